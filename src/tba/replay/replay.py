"""Takes trajectories into the replay buffer, decides when a batch may be drawn, and draws it.

Invariant: nothing is dropped for being old; what leaves leaves by the capacity rule, and is counted. Mean uses per
trajectory stay within the limit. All groups of a batch are scored under the reference that is current when it is drawn.
The trainer's threads may share it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.fields import as_declared
from tba.replay.buffer import Buffer, BufferSettings, Counts, Tally
from tba.replay.codec import MissingCounts, StoredTrajectory, pack_uses, unpack_uses
from tba.replay.columns import LostRow
from tba.replay.pacing import Pacing
from tba.replay.selection import SMALLEST_GROUP, BatchRequest, RecencyReward, Selection
from tba.types import ELSEWHERE, Group, Json, Score, Version

_CHUNK_ROWS = 4096  # rows drained at a time

NotReady: TypeAlias = Literal["warm_up", "paced", "empty", "unscored"]


@dataclass(frozen=True)
@as_declared
class ReplaySettings:
    """Says what is kept, what is drawn and when. Raises `UserError` when a field makes no sense."""

    selection: Selection = field(default_factory=RecencyReward)
    pacing: Pacing = field(default_factory=Pacing)
    buffer: BufferSettings = field(default_factory=BufferSettings)
    ingest: Literal["always", "sync"] = "always"  # use new data at once, or only after weight syncs (as in the paper)
    keep_gb: float | None = 100.0  # size limit of the journal on disk: the oldest bodies are deleted, but none that the
    # buffer still reads (memory_gb), or that a reset of the reference may ask for; None: keep all

    def __post_init__(self) -> None:
        if self.keep_gb is not None and not self.keep_gb > 0:
            raise UserError(f"--replay.keep-gb is {self.keep_gb}: give a size in GB above 0, or None to keep all")

    @property
    def keep_bytes(self) -> int | None:
        """Returns the size that the journal is kept to."""
        return None if self.keep_gb is None else int(1e9 * self.keep_gb)


class TrajectorySource(Protocol):
    """Gives trajectories, always in the same order: the journal's follower does.

    Positions count what was drained, trajectories and scores; they may be set, to drain again from there. So may
    `needed_from`, the first place that its retention leaves alone.
    """

    position: int
    score_position: int
    needed_from: int | None

    def drain_stored(self, limit: int | None = None, until: int | None = None) -> list[StoredTrajectory]:
        """Returns what is new since the last call, oldest first, at most `limit` of it, up to position `until`. Never
        waits.
        """

    def body(self, place: int) -> bytes:
        """Returns the body of what was drained from this place. Raises `Damaged` when it cannot be read any more."""

    def take_missing_counts(self) -> MissingCounts:
        """Returns the counts of trajectories that were passed over since the last call: they could not be read."""

    def ask(self, reference: Version, uids: Sequence[str]) -> None:
        """Request that searchers score these trajectories under `reference`."""

    def drain_scores(self, limit: int | None = None, until: int | None = None) -> list[Score]:
        """Returns the scores since the last call, as `drain_stored` gives trajectories."""


class Replay:
    """The replay buffer with its rules, from which the trainer draws groups. Set `now` to the trainer's version before
    each batch.

    sync_every: the trainer's k, which the selector is told. on_arrival: called with prompt, reward and tokens of all
    that searchers bring, as it comes in. resets: whether the reference may change, after which what is in the buffer is
    scored again by the source's bodies.
    """

    def __init__(
        self,
        source: TrajectorySource,
        settings: ReplaySettings,
        sync_every: int = 1,
        *,
        seed: int = 0,
        resets: bool = False,
        on_arrival: Callable[[Sequence[tuple[str, float, int]]], object] | None = None,
    ) -> None:
        self.settings = settings
        self.buffer = Buffer(settings.buffer, read_body=source.body)
        self.selector = settings.selection.start()
        self.sync_every = sync_every
        self.m: float | None = None  # the share of recent groups to ask for; None: the selection's own
        self._source, self._resets = source, resets
        self._rng = np.random.default_rng([seed, 0x5E1EC7])  # independent of the searchers' streams of the same seed
        self._lock = threading.RLock()
        self._batch_count = 0  # batches
        self._newest_batch: Sequence[Group] = ()  # the last of them
        self._on_arrival = on_arrival
        self._arrival_count = 0  # trajectories, the last time that there were any
        self._forfeited = 0.0  # trajectories whose uses are lost (`Pacing.forfeit`)
        # (position, incarnation) of the checkpoints that this run has resumed from
        self._lineage: list[tuple[int, int]] = []

    @property
    def now(self) -> Version:
        """Returns the trainer's version, from which lags are counted."""
        return self.buffer.now

    @now.setter
    def now(self, now: Version) -> None:
        with self._lock:
            self.buffer.now = now

    @property
    def reference(self) -> Version:
        """Returns the reference whose trajectories can be drawn. Setting it requests scores of the others under it."""
        return self.buffer.reference

    @reference.setter
    def reference(self, reference: Version) -> None:
        with self._lock:
            self.buffer.reference = reference
            self._request_scores(self.buffer.unscored())

    @property
    def references(self) -> set[Version]:
        """Returns the references of the trajectories in memory."""
        with self._lock:
            return self.buffer.references

    def drain(self) -> int:
        """Add new trajectories and scores of the source to the buffer; returns how many trajectories."""
        drained_count = 0
        with self._lock:
            while chunk := self._next_chunk():
                for trajectory in chunk:
                    self.buffer.add(trajectory)
                if self._on_arrival is not None:
                    self._on_arrival([(t.prompt.key, t.reward, t.length) for t in chunk if t.version != ELSEWHERE])
                self._request_scores([t.uid for t in chunk if t.reference != self.reference])
                drained_count += len(chunk)
                if len(chunk) < _CHUNK_ROWS:
                    break
            self._count_missing()
            while scores := self._source.drain_scores(_CHUNK_ROWS):
                for score in scores:
                    self.buffer.score(score)
            self._arrival_count = drained_count or self._arrival_count
        return drained_count

    def ready(self, group_count: int, size: int) -> NotReady | None:
        """Returns why a batch of `groups` x `size` may not be drawn now, or None: it may.

        Takes new data in, if the settings say so. While no batch may be drawn it always does: a trainer that is held
        back is at a sync point, and would wait for ever otherwise.

        After a reset of the reference ("unscored") a batch may be drawn once as many trajectories as the warm-up asks
        for (and a batch has) are scored under the new one, or all that there are: otherwise the first batches would
        consist of the same few trajectories.
        """
        with self._lock:
            if self.settings.ingest == "always" or self._hold_reason(group_count, size) is not None:
                self.drain()
            received, uses, batch = self.buffer.received, self.buffer.trained_total, group_count * size
            pacing = self.settings.pacing
            self._forfeited = pacing.forfeit(received, uses, batch, self._arrival_count, self._forfeited)
            return self._hold_reason(group_count, size)

    def sample_if_ready(self, group_count: int, size: int) -> list[Group] | NotReady:
        """Returns a batch, or why none may be drawn now. The reference cannot change between the two."""
        with self._lock:
            return self.ready(group_count, size) or self._draw(group_count, size)

    def sample(self, group_count: int, size: int) -> list[Group]:
        """Draws one batch and counts its uses. Raises `RuntimeError` unless `ready` would return None."""
        with self._lock:
            batch = self._draw(group_count, size)
            if isinstance(batch, str):
                raise RuntimeError(f"no batch may be sampled now ({batch}): wait until ready() answers None")
            return batch

    def _draw(self, group_count: int, size: int) -> list[Group] | NotReady:
        """Draws a batch; a trajectory that cannot be read is removed, and counted as damaged."""
        while (reason := self._hold_reason(group_count, size)) is None:
            request = BatchRequest(group_count, size, self._arrival_count, self.sync_every, self.m)
            try:
                groups = self.selector.select(self.buffer, request, self._rng)
            except LostRow as error:
                self.buffer.lose(error.row)
                continue
            self.buffer.use([t for group in groups for t in group.trajectories])
            self._batch_count, self._newest_batch = self._batch_count + 1, groups
            return groups
        return reason

    def take_back(self, groups: Sequence[Group]) -> None:
        """Give back the newest batch, which was not trained on after all (it was drawn ahead of the end): its uses do
        not count.

        Nothing may have been taken in since it was drawn.
        """
        trajectories = [t for group in groups for t in group.trajectories]
        with self._lock:
            self.buffer.take_back(trajectories)
            self._batch_count, self._newest_batch = self._batch_count - 1, ()

    def steer(self, m: float, sync_every: int) -> None:
        """Set, from the next batch on, the share of recent groups that is asked for, and the trainer's k."""
        with self._lock:
            self.m, self.sync_every = m, sync_every

    def searcher_limit(self, batch: int, updates: int) -> int | None:
        """Returns how many trajectories searchers may have sent before they are held (`Pacing.searcher_limit`)."""
        with self._lock:
            return self.settings.pacing.searcher_limit(self.buffer.trained_total, batch, updates)

    @property
    def samples_per_insert(self) -> float:
        """Returns the mean uses of the trajectories received (0 before the first)."""
        return self.buffer.trained_total / max(1, self.buffer.received)

    def ledger(self) -> dict[str, int]:
        """Returns what became of all that was taken in: received, trained_once, trained_total, waiting, evicted and
        duplicate, each as `<term>_trajectories` and `<term>_tokens`.

        What is still in the source is not included.
        """
        with self._lock:
            counts = self.buffer.counts()
        terms = {f.name: getattr(counts, f.name) for f in fields(counts)}
        return {f"{name}_{unit}": getattr(amount, unit) for name, amount in terms.items() for unit in _UNITS}

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the step: sizes, reuse, and what was drawn so far (groups)."""
        with self._lock:
            sizes = {
                "replay_trajectories": float(len(self.buffer)),
                "replay_prompts": float(len(self.buffer.prompts(SMALLEST_GROUP))),
                "replay_unscored": float(len(self.buffer) - self.buffer.sampleable),
                "replay_repeated": self.buffer.counts().duplicate.trajectories / max(1, self.buffer.received),
                "samples_per_insert": self.samples_per_insert,
            }
            return sizes | {f"groups_{name}": float(count) for name, count in self.selector.counts.items()}

    def state(self, trained_batches: int | None = None) -> Json:
        """Returns what `restore` needs besides the source.

        trained_batches: how many of the batches drawn here have been trained on; the uses of one that was drawn ahead
        do not count (None: all have been).
        """
        with self._lock:
            is_ahead = trained_batches is not None and self._batch_count != trained_batches
            trajectories = [t for group in self._newest_batch for t in group.trajectories] if is_ahead else []
            self.buffer.take_back(trajectories)
            counts, uses = self.buffer.counts(), self.buffer.fates()
            self.buffer.use(trajectories)
            return {
                "position": self._source.position,
                "lineage": [*self._lineage, (self._source.position, self.now.incarnation)],
                "counts": {f.name: astuple(getattr(counts, f.name)) for f in fields(counts)},
                "score_position": self._source.score_position,
                "uses": pack_uses(uses),
                "pacing": [self._arrival_count, self._forfeited],
                "now": str(self.now),
                "reference": str(self.reference),
                "rng": self._rng.bit_generator.state,
                "selector": self.selector.state(),
            }

    def restore(self, state: Json, now: Version | None = None) -> None:
        """Rebuild a new replay as it was at `state()`: it then draws exactly the batches that the other would have.

        now: the trainer's version from here on, the same step of a later incarnation (None: as it was). What the
        incarnations that led to the state had taken in by then was sampled by ancestors of the present weights, and is
        renamed to this incarnation: its lag is unchanged. All else that the source has was sampled by weights that are
        no ancestors of these, and comes after it.

        Reads the source again from its beginning. What was used after the state was taken counts as never used: the
        weights that it trained are gone. Raises `ValueError` when this replay is not new.
        """
        if self.buffer.received:
            raise ValueError("only a fresh replay can be restored: this one has taken in trajectories")
        with self._lock:
            uses = unpack_uses(state["uses"])
            self.now = Version.parse(state["now"]) if now is None else now
            self.buffer.reference = Version.parse(state["reference"])
            self._lineage = [(position, incarnation) for position, incarnation in state["lineage"]]
            self._add_again(uses)
            self._count_missing()
            self.buffer.carry(Counts(**{name: Tally(*pair) for name, pair in state["counts"].items()}), uses)
            self._arrival_count, self._forfeited = state.get("pacing", (self.buffer.received, 0.0))
            self._restore_scores(state["score_position"])
            self._request_scores(self.buffer.unscored())
            self._rng.bit_generator.state = state["rng"]
            self.selector.restore(state["selector"])

    def _next_chunk(self, until: int | None = None) -> list[StoredTrajectory]:
        """Returns the next chunk of the source, which may now delete the bodies that no row needs."""
        needed = self.buffer.needed_from(self._resets)
        self._source.needed_from = self._source.position + 1 if needed is None else needed
        return self._source.drain_stored(_CHUNK_ROWS, until)

    def _count_missing(self) -> None:
        """Count the trajectories that the source has on record and could not give."""
        counts = self._source.take_missing_counts()
        self.buffer.pass_over(
            evicted=Tally(counts.retired_trajectories, counts.retired_tokens),
            damaged=Tally(counts.damaged_trajectories, counts.damaged_tokens),
        )

    def _request_scores(self, uids: Sequence[str]) -> None:
        """Request scores of these trajectories under the current reference."""
        if uids:
            self._source.ask(self.reference, uids)

    def _add_again(self, uses_by_place: npt.NDArray[np.int32]) -> None:
        """Add the trajectories that each checkpoint of the lineage had, in the same order."""
        self._source.position = 0
        for position, incarnation in self._lineage:
            while chunk := self._next_chunk(position):
                for stored in chunk:
                    is_ancestor = stored.version.incarnation == incarnation
                    uses = int(uses_by_place[stored.place]) if stored.place < len(uses_by_place) else 0
                    self.buffer.add(stored, uses, self.now.incarnation if is_ancestor else None)
            self._source.position = position

    def _restore_scores(self, until: int) -> None:
        """Add the scores up to a position. Those under an earlier reference no longer count."""
        self._source.score_position = 0
        while scores := self._source.drain_scores(_CHUNK_ROWS, until):
            for score in scores:
                self.buffer.score(score)
        if self._source.score_position != until:  # the journal was replaced, and counts from the beginning again
            self._source.score_position = 0

    def _hold_reason(self, group_count: int, size: int) -> NotReady | None:
        received, trained_total = self.buffer.received, self.buffer.trained_total
        reason = self.settings.pacing.hold_reason(received, trained_total, group_count * size, self._forfeited)
        if reason == "warm_up":
            return reason
        unscored = self.buffer.sampleable < len(self.buffer)
        if unscored and self.buffer.sampleable < max(self.settings.pacing.warm_up, group_count * size):
            return "unscored"
        if not self.buffer.prompts(SMALLEST_GROUP):
            return "empty"
        return reason


_UNITS = ("trajectories", "tokens")
