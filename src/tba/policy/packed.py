"""The prompt once per group: one flat sequence through the model's own modules, and its attention.

A pack is, for each group, the prompt's tokens and then those of each of its completions; every completion's positions
start again at the prompt's length. Linear layers see no padding and no prompt twice.

Invariant: a token attends to exactly the tokens it would attend to in a forward of its prompt and its completion
alone. There is no cache: the layout travels through `model.forward(**kwargs)` as `packed_layout`, so Hugging Face's
gradient checkpointing, which drops caches, recomputes the same attention.

Attention has two parts: of each segment (prompt or completion) to itself, causally, and of a group's completions to
their prompt, which is one product for all of them. Each part returns its output and log-sum-exp, and these merge
exactly (the identity behind FlashAttention, Dao et al. 2022, and cascade inference, Ye et al. 2024). Backward, each
part needs only the merged output and log-sum-exp.

Shape legend: N flat tokens, H query heads, J key-value heads, D head width, n segments of one bucket, T their padded
length, Q queries and K keys of one part, M scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel

from tba.batch import Batch

ATTENTION = "tba_packed"  # the name the attention function has with transformers
_PADDED_PAIRS_PER_CALL = 1024  # attention pairs of padding that cost about as much as one more kernel call
_LONE_ON_CPU = 48  # tokens from which copying a segment into a bucket costs more than a call of its own
_NOTHING_SEEN = -1e30  # the log-sum-exp of a query that sees no key of a part


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of similar length that attend to themselves in one call; a single one is a slice and is not copied."""

    start: int
    stop: int
    index_nT: Tensor | None = None  # int64 into N; padding repeats the segment's last token. None: start..stop
    valid_nT: Tensor | None = None  # int64 into n * T: where tokens are; None: everywhere

    def take(self, rows_1ND: Tensor) -> Tensor:
        """[1, N, ...] -> [n, T, ...]."""
        if self.index_nT is None:
            return rows_1ND[:, self.start : self.stop]
        taken = rows_1ND[0].index_select(0, self.index_nT.flatten())
        return taken.view(*self.index_nT.shape, *taken.shape[1:])

    def put(self, rows_1ND: Tensor, taken_nTD: Tensor) -> None:
        """The inverse of `take`, in place; padding is dropped."""
        if self.index_nT is None:
            rows_1ND[:, self.start : self.stop] = taken_nTD
            return
        index, flat = self.index_nT.flatten(), taken_nTD.flatten(0, 1)
        if self.valid_nT is not None:
            index, flat = index[self.valid_nT], flat[self.valid_nT]
        rows_1ND[0].index_copy_(0, index, flat)

    def clear_padding(self, taken_nTD: Tensor) -> Tensor:
        """The same with zeros where there is no token, so that nothing flows back from padding."""
        if self.index_nT is None or self.valid_nT is None:
            return taken_nTD
        flat = taken_nTD.flatten(0, 1)
        kept = torch.zeros_like(flat).index_copy_(0, self.valid_nT, flat[self.valid_nT])
        return kept.view(taken_nTD.shape)


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Where a group lies: its prompt, then all its completions, in the flat sequence."""

    prompt: slice
    completions: slice


@dataclass(frozen=True)
class PackedLayout:
    """Which flat token belongs where; computed once per pack and used by every layer."""

    position_N: Tensor  # int64
    groups: tuple[GroupSpan, ...]
    buckets: tuple[Bucket, ...]
    longest: int  # tokens from a prompt's first to its longest completion's last

    @classmethod
    def of(cls, prompts: Sequence[int], completions: Sequence[Sequence[int]], device: torch.device) -> PackedLayout:
        """The layout of groups with these prompt lengths and these lengths of their completions."""
        spans, segments, positions = [], [], []
        at = longest = 0
        for prompt, lengths in zip(prompts, completions, strict=True):
            segments.append((at, prompt))
            positions.append(torch.arange(prompt))
            start = at = at + prompt
            for length in lengths:
                segments.append((at, length))
                positions.append(torch.arange(prompt, prompt + length))
                at += length
            spans.append(GroupSpan(slice(start - prompt, start), slice(start, at)))
            longest = max(longest, prompt + max(lengths, default=0))
        return cls(torch.cat(positions).to(device), tuple(spans), _bucketed(segments, device), longest)


@dataclass(frozen=True)
class Pack:
    """A batch as one flat sequence, and which of its positions predict which trained token."""

    token_N: Tensor
    layout: PackedLayout
    predictor_M: Tensor  # int64 into N: the position before each trained token
    target_M: Tensor  # int64: the trained tokens
    place_M: Tensor  # int64 into B * T: where they are in the batch


def pack(batch: Batch) -> Pack:
    """One flat sequence of a batch's groups. Its rows may be in any order."""
    device = batch.completion_BT.device
    order_B = torch.argsort(batch.group_B, stable=True)
    group, length = batch.group_B.tolist(), batch.length_B.tolist()
    prompt_length = batch.prompt_length_G.tolist()
    rows_of: list[list[int]] = [[] for _ in prompt_length]
    for row in order_B.tolist():
        rows_of[group[row]].append(row)
    layout = PackedLayout.of(prompt_length, [[length[b] for b in rows] for rows in rows_of], device)

    tokens, predictors, places = [], [], []
    width, at = batch.completion_BT.shape[1], 0
    for g, rows in enumerate(rows_of):
        tokens.append(batch.prompt_GP[g, : prompt_length[g]])
        at += prompt_length[g]
        last = at - 1
        for b in rows:
            tokens.append(batch.completion_BT[b, : length[b]])
            predictor = torch.arange(at - 1, at - 1 + length[b])
            predictor[0] = last
            predictors.append(predictor)
            places.append(torch.arange(b * width, b * width + length[b]))
            at += length[b]
    predictor_M, place_M = torch.cat(predictors).to(device), torch.cat(places).to(device)
    trained_M = batch.mask_BT.flatten()[place_M]
    predictor_M, place_M = predictor_M[trained_M], place_M[trained_M]
    return Pack(torch.cat(tokens), layout, predictor_M, batch.completion_BT.flatten()[place_M], place_M)


def _bucketed(segments: Sequence[tuple[int, int]], device: torch.device) -> tuple[Bucket, ...]:
    """Segments (start, length) in buckets, longest first: one joins if that costs less than a call of its own."""
    lone = _LONE_ON_CPU if device.type == "cpu" else torch.inf
    buckets: list[list[tuple[int, int]]] = []
    for start, length in sorted(segments, key=lambda segment: -segment[1]):
        padded = buckets[-1][0][1] ** 2 - length**2 if buckets else torch.inf
        if length < lone and padded <= _PADDED_PAIRS_PER_CALL:
            buckets[-1].append((start, length))
        else:
            buckets.append([(start, length)])
    return tuple(_bucket(members, device) for members in buckets)


def _bucket(members: list[tuple[int, int]], device: torch.device) -> Bucket:
    start, longest = members[0]
    if len(members) == 1:
        return Bucket(start, start + longest)
    start_n1, length_n1 = torch.tensor(members).T[:, :, None]
    step_T = torch.arange(longest)
    index_nT = start_n1 + torch.minimum(step_T, length_n1 - 1)
    valid = (step_T < length_n1).flatten().nonzero().flatten()
    return Bucket(0, 0, index_nT.to(device), None if len(valid) == index_nT.numel() else valid.to(device))


class UnsupportedAttentionError(Exception):
    """The model asks something of its attention that a pack cannot give; it takes the plain forward."""


def packed_attention(
    module: torch.nn.Module,
    query_1HND: Tensor,
    key_1JND: Tensor,
    value_1JND: Tensor,
    attention_mask: Tensor | None,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in each layer. Returns ([1, N, H, D], None).

    Dropout is not applied, whatever the model's mode: the policy is the function without it, so that its
    log-ratio to its own copy is 0.

    Raises `UnsupportedAttentionError` for masks, biases and sinks, and `ValueError` when the layout is missing.
    """
    if packed_layout is None:
        raise ValueError(
            f"the attention '{ATTENTION}' was called without packed_layout: this model belongs to a policy; "
            "use the policy's evaluate, or call model.set_attn_implementation('sdpa') before a forward of your own"
        )
    if attention_mask is not None or any(kwargs.get(name) is not None for name in ("s_aux", "position_bias")):
        raise UnsupportedAttentionError("it uses an attention mask, a position bias or attention sinks of its own")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds and kinds[module.layer_idx] == "sliding_attention" and sliding_window is None:
        raise UnsupportedAttentionError("its sliding window does not reach the attention function")
    scale = query_1HND.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window if sliding_window is not None and sliding_window < packed_layout.longest else None
    return _Merged.apply(query_1HND, key_1JND, value_1JND, packed_layout, _Kernel(scale, window, softcap)), None


AttentionInterface.register(ATTENTION, packed_attention)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Attention of Q queries to K keys, which also tells its log-sum-exp: fused on the CPU, else written out."""

    scale: float
    window: int | None  # a query at position p sees keys at positions above p - window; None: all
    softcap: float | None

    def forward(
        self, query_nHQD: Tensor, key_nJKD: Tensor, value_nJKD: Tensor, position_Q: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output [n, H, Q, D] and log-sum-exp [n, H, Q] (float32)."""
        if self._fused(query_nHQD):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_nHQD, key_nJKD, value_nJKD, 0.0, causal, scale=self.scale
            )
        score, _ = self._scores(query_nHQD, key_nJKD, position_Q)
        lse = score.logsumexp(-1).clamp_(min=_NOTHING_SEEN)
        weight = (score - lse[..., None]).exp().to(value_nJKD.dtype)
        out = weight.flatten(2, 3) @ value_nJKD  # [n, J, H/J * Q, D]
        return out.view(query_nHQD.shape), lse.flatten(1, 2)

    def backward(
        self,
        grad_nHQD: Tensor,
        query_nHQD: Tensor,
        key_nJKD: Tensor,
        value_nJKD: Tensor,
        out_nHQD: Tensor,
        lse_nHQ: Tensor,
        position_Q: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; `out` and `lse` are the merged ones."""
        if self._fused(query_nHQD):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_nHQD, query_nHQD, key_nJKD, value_nJKD, out_nHQD, lse_nHQ, 0.0, causal, scale=self.scale
            )
        heads = key_nJKD.shape[1]
        score, slope = self._scores(query_nHQD, key_nJKD, position_Q)
        weight = (score - lse_nHQ.unflatten(1, (heads, -1))[..., None]).exp()
        grad, query = grad_nHQD.unflatten(1, (heads, -1)), query_nHQD.unflatten(1, (heads, -1))
        delta = (grad * out_nHQD.unflatten(1, (heads, -1))).sum(-1, keepdim=True, dtype=torch.float32)
        grad_weight = (grad.flatten(2, 3) @ value_nJKD.mT).view(weight.shape)
        grad_score = weight * (grad_weight - delta) * self.scale
        if slope is not None:
            grad_score *= slope
        dtype = query.dtype
        weight, grad_score = weight.to(dtype).flatten(2, 3), grad_score.to(dtype).flatten(2, 3)
        grad_query = (grad_score @ key_nJKD).view(query_nHQD.shape)
        return grad_query, grad_score.mT @ query.flatten(2, 3), weight.mT @ grad.flatten(2, 3)

    def _fused(self, query: Tensor) -> bool:
        return query.device.type == "cpu" and self.window is None and self.softcap is None

    def _scores(self, query_nHQD: Tensor, key_nJKD: Tensor, position_Q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores [n, J, H/J, Q, K] in float32, -inf where unseen, and the softcap's slope (None: 1)."""
        query = query_nHQD.unflatten(1, (key_nJKD.shape[1], -1))
        score = (query.flatten(2, 3) @ key_nJKD.mT).view(*query.shape[:4], -1).float() * self.scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(score / self.softcap)
            score, slope = bent * self.softcap, 1 - bent * bent
        key_position_K = torch.arange(score.shape[-1], device=score.device)
        seen_QK = key_position_K <= position_Q[:, None]
        if self.window is not None:
            seen_QK &= key_position_K > position_Q[:, None] - self.window
        return score.masked_fill(~seen_QK, -torch.inf), slope


class _Merged(torch.autograd.Function):
    """Both parts of packed attention, and their exact gradient."""

    @staticmethod
    def forward(
        ctx: Any, query_1HND: Tensor, key_1JND: Tensor, value_1JND: Tensor, layout: PackedLayout, kernel: _Kernel
    ) -> Tensor:
        """[1, N, H, D]: the order transformers wants back."""
        query, key, value = (x.transpose(1, 2) for x in (query_1HND, key_1JND, value_1JND))
        out_1NHD = query.new_empty(query.shape[:3] + value.shape[3:])
        lse_1NH = query.new_empty(query.shape[:3], dtype=torch.float32)
        for bucket in layout.buckets:
            q, k, v = (bucket.take(x).transpose(1, 2) for x in (query, key, value))
            out, lse = kernel.forward(q, k, v, _steps(q), causal=True)
            bucket.put(out_1NHD, out.transpose(1, 2))
            bucket.put(lse_1NH, lse.transpose(1, 2))
        for group in layout.groups:
            part, prompt = group.completions, group.prompt
            q, k, v = query_1HND[:, :, part], key_1JND[:, :, prompt], value_1JND[:, :, prompt]
            out, lse = kernel.forward(q, k, v, layout.position_N[part], causal=False)
            own = lse_1NH[:, part]
            merged = torch.logaddexp(own, lse.transpose(1, 2))
            out_1NHD[:, part] *= (own - merged).exp_().to(out.dtype)[..., None]
            out_1NHD[:, part] += out.transpose(1, 2) * (lse.transpose(1, 2) - merged).exp_().to(out.dtype)[..., None]
            lse_1NH[:, part] = merged
        ctx.save_for_backward(query_1HND, key_1JND, value_1JND, out_1NHD, lse_1NH)
        ctx.layout, ctx.kernel = layout, kernel
        return out_1NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1NHD: Tensor) -> tuple[Tensor | None, ...]:
        layout, kernel = ctx.layout, ctx.kernel
        query, key, value, out, lse = ctx.saved_tensors
        flat = tuple(x.transpose(1, 2) for x in (query, key, value))
        grads = tuple(torch.empty_like(x) for x in flat)  # [1, N, heads, D]; the buckets cover every token
        for bucket in layout.buckets:
            taken = (bucket.take(x).transpose(1, 2) for x in (*flat, out, lse))
            q, k, v, o, s = taken
            grad = bucket.clear_padding(bucket.take(grad_1NHD)).transpose(1, 2)
            own = kernel.backward(grad, q, k, v, o, s.contiguous(), _steps(q), causal=True)
            for rows, part in zip(grads, own, strict=True):
                bucket.put(rows, part.transpose(1, 2))
        for group in layout.groups:
            part, prompt = group.completions, group.prompt
            shared = kernel.backward(
                grad_1NHD.transpose(1, 2)[:, :, part],
                query[:, :, part],
                key[:, :, prompt],
                value[:, :, prompt],
                out.transpose(1, 2)[:, :, part],
                lse.transpose(1, 2)[:, :, part].contiguous(),
                layout.position_N[part],
                causal=False,
            )
            for rows, place, grad in zip(grads, (part, prompt, prompt), shared, strict=True):
                rows[:, place] += grad.transpose(1, 2)
        return *(rows.transpose(1, 2) for rows in grads), None, None


def _steps(query_nHTD: Tensor) -> Tensor:
    """Positions within a segment: only differences matter to causality and windows."""
    return torch.arange(query_nHTD.shape[2], device=query_nHTD.device)


def packed_hidden(body: PreTrainedModel, pack: Pack) -> Tensor:
    """The last hidden states [N, hidden] of a pack; the model's attention must be `ATTENTION`."""
    out = body(
        input_ids=pack.token_N[None],
        position_ids=pack.layout.position_N[None],
        use_cache=False,
        packed_layout=pack.layout,
    )
    return out.last_hidden_state[0]


@torch.no_grad()
def use_packed_attention(model: PreTrainedModel) -> str | None:
    """Give the model packed attention for good. Returns None, or why it cannot have it (and it keeps its own).

    Besides what a model says of itself, a small pack is compared with the plain forward of its rows: what the
    layout does not reach (recurrent layers, masks a model makes for itself) shows as a difference.
    """
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        return f"it has layers of kind {', '.join(sorted(other))}"
    if not (model._can_set_attn_implementation() and getattr(model, "_supports_attention_backend", True)):
        return "its class does not let the attention function be chosen"
    body, before = model.get_decoder(), model.config._attn_implementation
    probe = _probe(config.vocab_size, model.device)
    model.set_attn_implementation("eager")  # as its authors wrote it; transformers' sdpa drops Gemma2's softcap
    plain_ND = _plain_hidden(body, probe)
    model.set_attn_implementation(ATTENTION)
    try:
        fault = _difference(packed_hidden(body, pack(probe)), plain_ND)
    except (UnsupportedAttentionError, TypeError, ValueError, RuntimeError) as error:
        fault = str(error)
    if fault is not None:
        model.set_attn_implementation(before)
    return fault


def _probe(vocabulary: int, device: torch.device) -> Batch:
    """Two ragged groups, of prompts of 5 and 3 tokens."""
    length_B = torch.tensor([4, 2, 6, 3])
    token = torch.arange(34) * 7919 % vocabulary
    return Batch(
        prompt_GP=token[:10].view(2, 5),
        prompt_length_G=torch.tensor([5, 3]),
        completion_BT=token[10:34].view(4, 6),
        length_B=length_B,
        mask_BT=torch.arange(6) < length_B[:, None],
        log_reference_BT=torch.zeros(4, 6),
        reward_B=torch.zeros(4),
        group_B=torch.tensor([0, 0, 1, 1]),
    ).to(device)


def _plain_hidden(body: PreTrainedModel, batch: Batch) -> Tensor:
    """What `packed_hidden` should give of a batch of whole groups, row by row: [N, hidden]."""
    parts, seen = [], set()
    for row, group in enumerate(batch.group_B.tolist()):
        prompt = batch.prompt_GP[group, : batch.prompt_length_G[group]]
        token = torch.cat([prompt, batch.completion_BT[row, : batch.length_B[row]]])
        hidden = body(input_ids=token[None], use_cache=False).last_hidden_state[0]
        parts.append(hidden[len(prompt) if group in seen else 0 :])
        seen.add(group)
    return torch.cat(parts)


def _difference(packed_ND: Tensor, plain_ND: Tensor) -> str | None:
    worst = float((packed_ND - plain_ND).abs().max() / plain_ND.abs().max())
    allowed = 1e-4 if plain_ND.dtype == torch.float32 else 0.03
    return None if worst <= allowed else f"a pack differs from the plain forward by {worst:.1g} of its largest value"
