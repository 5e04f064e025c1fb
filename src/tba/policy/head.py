"""Log-probabilities of tokens from hidden states, without ever holding all logits; and linear heads.

Invariant: equal to `log_softmax(head(hidden) / temperature)` in float32 at the target tokens, values and gradients.

With p = softmax(z), d log p_y / dz = onehot(y) - p, so both gradients are one matrix product with p - onehot(y). It is
formed in float32, because little is left of it where p_y is near 1, and kept for the first tokens, as many as
`ProbabilityBuffer` may hold; for the others it is computed again, a chunk at a time. What is kept is made in chunks and
read by one product for each gradient. Products are added up in float32 (except those of a head with a softcap, whose
gradient is autograd's, in the weight's type). Logits are rounded to the weight's type, because the engine rounds them
so: exact ones would be farther from what it sampled with.

The entropy of p costs nothing beside this: it is E[z_y - z] - log p_y over p, and E[z - z_y] = hidden . (p - onehot(y))
W, a product that the backward pass makes.

Where probabilities of several tokens are needed at a place (`bucket_log_probabilities`), p is kept likewise.

Shape legend: M tokens, W hidden width, V vocabulary, C tokens of one block, J tokens at a place, K most probable ones.

Linear heads on hidden states (`linear_heads`): a value before each token, log Z of a prompt.

Invariant: they begin at zero, are float32 whatever the model is, and belong to the policy that trains them: saved next
to its model, never published.

Shape legend: N any number of hidden states, W their width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tba.gpus import free_gpu_bytes
from tba.protocols import HEADS

_KEPT_SHARE = 0.75  # of a GPU's memory that is free beside all that the head needs, for what it keeps
_LEAST_PROBABILITY = torch.finfo(torch.float32).tiny  # of what others leave, whose logarithm has to be finite


@dataclass(frozen=True)
class Head:
    """The last layer of a language model as numbers: logits = cap * tanh((hidden @ weight.T + bias) / cap)."""

    weight_VW: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    compiled: bool = False  # torch.compile makes p - onehot(y) of logits in one kernel, where p is kept

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head | None:
        """Returns the model's head, or None where its logits are made in some other way (which a comparison shows)."""
        layer = model.get_output_embeddings()
        if not isinstance(layer, torch.nn.Linear) or model.get_decoder() is model:  # its body cannot be run by itself
            return None
        config = model.config.get_text_config()
        head = cls(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None))
        probe = torch.arange(4, device=model.device)[None] % config.vocab_size
        with torch.no_grad():
            head_logits = head.logits(model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state)
            model_logits = model(input_ids=probe, use_cache=False).logits.float()
        return head if torch.allclose(head_logits, model_logits, rtol=1e-3, atol=1e-4) else None

    def logits(self, hidden_MW: Tensor) -> Tensor:
        """Returns plain float32 logits [M, V]."""
        logits = torch.nn.functional.linear(hidden_MW, self.weight_VW, self.bias_V).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class ProbabilityBuffer:
    """A buffer lent by a forward to its backward: of at most `limit` bytes, or on a GPU as large as the free memory
    allows.

    On the host one buffer stays for the next forward: new memory costs more than its first use (every page of it is a
    fault). A GPU's memory goes back to torch's allocator, which has it for the layers' backward.
    """

    def __init__(self, limit: int, free_bytes: Callable[[torch.device], int | None] = free_gpu_bytes) -> None:
        self._limit, self._free_bytes = limit, free_bytes
        self._buffer: Tensor | None = None

    def capacity(self, weight_VW: Tensor, chunk: int, tokens: int) -> int:
        """Returns how many of so many tokens' probabilities are kept. chunk: tokens whose logits are there besides."""
        row_bytes, limit = len(weight_VW) * weight_VW.element_size(), self._limit
        if (free_bytes := self._free_bytes(weight_VW.device)) is not None:
            work_bytes = chunk * (row_bytes + 8 * len(weight_VW))  # logits, and in float32 with their logarithms
            # in float32 the weight's gradient and what is added to it; gradients of the hidden states, and these scaled
            work_bytes += 8 * weight_VW.numel()
            work_bytes += 3 * tokens * weight_VW.shape[1] * weight_VW.element_size()
            limit = max(limit, int(_KEPT_SHARE * (free_bytes - work_bytes)))
        return min(tokens, limit // row_bytes)

    def lend(self, rows: int, like_VW: Tensor) -> Tensor:
        """Returns [rows, V], of undefined content, with the weight's dtype and device; fewer rows, but as many as the
        limit allows, where free memory is in pieces that hold no more.
        """
        size, buffer = rows * len(like_VW), self._buffer
        self._buffer = None
        if buffer is None or len(buffer) < size or (buffer.dtype, buffer.device) != (like_VW.dtype, like_VW.device):
            buffer = self._allocate(rows, like_VW)
            rows = len(buffer) // len(like_VW)
        return buffer[: rows * len(like_VW)].view(rows, len(like_VW))

    def _allocate(self, rows: int, like_VW: Tensor) -> Tensor:
        least_rows = self._limit // (len(like_VW) * like_VW.element_size())
        while rows > least_rows:
            try:
                return like_VW.new_empty(rows * len(like_VW))
            except torch.OutOfMemoryError:
                rows = max(least_rows, rows // 2)
        return like_VW.new_empty(rows * len(like_VW))

    def give_back(self, rows_KV: Tensor) -> None:
        """Take back rows whose content is no longer needed."""
        if rows_KV.device.type != "cpu":
            return
        buffer = rows_KV._base if rows_KV._base is not None else rows_KV
        if self._buffer is None or len(self._buffer) < buffer.numel():
            self._buffer = buffer.view(-1)


def token_log_probabilities(
    hidden_MW: Tensor,
    head: Head,
    target_M: Tensor,
    temperature: float,
    chunk: int,
    buffer: ProbabilityBuffer,
    entropy_M: Tensor | None = None,
) -> Tensor:
    """Returns log p(target | hidden), float32 [M]. Beyond what the buffer holds, `chunk` tokens' logits are there at a
    time. The entropy of p, in nats, is written into `entropy_M` (float32) when the gradient is taken.
    """
    if not len(target_M):
        return hidden_MW.float().sum(-1)  # empty, but with a gradient
    if entropy_M is None:
        entropy_M = target_M.new_empty(0, dtype=torch.float32)
    if head.softcap is None:
        weights = _weights_of(head)
        return _TokenLogProbabilities.apply(
            hidden_MW, *weights, target_M, temperature, chunk, buffer, entropy_M, head.compiled
        )

    def of_chunk(entropy_C: Tensor, hidden_CW: Tensor, target_C: Tensor) -> Tensor:
        log_CV = torch.log_softmax(head.logits(hidden_CW) / temperature, -1)
        log_C = log_CV.gather(-1, target_C[:, None])[:, 0]
        if len(entropy_C):  # at the end: computed again for the gradient, it stops before
            write_entropy(log_CV, entropy_C)
        return log_C

    return _in_chunks(of_chunk, entropy_M, hidden_MW, target_M, chunk)


def bucket_log_probabilities(
    hidden_MW: Tensor,
    head: Head,
    bucket_MJ: Tensor,
    temperature: float,
    chunk: int,
    buffer: ProbabilityBuffer,
    entropy_M: Tensor | None = None,
) -> Tensor:
    """Returns `split_buckets` of the head's logits, float32 [M, J + 1]. Beyond what the buffer holds, `chunk` tokens'
    logits are there at a time. The entropy of p, in nats, is written into `entropy_M` (float32).
    """
    if not len(bucket_MJ):
        return hidden_MW.float().sum(-1, keepdim=True).expand(0, bucket_MJ.shape[1] + 1)
    if entropy_M is None:
        entropy_M = hidden_MW.new_empty(0, dtype=torch.float32)
    if head.softcap is None:
        return _BucketLogProbabilities.apply(
            hidden_MW, *_weights_of(head), bucket_MJ, temperature, chunk, buffer, entropy_M
        )

    def of_chunk(entropy_C: Tensor, hidden_CW: Tensor, bucket_CJ: Tensor) -> Tensor:
        logits_CV = head.logits(hidden_CW) / temperature
        log_CJ = split_buckets(logits_CV, bucket_CJ)
        if len(entropy_C):
            write_entropy(torch.log_softmax(logits_CV.detach(), -1), entropy_C)
        return log_CJ

    return _in_chunks(of_chunk, entropy_M, hidden_MW, bucket_MJ, chunk)


def _weights_of(head: Head) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias; where autograd is off they take no gradient, so that nothing is kept for one: a Function
    is not told that it is off. On a CPU they stay, because other chunks give other bits.
    """
    if torch.is_grad_enabled() or head.weight_VW.device.type == "cpu":
        return head.weight_VW, head.bias_V
    return head.weight_VW.detach(), None if head.bias_V is None else head.bias_V.detach()


def split_buckets(logits_NV: Tensor, bucket_NJ: Tensor) -> Tensor:
    """Returns the log-probability of a sampled token, which comes first, of the other J - 1 tokens of each row, and of
    all tokens but these others together: [N, J + 1]. The last is -inf where the others are the whole vocabulary.
    """
    log_total_N1 = logits_NV.logsumexp(-1, keepdim=True)
    log_NJ, other_NK = logits_NV.gather(1, bucket_NJ) - log_total_N1, bucket_NJ[:, 1:]
    if other_NK.shape[1] >= logits_NV.shape[1]:
        log_rest_N1 = torch.full_like(log_total_N1, -torch.inf)
    else:
        log_rest_N1 = logits_NV.scatter(1, other_NK, -torch.inf).logsumexp(-1, keepdim=True) - log_total_N1
    return torch.cat([log_NJ, log_rest_N1], 1)


@torch.no_grad()
def top_tokens(
    hidden_MW: Tensor, head: Head, target_M: Tensor, count: int, temperature: float, chunk: int, below: int | None
) -> tuple[Tensor, Tensor]:
    """Returns the `count` most probable tokens, int64 [M, K], and `split_buckets` of the targets and of these, without
    a gradient. `chunk` tokens' logits are there at a time. below: only tokens with smaller numbers are named.
    """
    if not len(target_M):
        names = min(count, len(head.weight_VW) if below is None else below)
        return target_M.new_empty(0, names), hidden_MW.new_empty(0, names + 2, dtype=torch.float32)
    parts = []
    for rows in _blocks(len(target_M), 0, chunk):
        logits_CV = head.logits(hidden_MW[rows]) / temperature
        parts.append(top_of(logits_CV, target_M[rows], count, below))
    ids, logs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logs)


def top_of(logits_NV: Tensor, target_N: Tensor, count: int, below: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest logits' tokens, int64 [N, K], and `split_buckets` of the targets and of these. below:
    only tokens with smaller numbers are named.
    """
    candidates_NV = logits_NV[:, :below]
    top_NK = candidates_NV.topk(min(count, candidates_NV.shape[1]), -1).indices
    return top_NK, split_buckets(logits_NV, torch.cat([target_N[:, None], top_NK], 1))


def _in_chunks(
    of_chunk: Callable[[Tensor, Tensor, Tensor], Tensor], entropy_M: Tensor, hidden_MW: Tensor, ids: Tensor, chunk: int
) -> Tensor:
    """Returns a function of chunks of tokens for all of them; what it keeps is computed again for the gradient."""
    parts = [
        checkpoint(
            partial(of_chunk, entropy_M[rows]),  # no argument: those must not change
            hidden_MW[rows],
            ids[rows],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for rows in _blocks(len(ids), 0, chunk)
    ]
    return torch.cat(parts)


@torch.no_grad()
def write_entropy(log_NV: Tensor, entropy_N: Tensor) -> None:
    """Write the entropy of each row of log-probabilities, in nats, into `entropy_N`."""
    entropy_N.copy_(torch.special.entr(log_NV.exp()).sum(-1))


class _TokenLogProbabilities(torch.autograd.Function):
    """A linear head, temperature, log-softmax and gather in one."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MW: Tensor,
        weight_VW: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        temperature: float,
        chunk: int,
        buffer: ProbabilityBuffer,
        entropy_M: Tensor,
        compiled: bool,
    ) -> Tensor:
        tokens, needs_gradient = len(hidden_MW), any(ctx.needs_input_grad[:3])
        kept_count = buffer.capacity(weight_VW, chunk, tokens) if needs_gradient else 0
        surplus_KV = buffer.lend(kept_count, weight_VW)
        log_M = hidden_MW.new_empty(tokens, dtype=torch.float32)
        arguments = hidden_MW, weight_VW, bias_V, target_M, temperature, chunk, surplus_KV, log_M
        if _in_place(surplus_KV):
            _log_in_place(*arguments)
        else:
            _log_of_chunks(*arguments, compiled)
        ctx.save_for_backward(hidden_MW, weight_VW, bias_V, target_M, log_M if len(entropy_M) else None)
        ctx.temperature, ctx.chunk, ctx.buffer, ctx.surplus_KV = temperature, chunk, buffer, surplus_KV
        ctx.entropy_M = entropy_M  # to be written, not read: it is not saved
        return log_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MW, weight_VW, bias_V, target_M, log_M = ctx.saved_tensors
        if ctx.surplus_KV is None:
            raise RuntimeError("log-probabilities are differentiated once: evaluate again for another gradient")
        kept_count, vocabulary = ctx.surplus_KV.shape
        scale_M1 = (grad_M / -ctx.temperature).to(hidden_MW.dtype)[:, None]
        scaled_MW = hidden_MW * scale_M1
        grad_hidden = torch.empty_like(hidden_MW)
        grad_weight: Tensor | None = None
        grad_bias = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        chunk_CV = weight_VW.new_empty(min(ctx.chunk, len(hidden_MW) - kept_count), vocabulary)
        for rows in _blocks(len(hidden_MW), kept_count, ctx.chunk):
            if rows.stop <= kept_count:
                d_CV = ctx.surplus_KV
            else:
                d_CV = chunk_CV[: rows.stop - rows.start]
                _surplus(hidden_MW[rows], weight_VW, bias_V, ctx.temperature, target_M[rows], d_CV)
            torch.mm(d_CV, weight_VW, out=grad_hidden[rows])
            if log_M is not None:
                above_C = torch.linalg.vecdot(hidden_MW[rows].float(), grad_hidden[rows].float())
                if bias_V is not None:
                    above_C += (d_CV @ bias_V).float()
                torch.sub(-log_M[rows], above_C, alpha=1 / ctx.temperature, out=ctx.entropy_M[rows])
            if ctx.needs_input_grad[1]:  # under adapters the weight is frozen: nothing is spent on its gradient
                grad_weight = _add_product(grad_weight, d_CV.T, scaled_MW[rows])
            if grad_bias is not None:
                grad_bias += d_CV.T @ scale_M1[rows, 0]
        ctx.buffer.give_back(ctx.surplus_KV)
        ctx.surplus_KV = None
        grad_hidden.mul_(scale_M1)
        grads = (None if grad is None else grad.to(weight_VW.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, *grads, None, None, None, None, None, None


class _BucketLogProbabilities(torch.autograd.Function):
    """A linear head, temperature, log-softmax and `split_buckets` in one.

    With g the derivatives of the J + 1 results and G their sum, the loss has the derivative g_rest p / p_rest - G p at
    the logits of all tokens but the other ones, g_j - G p_j at these, and g_y more at the sampled token's. These
    differences are formed in float32. What is kept of the first tokens is p with zeros at the other ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MW: Tensor,
        weight_VW: Tensor,
        bias_V: Tensor | None,
        bucket_MJ: Tensor,
        temperature: float,
        chunk: int,
        buffer: ProbabilityBuffer,
        entropy_M: Tensor,
    ) -> Tensor:
        tokens, needs_gradient = len(hidden_MW), any(ctx.needs_input_grad[:3])
        kept_count = buffer.capacity(weight_VW, chunk, tokens) if needs_gradient else 0
        kept_KV = buffer.lend(kept_count, weight_VW)
        kept_count = len(kept_KV)
        log_MJ = hidden_MW.new_empty(tokens, bucket_MJ.shape[1] + 1, dtype=torch.float32)
        is_whole = bucket_MJ.shape[1] > len(weight_VW)  # the other tokens are the vocabulary: nothing is left
        for rows in (*_chunks(0, kept_count, chunk), *_chunks(kept_count, tokens, chunk)):
            log_CV = _log_softmax(hidden_MW[rows], weight_VW, bias_V, temperature)
            log_MJ[rows, :-1] = log_CV.gather(1, bucket_MJ[rows])
            rest_CV = log_CV.exp_()
            if len(entropy_M):
                entropy_M[rows] = torch.special.entr(rest_CV).sum(-1)
            rest_C = _without_others(rest_CV, bucket_MJ[rows]).sum(-1)
            log_MJ[rows, -1] = rest_C.clamp_min(0.0 if is_whole else _LEAST_PROBABILITY).log()
            if rows.stop <= kept_count:
                kept_KV[rows] = rest_CV
        ctx.save_for_backward(hidden_MW, weight_VW, bias_V, bucket_MJ, log_MJ)
        ctx.temperature, ctx.chunk, ctx.buffer, ctx.kept_KV = temperature, chunk, buffer, kept_KV
        return log_MJ

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MJ: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MW, weight_VW, bias_V, bucket_MJ, log_MJ = ctx.saved_tensors
        if ctx.kept_KV is None:
            raise RuntimeError("log-probabilities are differentiated once: evaluate again for another gradient")
        kept_count = len(ctx.kept_KV)
        slope_MJ = grad_MJ.float() / ctx.temperature
        sum_M, p_MJ = slope_MJ.sum(-1), log_MJ.exp()
        factor_M = (
            torch.where(p_MJ[:, -1] > 0, slope_MJ[:, -1] / p_MJ[:, -1], 0.0) - sum_M
        )  # of p at all but the others
        grad_hidden = torch.empty_like(hidden_MW)
        grad_weight: Tensor | None = None
        grad_bias = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for rows in _blocks(len(hidden_MW), kept_count, ctx.chunk):
            bucket_CJ, d_CV = bucket_MJ[rows], ctx.kept_KV
            if rows.stop > kept_count:
                log_CV = _log_softmax(hidden_MW[rows], weight_VW, bias_V, ctx.temperature)
                d_CV = _without_others(log_CV.exp_(), bucket_CJ).to(weight_VW.dtype)
            d_CV *= factor_M[rows, None].to(d_CV.dtype)
            # in float32, because little is left of these where the policy is near the teacher; equal tokens of a row
            # get equal values, so that it does not matter which of them is written last
            is_equal_CJJ = bucket_CJ[:, :, None] == bucket_CJ[:, None, :]
            of_p_CJ = torch.where(is_equal_CJJ[:, :, 1:].any(-1), -sum_M[rows, None], factor_M[rows, None])
            slope_CJ = torch.where(is_equal_CJJ, slope_MJ[rows, None, :-1], 0.0).sum(-1) + of_p_CJ * p_MJ[rows, :-1]
            d_CV.scatter_(1, bucket_CJ, slope_CJ.to(d_CV.dtype))
            torch.mm(d_CV, weight_VW, out=grad_hidden[rows])
            if grad_bias is not None:
                grad_bias += d_CV.float().sum(0)
            if ctx.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, d_CV.T, hidden_MW[rows])
        ctx.buffer.give_back(ctx.kept_KV)
        ctx.kept_KV = None
        grads = (None if grad is None else grad.to(weight_VW.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, *grads, None, None, None, None, None


def _without_others(p_CV: Tensor, bucket_CJ: Tensor) -> Tensor:
    """Sets the probabilities of all given tokens but the first of each row to 0, in place."""
    return p_CV.scatter_(1, bucket_CJ[:, 1:], 0.0)


def _add_product(sum_VW: Tensor | None, d_VC: Tensor, factor_CW: Tensor) -> Tensor:
    """Returns sum + d @ factor in float32, whatever the factors are; None: 0. The sum may be changed in place."""
    if d_VC.dtype == torch.float32:
        return d_VC @ factor_CW if sum_VW is None else sum_VW.addmm_(d_VC, factor_CW)
    if d_VC.device.type in ("cuda", "meta") and torch.version.hip is None:
        product_VW = torch.mm(d_VC, factor_CW, out_dtype=torch.float32)  # which other devices do not have
    else:
        product_VW = d_VC @ factor_CW
    return product_VW.float() if sum_VW is None else sum_VW.add_(product_VW)


def _chunks(start: int, stop: int, chunk: int) -> list[slice]:
    """Returns the rows from `start` up to `stop`, `chunk` at a time."""
    return [slice(a, min(a + chunk, stop)) for a in range(start, stop, chunk)]


def _blocks(tokens: int, kept_count: int, chunk: int) -> list[slice]:
    """Returns the rows of the kept tokens as one block, those of the others in chunks."""
    return [*_chunks(0, kept_count, max(1, kept_count)), *_chunks(kept_count, tokens, chunk)]


def _log_in_place(
    hidden_MW: Tensor,
    weight_VW: Tensor,
    bias_V: Tensor | None,
    target_M: Tensor,
    temperature: float,
    chunk: int,
    surplus_KV: Tensor,
    log_M: Tensor,
) -> None:
    """Writes the targets' log-probabilities into `log_M`, and softmax(z) - onehot(target) of the first ones into
    `surplus_KV`, in the memory of their logits.
    """
    tokens, kept_count = len(hidden_MW), len(surplus_KV)
    chunk_CV = weight_VW.new_empty(min(chunk, tokens - kept_count), len(weight_VW))
    for rows in _blocks(tokens, kept_count, chunk):
        out = surplus_KV if rows.stop <= kept_count else chunk_CV[: rows.stop - rows.start]
        log_M[rows] = _surplus(hidden_MW[rows], weight_VW, bias_V, temperature, target_M[rows], out)


def _log_of_chunks(
    hidden_MW: Tensor,
    weight_VW: Tensor,
    bias_V: Tensor | None,
    target_M: Tensor,
    temperature: float,
    chunk: int,
    surplus_KV: Tensor,
    log_M: Tensor,
    compiled: bool,
) -> None:
    """Does what `_log_in_place` does, with logits that are there in float32 a chunk at a time."""
    kept_count = len(surplus_KV)
    for rows in (*_chunks(0, kept_count, chunk), *_chunks(kept_count, len(hidden_MW), chunk)):
        if compiled and rows.stop <= kept_count:
            z_CV = torch.nn.functional.linear(hidden_MW[rows], weight_VW, bias_V)
            log_M[rows] = _compiled_surplus()(z_CV, target_M[rows], temperature, surplus_KV[rows])
            continue
        log_CV = _log_softmax(hidden_MW[rows], weight_VW, bias_V, temperature)
        torch.gather(log_CV, 1, target_M[rows, None], out=log_M[rows, None])
        if rows.stop <= kept_count:
            torch.exp(log_CV, out=surplus_KV[rows])
    if not compiled:
        _take_one_from_target(surplus_KV, target_M[:kept_count], log_M[:kept_count])


@cache
def _compiled_surplus() -> Callable[[Tensor, Tensor, float, Tensor], Tensor]:
    return torch.compile(_surplus_of_logits, dynamic=True)


def _surplus_of_logits(z_CV: Tensor, target_C: Tensor, temperature: float, out_CV: Tensor) -> Tensor:
    """Writes softmax(z / temperature) - onehot(target) into `out_CV`; returns the targets' log-probabilities [C] in
    float32.
    """
    log_CV = torch.log_softmax(z_CV.float() / temperature, -1)
    log_C1 = log_CV.gather(1, target_C[:, None])
    is_target_CV = torch.arange(z_CV.shape[1], device=z_CV.device) == target_C[:, None]
    out_CV.copy_(torch.where(is_target_CV, torch.expm1(log_C1), log_CV.exp()))
    return log_C1[:, 0]


def _surplus(
    hidden_CW: Tensor, weight_VW: Tensor, bias_V: Tensor | None, temperature: float, target_C: Tensor, out_CV: Tensor
) -> Tensor:
    """Writes softmax(z) - onehot(target) into `out_CV`; returns the targets' log-probabilities [C] in float32."""
    log_C = _probabilities(hidden_CW, weight_VW, bias_V, temperature, target_C, out_CV)
    _take_one_from_target(out_CV, target_C, log_C)
    return log_C


def _take_one_from_target(p_CV: Tensor, target_C: Tensor, log_C: Tensor) -> None:
    """Sets the targets' probabilities, whose logarithms are given, to themselves minus 1, in place."""
    p_CV.scatter_(1, target_C[:, None], torch.expm1(log_C).to(p_CV.dtype)[:, None])


def _probabilities(
    hidden_CW: Tensor, weight_VW: Tensor, bias_V: Tensor | None, temperature: float, target_C: Tensor, out_CV: Tensor
) -> Tensor:
    """Writes softmax(z) into `out_CV`; returns the targets' log-probabilities [C] in float32."""
    if not _in_place(out_CV):
        log_CV = _log_softmax(hidden_CW, weight_VW, bias_V, temperature)
        torch.exp(log_CV, out=out_CV)
        return log_CV.gather(1, target_C[:, None])[:, 0]
    z_CV = torch.mm(hidden_CW / temperature, weight_VW.T, out=out_CV)
    if bias_V is not None:
        z_CV += bias_V / temperature
    torch.softmax(z_CV, -1, out=out_CV)  # in place: an element is read for the last time when it is written
    p_C = out_CV.gather(1, target_C[:, None])[:, 0]
    log_C = p_C.log()
    lost_C = p_C < 1e-30  # near underflow the logarithm has lost its digits
    if bool(lost_C.any()):
        exact_CV = _log_softmax(hidden_CW[lost_C], weight_VW, bias_V, temperature)
        log_C[lost_C] = exact_CV.gather(1, target_C[lost_C, None])[:, 0]
    return log_C


def _in_place(out_CV: Tensor) -> bool:
    """Returns whether probabilities are made where the logits were, which on a CPU is faster.

    Rounded to half precision they would not give the logarithm back, and whether one underflows a GPU is not asked.
    """
    return out_CV.dtype == torch.float32 and out_CV.device.type == "cpu"


def _log_softmax(hidden_CW: Tensor, weight_VW: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """Returns log-softmax(z / temperature) by its definition, in float32: [C, V]."""
    z_CV = torch.nn.functional.linear(hidden_CW, weight_VW, bias_V).float()
    return torch.log_softmax(z_CV if temperature == 1 else z_CV.div_(temperature), -1)


def linear_heads(names: Iterable[str], width: int, device: torch.device) -> torch.nn.ModuleDict:
    """Makes a head for each name, weight and bias zero. Raises `ValueError` for a name that is none of `HEADS`."""
    layers = {name: torch.nn.Linear(width, 1, device=device) for name in check_head_names(names)}
    return torch.nn.ModuleDict({name: zero_parameters(layer) for name, layer in layers.items()})


def apply_head(head: torch.nn.Module, hidden_NW: Tensor) -> Tensor:
    """Returns [N] float32: the output of a head for hidden states."""
    output_N: Tensor = head(hidden_NW.float())[:, 0]
    return output_N


def check_head_names(names: Iterable[str]) -> list[str]:
    """Returns the names in order. Raises `ValueError` for one that is none of `HEADS`."""
    sorted_names = sorted(names)
    if not HEADS.issuperset(sorted_names):
        raise ValueError(f"a policy's heads are {sorted(HEADS)}, but got {sorted_names}")
    return sorted_names


def zero_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """Sets a module's parameters to zero; returns the module."""
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    return module
