"""One decode step: the newest token of each row goes in, and the next one is drawn.

On a GPU launching a step's kernels one by one takes several times as long as running them. There a step is captured as
two CUDA graphs, of the model and of the draw, each of which is one launch. A graph computes over the buffers and with
the shapes that it was captured with: there is one for each of a few numbers of rows (and of widths, where attention has
one), and rows up to that number are computed with the others. They write into slots that are nobody's.

Invariant: a step that is replayed gives what it gives otherwise. The logits are compared when a graph is made and after
weights were replaced, on the rows and the weights that there are; on a difference, and where a step cannot be captured,
its kernels are launched one by one from there on, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tba.engines.decoding import Rows
from tba.engines.slots import SlotCache, attention_aside
from tba.types import Sampling

log = logging.getLogger(__name__)

_ROWS = (8, 16, 32, 48, 96, 192, 384)  # of captured steps, and all slots
_T = TypeVar("_T")


def sizes_of(slots: int) -> tuple[int, ...]:
    """Returns the numbers of rows that captured steps are made for."""
    return (*(size for size in _ROWS if size < slots), slots)


class Graph(Protocol):
    """Computes again what was captured, over the same buffers."""

    def replay(self) -> None: ...


class Capture(Protocol):
    """Captures a computation: `CudaGraphs`, or on a CPU what stands for it in tests."""

    def __call__(self, run: Callable[[], _T], warm_up: bool) -> tuple[Graph, _T]:
        """Returns the graph of `run`, and the tensors it will write to. `warm_up`: it may be run before."""
        ...

    def forget(self) -> None:
        """Let go of the memory: no graph is left, or will be when this returns."""
        ...


class CudaGraphs:
    """Captures on a stream of its own, in one memory pool. Other threads may use the device meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], _T], warm_up: bool) -> tuple[Graph, _T]:
        """Captures `run`, having run it once on the same stream, so that libraries have what they allocate at first."""
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):  # which `torch.cuda.graph` does not leave when a capture fails
            if warm_up:
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                out = run()
        before.wait_stream(self._stream)
        return graph, out

    def forget(self) -> None:
        """Wait for graphs that are being replayed, and begin another pool: the old one's name cannot be used again."""
        torch.cuda.synchronize(self._stream.device)
        self._pool = torch.cuda.graph_pool_handle()


@dataclass
class _Captured:
    """A step for a number of rows: the model's graph, the logits [R, V] it writes, and graphs that draw from these."""

    graph: Graph
    logits_RV: Tensor
    draws: dict[float | None, Graph] = field(default_factory=dict)  # by temperature; None: any other than 0 and 1


class Step:
    """Appends a token to rows: captured, if there is a `capture` and for as long as that gives the same; with
    `compiled` what is captured are the kernels of `torch.compile`.
    """

    def __init__(self, model: PreTrainedModel, rows: Rows, capture: Capture | None, compiled: bool = False) -> None:
        self._model, self._rows, self._capture = model, rows, capture
        self._compiled: dict[GradientCheckpointingLayer, Callable[..., Any]] = {}
        if compiled:
            attention_aside()
            layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
            self._compiled = {layer: torch.compile(layer.forward, dynamic=True) for layer in layers}
        self._nothing_padded_R1 = torch.ones_like(rows.newest_R1)  # so that no mask is built
        self._sizes = sizes_of(len(rows.newest_R1))
        self._captured: dict[tuple[int, int], _Captured] = {}  # by rows and width
        self._compared = True
        self._temperature = torch.ones((), device=rows.eos_V.device)
        self._tempered = 1.0  # what it holds

    @property
    def captured(self) -> bool:
        """Returns whether steps are captured."""
        return self._capture is not None

    def forget(self) -> None:
        """Drop the graphs: the buffers they write to are replaced."""
        if self._capture is not None:
            self._capture.forget()
            self._captured.clear()

    def loaded(self) -> None:
        """Compare again: the weights were replaced."""
        self._compared = False

    def __call__(self, cache: SlotCache, n: int, width: int, sampling: Sampling) -> None:
        """Append a token to each of the first `n` rows, whose sequences have at most `width` tokens until then."""
        captured = self._replayed(cache, n, width)
        if captured is None:
            self._rows.extend(self._logits(cache, n, width), sampling)
        else:
            self._draw(captured, n, sampling)

    def _logits(self, cache: SlotCache, n: int, width: int) -> Tensor:
        """Returns the model's logits [n, V] after the newest token of each row."""
        position_R = self._rows.position_R[:n]
        output = self._model(
            input_ids=self._rows.newest_R1[:n],
            position_ids=position_R[:, None],
            attention_mask=self._nothing_padded_R1[:n],
            use_cache=False,
            tba_slots=cache.at(position_R, width),
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _replayed(self, cache: SlotCache, n: int, width: int) -> _Captured | None:
        """Returns what has computed the logits of at least `n` rows; None where that is left to the caller."""
        if self._capture is None:
            return None
        self._rows.use(n)
        key = next(size for size in self._sizes if size >= n), cache.fixed(width)
        known = self._captured.get(key)
        if known is not None and self._compared:
            known.graph.replay()
            return known
        run, fault = partial(self._logits, cache, *key), None
        with _Waits() if known is None else nullcontext() as waits:
            eager_RV = run()  # stores the same keys and values
        if waits is not None and waits.name is not None:
            fault = f"its {waits.name} makes the host wait for the device"
        if fault is None:
            try:
                with self._layers_compiled():
                    captured = known or _Captured(*self._capture(run, warm_up=True))
                captured.graph.replay()
                fault = unlike(eager_RV, captured.logits_RV)
            except RuntimeError as error:
                fault = str(error)
        if fault is not None:
            self._give_up(fault)
            return None
        self._captured[key], self._compared = captured, True
        return captured

    @contextmanager
    def _layers_compiled(self) -> Iterator[None]:
        """Within the block layers are computed as they were compiled: all but attention, for any number of rows."""
        for layer, forward in self._compiled.items():
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._compiled:
                del layer.forward

    def _draw(self, captured: _Captured, n: int, sampling: Sampling) -> None:
        """Append a token to the rows, drawn from captured logits."""
        temperature = sampling.temperature
        # top-p looks at how many candidates it needs; a penalty looks at what has been read
        if self._capture is None or sampling.cuts or sampling.repetition_penalty != 1:
            self._rows.extend(captured.logits_RV[:n], sampling)
            return
        if temperature not in (0, 1, self._tempered):
            self._temperature.fill_(temperature)
            self._tempered = temperature
        key = temperature if temperature in (0, 1) else None
        if key in captured.draws:
            captured.draws[key].replay()
            return
        run = partial(self._extend, captured.logits_RV, key)
        run()
        try:
            captured.draws[key], _ = self._capture(run, warm_up=False)
        except RuntimeError as fault:
            self._give_up(str(fault))

    def _extend(self, logits_RV: Tensor, temperature: float | None) -> None:
        if temperature is None:
            logits_RV, temperature = logits_RV.float() / self._temperature, 1.0
        self._rows.extend(logits_RV, Sampling(temperature))

    def _give_up(self, why: str) -> None:
        """Launch kernels one by one from here on."""
        self.forget()
        self._capture = None
        self._rows.use(len(self._rows.newest_R1))
        log.warning("decode steps of %s are not captured as CUDA graphs: %s", type(self._model).__name__, why)


def unlike(one_RV: Tensor, other_RV: Tensor) -> str | None:
    """Returns in words how far the probabilities of some row are apart, both given as logits [R, V]; None if that is
    rounding. Rows without finite probabilities in both are left to who reads the tokens.
    """
    tolerance = 1e-4 if one_RV.dtype in (torch.float32, torch.float64) else 0.1
    one_RV, other_RV = (x.float().softmax(-1) for x in (one_RV, other_RV))
    neither_R = one_RV.isnan().any(-1) & other_RV.isnan().any(-1)
    distance_R = one_RV.sub_(other_RV).abs_().sum(-1) / 2  # in place: they are large
    distance = float(distance_R.masked_fill(neither_R, 0.0).max())
    return None if distance <= tolerance else f"total variation {distance:.2g} of its probabilities"


class _Waits(TorchDispatchMode):
    """While it is entered: the first operation that makes the host wait for the device, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # an operation that is made of others is seen whole in inference mode
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if self.name is None and _waits(func, args, out):
            self.name = func._schema.name.split("::")[1]
        return out


def _waits(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Returns whether an operation's result has a size, or a value on the host, that depends on data of the device."""
    name = func._schema.name.split("::")[1]
    if name in ("index", "index_put", "index_put_"):  # by a mask or by places
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]))
    if name in ("_to_copy", "copy_"):
        return len({x.device.type for x in (args[0], args[-1], out) if isinstance(x, Tensor)}) > 1
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
