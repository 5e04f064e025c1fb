"""Indexes of trajectories by prompt: the rows of each, oldest first; which prompts have how many, and which the newest.

Invariant: a `Listing` of size n holds exactly the prompts with at least n rows in the index, and the order of `Newest`
follows from a listing and the arrivals alone, so an index that is rebuilt gives the same. Rows are numbers, in one
array for each prompt. Nothing scans: adding the newest and listing cost O(1), finding the position of another row O(log
n) of the prompt's own; a change of the order costs O(1) when it happens and O(log n) when the order is asked for, and
so does each prompt that is returned.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence


class Listing(Collection[str]):
    """Keeps prompt keys in no particular order, and reports recent additions."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self._added: list[str] = []  # the newest additions, in order; keys may have left since
        self._forgotten = 0  # how many earlier additions are no longer in `_added`

    def add(self, key: str) -> None:
        """Add `key`, which must not be in it."""
        self._keys[key] = None
        self._added.append(key)
        if len(self._added) > 2 * len(self._keys) + 64:
            half = len(self._added) // 2
            del self._added[:half]
            self._forgotten += half

    def remove(self, key: str) -> None:
        """Remove `key`, which must be in it."""
        del self._keys[key]

    def since(self, cursor: int) -> tuple[int, Collection[str]]:
        """Returns (new cursor, the keys added since `cursor`, possibly more); begin with 0."""
        end = self._forgotten + len(self._added)
        if cursor < self._forgotten:
            return end, self._keys
        return end, self._added[cursor - self._forgotten :]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys


class PromptIndex:
    """Keeps rows by prompt.

    arrival: the order of rows; it is kept whatever the order in which they are added.
    """

    def __init__(self, arrival: Callable[[int], int]) -> None:
        self._arrival = arrival
        self._by_prompt: dict[str, array[int]] = {}
        self._listings: dict[int, Listing] = {}

    def count(self, prompt: str) -> int:
        """Returns how many rows the prompt has."""
        return len(self._by_prompt.get(prompt, ()))

    def of(self, prompt: str) -> Sequence[int]:
        """Returns the prompt's rows, oldest first: a live view, not to be changed."""
        return self._by_prompt.get(prompt, ())

    def add(self, prompt: str, row: int) -> None:
        """Add a row, which must not be there yet."""
        rows = self._by_prompt.setdefault(prompt, array("i"))
        if not rows or self._arrival(rows[-1]) < self._arrival(row):
            rows.append(row)
        else:
            rows.insert(self._place(rows, row), row)
        if (listing := self._listings.get(len(rows))) is not None:
            listing.add(prompt)

    def remove(self, prompt: str, row: int) -> None:
        """Remove a row. Raises `KeyError` when it is not there."""
        rows = self._by_prompt[prompt]
        place = self._place(rows, row)
        if place == len(rows) or rows[place] != row:
            raise KeyError(row)
        if (listing := self._listings.get(len(rows))) is not None:
            listing.remove(prompt)
        del rows[place]
        if not rows:
            del self._by_prompt[prompt]

    def prompts(self, size: int) -> Listing:
        """Returns the prompts with at least `size` rows: a live view, maintained from the first call on."""
        if size not in self._listings:
            listing = self._listings[size] = Listing()
            for prompt, rows in self._by_prompt.items():
                if len(rows) >= size:
                    listing.add(prompt)
        return self._listings[size]

    def _place(self, rows: Sequence[int], row: int) -> int:
        if self._arrival(rows[0]) == self._arrival(row):
            return 0  # most that leave are the oldest
        return bisect_left(rows, self._arrival(row), key=self._arrival)


class Newest:
    """Orders the prompts of a listing by their newest arrival, while prompts and arrivals come and go.

    newest: the newest arrival of a prompt in `listing`; no two prompts have the same.
    """

    def __init__(self, listing: Listing, newest: Callable[[str], int]) -> None:
        self._listing = listing
        self._newest = newest
        self._there: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []  # negative arrivals, the newest first; some entries are outdated
        self._changed = set(listing)

    def changed(self, prompt: str) -> None:
        """Note that the prompt has come, has left, or has another newest arrival."""
        self._changed.add(prompt)

    def first(self, count: int, last: int) -> list[str]:
        """Returns the newest `count` prompts, newest first, and all further ones whose newest arrival is `last` or
        later.
        """
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
