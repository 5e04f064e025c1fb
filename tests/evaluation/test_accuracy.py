"""Evaluation on the enumerable toy, where every accuracy can be written down."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from tba.errors import UserError
from tba.evaluation.accuracy import Assessment, EvaluationSettings, assess_accuracy
from tba.evaluation.estimators import GREEDY, SAMPLED
from tba.types import Completion, Judgement, Prompt, Sampling, Version
from toy.engine import TabularEngine, log_behavior, tabular_prompts
from toy.policy import EOS, TabularTask

TASK = TabularTask(seed=3, symbols=3, length=3, prompts=13)
PROMPTS = tabular_prompts(TASK, "eval")
THRESHOLD = 0.5  # the reward from which an answer of the toy counts as correct


def measure(
    settings: EvaluationSettings,
    prompts: Sequence[Prompt] = PROMPTS,
    interrupted: Callable[[], bool] | None = None,
    seed: int = 0,
) -> Assessment:
    """With a clock that ticks once whenever it is read."""
    rng, ticks = np.random.default_rng(seed), count(100)
    engine = TabularEngine(TASK, Version(0, 7))
    return assess_accuracy(
        engine, prompts, TASK.reward(), settings, rng, now=lambda: float(next(ticks)), interrupted=interrupted
    )


def probability_correct(temperature: float) -> np.ndarray:
    """Of each evaluation prompt, by enumeration of all its outcomes."""
    log_p_QNV = log_behavior(TASK.reference_logits_QNV, Sampling(temperature))
    shares = []
    for prompt in PROMPTS:
        q, share = TASK.question(prompt), 0.0
        for outcome in range(TASK.outcomes):
            node, log_p = 0, 0.0
            for token in TASK.tokens(outcome):
                log_p += log_p_QNV[q, node, token]
                node = node if token == EOS else node * TASK.symbols + token
            share += np.exp(log_p) * (TASK.rewards_QO[q, outcome] >= THRESHOLD)
        shares.append(share)
    return np.array(shares)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_accuracy_is_the_probability_of_a_correct_answer(temperature: float) -> None:
    found = measure(
        EvaluationSettings(
            problems=0, greedy=False, samples=400, pass_k=4, temperature=temperature, threshold=THRESHOLD
        )
    )
    p = probability_correct(temperature)
    assert found.scores[SAMPLED] == pytest.approx(p, abs=0.1)  # 4 standard errors of 400 draws
    assert found.scores[SAMPLED].mean() == pytest.approx(p.mean(), abs=0.025)
    assert found.scores["pass@4/sampled"].mean() == pytest.approx((1 - (1 - p) ** 4).mean(), abs=0.025)


def test_greedy_accuracy_is_that_of_the_likeliest_tokens() -> None:
    found = measure(EvaluationSettings(problems=0, samples=0, threshold=THRESHOLD))
    assert found.scores[GREEDY].mean() == pytest.approx(probability_correct(0.0).mean())
    assert set(found.scores) == {GREEDY}


def test_metrics_are_named_as_in_the_summary_and_carry_version_and_number_of_problems() -> None:
    found = measure(EvaluationSettings(problems=5, samples=3, pass_k=8, threshold=THRESHOLD))
    assert [e.metric for e in found.evaluations] == ["pass@1/greedy", "pass@1/sampled", "pass@8/sampled"]
    assert {(e.version, e.n, e.wall_seconds) for e in found.evaluations} == {(Version(0, 7), 5, 100.0)}


def test_the_policy_temperature_is_used_unless_the_settings_name_one() -> None:
    settings = EvaluationSettings(problems=0, greedy=False, samples=4, threshold=THRESHOLD)

    def scores(settings: EvaluationSettings, policy_temperature: float) -> list[float]:
        rng = np.random.default_rng(1)
        engine, reward = TabularEngine(TASK), TASK.reward()
        return list(
            assess_accuracy(
                engine, PROMPTS, reward, settings, rng, now=lambda: 0.0, policy_temperature=policy_temperature
            ).scores[SAMPLED]
        )

    cool = replace(settings, temperature=0.2)
    assert scores(settings, 0.2) == scores(cool, 1.0) != scores(settings, 1.0)


def test_seconds_and_tokens_of_the_figures_add_up_to_those_of_the_evaluation() -> None:
    found = measure(EvaluationSettings(problems=0, samples=2, pass_k=3, batch_size=4, threshold=THRESHOLD))
    assert sum(e.tokens for e in found.evaluations) == found.tokens > 0
    assert sum(e.seconds for e in found.evaluations) == found.seconds > 0
    assert found.trajectories == 13 * (1 + 3)


def test_greedy_answers_do_not_depend_on_the_chunk() -> None:
    whole, small = (
        measure(EvaluationSettings(problems=0, samples=0, batch_size=batch_size, threshold=THRESHOLD))
        for batch_size in (64, 3)
    )
    assert whole.answers == small.answers
    assert whole.scores[GREEDY].tolist() == small.scores[GREEDY].tolist()


def test_the_first_few_problems_are_shown_with_their_text_reward_and_mark() -> None:
    found = measure(EvaluationSettings(problems=0, samples=2, logged_problems=5, batch_size=2, threshold=THRESHOLD))
    assert [a.prompt for a in found.answers] == [p.text for p in PROMPTS[:5]]
    assert {a.metric for a in found.answers} == {GREEDY}
    assert [a.correct for a in found.answers] == [a.reward >= THRESHOLD for a in found.answers]
    assert [float(a.correct) for a in found.answers] == found.scores[GREEDY][:5].tolist()


@pytest.mark.parametrize("after", range(12))
def test_an_interrupted_evaluation_gives_no_figure_over_fewer_problems(after: int) -> None:
    asked = count()
    found = measure(
        EvaluationSettings(problems=0, samples=1, batch_size=5, threshold=THRESHOLD),
        interrupted=lambda: next(asked) >= after,
    )
    assert found.interrupted
    assert all(e.n == 13 and len(found.scores[e.metric]) == 13 for e in found.evaluations)
    assert SAMPLED not in found.scores
    assert found.tokens >= sum(e.tokens for e in found.evaluations)
    if after >= 2:  # it had begun: the unfinished answers are counted too
        assert found.tokens > 0


def test_a_figure_that_was_finished_before_the_interruption_is_kept() -> None:
    asked = count()  # the greedy pass asks at most 3 chunks x (1 + 3 positions) times
    found = measure(
        EvaluationSettings(problems=0, samples=4, batch_size=5, threshold=THRESHOLD),
        interrupted=lambda: next(asked) >= 13,
    )
    assert found.interrupted
    assert [e.metric for e in found.evaluations] == [GREEDY]
    assert found.scores[GREEDY].mean() == pytest.approx(probability_correct(0.0).mean())


def test_a_reward_that_is_not_a_number_is_not_correct() -> None:
    class Broken:
        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
            return [Judgement(float("nan")) for _ in answered]

    found = assess_accuracy(
        TabularEngine(TASK), PROMPTS, Broken(), EvaluationSettings(), np.random.default_rng(0), now=lambda: 0.0
    )
    assert [e.value for e in found.evaluations] == [0.0, 0.0]


def test_a_reward_that_leaves_answers_unmarked_is_an_error() -> None:
    class Lazy:
        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
            return [Judgement(1.0)] * (len(answered) - 1)

    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="the reward Lazy gave 12 values for 13 answers"):
        assess_accuracy(TabularEngine(TASK), PROMPTS, Lazy(), EvaluationSettings(), rng, now=lambda: 0.0)


def test_an_empty_held_out_split_is_said_in_one_sentence() -> None:
    with pytest.raises(UserError, match="held-out split is empty"):
        measure(EvaluationSettings(), prompts=[])


@pytest.mark.parametrize(
    "fields",
    [
        {"samples": -1},
        {"pass_k": 1},
        {"batch_size": 0},
        {"temperature": 0.0},
        {"greedy": False, "samples": 0},
        {"greedy": False, "samples": 0, "pass_k": 4, "every": 2, "problems_during": 5},
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UserError, match="evaluation: "):
        EvaluationSettings(**fields)
