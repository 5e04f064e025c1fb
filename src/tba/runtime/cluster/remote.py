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

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from tba.errors import HandedOutLost, UserError
from tba.protocols import Journal, PublishedWeights, Records
from tba.recipe import Recipe
from tba.replay.codec import from_wire, to_wire
from tba.runtime.cluster.gateway import JOURNAL, RECORDS, Offer
from tba.runtime.connections import Connections
from tba.runtime.elastic import Leaving, Place, enter
from tba.runtime.program import refuse_others
from tba.runtime.run_directory import RunDirectory
from tba.shipped import MARK
from tba.training.checkpoint import Checkpoint
from tba.types import Json, Version
from tba.weights.atomic_dir import atomic_folder, remove_folder
from tba.weights.chunks import FlatBytes, tensors
from tba.weights.deltas import Restored

_FRESH = 0.05  # seconds for which the newest known version counts as the newest


class Contact(Protocol):
    """Calls the gateway for a worker, each time within a deadline."""

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call this method of the gateway and return its result."""
        ...

    def fetch(self, references: Sequence[Any]) -> list[FlatBytes]:
        """Returns the pieces themselves. Raises `HandedOutLost` when they are no longer there."""
        ...


def remote(verbs: Iterable[str], call: Callable[..., Any]) -> Any:
    """Returns a remote implementation of a protocol with these methods: each is a call, with its name before its
    arguments.

    Trajectories are encoded here, where they were made, and decoded here, where they are needed.
    """

    def ask(verb: str, *arguments: Any, **named: Any) -> Any:
        return from_wire(call(verb, *map(to_wire, arguments), **{name: to_wire(v) for name, v in named.items()}))

    return SimpleNamespace(**{verb: partial(ask, verb) for verb in verbs})


class RemoteWeights:
    """Versions by name, pulled when they are asked for. The newest is looked up a few times a second at most."""

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        self._newest: PublishedWeights | None = None
        self._base: tuple[Version, dict[str, Any]] | None = None  # the newest base that was needed, fetched once
        self._looked = -_FRESH

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        """Returns the newest version if it is newer than `version` (None: any), else None. Never waits for one."""
        if time.monotonic() - self._looked > _FRESH:
            seen = None if self._newest is None else self._newest.version
            found = self._contact.call("newest", seen)
            if isinstance(found, Offer):
                self._newest = self._published(found)
            self._looked = time.monotonic()
        newest = self._newest
        return None if newest is None or (version is not None and newest.version <= version) else newest

    def at(self, version: Version) -> PublishedWeights:
        """Returns exactly that version. Raises `UserError` when it is not (or no longer) there."""
        offer = self._contact.call("at", version)
        if offer is None:
            raise UserError(f"version {version} of the weights is not (or no longer) there; give another")
        return self._published(offer)

    def _published(self, offer: Offer) -> PublishedWeights:
        def read() -> Mapping[str, Any]:
            try:
                return self._fetched(offer)
            except HandedOutLost:  # a gateway that was restarted hands it out again
                again = self._contact.call("at", offer.version)
                if again is None:
                    raise
                return self._fetched(again)

        return PublishedWeights(offer.version, offer.manifest, read)

    def _fetched(self, offer: Offer) -> Mapping[str, Any]:
        own = tensors(offer.header, self._contact.fetch(offer.references))
        if offer.base is None:
            return own
        if self._base is None or self._base[0] != offer.base.version:
            self._base = (offer.base.version, tensors(offer.base.header, self._contact.fetch(offer.base.references)))
        return Restored(self._base[1], own)


def through(contact: Contact, name: str, place: Json) -> Connections:
    """Returns all connections of a searcher, which has begun at `place`. Prompts leased under this name earlier are
    given back.
    """
    incarnation = int(contact.call("place", place))
    journal: Journal = remote(JOURNAL, partial(contact.call, "journal", name))
    records: Records = remote(RECORDS, partial(contact.call, "record"))
    journal.resume()
    return Connections(journal, RemoteWeights(contact), records, incarnation)


@contextmanager
def checkpoint_through(contact: Contact, worker: str, there: Path, checkpoints: Path) -> Iterator[Path]:
    """Yields the path of a checkpoint of the trainer's machine where this worker can read it.

    That is the original, if the run's own `checkpoints` can be reached; otherwise it is fetched, and kept while the
    block runs. Raises `UserError` when it does not arrive whole.
    """
    if there.parent == checkpoints:
        yield there
        return
    here = checkpoints / worker / there.name
    if here.exists():  # left by an earlier life: it may be a different one of the same step
        remove_folder(here)
    here.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with atomic_folder(here) as temporary:
        for name, references in contact.call("checkpoint", there.name):
            file = temporary / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                for reference in references:
                    out.write(contact.fetch([reference])[0])
        Checkpoint.load(temporary).verify()
    try:
        yield here
    finally:
        remove_folder(here)


def whole_facts(run: RunDirectory) -> dict[str, Json]:
    """Returns recipe.json, with the text of the recipe's file: enough to rebuild the recipe anywhere."""
    facts = run.facts
    source = facts["recipe"].partition(MARK)[0]
    return {**facts, "path": str(run.path.resolve()), "text": Path(source).read_text() if facts["digest"] else None}


def stand_in(facts: Json, scratch: Callable[[], Path]) -> RunDirectory:
    """Returns the run's directory where it can be reached; else one below `scratch()` with the same recipe and logs of
    its own.

    The recipe's file comes along, so that only what it imports has to be here already.
    """
    there = Path(facts["path"])
    if (there / "recipe.json").is_file() and RunDirectory.open(there).facts["started"] == facts["started"]:
        return RunDirectory.open(there)
    here = scratch() / f"{there.name}-{facts['started']:.0f}"
    (here / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = {**facts}
    text = facts.pop("text")
    if text is not None:
        _, mark, variant = facts["recipe"].partition(MARK)
        (here / "recipe.py").write_text(text)
        facts["recipe"] = f"{here / 'recipe.py'}{mark}{variant}"
    run = RunDirectory(here)
    run.write_facts(facts)
    return run


SILENCE = 900.0  # seconds: the guest may be loading a model, or waiting for a reward


@dataclass
class _Guest:
    place: Place
    sign: float  # its last heartbeat, by a monotonic clock


@dataclass
class Visitors:
    """The gateway's side: which visitors there are."""

    run: RunDirectory
    recipe: Recipe
    gone: Callable[[str], None] = lambda name: None  # called with the name of each guest that has left or died
    now: Callable[[], float] = time.monotonic
    _there: dict[int, _Guest] = field(default_factory=dict)

    def join(self, version: str) -> tuple[int, Json]:
        """Returns a number, and all that rebuilds the recipe. `version` is that of the guest's program.

        Raises `UserError` when the run cannot be joined.
        """
        self.look()
        refuse_others(self.run.facts, "a searcher that would join", version)
        place = enter(self.run, self.recipe, lambda: False)
        self._there[place.number] = _Guest(place, self.now())
        return place.number, whole_facts(self.run)

    def stay(self, number: int) -> str | None:
        """Take a heartbeat; returns why the guest is to leave, if it is."""
        self.look()
        guest = self._there.get(number)
        if guest is None:  # the gateway was restarted, or has taken the guest for dead: it may join again
            return "the run had lost touch with it"
        guest.sign = self.now()
        return guest.place.why if guest.place.stop() else None

    def leave(self, number: int, why: str) -> None:
        """The guest leaves, with its counts whole."""
        guest = self._there.pop(number, None)
        if guest is not None:
            guest.place.leave(why)
        self.gone(f"searcher-{number}")

    def look(self) -> None:
        """Remove the visitors that have died: the driver sees that and gives back what they had leased."""
        for number, guest in list(self._there.items()):
            if self.now() - guest.sign > SILENCE:
                del self._there[number]
                guest.place.file.close()
                self.gone(guest.place.name)


@dataclass
class Visit(Leaving):
    """The guest's side. Each question is also its heartbeat."""

    contact: Contact

    def called(self) -> str | None:
        """Returns what the gateway says."""
        why: str | None = self.contact.call("stay", self.number)
        return why
