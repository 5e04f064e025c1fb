"""The prompts of a listing by their newest arrival, while prompts and arrivals come and go.

Invariant: the order follows from the listing and the arrivals alone, so a memory that is rebuilt gives the same. A
change costs O(1) when it happens and O(log n) when the order is asked for, and so does each prompt that is given.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tba.replay.prompt_index import Listing


class Newest:
    """newest: the newest arrival of a prompt in `listing`; no two prompts have the same."""

    def __init__(self, listing: Listing, newest: Callable[[str], int]) -> None:
        self._listing = listing
        self._newest = newest
        self._there: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []  # below 0, the newest first; and some that are not so any longer
        self._changed = set(listing)

    def changed(self, prompt: str) -> None:
        """It has come, gone, or its newest arrival is another."""
        self._changed.add(prompt)

    def first(self, count: int, last: int) -> list[str]:
        """The newest `count` prompts, newest first, and all further ones whose newest arrival is `last` or later."""
        self._take_in_changes()
        heap, given = self._heap, list[tuple[int, str]]()
        while heap and (len(given) < count or -heap[0][0] >= last):
            entry = heapq.heappop(heap)
            if self._there.get(entry[1]) == -entry[0] and entry not in given[-1:]:
                given.append(entry)
        for entry in given:
            heapq.heappush(heap, entry)
        return [prompt for _, prompt in given]

    def _take_in_changes(self) -> None:
        for prompt in self._changed:
            if prompt not in self._listing:
                self._there.pop(prompt, None)
            elif (newest := self._newest(prompt)) != self._there.get(prompt):
                self._there[prompt] = newest
                heapq.heappush(self._heap, (-newest, prompt))
        self._changed.clear()
        if len(self._heap) > 2 * len(self._there) + 64:
            self._heap = [(-newest, prompt) for prompt, newest in self._there.items()]
            heapq.heapify(self._heap)
