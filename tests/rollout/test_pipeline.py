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

from tba.errors import DeadlineExceeded
from tba.protocols import PublishedWeights, Reward
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.rollout import pipeline as pipelines
from tba.rollout.exploration import Fixed, RandomPerRound
from tba.rollout.pipeline import Pipeline
from tba.rollout.prompts import PromptStream
from tba.rollout.searcher import Searcher
from tba.types import Completion, FloatArray, Judgement, Prompt, StopReason, Version
from tba.weights.directory import WeightDirectory
from toy.engine import TabularEngine, tabular_prompts
from toy.policy import WEIGHT, TabularReference

S = 4
LONG = 60.0  # seconds for what happens at once
Begin = Callable[..., tuple[Pipeline, "Counted", JournalFollower]]


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

        def make(deadline: float = LONG, **changes: Any) -> tuple[Pipeline, Counted, JournalFollower]:
            journal = ends.enter_context(JournalWriter(tmp_path / "journal.sqlite", "searcher-0"))
            follower = ends.enter_context(JournalFollower(tmp_path / "journal.sqlite"))
            counted = Counted(journal)
            parts: dict[str, Any] = {
                "name": "searcher-0",
                "engine": TabularEngine(TASK),
                "reference": TabularReference(TASK, 0.7),
                "reward": TASK.reward(),
                "exploration": Fixed(),
                "prompts": PromptStream(tabular_prompts(TASK), 0, counted.lease),
                "journal": journal,
                "weights": WeightDirectory(tmp_path / "weights"),
                "samples_per_prompt": S,
                "prompts_per_round": 3,
                "rng": np.random.default_rng(0),
                "hand_down_seconds": 0.0,
            }
            return Pipeline(Searcher(**{**parts, **changes}), deadline), counted, follower

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
    pipeline, slow.counted, follower = begin(reward=slow)
    while len(slow.went_on) < 3:
        pipeline.round()
    pipeline.drain()
    assert slow.went_on == [True] * 3
    sent, counts = follower.drain(), follower.counters()["searcher-0"]
    assert len(sent) == pipeline.sent == counts["generated_trajectories"] == slow.counted.begun * S
    for t in sent:
        assert t.reward == TASK.rewards_QO[TASK.question(t.prompt), TASK.outcome(t.completion.tokens)]
        np.testing.assert_array_equal(
            t.log_reference, TabularReference(TASK, 0.7).log_probabilities(t.prompt, [t.completion])[0]
        )


def test_a_rounds_worth_of_answers_is_sent_without_delay_and_less_is_held_for_a_while(begin: Begin) -> None:
    pipeline, counted, follower = begin(hand_down_seconds=math.inf)
    pipeline.searcher.journal = sent = Sent(counted.journal)
    while len(sent.sizes) < 20:
        pipeline.round()
    assert min(sent.sizes) >= 3 * S
    pipeline.drain()  # the rest, however little
    assert sum(sent.sizes) == len(follower.drain()) == counted.begun * S


def test_generation_waits_once_many_rounds_of_answers_wait_for_the_reward(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "_BEAT", 0.001)
    given, waited = threading.Event(), list[int]()

    class Held:
        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
            assert given.wait(LONG)
            return TASK.reward().judge(answered)

    def interrupted() -> bool:
        if pipeline.searcher.clock.present == "reward":  # it gives a sign of life while it waits
            waited.append(counted.begun)
            if len(waited) == 5:
                given.set()
        return False

    pipeline, counted, follower = begin(reward=Held(), interrupted=interrupted)
    while not given.is_set():
        pipeline.round()
    growing = 64 // S  # prompts that the engine holds; at most as many are in the part that is judged
    assert len(waited) >= 5
    assert len(set(waited)) == 1
    assert 16 * 3 <= waited[0] <= 16 * 3 + 3 * growing
    pipeline.drain()
    assert len(follower.drain()) == counted.begun * S
    assert pipeline.searcher.clock.seconds()["reward"] > 0


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
        return PublishedWeights(version, {}, self.read)

    def read(self) -> Mapping[str, Any]:
        assert self.counted is not None
        self.went_on = self.counted.goes_on(self.prompts)
        return {WEIGHT: torch.from_numpy(TASK.reference_logits_QNV)}


def test_generation_goes_on_while_weights_are_read_and_they_continue_answers_that_are_begun(begin: Begin) -> None:
    weights = SlowWeights(20)
    pipeline, weights.counted, follower = begin(weights=weights)
    while pipeline.searcher.engine.version == Version():
        pipeline.round()
    assert weights.went_on
    pipeline.drain()
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
    pipeline, reference.counted, follower = begin(reference=reference)
    while not reference.went_on:
        pipeline.round()
    other = torch.from_numpy(TASK.reference_logits_QNV) * 2
    pipeline.searcher.weights.publish({WEIGHT: other}, Version(0, 2), {"reference": "0.2"})
    while reference.version == Version():
        pipeline.round()
    pipeline.drain()
    later = TabularReference(TASK, 0.7)
    later.load({WEIGHT: other}, Version(0, 2))
    by = {Version(): TabularReference(TASK, 0.7), Version(0, 2): later}
    sent = follower.drain()
    assert {t.reference for t in sent} == set(by)
    for t in sent:
        np.testing.assert_array_equal(t.log_reference, by[t.reference].log_probabilities(t.prompt, [t.completion])[0])


class Broken(Exception):
    pass


def rounds(pipeline: Pipeline) -> None:
    """More of them than a stage that is broken can let pass."""
    for _ in range(1000):
        pipeline.round()


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
        return PublishedWeights(version, {}, self.read)

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
    pipeline, _, follower = begin(**changes)
    with pytest.raises(Broken) as raised:
        rounds(pipeline)
    assert raised.traceback[-1].name == where
    assert follower.drain() == []


def test_so_is_what_reading_weights_raises(begin: Begin) -> None:
    weights = BrokenWeights()
    pipeline, _, _ = begin(weights=weights)
    pipeline.round()
    weights.newest = Version(0, 4)
    with pytest.raises(Broken, match="in reading"):
        rounds(pipeline)


def test_a_stage_that_hangs_is_named_once_its_time_is_over(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "_BEAT", 0.001)
    over = threading.Event()

    class Hangs:
        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
            over.wait(LONG)
            return []

    pipeline, _, _ = begin(deadline=0.05, reward=Hangs())
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s for the reward of a searcher's answers"):
        rounds(pipeline)
    over.set()


def test_another_way_of_sampling_begins_once_the_answers_of_the_one_before_are_finished(begin: Begin) -> None:
    pipeline, counted, follower = begin(exploration=RandomPerRound(p_temperature=1.0, p_top_p=0.5))
    for _ in range(6):
        pipeline.round()
    pipeline.drain()
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
        searcher.hand_down_seconds = 0.0
        pipeline = Pipeline(searcher, LONG)
        for _ in range(3):
            pipeline.round()
        pipeline.drain()
        begun = journal.rows()
        assert begun >= 3 * 36
        assert journal.lease(1, 60.0) == [begun // 12]  # all that were begun are finished and given back
        pipeline.round()
        pipeline.drain(stop=True)
        rows = journal.rows()
    with JournalFollower(tmp_path / "journal.sqlite") as follower:
        kept = follower.drain()
        told = follower.counters()["searcher-0"]
    assert len(kept) == rows == pipeline.sent > begun  # those of a prompt that were finished are sent
    assert told["generated_trajectories"] == len(kept) + told["in_flight_trajectories"]
    assert told["generated_tokens"] == sum(t.length for t in kept) + told["in_flight_tokens"]
    assert told["in_flight_trajectories"] > 0
    for t in kept:
        assert t.completion.stop_reason is not StopReason.INTERRUPTED
        assert t.completion.log_behavior is not None
        np.testing.assert_allclose(t.log_reference, t.completion.log_behavior, atol=1e-4)


def test_the_time_of_a_searcher_is_counted_by_what_it_was_spent_on_and_adds_up(begin: Begin) -> None:
    for flows in (False, True):
        pipeline, _, follower = begin()
        for _ in range(20):
            (pipeline if flows else pipeline.searcher).round()
        pipeline.drain()
        counts = follower.counters()["searcher-0"]
        counted = sum(n for name, n in counts.items() if name.endswith("_milliseconds"))
        clock = sum(pipeline.searcher.clock.seconds().values())
        told = sum(pipeline.searcher._told.values())
        assert told <= 1000 * clock + 4  # each of its states is rounded
        assert counted >= told
