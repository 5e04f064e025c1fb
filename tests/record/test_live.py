"""What is seen of a run while it goes, and after."""

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tba.command.show import show_run
from tba.errors import UserError
from tba.record.failure import Failure
from tba.record.live import LiveView, Status, status_line
from tba.record.run_record import RunRecord
from tba.record.show import closing_page, comparison, course_table, held_out_table, show
from tba.record.text import duration, printable, short_number, size
from tba.types import Version

MakeRun = Callable[..., Path]
STATUS = Status(
    step=120,
    steps=400,
    elapsed_seconds=95.0,
    training_seconds=60.0,
    reward=0.7123,
    parts={"right": 0.7, "brief": 0.0123},
    accuracy={"pass@1/greedy": 0.61, "pass@1/sampled": 0.552, "pass@8/sampled": 0.9},
    log_ratio=1.234,
    lag=9.4,
    ess=0.625,
    generated_rate=2100.0,
    trained_rate=15_234.0,
    trainer_idle=0.021,
    trainer_paced=0.004,
    evaluated=100,
    evaluating=1,
    searcher_evaluating=0.263,
    note="searcher-0 was started again",
)


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rendered(renderable: object, width: int = 120) -> str:
    """As it is printed, with runs of spaces made one."""
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return re.sub(" +", " ", said(console))


def test_a_plain_line_holds_every_field_once_it_is_known() -> None:
    assert status_line(STATUS).strip().split(" | ") == [
        "95 s", "step 120/400", "reward 0.712, right 0.700, brief 0.012",
        "accuracy greedy 61.0 %, sampled 55.2 %, pass@8/sampled 90.0 % at step 100",
        "log-ratio 1.23", "lag 9.4", "ESS 62.5 %", "generated 2100 tok/s", "trained 15.2k tok/s", "trainer idle 2.1 %",
        "paced 0.4 %", "evaluating 26.3 % of the time, now too", "ETA 2:20 min", "searcher-0 was started again",
    ]  # fmt: skip
    assert status_line(Status(0, 400, 3.0, phase="warm-up")).strip() == "3 s | step 0/400 | warm-up"


def test_without_a_terminal_a_line_comes_every_so_often_at_each_phase_and_at_the_end() -> None:
    console = plain_console()
    with LiveView(console, every_seconds=10) as view:
        for second in range(35):
            view.update(Status(second, 34, float(second), phase="warm-up" if second < 3 else "training"))
    lines = said(console).splitlines()
    assert [text.split(" | ")[0].strip() for text in lines] == ["0 s", "3 s", "13 s", "23 s", "33 s", "34 s"]


def test_a_plain_line_stays_one_line_and_its_text_is_not_markup() -> None:
    console = plain_console()
    with LiveView(console) as view:
        view.update(Status(1, 2, 1.0, note="[bold]reward [3] hung[/bold] " + "x" * 200))
    assert said(console).count("\n") == 1
    assert "[bold]reward [3] hung[/bold]" in said(console)


def test_the_view_of_a_terminal_of_80_columns_shows_every_field_whole() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with LiveView(console, title="quickstart") as view:
        view.update(STATUS)
    text = said(console)
    for part in (
        "quickstart", "step 120/400", "0.712", "greedy 61.0 %", "sampled 55.2 %", "pass@8/sampled 90.0 %",
        "at step 100", "right 0.700", "brief 0.012", "log-ratio 1.23", "lag 9.4", "ESS 62.5 %",
        "2100 tok/s", "15.2k tok/s", "idle 2.1 %", "paced 0.4 %",
        "evaluating 26.3 % of the time, now too", "ETA 2:20 min", "started again",
    ):  # fmt: skip
        assert part in text


def test_the_time_to_go_is_at_the_mean_pace_of_the_steps_taken_here() -> None:
    assert STATUS.eta_seconds == 280 * 60 / 120
    assert Status(0, 400, 95.0).eta_seconds is None


def test_a_finished_run_is_shown_with_its_account_and_faults(make_run: MakeRun) -> None:
    text = rendered(show(RunRecord.read(make_run())))
    for part in (
        "first quickstart, seed 3, 40 steps, 33 s", "40.0 % [35.8, 44.4]", "+40.0", "10,000", "8,000", "24,000",
        "5.0 updates on average, 95 % within 7, at most 9", 
        "trainer idle 2.0 %, paced 1.0 %; searchers idle 0.0 %, evaluating 0.0 %",
        "restarts 1", "trainer 2.0 GiB", "samples per insert 2.40",
        "slow side searchers (the trainer waited 3.0 % of the time)",
    ):  # fmt: skip
        assert part in text
    assert "closes yes yes" in text
    text = " ".join(text.split())
    # the mean over steps 1 to 20, and over 21 to 40
    assert "first 20 steps last 20 entropy of the policy, nats a token 0.305 0.105" in text
    assert "engine against trainer, nats a token 0.01 0.01 the same, nats an answer 0.04 0.04" in text
    assert "groups without signal 25.0 % 25.0 % tokens of an answer 12 12 answers cut off 0.0 % 0.0 %" in text


def test_the_course_of_a_run_is_drawn_in_bars_from_the_lowest_to_the_highest(make_run: MakeRun) -> None:
    text = rendered(course_table(RunRecord.read(make_run())), 80)
    reward = re.search(r"reward (\S{36}) 0.025 1\n", text)
    assert reward is not None
    assert reward[1] == "".join(sorted(reward[1]))  # it rises at every step, and the bars' characters in their order
    assert set(reward[1]) == set("▁▂▃▄▅▆▇█")
    assert f"effective sample size {'▁' * 36} 75.0 % 75.0 %" in text
    assert "pass@1/sampled ▁ █ 40.0 % 80.0 %" in text


def test_an_account_that_does_not_close_is_said_not_to(make_run: MakeRun) -> None:
    text = rendered(show(RunRecord.read(make_run(lost_tokens=12))))
    assert "no: +12" in text


def test_an_unfinished_run_is_shown_as_far_as_it_got(make_run: MakeRun) -> None:
    text = rendered(show(RunRecord.read(make_run(finished=False))))
    assert "first step 40, 30 s; no summary: it is running, or was killed" in text
    assert "40.0 % [35.8, 44.4]" in text
    assert "log-ratio to the reference 2 \n" in text
    assert "trainer idle 2.0 %" in text
    assert "tokens/s trained 6000" in text


def test_a_failed_run_says_why_and_where_its_logs_are(make_run: MakeRun) -> None:
    run = make_run(finished=False)
    Failure.record(run, ValueError("of negative length"))
    assert f"failed: ValueError at step 40: of negative length (logs: {run}" in rendered(show(RunRecord.read(run)), 400)


def test_several_runs_are_compared_by_what_differs_and_how_they_did(make_run: MakeRun) -> None:
    runs = [RunRecord.read(make_run(name)) for name in ("first", "second")]
    text = rendered(comparison(runs, {"optimizer.lr": ["0.1", "0.2"]}), 80)
    for row in (
        "first second",
        "optimizer.lr 0.1 0.2",
        "steps 40 40",
        "pass@1/sampled 40.0 % -> 80.0 % 40.0 % -> 80.0 %",
    ):
        assert row in text
    assert "no setting" in rendered(comparison(runs, {}))


def test_a_run_with_nothing_but_its_recipe_can_be_shown(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    text = rendered(show(RunRecord.read(tmp_path)))
    assert "not evaluated yet" in text
    assert "no step recorded yet" in text


def test_the_closing_page_has_five_problems_before_and_after_and_what_it_took(make_run: MakeRun) -> None:
    run = make_run()
    text = rendered(closing_page(RunRecord.read(run)), width=200)
    for n in range(1, 6):
        assert f"{n}+1=" in text
        assert f"right {n + 1}" in text
    assert "6+1=" not in text
    assert "wrong 7" in text
    for part in (
        "40.0 %", "80.0 %", "80.0 % of the 10.0k generated, each used 3.0 times", "5.0 updates on average", str(run),
    ):  # fmt: skip
        assert part in text


def test_before_is_the_first_version_and_after_the_last_however_they_were_written(make_run: MakeRun) -> None:
    run = RunRecord.read(make_run())
    turned = RunRecord(run.directory, run.metrics, run.evaluations[::-1], run.answers[::-1], run.summary)
    before, after = turned.figures()["pass@1/sampled"]
    assert after is not None
    assert (before.version, after.version) == (Version(0, 0), Version(0, 40))
    assert all(not a.correct or a.prompt == "6+1=" for a, _ in turned.answers_before_after())


def test_what_a_restart_has_thrown_away_is_not_what_the_run_came_to(make_run: MakeRun) -> None:
    run = RunRecord.read(make_run())  # evaluated at 0.0 and 0.40
    rows = [*run.metrics, {"step": 31, "version": "1.31", "wall_seconds": 50.0}]
    resumed = replace(run, metrics=rows)
    before, after = resumed.figures()["pass@1/sampled"]
    assert (before.version, after) == (Version(0, 0), None)
    assert resumed.answers_before_after() == []
    earlier = replace(run, metrics=[*run.metrics, {"step": 41, "version": "1.41", "wall_seconds": 50.0}])
    assert earlier.figures() == run.figures()


def test_figures_over_other_problems_have_no_difference(make_run: MakeRun) -> None:
    run = RunRecord.read(make_run())
    fewer = [replace(e, n=20) if e.version.step else e for e in run.evaluations]
    text = rendered(held_out_table(replace(run, evaluations=fewer)), 80)
    assert "- 500, 20" in text
    assert "+40.0 500" in rendered(held_out_table(run), 80)


def test_a_run_that_cannot_be_read_does_not_hide_the_others(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("whole")
    damaged = make_run("damaged") / "summary.json"
    for path in (tmp_path / "whole", tmp_path / "damaged"):
        (path / "recipe.json").write_text("{}")
    facts = json.loads(damaged.read_text())
    facts["evaluations"][0]["value"] = 1.5
    damaged.write_text(json.dumps(facts))
    with pytest.raises(UserError, match="has unexpected contents"):
        RunRecord.read(damaged.parent)
    with redirect_stdout(io.StringIO()) as out:
        assert show_run(tmp_path) == 0
    assert re.search(r"damaged +cannot be read", out.getvalue())
    assert re.search(r"whole +ended +40", out.getvalue())


def test_what_is_no_run_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run"):
        RunRecord.read(tmp_path / "none")
    with pytest.raises(UserError, match="neither recipe nor metrics"):
        RunRecord.read(tmp_path)


def test_what_a_model_says_cannot_command_the_terminal(make_run: MakeRun) -> None:
    assert printable("a\x1b[2Jb\u202ec\td\ne\x7f") == "a\\x1b[2Jb\\u202ec\\td\ne\\x7f"
    assert printable("1\n2", newlines=False) == "1\\n2"
    assert printable("x" * 50, longest=10) == "xxxxxxx..."


def test_numbers_read_as_people_write_them() -> None:
    assert [duration(s) for s in (0, 99.4, 185, 5999, 7620)] == ["0 s", "99 s", "3:05 min", "99:59 min", "2:07 h"]
    assert [short_number(n) for n in (12, 9999, 12_340, 999_949, 4.56e6)] == ["12", "9999", "12.3k", "999.9k", "4.56M"]
    assert [size(n) for n in (412 << 20, 1536 << 20)] == ["412 MiB", "1.5 GiB"]
