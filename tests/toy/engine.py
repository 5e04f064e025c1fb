"""Sampling from a tabular policy, exactly; and whole judged groups of it, for tests of everything else.

Invariant: `log_behavior` is the log-probability under the very table a token was drawn from, after temperature and
top-p and renormalised; the stream of `rng` and the weights decide every token.

Shape legend: Q prompts, N nodes, V next tokens, B rows, T positions (as in `toy.policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tba.errors import UserError
from tba.generation import generate
from tba.protocols import Engine, Partner, Reference, Turn
from tba.types import Completion, Group, IntArray, Prompt, Sampling, Split, StopReason, Trajectory, Version
from toy.policy import EOS, TabularReference, TabularTask, TabularTokenizer, checked

Table = npt.NDArray[np.float64]
_ROWS = 64  # answers that a flow grows at the same time, or those of one prompt


class TabularEngine:
    """Samples from logits by prompt, prefix and next token; starts with those of the task's reference."""

    def __init__(self, task: TabularTask, version: Version = Version()) -> None:  # noqa: B008 - frozen
        self.task = task
        self._version = version
        self.logits_QNV: Table = task.reference_logits_QNV.copy()
        self.tokenizer = TabularTokenizer(task.symbols)

    @property
    def version(self) -> Version:
        return self._version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` in. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        self.logits_QNV[:] = checked(weights, self.logits_QNV.shape).detach().cpu().numpy()
        self._version = version

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> TabularFlow:
        """Returns what answers prompts for as long as some are submitted. See `protocols.Engine`.

        After its letter a prompt may have symbols: an answer that was begun, which is continued. With a partner every
        sampled symbol is a turn, and what it says are symbols too: nodes of the same tree.
        """
        if sampling.repetition_penalty != 1:
            raise UserError("the tabular engine has no repetition penalty: leave it out, or choose another model")
        return TabularFlow(self, count, sampling, rng, partner)


class TabularFlow:
    """Grows all answers by a symbol at a time, in the order of prompts; `interrupted` is asked before each."""

    def __init__(
        self, engine: TabularEngine, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None
    ) -> None:
        self._engine, self._count, self._sampling, self._rng = engine, count, sampling, rng
        self._partner = partner
        self._growing: dict[int, list[_Growing]] = {}  # by number of its prompt
        self.prompts_submitted = 0

    @property
    def prompts_needed(self) -> int:
        """As many as have answers that grow in `_ROWS` rows."""
        free = _ROWS - sum(row.reason is None for rows in self._growing.values() for row in rows)
        return max(0 if self._growing else 1, free // max(1, self._count))

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts. Raises `ValueError` for one that is none of the task's, and then adds none."""
        task = self._engine.task
        begun = [(task.question(prompt), task.begun(prompt)) for prompt in prompts]
        for question, symbols in begun:
            self._growing[self.prompts_submitted] = [
                _Growing(
                    self.prompts_submitted * self._count + j,
                    question,
                    task.outcome(symbols),
                    task.length - len(symbols),
                )
                for j in range(self._count)
            ]
            self.prompts_submitted += 1

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """See `protocols.Flow`."""
        while not (done := self._done()) and self._growing and not (until_needed and self.prompts_needed):
            if interrupted is not None and interrupted():
                done = list(self._growing)
                break
            self._grow([row for rows in self._growing.values() for row in rows if row.reason is None])
        return [(number, [self._completion(r) for r in self._growing.pop(number) if r.tokens]) for number in done]

    def cancel(self, request: int) -> None:
        """See `protocols.Flow`."""
        for row in self._growing.get(request // self._count, []):
            if row.request == request and row.reason is None:
                row.reason = StopReason.INTERRUPTED
                if not row.tokens:
                    self._completion(row)

    def _done(self) -> list[int]:
        return [number for number, rows in self._growing.items() if all(row.reason for row in rows)]

    def _grow(self, rows: Sequence[_Growing]) -> None:
        nodes = [row.question for row in rows], [row.node for row in rows]
        log_p_RV = log_behavior(self._engine.logits_QNV[nodes], self._sampling)
        for row, token, log_p_V in zip(rows, drawn(np.exp(log_p_RV), self._rng).tolist(), log_p_RV, strict=True):
            row.sample(token, log_p_V[token], self._engine)
        heard: dict[int, IntArray | None] = {}
        if self._partner is not None:
            self._partner.hear([row.turn(self._engine.tokenizer.decode(row.tokens[-1:])) for row in rows])
            while any(row.request not in heard and row.reason is not StopReason.INTERRUPTED for row in rows):
                heard |= self._partner.replies(wait=True)
            for row in rows:
                if row.reason is not StopReason.INTERRUPTED:
                    row.hear(heard[row.request], self._engine.task)

    def _completion(self, row: _Growing) -> Completion:
        tokens = np.array(row.tokens, np.int32)
        completion = Completion(
            tokens=tokens,
            text=self._engine.tokenizer.decode(row.tokens, skip_special_tokens=True),
            stop_reason=row.reason or StopReason.INTERRUPTED,
            versions=row.versions or (self._engine.version, self._engine.version),
            sampling=self._sampling,
            log_behavior=np.array(row.log_behavior, np.float32),
            mask=None if all(row.mask) else np.array(row.mask),
        )
        return completion if self._partner is None else self._partner.ended(row.request, completion)


@dataclass
class _Growing:
    """An answer, so far."""

    request: int
    question: int
    node: int
    room: int  # tokens that it has at most
    tokens: list[int] = field(default_factory=list)
    log_behavior: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    versions: tuple[Version, Version] | None = None  # the first and the last that have sampled it
    reason: StopReason | None = None  # why it has ended

    def __post_init__(self) -> None:
        if self.room <= 0:
            self.reason = StopReason.LENGTH

    def sample(self, token: int, log_p: float, engine: TabularEngine) -> None:
        """Take a token that was drawn."""
        self.versions = (self.versions[0] if self.versions else engine.version, engine.version)
        self._append([token], log_p, True, engine.task)
        if token == EOS:
            self.reason = StopReason.EOS
        elif len(self.tokens) == self.room:
            self.reason = StopReason.LENGTH

    def turn(self, text: str) -> Turn:
        """Returns the token that was drawn as a turn."""
        ended = self.reason is StopReason.EOS
        room = 0 if ended else self.room - len(self.tokens)
        return Turn(self.request, text, StopReason.EOS if ended else StopReason.STOP_STRING, room)

    def hear(self, said: IntArray | None, task: TabularTask) -> None:
        """Take what the partner says; it has ended where there is nothing, or no room behind it."""
        if said is None:
            self.reason = StopReason.EOS
        elif self.reason is None and len(self.tokens) + len(said) < self.room:
            self._append(said.tolist(), 0.0, False, task)
        else:
            self.reason = self.reason or StopReason.LENGTH

    def _append(self, tokens: Sequence[int], log_p: float, sampled: bool, task: TabularTask) -> None:
        self.tokens += tokens
        self.log_behavior += [log_p] * len(tokens)
        self.mask += [sampled] * len(tokens)
        for token in tokens:
            self.node = self.node if token == EOS else self.node * task.symbols + token


def log_behavior(logits: Table, sampling: Sampling) -> Table:
    """[..., V]: log-probabilities after temperature, min-p, top-k and top-p, renormalised; -inf where nothing is drawn.

    Temperature 0 is greedy. Top-p keeps the fewest most probable tokens that hold at least that mass.
    """
    if sampling.temperature == 0:
        greedy = np.arange(logits.shape[-1]) == logits.argmax(-1)[..., None]
        return np.where(greedy, 0.0, -np.inf)
    log_p = _log_softmax(logits / sampling.temperature)
    if sampling.min_p:
        log_p = np.where(log_p < log_p.max(-1, keepdims=True) + np.log(sampling.min_p), -np.inf, log_p)
    if sampling.top_k:
        place = np.argsort(np.argsort(-log_p, axis=-1, kind="stable"), axis=-1)
        log_p = np.where(place < sampling.top_k, log_p, -np.inf)
    log_p = _log_softmax(log_p) if sampling.min_p or sampling.top_k else log_p
    if sampling.top_p < 1:
        order = np.argsort(-log_p, axis=-1, kind="stable")
        p_sorted = np.exp(np.take_along_axis(log_p, order, -1))
        before = np.cumsum(p_sorted, -1) - p_sorted  # the mass of the more probable ones
        kept = np.zeros(log_p.shape, dtype=np.bool_)
        np.put_along_axis(kept, order, before < sampling.top_p, -1)
        log_p = _log_softmax(np.where(kept, log_p, -np.inf))
    return log_p


def tabular_prompts(task: TabularTask, split: Split = "train") -> list[Prompt]:
    """The prompts of a split, tokenised as a prompt stream does it."""
    tokenizer = TabularTokenizer(task.symbols)
    texts = [problem.prompt for problem in task.problems(split)]
    return [Prompt(task.name, np.array(tokenizer.encode(str(text)), dtype=np.int32), str(text)) for text in texts]


def sample_groups(
    task: TabularTask,
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    rng: np.random.Generator,
    engine: Engine | None = None,
    reference: Reference | None = None,
    interrupted: Callable[[], bool] | None = None,
) -> list[Group]:
    """One judged group of `count` trajectories for each prompt: a searcher's round in its plainest form.

    Sampled from the task's reference policy unless an engine is given.
    """
    engine = TabularEngine(task) if engine is None else engine
    reference = TabularReference(task) if reference is None else reference
    groups, answered = [], generate(engine, prompts, count, sampling, rng, interrupted=interrupted)
    for prompt, completions in zip(prompts, answered, strict=True):
        (log_references,) = reference.log_probabilities_of([(prompt, completions)])
        judgements = task.reward().judge([(prompt, c) for c in completions])
        groups.append(
            Group.of(
                [
                    Trajectory(rng.bytes(8).hex(), prompt, c, judgement.reward, log_reference, reference.version)
                    for c, log_reference, judgement in zip(completions, log_references, judgements, strict=True)
                ]
            )
        )
    return groups


def drawn(p_BV: Table, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """One token of each row, by inverting its cumulative distribution; never one of probability 0."""
    cumulative_BV = np.cumsum(p_BV, 1)
    below_B1 = rng.random((len(p_BV), 1)) * cumulative_BV[:, -1:]
    token_B: npt.NDArray[np.int64] = (cumulative_BV > below_B1).argmax(1)
    return token_B


def _log_softmax(logits: Table) -> Table:
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: Table = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised
