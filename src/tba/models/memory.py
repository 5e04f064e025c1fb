"""The memory that the parts of a run need, computed from the shape of the model: a pure function, no guess by running.

    precision = choose_precision("auto", "cuda", adapters=False)
    needed = trainer_bytes(Shape.of(config), TrainerWorkload(tokens=8192, precision=precision))

Each function returns bytes by part, as they are alive at the worst moment; `total` adds them up. What is counted is
what tensors hold, and an episode of several segments counts as one of their length, which holds no less. An allocator
holds more: on a CPU glibc's heap keeps freed blocks below 32 MB (docs/scaling.md says how much), on a GPU torch's keeps
freed blocks for later.

The rule of thumb is 16 bytes a trained parameter (float32 weight, gradient, two moments). The rest is what a pass keeps
for its backward: per token and layer what autograd saves of a decoder layer, or with checkpointing one hidden state of
each layer and all of one; and the head's. The worst moment is one of three: the backward of the head, when all
activations are alive; of the last layer; of the embedding, whose gradient is as large as itself.

Shape legend of the formulas: N tokens of a pass, W width, F feed-forward width, V vocabulary, i bytes of the type that
is computed with.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM

from tba.engines.step import captured_sizes
from tba.engines.transformers import PREFILL_TOKENS
from tba.gpus import free_gpu_bytes
from tba.host_memory import free_host_bytes
from tba.models.precision import Precision
from tba.policy.causal import KEPT_BYTES, chunk_of
from tba.pretrained import most_positions

Bytes: TypeAlias = dict[str, int]  # by part; parts are alive at the same time
SCORED_TOKENS = 8192  # tokens of a pass of the reference (`FrozenReference`)
_MOST_PREFILL_TOKENS = 4 * PREFILL_TOKENS
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # their names in configurations
_BLOCK = 128  # positions in a block of vLLM's keys and values, at most
_GRAPHS = 1 << 30  # bytes allowed for what vLLM records and keeps for itself, which no formula here knows


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only model. Parameters are counted, not derived."""

    width: int
    layers: int
    ff: int  # of a feed-forward layer
    queries: int  # width of all query heads
    keys: int  # width of all key heads, and of all value heads
    heads: int
    head_width: int
    vocabulary: int
    has_gate: bool  # whether the feed-forward layer has a gate
    layer_parameters: int  # parameters of one layer
    other_parameters: int  # and of embeddings, head and final norm; tied ones once
    is_tied: bool
    positions: int  # tokens of the longest prompt and completion
    linear: Mapping[str, tuple[int, int]]  # the linear layers of one layer: (in, out) by name
    has_experts: bool = False  # of which each token computes with a few

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Returns the shape of the causal language model with this Hugging Face configuration; nothing is loaded."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        heads, layers = text.num_attention_heads, text.num_hidden_layers
        head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
        blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers)
        parameters = sum(p.numel() for p in model.parameters())
        layer_parameters = sum(p.numel() for p in blocks[0].parameters())
        linear = {
            name.rpartition(".")[2]: (module.weight.shape[1], module.weight.shape[0])
            for name, module in blocks[0].named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        return cls(
            width=text.hidden_size,
            layers=layers,
            ff=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            queries=heads * head_width,
            keys=(getattr(text, "num_key_value_heads", None) or heads) * head_width,
            heads=heads,
            head_width=head_width,
            vocabulary=len(model.get_input_embeddings().weight),
            has_gate=any("gate" in name for name in linear),
            layer_parameters=layer_parameters,
            other_parameters=parameters - layers * layer_parameters,
            positions=most_positions(text) or sys.maxsize,
            is_tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
            linear=linear,
            has_experts=any((getattr(text, name, None) or 0) > 1 for name in _EXPERT_COUNTS),
        )

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.other_parameters

    @property
    def matrices(self) -> int:
        """Returns the parameters of the layers' linear layers, without biases."""
        return self.layers * sum(n * m for n, m in self.linear.values())

    def operations(self, read_tokens: float, scored_tokens: float) -> float:
        """Returns the floating-point operations of a forward over `read_tokens`, two for each weight of a matrix.

        `scored_tokens` of them go through the head. Attention is left out, which is much for long texts.
        """
        return 2 * (self.layers * self.layer_parameters * read_tokens + self.vocabulary * self.width * scored_tokens)

    def adapters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Returns the parameters of adapters of this rank on each layer's linear layers, or those in `targets`."""
        adapted_sizes = [size for name, size in self.linear.items() if not targets or name in targets]
        return self.layers * sum(rank * (n + m) for n, m in adapted_sizes)


@dataclass(frozen=True)
class TrainerWorkload:
    """Holds what the trainer's memory depends on besides the model's shape."""

    tokens: int  # of one forward and backward pass (--max-tokens-per-pass, or fewer if a batch has fewer)
    precision: Precision
    device: str = "cpu"
    rank: int = 0  # of adapters; 0: all weights are trained
    targets: tuple[str, ...] = ()
    checkpointed: bool = False
    ranks: int = 1  # processes that share parameters, gradients and moments
    moments_on_host: bool = False
    averaged: bool = False  # the optimizer keeps an average of the weights

    @property
    def moves_moments(self) -> bool:
        """Returns whether moments go to the device and back."""
        return self.moments_on_host and self.device != "cpu"


def trainer_bytes(shape: Shape, work: TrainerWorkload) -> Bytes:
    """Returns the bytes of each rank of the trainer at the worst moment of a step of several passes, by part."""
    i, tokens = work.precision.compute.itemsize, work.tokens
    parameters = shape.adapters(work.rank, work.targets) if work.rank else shape.parameters
    frozen_bytes = _base_bytes(shape, work.precision) if work.rank else 0
    parts = {
        "weights": (frozen_bytes + 4 * parameters) // work.ranks,
        "gradients": 4 * parameters // work.ranks,
        "moments": 0 if work.moves_moments else 8 * parameters // work.ranks,
        "probabilities kept": min(tokens, KEPT_BYTES // (shape.vocabulary * i)) * shape.vocabulary * i,
    } | ({"averages": 4 * parameters // work.ranks} if work.averaged else {})
    hidden = tokens * shape.width * i  # the hidden states of one layer
    layer = tokens * _layer_bytes(shape, work)
    activations = shape.layers * (hidden if work.checkpointed else layer)
    activations += 4 * hidden + 2 * tokens * shape.head_width * i  # the final norm, and what turns positions
    gradient = 0 if work.rank else 4 * shape.vocabulary * shape.width  # of the head, or of the embedding
    # what is added to it: in float32 in place; on a GPU in float32, else in the compute type
    added = 0 if i == 4 else gradient if work.device == "cuda" else gradient * i // 4
    forward_logits, backward_logits = _logit_bytes(shape, work, parts["probabilities kept"])
    parts["activations and temporaries"] = max(
        activations + forward_logits,  # the head's forward
        activations + 3 * hidden + gradient + max(backward_logits, added),  # its backward
        # the last layer's: what it computes again, and gradients of two of its widest
        activations + layer * work.checkpointed + 2 * tokens * (shape.ff + shape.width) * i + gradient * shape.is_tied,
        gradient * (1 + shape.is_tied),  # the embedding's
        2 * gradient // work.ranks * work.moves_moments,  # the moments of one tensor, in the update
    )
    return parts | (_matrix_bytes(shape, work.precision) if work.precision.four_bit else _copy_bytes(shape, work))


@dataclass(frozen=True)
class SearcherWorkload:
    """Holds what a searcher's memory depends on besides the model's shape."""

    precision: Precision
    slots: int  # completions that grow at the same time
    positions: int  # tokens of the longest prompt and completion
    prompt: int = 0  # and of the longest prompt
    scored_tokens: int = SCORED_TOKENS  # of a pass of the reference
    device: str = "cpu"
    rank: int = 0  # of adapters: the reference shares the engine's base
    targets: tuple[str, ...] = ()
    parks: bool = False  # completions wait for replies, and others take their place
    parked_bytes: int | None = None  # of the keys and values of those that wait; None: as many as of the slots


def engine_bytes(shape: Shape, work: SearcherWorkload, prefill_tokens: int = PREFILL_TOKENS) -> Bytes:
    """Returns the bytes of the transformers engine, by part. prefill_tokens: of prompts that are read together."""
    i, is_cuda = work.precision.compute.itemsize, work.device == "cuda"
    longest_read = work.positions if work.parks else work.prompt  # what was dropped is read again
    tokens = max(prefill_tokens, longest_read)  # read together; their keys and values stay until all are copied to rows
    prompts = tokens * shape.layers * 2 * shape.keys * i
    # its last layer, or, when all keys are put together, a second copy of them
    prefill = prompts + tokens * max(3 * shape.ff + 4 * shape.width, shape.layers * shape.keys) * i
    # logits as they come, then in float32 tempered, as probabilities and summed up
    step = prompts + work.slots * shape.vocabulary * (i + 3 * 4)
    adapters = shape.adapters(work.rank, work.targets) if work.rank else 0
    slots = work.slots * -(-work.positions // 16) * 16 * shape.layers * 2 * shape.keys * i
    return {
        "weights": _base_bytes(shape, work.precision) + i * adapters,
        "keys and values": slots,
        "parked keys and values": work.parks * (slots if work.parked_bytes is None else work.parked_bytes),
        "a step": max(prefill, step),
        # logits of each graph, and of the largest what its draw needs, none of which is shared with other work
        "captured steps": shape.vocabulary * (sum(captured_sizes(work.slots)) * i + work.slots * 3 * 4) * is_cuda,
    } | _matrix_bytes(shape, work.precision)


def prefill_tokens_within(shape: Shape, work: SearcherWorkload, room: int) -> int:
    """Returns how many tokens of prompts the transformers engine reads together, where it and the reference have `room`
    bytes: 2,048, or a multiple up to `_MOST_PREFILL_TOKENS`.
    """
    reference = total(reference_bytes(shape, work))
    tokens = _MOST_PREFILL_TOKENS
    while tokens > PREFILL_TOKENS and total(engine_bytes(shape, work, tokens)) + reference > room:
        tokens //= 2
    return tokens


def vllm_bytes(shape: Shape, work: SearcherWorkload, gpus: int = 1, room: int | None = None) -> Bytes:
    """Returns the bytes of the vllm engine on each of its `gpus`, by part. Its cache is what the slots need, or what is
    left of `room`, the searcher's part of a GPU, beside all else and the reference; at least what the longest answer
    needs.
    """
    i, transformers = work.precision.compute.itemsize, engine_bytes(shape, work)
    merged_base = transformers["weights"] if work.rank else 0  # adapters are merged into a base
    parts = {
        "weights": shape.parameters * i // gpus + merged_base,
        "a step": transformers["a step"],
        "graphs and buffers": _GRAPHS if work.device == "cuda" else 0,
    }
    block = _BLOCK * shape.layers * 2 * max(shape.keys // gpus, shape.head_width) * i
    row_blocks = -(-work.positions // _BLOCK)  # of the longest prompt and completion
    cache = (work.slots * row_blocks + 2) * block  # one is never used, one to spare
    if room is not None:
        cache = min(cache, max(room - total(parts) - total(reference_bytes(shape, work)), (row_blocks + 2) * block))
    return parts | {"keys and values": cache}


def disk_bytes(shape: Shape, work: TrainerWorkload) -> tuple[Bytes, Bytes]:
    """Returns the bytes on the disk of a checkpoint and of one version of the published weights, by part."""
    i = work.precision.compute.itemsize
    # the optimizer's file: moments, and with averages these and the weights
    moments, weights = 16 if work.averaged else 8, shape.parameters
    if not work.rank:
        return {"weights": 4 * weights, "moments": moments * weights}, {"weights": i * weights}
    adapters = shape.adapters(work.rank, work.targets)
    checkpoint = {"weights": i * weights, "adapters": 4 * adapters, "moments": moments * adapters}
    return checkpoint, {"adapters": i * adapters}


def reference_bytes(shape: Shape, work: SearcherWorkload) -> Bytes:
    """Returns the bytes of the reference that scores what the engine samples, by part."""
    i = work.precision.compute.itemsize
    scoring_pass = TrainerWorkload(work.scored_tokens, work.precision, work.device)
    forward_logits, _ = _logit_bytes(shape, scoring_pass, kept_bytes=0)
    return {
        "weights": i * (shape.adapters(work.rank, work.targets) if work.rank else shape.parameters),
        "a pass": work.scored_tokens * (3 * shape.ff + 4 * shape.width) * i + forward_logits,
    }


def scoring_model_bytes(config: Any, model_class: Any, tokens: int, itemsize: int = 4) -> int:
    """Returns the bytes of a model that only computes, in passes of so many tokens, such as a reward model: its weights
    and what one layer holds. model_class: the class of transformers that it is loaded as.
    """
    with torch.device("meta"):
        model = model_class.from_config(config)
    text = config.get_text_config()
    ff = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return itemsize * (sum(p.numel() for p in model.parameters()) + tokens * (3 * ff + 4 * text.hidden_size))


def _base_bytes(shape: Shape, precision: Precision) -> int:
    """Returns the bytes of the weights that are not trained: of engine, reference and adapters' base."""
    in_4_bits = shape.matrices if precision.four_bit else 0  # half a byte each, and a float32 for 64 of them
    return precision.compute.itemsize * (shape.parameters - in_4_bits) + in_4_bits * 9 // 16


def _matrix_bytes(shape: Shape, precision: Precision) -> Bytes:
    """Returns the bytes of the largest matrix in 4 bits as it is computed with."""
    largest = max((n * m for n, m in shape.linear.values()), default=0)
    return {"a matrix made whole": largest * precision.compute.itemsize} if precision.four_bit else {}


def _layer_bytes(shape: Shape, work: TrainerWorkload) -> int:
    """Returns the bytes that autograd keeps for each token of one layer."""
    i, norm = work.precision.compute.itemsize, 0 if work.rank else work.precision.compute.itemsize
    adapted_layers = sum(1 for name in shape.linear if not work.targets or name in work.targets) if work.rank else 0
    feed_forward = (4 if shape.has_gate else 2) * shape.ff * i  # gate, what it gates, its activation, their product
    # input in float32, normalised, scaled; the root. One kernel of a GPU keeps the input as it is
    norms = 2 * (shape.width * (4 + norm + i if work.device == "cpu" else 2 * i) + 4)
    attention = 2 * (shape.queries + shape.keys) * i + 4 * shape.heads  # query, output, key, value; the log-sum-exp
    return norms + attention + feed_forward + adapted_layers * work.rank * i


def _logit_bytes(shape: Shape, work: TrainerWorkload, kept_bytes: int) -> tuple[int, int]:
    """Returns the bytes of the logits that the head works on at a time, in its forward and in its backward, besides the
    probabilities that it keeps.
    """
    i = work.precision.compute.itemsize
    other_tokens = work.tokens - kept_bytes // (shape.vocabulary * i)
    chunk = chunk_of(shape.vocabulary, torch.device(work.device))
    if i == 4 and work.device == "cpu":  # in place
        chunk_bytes = min(chunk, other_tokens) * shape.vocabulary * i
        return chunk_bytes, chunk_bytes
    token_bytes = shape.vocabulary * (i + 8)  # logits as they come, in float32, and the logarithms of probabilities
    return min(chunk, work.tokens) * token_bytes, min(chunk, other_tokens) * token_bytes


def _copy_bytes(shape: Shape, work: TrainerWorkload) -> Bytes:
    """Returns the bytes of the copies that are computed with, besides the float32 weights: in one process those in the
    compute type, and some layers' gradients in it before they are cast; over ranks what is gathered of shards at a
    time, in the compute type, and gradients before they are shards again.
    """
    i = work.precision.compute.itemsize
    if work.ranks == 1:
        adapters = shape.adapters(work.rank, work.targets)
        parameters, layer = (adapters, 0) if work.rank else (shape.parameters, shape.layer_parameters)
        return {} if i == 4 else {"computed with": i * (parameters + 2 * layer)}
    return {"gathered": i * (2 * shape.layer_parameters + shape.other_parameters) + (4 + i) * shape.layer_parameters}


def host_bytes(shape: Shape, work: TrainerWorkload) -> Bytes:
    """Returns the bytes of the host's memory that each rank of a trainer on a GPU needs, by part."""
    parameters = shape.adapters(work.rank, work.targets) if work.rank else shape.parameters
    return {"moments": 8 * parameters // work.ranks} if work.moves_moments else {}


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes of a device's memory that nobody uses, with those that torch keeps for later; None where the
    system does not say.
    """
    if device.type == "cuda":
        return free_gpu_bytes(device)
    return free_host_bytes()


def total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())
