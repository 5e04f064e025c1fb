"""A step waits for the policy's device once, and all that it copies there goes through `moved`, which on a GPU pins it
and copies it on a stream of its own. On the meta device nothing can be read: code that would wait raises.

Of prompts that are shared: transformers' own mask, which the plain forward makes, is looked at on the host.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import BETA, groups_of, llama, trainer_of

from tba.batch import FetchedBatch, collate, to_device
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.protocols import HEADS, Objective
from tba.training.trainer import Trainer

OBJECTIVES: dict[str, Objective] = {
    "trajectory balance": TrajectoryBalance(BETA),
    "trajectory balance in a run": TrajectoryBalance(BETA).start(),
    "learned log Z": TrajectoryBalance(BETA, log_z="learned"),
}
WHOLE, BY_GROUPS, BY_SLICES = 10**6, 60, 12  # tokens of a pass
CASES = [(objective, limit) for objective in OBJECTIVES for limit in (WHOLE, BY_GROUPS, BY_SLICES)]


def fetched() -> FetchedBatch:
    """Groups whose behaviour was the reference."""
    groups = groups_of([4, 3, 5])
    batch = collate(groups)
    return FetchedBatch(groups, replace(batch, log_behavior_BT=batch.log_reference_BT.clone()))


def trainer_on_meta(objective: Objective, limit: int, path: Path) -> Trainer:
    """A trainer that was made on the CPU, where its policy could be compared with the plain forward, and then moved."""
    policy = CausalPolicy(llama(), heads=HEADS)
    assert policy.share_prompt
    trainer = trainer_of(policy, objective, path, max_tokens_per_pass=limit)
    torch.__future__.set_swap_module_params_on_conversion(True)  # the optimizer's parameters are these
    try:
        policy.model.to("meta")
        policy.heads.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(p.is_meta for p in trainer.optimizer.parameters)
    return trainer


@pytest.mark.parametrize(("objective", "limit"), CASES)
def test_a_step_reads_all_it_needs_from_the_device_at_once(
    objective: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_on_meta(OBJECTIVES[objective], limit, tmp_path)
    batch, read = fetched(), []

    def tolist(tensor: torch.Tensor) -> list[float]:
        """What cannot be had of a meta tensor; NaN ends the step without an update."""
        read.append(tensor)
        return [math.nan] * len(tensor)

    host = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: tolist(x) if x.is_meta else host(x))
    metrics = trainer.step(batch)
    assert len(read) == 1
    assert {"loss", "log_ratio", "residual", "off_policy", "off_policy_token_p95", "ess"} <= metrics.keys()
    assert metrics["skipped"] == 1
    assert metrics["behavior_share"] == 1.0
    assert metrics["tokens"] == int(batch.batch.length_B.sum())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_whose_update_the_device_decides_on_is_launched_without_a_wait_and_read_once_afterwards(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the next step's backward pass in between: `item()` and its like raise on the meta device. AdamW has no
    kernels for it; `test_kernel_counts` counts these.
    """
    trainer = trainer_on_meta(OBJECTIVES[objective], WHOLE, tmp_path)
    trainer.optimizer.device_decides = True
    monkeypatch.setattr(trainer.optimizer._adamw, "step", lambda: None)
    reads: list[int] = []
    host = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            return host(tensor)
        reads.append(len(tensor))
        return [1.0] * len(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    first_step = trainer.begin(fetched())
    trainer.launch(first_step)
    assert trainer.expected_version.step == trainer.version.step + 1
    second_step = trainer.begin(fetched())
    assert reads == []
    trainer.finish(first_step)
    assert len(reads) == 1
    assert trainer.version.step == trainer.expected_version.step == 1
    trainer.launch(second_step)
    assert len(reads) == 1


def test_a_batch_of_which_some_rows_have_no_behaviour_is_not_waited_for_either(tmp_path: Path) -> None:
    batch = fetched().batch
    some_BT = batch.log_reference_BT.clone()
    some_BT[2] = math.nan
    changed = replace(batch, log_behavior_BT=None, some_behavior_BT=some_BT)
    measured = trainer_on_meta(TrajectoryBalance(BETA), WHOLE, tmp_path).backward(changed)
    assert measured["behavior_share"] == 11 / 12
    assert all(value.is_meta for value in measured.values() if isinstance(value, torch.Tensor))


class Copies(TorchDispatchMode):
    """While it is entered: the operations on tensors of both host and device, and whether `moved` was at work. An
    operation given a number as a tensor of the host's passes it on; any other would be copied from pageable memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if any(x.is_meta for x in tensors) and any(not x.is_meta and x.ndim for x in tensors):
            frame: Any = sys._getframe()
            while frame is not None and frame.f_code is not to_device.__code__:
                frame = frame.f_back
            self.seen.append((str(func), frame is not None))
        return result


@pytest.mark.parametrize(("objective", "limit"), CASES)
def test_all_that_a_step_copies_to_the_device_goes_one_way(objective: str, limit: int, tmp_path: Path) -> None:
    trainer = trainer_on_meta(OBJECTIVES[objective], limit, tmp_path)
    batch = fetched().batch
    with Copies() as copies:
        trainer.backward(batch)
    assert [name for name, through_moved in copies.seen if not through_moved] == []
    assert len(copies.seen) > 10
    with Copies() as copies:
        batch.reward_B.to("meta")  # is seen
    assert copies.seen == [("aten._to_copy.default", False)]
