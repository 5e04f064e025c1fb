"""The report in a browser: it filters, searches, zooms and links, and nothing in it does anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import Browser, program

from tba.__main__ import main
from written_run import ANSWERS, STEPS, write

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        program() is None, reason="needs Chromium (Debian: apt-get install chromium): make test-browser"
    ),
]
ROUNDS = 30
ALL = ROUNDS * ANSWERS
CHAT = ("<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
HACKED = "document.title === 'hacked' || [...document.querySelectorAll('script')].length !== 3"
FOREIGN = "document.querySelectorAll('img, base, iframe, object, embed, link, main script, main style').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of reports: of one run, of three, of one that hides its text, of one whose prompts are chats."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [str(write(folder / f"run-{seed}", seed=seed, rounds=ROUNDS)) for seed in range(3)]
    hidden = str(write(folder / "hidden-run", hide_text=True))
    chats = str(write(folder / "chats", around=CHAT))
    named = {"one": runs[:1], "three": runs, "hidden": [hidden], "chats": [chats]}
    for name, some in named.items():
        assert main(["report", *some, "--out", str(folder / f"{name}.html")]) == 0
    return {name: (folder / f"{name}.html").as_uri() for name in named}


def opened(browser: Browser, address: str) -> None:
    """Load it; the page itself is all that was asked for, and nothing complained."""
    browser.open(address)
    nothing_but(browser, address)


def nothing_but(browser: Browser, address: str) -> None:
    assert browser.complaints == []
    assert {request.partition("#")[0] for request in browser.requests} == {address.partition("#")[0]}
    assert not browser.run(HACKED)
    assert browser.run(FOREIGN) == 0


def text(browser: Browser, selector: str) -> str:
    found: str = browser.run(f"document.querySelector({json.dumps(selector)}).innerText")
    return found


def state(browser: Browser) -> dict[str, Any]:
    return browser.run("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")


@pytest.mark.parametrize("view", ["overview", "curves", "read", "left", "settings"])
@pytest.mark.parametrize("name", ["one", "three", "hidden"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_view_draws_asks_for_nothing_and_leaves_foreign_text_inert(
    view: str, name: str, width: int, browser: Browser, pages: dict[str, str]
) -> None:
    browser.size(width, 900)
    opened(browser, f"{pages[name]}#view={view}")
    assert len(text(browser, "main")) > 100
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    browser.size(1280, 900)


def test_what_would_be_executed_is_kept_from_it_by_the_policy_even_if_it_came_onto_the_page(
    browser: Browser, pages: dict[str, str]
) -> None:
    opened(browser, pages["one"])
    browser.run(
        "document.body.insertAdjacentHTML('beforeend', '<img src=https://example.com/x onerror=\"window.bad=1\">');"
        "const s = document.createElement('script'); s.textContent = 'window.bad = 2'; document.body.append(s);"
    )
    browser.until("true")
    assert browser.run("window.bad === undefined")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_the_overview_has_the_figures_and_an_account_that_closes(browser: Browser, pages: dict[str, str]) -> None:
    opened(browser, pages["one"])
    shown = text(browser, "main")
    assert "25.0 % [19.5, 31.4]" in shown
    assert "+50.0 points" in shown
    assert f"generated {ALL}" in shown
    assert "The account closes" in shown
    assert "reference reset after step 20" in shown
    assert "✗ held out: </script><script>document.title = 'hacked'</script>" in shown


def test_curves_zoom_together_and_the_zoom_is_in_the_link(browser: Browser, pages: dict[str, str]) -> None:
    opened(browser, f"{pages['one']}#view=curves")
    drawn = "[...document.querySelectorAll('.chart canvas')].map(c => c.toDataURL().length + c.toDataURL().slice(-400))"
    before = browser.run(drawn)
    assert len(before) >= 3
    x, y = browser.middle(".chart .u-over")
    browser.drag((x - 60, y), (x + 60, y))
    browser.until("location.hash.includes('from=')")
    zoomed = state(browser)
    assert 0 < float(zoomed["from"]) < float(zoomed["to"]) < STEPS
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    after = browser.run(drawn)
    assert all(a != b for a, b in zip(after, before, strict=True))
    opened(browser, f"{pages['one']}#{browser.run('location.hash.slice(1)')}")
    assert browser.run(drawn) == after  # a link shows the same
    browser.click(*browser.middle("#whole"))
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.run(drawn) == before
    nothing_but(browser, pages["one"])


def test_the_last_curve_is_of_the_metric_that_its_menu_names(browser: Browser, pages: dict[str, str]) -> None:
    opened(browser, f"{pages['one']}#view=curves")
    menu = "document.querySelector('select[name=metric]')"
    for metric in browser.run(f"[{menu}.value, ...[...{menu}.options].map(o => o.value).reverse()]"):
        browser.run(f"{menu}.value = {json.dumps(metric)}; {menu}.dispatchEvent(new Event('change'))")
        assert metric in text(browser, ".chart:last-child .u-legend")
        assert browser.run(f"{menu}.value") == metric


def test_a_curve_names_its_values_and_a_click_shows_that_steps_trajectories(
    browser: Browser, pages: dict[str, str]
) -> None:
    opened(browser, f"{pages['one']}#view=curves&axis=step")
    x, y = browser.middle(".chart .u-over")
    browser.click(x, y)
    browser.until("location.hash.includes('view=read')")
    step = int(state(browser)["step"])
    assert step == pytest.approx(STEPS / 2, abs=2)
    said = text(browser, ".banner")
    assert f"Step {step}:" in said
    assert "of the batch of step 20" in said
    assert f"{ANSWERS} sampled by the weights of step {min(step, ROUNDS - 1)}" in said
    assert text(browser, ".counted").startswith("8 of 120")  # four of the batch are on record
    browser.run("history.back()")
    browser.until("location.hash.includes('view=curves')")
    browser.drag((x, y), (x, y))  # the mouse is there
    nothing_but(browser, pages["one"])


def test_search_and_filters_leave_what_matches(browser: Browser, pages: dict[str, str]) -> None:
    opened(browser, f"{pages['one']}#view=read")
    assert text(browser, ".counted") == f"{ALL} of {ALL} trajectories"
    browser.press("/")
    browser.type_text("answer 2 of round 7:")
    browser.until("document.querySelector('.counted').innerText.startsWith('1 of')")
    assert text(browser, ".list .item .one").startswith('answer 2 of round 7: <img src=x onerror="document.title')
    assert state(browser)["q"] == "answer 2 of round 7:"
    for change, shown in (
        ("q=onerror", ROUNDS // 6 * ANSWERS),
        ("stop=length", ROUNDS),
        ("searcher=1", ALL // 2),
        ("v0=10&v1=12", 3 * ANSWERS),
        ("l0=3&l1=5", ALL),
        ("r0=9", 0),
    ):
        opened(browser, f"{pages['one']}#view=read&{change}")
        assert text(browser, ".counted") == f"{shown} of {ALL} trajectories", change
    rewards = "[...document.querySelectorAll('.list .item .reward')].map(e => Number(e.innerText))"
    opened(browser, f"{pages['one']}#view=read&sort=best")
    best = browser.run(rewards)
    assert best == sorted(best, reverse=True)
    opened(browser, f"{pages['one']}#view=read&sort=worst")
    worst = browser.run(rewards)
    assert worst == sorted(worst)
    assert worst[0] < best[0]


def test_a_chat_template_stands_around_the_chosen_prompt_and_nowhere_else(
    browser: Browser, pages: dict[str, str]
) -> None:
    opened(browser, f"{pages['chats']}#view=read&by=prompts&sort=most")
    asked = browser.run("[...document.querySelectorAll('.list .item .one')].map(e => e.innerText)")
    assert len(asked) == 6
    assert all(one.startswith("asked: ") and "im_" not in one for one in asked)
    assert asked[0].join(CHAT).strip() == text(browser, ".prompt").strip()
    for words, found in (("assistant", 0), ("asked:", ALL)):  # the template is in every prompt: it is not searched
        opened(browser, f"{pages['chats']}#view=read&q={words}")
        assert text(browser, ".counted") == f"{found} of {ALL} trajectories"
    opened(browser, f"{pages['chats']}#view=overview")
    assert "im_start" not in text(browser, "#view")


def test_keys_walk_through_the_list_and_through_the_rounds_of_a_prompt(browser: Browser, pages: dict[str, str]) -> None:
    opened(browser, f"{pages['one']}#view=read&sort=oldest")
    first = state(browser)["t"]
    browser.press("ArrowDown")
    assert int(state(browser)["t"]) == int(first) + 1
    browser.press("ArrowUp")
    assert state(browser)["t"] == first
    assert "round 1 of 5 of this prompt" in text(browser, ".reading")
    browser.press("ArrowRight")
    assert "round 2 of 5 of this prompt" in text(browser, ".reading")
    browser.press("ArrowLeft")
    assert "round 1 of 5 of this prompt" in text(browser, ".reading")
    assert browser.run("document.querySelectorAll('.rounds tbody tr').length") == 5
    browser.click(*browser.middle(".rounds tbody tr:nth-child(4) td"))
    assert "round 4 of 5 of this prompt" in text(browser, ".reading")


def test_a_group_stands_side_by_side_with_its_figures_and_coloured_tokens(
    browser: Browser, pages: dict[str, str]
) -> None:
    opened(browser, f"{pages['one']}#view=read&t=1")  # which was sampled for samples.jsonl
    cards = browser.run("[...document.querySelectorAll('.group .card')].map(c => c.innerText)")
    assert len(cards) == ANSWERS
    for word in ("log-ratio", "residual", "uses", "right 1", "trained at step 1, 10, 20, 30, 40"):
        assert any(word in card for card in cards), word
    tints = "new Set([...document.querySelectorAll('.card.on .token')].map(t => t.style.background)).size"
    assert browser.run(tints) == 1  # policy minus reference is 0.25 everywhere
    browser.run(
        "(() => { const s = document.querySelector('select[name=colour]'); s.value = 'behaviour';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    assert state(browser)["colour"] == "behaviour"
    assert browser.run(tints) > 1  # -0.5 minus what the searcher had
    browser.press("r")
    assert browser.run("document.querySelectorAll('.token.raw').length") > 0
    assert state(browser)["raw"] == "1"


def test_prompts_can_be_read_one_by_one(browser: Browser, pages: dict[str, str]) -> None:
    opened(browser, f"{pages['one']}#view=read&by=prompts&sort=most")
    assert text(browser, ".counted") == f"6 prompts of {ALL} trajectories"
    assert "20 answers in 5 rounds" in text(browser, ".list .item")


def test_what_was_not_trained_is_listed_with_its_reason(browser: Browser, pages: dict[str, str]) -> None:
    opened(browser, f"{pages['one']}#view=left")
    assert "left by the capacity rule" in text(browser, "main")
    browser.click(*browser.middle("main button"))
    browser.until("location.hash.includes('view=read')")
    kind = state(browser)["fate"]
    assert kind in ("waiting", "evicted", "duplicate")
    uses = browser.run("[...document.querySelectorAll('.list .item .two')].every(e => e.innerText.endsWith('0 uses'))")
    assert uses is True


def test_several_runs_are_drawn_on_one_another_and_what_differs_is_marked(
    browser: Browser, pages: dict[str, str]
) -> None:
    opened(browser, f"{pages['three']}#view=curves")
    assert "run-0: reward" in text(browser, ".chart").replace("\n", " ")
    opened(browser, f"{pages['three']}#view=settings&differ=1")
    assert text(browser, "tbody").split() == ["seed", "0", "1", "2"]
    opened(browser, f"{pages['three']}#view=read&run=2")
    assert text(browser, ".bar button.on") == "run-2"


def test_several_runs_are_compared_over_steps_unless_seconds_are_asked_for(
    browser: Browser, pages: dict[str, str]
) -> None:
    for name, axis in (("one", "time"), ("three", "step")):
        opened(browser, f"{pages[name]}#view=curves")
        assert browser.run("document.querySelector('select[name=axis]').value") == axis


def test_a_phone_shows_before_and_after_side_by_side(browser: Browser, pages: dict[str, str]) -> None:
    browser.size(390, 844)
    try:
        opened(browser, pages["one"])
        right = "document.querySelector('.figures th:nth-child(3)').getBoundingClientRect().right"
        assert browser.run(right) <= 390
    finally:
        browser.size(1280, 900)


def test_a_run_that_hides_its_text_shows_keys_and_scores(browser: Browser, pages: dict[str, str]) -> None:
    opened(browser, f"{pages['hidden']}#view=read")
    shown = text(browser, "main")
    assert "(text is hidden)" in shown
    assert "record.hide_text" in shown
    assert "answer 0" not in shown
    assert browser.run("document.querySelectorAll('.group .card').length") == ANSWERS
