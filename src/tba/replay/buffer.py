"""The trajectories in the trainer's memory: by prompt, the newest (distinct) ones, oldest out first.

Invariant: every trajectory that was added is exactly one of trained (used at least once), waiting (in memory, never
used), evicted (left by the capacity rule, never used) or duplicate (replaced by a newer copy, never used), each counted
at its own event. Only trajectories of the current reference can be sampled. What has another one keeps its place, its
uses and its turn to leave, and can be sampled once it has been scored anew; until then it waits, unless it was used.

"Newer" is by arrival, the one order on which all searchers agree. "Recent" is by the weights that sampled.
No operation scans the memory, but moving to another reference, incarnation or window; listing a prompt's trajectories
costs that prompt's own, once after each change (which is all of it where there is one prompt only).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tba.errors import UserError
from tba.replay.scores import Score
from tba.replay.shelf import Listing, Shelf
from tba.types import Trajectory, Version

_FIRST = Version()


@dataclass(frozen=True)
class BufferSettings:
    """How much the trainer's memory holds."""

    per_prompt: int = 100  # trajectories of a prompt (paper: 100)
    total: int = 100_000  # trajectories in all (paper, red-teaming: 100k to 150k)
    distinct: bool = True  # a completion that is there already replaces its earlier copy (paper); off: both stay, for
    # answers of a few tokens, where a prompt has fewer than K distinct ones and repeats are how likely each is

    def __post_init__(self) -> None:
        for name in ("per_prompt", "total"):
            if getattr(self, name) < 2:
                raise UserError(
                    f"--replay.buffer.{name.replace('_', '-')} is {getattr(self, name)}, a group needs at least 2"
                )


@dataclass(slots=True)
class Amount:
    """How many trajectories, and how many completion tokens they have."""

    trajectories: int = 0
    tokens: int = 0

    def add(self, trajectory: Trajectory, times: int = 1) -> None:
        """Count it `times` times."""
        self.trajectories += times
        self.tokens += times * trajectory.length


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of everything that was added: received = trained_once + waiting + evicted + duplicate."""

    received: Amount
    trained_once: Amount
    trained_total: Amount  # every use counted
    waiting: Amount
    evicted: Amount
    duplicate: Amount


class Buffer:
    """A `TrajectoryStore` (see protocols).

    recent_window: trainer updates within which a trajectory counts as recent.
    """

    def __init__(self, settings: BufferSettings, recent_window: int, reference: Version = _FIRST) -> None:
        self._settings = settings
        self._window = recent_window
        self._reference = reference
        self._now = Version()
        self._all: OrderedDict[str, Trajectory] = OrderedDict()  # by uid, oldest first
        self._arrival: dict[str, int] = {}  # uid -> its place in the order of arrival
        self._kept = self._shelf()  # all of them
        self._current = self._shelf()  # those of the current reference
        self._recent = self._shelf()  # the recent ones of those
        self._by_reference: Counter[Version] = Counter()
        self._recent_by_step: dict[int, set[str]] = {}  # step that sampled -> uids on the recent shelf
        self._uses: dict[str, int] = {}  # of the trajectories in memory that were used
        self._waiting: dict[str, int] = {}  # uid -> tokens, of those in memory that never were
        self._received, self._trained_once, self._trained_total = Amount(), Amount(), Amount()
        self._evicted, self._duplicate = Amount(), Amount()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, trajectory: Trajectory, uses: int = 0) -> None:
        """Take it in as the newest; `uses` is how often it was used before (on resume).

        An earlier copy of the same completion is replaced, and the oldest leave what is over capacity. Raises
        `ValueError` when this very trajectory is in memory already.
        """
        uid, prompt = trajectory.uid, trajectory.prompt.key
        if uid in self._all:
            raise ValueError(f"trajectory {uid} was added twice: a source gives each of its trajectories once")
        if (copy := self._kept.copy_of(trajectory)) is not None:
            self._remove(copy, self._duplicate)
        elif self._kept.count(prompt) >= self._settings.per_prompt:
            self._remove(self._kept.oldest(prompt), self._evicted)
        self._arrival[uid] = self.received
        self._received.add(trajectory)
        self._all[uid] = trajectory
        self._kept.add(trajectory)
        self._waiting[uid] = trajectory.length
        for _ in range(uses):
            self._use(trajectory)
        self._by_reference[trajectory.reference] += 1
        self._make_current(trajectory)
        if len(self._all) > self._settings.total:
            self._remove(next(iter(self._all.values())), self._evicted)

    def score(self, score: Score) -> None:
        """A trajectory is of the current reference from here on; one whose score is not finite leaves.

        Nothing happens when it has left before, or the score is of a reference that is not the current one any longer.
        """
        old = self._all.get(score.uid)
        if old is None or score.reference != self._reference or old.reference == score.reference:
            return
        if not np.isfinite(score.log_reference).all():
            self._remove(old, self._evicted)
            return
        new = replace(old, log_reference=score.log_reference, reference=score.reference)
        self._by_reference.subtract([old.reference])
        self._by_reference[new.reference] += 1
        self._all[new.uid] = new
        self._kept.replace(new)
        self._make_current(new)

    def use(self, trajectories: Iterable[Trajectory]) -> None:
        """Count one use of each. Raises `KeyError` for one that is not in memory."""
        for trajectory in trajectories:
            if trajectory.uid not in self._all:
                raise KeyError(f"trajectory {trajectory.uid} is not in memory")
            self._use(trajectory)

    def take_back(self, trajectories: Iterable[Trajectory]) -> None:
        """Undo one `use` of each: the batch was drawn and then not trained. Raises `KeyError` as `use` does."""
        for trajectory in trajectories:
            uid = trajectory.uid
            self._trained_total.add(trajectory, -1)
            self._uses[uid] -= 1
            if not self._uses[uid]:
                del self._uses[uid]
                self._waiting[uid] = trajectory.length
                self._trained_once.add(trajectory, -1)

    def uses(self, uid: str) -> int:
        """How often a trajectory in memory was used."""
        return self._uses.get(uid, 0)

    def counts(self) -> Counts:
        """A copy of the counts."""
        waiting = Amount(len(self._waiting), sum(self._waiting.values()))
        amounts = (self._received, self._trained_once, self._trained_total, waiting, self._evicted, self._duplicate)
        return Counts(*(Amount(a.trajectories, a.tokens) for a in amounts))

    def carry(self, counts: Counts) -> None:
        """Go on counting from `counts`, those of a memory that was rebuilt here from what its source still has.

        Nothing changes where the source has all of it. What was waiting there and is not here has left by the source's
        own retention, and counts as evicted.
        """
        waiting = self.counts().waiting
        lost = [getattr(counts.waiting, unit) - getattr(waiting, unit) for unit in ("trajectories", "tokens")]
        self._received, self._trained_once = replace(counts.received), replace(counts.trained_once)
        self._trained_total, self._duplicate = replace(counts.trained_total), replace(counts.duplicate)
        self._evicted = Amount(counts.evicted.trajectories + lost[0], counts.evicted.tokens + lost[1])

    @property
    def received(self) -> int:
        """Trajectories ever added."""
        return self._received.trajectories

    @property
    def trained_total(self) -> int:
        """Uses of all trajectories ever added."""
        return self._trained_total.trajectories

    @property
    def now(self) -> Version:
        """The trainer's version, by which it is told what is recent."""
        return self._now

    @now.setter
    def now(self, now: Version) -> None:
        later = now.incarnation == self._now.incarnation and now.step >= self._now.step
        self._now = now
        if not later:
            self._rebuild_recent()
            return
        for step in [s for s in self._recent_by_step if s < now.step - self._window]:
            for uid in self._recent_by_step.pop(step):
                self._recent.remove(self._all[uid])

    @property
    def window(self) -> int:
        """Trainer updates within which a trajectory is recent."""
        return self._window

    @window.setter
    def window(self, window: int) -> None:
        if window != self._window:
            self._window = window
            self._rebuild_recent()

    @property
    def reference(self) -> Version:
        """The reference whose trajectories can be sampled."""
        return self._reference

    @reference.setter
    def reference(self, reference: Version) -> None:
        if reference != self._reference:
            self._reference = reference
            self._current = self._shelf()
            self._recent, self._recent_by_step = self._shelf(), {}
            for trajectory in self._all.values():
                self._make_current(trajectory)

    @property
    def sampleable(self) -> int:
        """How many trajectories in memory are of the current reference."""
        return self._by_reference[self._reference]

    @property
    def references(self) -> set[Version]:
        """Those that trajectories in memory have."""
        return {reference for reference, count in self._by_reference.items() if count}

    def unscored(self) -> list[str]:
        """The uids of those in memory that are not of the current reference, oldest first."""
        return [uid for uid, trajectory in self._all.items() if trajectory.reference != self._reference]

    def prompts(self, size: int = 1) -> Listing:
        """Prompts with at least `size` distinct trajectories."""
        return self._current.prompts(size)

    def of(self, prompt: str) -> Sequence[Trajectory]:
        """The distinct trajectories of `prompt`, oldest first."""
        return self._current.of(prompt)

    def recent(self, prompt: str) -> Sequence[Trajectory]:
        """Those of `prompt` within the recent window, oldest first."""
        return self._recent.of(prompt)

    def recent_prompts(self, size: int) -> Listing:
        """Prompts with at least `size` distinct recent trajectories."""
        return self._recent.prompts(size)

    def _use(self, trajectory: Trajectory) -> None:
        uid = trajectory.uid
        self._trained_total.add(trajectory)
        if uid in self._waiting:
            del self._waiting[uid]
            self._trained_once.add(trajectory)
        self._uses[uid] = self._uses.get(uid, 0) + 1

    def _remove(self, trajectory: Trajectory, unused: Amount) -> None:
        """It leaves memory; counted under `unused` if it was never used."""
        uid = trajectory.uid
        del self._all[uid], self._arrival[uid]
        self._kept.remove(trajectory)
        self._by_reference.subtract([trajectory.reference])
        if trajectory.reference == self._reference:
            self._current.remove(trajectory)
        uids = self._recent_by_step.get(trajectory.version.step, ())
        if uid in uids:
            self._recent_by_step[trajectory.version.step].remove(uid)
            self._recent.remove(trajectory)
        if uid in self._waiting:
            del self._waiting[uid]
            unused.add(trajectory)
        else:
            del self._uses[uid]

    def _is_recent(self, trajectory: Trajectory) -> bool:
        """By its own sampling version; what an earlier incarnation sampled never is."""
        version = trajectory.version
        return version.incarnation == self._now.incarnation and version.lag(self._now) <= self._window

    def _shelf(self) -> Shelf:
        return Shelf(self._settings.distinct, self._arrival)

    def _make_current(self, trajectory: Trajectory) -> None:
        """It can be sampled, if it is of the current reference."""
        if trajectory.reference == self._reference:
            self._current.add(trajectory)
            if self._is_recent(trajectory):
                self._add_recent(trajectory)

    def _add_recent(self, trajectory: Trajectory) -> None:
        self._recent_by_step.setdefault(trajectory.version.step, set()).add(trajectory.uid)
        self._recent.add(trajectory)

    def _rebuild_recent(self) -> None:
        self._recent, self._recent_by_step = self._shelf(), {}
        for trajectory in self._all.values():
            if trajectory.reference == self._reference and self._is_recent(trajectory):
                self._add_recent(trajectory)
