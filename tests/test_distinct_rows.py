"""Answers that are the same are evaluated once: which these are, and that nothing but the work changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba.batch import Batch, collate, distinct_rows
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Policy, PolicyOutput
from tba.schedules import Constant
from tba.training.gradients import backward
from tba.types import Completion, Group, Prompt, Sampling, StopReason, Trajectory, Version
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularTask

TASK = TabularTask(symbols=2, length=2, prompts=3)


def group(prompt: int, *answers: Sequence[int], masks: Sequence[Sequence[bool]] = ()) -> Group:
    rows = []
    for number, tokens in enumerate(answers):
        mask = np.array(masks[number]) if masks else None
        completion = Completion(np.array(tokens, np.int32), "", StopReason.EOS, (Version(), Version()), mask=mask)
        nothing = np.zeros(len(tokens), np.float32)
        question = Prompt("task", np.array([prompt], np.int32))
        rows.append(Trajectory(f"{prompt}-{number}", question, completion, float(number), nothing, Version()))
    return Group.of(rows)


@dataclass
class Rows:
    """A policy that notes how many rows it was given."""

    policy: Policy
    given: list[int] = field(default_factory=list)
    share_prompt: bool = True

    def evaluate(self, batch: Batch) -> PolicyOutput:
        self.given.append(batch.rows)
        return self.policy.evaluate(batch)


def test_they_are_the_first_of_each_answer_to_each_prompt_in_order() -> None:
    a, b, c = (1, 2, 3), (1, 2), (1, 2, 0)  # padded alike: b and c differ in length only
    rows, place = distinct_rows(collate([group(7, a, b, a, c), group(9, a, b, a)]))
    assert rows.tolist() == [0, 1, 3, 4, 5]
    assert place.tolist() == [0, 1, 0, 2, 3, 4, 3]


def test_answers_of_which_other_tokens_are_trained_are_distinct() -> None:
    batch = collate([group(7, (1, 2, 3), (1, 2, 3), masks=[(True, True, True), (True, False, True)])])
    assert distinct_rows(batch)[0].tolist() == [0, 1]


@given(st.lists(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6), min_size=1))
def test_every_row_finds_its_own_tokens(answers: list[list[list[int]]]) -> None:
    batch = collate([group(g, *rows) for g, rows in enumerate(answers)])
    rows, place = distinct_rows(batch)
    assert torch.equal(batch.completion_BT[rows][place], batch.completion_BT)
    assert torch.equal(batch.group_B[rows][place], batch.group_B)
    assert len(rows) == len({(g, tuple(row)) for g, own in enumerate(answers) for row in own})


@pytest.mark.parametrize("max_tokens", [10**6, 60, 12], ids=["whole", "by groups", "by slices"])
def test_the_gradient_is_that_of_all_rows_and_repeats_cost_nothing(max_tokens: int) -> None:
    """Seven outcomes, sixteen samples: at least nine rows of each group are repeats."""
    policy = TabularPolicy(TASK)
    with torch.no_grad():
        policy.logits_QNV.add_(torch.randn(policy.logits_QNV.shape, generator=torch.Generator().manual_seed(0)))
    batch = collate(sample_groups(TASK, tabular_prompts(TASK), 16, Sampling(), np.random.default_rng(0)))
    objective = TrajectoryBalance(Constant(0.1))
    loss, _ = objective(policy.evaluate(batch), batch, 1)
    (expected,) = torch.autograd.grad(loss, policy.logits_QNV)

    rows = Rows(policy)
    found, _ = backward(rows, objective, batch, 1, max_tokens)
    assert found == pytest.approx(loss.item(), rel=1e-5)
    assert policy.logits_QNV.grad is not None
    torch.testing.assert_close(policy.logits_QNV.grad, expected, rtol=1e-5, atol=1e-6)
    if max_tokens == 10**6:
        assert rows.given == [len(distinct_rows(batch)[0])]
        assert rows.given[0] <= 21
