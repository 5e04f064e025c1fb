"""Importing trajectories: answers are tokenised, graded by the task's own reward, scored under the reference.

Invariant: each line ends as a trajectory in the journal, as there already, or refused, and is counted as exactly one of
these (`Report`). A trajectory's name follows from its source, prompt, answer and how often the same has come before, so
that an import that was cut off, or is repeated, adds what is missing and nothing twice. A claimed reward is recorded as
claimed, and believed only on request. No weights of the run sampled it: it is never recent, and if it has no behaviour
log-probabilities it gets none.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias, TypeVar

import numpy as np

from tba.errors import DeadlineExceeded, UserError
from tba.intake.answers import Answer, answer_of
from tba.intake.encoding import Encoded, Encoder
from tba.intake.report import Report, counters
from tba.protocols import Journal, Reference, Reward
from tba.tables import Refusal, Values
from tba.types import TEACHER, Completion, FloatArray, Json, Judgement, Prompt, Trajectory, quote

S = TypeVar("S")
T = TypeVar("T")
CHUNK = 1024  # lines that are graded, scored and written together
Entry: TypeAlias = tuple[int, Values | Refusal | Trajectory]


@dataclass(frozen=True)
class Candidate:
    """Holds an encoded answer that is not written yet: its line, the reward claimed and its source."""

    number: int
    uid: str
    encoded: Encoded
    claimed: float | None
    provenance: Mapping[str, Json]

    @property
    def pair(self) -> tuple[Prompt, Completion]:
        return self.encoded.prompt, self.encoded.completion


@dataclass
class Intake:
    """Imports the lines of one source after another into the journal."""

    encoder: Encoder
    reward: Reward
    reference: Reference
    journal: Journal
    teachers: Sequence[Reference] = ()  # which score every answer as well
    believe: bool = False  # use claimed rewards, where there are any
    needs_behavior: bool = False  # refuse what comes without behaviour log-probabilities
    largest_reward: float = sys.float_info.max  # refuse what has a larger |reward|
    now: Callable[[], float] = time.time
    _seen: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def take(
        self, entries: Iterable[Entry], source: str, progress: Callable[[int], None] = lambda lines: None
    ) -> Report:
        """Import all of one source. Raises only what the journal raises."""
        report, lines = Report(source), iter(entries)
        while chunk := list(islice(lines, CHUNK)):
            report.lines += len(chunk)
            self._put(self._new(self._encoded(chunk, report), report), report)
            progress(report.lines)
        return report

    def _encoded(self, chunk: Sequence[Entry], report: Report) -> list[Candidate]:
        """Returns what can be tokenised, with its name; the others are refused."""
        candidates = []
        for number, entry in chunk:
            made = self._candidate(number, entry, report.source)
            if isinstance(made, Refusal):
                report.refuse(number, made)
            else:
                candidates.append(made)
        return candidates

    def _candidate(self, number: int, entry: Values | Refusal | Trajectory, source: str) -> Candidate | Refusal:
        provenance: dict[str, Json] = {"searcher": f"import:{source}", "line": number}
        found: Encoded | Answer | Refusal
        if isinstance(entry, Trajectory):
            found, claimed = self.encoder.adopt(entry), entry.reward
            provenance |= {"version": str(entry.version), "was": dict(entry.provenance)}
        elif isinstance(entry, Refusal):
            return entry
        else:
            found, claimed = answer_of(entry), None
        if isinstance(found, Answer):
            claimed = found.claimed
            provenance |= {} if found.source is None else {"source": found.source}
            found = self.encoder.encode(found)
        if isinstance(found, Refusal):
            return found
        if self.needs_behavior and found.completion.log_behavior is None:
            return Refusal("no log-probabilities of its behaviour, which the run's objective needs")
        if claimed is not None and math.isfinite(claimed):
            provenance["claimed_reward"] = claimed
        return Candidate(number, self._uid(source, found), found, claimed, provenance)

    def _uid(self, source: str, encoded: Encoded) -> str:
        """Returns 32 hex digits: hash of the content, and its repeat index."""
        kind = (source, encoded.prompt.key, f"{encoded.completion.digest} {encoded.completion.stop_reason}")
        self._seen[kind] += 1
        name = "\0".join((*kind, str(self._seen[kind])))
        return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()

    def _new(self, candidates: list[Candidate], report: Report) -> list[Candidate]:
        """Returns those that are not in the journal already."""
        known = self.journal.known([c.uid for c in candidates])
        report.repeated += sum(c.uid in known for c in candidates)
        return [c for c in candidates if c.uid not in known]

    def _put(self, candidates: list[Candidate], report: Report) -> None:
        """Grade, score, write; only what is written is counted as imported."""
        kept: list[tuple[Candidate, Judgement]] = []
        for candidate, mark in zip(candidates, self._marks(candidates), strict=True):
            if isinstance(mark, Refusal):
                report.refuse(candidate.number, mark)
            elif not abs(mark.reward) < math.inf:  # an int may be beyond any float
                report.refuse(candidate.number, _with_reward("its reward is not finite", candidate, mark))
            elif abs(mark.reward) > self.largest_reward:
                reason = f"its reward is beyond {self.largest_reward:g}, which the loss can square"
                report.refuse(candidate.number, _with_reward(reason, candidate, mark))
            else:
                kept.append((candidate, mark))
        scores = self._scores([candidate for candidate, _ in kept])
        trajectories, known, now = [], [], self.now()
        for (candidate, mark), scored in zip(kept, scores, strict=True):
            if isinstance(scored, Refusal):
                report.refuse(candidate.number, scored)
            elif not all(np.isfinite(log_T).all() for log_T in scored):
                total = ", ".join(str(float(log_T.sum())) for log_T in scored)
                report.refuse(
                    candidate.number, Refusal(f"its log-probability under {self._scorers} is not finite", total)
                )
            else:
                trajectories.append(self._trajectory(candidate, mark, scored, now))
                known.append(candidate.encoded.known)
        if trajectories:
            self.journal.put(trajectories, counters=counters(trajectories))
        for trajectory, is_known in zip(trajectories, known, strict=True):
            report.take(trajectory, is_known)
            self._compare(trajectory, report)

    @property
    def _scorers(self) -> str:
        return "the reference or a teacher" if self.teachers else "the reference"

    def _trajectory(self, of: Candidate, mark: Judgement, scored: Sequence[FloatArray], now: float) -> Trajectory:
        believed = self.believe and of.claimed is not None
        return Trajectory(
            uid=of.uid,
            prompt=of.encoded.prompt,
            completion=of.encoded.completion,
            reward=float(mark.reward),
            log_reference=scored[0],
            reference=self.reference.version,
            arrays={TEACHER: np.stack(scored[1:])} if self.teachers else {},
            reward_parts=mark.parts,
            provenance={**of.provenance, "reward": "claimed" if believed else "task"},
            created=now,
        )

    def _marks(self, candidates: Sequence[Candidate]) -> list[Judgement | Refusal]:
        """Returns the task's own judgement of each, or the claimed reward if that is believed; all in one call if
        possible.
        """
        believed = [self.believe and c.claimed is not None for c in candidates]
        asked = [c for c, b in zip(candidates, believed, strict=True) if not b]
        own = iter(self._judged(asked))
        return [
            Judgement(c.claimed, {"claimed": c.claimed}) if b and c.claimed is not None else next(own)
            for c, b in zip(candidates, believed, strict=True)
        ]

    def _judged(self, asked: Sequence[Candidate]) -> list[Judgement | Refusal]:
        return _in_parts(
            asked,
            lambda some: self.reward.judge([c.pair for c in some]),
            "the task's reward cannot grade it",
        )

    def _scores(self, candidates: Sequence[Candidate]) -> list[tuple[FloatArray, ...] | Refusal]:
        return _in_parts(candidates, self._scored, f"{self._scorers} cannot score it")

    def _scored(self, candidates: Sequence[Candidate]) -> list[tuple[FloatArray, ...]]:
        """Returns the log-probabilities of each under the reference and every teacher, in order, prompt by prompt.

        Equal answers are scored once.
        """
        by_prompt: dict[str, tuple[Prompt, dict[str, Completion]]] = {}
        for prompt, completion in (c.pair for c in candidates):
            by_prompt.setdefault(prompt.key, (prompt, {}))[1].setdefault(completion.digest, completion)
        answered = [(prompt, list(completions.values())) for prompt, completions in by_prompt.values()]
        scored: dict[tuple[str, str], tuple[FloatArray, ...]] = {}
        for scorer in (self.reference, *self.teachers):
            for (prompt, completions), rows in zip(answered, scorer.log_probabilities_of(answered), strict=True):
                for completion, row in zip(completions, rows, strict=True):
                    key = prompt.key, completion.digest
                    scored[key] = (*scored.get(key, ()), row)
        return [scored[prompt.key, completion.digest] for prompt, completion in (c.pair for c in candidates)]

    def _compare(self, trajectory: Trajectory, report: Report) -> None:
        """Compare the claimed reward with the one it got."""
        claimed = trajectory.provenance.get("claimed_reward")
        if claimed is not None:
            report.claimed += 1
            report.disagreed += not math.isclose(claimed, trajectory.reward, rel_tol=1e-6, abs_tol=1e-9)


def _in_parts(items: Sequence[S], act: Callable[[Sequence[S]], Sequence[T]], reason: str) -> list[T | Refusal]:
    """Calls `act` on all at once; where that fails, on ever smaller parts.

    Raises `DeadlineExceeded` as it does: what hangs would hang again.
    """
    if not items:
        return []
    try:
        done = list(act(items))
        if len(done) != len(items):
            raise UserError(f"{len(items)} answers were given and {len(done)} results came back")
    except DeadlineExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - foreign text may upset anything: what does is refused, with the error
        if len(items) == 1:
            return [Refusal(reason, _one_line(error))]
        half = len(items) // 2
        return _in_parts(items[:half], act, reason) + _in_parts(items[half:], act, reason)
    return [*done]


def _with_reward(reason: str, candidate: Candidate, mark: Judgement) -> Refusal:
    prompt, completion = candidate.pair
    return Refusal(reason, f"{mark} for {quote(completion.text, 80)} to {quote(prompt.text, 80)}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
