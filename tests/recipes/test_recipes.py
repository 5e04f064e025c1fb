"""The recipes that come with the package: the shipped base is the one their settings make, the paper's values hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.apps.preference.tldr import Tldr
from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import CausalJudge, SequenceClassifier
from tba.command.check import validate
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.objectives.tba_prime import TbaPrime
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipes.gsm8k import recipe as gsm8k
from tba.recipes.math import recipe as math
from tba.recipes.quickstart import recipe as quickstart
from tba.recipes.red_team_gpt2 import recipe as red_team_gpt2
from tba.recipes.red_team_llama import recipe as red_team_llama
from tba.recipes.red_team_small import recipe as red_team_small
from tba.recipes.tldr import recipe as tldr
from tba.recipes.tldr_small import recipe as small
from tba.settings import find
from tba.shipped import names
from tba.tasks.gsm8k import Gsm8k
from tba.tasks.math import Math
from tba.training.tiny_models import train_bpe_tokenizer


def test_every_recipe_is_found_by_its_own_name_and_says_what_it_is() -> None:
    assert {"quickstart", "gsm8k"} <= set(names())
    for name in names():
        recipe = find(name)
        assert recipe.name == name
        assert recipe.description


def test_the_shipped_base_is_what_the_quickstarts_settings_make_and_is_small() -> None:
    model = quickstart.model
    assert isinstance(model, HuggingFace)
    assert model.warm_start is not None
    shipped = model.warm_start.shipped
    said: list[str] = []
    assert model.prepared(quickstart.task, said.append).path == str(shipped)
    assert said == []  # nothing was trained
    assert shipped is not None
    assert sum(f.stat().st_size for f in Path(shipped).iterdir()) <= 4_000_000


def test_the_gsm8k_recipe_has_the_papers_table_2() -> None:
    r = gsm8k
    assert (r.groups_per_step, r.group_size, r.samples_per_prompt, r.sync_every) == (7, 20, 24, 2)
    assert (r.steps, r.searchers, r.policy_temperature, r.prompts.max_tokens) == (
        1000,
        None,
        0.7,
        512,
    )  # three on four GPUs
    assert r.replay.selection.m == 0.95
    assert r.replay.selection.inverse_temperature == 0.0
    assert r.replay.pacing.warm_up == 500
    assert isinstance(r.objective, TrajectoryBalance)
    assert [r.objective.beta(s) for s in (1, 501, 1000)] == pytest.approx([0.012, 0.004, 0.004])
    rates = [r.optimizer.lr * r.optimizer.schedule(s) for s in (25, 50, 500, 1000)]
    assert rates[:3] == pytest.approx([0.5e-5, 1e-5, 1e-5])
    assert 0 < rates[3] < 1e-9
    assert isinstance(r.task, Gsm8k)


def test_the_tldr_recipe_has_the_papers_table_3() -> None:
    r = tldr
    assert (r.groups_per_step, r.group_size, r.samples_per_prompt, r.sync_every) == (8, 20, 20, 10)
    assert (r.steps, r.searchers, r.policy_temperature, r.prompts.max_tokens) == (
        256,
        None,
        0.7,
        512,
    )  # three on four GPUs
    assert (r.replay.selection.m, r.replay.selection.inverse_temperature) == (0.5, 1.0)
    assert r.replay.pacing.warm_up == 10_000
    assert isinstance(r.objective, TrajectoryBalance)
    assert [r.objective.beta(s) for s in (1, 31, 32, 256)] == pytest.approx([1.0, 0.777, 0.05, 0.05], abs=1e-3)
    assert r.optimizer.lr * r.optimizer.schedule(1) == pytest.approx(3e-6)
    assert isinstance(r.task, Tldr)
    assert r.task.without_eos == -1.0


def test_the_small_tldr_recipe_has_a_policy_of_a_million_parameters_that_fits_its_posts() -> None:
    model, task = small.model, small.task
    assert isinstance(model, HuggingFace)
    assert isinstance(task, Tldr)
    assert model.warm_start is not None
    start = model.warm_start
    made = start.scratch.start(train_bpe_tokenizer(["post"], 300))
    embedding = made.get_input_embeddings().weight
    assert 0.9e6 < made.num_parameters() + (start.vocab_size - len(embedding)) * embedding.shape[1] < 1.2e6
    assert small.prompts.max_tokens + model.generation.max_completion_tokens <= start.scratch.max_positions
    assert small.evaluation.shown >= 1000  # every answer: lab/benchmarks/win_rate.py pairs them
    with pytest.raises(UserError, match=r"has path 'posts.jsonl', which does not exist"):
        task.problems("train")


def test_a_recipe_without_full_support_is_warned_of() -> None:
    from dataclasses import replace

    from tba.search.exploration import Fixed

    assert not any("full support" in w for w in validate(quickstart))
    cut = replace(quickstart, exploration=Fixed(temperature=1.0, top_p=0.9))
    assert any("full support" in w for w in validate(cut))


def test_the_math_recipe_has_the_papers_table_4() -> None:
    r = math
    assert (r.groups_per_step, r.group_size, r.samples_per_prompt, r.steps) == (32, 16, 16, 400)
    assert (r.sync_every, r.reference_reset, r.policy_temperature, r.prompts.max_tokens) == (2, 50, 1.0, 1024)
    assert isinstance(r.objective, TbaPrime)
    assert [r.objective.beta(s) for s in (1, 400)] == [0.005, 0.005]
    assert (r.objective.correction.form, r.objective.correction.level, r.objective.correction.cap) == (
        *("clamp", "token", 8.0),
    )
    o = r.optimizer
    assert (o.lr, o.betas, o.weight_decay, o.clip_norm) == (1e-6, (0.9, 0.99), 0.01, 1.0)
    assert [o.schedule(s) for s in (1, 400)] == [1.0, 1.0]
    assert isinstance(r.model, HuggingFace)
    assert r.model.path == "Qwen/Qwen2.5-7B"
    assert r.prompts.max_tokens + r.model.generation.max_completion_tokens == 3072
    assert isinstance(r.task, Math)
    assert r.task.evaluate_on == "math500"
    assert validate(r) == [] or all("cores" in warning for warning in validate(r))


def test_the_red_teaming_recipes_have_the_papers_values_and_hide_what_is_said() -> None:
    for r, total, horizon, searchers in ((red_team_gpt2, 100_000, 500, 2), (red_team_llama, 150_000, 1000, 6)):
        assert (r.steps, r.groups_per_step * r.group_size, r.sync_every, r.searchers) == (5000, 128, 10, searchers)
        assert (r.optimizer.lr, r.optimizer.weight_decay, r.replay.selection.m) == (1e-4, 0.1, 0.5)
        assert (r.replay.buffer.total, r.replay.buffer.per_prompt) == (total, total)
        o = r.objective
        assert isinstance(o, TrajectoryBalance)
        assert [o.beta(s) for s in (1, 5000)] == [0.05, 0.05]
        assert [o.reward_temperature(s) for s in (1, horizon + 1)] == [2.0, 1.0]
        assert isinstance(r.task, RedTeam)
        assert (r.task.count, r.task.threshold, r.task.evaluated) == (5, 0.5, 1024)
    assert isinstance(red_team_llama.objective, TrajectoryBalance)
    assert [red_team_llama.objective.reference_temperature(s) for s in (1, 2001)] == [1.0, 1.2]
    assert (red_team_llama.exploration.temperature_low, red_team_llama.exploration.temperature_high) == (0.7, 2.0)
    assert isinstance(red_team_gpt2.task, RedTeam)
    assert isinstance(red_team_gpt2.task.classifier, SequenceClassifier)
    assert isinstance(red_team_llama.task, RedTeam)
    assert isinstance(red_team_llama.task.classifier, CausalJudge)
    for r in (red_team_gpt2, red_team_llama, red_team_small):
        assert r.record.hide_text
        validate(r)
