"""Trajectories as rows of the journal, encoded where they are made: what travels when the journal is elsewhere.

Invariant: plain values and bytes, so that nothing has to be unpickled to be written down, and whoever writes it down
does not decode it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tba.replay.codec import decode_prompt, decode_trajectory, encode_prompt, encode_trajectories
from tba.replay.schema import prompt_id
from tba.types import Trajectory


class Row(NamedTuple):
    """A trajectory: what is known of it, and its body."""

    uid: str
    prompt: int  # the digest of its body
    tokens: int
    incarnation: int
    step: int
    reward: float
    created: float
    body: bytes


class Encoded(NamedTuple):
    """Trajectories and their prompts, each prompt once."""

    prompts: Mapping[int, bytes]  # by digest
    rows: Sequence[Row]


def encoded(trajectories: Sequence[Trajectory] | Encoded) -> Encoded:
    """What is encoded already stays as it is. Raises `ValueError` for arrays that do not fit their completion."""
    if isinstance(trajectories, Encoded):
        return trajectories
    bodies = encode_trajectories(trajectories)
    by_object: dict[int, int] = {}
    prompts: dict[int, bytes] = {}
    rows = []
    for t, body in zip(trajectories, bodies, strict=True):
        prompt = by_object.get(id(t.prompt))
        if prompt is None:
            written = encode_prompt(t.prompt)
            prompt = by_object[id(t.prompt)] = prompt_id(written)
            prompts[prompt] = written
        version = t.version
        rows.append(Row(t.uid, prompt, t.length, version.incarnation, version.step, t.reward, t.created, body))
    return Encoded(prompts, rows)


def packed(value: Any) -> Any:
    """An argument or a result as it travels: trajectories encoded, all else as it is."""
    some = isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Trajectory)
    return encoded(value) if some else value


def unpacked(value: Any) -> Any:
    """The inverse. Raises `Damaged` when the bytes are not those that were written."""
    if not isinstance(value, Encoded):
        return value
    prompts = {digest: decode_prompt(body) for digest, body in value.prompts.items()}
    return [decode_trajectory(row.body, prompts[row.prompt]) for row in value.rows]
