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

import torch
from torch import Tensor

from tba.engines.rules import Rules
from tba.types import Sampling

_FIRST_CANDIDATES = 64  # top-p looks at this many tokens first, then at 8 times as many, ...


@dataclass(frozen=True)
class Heard:
    """Tokens that rows have read and not sampled: N of them, each at its row and its place in the completion."""

    row_N: Tensor
    at_N: Tensor
    token_N: Tensor


class Rows:
    """Preallocated state of `slots` rows of at most `length` completion tokens."""

    def __init__(self, slots: int, length: int, rules: Rules) -> None:
        """The device of `rules` is the state's."""
        device = rules.eos_V.device
        self.rules, self.eos_V = rules, rules.eos_V
        self.uniform_RT = torch.zeros(slots, length, device=device)
        self.token_RT = torch.zeros(slots, length, dtype=torch.int64, device=device)
        self.log_behavior_RT = torch.zeros(slots, length, device=device)
        self.count_R1 = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.position_R = torch.zeros(slots, dtype=torch.int64, device=device)  # of the newest token in its sequence
        self.newest_R1 = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.ended_R = torch.zeros(slots, dtype=torch.bool, device=device)
        self._seen_RV: Tensor | None = None  # bool, the tokens that a row has read or drawn: once a penalty asks for it
        self._used = slots
        self._used_R1 = torch.ones_like(self.count_R1)  # 1, or 0 of a row that stays where it is

    def use(self, n: int) -> None:
        """Let the rows from `n` on stay at their first position, whatever is appended to them."""
        if n != self._used:
            self._used = n
            self._used_R1[:n] = 1
            for state in (self._used_R1, self.count_R1, self.position_R):
                state[n:] = 0

    def read(self, rows: Sequence[int], tokens: Sequence[Tensor]) -> None:
        """Remember which tokens the sequences of rows have (int64, one tensor for each row), and forget what was known
        of them: what a repetition penalty looks at.
        """
        seen_RV = self._seen()
        for row, own in zip(rows, tokens, strict=True):
            seen_RV[row] = False
            seen_RV[row, own.to(seen_RV.device)] = True

    def admit(self, rows: Tensor, prompt_length: Tensor, uniform: Tensor, logits: Tensor, sampling: Sampling) -> None:
        """Start completions in `rows` (int64 indices) with a token from each prompt's logits."""
        logits = self._penalised(logits, rows, sampling)
        token, log_behavior = draw(self.rules.first(logits), uniform[:, 0], sampling)
        if sampling.repetition_penalty != 1:
            self._seen()[rows, token] = True
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
        logits_RV = self._penalised(logits_RV, slice(n), sampling)
        token_R, log_behavior_R = draw(self.rules.next(logits_RV, count_R1), uniform_R, sampling)
        if sampling.repetition_penalty != 1:
            self._seen()[:n].scatter_(1, token_R[:, None], True)
        self.newest_R1[:n, 0] = token_R
        self.token_RT[:n].scatter_(1, count_R1, token_R[:, None])
        self.log_behavior_RT[:n].scatter_(1, count_R1, log_behavior_R[:, None])
        self.ended_R[:n] |= self.eos_V[token_R]
        count_R1 += self._used_R1[:n]
        self.position_R[:n] += self._used_R1[:n, 0]

    def hear(
        self, rows: Tensor, count: Tensor, heard: Heard, first: Tensor, logits: Tensor, sampling: Sampling
    ) -> None:
        """Go on in `rows` (int64 indices) after they have read `heard`, with a token from the logits after it. What a
        penalty looks at is to be `read` before.

        count: the tokens that each has then; first: its prompt's. Both int64, like `rows`.
        """
        self.token_RT[heard.row_N, heard.at_N] = heard.token_N
        self.log_behavior_RT[heard.row_N, heard.at_N] = 0.0
        logits = self._penalised(logits, rows, sampling)
        token, log_behavior = draw(self.rules.next(logits, count[:, None]), self.uniform_RT[rows, count], sampling)
        if sampling.repetition_penalty != 1:
            self._seen()[rows, token] = True
        self.token_RT[rows, count] = token
        self.log_behavior_RT[rows, count] = log_behavior
        self.count_R1[rows] = count[:, None] + 1
        self.position_R[rows] = first + count
        self.newest_R1[rows] = token[:, None]
        self.ended_R[rows] = self.eos_V[token]

    def _penalised(self, logits: Tensor, rows: Tensor | slice, sampling: Sampling) -> Tensor:
        """Returns the logits after the repetition penalty (Keskar et al. 2019, arXiv 1909.05858)."""
        if sampling.repetition_penalty == 1:
            return logits
        logits, penalty = logits.float(), sampling.repetition_penalty
        return torch.where(self._seen()[rows], torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _seen(self) -> Tensor:
        if self._seen_RV is None:
            self._seen_RV = torch.zeros(len(self.ended_R), len(self.eos_V), dtype=torch.bool, device=self.eos_V.device)
        return self._seen_RV

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows `source` to the rows `target` (int64 indices; no row is in both)."""
        for state in self._states:
            state[target] = state[source]

    def take(self, row: int) -> tuple[Tensor, ...]:
        """A copy of all that is known of a row, for one that is set aside."""
        return tuple(state[row].clone() for state in self._states)

    def put(self, row: int, taken: tuple[Tensor, ...]) -> None:
        """Give a row what `take` returned of another."""
        for state, value in zip(self._states, taken, strict=True):
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
            *(() if self._seen_RV is None else (self._seen_RV,)),
        )


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(int64 tokens [R], float32 log_behavior [R]) for uniforms in [0, 1). Temperature 0 takes the best token."""
    if sampling.temperature == 0:
        token_R = logits_RV.argmax(-1)
        return token_R, torch.zeros(token_R.shape, device=token_R.device)
    logits_RV = logits_RV.float()
    if sampling.temperature != 1:
        logits_RV = logits_RV / sampling.temperature
    kept_RK, token_RK = torch.softmax(logits_RV, -1), None
    if sampling.min_p > 0:
        kept_RK = kept_RK.masked_fill(kept_RK < sampling.min_p * kept_RK.amax(-1, keepdim=True), 0.0)
    if 0 < sampling.top_k < kept_RK.shape[-1]:
        kept_RK, token_RK = kept_RK.topk(sampling.top_k, -1)
    if sampling.top_p < 1:
        whole = 1.0 if token_RK is None and not sampling.min_p else kept_RK.sum(-1, keepdim=True)
        kept_RK, place_RK = _nucleus(kept_RK, sampling.top_p * whole)
        token_RK = place_RK if token_RK is None else token_RK.gather(1, place_RK)
    index_R1, chosen_R1 = _inverse_cumulative(kept_RK, uniform_R)
    token_R1 = index_R1 if token_RK is None else token_RK.gather(1, index_R1)
    return token_R1[:, 0], chosen_R1[:, 0].log()


def _inverse_cumulative(weight_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """An index drawn in proportion to `weight_RV`, and its share of the row's sum; both [R, 1]."""
    cumulative_RV = weight_RV.cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    # right=True: the first index whose cumulative weight exceeds the target, which therefore has a weight of its own.
    index_R1 = torch.searchsorted(cumulative_RV, uniform_R[:, None] * total_R1, right=True)
    # a target that is rounded up to the sum gets the last that has one
    last_R1 = torch.searchsorted(cumulative_RV, total_R1.contiguous())
    index_R1 = torch.minimum(index_R1, last_R1).clamp(max=weight_RV.shape[1] - 1)  # of weights that are NaN: any
    return index_R1, weight_RV.gather(1, index_R1) / total_R1


def _nucleus(probability_RV: Tensor, held: float | Tensor) -> tuple[Tensor, Tensor]:
    """The fewest most probable tokens that hold as much (Holtzman et al. 2020): (probability or 0, token), both [R, K].

    held: the same for all rows, or [R, 1].

    Only as many candidates are sorted as are needed; the best token is always kept.
    """
    size = probability_RV.shape[-1]
    candidates = min(_FIRST_CANDIDATES, size)
    while True:
        best_RK, token_RK = probability_RV.topk(candidates, -1)
        before_RK = best_RK.cumsum(-1) - best_RK
        if candidates == size or bool((before_RK[:, -1:] >= held).all()):
            outside_RK = before_RK >= held
            outside_RK[:, 0] = False
            return best_RK.masked_fill(outside_RK, 0.0), token_RK
        candidates = min(8 * candidates, size)
