"""The searcher: draws prompts, samples answers, has them graded and scored, and sends them to the journal.

One loop owns the flow of prompts through the engine, the weights, and the answers that are being graded:

    prompts -> generating -> generated -> reward    (a window of calls, `tba.grading`) -> graded -> journal
                   ^                   -> reference (here, or in a thread)
                   weights, read in a thread

With `flows`, prompts begin as soon as there is room for them, whatever round they belong to. Between two tokens, every
few of them (`_between`), the loop loads weights that have been read, hands what is generated to the reward and the
reference, takes in what is graded and sends it. Rows that are being generated keep the keys and values of older
weights. Without `flows` (inline) the same stages follow one another: a round is generated, graded, scored and sent
before the next begins, with weights that are loaded between rounds.

Each graded answer is on the disk at once (staged, `Journal.put`) and can be drawn when the last answer to its prompt is
there, with which the prompt's lease is given back: answers that are quick to grade are not preferred. An answer whose
call expired is rejected, and its group is marked as having left something out.

Invariant: it never waits for the trainer. Only its own thread draws random numbers and uses the engine; it alone uses
the journal, but for scores under a new reference, which come from the reference's thread where there is one. Generation
stands still only while as many answers wait for their grades as `_most_waiting` allows. What is generated is sent (with
its lease, in one transaction), rejected, or in flight, and each is counted here.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tba.clock import SEARCHERS_TIME, ShareClock, State
from tba.errors import DeadlineExceeded, UserError
from tba.grading import Grade, Grader, in_thread
from tba.protocols import (
    Concurrent,
    Engine,
    Exploration,
    Flow,
    Journal,
    PromptSource,
    PublishedWeights,
    Reference,
    ScoredByCalls,
    WeightSource,
)
from tba.rollout.overlong import Overlong
from tba.rollout.rates import Rate
from tba.rollout.rescoring import Rescorer
from tba.rollout.stages import Limits, Scores, count, failed, score, sort, stamped, trajectory, unusable
from tba.rollout.vine import VineRollouts
from tba.types import Completion, FloatArray, Json, Outcome, Prompt, Sampling, StopReason, Trajectory, Version

log = logging.getLogger("tba.searcher")
COSTLY = 0.25  # seconds of a call, beyond which a grade is put on the disk with little delay
GENERATING = 8  # generate this many times as long as scoring or sending what is there takes, before doing it again
_PROMPT = 0.05  # seconds for which grades that were costly are held at most: a kill takes them
MOST_ROUNDS = 4  # rounds of answers, which are sent at once however long that takes
_ROUNDS_WITHOUT_USE = 10  # first rounds without a usable answer, after which no further one is expected to bring any
_POLL = 0.05  # seconds between two polls for newer weights, and of a wait for grades or prompts
_WAIT = 1.0  # seconds that a round waits for grades before it ends, so that other duties get their turn
_COUNTED = 1.0  # seconds after which counts are written though there is no trajectory to write them with
_SOON = 0.1  # seconds at a stop in which quick rewards grade all that waits
_STOP_SECONDS = 1.0  # that calls which are under way have at a stop
_READ_SECONDS = 1800.0  # that reading weights may take
_PAGE = 1024  # of so many numbers in a row one is read, which brings all of them into memory


@dataclass(eq=False)
class OpenAnswer:
    """An answer that is neither sent nor rejected."""

    group: OpenGroup
    completion: Completion
    grade: Grade | None = None
    scores: Scores | None = None
    reference: Version | None = None  # under which it was scored
    trajectory: Trajectory | None = None
    done: bool = False  # it is a trajectory, or rejected
    staged: bool = False  # the trajectory is on the disk already

    @property
    def ready(self) -> bool:
        """Returns whether it is graded and scored."""
        return self.grade is not None and self.grade.missing == 0 and self.scores is not None


@dataclass(eq=False)
class OpenGroup:
    """A prompt whose answers are on their way; `position` is the one that was leased."""

    position: int
    prompt: Prompt
    began: float  # when it was asked, by a monotonic clock
    generated: int  # answers that were not interrupted
    answers: list[OpenAnswer] = field(default_factory=list)  # those to be graded
    open: int = 0  # of these
    counts: Counter[str] = field(default_factory=Counter)  # of its answers that are done, not written yet
    since: float = 0.0  # when the first answer was completed that is not on the disk, by a monotonic clock

    @property
    def trajectories(self) -> list[Trajectory]:
        return [a.trajectory for a in self.answers if a.trajectory is not None]

    @property
    def unstaged(self) -> list[OpenAnswer]:
        """Returns those that are trajectories and not on the disk."""
        return [a for a in self.answers if a.trajectory is not None and not a.staged]


@dataclass
class Searcher:
    """Owns a slightly stale copy of the policy. Call `round()` by hand in a REPL, or let a runtime do it."""

    name: str
    engine: Engine
    reference: Reference
    grader: Grader  # by the task's reward
    exploration: Exploration
    prompts: PromptSource
    journal: Journal
    weights: WeightSource
    samples_per_prompt: int  # S
    prompts_per_round: int
    rng: np.random.Generator
    flows: bool = False  # rounds flow into one another; else each is graded and sent before the next
    interrupted: Callable[[], bool] | None = None
    rescorer: Rescorer | None = None  # None: the reference is never reset
    teachers: Sequence[Reference] = ()  # which score every answer as well
    vine: VineRollouts | None = None  # values of the steps of every answer; only where rounds do not flow
    largest_reward: float = sys.float_info.max  # an answer whose |reward| is beyond it is rejected
    overlong: Overlong = Overlong()  # what is taken off the reward of long answers
    hide_text: bool = False  # name a rejected answer by its prompt's key, its digest and its length
    hand_down_seconds: float = math.inf  # after which less than a round's answers are sent, in the middle of a round
    grading_lag: float = 2.0  # trainer updates that an answer may wait for its grade before generation stands still
    warm_up: int = 0  # trajectories before the trainer's first update, until when answers do not age
    searchers: int = 1  # that share the warm-up
    rounds: int = 0
    sent: int = 0  # trajectories
    rejected: int = 0  # answers
    rejection: str = ""  # why the newest rejected answer was rejected
    rounds_without_use: int | None = 0  # first rounds of which all answers were rejected; None: one was of use
    manifest: Mapping[str, Json] = field(default_factory=dict)  # of the newest weights seen
    clock: ShareClock = field(default_factory=lambda: ShareClock(state="generating"))
    _flow: tuple[Flow, Sampling] | None = None
    # by number in the flow: its position, the prompt itself, and when it began
    _generating: dict[int, tuple[int, Prompt, float]] = field(default_factory=dict)
    _generated: list[OpenGroup] = field(default_factory=list)  # not submitted to the grader yet
    _unscored: list[OpenGroup] = field(default_factory=list)
    _scoring: tuple[list[OpenGroup], Future[tuple[Version, list[list[Scores]]]]] | None = None
    _by_grade: dict[Grade, OpenAnswer] = field(default_factory=dict)  # answers that are being graded
    _graded: list[Grade] = field(default_factory=list)  # that have come back
    _open: dict[OpenGroup, None] = field(default_factory=dict)  # the oldest first
    _changed: dict[OpenGroup, None] = field(default_factory=dict)  # with answers that are not written yet
    _counts: Counter[str] = field(default_factory=Counter)  # not written yet
    _counted: Counter[str] = field(default_factory=Counter)  # milliseconds of the clock that have been written
    _reading: Future[PublishedWeights] | None = None  # newer weights
    _in_order: deque[OpenAnswer] = field(default_factory=deque)  # without `flows`: those that are not done yet
    _remaining: int = 0  # prompts that the round lacks which has waited for grades
    _polled: float = -_POLL  # when newer weights were looked for
    _scored: float = field(default_factory=time.perf_counter)  # when scoring began last
    _score_seconds: float = 0.0
    _written: float = field(default_factory=time.perf_counter)  # when something was written last
    _write_seconds: float = 0.0
    _costly: bool = False  # an answer that is not written was slow to grade
    _newest_expired: bool = False  # the newest rejected answer was not graded in time
    _rejections: int = 0  # that no warning has named yet
    _series: tuple[int, bytes, int] | None = None  # the round, the beginning of its names, how many there are
    _judged: Rate = field(default_factory=Rate)
    _updates: Rate = field(default_factory=Rate)
    _missing: tuple[float, int] = (-math.inf, 0)  # when the warm-up was looked at, and how much it lacked

    def round(self) -> int:
        """Generate until as many prompts are answered as a round has; returns the number of trajectories that were sent
        meanwhile: without `flows` those of the round.
        """
        sent, rejected = self.sent, self.rejected
        try:
            if self.flows:
                self._flow_on()
            else:
                self._one_round()
        except BaseException:
            self.save()
            raise
        self.rounds += 1
        self.require_use(self.rejected - rejected)
        return self.sent - sent

    def tend(self) -> None:
        """Do what is due besides generating: load weights, take in what is graded, send it."""
        self._between()

    def free_engine(self) -> None:
        """Finish what is being generated, so that the engine can be used otherwise. What is graded quickly is sent:
        else it would wait until this searcher generates again. Slower grading goes on.
        """
        self._empty()
        self._hand_over()
        self._score()
        self._wait_for_grades(_SOON)
        self._collect_grades()
        if self._writable:
            self._write()

    def drain(self, stop: bool = False) -> None:
        """Finish what is being generated, graded and scored, and send it.

        stop: leave what is being generated, and what is not graded soon, as in flight. No further call begins, and
        those that are under way have a second.
        """
        self._empty(stop)
        self._hand_over()
        self._score()
        if not stop:
            self._settle(give_up=self._wait_for_grades())
            return
        if self._wait_for_grades(_SOON):
            self.grader.cancel()
            self._wait_for_grades(_STOP_SECONDS)
        self._settle(give_up=True)

    def pull(self) -> Version:
        """Load newer weights, and another reference if they name one, in place.

        The newest manifest is always read: the engine may hold a version that was only to be evaluated.
        """
        published = self.weights.newer_than(None)
        if published is not None:
            with self.clock.state("weights"):
                if published.version > self.engine.version:
                    self.engine.load(published.read(), published.version)
                self._see(published)
                self.refer()
        return self.engine.version

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

    def require_use(self, rejected: int) -> None:
        """Raises `UserError` where the first rounds bring nothing but answers that are rejected: the run would never
        end. rejected: answers of the newest round.
        """
        if self.rounds_without_use is None or not rejected:
            return
        self.rounds_without_use += 1
        answers = _ROUNDS_WITHOUT_USE * self.prompts_per_round * self.samples_per_prompt
        if self.rounds_without_use >= _ROUNDS_WITHOUT_USE and self.rejected >= answers:
            raise UserError(
                f"all answers of the first {_ROUNDS_WITHOUT_USE} rounds are rejected: there is nothing to learn from; "
                f"the last: {self.rejection}; what can be used has a reward from {-self.largest_reward:g} to "
                f"{self.largest_reward:g} and finite log-probabilities: "
                + self._remedy
                + ", then start again, or resume"
            )

    @property
    def _remedy(self) -> str:
        """Returns what to do about answers that are all rejected."""
        if self._newest_expired:
            return "make the reward faster, or give a call more time (--run.reward-deadline)"
        return "allow longer answers" if self.overlong.penalty == "drop" else "fix the reward"

    @property
    def unsent(self) -> int:
        """Returns how many answers are generated and neither sent nor rejected."""
        return sum(len(group.answers) for group in self._open)

    @property
    def waiting(self) -> int:
        """Returns how many answers are generated and not graded."""
        return self.grader.unfinished + sum(len(group.answers) for group in self._generated)

    # The loop, in its two forms

    def _one_round(self) -> None:
        """Generate a round, have it graded and scored, and send it."""
        self.pull()
        self.rescore()
        positions, prompts = self.prompts.take(self.prompts_per_round)
        sampling = self.exploration.draw(self.rng)
        self._flow = self.engine.flow(self.samples_per_prompt, sampling, self.rng), sampling
        self._submit(positions, prompts)
        while self._generating:
            self._take_in(self._flow[0].next(self.interrupted, until_needed=False))
            if self.hand_down_seconds < math.inf:
                self._advance()
        self._flow = None
        self._hand_over()
        self._score()
        unfinished = self._wait_for_grades()
        self._settle(sampling if self.vine is not None else None, unfinished)

    def _flow_on(self) -> None:
        """Generate until as many prompts are answered as a round has, while all other stages go on."""
        if self._remaining <= 0 or self._flow is None:  # else the round before has waited for grades
            self._flowing()
            self._remaining = self.prompts_per_round
        assert self._flow is not None
        flow, waited = self._flow[0], 0.0
        while self._remaining > 0 and waited < _WAIT:
            if self._between():
                self.drain(stop=True)
                return
            if self._crowded():
                waited += self._wait("reward")
                continue
            finished = self._generate(flow)
            self._remaining -= finished
            if not self._generating:  # all prompts are leased, or generation was told to stop
                if not finished:
                    self._wait("reward" if self.waiting else "paced")
                return

    def _flowing(self) -> Flow:
        """Returns what prompts flow through; another way of sampling begins when the one before is finished."""
        sampling = self.exploration.draw(self.rng)
        if self._flow is None:
            self._reading = None
            self.pull()  # at once, whatever the engine was used for
        elif self._flow[1] == sampling:
            return self._flow[0]
        else:
            self._empty()
        self._flow = self.engine.flow(self.samples_per_prompt, sampling, self.rng), sampling
        return self._flow[0]

    def _generate(self, flow: Flow) -> int:
        """Begin as many prompts as there is room for, and generate until some are finished or there is room for
        others; returns how many are finished.
        """
        room = flow.prompts_needed
        positions, prompts = self.prompts.take(room) if room else ([], [])
        self._submit(positions, prompts)
        # where the rest of the prompts is leased, no more will be begun than those that are there
        return self._take_in(flow.next(self._between, until_needed=len(prompts) == room))

    def _submit(self, positions: Sequence[int], prompts: Sequence[Prompt]) -> None:
        assert self._flow is not None
        number, began = self._flow[0].prompts_submitted, time.perf_counter()
        self._flow[0].submit(prompts)
        for i, (position, prompt) in enumerate(zip(positions, prompts, strict=True)):
            self._generating[number + i] = (position, prompt, began)

    def _empty(self, stop: bool = False) -> None:
        """Generate what has begun to its end, or stop it where it is."""
        while self._generating:
            assert self._flow is not None
            self._take_in(self._flow[0].next((lambda: True) if stop else self._between, until_needed=False))
        self._flow = None

    def _take_in(self, finished: Sequence[tuple[int, list[Completion]]]) -> int:
        """Take in prompts with their answers as the flow gives them; returns how many."""
        for number, completions in finished:
            position, prompt, began = self._generating.pop(number)
            generated = sum(c.stop_reason is not StopReason.INTERRUPTED for c in completions)
            group = OpenGroup(position, prompt, began, generated)
            judged, counts = sort(prompt, completions, self.overlong)
            self._counts.update(counts)
            if dropped := counts["rejected_trajectories"]:
                self.rejected += dropped
                longest = max(len(c.tokens) for c in completions)
                self.rejection = f"an answer was cut off at {longest} tokens (--overlong-penalty drop)"
            group.answers = [OpenAnswer(group, c) for c in judged]
            group.open = len(judged)
            for completion in judged:
                count(self._counts, "grading", completion)
            self._open[group] = None
            self._generated.append(group)
            if not judged:
                self._changed[group] = None
        return len(finished)

    def _between(self) -> bool:
        """Do what is due between two tokens; returns whether generation is to stop."""
        self._load()
        self._advance()
        return self.interrupted is not None and self.interrupted()

    def _advance(self) -> None:
        """Hand on what is generated, take in what is scored and graded, and send what is due."""
        self._hand_over()
        if self._score_due():
            self._score(background=True)
        self._collect_scores()
        self.grader.poll()
        self._collect_grades()
        if self._write_due():
            self._write()

    # Weights

    def _load(self) -> None:
        """Load the weights that have been read, and begin to read newer ones."""
        now = time.monotonic()
        if self._reading is not None:
            if self._reading.done():
                published, self._reading = self._reading.result(), None
                if published.version > self.engine.version:
                    with self.clock.state("weights"):
                        self.engine.load(published.read(), published.version)
            elif now - self._polled > _READ_SECONDS:
                raise DeadlineExceeded(f"newer weights could not be read within {_READ_SECONDS:g} s")
        elif now - self._polled >= _POLL:
            self._polled = now
            newest = self.weights.newer_than(None)
            if newest is not None:
                self._see(newest)
                if newest.version > self.engine.version:
                    self._reading = in_thread("weights", _read, newest)

    def _see(self, published: PublishedWeights) -> None:
        """Remember the newest manifest, and how fast the trainer makes updates."""
        self.manifest = published.manifest
        self._updates.see(time.monotonic(), published.version.step)

    # Grades and scores

    def _hand_over(self) -> None:
        """Hand what is generated to the reward, and note that it is to be scored."""
        groups, self._generated = [group for group in self._generated if group.answers], []
        if not groups:
            return
        answers = [(group.prompt, [a.completion for a in group.answers]) for group in groups]
        for group, grades in zip(groups, self.grader.submit(answers, self._graded), strict=True):
            for answer, grade in zip(group.answers, grades, strict=True):
                answer.grade = grade
                self._by_grade[grade] = answer
            if not self.flows:
                self._in_order.extend(group.answers)
        self._unscored += groups

    def _score_due(self) -> bool:
        """Returns whether answers are scored now: a round of them, or fewer after `hand_down_seconds`."""
        if not self._unscored or self._scoring is not None:
            return False
        if len(self._unscored) >= self.prompts_per_round:
            return True
        seconds = time.perf_counter() - self._scored
        return seconds >= max(self.hand_down_seconds, GENERATING * self._score_seconds)

    def _score(self, background: bool = False) -> None:
        """Score all that is to be scored, under the reference that the newest weights name; in a thread of its own
        where that is possible and wanted.
        """
        self._collect_scores(wait=True)
        groups, self._unscored = self._unscored, []
        if not groups:
            return
        self._scored = time.perf_counter()
        if background and isinstance(self.reference, Concurrent) and self.reference.concurrent:
            self._scoring = groups, in_thread("reference", self._scores, groups)
        else:
            with self.clock.state("reference"):
                self._take_scores(groups, *self._scores(groups))
            self._score_seconds = time.perf_counter() - self._scored

    def _scores(self, groups: Sequence[OpenGroup]) -> tuple[Version, list[list[Scores]]]:
        """Returns the reference and the scores under it; before, load another reference if one is named, and score
        older trajectories.
        """
        if self.flows:
            self.refer()
            if self.rescorer is not None:
                self.rescorer.round()
        answers = [(group.prompt, [a.completion for a in group.answers]) for group in groups]
        return self.reference.version, score((self.reference, *self._scored_here), answers)

    def _collect_scores(self, wait: bool = False) -> None:
        """Take in the scores of the reference's thread, if they are there."""
        if self._scoring is None:
            return
        groups, scoring = self._scoring
        if wait:
            with self.clock.state("reference"):
                self._await(scoring, "the reference")
        if scoring.done():
            self._scoring = None
            self._take_scores(groups, *scoring.result())
            self._score_seconds = 0.0

    def _take_scores(self, groups: Sequence[OpenGroup], reference: Version, scores: list[list[Scores]]) -> None:
        for group, rows in zip(groups, scores, strict=True):
            for answer, row in zip(group.answers, rows, strict=True):
                answer.scores, answer.reference = row, reference
            self._complete_ready(group.answers)

    def _collect_grades(self) -> None:
        """Take in what the reward has graded."""
        if not self._graded:
            return
        answers = [answer for grade in self._graded if (answer := self._by_grade.pop(grade, None)) is not None]
        self._judged.see(time.monotonic(), self._judged.total + len(self._graded))
        self._graded.clear()
        self._complete_ready(answers)

    def _complete_ready(self, answers: Sequence[OpenAnswer]) -> None:
        """Complete those that are graded and scored; without `flows` in the order of generation, so that equal
        generators give equal rounds however long grading takes.
        """
        if self.flows:
            for answer in answers:
                if answer.ready:
                    self._complete(answer)
        while self._in_order and self._in_order[0].ready:
            self._complete(self._in_order.popleft())

    def _complete(self, answer: OpenAnswer) -> None:
        """Completion -> Trajectory, for an answer that is graded and scored; or it is rejected, and counted."""
        group, completion, grade = answer.group, answer.completion, answer.grade
        assert grade is not None
        assert answer.scores is not None
        assert answer.reference is not None
        if answer.done:
            return
        answer.done = True
        count(group.counts, "grading", completion, -1)
        group.open -= 1
        if group not in self._changed:
            self._changed[group], group.since = None, time.perf_counter()
        self._costly |= grade.seconds > COSTLY
        if grade.judgement is None:
            count(group.counts, "expired", completion)
            why: str | None = f"{self._limits.reward_name} did not grade an answer within {self.grader.deadline:g} s"
        else:
            judgement = self.overlong.of(completion, grade.judgement)
            scores = (answer.scores[0], *self._of_teachers(answer.scores[1:], grade.scores))
            why = unusable(group.prompt, completion, judgement, scores, self._limits)
        if why is not None:
            count(group.counts, "rejected", completion)
            if failed(completion):
                count(group.counts, "failed", completion)
            self._newest_expired = grade.judgement is None
            self.rejected, self._rejections, self.rejection = self.rejected + 1, self._rejections + 1, why
            return
        provenance = {"searcher": self.name, "round": self.rounds}
        uid, self.rounds_without_use = self._uid(), None
        answer.trajectory = trajectory(uid, group.prompt, completion, judgement, scores, answer.reference, provenance)

    def _uid(self) -> str:
        """Returns a new name. Names increase with the rounds, so that inserts touch the index page just written."""
        drawn = self.rng.bytes(16)
        if not self._series or self._series[0] != self.rounds:
            self._series = self.rounds, self.rounds.to_bytes(4, "big") + drawn[:8], 0
        number, series, index = self._series
        self._series = number, series, index + 1
        return (series + index.to_bytes(4, "big")).hex()

    @cached_property
    def _scored_here(self) -> list[Reference]:
        """Returns the teachers that are no servers, for which answers wait in windows."""
        return [teacher for teacher in self.teachers if not isinstance(teacher, ScoredByCalls)]

    def _of_teachers(self, here: Iterable[FloatArray], by_calls: Iterable[FloatArray]) -> list[FloatArray]:
        """Returns the log-probabilities under each teacher, in their order."""
        local, remote = iter(here), iter(by_calls)
        return [next(remote if isinstance(teacher, ScoredByCalls) else local) for teacher in self.teachers]

    @cached_property
    def _limits(self) -> Limits:
        scorers = "the reference or a teacher" if self.teachers else "the reference"
        return Limits(self.largest_reward, type(self.grader.reward).__name__, scorers, self.hide_text)

    # Waiting

    def _crowded(self) -> bool:
        """Returns whether generation stands still because too many answers wait for their grades."""
        return self.waiting >= self._most_waiting()

    def _most_waiting(self) -> float:
        """Returns how many answers may wait: as many as are graded in the time of `grading_lag` updates, but enough
        that no place in the window is ever empty. Before the first update answers do not age: all that the warm-up
        lacks may wait.
        """
        now, least = time.monotonic(), self.grader.busy(self.samples_per_prompt) + 2 * self.samples_per_prompt
        if self.grader.batched:  # one round is graded while the next waits
            least = max(least, 2 * self.prompts_per_round * self.samples_per_prompt)
        if updates := self._updates.per_second(now):
            return max(least, self.grading_lag * self._judged.per_second(now) / updates)
        if now - self._missing[0] > _COUNTED:
            self._missing = now, (self.warm_up - self.journal.rows()) // self.searchers
        return max(least, self._missing[1])

    def _wait(self, state: State) -> float:
        """Wait a moment, for grades if there are any to come; returns the seconds."""
        began = time.monotonic()
        with self.clock.state(state):
            if self.waiting:
                self.grader.wait(_POLL)
            else:
                time.sleep(_POLL)
        return time.monotonic() - began

    def _wait_for_grades(self, seconds: float = math.inf) -> bool:
        """Wait until all that was handed over is graded; returns whether to stop before."""
        polled = time.monotonic()
        end, stop = polled + seconds, False
        with self.clock.state("reward"):
            while self.grader.unfinished:
                self.grader.wait(_POLL)
                self._collect_grades()
                if self._costly and self.vine is None and self._write_due():
                    self._write()
                now = time.monotonic()
                if now - polled >= _POLL and self.interrupted is not None:
                    polled = now
                    if self.interrupted() and not stop:
                        self.grader.cancel()
                        stop, end = True, min(end, now + _STOP_SECONDS)
                if now > end:
                    return True
        return stop

    def _await(self, future: Future[Any], stage: str) -> None:
        """Wait for a thread of this searcher, with signs of life."""
        end = time.monotonic() + _READ_SECONDS
        while not future.done():
            with suppress(TimeoutError):
                future.exception(_POLL)
            if self.interrupted is not None:
                self.interrupted()
            if time.monotonic() > end:
                raise DeadlineExceeded(f"waited {_READ_SECONDS:g} s for {stage} of {self.name}'s answers")

    # Sending

    def save(self) -> None:
        """After an error: send what is graded, as far as that is possible."""
        if self.vine is not None:  # what its rollouts have not valued cannot be trained on
            return
        for step in (self.grader.poll, self._score, lambda: self._settle(give_up=True)):
            with suppress(Exception):
                step()

    def _settle(self, sampling: Sampling | None = None, give_up: bool = False) -> None:
        """Send all open groups, in the order of generation. give_up: answers that are not graded are in flight.

        sampling: estimate the values of the answers' steps first, by rollouts that are sampled so.
        """
        self._collect_scores(wait=True)
        self._collect_grades()
        answers = [answer for group in self._open for answer in group.answers if not answer.done]
        for answer in answers:
            if answer.ready:
                self._complete(answer)
            elif give_up:
                answer.group.counts.update(grading_trajectories=-1, grading_tokens=-len(answer.completion.tokens))
                count(answer.group.counts, "in_flight", answer.completion)
                answer.done = True
        if give_up:
            self._by_grade.clear()
            self._in_order.clear()
        self._write(list(self._open), sampling)

    def _write_due(self) -> bool:
        """Returns whether something is written now: a round of answers, fewer after `hand_down_seconds` or where a
        grade took longer than that, or counts alone.
        """
        since = time.perf_counter() - self._written
        groups = self._writable
        if not groups:
            return bool(self._counts) and since >= _COUNTED
        ready = sum(len(group.unstaged) for group in groups)
        rounds = ready / (self.prompts_per_round * self.samples_per_prompt)
        if self._costly:
            return since >= max(_PROMPT, 2 * self._write_seconds)
        hold = 0.0 if rounds >= 1 else self.hand_down_seconds
        return rounds >= MOST_ROUNDS or since >= max(hold, GENERATING * self._write_seconds)

    @property
    def _writable(self) -> list[OpenGroup]:
        """Returns the groups of which there is something to write: those that are complete, and others whose graded
        answers have waited for the rest for a while, which is short where grades are costly.
        """
        before = time.perf_counter() - (_PROMPT if self._costly else COSTLY)
        return [g for g in self._changed if not g.open or g.since <= before]

    def _write(self, groups: Iterable[OpenGroup] | None = None, sampling: Sampling | None = None) -> None:
        """Write the groups that are complete, with their leases, in one transaction; graded answers of the others are
        staged. groups: write these, complete or not.
        """
        began = time.perf_counter()
        writable = self._writable if groups is None else list(groups)
        complete = [group for group in writable if not group.open or groups is not None]
        partial = [group for group in writable if group.open and groups is None]
        if self._rejections:
            log.warning(
                "%d answers are rejected (a reward is a number from %g to %g), the last: %s",
                self._rejections, -self.largest_reward, self.largest_reward, self.rejection,
            )  # fmt: skip
            self._rejections = 0
        if writable:
            self._put(complete, partial, sampling)
        elif self._counts:
            self.journal.count(**self._take_counts())
        for group in writable:
            self._changed.pop(group, None)
        self._costly = self._costly and bool(self._changed)
        self._written = time.perf_counter()
        self._write_seconds = self._written - began

    def _put(self, groups: Sequence[OpenGroup], partial: Sequence[OpenGroup], sampling: Sampling | None) -> None:
        """Send groups, whose leases are given back where all their answers are there, and stage the graded answers of
        others, all in one transaction with their counts.
        """
        whole = [group for group in groups if group.generated == self.samples_per_prompt and not group.open]
        leases = [group.position for group in whole]
        by_group = [(group, group.trajectories) for group in groups]
        for group in (*groups, *partial):
            self._counts.update(group.counts)
            group.counts = Counter()
        if sampling is not None and self.vine is not None:
            before = self._counts["in_flight_trajectories"], self._counts["rejected_trajectories"]
            graded = [t for _, trajectories in by_group for t in trajectories]
            grown = {t.uid: t for t in self.vine.grow(graded, sampling, self.rng, self._counts, self.interrupted)}
            by_group = [(group, [grown[t.uid] for t in graded if t.uid in grown]) for group, graded in by_group]
            leases = leases if self._counts["in_flight_trajectories"] == before[0] else []
            self.rejected += self._counts["rejected_trajectories"] - before[1]
        now, seconds = time.time(), time.perf_counter() - min((g.began for g in (*groups, *partial)), default=0.0)
        trajectories = [
            t
            for group, graded in by_group
            for t in stamped(graded, now, seconds, (group.generated - len(graded)) / max(1, len(graded)))
        ]
        answers = [answer for group in partial for answer in group.unstaged]
        staged = stamped([a.trajectory for a in answers if a.trajectory is not None], now, seconds)
        outcomes = self._outcomes({group.position: group.prompt for group in whole}, leases, trajectories)
        more: dict[str, Any] = {}
        if staged:
            more = {"staged": staged, "positions": [a.group.position for a in answers]}
            more["samples"] = self.samples_per_prompt
        counts = self._take_counts()
        try:
            self.journal.put(trajectories, leases, counts, outcomes, **more)
        except BaseException:
            self._counts.update(counts)
            raise
        for answer in answers:
            answer.staged = True
        for group in groups:
            self._open.pop(group, None)
        self.sent += len(trajectories)

    def _outcomes(
        self, prompts: Mapping[int, Prompt], leases: Sequence[int], trajectories: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        """Returns the outcomes of the prompts that are given back."""
        by_key: dict[str, list[float]] = {}
        for t in trajectories:
            by_key.setdefault(t.prompt.key, []).append(t.reward)
        return self.prompts.outcomes({p: by_key[key] for p in leases if (key := prompts[p].key) in by_key})

    def _take_counts(self) -> Counter[str]:
        """Returns the counts that are not written yet, with what the clock has measured since the last time."""
        counts, self._counts = self._counts, Counter()
        seconds = self.clock.seconds()
        for name, states in SEARCHERS_TIME.items():
            milliseconds = round(1000 * sum(seconds.get(state, 0.0) for state in states))
            counts[f"{name}_milliseconds"] = milliseconds - self._counted[name]
            self._counted[name] = milliseconds
        return counts


def _read(published: PublishedWeights) -> PublishedWeights:
    """Returns published weights once all of them are in memory, so that loading them is only copying."""
    weights = published.read()
    for tensor in weights.values():
        tensor.flatten()[::_PAGE].sum()
    return PublishedWeights(published.version, published.manifest, lambda: weights)
