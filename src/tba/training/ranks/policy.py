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
from typing import Any

import safetensors
import torch
from torch import Tensor
from torch.nn import Parameter

from tba.batch import Batch, deal, shortest_row, to_device
from tba.errors import DeadlineExceeded
from tba.host_copies import HostCopies
from tba.protocols import PolicyOutput, SavedPolicy
from tba.streaming import SAFETENSORS_NAMES, TensorChange, TensorStream, changes_since
from tba.training.gradients import Slice, put_together
from tba.training.optimizer import Optimizer, OptimizerSettings
from tba.training.ranks.background import Background
from tba.training.ranks.checkpoint import AllRows, ModelWithoutRows, Shards, lay_out, saving
from tba.training.ranks.messages import Message, Ranks
from tba.training.ranks.weights import Leaving

_LOOKS = "for the other ranks to look for the checkpoints"
_PROMPTS = ("prompt_GP", "prompt_length_G")  # these and the answers make a batch that can be evaluated
_ANSWERS = ("completion_BT", "length_B", "mask_BT", "log_reference_BT", "reward_B", "group_B")


@dataclass(frozen=True)
class _Share:
    """Holds what one rank evaluates of a batch: its rows, or one of them whose result is not used."""

    part: Slice
    used: bool

    @classmethod
    def of(cls, batch: Batch, rows: Tensor) -> _Share:
        used = len(rows) > 0
        return cls(Slice.of(batch, rows if used else shortest_row(batch)), used)

    def shapes(self, heads: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the shapes of the policy's outputs for it, in the order of `given`."""
        rows, groups = self.part.batch.completion_BT.shape, (self.part.batch.groups,)
        return [tuple(rows), *([tuple(rows)] if "value" in heads else []), *([groups] if "log_z" in heads else [])]


def given(output: PolicyOutput) -> list[Tensor]:
    """Returns the outputs of a policy, without those it does not have."""
    return [t for t in (output.log_policy_BT, output.value_BT, output.log_z_G) if t is not None]


def _entropy_of(output: PolicyOutput) -> Tensor:
    """Returns the entropies [B] of an output whose gradient has been taken, NaN of a policy that gives none."""
    if output.entropy_B is None:
        return output.log_policy_BT.new_full((len(output.log_policy_BT),), torch.nan)
    return output.entropy_B()


def _output(tensors: Sequence[Tensor], heads: Sequence[str]) -> PolicyOutput:
    """Returns the output whose `given` these tensors are."""
    rest = iter(tensors)
    log_policy_BT = next(rest)
    value_BT = next(rest) if "value" in heads else None
    return PolicyOutput(log_policy_BT, value_BT, next(rest) if "log_z" in heads else None)


@dataclass
class Rank0Policy:
    """The `Policy` of rank 0: each call is executed by all ranks."""

    own: SavedPolicy  # this rank's shards
    ranks: Ranks
    max_tokens: int  # of one pass, on each rank
    published: torch.dtype = torch.float32  # in which `weights` are gathered: cast on each rank, before they travel
    copies: HostCopies = field(default_factory=HostCopies)  # of this rank's shards, for publication
    saving: Background = field(init=False)  # the checkpoint that is being written
    # unset while the weights are being gathered for publication
    reading: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.reading.set()
        self.saving = saving(self.ranks)
        self._anchor = torch.zeros((), device=self.ranks.device, requires_grad=True)

    @property
    def heads(self) -> torch.nn.ModuleDict:
        return self.own.heads

    @property
    def share_prompt(self) -> bool:
        return self.own.share_prompt

    def parameters(self) -> Sequence[Parameter]:
        return self.own.parameters()

    def evaluate(self, batch: Batch) -> PolicyOutput:
        """Evaluates all rows. Gradients go through it once, with all of its outputs at the same time."""
        dealt = deal(batch, self.ranks.count, self.max_tokens, self.share_prompt)
        shares = [_Share.of(batch, rows) for rows in dealt]
        spoken = {name: getattr(batch, name) for name in (*_PROMPTS, *_ANSWERS)}
        self.ranks.say("evaluate", spoken, gradient=torch.is_grad_enabled())
        with self.ranks.inside("evaluate"):
            output = self.own.evaluate(shares[0].part.batch)
        own = given(output)
        made = {0: [t.detach() for t in own]}
        for rank, share in enumerate(shares):
            if rank and share.used:
                made[rank] = self.ranks.receive(share.shapes(list(self.heads)), rank)
        whole = _whole(batch, [(shares[rank].part, tensors) for rank, tensors in made.items() if shares[rank].used])
        if not torch.is_grad_enabled():
            return _output(whole, list(self.heads))
        entropy_B = torch.full((batch.rows,), torch.nan, device=self.ranks.device)

        def backpropagate(gradients: Sequence[Tensor]) -> None:
            self._backpropagate(batch, shares, output, gradients)
            for rank, share in enumerate(shares):
                if share.used:
                    rows = share.part.row_index.to(entropy_B.device)
                    entropy_B[rows] = self.ranks.receive([rows.shape], rank)[0] if rank else _entropy_of(output)

        dealt_output = _output(_Dealt.apply(self._anchor, backpropagate, *whole), list(self.heads))
        return replace(dealt_output, entropy_B=lambda: entropy_B)

    def _backpropagate(
        self, batch: Batch, shares: Sequence[_Share], output: PolicyOutput, gradients: Sequence[Tensor]
    ) -> None:
        """Each rank backpropagates its part of the derivative; log Z of a split group goes with the first part that has
        it.
        """
        own = given(output)
        self.ranks.say("backpropagate")
        done_G = torch.zeros(batch.groups, dtype=torch.bool)
        mine = [torch.zeros_like(tensor) for tensor in own]
        for rank, share in enumerate(shares):
            if not share.used:
                continue
            part, rows, of_groups = share.part, list(gradients), None
            if "log_z" in self.heads:
                of_groups = part.first_groups(rows.pop(), done_G)
            done_G[part.group_index] = True
            parts = [g[part.place_BT(g.device)] for g in rows] + ([] if of_groups is None else [of_groups])
            if rank:
                self.ranks.send(parts, rank)
            else:
                mine = parts
        with self.ranks.inside("backpropagate"):
            torch.autograd.backward(list(own), mine)

    def weights(self) -> TensorStream:
        """Returns whole tensors, one after the other; a second reader waits until the first has finished."""
        return self._sent(everything=False)

    def _sent(self, everything: bool) -> TensorStream:
        """`everything` is gathered as it is trained, for a checkpoint."""
        if not self.reading.wait(self.ranks.deadline):
            raise DeadlineExceeded(f"the weights were still being read after {self.ranks.deadline:g} s")
        self.reading.clear()
        dtype = None if everything else self.published
        self.ranks.say("weights", everything=everything, dtype=None if dtype is None else SAFETENSORS_NAMES[dtype])
        leaving = Leaving.of(self.own, self.ranks, everything, dtype, self.copies)

        def tensors() -> Iterator[tuple[str, Tensor]]:
            try:
                leaving.since(None)
                yield from leaving.whole()
            finally:
                self.reading.set()

        def changes(base: Path) -> Iterator[TensorChange]:
            try:
                since = leaving.since(base)
                with safetensors.safe_open(base, framework="pt") as old:
                    if since is None:
                        yield from changes_since(old.get_tensor, TensorStream(leaving.like, leaving.whole))
                    else:
                        yield from leaving.changes(old)
            finally:
                self.reading.set()

        return TensorStream(leaving.like, tensors, changes, leaving.hold)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.ranks.say("load", weights)
        self.own.load(weights)

    def save(self, path: Path, tokenizer: Any = None, weights: Mapping[str, Tensor] | None = None) -> None:
        self.own.save(path, tokenizer, self._sent(everything=True) if weights is None else weights)

    def lay_out(self, optimizer: Optimizer, folder: Path) -> tuple[ModelWithoutRows, AllRows] | None:
        """Have all ranks copy what they hold, for a checkpoint within `folder`, which is then written by `saving`.
        Waits for the one before.

        None, and nothing is copied, where a rank does not see the folder (it is on another machine), or adapters have
        to be merged: what is saved has to be gathered then.
        """
        self.saving.settle()
        if self.own.everything().keys() != self.own.weights().keys():
            return None
        self.ranks.say("checkpoint")
        seen = self.ranks.shared(folder, _LOOKS, self.ranks.saving)
        return None if seen is None else lay_out(self.own, optimizer, self.ranks)


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
        self.ranks.say("step", step=step)
        with self.ranks.inside("step"):
            return super().step(step, loss, read)

    def forget(self) -> None:
        self.ranks.say("forget")
        super().forget()

    def swap(self) -> None:
        if self.settings.averaged:
            self.ranks.say("swap")
            with self.ranks.inside("swap"):
                super().swap()

    def save(self, folder: Path) -> None:
        self.ranks.say("save")
        with self.ranks.inside("save"):
            super().save(folder)


@dataclass
class Follower:
    """Any other rank: `follow()` until rank 0 ends it."""

    own: SavedPolicy
    optimizer: Optimizer
    ranks: Ranks
    max_tokens: int
    copies: HostCopies = field(default_factory=HostCopies)  # of this rank's shards, for publication
    _made: PolicyOutput | None = None
    _share: _Share | None = None
    _held: Callable[[], bool] = lambda: False
    _sending: Background = field(default_factory=lambda: Background("weights"))  # of which each wait has its deadline
    _saving: Background = field(init=False)

    def __post_init__(self) -> None:
        self._saving = saving(self.ranks)

    def follow(self) -> None:
        """Execute the messages of rank 0; it waits for nothing else."""
        acts: dict[str, Callable[[Message], object]] = {
            "evaluate": self._evaluate,
            "backpropagate": self._backpropagate,
            "step": self._step,
            "forget": lambda message: self.optimizer.forget(),
            "swap": self._swap,
            "save": lambda message: self.optimizer.save(Path()),
            "weights": self._send_weights,
            "checkpoint": self._checkpoint,
            "load": lambda message: self.own.load(message.tensors),
        }
        while (message := self.ranks.hear()).word != "end":
            with self.ranks.inside(message.word):
                acts[message.word](message)
        self._sending.settle()
        self._saving.settle()

    def _evaluate(self, message: Message) -> None:
        batch = Batch(**message.tensors)
        dealt = deal(batch, self.ranks.count, self.max_tokens, self.own.share_prompt)
        self._share = _Share.of(batch, dealt[self.ranks.rank])
        with torch.set_grad_enabled(bool(message.facts["gradient"])):
            self._made = self.own.evaluate(self._share.part.batch)
        if self._share.used:
            self.ranks.send(given(self._made), 0)

    def _backpropagate(self, message: Message) -> None:
        assert self._share is not None
        assert self._made is not None
        output, self._made = self._made, None
        made = given(output)
        gradients = [torch.zeros_like(tensor) for tensor in made]
        if self._share.used:
            gradients = self.ranks.receive([t.shape for t in made], 0)
        torch.autograd.backward(made, gradients)
        if self._share.used:
            self.ranks.send([_entropy_of(output)], 0)

    def _step(self, message: Message) -> None:
        if not self._held():
            self._sending.settle()
        self._sending.look()
        self._saving.look()
        self.optimizer.step(int(message.facts["step"]))

    def _swap(self, message: Message) -> None:
        self._sending.settle()
        self.optimizer.swap()

    def _checkpoint(self, message: Message) -> None:
        """Copy this rank's rows, and write them while the next steps are computed."""
        self._sending.settle()
        self._saving.settle()
        if self.ranks.shared(None, _LOOKS, self.ranks.saving) is not None:
            shards = Shards.of(self.own, self.optimizer)
            self._saving.begin(lambda: shards.write(self.ranks, ""))

    def _send_weights(self, message: Message) -> None:
        """Send the weights while the next step is computed; this ends before they change, unless it sends copies."""
        self._sending.settle()
        dtype = next((dtype for dtype, name in SAFETENSORS_NAMES.items() if name == message.facts["dtype"]), None)
        leaving = Leaving.of(self.own, self.ranks, bool(message.facts["everything"]), dtype, self.copies)
        self._held = leaving.hold
        self._sending.begin(leaving.send)


class _Dealt(torch.autograd.Function):
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


def _whole(batch: Batch, made: Sequence[tuple[Slice, Sequence[Tensor]]]) -> list[Tensor]:
    """Returns the outputs for the whole batch, each part in its place."""
    shape_BT, whole = tuple(batch.completion_BT.shape), []
    for column in zip(*(tensors for _, tensors in made), strict=True):
        rows = column[0].ndim == 2
        device = column[0].device
        places: list[Any] = [part.place_BT(device) if rows else to_device(part.group_index, device) for part, _ in made]
        tensor = put_together(column, places, shape_BT if rows else (batch.groups,))
        assert tensor is not None
        whole.append(tensor.detach())
    return whole
