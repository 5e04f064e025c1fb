"""A searcher's round: what is generated, judged, sent down and counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_llama import small_llama

from tba.batch import collate
from tba.grading import Grader
from tba.models.huggingface import HuggingFace
from tba.protocols import Manifest, Reward
from tba.replay.buffer import Buffer, BufferSettings
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.rollout.exploration import Fixed, RandomPerRound
from tba.rollout.prompts import PromptStream
from tba.rollout.searcher import Searcher
from tba.types import LEFT_OUT, Completion, Group, Judgement, Prompt, Sampling, StopReason, Trajectory, Version
from tba.weights.directory import WeightDirectory
from toy.engine import TabularEngine, tabular_prompts
from toy.policy import TabularReference, TabularTask

TASK = TabularTask()
S = 9


@dataclass
class Bench:
    """A searcher of the toy with real ends, and the other ends of these."""

    searcher: Searcher
    journal: JournalWriter
    follower: JournalFollower
    weights: WeightDirectory

    @property
    def counts(self) -> dict[str, int]:
        return self.follower.counters()["searcher-0"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    with ExitStack() as ends:

        def make(**changes: Any) -> Bench:
            journal = ends.enter_context(JournalWriter(tmp_path / "journal.sqlite", "searcher-0"))
            follower = ends.enter_context(JournalFollower(tmp_path / "journal.sqlite"))
            weights = WeightDirectory(tmp_path / "weights")
            parts: dict[str, Any] = {
                "name": "searcher-0",
                "engine": TabularEngine(TASK),
                "reference": TabularReference(TASK, 0.7),
                "grader": Grader(changes.pop("reward", TASK.reward())),
                "exploration": Fixed(),
                "prompts": PromptStream(tabular_prompts(TASK), 0, lambda count: journal.lease(count, 60.0)),
                "journal": journal,
                "weights": weights,
                "samples_per_prompt": S,
                "prompts_per_round": 3,
                "rng": np.random.default_rng(0),
            }
            return Bench(Searcher(**{**parts, **changes}), journal, follower, weights)

        yield make


def after(times: int) -> Callable[[], bool]:
    """False so many times, then true."""
    asked = iter(range(times))
    return lambda: next(asked, None) is None


@dataclass
class Watched:
    """A reward that remembers what it was asked."""

    reward: Reward
    asked: list[tuple[Prompt, Completion]] = field(default_factory=list)

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
        self.asked += answered
        return self.reward.judge(answered)


@dataclass(frozen=True)
class NotANumberForShort:
    """Not a number for answers of one token, infinite for those of two."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [Judgement({1: float("nan"), 2: float("inf")}.get(len(c.tokens), 0.5)) for _, c in answered]


@dataclass(frozen=True)
class Indifferent:
    """0.5 to everything."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [Judgement(0.5) for _ in answered]


def test_a_round_sends_every_answer_down_with_its_mark_and_reference(bench: Callable[..., Bench]) -> None:
    b = bench()
    assert b.searcher.round() == 3 * S
    sent = b.follower.drain()
    tokens = sum(t.length for t in sent)
    counts = {name: n for name, n in b.counts.items() if n and not name.endswith("_milliseconds")}
    asked = sum(len(t.prompt.tokens) for t in sent) // S
    assert counts == {"generated_tokens": tokens, "generated_trajectories": 3 * S, "asked_tokens": asked}
    table = TabularReference(TASK, 0.7)
    for t in sent:
        assert t.reward == TASK.rewards_QO[TASK.question(t.prompt), TASK.outcome(t.completion.tokens)]
        np.testing.assert_array_equal(t.log_reference, table.log_probabilities(t.prompt, [t.completion])[0])
        assert t.provenance["searcher"] == "searcher-0"
        assert t.provenance["round"] == 0
        assert 0 <= t.provenance["seconds"] == sent[0].provenance["seconds"] < 60  # since the round began
        assert t.created == sent[0].created > 0
    assert len({t.uid for t in sent}) == len(sent)
    assert b.journal.lease(1, 60.0) == [3]  # 0, 1 and 2 are answered


def test_an_answer_whose_mark_is_not_finite_is_rejected_and_counted(bench: Callable[..., Bench]) -> None:
    b = bench(reward=NotANumberForShort())
    for _ in range(4):
        b.searcher.round()
    sent, counts = b.follower.drain(), b.counts
    assert {t.length for t in sent} == {3}
    assert counts["rejected_trajectories"] > 0
    assert counts["generated_trajectories"] == 4 * 3 * S == len(sent) + counts["rejected_trajectories"]
    assert counts["generated_tokens"] == sum(t.length for t in sent) + counts["rejected_tokens"]
    assert b.journal.lease(1, 60.0) == [12]  # a rejected answer is an answer
    buffer, rejecting = (
        Buffer(BufferSettings(deduplicate=False)),
        {t.prompt.key for t in sent if t.provenance.get(LEFT_OUT)},
    )
    for t in sent:
        buffer.add(t)
    kept = Counter((t.prompt.key, t.provenance["round"]) for t in sent)
    assert rejecting == {key for (key, _), n in kept.items() if n < S}  # each prompt was asked for S answers at a time
    assert sum(t.provenance.get(LEFT_OUT, 0) for t in sent) == pytest.approx(counts["rejected_trajectories"])
    assert all(buffer.thinned(key) for key in rejecting)  # what is left of its answers is a choice by what they say


@pytest.mark.parametrize("asked", [1, 2])
def test_what_was_interrupted_is_never_judged_is_in_flight_and_its_prompts_come_again(
    bench: Callable[..., Bench], asked: int
) -> None:
    watched = Watched(TASK.reward())
    b = bench(reward=watched, interrupted=after(asked))
    b.searcher.round()
    sent, counts = b.follower.drain(), b.counts
    assert len(watched.asked) == len(sent) < 3 * S
    assert not [c for _, c in watched.asked if c.stop_reason is StopReason.INTERRUPTED]
    assert counts["in_flight_trajectories"] > 0
    assert counts["generated_trajectories"] == 3 * S == len(sent) + counts["in_flight_trajectories"]
    assert counts["generated_tokens"] == sum(t.length for t in sent) + counts["in_flight_tokens"]
    b.journal.resume()
    assert b.journal.lease(4, 60.0) == [0, 1, 2, 3]


def test_a_round_that_is_interrupted_before_its_first_token_answers_no_prompt(bench: Callable[..., Bench]) -> None:
    b = bench(interrupted=lambda: True)
    assert b.searcher.round() == 0
    b.journal.resume()
    assert b.journal.lease(3, 60.0) == [0, 1, 2]


def test_newer_weights_are_taken_between_rounds_and_only_then(bench: Callable[..., Bench]) -> None:
    b = bench()
    start = torch.from_numpy(TASK.reference_logits_QNV)
    versions = []
    for version in (None, Version(0, 2), None, Version(0, 4), Version(1, 4)):
        if version is not None:
            b.weights.publish({"prefix.logits": start + version.step}, version, Manifest(wanted=version.step))
        b.searcher.round()
        versions += sorted({t.completion.versions for t in b.follower.drain()})
    expected = [Version(), Version(0, 2), Version(0, 2), Version(0, 4), Version(1, 4)]
    assert versions == [(v, v) for v in expected]
    assert b.searcher.manifest == Manifest(wanted=4)


def test_weights_that_come_in_the_middle_of_a_round_wait_for_its_end(bench: Callable[..., Bench]) -> None:
    engine = TabularEngine(TASK)
    asked: list[Version] = []

    def interrupted() -> bool:
        asked.append(engine.version)
        if len(asked) == 2:
            b.weights.publish(
                {"prefix.logits": torch.from_numpy(TASK.reference_logits_QNV)}, Version(0, 2), Manifest(wanted=1)
            )
        return False

    b = bench(engine=engine, interrupted=interrupted)
    b.searcher.round()
    assert asked == [Version()] * TASK.length
    assert b.searcher.manifest == Manifest()
    b.searcher.round()
    assert asked[TASK.length :] == [Version(0, 2)] * TASK.length
    assert b.searcher.manifest == Manifest(wanted=1)


def test_the_settings_of_each_round_are_recorded_with_its_answers(bench: Callable[..., Bench]) -> None:
    exploration = RandomPerRound(p_temperature=0.5, p_top_p=0.5)
    b = bench(exploration=exploration)
    drawn = []
    for _ in range(6):
        b.searcher.round()
        (settings,) = {t.completion.sampling for t in b.follower.drain()}
        drawn.append(settings)
    assert len(set(drawn)) == 6
    assert {s.top_p < 1 for s in drawn} == {True, False} == {s.temperature == 1.0 for s in drawn}


def test_equal_generators_give_equal_rounds(bench: Callable[..., Bench]) -> None:
    rounds = []
    for _ in range(2):
        b = bench(rng=np.random.default_rng(7))
        b.searcher.prompts.lease = lambda count: list(range(count))
        b.searcher.journal = Kept()
        b.searcher.round()
        rounds.append([(t.uid, t.completion.digest) for t in b.searcher.journal.kept])
    assert rounds[0] == rounds[1]


@dataclass
class Kept:
    """A journal in memory, which is only put into."""

    kept: list[Trajectory] = field(default_factory=list)

    def put(
        self, trajectories: Sequence[Trajectory], leases: Sequence[int] = (), counters: Any = None, outcomes: Any = ()
    ) -> None:
        self.kept += trajectories


@dataclass
class Sent:
    """A journal that remembers how many trajectories each transaction had."""

    journal: JournalWriter
    sizes: list[int] = field(default_factory=list)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.journal, verb)

    def put(self, trajectories: Sequence[Trajectory], *rest: Any) -> None:
        self.sizes.append(len(trajectories))
        self.journal.put(trajectories, *rest)


@pytest.mark.parametrize(("seconds", "puts"), [(0.0, 3), (math.inf, 1), (1e6, 1)])
def test_a_long_round_is_sent_down_prompt_by_prompt_and_its_account_closes(
    tmp_path: Path, seconds: float, puts: int
) -> None:
    model = small_llama(tmp_path / "model")
    with JournalWriter(tmp_path / "journal.sqlite", "searcher-0") as journal:
        searcher = searcher_of(model, tmp_path, 0.7, Fixed(temperature=0.7), sent := Sent(journal))
        searcher.prompts = PromptStream(searcher.prompts.prompts, 0, lambda count: journal.lease(count, 60.0))
        searcher.hand_down_seconds = seconds
        handed_down = searcher.round()
        assert journal.lease(1, 60.0) == [3]  # 0, 1 and 2 are given back
    assert handed_down == sum(sent.sizes) == 36
    assert len(sent.sizes) <= puts
    assert (len(sent.sizes) > 1) == (seconds == 0.0)
    with JournalFollower(tmp_path / "journal.sqlite") as follower:
        kept = follower.drain()
        counts = follower.counters()["searcher-0"]
    assert Counter(t.prompt.text for t in kept) == {"1+2=": 12, "7.": 12, "12+34+56=": 12}
    assert counts["generated_trajectories"] == len(kept)
    assert counts["generated_tokens"] == sum(t.length for t in kept)
    ages = [t.provenance["seconds"] for t in kept]
    assert ages == sorted(ages)
    for t in kept:  # scored while the others were half done, by another model of the same kind
        assert t.completion.log_behavior is not None
        np.testing.assert_allclose(t.log_reference, t.completion.log_behavior, atol=1e-4)


def rounds_of(model: HuggingFace, tmp_path: Path, temperature: float, exploration: Fixed) -> list[Trajectory]:
    """Two rounds of real parts at version 0; answers of many lengths, some ended by EOS and some truncated."""
    journal = Kept()
    searcher = searcher_of(model, tmp_path, temperature, exploration, journal)
    searcher.round()
    searcher.round()
    assert {t.completion.stop_reason for t in journal.kept} == {StopReason.EOS, StopReason.LENGTH}
    return journal.kept


def searcher_of(model: HuggingFace, tmp_path: Path, temperature: float, exploration: Fixed, journal: Any) -> Searcher:
    """Three prompts, twelve answers to each, on seven slots."""
    tokenizer = model.tokenizer()
    prompts = [Prompt("t", np.array(tokenizer.encode(t), np.int32), t) for t in ("1+2=", "7.", "12+34+56=")]
    return Searcher(
        name="searcher-0",
        engine=model.engine(Version()),
        reference=model.reference(temperature, Version()),
        grader=Grader(Indifferent()),
        exploration=exploration,
        prompts=PromptStream(prompts, 0, lambda count: list(range(count))),
        journal=journal,
        weights=WeightDirectory(tmp_path / "weights"),
        samples_per_prompt=12,
        prompts_per_round=3,
        rng=np.random.default_rng(0),
    )


def test_at_version_0_every_log_ratio_to_the_reference_is_0_whatever_the_searcher_sampled_at(tmp_path: Path) -> None:
    model = small_llama(tmp_path / "model")
    sent = rounds_of(model, tmp_path, 0.7, Fixed(temperature=1.3, top_p=0.9))
    assert {t.completion.sampling for t in sent} == {Sampling(1.3, 0.9)}
    by_prompt = {t.prompt.key: [u for u in sent if u.prompt.key == t.prompt.key] for t in sent}
    batch = collate([Group.of(group) for group in by_prompt.values()])
    with torch.no_grad():
        log_policy_BT = model.policy(0.7).evaluate(batch).log_policy_BT
        untempered_BT = model.policy(1.0).evaluate(batch).log_policy_BT
    assert (log_policy_BT - batch.log_reference_BT).sum(1).abs().max() < 1e-5
    assert batch.log_behavior_BT is not None
    for other_BT in (untempered_BT, batch.log_behavior_BT):  # it would be seen if one of the two slipped in
        assert (other_BT - batch.log_reference_BT).sum(1).abs().max() > 0.1


def test_what_the_engine_samples_at_the_policy_temperature_is_as_likely_as_the_reference_says(tmp_path: Path) -> None:
    sent = rounds_of(small_llama(tmp_path / "model"), tmp_path, 0.7, Fixed(temperature=0.7))
    for t in sent:
        assert t.completion.log_behavior is not None
        np.testing.assert_allclose(t.log_reference, t.completion.log_behavior, atol=1e-4)
