"""The prompt once per group: one flat sequence through the model's own modules, and its attention.

A pack is the tokens of all prompts and then, group by group, those of their completions; every completion's positions
start at its prompt's length. Linear layers see no padding and no prompt twice. A later segment of a completion reads
nothing but itself: it is one more prompt, which nobody answers.

Invariant: a token attends to exactly the tokens it would attend to in a forward of its prompt and its completion
alone, or of a later segment alone. There is no cache: the layout travels through `model.forward(**kwargs)` as
`packed_layout`, so Hugging Face's gradient checkpointing, which drops caches, recomputes the same attention.

Attention has two parts: of each segment (prompt or completion) to itself, causally, and of a group's completions to
their prompt. Each is one call for all segments and groups (`policy.varlen`) and returns its output and log-sum-exp, and
these merge exactly (the identity behind FlashAttention, Dao et al. 2022, and cascade inference, Ye et al. 2024).
Backward, each part needs only the merged output and log-sum-exp. A layer with a sliding window that matters has one
part: every completion to itself and to a copy of as much of its prompt as its first token sees.

Shape legend: N flat tokens, H query heads, J key-value heads, D head width, P tokens of prompts, K keys, M scored
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel

from tba.batch import Batch, to_device
from tba.policy.varlen import Attention, Sequences

ATTENTION = "tba_packed"  # the name the attention function has with transformers


@dataclass(frozen=True)
class PackedLayout:
    """Maps flat tokens to their places; computed once per pack and used by every layer."""

    position_N: Tensor  # int64
    prompts: tuple[int, ...]  # the length of each group's prompt, then of each later segment
    completions: tuple[tuple[int, ...], ...]  # the lengths of its completions
    segments: Sequences  # each segment to itself
    to_prompts: Sequences  # each group's completions to its prompt
    _by_window: dict[int, tuple[Sequences, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: Sequence[int], completions: Sequence[Sequence[int]], device: torch.device) -> PackedLayout:
        """Returns the layout of groups with these prompt lengths and these lengths of their completions."""
        lengths = tuple(tuple(of_group) for of_group in completions)
        answers = [(prompt, n) for prompt, of_group in zip(prompts, lengths, strict=True) for n in of_group]
        read = 1 + max(g for g, of_group in enumerate(lengths) if of_group)  # so many prompts, which come first
        segments = [*prompts, *(length for _, length in answers)]
        positions = [*map(torch.arange, prompts), *(torch.arange(prompt, prompt + n) for prompt, n in answers)]
        return cls(
            position_N=to_device(torch.cat(positions), device),
            prompts=tuple(prompts),
            completions=lengths,
            segments=Sequences.of(segments, segments, device, causal=True),
            to_prompts=Sequences.of([*map(sum, lengths[:read])], prompts[:read], device, causal=False),
        )

    @property
    def prompt_tokens(self) -> int:
        """Returns the number of tokens of all prompts, which come first."""
        return sum(self.prompts)

    @property
    def read_tokens(self) -> int:
        """Returns the number of tokens of the prompts that completions read, which come before later segments."""
        return sum(self.to_prompts.key_lengths)

    @property
    def longest(self) -> int:
        """Returns the most tokens from a prompt's first to its longest completion's last."""
        pairs = zip(self.prompts, self.completions, strict=True)
        return max(prompt + max(lengths, default=0) for prompt, lengths in pairs)

    def window_sequences(self, window: int) -> tuple[Sequences, Tensor]:
        """Returns the sequences of a layer with a sliding window, and the flat token of each key (int64 [K])."""
        if window not in self._by_window:
            device, token, prompt_end = self.position_N.device, self.prompt_tokens, 0
            keys, key_lengths, query_lengths = [torch.arange(token)], list(self.prompts), list(self.prompts)
            for prompt, lengths in zip(self.prompts, self.completions, strict=True):
                prompt_end += prompt
                prefix_length = min(prompt, window - 1)
                for length in lengths:
                    keys += [torch.arange(prompt_end - prefix_length, prompt_end), torch.arange(token, token + length)]
                    key_lengths.append(prefix_length + length)
                    query_lengths.append(length)
                    token += length
            sequences = Sequences.of(query_lengths, key_lengths, device, causal=True, window=window)
            self._by_window[window] = sequences, to_device(torch.cat(keys), device)
        return self._by_window[window]


@dataclass(frozen=True)
class Pack:
    """A batch as one flat sequence, and which of its positions predict which trained token."""

    token_N: Tensor
    layout: PackedLayout
    predictor_M: Tensor  # int64 into N: the position before each trained token
    target_M: Tensor  # int64: the trained tokens
    place_M: Tensor  # int64 into B * T: where they are in the batch


def pack(batch: Batch, device: torch.device) -> Pack:
    """Returns a batch's groups as one flat sequence on `device`. The batch's rows may be in any order.

    The batch is read on the host: one on an accelerator would have to be waited for.
    """
    batch = batch.to("cpu")
    group, length = batch.group_B.tolist(), batch.first_length_B.tolist()
    prompt_length, later_segments = batch.prompt_length_G.tolist(), batch.later_segments()
    rows_of: list[list[int]] = [[] for _ in prompt_length]
    for row, g in enumerate(group):
        rows_of[g].append(row)
    segment_lengths = [end - begin for _, begin, end in later_segments]
    completions = [*([length[b] for b in rows] for rows in rows_of), *([] for _ in later_segments)]
    layout = PackedLayout.of([*prompt_length, *segment_lengths], completions, device)

    tokens = [batch.prompt_GP[g, :n] for g, n in enumerate(prompt_length)]
    tokens += [batch.completion_BT[b, begin:end] for b, begin, end in later_segments]
    predictors, places = [], []
    width, offset, prompt_end = batch.completion_BT.shape[1], sum(prompt_length), -1
    for b, begin, end in later_segments:
        predictors.append(torch.arange(offset - 1, offset - 1 + end - begin))  # the first token is never trained
        places.append(torch.arange(b * width + begin, b * width + end))
        offset += end - begin
    for n, rows in zip(prompt_length, rows_of, strict=True):
        prompt_end += n
        for b in rows:
            tokens.append(batch.completion_BT[b, : length[b]])
            predictor = torch.arange(offset - 1, offset - 1 + length[b])
            predictor[:1] = prompt_end
            predictors.append(predictor)
            places.append(torch.arange(b * width, b * width + length[b]))
            offset += length[b]
    predictor_M, place_M = torch.cat(predictors), torch.cat(places)
    trained_M = batch.mask_BT.flatten()[place_M]
    predictor_M, place_M = predictor_M[trained_M], place_M[trained_M]
    parts = (torch.cat(tokens), predictor_M, batch.completion_BT.flatten()[place_M], place_M)
    token_N, predictor_M, target_M, place_M = to_device(torch.cat(parts), device).split([len(part) for part in parts])
    return Pack(token_N, layout, predictor_M, target_M, place_M)


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
    """Attends as transformers asks for it in each layer. Returns ([1, N, H, D], None).

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
    attention = Attention(scale, softcap)
    if window is not None:
        sequences, index_K = packed_layout.window_sequences(window)
        return _WindowedAttention.apply(query_1HND, key_1JND, value_1JND, sequences, index_K, attention), None
    return _MergedAttention.apply(query_1HND, key_1JND, value_1JND, packed_layout, attention), None


AttentionInterface.register(ATTENTION, packed_attention)


def exclude_packed_attention_from_compile() -> None:
    """Keep `torch.compile` out of attention from here on; its layout is new with every batch."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))


class _MergedAttention(torch.autograd.Function):
    """Both parts of packed attention, and their exact gradient."""

    @staticmethod
    def forward(
        ctx: Any, query_1HND: Tensor, key_1JND: Tensor, value_1JND: Tensor, layout: PackedLayout, attention: Attention
    ) -> Tensor:
        """Returns [1, N, H, D], the order that transformers expects."""
        query, key, value = (x[0].transpose(0, 1) for x in (query_1HND, key_1JND, value_1JND))  # [N, heads, D]
        out_NHD, lse_HN = attention.forward(query, key, value, layout.segments)
        n, read = layout.prompt_tokens, layout.read_tokens
        prompt_out, prompt_lse = attention.forward(query[n:], key[:read], value[:read], layout.to_prompts)
        segment_out, segment_lse = out_NHD[n:], lse_HN[:, n:]
        share = torch.sigmoid(prompt_lse - segment_lse).T.to(prompt_out.dtype)  # of the prompt's part
        torch.lerp(segment_out, prompt_out, share[..., None], out=segment_out)
        torch.logaddexp(segment_lse, prompt_lse, out=segment_lse)
        ctx.save_for_backward(query_1HND, key_1JND, value_1JND, out_NHD, lse_HN)
        ctx.layout, ctx.attention = layout, attention
        return out_NHD[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1NHD: Tensor) -> tuple[Tensor | None, ...]:
        layout, n, read = ctx.layout, ctx.layout.prompt_tokens, ctx.layout.read_tokens
        *flat, out, lse = ctx.saved_tensors
        query, key, value = (x[0].transpose(0, 1) for x in flat)
        grad = grad_1NHD[0]
        grads = ctx.attention.backward(grad, query, key, value, out, lse, layout.segments)
        prompt_grads = ctx.attention.backward(
            grad[n:], query[n:], key[:read], value[:read], out[n:], lse[:, n:], layout.to_prompts
        )
        row_slices = (slice(n, None), slice(read), slice(read))
        for segment_grad, rows, prompt_grad in zip(grads, row_slices, prompt_grads, strict=True):
            segment_grad[rows] += prompt_grad
        return *(x.transpose(0, 1)[None] for x in grads), None, None


class _WindowedAttention(torch.autograd.Function):
    """Packed attention with a sliding window: the end of a prompt is copied to each of its completions."""

    @staticmethod
    def forward(
        ctx: Any,
        query_1HND: Tensor,
        key_1JND: Tensor,
        value_1JND: Tensor,
        sequences: Sequences,
        index_K: Tensor,
        attention: Attention,
    ) -> Tensor:
        """Returns [1, N, H, D], the order that transformers expects."""
        query, key, value = (x[0].transpose(0, 1) for x in (query_1HND, key_1JND, value_1JND))
        out_NHD, lse_HN = attention.forward(
            query, key.index_select(0, index_K), value.index_select(0, index_K), sequences
        )
        ctx.save_for_backward(query_1HND, key_1JND, value_1JND, out_NHD, lse_HN, index_K)
        ctx.sequences, ctx.attention = sequences, attention
        return out_NHD[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1NHD: Tensor) -> tuple[Tensor | None, ...]:
        *flat, out, lse, index_K = ctx.saved_tensors
        query, key, value = (x[0].transpose(0, 1) for x in flat)
        copies = (key.index_select(0, index_K), value.index_select(0, index_K))
        grad_query, *grads = ctx.attention.backward(grad_1NHD[0], query, *copies, out, lse, ctx.sequences)
        grad_key, grad_value = (_sum_copies(grad, index_K, len(key)) for grad in grads)
        return *(x.transpose(0, 1)[None] for x in (grad_query, grad_key, grad_value)), None, None, None


def _sum_copies(grad_KJD: Tensor, index_K: Tensor, rows: int) -> Tensor:
    """Adds up the gradients of all copies of each row, in float32 at least: [rows, J, D]."""
    dtype = torch.promote_types(grad_KJD.dtype, torch.float32)
    sum_NJD = grad_KJD.new_zeros(rows, *grad_KJD.shape[1:], dtype=dtype)
    return sum_NJD.index_add_(0, index_K, grad_KJD.to(dtype)).to(grad_KJD.dtype)


def packed_hidden(body: PreTrainedModel, pack: Pack) -> Tensor:
    """Returns the last hidden states [N, hidden] of a pack; the model's attention must be `ATTENTION`."""
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
    other_kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other_kinds:
        return f"it has layers of kind {', '.join(sorted(other_kinds))}"
    if not (model._can_set_attn_implementation() and getattr(model, "_supports_attention_backend", True)):
        return "its class does not let the attention function be chosen"
    body, implementation = model.get_decoder(), model.config._attn_implementation
    probe = _probe(config.vocab_size)
    model.set_attn_implementation("eager")  # as its authors wrote it; transformers' sdpa drops Gemma2's softcap
    plain_ND = _plain_hidden(body, probe, model.device)
    model.set_attn_implementation(ATTENTION)
    try:
        fault = _difference(packed_hidden(body, pack(probe, model.device)), plain_ND)
    except (UnsupportedAttentionError, TypeError, ValueError, RuntimeError) as error:
        fault = str(error)
    if fault is not None:
        model.set_attn_implementation(implementation)
    return fault


def _probe(vocabulary: int) -> Batch:
    """Returns a batch of two ragged groups, of prompts of 5 and 3 tokens."""
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
    )


def _plain_hidden(body: PreTrainedModel, batch: Batch, device: torch.device) -> Tensor:
    """Returns what `packed_hidden` should give of a batch whose rows are in the order of groups, row by row: [N,
    hidden].
    """
    prompts: dict[int, Tensor] = {}
    completions = []
    for row, group in enumerate(batch.group_B.tolist()):
        prompt = batch.prompt_GP[group, : batch.prompt_length_G[group]]
        token = torch.cat([prompt, batch.completion_BT[row, : batch.length_B[row]]]).to(device)
        hidden = body(input_ids=token[None], use_cache=False).last_hidden_state[0]
        prompts.setdefault(group, hidden[: len(prompt)])
        completions.append(hidden[len(prompt) :])
    return torch.cat([*prompts.values(), *completions])


def _difference(packed_ND: Tensor, plain_ND: Tensor) -> str | None:
    share = float((packed_ND - plain_ND).abs().max() / plain_ND.abs().max())
    tolerance = 1e-4 if plain_ND.dtype == torch.float32 else 0.03
    return None if share <= tolerance else f"a pack differs from the plain forward by {share:.1g} of its largest value"
