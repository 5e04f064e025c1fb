"""An excerpt of a journal for people to read: the facts of all trajectories, and some of them whole.

Invariant: the facts are of every trajectory, read in one pass of a few columns; bodies are read only of those that are
chosen, a few hundred at a time. The choice is the same for the same journal, and takes whole rounds: all answers that
one searcher sampled to one prompt at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.replay.codec import Damaged, decode_prompt, decode_trajectory, intact
from tba.replay.queries import JournalQueries
from tba.types import Prompt, Trajectory

_AT_ONCE = 20_000  # rows of facts
_EXTREME = 50  # rounds that are always chosen of the newest, best, worst and most used
_Column = npt.NDArray[Any]


@dataclass(frozen=True)
class Facts:
    """Holds what the journal says of each trajectory without its body: columns [N], in the order of arrival."""

    place: npt.NDArray[np.int64]  # its number in the journal
    prompt: npt.NDArray[np.int64]  # the digest of its prompt
    owner: npt.NDArray[np.int32]  # who put it: an index of `owners`
    tokens: npt.NDArray[np.int64]  # of the completion
    incarnation: npt.NDArray[np.int64]  # and `step`: the oldest weights that sampled a part of it
    step: npt.NDArray[np.int64]
    reward: npt.NDArray[np.float64]  # NaN where the journal has none
    created: npt.NDArray[np.float64]  # seconds since the epoch
    uses: npt.NDArray[np.int32]  # as `Buffer.fates` counts them
    round: npt.NDArray[np.int64]  # equal for what one owner sampled to one prompt at one time; from 0 on
    owners: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.place)


def read_facts(reader: JournalQueries, used: npt.NDArray[np.int32]) -> Facts:
    """Reads the facts of all trajectories. used: [places + 1], see `Buffer.fates`; what is beyond it was never used."""
    _, rows = reader.query(
        "SELECT seq, prompt, owner, tokens, incarnation, step, reward, created FROM trajectories ORDER BY seq"
    )
    kinds = (np.int64, np.int64, np.int32, np.int64, np.int64, np.int64, np.float64, np.float64)
    parts: list[list[_Column]] = [[np.zeros(0, kind)] for kind in kinds]
    owners: dict[str, int] = {}
    while chunk := list(islice(rows, _AT_ONCE)):
        columns: list[Any] = list(zip(*chunk, strict=True))
        columns[2] = [owners.setdefault(owner, len(owners)) for owner in columns[2]]
        for part, column, kind in zip(parts, columns, kinds, strict=True):
            part.append(np.array(column, dtype=kind))  # None, of a reward that is not finite, becomes NaN
    place, prompt, owner, tokens, incarnation, step, reward, created = (np.concatenate(part) for part in parts)
    uses = np.zeros(len(place), np.int32)
    known = place < len(used)
    uses[known] = used[place[known]]
    return Facts(
        *(place, prompt, owner, tokens, incarnation, step, reward, created, uses),
        round=_rounds(owner, prompt, created),
        owners=tuple(owners),
    )


def chosen(facts: Facts, most: int, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Returns the rows to be read whole, about `most` at most, the most wanted first.

    First come the rounds of the places `wanted`, then those with the newest, best, worst and most used answers; then
    rounds by lot, and prompts by lot with all their rounds, in equal parts, so that both the course of the run and how
    the answers to one prompt changed can be read.
    """
    if not len(facts):
        return np.zeros(0, np.intp)
    rng = np.random.default_rng(0)
    prompts, prompt_index = np.unique(facts.prompt, return_inverse=True)
    rounds = int(facts.round.max()) + 1
    lot = np.minimum(rng.random(rounds)[facts.round], rng.random(len(prompts))[prompt_index])
    reward = np.nan_to_num(facts.reward, nan=0.0)
    firsts = [np.isin(facts.place, wanted).nonzero()[0]]
    firsts += [_first_rounds(facts, order) for order in (-facts.place, -reward, reward, -facts.uses.clip(min=0))]
    for turn, rows in reversed(list(enumerate(firsts))):
        lot[np.isin(facts.round, facts.round[rows])] = turn - len(firsts)
    order = np.lexsort((facts.place, facts.round, lot))
    if len(order) > most:
        cut = facts.round[order[most]]  # whole rounds, unless the first is larger
        inside = (facts.round[order[:most]] == cut).nonzero()[0]
        most = int(inside[0]) if len(inside) and inside[0] else most
    return order[:most]


def _first_rounds(facts: Facts, key: _Column) -> npt.NDArray[np.intp]:
    """Returns a row of each of the first rounds in the order of `key`."""
    order = np.argsort(key, kind="stable")
    _, first = np.unique(facts.round[order], return_index=True)
    return order[np.sort(first)[:_EXTREME]]


def read_bodies(
    reader: JournalQueries, facts: Facts, rows: npt.NDArray[np.intp]
) -> Iterator[tuple[int, Trajectory | None]]:
    """Yields the rows with their trajectories, in the order given; None where the body was deleted or is damaged."""
    prompt_of = _prompts(reader)
    for row in rows.tolist():
        query = "SELECT body, uid FROM bodies JOIN trajectories USING (seq) WHERE seq = ?"
        body, uid = next(reader.query(query, facts.place.item(row))[1], (None, ""))
        yield row, _decoded(body, uid, prompt_of(facts.prompt.item(row)))


def _decoded(body: object, uid: str, prompt: Prompt | None) -> Trajectory | None:
    if not isinstance(body, bytes) or prompt is None:
        return None
    try:
        return decode_trajectory(intact(body, uid), prompt, compare=False)
    except Damaged:
        return None


def _prompts(reader: JournalQueries) -> Callable[[int], Prompt | None]:
    known: dict[int, Prompt | None] = {}

    def prompt_of(digest: int) -> Prompt | None:
        if digest not in known:
            (body,) = next(reader.query("SELECT body FROM prompts WHERE id = ?", digest)[1], (None,))
            try:
                known[digest] = decode_prompt(body) if isinstance(body, bytes) else None
            except (ValueError, KeyError, TypeError, RecursionError):
                known[digest] = None
        return known[digest]

    return prompt_of


def _rounds(owner: _Column, prompt: _Column, created: _Column) -> npt.NDArray[np.int64]:
    """Numbers what was put by one owner, for one prompt, at one time."""
    order = np.lexsort((created, prompt, owner))
    new = np.zeros(len(order), np.int64)
    for column in (owner, prompt, created):
        new[1:] |= column[order][1:] != column[order][:-1]
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(new)
    return found
