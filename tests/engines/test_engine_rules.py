"""What the engine's rules forbid is never sampled, and what is sampled says how likely it was under them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_families import EOS, VOCABULARY, Letters, build, plain_log_probabilities, ragged_prompts

from tba.engines.decoding import draw
from tba.engines.rules import rules_of
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.errors import UserError
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.rollout.vine import Vine
from tba.runs.validating import validate
from tba.settings import find
from tba.types import Sampling, StopReason

LEAST, FIRST, NEVER = 4, ("a", "b", "c", "d"), ("d",)
RULED = EngineSettings(
    slots=5,
    max_completion_tokens=9,
    min_completion_tokens=LEAST,
    allowed_first_tokens=FIRST,
    forbidden_first_tokens=NEVER,
)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_answer_ends_early_or_begins_otherwise_and_log_behavior_is_renormalised(temperature: float) -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 6  # else an end is rare, and a rule about it says little
    prompts = ragged_prompts(3, 7, 5)
    allowed = [Letters().encode(letter)[0] for letter in "abc"]
    engine = TransformersEngine(model, Letters(), RULED)
    answers = generate(engine, prompts, 30, Sampling(temperature), np.random.default_rng(0))
    ended = 0
    for prompt, group in zip(prompts, answers, strict=True):
        for completion in group:
            tokens = completion.tokens.astype(np.int64)
            ended += completion.stop_reason is StopReason.EOS
            assert tokens[0] in allowed
            assert EOS not in tokens[:LEAST]
            rows = plain_log_probabilities(model, prompt, completion.tokens, temperature).clone()
            rows[:LEAST, EOS] = -torch.inf
            rows[0, [i for i in range(VOCABULARY) if i not in allowed]] = -torch.inf
            expected = rows.log_softmax(-1)[torch.arange(len(tokens)), torch.from_numpy(tokens)]
            np.testing.assert_allclose(completion.log_behavior, expected, atol=1e-4)
    assert ended > 20  # the least number of tokens holds the end back, and nothing else
    greedy = generate(engine, prompts, 1, Sampling(0.0), np.random.default_rng(0))
    assert all(c.tokens[0] in allowed and EOS not in c.tokens[:LEAST] for (c,) in greedy)


def test_a_least_length_of_one_forbids_the_empty_answer_alone() -> None:
    eos_V = torch.tensor([False, True, False])
    rules = rules_of(Letters(), eos_V, 1, (), ())
    logits_RV = torch.zeros(2, 3)
    assert rules.mask_first_token(logits_RV)[0].tolist() == [0, -torch.inf, 0]
    assert rules.mask_next_token(logits_RV, torch.ones(2, 1, dtype=torch.int64)) is logits_RV
    none = rules_of(Letters(), eos_V, 0, (), ())
    assert none.mask_first_token(logits_RV) is logits_RV


def test_the_least_length_counts_each_rows_own_tokens() -> None:
    rules = rules_of(Letters(), torch.tensor([False, True, False]), 3, (), ())
    ruled_RV = rules.mask_next_token(torch.zeros(3, 3), torch.tensor([[1], [2], [3]]))
    assert ruled_RV[:, 1].tolist() == [-torch.inf, -torch.inf, 0]


def test_the_largest_uniform_never_draws_what_is_forbidden() -> None:
    """Rounded up, its target can reach the sum: the last token of all would be drawn, which may have no chance."""
    logits_RV = torch.full((64, 2000), -torch.inf)
    logits_RV[:, :1500] = torch.randn(64, 1500, generator=torch.Generator().manual_seed(0))
    token_R, log_R = draw(logits_RV, torch.full((64,), 1 - 2**-24), Sampling())
    assert token_R.max() < 1500
    assert torch.isfinite(log_R).all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"allowed_first_tokens": ("ab",)}, "'ab', which is 2 tokens"),
        ({"allowed_first_tokens": ("a",), "forbidden_first_tokens": ("a",)}, "leave no token"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(settings: dict[str, tuple[str, ...]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        TransformersEngine(build("llama"), Letters(), EngineSettings(**settings))


def test_a_least_length_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(UserError, match="min_completion_tokens is 8"):
        EngineSettings(max_completion_tokens=8, min_completion_tokens=8)


def test_check_warns_of_what_the_rules_keep_from_being_sampled_and_a_vine_does_not_go_with_them() -> None:
    recipe = find("quickstart")
    assert not [w for w in validate(recipe) if "rules" in w]
    assert isinstance(recipe.model, HuggingFace)
    ruled = replace(recipe, model=replace(recipe.model, generation=replace(RULED, forbidden_first_tokens=())))
    (warning,) = [w for w in validate(ruled) if "the engine's rules" in w]
    assert "answers that end before 4 tokens or answers that do not begin with 'a' or" in warning
    with pytest.raises(UserError, match="the vine continues answers"):
        replace(ruled, vine=Vine())
