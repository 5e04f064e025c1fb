"""AdamW with float32 state, a schedule for the learning rate, and the gradient's norm clipped.

Invariant: a gradient that is not finite never reaches the weights or the moments. `Optimizer.step` checks its norm
first, changes nothing when that is not finite, and returns it. A GPU checks it by itself: the update is launched before
the host reads the norm, so that the GPU does not idle while the host waits and launches.

Of sharded parameters (`tba.sharding`) each rank updates its rows and has the moments of these only. The norm is that of
the whole gradient, added up in one order on every rank, so that all of them decide alike. Parameters that are whole on
every rank have the sum of the ranks' gradients. What is saved is whole, and the same for any number of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tba.errors import UserError
from tba.fields import as_declared
from tba.json_input import parse_json
from tba.schedules import RateShape, WarmupConstant, warmup_share
from tba.sharding import copy_local_rows, gather_rows, is_sharded, local_part, process_group, row_range
from tba.streaming import TensorStream, write_tensors
from tba.types import Json

STATE_FILE = "optimizer.safetensors"
FACTS_FILE = "optimizer.json"
_CLIP_EPSILON = 1e-6  # which torch's clipping adds to the norm
_MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch's AdamW names them


@dataclass(frozen=True)
@as_declared
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019). Raises `UserError` for values with which it cannot work."""

    lr: float = 1e-5  # peak learning rate; the schedule multiplies it
    schedule: RateShape = WarmupConstant()
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the two moments
    weight_decay: float = 0.0  # decoupled weight decay, multiplied by the learning rate
    clip_norm: float | None = 1.0  # largest norm of the gradient; None: no clipping (as in the paper)
    head_lr: float | None = None  # peak learning rate of value and log Z heads; None: the same
    weight_average: bool = False  # an average of the weights over some ten updates is evaluated, saved and pushed in
    # their place; searchers sample from the weights themselves (4 bytes a parameter more)
    moments_on_host: bool = False  # AdamW's moments are in the host's memory, 8 bytes a parameter that a GPU need not
    # hold; they go there and back in each update

    def __post_init__(self) -> None:
        for name, value, example in (("lr", self.lr, "1e-4"), ("clip_norm", self.clip_norm, "1")):
            if value is not None and not (math.isfinite(value) and value > 0):
                flag = name.replace("_", "-")
                raise UserError(f"--optimizer.{flag} is {value}: give a positive number, such as {example}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"--optimizer.betas is {self.betas}: give two numbers from 0 to below 1")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"--optimizer.weight-decay is {self.weight_decay}: give 0 or more")

    def start(self, parameters: Sequence[Parameter], heads: Sequence[Parameter] = ()) -> Optimizer:
        """Returns an optimizer of `parameters`, of which `heads` (some of them) have a group and a learning rate of
        their own.
        """
        return Optimizer(self, parameters, heads)


class _AdamW(torch.optim.AdamW):
    """AdamW with what torch's fused kernels read of an optimizer if it is there, as `torch.amp.GradScaler` sets it."""

    found_inf: Tensor  # 1: no update is made
    grad_scale: Tensor  # the gradient is divided by it


class Optimizer:
    """torch's fused AdamW over the policy's parameters. `settings.start` makes one.

    The rise of the schedule's rate begins anew where the moments do (`forget`). Fused costs a third of the foreach and
    plain ones on one CPU thread (measured at 0.3 M and 5 M parameters).
    """

    def __init__(
        self, settings: OptimizerSettings, parameters: Sequence[Parameter], heads: Sequence[Parameter]
    ) -> None:
        self.settings = settings
        self.parameters = list(parameters)
        self._group = process_group(self.parameters)
        self._local_rows = [local_part(p) if is_sharded(p) else p for p in self.parameters]
        self._masters = [self._make_master(rows) for rows in self._local_rows]
        # float32, like the masters: their exponential moving averages
        self._averages = [m.detach().clone() for m in self._masters] if settings.weight_average else []
        head_ids = {id(p) for p in heads}
        body_masters = [m for p, m in zip(self.parameters, self._masters, strict=True) if id(p) not in head_ids]
        head_masters = [m for p, m in zip(self.parameters, self._masters, strict=True) if id(p) in head_ids]
        peaks = (settings.lr, settings.lr if settings.head_lr is None else settings.head_lr)
        masters = (body_masters, head_masters)
        groups = [{"params": g, "lr": lr, "peak": lr} for g, lr in zip(masters, peaks, strict=True) if g]
        self._adamw = _AdamW(groups, betas=settings.betas, weight_decay=settings.weight_decay, fused=True)
        self._moment_updates = 0  # updates since the moments were zero
        # a GPU makes or leaves out an update without the host; averages and moments on the host need its decision
        is_on_gpus = all(master.is_cuda for master in self._masters)
        self.device_decides = is_on_gpus and not (settings.weight_average or settings.moments_on_host)

    def step(self, step: int, loss: Tensor | None = None, read_norm: Callable[[Tensor], float] = float) -> float:
        """Make update number `step` (from 1) with the present gradients, which are then dropped.

        Returns their norm before clipping, NaN if the `loss` is not finite; when it is not finite, nothing was updated.
        `read_norm` reads the norm from its device, once; a caller can read its other tensors at the same time.
        """
        if self.device_decides:
            norm_value = read_norm(self.launch(step, loss))
            self.conclude(norm_value)
            return norm_value
        norm = self._norm_of_gradients(loss)
        norm_value = read_norm(norm)
        if math.isfinite(norm_value):
            self._update(step, norm, norm_value)
        self._drop_gradients()
        return norm_value

    def launch(self, step: int, loss: Tensor | None = None) -> Tensor:
        """Make update number `step` without waiting for the device, which leaves it out if the norm of the gradient or
        the `loss` is not finite; returns the norm. Call `conclude` with it before the next one. `device_decides` has to
        be True.
        """
        norm, clip_norm = self._norm_of_gradients(loss), self.settings.clip_norm
        self._adamw.found_inf = (norm - norm).ne(0).to(torch.float32)  # of what is not finite it is NaN
        if clip_norm is not None:  # the kernels divide the gradient by this
            self._adamw.grad_scale = ((norm + _CLIP_EPSILON) / clip_norm).clamp_min(1).to(torch.float32)
        self._launch_update(step)
        self._drop_gradients()
        return norm

    def conclude(self, norm_value: float) -> None:
        """Take the norm of the update that was launched last: one that is not finite was none."""
        self._moment_updates -= not math.isfinite(norm_value)

    def _norm_of_gradients(self, loss: Tensor | None) -> Tensor:
        """Give the masters their gradients, and return the norm of these."""
        for parameter, master in zip(self.parameters, self._masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else local_part(parameter.grad).to(torch.float32)
        return self._norm(loss)

    def _drop_gradients(self) -> None:
        for parameter in (*self.parameters, *self._masters):
            parameter.grad = None

    def reset_moments(self) -> None:
        """Reset moments and counts; weights and their float32 masters stay."""
        self._adamw.state.clear()
        self._moment_updates = 0

    def rate(self, step: int) -> float:
        """Returns the learning rate of update `step`, when it has been made (heads may have another)."""
        return self.settings.lr * self._rate_share(step)

    def _rate_share(self, step: int) -> float:
        """Returns the rate as a share of its peak: by the schedule, warmed up again after moments were reset."""
        schedule = self.settings.schedule
        return min(schedule(step), warmup_share(max(self._moment_updates, 1), schedule.warmup))

    @contextmanager
    def averages(self) -> Iterator[None]:
        """Put the averages in the place of the weights inside the block, on every rank. Nobody may read the weights."""
        self.swap_averages()
        try:
            yield
        finally:
            self.swap_averages()

    def swap_averages(self) -> None:
        """Exchange weights and averages, on every rank."""
        self.swap_local_averages()

    def swap_local_averages(self) -> None:
        """Exchange this rank's weights and their averages, tensor by tensor; without averages nothing changes."""
        with torch.no_grad():
            for master, average in zip(self._masters, self._averages, strict=bool(self._averages)):
                weights = master.detach().clone()
                master.copy_(average)
                average.copy_(weights)
            for parameter, master in self._rows_with_masters() if self._averages else ():
                parameter.copy_(master)

    def save(self, folder: Path) -> None:
        """Save moments, counts and float32 masters as `optimizer.safetensors`, and what they belong to as
        `optimizer.json`. Where there are averages, which the model is saved with, these and the weights are there too.

        Every rank calls it, and the first one writes.
        """
        tensors = self._saved_tensors()
        if self._group is not None and dist.get_rank(self._group) > 0:
            for _ in tensors.items():
                pass
            return
        write_tensors(folder / STATE_FILE, tensors)
        (folder / FACTS_FILE).write_text(json.dumps(self._describe_parameters()))

    def meta_tensors(self) -> Mapping[str, Tensor]:
        """Returns what `save` writes, as whole tensors on the meta device."""
        return self._saved_tensors().declared_tensors

    def snapshot(self) -> dict[str, tuple[int, Tensor]]:
        """Returns copies of this rank's rows of the saved state: by name, the number of the first row and the rows."""
        parameters = self._numbered_parameters()
        parts = self._saved_parts()
        return {name: rows for i, name, part in parts if (rows := copy_local_rows(part, parameters[i])) is not None}

    def write_empty_files(self, folder: Path, meta_tensors: Mapping[str, Tensor]) -> None:
        """Write the files of `save` with room for the tensors of all ranks, with the shapes of `meta_tensors`."""
        write_tensors(folder / STATE_FILE, meta_tensors)
        (folder / FACTS_FILE).write_text(json.dumps(self._describe_parameters()))

    def load(self, folder: Path) -> None:
        """Load what `save` wrote. Raises `UserError` when it is missing, damaged or of another model."""
        try:
            if parse_json((folder / FACTS_FILE).read_bytes()) != self._describe_parameters():
                raise UserError(f"the optimizer state in {folder} is of another model: parameters differ; give its own")
            tensors = self._load_local_tensors(folder / STATE_FILE)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise UserError(f"the optimizer's state in {folder} cannot be read ({error}); give another one") from error
        averages = {id(m): a for m, a in zip(self._masters, self._averages, strict=bool(self._averages))}
        with torch.no_grad():
            for i, master in self._numbered_float32_copies():
                master.copy_(tensors.pop(f"{i}.master"))
            for i, master in enumerate(self._numbered_masters()):
                if (raw := tensors.pop(f"{i}.raw", None)) is not None:
                    master.copy_(raw)
                saved = tensors.pop(f"{i}.average", master)
                if (average := averages.get(id(master))) is not None:
                    average.copy_(saved)
            for parameter, master in self._rows_with_masters():
                parameter.copy_(master)
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, key = name.split(".")
            state.setdefault(int(index), {})[key] = tensor
        self._moment_updates = int(max((values["step"] for values in state.values() if "step" in values), default=0))
        if self.settings.moments_on_host:  # which torch would load onto the device, all of them at once
            for i, master in enumerate(self._numbered_masters()):
                for key, tensor in state.get(i, {}).items():
                    self._adamw.state[master][key] = _to_host(tensor) if key in _MOMENTS else tensor.to(master.device)
            return
        self._adamw.load_state_dict({"state": state, "param_groups": self._adamw.state_dict()["param_groups"]})

    def _saved_tensors(self) -> TensorStream:
        """Returns all tensors that are saved; each is gathered from the ranks when it is read."""
        parts = self._saved_parts()
        parameters = self._numbered_parameters()
        meta_tensors = {
            name: torch.empty(parameters[i].shape if t.ndim else (), dtype=t.dtype, device="meta")
            for i, name, t in parts
        }

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for i, name, rows in parts:
                if not (rows.ndim and is_sharded(parameters[i])):
                    yield name, rows
                    continue
                tensor = gather_rows(rows, parameters[i].shape, self._group)
                yield name, rows if tensor is None else tensor

        return TensorStream(meta_tensors, tensors)

    def _saved_parts(self) -> list[tuple[int, str, Tensor]]:
        """Returns (number of the parameter, name, this rank's part) of all that is saved."""
        if self.settings.moments_on_host and self._masters[0].is_cuda:
            torch.cuda.current_stream(self._masters[0].device).synchronize()  # they may still be on their way
        state = self._adamw.state_dict()["state"]
        parts = [(i, f"{i}.{key}", t) for i, moments in state.items() for key, t in moments.items()]
        parts += [(i, f"{i}.master", m.detach()) for i, m in self._numbered_float32_copies()]
        if not self._averages:
            return parts
        averages = {id(m): a for m, a in zip(self._masters, self._averages, strict=True)}
        copied_numbers = {i for i, _ in self._numbered_float32_copies()}
        numbered_masters = list(enumerate(self._numbered_masters()))
        parts += [(i, f"{i}.raw", m.detach()) for i, m in numbered_masters if i not in copied_numbers]
        return parts + [(i, f"{i}.average", averages[id(m)]) for i, m in numbered_masters]

    def _load_local_tensors(self, path: Path) -> dict[str, Tensor]:
        """Returns this rank's part of the tensors in a file."""
        parameters, tensors = self._numbered_parameters(), {}
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                parameter, part = parameters[int(name.split(".")[0])], file.get_slice(name)
                if part.get_shape() and is_sharded(parameter):
                    rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
                    begin, end = row_range(len(parameter), rank, ranks)
                    tensors[name] = part[begin:end] if end > begin else local_part(parameter).to(torch.float32)
                else:
                    tensors[name] = file.get_tensor(name)
        return tensors

    def _make_master(self, rows: Tensor) -> Parameter:
        """Returns the tensor that AdamW updates: the rows themselves, or a float32 copy of rows of lower precision."""
        if torch.finfo(rows.dtype).bits >= 32:
            return rows if isinstance(rows, Parameter) else Parameter(rows)
        return Parameter(rows.detach().to(torch.float32))

    def _norm(self, loss: Tensor | None) -> Tensor:
        """Returns the norm of the whole gradient on every rank, NaN if one of them has a `loss` that is not finite."""
        zero_or_nan = 0.0 if loss is None else loss - loss  # or NaN
        if self._group is None:
            return torch.nn.utils.get_total_norm([m.grad for m in self._masters if m.grad is not None]) + zero_or_nan
        sharded_gradients, whole_gradients = [], []
        for parameter, master in zip(self.parameters, self._masters, strict=True):
            if is_sharded(parameter):
                sharded_gradients += [] if master.grad is None else [master.grad]
                continue
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            dist.all_reduce(master.grad, group=self._group)
            whole_gradients.append(master.grad)
        device = self._masters[0].device
        square = torch.nn.utils.get_total_norm(sharded_gradients).to(device, torch.float64).square() + zero_or_nan
        squares = [torch.empty_like(square) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(squares, square, group=self._group)
        whole_square = torch.nn.utils.get_total_norm(whole_gradients).to(device, torch.float64).square()
        return (torch.stack(squares).sum() + whole_square).sqrt().to(torch.float32)

    def _update(self, step: int, norm: Tensor, norm_value: float) -> None:
        clip_norm = self.settings.clip_norm
        if clip_norm is not None and norm_value > clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self._masters, clip_norm, norm)
        self._launch_update(step)
        if self._averages:
            with torch.no_grad():
                torch._foreach_lerp_(self._averages, [m.detach() for m in self._masters], 1 - decay_of_average(step))

    def _launch_update(self, step: int) -> None:
        self._moment_updates += 1
        rate_share = self._rate_share(step)
        for group in self._adamw.param_groups:
            group["lr"] = group["peak"] * rate_share
        if self.settings.moments_on_host:
            self._update_one_by_one()
        else:
            self._adamw.step()
        torch.autograd.graph.increment_version(self._masters)  # torch's fused AdamW does not say that it changes them
        with torch.no_grad():
            for parameter, master in self._rows_with_masters():
                parameter.copy_(master)

    def _update_one_by_one(self) -> None:
        """Make AdamW's step for one parameter after the other: its moments are on its device meanwhile, and no others
        are. Copies and updates are in the order of the device's stream; the host waits for none.
        """
        gradients = [(master, master.grad) for master in self._numbered_masters() if master.grad is not None]
        for master, _ in gradients:
            master.grad = None  # AdamW passes over a parameter without one
        for master, gradient in gradients:
            state, master.grad = self._adamw.state[master], gradient
            hosts = {key: state[key] for key in _MOMENTS if key in state}
            for key, host in hosts.items():
                state[key] = host.to(master.device, non_blocking=True, copy=True)
            self._adamw.step()
            for key in _MOMENTS:
                host = hosts[key] if key in hosts else _to_host(torch.empty_like(state[key], device="cpu"))
                state[key] = host.copy_(state[key], non_blocking=True)
            master.grad = None

    def _rows_with_masters(self) -> list[tuple[Tensor, Parameter]]:
        """Returns (this rank's rows of a parameter, their float32 master) where these are two tensors."""
        pairs = zip(self._local_rows, self._masters, strict=True)
        return [(rows, master) for rows, master in pairs if rows.dtype != master.dtype]

    def _numbered_masters(self) -> list[Parameter]:
        """Returns what AdamW updates, in the order in which its state is numbered."""
        return [master for group in self._adamw.param_groups for master in group["params"]]

    def _numbered_parameters(self) -> list[Parameter]:
        """Returns the parameters in the order in which AdamW's state is numbered."""
        parameter_of = {id(master): parameter for parameter, master in zip(self.parameters, self._masters, strict=True)}
        return [parameter_of[id(master)] for master in self._numbered_masters()]

    def _numbered_float32_copies(self) -> list[tuple[int, Parameter]]:
        master_ids = {id(master) for _, master in self._rows_with_masters()}
        return [(i, master) for i, master in enumerate(self._numbered_masters()) if id(master) in master_ids]

    def _describe_parameters(self) -> dict[str, Json]:
        shapes = [list(parameter.shape) for parameter in self._numbered_parameters()]
        return {"shapes": shapes, "masters": [i for i, _ in self._numbered_float32_copies()]}


def decay_of_average(step: int) -> float:
    """Returns the decay of the average at update number `step`: 0.9, less at first, when weights change fastest."""
    return min(0.9, (1 + step) / (10 + step))


def _to_host(tensor: Tensor) -> Tensor:
    """Returns a tensor in the host's memory, pinned where there is a GPU that copies."""
    host_tensor = tensor.to("cpu")
    return host_tensor.pin_memory() if torch.cuda.is_initialized() else host_tensor
