"""A searcher's connections where the run's directory cannot be reached: each call goes to the gateway on the trainer's
machine.

Invariant: what `put` has returned from is on the disk of the run; no call waits longer than its deadline, and weights
that were handed out can be read even after their version has been pruned.

`Visitors` and `Visit` are for searchers that join a run from other machines: `tba search --run NAME --address
HOST:PORT`.

Invariant: the run treats a guest like a searcher that joined on its own machine (`elastic`): the gateway holds its
place, and the place's lock, as long as the guest gives a heartbeat now and then. A guest that is silent for `SILENCE`
seconds is taken for dead.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from tba.errors import DeadlineExceeded, HandedOutLost, UserError
from tba.protocols import Journal, PublishedWeights, Records
from tba.recipe import Recipe
from tba.recipe_names import VARIANT_MARK
from tba.replay.codec import from_wire, to_wire
from tba.runtime.cluster.gateway import JOURNAL, RECORDS, Offer, PieceSource
from tba.runtime.elastic import LocalMembership, Membership, enter_run
from tba.runtime.program import require_same_version
from tba.runtime.run_directory import RunDirectory
from tba.runtime.searcher_connections import Connections
from tba.training.checkpoint import Checkpoint
from tba.types import Json, Version
from tba.weights.atomic_dir import atomic_folder, remove_folder
from tba.weights.chunks import FlatBytes, tensors
from tba.weights.deltas import Restored

_FETCH_SECONDS = 1800.0  # that a version may take while pieces come from other searchers
_CLAIM_POLL_SECONDS = 0.01  # between two questions for pieces that others fetch
_FRESH_SECONDS = 0.05  # for which the newest known version counts as the newest


class Contact(Protocol):
    """Calls the gateway for a worker, each time within a deadline."""

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call this method of the gateway and return its result."""

    def fetch(self, references: Sequence[Any]) -> list[FlatBytes]:
        """Returns the pieces themselves. Raises `HandedOutLost` when they are no longer there."""

    def send(self, piece: FlatBytes) -> Any:
        """Put a piece where other searchers can fetch it, and return its reference."""


def remote_proxy(verbs: Iterable[str], call: Callable[..., Any]) -> Any:
    """Returns a remote implementation of a protocol with these methods: each calls with its name before its arguments.

    Trajectories are encoded here, where they were made, and decoded here, where they are needed.
    """

    def call_verb(verb: str, *arguments: Any, **options: Any) -> Any:
        return from_wire(call(verb, *map(to_wire, arguments), **{name: to_wire(v) for name, v in options.items()}))

    return SimpleNamespace(**{verb: partial(call_verb, verb) for verb in verbs})


class RemoteWeights:
    """Versions by name, pulled when they are asked for. The newest is looked up a few times a second at most.

    Pieces are fetched in a random order, from the trainer's node or from where another searcher has handed them on
    (`Exchange.piece`). node: the name of this searcher's.
    """

    def __init__(self, contact: Contact, node: str = "") -> None:
        self._contact, self._node = contact, node
        self._newest: PublishedWeights | None = None
        self._base: tuple[Version, dict[str, Any]] | None = None  # the newest base that was needed, fetched once
        self._polled_at = -_FRESH_SECONDS

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        """Returns the newest version if it is newer than `version` (None: any), else None. Never waits for one."""
        if time.monotonic() - self._polled_at > _FRESH_SECONDS:
            answer = self._contact.call("newest", None if self._newest is None else self._newest.version)
            if isinstance(answer, Offer):
                self._newest = self._as_published(answer)
            self._polled_at = time.monotonic()
        newest = self._newest
        return None if newest is None or (version is not None and newest.version <= version) else newest

    def at(self, version: Version) -> PublishedWeights:
        """Returns exactly that version. Raises `UserError` when it is not (or no longer) there."""
        offer = self._contact.call("at", version)
        if offer is None:
            self._polled_at = -math.inf  # what is remembered as the newest may be older than that
            raise UserError(f"version {version} of the weights is not (or no longer) there; give another")
        return self._as_published(offer)

    def _as_published(self, offer: Offer) -> PublishedWeights:
        def read() -> Mapping[str, Any]:
            try:
                return self._fetch_tensors(offer)
            except HandedOutLost:  # a gateway that was restarted hands it out again
                new_offer = self._contact.call("at", offer.version)
                if new_offer is None:
                    raise
                return self._fetch_tensors(new_offer)

        return PublishedWeights(offer.version, offer.manifest, read)

    def _fetch_tensors(self, offer: Offer) -> Mapping[str, Any]:
        fetched_tensors = tensors(offer.header, self._fetch_pieces(offer))
        if offer.base is None:
            return fetched_tensors
        base = self._base  # another thread may replace it by that of another version
        if base is None or base[0] != offer.base.version:
            base = self._base = (offer.base.version, tensors(offer.base.header, self._fetch_pieces(offer.base)))
        return Restored(base[1], fetched_tensors)

    def _fetch_pieces(self, offer: Offer) -> list[FlatBytes]:
        """Returns the pieces of a version, in their order. A piece that another searcher has claimed is waited for once
        all others are here; a claim that is not kept expires.
        """
        pieces: dict[int, FlatBytes] = {}
        missing_places = deque(random.sample(range(len(offer.references)), len(offer.references)))
        limit, waits = time.monotonic() + _FETCH_SECONDS, 0
        while missing_places:
            place = missing_places.popleft()
            piece = self._fetch_piece(offer, place)
            if piece is not None:
                pieces[place], waits = piece, 0
                continue
            missing_places.append(place)
            waits += 1
            if waits >= len(missing_places):  # all that are missing are on their way to others
                if time.monotonic() > limit:
                    raise DeadlineExceeded(
                        f"waited {_FETCH_SECONDS:g} s for pieces of version {offer.version} that other searchers fetch"
                    )
                time.sleep(_CLAIM_POLL_SECONDS)
        return [pieces[place] for place in range(len(offer.references))]

    def _fetch_piece(self, offer: Offer, place: int) -> FlatBytes | None:
        """Returns a piece; None while another searcher fetches it from the trainer's node."""
        source: PieceSource = self._contact.call("piece", offer.version, place, self._node)
        if source.kind == "wait":
            return None
        if source.kind == "relay":
            try:
                return self._contact.fetch(source.reference)[0]
            except (HandedOutLost, DeadlineExceeded):  # the searcher that handed it on is gone, or out of reach
                self._contact.call("hand_on", offer.version, place, ())
        piece = self._contact.fetch([offer.references[place]])[0]
        if source.kind == "claim":
            self._contact.call("hand_on", offer.version, place, [self._contact.send(piece)])
        return piece


def connect_via(contact: Contact, name: str, place: Json) -> Connections:
    """Returns all connections of a searcher at `place`, and releases prompts leased under its name before."""
    incarnation = int(contact.call("place", place))
    journal: Journal = remote_proxy(JOURNAL, partial(contact.call, "journal", name))
    records: Records = remote_proxy(RECORDS, partial(contact.call, "record"))
    journal.resume()
    node = str(place.get("node_id", "")) if isinstance(place, Mapping) else ""
    return Connections(journal, RemoteWeights(contact, node), records, incarnation)


@contextmanager
def checkpoint_through(contact: Contact, worker: str, path: Path, checkpoints: Path) -> Iterator[Path]:
    """Yields the path of a checkpoint of the trainer's machine where this worker can read it.

    That is the original, if the run's own `checkpoints` can be reached; otherwise it is fetched, and kept while the
    block runs. Raises `UserError` when it does not arrive whole.
    """
    if path.parent == checkpoints:
        yield path
        return
    local_copy = checkpoints / worker / path.name
    if local_copy.exists():  # left by an earlier life: it may be a different one of the same step
        remove_folder(local_copy)
    local_copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with atomic_folder(local_copy) as temporary:
        for name, references in contact.call("checkpoint", path.name):
            file = temporary / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as writer:
                for reference in references:
                    writer.write(contact.fetch([reference])[0])
        Checkpoint.load(temporary).verify()
    try:
        yield local_copy
    finally:
        remove_folder(local_copy)


def facts_with_text(run: RunDirectory) -> dict[str, Json]:
    """Returns recipe.json, with the text of the recipe's file: enough to rebuild the recipe anywhere."""
    facts = run.facts
    source = facts["recipe"].partition(VARIANT_MARK)[0]
    return {**facts, "path": str(run.path.resolve()), "text": Path(source).read_text() if facts["digest"] else None}


def reachable_directory(facts: Json, scratch: Callable[[], Path]) -> RunDirectory:
    """Returns the run's directory where it can be reached; else one below `scratch()` with the same recipe and logs of
    its own.

    The recipe's file comes along, so that only what it imports has to be here already.
    """
    original = Path(facts["path"])
    if (original / "recipe.json").is_file() and RunDirectory.open(original).facts["started"] == facts["started"]:
        return RunDirectory.open(original)
    stand_in_folder = scratch() / f"{original.name}-{facts['started']:.0f}"
    (stand_in_folder / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = {**facts}
    text = facts.pop("text")
    if text is not None:
        _, mark, variant = facts["recipe"].partition(VARIANT_MARK)
        (stand_in_folder / "recipe.py").write_text(text)
        facts["recipe"] = f"{stand_in_folder / 'recipe.py'}{mark}{variant}"
    run = RunDirectory(stand_in_folder)
    run.write_facts(facts)
    return run


SILENCE = 900.0  # seconds: the guest may be loading a model, or waiting for a reward


@dataclass
class _Guest:
    membership: LocalMembership
    last_heartbeat: float  # its last heartbeat, by a monotonic clock


@dataclass
class Visitors:
    """The gateway's view of the searchers that have joined from other machines."""

    run: RunDirectory
    recipe: Recipe
    on_departure: Callable[[str], None] = lambda name: None  # called with the name of each guest that has left or died
    now: Callable[[], float] = time.monotonic
    _guests: dict[int, _Guest] = field(default_factory=dict)

    def join(self, version: str) -> tuple[int, Json]:
        """Returns the guest's number, and all that rebuilds the recipe. `version` is that of the guest's program.

        Raises `UserError` when the run cannot be joined.
        """
        self.remove_silent()
        require_same_version(self.run.facts, "a searcher that would join", version)
        membership = enter_run(self.run, self.recipe, lambda: False)
        self._guests[membership.number] = _Guest(membership, self.now())
        return membership.number, facts_with_text(self.run)

    def stay(self, number: int) -> str | None:
        """Note a heartbeat of the guest; returns why it is to leave, if it is."""
        self.remove_silent()
        guest = self._guests.get(number)
        if guest is None:  # the gateway was restarted, or has taken the guest for dead: it may join again
            return "the run had lost touch with it"
        guest.last_heartbeat = self.now()
        return guest.membership.reason if guest.membership.stop() else None

    def leave(self, number: int, reason: str) -> None:
        """Let the guest leave, with its counts whole."""
        guest = self._guests.pop(number, None)
        if guest is not None:
            guest.membership.leave(reason)
        self.on_departure(f"searcher-{number}")

    def remove_silent(self) -> None:
        """Remove the guests that have died: the driver sees that and gives back what they had leased."""
        for number, guest in list(self._guests.items()):
            if self.now() - guest.last_heartbeat > SILENCE:
                del self._guests[number]
                guest.membership.file.close()
                self.on_departure(guest.membership.name)


@dataclass
class Visit(Membership):
    """A membership of a guest, which asks the gateway. Each question is also the guest's heartbeat."""

    contact: Contact

    def reason_to_leave(self) -> str | None:
        """Returns why the gateway wants the guest to leave; None: it does not."""
        reason: str | None = self.contact.call("stay", self.number)
        return reason
