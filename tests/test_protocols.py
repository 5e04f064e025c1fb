"""The abilities that a component may have: those of the package have them, and a user's without any of them trains."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import tba
from tba import protocols
from tba.batch import Batch
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.protocols import LoadedOnDevice, PolicyOutput, path_of
from tba.recipe import LARGEST_SQUARED
from tba.replay.selection import Selector
from tba.runs.recipe_resolution import with_weights
from tba.runtime.needs import with_checkpointing
from tba.settings import find

TOY = Path(__file__).parent / "toy" / "recipe.py"
ABILITIES = [kind for name, kind in inspect.getmembers(protocols, inspect.isclass) if name.startswith("Has")]
ABILITIES += [protocols.LoadedFromPath, protocols.LoadsOtherModels, protocols.LimitsEpisodes, protocols.EndingSchedule]


@dataclass(frozen=True)
class Reinforce:
    """An objective that has no more than every objective must have."""

    needs: frozenset[str] = frozenset()
    by_group: bool = True

    def __call__(
        self, output: PolicyOutput, batch: Batch, step: int
    ) -> tuple[torch.Tensor, Mapping[str, float | torch.Tensor]]:
        return -(output.log_policy_BT.sum(1) * batch.reward_B).mean(), {}


@dataclass(frozen=True)
class Recent:
    """A selection that has no more than every selection must have."""

    def start(self) -> Selector:
        return tba.RecencyReward(m=1.0).start()


def test_components_without_any_optional_ability_train(tmp_path: Path) -> None:
    toy = find(str(TOY))
    pacing = replace(toy.replay.pacing, warm_up=32)
    recipe = replace(toy, objective=Reinforce(), replay=replace(toy.replay, selection=Recent(), pacing=pacing), steps=2)
    parts = (recipe.task, recipe.model, recipe.objective, recipe.replay.selection)
    assert [kind for kind in ABILITIES for part in parts if isinstance(part, kind)] == []
    assert len(ABILITIES) > 12
    assert path_of(recipe.model) == ""
    assert isinstance(recipe.model, LoadedOnDevice)
    assert recipe.largest_reward == LARGEST_SQUARED
    assert with_checkpointing(recipe) is None
    assert with_weights(recipe, [], print)[1] == []
    run = tba.train(recipe, runs=tmp_path, run_name="r", quiet=True, runtime="inline")
    assert run.summary is not None
    assert run.summary.steps == 2


def test_each_ability_is_one_of_some_component_of_the_package() -> None:
    recipe, beta = find("calculator"), tba.Constant(1.0)
    parts = (recipe.model, recipe.task, recipe.replay.selection, beta, tba.TrajectoryBalance(beta))
    parts += (SubtrajectoryBalance(beta), tba.Distil())
    assert [kind.__name__ for kind in ABILITIES if not any(isinstance(part, kind) for part in parts)] == []
