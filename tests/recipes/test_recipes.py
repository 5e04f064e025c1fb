"""The recipes that come with the package: the shipped base is the one that their settings make, none is warned of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tba.apps.preference.tldr import Tldr
from tba.apps.red_team.task import RedTeam
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.recipe_names import recipe_names
from tba.recipes.quickstart import recipe as quickstart
from tba.recipes.tldr_small import recipe as small
from tba.rollout.exploration import Fixed
from tba.runs.validating import validate
from tba.settings import find
from tba.training.tiny_models import train_bpe_tokenizer


def test_every_recipe_is_found_by_its_own_name_and_says_what_it_is() -> None:
    assert {"quickstart", "gsm8k"} <= set(recipe_names())
    for name in recipe_names():
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
    assert small.evaluation.logged_problems >= 1000  # every answer: lab/benchmarks/win_rate.py pairs them
    with pytest.raises(UserError, match=r"has path 'posts.jsonl', which does not exist"):
        task.problems("train")


def test_a_recipe_without_full_support_is_warned_of() -> None:
    assert not any("full support" in w for w in validate(quickstart))
    cut = replace(quickstart, exploration=Fixed(temperature=1.0, top_p=0.9))
    assert any("full support" in w for w in validate(cut))


def test_of_red_teaming_nothing_that_is_said_is_shown() -> None:
    recipes = [find(name) for name in recipe_names() if isinstance(find(name).task, RedTeam)]
    assert len(recipes) >= 4
    assert all(recipe.record.hide_text for recipe in recipes)


def test_no_recipe_but_those_of_red_teaming_is_warned_of_anything_but_this_machine() -> None:
    recipes = [find(name) for name in recipe_names()]
    warnings = {r.name: validate(r) for r in recipes if not isinstance(r.task, RedTeam)}
    assert {name: said for name, said in warnings.items() if any("cores" not in line for line in said)} == {}
