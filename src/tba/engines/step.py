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

from tba.engines.decoding import DecodingRows
from tba.engines.slots import SlotCache, exclude_attention_from_compile
from tba.types import Sampling

log = logging.getLogger(__name__)

_ROWS = (8, 16, 32, 48, 96, 192, 384)  # of captured steps, and all slots
_T = TypeVar("_T")


def captured_sizes(slots: int) -> tuple[int, ...]:
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
        """Release the memory of all graphs, none of which is replayed any more."""
        ...


class CudaGraphs:
    """Captures on a stream of its own, in one memory pool. Other threads may use the device meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], _T], warm_up: bool) -> tuple[Graph, _T]:
        """Captures `run`, having run it once on the same stream, so that libraries have what they allocate at first."""
        calling_stream = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(calling_stream)
        with torch.cuda.stream(self._stream):  # which `torch.cuda.graph` does not leave when a capture fails
            if warm_up:
                run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                out = run()
        calling_stream.wait_stream(self._stream)
        return graph, out

    def forget(self) -> None:
        """Wait for graphs that are being replayed, and begin another pool: an old pool's name cannot be used again."""
        torch.cuda.synchronize(self._stream.device)
        self._pool = torch.cuda.graph_pool_handle()


@dataclass
class _CapturedStep:
    """A step for a number of rows: the model's graph, the logits [R, V] it writes, and graphs that draw from these."""

    graph: Graph
    logits_RV: Tensor
    draws: dict[float | None, Graph] = field(default_factory=dict)  # by temperature; None: any other than 0 and 1


class Step:
    """Appends a token to rows: captured, if there is a `capture` and for as long as that gives the same; with
    `compiled` what is captured are the kernels of `torch.compile`.
    """

    def __init__(
        self, model: PreTrainedModel, rows: DecodingRows, capture: Capture | None, compiled: bool = False
    ) -> None:
        self._model, self._rows, self._capture = model, rows, capture
        self._compiled_forwards: dict[GradientCheckpointingLayer, Callable[..., Any]] = {}
        if compiled:
            exclude_attention_from_compile()
            layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
            self._compiled_forwards = {layer: torch.compile(layer.forward, dynamic=True) for layer in layers}
        self._attention_mask_R1 = torch.ones_like(rows.newest_R1)  # so that no mask is built
        self._sizes = captured_sizes(len(rows.newest_R1))
        self._captured_steps: dict[tuple[int, int], _CapturedStep] = {}  # by rows and width
        self.fault = ""  # why steps are no longer captured
        self._is_compared = True
        self._temperature = torch.ones((), dtype=torch.float32, device=rows.eos_V.device)
        self._graph_temperature = 1.0  # what `_temperature` holds

    @property
    def is_capturing(self) -> bool:
        """Returns whether steps are captured."""
        return self._capture is not None

    def drop_graphs(self) -> None:
        """Drop the graphs, because the buffers that they write to are replaced."""
        if self._capture is not None:
            self._capture.forget()
            self._captured_steps.clear()

    def require_comparison(self) -> None:
        """Have the next step compared again, because the weights were replaced."""
        self._is_compared = False

    def __call__(self, cache: SlotCache, n: int, width: int, sampling: Sampling) -> None:
        """Append a token to each of the first `n` rows, whose sequences have at most `width` tokens until then."""
        captured = self._replay(cache, n, width)
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
            attention_mask=self._attention_mask_R1[:n],
            use_cache=False,
            tba_slots=cache.at_positions(position_R, width),
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _replay(self, cache: SlotCache, n: int, width: int) -> _CapturedStep | None:
        """Returns the captured step that has computed the logits of at least `n` rows; None where the caller has to."""
        if self._capture is None:
            return None
        self._rows.set_active(n)
        key = next(size for size in self._sizes if size >= n), cache.round_width(width)
        cached_step = self._captured_steps.get(key)
        if cached_step is not None and self._is_compared:
            cached_step.graph.replay()
            return cached_step
        run, fault = partial(self._logits, cache, *key), None
        with _HostWaitDetector() if cached_step is None else nullcontext() as detector:
            eager_RV = run()  # stores the same keys and values
        if detector is not None and detector.operation is not None:
            fault = f"its {detector.operation} makes the host wait for the device"
        if fault is None:
            try:
                with self._layers_compiled():
                    captured = cached_step or _CapturedStep(*self._capture(run, warm_up=True))
                captured.graph.replay()
                fault = describe_difference(eager_RV, captured.logits_RV)
            except RuntimeError as error:
                fault = str(error)
        if fault is not None:
            self._stop_capturing(fault)
            return None
        self._captured_steps[key], self._is_compared = captured, True
        return captured

    @contextmanager
    def _layers_compiled(self) -> Iterator[None]:
        """Have layers run compiled within the block: all but attention, for any number of rows."""
        for layer, forward in self._compiled_forwards.items():
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._compiled_forwards:
                del layer.forward

    def _draw(self, captured: _CapturedStep, n: int, sampling: Sampling) -> None:
        """Append a token to the rows, drawn from captured logits."""
        temperature = sampling.temperature
        # top-p looks at how many candidates it needs; a penalty looks at what has been read
        if self._capture is None or sampling.cuts or sampling.repetition_penalty != 1:
            self._rows.extend(captured.logits_RV[:n], sampling)
            return
        if temperature not in (0, 1, self._graph_temperature):
            self._temperature.fill_(temperature)
            self._graph_temperature = temperature
        key = temperature if temperature in (0, 1) else None
        if key in captured.draws:
            captured.draws[key].replay()
            return
        run = partial(self._extend, captured.logits_RV, key)
        run()
        try:
            captured.draws[key], _ = self._capture(run, warm_up=False)
        except RuntimeError as fault:
            self._stop_capturing(str(fault))

    def _extend(self, logits_RV: Tensor, temperature: float | None) -> None:
        if temperature is None:
            logits_RV, temperature = logits_RV.float() / self._temperature, 1.0
        self._rows.extend(logits_RV, Sampling(temperature))

    def _stop_capturing(self, reason: str) -> None:
        """Drop all graphs, and launch kernels one by one from here on."""
        self.drop_graphs()
        self._capture = None
        self._rows.set_active(len(self._rows.newest_R1))
        self.fault = f"decode steps of {type(self._model).__name__} are not captured as CUDA graphs: {reason}"
        log.warning("%s", self.fault)


def describe_difference(expected_RV: Tensor, computed_RV: Tensor) -> str | None:
    """Returns in words how far the probabilities of some row are apart, both given as logits [R, V]; None if that is
    rounding. Rows without finite probabilities in both are passed over: whoever reads their tokens refuses them.
    """
    tolerance = 1e-4 if expected_RV.dtype in (torch.float32, torch.float64) else 0.1
    expected_RV, computed_RV = (x.float().softmax(-1) for x in (expected_RV, computed_RV))
    both_nan_R = expected_RV.isnan().any(-1) & computed_RV.isnan().any(-1)
    distance_R = expected_RV.sub_(computed_RV).abs_().sum(-1) / 2  # in place: they are large
    distance = float(distance_R.masked_fill(both_nan_R, 0.0).max())
    return None if distance <= tolerance else f"total variation {distance:.2g} of its probabilities"


class _HostWaitDetector(TorchDispatchMode):
    """Finds the first operation inside its block that makes the host wait for the device, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.operation: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # an operation that is made of others is seen whole in inference mode
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if self.operation is None and _makes_host_wait(func, args, out):
            self.operation = func._schema.name.split("::")[1]
        return out


def _makes_host_wait(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Returns whether an operation's result has a size, or a value on the host, that depends on data of the device."""
    name = func._schema.name.split("::")[1]
    if name in ("index", "index_put", "index_put_"):  # by a mask or by places
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]))
    if name in ("_to_copy", "copy_"):
        return len({x.device.type for x in (args[0], args[-1], out) if isinstance(x, Tensor)}) > 1
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
