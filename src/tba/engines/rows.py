"""The completions that grow at the same time, as tensors on the model's device, and the draw of their next tokens.

Invariant: row r's completion is token_RT[r, :count_R[r]]; `ended_R[r]` says whether an EOS token is among them. A step
reads and writes all rows by tensor operations, and only top-p waits for the device. Rows that hold no completion may be
stepped with the others, and stay at their first position (`use`).

`log_behavior` is the log-probability of the drawn token after temperature and after top-p, renormalised over what top-p
keeps. The draw is the inverse of the cumulative distribution at a given uniform number, so that equal uniforms give
equal tokens, and because `torch.multinomial` costs 20 times as much on a large vocabulary.

Shape legend: R rows, T completion positions, V vocabulary, K candidates.
"""

from __future__ import annotations

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
        self._used = slots
        self._used_R1 = torch.ones_like(self.count_R1)  # 1, or 0 of a row that stays where it is

    def use(self, n: int) -> None:
        """Let the rows from `n` on stay at their first position, whatever is appended to them."""
        if n != self._used:
            self._used = n
            self._used_R1[:n] = 1
            for state in (self._used_R1, self.count_R1, self.position_R):
                state[n:] = 0

    def admit(self, rows: Tensor, prompt_length: Tensor, uniform: Tensor, logits: Tensor, sampling: Sampling) -> None:
        """Start completions in `rows` (int64 indices) with a token from each prompt's logits."""
        token, log_behavior = draw(self.rules.first(logits), uniform[:, 0], sampling)
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
        token_R, log_behavior_R = draw(self.rules.next(logits_RV, count_R1), uniform_R, sampling)
        self.newest_R1[:n, 0] = token_R
        self.token_RT[:n].scatter_(1, count_R1, token_R[:, None])
        self.log_behavior_RT[:n].scatter_(1, count_R1, log_behavior_R[:, None])
        self.ended_R[:n] |= self.eos_V[token_R]
        count_R1 += self._used_R1[:n]
        self.position_R[:n] += self._used_R1[:n, 0]

    def hear(
        self, rows: Tensor, count: Tensor, heard: Heard, first: Tensor, logits: Tensor, sampling: Sampling
    ) -> None:
        """Go on in `rows` (int64 indices) after they have read `heard`, with a token from the logits after it.

        count: the tokens that each has then; first: its prompt's. Both int64, like `rows`.
        """
        self.token_RT[heard.row_N, heard.at_N] = heard.token_N
        self.log_behavior_RT[heard.row_N, heard.at_N] = 0.0
        token, log_behavior = draw(self.rules.next(logits, count[:, None]), self.uniform_RT[rows, count], sampling)
        self.token_RT[rows, count] = token
        self.log_behavior_RT[rows, count] = log_behavior
        self.count_R1[rows] = count[:, None] + 1
        self.position_R[rows] = first + count
        self.newest_R1[rows] = token[:, None]
        self.ended_R[rows] = self.eos_V[token]

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
        )


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(int64 tokens [R], float32 log_behavior [R]) for uniforms in [0, 1). Temperature 0 takes the best token."""
    if sampling.temperature == 0:
        token_R = logits_RV.argmax(-1)
        return token_R, torch.zeros(token_R.shape, device=token_R.device)
    logits_RV = logits_RV.float()
    if sampling.temperature != 1:
        logits_RV = logits_RV / sampling.temperature
    probability_RV = torch.softmax(logits_RV, -1)
    if sampling.top_p >= 1:
        token_R1, chosen_R1 = _inverse_cumulative(probability_RV, uniform_R)
    else:
        kept_RK, token_RK = _nucleus(probability_RV, sampling.top_p)
        index_R1, chosen_R1 = _inverse_cumulative(kept_RK, uniform_R)
        token_R1 = token_RK.gather(1, index_R1)
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


def _nucleus(probability_RV: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most probable tokens that hold `top_p` (Holtzman et al. 2020): (probability or 0, token), both [R, K].

    Only as many candidates are sorted as are needed; the best token is always kept.
    """
    size = probability_RV.shape[-1]
    candidates = min(_FIRST_CANDIDATES, size)
    while True:
        best_RK, token_RK = probability_RV.topk(candidates, -1)
        before_RK = best_RK.cumsum(-1) - best_RK
        if candidates == size or bool((before_RK[:, -1] >= top_p).all()):
            outside_RK = before_RK >= top_p
            outside_RK[:, 0] = False
            return best_RK.masked_fill(outside_RK, 0.0), token_RK
        candidates = min(8 * candidates, size)
