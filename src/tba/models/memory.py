"""The memory that the parts of a run need, computed from the shape of the model: a pure function, no guess by running.

    needed = trainer(Shape.of(config), Pass(tokens=8192, precision=precision("auto", "cuda", adapters=False)))

Each function returns bytes by part, as they are alive at the worst moment; `total` adds them up. What is counted is
what tensors hold. An allocator holds more: on a CPU glibc's heap keeps freed blocks below 32 MB (docs/scaling.md says
how much), on a GPU torch's keeps freed blocks for later.

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

from tba.engines.step import sizes_of
from tba.engines.transformers import PREFILL_TOKENS
from tba.models.precision import Precision
from tba.policy.causal import KEPT_BYTES, chunk_of
from tba.pretrained import most_positions

Bytes: TypeAlias = dict[str, int]  # by part; parts are alive at the same time
SCORED = 8192  # tokens of a pass of the reference (`FrozenReference`)
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
    gated: bool  # whether the feed-forward layer has a gate
    layer: int  # parameters of one layer
    outside: int  # and of embeddings, head and final norm; tied ones once
    tied: bool
    positions: int  # tokens of the longest prompt and completion
    linear: Mapping[str, tuple[int, int]]  # the linear layers of one layer: (in, out) by name

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
        layer = sum(p.numel() for p in blocks[0].parameters())
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
            gated=any("gate" in name for name in linear),
            layer=layer,
            outside=parameters - layers * layer,
            positions=most_positions(text) or sys.maxsize,
            tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
            linear=linear,
        )

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside

    @property
    def matrices(self) -> int:
        """Parameters of the layers' linear layers, without biases."""
        return self.layers * sum(n * m for n, m in self.linear.values())

    def operations(self, read: float, scored: float) -> float:
        """Returns the floating-point operations of a forward over `read` tokens, of which `scored` go through the head:
        two for each weight of a matrix. Attention to other tokens is left out, which for long ones is not little.
        """
        return 2 * (self.layers * self.layer * read + self.vocabulary * self.width * scored)

    def adapters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Returns the parameters of adapters of this rank on each layer's linear layers, or those in `targets`."""
        adapted = [size for name, size in self.linear.items() if not targets or name in targets]
        return self.layers * sum(rank * (n + m) for n, m in adapted)


@dataclass(frozen=True)
class Pass:
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
    def moves(self) -> bool:
        """Returns whether moments go to the device and back."""
        return self.moments_on_host and self.device != "cpu"


def trainer(shape: Shape, of: Pass) -> Bytes:
    """Bytes of each rank of the trainer at the worst moment of a step of several passes, by part."""
    i, tokens = of.precision.compute.itemsize, of.tokens
    trained = shape.adapters(of.rank, of.targets) if of.rank else shape.parameters
    frozen = _base(shape, of.precision) if of.rank else 0
    found = {
        "weights": (frozen + 4 * trained) // of.ranks,
        "gradients": 4 * trained // of.ranks,
        "moments": 0 if of.moves else 8 * trained // of.ranks,
        "probabilities kept": _kept(shape, tokens, i),
    } | ({"averages": 4 * trained // of.ranks} if of.averaged else {})
    stream = tokens * shape.width * i  # the hidden states of one layer
    layer = tokens * _layer(shape, of)
    kept = shape.layers * (stream if of.checkpointed else layer)
    kept += 4 * stream + 2 * tokens * shape.head_width * i  # the final norm, and what turns positions
    matrix = 0 if of.rank else 4 * shape.vocabulary * shape.width  # a gradient of the head, or of the embedding
    first, rest = _logits(shape, of, found["probabilities kept"])
    found["activations and temporaries"] = max(
        kept + first,  # the head's forward
        kept + 3 * stream + matrix + max(rest, 0 if i == 4 else matrix * i // 4),  # its backward
        # the last layer's: what it computes again, and gradients of two of its widest
        kept + layer * of.checkpointed + 2 * tokens * (shape.ff + shape.width) * i + matrix * shape.tied,
        matrix * (1 + shape.tied),  # the embedding's
        2 * matrix // of.ranks * of.moves,  # the moments of one tensor, in the update
    )
    return found | (_made_whole(shape, of.precision) if of.precision.four_bit else _gathered(shape, of))


@dataclass(frozen=True)
class Sampling:
    """Holds what a searcher's memory depends on besides the model's shape."""

    precision: Precision
    slots: int  # completions that grow at the same time
    positions: int  # tokens of the longest prompt and completion
    prompt: int = 0  # and of the longest prompt
    scored: int = SCORED  # of a pass of the reference
    device: str = "cpu"
    rank: int = 0  # of adapters: the reference shares the engine's base
    targets: tuple[str, ...] = ()


def engine(shape: Shape, of: Sampling) -> Bytes:
    """Bytes of the transformers engine, by part."""
    i = of.precision.compute.itemsize
    prompts = max(PREFILL_TOKENS, of.prompt)  # tokens read together, whose keys and values stay until all is taken
    kept = prompts * shape.layers * 2 * shape.keys * i
    # its last layer, or, when all keys are put together, a second copy of them
    prefill = kept + prompts * max(3 * shape.ff + 4 * shape.width, shape.layers * shape.keys) * i
    # logits as they come, then in float32 tempered, as probabilities and summed up
    step = kept + of.slots * shape.vocabulary * (i + 3 * 4)
    return {
        "weights": _base(shape, of.precision) + i * (shape.adapters(of.rank, of.targets) if of.rank else 0),
        "keys and values": of.slots * -(-of.positions // 16) * 16 * shape.layers * 2 * shape.keys * i,
        "a step": max(prefill, step),
        # logits of each graph, and of the largest what its draw needs, none of which is shared with other work
        "captured steps": shape.vocabulary * (sum(sizes_of(of.slots)) * i + of.slots * 3 * 4) * (of.device == "cuda"),
    } | _made_whole(shape, of.precision)


def vllm(shape: Shape, of: Sampling, gpus: int = 1, room: int | None = None) -> Bytes:
    """Bytes of the vllm engine on each of its `gpus`, by part. Its cache is what the slots need, or what is left of
    `room`, the searcher's part of a GPU, beside all else and the reference; at least what the longest answer needs.
    """
    i, own = of.precision.compute.itemsize, engine(shape, of)
    found = {
        "weights": shape.parameters * i // gpus + (own["weights"] if of.rank else 0),  # adapters are merged into a base
        "a step": own["a step"],
        "graphs and buffers": _GRAPHS if of.device == "cuda" else 0,
    }
    of_block = _BLOCK * shape.layers * 2 * max(shape.keys // gpus, shape.head_width) * i
    longest = -(-of.positions // _BLOCK)
    cache = (of.slots * longest + 2) * of_block  # one is never used, one to spare
    if room is not None:
        cache = min(cache, max(room - total(found) - total(reference(shape, of)), (longest + 2) * of_block))
    return found | {"keys and values": cache}


def stored(shape: Shape, of: Pass) -> tuple[Bytes, Bytes]:
    """Returns the bytes on the disk of a checkpoint and of one version of the published weights, by part."""
    i = of.precision.compute.itemsize
    # the optimizer's file: moments, and with averages these and the weights
    each = 16 if of.averaged else 8
    if not of.rank:
        return {"weights": 4 * shape.parameters, "moments": each * shape.parameters}, {"weights": i * shape.parameters}
    own = shape.adapters(of.rank, of.targets)
    return {"weights": i * shape.parameters, "adapters": 4 * own, "moments": each * own}, {"adapters": i * own}


def reference(shape: Shape, of: Sampling) -> Bytes:
    """Bytes of the reference that scores what the engine samples, by part."""
    i = of.precision.compute.itemsize
    scored = Pass(of.scored, of.precision, of.device)
    first, _ = _logits(shape, scored, kept=0)
    return {
        "weights": i * (shape.adapters(of.rank, of.targets) if of.rank else shape.parameters),
        "a pass": of.scored * (3 * shape.ff + 4 * shape.width) * i + first,
    }


def judge(config: Any, kind: Any, tokens: int, itemsize: int = 4) -> int:
    """Returns the bytes of a model that only computes, in passes of so many tokens, such as a reward model: its weights
    and what one layer holds. kind: the class of transformers that it is loaded as.
    """
    with torch.device("meta"):
        model = kind.from_config(config)
    text = config.get_text_config()
    ff = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return itemsize * (sum(p.numel() for p in model.parameters()) + tokens * (3 * ff + 4 * text.hidden_size))


def _base(shape: Shape, of: Precision) -> int:
    """Bytes of the weights that are not trained: of engine, reference and adapters' base."""
    in_4_bits = shape.matrices if of.four_bit else 0  # half a byte each, and a float32 for 64 of them
    return of.compute.itemsize * (shape.parameters - in_4_bits) + in_4_bits * 9 // 16


def _made_whole(shape: Shape, of: Precision) -> Bytes:
    """The largest matrix in 4 bits as it is computed with."""
    largest = max((n * m for n, m in shape.linear.values()), default=0)
    return {"a matrix made whole": largest * of.compute.itemsize} if of.four_bit else {}


def _layer(shape: Shape, of: Pass) -> int:
    """Bytes that autograd keeps for each token of one layer."""
    i, norm = of.precision.compute.itemsize, 0 if of.rank else of.precision.compute.itemsize
    adapted = sum(1 for name in shape.linear if not of.targets or name in of.targets) if of.rank else 0
    wide = (4 if shape.gated else 2) * shape.ff * i  # gate, what it gates, its activation, their product
    # input in float32, normalised, scaled; the root. One kernel of a GPU keeps the input as it is
    norms = 2 * (shape.width * (4 + norm + i if of.device == "cpu" else 2 * i) + 4)
    attention = 2 * (shape.queries + shape.keys) * i + 4 * shape.heads  # query, output, key, value; the log-sum-exp
    return norms + attention + wide + adapted * of.rank * i


def _kept(shape: Shape, tokens: int, i: int) -> int:
    """Bytes of the probabilities that the head keeps for its backward."""
    return min(tokens, KEPT_BYTES // (shape.vocabulary * i)) * shape.vocabulary * i


def _logits(shape: Shape, of: Pass, kept: int) -> tuple[int, int]:
    """Bytes of the logits that the head works on at a time besides these: in its forward, and in its backward."""
    i = of.precision.compute.itemsize
    kept //= shape.vocabulary * i  # tokens
    chunk = min(chunk_of(shape.vocabulary, torch.device(of.device)), of.tokens - kept)
    room = chunk * shape.vocabulary * i
    if i == 4 and of.device == "cpu":  # in place
        return room, room
    once = 8 * shape.vocabulary  # logits in float32, and the logarithms of their probabilities
    return room + max(kept, chunk) * once, room + chunk * once


def _gathered(shape: Shape, of: Pass) -> Bytes:
    """Returns what is computed with besides the float32 weights: in one process copies in the compute type, and some
    layers' gradients in it before they are cast; over ranks what is gathered of shards at a time, in the compute type,
    and gradients before they are shards again.
    """
    i = of.precision.compute.itemsize
    if of.ranks == 1:
        trained, layer = (shape.adapters(of.rank, of.targets), 0) if of.rank else (shape.parameters, shape.layer)
        return {} if i == 4 else {"computed with": i * (trained + 2 * layer)}
    return {"gathered": i * (2 * shape.layer + shape.outside) + (4 + i) * shape.layer}


def on_host(shape: Shape, of: Pass) -> Bytes:
    """Bytes of the host's memory that each rank of a trainer on a GPU needs for what is not there, by part."""
    trained = shape.adapters(of.rank, of.targets) if of.rank else shape.parameters
    return {"moments": 8 * trained // of.ranks} if of.moves else {}


def total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())
