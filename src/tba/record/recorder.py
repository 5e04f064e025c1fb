"""Everything a run records step by step, behind one object.

Invariant: the trainer's process owns it, so that each file has one writer; `metrics.jsonl` is always written first,
and the rest is a copy of it for other eyes. The part that evaluates writes its own file (`evaluations`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tba.errors import UserError
from tba.record.metrics import MetricsWriter
from tba.record.samples import SampleWriter
from tba.record.tensorboard import TensorBoardEvents
from tba.record.wandb import WandbRun
from tba.types import Evaluation, Json, Trajectory, Version


@dataclass(frozen=True)
class RecordSettings:
    """What a run records besides `metrics.jsonl`."""

    samples_per_step: int = 2  # trajectories of each step's batch in samples.jsonl; 0: none
    sample_text: bool = True  # write what was said; off: keys, lengths and numbers only
    tensorboard: bool = True  # TensorBoard events in tensorboard/
    wandb_project: str = ""  # W&B project to send the metrics to; empty: none
    status_seconds: float = 10.0  # between two lines of progress when there is no terminal

    def __post_init__(self) -> None:
        if self.samples_per_step < 0:
            raise UserError(f"record: samples_per_step must not be negative, but is {self.samples_per_step}.")
        if self.status_seconds <= 0:
            raise UserError(f"record: status_seconds must be positive, but is {self.status_seconds}.")

    def start(self, directory: Path, recipe: Mapping[str, Json] | None = None) -> Recorder:
        """Open the files of the run in `directory`; `recipe` is what W&B is told of it."""
        wandb = WandbRun(self.wandb_project, directory, recipe or {}) if self.wandb_project else None
        return Recorder(
            metrics=MetricsWriter(directory),
            samples=SampleWriter(directory, self.samples_per_step, self.sample_text) if self.samples_per_step else None,
            tensorboard=TensorBoardEvents(directory) if self.tensorboard else None,
            wandb=wandb,
        )


@dataclass
class Recorder:
    """Fans each step out to the files that were asked for."""

    metrics: MetricsWriter
    samples: SampleWriter | None = None
    tensorboard: TensorBoardEvents | None = None
    wandb: WandbRun | None = None

    def step(
        self,
        version: Version,
        wall_seconds: float,
        metrics: Mapping[str, float],
        trajectories: Sequence[Trajectory] = (),
    ) -> None:
        """One optimizer step: its metrics, and a few of the trajectories it was made of.

        `wall_seconds` are since the run began.
        """
        self.metrics.write(version, wall_seconds, metrics)
        if self.samples is not None:
            self.samples.write(version.step, trajectories)
        self._copy(version.step, metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        """A held-out figure, for TensorBoard and W&B, by the step of the version it measured."""
        self._copy(evaluation.version.step, {f"eval/{evaluation.metric}": evaluation.value})

    def _copy(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.tensorboard is not None:
            self.tensorboard.write(step, time.time(), metrics)
        if self.wandb is not None:
            self.wandb.write(step, metrics)

    def close(self) -> None:
        for part in (self.metrics, self.samples, self.tensorboard, self.wandb):
            if part is not None:
                part.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
