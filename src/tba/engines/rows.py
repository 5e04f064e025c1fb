"""What each active row has sampled so far, as tensors on the model's device.

Invariant: row r's completion is token_RT[r, :count_R[r]]; `ended_R[r]` says whether an EOS token is among them. A step
reads and writes all rows by tensor operations, and nothing here waits for the device.

Shape legend: R rows, T completion positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tba.engines.rules import Rules
from tba.engines.sampling import draw
from tba.types import Sampling


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
        count_R1 += 1
        self.position_R[:n] += 1

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows `source` to the rows `target` (int64 indices; no row is in both)."""
        for state in (
            self.uniform_RT,
            self.token_RT,
            self.log_behavior_RT,
            self.count_R1,
            self.position_R,
            self.newest_R1,
            self.ended_R,
        ):
            state[target] = state[source]
