"""Steps of answers as tensors; the rest of a batch is tested where it is used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tba.batch import collate
from tba.engines.tabular import sample_groups, tabular_prompts
from tba.policy.tabular import TabularTask
from tba.types import Completion, Group, Sampling, Trajectory

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
