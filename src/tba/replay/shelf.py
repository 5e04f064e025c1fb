"""Distinct trajectories by prompt, and which prompts have how many of them, without scanning.

Invariant: a `Listing` of size n holds exactly the prompts with at least n distinct trajectories on the shelf. Adding,
replacing, removing and listing cost O(1); `of` costs the prompt's own trajectories, once after each change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from tba.types import Trajectory


class Listing(Sequence[str]):
    """A set of prompt keys in no particular order, which can also tell what was added lately."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._place: dict[str, int] = {}
        self._added: list[str] = []  # the newest additions, in order; keys may have left since
        self._forgotten = 0  # how many earlier additions are not in `_added` any more

    def add(self, key: str) -> None:
        """`key` must not be in it."""
        self._place[key] = len(self._keys)
        self._keys.append(key)
        self._added.append(key)
        if len(self._added) > 2 * len(self._keys) + 64:
            half = len(self._added) // 2
            del self._added[:half]
            self._forgotten += half

    def remove(self, key: str) -> None:
        """`key` must be in it; the last takes its place."""
        place, last = self._place.pop(key), self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._place[last] = place

    def since(self, cursor: int) -> tuple[int, Sequence[str]]:
        """(new cursor, the keys added since `cursor`, possibly more); begin with 0."""
        end = self._forgotten + len(self._added)
        if cursor < self._forgotten:
            return end, self._keys
        return end, self._added[cursor - self._forgotten :]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._keys[index]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._place


class Shelf:
    """Trajectories by prompt, oldest first; one for each completion digest if they are `distinct`.

    arrival: the place of each uid in the order of arrival, for a shelf that is not filled in that order.
    """

    def __init__(self, distinct: bool = True, arrival: Mapping[str, int] | None = None) -> None:
        self._distinct = distinct
        self._arrival = arrival
        self._by_prompt: dict[str, OrderedDict[str, Trajectory]] = {}
        self._of: dict[str, list[Trajectory]] = {}  # what `of` answered; gone once the prompt changes
        self._listings: dict[int, Listing] = {}

    def __iter__(self) -> Iterator[Trajectory]:
        """Prompt after prompt."""
        for bucket in self._by_prompt.values():
            yield from bucket.values()

    def count(self, prompt: str) -> int:
        """How many distinct trajectories the prompt has."""
        return len(self._by_prompt.get(prompt, ()))

    def copy_of(self, trajectory: Trajectory) -> Trajectory | None:
        """What `trajectory` would replace, if that is there: the same completion of its prompt."""
        bucket = self._by_prompt.get(trajectory.prompt.key)
        return None if bucket is None else bucket.get(self._key(trajectory))

    def _key(self, trajectory: Trajectory) -> str:
        return trajectory.completion.digest if self._distinct else trajectory.uid

    def oldest(self, prompt: str) -> Trajectory:
        """The one that was added first. Raises `KeyError` when there is none."""
        return next(iter(self._by_prompt[prompt].values()))

    def add(self, trajectory: Trajectory) -> None:
        """Its completion must not be there."""
        prompt = trajectory.prompt.key
        bucket = self._by_prompt.setdefault(prompt, OrderedDict())
        bucket[self._key(trajectory)] = trajectory
        self._of.pop(prompt, None)
        if (listing := self._listings.get(len(bucket))) is not None:
            listing.add(prompt)

    def replace(self, trajectory: Trajectory) -> None:
        """Takes the place of the one with its completion, which has to be there."""
        self._by_prompt[trajectory.prompt.key][self._key(trajectory)] = trajectory
        self._of.pop(trajectory.prompt.key, None)

    def remove(self, trajectory: Trajectory) -> None:
        """Raises `KeyError` when it is not there."""
        prompt = trajectory.prompt.key
        bucket = self._by_prompt[prompt]
        if (listing := self._listings.get(len(bucket))) is not None:
            listing.remove(prompt)
        del bucket[self._key(trajectory)]
        self._of.pop(prompt, None)
        if not bucket:
            del self._by_prompt[prompt]

    def of(self, prompt: str) -> Sequence[Trajectory]:
        """The prompt's trajectories, oldest first; not to be changed."""
        found = self._of.get(prompt)
        if found is None:
            if (bucket := self._by_prompt.get(prompt)) is None:
                return ()
            found = list(bucket.values())
            arrival = self._arrival
            if arrival is not None:
                found.sort(key=lambda t: arrival[t.uid])  # nearly sorted: nearly free
            self._of[prompt] = found
        return found

    def prompts(self, size: int) -> Listing:
        """The prompts with at least `size` distinct trajectories: a live view, kept up from the first time asked."""
        if size not in self._listings:
            listing = self._listings[size] = Listing()
            for prompt, bucket in self._by_prompt.items():
                if len(bucket) >= size:
                    listing.add(prompt)
        return self._listings[size]
