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

from tba.replay.codec import Damaged, check_body, decode_prompt, decode_trajectory
from tba.replay.queries import JournalQueries
from tba.types import Prompt, Trajectory

_FACT_ROWS = 20_000  # rows of facts
_EXTREME_ROUNDS = 50  # rounds that are always chosen of the newest, best, worst and most used
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


def read_facts(reader: JournalQueries, uses_by_place: npt.NDArray[np.int32]) -> Facts:
    """Reads the facts of all trajectories. used: [places + 1], see `Buffer.fates`; what is beyond it was never used."""
    _, rows = reader.query(
        "SELECT seq, prompt, owner, tokens, incarnation, step, reward, created FROM trajectories ORDER BY seq"
    )
    kinds = (np.int64, np.int64, np.int32, np.int64, np.int64, np.int64, np.float64, np.float64)
    parts: list[list[_Column]] = [[np.zeros(0, kind)] for kind in kinds]
    owners: dict[str, int] = {}
    while chunk := list(islice(rows, _FACT_ROWS)):
        columns: list[Any] = list(zip(*chunk, strict=True))
        columns[2] = [owners.setdefault(owner, len(owners)) for owner in columns[2]]
        for part, column, kind in zip(parts, columns, kinds, strict=True):
            part.append(np.array(column, dtype=kind))  # None, of a reward that is not finite, becomes NaN
    place, prompt, owner, tokens, incarnation, step, reward, created = (np.concatenate(part) for part in parts)
    uses = np.zeros(len(place), np.int32)
    is_counted = place < len(uses_by_place)
    uses[is_counted] = uses_by_place[place[is_counted]]
    return Facts(
        *(place, prompt, owner, tokens, incarnation, step, reward, created, uses),
        round=_number_rounds(owner, prompt, created),
        owners=tuple(owners),
    )


def choose_rows(facts: Facts, most_rows: int, wanted_places: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Returns the rows to be read whole, about `most` at most, the most wanted first.

    First come the rounds of the places `wanted`, then those with the newest, best, worst and most used answers; then
    rounds by lot, and prompts by lot with all their rounds, in equal parts, so that both the course of the run and how
    the answers to one prompt changed can be read.
    """
    if not len(facts):
        return np.zeros(0, np.intp)
    rng = np.random.default_rng(0)
    prompts, prompt_index = np.unique(facts.prompt, return_inverse=True)
    round_count = int(facts.round.max()) + 1
    priority = np.minimum(rng.random(round_count)[facts.round], rng.random(len(prompts))[prompt_index])
    reward = np.nan_to_num(facts.reward, nan=0.0)
    first_rows = [np.isin(facts.place, wanted_places).nonzero()[0]]
    first_rows += [_first_rounds(facts, order) for order in (-facts.place, -reward, reward, -facts.uses.clip(min=0))]
    for rank, rows in reversed(list(enumerate(first_rows))):
        priority[np.isin(facts.round, facts.round[rows])] = rank - len(first_rows)
    order = np.lexsort((facts.place, facts.round, priority))
    if len(order) > most_rows:
        cut_round = facts.round[order[most_rows]]  # whole rounds, unless the first is larger
        rows_of_cut_round = (facts.round[order[:most_rows]] == cut_round).nonzero()[0]
        most_rows = int(rows_of_cut_round[0]) if len(rows_of_cut_round) and rows_of_cut_round[0] else most_rows
    return order[:most_rows]


def _first_rounds(facts: Facts, key: _Column) -> npt.NDArray[np.intp]:
    """Returns a row of each of the first rounds in the order of `key`."""
    order = np.argsort(key, kind="stable")
    _, first_indices = np.unique(facts.round[order], return_index=True)
    return order[np.sort(first_indices)[:_EXTREME_ROUNDS]]


def read_bodies(
    reader: JournalQueries, facts: Facts, rows: npt.NDArray[np.intp]
) -> Iterator[tuple[int, Trajectory | None]]:
    """Yields the rows with their trajectories, in the order given; None where the body was deleted or is damaged."""
    prompt_of = _prompt_reader(reader)
    for row in rows.tolist():
        query = "SELECT body, uid FROM bodies JOIN trajectories USING (seq) WHERE seq = ?"
        body, uid = next(reader.query(query, facts.place.item(row))[1], (None, ""))
        yield row, _decode(body, uid, prompt_of(facts.prompt.item(row)))


def _decode(body: object, uid: str, prompt: Prompt | None) -> Trajectory | None:
    if not isinstance(body, bytes) or prompt is None:
        return None
    try:
        return decode_trajectory(check_body(body, uid), prompt, verify=False)
    except Damaged:
        return None


def _prompt_reader(reader: JournalQueries) -> Callable[[int], Prompt | None]:
    prompts: dict[int, Prompt | None] = {}

    def prompt_of(digest: int) -> Prompt | None:
        if digest not in prompts:
            (body,) = next(reader.query("SELECT body FROM prompts WHERE id = ?", digest)[1], (None,))
            try:
                prompts[digest] = decode_prompt(body) if isinstance(body, bytes) else None
            except (ValueError, KeyError, TypeError, RecursionError):
                prompts[digest] = None
        return prompts[digest]

    return prompt_of


def _number_rounds(owner: _Column, prompt: _Column, created: _Column) -> npt.NDArray[np.int64]:
    """Numbers what was put by one owner, for one prompt, at one time."""
    order = np.lexsort((created, prompt, owner))
    starts_round = np.zeros(len(order), np.int64)
    for column in (owner, prompt, created):
        starts_round[1:] |= column[order][1:] != column[order][:-1]
    round_of_row = np.empty(len(order), np.int64)
    round_of_row[order] = np.cumsum(starts_round)
    return round_of_row
