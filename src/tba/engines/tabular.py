"""Sampling from a tabular policy, exactly; and whole judged groups of it, for tests of everything else.

Invariant: `log_behavior` is the log-probability under the very table a token was drawn from, after temperature and
top-p and renormalised; the stream of `rng` and the weights decide every token.

Shape legend: Q prompts, N nodes, V next tokens, B rows, T positions (as in `tba.policy.tabular`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tba.policy.tabular import EOS, TabularReference, TabularTask, TabularTokenizer, checked
from tba.protocols import Engine, Partner, Reference, Turn
from tba.types import Completion, Group, IntArray, Prompt, Sampling, Split, StopReason, Trajectory, Version

Table = npt.NDArray[np.float64]
_ROWS = 64  # answers that a flow grows at the same time, or those of one prompt


class TabularEngine:
    """Samples from logits by prompt, prefix and next token; starts with those of the task's reference."""

    def __init__(self, task: TabularTask, version: Version = Version()) -> None:  # noqa: B008 - frozen
        self.task = task
        self._version = version
        self._logits_QNV: Table = task.reference_logits_QNV.copy()
        self._tokenizer = TabularTokenizer(task.symbols)

    @property
    def version(self) -> Version:
        return self._version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` in. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        self._logits_QNV[:] = checked(weights, self._logits_QNV.shape).detach().cpu().numpy()
        self._version = version

    def generate(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        interrupted: Callable[[], bool] | None = None,
    ) -> list[list[Completion]]:
        """Samples `count` completions of each prompt, position by position; `interrupted` is asked before each.

        After its letter a prompt may have symbols: an answer that was begun, which is continued.
        """
        asked = np.array([self.task.question(p) for p in prompts for _ in range(count)], dtype=np.int64)
        log_behavior_QNV = log_behavior(self._logits_QNV, sampling)
        tokens_BT = np.zeros((len(asked), self.task.length), dtype=np.int32)
        log_behavior_BT = np.zeros(tokens_BT.shape, dtype=np.float32)
        length_B = np.zeros(len(asked), dtype=np.int64)
        begun = [self.task.begun(p) for p in prompts]
        node_B = np.repeat([self.task.outcome(symbols) for symbols in begun], count)
        room_B = self.task.length - np.repeat([len(symbols) for symbols in begun], count)
        live = np.arange(len(asked))  # the rows without an EOS, and with room
        for t in range(self.task.length):
            live = live[room_B[live] > t]
            if not live.size or (interrupted is not None and interrupted()):
                break
            log_p_BV = log_behavior_QNV[asked[live], node_B[live]]
            drawn = _draw(np.exp(log_p_BV), rng)
            tokens_BT[live, t] = drawn
            log_behavior_BT[live, t] = log_p_BV[np.arange(len(live)), drawn]
            length_B[live] = t + 1
            node_B[live] = node_B[live] * self.task.symbols + drawn
            live = live[drawn != EOS]
        answers: list[list[Completion]] = []
        for i in range(len(prompts)):
            rows = [b for b in range(i * count, (i + 1) * count) if length_B[b]]
            answers.append(
                [
                    self.completion(
                        tokens_BT[b, : length_B[b]], log_behavior_BT[b, : length_B[b]], int(room_B[b]), sampling
                    )
                    for b in rows
                ]
            )
        return answers

    def flow(self, count: int, sampling: Sampling, rng: np.random.Generator) -> TabularFlow:
        """Returns what answers prompts for as long as some are submitted. See `protocols.Flowing`."""
        return TabularFlow(self, count, sampling, rng)

    def converse(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        partner: Partner,
        interrupted: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yields completions of which every sampled symbol is a turn; at an EOS, and at the longest, nothing follows.

        See `protocols.Conversing`. What the partner says are symbols too: nodes of the same tree.
        """
        log_behavior_QNV = log_behavior(self._logits_QNV, sampling)
        growing = [
            _Growing(i, prompt, self.task.begun(prompt))
            for i, prompt in enumerate(p for p in prompts for _ in range(count))
        ]
        ended: list[list[Completion]] = [[] for _ in prompts]
        going_on = growing
        while going_on and not (interrupted is not None and interrupted()):
            nodes = [self.task.outcome([*row.begun, *row.tokens]) for row in going_on]
            questions = [self.task.question(row.prompt) for row in going_on]
            log_p_RV = log_behavior_QNV[questions, nodes]
            for row, token, log_p_V in zip(going_on, _draw(np.exp(log_p_RV), rng).tolist(), log_p_RV, strict=True):
                row.append([token], [log_p_V[token]], True)
            partner.hear(
                [
                    Turn(
                        row.request,
                        self._tokenizer.decode(row.tokens[-1:]),
                        StopReason.EOS if row.tokens[-1] == EOS else StopReason.STOP_STRING,
                        0 if row.tokens[-1] == EOS else self.task.length - len(row.begun) - len(row.tokens),
                    )
                    for row in going_on
                ]
            )
            heard: dict[int, IntArray | None] = {}
            while len(heard) < len(going_on):
                heard |= partner.replies(wait=True)
            going_on = [row for row in going_on if row.takes(heard[row.request], self.task.length - len(row.begun))]
        for row in growing:
            if row.tokens:
                completion = replace(
                    self.completion(
                        np.array(row.tokens, np.int32),
                        np.array(row.log_behavior, np.float32),
                        self.task.length - len(row.begun),
                        sampling,
                    ),
                    stop_reason=row.stop_reason,
                    mask=np.array(row.mask) if not all(row.mask) else None,
                )
                ended[row.request // count].append(partner.ended(row.request, completion))
        yield from enumerate(ended)

    def completion(
        self, tokens: npt.NDArray[np.int32], log_behavior: npt.NDArray[np.float32], room: int, sampling: Sampling
    ) -> Completion:
        if tokens[-1] == EOS:
            stop_reason = StopReason.EOS
        else:
            stop_reason = StopReason.LENGTH if len(tokens) == room else StopReason.INTERRUPTED
        return Completion(
            tokens=tokens.copy(),
            text=self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
            stop_reason=stop_reason,
            versions=(self._version, self._version),
            sampling=sampling,
            log_behavior=log_behavior.copy(),
        )


class TabularFlow:
    """Grows all answers by a symbol at a time: each is drawn from the table that the engine has then, so an answer that
    is begun is continued by newer weights.
    """

    def __init__(self, engine: TabularEngine, count: int, sampling: Sampling, rng: np.random.Generator) -> None:
        self._engine, self._count, self._sampling, self._rng = engine, count, sampling, rng
        self._growing: dict[int, list[_Growing]] = {}  # by number of its prompt
        self.submitted = 0

    @property
    def wanted(self) -> int:
        """As many as have answers that grow in `_ROWS` rows."""
        free = _ROWS - sum(not row.ended for rows in self._growing.values() for row in rows)
        return max(0, free) // self._count if self._growing else max(1, free // self._count)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self._growing[self.submitted] = [_Growing(i, prompt) for i in range(self._count)]
            self.submitted += 1

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_wanted: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """See `protocols.Flow`."""
        done: list[int] = []
        while self._growing and not done and not (until_wanted and self.wanted):
            if interrupted is not None and interrupted():
                done = list(self._growing)
                break
            self._grow([row for rows in self._growing.values() for row in rows if not row.ended])
            done = [number for number, rows in self._growing.items() if all(row.ended for row in rows)]
        return [(number, self._completions(self._growing.pop(number))) for number in done]

    def _grow(self, rows: Sequence[_Growing]) -> None:
        task, version = self._engine.task, self._engine.version
        questions = [task.question(row.prompt) for row in rows]
        nodes = [task.outcome([*task.begun(row.prompt), *row.tokens]) for row in rows]
        log_p_RV = log_behavior(self._engine._logits_QNV, self._sampling)[questions, nodes]
        for row, token, log_p_V in zip(rows, _draw(np.exp(log_p_RV), self._rng).tolist(), log_p_RV, strict=True):
            row.append([token], [log_p_V[token]], True)
            row.versions = (row.versions[0] if row.versions else version, version)
            row.ended = token == EOS or len(row.tokens) == task.length - len(task.begun(row.prompt))

    def _completions(self, rows: Sequence[_Growing]) -> list[Completion]:
        """Of those that have a symbol."""
        found = []
        for row in rows:
            if row.versions:
                room = self._engine.task.length - len(self._engine.task.begun(row.prompt))
                tokens, log_behavior = np.array(row.tokens, np.int32), np.array(row.log_behavior, np.float32)
                completion = self._engine.completion(tokens, log_behavior, room, self._sampling)
                found.append(replace(completion, versions=row.versions))
        return found


@dataclass
class _Growing:
    """A completion, so far."""

    request: int
    prompt: Prompt
    begun: list[int] = field(default_factory=list)  # the part of an answer that the prompt ends with
    tokens: list[int] = field(default_factory=list)
    log_behavior: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    stop_reason: StopReason = StopReason.INTERRUPTED
    versions: tuple[Version, Version] | None = None  # the first and the last that have sampled it
    ended: bool = False

    def append(self, tokens: Sequence[int], log_behavior: Sequence[float], sampled: bool) -> None:
        self.tokens += tokens
        self.log_behavior += log_behavior
        self.mask += [sampled] * len(tokens)

    def takes(self, heard: IntArray | None, length: int) -> bool:
        """Whether it goes on after what the partner has said."""
        if heard is not None and self.tokens[-1] != EOS and len(self.tokens) + len(heard) < length:
            self.append(heard.tolist(), [0.0] * len(heard), False)
            return True
        at_its_end = heard is None or self.tokens[-1] == EOS
        self.stop_reason = StopReason.EOS if at_its_end else StopReason.LENGTH
        return False


def log_behavior(logits: Table, sampling: Sampling) -> Table:
    """[..., V]: log-probabilities after temperature and top-p, renormalised; -inf where nothing is ever drawn.

    Temperature 0 is greedy. Top-p keeps the fewest most probable tokens that hold at least that mass.
    """
    if sampling.temperature == 0:
        greedy = np.arange(logits.shape[-1]) == logits.argmax(-1)[..., None]
        return np.where(greedy, 0.0, -np.inf)
    log_p = _log_softmax(logits / sampling.temperature)
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
) -> list[Group]:
    """One judged group of `count` trajectories for each prompt: a searcher's round in its plainest form.

    Sampled from the task's reference policy unless an engine is given.
    """
    engine = TabularEngine(task) if engine is None else engine
    reference = TabularReference(task) if reference is None else reference
    groups = []
    for prompt, completions in zip(prompts, engine.generate(prompts, count, sampling, rng), strict=True):
        log_references = reference.log_probabilities(prompt, completions)
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


def _draw(p_BV: Table, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """One token of each row, by inverting its cumulative distribution; never one of probability 0."""
    cumulative_BV = np.cumsum(p_BV, 1)
    below_B1 = rng.random((len(p_BV), 1)) * cumulative_BV[:, -1:]
    drawn: npt.NDArray[np.int64] = (cumulative_BV > below_B1).argmax(1)
    return drawn


def _log_softmax(logits: Table) -> Table:
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: Table = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised
