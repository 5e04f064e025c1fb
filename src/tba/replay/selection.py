"""Which prompts, and which of their trajectories, go into a batch: the paper's recency / reward selection.

Invariant: no trajectory is twice in a group, prompts are drawn without replacement epoch by epoch, and a reward only
ever decides between the responses of one prompt. The paper's m lives here and nowhere else. Where a task has one prompt
only, every group of a batch is of it, and rewards decide between all trajectories there are.

Shape legend: N the trajectories of one prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.protocols import TrajectoryStore
from tba.replay.deck import Deck
from tba.types import Group, Json

SMALLEST_GROUP = 2  # log Z of a single trajectory is its own residual: it teaches nothing


class RunningSelector(Protocol):
    """A `Selector` (see protocols) that counts what it drew and can be resumed."""

    @property
    def counts(self) -> Mapping[str, int]: ...

    def select(self, store: TrajectoryStore, groups: int, size: int, rng: np.random.Generator) -> list[Group]: ...

    def state(self) -> Json: ...

    def restore(self, state: Json) -> None: ...


class Selection(Protocol):
    """The settings of a selector."""

    def start(self) -> RunningSelector: ...


@dataclass(frozen=True)
class RecencyReward:
    """Each group is, independently, recent with probability m, else drawn by reward (arXiv 2503.18929, section 4)."""

    m: float = 0.95  # the paper's most-on-policy probability
    inverse_temperature: float = 0.0  # of softmax(reward x this) over a prompt's responses; 0 = uniform
    mix: Literal["chance", "batch", "group"] = "chance"  # what is recent: each group with probability m (paper), the
    # share m of a batch's groups, or the share m of each group's trajectories
    disjoint: bool = False  # groups of one prompt in one batch share no trajectory, as far as there are enough

    def __post_init__(self) -> None:
        if not 0 <= self.m <= 1:
            raise UserError(f"--replay.selection.m is {self.m}, it is a probability: give 0 to 1")
        if not (self.inverse_temperature >= 0 and math.isfinite(self.inverse_temperature)):
            raise UserError(
                f"--replay.selection.inverse-temperature is {self.inverse_temperature}: give 0 (uniform) or more"
            )

    def start(self) -> RecencyRewardSelector:
        """A selector at the beginning of its first epoch."""
        return RecencyRewardSelector(self)


class RecencyRewardSelector:
    """Draws groups; keeps the two epochs (of recent prompts, of all prompts) and the counts.

    counts: groups "recent" and "reward" as they came out; "recent_shortfall", meant to be recent but no further prompt
    had K recent trajectories; "ragged", smaller than K; "repeated", of a prompt that the batch had already.
    """

    def __init__(self, settings: RecencyReward) -> None:
        self.settings = settings
        self.m = settings.m  # may be moved
        self.counts: Counter[str] = Counter(recent=0, reward=0, recent_shortfall=0, ragged=0, repeated=0)
        self._recent = Deck()
        self._all = Deck()

    def select(self, store: TrajectoryStore, groups: int, size: int, rng: np.random.Generator) -> list[Group]:
        """`groups` groups of `size` distinct trajectories each; fewer (at least 2) where a prompt has no more.

        A prompt comes twice only when every prompt is in the batch already. Raises `ValueError` when no prompt has 2
        distinct trajectories.
        """
        chosen: list[Group] = []
        drawn: dict[str, set[int]] = {}  # by prompt of the batch, the numbers of what it has given
        least = size if self.settings.mix != "group" else max(SMALLEST_GROUP, math.ceil(round(self.m * size, 9)))
        for recent in self._halves(groups, rng):
            prompt, is_recent = self._prompt(store, least, recent, drawn, rng)
            repeated = prompt in drawn
            own = drawn.setdefault(prompt, set())
            if self.settings.mix == "group" or (self.settings.disjoint and repeated):
                group = self._mixed(store, prompt, size, is_recent, own if self.settings.disjoint else set(), rng)
            else:
                group = self._plain(store, prompt, size, is_recent, own, rng)
            self._count(group, size, is_recent, recent, repeated)
            chosen.append(group)
        return chosen

    def _halves(self, groups: int, rng: np.random.Generator) -> list[bool]:
        """Of each group, whether it is meant to be recent (with `mix = "group"`: whether a part of it is)."""
        recent: npt.NDArray[np.bool_] = rng.random(groups) < self.m
        if self.settings.mix == "batch":
            recent = rng.permutation(groups) < _share(self.m * groups, rng)
        elif self.settings.mix == "group":
            recent = np.full(groups, self.m > 0)
        return [bool(r) for r in recent]

    def _plain(
        self, store: TrajectoryStore, prompt: str, size: int, is_recent: bool, own: set[int], rng: np.random.Generator
    ) -> Group:
        """Of one half, whatever the batch has already; what it takes is added to `own`."""
        trajectories = store.recent(prompt) if is_recent else store.of(prompt)
        if is_recent or self.settings.inverse_temperature == 0:
            rows = uniform(len(trajectories), size, rng)
        else:
            rows = softmax_without_replacement(store.rewards(prompt), self.settings.inverse_temperature, size, rng)
        if self.settings.disjoint:
            numbers = store.recent_numbers(prompt) if is_recent else store.numbers(prompt)
            own.update(numbers[i] for i in rows)
        return Group(tuple(trajectories[i] for i in rows))

    def _mixed(
        self, store: TrajectoryStore, prompt: str, size: int, is_recent: bool, taken: set[int], rng: np.random.Generator
    ) -> Group:
        """Of both halves, or apart from `taken` as far as there are enough; what it takes is added to that."""
        share = (self.m if self.settings.mix == "group" else 1.0) if is_recent else 0.0
        both = is_recent and self.settings.mix == "group"
        wanted = size + len(taken)
        recent, recent_numbers = store.recent(prompt), store.recent_numbers(prompt)
        fresh = in_turn(np.zeros(len(recent)), 0.0, wanted, rng) if is_recent else []
        fresh = _apart_first(fresh, recent_numbers, taken)
        count = min(_share(share * size, rng), len(fresh))
        group = {recent_numbers[i]: recent[i] for i in fresh[:count]}
        if both or not is_recent:
            kept, numbers = store.of(prompt), store.numbers(prompt)
            order = in_turn(store.rewards(prompt), self.settings.inverse_temperature, wanted + count, rng)
            for i in _apart_first([i for i in order if numbers[i] not in group], numbers, taken)[: size - count]:
                group[numbers[i]] = kept[i]
        for i in fresh[count:]:  # where less is kept than is wanted
            if len(group) < size:
                group.setdefault(recent_numbers[i], recent[i])
        taken.update(group)
        return Group(tuple(group.values()))

    def state(self) -> Json:
        """What `restore` takes."""
        return {"recent": self._recent.state(), "all": self._all.state(), "counts": dict(self.counts)}

    def restore(self, state: Json) -> None:
        """Go on where `state` was taken."""
        self._recent.restore(state["recent"])
        self._all.restore(state["all"])
        self.counts = Counter(state["counts"])

    def _prompt(
        self, store: TrajectoryStore, size: int, recent: bool, batch: Collection[str], rng: np.random.Generator
    ) -> tuple[str, bool]:
        """(a prompt, whether it is drawn as recent): first one that is not in the batch, recent if it was meant so."""
        everything: frozenset[str] = frozenset()
        for avoid in (batch, everything):
            if recent:
                listed = store.recent_prompts(size)
                prompt = self._recent.draw(listed, lambda p: len(store.recent(p)) >= size, avoid, rng)
                if prompt is not None:
                    return prompt, True
            listed = store.prompts(SMALLEST_GROUP)
            prompt = self._all.draw(listed, lambda p: len(store.of(p)) >= SMALLEST_GROUP, avoid, rng)
            if prompt is not None:
                return prompt, False
        raise ValueError(f"no prompt has {SMALLEST_GROUP} distinct trajectories to make a group of")

    def _count(self, group: Group, size: int, is_recent: bool, meant_recent: bool, repeated: bool) -> None:
        self.counts["recent" if is_recent else "reward"] += 1
        self.counts["recent_shortfall"] += meant_recent and not is_recent
        self.counts["ragged"] += len(group) < size
        self.counts["repeated"] += repeated


def uniform(count: int, size: int, rng: np.random.Generator) -> list[int]:
    """`size` of `count` indices, all subsets equally likely; all of them when there are no more.

    By Floyd's method (Bentley and Floyd 1987): its cost does not depend on `count`.
    """
    if count <= size:
        return list(range(count))
    last = np.arange(count - size, count)
    chosen: dict[int, None] = {}
    for highest, drawn in zip(last.tolist(), rng.integers(last + 1).tolist(), strict=True):
        chosen[highest if drawn in chosen else drawn] = None
    return list(chosen)


def softmax_without_replacement(
    reward_N: npt.NDArray[np.float64], inverse_temperature: float, size: int, rng: np.random.Generator
) -> list[int]:
    """`size` indices drawn one after another from softmax(reward x inverse_temperature), without replacement.

    By Gumbel top-k (Vieira 2014; Kool et al. 2019): the `size` largest of logit + Gumbel noise are exactly such a
    draw. In log space nothing underflows; what is infinitely less likely than the best comes last, in random order.
    """
    count = len(reward_N)
    if count <= size:
        return list(range(count))
    order_N, key_N = _keys(reward_N, inverse_temperature, rng)
    chosen: list[int] = order_N[np.argpartition(-key_N, size - 1)[:size]].tolist()
    return chosen


def in_turn(
    reward_N: npt.NDArray[np.float64], inverse_temperature: float, size: int, rng: np.random.Generator
) -> list[int]:
    """The same draw in the order in which it is made: without some of them the others are a draw from the rest.

    inverse_temperature: 0 is uniform.
    """
    count = len(reward_N)
    if inverse_temperature == 0:
        chosen: list[int] = rng.permutation(uniform(count, size, rng)).tolist()
        return chosen
    order_N, key_N = _keys(reward_N, inverse_temperature, rng)
    best = np.argpartition(-key_N, size - 1)[:size] if size < count else np.arange(count)
    ordered: list[int] = order_N[best[np.argsort(-key_N[best])]].tolist()
    return ordered


def _keys(
    reward_N: npt.NDArray[np.float64], inverse_temperature: float, rng: np.random.Generator
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """A random order, and in it logit + Gumbel noise: equal keys are taken by position, which is hereby random."""
    order_N = rng.permutation(len(reward_N))
    with np.errstate(over="ignore"):
        logit_N = (reward_N[order_N] - reward_N.max(initial=-np.inf)) * inverse_temperature
    return order_N, logit_N + rng.gumbel(size=len(reward_N))


def _share(mean: float, rng: np.random.Generator) -> int:
    """A whole number with this mean, next below or above it."""
    whole = math.floor(round(mean, 9))
    part = round(mean - whole, 9)
    return whole + (part > 0 and rng.random() < part)


def _apart_first(order: list[int], numbers: Sequence[int], taken: Collection[int]) -> list[int]:
    """In order, those that are not taken before those that are."""
    return sorted(order, key=lambda i: numbers[i] in taken)
