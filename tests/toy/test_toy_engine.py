"""The tabular engine samples exactly what it says it samples."""

from collections import Counter

import numpy as np
import pytest
import torch

from tba.batch import collate
from tba.engines.decoding import draw
from tba.generation import generate
from tba.protocols import Engine
from tba.types import Sampling, StopReason, Version
from toy.engine import TabularEngine, log_behavior, sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularTask, distribution

TASK = TabularTask()


def behavior_policy(sampling: Sampling) -> TabularPolicy:
    """The policy whose distribution at temperature 1 is the behaviour's."""
    policy = TabularPolicy(TASK, 1.0, torch.float64)
    with torch.no_grad():
        policy.logits_QNV.copy_(torch.from_numpy(log_behavior(TASK.reference_logits_QNV, sampling)))
    return policy


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7), Sampling(1.5), Sampling(1e6), Sampling(1.0, 0.7), Sampling(0.7, 0.9)]
)
def test_frequencies_and_log_behavior_are_those_of_the_enumerated_behavior(sampling: Sampling) -> None:
    n, prompts = 20_000, tabular_prompts(TASK)
    exact = distribution(behavior_policy(sampling))
    answers = generate(TabularEngine(TASK), prompts, n, sampling, np.random.default_rng(0))
    for prompt, completions in zip(prompts, answers, strict=True):
        p_O = exact[TASK.question(prompt)].numpy()
        counts = Counter(TASK.outcome(c.tokens) for c in completions)
        standard_error = np.sqrt(p_O * (1 - p_O) / n)
        frequency = np.array([counts[o] for o in range(TASK.outcomes)]) / n
        assert (np.abs(frequency - p_O) <= 5 * standard_error + 1e-12).all()
        for c in completions[:500]:
            assert c.log_behavior is not None
            assert c.log_behavior.sum() == pytest.approx(np.log(p_O[TASK.outcome(c.tokens)]), abs=1e-4)


def test_a_very_high_temperature_draws_every_token_uniformly() -> None:
    p_O = distribution(behavior_policy(Sampling(1e9)))[0].numpy()
    lengths = [len(TASK.tokens(o)) for o in range(TASK.outcomes)]
    np.testing.assert_allclose(p_O, [0.2**length for length in lengths], rtol=1e-6)


def test_temperature_0_is_greedy_with_log_behavior_0() -> None:
    engine, prompts = TabularEngine(TASK), tabular_prompts(TASK)
    for completions in generate(engine, prompts, 5, Sampling(temperature=0.0), np.random.default_rng(0)):
        assert len({c.digest for c in completions}) == 1
        assert all(c.log_behavior is not None and not c.log_behavior.any() for c in completions)


def test_top_k_and_min_p_keep_what_the_other_engine_keeps() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (40, 12))
    for sampling in (Sampling(top_k=3), Sampling(min_p=0.1), Sampling(0.7, 0.8, 5, 0.05), Sampling(1.0, 0.5, 2)):
        ours = log_behavior(logits, sampling)
        for row, log_p in zip(logits, ours, strict=True):
            uniform = torch.linspace(0, 1 - 2**-24, 400)
            token, chosen = draw(torch.from_numpy(row).float().expand(400, -1), uniform, sampling)
            assert set(token.tolist()) <= set(np.flatnonzero(np.isfinite(log_p)).tolist())
            np.testing.assert_allclose(chosen, log_p[token], atol=1e-5)
        np.testing.assert_allclose(np.exp(ours).sum(-1), 1.0)


def test_top_p_keeps_the_fewest_most_probable_tokens_that_hold_the_mass() -> None:
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    np.testing.assert_allclose(np.exp(log_behavior(logits, Sampling(1.0, 0.69))), [0, 4 / 7, 3 / 7, 0], atol=1e-12)
    np.testing.assert_allclose(np.exp(log_behavior(logits, Sampling(1.0, 0.71))), [0, 4 / 9, 3 / 9, 2 / 9], atol=1e-12)
    np.testing.assert_allclose(np.exp(log_behavior(logits, Sampling(1.0, 0.01))), [0, 1, 0, 0], atol=1e-12)


def test_on_its_own_weights_log_behavior_at_temperature_1_is_the_policys_log_probability() -> None:
    batch = collate(sample_groups(TASK, tabular_prompts(TASK), 100, Sampling(), np.random.default_rng(0)))
    assert batch.log_behavior_BT is not None
    torch.testing.assert_close(batch.log_behavior_BT, TabularPolicy(TASK).evaluate(batch).log_policy_BT)


def test_an_eos_ends_a_completion_and_is_part_of_it_and_a_truncated_one_has_none() -> None:
    for c in generate(TabularEngine(TASK), tabular_prompts(TASK), 500, Sampling(), np.random.default_rng(0))[0]:
        assert (c.tokens == 0).sum() == (c.tokens[-1] == 0)
        assert c.stop_reason is (StopReason.EOS if c.tokens[-1] == 0 else StopReason.LENGTH)
        assert c.stop_reason is StopReason.EOS or len(c.tokens) == TASK.length
        assert len(c.text) == (c.tokens != 0).sum()


def test_equal_generators_give_equal_completions() -> None:
    first, second = (
        generate(TabularEngine(TASK), tabular_prompts(TASK), 50, Sampling(), np.random.default_rng(3)) for _ in range(2)
    )
    assert [[c.digest for c in row] for row in first] == [[c.digest for c in row] for row in second]


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_interrupted_it_gives_back_what_it_had_and_leaves_out_what_it_had_not_begun(calls: int) -> None:
    asked = iter([False] * calls + [True])
    rng, prompts = np.random.default_rng(0), tabular_prompts(TASK)
    rows = generate(TabularEngine(TASK), prompts, 50, Sampling(), rng, interrupted=lambda: next(asked))
    assert [len(row) for row in rows] == [50 * (calls > 0)] * 2
    for c in rows[0] + rows[1]:
        assert c.stop_reason is (StopReason.EOS if c.tokens[-1] == 0 else StopReason.INTERRUPTED)
        assert len(c.tokens) == calls or c.tokens[-1] == 0


def test_it_samples_from_the_weights_it_was_given_and_signs_with_their_version() -> None:
    engine: Engine = TabularEngine(TASK)
    policy, wanted = TabularPolicy(TASK), torch.full((4, TASK.outcomes), 1e-9, dtype=torch.float64)
    wanted[:, 42] = 1.0
    policy.become(wanted)
    engine.load(policy.weights(), Version(1, 7))
    policy.load({name: torch.zeros_like(w) for name, w in policy.weights().items()})  # the engine has its own copy
    for completions in generate(engine, tabular_prompts(TASK), 20, Sampling(), np.random.default_rng(0)):
        assert {TASK.outcome(c.tokens) for c in completions} == {42}
        assert {c.versions for c in completions} == {(Version(1, 7), Version(1, 7))}
    assert engine.version == Version(1, 7)
