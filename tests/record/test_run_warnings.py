"""Falls: what fell far is told once, noise is not, and what a page says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.record.conftest import evaluations

from tba.record.answer_watches import LengthWatch, RewardWatch
from tba.record.evaluations import EvaluationWriter, read_evaluations
from tba.record.faults import count_faults
from tba.record.run_record import RunRecord
from tba.record.run_warnings import (
    COPIES,
    ENTROPY_FALLS,
    HELD_OUT,
    LARGE_STEPS,
    LONG,
    LOST_SAMPLES,
    MISMATCHES,
    NO_SIGNAL,
    SHORT,
    TRUNCATED,
    by_version,
    find_accuracy_falls,
    record_accuracy_falls,
    recorded_warnings,
)
from tba.record.step_watches import CollapseWatch, SignalWatch, StalenessWatch
from tba.types import Evaluation, Version

SAMPLED = "pass@1/sampled"


def figures(values: Sequence[float], n: int = 500) -> list[Evaluation]:
    """One every ten steps."""
    return [Evaluation(Version(0, 10 * i), 0.0, SAMPLED, value, n) for i, value in enumerate(values)]


def test_a_fall_is_told_once_until_the_figure_has_come_back() -> None:
    told = find_accuracy_falls(figures([0.39, 0.62, 0.17, 0.20, 0.61, 0.17]))
    assert told == [
        "pass@1/sampled is 17.0 % at step 20: it was 62.0 % at step 10",
        "pass@1/sampled is 17.0 % at step 50: it was 62.0 % at step 10",
    ]


@pytest.mark.parametrize(
    ("best", "then", "n", "told"),
    [
        (0.62, 0.46, 500, True),  # 16 points, the error of the difference is 3.1
        (0.62, 0.47, 500, False),
        (0.62, 0.46, 100, False),
        (0.99, 0.93, 10**6, True),
        (0.99, 0.95, 10**6, False),  # within 5 points, however sure
        (1.00, 0.00, 1, False),  # of one problem
        (1.00, 0.00, 20, True),
    ],
)
def test_a_fall_is_more_than_5_points_and_more_than_5_standard_errors(
    best: float, then: float, n: int, told: bool
) -> None:
    assert bool(find_accuracy_falls(figures([0.1, best, then], n))) == told


def test_figures_are_compared_in_the_order_of_versions_not_of_their_arrival() -> None:
    assert find_accuracy_falls(reversed(figures([0.1, 0.5, 0.9]))) == []
    assert len(find_accuracy_falls(reversed(figures([0.9, 0.5, 0.1])))) == 1


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_fewer_than_one_run_in_a_hundred_tells_of_a_fall_where_a_hundred_figures_differ_by_chance_alone(
    share: float,
) -> None:
    drawn = np.random.default_rng(0).binomial(200, share, size=(1000, 100)) / 200
    assert sum(bool(find_accuracy_falls(figures(row, 200))) for row in drawn.tolist()) < 10


def answers(means: Sequence[float], seed: int) -> list[tuple[str, float]]:
    """Twenty answers, right or wrong, to each of 100 prompts, in turn for each mean; prompts differ in difficulty."""
    rng = np.random.default_rng(seed)
    rewards = [rng.binomial(1, p, 20) for mean in means for p in rng.beta(4 * mean, 4 * (1 - mean), 100)]
    return [(f"prompt {i}", float(reward)) for i, own in enumerate(rewards) for reward in own]


def test_a_mean_reward_that_loses_most_of_what_was_gained_is_told_once() -> None:
    watch = RewardWatch()
    assert watch.see(answers([0.4, 0.9, 0.9, 0.8], 0)) == []  # the gain is mostly there
    (told,) = watch.see(answers([0.4, 0.4, 0.4, 0.4, 0.9], 1))
    assert told.startswith("the mean reward of new answers is 0.4")
    assert len(watch.see(answers([0.9, 0.3, 0.3], 2))) == 1


def test_fewer_than_one_run_in_a_hundred_tells_of_a_fall_where_the_mean_reward_differs_by_chance_alone() -> None:
    rng = np.random.default_rng(3)
    told = 0
    for _ in range(200):
        watch = RewardWatch()
        rewards = rng.normal(0.0, 1.0, 100 * 100)
        told += bool(watch.see((str(i), float(reward)) for i, reward in enumerate(rewards)))
    assert told < 2


def lengths(name: str, *means: float) -> list[tuple[str, float]]:
    """Two answers to each of 100 prompts for each mean: a token shorter to half of them, and longer to the others."""
    tokens = [mean + (1 if i % 2 else -1) for mean in means for i in range(100)]
    return [(f"{name} {i}", length) for i, length in enumerate(tokens) for _ in range(2)]


def test_answers_that_have_less_than_half_or_more_than_twice_of_their_first_length_are_told_of_once() -> None:
    watch = LengthWatch()
    assert watch.see(lengths("a", 33.4, 16.8, 66.7)) == {}
    told = watch.see(lengths("b", 16.6, 12.0, 67.0, 80.0, 33.4))
    assert told.keys() == {SHORT, LONG}
    assert told[SHORT].startswith("answers became short: new answers have 16.6 tokens on average, 33.4 when the run")
    assert told[LONG].startswith("answers became long: new answers have 67 tokens on average, 33.4 when the run")
    assert watch.see(lengths("c", 10.0, 90.0)) == {} == watch.finish()


@pytest.mark.parametrize(
    ("prompts", "kinds"), [([33.4] * 20 + [16.0] * 20, {SHORT}), ([33.4] * 19 + [16.0] * 19, set())]
)
def test_at_the_end_of_a_short_run_the_later_half_of_the_prompts_is_compared_with_the_earlier(
    prompts: list[float], kinds: set[str]
) -> None:
    watch = LengthWatch()
    assert watch.see((f"prompt {i}", length + i % 2) for i, length in enumerate(prompts)) == {}
    assert watch.finish().keys() == kinds


def test_fewer_than_one_run_in_a_hundred_tells_of_lengths_that_differ_by_chance_alone() -> None:
    rng, told = np.random.default_rng(4), 0
    for _ in range(200):
        tokens = rng.lognormal(3.0, 1.5, 20 * 100)  # a few answers are very long
        told += bool(LengthWatch().see((str(i), float(length)) for i, length in enumerate(tokens)))
    assert told < 2


def test_what_is_noted_is_noted_once_counted_and_shown(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert record_accuracy_falls(run, read_evaluations(run)) == []
    written = EvaluationWriter(run)
    written.write(evaluations(60, 0.2, 0.79))
    written.close()
    fall = "pass@1/greedy is 20.0 % at step 60: it was 90.0 % at step 40"
    assert record_accuracy_falls(run, read_evaluations(run)) == [fall]
    assert record_accuracy_falls(run, read_evaluations(run)) == []
    assert recorded_warnings(run) == list(RunRecord.read(run).warnings) == [fall]
    assert count_faults(run)[HELD_OUT] == 1


def test_versions_are_compared_by_sampled_accuracy_and_by_greedy_where_that_was_not_measured() -> None:
    both = evaluations(0, 0.9, 0.1) + evaluations(10, 0.1, 0.9)
    assert {v.step: e.value for v, e in by_version(both).items()} == {0: 0.1, 10: 0.9}
    greedy = [e for e in both if e.metric != SAMPLED]
    assert {v.step: e.value for v, e in by_version(greedy).items()} == {0: 0.9, 10: 0.1}
    assert by_version([]) == {}


def test_stale_data_are_reported_once_and_again_after_they_recovered() -> None:
    watch = StalenessWatch(sync_every=2)
    reports = {}
    values = [0.9] * 60 + [0.2] * 200 + [0.52] * 100 + [0.9] * 60 + [0.2] * 60 + [math.nan] * 5
    for step, ess in enumerate(values, start=1):
        for what in watch.see(step, {"ess": ess, "off_policy": 0.1}):
            reports[step] = what
    # 50 steps of which n have 0.2 and the others 0.9 are below a half from n = 29 on
    assert list(reports) == [60 + 29, 420 + 29]
    assert "was 49.4 % of a batch over steps 40 to 89" in reports[89]
    assert reports[89].endswith("weights are published every 2 updates (--sync-every)")
    assert watch.see(1, {"ess": None}) == []


def test_stale_data_for_want_of_new_answers_name_the_copies_that_are_dropped() -> None:
    def said(repeated: float | None) -> str:
        watch = StalenessWatch(sync_every=1)
        steps = [watch.see(step, {"ess": 0.2, "replay_repeated": repeated}) for step in range(1, 51)]
        ((found,),) = [told for told in steps if told]
        return found

    assert said(0.51).endswith(
        "; 51.0 % of the answers left as copies of others (--replay.buffer.no-deduplicate keeps them)"
    )
    assert "no-deduplicate" not in said(0.33) + said(None)


def test_data_that_drifted_all_the_same_way_are_stale_though_their_weights_are_equal() -> None:
    watch = StalenessWatch(sync_every=1)
    reports = {}
    for step, nats in enumerate([0.1] * 50 + [2.0] * 100 + [1.4] * 100 + [0.1] * 100 + [2.0] * 50, start=1):
        for what in watch.see(step, {"ess": 1.0, "off_policy": nats}):
            reports[step] = what
    # 50 steps of which n have 2 nats and the others 0.1 are above 1.5 from n = 37 on; 1.4 is no recovery
    assert list(reports) == [50 + 37, 350 + 37]
    assert "1.5 nats likelier under the weights that sampled them than now over steps 38 to 87" in reports[87]
    assert "--sync-every" not in reports[87]  # nobody can publish more often than after every update


def test_steps_that_teach_nothing_are_reported_once_and_answers_that_are_cut_off() -> None:
    watch = SignalWatch()
    assert not any(watch.see(step, 0.0, 0.0) for step in range(1, 50))
    found = watch.see(50, 0.0, 0.0)
    assert list(found) == [NO_SIGNAL]
    assert found[NO_SIGNAL].startswith("nothing can be learnt: in steps 1 to 50 all answers to a prompt got the same")
    assert watch.see(51, 0.0, 0.0) == {}
    cut = [(step, watch.see(step, 1.0, 1.0)) for step in range(52, 102)]
    assert [(step, list(said)) for step, said in cut if said] == [(52 + 25, [TRUNCATED])]  # 26 of 50
    assert not any(SignalWatch().see(step, step % 50 == 0, 0.5) for step in range(200))


def told(figures: Sequence[dict[str, float]]) -> dict[tuple[int, str], str]:
    """What is told of metrics from step 1 on, by step and kind."""
    watch = CollapseWatch()
    return {(i, kind): what for i, one in enumerate(figures, start=1) for kind, what in watch.see(i, one).items()}


def test_an_entropy_that_halves_within_ten_steps_is_told_once_and_a_slow_fall_never() -> None:
    sudden = [{"entropy": value} for value in [0.8] * 20 + [0.25] * 20 + [0.1] * 20]
    ((at, what),) = told(sudden).items()
    # five steps of which n have 0.25 and the others 0.8 are below 0.4, half of the five before them, from n = 4 on
    assert at == (24, ENTROPY_FALLS)
    assert what.startswith("the policy's entropy fell from 0.8 to 0.36 nats a token in the 10 steps to 24")
    assert told([{"entropy": math.exp(-0.13 * step)} for step in range(60)]) == {}  # exp(-.65) in five steps
    assert told([{"entropy": value} for value in [0.049] * 5 + [0.001] * 5]) == {}


def test_engine_and_trainer_differ_when_enough_tokens_of_one_set_of_weights_are_a_tenth_of_a_nat_apart() -> None:
    apart = {"mismatch": 0.11, "mismatch_answer": 2.0, "fresh_share": 0.5, "tokens": 200.0}
    ((at, what),) = told([apart, apart]).items()
    assert at == (1, MISMATCHES)
    assert "a token 0.11 nats more or less, an answer 2" in what
    for less in ({"mismatch": 0.1}, {"tokens": 198.0}, {"mismatch": math.nan}, {"fresh_share": 0.0}):
        assert told([apart | less]) == {}


def test_ten_batches_in_a_row_below_a_tenth_are_told_and_nine_are_not() -> None:
    assert told([{"ess": 0.09}] * 9 + [{"ess": 0.1}] + [{"ess": 0.09}] * 9) == {}
    ((at, what),) = told([{"ess": 0.5}] + [{"ess": 0.08}] * 9 + [{"ess": 0.09}] * 5).items()
    assert at == (11, LOST_SAMPLES)
    assert what.startswith("in the 10 batches to step 11 the effective sample size was at most 9.0 %")


def test_updates_are_large_when_five_batches_drifted_by_a_twentieth_of_a_nat_a_token_and_update() -> None:
    assert told([{"drift": 0.2}, {"drift": 0.01}, {"drift": 0.02}, {"drift": 0.01}, {"drift": 0.01}]) == {}
    fresh: list[dict[str, float]] = [{"mismatch": 0.0}] * 7  # what was sampled just now has not drifted
    ((at, _),) = told([*fresh, *[{"drift": 0.04}] * 5, *fresh, {"drift": 0.2}]).items()
    assert at == (20, LARGE_STEPS)


def test_answers_that_leave_as_copies_are_reported_early_and_once() -> None:
    watch = SignalWatch()
    found = {step: watch.see(step, 1.0, 0.0, 0.9) for step in range(1, 60)}
    assert [(step, list(said)) for step, said in found.items() if said] == [(10, [COPIES])]
    assert found[10][COPIES].startswith("90.0 % of the answers so far were dropped as copies of others")
    assert not any(SignalWatch().see(step, 1.0, 0.0, 0.5) for step in range(200))


@pytest.mark.parametrize("steps", [3, 6, 49])
def test_a_run_shorter_than_the_window_is_told_at_its_end_that_nothing_could_be_learnt(steps: int) -> None:
    watch = SignalWatch()
    assert not any(watch.see(step, 0.0, 1.0) for step in range(1, steps + 1))
    report = watch.finish(steps)
    assert list(report) == [NO_SIGNAL, TRUNCATED]
    assert f"in steps 1 to {steps} all answers to a prompt got the same reward" in report[NO_SIGNAL]
    assert report[TRUNCATED].startswith(f"100.0 % of the answers of steps 1 to {steps} were cut off")
    assert watch.finish(steps) == {}


def test_the_end_of_a_run_says_nothing_of_two_steps_of_one_group_that_differed_or_twice() -> None:
    few = SignalWatch()
    assert not any(few.see(step, 0.0, 1.0, 0.9) for step in (1, 2))
    assert few.finish(2) == {}
    varied = SignalWatch()
    for step in range(1, 7):
        varied.see(step, float(step == 1), 0.5, 0.5)
    assert varied.finish(6) == {}
    long = SignalWatch()
    assert sum(len(long.see(step, 0.0, 0.0)) for step in range(1, 81)) == 1
    assert long.finish(80) == {}


def test_copies_are_told_of_at_the_end_of_a_run_of_fewer_than_ten_steps() -> None:
    watch = SignalWatch()
    assert not any(watch.see(step, 1.0, 0.0, 0.9) for step in range(1, 7))
    assert list(watch.finish(6)) == [COPIES]


def test_stale_data_of_a_short_run_are_told_of_at_its_end_over_the_steps_there_were() -> None:
    watch = StalenessWatch(sync_every=2)
    assert not any(watch.see(step, {"ess": 0.2, "off_policy": 2.0}) for step in range(1, 7))
    share, nats = watch.finish(6)
    assert "was 20.0 % of a batch over steps 1 to 6" in share
    assert "2 nats likelier under the weights that sampled them than now over steps 1 to 6" in nats
    assert watch.finish(6) == []
    few = StalenessWatch(sync_every=2)
    assert [*few.see(1, {"ess": 0.2}), *few.see(2, {"ess": 0.2}), *few.finish(2)] == []
    long = StalenessWatch(sync_every=2)
    assert sum(len(long.see(step, {"ess": 0.2})) for step in range(1, 61)) == 1
    assert long.finish(60) == []


@pytest.mark.parametrize(
    ("figures", "kind", "what"),
    [
        ([{"entropy": value} for value in (0.8, 0.8, 0.8, 0.3, 0.3, 0.3)], ENTROPY_FALLS, "in the 6 steps to 6"),
        ([{"ess": 0.05}] * 4, LOST_SAMPLES, "in the 4 batches to step 4"),
        ([{"drift": 0.2}] * 3, LARGE_STEPS, "by step 3 each moved"),
    ],
)
def test_what_a_collapse_begins_with_is_told_at_the_end_of_a_run_of_a_few_steps(
    figures: list[dict[str, float]], kind: str, what: str
) -> None:
    watch = CollapseWatch()
    assert not any(watch.see(step, row) for step, row in enumerate(figures, start=1))
    report = watch.finish(len(figures))
    assert list(report) == [kind]
    assert what in report[kind]
    assert watch.finish(len(figures)) == {}
    fewer = CollapseWatch()
    for step, row in enumerate(figures[:2], start=1):
        fewer.see(step, row)
    assert fewer.finish(2) == {}


def test_a_mean_reward_that_fell_within_a_short_run_is_told_of_at_its_end() -> None:
    high, low = answers([0.9], 0), answers([0.3], 1)
    watch = RewardWatch()
    assert watch.see([*high[: 20 * 40], *((f"later {prompt}", r) for prompt, r in low[: 20 * 40])]) == []
    (fall,) = watch.finish()
    assert fall.startswith("the mean reward of new answers is 0.2")
    assert watch.finish() == []
    few = RewardWatch()
    few.see([*high[: 20 * 19], *((f"later {prompt}", r) for prompt, r in low[: 20 * 19])])
    assert few.finish() == []
    longer = RewardWatch()
    assert longer.see([*high, *((f"later {prompt}", r) for prompt, r in low[: 20 * 30])]) == []
    assert len(longer.finish()) == 1


def test_fewer_than_one_short_run_in_a_hundred_is_told_of_a_fall_by_chance_alone() -> None:
    rng = np.random.default_rng(4)
    fallen = 0
    for prompts in rng.integers(40, 200, size=500).tolist():
        watch = RewardWatch()
        watch.see((str(i), reward) for i, reward in enumerate(rng.binomial(1, 0.9, prompts).astype(float).tolist()))
        fallen += bool(watch.finish())
    assert fallen < 5
