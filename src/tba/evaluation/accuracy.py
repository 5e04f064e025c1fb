"""Accuracy: how many held-out problems one version of the weights answers correctly.

Invariant: a figure is over all the problems asked for, or it is not reported: an interrupted evaluation leaves no
figure over some other set of problems. Its seconds and tokens are counted here, apart from generation for training.

Metrics: `pass@1/greedy`; `pass@1/sampled` at the training temperature; `pass@K/sampled`, unbiased, K a number, from the
same draws. It consumes an engine and a reward, and waits for nothing; `interrupted` ends it between and within chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.evaluation.estimators import GREEDY, SAMPLED, pass_at_k
from tba.fields import BY_CODE, as_declared
from tba.generation import generate
from tba.grading import Grade, Grader
from tba.protocols import Engine, Reward
from tba.types import Completion, Evaluation, Prompt, Sampling, StopReason, Version

_SHORT_WAIT_SECONDS, _LONG_WAIT_SECONDS = 0.001, 0.5


@dataclass(frozen=True)
@as_declared
class EvaluationSettings:
    """Says what is measured on the held-out split, and when. Raises `UserError` when a field makes no sense."""

    every: int = 0  # trainer steps between evaluations during the run; 0: only before and after
    problems: int = 200  # how many held-out problems, from the first; 0: all
    problems_during: int = 0  # how many during the run, without pass@K; 0: as many as before and after
    greedy: bool = True  # measure pass@1/greedy
    samples: int = 1  # draws per problem for pass@1/sampled; 0: not measured, unless pass_k asks for draws
    pass_k: int = 0  # K of pass@K/sampled, at least K draws per problem; 0: not measured
    temperature: float | None = None  # temperature of the draws; None: the recipe's policy temperature
    threshold: float = 1.0  # an answer is correct if its reward is at least this
    batch_size: int = 64  # problems answered at a time; between two of these a searcher makes a round
    logged_problems: int = field(default=5, metadata=BY_CODE)  # problems whose answers are kept for reading

    def __post_init__(self) -> None:
        for name in ("every", "problems", "problems_during", "samples", "pass_k", "logged_problems"):
            if getattr(self, name) < 0:
                raise UserError(f"evaluation: {name} must not be negative, but is {getattr(self, name)}.")
        if self.batch_size < 1:
            raise UserError(f"evaluation: batch_size must be at least 1, but is {self.batch_size}.")
        if self.pass_k == 1:
            raise UserError("evaluation: pass_k = 1 is pass@1/sampled; ask for it with samples, or set pass_k to 2.")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise UserError(f"evaluation: temperature must be positive, but is {self.temperature}; greedy is its own.")
        if not math.isfinite(self.threshold):
            raise UserError(f"evaluation: threshold is {self.threshold}: give the least reward of a correct answer.")
        if not self.greedy and self.draws == 0:
            raise UserError("evaluation: nothing to measure; set greedy, samples or pass_k.")
        if self.every and self.problems_during and not self.greedy and not self.samples:
            raise UserError("evaluation: of problems_during pass@K is not measured; set greedy or samples too.")

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect: while nothing is evaluated during the run, or no answers are sampled."""
        unused_fields = {} if self.every else {"problems_during": "every"}
        return unused_fields if self.draws else unused_fields | {"temperature": "samples"}

    @property
    def draws(self) -> int:
        """Returns the number of sampled answers per problem."""
        return max(self.samples, self.pass_k)

    def during(self) -> EvaluationSettings:
        """Returns the settings of evaluations during the run."""
        if not self.problems_during:
            return self
        return replace(self, problems=self.problems_during, problems_during=0, pass_k=0)


@dataclass(frozen=True, slots=True)
class AssessedAnswer:
    """Holds one problem and its answer, for people to read."""

    prompt: str
    completion: str
    reward: float
    correct: bool
    metric: str  # GREEDY or SAMPLED: how it was drawn


@dataclass(frozen=True)
class Assessment:
    """Holds all results of one evaluation of one version, and its cost."""

    version: Version
    wall_seconds: float  # since the run began, when it was begun: the weights were this good by then
    evaluations: tuple[Evaluation, ...]
    answers: tuple[AssessedAnswer, ...]  # of the first few problems; greedy ones if greedy was measured
    scores: Mapping[str, npt.NDArray[np.float64]]  # metric -> [problems] in order, for paired intervals
    seconds: float
    tokens: int  # generated, those of unfinished answers included: the ledger's `evaluation`
    trajectories: int
    interrupted: bool = False


def assess_accuracy(
    engine: Engine,
    prompts: Sequence[Prompt],
    reward: Reward,
    settings: EvaluationSettings,
    rng: np.random.Generator,
    *,
    now: Callable[[], float],
    policy_temperature: float = 1.0,
    interrupted: Callable[[], bool] | None = None,
    between_batches: Callable[[], None] | None = None,
) -> Assessment:
    """Measure the engine's present weights on the first `settings.problems` of `prompts`.

    `now()` gives seconds since the run began. `interrupted()` is asked between chunks, and by the engine within one.
    `between_batches()` is called after each chunk but the last, may use the engine, and leaves it as it was.
    Raises `UserError` when there are no prompts.
    """
    problems = prompts[: settings.problems] if settings.problems else prompts
    if not problems:
        raise UserError("evaluation: the held-out split is empty; give the task evaluation problems.")
    version, start_seconds = engine.version, now()
    temperature = policy_temperature if settings.temperature is None else settings.temperature
    plan = [(GREEDY, 1, Sampling(0.0))] if settings.greedy else []
    if settings.draws:
        plan.append((SAMPLED, settings.draws, Sampling(temperature)))
    grader = reward if isinstance(reward, Grader) else Grader(reward)
    examiner = _ProblemRound(engine, grader, settings, rng, now, interrupted, between_batches)
    scores: dict[str, npt.NDArray[np.float64]] = {}
    evaluations: list[Evaluation] = []
    for metric, count, sampling in plan:
        seconds, tokens = examiner.seconds, examiner.tokens
        correct = examiner.draw(problems, metric, count, sampling)
        if correct is None:
            break
        cost = (examiner.seconds - seconds, examiner.tokens - tokens)
        for name, values in _scores(metric, correct, settings).items():
            scores[name] = values
            evaluations.append(Evaluation(version, start_seconds, name, float(values.mean()), len(problems), *cost))
            cost = (0.0, 0)  # figures of the same draws: the first is charged for them
    return Assessment(
        version=version,
        wall_seconds=start_seconds,
        evaluations=tuple(evaluations),
        answers=tuple(examiner.answers),
        scores=scores,
        seconds=examiner.seconds,
        tokens=examiner.tokens,
        trajectories=examiner.trajectories,
        interrupted=examiner.is_stopped,
    )


@dataclass
class _ProblemRound:
    """Gives problems to an engine, grades the answers and counts what that cost."""

    engine: Engine
    grader: Grader
    settings: EvaluationSettings
    rng: np.random.Generator
    now: Callable[[], float]
    interrupted: Callable[[], bool] | None
    between_batches: Callable[[], None] | None
    answers: list[AssessedAnswer] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    trajectories: int = 0
    is_stopped: bool = False
    grades: list[Grade] = field(default_factory=list)  # those that have come back
    submitted_count: int = 0

    def draw(
        self, prompts: Sequence[Prompt], metric: str, count: int, sampling: Sampling
    ) -> npt.NDArray[np.bool_] | None:
        """Returns which of `count` answers to each prompt are correct, [problems, draws]; None where interrupted.

        Chunks are graded while the next ones are generated, and while `between` does something else.
        """
        chunks: list[tuple[Sequence[Prompt], list[list[Completion]], list[list[Grade]]]] = []
        shown_count = 0 if self.answers else self.settings.logged_problems
        for start in range(0, len(prompts), self.settings.batch_size):
            if self.between_batches is not None and self.trajectories:
                self.between_batches()
            start_seconds = self.now()
            if self.interrupted is not None and self.interrupted():
                self.is_stopped = True
                return None
            chunk = prompts[start : start + self.settings.batch_size]
            rows = generate(self.engine, chunk, count, sampling, self.rng, self.interrupted)
            self.tokens += sum(len(c.tokens) for row in rows for c in row)
            self.trajectories += sum(len(row) for row in rows)
            if any(len(row) < count or any(c.stop_reason is StopReason.INTERRUPTED for c in row) for row in rows):
                self.is_stopped = True
                return None
            chunks.append((chunk, rows, self._submit(chunk, rows)))
            self.seconds += self.now() - start_seconds
        if not self._all_graded():
            return None
        correct_rows: list[list[bool]] = []
        for chunk, rows, grades in chunks:
            answers = self._answers(chunk, rows, grades, metric)
            self.answers += [row[0] for row in answers[: max(0, shown_count - len(correct_rows))]]
            correct_rows += [[answer.correct for answer in row] for row in answers]
        return np.array(correct_rows, dtype=np.bool_)

    def _submit(self, prompts: Sequence[Prompt], rows: Sequence[Sequence[Completion]]) -> list[list[Grade]]:
        answers = list(zip(prompts, rows, strict=True))
        grades = self.grader.submit(answers, self.grades, is_urgent=True, with_scores=False)
        self.submitted_count += sum(map(len, grades))
        self.grader.wait(_SHORT_WAIT_SECONDS)  # most rewards are done by then
        return grades

    def _all_graded(self) -> bool:
        """Wait until all answers are graded; returns False where that is interrupted."""
        while len(self.grades) < self.submitted_count:
            start_seconds = self.now()
            if self.interrupted is not None and self.interrupted():
                self.is_stopped = True
                return False
            self.grader.wait(_LONG_WAIT_SECONDS)
            self.seconds += self.now() - start_seconds
            if self.between_batches is not None and len(self.grades) < self.submitted_count:
                self.between_batches()
        return True

    def _answers(
        self,
        prompts: Sequence[Prompt],
        completion_rows: Sequence[Sequence[Completion]],
        grades: Sequence[Sequence[Grade]],
        metric: str,
    ) -> list[list[AssessedAnswer]]:
        """Returns answers with their rewards; one that was not graded in time has none, and is not correct."""
        rows = []
        for prompt, completions, row in zip(prompts, completion_rows, grades, strict=True):
            rewards = [math.nan if g.judgement is None else float(g.judgement.reward) for g in row]
            rows.append(
                [
                    AssessedAnswer(prompt.text, c.text, reward, reward >= self.settings.threshold, metric)
                    for c, reward in zip(completions, rewards, strict=True)
                ]
            )
        return rows


def _scores(
    metric: str, correct: npt.NDArray[np.bool_], settings: EvaluationSettings
) -> dict[str, npt.NDArray[np.float64]]:
    """Returns one score per problem by metric, from `correct` [problems, draws]."""
    scores = {}
    if metric == GREEDY or settings.samples:
        scores[metric] = correct.mean(axis=1)
    if metric == SAMPLED and settings.pass_k:
        n, k = correct.shape[1], settings.pass_k
        scores[f"pass@{k}/sampled"] = np.array([pass_at_k(n, int(c), k) for c in correct.sum(axis=1)])
    return scores
