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
_LONE = 48  # tokens from which copying a sequence into a bucket costs more than a call of its own
_SCORES = 2**26  # of a block that is written out: 256 MiB of float32
_WIDEST = 256  # head that the kernel takes; it has to be a multiple of 8


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

    def runs(self) -> Iterator[tuple[slice, slice]]:
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
            buckets = _bucketed([(run.start, run.stop - run.start) for run, _ in self.runs()], self.query_start.device)
            return tuple((bucket, bucket) for bucket in buckets)
        return tuple((Run(q.start, q.stop), Run(k.start, k.stop)) for q, k in self.runs())


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(scale * query . key) @ value; with a softcap c scores become c * tanh(score / c)."""

    scale: float
    softcap: float | None = None

    def forward(self, query_NHD: Tensor, key_KJD: Tensor, value_KJD: Tensor, of: Sequences) -> tuple[Tensor, Tensor]:
        """Returns output [N, H, D] and log-sum-exp [H, N] (float32)."""
        if self._flash(query_NHD, value_KJD):
            longest, causal, window = _flash_arguments(of)
            out, lse, *_ = torch.ops.aten._flash_attention_forward(
                query_NHD, key_KJD, value_KJD, of.query_start, of.key_start, *longest, 0.0, causal, False,
                scale=self.scale, **window,
            )  # fmt: skip
            return out, lse
        dtype = query_NHD.dtype
        query_NHD, key_KJD, value_KJD = (_computed(x) for x in (query_NHD, key_KJD, value_KJD))
        out_NHD = query_NHD.new_empty(*query_NHD.shape[:2], value_KJD.shape[2])
        lse_NH = query_NHD.new_empty(query_NHD.shape[:2], dtype=torch.float32)
        for queries, keys in of.calls:
            q = queries.take(query_NHD).transpose(1, 2)
            k, v = (keys.take(x).transpose(1, 2) for x in (key_KJD, value_KJD))
            out, lse = self._of_call(q, k, v, of.causal, of.window)
            queries.put(out_NHD, out.transpose(1, 2))
            queries.put(lse_NH, lse.transpose(1, 2))
        return out_NHD.to(dtype), lse_NH.T

    def backward(
        self,
        grad_NHD: Tensor,
        query_NHD: Tensor,
        key_KJD: Tensor,
        value_KJD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
        of: Sequences,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value."""
        if self._flash(query_NHD, value_KJD):
            longest, causal, window = _flash_arguments(of)
            unused = lse_HN.new_empty(2, dtype=torch.uint64)  # the state of a random generator: there is no dropout
            query, key, value = torch.ops.aten._flash_attention_backward(
                grad_NHD, query_NHD, key_KJD, value_KJD, out_NHD, lse_HN.contiguous(), of.query_start, of.key_start,
                *longest, 0.0, causal, unused, unused, scale=self.scale, **window,
            )  # fmt: skip
            return query, key, value
        dtype = query_NHD.dtype
        grad_NHD, query_NHD, key_KJD, value_KJD, out_NHD = (
            _computed(x) for x in (grad_NHD, query_NHD, key_KJD, value_KJD, out_NHD)
        )
        made = torch.zeros_like if 0 in of.query_lengths else torch.empty_like  # keys that nobody sees have no gradient
        grads = (torch.empty_like(query_NHD), made(key_KJD), made(value_KJD))
        for queries, keys in of.calls:
            q, out, lse = (queries.take(x).transpose(1, 2) for x in (query_NHD, out_NHD, lse_HN.T))
            k, v = (keys.take(x).transpose(1, 2) for x in (key_KJD, value_KJD))
            grad = queries.clear_padding(queries.take(grad_NHD)).transpose(1, 2)
            parts = self._backward_of_call(grad, q, k, v, out, lse.contiguous(), of.causal, of.window)
            for rows, place, part in zip(grads, (queries, keys, keys), parts, strict=True):
                place.put(rows, part.transpose(1, 2))
        query, key, value = (grad.to(dtype) for grad in grads)
        return query, key, value

    def _flash(self, query: Tensor, value: Tensor) -> bool:
        """Returns whether the kernel of GPUs takes it."""
        return self.softcap is None and takes_flash(query, value)

    def _fused(self, query_nHQD: Tensor, key_nJTD: Tensor, causal: bool, window: int | None) -> bool:
        """Returns whether torch's kernel for CPUs takes it, whose causal mask is of equally many queries and keys."""
        square = query_nHQD.shape[2] == key_nJTD.shape[2]
        return query_nHQD.device.type == "cpu" and window is None and self.softcap is None and (square or not causal)

    def _of_call(
        self, query_nHQD: Tensor, key_nJTD: Tensor, value_nJTD: Tensor, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Returns output [n, H, Q, D] and log-sum-exp [n, H, Q] (float32)."""
        if self._fused(query_nHQD, key_nJTD, causal, window):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_nHQD, key_nJTD, value_nJTD, 0.0, causal, scale=self.scale
            )
        outs, lses = [], []
        for rows in _blocks(query_nHQD, key_nJTD):
            query = query_nHQD[:, :, rows]
            score, _ = self._scores(query, key_nJTD, _seen(rows, query_nHQD, key_nJTD, causal, window))
            lse = score.logsumexp(-1)
            weight = (score - lse[..., None]).exp().to(value_nJTD.dtype)
            outs.append((weight.flatten(2, 3) @ value_nJTD).view(query.shape))  # [n, J, H/J * Q, D]
            lses.append(lse.flatten(1, 2))
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def _backward_of_call(
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
        if self._fused(query_nHQD, key_nJTD, causal, window):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_nHQD, query_nHQD, key_nJTD, value_nJTD, out_nHQD, lse_nHQ, 0.0, causal, scale=self.scale
            )
        heads, dtype, queries = key_nJTD.shape[1], query_nHQD.dtype, []
        grad_key, grad_value = torch.zeros_like(key_nJTD), torch.zeros_like(value_nJTD)
        for rows in _blocks(query_nHQD, key_nJTD):
            query, grad, out, lse = (
                x[:, :, rows].unflatten(1, (heads, -1)) for x in (query_nHQD, grad_nHQD, out_nHQD, lse_nHQ)
            )
            seen = _seen(rows, query_nHQD, key_nJTD, causal, window)
            score, slope = self._scores(query.flatten(1, 2), key_nJTD, seen)
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

    def _scores(self, query_nHQD: Tensor, key_nJTD: Tensor, seen_QT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns scores [n, J, H/J, Q, T] in float32, -inf where unseen, and the softcap's slope (None: 1)."""
        query = query_nHQD.unflatten(1, (key_nJTD.shape[1], -1))
        score = (query.flatten(2, 3) @ key_nJTD.mT).view(*query.shape[:4], -1).float() * self.scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(score / self.softcap)
            score, slope = bent * self.softcap, 1 - bent * bent
        return score if seen_QT is None else score.masked_fill(~seen_QT, -torch.inf), slope


def _computed(x: Tensor) -> Tensor:
    """Compute attention in float32 on a CPU, whose kernel takes three times as long for half precision, backward."""
    return x.float() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x


def takes_flash(key: Tensor, value: Tensor) -> bool:
    """Returns whether the kernel of GPUs takes keys (or queries) and values like these, [..., D]; the meta device
    stands for one that has it.
    """
    width = key.shape[-1]
    if key.dtype not in (torch.bfloat16, torch.float16) or width > _WIDEST or width % 8 or value.shape[-1] != width:
        return False
    return key.is_meta or (key.is_cuda and _has_flash(key.device.index))


@cache
def _has_flash(device: int) -> bool:
    """Returns whether this GPU runs the kernel."""
    return torch.cuda.get_device_capability(device) >= (8, 0) and torch.backends.cuda.is_flash_attention_available()


def _flash_arguments(of: Sequences) -> tuple[tuple[int, int], bool, dict[str, int]]:
    """Returns (longest queries, longest keys), whether it is causal and no window, and what that is."""
    longest = (max(of.query_lengths), max(of.key_lengths))
    if of.window is None:
        return longest, of.causal, {}
    return longest, False, {"window_size_left": of.window - 1, "window_size_right": 0}


def _blocks(query_nHQD: Tensor, key_nJTD: Tensor) -> list[slice]:
    """Queries whose scores are there at a time."""
    batch, heads, queries, _ = query_nHQD.shape
    step = max(1, _SCORES // (batch * heads * key_nJTD.shape[2]))
    return [slice(at, min(at + step, queries)) for at in range(0, queries, step)]


def _seen(rows: slice, query_nHQD: Tensor, key_nJTD: Tensor, causal: bool, window: int | None) -> Tensor | None:
    """Returns which keys these queries see, bool [Q, T]; None: all."""
    if not causal:
        return None
    keys, device = key_nJTD.shape[2], key_nJTD.device
    position_Q = torch.arange(rows.start, rows.stop, device=device)[:, None] + keys - query_nHQD.shape[2]
    position_T = torch.arange(keys, device=device)
    seen_QT = position_T <= position_Q
    return seen_QT if window is None else seen_QT & (position_T > position_Q - window)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that lie one after the other, as a batch of one: a slice, which is not copied."""

    start: int
    stop: int

    def take(self, rows_ND: Tensor) -> Tensor:
        """[N, ...] -> [1, T, ...]."""
        return rows_ND[None, self.start : self.stop]

    def put(self, rows_ND: Tensor, taken_1TD: Tensor) -> None:
        """Put back what `take` took, in place."""
        rows_ND[self.start : self.stop] = taken_1TD[0]

    def clear_padding(self, taken_1TD: Tensor) -> Tensor:
        """Do nothing: packed rows have no padding to clear."""
        return taken_1TD


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length, padded to one batch."""

    index_nT: Tensor  # int64 into N; padding repeats the sequence's last row
    valid_nT: Tensor | None  # int64 into n * T: where there is no padding; None: everywhere

    def take(self, rows_ND: Tensor) -> Tensor:
        """[N, ...] -> [n, T, ...]."""
        taken = rows_ND.index_select(0, self.index_nT.flatten())
        return taken.view(*self.index_nT.shape, *taken.shape[1:])

    def put(self, rows_ND: Tensor, taken_nTD: Tensor) -> None:
        """Put back what `take` took, in place; padding is dropped."""
        index, flat = self.index_nT.flatten(), taken_nTD.flatten(0, 1)
        if self.valid_nT is not None:
            index, flat = index[self.valid_nT], flat[self.valid_nT]
        rows_ND.index_copy_(0, index, flat)

    def clear_padding(self, taken_nTD: Tensor) -> Tensor:
        """Put gradients back with zeros for padding, so that nothing flows back from it."""
        if self.valid_nT is None:
            return taken_nTD
        flat = taken_nTD.flatten(0, 1)
        kept = torch.zeros_like(flat).index_copy_(0, self.valid_nT, flat[self.valid_nT])
        return kept.view(taken_nTD.shape)


Call: TypeAlias = tuple[Run | Bucket, Run | Bucket]  # queries and keys


def _bucketed(sequences: Sequence[tuple[int, int]], device: torch.device) -> list[Run | Bucket]:
    """Sequences (start, length) in buckets, longest first: one joins if that costs less than a call of its own."""
    lone = _LONE if device.type == "cpu" else torch.inf
    buckets: list[list[tuple[int, int]]] = []
    for start, length in sorted(sequences, key=lambda sequence: -sequence[1]):
        padded = buckets[-1][0][1] ** 2 - length**2 if buckets else torch.inf
        if length < lone and padded <= _PADDED_PAIRS_PER_CALL:
            buckets[-1].append((start, length))
        else:
            buckets.append([(start, length)])
    return [_bucket(members, device) for members in buckets]


def _bucket(members: list[tuple[int, int]], device: torch.device) -> Run | Bucket:
    start, longest = members[0]
    if len(members) == 1:
        return Run(start, start + longest)
    start_n1, length_n1 = torch.tensor(members).T[:, :, None]
    step_T = torch.arange(longest)
    index_nT = start_n1 + torch.minimum(step_T, length_n1 - 1)
    valid = (step_T < length_n1).flatten().nonzero().flatten()
    return Bucket(to_device(index_nT, device), None if len(valid) == index_nT.numel() else to_device(valid, device))
