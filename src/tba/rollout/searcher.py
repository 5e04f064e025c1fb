"""The searcher: draws prompts, samples answers, has them graded and scored, and sends them to the journal.

One loop owns the flow of prompts through the engine, the weights, and the answers that are being graded:

    prompts -> generating -> generated -> reward    (a window of calls, `tba.grading`) -> graded -> journal
                   ^                   -> reference (here, or in a thread)
                   weights, read in a thread

With `flows`, prompts begin as soon as there is room for them, whatever round they belong to. Between two tokens, every
few of them (`run_stages`), the loop loads weights that have been read, hands what is generated to the reward and the
reference, takes in what is graded and sends it. Rows that are being generated keep the keys and values of older
weights. Without `flows` (inline) the same stages follow one another: a round is generated, graded, scored and sent
before the next begins, with weights that are loaded between rounds.

Each graded answer is on the disk at once (staged, `Journal.put`) and can be drawn when the last answer to its prompt is
there, with which the prompt's lease is given back: answers that are quick to grade are not preferred. An answer whose
call expired is rejected, and its group is marked as having left something out.

Invariant: it never waits for the trainer. Only its own thread draws random numbers and uses the engine; it alone uses
the journal, but for scores under a new reference, which come from the reference's thread where there is one. Generation
stands still only while as many answers wait for their grades as `_waiting_limit` allows. What is generated is sent
(with its lease, in one transaction), rejected, or in flight, and each is counted here.
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

from tba.clock import SEARCHER_STATES, ShareClock, State
from tba.errors import DeadlineExceeded, UserError
from tba.grading import Grade, Grader, call_in_thread
from tba.protocols import (
    AnsweredOneByOne,
    AnswerScorer,
    Concurrent,
    Engine,
    Exploration,
    Flow,
    Journal,
    Manifest,
    PromptSource,
    PublishedWeights,
    Reference,
    ScoredByCalls,
    StagesWeights,
    WeightSource,
)
from tba.rollout import stages
from tba.rollout.overlong import Overlong
from tba.rollout.rates import GrowthRate
from tba.rollout.rescoring import Rescorer
from tba.rollout.stages import Limits, Scores
from tba.rollout.vine import VineRollouts
from tba.types import Completion, Outcome, Prompt, Sampling, StopReason, TokenScores, Trajectory, Version

log = logging.getLogger("tba.searcher")
COSTLY_SECONDS = 0.25  # seconds of a call, beyond which a grade is put on the disk with little delay
GENERATION_RATIO = 8  # generate this many times as long as scoring or sending takes, before doing that again
_HOLD_SECONDS = 0.05  # seconds for which grades that were costly are held at most: a kill takes them
MAX_ROUNDS = 4  # rounds of answers, which are sent at once however long that takes
_MAX_USELESS_ROUNDS = 10  # first rounds without a usable answer, after which no further one is expected to bring any
_POLL_SECONDS = 0.05  # seconds between two polls for newer weights, and of a wait for grades or prompts
_WAIT_SECONDS = 1.0  # seconds that a round waits for grades before it ends, so that other duties get their turn
_COUNTS_SECONDS = 1.0  # seconds after which counts are written though there is no trajectory to write them with
_QUICK_SECONDS = 0.1  # seconds at a stop in which quick rewards grade all that waits
_STOP_SECONDS = 1.0  # that calls which are under way have at a stop
_READ_SECONDS = 1800.0  # that reading weights may take
_PAGE_NUMBERS = 1024  # of so many numbers in a row one is read, which brings all of them into memory


@dataclass(eq=False)
class OpenAnswer:
    """An answer that is neither sent nor rejected."""

    group: OpenGroup
    completion: Completion
    grade: Grade | None = None
    scores: Scores | None = None
    reference: Version | None = None  # under which it was scored
    trajectory: Trajectory | None = None
    is_done: bool = False  # it is a trajectory, or rejected
    is_staged: bool = False  # the trajectory is on the disk already

    @property
    def is_ready(self) -> bool:
        """Returns whether the answer is graded and scored."""
        return self.grade is not None and self.grade.missing_parts == 0 and self.scores is not None


@dataclass(eq=False)
class OpenGroup:
    """A prompt whose answers are being generated, graded or sent; `position` is the one that was leased."""

    position: int
    prompt: Prompt
    start: float  # when its prompt was submitted, by a monotonic clock
    generated_count: int = 0  # answers that were not interrupted
    answers: list[OpenAnswer] = field(default_factory=list)  # to be graded
    open_count: int = 0  # answers that are not done
    is_generating: bool = False  # more answers will come
    came_one_by_one: bool = False  # its answers did; there may be fewer than a group has
    counts: Counter[str] = field(default_factory=Counter)  # of its answers that are done, not written yet
    unwritten_since: float = 0.0  # when the first answer was completed that is not on the disk, by a monotonic clock

    @property
    def is_complete(self) -> bool:
        """Returns whether all its answers have come and are done."""
        return not self.open_count and not self.is_generating

    @property
    def trajectories(self) -> list[Trajectory]:
        return [a.trajectory for a in self.answers if a.trajectory is not None]

    @property
    def unstaged(self) -> list[OpenAnswer]:
        """Returns the answers that are trajectories and not on the disk."""
        return [a for a in self.answers if a.trajectory is not None and not a.is_staged]


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
    teachers: Sequence[AnswerScorer] = ()  # which score every answer as well
    vine: VineRollouts | None = None  # values of the steps of every answer; only where rounds do not flow
    largest_reward: float = sys.float_info.max  # an answer whose |reward| is beyond it is rejected
    overlong: Overlong = Overlong()  # what is taken off the reward of long answers
    hide_text: bool = False  # name a rejected answer by its prompt's key, its digest and its length
    hand_down_seconds: float = math.inf  # after which less than a round's answers are sent, in the middle of a round
    grading_lag: float = 2.0  # trainer updates that an answer may wait for its grade before generation stands still
    warm_up: int = 0  # trajectories before the trainer's first update, until when answers do not age
    searchers: int = 1  # that share the warm-up
    rounds: int = 0
    sent_count: int = 0  # trajectories
    rejected_count: int = 0  # answers
    rejection: str = ""  # why the newest rejected answer was rejected
    rounds_without_use: int | None = 0  # first rounds of which all answers were rejected; None: one was of use
    manifest: Manifest = Manifest()  # of the newest weights seen
    clock: ShareClock = field(default_factory=lambda: ShareClock(state="generating"))
    on_done: Callable[[OpenAnswer], None] | None = None  # is told of each answer that is on the disk, or rejected
    _flow: tuple[Flow, Sampling] | None = None
    # by number in the flow: its position, the prompt itself, and when it began
    _open_prompts: dict[int, tuple[int, Prompt, float]] = field(default_factory=dict)
    _generating_groups: dict[int, OpenGroup] = field(default_factory=dict)  # with some of their answers, by number
    # answers to one prompt each: not submitted to the grader yet, and not scored yet
    _ungraded: list[list[OpenAnswer]] = field(default_factory=list)
    _unscored: list[list[OpenAnswer]] = field(default_factory=list)
    _scoring_job: tuple[list[list[OpenAnswer]], Future[tuple[Version, list[list[Scores]]]]] | None = None
    _by_grade: dict[Grade, OpenAnswer] = field(default_factory=dict)  # answers that are being graded
    _finished_grades: list[Grade] = field(default_factory=list)  # that have come back
    _open_groups: dict[OpenGroup, None] = field(default_factory=dict)  # the oldest first
    _unwritten_groups: dict[OpenGroup, None] = field(default_factory=dict)  # with answers that are not written yet
    _counts: Counter[str] = field(default_factory=Counter)  # not written yet
    _written_milliseconds: Counter[str] = field(default_factory=Counter)  # of the clock
    _weights_future: Future[PublishedWeights] | None = None  # newer weights
    _ordered_answers: deque[OpenAnswer] = field(default_factory=deque)  # without `flows`: those that are not done yet
    _prompts_left: int = 0  # prompts that the round lacks which has waited for grades
    _polled_at: float = -_POLL_SECONDS  # when newer weights were looked for
    _scored_at: float = field(default_factory=time.perf_counter)  # when scoring began last
    _score_seconds: float = 0.0
    _written_at: float = field(default_factory=time.perf_counter)  # when something was written last
    _write_seconds: float = 0.0
    _is_costly: bool = False  # an answer that is not written was slow to grade
    _newest_has_expired: bool = False  # the newest rejected answer was not graded in time
    _unreported_count: int = 0  # that no warning has named yet
    _uid_series: tuple[int, bytes, int] | None = None  # the round, the beginning of its names, how many there are
    _grade_rate: GrowthRate = field(default_factory=GrowthRate)
    _update_rate: GrowthRate = field(default_factory=GrowthRate)
    _warm_up_gap: tuple[float, int] = (-math.inf, 0)  # when the warm-up was looked at, and how much it lacked

    def round(self) -> int:
        """Generate until as many prompts are answered as a round has; returns the number of trajectories that were sent
        meanwhile: without `flows` those of the round.
        """
        sent_before, rejected_before = self.sent_count, self.rejected_count
        try:
            if self.flows:
                self._flow_round()
            else:
                self._plain_round()
        except BaseException:
            self.save()
            raise
        self.rounds += 1
        if self.on_done is None:  # one agent whose answers are of no use must not end the others' service
            self.require_use(self.rejected_count - rejected_before)
        return self.sent_count - sent_before

    def run_stages(self) -> bool:
        """Run the stages besides generating that are due; returns whether generation is to stop."""
        self._load_weights()
        self._advance()
        return self.interrupted is not None and self.interrupted()

    def free_engine(self) -> None:
        """Finish what is being generated, so that the engine can be used otherwise. What is graded quickly is sent:
        else it would wait until this searcher generates again. Slower grading goes on.
        """
        self._finish_generating()
        self._submit_to_grader()
        self._score()
        self._wait_for_grades(_QUICK_SECONDS)
        self._collect_grades()
        if self._writable:
            self._write()

    def drain(self, stop: bool = False) -> None:
        """Finish what is being generated, graded and scored, and send it.

        stop: leave what is being generated, and what is not graded soon, as in flight. No further call begins, and
        those that are under way have a second.
        """
        self._finish_generating(stop)
        self._submit_to_grader()
        self._score()
        if not stop:
            self._send_all(give_up=self._wait_for_grades())
            return
        if self._wait_for_grades(_QUICK_SECONDS):
            self.grader.cancel()
            self._wait_for_grades(_STOP_SECONDS)
        self._send_all(give_up=True)

    def pull(self) -> Version:
        """Load newer weights, and another reference if they name one, in place.

        The newest manifest is always read: the engine may hold a version that was only to be evaluated.
        """
        newest_weights = self.weights.newer_than(None)
        if newest_weights is not None:
            with self.clock.state("weights"):
                if newest_weights.version > self.engine.version:
                    self.engine.load(newest_weights.read(), newest_weights.version)
                self._note_manifest(newest_weights)
                if self._other_reference() is not None:
                    self.finish_scoring()  # its thread uses the reference that is loaded
                    self.load_reference()
        return self.engine.version

    def load_reference(self) -> None:
        """Load the reference that the newest weights name, if it is another one. Its version is pinned; the first one
        is what the run began with, which no version has. A trainer that resumes from an older checkpoint may name an
        older one, or the first.
        """
        version = self._other_reference()
        if version == Version():
            self.reference.load_first()
        elif version is not None:
            self.reference.load(self.weights.at(version).read(), version)

    def _other_reference(self) -> Version | None:
        """Returns the reference that the newest weights name; None where it is the one that is loaded, or none."""
        version = self.manifest.reference
        return None if version == self.reference.version else version

    def rescore(self) -> None:
        """Score a bounded number of older trajectories under a newer reference, if there is a rescorer."""
        if self.rescorer is not None:
            self.finish_scoring()  # its thread uses the reference
            with self.clock.state("reference"):
                self.rescorer.round()

    def require_use(self, rejected_count: int) -> None:
        """Raises `UserError` where the first rounds bring nothing but answers that are rejected: the run would never
        end. rejected: answers of the newest round.
        """
        if self.rounds_without_use is None or not rejected_count:
            return
        self.rounds_without_use += 1
        answers = _MAX_USELESS_ROUNDS * self.prompts_per_round * self.samples_per_prompt
        if self.rounds_without_use >= _MAX_USELESS_ROUNDS and self.rejected_count >= answers:
            raise UserError(
                f"all answers of the first {_MAX_USELESS_ROUNDS} rounds are rejected: there is nothing to learn from; "
                f"the last: {self.rejection}; what can be used has a reward from {-self.largest_reward:g} to "
                f"{self.largest_reward:g} and finite log-probabilities: "
                + self._remedy
                + ", then start again, or resume"
            )

    @property
    def _remedy(self) -> str:
        """Returns what to do about answers that are all rejected."""
        if self._newest_has_expired:
            return "make the reward faster, or give a call more time (--run.reward-deadline)"
        if self.rejection == stages.UNWRITTEN:
            return "take a model that answers as the run's own does"
        return "allow longer answers" if self.overlong.penalty == "drop" else "fix the reward"

    @property
    def unsent_count(self) -> int:
        """Returns how many answers are generated and neither sent nor rejected."""
        return sum(len(group.answers) for group in self._open_groups)

    @property
    def waiting_count(self) -> int:
        """Returns how many answers are generated and not graded."""
        return self.grader.unfinished_count + sum(map(len, self._ungraded))

    def finish_scoring(self) -> None:
        """Wait for the scores that the reference's thread computes, so that the reference can be used here."""
        self._collect_scores(wait=True)

    @property
    def has_grading_backlog(self) -> bool:
        """Returns whether so many answers wait for their grades that no further ones are to begin."""
        return self.waiting_count >= self._waiting_limit()

    # The loop, in its two forms

    def _plain_round(self) -> None:
        """Generate a round, have it graded and scored, and send it."""
        self.pull()
        self.rescore()
        positions, prompts = self.prompts.take(self.prompts_per_round)
        sampling = self.exploration.draw(self.rng)
        self._flow = self.engine.flow(self.samples_per_prompt, sampling, self.rng), sampling
        self._submit(positions, prompts)
        while self._open_prompts:
            self._collect_answers(self._flow[0].next(self.interrupted, until_needed=False))
            if self.hand_down_seconds < math.inf:
                self._advance()
        self._flow = None
        self._submit_to_grader()
        self._score()
        self._send_all(sampling if self.vine is not None else None, self._wait_for_grades())

    def _flow_round(self) -> None:
        """Generate until as many prompts are answered as a round has, while all other stages go on."""
        if self._prompts_left <= 0 or self._flow is None:  # else the round before has waited for grades
            self._current_flow()
            self._prompts_left = self.prompts_per_round
        assert self._flow is not None
        flow, waited_seconds = self._flow[0], 0.0
        while self._prompts_left > 0 and waited_seconds < _WAIT_SECONDS:
            if self.run_stages():
                self.drain(stop=True)
                return
            if self.on_done is None and self.has_grading_backlog:  # agents wait before they begin an episode instead
                waited_seconds += self._wait("reward")
                continue
            finished_count = self._generate(flow)
            self._prompts_left -= finished_count
            if not self._open_prompts:  # all prompts are leased, or generation was told to stop
                if not finished_count:
                    self._wait("reward" if self.waiting_count else "paced")
                return

    def _current_flow(self) -> Flow:
        """Returns the flow of prompts; a new one begins for other sampling settings, once the old one is finished."""
        sampling = self.exploration.draw(self.rng)
        if self._flow is None:
            self._weights_future = None
            self.pull()  # at once, whatever the engine was used for
        elif self._flow[1] == sampling:
            return self._flow[0]
        else:
            self._finish_generating()
        self._flow = self.engine.flow(self.samples_per_prompt, sampling, self.rng), sampling
        return self._flow[0]

    def _generate(self, flow: Flow) -> int:
        """Begin as many prompts as there is room for, and generate until some are finished or there is room for
        others; returns how many are finished.
        """
        prompt_count = flow.prompts_needed
        positions, prompts = self.prompts.take(prompt_count) if prompt_count else ([], [])
        self._submit(positions, prompts)
        # where the rest of the prompts is leased, no more will be begun than those that are there
        return self._collect_answers(flow.next(self.run_stages, until_needed=len(prompts) == prompt_count))

    def _submit(self, positions: Sequence[int], prompts: Sequence[Prompt]) -> None:
        assert self._flow is not None
        number, start = self._flow[0].prompts_submitted, time.perf_counter()
        self._flow[0].submit(prompts)
        for i, (position, prompt) in enumerate(zip(positions, prompts, strict=True)):
            self._open_prompts[number + i] = (position, prompt, start)

    def _finish_generating(self, stop: bool = False) -> None:
        """Generate all open prompts to their end, or stop them where they are."""
        while self._open_prompts:
            assert self._flow is not None
            self._collect_answers(self._flow[0].next((lambda: True) if stop else self.run_stages, until_needed=False))
        self._flow = None

    def _collect_answers(self, answered_prompts: Sequence[tuple[int, list[Completion]]]) -> int:
        """Collect the answers to prompts; returns how many prompts are finished."""
        assert self._flow is not None
        flow = self._flow[0]
        unfinished_prompts = flow.unfinished_prompts if isinstance(flow, AnsweredOneByOne) else ()
        for number, completions in answered_prompts:
            group = self._generating_groups.pop(number, None) or OpenGroup(*self._open_prompts[number])
            group.is_generating = number in unfinished_prompts
            group.came_one_by_one |= group.is_generating
            if group.is_generating:
                self._generating_groups[number] = group
            else:
                del self._open_prompts[number]
            group.generated_count += sum(c.stop_reason is not StopReason.INTERRUPTED for c in completions)
            gradable_completions, counts = stages.sort_answers(group.prompt, completions, self.overlong)
            self._counts.update(counts)
            if dropped_count := counts["rejected_trajectories"]:
                self.rejected_count += dropped_count
                self.rejection = stages.drop_reason(completions)
                self._report_done(OpenAnswer(group, c) for c in completions if self.overlong.drops(c))
            answers = [OpenAnswer(group, c) for c in gradable_completions]
            group.answers += answers
            group.open_count += len(answers)
            for completion in gradable_completions:
                stages.count_answer(self._counts, "grading", completion)
            self._open_groups[group] = None
            if answers:
                self._ungraded.append(answers)
            elif group.is_complete:
                self._unwritten_groups[group] = None
        return sum(number not in unfinished_prompts for number, _ in answered_prompts)

    def _advance(self) -> None:
        """Submit generated answers to be graded, collect scores and grades, and send what is due."""
        self._submit_to_grader()
        if self._is_score_due():
            self._score(background=True)
        self._collect_scores()
        self.grader.poll()
        self._collect_grades()
        if self._is_write_due():
            self._write()

    # Weights

    def _load_weights(self) -> None:
        """Load the weights that have been read, and begin to read newer ones."""
        now = time.monotonic()
        if self._weights_future is not None:
            if self._weights_future.done():
                loaded_weights, self._weights_future = self._weights_future.result(), None
                if loaded_weights.version > self.engine.version:
                    with self.clock.state("weights"):
                        self.engine.load(loaded_weights.read(), loaded_weights.version)
            elif now - self._polled_at > _READ_SECONDS:
                raise DeadlineExceeded(f"newer weights could not be read within {_READ_SECONDS:g} s")
        elif now - self._polled_at >= _POLL_SECONDS:
            self._polled_at = now
            newest_weights = self.weights.newer_than(None)
            if newest_weights is not None:
                self._note_manifest(newest_weights)
                if newest_weights.version > self.engine.version:
                    self._weights_future = call_in_thread("weights", _read, newest_weights, self.engine)

    def _note_manifest(self, published: PublishedWeights) -> None:
        """Remember the newest manifest, and how fast the trainer makes updates."""
        self.manifest = published.manifest
        self._update_rate.record(time.monotonic(), published.version.step)

    # Grades and scores

    def _submit_to_grader(self) -> None:
        """Submit generated answers to the reward, and queue them to be scored."""
        batches, self._ungraded = self._ungraded, []
        if not batches:
            return
        grades_by_prompt = self.grader.submit(_completions_by_prompt(batches), self._finished_grades)
        for answers, grades in zip(batches, grades_by_prompt, strict=True):
            for answer, grade in zip(answers, grades, strict=True):
                answer.grade = grade
                self._by_grade[grade] = answer
            if not self.flows:
                self._ordered_answers.extend(answers)
        self._unscored += batches

    def _is_score_due(self) -> bool:
        """Returns whether answers are scored now: a round of them, or fewer after `hand_down_seconds`."""
        if not self._unscored or self._scoring_job is not None:
            return False
        if len(self._unscored) >= self.prompts_per_round:
            return True
        seconds = time.perf_counter() - self._scored_at
        return seconds >= max(self.hand_down_seconds, GENERATION_RATIO * self._score_seconds)

    def _score(self, background: bool = False) -> None:
        """Score all queued answers under the reference that the newest weights name; in a thread of its own if that is
        possible and asked for by `background`.
        """
        self._collect_scores(wait=True)
        batches, self._unscored = self._unscored, []
        if not batches:
            return
        self._scored_at = time.perf_counter()
        scorers = (self.reference, *self._local_teachers)
        if background and all(isinstance(scorer, Concurrent) and scorer.concurrent for scorer in scorers):
            self._scoring_job = batches, call_in_thread("reference", self._load_and_score, batches)
        else:
            with self.clock.state("reference"):
                self._store_scores(batches, *self._load_and_score(batches))
            self._score_seconds = time.perf_counter() - self._scored_at

    def _load_and_score(self, batches: Sequence[Sequence[OpenAnswer]]) -> tuple[Version, list[list[Scores]]]:
        """Load another reference if one is named, and score older trajectories; returns the version of the reference
        and the scores of the answers under it.
        """
        if self.flows:
            self.load_reference()
            if self.rescorer is not None:
                self.rescorer.round()
        scorers = (self.reference, *self._local_teachers)
        return self.reference.version, stages.score_answers(scorers, _completions_by_prompt(batches))

    def _collect_scores(self, wait: bool = False) -> None:
        """Collect the scores of the reference's thread, if it is done."""
        if self._scoring_job is None:
            return
        batches, future = self._scoring_job
        if wait:
            with self.clock.state("reference"):
                self._await(future, "the reference")
        if future.done():
            self._scoring_job = None
            self._store_scores(batches, *future.result())
            self._score_seconds = 0.0

    def _store_scores(
        self, batches: Sequence[Sequence[OpenAnswer]], reference: Version, scores: list[list[Scores]]
    ) -> None:
        for answers, rows in zip(batches, scores, strict=True):
            for answer, row in zip(answers, rows, strict=True):
                answer.scores, answer.reference = row, reference
            self._complete_ready(answers)

    def _collect_grades(self) -> None:
        """Collect the grades that the reward has given."""
        if not self._finished_grades:
            return
        answers = [answer for grade in self._finished_grades if (answer := self._by_grade.pop(grade, None)) is not None]
        self._grade_rate.record(time.monotonic(), self._grade_rate.total + len(self._finished_grades))
        self._finished_grades.clear()
        self._complete_ready(answers)

    def _complete_ready(self, answers: Sequence[OpenAnswer]) -> None:
        """Complete the answers that are graded and scored; without `flows` in the order of generation, so that equal
        generators give equal rounds however long grading takes.
        """
        if self.flows:
            for answer in answers:
                if answer.is_ready:
                    self._complete(answer)
        while self._ordered_answers and self._ordered_answers[0].is_ready:
            self._complete(self._ordered_answers.popleft())

    def _complete(self, answer: OpenAnswer) -> None:
        """Make a trajectory of an answer that is graded and scored, or reject and count it."""
        group, completion, grade = answer.group, answer.completion, answer.grade
        assert grade is not None
        assert answer.scores is not None
        assert answer.reference is not None
        if answer.is_done:
            return
        answer.is_done = True
        stages.count_answer(group.counts, "grading", completion, -1)
        group.open_count -= 1
        if group not in self._unwritten_groups:
            self._unwritten_groups[group], group.unwritten_since = None, time.perf_counter()
        self._is_costly |= grade.seconds > COSTLY_SECONDS
        if grade.judgement is None:
            stages.count_answer(group.counts, "expired", completion)
            reason: str | None = f"{self._limits.reward_name} did not grade an answer within {self.grader.deadline:g} s"
        else:
            judgement = self.overlong.penalise(completion, grade.judgement)
            scores = (answer.scores[0], *self._teacher_scores(answer.scores[1:], grade.scores))
            reason = stages.rejection_reason(group.prompt, completion, judgement, scores, self._limits)
        if reason is not None:
            stages.count_answer(group.counts, "rejected", completion)
            if stages.has_failed_environment(completion):
                stages.count_answer(group.counts, "failed", completion)
            self._newest_has_expired = grade.judgement is None
            self.rejected_count, self._unreported_count = self.rejected_count + 1, self._unreported_count + 1
            self.rejection = reason
            self._report_done([answer])
            return
        provenance = {"searcher": self.name, "round": self.rounds}
        uid, self.rounds_without_use = self._uid(), None
        row = (group.prompt, completion, judgement, scores, answer.reference)
        answer.trajectory = stages.build_trajectory(uid, *row, provenance)

    def _uid(self) -> str:
        """Returns a new name. Names increase with the rounds, so that inserts touch the index page just written."""
        random_bytes = self.rng.bytes(16)
        if not self._uid_series or self._uid_series[0] != self.rounds:
            self._uid_series = self.rounds, self.rounds.to_bytes(4, "big") + random_bytes[:8], 0
        number, series, index = self._uid_series
        self._uid_series = number, series, index + 1
        return (series + index.to_bytes(4, "big")).hex()

    @cached_property
    def _local_teachers(self) -> list[AnswerScorer]:
        """Returns the teachers that are no servers, for which answers wait in windows."""
        return [teacher for teacher in self.teachers if not isinstance(teacher, ScoredByCalls)]

    def _teacher_scores(self, local: Iterable[TokenScores], remote: Iterable[TokenScores]) -> list[TokenScores]:
        """Returns the scores by each teacher, in their order."""
        local_rows, remote_rows = iter(local), iter(remote)
        return [next(remote_rows if isinstance(teacher, ScoredByCalls) else local_rows) for teacher in self.teachers]

    @cached_property
    def _limits(self) -> Limits:
        scorers = "the reference or a teacher" if self.teachers else "the reference"
        return Limits(self.largest_reward, type(self.grader.reward).__name__, scorers, self.hide_text)

    # Waiting

    def _waiting_limit(self) -> float:
        """Returns how many answers may wait: as many as are graded in the time of `grading_lag` updates, but enough
        that no place in the window is ever empty. Before the first update answers do not age: all that the warm-up
        lacks may wait.
        """
        now, lower_limit = time.monotonic(), self.grader.capacity(self.samples_per_prompt) + 2 * self.samples_per_prompt
        if self.grader.has_batched_part:  # one round is graded while the next waits
            lower_limit = max(lower_limit, 2 * self.prompts_per_round * self.samples_per_prompt)
        if updates := self._update_rate.per_second(now):
            return max(lower_limit, self.grading_lag * self._grade_rate.per_second(now) / updates)
        if now - self._warm_up_gap[0] > _COUNTS_SECONDS:
            self._warm_up_gap = now, (self.warm_up - self.journal.rows()) // self.searchers
        return max(lower_limit, self._warm_up_gap[1])

    def _wait(self, state: State) -> float:
        """Wait a moment, for grades if there are any to come; returns the seconds."""
        start = time.monotonic()
        with self.clock.state(state):
            if self.waiting_count:
                self.grader.wait(_POLL_SECONDS)
            else:
                time.sleep(_POLL_SECONDS)
        return time.monotonic() - start

    def _wait_for_grades(self, seconds: float = math.inf) -> bool:
        """Wait until all submitted answers are graded; returns whether the wait was given up."""
        poll_time = time.monotonic()
        end, must_stop = poll_time + seconds, False
        with self.clock.state("reward"):
            while self.grader.unfinished_count:
                self.grader.wait(_POLL_SECONDS)
                self._collect_grades()
                if self._is_costly and self.vine is None and self._is_write_due():
                    self._write()
                now = time.monotonic()
                if now - poll_time >= _POLL_SECONDS and self.interrupted is not None:
                    poll_time = now
                    if self.interrupted() and not must_stop:
                        self.grader.cancel()
                        must_stop, end = True, min(end, now + _STOP_SECONDS)
                if now > end:
                    return True
        return must_stop

    def _await(self, future: Future[Any], stage: str) -> None:
        """Wait for a thread of this searcher, with signs of life."""
        end = time.monotonic() + _READ_SECONDS
        while not future.done():
            with suppress(TimeoutError):
                future.exception(_POLL_SECONDS)
            if self.interrupted is not None:
                self.interrupted()
            if time.monotonic() > end:
                raise DeadlineExceeded(f"waited {_READ_SECONDS:g} s for {stage} of {self.name}'s answers")

    # Sending

    def save(self) -> None:
        """Send graded answers after an error, as far as that is possible."""
        if self.vine is not None:  # what its rollouts have not valued cannot be trained on
            return
        for step in (self.grader.poll, self._score, lambda: self._send_all(give_up=True)):
            with suppress(Exception):
                step()

    def _send_all(self, sampling: Sampling | None = None, give_up: bool = False) -> None:
        """Send all open groups, in the order of generation. give_up: answers that are not graded are in flight.

        sampling: estimate the values of the answers' steps first, by rollouts that are sampled so.
        """
        self._collect_scores(wait=True)
        self._collect_grades()
        answers = [answer for group in self._open_groups for answer in group.answers if not answer.is_done]
        for answer in answers:
            if answer.is_ready:
                self._complete(answer)
            elif give_up:
                answer.group.counts.update(grading_trajectories=-1, grading_tokens=-len(answer.completion.tokens))
                stages.count_answer(answer.group.counts, "in_flight", answer.completion)
                answer.is_done = True
        if give_up:
            self._by_grade.clear()
            self._ordered_answers.clear()
        self._write(list(self._open_groups), sampling)

    def _is_write_due(self) -> bool:
        """Returns whether something is written now: a round of answers, fewer after `hand_down_seconds` or where a
        grade took longer than that, or counts alone.
        """
        seconds = time.perf_counter() - self._written_at
        groups = self._writable
        if not groups:
            return bool(self._counts) and seconds >= _COUNTS_SECONDS
        answer_count = sum(len(group.unstaged) for group in groups)
        round_count = answer_count / (self.prompts_per_round * self.samples_per_prompt)
        if self._is_costly:
            return seconds >= max(_HOLD_SECONDS, 2 * self._write_seconds)
        hold_seconds = 0.0 if round_count >= 1 else self.hand_down_seconds
        return round_count >= MAX_ROUNDS or seconds >= max(hold_seconds, GENERATION_RATIO * self._write_seconds)

    @property
    def _writable(self) -> list[OpenGroup]:
        """Returns the groups of which there is something to write: complete ones, and others whose graded answers have
        waited for the other answers for a while, which is short where grades are costly.
        """
        deadline = time.perf_counter() - (_HOLD_SECONDS if self._is_costly else COSTLY_SECONDS)
        return [g for g in self._unwritten_groups if g.is_complete or g.unwritten_since <= deadline]

    def _write(self, groups: Iterable[OpenGroup] | None = None, sampling: Sampling | None = None) -> None:
        """Write the groups that are complete, with their leases, in one transaction; graded answers of the others are
        staged. groups: write these, complete or not.
        """
        start = time.perf_counter()
        writable_groups = self._writable if groups is None else list(groups)
        complete_groups = [group for group in writable_groups if group.is_complete or groups is not None]
        partial_groups = [group for group in writable_groups if not group.is_complete and groups is None]
        if self._unreported_count:
            log.warning(
                "%d answers are rejected (a reward is a number from %g to %g), the last: %s",
                self._unreported_count, -self.largest_reward, self.largest_reward, self.rejection,
            )  # fmt: skip
            self._unreported_count = 0
        if writable_groups:
            self._put(complete_groups, partial_groups, sampling)
        elif self._counts:
            self.journal.count(**self._pop_counts())
        for group in writable_groups:
            self._unwritten_groups.pop(group, None)
        self._is_costly = self._is_costly and bool(self._unwritten_groups)
        self._written_at = time.perf_counter()
        self._write_seconds = self._written_at - start

    def _put(self, groups: Sequence[OpenGroup], partial_groups: Sequence[OpenGroup], sampling: Sampling | None) -> None:
        """Send groups, whose leases are given back where all their answers are there, and stage the graded answers of
        others, all in one transaction with their counts.
        """
        samples = self.samples_per_prompt
        complete_groups = [g for g in groups if g.is_complete and (g.generated_count == samples or g.came_one_by_one)]
        leases = [group.position for group in complete_groups]
        by_group = [(group, group.trajectories) for group in groups]
        for group in (*groups, *partial_groups):
            self._counts.update(group.counts)
            group.counts = Counter()
        if sampling is not None and self.vine is not None:
            earlier_counts = self._counts["in_flight_trajectories"], self._counts["rejected_trajectories"]
            rows = [t for _, row in by_group for t in row]
            by_uid = {t.uid: t for t in self.vine.add_values(rows, sampling, self.rng, self._counts, self.interrupted)}
            by_group = [(group, [by_uid[t.uid] for t in row if t.uid in by_uid]) for group, row in by_group]
            leases = leases if self._counts["in_flight_trajectories"] == earlier_counts[0] else []
            self.rejected_count += self._counts["rejected_trajectories"] - earlier_counts[1]
        start = min((group.start for group in (*groups, *partial_groups)), default=0.0)
        now, seconds = time.time(), time.perf_counter() - start
        trajectories = [
            t
            for group, row in by_group
            for t in stages.stamp(row, now, seconds, (group.generated_count - len(row)) / max(1, len(row)))
        ]
        staged_answers = [answer for group in partial_groups for answer in group.unstaged]
        staged_rows = stages.stamp([a.trajectory for a in staged_answers if a.trajectory is not None], now, seconds)
        outcomes = self._outcomes({group.position: group.prompt for group in complete_groups}, leases, trajectories)
        staging: dict[str, Any] = {}
        if staged_rows:
            positions = [answer.group.position for answer in staged_answers]
            staging = {"staged": staged_rows, "positions": positions, "samples": samples}
        counts = self._pop_counts()
        try:
            self.journal.put(trajectories, leases, counts, outcomes, **staging)
        except BaseException:
            self._counts.update(counts)
            raise
        new_answers = [*staged_answers, *(answer for group in groups for answer in group.unstaged)]
        for answer in new_answers:
            answer.is_staged = True
        for group in groups:
            self._open_groups.pop(group, None)
        self._report_done(new_answers)
        self.sent_count += len(trajectories)

    def _report_done(self, answers: Iterable[OpenAnswer]) -> None:
        """Tell of answers that they are on the disk, or rejected."""
        if self.on_done is not None:
            for answer in answers:
                self.on_done(answer)

    def _outcomes(
        self, prompts: Mapping[int, Prompt], leases: Sequence[int], trajectories: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        """Returns the outcomes of the prompts that are given back."""
        by_key: dict[str, list[float]] = {}
        for t in trajectories:
            by_key.setdefault(t.prompt.key, []).append(t.reward)
        return self.prompts.outcomes({p: by_key[key] for p in leases if (key := prompts[p].key) in by_key})

    def _pop_counts(self) -> Counter[str]:
        """Returns the counts that are not written yet, with what the clock has measured since the last time."""
        counts, self._counts = self._counts, Counter()
        seconds = self.clock.seconds()
        for name, states in SEARCHER_STATES.items():
            milliseconds = round(1000 * sum(seconds.get(state, 0.0) for state in states))
            counts[f"{name}_milliseconds"] = milliseconds - self._written_milliseconds[name]
            self._written_milliseconds[name] = milliseconds
        return counts


def _completions_by_prompt(batches: Iterable[Sequence[OpenAnswer]]) -> list[tuple[Prompt, list[Completion]]]:
    """Returns the prompt of each batch, with the completions of its answers."""
    return [(answers[0].group.prompt, [answer.completion for answer in answers]) for answers in batches]


def _read(published: PublishedWeights, engine: Engine) -> PublishedWeights:
    """Returns published weights once all of them are in memory, and on their way to the engine's device, so that
    loading them is only copying.
    """
    weights = published.read()
    for tensor in weights.values():
        tensor.flatten()[::_PAGE_NUMBERS].sum()
    if isinstance(engine, StagesWeights):
        weights = engine.stage(weights)
    return PublishedWeights(published.version, published.manifest, lambda: weights)
