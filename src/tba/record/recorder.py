"""Everything a run records step by step, behind one object.

Invariant: `metrics.jsonl` is always written, and first; the rest is a copy of it for other programs. The results of an
evaluation are written by the part that evaluates (`evaluations`).
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

    samples_every: int = 20  # steps between trajectories written to samples.jsonl; 0: none
    samples: int = 4  # trajectories of the batch each time
    curves: bool = True  # draw curves.png at the end (a second); `tba show` draws it at any time
    tensorboard: bool = True  # TensorBoard events in tensorboard/
    wandb: str | None = None  # W&B project to send the metrics to; None: none
    hide_text: bool = False  # keep prompts and answers out of samples.jsonl, answers.jsonl and the terminal

    def __post_init__(self) -> None:
        for name in ("samples_every", "samples"):
            if getattr(self, name) < 0:
                raise UserError(f"record: {name} must not be negative, but is {getattr(self, name)}.")

    @property
    def unused(self) -> Mapping[str, str]:
        """The field without effect while no samples are written."""
        return {} if self.samples_every else {"samples": "samples_every"}

    def start(self, directory: Path, recipe: Mapping[str, Json] | None = None) -> Recorder:
        """Open the files of the run in `directory`; `recipe` is the configuration that W&B shows.

        Raises `UserError` when W&B is asked for and not installed.
        """
        wandb = WandbRun(self.wandb, directory, recipe or {}) if self.wandb else None
        wanted = self.samples_every > 0 and self.samples > 0
        return Recorder(
            metrics=MetricsWriter(directory),
            samples=SampleWriter(directory, self.samples_every, self.samples, not self.hide_text) if wanted else None,
            tensorboard=TensorBoardEvents(directory) if self.tensorboard else None,
            wandb=wandb,
        )


@dataclass
class Recorder:
    """Writes each step to all files that were asked for."""

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
        """Record one optimizer step: its metrics, and a few of the trajectories it was made of.

        `wall_seconds` are since the run began.
        """
        self.metrics.write(version, wall_seconds, metrics)
        if self.samples is not None:
            self.samples.write(version.step, trajectories)
        self._copy(version.step, metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Send a held-out figure to TensorBoard and W&B, by the step of the version it measured."""
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
