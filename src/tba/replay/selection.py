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
    """Holds the batch that the trainer requests, and all that a selector gets to know of the run."""

    groups: int  # B
    size: int  # K, trajectories of each group
    arrived: int = 0  # trajectories that came in together, the last time that any did
    sync_every: int = 1  # k, updates between two publications of the weights, as it is now
    m: float | None = None  # share of recent groups that the run's controller wants; None: the selection's own


class Selector(Protocol):
    """Draws the batches of one run."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Returns the groups drawn so far, by kind: each is the metric `groups_KIND`."""

    def select(self, store: Buffer, request: BatchRequest, rng: np.random.Generator) -> list[Group]:
        """Draws a batch with randomness from `rng` alone. Some prompt has `SMALLEST_GROUP` distinct trajectories."""

    def state(self) -> Json:
        """Returns what `restore` takes, so that a resumed run draws the same."""

    def restore(self, state: Json) -> None:
        """Continue from what `state` returned."""


class Selection(Protocol):
    """Holds the settings of a selector, a field of the recipe."""

    def start(self) -> Selector:
        """Returns a selector that has drawn nothing yet."""


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
    """Draws groups, and keeps the epoch of the other half and the counts.

    counts: groups "recent" and "reward" as they were drawn; "newest", those all of whose trajectories were among the
    newest arrivals; "ragged", smaller than K; "repeated", of a prompt that the batch had already; "passed_over", for
    want of signal.
    """

    def __init__(self, settings: RecencyReward) -> None:
        self.settings = settings
        self.counts: Counter[str] = Counter(recent=0, reward=0, newest=0, ragged=0, repeated=0)
        self._m = settings.m  # of this batch
        self._newest_arrivals = 0  # arrivals that count as the newest, in this batch
        self._deck = Deck()
        self._passed_over: dict[str, int] = {}  # prompts whose newest group was passed over, and its newest arrival

    def select(self, store: Buffer, request: BatchRequest, rng: np.random.Generator) -> list[Group]:
        """Draws groups of K distinct trajectories each; fewer (at least 2) where a prompt has no more.

        A prompt comes twice only when every prompt is in the batch already. Raises `ValueError` when no prompt has 2
        distinct trajectories.
        """
        chosen_groups: list[Group] = []
        prompt_counts = Counter[str]()  # how often each prompt was drawn for it
        number_counts: dict[str, Counter[int]] = {}  # by prompt of the batch, how often each number was drawn
        groups, size = request.groups, request.size
        self._m = self.settings.m if request.m is None else request.m
        recent_size = size if self.settings.mix != "group" else max(SMALLEST_GROUP, math.ceil(round(self._m * size, 9)))
        self._newest_arrivals = 2 * max(request.sync_every * groups * recent_size, request.arrived)
        limit = PASSED_OVER * groups if self.settings.refill else 0  # groups without signal to pass over
        turns = functools.cache(lambda size: self._prompts_in_turn(store, size, groups + limit))

        def draw(wants_recent: bool) -> tuple[Group, bool, bool]:
            """Returns a group, whether it is recent, and whether the batch had its prompt before."""
            prompt, is_recent = self._choose_prompt(store, recent_size, wants_recent, turns, prompt_counts, rng)
            counts, is_repeated = number_counts.setdefault(prompt, Counter()), prompt in prompt_counts
            prompt_counts[prompt] += 1
            if self.settings.mix == "group" or (self.settings.disjoint and is_repeated and not is_recent):
                return self._draw_mixed(store, prompt, size, is_recent, counts, rng), is_recent, is_repeated
            return self._draw_half(store, prompt, size, is_recent, counts, rng), is_recent, is_repeated

        passes: list[tuple[Group, bool, bool]] = []  # what was passed over
        for wants_recent in self._choose_halves(groups, rng):
            candidate = draw(wants_recent)
            while len(passes) < limit and not candidate[2] and len({t.reward for t in candidate[0].trajectories}) == 1:
                passes.append(candidate)
                candidate = draw(wants_recent)
            if candidate[2] and passes:  # a prompt comes twice only when no other is left
                candidate = passes.pop(0)
            group, is_recent, is_repeated = candidate
            self._count_group(store, group, size, is_recent, is_repeated)
            chosen_groups.append(replace(group, as_sampled=False) if self.settings.refill else group)
        if passes:
            self.counts["passed_over"] += len(passes)
        keys = [group.prompt.key for group, is_recent, _ in passes if is_recent]
        self._passed_over |= {key: store.newest_arrival(key) for key in keys}
        return chosen_groups

    def _prompts_in_turn(self, store: Buffer, size: int, count: int) -> list[str]:
        """Returns the prompts of recent groups in the order in which they are to be drawn: those that were passed over
        come last, until something new of theirs arrives. They are never used, and would come first in every batch.
        """
        prompts = store.newest_prompts(size, self._newest_arrivals, count)
        listing, is_few = (
            set(prompts),
            len(self._passed_over) < 4 * count,
        )  # those that are not in it may be in the next
        self._passed_over = {
            p: at for p, at in self._passed_over.items() if (at == store.newest_arrival(p) if p in listing else is_few)
        }
        return sorted(prompts, key=self._passed_over.__contains__)

    def _choose_halves(self, groups: int, rng: np.random.Generator) -> list[bool]:
        """Returns for each group whether it is to be recent (with `mix = "group"`: whether a part of it is)."""
        is_recent: npt.NDArray[np.bool_] = rng.random(groups) < self._m
        if self.settings.mix == "batch":
            is_recent = rng.permutation(groups) < _share(self._m * groups, rng)
        elif self.settings.mix == "group":
            is_recent = np.full(groups, self._m > 0)
        return [bool(r) for r in is_recent]

    def _draw_half(
        self, store: Buffer, prompt: str, size: int, is_recent: bool, counts: Counter[int],
        rng: np.random.Generator,
    ) -> Group:  # fmt: skip
        """Draws a group of one half; its rows are added to `counts` if a later group of this prompt is to share
        none of them.
        """
        if is_recent:
            numbers = self._next_numbers(store, prompt, size, counts)
            counts.update(numbers)
            return Group(tuple(store.numbered(numbers)), not store.thinned(prompt))
        trajectories = store.of(prompt)
        if self.settings.inverse_temperature == 0:
            rows = draw_uniform(len(trajectories), size, rng)
        else:
            rows = draw_by_reward(store.rewards(prompt), self.settings.inverse_temperature, size, rng)
        if self.settings.disjoint:
            row_numbers = store.numbers(prompt)
            counts.update(row_numbers[i] for i in rows)
        return Group(tuple(trajectories[i] for i in rows), self._is_as_sampled(store, prompt))

    def _draw_mixed(
        self, store: Buffer, prompt: str, size: int, is_recent: bool, counts: Counter[int],
        rng: np.random.Generator,
    ) -> Group:  # fmt: skip
        """Draws a group of both halves, or one disjoint from `counts` as far as there are enough rows; its rows
        are added to `counts`.
        """
        share = self._m if is_recent else 0.0
        avoided = counts if self.settings.disjoint else Counter[int]()
        recent_numbers = self._next_numbers(store, prompt, size, counts) if is_recent else []
        count = min(_share(share * size, rng), len(recent_numbers))
        row_numbers = store.numbers(prompt)
        order = draw_in_turn(store.rewards(prompt), self.settings.inverse_temperature, size + len(avoided) + count, rng)
        reward_numbers = [row_numbers[i] for i in order if row_numbers[i] not in recent_numbers[:count]]
        numbers = recent_numbers[:count] + _rarest_first(reward_numbers, avoided)[: size - count]
        unused_numbers = [n for n in recent_numbers[count:] if n not in numbers]  # where too few are kept
        numbers += unused_numbers[: size - len(numbers)]
        counts.update(numbers)
        return Group(tuple(store.numbered(numbers)), self._is_as_sampled(store, prompt))

    def _is_as_sampled(self, store: Buffer, prompt: str) -> bool:
        """Returns whether a draw among all answers to `prompt` goes by how often they were sampled."""
        return self.settings.inverse_temperature == 0 and not store.thinned(prompt)

    def state(self) -> Json:
        """Returns the selector's state as JSON, which `restore` takes."""
        return {"all": self._deck.state(), "counts": dict(self.counts), "passed": self._passed_over}

    def restore(self, state: Json) -> None:
        """Continue with the draws and counts that `state` gave."""
        self._deck.restore(state["all"])
        self.counts = Counter(state["counts"])
        self._passed_over = state.get("passed", {})

    def _choose_prompt(
        self, store: Buffer, size: int, wants_recent: bool, turns: Callable[[int], Sequence[str]],
        prompt_counts: Counter[str], rng: np.random.Generator,
    ) -> tuple[str, bool]:  # fmt: skip
        """Returns (a prompt, whether it is drawn as recent): one that is not in the batch yet, else the least frequent
        one.

        A recent group is ragged before its prompt comes twice. A group that is to be recent is of the other half only
        where all that is left was imported, which is never recent.
        """
        for may_repeat in (False, True):
            for least_size in (size, SMALLEST_GROUP) if wants_recent else ():
                prompts = [prompt for prompt in turns(least_size) if may_repeat or prompt not in prompt_counts]
                if prompts:
                    return min(prompts, key=prompt_counts.__getitem__), True
            prompt = self._deck.draw(store.prompts(SMALLEST_GROUP), () if may_repeat else prompt_counts, rng)
            if prompt is not None:
                return prompt, False
        raise ValueError(f"no prompt has {SMALLEST_GROUP} distinct trajectories to make a group of")

    def _next_numbers(self, store: Buffer, prompt: str, size: int, counts: Counter[int]) -> list[int]:
        """Returns the numbers of a prompt's next `size` rows, first those that the batch does not have yet."""
        return _rarest_first(store.newest(prompt, size + len(counts), self._newest_arrivals), counts)[:size]

    def _count_group(self, store: Buffer, group: Group, size: int, is_recent: bool, is_repeated: bool) -> None:
        self.counts["recent" if is_recent else "reward"] += 1
        self.counts["newest"] += store.behind(group.trajectories) <= self._newest_arrivals
        self.counts["ragged"] += len(group) < size
        self.counts["repeated"] += is_repeated


def draw_uniform(count: int, size: int, rng: np.random.Generator) -> list[int]:
    """Returns `size` of `count` indices, all subsets equally likely; all of them when there are no more.

    This is Floyd's method (Bentley and Floyd 1987): its cost does not depend on `count`.
    """
    if count <= size:
        return list(range(count))
    upper_bounds = np.arange(count - size, count)
    indices: dict[int, None] = {}
    for highest, index in zip(upper_bounds.tolist(), rng.integers(upper_bounds + 1).tolist(), strict=True):
        indices[highest if index in indices else index] = None
    return list(indices)


def draw_by_reward(
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
    indices: list[int] = order_N[np.argpartition(-key_N, size - 1)[:size]].tolist()
    return indices


def draw_in_turn(
    reward_N: npt.NDArray[np.float64], inverse_temperature: float, size: int, rng: np.random.Generator
) -> list[int]:
    """Draws like `draw_by_reward`, and keeps the order: without some of them the others are a draw from the rest.

    inverse_temperature: 0 is uniform.
    """
    count = len(reward_N)
    if inverse_temperature == 0:
        indices: list[int] = rng.permutation(draw_uniform(count, size, rng)).tolist()
        return indices
    order_N, key_N = _keys(reward_N, inverse_temperature, rng)
    largest = np.argpartition(-key_N, size - 1)[:size] if size < count else np.arange(count)
    sorted_indices: list[int] = order_N[largest[np.argsort(-key_N[largest])]].tolist()
    return sorted_indices


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
    floor = math.floor(round(mean, 9))
    fraction = round(mean - floor, 9)
    return floor + (fraction > 0 and rng.random() < fraction)


def _rarest_first(numbers: Sequence[int], counts: Counter[int]) -> list[int]:
    """Returns the numbers in order, those with lower counts before the others."""
    return sorted(numbers, key=counts.__getitem__)


class Deck:
    """Draws prompts uniformly without replacement, epoch after epoch, while prompts come and go.

    Invariant: within an epoch each prompt is drawn at most once while it stays, and every draw is uniform over the
    prompts not yet drawn that are there and not to be avoided. A prompt that arrives joins the current epoch. Nothing
    depends on the order of a listing, so a deck restored over a rebuilt store continues exactly. A draw, and an
    arrival, cost O(log n) amortised: an epoch of n draws is sorted once.
    """

    def __init__(self) -> None:
        self._undrawn: list[str] = []
        self._epoch_prompts: set[str] = set()  # in this epoch: drawn, or in `_undrawn`
        self._listing: Listing | None = None
        self._cursor = 0

    def refresh(self, prompts: Listing) -> None:
        """Add the prompts that arrived since the last call to the epoch."""
        if prompts is not self._listing:
            self._listing, self._cursor = prompts, 0
        self._cursor, recent_prompts = prompts.since(self._cursor)
        new_prompts = sorted({p for p in recent_prompts if p in prompts and p not in self._epoch_prompts})
        self._epoch_prompts.update(new_prompts)
        self._undrawn += new_prompts
        if len(self._epoch_prompts) > 4 * len(prompts) + 1024:  # most have left: endless new prompts end no epoch
            present_prompts = set(prompts)
            self._undrawn = [prompt for prompt in self._undrawn if prompt in present_prompts]
            self._epoch_prompts &= present_prompts

    def draw(self, prompts: Listing, avoided: Collection[str], rng: np.random.Generator) -> str | None:
        """Draws one prompt of a listing that is not in `avoided`; None when there is none. A new epoch begins when
        necessary.

        A prompt that is avoided can still be drawn later in the epoch.
        """
        self.refresh(prompts)
        prompt = self._draw_undrawn(prompts, avoided, rng)
        if prompt is None and any(candidate not in avoided for candidate in prompts):
            self._undrawn = sorted(prompts)
            self._epoch_prompts = set(prompts)
            prompt = self._draw_undrawn(prompts, avoided, rng)
        return prompt

    def state(self) -> Json:
        """Returns the deck's state as JSON, which `restore` takes."""
        return {"undrawn": list(self._undrawn), "drawn": sorted(self._epoch_prompts.difference(self._undrawn))}

    def restore(self, state: Json) -> None:
        """Continue the epoch that `state` gave."""
        self._undrawn = list(state["undrawn"])
        self._epoch_prompts = {*state["undrawn"], *state["drawn"]}
        self._listing = None

    def _draw_undrawn(self, prompts: Listing, avoided: Collection[str], rng: np.random.Generator) -> str | None:
        undrawn, avoided_prompts, drawn_prompt = self._undrawn, [], None
        while undrawn and drawn_prompt is None:
            place = int(rng.integers(len(undrawn)))
            undrawn[place], undrawn[-1] = undrawn[-1], undrawn[place]
            prompt = undrawn.pop()
            if prompt not in prompts:
                self._epoch_prompts.discard(prompt)  # it joins again if it comes back
            elif prompt in avoided:
                avoided_prompts.append(prompt)
            else:
                drawn_prompt = prompt
        undrawn.extend(avoided_prompts)
        return drawn_prompt
