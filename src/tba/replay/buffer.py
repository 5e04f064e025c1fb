"""The replay buffer: the trajectories in the trainer's memory, by prompt. Over capacity the oldest leave by default.

Invariant: every trajectory that was added is exactly one of trained (used at least once), waiting (in memory, never
used), evicted (removed by the capacity rule, never used) or duplicate (replaced by a copy or a near one, never used),
each counted when it happens; what the source has on record and could not give is evicted or damaged. Only trajectories
of the current reference can be sampled. One with an older reference keeps its position, its uses and its place in the
order of eviction, and can be sampled once it has been rescored; until then it counts as waiting, unless it was used.

"Newer" and "recent" are by arrival, the one order on which all searchers agree; only copies are compared by their
weights. What is kept follows from what arrived, its rewards and its weights alone, in order, so that a buffer that is
rebuilt is the same. With `keep_recent` a trajectory that is no longer kept stays in the recent index only.

No operation loops over the whole buffer, except a change of reference. Where near duplicates or the lowest reward are
searched, numpy reads some columns from end to end, and likewise those of a prompt where its newest rows are needed.
Trajectories are stored in arrays (`columns`), and become objects when they are asked for. Beyond `memory_gb` the oldest
are read from the source again.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.fields import as_declared
from tba.replay.codec import StoredTrajectory
from tba.replay.columns import Answers, LostRow, TrajectoryTable
from tba.replay.prompt_index import Listing, NewestPrompts, PromptIndex
from tba.types import IntArray, Score, Trajectory, Version

_FIRST = Version()
# Bytes of a trajectory: for each token its number, two log-probabilities and 5 of text; its facts; and its row with all
# indexes. 30,000 of 4 and of 512 tokens took 957 and 9,569 each.
TOKEN_BYTES, BODY_BYTES, _ROW_BYTES = 17, 320, 570
_DUPLICATE, _EVICTED, _DAMAGED = 1, 2, 3  # how a row left what is kept
# how one left that was never used, in `Buffer.fates`
UNUSED_FATES = {-_DUPLICATE: "duplicate", -_EVICTED: "evicted", -_DAMAGED: "damaged"}


class NeighbourIndex(Protocol):
    """Finds near duplicates of a new trajectory among the rows that are kept."""

    def of(self, stored: StoredTrajectory) -> npt.NDArray[np.intp]:
        """Returns the rows whose answers nearly equal this one to the same prompt."""

    def add(self, row: int, stored: StoredTrajectory) -> None:
        """Add a row, which must not be there yet."""

    def remove(self, row: int, prompt: str) -> None:
        """Remove a row of a prompt (by its key), which must be there."""


class NearSettings(Protocol):
    """Settings that say which answers to one prompt are nearly the same, and which of them stays.

    `NearDuplicates` in `apps/red_team/near.py` is one.
    """

    @property
    def keep(self) -> Literal["better", "newer"]:
        """Says which of two stays: the one with the higher reward (in a tie the earlier), or the newer."""

    def start(self, tokens: Callable[[int], IntArray]) -> NeighbourIndex:
        """Returns an index without rows; `tokens` gives the tokens of a row."""


@dataclass(frozen=True)
@as_declared
class BufferSettings:
    """Limits what the replay buffer in the trainer's memory holds. Raises `UserError` when a field makes no sense."""

    per_prompt: int = 100  # most trajectories of one prompt (paper: 100)
    total: int = 100_000  # most trajectories in all (paper, red-teaming: 100k to 150k)
    memory_gb: float = 4.0  # memory for their tokens, 10^9 bytes; beyond it the oldest are read from the journal
    deduplicate: bool = True  # of equal completions to a prompt keep the one of the newest weights (paper); off: keep
    # all, for short answers, where a prompt has fewer than K distinct ones and repeats reflect their probabilities
    near_duplicates: NearSettings | None = None  # which answers are near duplicates, of which one stays; None: none are
    evict: Literal["oldest", "lowest_reward"] = "oldest"  # what is evicted over capacity (the lowest reward may be the
    # newcomer's; among equal rewards the oldest)
    keep_recent: bool = False  # the last `total` trajectories that were evicted or replaced by a near duplicate can
    # still be drawn as recent, so that the recent half represents the policy

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect: where only the oldest leave, nothing recent does."""
        lets_recent_leave = self.evict == "lowest_reward" or self.near_duplicates is not None
        if lets_recent_leave or self.keep_recent:
            return {}
        return {"keep_recent": "evict lowest_reward, or near_duplicates, in code"}

    def __post_init__(self) -> None:
        for name in ("per_prompt", "total"):
            if getattr(self, name) < 2:
                raise UserError(f"--replay.buffer.{name.replace('_', '-')} is {getattr(self, name)}, a group needs 2")
        if not self.memory_gb >= 0:
            raise UserError(f"--replay.buffer.memory-gb is {self.memory_gb}, give a number of GB, 0 or more")

    def memory(self, tokens: int) -> dict[str, int]:
        """Returns the bytes of memory that a full buffer of answers of so many tokens takes, by part."""
        rows = self.total * (2 if self.keep_recent else 1)
        bodies = min(rows * (BODY_BYTES + tokens * TOKEN_BYTES), int(1e9 * self.memory_gb))
        return {"tokens": bodies, "numbers and indexes": rows * _ROW_BYTES}


@dataclass(slots=True)
class Tally:
    """Counts trajectories, and their completion tokens."""

    trajectories: int = 0
    tokens: int = 0

    def add(self, length: int, times: int = 1) -> None:
        """Count a trajectory of `length` tokens `times` times."""
        self.trajectories += times
        self.tokens += times * length

    def add_tally(self, addend: Tally, times: int = 1) -> None:
        """Add another amount, `times` times."""
        self.trajectories += times * addend.trajectories
        self.tokens += times * addend.tokens


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts what became of all that was added: received = trained_once + waiting + evicted + duplicate + damaged."""

    received: Tally = field(default_factory=Tally)
    trained_once: Tally = field(default_factory=Tally)
    trained_total: Tally = field(default_factory=Tally)  # every use counted
    waiting: Tally = field(default_factory=Tally)
    evicted: Tally = field(default_factory=Tally)
    duplicate: Tally = field(default_factory=Tally)
    damaged: Tally = field(default_factory=Tally)


RARE_SHARE = 0.001  # of all answers: with as many left out a rare answer comes so much less often that it is noticed


class Buffer:
    """Keeps the trajectories in memory, with their counts. What a selector may use is in the methods from `prompts` on.

    read_body: returns the body at a place of the source, or raises `Damaged`. Without it all are held, whatever the
    settings say. Any method that returns trajectories raises `LostRow` for one that cannot be read (see `lose`).
    """

    def __init__(
        self, settings: BufferSettings, reference: Version = _FIRST, read_body: Callable[[int], bytes] | None = None
    ) -> None:
        self._settings = settings
        self._reference = reference
        self._version = Version()
        self._rows = TrajectoryTable(read_body, 1e9 * settings.memory_gb)
        self._neighbours = (
            None if settings.near_duplicates is None else settings.near_duplicates.start(self._rows.tokens)
        )
        self._keeps_newer = settings.near_duplicates is not None and settings.near_duplicates.keep == "newer"
        # rows that are in the recent index only, in the order in which they came there
        self._passing_rows: dict[int, None] = {}
        self._kept_index = self._new_index()  # all rows that are kept
        self._current_index = self._new_index()  # those of the current reference
        # those of the current reference that searchers brought, and those in `_passing_rows`
        self._recent_index = self._new_index()
        # by group size the prompts that have as many recent rows, by arrival
        self._newest_prompts: dict[int, NewestPrompts] = {}
        self._by_reference: Counter[Version] = Counter()
        self._uses_by_place = array("i")  # uses by place, also of trajectories that have left; see `fates`
        self._counts = Counts()
        # prompts of which answers were left out for what they say, and how many answers that were: see `thinned`
        self._thinned_prompts, self._left_out_answers = set[str](), 0.0
        self._has_retired = False  # whether some of what was evicted had left by the source's own retention

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, trajectory: Trajectory | StoredTrajectory, uses: int = 0, incarnation: int | None = None) -> None:
        """Add a trajectory as the newest; `uses` is how often it was used before (on resume).

        incarnation: that of the weights that sampled it, if it is to count as another one now (None: as it says). An
        earlier copy of the same completion is replaced, or stays in its place if it is of newer weights; near
        duplicates, and what is over capacity, leave according to the settings. Raises `ValueError` when this very
        trajectory is in memory, or as the journal's format does.
        """
        stored = StoredTrajectory.of(trajectory) if isinstance(trajectory, Trajectory) else trajectory
        rows, prompt = self._rows, stored.prompt.key
        if rows.find(stored.uid) is not None:
            raise ValueError(f"trajectory {stored.uid} was added twice: a source gives each of its trajectories once")
        incarnation = stored.version.incarnation if incarnation is None else incarnation
        place = stored.place or self.received + 1
        self._uses_by_place.extend([0] * (place + 1 - len(self._uses_by_place)))
        if stored.left_out:
            self._leave_out(prompt, stored.left_out)
        copy = rows.copy_of(prompt, stored.digest) if self._settings.deduplicate else None
        if copy is not None:
            # one that arrived later but was sampled by older weights than its copy does not replace it
            if (incarnation, stored.version.step) < (rows.incarnation.item(copy), rows.step.item(copy)):
                self._counts.received.add(stored.length)
                self._counts.duplicate.add(stored.length)
                self._uses_by_place[place] = -_DUPLICATE
                self._leave_out(prompt)
                return
            self._leave_out(prompt)
            self._remove(copy, _DUPLICATE)
        near_rows = self._find_near_rows(stored)
        row = rows.add(stored, place, incarnation)
        self._counts.received.add(stored.length)
        self._counts.waiting.add(stored.length)
        self._kept_index.add(prompt, row)
        if self._neighbours is not None:
            self._neighbours.add(row, stored)
        for _ in range(uses):
            self._count_use(row)
        self._by_reference[stored.reference] += 1
        self._make_current(row)
        if near_rows is not None and len(near_rows):
            self._leave_out(prompt)
            is_better = self._keeps_newer or self._rows.reward[near_rows].max() < stored.reward
            for dropped_row in near_rows.tolist() if is_better else [row]:
                self._stop_keeping(dropped_row, _DUPLICATE)
        self._keep_to_capacity(prompt)

    def thinned(self, prompt: str) -> bool:
        """Returns whether an answer to `prompt` was ever left out for what it says: a copy, nearly one, the lowest
        reward over capacity, or one that a searcher rejected (`LEFT_OUT`). What is left comes less often, or more, than
        policies sampled it.

        So are all prompts where this befell more than one in a thousand answers: those that happen to have no repeat
        among many repeats do not represent what was sampled either.
        """
        return prompt in self._thinned_prompts or self._left_out_answers > RARE_SHARE * self.received

    def _leave_out(self, prompt: str, answers: float = 1) -> None:
        self._thinned_prompts.add(prompt)
        self._left_out_answers += answers

    def _find_near_rows(self, stored: StoredTrajectory) -> npt.NDArray[np.intp] | None:
        """Returns the rows that a new trajectory nearly equals; None where near duplicates stay."""
        while self._neighbours is not None:
            try:
                return self._neighbours.of(stored)
            except LostRow as error:
                self.lose(error.row)
        return None

    def lose(self, row: int) -> None:
        """Remove a row that cannot be read any more; it counts as damaged if it was never used."""
        self._remove(row, _DAMAGED)

    def needed_from(self, all_of_them: bool) -> int | None:
        """Returns the first place of the source whose body this buffer may still read: of the rows without a body, or
        (all_of_them, before a change of reference) of all rows. None: it needs none.
        """
        if not all_of_them or len(self._rows) == len(self._passing_rows):
            return self._rows.first_spilled
        return int(self._rows.arrival[self._rows.oldest])

    def _keep_to_capacity(self, prompt: str) -> None:
        drops_oldest = self._settings.evict == "oldest"
        if self._kept_index.count(prompt) > self._settings.per_prompt:
            prompt_rows = self._kept_index.of(prompt)
            if not drops_oldest:
                self._leave_out(prompt)
            place = 0 if drops_oldest else int(self._rows.reward[np.asarray(prompt_rows)].argmin())
            self._stop_keeping(prompt_rows[place], _EVICTED)
        if len(self._rows) - len(self._passing_rows) > self._settings.total:
            row = self._rows.oldest if drops_oldest else self._rows.lowest
            if not drops_oldest:
                self._leave_out(self._prompt_key(row))
            self._stop_keeping(row, _EVICTED)

    def pass_over(self, evicted: Tally, damaged: Tally) -> None:
        """Count trajectories that the source could not give: deleted by its own retention, or unreadable."""
        for tally, passed_over in ((self._counts.evicted, evicted), (self._counts.damaged, damaged)):
            tally.add_tally(passed_over)
            self._counts.received.add_tally(passed_over)
        self._has_retired |= evicted.trajectories > 0

    def score(self, score: Score) -> None:
        """Store a trajectory's score under the current reference; one whose score is not finite is removed.

        Nothing happens when it has left before or is no longer kept, or the score is of a reference that is no longer
        the current one.
        """
        row = self._rows.find(score.uid)
        if row is None or score.reference != self._reference or self._reference_of(row) == score.reference:
            return
        if self._rows.exit_reason[row]:  # it leaves together with the reference under which it was recent
            return
        if not np.isfinite(score.log_reference).all():
            self._remove(row, _EVICTED)
            return
        self._by_reference.subtract([self._reference_of(row)])
        self._by_reference[score.reference] += 1
        self._rows.rescore(row, score.log_reference, score.reference)
        self._make_current(row)

    def use(self, trajectories: Iterable[Trajectory]) -> None:
        """Count one use of each trajectory. Raises `KeyError` for one that is not in memory."""
        for trajectory in trajectories:
            self._count_use(self._row_of(trajectory))

    def take_back(self, trajectories: Iterable[Trajectory]) -> None:
        """Undo one `use` of each trajectory of a batch that was drawn and then not trained on. Raises `KeyError` for
        one that is not in memory.
        """
        for trajectory in trajectories:
            row = self._row_of(trajectory)
            self._counts.trained_total.add(trajectory.length, -1)
            self._rows.uses[row] -= 1
            self._uses_by_place[int(self._rows.arrival[row])] -= 1
            if not self._rows.uses[row]:
                self._counts.waiting.add(trajectory.length)
                self._counts.trained_once.add(trajectory.length, -1)

    def counts(self) -> Counts:
        """Returns a copy of the counts."""
        return deepcopy(self._counts)

    def fates(self) -> npt.NDArray[np.int32]:
        """Returns [places + 1], how often each was used; negative: it left unused (`UNUSED_FATES` says how)."""
        return np.array(self._uses_by_place, dtype=np.int32)

    def carry(self, counts: Counts, uses: npt.NDArray[np.int32]) -> None:
        """Continue counting from the `counts` and `uses` of an earlier buffer, which this one was rebuilt from.

        Nothing changes where the source still has everything. What is damaged there now, and had not been trained on,
        counts as damaged, and all else as it does here. What was deleted by the source's own retention counts as it
        did, or as evicted where it was waiting.
        """
        current, duplicates = self._counts, self._counts.duplicate.trajectories
        if current.damaged.trajectories > counts.damaged.trajectories and not self._has_retired:
            current.damaged.add_tally(counts.trained_once, -1)  # what was trained and is missing here counts as trained
            current.damaged.add_tally(current.trained_once)
        else:
            self._counts = replace(deepcopy(counts), waiting=current.waiting)
            self._counts.evicted.add_tally(counts.waiting)
            self._counts.evicted.add_tally(current.waiting, -1)
            self._left_out_answers += max(0, counts.duplicate.trajectories - duplicates)
        self._counts = replace(
            self._counts, trained_once=replace(counts.trained_once), trained_total=replace(counts.trained_total)
        )
        self._uses_by_place.extend([0] * (len(uses) - len(self._uses_by_place)))
        self._uses_by_place[: len(uses)] = array("i", uses.tolist())

    @property
    def received(self) -> int:
        """Returns how many trajectories were ever added."""
        return self._counts.received.trajectories

    @property
    def trained_total(self) -> int:
        """Returns the uses of all trajectories ever added."""
        return self._counts.trained_total.trajectories

    @property
    def now(self) -> Version:
        """Returns the trainer's version. Setting it removes rows that were only recent under an earlier reference."""
        return self._version

    @now.setter
    def now(self, now: Version) -> None:
        self._version = now
        for row in [row for row in self._passing_rows if not self._rows.is_recent[row]]:
            self._remove(row, 0)  # not before: a batch that was drawn ahead of the reset may be given back

    @property
    def reference(self) -> Version:
        """Returns the reference whose trajectories can be sampled."""
        return self._reference

    @reference.setter
    def reference(self, reference: Version) -> None:
        if reference != self._reference:
            self._reference = reference
            self._current_index, self._recent_index, self._newest_prompts = self._new_index(), self._new_index(), {}
            self._rows.is_recent[:] = False
            for row in self._rows.in_order().tolist():
                self._make_current(row)

    @property
    def sampleable(self) -> int:
        """Returns how many trajectories in memory are of the current reference."""
        return self._by_reference[self._reference]

    @property
    def references(self) -> set[Version]:
        """Returns the references of the trajectories in memory."""
        return {reference for reference, count in self._by_reference.items() if count}

    def unscored(self) -> list[str]:
        """Returns the uids of the trajectories that are not of the current reference, oldest first."""
        rows = self._rows.in_order()
        unscored_rows = rows[self._rows.reference[rows] != self._rows.reference_number(self._reference)]
        unscored_rows = unscored_rows[self._rows.exit_reason[unscored_rows] == 0]
        return [self._rows.uid(row) for row in unscored_rows.tolist()]

    def prompts(self, size: int = 1) -> Listing:
        """Returns the prompts with at least `size` distinct trajectories."""
        return self._current_index.prompts(size)

    def of(self, prompt: str) -> Answers:
        """Returns the distinct trajectories of `prompt`, oldest first; valid until the buffer changes."""
        return Answers(self._rows, self._current_index.of(prompt))

    def rewards(self, prompt: str) -> npt.NDArray[np.float64]:
        """Returns the rewards of `of(prompt)`, in order."""
        return self._rows.reward[np.asarray(self._current_index.of(prompt), dtype=np.intp)]

    def numbers(self, prompt: str) -> Sequence[int]:
        """Returns row numbers of `of(prompt)`, in order: until the buffer changes, equal numbers are the same
        trajectory.
        """
        return self._current_index.of(prompt)

    def newest(self, prompt: str, size: int, within: int) -> Sequence[int]:
        """Returns the numbers of up to `size` rows of `prompt` in the order in which they are to be drawn: the newest
        first, and among the last `within` arrivals those never used before the others.
        """
        rows = np.asarray(self._recent_index.of(prompt)[-max(size, within) :], dtype=np.intp)[::-1]
        is_later = (self._rows.uses[rows] > 0) | (self._rows.arrival[rows] < len(self._uses_by_place) - within)
        numbers: list[int] = np.concatenate([rows[~is_later], rows[is_later]])[:size].tolist()
        return numbers

    def newest_prompts(self, size: int, within: int, count: int) -> list[str]:
        """Returns the first prompts with `size` recent trajectories in the order in which they are to be drawn, `count`
        or more if there are.

        First come those with one of the last `within` arrivals: the prompt whose next `size` have been used least in
        all comes first, and of several the one with the newest. Then the next newest.
        """
        if size not in self._newest_prompts:
            self._newest_prompts[size] = NewestPrompts(self._recent_index.prompts(size), self.newest_arrival)
        start = len(self._uses_by_place) - within
        prompts = self._newest_prompts[size].newest(count, start)
        return sorted(
            prompts, key=lambda p: self._uses_of_next(p, size, within) if self.newest_arrival(p) >= start else math.inf
        )

    def newest_arrival(self, prompt: str) -> int:
        """Returns when the newest recent trajectory of `prompt` arrived, as its place among all."""
        return self._rows.arrival.item(self._recent_index.of(prompt)[-1])

    def numbered(self, numbers: Iterable[int]) -> list[Trajectory]:
        """Returns the trajectories of these numbers, oldest first."""
        return list(Answers(self._rows, sorted(numbers, key=self._rows.arrival.item)))

    def behind(self, trajectories: Iterable[Trajectory]) -> int:
        """Returns how many trajectories have arrived since the first of these, itself included."""
        return len(self._uses_by_place) - min(self._rows.arrival.item(self._row_of(t)) for t in trajectories)

    def _row_of(self, trajectory: Trajectory) -> int:
        row = self._rows.find(trajectory.uid)
        if row is None:
            raise KeyError(f"trajectory {trajectory.uid} is not in memory")
        return row

    def _prompt_key(self, row: int) -> str:
        return self._rows.prompt(row).key

    def _reference_of(self, row: int) -> Version:
        return self._rows.reference_of(int(self._rows.reference[row]))

    def _count_use(self, row: int) -> None:
        length = self._rows.length.item(row)
        self._counts.trained_total.add(length)
        if not self._rows.uses[row]:
            self._counts.waiting.add(length, -1)
            self._counts.trained_once.add(length)
        self._rows.uses[row] += 1
        place = self._rows.arrival.item(row)
        self._uses_by_place[place] = max(0, self._uses_by_place[place]) + 1

    def _stop_keeping(self, row: int, reason: int) -> None:
        """Stop keeping a row. It stays in the recent index for a while, if the settings say so."""
        if not (self._settings.keep_recent and self._rows.is_recent[row]):
            self._remove(row, reason)
            return
        self._remove_from_indexes(row)
        self._rows.let_pass(row, reason)
        self._passing_rows[row] = None
        if len(self._passing_rows) > self._settings.total:
            self._remove(next(iter(self._passing_rows)), 0)

    def _remove(self, row: int, reason: int) -> None:
        """Remove a row from memory. If it was never used, it is counted by the reason for which it left."""
        reason, length = int(self._rows.exit_reason[row]) or reason, int(self._rows.length[row])
        if self._rows.exit_reason[row]:
            del self._passing_rows[row]
        else:
            self._remove_from_indexes(row)
        self._by_reference.subtract([self._reference_of(row)])
        if self._rows.is_recent[row]:
            self._recent_index.remove(self._prompt_key(row), row)
            self._rows.is_recent[row] = False
            self._note_newest_change(self._prompt_key(row))
        if not self._rows.uses[row]:
            counts = self._counts
            counts.waiting.add(length, -1)
            {_DUPLICATE: counts.duplicate, _DAMAGED: counts.damaged}.get(reason, counts.evicted).add(length)
            self._uses_by_place[self._rows.arrival.item(row)] = -reason
        self._rows.remove(row)

    def _remove_from_indexes(self, row: int) -> None:
        """Remove a row from the indexes of rows that are kept."""
        prompt = self._prompt_key(row)
        self._kept_index.remove(prompt, row)
        if self._neighbours is not None:
            self._neighbours.remove(row, prompt)
        if self._reference_of(row) == self._reference:
            self._current_index.remove(prompt, row)

    def _new_index(self) -> PromptIndex:
        return PromptIndex(lambda row: self._rows.arrival.item(row))  # a Python number, cheaper than indexing

    def _make_current(self, row: int) -> None:
        """Index a row for sampling if it is of the current reference, also as recent unless it was imported."""
        if self._reference_of(row) == self._reference:
            key = self._prompt_key(row)
            if not self._rows.exit_reason[row]:
                self._current_index.add(key, row)
            if self._rows.incarnation[row] >= 0:
                self._recent_index.add(key, row)
                self._rows.is_recent[row] = True
                self._note_newest_change(key)

    def _note_newest_change(self, prompt: str) -> None:
        for newest in self._newest_prompts.values():
            newest.note_change(prompt)

    def _uses_of_next(self, prompt: str, size: int, within: int) -> int:
        return int(self._rows.uses[np.asarray(self.newest(prompt, size, within))].sum())
