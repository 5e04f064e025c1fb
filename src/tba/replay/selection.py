"""Selection: which prompts, and which of their trajectories, go into a batch, as in the paper by recency or reward.

Invariant: no trajectory is twice in a group, and a reward only ever decides between the responses of one prompt. The
paper's m is here and nowhere else: nothing but its draw decides which half a group comes from, as long as searchers
have brought two answers to one prompt.

The recent half is the newest by arrival, never by the weights that sampled. The newest arrivals are the last 2k B K
trajectories, what the trainer draws in two sync intervals (paper: what came in at the last sync), and at least twice as
many as came in together the last time, so that nothing of a larger round is passed over; with `mix = "group"`, where m
says how much of each group is recent, mK in the place of K. Of the prompts that have one
of these and K answers, the one whose next K have been used least comes first, and of several the newest; after them
come the next newest prompts. A prompt's next K are its newest, and among them those never used before the others. For
the other half prompts are drawn without replacement, epoch by epoch. Where a task has one prompt only, every group of a
batch is of it: its next K, the K after these and so on, and rewards decide between all trajectories there are.

Shape legend: N the trajectories of one prompt.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.fields import as_declared
from tba.replay.buffer import Buffer
from tba.replay.prompt_index import Listing
from tba.types import Group, Json

PASSED_OVER = 10  # groups without signal for each group of a batch, before such are taken (DAPO's bound on its draws)
SMALLEST_GROUP = 2  # log Z of a single trajectory is its own residual: it teaches nothing


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Says what the trainer asks for, and all that a selector is told of the run."""

    groups: int  # B
    size: int  # K, trajectories of each group
    arrived: int = 0  # trajectories that came in together, the last time that any did
    sync_every: int = 1  # k, updates between two publications of the weights, as it is now
    m: float | None = None  # share of recent groups that the run's controller wants; None: the selection's own


class Selector(Protocol):
    """Draws the batches of one run."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Groups drawn so far, by kind: each is the metric `groups_KIND`."""
        ...

    def select(self, store: Buffer, wanted: BatchRequest, rng: np.random.Generator) -> list[Group]:
        """Draws a batch, all randomness from `rng`. Some prompt has `SMALLEST_GROUP` distinct trajectories."""
        ...

    def state(self) -> Json:
        """Returns what `restore` takes, so that a resumed run draws the same."""
        ...

    def restore(self, state: Json) -> None:
        """Continue from what `state` returned."""
        ...


class Selection(Protocol):
    """Holds the settings of a selector, a field of the recipe."""

    def start(self) -> Selector:
        """Returns a selector that has drawn nothing yet."""
        ...


@dataclass(frozen=True)
@as_declared
class RecencyReward:
    """Draws each group as recent with probability m, else by reward (arXiv 2503.18929, section 4).
    Raises `UserError` when a field makes no sense.
    """

    m: float = 0.95  # the paper's most-on-policy probability
    inverse_temperature: float = 0.0  # of softmax(reward x this) over a prompt's responses; 0 = uniform
    mix: Literal["chance", "batch", "group"] = "chance"  # what is recent: each group with probability m (paper), the
    # share m of a batch's groups, or the share m of each group's trajectories
    disjoint: bool = False  # groups of one prompt in one batch share no trajectory, as far as there are enough
    refill: bool = False  # a group all of whose rewards are the same is passed over for the next prompt's, as far as
    # there are others (DAPO)

    def __post_init__(self) -> None:
        if not 0 <= self.m <= 1:
            raise UserError(f"--replay.selection.m is {self.m}, it is a probability: give 0 to 1")
        if not (self.inverse_temperature >= 0 and math.isfinite(self.inverse_temperature)):
            raise UserError(
                f"--replay.selection.inverse-temperature is {self.inverse_temperature}: give 0 (uniform) or more"
            )

    def start(self) -> RecencyRewardSelector:
        """Returns a selector at the beginning of its first epoch."""
        return RecencyRewardSelector(self)


class RecencyRewardSelector:
    """Draws groups; keeps the epoch of the other half and the counts.

    counts: groups "recent" and "reward" as they were drawn; "newest", those all of whose trajectories were among the
    newest arrivals; "ragged", smaller than K; "repeated", of a prompt that the batch had already; "passed_over", for
    want of signal.
    """

    def __init__(self, settings: RecencyReward) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter(recent=0, reward=0, newest=0, ragged=0, repeated=0)
        self._m = settings.m  # of this batch
        self._within = 0  # arrivals that count as the newest, in this batch
        self._all = Deck()
        self._passed: dict[str, int] = {}  # prompts whose newest group was passed over, and its newest arrival

    def select(self, store: Buffer, wanted: BatchRequest, rng: np.random.Generator) -> list[Group]:
        """Draws groups of K distinct trajectories each; fewer (at least 2) where a prompt has no more.

        A prompt comes twice only when every prompt is in the batch already. Raises `ValueError` when no prompt has 2
        distinct trajectories.
        """
        chosen: list[Group] = []
        batch = Counter[str]()  # how often each prompt was drawn for it
        drawn: dict[str, Counter[int]] = {}  # by prompt of the batch, how often each number was drawn
        groups, size = wanted.groups, wanted.size
        self._m = self.settings.m if wanted.m is None else wanted.m
        least = size if self.settings.mix != "group" else max(SMALLEST_GROUP, math.ceil(round(self._m * size, 9)))
        self._within = 2 * max(wanted.sync_every * groups * least, wanted.arrived)
        most = PASSED_OVER * groups if self.settings.refill else 0  # groups without signal that are passed over
        turns = functools.cache(lambda least: self._in_turn(store, least, groups + most))

        def draw(recent: bool) -> tuple[Group, bool, bool]:
            """Returns a group, whether it is recent, and whether the batch had its prompt before."""
            prompt, is_recent = self._prompt(store, least, recent, turns, batch, rng)
            own, repeated = drawn.setdefault(prompt, Counter()), prompt in batch
            batch[prompt] += 1
            if self.settings.mix == "group" or (self.settings.disjoint and repeated and not is_recent):
                return self._mixed(store, prompt, size, is_recent, own, rng), is_recent, repeated
            return self._plain(store, prompt, size, is_recent, own, rng), is_recent, repeated

        passed: list[tuple[Group, bool, bool]] = []
        for recent in self._halves(groups, rng):
            found = draw(recent)
            while len(passed) < most and not found[2] and len({t.reward for t in found[0].trajectories}) == 1:
                passed.append(found)
                found = draw(recent)
            if found[2] and passed:  # a prompt comes twice only when no other is left
                found = passed.pop(0)
            group, is_recent, repeated = found
            self._count(store, group, size, is_recent, repeated)
            chosen.append(replace(group, as_sampled=False) if self.settings.refill else group)
        if passed:
            self.counts["passed_over"] += len(passed)
        self._passed |= {
            group.prompt.key: store.newest_arrival(group.prompt.key) for group, recent, _ in passed if recent
        }
        return chosen

    def _in_turn(self, store: Buffer, least: int, count: int) -> list[str]:
        """Returns the prompts of recent groups in the order in which they are to be drawn: those that were passed over
        come last, until something new of theirs arrives. They are never used, and would come first in every batch.
        """
        turns = store.newest_prompts(least, self._within, count)
        there, few = set(turns), len(self._passed) < 4 * count  # those that are not there may be in the next listing
        self._passed = {
            p: at for p, at in self._passed.items() if (at == store.newest_arrival(p) if p in there else few)
        }
        return sorted(turns, key=self._passed.__contains__)

    def _halves(self, groups: int, rng: np.random.Generator) -> list[bool]:
        """Returns for each group whether it is to be recent (with `mix = "group"`: whether a part of it is)."""
        recent: npt.NDArray[np.bool_] = rng.random(groups) < self._m
        if self.settings.mix == "batch":
            recent = rng.permutation(groups) < _share(self._m * groups, rng)
        elif self.settings.mix == "group":
            recent = np.full(groups, self._m > 0)
        return [bool(r) for r in recent]

    def _plain(
        self, store: Buffer, prompt: str, size: int, is_recent: bool, own: Counter[int],
        rng: np.random.Generator,
    ) -> Group:  # fmt: skip
        """Draws a group of one half; its numbers are added to `own`, if a later group of this prompt is to share none
        of them.
        """
        if is_recent:
            numbers = self._next(store, prompt, size, own)
            own.update(numbers)
            return Group(tuple(store.numbered(numbers)), not store.thinned(prompt))
        trajectories = store.of(prompt)
        if self.settings.inverse_temperature == 0:
            rows = uniform(len(trajectories), size, rng)
        else:
            rows = softmax_without_replacement(store.rewards(prompt), self.settings.inverse_temperature, size, rng)
        if self.settings.disjoint:
            kept = store.numbers(prompt)
            own.update(kept[i] for i in rows)
        return Group(tuple(trajectories[i] for i in rows), self._as_sampled(store, prompt))

    def _mixed(
        self, store: Buffer, prompt: str, size: int, is_recent: bool, own: Counter[int],
        rng: np.random.Generator,
    ) -> Group:  # fmt: skip
        """Draws a group of both halves, or disjoint from `own` as far as there are enough; its numbers are added to
        `own`.
        """
        share = self._m if is_recent else 0.0
        taken = own if self.settings.disjoint else Counter[int]()
        fresh = self._next(store, prompt, size, own) if is_recent else []
        count = min(_share(share * size, rng), len(fresh))
        kept = store.numbers(prompt)
        order = in_turn(store.rewards(prompt), self.settings.inverse_temperature, size + len(taken) + count, rng)
        others = [kept[i] for i in order if kept[i] not in fresh[:count]]
        chosen = fresh[:count] + _apart_first(others, taken)[: size - count]
        missing = [number for number in fresh[count:] if number not in chosen]  # where less is kept than is wanted
        chosen += missing[: size - len(chosen)]
        own.update(chosen)
        return Group(tuple(store.numbered(chosen)), self._as_sampled(store, prompt))

    def _as_sampled(self, store: Buffer, prompt: str) -> bool:
        """Returns whether a draw among all answers to `prompt` goes by how often they were sampled."""
        return self.settings.inverse_temperature == 0 and not store.thinned(prompt)

    def state(self) -> Json:
        """Returns the selector's state as JSON, which `restore` takes."""
        return {"all": self._all.state(), "counts": dict(self.counts), "passed": self._passed}

    def restore(self, state: Json) -> None:
        """Continue with the draws and counts that `state` gave."""
        self._all.restore(state["all"])
        self.counts = Counter(state["counts"])
        self._passed = state.get("passed", {})

    def _prompt(
        self, store: Buffer, size: int, recent: bool, turns: Callable[[int], Sequence[str]],
        batch: Counter[str], rng: np.random.Generator,
    ) -> tuple[str, bool]:  # fmt: skip
        """Returns (a prompt, whether it is drawn as recent): one that is not in the batch, else the one that is least
        often.

        A recent group is ragged before its prompt comes twice. A group that is to be recent is of the other half only
        where all that is left was imported, which is never recent.
        """
        for again in (False, True):
            for least in (size, SMALLEST_GROUP) if recent else ():
                left = [prompt for prompt in turns(least) if again or prompt not in batch]
                if left:
                    return min(left, key=batch.__getitem__), True
            drawn = self._all.draw(store.prompts(SMALLEST_GROUP), () if again else batch, rng)
            if drawn is not None:
                return drawn, False
        raise ValueError(f"no prompt has {SMALLEST_GROUP} distinct trajectories to make a group of")

    def _next(self, store: Buffer, prompt: str, size: int, own: Counter[int]) -> list[int]:
        """Returns the numbers of a prompt's next `size`, those first that the batch does not have yet."""
        return _apart_first(store.newest(prompt, size + len(own), self._within), own)[:size]

    def _count(self, store: Buffer, group: Group, size: int, is_recent: bool, repeated: bool) -> None:
        self.counts["recent" if is_recent else "reward"] += 1
        self.counts["newest"] += store.behind(group.trajectories) <= self._within
        self.counts["ragged"] += len(group) < size
        self.counts["repeated"] += repeated


def uniform(count: int, size: int, rng: np.random.Generator) -> list[int]:
    """Returns `size` of `count` indices, all subsets equally likely; all of them when there are no more.

    This is Floyd's method (Bentley and Floyd 1987): its cost does not depend on `count`.
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
    """Returns `size` indices drawn one after another from softmax(reward x inverse_temperature), without replacement.

    This is Gumbel top-k (Vieira 2014; Kool et al. 2019): the `size` largest of logit + Gumbel noise are exactly such a
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
    """Makes the same draw in the order in which it is made: without some of them the others are a draw from the rest.

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
    """Returns a random order, and in it logit + Gumbel noise: equal keys are taken by position, which is thereby
    random.
    """
    order_N = rng.permutation(len(reward_N))
    with np.errstate(over="ignore"):
        logit_N = (reward_N[order_N] - reward_N.max(initial=-np.inf)) * inverse_temperature
    return order_N, logit_N + rng.gumbel(size=len(reward_N))


def _share(mean: float, rng: np.random.Generator) -> int:
    """Returns a random integer with this mean, the next one below or above it."""
    whole = math.floor(round(mean, 9))
    part = round(mean - whole, 9)
    return whole + (part > 0 and rng.random() < part)


def _apart_first(numbers: Sequence[int], taken: Counter[int]) -> list[int]:
    """Returns them in order, those that were taken less often before the others."""
    return sorted(numbers, key=taken.__getitem__)


class Deck:
    """Draws prompts uniformly without replacement, epoch after epoch, while prompts come and go.

    Invariant: within an epoch each prompt is drawn at most once while it stays, and every draw is uniform over the
    prompts not yet drawn that are there and not to be avoided. A prompt that arrives joins the current epoch. Nothing
    depends on the order of a listing, so a deck restored over a rebuilt store continues exactly. A draw, and an
    arrival, cost O(log n) amortised: an epoch of n draws is sorted once.
    """

    def __init__(self) -> None:
        self._undrawn: list[str] = []
        self._seen: set[str] = set()  # in this epoch: drawn, or in `_undrawn`
        self._listing: Listing | None = None
        self._cursor = 0

    def refresh(self, prompts: Listing) -> None:
        """Let those that arrived since the last time join the epoch."""
        if prompts is not self._listing:
            self._listing, self._cursor = prompts, 0
        self._cursor, added = prompts.since(self._cursor)
        new = sorted({prompt for prompt in added if prompt in prompts and prompt not in self._seen})
        self._seen.update(new)
        self._undrawn += new
        if len(self._seen) > 4 * len(prompts) + 1024:  # most have left: an epoch of endless new prompts never ends
            present = set(prompts)
            self._undrawn = [prompt for prompt in self._undrawn if prompt in present]
            self._seen &= present

    def draw(self, prompts: Listing, avoid: Collection[str], rng: np.random.Generator) -> str | None:
        """Draws one prompt of a listing that is not in `avoid`; None when there is none. A new epoch begins when
        necessary.

        A prompt that is avoided can still be drawn later in the epoch.
        """
        self.refresh(prompts)
        drawn = self._take(prompts, avoid, rng)
        if drawn is None and any(prompt not in avoid for prompt in prompts):
            self._undrawn = sorted(prompts)
            self._seen = set(prompts)
            drawn = self._take(prompts, avoid, rng)
        return drawn

    def state(self) -> Json:
        """Returns the deck's state as JSON, which `restore` takes."""
        return {"undrawn": list(self._undrawn), "drawn": sorted(self._seen.difference(self._undrawn))}

    def restore(self, state: Json) -> None:
        """Continue the epoch that `state` gave."""
        self._undrawn = list(state["undrawn"])
        self._seen = {*state["undrawn"], *state["drawn"]}
        self._listing = None

    def _take(self, prompts: Listing, avoid: Collection[str], rng: np.random.Generator) -> str | None:
        undrawn, kept, drawn = self._undrawn, [], None
        while undrawn and drawn is None:
            place = int(rng.integers(len(undrawn)))
            undrawn[place], undrawn[-1] = undrawn[-1], undrawn[place]
            prompt = undrawn.pop()
            if prompt not in prompts:
                self._seen.discard(prompt)  # it joins again if it comes back
            elif prompt in avoid:
                kept.append(prompt)
            else:
                drawn = prompt
        undrawn.extend(kept)
        return drawn
