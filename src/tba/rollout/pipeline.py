"""A searcher whose stages go on at the same time: requests flow, and nothing stands still for a slow reward.

    prompts -> generating -> answered (a bounded queue) -> reward    -> journal
                   ^                                    -> reference
                   weights, read in the background

Prompts are begun as soon as there is room for them, whatever round they belong to, and each is given back with its
answers. Between two tokens, every few of them (`_between`): weights that have been read are loaded, rows that are being
generated keep the keys and values of the older ones; a part of the answers that is judged and scored is sent, and all
that have been finished meanwhile are the next part. There is one part at a time, so neither a reward nor a reference is
ever called by two threads at once, and a slow reward is asked about all that came during its last call.

The reward and the reading of weights have threads of their own; the reference has one where it is on an accelerator
(`Concurrent`), and scores in this thread where it would compete with generation for the processor.

Invariant: only this thread draws random numbers and uses the engine; it alone uses the journal, but for scores under a
new reference, which come from the reference's thread where it has one; generation waits for a stage only
when as many answers wait as `_ROUNDS_WAITING` says. What a stage raises is raised here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from tba.clock import Searching
from tba.errors import DeadlineExceeded
from tba.protocols import Concurrent, Flow, PublishedWeights
from tba.rollout.reward_retry import beside
from tba.rollout.searcher import GENERATING, Answered, Finished, Scores, Searcher
from tba.types import Completion, Judgement, Prompt, Sampling

T = TypeVar("T")
_ROUNDS_WAITING = 16  # rounds of answers that may wait for the reward: what they are older by is a few updates
_LOOK = 0.05  # seconds between two looks for newer weights, or for prompts where others hold them all
_BEAT = 1.0  # seconds between two signs of life while it waits for a stage
_PAGE = 1024  # of so many numbers in a row one is read, which brings all of them into memory


@dataclass(frozen=True)
class _Part:
    """Answers that are being judged and scored."""

    answered: Sequence[Answered]
    finished: Finished
    counts: Counter[str]
    judging: Future[Sequence[Judgement]]
    scoring: Future[list[Scores]]

    @property
    def done(self) -> bool:
        return self.judging.done() and self.scoring.done()


@dataclass
class Pipeline:
    """Makes a searcher's rounds flow into one another."""

    searcher: Searcher
    deadline: float  # seconds that a stage may take over a part
    answered: list[Answered] = field(default_factory=list)  # finished, and waiting for the reward
    part: _Part | None = None
    reading: Future[PublishedWeights] | None = None  # newer weights
    sent: int = 0  # trajectories
    rejected: int = 0
    _flow: tuple[Flow, Sampling] | None = None
    _asked: dict[int, tuple[int, Prompt, float]] = field(default_factory=dict)  # by number in the flow: its position,
    # the prompt itself, and when it was begun
    _looked: float = -_LOOK  # when newer weights were looked for
    _since: float = 0.0  # when the newest part was begun
    _took: float = 0.0  # seconds that sending the one before took

    def round(self) -> int:
        """Generate until as many prompts are answered as a round has; returns the trajectories that were sent
        meanwhile.
        """
        sent, rejected = self.sent, self.rejected
        flow, left = self._flowing(), self.searcher.prompts_per_round
        while left > 0:
            self._between()
            found = self._generated(flow)
            left -= found
            if not self._asked:  # others hold all prompts, or generation was told to stop
                self.settle()
                if not found:
                    with self.searcher.clock.state("paced"):
                        time.sleep(_LOOK)
                break
        self.searcher.rounds += 1
        self.searcher.require_use(self.sent - sent, self.rejected - rejected)
        return self.sent - sent

    def drain(self, stop: bool = False) -> None:
        """Finish what is being generated, judged and scored, and send it; afterwards the engine can be used otherwise.

        stop: leave what is being generated as it is, counted as in flight.
        """
        self._empty(stop)
        self.settle()

    def _empty(self, stop: bool = False) -> None:
        while self._asked:
            assert self._flow is not None
            self._take_in(self._flow[0].next((lambda: True) if stop else self._between, until_wanted=False))
        self._flow = None

    def _flowing(self) -> Flow:
        """Returns what prompts flow through; another way of sampling begins when the one before is finished."""
        searcher = self.searcher
        sampling = searcher.exploration.draw(searcher.rng)
        if self._flow is None:
            self.reading = None
            searcher.pull()  # at once, whatever the engine was used for
        elif self._flow[1] == sampling:
            return self._flow[0]
        else:
            self._empty()
        self._flow = searcher.engine.flow(searcher.samples_per_prompt, sampling, searcher.rng), sampling
        return self._flow[0]

    def _generated(self, flow: Flow) -> int:
        """Begin as many prompts as there is room for, and generate until some are finished or there is room for
        others; returns how many are finished.
        """
        wanted, number, began = flow.wanted, flow.submitted, time.perf_counter()
        positions, prompts = self.searcher.prompts.take(wanted) if wanted else ([], [])
        flow.submit(prompts)
        for i, asked in enumerate(zip(positions, prompts, strict=True)):
            self._asked[number + i] = (*asked, began)
        # where others hold the rest of the prompts, no more will be wanted than those that are begun
        return self._take_in(flow.next(self._between, until_wanted=len(prompts) == wanted))

    def _take_in(self, found: Sequence[tuple[int, list[Completion]]]) -> int:
        for number, completions in found:
            position, prompt, began = self._asked.pop(number)
            self.answered.append(Answered(position, prompt, completions, began))
        return len(found)

    def _between(self) -> bool:
        """Do what is due between two tokens; returns whether generation is to stop."""
        self._load()
        self._pass_on()
        interrupted = self.searcher.interrupted
        return interrupted is not None and interrupted()

    def _load(self) -> None:
        """Load the weights that have been read, and begin to read newer ones."""
        searcher, now = self.searcher, time.monotonic()
        if self.reading is not None:
            if self.reading.done():
                published, self.reading = self.reading.result(), None
                if published.version > searcher.engine.version:
                    with searcher.clock.state("weights"):
                        searcher.engine.load(published.read(), published.version)
            elif now - self._looked > self.deadline:
                raise DeadlineExceeded(f"newer weights could not be read within {self.deadline:g} s")
        elif now - self._looked >= _LOOK:
            self._looked = now
            newest = searcher.weights.newer_than(None)
            if newest is not None:
                searcher.manifest = newest.manifest
                if newest.version > searcher.engine.version:
                    self.reading = beside("weights", _read, newest)

    def _pass_on(self) -> None:
        """Send the part that is judged and scored, and make the next one of what has been answered since: a round, or
        less after `hand_down_seconds`. In larger parts answers would come faster than they are trained, then none.
        """
        crowded = len(self.answered) >= _ROUNDS_WAITING * self.searcher.prompts_per_round
        if self.part is not None and (self.part.done or crowded):
            self._send()
        hold = 0.0 if len(self.answered) >= self.searcher.prompts_per_round else self.searcher.hand_down_seconds
        due = crowded or time.perf_counter() - self._since >= max(hold, GENERATING * self._took)
        if self.part is None and self.answered and due:
            self._begin()

    def settle(self) -> None:
        """Wait for all that is finished to be judged and scored, and send it."""
        while self.part is not None or self.answered:
            if self.part is None:
                self._begin()
            self._send()

    def _begin(self) -> None:
        """Give all that is finished to the reward and to the reference."""
        searcher, answered = self.searcher, self.answered
        self._since, self.answered = time.perf_counter(), []
        finished, counts = searcher.sort(answered)
        judging = beside("reward", searcher.judge, finished)
        if isinstance(searcher.reference, Concurrent) and searcher.reference.concurrent:
            scoring = beside("reference", self._score, finished)
        else:
            with searcher.clock.state("reference"):
                scoring = Future()
                scoring.set_result(self._score(finished))
        self.part = _Part(answered, finished, counts, judging, scoring)

    def _score(self, finished: Finished) -> list[Scores]:
        """Score a part; before it, load another reference if one is named, and score older trajectories."""
        self.searcher.refer()
        if self.searcher.rescorer is not None:
            self.searcher.rescorer.round()
        return self.searcher.score(finished)

    def _send(self) -> None:
        """Send the part, waiting until it is judged and scored."""
        assert self.part is not None
        searcher, part = self.searcher, self.part
        judgements = self._waited(part.judging, "reward")
        scores = self._waited(part.scoring, "reference")
        self.part = None
        trajectories = searcher.trajectories(part.finished, judgements, scores, part.counts)
        began = time.perf_counter()
        searcher.send(part.answered, trajectories, searcher.whole(part.answered), part.counts)
        self._took = time.perf_counter() - began
        self.sent += len(trajectories)
        self.rejected += part.counts["rejected_trajectories"]

    def _waited(self, stage: Future[T], name: Searching) -> T:
        """Returns what a stage has found, or raises what it raised."""
        if stage.done():
            return stage.result()
        end = time.monotonic() + self.deadline
        with self.searcher.clock.state(name):
            while time.monotonic() < end:
                try:
                    return stage.result(_BEAT)
                except TimeoutError:
                    if stage.done():  # in this moment, or it is the stage's own error
                        return stage.result()
                if self.searcher.interrupted is not None:
                    self.searcher.interrupted()  # a sign of life; a part that is begun is finished
        raise DeadlineExceeded(f"waited {self.deadline:g} s for the {name} of a searcher's answers")


def _read(published: PublishedWeights) -> PublishedWeights:
    """Returns published weights once all of them are in memory, so that loading them is only copying."""
    weights = published.read()
    for tensor in weights.values():
        tensor.flatten()[::_PAGE].sum()
    return PublishedWeights(published.version, published.manifest, lambda: weights)
