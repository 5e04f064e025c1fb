"""Rounds that flow into one another: nothing waits for a slow stage, nothing is lost, what a stage raises is raised."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_searcher import TASK, Sent, searcher_of, small_llama

from tba.grading import Grader
from tba.protocols import GradingCalls, Manifest, PublishedWeights, Reward
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.rollout.exploration import Fixed, RandomPerRound
from tba.rollout.prompts import PromptStream
from tba.rollout.searcher import Searcher
from tba.types import LEFT_OUT, Completion, FloatArray, Judgement, Prompt, StopReason, Version
from tba.weights.directory import WeightDirectory
from toy.engine import TabularEngine, tabular_prompts
from toy.policy import WEIGHT, TabularReference

S = 4
LONG = 60.0  # seconds for what happens at once
Begin = Callable[..., tuple[Searcher, "Counted", JournalFollower]]


@dataclass
class Counted:
    """Leases prompts, and lets others wait until so many more have been begun."""

    journal: JournalWriter
    begun: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def lease(self, count: int) -> list[int]:
        positions = self.journal.lease(count, 60.0)
        with self.changed:
            self.begun += len(positions)
            self.changed.notify_all()
        return positions

    def goes_on(self, prompts: int) -> bool:
        """Whether so many more prompts are begun, in another thread, while this one waits."""
        with self.changed:
            end = self.begun + prompts
            return self.changed.wait_for(lambda: self.begun >= end, LONG)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with ExitStack() as ends:

        def make(deadline: float = LONG, **changes: Any) -> tuple[Searcher, Counted, JournalFollower]:
            journal = ends.enter_context(JournalWriter(tmp_path / "journal.sqlite", "searcher-0"))
            follower = ends.enter_context(JournalFollower(tmp_path / "journal.sqlite"))
            counted = Counted(journal)
            parts: dict[str, Any] = {
                "name": "searcher-0",
                "engine": TabularEngine(TASK),
                "reference": TabularReference(TASK, 0.7),
                "grader": Grader(changes.pop("reward", TASK.reward()), deadline),
                "exploration": Fixed(),
                "prompts": PromptStream(tabular_prompts(TASK), 0, counted.lease),
                "journal": journal,
                "weights": WeightDirectory(tmp_path / "weights"),
                "samples_per_prompt": S,
                "prompts_per_round": 3,
                "rng": np.random.default_rng(0),
                "hand_down_seconds": 0.0,
                "flows": True,
                "warm_up": 10**6,
            }
            return Searcher(**{**parts, **changes}), counted, follower

        yield make


@dataclass
class Slow:
    """A reward that is not given before so many more prompts have been begun."""

    reward: Reward
    prompts: int
    counted: Counted | None = None
    went_on: list[bool] = field(default_factory=list)

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
        assert self.counted is not None
        if len(self.went_on) < 3:
            self.went_on.append(self.counted.goes_on(self.prompts))
        return self.reward.judge(answered)


def test_generation_goes_on_while_the_reward_is_asked_and_it_is_asked_about_all_that_came_meanwhile(
    begin: Begin,
) -> None:
    slow = Slow(TASK.reward(), 20)
    searcher, slow.counted, follower = begin(reward=slow)
    while len(slow.went_on) < 3:
        searcher.round()
    searcher.drain()
    assert slow.went_on == [True] * 3
    sent, counts = follower.drain(), follower.counters()["searcher-0"]
    assert len(sent) == searcher.sent_count == counts["generated_trajectories"] == slow.counted.begun * S
    for t in sent:
        assert t.reward == TASK.rewards_QO[TASK.question(t.prompt), TASK.outcome(t.completion.tokens)]
        np.testing.assert_array_equal(
            t.log_reference, TabularReference(TASK, 0.7).log_probabilities(t.prompt, [t.completion])[0]
        )


def test_a_rounds_worth_of_answers_is_sent_without_delay_and_less_is_held_for_a_while(begin: Begin) -> None:
    searcher, counted, follower = begin(hand_down_seconds=math.inf, warm_up=0)
    searcher.journal = sent = Sent(counted.journal)
    while len(sent.sizes) < 20:
        searcher.round()
    assert min(sent.sizes) >= 3 * S
    searcher.drain()  # the rest, however little
    assert sum(sent.sizes) == len(follower.drain()) == counted.begun * S


def test_generation_waits_once_as_many_answers_wait_for_the_reward_as_the_warm_up_lacks(begin: Begin) -> None:
    given, waited = threading.Event(), list[int]()

    class Held:
        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
            assert given.wait(LONG)
            return TASK.reward().judge(answered)

    searcher, counted, follower = begin(reward=Held(), warm_up=200)
    while len(waited) < 5:
        searcher.round()
        if searcher.clock.seconds().get("reward", 0.0) > 0:
            waited.append(counted.begun)
    given.set()
    growing = 64 // S  # prompts that the engine holds
    assert len(set(waited)) == 1
    assert 200 // S <= waited[0] <= 200 // S + 3 * growing
    searcher.drain()
    assert len(follower.drain()) == counted.begun * S


@dataclass
class SlowWeights:
    """One newer version, which is not read before so many more prompts have been begun."""

    prompts: int
    counted: Counted | None = None
    went_on: bool = False

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        newest = self.at(Version(0, 2)) if self.counted is not None and self.counted.begun else self.at(Version())
        return newest if version is None or newest.version > version else None

    def at(self, version: Version) -> PublishedWeights:
        return PublishedWeights(version, Manifest(), self.read)

    def read(self) -> Mapping[str, Any]:
        assert self.counted is not None
        self.went_on = self.counted.goes_on(self.prompts)
        return {WEIGHT: torch.from_numpy(TASK.reference_logits_QNV)}


def test_generation_goes_on_while_weights_are_read_and_they_continue_answers_that_are_begun(begin: Begin) -> None:
    weights = SlowWeights(20)
    searcher, weights.counted, follower = begin(weights=weights)
    while searcher.engine.version == Version():
        searcher.round()
    assert weights.went_on
    searcher.drain()
    spans = {t.completion.versions for t in follower.drain()}
    assert spans == {(Version(), Version()), (Version(), Version(0, 2)), (Version(0, 2), Version(0, 2))}


class OnAnAccelerator(TabularReference):
    """A reference that scores in a thread of its own, not before more prompts have been begun."""

    concurrent = True
    counted: Counted | None = None
    went_on = False

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        assert self.counted is not None
        if not self.went_on:
            assert self.counted.goes_on(20)
            self.went_on = True
        return super().log_probabilities_of(answered)


def test_generation_goes_on_while_a_reference_on_an_accelerator_scores_and_it_becomes_another_in_order(
    begin: Begin,
) -> None:
    reference = OnAnAccelerator(TASK, 0.7)
    searcher, reference.counted, follower = begin(reference=reference)
    while not reference.went_on:
        searcher.round()
    other = torch.from_numpy(TASK.reference_logits_QNV) * 2
    searcher.weights.publish({WEIGHT: other}, Version(0, 2), Manifest(reference=Version(0, 2)))
    while reference.version == Version():
        searcher.round()
    searcher.drain()
    later = TabularReference(TASK, 0.7)
    later.load({WEIGHT: other}, Version(0, 2))
    by = {Version(): TabularReference(TASK, 0.7), Version(0, 2): later}
    sent = follower.drain()
    assert {t.reference for t in sent} == set(by)
    for t in sent:
        np.testing.assert_array_equal(t.log_reference, by[t.reference].log_probabilities(t.prompt, [t.completion])[0])


class Broken(Exception):
    pass


def rounds(searcher: Searcher) -> None:
    """More of them than a stage that is broken can let pass."""
    for _ in range(1000):
        searcher.round()


@dataclass(frozen=True)
class BrokenReward:
    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
        raise Broken("in the reward")


@dataclass
class BrokenWeights:
    """Versions of which only the first can be read."""

    newest: Version = Version(0, 2)

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        return self.at(self.newest) if version is None or self.newest > version else None

    def at(self, version: Version) -> PublishedWeights:
        return PublishedWeights(version, Manifest(), self.read)

    def read(self) -> Mapping[str, Any]:
        if self.newest > Version(0, 2):
            raise Broken("in reading")
        return {WEIGHT: torch.from_numpy(TASK.reference_logits_QNV)}


class BrokenReference(TabularReference):
    concurrent = True

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        raise Broken("in the reference")


@pytest.mark.parametrize(
    ("changes", "where"),
    [({"reward": BrokenReward()}, "judge"), ({"reference": BrokenReference(TASK, 0.7)}, "log_probabilities_of")],
)
def test_what_a_stage_raises_is_raised_by_the_round_with_the_stages_traceback(
    begin: Begin, changes: dict[str, Any], where: str
) -> None:
    searcher, _, follower = begin(**changes)
    with pytest.raises(Broken) as raised:
        rounds(searcher)
    assert raised.traceback[-1].name == where
    assert follower.drain() == []


def test_so_is_what_reading_weights_raises(begin: Begin) -> None:
    weights = BrokenWeights()
    searcher, _, _ = begin(weights=weights)
    searcher.round()
    weights.newest = Version(0, 4)
    with pytest.raises(Broken, match="in reading"):
        rounds(searcher)


@dataclass
class HangsOnce:
    """A reward that never judges one answer, and all others at once."""

    released: threading.Event
    concurrency: int = 2
    hung: list[Completion] = field(default_factory=list)

    def calls(self) -> Sequence[GradingCalls]:
        return [GradingCalls("the hanging reward", self.judge, "answer", self.concurrency)]

    def judgement(self, values: Sequence[Judgement]) -> Judgement:
        return values[0]

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
        if not self.hung:
            self.hung.append(answered[0][1])
            self.released.wait(LONG)
        return TASK.reward().judge(answered)


def test_an_answer_whose_call_hangs_is_rejected_counted_and_held_against_its_group_only(begin: Begin) -> None:
    hangs = HangsOnce(threading.Event())
    searcher, counted, follower = begin(deadline=2.0, reward=hangs)
    while searcher.rejected_count == 0:
        searcher.round()
    searcher.drain()
    hangs.released.set()
    sent, counts = follower.drain(), follower.counters()["searcher-0"]
    assert counts["expired_trajectories"] == counts["rejected_trajectories"] == 1
    assert counts["rejected_tokens"] == len(hangs.hung[0].tokens)
    assert len(sent) == counted.begun * S - 1
    assert counts["grading_trajectories"] == counts["grading_tokens"] == 0
    marked = [t for t in sent if LEFT_OUT in t.provenance]
    assert len(marked) == S - 1
    assert {t.provenance[LEFT_OUT] for t in marked} == {1 / (S - 1)}
    assert len({t.prompt.key for t in marked}) == 1


def test_another_way_of_sampling_begins_once_the_answers_of_the_one_before_are_finished(begin: Begin) -> None:
    searcher, counted, follower = begin(exploration=RandomPerRound(p_temperature=1.0, p_top_p=0.5))
    for _ in range(6):
        searcher.round()
    searcher.drain()
    sent = follower.drain()
    assert len(sent) == counted.begun * S
    by_prompt: dict[int, set[Any]] = {}
    for i, t in enumerate(sent):
        by_prompt.setdefault(i // S, set()).add(t.completion.sampling)
    assert all(len(ways) == 1 for ways in by_prompt.values())
    assert len({t.completion.sampling for t in sent}) == 6


def test_rounds_that_flow_into_one_another_lose_nothing_and_leave_the_rest_in_flight(tmp_path: Path) -> None:
    model = small_llama(tmp_path / "model")
    with JournalWriter(tmp_path / "journal.sqlite", "searcher-0") as journal:
        searcher = searcher_of(model, tmp_path, 0.7, Fixed(temperature=0.7), Sent(journal))
        searcher.prompts = PromptStream(searcher.prompts.prompts, 0, lambda count: journal.lease(count, 60.0))
        searcher.hand_down_seconds, searcher.flows, searcher.warm_up = 0.0, True, 10**6
        for _ in range(3):
            searcher.round()
        searcher.drain()
        begun = journal.rows()
        assert begun >= 3 * 36
        assert journal.lease(1, 60.0) == [begun // 12]  # all that were begun are finished and given back
        searcher.round()
        searcher.drain(stop=True)
        rows = journal.rows()
    with JournalFollower(tmp_path / "journal.sqlite") as follower:
        kept = follower.drain()
        told = follower.counters()["searcher-0"]
    assert len(kept) == rows == searcher.sent_count > begun  # those of a prompt that were finished are sent
    assert told["generated_trajectories"] == len(kept) + told["in_flight_trajectories"]
    assert told["generated_tokens"] == sum(t.length for t in kept) + told["in_flight_tokens"]
    assert told["in_flight_trajectories"] > 0
    for t in kept:
        assert t.completion.stop_reason is not StopReason.INTERRUPTED
        assert t.completion.log_behavior is not None
        np.testing.assert_allclose(t.log_reference, t.completion.log_behavior, atol=1e-4)


def test_the_time_of_a_searcher_is_counted_by_what_it_was_spent_on_and_adds_up(begin: Begin) -> None:
    for flows in (False, True):
        searcher, _, follower = begin(flows=flows)
        for _ in range(20):
            searcher.round()
        searcher.drain()
        counts = follower.counters()["searcher-0"]
        counted = sum(n for name, n in counts.items() if name.endswith("_milliseconds"))
        clock = sum(searcher.clock.seconds().values())
        told = sum(searcher._written_milliseconds.values())
        assert told <= 1000 * clock + 4  # each of its states is rounded
        assert counted >= told
