"""Records a run step by step: `metrics.jsonl`, `samples.jsonl`, TensorBoard events and, if asked for, W&B.

Invariant: `metrics.jsonl` is always written, and first; TensorBoard and W&B get the same numbers under the same names,
by optimizer step, W&B also a table of the samples, of at most `TABLE_ROWS` rows. A sample is what was trained on,
unedited; with `hide_text` it has no prompt and no answer, only keys, lengths and numbers; nor has a message about a
rejected answer, and there is no table. The results of an evaluation are written by the part that evaluates
(`evaluations`).
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from tba.errors import UserError
from tba.fields import as_declared
from tba.record.jsonl import JsonLines, read_lines
from tba.record.metrics import MetricsWriter
from tba.record.prometheus import PrometheusSettings
from tba.types import Evaluation, Json, Trajectory, Version

SAMPLES = "samples.jsonl"
TABLE = "trajectories"  # its key in W&B
TABLE_ROWS = 200  # the newest: what W&B stores each time, and shows without a search
TABLE_EVERY = 10  # times that samples are written: by default, 200 steps
# of each token of some trajectories of the step's batch, the policy's log-probability before the update
LogPolicy: TypeAlias = Callable[[Sequence[Trajectory]], Sequence[Sequence[float]]]


@dataclass(frozen=True)
@as_declared
class RecordSettings:
    """Says what a run records besides `metrics.jsonl`. Raises `UserError` when a field makes no sense."""

    samples_every: int = 20  # steps between trajectories written to samples.jsonl; 0: none
    samples_per_batch: int = 4  # trajectories of the batch that are written each time
    tensorboard: bool | None = None  # TensorBoard events in tensorboard/; None: where TensorBoard is installed
    wandb: str | None = None  # W&B project to send the metrics and a table of the samples to; None: none
    hide_text: bool = False  # keep prompts and answers out of samples.jsonl, answers.jsonl, logs and the terminal
    prometheus: PrometheusSettings = field(default_factory=PrometheusSettings)

    def __post_init__(self) -> None:
        for name in ("samples_every", "samples_per_batch"):
            if getattr(self, name) < 0:
                raise UserError(f"record: {name} must not be negative, but is {getattr(self, name)}.")

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the field without effect while no samples are written."""
        return {} if self.samples_every else {"samples_per_batch": "samples_every"}

    def has_tensorboard(self) -> bool:
        """Returns whether TensorBoard events are written. Raises `UserError` where they need a missing package."""
        is_installed = find_spec("tensorboard") is not None
        if self.tensorboard and not is_installed:
            raise UserError(
                "TensorBoard events were asked for, but the package tensorboard is not installed; run "
                "`pip install tensorboard` or leave out --record.tensorboard."
            )
        return is_installed if self.tensorboard is None else self.tensorboard

    def start(self, directory: Path, recipe: Mapping[str, Json] | None = None) -> Recorder:
        """Open the files of the run in `directory`; `recipe` is the configuration that W&B shows.

        Raises `UserError` when TensorBoard or W&B is asked for and not installed.
        """
        tensorboard = TensorBoardEvents(directory) if self.has_tensorboard() else None
        wandb = WandbRun(self.wandb, directory, recipe or {}) if self.wandb else None
        sampling = self.samples_every, self.samples_per_batch  # 0: none
        return Recorder(
            metrics=MetricsWriter(directory),
            samples=SampleWriter(directory, *sampling, text=not self.hide_text) if all(sampling) else None,
            tensorboard=tensorboard,
            wandb=wandb,
        )


@dataclass
class Recorder:
    """Writes each step to all files that the settings ask for."""

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
        log_policy: LogPolicy | None = None,
    ) -> None:
        """Record one optimizer step: its metrics, and a few of the trajectories it was made of, with what `log_policy`
        gives of them.

        `wall_seconds` are since the run began.
        """
        self.metrics.write(version, wall_seconds, metrics)
        if self.samples is not None:
            lines = self.samples.write(version.step, trajectories, log_policy)
            if self.wandb is not None:
                self.wandb.samples(version.step, lines)
        self._send_scalars(version.step, metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Send a held-out figure to TensorBoard and W&B, by the step of the version it measured."""
        self._send_scalars(evaluation.version.step, {f"eval/{evaluation.metric}": evaluation.value})

    def _send_scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.tensorboard is not None:
            self.tensorboard.write(step, time.time(), metrics)
        if self.wandb is not None:
            self.wandb.write(step, metrics)

    def close(self) -> None:
        for part in (self.metrics, self.samples, self.tensorboard, self.wandb):
            if part is not None:
                part.close()


class SampleWriter:
    """Appends `count` trajectories of every `every`th step's batch, the first step's included, spread over its rows."""

    def __init__(self, directory: Path, every: int = 20, count: int = 4, text: bool = True) -> None:
        self._lines = JsonLines(directory / SAMPLES)
        self.every = every
        self.count = count
        self.text = text

    def write(
        self, step: int, trajectories: Sequence[Trajectory], log_policy: LogPolicy | None = None
    ) -> Sequence[Mapping[str, Json]]:
        """Append some of `trajectories`, the batch of optimizer step `step` (from 1), if samples are due at this step.

        Returns the lines written.
        """
        if step != 1 and step % self.every:
            return []
        count = min(self.count, len(trajectories))
        samples = [trajectories[i * len(trajectories) // count] for i in range(count)]
        log_policies = {} if log_policy is None else dict(zip(range(count), log_policy(samples), strict=True))
        lines = []
        for i, trajectory in enumerate(samples):
            log_policy_field = {"log_policy": [round(x, 4) for x in log_policies[i]]} if i in log_policies else {}
            lines.append({**self._line(step, trajectory), **log_policy_field})
            self._lines.append(lines[-1])
        return lines

    def close(self) -> None:
        self._lines.close()

    def _line(self, step: int, t: Trajectory) -> dict[str, Json]:
        text_fields = {"prompt": t.prompt.text, "completion": t.completion.text} if self.text else {}
        segment_fields = {} if t.completion.begins is None else {"segments": len(t.completion.segments)}
        return {
            "step": step,
            "prompt_key": t.prompt.key,
            **text_fields,
            "reward": t.reward,
            "reward_parts": t.reward_parts,
            "version": t.version,
            "length": t.length,
            **segment_fields,
            "stop_reason": t.completion.stop_reason,
            "log_reference": float(t.log_reference.sum()) if t.has_reference else None,
            "uid": t.uid,
            "searcher": t.provenance.get("searcher"),
        }


def read_samples(directory: Path) -> list[dict[str, Json]]:
    """Returns a run's samples, in the order written; none when it has none yet."""
    return read_lines(directory / SAMPLES)


class TensorBoardEvents:
    """Writes scalars; TensorBoard's own thread flushes them every few seconds, `close` at once."""

    def __init__(self, directory: Path) -> None:
        # half a second to load, and not needed by commands that only read a run
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        path = directory / "tensorboard"
        path.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        self._writer: Any = EventFileWriter(str(path), flush_secs=10)

    def write(self, step: int, seconds_since_epoch: float, metrics: Mapping[str, float]) -> None:
        """Write the finite ones of `metrics` at an optimizer step."""
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, wall_time=seconds_since_epoch, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbRun:
    """One run of a W&B project. Raises `UserError` when the package is not installed."""

    def __init__(self, project: str, directory: Path, recipe: Mapping[str, Json]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"W&B project {project!r} was asked for, but the package wandb is not installed; "
                "run `pip install wandb` or leave the field empty."
            ) from None
        self._run: Any = wandb.init(
            project=project, name=directory.name, dir=str(directory), config=dict(recipe), resume="allow"
        )
        # its own axis: an evaluation comes later than the step of the weights it measured, and W&B's own
        # counter refuses to go back
        self._run.define_metric("*", step_metric="step")
        self._make_table: Any = wandb.Table
        self._rows: deque[list[Json]] = deque(maxlen=TABLE_ROWS)
        self._sample_times = 0  # times that samples came, and the step of the newest that is in no table yet
        self._unsent_step: int | None = None

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send `metrics` at an optimizer step."""
        self._run.log({**metrics, "step": step})

    def samples(self, step: int, lines: Sequence[Mapping[str, Json]]) -> None:
        """Send lines of `samples.jsonl` as a table: the first at once, later ones with others. Without text, none."""
        rows = [_row(line) for line in lines if "completion" in line]
        if not rows:
            return
        self._rows.extend(rows)
        self._unsent_step = step
        if self._sample_times % TABLE_EVERY == 0:
            self._send_table()
        self._sample_times += 1

    def _send_table(self) -> None:
        if self._unsent_step is not None:
            columns = ["step", "prompt", "completion", "reward", "parts"]
            self.write(self._unsent_step, {TABLE: self._make_table(columns=columns, data=list(self._rows))})
        self._unsent_step = None

    def close(self) -> None:
        self._send_table()
        self._run.finish()


def _row(line: Mapping[str, Json]) -> list[Json]:
    """Returns a row of W&B's table. Parts are one text, since a column has one type and parts differ by prompt."""
    return [line["step"], line["prompt"], line["completion"], line["reward"], json.dumps(line["reward_parts"])]
