"""`summary.json` has the keys it is to have."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tba.errors import UserError
from tba.record.ledger import Ledger
from tba.record.summary import Lag, Summary, WallSeconds
from tba.types import Evaluation, Version

SUMMARY = Summary(
    recipe="quickstart",
    seed=3,
    steps=400,
    wall_seconds=WallSeconds(total=222.2, sft=0.0, warm_up=10.0, train=200.0, eval=14.5),
    evaluations=(Evaluation(Version(0, 400), 215.0004, "pass@1/sampled", 0.86, 500, 2.5, 3000),),
    trainer_idle=0.021,
    trainer_paced=0.008,
    searcher_idle=0.004,
    tokens=Ledger(generated=10, trained_once=7, trained_total=20, waiting=3),
    trajectories=Ledger(generated=4, trained_once=3, trained_total=9, waiting=1),
    lag=Lag(9.8, 17.0, 41.0),
    control=({"step": 20, "signal": "ess", "value": 0.4, "sync_every": 1, "m": 1.0},),
    reference_resets=({"step": 200, "version": "0.200", "wall_seconds": 101.5},),
    faults={"restarts": 1, "non_finite_steps": 0},
    peak_memory_bytes={"searcher-0": 1 << 28, "trainer": 1 << 29},
)
LEDGER_KEYS = {
    "generated", "observed", "failed", "expired", "trained_once", "trained_total", "waiting", "evicted", "rejected",
    "duplicate", "damaged", "in_flight_at_stop", "evaluation", "auxiliary", "imported",
}  # fmt: skip


def test_the_keys_of_the_summary_are_exactly_these(tmp_path: Path) -> None:
    row = json.loads(SUMMARY.write(tmp_path).read_text())
    assert set(row) == {
        "recipe", "seed", "steps", "wall_seconds", "evaluations", "trainer_idle", "trainer_paced", "searcher_idle",
        "samples_per_insert", "tokens", "trajectories", "lag", "faults", "peak_memory_bytes", "versions", "machine",
        "reference_resets", "searcher_paced", "searcher_evaluating", "searcher_time", "utilisation",
        "slow_side", "control", "joined", "served", "recent_share", "trained_share", "prompts",
    }  # fmt: skip
    assert row["reference_resets"] == [{"step": 200, "version": "0.200", "wall_seconds": 101.5}]
    assert set(row["wall_seconds"]) == {"total", "sft", "warm_up", "train", "eval"}
    assert row["evaluations"] == [
        {"version": "0.400", "wall_seconds": 215.0, "metric": "pass@1/sampled", "value": 0.86, "n": 500}
    ]
    assert set(row["tokens"]) == set(row["trajectories"]) == LEDGER_KEYS
    assert set(row["lag"]) == {"mean", "p95", "max"}
    assert (row["samples_per_insert"], row["trained_share"]) == (9 / 4, 3 / 4)
    assert set(row["versions"]) == {"python", "torch", "transformers", "tba"}
    assert {"cores", "memory_bytes", "cpu"} <= set(row["machine"])


def test_a_summary_is_read_back_as_it_was_but_for_the_cost_of_its_evaluations(tmp_path: Path) -> None:
    SUMMARY.write(tmp_path)
    found = Summary.read(tmp_path)
    assert found is not None
    assert found.to_json() == SUMMARY.to_json()
    assert (found.tokens, found.lag, found.wall_seconds) == (SUMMARY.tokens, SUMMARY.lag, SUMMARY.wall_seconds)


def test_a_run_that_has_not_ended_has_no_summary(tmp_path: Path) -> None:
    assert Summary.read(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": 1, "samples_per_insert": 1}', '{"samples_per_insert": '])
def test_a_file_that_is_no_summary_is_said_in_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary.json has unexpected contents"):
        Summary.read(tmp_path)


@pytest.mark.parametrize(
    ("trainer", "searchers", "uses", "slow"),
    [
        ((0.05, 0.0), 0.0, 3, "searchers"),  # the trainer waited for data
        ((0.0, 0.03), 0.0, 3, "searchers"),  # or was held, since there was too little of it
        ((0.0, 0.01), 0.06, 1, "trainer"),  # searchers held_back off
        ((0.01, 0.0), 0.0, 3, "searchers"),  # nobody waited; the trainer used what there was three times
        ((0.0, 0.0), 0.0, 0.5, "trainer"),  # or half of it once
        ((0.0, 0.0), 0.0, 1.05, "neither"),
        ((0.0, 0.0), 0.0, 0, "neither"),  # nothing was trained
    ],
)
def test_the_slow_side_is_the_one_that_was_waited_for_or_could_not_keep_up_with_one_use_of_each(
    trainer: tuple[float, float], searchers: float, uses: float, slow: str
) -> None:
    account = Ledger(generated=200, trained_once=100, waiting=100, trained_total=round(200 * uses))
    idle, paced = trainer
    summary = replace(
        SUMMARY,
        trainer_idle=idle,
        trainer_paced=paced,
        searcher_idle=0.0,
        searcher_paced=searchers,
        trajectories=account,
    )
    assert summary.slow_side == slow
    assert summary.to_json()["slow_side"] == slow
