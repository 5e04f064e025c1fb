"""A policy and an optimizer over several ranks, led by rank 0, whose trainer sees one policy and one optimizer.

Invariant: the objective is computed once, on rank 0, over the whole batch. A pass deals whole groups to the ranks. Each
evaluates its rows (one that has none evaluates one all the same), rank 0 puts the log-probabilities together, and the
objective's derivative with respect to them goes back the same way: each rank backpropagates its part of it. So the loss
and every mean in it are of the whole batch for any objective and any number of ranks, and all ranks make equally many
passes. Whether a step is made follows from the norm that all ranks add up alike: with a loss that is not finite, rank 0
adds what makes it NaN.

Shape legend: B rows, T completion positions, G groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from torch import Tensor
from torch.nn import Parameter

from tba.batch import Batch, deal, shortest_row, to_device
from tba.device_to_host import HostCopies
from tba.errors import DeadlineExceeded, UserError
from tba.protocols import PolicyOutput, SavedPolicy, ScoringPolicy, WeightHolder
from tba.sharding import local_part
from tba.streaming import SAFETENSORS_NAMES, TensorChange, TensorStream, changes_since
from tba.training.gradients import Slice, assemble
from tba.training.optimizer import Optimizer, OptimizerSettings
from tba.training.ranks.background import Background
from tba.training.ranks.checkpoint import AllRows, ModelWithoutRows, Shards, checkpoint_thread, copy_rows
from tba.training.ranks.messages import RankCommand, Ranks
from tba.training.ranks.weights import OutgoingWeights

_SHARING = "for the other ranks to look for the checkpoints"
_PROMPTS = ("prompt_GP", "prompt_length_G")  # these and the answers make a batch that can be evaluated
_ANSWERS = ("completion_BT", "length_B", "mask_BT", "log_reference_BT", "reward_B", "group_B")
_OPTIONAL = ("segment_start_BL", "top_id_BTK")  # which change an evaluation where a batch has them
_OUTPUTS = ("log_policy_BT", "value_BT", "log_top_BTC", "log_z_G")  # of a policy, in the order in which they travel


@dataclass(frozen=True)
class _RankShare:
    """Holds a rank's share of a batch: its rows, or, where it has none, some row whose result is not used."""

    part: Slice
    is_used: bool

    @classmethod
    def of(cls, batch: Batch, rows: Tensor) -> _RankShare:
        is_used = len(rows) > 0
        return cls(Slice.of(batch, rows if is_used else shortest_row(batch)), is_used)

    def shapes(self, heads: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the shapes of the policy's outputs for the share, in the order of `present_outputs`."""
        batch = self.part.batch
        rows = tuple(batch.completion_BT.shape)
        top = [] if batch.top_id_BTK is None else [(*rows, batch.top_id_BTK.shape[-1] + 1)]
        return [rows, *([rows] if "value" in heads else []), *top, *([(batch.groups,)] if "log_z" in heads else [])]


def present_outputs(output: PolicyOutput) -> list[Tensor]:
    """Returns the tensors of a policy's output, without those it does not have."""
    return [tensor for name in _OUTPUTS if (tensor := getattr(output, name)) is not None]


def _take_entropy(output: PolicyOutput) -> Tensor:
    """Returns the entropies [B] of an output whose gradient has been taken, NaN of a policy that gives none."""
    if output.entropy_B is None:
        return output.log_policy_BT.new_full((len(output.log_policy_BT),), torch.nan)
    return output.entropy_B()


def _to_output(tensors: Sequence[Tensor], local_output: PolicyOutput) -> PolicyOutput:
    """Returns the output with these `present_outputs`, which are the same as a rank's own."""
    names = [name for name in _OUTPUTS if getattr(local_output, name) is not None]
    columns: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return PolicyOutput(**columns)


@dataclass
class Rank0Policy:
    """The `Policy` of rank 0: each call is executed by all ranks."""

    local_policy: SavedPolicy  # this rank's shards
    ranks: Ranks
    max_tokens: int  # of one pass, on each rank
    published_dtype: torch.dtype = torch.float32  # to which each rank casts `weights` before they travel
    reference: ScoringPolicy | None = None  # this rank's part of it, where the trainer scores answers under it
    copies: HostCopies = field(default_factory=HostCopies)  # of this rank's shards, for publication
    checkpoint_thread: Background = field(init=False)  # the checkpoint that is being written
    # unset while the weights are being gathered for publication
    readable: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.readable.set()
        self.checkpoint_thread = checkpoint_thread(self.ranks)
        self._anchor = torch.zeros((), device=self.ranks.device, requires_grad=True)

    @property
    def heads(self) -> torch.nn.ModuleDict:
        return self.local_policy.heads

    @property
    def share_prompt(self) -> bool:
        return self.local_policy.share_prompt

    def parameters(self) -> Sequence[Parameter]:
        return self.local_policy.parameters()

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Evaluate all rows. Gradients go through the result once, with all of its outputs at the same time."""
        if batch.segment_start_BL is not None and self.ranks.count > 1 and not self.share_prompt:
            raise UserError(  # the ranks would make different numbers of passes, which FSDP does not allow
                "the batch has episodes of several segments, which a model whose prompts are not shared within groups "
                "cannot train over several ranks: train it on one, or leave such episodes out"
            )
        shares, output, batch_outputs = self._evaluate_shares("evaluate", self.local_policy, batch)
        if not torch.is_grad_enabled():
            return _to_output(batch_outputs, output)
        entropy_B = torch.full((batch.rows,), torch.nan, dtype=torch.float32, device=self.ranks.device)

        def backpropagate(gradients: Sequence[Tensor]) -> None:
            self._backpropagate(batch, shares, output, gradients)
            for rank, share in enumerate(shares):
                if share.is_used:
                    rows = share.part.row_index.to(entropy_B.device)
                    entropy_B[rows] = self.ranks.receive([rows.shape], rank)[0] if rank else _take_entropy(output)

        rank_outputs = _to_output(_RankOutputs.apply(self._anchor, backpropagate, *batch_outputs), output)
        return replace(rank_outputs, entropy_B=lambda: entropy_B)

    def score(self, batch: Batch) -> Tensor:
        """Returns the log-probabilities of all rows under the reference, float32 [B, T], without gradient."""
        assert self.reference is not None
        with torch.no_grad():
            _, output, batch_outputs = self._evaluate_shares("score", self.reference, batch)
        return _to_output(batch_outputs, output).log_policy_BT

    def reset_reference(self) -> None:
        """Make the policy as it is the reference, on each rank its own rows."""
        self.ranks.broadcast("reset_reference")
        _copy_rows_to(self.reference, self.local_policy)

    def load_reference(self, weights: Mapping[str, Tensor]) -> None:
        """Load other weights into the reference of all ranks."""
        self.ranks.broadcast("load_reference", weights)
        cast(WeightHolder, self.reference).load(weights)

    def _evaluate_shares(
        self, command: str, policy: ScoringPolicy, batch: Batch
    ) -> tuple[list[_RankShare], PolicyOutput, list[Tensor]]:
        """Have each rank evaluate its share of a batch; returns the shares, this rank's output, and the batch's."""
        rows_by_rank = deal(batch, self.ranks.count, self.max_tokens, policy.share_prompt)
        shares = [_RankShare.of(batch, rows) for rows in rows_by_rank]
        optional = [name for name in _OPTIONAL if getattr(batch, name) is not None]
        batch_tensors = {name: getattr(batch, name) for name in (*_PROMPTS, *_ANSWERS, *optional)}
        self.ranks.broadcast(command, batch_tensors, gradient=torch.is_grad_enabled())
        with self.ranks.name_collectives(command):
            output = policy.evaluate(shares[0].part.batch)
        outputs_by_rank = {0: [t.detach() for t in present_outputs(output)]}
        for rank, share in enumerate(shares):
            if rank and share.is_used:
                outputs_by_rank[rank] = self.ranks.receive(share.shapes(list(policy.heads)), rank)
        slices = [(shares[rank].part, tensors) for rank, tensors in outputs_by_rank.items() if shares[rank].is_used]
        return shares, output, _assemble_batch(batch, slices)

    def _backpropagate(
        self, batch: Batch, shares: Sequence[_RankShare], output: PolicyOutput, gradients: Sequence[Tensor]
    ) -> None:
        """Have each rank backpropagate its part; a split group's log Z goes to the first rank that has the group."""
        local_outputs = present_outputs(output)
        self.ranks.broadcast("backpropagate")
        done_G = torch.zeros(batch.groups, dtype=torch.bool)
        local_gradients = [torch.zeros_like(tensor) for tensor in local_outputs]
        for rank, share in enumerate(shares):
            if not share.is_used:
                continue
            part, rows, group_gradient = share.part, list(gradients), None
            if "log_z" in self.heads:
                group_gradient = part.log_z_derivatives(rows.pop(), done_G)
            done_G[part.group_index] = True
            parts = [g[part.place_BT(g.device)] for g in rows] + ([] if group_gradient is None else [group_gradient])
            if rank:
                self.ranks.send(parts, rank)
            else:
                local_gradients = parts
        with self.ranks.name_collectives("backpropagate"):
            torch.autograd.backward(local_outputs, local_gradients)

    def weights(self) -> TensorStream:
        """Returns whole tensors, one after the other; a second reader waits until the first has finished."""
        return self._stream_weights(everything=False)

    def _stream_weights(self, everything: bool) -> TensorStream:
        """Returns the weights as published, or `everything` as it is trained, for a checkpoint."""
        if not self.readable.wait(self.ranks.deadline):
            raise DeadlineExceeded(f"the weights were still being read after {self.ranks.deadline:g} s")
        self.readable.clear()
        dtype = None if everything else self.published_dtype
        dtype_name = None if dtype is None else SAFETENSORS_NAMES[dtype]
        self.ranks.broadcast("weights", everything=everything, dtype=dtype_name)
        outgoing = OutgoingWeights.of(self.local_policy, self.ranks, everything, dtype, self.copies)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            try:
                outgoing.agree_on_base(None)
                yield from outgoing.whole_tensors()
            finally:
                self.readable.set()

        def changes(base: Path) -> Iterator[TensorChange]:
            try:
                base_file = outgoing.agree_on_base(base)
                with safetensors.safe_open(base, framework="pt") as base_tensors:
                    if base_file is None:
                        whole_tensors = TensorStream(outgoing.like, outgoing.whole_tensors)
                        yield from changes_since(base_tensors.get_tensor, whole_tensors)
                    else:
                        yield from outgoing.changes(base_tensors)
            finally:
                self.readable.set()

        return TensorStream(outgoing.like, tensors, changes, outgoing.hold)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.ranks.broadcast("load", weights)
        self.local_policy.load(weights)

    def save(self, path: Path, tokenizer: Any = None, weights: Mapping[str, Tensor] | None = None) -> None:
        self.local_policy.save(path, tokenizer, self._stream_weights(everything=True) if weights is None else weights)

    def copy_rows(self, optimizer: Optimizer, folder: Path) -> tuple[ModelWithoutRows, AllRows] | None:
        """Have all ranks copy their rows, for a checkpoint within `folder` that `checkpoint_thread` then writes. Waits
        for the checkpoint before.

        None, and nothing is copied, where a rank does not see the folder (it is on another machine), or adapters have
        to be merged: what is saved has to be gathered then.
        """
        self.checkpoint_thread.wait()
        if self.local_policy.everything().keys() != self.local_policy.weights().keys():
            return None
        self.ranks.broadcast("checkpoint")
        shared_folder = self.ranks.share_folder(folder, _SHARING, self.ranks.checkpoint_group)
        return None if shared_folder is None else copy_rows(self.local_policy, optimizer, self.ranks)


class Rank0Optimizer(Optimizer):
    """The `Optimizer` of rank 0: each call is executed by all ranks. Only `load` each rank runs by itself, when it
    starts.
    """

    def __init__(
        self, ranks: Ranks, settings: OptimizerSettings, parameters: Sequence[Parameter], heads: Sequence[Parameter]
    ) -> None:
        super().__init__(settings, parameters, heads)
        self.ranks = ranks

    def step(self, step: int, loss: Tensor | None = None, read: Callable[[Tensor], float] = float) -> float:
        self.ranks.broadcast("step", step=step)
        with self.ranks.name_collectives("step"):
            return super().step(step, loss, read)

    def reset_moments(self) -> None:
        self.ranks.broadcast("reset_moments")
        super().reset_moments()

    def swap_averages(self) -> None:
        if self.settings.weight_average:
            self.ranks.broadcast("swap")
            with self.ranks.name_collectives("swap"):
                super().swap_averages()

    def save(self, folder: Path) -> None:
        self.ranks.broadcast("save")
        with self.ranks.name_collectives("save"):
            super().save(folder)


@dataclass
class Follower:
    """Executes rank 0's commands on any other rank: call `follow()`, which returns when rank 0 ends."""

    local_policy: SavedPolicy
    optimizer: Optimizer
    ranks: Ranks
    max_tokens: int
    reference: ScoringPolicy | None = None  # this rank's part of it, where the trainer scores answers under it
    copies: HostCopies = field(default_factory=HostCopies)  # of this rank's shards, for publication
    _output: PolicyOutput | None = None
    _share: _RankShare | None = None
    _hold_copies: Callable[[], bool] = lambda: False
    _sending: Background = field(default_factory=lambda: Background("weights"))  # of which each wait has its deadline
    _checkpoint_thread: Background = field(init=False)

    def __post_init__(self) -> None:
        self._checkpoint_thread = checkpoint_thread(self.ranks)

    def follow(self) -> None:
        """Execute the commands of rank 0, and wait for nothing else, until it sends "end"."""
        handlers: dict[str, Callable[[RankCommand], object]] = {
            "evaluate": self._evaluate,
            "score": self._score,
            "reset_reference": lambda command: _copy_rows_to(self.reference, self.local_policy),
            "load_reference": self._load_reference,
            "backpropagate": self._backpropagate,
            "step": self._step,
            "reset_moments": lambda command: self.optimizer.reset_moments(),
            "swap": self._swap,
            "save": lambda command: self.optimizer.save(Path()),
            "weights": self._send_weights,
            "checkpoint": self._checkpoint,
            "load": lambda command: self.local_policy.load(command.tensors),
        }
        while (command := self.ranks.receive_command()).name != "end":
            with self.ranks.name_collectives(command.name):
                handlers[command.name](command)
        self._sending.wait()
        self._checkpoint_thread.wait()

    def _evaluate(self, command: RankCommand) -> None:
        self._share, self._output = self._evaluate_share(self.local_policy, command)

    def _score(self, command: RankCommand) -> None:
        assert self.reference is not None
        self._evaluate_share(self.reference, command)

    def _load_reference(self, command: RankCommand) -> None:
        cast(WeightHolder, self.reference).load(command.tensors)

    def _evaluate_share(self, policy: ScoringPolicy, command: RankCommand) -> tuple[_RankShare, PolicyOutput]:
        """Evaluate this rank's share of a batch, and send what comes out."""
        batch = Batch(**command.tensors)
        share = _RankShare.of(
            batch, deal(batch, self.ranks.count, self.max_tokens, policy.share_prompt)[self.ranks.rank]
        )
        with torch.set_grad_enabled(bool(command.arguments["gradient"])):
            output = policy.evaluate(share.part.batch)
        if share.is_used:
            self.ranks.send(present_outputs(output), 0)
        return share, output

    def _backpropagate(self, command: RankCommand) -> None:
        assert self._share is not None
        assert self._output is not None
        output, self._output = self._output, None
        outputs = present_outputs(output)
        gradients = [torch.zeros_like(tensor) for tensor in outputs]
        if self._share.is_used:
            gradients = self.ranks.receive([t.shape for t in outputs], 0)
        torch.autograd.backward(outputs, gradients)
        if self._share.is_used:
            self.ranks.send([_take_entropy(output)], 0)

    def _step(self, command: RankCommand) -> None:
        if not self._hold_copies():
            self._sending.wait()
        self._sending.raise_error()
        self._checkpoint_thread.raise_error()
        self.optimizer.step(int(command.arguments["step"]))

    def _swap(self, command: RankCommand) -> None:
        self._sending.wait()
        self.optimizer.swap_averages()

    def _checkpoint(self, command: RankCommand) -> None:
        """Copy this rank's rows, and write them while the next steps are computed."""
        self._sending.wait()
        self._checkpoint_thread.wait()
        if self.ranks.share_folder(None, _SHARING, self.ranks.checkpoint_group) is not None:
            shards = Shards.of(self.local_policy, self.optimizer)
            self._checkpoint_thread.start(lambda: shards.write(self.ranks, ""))

    def _send_weights(self, command: RankCommand) -> None:
        """Send the weights while the next step is computed; this ends before they change, unless it sends copies."""
        self._sending.wait()
        dtype = next((dtype for dtype, name in SAFETENSORS_NAMES.items() if name == command.arguments["dtype"]), None)
        everything = bool(command.arguments["everything"])
        outgoing = OutgoingWeights.of(self.local_policy, self.ranks, everything, dtype, self.copies)
        self._hold_copies = outgoing.hold
        self._sending.start(outgoing.send)


def _copy_rows_to(reference: ScoringPolicy | None, policy: SavedPolicy) -> None:
    """Copy a rank's rows of the policy's weights to those of the reference, in its precision."""
    weights = policy.weights()
    with torch.no_grad():
        for name, tensor in cast(WeightHolder, reference).weights().items():
            local_part(tensor).copy_(local_part(weights[name]))


class _RankOutputs(torch.autograd.Function):
    """The outputs of the ranks as one differentiable operation, whose backward pass sends derivatives to them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, backpropagate: Callable[[Sequence[Tensor]], None], *whole: Tensor) -> Any:
        ctx.backpropagate = backpropagate
        return tuple(tensor.clone() for tensor in whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            ctx.backpropagate(gradients)
        return None, None, *[None] * len(gradients)


def _assemble_batch(batch: Batch, outputs: Sequence[tuple[Slice, Sequence[Tensor]]]) -> list[Tensor]:
    """Returns the outputs for the whole batch, each part in its place."""
    shape_BT, tensors = tuple(batch.completion_BT.shape), []
    for column in zip(*(tensors for _, tensors in outputs), strict=True):
        is_by_row = column[0].ndim > 1
        device = column[0].device
        slices = [part for part, _ in outputs]
        places: list[Any] = [s.place_BT(device) if is_by_row else to_device(s.group_index, device) for s in slices]
        tensor = assemble(column, places, shape_BT if is_by_row else (batch.groups,))
        assert tensor is not None
        tensors.append(tensor.detach())
    return tensors
