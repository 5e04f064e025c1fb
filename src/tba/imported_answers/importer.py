"""Importing trajectories: answers are tokenised, graded by the task's own reward, scored under the reference.

Invariant: each line ends as a trajectory in the journal, as there already, or refused, and is counted as exactly one of
these (`Report`). A trajectory's name follows from its source, prompt, answer and how often the same has come before, or
the name that its sender gave it, so that an import that was cut off, or is repeated, adds what is missing and nothing
twice. An episode of an environment is judged by acting it again. A claimed reward is recorded as
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
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias, TypeVar

from tba.errors import DeadlineExceeded, UserError
from tba.imported_answers.encoding import EncodedAnswer, Encoder
from tba.imported_answers.parsing import ImportedAnswer, parse_answer
from tba.imported_answers.report import Report, counters
from tba.protocols import AnswerScorer, Journal, Reference, Reward
from tba.tables import Refusal, Values, as_object
from tba.types import (
    Completion,
    Json,
    Judgement,
    Prompt,
    TokenScores,
    TopScores,
    Trajectory,
    are_finite,
    quote,
    teacher_arrays,
)

S = TypeVar("S")
T = TypeVar("T")
CHUNK = 1024  # lines that are graded, scored and written together
Entry: TypeAlias = tuple[int, Values | Refusal | Trajectory]


@dataclass(frozen=True)
class Candidate:
    """Holds an encoded answer that is not written yet: its line, the reward claimed and its source."""

    line: int
    uid: str
    encoded: EncodedAnswer
    claimed_reward: float | None
    provenance: Mapping[str, Json]

    @property
    def pair(self) -> tuple[Prompt, Completion]:
        return self.encoded.prompt, self.encoded.completion


@dataclass
class AnswerImporter:
    """Imports the lines of one source after another into the journal."""

    encoder: Encoder
    reward: Reward
    reference: Reference
    journal: Journal
    teachers: Sequence[AnswerScorer] = ()  # which score every answer as well
    believe: bool = False  # use claimed rewards, where there are any
    needs_behavior: bool = False  # refuse what comes without behaviour log-probabilities
    largest_reward: float = sys.float_info.max  # refuse what has a larger |reward|
    # returns episodes with their environment's judgement, or why they have none; None: a reward grades answers
    replay: Callable[[Sequence[tuple[Prompt, Completion]]], Sequence[Completion | Refusal]] | None = None
    now: Callable[[], float] = time.time
    _repeats: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def import_entries(
        self, entries: Iterable[Entry], source: str, progress: Callable[[int], None] = lambda lines: None
    ) -> Report:
        """Import all entries of one source. Raises only the journal's errors."""
        report, lines = Report(source), iter(entries)
        while chunk := list(islice(lines, CHUNK)):
            report.lines += len(chunk)
            new_candidates = self._without_imported(self._encode_chunk(chunk, report), report)
            self._grade_and_write(self._replay_episodes(new_candidates, report), report)
            progress(report.lines)
        return report

    def import_values(self, values: Iterable[Json], source: str) -> Report:
        """Import JSON values as `import_entries` does the objects of a file's lines; the first has the number 1."""
        return self.import_entries(enumerate(map(as_object, values), 1), source)

    def _encode_chunk(self, chunk: Sequence[Entry], report: Report) -> list[Candidate]:
        """Returns the candidates of entries that can be tokenised; the other entries are refused."""
        candidates = []
        for line, entry in chunk:
            candidate = self._make_candidate(line, entry, report.source)
            if isinstance(candidate, Refusal):
                report.refuse(line, candidate)
            else:
                candidates.append(candidate)
        return candidates

    def _make_candidate(self, line: int, entry: Values | Refusal | Trajectory, source: str) -> Candidate | Refusal:
        provenance: dict[str, Json] = {"searcher": f"import:{source}", "line": line}
        result: EncodedAnswer | ImportedAnswer | Refusal
        if isinstance(entry, Trajectory):
            result, claimed_reward = self.encoder.adopt(entry), entry.reward
            provenance |= {"version": str(entry.version), "was": dict(entry.provenance)}
        elif isinstance(entry, Refusal):
            return entry
        else:
            result, claimed_reward = parse_answer(entry), None
        if isinstance(result, ImportedAnswer):
            claimed_reward = result.claimed_reward
            provenance |= {} if result.source is None else {"source": result.source}
            provenance |= {"uid": result.uid} if result.uid else {}
            result = self.encoder.encode(result)
        if isinstance(result, Refusal):
            return result
        if self.needs_behavior and result.completion.log_behavior is None:
            return Refusal("no log-probabilities of its behaviour, which the run's objective needs")
        if claimed_reward is not None and math.isfinite(claimed_reward):
            provenance["claimed_reward"] = claimed_reward
        uid = self._name_candidate(source, result, provenance.get("uid", ""))
        return Candidate(line, uid, result, claimed_reward, provenance)

    def _name_candidate(self, source: str, encoded: EncodedAnswer, name: str) -> str:
        """Returns a candidate's uid, 32 hex digits: a hash of its content and of its sender's `name` of it, or without
        one of how often the same content has come before.
        """
        content = (source, encoded.prompt.key, f"{encoded.completion.digest} {encoded.completion.stop_reason}")
        if not name:
            self._repeats[content] += 1
        hashed_text = "\0".join((*content, f"uid {name}" if name else str(self._repeats[content])))
        return hashlib.blake2b(hashed_text.encode(), digest_size=16).hexdigest()

    def _without_imported(self, candidates: list[Candidate], report: Report) -> list[Candidate]:
        """Returns the candidates that are not in the journal already, nor among those before them."""
        imported_uids = self.journal.known([c.uid for c in candidates])
        new_candidates: dict[str, Candidate] = {}
        for candidate in candidates:
            if candidate.uid not in imported_uids:
                new_candidates.setdefault(candidate.uid, candidate)
        report.repeated += len(candidates) - len(new_candidates)
        return [*new_candidates.values()]

    def _replay_episodes(self, candidates: list[Candidate], report: Report) -> list[Candidate]:
        """Returns the candidates that their environment has judged."""
        if self.replay is None:
            return candidates
        pending = [c for c in candidates if c.encoded.completion.judgement is None]
        replayed = dict(zip((c.uid for c in pending), self.replay([c.pair for c in pending]), strict=True))
        acted_candidates = []
        for candidate in candidates:
            prompt, completion = candidate.encoded.prompt, replayed.get(candidate.uid, candidate.encoded.completion)
            if isinstance(completion, Completion):
                completion = self.encoder.refuse_size(prompt, completion) or completion
            if isinstance(completion, Refusal):
                report.refuse(candidate.line, completion)
            else:
                encoded = replace(candidate.encoded, completion=completion)
                acted_candidates.append(replace(candidate, encoded=encoded))
        return acted_candidates

    def _grade_and_write(self, candidates: list[Candidate], report: Report) -> None:
        """Grade, score and write candidates; only those written are counted as imported."""
        graded: list[tuple[Candidate, Judgement]] = []
        for candidate, judgement in zip(candidates, self._judgements(candidates), strict=True):
            if isinstance(judgement, Refusal):
                report.refuse(candidate.line, judgement)
            elif not abs(judgement.reward) < math.inf:  # an int may be beyond any float
                report.refuse(candidate.line, _refuse_reward("its reward is not finite", candidate, judgement))
            elif abs(judgement.reward) > self.largest_reward:
                reason = f"its reward is beyond {self.largest_reward:g}, which the loss can square"
                report.refuse(candidate.line, _refuse_reward(reason, candidate, judgement))
            else:
                graded.append((candidate, judgement))
        scores = self._score([candidate for candidate, _ in graded])
        trajectories, are_task_prompts, now = [], [], self.now()
        for (candidate, judgement), scored in zip(graded, scores, strict=True):
            if isinstance(scored, Refusal):
                report.refuse(candidate.line, scored)
            elif not all(map(are_finite, scored)):
                logs = [scores.log_T if isinstance(scores, TopScores) else scores for scores in scored]
                total = ", ".join(str(float(log_T.sum())) for log_T in logs)
                report.refuse(
                    candidate.line, Refusal(f"its log-probability under {self._scorers} is not finite", total)
                )
            else:
                trajectories.append(self._make_trajectory(candidate, judgement, scored, now))
                are_task_prompts.append(candidate.encoded.is_task_prompt)
        if trajectories:
            self.journal.put(trajectories, counters=counters(trajectories))
        for trajectory, is_task_prompt in zip(trajectories, are_task_prompts, strict=True):
            report.add(trajectory, is_task_prompt)
            self._count_claim(trajectory, report)

    @property
    def _scorers(self) -> str:
        return "the reference or a teacher" if self.teachers else "the reference"

    def _make_trajectory(
        self, candidate: Candidate, judgement: Judgement, scores: Sequence[TokenScores], now: float
    ) -> Trajectory:
        reference_scores, *teacher_scores = scores
        assert not isinstance(reference_scores, TopScores)
        is_believed = self.believe and candidate.claimed_reward is not None
        return Trajectory(
            uid=candidate.uid,
            prompt=candidate.encoded.prompt,
            completion=candidate.encoded.completion,
            reward=float(judgement.reward),
            log_reference=reference_scores,
            reference=self.reference.version,
            arrays=teacher_arrays(teacher_scores),
            reward_parts=judgement.parts,
            provenance={**candidate.provenance, "reward": "claimed" if is_believed else "task"},
            created=now,
        )

    def _judgements(self, candidates: Sequence[Candidate]) -> list[Judgement | Refusal]:
        """Returns the task's judgement of each candidate, or its claimed reward if that is believed."""
        claims = [c.claimed_reward if self.believe else None for c in candidates]
        judgements = iter(self._judge([c for c, claim in zip(candidates, claims, strict=True) if claim is None]))
        return [next(judgements) if claim is None else Judgement(claim, {"claimed": claim}) for claim in claims]

    def _judge(self, candidates: Sequence[Candidate]) -> list[Judgement | Refusal]:
        return _call_in_halves(
            candidates,
            lambda part: self.reward.judge([c.pair for c in part]),
            "the task's reward cannot grade it",
        )

    def _score(self, candidates: Sequence[Candidate]) -> list[tuple[TokenScores, ...] | Refusal]:
        return _call_in_halves(candidates, self._score_by_prompt, f"{self._scorers} cannot score it")

    def _score_by_prompt(self, candidates: Sequence[Candidate]) -> list[tuple[TokenScores, ...]]:
        """Returns the scores of each candidate under the reference and every teacher, in order.

        Equal answers are scored once.
        """
        by_prompt: dict[str, tuple[Prompt, dict[str, Completion]]] = {}
        for prompt, completion in (c.pair for c in candidates):
            by_prompt.setdefault(prompt.key, (prompt, {}))[1].setdefault(completion.digest, completion)
        answers = [(prompt, list(completions.values())) for prompt, completions in by_prompt.values()]
        logs: dict[tuple[str, str], tuple[TokenScores, ...]] = {}
        for scorer in (self.reference, *self.teachers):
            for (prompt, completions), rows in zip(answers, scorer.log_probabilities_of(answers), strict=True):
                for completion, row in zip(completions, rows, strict=True):
                    key = prompt.key, completion.digest
                    logs[key] = (*logs.get(key, ()), row)
        return [logs[prompt.key, completion.digest] for prompt, completion in (c.pair for c in candidates)]

    def _count_claim(self, trajectory: Trajectory, report: Report) -> None:
        """Count whether a trajectory's claimed reward is the one that it got."""
        claimed_reward = trajectory.provenance.get("claimed_reward")
        if claimed_reward is not None:
            report.claimed += 1
            report.disagreed += not math.isclose(claimed_reward, trajectory.reward, rel_tol=1e-6, abs_tol=1e-9)


def _call_in_halves(items: Sequence[S], act: Callable[[Sequence[S]], Sequence[T]], reason: str) -> list[T | Refusal]:
    """Calls `act` on all items at once; where that fails, on either half, down to single items, which are refused.

    Raises `DeadlineExceeded` if `act` does: a call that hangs would hang again.
    """
    if not items:
        return []
    try:
        results = list(act(items))
        if len(results) != len(items):
            raise UserError(f"{len(items)} answers were given and {len(results)} results came back")
    except DeadlineExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - foreign text may upset anything: what does is refused, with the error
        if len(items) == 1:
            return [Refusal(reason, _describe_error(error))]
        middle = len(items) // 2
        return _call_in_halves(items[:middle], act, reason) + _call_in_halves(items[middle:], act, reason)
    return [*results]


def _refuse_reward(reason: str, candidate: Candidate, judgement: Judgement) -> Refusal:
    prompt, completion = candidate.pair
    return Refusal(reason, f"{judgement} for {quote(completion.text, 80)} to {quote(prompt.text, 80)}")


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
