"""AdamW with float32 state, a schedule for the learning rate, and the norm of the gradient clipped.

Invariant: a gradient that is not finite never reaches the weights or the moments. `Optimizer.step` looks at its norm
first, changes nothing when that is not finite, and says so by returning it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import Parameter

from tba.errors import UserError
from tba.schedules import RateShape, WarmupConstant
from tba.types import Json

STATE = "optimizer.safetensors"
FACTS = "optimizer.json"


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019). Raises `UserError` for values with which it cannot work."""

    lr: float = 1e-5  # peak learning rate; the schedule multiplies it
    schedule: RateShape = WarmupConstant()
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the two moments
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # decoupled: times the learning rate
    clip_norm: float | None = 1.0  # largest norm of the gradient; None: it is not clipped (the paper's)
    head_lr: float | None = None  # peak learning rate of value and log Z heads; None: lr
    master_weights: bool = True  # float32 copies of lower-precision weights; False: all in their dtype (the paper's)

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("eps", self.eps), ("clip_norm", self.clip_norm)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"the optimizer's {name} is {value}, but it has to be a positive number; give one.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"the optimizer's betas are {self.betas}, but each has to be at least 0 and below 1.")
        if self.weight_decay < 0:
            raise UserError(f"the optimizer's weight_decay is {self.weight_decay}, but it cannot be negative.")

    def start(self, parameters: Sequence[Parameter], heads: Sequence[Parameter] = ()) -> Optimizer:
        """An optimizer of `parameters`, of which `heads` (some of them) have a group and a rate of their own."""
        return Optimizer(self, parameters, heads)


class Optimizer:
    """torch's fused AdamW over the policy's parameters. `settings.start` makes one.

    Fused costs a third of the foreach and plain ones on one CPU thread (measured at 0.3 M and 5 M parameters).
    """

    def __init__(
        self, settings: OptimizerSettings, parameters: Sequence[Parameter], heads: Sequence[Parameter]
    ) -> None:
        self.settings = settings
        self.parameters = list(parameters)
        self._masters = [self._master(p) for p in self.parameters]
        in_heads = {id(p) for p in heads}
        body = [m for p, m in zip(self.parameters, self._masters, strict=True) if id(p) not in in_heads]
        head = [m for p, m in zip(self.parameters, self._masters, strict=True) if id(p) in in_heads]
        peaks = (settings.lr, settings.lr if settings.head_lr is None else settings.head_lr)
        groups = [{"params": g, "lr": lr, "peak": lr} for g, lr in zip((body, head), peaks, strict=True) if g]
        self._adamw = torch.optim.AdamW(
            groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True
        )

    def step(self, step: int) -> float:
        """Update number `step` (from 1) with the gradients there are, which are then dropped.

        Returns their norm before clipping; when it is not finite, nothing was updated.
        """
        for parameter, master in self._copies():
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        norm = torch.nn.utils.get_total_norm([m.grad for m in self._masters if m.grad is not None])
        norm_value = float(norm)
        if math.isfinite(norm_value):
            self._update(step, norm, norm_value)
        self.drop()
        return norm_value

    def drop(self) -> None:
        """Forget the gradients."""
        for parameter in (*self.parameters, *self._masters):
            parameter.grad = None

    def forget(self) -> None:
        """Moments and counts begin anew; weights and their float32 masters stay."""
        self._adamw.state.clear()

    def rate(self, step: int) -> float:
        """The learning rate of update `step` (heads may have another)."""
        return self.settings.lr * self.settings.schedule(step)

    def save(self, folder: Path) -> None:
        """Moments, counts and float32 masters as `optimizer.safetensors`, what they belong to as `optimizer.json`."""
        tensors = {f"{i}.{key}": t for i, s in self._adamw.state_dict()["state"].items() for key, t in s.items()}
        tensors |= {f"{i}.master": m.detach() for i, m in self._numbered_copies()}
        safetensors.torch.save_file(tensors, folder / STATE)
        (folder / FACTS).write_text(json.dumps(self._facts()))

    def load(self, folder: Path) -> None:
        """The inverse of `save`. Raises `UserError` when it is missing, damaged or of another model."""
        try:
            tensors = safetensors.torch.load_file(folder / STATE)
            facts = json.loads((folder / FACTS).read_text())
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise UserError(f"the optimizer's state in {folder} cannot be read ({error}); give another one") from error
        if facts != self._facts():
            raise UserError(
                f"the optimizer's state in {folder} is of another model: its parameters differ; give its own"
            )
        with torch.no_grad():
            for i, master in self._numbered_copies():
                master.copy_(tensors.pop(f"{i}.master"))
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor
        self._adamw.load_state_dict({"state": state, "param_groups": self._adamw.state_dict()["param_groups"]})

    def _master(self, parameter: Parameter) -> Parameter:
        """What AdamW updates: the parameter, or a float32 copy of one of lower precision."""
        if not self.settings.master_weights or torch.finfo(parameter.dtype).bits >= 32:
            return parameter
        return Parameter(parameter.detach().to(torch.float32))

    def _update(self, step: int, norm: Tensor, norm_value: float) -> None:
        clip = self.settings.clip_norm
        if clip is not None and norm_value > clip:
            torch.nn.utils.clip_grads_with_norm_(self._masters, clip, norm)
        shape = self.settings.schedule(step)
        for group in self._adamw.param_groups:
            group["lr"] = group["peak"] * shape
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in self._copies():
                parameter.copy_(master)

    def _copies(self) -> list[tuple[Parameter, Parameter]]:
        """(parameter, its float32 master) where these are two."""
        return [(p, m) for p, m in zip(self.parameters, self._masters, strict=True) if m is not p]

    def _numbered(self) -> list[Parameter]:
        """What AdamW updates, in the order in which its state is numbered."""
        return [master for group in self._adamw.param_groups for master in group["params"]]

    def _numbered_copies(self) -> list[tuple[int, Parameter]]:
        copies = {id(master) for _, master in self._copies()}
        return [(i, master) for i, master in enumerate(self._numbered()) if id(master) in copies]

    def _facts(self) -> dict[str, Json]:
        shapes = [list(master.shape) for master in self._numbered()]
        return {"shapes": shapes, "masters": [i for i, _ in self._numbered_copies()]}
