"""A report says what the run says, as a page that nothing in the run can turn into more than text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.runs import TOY

from tba.__main__ import main
from tba.command.report import make_report
from tba.command.report_data import differing_settings, report_data
from tba.record.page import embedded
from tba.record.summary import Summary
from tba.replay.excerpt import Facts, choose_rows
from tba.runtime.run_directory import RunDirectory
from tba.settings import find
from written_run import ANSWERS, BEGAN, BETA, HOSTILE, STEPS, write

ROUNDS = 30
ALL = ROUNDS * ANSWERS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs") / "first", rounds=ROUNDS)


@pytest.fixture(scope="module")
def data(run: Path) -> dict[str, Any]:
    return report_data(run, 50_000, 10_000_000)


def test_the_fates_of_all_trajectories_are_the_summarys_account(run: Path, data: dict[str, Any]) -> None:
    summary = Summary.read(run)
    assert summary is not None
    assert summary.trajectories.closes()
    assert summary.tokens.closes()
    for i, ledger in enumerate((summary.trajectories, summary.tokens)):
        counted = {name: pair[i] for name, pair in data["fates"]["counts"].items()}
        assert counted == {
            "trained": ledger.trained_once, "waiting": ledger.waiting, "evicted": ledger.evicted,
            "duplicate": ledger.duplicate, "damaged": ledger.damaged,
        }  # fmt: skip
        assert sum(counted.values()) == ledger.generated
    assert min(pair for name, pair in data["fates"]["counts"].items() if name != "damaged") > [0, 0]
    assert data["account"]["trajectories"]["difference"] == 0
    shown = data["trajectories"]["columns"]
    assert sum(shown["uses"]) == summary.trajectories.trained_total
    assert sum(shown["length"]) == summary.tokens.generated
    fates = [shown["fate"]["kinds"][i] for i in shown["fate"]["of"]]
    assert {name: fates.count(name) for name in data["fates"]["counts"]} == {
        name: pair[0] for name, pair in data["fates"]["counts"].items()
    }
    assert [(s["name"], s["trajectories"]) for s in data["searchers"]] == [
        ("searcher-0", ALL // 2),
        ("searcher-1", ALL // 2),
    ]


def test_residuals_are_those_of_the_equation_and_vanish_in_the_mean_of_each_round(data: dict[str, Any]) -> None:
    t = data["trajectories"]["columns"]
    rounds = np.array(t["round"])
    residual, reward, ratio = (np.array(t[name]) for name in ("residual", "reward", "ratio"))
    assert ratio == pytest.approx(0.25 * np.array(t["length"]), abs=2e-3)  # as it was written
    for one in set(t["round"]):
        own = rounds == one
        assert own.sum() == ANSWERS
        log_z = np.mean(reward[own] / BETA - ratio[own])
        assert residual[own] == pytest.approx(log_z + ratio[own] - reward[own] / BETA, abs=5e-3)
        assert residual[own].sum() == pytest.approx(0, abs=1e-2)


def test_tokens_have_their_text_and_their_log_probabilities(data: dict[str, Any]) -> None:
    t = data["trajectories"]["columns"]
    assert data["trajectories"]["pieces"] == {
        "0": "sum", "1": " is", "2": " ", "3": "<", "4": "script", "5": ">", "6": "\n", "7": " b",
    }  # fmt: skip
    for tokens, behavior, ratio, total, length in zip(
        t["tokens"], t["log_behavior"], t["log_ratio"], t["ratio"], t["length"], strict=True
    ):
        assert len(tokens) == len(behavior) == len(ratio) == length
        assert sum(ratio) / 100 == pytest.approx(total, abs=0.005 * length + 1e-9)
    trained = [use for uses in t["trained"] for use in uses]
    assert {use["step"] for use in trained} == {1, 10, 20, 30, 40}
    assert all(set(use["log_policy"]) == {-50} for use in trained)


def test_what_happened_stands_on_the_runs_own_clock(data: dict[str, Any]) -> None:
    assert [(event["wall"], event["kind"]) for event in data["events"]] == [
        (0.0, "evaluation"), (1.0, "searcher"), (12.0, "fault"), (20.0, "reset"), (39.0, "searcher"),
        (float(STEPS), "evaluation"),
    ]  # fmt: skip
    assert data["trajectories"]["columns"]["wall"] == sorted(
        (float(i + 1) for i in range(ROUNDS) for _ in range(ANSWERS)), key=lambda wall: (wall - 1) % 2
    )


def test_the_clock_stands_still_while_a_run_is_left(tmp_path: Path) -> None:
    run = write(tmp_path / "left")
    facts = json.loads((run / "recipe.json").read_text())
    facts["clock"] = {"began": 0.0, "before": 25.0}
    (run / "recipe.json").write_text(json.dumps(facts))
    with (run / "faults.jsonl").open("a") as file:
        for kind, time in (("resumes", BEGAN + 1000), ("silences", BEGAN + 1004)):
            file.write(json.dumps({"kind": kind, "what": "", "time": time}) + "\n")
    walls = {e["text"].split(":")[0]: e["wall"] for e in report_data(run, 10, 10_000)["events"] if e["kind"] == "fault"}
    assert walls == {"reward retries": 12.0, "resumes": 25.0, "silences": 29.0}


def test_the_clock_knows_which_incarnations_a_restarted_trainer_began(tmp_path: Path) -> None:
    run = write(tmp_path / "left")
    facts = json.loads((run / "recipe.json").read_text())
    facts["clock"] = {"began": 0.0, "before": 200.0}
    whys = ("started", "the trainer was killed", "resumed: it had failed", "resumed: it had ended")
    facts["incarnations"] = [{**facts["incarnations"][0], "why": why} for why in whys]
    (run / "recipe.json").write_text(json.dumps(facts))
    rows = ((0, 1, 40.0), (1, 2, 100.0), (2, 3, 200.0), (None, 4, 210.0))
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "version": i if i is None else f"{i}.{step}", "wall_seconds": wall}) + "\n"
            for i, step, wall in rows
        )
    )
    (run / "faults.jsonl").write_text(
        "".join(
            json.dumps({"kind": kind, "what": "", "time": BEGAN + time}) + "\n"
            for kind, time in (("resumes", 1000), ("silences", 1050), ("resumes", 2000))
        )
    )
    walls = {e["text"].split(":")[0]: e["wall"] for e in report_data(run, 10, 10_000)["events"] if e["kind"] == "fault"}
    assert walls == {"resumes": 200.0, "silences": 150.0}


def test_a_report_replaces_an_earlier_one_and_no_other_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    before = (run / "recipe.json").read_bytes()
    assert main(["report", str(run), "--out", str(run / "recipe.html")]) == 2
    assert "would replace" in capsys.readouterr().err
    assert (run / "recipe.json").read_bytes() == before


def test_of_many_steps_a_point_is_the_mean_of_some_and_the_last_of_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "long", rounds=6)
    monkeypatch.setattr("tba.command.report_data.MAX_POINTS", 14)
    curves = report_data(run, 10, 10_000)["metrics"]
    assert curves["steps_per_point"] == 3
    assert curves["columns"]["step"] == [*range(3, 40, 3), 40]
    assert curves["columns"]["reward"] == pytest.approx([*(s / STEPS for s in range(2, 39, 3)), 1.0])


def test_a_sample_takes_whole_rounds_the_extremes_and_some_prompts_entirely_and_counts_stay_those_of_all(
    run: Path, data: dict[str, Any]
) -> None:
    few = report_data(run, 90, 10_000_000)
    assert few["fates"] == data["fates"]
    assert few["searchers"] == data["searchers"]
    shown = few["trajectories"]
    assert (shown["of"], shown["shown"]) == (ALL, len(shown["columns"]["place"]))
    assert 80 < shown["shown"] <= 90
    assert all(shown["columns"]["round"].count(r) == ANSWERS for r in set(shown["columns"]["round"]))
    assert report_data(run, 90, 10_000_000)["trajectories"] == shown


def test_what_is_chosen_first_are_the_newest_best_worst_and_most_used() -> None:
    rows, rng = 40_000, np.random.default_rng(0)
    number = np.arange(rows)
    facts = Facts(
        place=number + 1, prompt=number // 8 % 500, owner=np.zeros(rows, np.int32), tokens=np.ones(rows, np.int64),
        incarnation=np.zeros(rows, np.int64), step=number // 100, reward=rng.random(rows), created=number // 8 * 1.0,
        uses=rng.integers(-2, 9, rows).astype(np.int32), round=number // 8, owners=("searcher-0",),
    )  # fmt: skip
    facts.uses[123] = 99
    rows_chosen = choose_rows(facts, 10_000, np.array([20_001]))
    assert 9_990 < len(rows_chosen) <= 10_000
    assert set(rows_chosen[:8]) == set(range(20_000, 20_008))  # the round of what was wanted
    for extreme in (rows - 1, int(facts.reward.argmax()), int(facts.reward.argmin()), 123):
        assert extreme in rows_chosen
    taken = np.bincount(facts.round[rows_chosen], minlength=rows // 8)
    assert set(taken) == {0, 8}
    by_prompt = (taken.reshape(10, 500) > 0).sum(0)  # of the ten rounds of each prompt
    assert (by_prompt == 10).sum() > 40  # some prompts entirely
    quarters = (taken.reshape(4, -1) > 0).mean(1)
    assert quarters == pytest.approx([0.25] * 4, abs=0.06)  # and all of the run evenly


def test_a_page_is_never_larger_than_it_may_be_and_says_how_much_it_shows(run: Path) -> None:
    _, whole = make_report([run])
    limit = len(whole) - 20_000
    data, page = make_report([run], limit)
    assert len(page) <= limit
    assert 0 < data["runs"][0]["trajectories"]["shown"] < ALL
    assert data["runs"][0]["trajectories"]["of"] == ALL


def test_foreign_text_is_nowhere_in_the_page_but_as_escaped_json_and_nothing_else_may_run(run: Path) -> None:
    data, page = make_report([run, run])
    text = page.decode()
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    head, found = re.split(r'<script type="application/json" id="data">', text)
    embedded_json, _, rest = found.partition("</script>")
    assert not set("<>&\u2028\u2029") & set(embedded_json)
    assert json.loads(embedded_json) == json.loads(json.dumps(data))
    for hostile in HOSTILE[:5]:
        assert hostile not in text
    scripts = re.findall(r"<script>(.*?)</script>", rest, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", head, re.DOTALL)
    assert (len(scripts), len(styles), text.lower().count("<script"), text.lower().count("<style")) == (2, 2, 3, 2)

    def hashes(parts: list[str]) -> str:
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(p.encode()).digest()).decode()}'" for p in parts)

    assert policy == [
        f"default-src 'none'; script-src {hashes(scripts)}; style-src {hashes(styles)}; "
        "base-uri 'none'; form-action 'none'"
    ]
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch("):
        assert word not in "".join(scripts)


def test_json_in_a_script_element_has_no_character_that_could_end_it() -> None:
    value = {"</script>": ["<!--", "&amp;", "\u2028", "π", 1.5, None, True]}
    assert json.loads(embedded(value)) == value
    assert not set("<>&\u2028") & set(embedded(value))
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded(float("nan"))


def test_a_run_that_hides_its_text_shows_keys_and_scores_only(tmp_path: Path) -> None:
    run = write(tmp_path / "hidden", hide_text=True)
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    page, beside = ((tmp_path / name).read_text() for name in ("report.html", "report.json"))
    for text in (page.partition('id="data">')[2].partition("</script>")[0], beside):
        plain = text.replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u0026", "&")
        for secret in (*HOSTILE, "answer 0", "of round", "asked:", "held out:", "raised on"):
            assert secret not in plain, secret
    run_shown = json.loads((tmp_path / "report.json").read_text())["runs"][0]
    shown = run_shown["trajectories"]
    assert all(re.fullmatch(r"[0-9a-f]{16}", p["key"]) and list(p) == ["key"] for p in shown["prompts"])
    assert shown["columns"]["text"] == shown["columns"]["tokens"] == [None] * shown["shown"]
    assert shown["pieces"] == {}
    assert None not in shown["columns"]["reward"]
    assert {use["log_policy"] for uses in shown["columns"]["trained"] for use in uses} == {None}


def test_what_differs_between_runs_is_found_by_name(tmp_path: Path) -> None:
    runs = [write(tmp_path / str(seed), seed=seed, rounds=6) for seed in range(3)]
    out = tmp_path / "three.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    data = json.loads(out.with_suffix(".json").read_text())
    assert data["different"] == ["seed"]
    assert [run["settings"]["seed"] for run in data["runs"]] == [0, 1, 2]
    assert data["runs"][0]["settings"]["objective"] == "TrajectoryBalance"
    assert differing_settings([{"a": 1, "b": 2}, {"a": 1}]) == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "three.html", "three.json"]


def test_a_run_that_has_just_begun_has_a_report_too(tmp_path: Path) -> None:
    run = write(tmp_path / "begun", rounds=2)
    for name in ("summary.json", "metrics.jsonl", "evaluations.jsonl", "answers.jsonl", "samples.jsonl"):
        (run / name).unlink()
    (run / "checkpoints" / f"step-{STEPS}" / "run.json").unlink()
    data, _ = make_report([run])
    assert data["runs"][0]["account"] is None
    assert data["runs"][0]["fates"] is None
    assert data["runs"][0]["trajectories"]["columns"]["uses"] == [None] * 8
    (run / "journal.sqlite").unlink()
    data, _ = make_report([run])
    assert data["runs"][0]["trajectories"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs a run's folder, such as runs/NAME, first"),
        (["nowhere"], "nowhere: there is no such run"),
        (["RUN", "--out", "report.txt"], "give a name that ends in .html"),
        (["RUN", "--out", "nowhere/report.html"], ": make it"),
        (["RUN", "--out", "report.html", "more"], "does not take 'more'"),
    ],
)
def test_what_cannot_be_reported_is_said_in_a_sentence(
    arguments: list[str],
    said: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(str(run) if word == "RUN" else word for word in arguments)]) == 2
    written = capsys.readouterr().err
    assert said in written
    assert written.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_runs_start_is_where_its_clock_begins_however_long_the_start_up_took(tmp_path: Path) -> None:
    """Metrics are told by the one, trajectories by the other, and both are on one axis."""
    start_up = 1e6
    run = RunDirectory.create(tmp_path / "run", str(TOY), [], find(str(TOY)), began=time.monotonic() - start_up)
    off = run.facts["started"] + run.clock()() - time.time()
    assert abs(off) < start_up / 1e3  # the machine's two clocks are read one after the other
