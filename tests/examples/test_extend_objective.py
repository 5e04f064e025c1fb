"""The objective of docs/extend.md, read from the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tba.__main__ import main
from tba.batch import Batch, collate
from tba.objectives.grpo import Grpo
from tba.protocols import Objective
from tba.record.metrics import read_metrics
from tba.schedules import Constant
from tba.settings import find
from tba.types import Sampling
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularTask

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
FEW = ("--runtime", "inline", "--replay.pacing.warm-up", "16", "--evaluation.problems", "8", "--steps", "2")
TASK = TabularTask()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    code, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    path = tmp_path / "my_objective.py"
    path.write_text(code)
    return path


def gradient(objective: Objective, batch: Batch) -> torch.Tensor:
    policy = TabularPolicy(TASK, dtype=torch.float64)
    loss, _ = objective(policy.evaluate(batch), batch, 1)
    loss.backward()
    assert policy.logits_QNV.grad is not None
    return policy.logits_QNV.grad


def sampled() -> Batch:
    groups = sample_groups(TASK, tabular_prompts(TASK), 8, Sampling(), np.random.default_rng(0))
    return collate(groups)


def test_on_policy_its_gradient_is_that_of_grpo(written: Path) -> None:
    """Both ratios are 1 there: of each, A grad log pi / |y| is left."""
    batch = sampled()
    torch.testing.assert_close(
        gradient(find(str(written)).objective, batch), gradient(Grpo(beta=Constant(0.0)), batch), rtol=1e-5, atol=1e-8
    )


def test_an_answer_whose_ratio_is_beyond_the_clip_has_no_gradient_where_its_advantage_asks_for_more(
    written: Path,
) -> None:
    batch, objective = sampled(), find(str(written)).objective
    for sign in (1.0, -1.0):
        output = TabularPolicy(TASK, dtype=torch.float64).evaluate(batch)
        behavior_BT = torch.where(batch.mask_BT, output.log_policy_BT.detach() - sign * 0.2, 0.0)
        loss, metrics = objective(output, replace(batch, log_behavior_BT=behavior_BT), 1)
        (slope_BT,) = torch.autograd.grad(loss, output.log_policy_BT)
        reward_B = batch.reward_B
        mean_B = torch.stack([reward_B[batch.group_B == g].mean() for g in batch.group_B.tolist()])
        assert torch.equal(slope_BT.abs().sum(1) == 0, (reward_B - mean_B) * sign >= 0)
        assert float(metrics["clipped"]) == 1.0


def test_a_run_trains_with_it_and_its_field_is_a_flag(written: Path, tmp_path: Path) -> None:
    flags = ("--runs", str(tmp_path), "--run-name", "run", "--objective.clip", "1e-9")
    assert main(["train", str(written), *FEW, *flags]) == 0
    rows = list(read_metrics(tmp_path / "run"))
    assert len(rows) == 2
    assert all(0.5 < row["ratio"] < 2 and 0 < row["clipped"] <= 1 for row in rows)
