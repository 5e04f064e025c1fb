"""The completions that grow at the same time, as tensors on the model's device, and the draw of their next tokens.

Invariant: row r's completion is token_RT[r, :count_R[r]]; `ended_R[r]` says whether an EOS token is among them. A step
reads and writes all rows by tensor operations, and only top-p waits for the device. Rows that hold no completion may be
stepped with the others, and stay at their first position (`use`).

`log_behavior` is the log-probability of the drawn token after all of `Sampling`, renormalised over the tokens that it
leaves. The draw is the inverse of the cumulative distribution at a given uniform number, so that equal uniforms give
equal tokens, and because `torch.multinomial` costs 20 times as much on a large vocabulary.

Shape legend: R rows, T completion positions, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tba.engines.rules import Rules
from tba.types import FloatArray, IntArray, Sampling

_BLOCK = 1024  # weights that are added up together where many are
_FIRST_CANDIDATES = 64  # top-p looks at this many tokens first, then at 8 times as many, ...


@dataclass(frozen=True)
class ReplyTokens:
    """N tokens that rows have read and not sampled, each at its row and its place in the completion."""

    row_N: Tensor
    place_N: Tensor
    token_N: Tensor


class DecodingRows:
    """Preallocated state of `slots` rows of at most `length` completion tokens."""

    def __init__(self, slots: int, length: int, rules: Rules) -> None:
        """Allocates the state on the device of `rules`."""
        device = rules.eos_V.device
        self.rules, self.eos_V = rules, rules.eos_V
        self.uniform_RT = torch.zeros(slots, length, dtype=torch.float32, device=device)
        self.token_RT = torch.zeros(slots, length, dtype=torch.int64, device=device)
        self.log_behavior_RT = torch.zeros(slots, length, dtype=torch.float32, device=device)
        self.count_R1 = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.position_R = torch.zeros(slots, dtype=torch.int64, device=device)  # of the newest token in its sequence
        self.newest_R1 = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.ended_R = torch.zeros(slots, dtype=torch.bool, device=device)
        self._occurs_RV: Tensor | None = None  # bool, the tokens that a row has read or drawn, once a penalty needs it
        self._active_rows = slots
        self._advance_R1 = torch.ones_like(self.count_R1)  # 1, or 0 of a row that stays where it is

    def set_active(self, n: int) -> None:
        """Let only the first `n` rows grow; the others stay at their first position, whatever is appended to them."""
        if n != self._active_rows:
            self._active_rows = n
            self._advance_R1[:n] = 1
            for state in (self._advance_R1, self.count_R1, self.position_R):
                state[n:] = 0

    def remember_tokens(self, rows: Sequence[int], tokens: Sequence[Tensor]) -> None:
        """Record which tokens the sequences of rows have (int64, one tensor for each row), for the repetition penalty;
        what was recorded for these rows before is dropped.
        """
        occurs_RV = self._occurrences()
        for row, row_tokens in zip(rows, tokens, strict=True):
            occurs_RV[row] = False
            occurs_RV[row, row_tokens.to(occurs_RV.device)] = True

    def admit(self, rows: Tensor, prompt_length: Tensor, uniform: Tensor, logits: Tensor, sampling: Sampling) -> None:
        """Start completions in `rows` (int64 indices) with a token from each prompt's logits."""
        logits = self._penalise(logits, rows, sampling)
        token, log_behavior = draw(self.rules.mask_first_token(logits), uniform[:, 0], sampling)
        if sampling.repetition_penalty != 1:
            self._occurrences()[rows, token] = True
        self.uniform_RT[rows] = uniform
        self.token_RT[rows, 0] = token
        self.log_behavior_RT[rows, 0] = log_behavior
        self.count_R1[rows] = 1
        self.position_R[rows] = prompt_length
        self.newest_R1[rows] = token[:, None]
        self.ended_R[rows] = self.eos_V[token]

    def extend(self, logits_RV: Tensor, sampling: Sampling) -> None:
        """Append one token to each of the first R rows."""
        n = len(logits_RV)
        count_R1 = self.count_R1[:n]
        uniform_R = self.uniform_RT[:n].gather(1, count_R1)[:, 0]
        logits_RV = self._penalise(logits_RV, slice(n), sampling)
        token_R, log_behavior_R = draw(self.rules.mask_next_token(logits_RV, count_R1), uniform_R, sampling)
        if sampling.repetition_penalty != 1:
            self._occurrences()[:n].scatter_(1, token_R[:, None], True)
        self.newest_R1[:n, 0] = token_R
        self.token_RT[:n].scatter_(1, count_R1, token_R[:, None])
        self.log_behavior_RT[:n].scatter_(1, count_R1, log_behavior_R[:, None])
        self.ended_R[:n] |= self.eos_V[token_R]
        count_R1 += self._advance_R1[:n]
        self.position_R[:n] += self._advance_R1[:n, 0]

    def resume(
        self, rows: Tensor, count: Tensor, reply: ReplyTokens, prompt_length: Tensor, logits: Tensor, sampling: Sampling
    ) -> None:
        """Go on in `rows` (int64 indices) after they have read `reply`, with a token from the logits after it. Where
        there is a penalty, call `remember_tokens` before. count: the tokens that each completion has then, int64.
        """
        self.token_RT[reply.row_N, reply.place_N] = reply.token_N
        self.log_behavior_RT[reply.row_N, reply.place_N] = 0.0
        logits = self._penalise(logits, rows, sampling)
        logits = self.rules.mask_next_token(logits, count[:, None])
        token, log_behavior = draw(logits, self.uniform_RT[rows, count], sampling)
        if sampling.repetition_penalty != 1:
            self._occurrences()[rows, token] = True
        self.token_RT[rows, count] = token
        self.log_behavior_RT[rows, count] = log_behavior
        self.count_R1[rows] = count[:, None] + 1
        self.position_R[rows] = prompt_length + count
        self.newest_R1[rows] = token[:, None]
        self.ended_R[rows] = self.eos_V[token]

    def _penalise(self, logits: Tensor, rows: Tensor | slice, sampling: Sampling) -> Tensor:
        """Returns the logits after the repetition penalty (Keskar et al. 2019, arXiv 1909.05858)."""
        if sampling.repetition_penalty == 1:
            return logits
        logits, penalty = logits.float(), sampling.repetition_penalty
        penalised_logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(self._occurrences()[rows], penalised_logits, logits)

    def _occurrences(self) -> Tensor:
        if self._occurs_RV is None:
            self._occurs_RV = self.eos_V.new_zeros(len(self.ended_R), len(self.eos_V))
        return self._occurs_RV

    def progress(self, row_count: int, reach: int) -> Tensor:
        """Returns, of the first `row_count` rows, whether the completion has ended and its last `reach` tokens:
        int64 [row_count, 1 + reach]. Of a completion of fewer tokens only the columns of these, the last ones, mean
        something.
        """
        ended_R1 = self.ended_R[:row_count, None].to(torch.int64)
        if not reach:
            return ended_R1
        place_RN = self.count_R1[:row_count] + torch.arange(-reach, 0, device=ended_R1.device)
        return torch.cat([ended_R1, self.token_RT[:row_count].gather(1, place_RN.clamp_(min=0))], 1)

    def completions(self, rows: Tensor, length: int) -> tuple[IntArray, FloatArray]:
        """Returns the first `length` tokens of the completions in `rows` (int64 indices) and their log-probabilities,
        both [rows, length], read from the device at once.
        """
        token_RT, log_RT = self.token_RT[rows, :length], self.log_behavior_RT[rows, :length]
        joined_RN = torch.cat([token_RT.to(torch.int32), log_RT.view(torch.int32)], 1).cpu().numpy()
        return joined_RN[:, :length], joined_RN[:, length:].view(np.float32)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows `source` to the rows `target` (int64 indices; no row is in both)."""
        for state in self._states:
            state[target] = state[source]

    def copy_row(self, row: int) -> tuple[Tensor, ...]:
        """Returns a copy of all state of a row."""
        return tuple(state[row].clone() for state in self._states)

    def restore_row(self, row: int, row_state: tuple[Tensor, ...]) -> None:
        """Give a row the state that `copy_row` returned."""
        for state, value in zip(self._states, row_state, strict=True):
            state[row] = value

    @property
    def _states(self) -> tuple[Tensor, ...]:
        return (
            self.uniform_RT,
            self.token_RT,
            self.log_behavior_RT,
            self.count_R1,
            self.position_R,
            self.newest_R1,
            self.ended_R,
            *(() if self._occurs_RV is None else (self._occurs_RV,)),
        )


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draws (int64 tokens [R], float32 log_behavior [R]) by uniforms in [0, 1). Temperature 0 takes the best token."""
    if sampling.temperature == 0:
        token_R = logits_RV.argmax(-1)
        return token_R, torch.zeros(token_R.shape, dtype=torch.float32, device=token_R.device)
    logits_RV = logits_RV.float()
    if sampling.temperature != 1:
        logits_RV = logits_RV / sampling.temperature
    weight_RK, token_RK = torch.softmax(logits_RV, -1), None
    if sampling.min_p > 0:
        weight_RK = weight_RK.masked_fill(weight_RK < sampling.min_p * weight_RK.amax(-1, keepdim=True), 0.0)
    if 0 < sampling.top_k < weight_RK.shape[-1]:
        weight_RK, token_RK = weight_RK.topk(sampling.top_k, -1)
    if sampling.top_p < 1:
        total_mass = 1.0 if token_RK is None and not sampling.min_p else weight_RK.sum(-1, keepdim=True)
        weight_RK, place_RK = _nucleus(weight_RK, sampling.top_p * total_mass)
        token_RK = place_RK if token_RK is None else token_RK.gather(1, place_RK)
    index_R1, probability_R1 = _draw_index(weight_RK, uniform_R)
    token_R1 = index_R1 if token_RK is None else token_RK.gather(1, index_R1)
    return token_R1[:, 0], probability_R1[:, 0].log()


def _draw_index(weight_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an index drawn in proportion to `weight_RV`, and its share of the row's sum; both [R, 1]."""
    if weight_RV.device.type != "cpu" and weight_RV.shape[1] > 2 * _BLOCK:
        return draw_in_blocks(weight_RV, uniform_R, _BLOCK)
    cumulative_RV = weight_RV.cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    # right=True: the first index whose cumulative weight exceeds the target, which therefore has a weight of its own.
    index_R1 = torch.searchsorted(cumulative_RV, uniform_R[:, None] * total_R1, right=True)
    # a target that is rounded up to the sum gets the last that has one
    last_R1 = torch.searchsorted(cumulative_RV, total_R1.contiguous())
    index_R1 = torch.minimum(index_R1, last_R1).clamp(max=weight_RV.shape[1] - 1)  # of weights that are NaN: any
    return index_R1, weight_RV.gather(1, index_R1) / total_R1


def draw_in_blocks(weight_RV: Tensor, uniform_R: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns what `_draw_index` does but for rounding: a block of indices is drawn first, then an index in it. So
    weights are added up by sums of blocks, which a GPU does faster than all cumulative sums.
    """
    size = weight_RV.shape[1]
    blocks_end = size // block * block
    sums = [
        weight_RV[:, :blocks_end].unflatten(1, (-1, block)).sum(-1),
        weight_RV[:, blocks_end:].sum(-1, keepdim=True),
    ]
    cumulative_RN = torch.cat(sums, 1).cumsum(-1)
    total_R1 = cumulative_RN[:, -1:].contiguous()
    target_R1 = uniform_R[:, None] * total_R1
    block_R1 = torch.searchsorted(cumulative_RN, target_R1, right=True)
    block_R1 = torch.minimum(block_R1, torch.searchsorted(cumulative_RN, total_R1))  # as in `_draw_index`
    block_R1 = block_R1.clamp_(max=cumulative_RN.shape[1] - 1)
    before_R1 = cumulative_RN.gather(1, (block_R1 - 1).clamp_(min=0)).masked_fill_(block_R1 == 0, 0.0)
    index_RC = block_R1 * block + torch.arange(block, device=weight_RV.device)
    inner_RC = weight_RV.gather(1, index_RC.clamp(max=size - 1)).masked_fill_(index_RC >= size, 0.0).cumsum(-1)
    # what rounding takes from the target leaves 0, which is drawn as the first index that has a weight
    place_R1 = torch.searchsorted(inner_RC, (target_R1 - before_R1).clamp_(min=0.0), right=True)
    place_R1 = torch.minimum(place_R1, torch.searchsorted(inner_RC, inner_RC[:, -1:].contiguous()))
    index_R1 = (block_R1 * block + place_R1).clamp_(max=size - 1)
    return index_R1, weight_RV.gather(1, index_R1) / total_R1


def _nucleus(probability_RV: Tensor, mass: float | Tensor) -> tuple[Tensor, Tensor]:
    """Returns the fewest most probable tokens that hold a mass (Holtzman et al. 2020): (probability or 0, token), both
    [R, K]. mass: the same for all rows, or [R, 1].

    Only as many candidates are sorted as are needed; the best token always stays.
    """
    size = probability_RV.shape[-1]
    candidates = min(_FIRST_CANDIDATES, size)
    while True:
        best_RK, token_RK = probability_RV.topk(candidates, -1)
        before_RK = best_RK.cumsum(-1) - best_RK
        if candidates == size or bool((before_RK[:, -1:] >= mass).all()):
            outside_RK = before_RK >= mass
            outside_RK[:, 0] = False
            return best_RK.masked_fill(outside_RK, 0.0), token_RK
        candidates = min(8 * candidates, size)
