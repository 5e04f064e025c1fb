"""The searcher: one `round()` draws prompts, samples answers, judges them and sends them to the journal.

A long round is sent in parts, each prompt with all its answers, so that answers are young when they arrive. Here one
step follows another; `Pipeline` makes the same steps while others are going on.

Invariant: it never waits for the trainer. Newer weights, if there are any, are loaded between rounds, and with them the
reference that they name; what is generated is either written (with its leases, in one transaction), rejected or in
flight, and each is counted here.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from tba.clock import SEARCHERS_TIME, ShareClock
from tba.errors import UserError
from tba.generation import generate, stream
from tba.protocols import Engine, Exploration, Journal, PromptSource, Reference, Reward, WeightSource
from tba.rollout.overlong import Overlong
from tba.rollout.rescoring import Rescorer
from tba.rollout.reward_retry import PatientReward
from tba.rollout.vine import VineRollouts
from tba.types import (
    LEFT_OUT,
    TEACHER,
    Completion,
    FloatArray,
    Json,
    Judgement,
    Outcome,
    Prompt,
    Sampling,
    StopReason,
    Trajectory,
    Version,
    quoted,
)

log = logging.getLogger("tba.searcher")
GENERATING = 8  # generate this many times as long as judging and sending what is finished takes, before sending a part
_ROUNDS_WITHOUT_USE = 10  # first rounds without a usable answer, after which no further one is expected to bring any


Scores: TypeAlias = "tuple[FloatArray, ...]"  # log-probabilities [T] under the reference, then under each teacher
Finished: TypeAlias = "Sequence[tuple[Prompt, list[Completion]]]"  # prompts with the answers that are finished


@dataclass(frozen=True)
class Answered:
    """A prompt of a round with its completions; `position` is the one that was leased."""

    position: int
    prompt: Prompt
    completions: Sequence[Completion]
    began: float  # when it was asked, by a monotonic clock

    def is_whole(self, count: int) -> bool:
        """Returns whether the lease is given back: `count` completions are finished. Otherwise it runs out, and is
        leased again.
        """
        return sum(c.stop_reason is not StopReason.INTERRUPTED for c in self.completions) == count


@dataclass
class Searcher:
    """Owns a slightly stale copy of the policy. Call `round()` by hand in a REPL, or let a runtime do it."""

    name: str
    engine: Engine
    reference: Reference
    reward: Reward
    exploration: Exploration
    prompts: PromptSource
    journal: Journal
    weights: WeightSource
    samples_per_prompt: int  # S
    prompts_per_round: int
    rng: np.random.Generator
    interrupted: Callable[[], bool] | None = None
    rescorer: Rescorer | None = None  # None: the reference is never reset
    teachers: Sequence[Reference] = ()  # which score every answer as well
    vine: VineRollouts | None = None  # values of the steps of every answer
    largest_reward: float = sys.float_info.max  # an answer whose |reward| is beyond it is rejected
    overlong: Overlong = Overlong()  # what is taken off the reward of long answers
    hide_text: bool = False  # name a rejected answer by its prompt's key, its digest and its length
    hand_down_seconds: float = math.inf  # a part of a round is sent after so many seconds, in the middle of the round
    rounds: int = 0
    rejected: str = ""  # why the last rejected answer was rejected
    rounds_without_use: int | None = 0  # first rounds of which all answers were rejected; None: one was of use
    manifest: Mapping[str, Json] = field(default_factory=dict)  # of the newest weights seen
    clock: ShareClock = field(default_factory=lambda: ShareClock(state="generating"))
    _told: Counter[str] = field(default_factory=Counter)  # milliseconds of the clock that have been counted

    def round(self) -> int:
        """Make one round; returns the number of trajectories sent. What a new reference requires to be rescored comes
        first.
        """
        self.pull()
        self.rescore()
        asked = self.prompts.take(self.prompts_per_round)
        sampling = self.exploration.draw(self.rng)
        sent = rejected = 0
        for answered in _due(self._answered(*asked, sampling), self.hand_down_seconds):
            finished, counts = self.sort(answered)
            with self.clock.state("reward"):
                judgements = self.judge(finished)
            with self.clock.state("reference"):
                scores = self.score(finished)
            trajectories = self.trajectories(finished, judgements, scores, counts)
            leases = self.whole(answered)
            if self.vine is not None:
                in_flight = counts["in_flight_trajectories"]
                trajectories = self.vine.grow(trajectories, sampling, self.rng, counts, self.interrupted)
                leases = leases if counts["in_flight_trajectories"] == in_flight else []
            self.send(answered, trajectories, leases, counts)
            sent, rejected = sent + len(trajectories), rejected + counts["rejected_trajectories"]
        self.rounds += 1
        self.require_use(sent, rejected)
        return sent

    def _answered(self, positions: Sequence[int], prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Answered]:
        """Yields a round's prompts with their completions, as they are finished or all at the end."""
        began = time.perf_counter()
        asked = (self.engine, prompts, self.samples_per_prompt, sampling, self.rng, self.interrupted)
        found: Iterable[tuple[int, Sequence[Completion]]]
        found = stream(*asked) if self.hand_down_seconds < math.inf else enumerate(generate(*asked))
        for i, completions in found:
            yield Answered(positions[i], prompts[i], completions, began)

    def whole(self, answered: Sequence[Answered]) -> list[int]:
        """Returns the leases that are given back: of prompts all of whose answers are there."""
        return [a.position for a in answered if a.is_whole(self.samples_per_prompt)]

    def send(
        self,
        answered: Sequence[Answered],
        trajectories: Sequence[Trajectory],
        leases: Sequence[int],
        counts: Counter[str],
    ) -> None:
        """Write trajectories, the leases that are given back and what was counted, in one transaction."""
        outcomes = self._outcomes({a.position: a.prompt for a in answered}, leases, trajectories)
        finished = Counter(
            a.prompt.key for a in answered for c in a.completions if c.stop_reason is not StopReason.INTERRUPTED
        )
        stored = Counter(t.prompt.key for t in trajectories)
        left_out = {key: (finished[key] - kept) / kept for key, kept in stored.items() if kept < finished[key]}
        trajectories = _stamped(trajectories, time.perf_counter() - min(a.began for a in answered), left_out)
        self._count_time(counts)
        self.journal.put(trajectories, leases, counts, outcomes)

    def _count_time(self, counts: Counter[str]) -> None:
        """Add what the clock has measured since the last time."""
        seconds = self.clock.seconds()
        for name, states in SEARCHERS_TIME.items():
            milliseconds = round(1000 * sum(seconds.get(state, 0.0) for state in states))
            counts[f"{name}_milliseconds"] = milliseconds - self._told[name]
            self._told[name] = milliseconds

    def pull(self) -> Version:
        """Load newer weights, and another reference if they name one, in place.

        The newest manifest is always read: the engine may hold a version that was only to be evaluated.
        """
        published = self.weights.newer_than(None)
        if published is not None:
            with self.clock.state("weights"):
                if published.version > self.engine.version:
                    self.engine.load(published.read(), published.version)
                self.manifest = published.manifest
                self.refer()
        return self.engine.version

    def require_use(self, kept: int, rejected: int) -> None:
        """Raises `UserError` where the first rounds bring nothing but answers that are rejected: the run would never
        end.
        """
        if kept:
            self.rounds_without_use = None
        if self.rounds_without_use is None or not rejected:
            return
        self.rounds_without_use += 1
        if self.rounds_without_use == _ROUNDS_WITHOUT_USE:
            raise UserError(
                f"all answers of the first {_ROUNDS_WITHOUT_USE} rounds are rejected: there is nothing to learn from; "
                f"the last: {self.rejected}; what can be used has a reward from {-self.largest_reward:g} to "
                f"{self.largest_reward:g} and finite log-probabilities: "
                + ("allow longer answers" if self.overlong.penalty == "drop" else "fix the reward")
                + ", then start again, or resume"
            )

    def refer(self) -> None:
        """Score under the version that the newest weights name from here on. It is pinned; the first one is what the
        run began with.
        """
        name = self.manifest.get("reference")
        if name is not None and (version := Version.parse(name)) != self.reference.version:
            self.reference.load(self.weights.at(version).read(), version)

    def rescore(self) -> None:
        """Score older trajectories under a newer reference, where that is wanted: a bounded number at a time."""
        if self.rescorer is not None:
            with self.clock.state("reference"):
                self.rescorer.round()

    def _outcomes(
        self, prompts: Mapping[int, Prompt], leases: Sequence[int], trajectories: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        """Returns the outcomes of the prompts that are given back."""
        by_key: dict[str, list[float]] = {}
        for t in trajectories:
            by_key.setdefault(t.prompt.key, []).append(t.reward)
        return self.prompts.outcomes({p: by_key[key] for p in leases if (key := prompts[p].key) in by_key})

    def sort(self, answered: Sequence[Answered]) -> tuple[Finished, Counter[str]]:
        """Returns what is finished, by prompt; and the counts of all that was generated."""
        counts: Counter[str] = Counter()
        finished = []
        for one in answered:
            counts["asked_tokens"] += len(one.prompt.tokens)
            kept = []
            for c in one.completions:
                _count(counts, "generated", c)
                if c.mask is not None:
                    counts["observed_tokens"] += c.observed
                if c.stop_reason is StopReason.INTERRUPTED:
                    _count(counts, "in_flight", c)
                elif self.overlong.drops(c):
                    _count(counts, "rejected", c)
                    self.rejected = f"an answer was cut off at {len(c.tokens)} tokens (--overlong-penalty drop)"
                else:
                    kept.append(c)
            if kept:
                finished.append((one.prompt, kept))
        return finished, counts

    def judge(self, finished: Finished) -> Sequence[Judgement]:
        """Returns the reward's judgement of each answer, in order."""
        pairs = _pairs(finished)
        judgements = self.reward.judge(pairs) if pairs else []
        return [self.overlong.of(c, judgement) for (_, c), judgement in zip(pairs, judgements, strict=True)]

    def trajectories(
        self,
        finished: Finished,
        judgements: Sequence[Judgement],
        scores: Sequence[Scores],
        counts: Counter[str],
    ) -> list[Trajectory]:
        """Completion -> Trajectory: adds the reward and the log-probabilities under reference and teachers; counts what
        is rejected.
        """
        pairs = _pairs(finished)
        trajectories: list[Trajectory] = []
        series, before = b"", counts["rejected_trajectories"]
        provenance = {"searcher": self.name, "round": self.rounds}
        for (prompt, completion), judgement, scored in zip(pairs, judgements, scores, strict=True):
            known = all(np.isfinite(log_T).all() for log_T in scored)
            if not (known and abs(judgement.reward) <= self.largest_reward):  # NaN fails this comparison too
                _count(counts, "rejected", completion)
                if completion.judgement is not None and math.isnan(completion.judgement.reward):
                    _count(counts, "failed", completion)
                self.rejected = self._described(prompt, completion, judgement, known)
                continue
            drawn = self.rng.bytes(16)
            # Ids increase with the rounds, so inserts always touch the index page just written, however long it is.
            series = series or self.rounds.to_bytes(4, "big") + drawn[:8]
            trajectories.append(
                Trajectory(
                    uid=(series + len(trajectories).to_bytes(4, "big")).hex(),
                    prompt=prompt,
                    completion=completion if completion.judgement is None else replace(completion, judgement=None),
                    reward=float(judgement.reward),
                    reward_parts=judgement.parts,
                    log_reference=scored[0],
                    reference=self.reference.version,
                    arrays={TEACHER: np.stack(scored[1:])} if self.teachers else {},
                    provenance=provenance,
                )
            )
        if rejected := counts["rejected_trajectories"] - before:
            log.warning(
                "%d of %d answers are rejected (a reward is a number from %g to %g), the last: %s",
                rejected, len(pairs), -self.largest_reward, self.largest_reward, self.rejected,
            )  # fmt: skip
        return trajectories

    def _described(self, prompt: Prompt, completion: Completion, judgement: Judgement, known: bool) -> str:
        """Returns which answer was rejected, and why."""
        reward = type(self.reward.reward if isinstance(self.reward, PatientReward) else self.reward).__name__
        judges = "the reference or a teacher" if self.teachers else "the reference"
        because = "" if known else f", and its log-probability under {judges} is not finite"
        answer, question = quoted(completion.text), quoted(prompt.text)
        if self.hide_text:
            answer, question = f"{completion.digest} of {len(completion.tokens)} tokens", prompt.key
        return f"{reward} gave {judgement} for the answer {answer} to the prompt {question}{because}"

    def score(self, finished: Finished) -> list[Scores]:
        """Returns the log-probabilities of each under the reference and every teacher, in order; an answer sampled
        twice for a prompt is scored once.
        """
        distinct = [(prompt, list({c.digest: c for c in completions}.values())) for prompt, completions in finished]
        by = [self._scored(scorer, distinct, finished) for scorer in (self.reference, *self.teachers)]
        return list(zip(*by, strict=True))

    @staticmethod
    def _scored(scorer: Reference, distinct: Finished, finished: Finished) -> list[FloatArray]:
        scores = scorer.log_probabilities_of(distinct)
        by_digest = [
            {c.digest: row for c, row in zip(completions, rows, strict=True)}
            for (_, completions), rows in zip(distinct, scores, strict=True)
        ]
        return [by[c.digest] for by, (_, completions) in zip(by_digest, finished, strict=True) for c in completions]


def _pairs(finished: Finished) -> list[tuple[Prompt, Completion]]:
    return [(prompt, c) for prompt, completions in finished for c in completions]


def _due(answered: Iterator[Answered], hold: float) -> Iterator[list[Answered]]:
    """Yields prompts with their completions in parts: what is finished after so many seconds, and later if handing it
    down takes long.
    """
    done: list[Answered] = []
    since, took = time.perf_counter(), 0.0
    for one in answered:
        done.append(one)
        reached = time.perf_counter()
        if reached - since >= max(hold, GENERATING * took):
            yield done
            done, since = [], time.perf_counter()
            took = since - reached
    if done:
        yield done


def _stamped(trajectories: Sequence[Trajectory], seconds: float, left_out: Mapping[str, float]) -> list[Trajectory]:
    """Returns trajectories with the time of sending, the seconds since the first was asked (monotonic clock), and
    the answers to its prompt that were rejected, for each that was not.
    """
    now, own = time.time(), {"seconds": round(seconds, 3)}
    stamps = {key: own | {LEFT_OUT: share} for key, share in left_out.items()}
    return [replace(t, created=now, provenance={**t.provenance, **stamps.get(t.prompt.key, own)}) for t in trajectories]


def _count(counts: Counter[str], name: str, completion: Completion) -> None:
    counts[f"{name}_tokens"] += len(completion.tokens)
    counts[f"{name}_trajectories"] += 1
