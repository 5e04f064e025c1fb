"""The figures of a run, by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.record.failure import Failure
from tba.record.metrics import MetricsWriter
from tba.record.run_record import RunRecord
from tba.types import Version
from tba_lab.figures import (
    COLUMNS,
    DATA,
    MACHINE,
    accuracy_by_updates,
    accuracy_curve,
    end_mean,
    figures,
    format_figure,
    heading,
    largest_fall,
    reached,
)


def test_the_figures_of_a_run_are_those_it_recorded(make_run: Callable[..., Path]) -> None:
    run = make_run()
    (run / "divergence.json").write_text(json.dumps({"kl": 1.5, "reward": 0.75, "tokens": 4.0, "perplexity": 9.5}))
    values = figures(RunRecord.read(run), "pass@1/sampled", target=0.6)
    assert values == pytest.approx(
        {
            "pass@1/greedy": 0.9, "pass@1/sampled": 0.8, "fall": 0.0,
            "seconds_to_target": 10.0,  # 40 % at 0 s and 80 % at 20 s after the first step
            "updates_to_target": 20.0,  # of 40
            "seconds": 20.0, "seconds_in_all": 33.0, "steps": 40.0,
            "log_ratio": 2 * 38.5 / 40,  # steps 37 to 40
            "lag": 5.0, "ess": 0.75, "uses": 2_400 / 1_000, "tokens_generated": 10_000.0, "tokens_trained": 24_000.0,
            "trainer_memory": 2.0**31, "searcher_memory": 300 * 2.0**20,
            "trainer_idle": 0.02, "trainer_paced": 0.01, "searcher_idle": 0.0, "skipped_steps": 0.0,
            "kl": 1.5, "reward": 0.75, "answer_tokens": 4.0, "perplexity": 9.5,
        }
    )  # fmt: skip


def test_diversity_is_told_of_both_ends_and_pass_at_k_at_powers_of_two(make_run: Callable[..., Path]) -> None:
    run = make_run()
    before = {"distinct": 4.5, "differ": 0.75, "pass_at": [0.25, 0.4, 0.5, 0.6, 0.65, 0.7], "samples": 6}
    after = {"distinct": 2.0, "differ": None, "pass_at": [0.5, 0.6, 0.65, 0.7, 0.72, 0.74], "samples": 6}
    (run / "diversity.json").write_text(json.dumps({"before": before, "after": after}))
    values = figures(RunRecord.read(run), "pass@1/sampled")
    assert {name: value for name, value in values.items() if "of6" in name or name.startswith(("dist", "diff"))} == {
        "distinct": 2.0,
        "distinct_before": 4.5,
        "differ_before": 0.75,
        "pass@1/of6": 0.5,
        "pass@2/of6": 0.6,
        "pass@4/of6": 0.7,
    }
    assert (heading("pass@4/of6"), format_figure("pass@4/of6", 0.7)) == ("pass@4/of6, %", "70.0")


def test_what_a_run_does_not_have_is_not_there(make_run: Callable[..., Path]) -> None:
    values = figures(RunRecord.read(make_run()), "pass@1/sampled", target=0.85)
    assert {"kl", "reward", "seconds_to_target", "pass@4/sampled"} & values.keys() == set()
    assert figures(RunRecord.read(make_run("second", finished=False)), "pass@1/sampled") == {}


def test_an_accuracy_curve_begins_with_the_first_step(make_run: Callable[..., Path]) -> None:
    run = RunRecord.read(make_run())
    assert accuracy_curve(run, "pass@1/greedy") == [(0.0, 0.5), (20.0, 0.9)]
    assert accuracy_by_updates(run, "pass@1/greedy") == [(0.0, 0.5), (40.0, 0.9)]


def test_a_target_is_reached_on_the_line_between_two_evaluations() -> None:
    curve = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.3), (40.0, 0.8)]
    assert reached(curve, 0.3) == pytest.approx(5.0)
    assert reached(curve, 0.5) == pytest.approx(28.0)
    assert reached(curve, 0.1) == 0.0
    assert reached(curve, 0.9) is None
    assert reached([], 0.9) is None


def test_the_largest_fall_is_below_the_best_so_far() -> None:
    assert largest_fall([0.2, 0.5, 0.4, 0.9, 0.6, 0.95]) == pytest.approx(0.3)
    assert largest_fall([0.1, 0.2, 0.3]) == 0.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_largest_fall_is_the_worst_of_all_ordered_pairs(values: list[float]) -> None:
    pairs = [values[i] - values[j] for i in range(len(values)) for j in range(i, len(values))]
    assert largest_fall(values) == max(pairs)


def test_the_mean_over_the_end_is_of_the_last_tenth_and_at_least_one() -> None:
    rows = [{"step": i, "a": float(i)} for i in range(1, 31)]
    assert end_mean(rows, "a") == 29.0  # of 28, 29, 30
    assert end_mean(rows[:4], "a") == 4.0
    assert end_mean(rows, "b") is None


def test_every_column_says_what_it_is_and_how_it_is_written() -> None:
    assert {*DATA, *MACHINE} <= set(COLUMNS)
    assert format_figure("pass@1/sampled", 0.9341) == "93.4"
    assert (heading("pass@8/sampled"), format_figure("pass@8/sampled", 0.5)) == ("pass@8/sampled, %", "50.0")
    assert (format_figure("trainer_memory", 2.0**30), format_figure("tokens_trained", 1_234_567)) == ("1024", "1.23M")
    assert (format_figure("seconds", 61.24), format_figure("seconds", 512.3)) == ("61.2", "512")


def test_a_failure_is_that_of_the_part_that_had_it_and_knows_how_far_it_came(tmp_path: Path) -> None:
    assert Failure.read(tmp_path) is None
    failure = Failure.record(tmp_path, ValueError("who knows"))
    assert (failure.kind, failure.message, failure.step) == ("ValueError", "who knows", 0)
    (tmp_path / "logs").mkdir()
    error = {"kind": "NonFiniteLoss", "message": "three in a row", "traceback": "..."}
    (tmp_path / "logs" / "trainer.error.json").write_text(json.dumps(error))
    writer = MetricsWriter(tmp_path)
    writer.write(Version(0, 17), 3.0, {"loss": 1.0})
    writer.close()
    Failure.record(tmp_path, RuntimeError("trainer ended"))
    assert str(Failure.read(tmp_path)) == "NonFiniteLoss at step 17"


def test_show_says_why_a_run_failed(make_run: Callable[..., Path]) -> None:
    from rich.console import Console

    from tba.record.show import show

    run = make_run(finished=False)
    Failure.record(run, "killed by signal 9")
    console = Console(record=True, width=100)
    console.print(show(RunRecord.read(run)))
    assert "failed: killed by signal 9 at step 40" in console.export_text()
