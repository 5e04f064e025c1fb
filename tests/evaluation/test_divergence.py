"""The measured distance to the reference against the exact one of the enumerable toy."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tba.errors import UserError
from tba.evaluation.divergence import divergence
from tba.rollout.prompts import PromptSettings, encode
from tba.types import Completion, Judgement, StopReason, Version
from toy.engine import TabularEngine
from toy.policy import TabularPolicy, TabularReference, TabularTask, TabularTokenizer, distribution, ideal

TASK = TabularTask()
PROMPTS = encode(TASK.problems("train"), TASK.name, TabularTokenizer(TASK.symbols), PromptSettings()).prompts


def engine_of(policy: TabularPolicy) -> TabularEngine:
    engine = TabularEngine(TASK, Version())
    engine.load(policy.weights(), Version(0, 1))
    return engine


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_it_is_the_exact_divergence_and_the_exact_reward_of_the_policy(temperature: float) -> None:
    policy = TabularPolicy(TASK, temperature, torch.float64)
    reference_QO = distribution(policy)
    policy.become(ideal(TASK, 0.3, temperature))
    policy_QO = distribution(policy)
    kl_Q = (policy_QO * (policy_QO / reference_QO).log()).sum(1)[: TASK.prompts]
    reward_Q = (policy_QO * torch.tensor(TASK.rewards_QO)).sum(1)[: TASK.prompts]
    found = divergence(
        engine_of(policy),
        TabularReference(TASK, temperature),
        TASK.reward(),
        PROMPTS * 20,
        200,
        np.random.default_rng(0),
        policy_temperature=temperature,
    )
    assert abs(found.kl - float(kl_Q.mean())) < 4 * found.kl_error < 0.1
    assert abs(found.reward - float(reward_Q.mean())) < 4 * found.reward_error
    assert 1 <= found.tokens <= TASK.length
    assert (found.prompts, found.samples) == (40, 200)
    assert found.kl_per_token == pytest.approx(found.kl / found.tokens)
    # Under the reference, in nats: per token of an answer, and per token of prompt and answer.
    nats = math.log(found.perplexity) * found.tokens
    prompt_tokens = float(np.mean([len(p.tokens) for p in PROMPTS]))
    assert math.log(found.perplexity_with_prompt) == pytest.approx(nats / (found.tokens + prompt_tokens))
    cross_Q = -(policy_QO * reference_QO.log()).sum(1)[: TASK.prompts]
    assert nats == pytest.approx(float(cross_Q.mean()), rel=0.05)


def test_it_is_0_at_the_reference_answer_by_answer() -> None:
    found = divergence(
        engine_of(TabularPolicy(TASK)), TabularReference(TASK), TASK.reward(), PROMPTS, 50, np.random.default_rng(1)
    )
    assert (found.kl, found.kl_error) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_what_an_environment_said_counts_as_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of log-ratio 1 and log pi_ref -2 among ten: 1 nat a token, not a fifth of it."""
    mask = np.arange(10) % 5 == 0
    said = Completion(
        np.ones(10, np.int32), "", StopReason.EOS, (Version(), Version()), log_behavior=-np.float32(mask), mask=mask
    )
    monkeypatch.setattr(
        "tba.evaluation.divergence.generate", lambda _, asked, count, *__: [[said] * count for _ in asked]
    )

    class Reference(TabularReference):
        def log_probabilities_of(self, asked: Any) -> Any:
            return [[-2 * np.float32(mask) for _ in row] for _, row in asked]

    class Reward:
        def judge(self, answered: Any) -> list[Judgement]:
            return [Judgement(0.0) for _ in answered]

    ours = (engine_of(TabularPolicy(TASK)), Reference(TASK), Reward())
    found = divergence(*ours, PROMPTS, 3, np.random.default_rng(0))
    assert (found.kl, found.kl_per_token, found.tokens) == pytest.approx((2.0, 1.0, 2.0))
    assert math.log(found.perplexity) == pytest.approx(2.0)


def test_one_prompt_has_no_error_to_speak_of_and_none_is_refused() -> None:
    ours = (engine_of(TabularPolicy(TASK)), TabularReference(TASK), TASK.reward())
    assert divergence(*ours, PROMPTS[:1], 5, np.random.default_rng(1)).reward_error == math.inf
    with pytest.raises(UserError, match="0 prompts and 5 samples"):
        divergence(*ours, [], 5, np.random.default_rng(1))
