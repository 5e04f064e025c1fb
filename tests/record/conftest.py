"""Runs as they lie on disk, with numbers that can be checked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tba.evaluation.accuracy import AssessedAnswer
from tba.evaluation.estimators import GREEDY, SAMPLED
from tba.record.evaluations import EvaluationWriter
from tba.record.ledger import Ledger
from tba.record.metrics import MetricsWriter
from tba.record.summary import Lag, Summary, WallSeconds
from tba.types import Evaluation, Version

STEPS = 40


def evaluations(step: int, greedy: float, sampled: float) -> list[Evaluation]:
    """Two figures over 500 problems, half a second of wall-clock per step after 10 s."""
    version, wall = Version(0, step), 10 + 0.5 * step
    return [Evaluation(version, wall, GREEDY, greedy, 500), Evaluation(version, wall, SAMPLED, sampled, 500)]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run of 40 steps; its numbers are simple functions of the step."""

    def make(name: str = "first", finished: bool = True, lost_tokens: int = 0) -> Path:
        run = tmp_path / name
        metrics, found = MetricsWriter(run), EvaluationWriter(run)
        found.write(
            evaluations(0, 0.5, 0.4),
            [AssessedAnswer(f"{n}+1=", "7", float(n == 6), n == 6, GREEDY) for n in range(1, 8)],
        )
        for step in range(1, STEPS + 1):
            metrics.write(
                Version(0, step),
                10 + 0.5 * step,
                {
                    "reward": step / STEPS, "log_ratio": 2 * step / STEPS, "lag": 5.0, "lag_max": 9.0,
                    "waiting_seconds": 2.0, "in_flight_seconds": 0.25, "ess": 0.75, "residual_relative": 0.5,
                    "off_policy": 0.5, "off_policy_p05": -0.5, "off_policy_p95": 2.0,
                    "entropy": 0.4 * (STEPS - step + 1) / STEPS, "mismatch": 0.01, "mismatch_answer": 0.04,
                    "without_signal": 0.25, "truncated": 0.0, "cut": 0.125, "length": 12.0,
                    "trainer_idle": 0.02, "trainer_paced": 0.01, "searcher_evaluating": 0.26,
                    "generated_tokens": 1000.0 * step, "tokens": 3000.0,
                },
            )  # fmt: skip
        found.write(
            evaluations(STEPS, 0.9, 0.8),
            [AssessedAnswer(f"{n}+1=", str(n + 1), 1.0, True, GREEDY) for n in range(1, 8)],
        )
        metrics.close()
        found.close()
        if finished:
            Summary(
                recipe="quickstart",
                seed=3,
                steps=STEPS,
                wall_seconds=WallSeconds(total=33.0, warm_up=10.0, train=20.0, eval=3.0),
                evaluations=evaluations(0, 0.5, 0.4) + evaluations(STEPS, 0.9, 0.8),
                trainer_idle=0.02,
                trainer_paced=0.01,
                tokens=Ledger(generated=10_000 + lost_tokens, trained_once=8_000, trained_total=24_000, waiting=2_000),
                trajectories=Ledger(generated=1_000, trained_once=800, trained_total=2_400, waiting=200),
                lag=Lag(5.0, 7.0, 9.0),
                faults={"restarts": 1},
                peak_memory_bytes={"searcher-0": 300 << 20, "trainer": 2 << 30},
                utilisation={"trainer": 0.48, "searchers": 0.3},
            ).write(run)
        return run

    return make
