"""Attention of many sequences of different lengths in one call, which also gives its log-sum-exp.

On a GPU this is the kernel behind `torch.nn.attention.varlen.varlen_attn` (FlashAttention 2, Dao 2023): for half
precision, on NVIDIA GPUs from Ampere on and on AMD's. It is called by its own name, because both parts of packed
attention share one log-sum-exp, for which `varlen_attn` has no gradient. Its memory is linear in the number of tokens.
All else takes the stand-in below: on a CPU fused calls by sequence, short ones together; elsewhere, and with a softcap
or a window, written out, a block of queries at a time, so that its memory is bounded too.

Invariant: backward, `out` and `lse` may be those of a larger softmax, of which these keys are a part. The result is
then this part's share of the gradient, because softmax(z)_j = exp(z_j - lse) for each key.

Shape legend: N queries of all sequences, K their keys, H query heads, J key-value heads (each serves H / J of those), D
head width, n sequences of one call, Q and T the queries and keys of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from tba.batch import to_device

_PADDED_PAIRS_PER_CALL = 1024  # attention pairs of padding that cost about as much as one more call on a CPU
_LONE_LENGTH = 48  # tokens from which copying a sequence into a bucket costs more than a call of its own
_SCORES = 2**26  # of a block that is written out: 256 MiB of float32
_MAX_WIDTH = 256  # head that the kernel takes; it has to be a multiple of 8


@dataclass(frozen=True)
class Sequences:
    """Holds of each sequence, in order, a run of rows of the queries, and a run of rows of the keys.

    Causal: the last query sees all keys, the one before it all but the last, and so on; with a `window` of W each sees
    the last W of these.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_start: Tensor  # int32 [sequences + 1]: where each begins, and the total
    key_start: Tensor
    causal: bool
    window: int | None

    @classmethod
    def of(
        cls,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        device: torch.device,
        causal: bool,
        window: int | None = None,
    ) -> Sequences:
        starts = torch.tensor([_starts(query_lengths), _starts(key_lengths)], dtype=torch.int32)
        query_start, key_start = to_device(starts, device)
        return cls(tuple(query_lengths), tuple(key_lengths), query_start, key_start, causal, window)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yields (queries, keys) of each sequence that has queries."""
        for query, key in zip(pairwise(_starts(self.query_lengths)), pairwise(_starts(self.key_lengths)), strict=True):
            if query[1] > query[0]:
                yield slice(*query), slice(*key)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Returns what the stand-in computes at a time: buckets if each sequence attends to itself, else single
        sequences.
        """
        if self.causal and self.window is None and self.query_lengths == self.key_lengths:
            runs = [(queries.start, queries.stop - queries.start) for queries, _ in self.slices()]
            return tuple((bucket, bucket) for bucket in _make_buckets(runs, self.query_start.device))
        return tuple((RowRange(q.start, q.stop), RowRange(k.start, k.stop)) for q, k in self.slices())


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(scale * query . key) @ value; with a softcap c scores become c * tanh(score / c)."""

    scale: float
    softcap: float | None = None

    def forward(self, query_NHD: Tensor, key_KJD: Tensor, value_KJD: Tensor, spans: Sequences) -> tuple[Tensor, Tensor]:
        """Returns output [N, H, D] and log-sum-exp [H, N] (float32)."""
        if self._uses_flash(query_NHD, value_KJD):
            longest, causal, window = _flash_arguments(spans)
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                query_NHD, key_KJD, value_KJD, spans.query_start, spans.key_start, *longest, 0.0, causal, False,
                scale=self.scale, **window,
            )  # fmt: skip
            return out, lse
        dtype = query_NHD.dtype
        query_NHD, key_KJD, value_KJD = (_to_compute_dtype(x) for x in (query_NHD, key_KJD, value_KJD))
        out_NHD = query_NHD.new_empty(*query_NHD.shape[:2], value_KJD.shape[2])
        lse_NH = query_NHD.new_empty(query_NHD.shape[:2], dtype=torch.float32)
        for queries, keys in spans.calls:
            q = queries.gather(query_NHD).transpose(1, 2)
            k, v = (keys.gather(x).transpose(1, 2) for x in (key_KJD, value_KJD))
            out, lse = self._forward_call(q, k, v, spans.causal, spans.window)
            queries.scatter(out_NHD, out.transpose(1, 2))
            queries.scatter(lse_NH, lse.transpose(1, 2))
        return out_NHD.to(dtype), lse_NH.T

    def backward(
        self,
        grad_NHD: Tensor,
        query_NHD: Tensor,
        key_KJD: Tensor,
        value_KJD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
        spans: Sequences,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value."""
        if self._uses_flash(query_NHD, value_KJD):
            longest, causal, window = _flash_arguments(spans)
            state = lse_HN.new_empty(2, dtype=torch.uint64)  # of a random generator, unused: there is no dropout
            query, key, value = torch.ops.aten._flash_attention_backward(
                grad_NHD, query_NHD, key_KJD, value_KJD, out_NHD, lse_HN.contiguous(), spans.query_start,
                spans.key_start, *longest, 0.0, causal, state, state, scale=self.scale, **window,
            )  # fmt: skip
            return query, key, value
        dtype = query_NHD.dtype
        grad_NHD, query_NHD, key_KJD, value_KJD, out_NHD = (
            _to_compute_dtype(x) for x in (grad_NHD, query_NHD, key_KJD, value_KJD, out_NHD)
        )
        make = torch.zeros_like if 0 in spans.query_lengths else torch.empty_like  # keys that nobody sees get zeros
        grads = (torch.empty_like(query_NHD), make(key_KJD), make(value_KJD))
        for queries, keys in spans.calls:
            q, out, lse = (queries.gather(x).transpose(1, 2) for x in (query_NHD, out_NHD, lse_HN.T))
            k, v = (keys.gather(x).transpose(1, 2) for x in (key_KJD, value_KJD))
            grad = queries.clear_padding(queries.gather(grad_NHD)).transpose(1, 2)
            parts = self._backward_call(grad, q, k, v, out, lse.contiguous(), spans.causal, spans.window)
            for rows, place, part in zip(grads, (queries, keys, keys), parts, strict=True):
                place.scatter(rows, part.transpose(1, 2))
        query, key, value = (grad.to(dtype) for grad in grads)
        return query, key, value

    def _uses_flash(self, query: Tensor, value: Tensor) -> bool:
        """Returns whether the kernel of GPUs takes these tensors."""
        return self.softcap is None and takes_flash(query, value)

    def _uses_fused(self, query_nHQD: Tensor, key_nJTD: Tensor, causal: bool, window: int | None) -> bool:
        """Returns whether torch's kernel for CPUs takes these tensors; a causal mask needs as many queries as keys."""
        is_square = query_nHQD.shape[2] == key_nJTD.shape[2]
        return query_nHQD.device.type == "cpu" and window is None and self.softcap is None and (is_square or not causal)

    def _forward_call(
        self, query_nHQD: Tensor, key_nJTD: Tensor, value_nJTD: Tensor, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Returns output [n, H, Q, D] and log-sum-exp [n, H, Q] (float32)."""
        if self._uses_fused(query_nHQD, key_nJTD, causal, window):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_nHQD, key_nJTD, value_nJTD, 0.0, causal, scale=self.scale
            )
        outs, lses = [], []
        for rows in _blocks(query_nHQD, key_nJTD):
            query = query_nHQD[:, :, rows]
            score, _ = self._scores(query, key_nJTD, _visible_keys(rows, query_nHQD, key_nJTD, causal, window))
            lse = score.logsumexp(-1)
            weight = (score - lse[..., None]).exp().to(value_nJTD.dtype)
            outs.append((weight.flatten(2, 3) @ value_nJTD).view(query.shape))  # [n, J, H/J * Q, D]
            lses.append(lse.flatten(1, 2))
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def _backward_call(
        self,
        grad_nHQD: Tensor,
        query_nHQD: Tensor,
        key_nJTD: Tensor,
        value_nJTD: Tensor,
        out_nHQD: Tensor,
        lse_nHQ: Tensor,
        causal: bool,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value."""
        if self._uses_fused(query_nHQD, key_nJTD, causal, window):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_nHQD, query_nHQD, key_nJTD, value_nJTD, out_nHQD, lse_nHQ, 0.0, causal, scale=self.scale
            )
        heads, dtype, queries = key_nJTD.shape[1], query_nHQD.dtype, []
        grad_key, grad_value = torch.zeros_like(key_nJTD), torch.zeros_like(value_nJTD)
        for rows in _blocks(query_nHQD, key_nJTD):
            query, grad, out, lse = (
                x[:, :, rows].unflatten(1, (heads, -1)) for x in (query_nHQD, grad_nHQD, out_nHQD, lse_nHQ)
            )
            visible_QT = _visible_keys(rows, query_nHQD, key_nJTD, causal, window)
            score, slope = self._scores(query.flatten(1, 2), key_nJTD, visible_QT)
            weight = (score - lse[..., None]).exp()
            delta = (grad * out).sum(-1, keepdim=True, dtype=torch.float32)
            grad_weight = (grad.flatten(2, 3) @ value_nJTD.mT).view(weight.shape)
            grad_score = weight * (grad_weight - delta) * self.scale
            if slope is not None:
                grad_score *= slope
            weight, grad_score = weight.to(dtype).flatten(2, 3), grad_score.to(dtype).flatten(2, 3)
            queries.append((grad_score @ key_nJTD).view(grad.shape).flatten(1, 2))
            grad_key += grad_score.mT @ query.flatten(2, 3)
            grad_value += weight.mT @ grad.flatten(2, 3)
        return torch.cat(queries, 2), grad_key, grad_value

    def _scores(self, query_nHQD: Tensor, key_nJTD: Tensor, visible_QT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns scores [n, J, H/J, Q, T] in float32, -inf where unseen, and the softcap's slope (None: 1)."""
        query = query_nHQD.unflatten(1, (key_nJTD.shape[1], -1))
        score = (query.flatten(2, 3) @ key_nJTD.mT).view(*query.shape[:4], -1).float() * self.scale
        slope = None
        if self.softcap is not None:
            tanh_score = torch.tanh(score / self.softcap)
            score, slope = tanh_score * self.softcap, 1 - tanh_score * tanh_score
        return score if visible_QT is None else score.masked_fill(~visible_QT, -torch.inf), slope


def _to_compute_dtype(x: Tensor) -> Tensor:
    """Converts half precision to float32 on a CPU, whose kernel takes three times as long for it, backward."""
    return x.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x


def takes_flash(key: Tensor, value: Tensor) -> bool:
    """Returns whether the kernel of GPUs takes keys (or queries) and values like these, [..., D]; the meta device
    stands for one that has it.
    """
    width = key.shape[-1]
    if key.dtype not in (torch.bfloat16, torch.float16) or width > _MAX_WIDTH or width % 8 or value.shape[-1] != width:
        return False
    return key.is_meta or (key.is_cuda and _has_flash(key.device.index))


@cache
def _has_flash(device: int) -> bool:
    """Returns whether this GPU runs the kernel."""
    return torch.cuda.get_device_capability(device) >= (8, 0) and torch.backends.cuda.is_flash_attention_available()


def _flash_arguments(sequences: Sequences) -> tuple[tuple[int, int], bool, dict[str, int]]:
    """Returns the lengths of the longest queries and keys, whether to mask causally, and the arguments of a window."""
    longest = (max(sequences.query_lengths), max(sequences.key_lengths))
    if sequences.window is None:
        return longest, sequences.causal, {}
    return longest, False, {"window_size_left": sequences.window - 1, "window_size_right": 0}


def _blocks(query_nHQD: Tensor, key_nJTD: Tensor) -> list[slice]:
    """Returns the queries in blocks whose scores are in memory at a time."""
    batch, heads, queries, _ = query_nHQD.shape
    step = max(1, _SCORES // (batch * heads * key_nJTD.shape[2]))
    return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]


def _visible_keys(rows: slice, query_nHQD: Tensor, key_nJTD: Tensor, causal: bool, window: int | None) -> Tensor | None:
    """Returns which keys these queries see, bool [Q, T]; None: all."""
    if not causal:
        return None
    keys, device = key_nJTD.shape[2], key_nJTD.device
    position_Q = torch.arange(rows.start, rows.stop, device=device)[:, None] + keys - query_nHQD.shape[2]
    position_T = torch.arange(keys, device=device)
    visible_QT = position_T <= position_Q
    return visible_QT if window is None else visible_QT & (position_T > position_Q - window)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows that lie one after the other, as a batch of one: a slice, which is not copied."""

    start: int
    stop: int

    def gather(self, rows_ND: Tensor) -> Tensor:
        """Returns the rows as a batch: [N, ...] -> [1, T, ...]."""
        return rows_ND[None, self.start : self.stop]

    def scatter(self, rows_ND: Tensor, values_1TD: Tensor) -> None:
        """Write values where `gather` read them, in place."""
        rows_ND[self.start : self.stop] = values_1TD[0]

    def clear_padding(self, values_1TD: Tensor) -> Tensor:
        """Do nothing: packed rows have no padding to clear."""
        return values_1TD


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, padded to one batch."""

    index_nT: Tensor  # int64 into N; padding repeats the sequence's last row
    valid_nT: Tensor | None  # int64 into n * T: where there is no padding; None: everywhere

    def gather(self, rows_ND: Tensor) -> Tensor:
        """Returns the rows as a padded batch: [N, ...] -> [n, T, ...]."""
        values = rows_ND.index_select(0, self.index_nT.flatten())
        return values.view(*self.index_nT.shape, *values.shape[1:])

    def scatter(self, rows_ND: Tensor, values_nTD: Tensor) -> None:
        """Write values where `gather` read them, in place; padding is dropped."""
        index, flat = self.index_nT.flatten(), values_nTD.flatten(0, 1)
        if self.valid_nT is not None:
            index, flat = index[self.valid_nT], flat[self.valid_nT]
        rows_ND.index_copy_(0, index, flat)

    def clear_padding(self, values_nTD: Tensor) -> Tensor:
        """Put gradients back with zeros for padding, so that nothing flows back from it."""
        if self.valid_nT is None:
            return values_nTD
        flat = values_nTD.flatten(0, 1)
        return torch.zeros_like(flat).index_copy_(0, self.valid_nT, flat[self.valid_nT]).view(values_nTD.shape)


Call: TypeAlias = tuple[RowRange | Bucket, RowRange | Bucket]  # queries and keys


def _make_buckets(sequences: Sequence[tuple[int, int]], device: torch.device) -> list[RowRange | Bucket]:
    """Groups sequences (start, length) in buckets, longest first: one joins if that costs less than its own call."""
    length_limit = _LONE_LENGTH if device.type == "cpu" else torch.inf
    buckets: list[list[tuple[int, int]]] = []
    for start, length in sorted(sequences, key=lambda sequence: -sequence[1]):
        padding_pairs = buckets[-1][0][1] ** 2 - length**2 if buckets else torch.inf
        if length < length_limit and padding_pairs <= _PADDED_PAIRS_PER_CALL:
            buckets[-1].append((start, length))
        else:
            buckets.append([(start, length)])
    return [_make_bucket(members, device) for members in buckets]


def _make_bucket(members: list[tuple[int, int]], device: torch.device) -> RowRange | Bucket:
    start, longest = members[0]
    if len(members) == 1:
        return RowRange(start, start + longest)
    start_n1, length_n1 = torch.tensor(members).T[:, :, None]
    step_T = torch.arange(longest)
    index_nT = start_n1 + torch.minimum(step_T, length_n1 - 1)
    valid = (step_T < length_n1).flatten().nonzero().flatten()
    return Bucket(to_device(index_nT, device), None if len(valid) == index_nT.numel() else to_device(valid, device))
