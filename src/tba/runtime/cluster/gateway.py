"""The gateway (called `exchange` in logs and counts): on the trainer's machine, it takes what remote searchers send and
hands out weights.

Invariant: what a call acknowledges is on disk (written by the journal's own writer, and read by the trainer). The
gateway holds nothing that cannot be read from the run's directory again, so it can die and be restarted, and a call can
be repeated.

A piece of a version leaves the trainer's node once: the first who asks for it fetches it from there and hands it on,
and all others fetch it from where it was handed on. As searchers ask in orders of their own, each hands on a part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getmembers, isfunction
from typing import Any, Literal

from tba.protocols import Journal, Manifest, Records
from tba.recipe import Recipe
from tba.record.jsonl import JsonLines
from tba.replay.codec import to_wire
from tba.replay.journal import JournalWriter
from tba.runtime.run_directory import RunDirectory
from tba.runtime.searcher_connections import RunRecords
from tba.types import Json, Version
from tba.weights.chunks import FlatBytes, cut_pieces, map_file
from tba.weights.directory import WeightDirectory


def verbs_of(protocol: type) -> frozenset[str]:
    """Returns the names of the protocol's methods: what may be called from another machine, and nothing else."""
    return frozenset(name for name, _ in getmembers(protocol, isfunction) if not name.startswith("_"))


JOURNAL, RECORDS = verbs_of(Journal), verbs_of(Records)
PLACES = "places.jsonl"  # where each worker runs or ran, and its logs
RELAY_NODES = 4  # nodes besides the trainer's from which on searchers hand pieces on
CLAIM_SECONDS = 60.0  # that a searcher has to hand a piece on, before another fetches it from the trainer's node
KEPT_VERSIONS = 2  # versions whose pieces are kept for the next searcher that asks, besides those of their base


@dataclass(frozen=True)
class Offer:
    """A version that can be fetched: its manifest, the header of its file, and a reference for each piece."""

    version: Version
    manifest: Manifest
    header: str
    references: Sequence[Any]
    base: Offer | None = None  # the version that these are changes of; None: this one is whole


@dataclass(frozen=True)
class PieceSource:
    """Says where a searcher gets a piece: from the trainer's node, or where another searcher has handed it on."""

    kind: Literal["trainer", "claim", "relay", "wait"]  # claim: from the trainer's, then it is to be handed on; wait:
    # another searcher has claimed it
    reference: Sequence[Any] = ()  # of a piece that was handed on


@dataclass
class _Claim:
    claimed_at: float
    reference: Sequence[Any] = ()  # once it was handed on


class Exchange:
    """The run's side of all remote searchers' connections. `send` puts a piece where the searchers can fetch it, and
    returns its reference. node: the name of the trainer's node, whose searchers have its pieces already.

    Journal and weights may be called from two threads, one each.
    """

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        send: Callable[[FlatBytes], Any],
        node: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._now = now
        self._other_nodes: set[str] = set()  # that have fetched pieces
        self._claims: dict[Version, dict[int, _Claim]] = {}  # by the piece's place
        self._run = run
        self._recipe = recipe
        self._send = send
        self._writers: dict[str, JournalWriter] = {}
        self._records = RunRecords(run, recipe)
        self._weights = WeightDirectory(run.weights)
        self._offers: dict[Version, Offer] = {}
        self._base: Offer | None = None  # the base of the newest changes that were asked for

    def journal(self, owner: str, verb: str, *arguments: Any, **keywords: Any) -> Any:
        """Call `JournalWriter` for this owner; trajectories travel encoded, and are written as they come."""
        _require_verb(verb, JOURNAL)
        if verb == "close":
            return self.close_journal(owner)
        if owner not in self._writers:
            path = self._run.journal(self._recipe)
            self._writers[owner] = JournalWriter(path, owner, self._recipe.run.journal_deadline, create=False)
        return to_wire(getattr(self._writers[owner], verb)(*arguments, **keywords))

    def close_journal(self, owner: str) -> None:
        """Close the journal of an owner that has left, or is taken for dead."""
        if (writer := self._writers.pop(owner, None)) is not None:
            writer.close()

    def record(self, verb: str, *arguments: Any, **keywords: Any) -> None:
        """Call `RunRecords` for a remote searcher."""
        _require_verb(verb, RECORDS)
        getattr(self._records, verb)(*arguments, **keywords)

    def place(self, facts: Json) -> int:
        """Record where a worker has begun to run; returns the run's incarnation."""
        note_place(self._run, facts)
        return self._run.incarnation

    def newest(self, version: Version | None) -> Offer | Version | None:
        """Returns the newest version, or only its name where the searcher has that `version` already.

        None before the first, and where it is gone from the machine's memory: the trainer publishes a newer one.
        """
        while True:  # terminates: where a version was pruned, a newer one exists
            newest = self._weights.newest()
            if newest is None or newest == version:
                return newest
            offer = self.at(newest)
            if offer is not None:
                return offer
            if self._weights.is_lost(newest):
                return None

    def at(self, version: Version) -> Offer | None:
        """Returns exactly that version, or None when it is not (or no longer) there."""
        if version not in self._offers:
            published = self._weights.find(version)
            if published is None:
                return None
            try:
                header, contents = self._weights.map(version)
                base_version = self._weights.base(version)
            except OSError:  # pruned in the meantime
                return None
            base = None
            if base_version is not None:
                base = self._base
                if base is None or base.version != base_version:
                    base = self.at(base_version)
                if base is None:
                    return None
                self._base = base
            references = [self._send(piece) for piece in cut_pieces(contents)]
            self._offers[version] = Offer(version, published.manifest, header, references, base)
            for version_to_drop in list(self._offers)[:-KEPT_VERSIONS]:
                del self._offers[version_to_drop]
            for version_to_drop in self._claims.keys() - self._offers.keys() - {self._base and self._base.version}:
                del self._claims[version_to_drop]
        return self._offers[version]

    def piece(self, version: Version, place: int, node: str) -> PieceSource:
        """Returns where a searcher on `node` gets the piece at `place` of a version. With few nodes all of it comes
        from the trainer's: to hand a piece on costs a copy.
        """
        if node != self._node:
            self._other_nodes.add(node)
        if node == self._node or len(self._other_nodes) < RELAY_NODES:
            return PieceSource("trainer")
        claims = self._claims.setdefault(version, {})
        claim = claims.get(place)
        if claim is not None and claim.reference:
            return PieceSource("relay", claim.reference)
        if claim is not None and self._now() - claim.claimed_at < CLAIM_SECONDS:
            return PieceSource("wait")
        claims[place] = _Claim(self._now())
        return PieceSource("claim")

    def hand_on(self, version: Version, place: int, reference: Sequence[Any]) -> None:
        """Note where a piece was handed on, for those who ask for it from now on; nowhere: it is lost."""
        claims = self._claims.get(version, {})
        if reference and place in claims:
            claims[place].reference = reference
        elif not reference:
            claims.pop(place, None)

    def checkpoint(self, name: str) -> list[tuple[str, list[Any]]]:
        """Returns the files of checkpoints/`name`: the path of each in it, and the references of its pieces."""
        from tba.training.checkpoint import STEP  # loads torch, which nothing else here needs

        if not STEP.fullmatch(name):
            raise ValueError(f"{name} is no checkpoint")
        folder = self._run.checkpoints / name
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [(str(path.relative_to(folder)), [self._send(p) for p in cut_pieces(map_file(path))]) for path in files]

    def close(self) -> None:
        for writer in list(self._writers.values()):  # another thread may add one
            writer.close()


def _require_verb(verb: str, verbs: frozenset[str]) -> None:
    if verb not in verbs:
        raise ValueError(f"{verb} is not for searchers")


def note_place(run: RunDirectory, facts: Json) -> None:
    """Append a line to the record of where the run's workers are."""
    lines = JsonLines(run.path / "logs" / PLACES)
    lines.append(facts)
    lines.close()
