"""The trainer: `step(batch)` makes one update, and every k steps weights are due, which `publish()` sends out.

Invariant: the version counts updates that were made. A step whose loss or gradient is not finite makes none: it is
skipped, counted and reported; the third in a row saves its batch and ends the run with the weights untouched. The
trainer holds no reference policy, and waits for nothing.

A step has parts: `begin` evaluates and backpropagates, `launch` gives a GPU its update, and `finish` reads what came of
it. Between `launch` and `finish` the next step may begin, so that a GPU does not idle while the host reads and records.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from tba.batch import Batch, FetchedBatch
from tba.device_to_host import begin_reading
from tba.errors import NonFiniteLoss, UserError
from tba.protocols import HEADS, Manifest, Measured, Objective, Policy, PolicyOutput, WeightPublisher
from tba.training.gradients import backward
from tba.training.optimizer import Optimizer
from tba.training.staleness import Staleness
from tba.training.teacher import Teacher
from tba.types import Group, Sampling, StopReason, Trajectory, Version

Metrics: TypeAlias = dict[str, float]
NON_FINITE_IN_A_ROW = 3


def _no_readers() -> None:
    """Return at once: the default of `wait_for_readers`, where nobody reads the weights while they change."""


@dataclass
class PendingStep:
    """A step that has been evaluated, and backpropagated into the policy's gradients."""

    batch: Batch  # as the teachers' share in the target made it
    measured: Measured  # loss and metrics, on the policy's device
    metrics: Metrics  # of the batch, before it is used
    target_shift: float | None  # mean over rows of what teachers added to the log-probabilities of the reference
    outputs: list[tuple[Tensor, Batch]]  # the policy's log-probabilities [B, T] of each pass, and the pass's rows
    read_values: Callable[[], list[float]] | None = None  # norm and tensors of `measured`, once the update is launched

    @property
    def loss(self) -> Tensor:
        loss = self.measured["loss"]
        assert isinstance(loss, Tensor)
        return loss


@dataclass
class Trainer:
    """Makes updates. Call `step` by hand in a REPL, or let a runtime do it. `version` names the present weights.

    Raises `UserError` when the objective needs a head that the policy does not have.
    """

    policy: Policy
    objective: Objective
    weights: WeightPublisher
    optimizer: Optimizer
    sync_every: int  # k, updates between two publications
    max_tokens_per_pass: int  # of one forward and backward pass, on each rank
    directory: Path  # where a batch that ended the run is saved
    version: Version = Version()
    groups: Sequence[Group] = ()  # those of the last step
    published: Version | None = None  # the newest version that was published
    skipped: int = 0  # steps without an update
    ranks: int = 1  # over which the policy spreads each pass
    wait_for_readers: Callable[[], object] = _no_readers  # of the weights; called before these change
    teacher: Teacher = Teacher()  # whose share of the target is mixed into each batch
    sampling: Sampling | None = None  # with which answers are drawn from the policy itself; None: no settings do that
    now: Callable[[], float] = time.time  # seconds since the epoch, as `Trajectory.created` has them
    _skipped_in_a_row: int = field(default=0, repr=False)
    _launched_updates: int = field(default=0, repr=False)  # of which it is not known whether they were made
    # of the last step: the policy's log-probabilities [B, T] of each pass, and the pass's rows
    _last_outputs: list[tuple[Tensor, Batch]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        missing_heads = (self.objective.needs & HEADS) - set(self.policy.heads)
        if missing_heads:
            heads = " and ".join(sorted(missing_heads))
            raise UserError(
                f"{type(self.objective).__name__} needs {heads} of the policy, but {type(self.policy).__name__} has no "
                "such head; choose a policy that has it or another objective"
            )

    @property
    def expected_version(self) -> Version:
        """Returns the version once the updates that have been launched turn out to be made."""
        return dataclasses.replace(self.version, step=self.version.step + self._launched_updates)

    def step(self, fetched: FetchedBatch) -> Metrics:
        """Make one update from one batch. The policy's device is waited for once, when the update is decided on."""
        return self.finish(self.begin(fetched))

    def begin(self, fetched: FetchedBatch) -> PendingStep:
        """Evaluate a batch and backpropagate, without waiting for the policy's device."""
        self.groups = fetched.groups
        batch = dataclasses.replace(fetched.batch, lag_B=self._lag_B())
        metrics, step, target, target_shift = self._describe_batch(batch), self.expected_version.step + 1, batch, None
        if self.teacher.count:
            if any(self.teacher.shares(step)):
                metrics["without_signal"] = 0.0  # a teacher tells answers of the same reward apart
            target = self.teacher.with_teachers(batch, step)
            if not self.teacher.replaces_reference:
                shift_BT = torch.where(batch.mask_BT, target.log_reference_BT - batch.log_reference_BT, 0.0)
                target_shift = float(shift_BT.sum()) / batch.rows
        return PendingStep(target, self.backward(target), metrics, target_shift, self._last_outputs)

    def launch(self, work: PendingStep) -> None:
        """Launch the update of a step, which the device makes if it is finite, and begin to read what comes of it. The
        optimizer's `device_decides` has to be True.
        """
        self.wait_for_readers()
        norm = self.optimizer.launch(self.version.step + 1, work.loss)
        work.read_values = begin_reading(_stack_values(norm, work.measured))
        self._launched_updates = 1

    def finish(self, work: PendingStep) -> Metrics:
        """Make the update of a step, unless it has been launched, and return all metrics as numbers."""
        metrics = work.metrics | self._conclude_update(work)
        self._last_outputs = work.outputs
        if not self.teacher.count:
            return metrics
        if work.target_shift is not None:
            metrics["log_ratio_reference"] = metrics["log_ratio"] + work.target_shift
        return metrics | {"reward": work.metrics["reward"]}

    def log_policy(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Returns the log-probabilities of tokens of the last batch, before its update. The device is waited for."""
        keys = [(_bytes(t.prompt.tokens), _bytes(t.completion.tokens)) for t in trajectories]
        index_of = {key: i for i, key in enumerate(keys)}  # equal answers to one prompt have the same
        log_policies: dict[int, list[float]] = {}
        for log_policy_BT, evaluated in self._last_outputs:
            prompt_GP, completion_BT = evaluated.prompt_GP.numpy(), evaluated.completion_BT.numpy()
            prompts = [_bytes(prompt_GP[g, :n]) for g, n in enumerate(evaluated.prompt_length_G.tolist())]
            rows = zip(evaluated.length_B.tolist(), evaluated.group_B.tolist(), strict=True)
            for b, (length, group) in enumerate(rows):
                i = index_of.get((prompts[group], _bytes(completion_BT[b, :length])))
                if i is not None and i not in log_policies:
                    log_policies[i] = log_policy_BT[b, :length].tolist()
        return [log_policies[index_of[key]] for key in keys]

    @property
    def should_publish(self) -> bool:
        """Returns whether weights are to be published: every `sync_every` updates, once per version; and after one that
        has been left out.
        """
        return self.is_sync_due(self.version)

    def is_sync_due(self, version: Version) -> bool:
        """Returns whether the weights are to be published once they are this version."""
        published_step = 0 if self.published is None else self.published.step
        return version != self.published and version.step // self.sync_every > published_step // self.sync_every

    def backward(self, batch: Batch) -> Measured:
        """Evaluate, compute the objective, backpropagate: in one pass or slice by slice (`training.gradients`).

        Returns the loss and metrics, on the policy's device.
        """
        for need, tensor_BT, description in (
            ("log_behavior", batch.log_behavior_BT, "the log-probabilities of the behaviour policy"),
            ("step_value", batch.step_value_BS, "the values of the answer's steps"),
        ):
            if need in self.objective.needs and tensor_BT is None:
                raise UserError(
                    f"{type(self.objective).__name__} needs {description}, but a trajectory of this batch came "
                    "without them; leave imported data out or choose trajectory balance"
                )
        step = self.expected_version.step + 1
        staleness, outputs = Staleness(), []

        def observe(output: PolicyOutput, part: Batch) -> None:
            staleness.add(output, part)
            outputs.append((output.log_policy_BT.detach(), part))

        self._last_outputs = outputs
        limit, ranks = self.max_tokens_per_pass, self.ranks
        loss, metrics = backward(self.policy, self.objective, batch, step, limit, observe, ranks)
        return {**staleness.metrics(metrics.get("beta")), **metrics, "loss": loss}

    def _conclude_update(self, work: PendingStep) -> Metrics:
        """Make one optimizer step, unless it has been launched or the loss or the gradient is not finite. Returns all
        that was measured as numbers.
        """
        step, names = self.version.step + 1, [n for n, value in work.measured.items() if isinstance(value, Tensor)]
        metrics = {name: value for name, value in work.measured.items() if not isinstance(value, Tensor)}
        if work.read_values is None:
            norm_values: list[float] = []

            def read_norm(norm: Tensor) -> float:
                norm_values.extend(_stack_values(norm, work.measured).tolist())
                return norm_values[0]

            self.wait_for_readers()
            self.optimizer.step(step, work.loss, read_norm)
        else:
            norm_values, self._launched_updates = work.read_values(), 0
            self.optimizer.conclude(norm_values[0])
        grad_norm, *values = norm_values
        metrics |= dict(zip(names, values, strict=True))
        metrics |= {"grad_norm": grad_norm, "lr": self.optimizer.rate(step)}
        if math.isfinite(grad_norm):
            self.version = dataclasses.replace(self.version, step=step)
            self._skipped_in_a_row = 0
        else:
            self._count_skipped_step(work.batch, metrics["loss"], grad_norm)
        return metrics | {"skipped": float(self.skipped)}

    def publish(self, manifest: Manifest | None = None) -> None:
        """Publish the weights as they are, with a manifest; a run that resumes calls it at once."""
        self.weights.publish(self.policy.weights(), self.version, manifest or Manifest())
        self.published = self.version

    def _describe_batch(self, batch: Batch) -> Metrics:
        """Returns the batch's metrics before it is used. Lag: updates since the weights that sampled a row."""
        trajectories = [t for group in self.groups for t in group.trajectories]
        lags = [t.version.lag(self.expected_version) for t in trajectories if not t.imported]
        is_truncated = [t.completion.stop_reason is StopReason.LENGTH for t in trajectories]
        is_uniform = [len({t.reward for t in group.trajectories}) == 1 for group in self.groups]
        return ages(trajectories, self.now()) | {
            "reward": float(batch.reward_B.mean()),
            **({"lag": sum(lags) / len(lags), "lag_max": float(max(lags))} if lags else {}),
            "tokens": float(batch.length_B.sum()),
            "trajectories": float(batch.rows),
            "length": float(batch.mask_BT.sum()) / batch.rows,
            "truncated": sum(is_truncated) / len(is_truncated),
            "without_signal": sum(is_uniform) / len(is_uniform),
        }

    def _lag_B(self) -> Tensor:
        """Returns the lag of each row that weights of this incarnation sampled, as the policy itself would: else -1."""
        now, sampling = self.expected_version, self.sampling
        lags = [
            t.version.lag(now)
            if sampling is not None and t.completion.sampling == sampling and t.version.incarnation == now.incarnation
            else -1
            for group in self.groups
            for t in group.trajectories
        ]
        return torch.tensor(lags, dtype=torch.int64)

    def _count_skipped_step(self, batch: Batch, loss: float, grad_norm: float) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row < NON_FINITE_IN_A_ROW:
            return
        path = self.directory / f"non-finite-{self.version}.safetensors"
        save_batch(batch, path)
        raise NonFiniteLoss(
            f"{NON_FINITE_IN_A_ROW} steps in a row after version {self.version} had loss {loss} and gradient norm "
            f"{grad_norm}; the weights are untouched and the last batch is in {path}"
        )


def _stack_values(norm: Tensor, measured: Measured) -> Tensor:
    """Returns the norm and all tensors that were measured, in order, as one tensor of the norm's device."""
    return torch.stack([norm, *(value.to(norm) for value in measured.values() if isinstance(value, Tensor))])


def _bytes(tokens: npt.NDArray[np.integer]) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def ages(trajectories: Sequence[Trajectory], now: float) -> Metrics:
    """Returns the mean age of the trajectories in seconds, in two parts; each over those that have the figure.

    in_flight_seconds: from the beginning of its round to the journal, a duration that its searcher measured by a
    monotonic clock. waiting_seconds: from there to `now`, by the wall clocks of both sides: only as right as these
    agree, and 0 where it would be negative.
    """
    durations = (t.provenance.get("seconds") for t in trajectories)
    in_flight = [float(d) for d in durations if isinstance(d, int | float)]
    waiting = [max(0.0, now - t.created) for t in trajectories if t.created > 0]
    columns = {"in_flight_seconds": in_flight, "waiting_seconds": waiting}
    return {name: sum(values) / len(values) for name, values in columns.items() if values}


def save_batch(batch: Batch, path: Path) -> None:
    """Save a batch's tensors by field name, as safetensors."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    tensors = {name: t.contiguous() for name, t in fields.items() if isinstance(t, torch.Tensor)}
    safetensors.torch.save_file(tensors, path)


def load_batch(path: Path) -> Batch:
    """Load a batch that `save_batch` wrote."""
    return Batch(**safetensors.torch.load_file(path))
