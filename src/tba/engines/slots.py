"""Keys and values of many rows at different positions, read by a model's own attention modules.

A transformers model calls the attention function that its configuration names and hands it the keyword arguments of
`model.forward`. Here that function is `tba_slots`, and the argument is the object that holds the keys and values:
`PackedPrompts` while prompts are read (many prompts in one row without padding, each attending to itself only), then
`SlotCache` while completions grow (one token per row and step, each row at its own position), and `Continuations` where
several tokens are appended to some rows at once (what an environment has said).

Invariant: row r attends to the keys at positions 0..position_R[r] of slot r (within the layer's sliding window) and to
nothing else, whatever an earlier occupant left behind.

Shape legend: L layers, R rows, H key/value heads, Q query heads per key/value head, D width of a head, S slot length,
N packed tokens, P tokens of one prompt, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tba.errors import UserError
from tba.policy.varlen import Attention, Sequences, takes_flash

ATTENTION = "tba_slots"
_ALIGNMENT = 16  # the kernels like widths of a multiple of this
_MIN_WIDTH = 128  # width of a step whose shapes do not change


class AttentionPass(Protocol):
    """Computes the attention of layers, as the object handed through `model.forward(tba_slots=...)`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Stores key and value; returns the attention's output: [1 or R, heads, tokens, D] -> the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Holds how one layer's attention is computed."""

    scale: float | None  # None: 1 / sqrt(D)
    window: int | None  # a query at p sees keys at p - window + 1 .. p; None: all up to p
    softcap: float | None  # scores become softcap * tanh(scores / softcap)


def _attend_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    tba_slots: AttentionPass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends as transformers' `AttentionInterface` asks for it: [B, heads, T, D] -> [B, T, heads, D]."""
    if tba_slots is None or attention_mask is not None or s_aux is not None or position_bias is not None:
        raise UserError(
            f"{type(module).__name__} needs attention sinks, a bias or a mask of its own, which this engine does not "
            "compute: use the vllm engine for this model"
        )
    kind = AttentionKind(scaling, sliding_window or None, softcap or None)
    return tba_slots.attend(int(module.layer_idx), query, key, value, kind).transpose(1, 2), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attend_slots)  # not a mask function too: so transformers builds no mask


def exclude_attention_from_compile() -> None:
    """Keep `torch.compile` out of attention from here on; it would compile it anew for each layer's number."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(_attend_slots))


@contextmanager
def slot_attention(model: PreTrainedModel) -> Iterator[None]:
    """Have `model` attend through `tba_slots` within the block, and as before after it."""
    configs = list({id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values())
    implementations = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = ATTENTION
        yield
    finally:
        for config, name in zip(configs, implementations, strict=True):  # parents first: they also set their parts
            config._attn_implementation = name


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kind: AttentionKind) -> Tensor:
    """Computes scaled dot-product attention with an additive bias that broadcasts to the scores."""
    if kind.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=kind.scale)
    scale = 1 / math.sqrt(query.shape[-1]) if kind.scale is None else kind.scale
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / kind.softcap)) * kind.softcap + bias
    return torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value


class PackedPrompts:
    """One pass over several prompts laid end to end in one row; afterwards it holds their keys and values.

    A GPU's kernel for sequences of different lengths attends within all of them in one call. Elsewhere those of one
    length share a call, because the prompts are ordered by length.
    """

    def __init__(self, prompts: Sequence[Tensor], device: torch.device) -> None:
        """`prompts`: int64 [P] each, P >= 1, on the host; they are copied to the model's `device` together."""
        self.length = [len(p) for p in prompts]
        order = sorted(range(len(prompts)), key=self.length.__getitem__)
        self.start = [0] * len(prompts)
        self.blocks: list[tuple[int, int, int]] = []  # (first token, prompts, tokens of each)
        end = 0
        for i in order:
            self.start[i] = end
            if self.blocks and self.blocks[-1][2] == self.length[i]:
                start, n, length = self.blocks[-1]
                self.blocks[-1] = (start, n + 1, length)
            else:
                self.blocks.append((end, 1, self.length[i]))
            end += self.length[i]
        position_N = torch.cat([torch.arange(self.length[i]) for i in order])
        input_2N = torch.stack([torch.cat([prompts[i] for i in order]), position_N]).to(device)
        self.tokens_1N, self.position_1N = input_2N[:1], input_2N[1:]
        last_index_P = [start + length - 1 for start, length in zip(self.start, self.length, strict=True)]
        self.last_index_P = torch.tensor(last_index_P, device=device)
        self._spans: dict[int | None, Sequences] = {}  # by window
        self.kinds: dict[int, AttentionKind] = {}  # by layer, as the model asked for them
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.keys_LHND = self.values_LHND = self.logits_PV = torch.empty(0)

    @property
    def takes_flash(self) -> bool:
        """Returns whether the flash kernel could read such keys and values, once they were computed."""
        return takes_flash(self.keys_LHND, self.values_LHND) and not any(kind.softcap for kind in self.kinds.values())

    def run(self, model: PreTrainedModel) -> None:
        """Read the prompts; the logits after each one's last token are `logits_PV`, in the order they were given."""
        output = model(
            input_ids=self.tokens_1N,
            position_ids=self.position_1N,
            attention_mask=torch.ones_like(self.tokens_1N),  # says that nothing is padding; no mask is built from it
            use_cache=False,
            logits_to_keep=self.last_index_P,
            tba_slots=self,
        )
        self.logits_PV = output.logits[0]
        layers = range(len(self._keys))
        if len({k.shape for k in self._keys.values()}) != 1 or list(self._keys) != list(layers):
            raise UserError(
                f"{type(model).__name__} does not attend in every layer with heads of one shape, which the slots need: "
                "use the vllm engine for this model"
            )
        self.keys_LHND = torch.stack([self._keys.pop(i) for i in layers])
        self.values_LHND = torch.stack([self._values.pop(i) for i in layers])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Computes causal attention within each prompt."""
        self._keys[layer], self._values[layer], self.kinds[layer] = key[0], value[0], kind
        if kind.softcap is None and takes_flash(query, value):
            return self._attend_together(query, key, value, kind)
        blocks = [self._attend_block(block, query[0], key[0], value[0], kind) for block in self.blocks]
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1))[None]

    def _attend_together(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Attends within all prompts in one call: [1, heads, N, D] -> the same."""
        if kind.window not in self._spans:
            lengths = [length for _, count, length in self.blocks for _ in range(count)]
            self._spans[kind.window] = Sequences.of(lengths, lengths, query.device, causal=True, window=kind.window)
        scale = 1 / math.sqrt(query.shape[-1]) if kind.scale is None else kind.scale
        query_NHD, key_NHD, value_NHD = (x[0].transpose(0, 1) for x in (query, key, value))
        out_NHD, _ = Attention(scale).forward(query_NHD, key_NHD, value_NHD, self._spans[kind.window])
        return out_NHD.transpose(0, 1)[None]

    @staticmethod
    def _attend_block(
        block: tuple[int, int, int], query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """Attends within the prompts of one length: [heads, N, D] -> [heads, prompts * P, D]."""
        start, n, length = block
        repeat = query.shape[0] // key.shape[0]
        q, k, v = (
            x[:, start : start + n * length].unflatten(1, (n, length)).transpose(0, 1) for x in (query, key, value)
        )
        if kind.softcap is None and (kind.window is None or kind.window >= length):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kind.scale, enable_gqa=repeat > 1)
        else:
            position_P = torch.arange(length, device=query.device)
            distance_PP = position_P[:, None] - position_P[None, :]
            visible_PP = (distance_PP >= 0) if kind.window is None else (distance_PP >= 0) & (distance_PP < kind.window)
            bias = torch.zeros_like(visible_PP, dtype=query.dtype).masked_fill_(~visible_PP, -torch.inf)
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            out = _attention(q, k, v, bias, kind)
        return out.transpose(0, 1).flatten(1, 2)


class SlotCache:
    """Preallocated keys [L, R, H, S, D] and values of `slots` rows; reused between calls, never cleared.

    With `flash` each (row, head) is a sequence of the kernel of `policy/varlen.py`, which finds on the device how many
    keys it has; otherwise a bias says what is seen, and the keys are read as far as the longest row needs.
    """

    def __init__(self, template: PackedPrompts, slots: int, length: int, flash: bool = False) -> None:
        """Makes room for `slots` rows of `length` positions, with the layers and heads of `template`."""
        layers, heads, _, width = template.keys_LHND.shape
        self.length = -(-length // _ALIGNMENT) * _ALIGNMENT
        shape = (layers, slots, heads, self.length)
        self.keys = template.keys_LHND.new_zeros((*shape, width))  # zeros: a masked NaN would still poison its row
        self.values = template.values_LHND.new_zeros((*shape, template.values_LHND.shape[-1]))
        self._flat_keys = [k.view(-1, k.shape[-1]) for k in self.keys]
        self._flat_values = [v.view(-1, v.shape[-1]) for v in self.values]
        sequences = slots * heads
        lanes = torch.arange(sequences, device=self.keys.device).view(slots, heads)
        self.lanes = lanes * self.length  # [R, H], where each (row, head) begins in a flat view
        self._positions = torch.arange(self.length, device=self.keys.device)
        self._position_R = self._positions[:0]
        self._write_index = self._positions[:0]
        self._width = 0
        self._bias: dict[int | None, Tensor] = {}
        self.uses_flash = flash and sequences * self.length < 2**31  # the kernel counts keys in 32 bits
        if self.uses_flash:
            starts = torch.arange(sequences + 1, dtype=torch.int32, device=self.keys.device)
            self._query_start, self._key_start = starts, starts * self.length
            self._key_count = starts[:0]  # of each sequence: how many keys it has

    def fill(self, slots: Sequence[int], prompts: PackedPrompts, prompt: int) -> None:
        """Copy the keys and values of one packed prompt into `slots` (ascending)."""
        start, length = prompts.start[prompt], prompts.length[prompt]
        keys = prompts.keys_LHND[:, None, :, start : start + length]
        values = prompts.values_LHND[:, None, :, start : start + length]
        for begin, end in _runs(slots):
            self.keys[:, begin:end, :, :length] = keys
            self.values[:, begin:end, :, :length] = values

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of the rows `source` to the rows `target` (no row is in both)."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def bytes_of(self, positions: int) -> int:
        """Returns the bytes of keys and values at so many positions."""
        return positions * (self.keys.nbytes + self.values.nbytes) // (self.keys.shape[1] * self.length)

    def copy_row(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns a copy of the first `length` keys and values of a row, [L, H, length, D]."""
        return self.keys[:, row, :, :length].clone(), self.values[:, row, :, :length].clone()

    def restore_row(self, row: int, row_cache: tuple[Tensor, Tensor]) -> None:
        """Give a row the keys and values that `copy_row` returned."""
        keys, values = row_cache
        self.keys[:, row, :, : keys.shape[2]] = keys
        self.values[:, row, :, : values.shape[2]] = values

    def at_positions(self, position_R: Tensor, width: int) -> SlotCache:
        """Prepare the cache for a pass in which row r writes at position_R[r] < `width`; returns the cache."""
        self._position_R = position_R
        self._width = min(-(-width // _ALIGNMENT) * _ALIGNMENT, self.length)
        self._write_index = (self.lanes[: len(position_R)] + position_R[:, None]).view(-1)
        self._bias.clear()
        if self.uses_flash:
            rows, heads = len(position_R), self.lanes.shape[1]
            self._key_count = (position_R + 1).to(torch.int32)[:, None].expand(rows, heads).reshape(-1)
        return self

    def round_width(self, width: int) -> int:
        """Returns one of few widths from `width` on, for a pass that is to be computed again without new shapes."""
        return self.length if self.uses_flash else min(self.length, max(_MIN_WIDTH, 1 << (width - 1).bit_length()))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Attends from one token of each row: [R, H * Q, 1, D] -> [R, H * Q, 1, D]."""
        rows, heads, _, width = key.shape
        self.write(layer, self._write_index, key, value)
        # The Q query heads of a key head are laid out as Q queries: no key is repeated.
        if self.uses_flash:
            out = self._attend_flash(layer, query.reshape(rows * heads, -1, width), kind)
        else:
            grouped_query = query.reshape(rows, heads, -1, width)
            keys = self.keys[layer, :rows, :, : self._width]
            values = self.values[layer, :rows, :, : self._width]
            out = _attention(grouped_query, keys, values, self._bias_of(kind.window), kind)
        return out.reshape(rows, -1, 1, value.shape[-1])

    def _attend_flash(self, layer: int, query_NQD: Tensor, kind: AttentionKind) -> Tensor:
        """Attends by the flash kernel, with each (row, head) as a sequence of one token: [R * H, Q, D] -> the same."""
        n = len(query_NQD) + 1
        # `length` is the most keys that a sequence can have: too large does no harm, and it never changes.
        lengths = (self._query_start[:n], self._key_start[:n], 1, self.length)
        window = {}
        # the kernel splits keys and groups heads only without a window
        if kind.window is not None and kind.window < self.length:
            window = {"window_size_left": kind.window - 1, "window_size_right": 0}
        keys, values = self._flat_keys[layer][:, None], self._flat_values[layer][:, None]
        out, *_ = torch.ops.aten._flash_attention_forward(
            query_NQD, keys, values, *lengths, 0.0, False, False, scale=kind.scale, seqused_k=self._key_count, **window
        )
        return out

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values [..., D] at `index`, places in the flat views of `lanes`."""
        self._flat_keys[layer].index_copy_(0, index, key.reshape(-1, key.shape[-1]))
        self._flat_values[layer].index_copy_(0, index, value.reshape(-1, value.shape[-1]))

    def _bias_of(self, window: int | None) -> Tensor:
        """Returns [R, 1, 1, width]: 0 where a row sees, -inf elsewhere; the same for all layers of one window."""
        bias = self._bias.get(window)
        if bias is None:
            distance = self._position_R[:, None] - self._positions[: self._width]
            is_hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
            bias = self.keys.new_zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)[:, None, None]
            self._bias[window] = bias
        return bias


def flash_fault(prompts: PackedPrompts) -> str | None:
    """Returns in words how far the flash kernel is from the definition for two rows of different lengths, with a window
    and without; None if that is rounding.
    """
    heads, width, length = prompts.keys_LHND.shape[1], prompts.keys_LHND.shape[3], 3 * _ALIGNMENT
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(prompts.keys_LHND)

    position_R = torch.tensor([2, length - 7], device=prompts.keys_LHND.device)
    stored_keys, stored_values = normal(2, 2, heads, length, width)
    key, value = normal(2, 2, heads, 1, width)
    query = normal(2, 2 * heads, 1, width)
    for window in (None, _ALIGNMENT // 2):
        kind, outs = AttentionKind(None, window, None), []
        for flash in (True, False):
            cache = SlotCache(prompts, 2, length, flash)
            cache.keys[0], cache.values[0] = stored_keys, stored_values
            outs.append(cache.at_positions(position_R, length).attend(0, query, key, value, kind))
        distance = float((outs[0] - outs[1]).abs().max())
        if not distance <= 0.05:  # of averages of normal numbers: a few roundings to 8 bits
            return f"a head's output differs by {distance:.2g} (window: {window})"
    return None


class Continuations:
    """One pass that appends several tokens to each of some rows of a cache, which are already there up to `starts`.

    As in `PackedPrompts` they are laid end to end in one row, ordered by length; rows with equally many share a call.
    """

    def __init__(self, cache: SlotCache, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Tensor]) -> None:
        """`tokens`: int64 [n] each, n >= 1, on the host, for the positions from `starts` on."""
        self._cache, device = cache, cache.keys.device
        order = sorted(range(len(rows)), key=lambda i: len(tokens[i]))
        # (first token, tokens of each, width of the keys, rows, starts); the width from here, not from the device
        self._blocks: list[tuple[int, int, int, Tensor, Tensor]] = []
        token_start = block_start = 0
        for i in range(1, len(order) + 1):
            length = len(tokens[order[block_start]])
            if i == len(order) or len(tokens[order[i]]) != length:
                members = order[block_start:i]
                block_rows, block_starts = ([values[j] for j in members] for values in (rows, starts))
                width = max(block_starts) + length
                row_R, start_R = torch.tensor([block_rows, block_starts], device=device)
                self._blocks.append((token_start, length, width, row_R, start_R))
                token_start, block_start = token_start + length * len(members), i
        lengths = torch.tensor([len(tokens[i]) for i in order])
        last_index = torch.empty_like(lengths)
        last_index[torch.tensor(order)] = lengths.cumsum(0) - 1
        position_N = torch.cat([torch.arange(starts[i], starts[i] + len(tokens[i])) for i in order])
        row_N = torch.tensor([rows[i] for i in order]).repeat_interleave(lengths)
        input_3N = torch.stack([torch.cat([tokens[i] for i in order]), position_N, row_N]).to(device)
        self._last_index = last_index.to(device)
        self._tokens_1N, self._position_1N = input_3N[:1], input_3N[1:2]
        self._index = (cache.lanes[input_3N[2]] + self._position_1N[0, :, None]).view(-1)

    def run(self, model: PreTrainedModel) -> Tensor:
        """Returns the logits after each row's last token, [rows, V], in the order in which they were given."""
        logits: Tensor = model(
            input_ids=self._tokens_1N,
            position_ids=self._position_1N,
            attention_mask=torch.ones_like(self._tokens_1N),
            use_cache=False,
            logits_to_keep=self._last_index,
            tba_slots=self,
        ).logits
        return logits[0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> Tensor:
        """Computes causal attention of each row's new tokens to all that the row has."""
        self._cache.write(layer, self._index, key[0].transpose(0, 1), value[0].transpose(0, 1))
        blocks = [self._attend_block(block, layer, query[0], kind) for block in self._blocks]
        return (blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1))[None]

    def _attend_block(
        self, block: tuple[int, int, int, Tensor, Tensor], layer: int, query: Tensor, kind: AttentionKind
    ) -> Tensor:
        """Attends from rows with equally many new tokens: [heads, N, D] -> [heads, rows * length, D]."""
        begin, length, width, row_R, start_R = block
        keys, values = (x[layer, row_R, :, :width] for x in (self._cache.keys, self._cache.values))
        repeat = query.shape[0] // keys.shape[1]
        queries = query[:, begin : begin + len(row_R) * length].unflatten(1, (len(row_R), length)).transpose(0, 1)
        position_RT = start_R[:, None] + torch.arange(length, device=query.device)
        distance = position_RT[:, None, :, None] - torch.arange(width, device=query.device)
        is_hidden = (distance < 0) if kind.window is None else (distance < 0) | (distance >= kind.window)
        bias = queries.new_zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        return _attention(queries, keys, values, bias, kind).transpose(0, 1).flatten(1, 2)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields ascending integers as half-open runs: [2, 3, 4, 7] -> (2, 5), (7, 8)."""
    begin = end = numbers[0]
    for n in numbers:
        if n != end:
            yield begin, end
            begin = end = n
        end += 1
    yield begin, end
