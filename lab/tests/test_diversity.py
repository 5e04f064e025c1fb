"""Different right answers and pass@k: by hand, by enumeration, and against the enumerable toy."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba.errors import UserError
from tba.rollout.prompts import PromptSettings, encode
from tba.types import Version
from tba_lab.diversity import chance_to_differ, diversity, diversity_of
from toy.engine import TabularEngine
from toy.policy import TabularPolicy, TabularTask, TabularTokenizer, distribution

TASK = TabularTask()
PROMPTS = encode(TASK.problems("train"), TASK.name, TabularTokenizer(TASK.symbols), PromptSettings()).prompts


def test_three_problems_by_hand() -> None:
    result = diversity_of([["a", "b", "a", "a"], ["c"], []], samples=4)
    assert result.distinct == 1.0  # 2, 1 and 0
    assert result.distinct_error == pytest.approx(1 / 3**0.5)
    assert result.differ == 0.5  # 3 of the 6 pairs of the first; the others have no pair
    assert result.pass_at == pytest.approx([(4 + 1) / 12, (1 + 1 / 2) / 3, (1 + 3 / 4) / 3, 2 / 3])
    assert (result.prompts, result.samples) == (3, 4)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_the_chance_to_differ_is_the_share_of_pairs_that_do(texts: list[str]) -> None:
    pairs = list(combinations(texts, 2))
    assert chance_to_differ(texts) == pytest.approx(sum(a != b for a, b in pairs) / len(pairs))


def test_the_chance_to_differ_is_unbiased_whatever_the_number_of_answers() -> None:
    shares, rng = np.array([0.5, 0.3, 0.2]), np.random.default_rng(0)
    for count in (2, 7):
        chances = [chance_to_differ(list(rng.choice(list("abc"), size=count, p=shares))) for _ in range(4000)]
        values = np.array(chances, dtype=float)
        assert abs(values.mean() - (1 - (shares**2).sum())) < 4 * values.std() / 4000**0.5


def test_fewer_than_two_right_answers_say_nothing_of_their_difference() -> None:
    assert chance_to_differ(["a"]) is None
    assert diversity_of([[], ["a"]], samples=3).differ is None


def test_what_is_measured_of_an_engine_is_what_its_distribution_says() -> None:
    policy, samples, repeats = TabularPolicy(TASK, 1.0, torch.float64), 16, 100
    engine = TabularEngine(TASK, Version())
    engine.load(policy.weights(), Version(0, 1))
    rewards_QO = np.array(TASK.rewards_QO)[: len(PROMPTS)]
    threshold = float(np.median(rewards_QO))
    chance_QO = distribution(policy).detach().numpy()[: len(PROMPTS)] * (rewards_QO >= threshold)
    result = diversity(engine, TASK.reward(), PROMPTS * repeats, samples, np.random.default_rng(0), threshold=threshold)
    expected = (1 - (1 - chance_QO) ** samples).sum(1).mean()  # an answer is among the samples, summed over answers
    assert abs(result.distinct - expected) < 4 * result.distinct_error < 0.5
    accuracy_Q = chance_QO.sum(1)
    assert result.pass_at[0] == pytest.approx(
        accuracy_Q.mean(), abs=4 * 0.5 / (len(PROMPTS) * repeats * samples) ** 0.5
    )
    assert result.pass_at[samples - 1] == pytest.approx((1 - (1 - accuracy_Q) ** samples).mean(), abs=0.1)
    assert list(result.pass_at) == sorted(result.pass_at)


def test_nothing_to_sample_is_refused() -> None:
    engine = TabularEngine(TASK, Version())
    with pytest.raises(UserError, match="0 prompts and 4 samples"):
        diversity(engine, TASK.reward(), [], 4, np.random.default_rng(0))
