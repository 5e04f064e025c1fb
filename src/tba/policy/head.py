"""Log-probabilities of tokens from hidden states, without ever holding all logits.

Invariant: equal to `log_softmax(head(hidden) / temperature)` in float32 at the target tokens, values and gradients.

With u = exp(z - max z) and s = sum u, d log p_y / dz = onehot(y) - u / s, so both gradients are matrix products with
the *unnormalised* u: it is kept as it is while that fits `kept_bytes`, and computed again beyond.

Shape legend: M tokens, W hidden width, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Head:
    """The last layer of a language model as numbers: logits = cap * tanh((hidden @ weight.T + bias) / cap)."""

    weight_VW: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head | None:
        """The model's head, or None where its logits are made in some other way (found by comparing)."""
        layer = model.get_output_embeddings()
        if not isinstance(layer, torch.nn.Linear):
            return None
        config = model.config.get_text_config()
        head = cls(layer.weight, layer.bias, getattr(config, "final_logit_softcapping", None))
        probe = torch.arange(4, device=model.device)[None] % config.vocab_size
        with torch.no_grad():
            own = head.logits(model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state)
            model_s = model(input_ids=probe, use_cache=False).logits.float()
        return head if torch.allclose(own, model_s, rtol=1e-3, atol=1e-4) else None

    def logits(self, hidden_MW: Tensor) -> Tensor:
        """Plain float32 logits [M, V]."""
        logits = torch.nn.functional.linear(hidden_MW, self.weight_VW, self.bias_V).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def token_log_probabilities(
    hidden_MW: Tensor, head: Head, target_M: Tensor, temperature: float, chunk: int, kept_bytes: int
) -> Tensor:
    """float32 [M]: log p(target | hidden), `chunk` tokens at a time."""
    if head.softcap is None:
        bias = head.bias_V
        return _TokenLogProbabilities.apply(hidden_MW, head.weight_VW, bias, target_M, temperature, chunk, kept_bytes)

    def of_chunk(hidden_CW: Tensor, target_C: Tensor) -> Tensor:
        log_CV = torch.log_softmax(head.logits(hidden_CW) / temperature, dim=-1)
        return log_CV.gather(-1, target_C[:, None])[:, 0]

    parts = [
        checkpoint(of_chunk, hidden, target, use_reentrant=False, preserve_rng_state=False)
        for hidden, target in zip(hidden_MW.split(chunk), target_M.split(chunk), strict=True)
    ]
    return torch.cat(parts) if parts else hidden_MW.new_zeros(0, dtype=torch.float32)


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
        kept_bytes: int,
    ) -> Tensor:
        tokens, vocabulary = len(hidden_MW), len(weight_VW)
        kept = 0
        if any(ctx.needs_input_grad[:3]):
            kept = min(tokens, kept_bytes // (vocabulary * hidden_MW.element_size())) // chunk * chunk
            kept = tokens if kept + chunk > tokens else kept
        kept_KV = hidden_MW.new_empty(kept, vocabulary)
        log_M = hidden_MW.new_empty(tokens, dtype=torch.float32)
        sum_M = torch.empty_like(log_M)
        for start in range(0, tokens, chunk):
            rows = slice(start, start + chunk)
            out = kept_KV[rows] if start < kept else None
            _, sum_M[rows], log_M[rows] = _exponentials(
                hidden_MW[rows], weight_VW, bias_V, temperature, target_M[rows], out
            )
        ctx.save_for_backward(hidden_MW, weight_VW, bias_V, target_M, sum_M, kept_KV)
        ctx.temperature, ctx.chunk = temperature, chunk
        return log_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MW, weight_VW, bias_V, target_M, sum_M, kept_KV = ctx.saved_tensors
        scale_M = grad_M / ctx.temperature
        grad_hidden = torch.empty_like(hidden_MW)
        grad_weight = torch.zeros_like(weight_VW)
        grad_bias = None if bias_V is None else torch.zeros_like(bias_V)
        step = ctx.chunk
        for start in range(0, len(hidden_MW), step):
            rows = slice(start, start + step)
            hidden, target, scale = hidden_MW[rows], target_M[rows], scale_M[rows]
            if start < len(kept_KV):
                u_CV = kept_KV[rows]
            else:
                u_CV, _, _ = _exponentials(hidden, weight_VW, bias_V, ctx.temperature, target, None)
            share = (scale / sum_M[rows]).to(hidden.dtype)[:, None]
            hit = scale.to(hidden.dtype)[:, None]
            grad_hidden[rows] = weight_VW[target] * hit - (u_CV @ weight_VW) * share
            grad_weight.addmm_(u_CV.T, hidden * share, alpha=-1)
            grad_weight.index_add_(0, target, hidden * hit)
            if grad_bias is not None:
                grad_bias.addmv_(u_CV.T, share[:, 0], alpha=-1).index_add_(0, target, hit[:, 0])
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _exponentials(
    hidden_CW: Tensor,
    weight_VW: Tensor,
    bias_V: Tensor | None,
    temperature: float,
    target_C: Tensor,
    out_CV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """u = exp(z - max z) [C, V] (into `out`, if given), its row sums [C] and the targets' log-probabilities [C]."""
    z_CV = torch.mm(hidden_CW, weight_VW.T, out=out_CV) if out_CV is not None else hidden_CW @ weight_VW.T
    if bias_V is not None:
        z_CV += bias_V
    if temperature != 1:
        z_CV /= temperature
    z_CV -= z_CV.amax(-1, keepdim=True)
    chosen_C = z_CV.gather(1, target_C[:, None])[:, 0].float()
    sum_C = z_CV.exp_().sum(-1, dtype=torch.float32)
    return z_CV, sum_C, chosen_C - sum_C.log()
