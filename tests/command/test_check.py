"""`tba check` measures both halves and runs nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tba.__main__ import main
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape
from tba.objectives.grpo import dr_grpo
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.recipe import Recipe
from tba.recipes.quickstart import BASE
from tba.replay.buffer import BufferSettings
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rollout.exploration import Fixed, RandomPerRound
from tba.runs.estimate import estimate
from tba.runs.validating import notes_on_prompts, validate
from tba.schedules import Constant
from tba.settings import find
from tba.training.ranks.messages import RankSettings

RECIPE = str(Path(__file__).parents[1] / "tiny_sums.py")


def shape_with(**sizes: Any) -> Shape:
    """A shape that has these sizes, and nothing else."""
    return Shape(**{field.name: 0 for field in fields(Shape)} | sizes)


def test_the_operations_of_a_forward_are_two_for_each_weight_that_a_token_meets() -> None:
    assert shape_with(layers=3, layer_parameters=100, vocabulary=7, width=5).operations(10, 4) == 2 * (3000 + 140)


def test_an_estimate_is_measured_on_both_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.runs.estimate._LEAST_SECONDS", 0.0)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path))  # other tests look at what their own warm start took
    recipe = find(RECIPE)
    counting = shape_with(layers=1, layer_parameters=1)  # two operations are a token of a forward
    e = estimate(recipe, RECIPE, ["--steps", "10"], counting)
    assert e.generation_operations is not None
    assert e.step_operations is not None
    prompt, answers = len("1+1="), recipe.samples_per_prompt
    for operations, prompts in ((e.generation_operations / 2, recipe.prompts_per_round), (e.step_operations / 6, 2)):
        assert prompts * (prompt + answers) <= operations <= prompts * (prompt + 3 * answers)
    assert 0 < e.generation_seconds < e.round_seconds
    assert e.product_rates.keys() == {"float32"}
    assert e.step_operations / e.step_seconds < e.product_rates["float32"]
    assert 0 < e.step_seconds < e.total_seconds
    assert 0 < e.round_seconds < e.total_seconds
    assert e.tokens_per_round > 0
    assert min(e.trainer_bytes, e.searcher_bytes) > 50e6  # python and torch alone have more


def test_sampling_that_is_not_the_policys_is_warned_of_where_the_objective_takes_ratios() -> None:
    quickstart = find("quickstart")

    def warned(recipe: Recipe) -> list[str]:
        return [w for w in validate(recipe) if "sampled otherwise than from the policy" in w]

    assert warned(quickstart) == []
    assert (
        "temperature 1 and top-p 0.5, the policy's is temperature 1"
        in warned(replace(quickstart, exploration=Fixed(top_p=0.5)))[0]
    )
    for settings, said in (
        ({"top_k": 50}, "temperature 1 and top-k 50, the"),
        ({"min_p": 0.05}, "temperature 1 and min-p 0.05, the"),
        ({"repetition_penalty": 1.1, "top_p": 0.9}, "and top-p 0.9 and a repetition penalty of 1.1, the"),
    ):
        assert said in warned(replace(quickstart, exploration=Fixed(**settings)))[0]
    cold = replace(quickstart, exploration=Fixed(temperature=0.9))
    assert "--exploration.temperature 1 --exploration.top-p 1" in warned(cold)[0]
    assert warned(replace(cold, policy_temperature=0.9)) == []
    assert warned(replace(cold, objective=TrajectoryBalance(beta=Constant(0.05), off_policy="none"))) == []
    assert "of the rounds are" in warned(replace(quickstart, exploration=RandomPerRound()))[0]
    assert len(warned(replace(cold, objective=dr_grpo()))) == ("log_behavior" in dr_grpo().needs)


def test_a_round_that_does_not_fill_its_groups_is_warned_of() -> None:
    quickstart = replace(find("quickstart"), group_size=20, samples_per_prompt=20)
    assert not validate(replace(quickstart, searchers=1))

    def warned(**changes: Any) -> str:
        return " ".join(validate(replace(quickstart, searchers=1, **changes)))

    assert "S = 10 samples per prompt are fewer than K = 20" in warned(samples_per_prompt=10)
    half = ReplaySettings(selection=RecencyReward(m=0.5, mix="group"), buffer=BufferSettings(deduplicate=False))
    assert not warned(samples_per_prompt=10, replay=half)  # ten of memory fill it
    assert "fewer than K = 20" in warned(samples_per_prompt=9, replay=half)
    newest = ReplaySettings(selection=RecencyReward(m=1.0))
    assert "--replay.buffer.no-deduplicate" in warned(replay=newest, sync_every=1)
    assert not warned(replay=replace(newest, buffer=BufferSettings(deduplicate=False)), sync_every=1)
    assert "fewer" not in " ".join(validate(find("red_team_small")))


def test_an_objective_whose_optimum_depends_on_how_often_an_answer_comes_is_warned_of() -> None:
    quickstart = replace(find("quickstart"), searchers=1)

    def warned(objective: Objective, deduplicate: bool = True, m: float = 0.95, by: float = 0.0) -> str:
        replay = ReplaySettings(selection=RecencyReward(m, by), buffer=BufferSettings(deduplicate=deduplicate))
        return " ".join(validate(replace(quickstart, objective=objective, replay=replay)))

    bare, dr = Reinforce(Constant(0.05), "none"), dr_grpo(Constant(0.05))
    assert "of equal answers one is kept, which moves the optimum of REINFORCE without a baseline" in warned(bare)
    assert "--replay.buffer.no-deduplicate, or --objective.penalty reward" in warned(dr)
    assert "groups are drawn by reward, which moves" in warned(dr, deduplicate=False, by=1.0)
    assert not warned(dr, deduplicate=False)
    assert not warned(dr, deduplicate=False, m=1.0, by=1.0)  # nothing is drawn by reward
    for other in (TrajectoryBalance(Constant(0.05)), TbaPrime(Constant(0.05)), Reinforce(Constant(0.05)), dr_grpo()):
        assert "optimum" not in warned(other, by=1.0)
    assert "optimum" not in warned(dr_grpo(Constant(0.05), penalty="reward"), by=1.0)


def test_template_arguments_for_prompts_that_are_texts_are_warned_of() -> None:
    recipe = find("quickstart")
    assert isinstance(recipe.model, HuggingFace)
    given = replace(recipe, model=replace(recipe.model, template_arguments=("enable_thinking=false",)))
    assert notes_on_prompts(recipe) == []
    assert [note.partition(":")[0] for note in notes_on_prompts(given)] == ["--model.template-arguments has no effect"]


def test_more_ranks_than_gpus_are_refused_before_nccl_meets_them() -> None:
    quickstart = find("quickstart")
    assert isinstance(quickstart.model, HuggingFace)
    many = replace(quickstart, model=replace(quickstart.model, device="cuda"), trainer=RankSettings(ranks=64))
    with pytest.raises(UserError, match=r"this machine (shows|has) (none|\d+)"):
        validate(many)


def test_check_leaves_nothing_behind_and_names_a_wrong_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", RECIPE, "--nonsense", "1"]) == 2
    assert "--nonsense" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rate", "runs_away"), [("1e-4", False), ("3e-3", True)])
def test_a_rate_at_which_the_policy_leaves_its_data_within_six_updates_is_warned_of(
    rate: str, runs_away: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tba.runs.estimate._LEAST_SECONDS", 0.0)
    few = ["--model.path", str(BASE), "--task.train-problems", "1000", "--task.eval-problems", "100"]
    assert main(["check", "quickstart", *few, "--optimizer.lr", rate]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "after 6 updates the answers from before them have an effective sample size of" in said
    assert "not measured" not in said
    assert ("within 6 updates the policy has left the answers that it began with" in said) == runs_away
