"""Prompts drawn uniformly without replacement, epoch after epoch, while prompts come and go.

Invariant: within an epoch each prompt is drawn at most once while it stays, and every draw is uniform over the prompts
not yet drawn that are there and not to be avoided. A prompt that arrives joins the epoch under way. Nothing depends on
the order of a listing, so a deck restored over a rebuilt store goes on exactly. A draw, and an arrival, cost O(log n)
amortised: an epoch of n draws is sorted once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from tba.replay.shelf import Listing
from tba.types import Json


class Deck:
    """The prompts of one epoch: drawn, and not yet drawn."""

    def __init__(self) -> None:
        self._undrawn: list[str] = []
        self._seen: set[str] = set()  # in this epoch: drawn, or in `_undrawn`
        self._listing: Sequence[str] | None = None
        self._cursor = 0

    def refresh(self, prompts: Sequence[str]) -> None:
        """Let those that arrived since the last time join the epoch."""
        if prompts is not self._listing:
            self._listing, self._cursor = prompts, 0
        arrived: Iterable[str] = prompts
        if isinstance(prompts, Listing):
            self._cursor, added = prompts.since(self._cursor)
            arrived = (prompt for prompt in added if prompt in prompts)
        new = sorted({prompt for prompt in arrived if prompt not in self._seen})
        self._seen.update(new)
        self._undrawn += new
        if len(self._seen) > 4 * len(prompts) + 1024:  # most have left: an epoch of endless new prompts never ends
            present = set(prompts)
            self._undrawn = [prompt for prompt in self._undrawn if prompt in present]
            self._seen &= present

    def draw(
        self,
        prompts: Sequence[str],
        there: Callable[[str], bool],
        avoid: Collection[str],
        rng: np.random.Generator,
    ) -> str | None:
        """One prompt that is `there` and not in `avoid`; None when there is none. A new epoch begins when need be.

        `prompts` lists exactly those that are there. What is to be avoided keeps its turn.
        """
        self.refresh(prompts)
        drawn = self._take(there, avoid, rng)
        if drawn is None and any(prompt not in avoid for prompt in prompts):
            self._undrawn = sorted(prompts)
            self._seen = set(prompts)
            drawn = self._take(there, avoid, rng)
        return drawn

    def state(self) -> Json:
        """What `restore` takes."""
        return {"undrawn": list(self._undrawn), "drawn": sorted(self._seen.difference(self._undrawn))}

    def restore(self, state: Json) -> None:
        """Go on where `state` was taken."""
        self._undrawn = list(state["undrawn"])
        self._seen = {*state["undrawn"], *state["drawn"]}
        self._listing = None

    def _take(self, there: Callable[[str], bool], avoid: Collection[str], rng: np.random.Generator) -> str | None:
        undrawn, kept, drawn = self._undrawn, [], None
        while undrawn and drawn is None:
            place = int(rng.integers(len(undrawn)))
            undrawn[place], undrawn[-1] = undrawn[-1], undrawn[place]
            prompt = undrawn.pop()
            if not there(prompt):
                self._seen.discard(prompt)  # it joins again if it comes back
            elif prompt in avoid:
                kept.append(prompt)
            else:
                drawn = prompt
        undrawn.extend(kept)
        return drawn
