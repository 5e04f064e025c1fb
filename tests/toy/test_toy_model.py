"""The toy as a recipe's model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tba.batch import collate
from tba.errors import UserError
from tba.types import Sampling, Version
from toy.engine import sample_groups, tabular_prompts
from toy.model import TabularModel
from toy.policy import TabularTask, distribution


def test_both_halves_begin_as_the_reference() -> None:
    task = TabularTask(seed=3)
    model = TabularModel(task).prepared(task)
    engine, reference = model.engine(Version(2, 0)), model.reference(0.7, Version(2, 0))
    groups = sample_groups(task, tabular_prompts(task), 20, Sampling(), np.random.default_rng(0), engine, reference)
    assert {g.reference for g in groups} == {engine.version} == {Version(2, 0)}
    batch = collate(groups)
    torch.testing.assert_close(model.policy(0.7).evaluate(batch).log_policy_BT, batch.log_reference_BT)


def test_a_model_of_another_task_is_refused() -> None:
    with pytest.raises(UserError, match="make them equal"):
        TabularModel(TabularTask(seed=0)).prepared(TabularTask(seed=1))


def test_a_saved_policy_is_loaded_again(tmp_path: Path) -> None:
    model = TabularModel(TabularTask())
    policy, other = model.policy(1.0), model.policy(1.0)
    policy.load({name: torch.randn_like(w) for name, w in policy.weights().items()})
    model.save(policy, tmp_path / "final")
    other.load(load_file(tmp_path / "final" / "model.safetensors"))
    torch.testing.assert_close(distribution(other), distribution(policy))
