"""Steps of answers as tensors, and how much a pass runs; the rest of a batch is tested where it is used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba.batch import Batch, collate, deal, largest_group, micro_batches
from tba.types import Completion, Group, Sampling, Trajectory
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularTask

TASK = TabularTask(symbols=3, length=5, prompts=1)


def group(*steps: tuple[int, list[int], list[float]]) -> Group:
    """A trajectory for each (length, starts, values)."""
    (bare,) = sample_groups(TASK, tabular_prompts(TASK), 1, Sampling(), np.random.default_rng(0))
    rows = []
    for number, (length, starts, values) in enumerate(steps):
        completion = replace(bare.trajectories[0].completion, tokens=np.ones(length, np.int32), log_behavior=None)
        arrays = {"step_start": np.array(starts, np.int64), "step_value": np.array(values, np.float32)}
        rows.append(with_steps(bare.trajectories[0], f"t{number}", completion, arrays))
    return Group.of(rows)


def with_steps(t: Trajectory, uid: str, completion: Completion, arrays: dict[str, np.ndarray]) -> Trajectory:
    log_reference = np.zeros(len(completion.tokens), np.float32)
    return replace(t, uid=uid, completion=completion, log_reference=log_reference, arrays=arrays)


def test_steps_are_padded_with_the_end_of_their_row_and_a_value_of_zero_and_go_with_their_rows() -> None:
    batch = collate([group((5, [0, 2, 4], [0.5, 0.25, 1.0]), (2, [0], [0.75]), (3, [0, 1], [0.125, 0.0]))])
    assert batch.step_start_BS is not None
    assert batch.step_value_BS is not None
    assert batch.step_start_BS.tolist() == [[0, 2, 4], [0, 2, 2], [0, 1, 3]]
    assert batch.step_value_BS.tolist() == [[0.5, 0.25, 1.0], [0.75, 0, 0], [0.125, 0, 0]]
    part = batch.select(torch.tensor([2, 1]))
    assert part.step_start_BS is not None
    assert part.step_value_BS is not None
    assert part.step_start_BS.tolist() == [[0, 1], [0, 2]]
    assert part.step_value_BS.tolist() == [[0.125, 0], [0.75, 0]]


def test_a_batch_has_steps_only_if_every_row_has() -> None:
    whole = group((3, [0], [0.5]), (3, [0, 1], [0.5, 1.0]))
    assert collate([whole]).step_value_BS is not None
    without = Group.of([whole.trajectories[0], replace(whole.trajectories[1], arrays={})])
    batch = collate([without])
    assert batch.step_start_BS is None
    assert batch.step_value_BS is None
    assert batch.select(torch.tensor([0])).step_start_BS is None


@pytest.mark.parametrize(
    ("starts", "values"), [([], []), ([1], [0.5]), ([0, 0], [0.5, 0.5]), ([0, 3], [0.5, 0.5]), ([0, 1], [0.5])]
)
def test_steps_that_do_not_cover_the_answer_in_order_are_refused(starts: list[int], values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"the steps of trajectory t0 begin at .* begin at 0 and go up"):
        collate([group((3, starts, values))])


def test_where_only_some_rows_have_log_probabilities_of_the_behaviour_the_others_are_marked() -> None:
    (sampled,) = sample_groups(TASK, tabular_prompts(TASK), 3, Sampling(), np.random.default_rng(0))
    bare = replace(sampled.trajectories[1], completion=replace(sampled.trajectories[1].completion, log_behavior=None))
    mixed = collate([Group.of([sampled.trajectories[0], bare, sampled.trajectories[2]])])
    assert mixed.log_behavior_BT is None
    assert mixed.some_behavior_BT is not None
    assert mixed.some_behavior_BT[:, 0].isnan().tolist() == [False, True, False]
    part = mixed.select(torch.tensor([2]))
    assert part.some_behavior_BT is not None
    whole = collate([sampled])
    assert whole.some_behavior_BT is None
    assert whole.log_behavior_BT is not None
    torch.testing.assert_close(part.some_behavior_BT, whole.select(torch.tensor([2])).log_behavior_BT)
    none = collate([Group.of([bare])])
    assert none.log_behavior_BT is None
    assert none.some_behavior_BT is None


def lengths_batch(prompts: list[int], completions: list[list[int]]) -> Batch:
    """A batch of groups with these prompt lengths and these lengths of their completions."""
    length_B = torch.tensor([n for lengths in completions for n in lengths])
    zeros_BT = torch.zeros(len(length_B), int(length_B.max()))
    return Batch(
        prompt_GP=torch.zeros(len(prompts), max(prompts), dtype=torch.int64),
        prompt_length_G=torch.tensor(prompts),
        completion_BT=zeros_BT.long(),
        length_B=length_B,
        mask_BT=torch.arange(zeros_BT.shape[1]) < length_B[:, None],
        log_reference_BT=zeros_BT,
        reward_B=torch.zeros(len(length_B)),
        group_B=torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([len(n) for n in completions])),
    )


def tokens_run(batch: Batch, share_prompt: bool) -> int:
    """Of one pass: packed, each prompt and each completion once; else prompt and completion of each row, padded."""
    prompt_B = batch.prompt_length_G[batch.group_B]
    if share_prompt:
        return int(batch.prompt_length_G.sum() + batch.length_B.sum())
    return batch.rows * int((prompt_B + batch.length_B).max())


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=5
    ),
    st.integers(5, 120),
    st.booleans(),
)
def test_micro_batches_hold_every_row_once_within_the_tokens_that_a_pass_runs(
    groups: list[tuple[int, list[int]]], limit: int, share_prompt: bool
) -> None:
    batch = lengths_batch([prompt for prompt, _ in groups], [lengths for _, lengths in groups])
    parts = list(micro_batches(batch, limit, share_prompt=share_prompt))
    assert sorted(torch.cat(parts).tolist()) == list(range(batch.rows))
    for rows in parts:
        assert len(rows) == 1 or tokens_run(batch.select(rows), share_prompt) <= limit
    for g in range(batch.groups):
        own = (batch.group_B == g).nonzero()[:, 0]
        if tokens_run(batch.select(own), share_prompt) <= limit:
            assert any(set(own.tolist()) <= set(rows.tolist()) for rows in parts)
    largest = max(
        tokens_run(batch.select((batch.group_B == g).nonzero()[:, 0]), share_prompt) for g in range(batch.groups)
    )
    assert largest_group(batch, share_prompt) == largest


def test_one_long_answer_among_short_ones_is_not_padded_to() -> None:
    batch = lengths_batch([100], [[400] * 19 + [8192]])
    assert tokens_run(batch, share_prompt=False) == 165_840
    parts = [batch.select(rows) for rows in micro_batches(batch, 16_384, share_prompt=False)]
    assert [tokens_run(part, share_prompt=False) for part in parts] == [19 * 500, 8292]
    assert largest_group(batch) == 100 + 19 * 400 + 8192  # packed, one pass
    assert [len(rows) for rows in micro_batches(batch, 16_384)] == [20]


@given(st.lists(st.integers(1, 30), min_size=2, max_size=9), st.integers(2, 4))
def test_what_is_dealt_to_ranks_is_bounded_by_padded_area_too(lengths: list[int], ranks: int) -> None:
    batch = lengths_batch([5], [lengths])
    limit = max(35, -(-len(lengths) // ranks) * 35 + 35)
    shares = deal(batch, ranks, limit, share_prompt=False)
    assert sorted(torch.cat(shares).tolist()) == list(range(batch.rows))
    assert all(tokens_run(batch.select(rows), share_prompt=False) <= limit for rows in shares if len(rows))
