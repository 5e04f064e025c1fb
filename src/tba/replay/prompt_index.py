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
        self._recent_keys: list[str] = []  # the newest additions, in order; keys may have left since
        self._forgotten_count = 0  # how many earlier additions are no longer in `_added`

    def add(self, key: str) -> None:
        """Add `key`, which must not be in it."""
        self._keys[key] = None
        self._recent_keys.append(key)
        if len(self._recent_keys) > 2 * len(self._keys) + 64:
            half = len(self._recent_keys) // 2
            del self._recent_keys[:half]
            self._forgotten_count += half

    def remove(self, key: str) -> None:
        """Remove `key`, which must be in it."""
        del self._keys[key]

    def since(self, cursor: int) -> tuple[int, Collection[str]]:
        """Returns (new cursor, the keys added since `cursor`, possibly more); begin with 0."""
        end = self._forgotten_count + len(self._recent_keys)
        if cursor < self._forgotten_count:
            return end, self._keys
        return end, self._recent_keys[cursor - self._forgotten_count :]

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


class NewestPrompts:
    """Orders the prompts of a listing by their newest arrival, while prompts and arrivals come and go.

    newest: the newest arrival of a prompt in `listing`; no two prompts have the same.
    """

    def __init__(self, listing: Listing, newest_arrival: Callable[[str], int]) -> None:
        self._listing = listing
        self._newest_arrival = newest_arrival
        self._arrivals: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []  # negative arrivals, the newest first; some entries are outdated
        self._changed_prompts = set(listing)

    def note_change(self, prompt: str) -> None:
        """Note that the prompt has come, has left, or has another newest arrival."""
        self._changed_prompts.add(prompt)

    def newest(self, count: int, last_arrival: int) -> list[str]:
        """Returns the newest `count` prompts, newest first, and all further ones whose newest arrival is `last` or
        later.
        """
        self._apply_changes()
        heap, entries = self._heap, list[tuple[int, str]]()
        while heap and (len(entries) < count or -heap[0][0] >= last_arrival):
            entry = heapq.heappop(heap)
            if self._arrivals.get(entry[1]) == -entry[0] and entry not in entries[-1:]:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(heap, entry)
        return [prompt for _, prompt in entries]

    def _apply_changes(self) -> None:
        for prompt in self._changed_prompts:
            if prompt not in self._listing:
                self._arrivals.pop(prompt, None)
            elif (arrival := self._newest_arrival(prompt)) != self._arrivals.get(prompt):
                self._arrivals[prompt] = arrival
                heapq.heappush(self._heap, (-arrival, prompt))
        self._changed_prompts.clear()
        if len(self._heap) > 2 * len(self._arrivals) + 64:
            self._heap = [(-arrival, prompt) for prompt, arrival in self._arrivals.items()]
            heapq.heapify(self._heap)
