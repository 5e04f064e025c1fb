"""What the trainer asks of an accelerator: kernels launched, bytes moved, peak memory. Counted, not timed.

    python benchmarks/kernel_counts.py

Tensors are on torch's `meta` device: shapes and types without data. Code that asks for the device takes the branch of
an accelerator, every operation arrives at a `TorchDispatchMode`, and nothing is computed. So this runs on any machine,
gives the same figures on each, and says nothing about seconds.

- *Kernels*: operations that launch something, views and allocations left out. A fused attention call counts as the
  kernels it consists of (`COMPOSITE`).
- *Bytes moved*: what each kernel reads and writes, once; of a gather or scatter only the rows it touches.
- *Peak*: the most memory that is alive at once beyond the model's parameters, gradients included.

Three cases: one checkpointed pass, forward and backward, of 60 GSM8K-length answers (3 groups of 20 answers of 20 to
400 tokens to prompts of 100) through a model like Qwen2.5-0.5B in bfloat16; the head of a 7B model alone, forward and
backward, on 8,192 tokens; one layer's attention of a 7B model, forward and backward, for one answer of 8,192 and of
32,768 tokens to a prompt of 100.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tba.policy.causal import KEPT_BYTES, chunk_of
from tba.policy.head import Head, KeptProbabilities, token_log_probabilities
from tba.policy.packed import ATTENTION, Pack, PackedLayout, packed_attention, packed_hidden

META = torch.device("meta")
COMPOSITE = {"_flash_attention_forward": 2, "_flash_attention_backward": 6}  # with zeroing, and sums over grouped heads
_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "detach"}
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
        given = tree_leaves((args, kwargs))
        before = {id(x.untyped_storage()) for x in given if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if all(x.device.type == "cpu" for x in (*made, *(x for x in given if isinstance(x, Tensor)))):
            return result  # the host's own work
        for tensor in made:
            self._hold(tensor, before)
        if name == "_flash_attention_backward":
            self.peak = max(self.peak, self._live + _workspace(*given[1:3]))
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"):
            self.waits += 1
        writes = func._schema.is_mutable
        if name not in _NOTHING and (writes or not func.is_view):
            launched = COMPOSITE.get(name, 1)
            self.kernels += launched
            self.by_name[name] = self.by_name.get(name, 0) + launched
            self.moved += _moved(name, [x for x in given if isinstance(x, Tensor)], made, writes)
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


def _workspace(query_NHD: Tensor, key_KJD: Tensor) -> int:
    """Of the kernel itself: the query's gradient in float32, those of keys and values for each query head."""
    of_keys = key_KJD.shape[0] * query_NHD.shape[1] * query_NHD.shape[2] * query_NHD.element_size()
    return 4 * query_NHD.numel() + (2 * of_keys if key_KJD.shape[1] < query_NHD.shape[1] else 0)


def _bytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _moved(name: str, given: Sequence[Tensor], made: Sequence[Tensor], writes: bool) -> int:
    if name in _GATHERS:
        return 2 * sum(map(_bytes, made)) + sum(_bytes(x) for x in given if not x.is_floating_point())
    if name in _SCATTERS:
        return sum(map(_bytes, given[1:])) + _bytes(given[-1])
    return sum(map(_bytes, given)) + sum(map(_bytes, made))


def counted(call: Callable[[], object]) -> Count:
    with Count() as count:
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
    chunk, kept = chunk_of(len(weight_VW), META), KeptProbabilities(KEPT_BYTES)
    token_log_probabilities(hidden_MW, Head(weight_VW), target_M, 1.0, chunk, kept).sum().backward()


def head_alone(dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """The head of a 7B model on 8,192 tokens."""
    weight = torch.empty(152_064, 3584, dtype=dtype, device=META, requires_grad=True)
    hidden = torch.empty(8192, 3584, dtype=dtype, device=META, requires_grad=True)
    target = torch.empty(8192, dtype=torch.int64, device=META)
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


def main() -> None:
    model, pack = qwen(), pack_of(*gsm8k_like())
    cases = {
        f"a pass, 60 answers, {len(pack.token_N):,} tokens, 0.5B": lambda: checkpointed_pass(model, pack),
        "head, 8,192 tokens, 7B": head_alone(),
        "attention of a layer, 8,192 tokens, 7B": attention_alone(8192),
        "attention of a layer, 32,768 tokens, 7B": attention_alone(32_768),
    }
    print("| case | kernels | GB moved | GB at peak | waits |\n|---|---|---|---|---|")
    for name, call in cases.items():
        count = counted(call)
        print(f"| {name} | {count.kernels:,} | {count.moved / 1e9:,.1f} | {count.peak / 1e9:,.2f} | {count.waits} |")


if __name__ == "__main__":
    main()
