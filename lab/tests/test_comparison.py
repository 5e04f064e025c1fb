"""Tables of studies against numbers worked out by hand."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tba.evaluation.estimators import Interval, mean_interval
from tba_lab.comparison import Outcome, Statistic, variant_rows, verdict, versus
from tba_lab.study_plots import draw_against, draw_frontier, draw_over_time, lines_of, mean_curve
from tba_lab.study_table import Comparison, cell, page, view, write_tables

METRIC = "pass@1/sampled"
OUTCOMES = [
    *(Outcome("tb", seed, {METRIC: value, "lag": 2.0}) for seed, value in enumerate((0.90, 0.92, 0.94))),
    *(Outcome("rloo", seed, {METRIC: value, "lag": 3.0}) for seed, value in enumerate((0.89, 0.90, 0.91))),
    Outcome("grpo", 0, {METRIC: 0.70, "seconds_to_target": 30.0}),
    Outcome("grpo", 1, {METRIC: 0.72}),
    Outcome("grpo", 2, failure="NonFiniteLoss at step 12: nan | inf"),
]
WHOLE = Comparison(
    "it",
    "What it is.",
    OUTCOMES,
    ("tb", "rloo", "grpo", "never run"),
    METRIC,
    {"rloo": "tb", "grpo": "tb", "tb": "tb"},
    0.03,
)


def test_a_mean_has_its_standard_deviation_and_students_interval() -> None:
    statistic = Statistic.of([0.90, 0.92, 0.94])
    interval = mean_interval([0.90, 0.92, 0.94])
    assert (statistic.mean, statistic.spread, statistic.n) == (pytest.approx(0.92), pytest.approx(0.02), 3)
    assert (
        (statistic.low, statistic.high)
        == (interval.low, interval.high)
        == (pytest.approx(0.87032, abs=1e-5), pytest.approx(0.96968, abs=1e-5))
    )


def test_one_run_has_no_spread_and_no_interval() -> None:
    statistic = Statistic.of([0.5])
    assert (statistic.mean, statistic.n) == (0.5, 1)
    assert math.isnan(statistic.spread)
    assert math.isnan(statistic.low)
    assert cell(METRIC, statistic, 1, interval=True) == "50.0"


def test_a_row_counts_its_failures_and_every_figure_its_runs() -> None:
    row_of = {row.variant: row for row in variant_rows(OUTCOMES, WHOLE.variants)}
    assert list(row_of) == ["tb", "rloo", "grpo"]
    grpo = row_of["grpo"]
    assert (grpo.runs, grpo.failures) == (3, ("NonFiniteLoss at step 12: nan | inf",))
    assert (grpo.statistics[METRIC].n, grpo.statistics["seconds_to_target"].n) == (2, 1)
    assert cell("seconds_to_target", grpo.statistics["seconds_to_target"], 2, interval=False) == "30.0 (1 of 2)"
    assert cell("lag", grpo.statistics.get("lag"), 2, interval=False) == "-"


def test_variants_are_held_against_the_baseline_by_students_t() -> None:
    rloo, grpo = versus(OUTCOMES, {"tb": "tb", "rloo": "tb", "grpo": "tb", "never run": "tb"}, METRIC, 0.03)
    assert (rloo.variant, rloo.baseline, grpo.variant) == ("rloo", "tb", "grpo")
    # means 0.92 and 0.90, variances 4e-4 / 3 and 1e-4 / 3: freedom 5^2 / (4^2 / 2 + 1 / 2) = 2.941, t = 3.2186
    half = 3.2186 * math.sqrt(5e-4 / 3)
    assert rloo.difference.estimate == pytest.approx(-0.02)
    assert rloo.difference.low == pytest.approx(-0.02 - half, abs=1e-5)
    assert rloo.not_worse == "open"
    assert (grpo.not_worse, grpo.remark) == ("no", "1 of 3 failed")  # whatever its other runs came to
    assert versus(OUTCOMES, {"tb": "rloo"}, METRIC, 0.05)[0].not_worse == "yes"


def test_not_worse_by_a_margin_needs_the_whole_interval() -> None:
    assert verdict(Interval(0.0, -0.029, 0.029), 0.03) == "yes"
    assert verdict(Interval(0.0, -0.031, 0.031), 0.03) == "open"
    assert verdict(Interval(-0.1, -0.2, -0.031), 0.03) == "no"
    assert verdict(Interval(0.0, -math.inf, math.inf), 0.03) == "open"


def test_the_page_has_the_numbers(tmp_path: Path) -> None:
    text = page(WHOLE)
    assert "| variant | n | sampled accuracy, % | s to target | failed |" in text
    assert "| tb | 3 | 92.0 ± 2.0 [87.0, 97.0] | - |  |" in text
    assert "| grpo | 2 | 71.0 ± 1.4 [58.3, 83.7] | 30.0 (1 of 2) | 1 of 3: NonFiniteLoss at step 12 |" in text
    assert "| rloo | 3 | 3.0 ± 0.0 |" in text  # lag, among what it took
    assert "| rloo | tb | -2.0 | [-6.2, +2.2] | open |" in text
    assert "- grpo, seed 2: NonFiniteLoss at step 12: nan | inf" in text
    assert "never run" not in text


def test_the_data_are_the_same_numbers_in_full(tmp_path: Path) -> None:
    write_tables(WHOLE, tmp_path)
    with (tmp_path / "table.csv").open() as file:
        table = {(r["variant"], r["figure"]): r for r in csv.DictReader(file)}
    assert float(table["tb", METRIC]["mean"]) == pytest.approx(0.92)
    assert table["grpo", "seconds_to_target"]["spread"] == ""
    assert (table["grpo", METRIC]["n"], table["grpo", METRIC]["failed"], table["grpo", METRIC]["runs"]) == (
        *("2", "1", "3"),
    )
    runs = list(csv.reader(io.StringIO((tmp_path / "runs.csv").read_text())))
    assert runs[0] == ["variant", "seed", "failure", METRIC, "seconds_to_target", "lag"]
    assert runs[-1] == ["grpo", "2", "NonFiniteLoss at step 12: nan | inf", "", "", ""]
    assert len(runs) == 1 + len(OUTCOMES)


def test_only_the_columns_that_are_asked_for_are_in_the_table() -> None:
    few = Comparison("it", "", OUTCOMES, ("tb", "rloo"), METRIC, columns=("lag",))
    assert "sampled accuracy" not in page(few)
    assert "| tb | 3 | 2.0 ± 0.0 |" in page(few)


def test_the_terminal_shows_the_same_rows() -> None:
    console = Console(record=True, width=140)
    console.print(view(WHOLE))
    output = " ".join(console.export_text().split())
    assert "tb 3 92.0 ± 2.0" in output
    assert "1 of 3: NonFiniteLoss at step 12" in output
    assert "rloo tb -2.0 [-6.2, +2.2] open" in output


@pytest.mark.parametrize("width", [12, 20, 30, 60])
def test_no_figure_is_lost_on_a_narrow_terminal(width: int) -> None:
    outcomes = [Outcome("a-variant-of-a-long-name", seed, {METRIC: 0.5, "lag": 2.0}) for seed in (0, 1)]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(replace(WHOLE, outcomes=outcomes, variants=("a-variant-of-a-long-name",), baselines={})))
    output = "".join(console.export_text().split())
    for figure in ("50.0", "0.0", "2.0"):
        assert figure in output, console.export_text()


def test_columns_for_which_a_terminal_has_no_room_stand_below() -> None:
    figures = {f"pass@{k}/of32": k / 100 for k in (1, 2, 4, 8, 16, 32)}
    outcomes = [Outcome(name, seed, figures) for name in ("tb-robust-sync", "tb") for seed in (0, 1)]
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(view(replace(WHOLE, outcomes=outcomes, variants=("tb-robust-sync", "tb"), baselines={})))
    lines = console.export_text().splitlines()
    rows = [line.split() for line in lines if line.lstrip().startswith("tb-robust-sync ")]
    assert len(rows) == 3
    assert " ".join(cell for row in rows for cell in row[1:]) == "2 " + " ".join(
        f"{k}.0 ± 0.0" for k in (1, 2, 4, 8, 16, 32)
    )


def test_a_mean_curve_is_over_the_time_that_all_runs_have() -> None:
    x, y = mean_curve([[(0.0, 0.0), (10.0, 1.0)], [(0.0, 0.2), (20.0, 1.0)]])
    assert (x[0], x[-1]) == (0.0, 10.0)
    assert (y[0], y[-1]) == (pytest.approx(0.1), pytest.approx(0.8))


def test_a_plot_of_nothing_is_not_drawn(tmp_path: Path) -> None:
    lines = lines_of(["tb", "rloo"], {"tb": "a", "rloo": "b"})
    assert [(line.family, line.variants) for line in lines] == [("a", ["tb"]), ("b", ["rloo"])]
    assert draw_over_time(tmp_path / "a.png", "it", METRIC, {"tb": [], "rloo": []}, lines) is None
    assert draw_frontier(tmp_path / "b.png", "it", OUTCOMES, lines) is None
    assert draw_against(tmp_path / "c.png", "it", METRIC, "k", {}, OUTCOMES, lines) is None
    assert not list(tmp_path.iterdir())
    assert draw_against(tmp_path / "c.png", "it", METRIC, "k", {"tb": 1.0}, OUTCOMES, lines) == tmp_path / "c.png"
