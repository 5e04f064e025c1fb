"""Searchers that join a run from other machines: `tba search --run NAME --address HOST:PORT`.

Invariant: to the run a guest is one who joined on its own machine (`joining`): the exchange holds its place, and with
it its lock, as long as the guest says now and then that it is there. One that says nothing for `SILENCE` seconds died.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tba.recipe import Recipe
from tba.runtime.directory import RunDirectory
from tba.runtime.joining import Leaving, Place, enter
from tba.runtime.program import refuse_others
from tba.runtime.remote import Contact, whole_facts
from tba.types import Json

SILENCE = 900.0  # seconds: it may be loading a model, or waiting for a reward


@dataclass
class _Guest:
    place: Place
    sign: float  # by a clock that never goes back


@dataclass
class Guests:
    """The exchange's end: who is there."""

    run: RunDirectory
    recipe: Recipe
    gone: Callable[[str], None] = lambda name: None  # told of each who has left or died
    now: Callable[[], float] = time.monotonic
    _there: dict[int, _Guest] = field(default_factory=dict)

    def join(self, version: str) -> tuple[int, Json]:
        """A number, and all that rebuilds the recipe. `version` is that of the guest's program.

        Raises `UserError` when the run cannot be joined.
        """
        self.look()
        refuse_others(self.run.facts, "a searcher that would join", version)
        place = enter(self.run, self.recipe, lambda: False)
        self._there[place.number] = _Guest(place, self.now())
        return place.number, whole_facts(self.run)

    def stay(self, number: int) -> str | None:
        """A sign of life; why it is to leave, if it is."""
        self.look()
        guest = self._there.get(number)
        if guest is None:  # the exchange was made anew, or has taken it for dead: it may join again
            return "the run had lost touch with it"
        guest.sign = self.now()
        return guest.place.why if guest.place.stop() else None

    def leave(self, number: int, why: str) -> None:
        """With its counts whole."""
        guest = self._there.pop(number, None)
        if guest is not None:
            guest.place.leave(why)
        self.gone(f"searcher-{number}")

    def look(self) -> None:
        """Let go of those that have died: the driver sees that and gives back what they held."""
        for number, guest in list(self._there.items()):
            if self.now() - guest.sign > SILENCE:
                del self._there[number]
                guest.place.file.close()
                self.gone(guest.place.name)


@dataclass
class Visit(Leaving):
    """The guest's end. To ask is its sign of life."""

    contact: Contact

    def called(self) -> str | None:
        """As the exchange says."""
        why: str | None = self.contact.call("stay", self.number)
        return why
