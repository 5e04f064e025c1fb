"""What the trainer asks of an accelerator: kernels launched, bytes moved, peak memory. Counted, not timed.

    python lab/benchmarks/kernel_counts.py

Tensors are on torch's `meta` device: shapes and types without data. Code that asks for the device takes the branch of
an accelerator, every operation arrives at a `TorchDispatchMode`, and nothing is computed. So this runs on any machine,
gives the same figures on each, and says nothing about seconds.

- *Kernels*: operations that launch something, views and allocations left out. A fused call counts as the kernels it
  consists of (`COMPOSITE`), an operation on lists as the launches that its tensors fill. Norms, which torch takes apart
  on `meta`, stand for the kernels that they are on a GPU: one forward, two backward (`RmsNorm`).
- *Bytes moved*: what each kernel reads and writes, once; of a gather or scatter only the rows it touches.
- *Peak*: the most memory that is alive at once beyond the model's parameters, gradients included.

First a step of the trainer, as one GPU makes it: forward, loss, backward and optimizer, of 60 answers of 200 tokens to
3 prompts of 100, Qwen2.5-0.5B's shape in bfloat16, trained in float32; with checkpointing and without, and what of it
is the head's. Then the cases: one checkpointed pass, forward and backward, of 60 GSM8K-length answers (3 groups of 20
answers of 20 to 400 tokens to prompts of 100) through a model like Qwen2.5-0.5B in bfloat16; the head of a 7B model
alone, forward and backward, on 8,192 tokens; one layer's attention of a 7B model, forward and backward, for one answer
of 8,192 and of 32,768 tokens to a prompt of 100; a token step of an engine, whose kernels are two launches where it is
captured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grad
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tba.batch import Batch
from tba.engines.decoding import DecodingRows
from tba.engines.rules import Rules
from tba.engines.slots import PackedPrompts, SlotCache, slot_attention
from tba.engines.step import Step
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy import norms
from tba.policy.causal import CausalPolicy, chunk_of
from tba.policy.head import Head, ProbabilityBuffer, token_log_probabilities
from tba.policy.packed import ATTENTION, Pack, PackedLayout, packed_attention, packed_hidden
from tba.protocols import PolicyOutput
from tba.schedules import Constant
from tba.training.optimizer import OptimizerSettings
from tba.types import Sampling

META = torch.device("meta")
KEPT_BYTES = 6 * 10**9  # which a card has for the probabilities that the head keeps
COMPOSITE = {
    "_flash_attention_forward": 2,  # with zeroing
    "_flash_attention_backward": 6,  # and with sums over grouped heads
    "slice_backward": 2,
}
_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "detach"}
_NOTHING |= {"_unsafe_view", "device", "_record_function_enter_new", "_record_function_exit"}
_TENSORS = (110, 64, 48, 36, 30)  # that one launch of an operation on lists takes, by its number of lists (torch 2.11's
_CHUNK, _CHUNKS = 65_536, 320  # MultiTensorApply.cuh), and pieces of so many elements, of so many elements each
_GATHERS = {"index_select", "gather", "index", "embedding"}  # read as many elements as they return
_SCATTERS = {"index_copy_", "index_add_", "scatter_", "index_put_"}  # write as many as they are given


@dataclass
class Count(TorchDispatchMode):
    """While it is entered, what every operation asks of the device."""

    kernels: int = 0
    moved: int = 0  # bytes
    peak: int = 0  # bytes
    waits: int = 0  # operations that make the host wait for the device
    by_name: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._live = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = tree_leaves((args, kwargs))
        before = {id(x.untyped_storage()) for x in inputs if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if all(x.device.type == "cpu" for x in (*outputs, *(x for x in inputs if isinstance(x, Tensor)))):
            return result  # the host's own work
        for tensor in outputs:
            self._hold(tensor, before)
        if name == "_flash_attention_backward":
            self.peak = max(self.peak, self._live + _workspace(*inputs[1:3]))
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"):
            self.waits += 1
        writes = func._schema.is_mutable
        if name not in _NOTHING and (writes or not func.is_view):
            lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
            launched = (
                _of_lists(name, lists) if name.startswith(("_foreach", "_fused_adamw")) else COMPOSITE.get(name, 1)
            )
            self.kernels += launched
            self.by_name[name] = self.by_name.get(name, 0) + launched
            self.moved += _moved(name, [x for x in inputs if isinstance(x, Tensor)], outputs, writes)
        return result

    def _hold(self, tensor: Tensor, before: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known or key in before:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._let_go(key, size))
        self._live += size
        self.peak = max(self.peak, self._live)

    def _let_go(self, key: int, size: int) -> None:
        del self._known[key]
        self._live -= size


def _of_lists(name: str, lists: Sequence[Sequence[Tensor]]) -> int:
    """Launches of an operation on lists of tensors: each takes as many tensors and chunks as its arguments hold."""
    depth = 4 if name == "_fused_adamw_" else len(lists)
    launches = tensors = blocks = 0
    for tensor in lists[0]:
        chunks = -(-tensor.numel() // _CHUNK)
        tensors += chunks > 0
        for chunk in range(1, chunks + 1):
            blocks += 1
            if blocks == _CHUNKS or (chunk == chunks and tensors == _TENSORS[depth - 1]):
                launches, blocks, tensors = launches + 1, 0, int(chunk < chunks)
    return launches + (blocks > 0) + (name == "_foreach_norm")  # which adds up the chunks' norms


def _workspace(query_NHD: Tensor, key_KJD: Tensor) -> int:
    """Of the kernel itself: the query's gradient in float32, those of keys and values for each query head."""
    of_keys = key_KJD.shape[0] * query_NHD.shape[1] * query_NHD.shape[2] * query_NHD.element_size()
    return 4 * query_NHD.numel() + (2 * of_keys if key_KJD.shape[1] < query_NHD.shape[1] else 0)


def _bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _moved(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], writes: bool) -> int:
    if name in _GATHERS:
        return 2 * sum(map(_bytes, outputs)) + sum(_bytes(x) for x in inputs if not x.is_floating_point())
    if name in _SCATTERS:
        return sum(map(_bytes, inputs[1:])) + _bytes(inputs[-1])
    return sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))


class RmsNorm(torch.autograd.Function):
    """Does as many operations as torch's `rms_norm` launches kernels on a GPU, and keeps what that keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))  # the root of the mean square
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, *_ = ctx.saved_tensors
        of_weight = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad * x, of_weight


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Inside, norms are as on a GPU, and lists of stand-ins for tensors are taken together as those of tensors are."""
    with ExitStack() as replaced:
        replaced.enter_context(patch.object(norms, "rms_norm", lambda x, weight, eps: RmsNorm.apply(x, weight)))
        for module in (_foreach_utils, clip_grad):
            replaced.enter_context(patch.object(module, "_has_foreach_support", lambda tensors, device: True))
        yield


def counted(call: Callable[[], object]) -> Count:
    with on_a_gpu(), Count() as count:
        call()
    return count


def gsm8k_like(groups: int = 3, size: int = 20, prompt: int = 100) -> tuple[list[int], list[list[int]]]:
    """Lengths of prompts and of the answers to each: 60 answers, 12,600 tokens of them on average."""
    rng = np.random.default_rng(0)
    return [prompt] * groups, [rng.integers(20, 400, size, endpoint=True).tolist() for _ in range(groups)]


def qwen(width: int = 896, layers: int = 24, ff: int = 4864, vocabulary: int = 151_936) -> PreTrainedModel:
    """Qwen2.5-0.5B's shape, with 14 heads on 2 of keys and values, on the meta device."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )
    with torch.device(META):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    model.set_attn_implementation(ATTENTION)
    norms.fuse_norms(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def pack_of(prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> Pack:
    """A pack on the meta device of groups with these lengths."""
    layout = PackedLayout.of(prompts, completions, META)
    answers = sum(map(sum, completions))
    predictor, target, place = (torch.empty(answers, dtype=torch.int64, device=META) for _ in range(3))
    return Pack(torch.empty_like(layout.position_N), layout, predictor, target, place)


def checkpointed_pass(model: PreTrainedModel, pack: Pack) -> None:
    """Forward and backward as `CausalPolicy` does them, the layers checkpointed."""
    for layer in model.model.layers:
        layer.training = True
    hidden_MW = packed_hidden(model.get_decoder(), pack).index_select(0, pack.predictor_M)
    _head(hidden_MW, model.get_output_embeddings().weight, pack.target_M)


def _head(hidden_MW: Tensor, weight_VW: Tensor, target_M: Tensor) -> None:
    """Forward, and backward as far as it goes."""
    chunk, probabilities = chunk_of(len(weight_VW), META), ProbabilityBuffer(KEPT_BYTES)
    token_log_probabilities(hidden_MW, Head(weight_VW), target_M, 1.0, chunk, probabilities).sum().backward()


def policy_on_meta(checkpointed: bool, compute: torch.dtype | None = torch.bfloat16, **shape: int) -> CausalPolicy:
    """The trainer's policy, which shares prompts and has found its head linear, as it does with memory."""
    model = qwen(**shape).float()
    model.gradient_checkpointing_disable()
    policy = CausalPolicy(model, kept_bytes=KEPT_BYTES, gradient_checkpointing=checkpointed, compute=compute)
    policy._has_linear_head, policy._softcap = True, None
    model.set_attn_implementation(ATTENTION)
    return policy


def batch_of(groups: int = 3, size: int = 20, prompt: int = 100, length: int = 200) -> Batch:
    """On the host, where a trainer has it."""
    rows = groups * size
    token_BT = torch.arange(rows * length).view(rows, length) % 1000
    return Batch(
        prompt_GP=torch.arange(groups * prompt).view(groups, prompt) % 1000,
        prompt_length_G=torch.full((groups,), prompt),
        completion_BT=token_BT,
        length_B=torch.full((rows,), length),
        mask_BT=torch.ones(rows, length, dtype=torch.bool),
        log_reference_BT=torch.zeros(rows, length),
        reward_B=torch.zeros(rows),
        group_B=torch.arange(rows) // size,
    )


def step(policy: CausalPolicy, batch: Batch) -> dict[str, Count]:
    """A step's counts by part. The head's are those of the same part of the step without its layers."""
    objective, outputs, losses = TrajectoryBalance(Constant(0.05)), list[PolicyOutput](), list[Tensor]()
    meta_batch = batch.to(META)
    counts = {"forward": counted(lambda: outputs.append(policy.evaluate(batch)))}
    counts["loss"] = counted(lambda: losses.append(objective(outputs[0], meta_batch, 1)[0]))
    counts["backward"] = counted(losses[0].backward)
    counts["optimizer"] = update([tuple(p.shape) for p in policy.parameters()])
    for weight in policy.parameters():
        torch.autograd.graph.increment_version(weight)
    counts["rounding"] = counted(policy._low_precision.refresh) if policy._low_precision is not None else Count()
    weight, tokens = policy.model.get_output_embeddings().weight, int(batch.mask_BT.sum())
    hidden = torch.empty(tokens, weight.shape[1], dtype=weight.dtype, device=META, requires_grad=True)
    target = torch.empty(tokens, dtype=torch.int64, device=META)
    counts["(of these the head)"] = counted(lambda: _head(hidden, weight.detach().requires_grad_(), target))
    return counts


def update(shapes: Sequence[tuple[int, ...]]) -> Count:
    """An update with a gradient that is clipped, the second one, on stand-ins for tensors of a GPU."""
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        optimizer = OptimizerSettings().start(parameters)
        for number in (1, 2):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            count = counted(partial(optimizer.step, number, read_norm=lambda norm: 2.0))
    return count


def head_alone(
    dtype: torch.dtype = torch.bfloat16, tokens: int = 8192, vocabulary: int = 152_064, width: int = 3584
) -> Callable[[], None]:
    """A head, by default that of a 7B model."""
    weight = torch.empty(vocabulary, width, dtype=dtype, device=META, requires_grad=True)
    hidden = torch.empty(tokens, width, dtype=dtype, device=META, requires_grad=True)
    target = torch.empty(tokens, dtype=torch.int64, device=META)
    return lambda: _head(hidden, weight, target)


def attention_alone(
    tokens: int, prompt: int = 100, window: int | None = None, softcap: float | None = None
) -> Callable[[], None]:
    """One layer's attention of a 7B model, 28 heads of 128 on 4 of keys and values, for an answer of `tokens`."""
    layout = PackedLayout.of([prompt], [[tokens]], META)
    query, key, value = (
        torch.empty(1, heads, prompt + tokens, 128, dtype=torch.bfloat16, device=META, requires_grad=True)
        for heads in (28, 4, 4)
    )
    layer = torch.nn.Module()  # it is asked for its configuration, and has none

    def run() -> None:
        out, _ = packed_attention(layer, query, key, value, None, layout, sliding_window=window, softcap=softcap)
        out.sum().backward()

    return run


def print_step() -> None:
    parts = {name: step(policy_on_meta(on), batch_of()) for name, on in (("checkpointed", True), ("not", False))}
    print("| a step's kernels | " + " | ".join(parts) + " |\n|---|---|---|")
    for part in next(iter(parts.values())):
        print(f"| {part} | " + " | ".join(f"{counts[part].kernels:,}" for counts in parts.values()) + " |")
    sums = [sum(count.kernels for name, count in counts.items() if name[0] != "(") for counts in parts.values()]
    print("| all | " + " | ".join(f"{kernels:,}" for kernels in sums) + " |\n")


def token_step(flash: bool, rows: int = 72, length: int = 360) -> tuple[Callable[[], object], Callable[[], object]]:
    """The model and the draw of one decode step of Qwen2.5-0.5B's shape, `length` positions in each slot: what is
    captured as two CUDA graphs, or else launched kernel by kernel.
    """
    model = qwen()
    norms.fuse_norms(model)
    with torch.no_grad(), slot_attention(model):
        packed = PackedPrompts([torch.arange(100)], META)
        packed.run(model)
    cache = SlotCache(packed, rows, length, flash)
    of_rows = DecodingRows(rows, 256, Rules(torch.empty(model.config.vocab_size, dtype=torch.bool, device=META)))
    step = Step(model, of_rows, None)

    def forward() -> Tensor:
        with torch.no_grad(), slot_attention(model):
            return step._logits(cache, rows, length)

    logits_RV = forward()
    return forward, lambda: of_rows.extend(logits_RV, Sampling(0.7))


def prefill(lengths: Sequence[int]) -> Callable[[], object]:
    """The reading of prompts of these lengths by Qwen2.5-0.5B's shape."""
    model = qwen()
    norms.fuse_norms(model)

    def read() -> None:
        with torch.no_grad(), slot_attention(model):
            PackedPrompts([torch.arange(length) for length in lengths], META).run(model)

    return read


def main() -> None:
    print_step()
    model, pack = qwen(), pack_of(*gsm8k_like())
    cases = {
        f"a pass, 60 answers, {len(pack.token_N):,} tokens, 0.5B": lambda: checkpointed_pass(model, pack),
        "head, 12,000 tokens, 0.5B": head_alone(tokens=12_000, vocabulary=151_936, width=896),
        "head, 8,192 tokens, 7B": head_alone(),
        "attention of a layer, 8,192 tokens, 7B": attention_alone(8192),
        "attention of a layer, 32,768 tokens, 7B": attention_alone(32_768),
        "reading 16 prompts of 60 to 135 tokens, 0.5B": prefill(range(60, 140, 5)),
        "the model of a token step, 72 rows, 0.5B": token_step(flash=True)[0],
        "the same without the flash kernel": token_step(flash=False)[0],
        "the draw of a token step, 72 rows, 0.5B": token_step(flash=True)[1],
    }
    print("| case | kernels | GB moved | GB at peak | waits |\n|---|---|---|---|---|")
    for name, call in cases.items():
        count = counted(call)
        print(f"| {name} | {count.kernels:,} | {count.moved / 1e9:,.1f} | {count.peak / 1e9:,.2f} | {count.waits} |")


if __name__ == "__main__":
    main()
