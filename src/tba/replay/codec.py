"""Prompts and trajectories as bytes: a JSON header, then raw little-endian arrays. No pickle.

Invariant: `decode_trajectory(encode_trajectory(t), prompt)` equals `t` exactly, arrays and floats bit for bit (a scalar
NaN stays a NaN, whichever it was). Decoded arrays are read-only views of the bytes they came from.

Layout: header length (31 bits) and a bit that says "sealed" (uint32), header (ASCII JSON), zeros up to a multiple of 8;
then each array, padded to 8 bytes. A trajectory is sealed: its body ends with the CRC-32 of all that comes before, so
that bytes that have changed on the disk are detected before anything is learnt from them. A prompt is not: its name is
its digest.

`Encoded` is what is sent when the journal is on another machine: plain values and bytes, which the receiver writes
without unpickling or decoding. `pack_uses` is how a checkpoint stores how often each trajectory was used.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tba.types import LEFT_OUT, Completion, FloatArray, IntArray, Prompt, Sampling, StopReason, Trajectory, Version

_TOKENS = np.dtype("<i4")
_LOGS = np.dtype("<f4")
_MASK = np.dtype("?")
_USES = np.dtype("<i4")
_MOST_USES = 1 << 31  # bytes: half a thousand million trajectories
_SEALED = 1 << 31
_CRC_BYTES = 4
_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes an encoder for each call
_Array = npt.NDArray[Any]


class Damaged(ValueError):
    """Raised for a body whose bytes are not what was written."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Counts what a source has on record and cannot give (any more): deleted by retention before it was read, or
    damaged.

    Each reader that passes over it counts it, once for each time that it does.
    """

    retired_trajectories: int = 0
    retired_tokens: int = 0
    damaged_trajectories: int = 0
    damaged_tokens: int = 0

    def __add__(self, other: Gone) -> Gone:
        return Gone(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def encode_prompt(prompt: Prompt) -> bytes:
    """Encodes the whole prompt, also what its key leaves out (text and fields)."""
    tokens = np.ascontiguousarray(prompt.tokens, _TOKENS)
    header = {"task": prompt.task, "text": prompt.text, "fields": dict(prompt.fields), "tokens": len(tokens)}
    if prompt.seed is not None:  # else as it was written before there were environments
        header["seed"] = prompt.seed
    return _pack(header, [tokens])


def decode_prompt(body: bytes) -> Prompt:
    """Returns the prompt that `encode_prompt` was given."""
    header, start = _header(body)
    return Prompt(
        task=header["task"],
        tokens=np.frombuffer(body, _TOKENS, header["tokens"], start),
        text=header["text"],
        fields=header["fields"],
        seed=header.get("seed"),
    )


def prompt_id(body: bytes) -> int:
    """Returns 64 bits of the content's digest, as SQLite's signed integer."""
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little", signed=True)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Encodes everything but the prompt, which is stored once.

    Raises `ValueError` when an array does not have the completion's length T, or is not of plain numbers; `TypeError`
    when the provenance is not JSON.
    """
    c, reference = trajectory.completion, trajectory.reference
    by_token: list[_Array] = [np.asarray(c.tokens, _TOKENS), np.asarray(trajectory.log_reference, _LOGS)]
    if c.log_behavior is not None:
        by_token.append(np.asarray(c.log_behavior, _LOGS))
    if c.mask is not None:
        by_token.append(np.asarray(c.mask, _MASK))
    length = len(by_token[0])
    for array in by_token:
        if array.shape != (length,):
            raise ValueError(f"trajectory {trajectory.uid} has {length} tokens, but an array of shape {array.shape}")
    arrays = {name: _plain(name, array) for name, array in trajectory.arrays.items()}
    header = {
        "uid": trajectory.uid,
        "length": length,
        "log_behavior": c.log_behavior is not None,
        "mask": c.mask is not None,
        "text": c.text,
        "stop_reason": c.stop_reason.value,
        "versions": [number for version in c.versions for number in (version.incarnation, version.step)],
        "reference": [reference.incarnation, reference.step],
        "sampling": None if c.sampling is None else astuple(c.sampling),
        "reward": float(trajectory.reward),
        "reward_parts": {name: float(part) for name, part in trajectory.reward_parts.items()},
        "provenance": dict(trajectory.provenance),
        "created": float(trajectory.created),
        "arrays": [(name, array.dtype.str, array.shape) for name, array in arrays.items()],
    }
    body = _pack(header, [*by_token, *arrays.values()], _SEALED)
    return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")


def decode_trajectory(body: bytes, prompt: Prompt, compare: bool = True) -> Trajectory:
    """Returns the trajectory that `encode_trajectory` was given. Raises `Damaged` when these are not the bytes that
    were written.

    compare: with their checksum, which need not be done again for what has not been on the disk since.
    """
    header, at = _header(intact(body) if compare else body)
    length, sampling, versions = header["length"], header["sampling"], header["versions"]
    logs, masks = [_LOGS] * (1 + header["log_behavior"]), [_MASK] * header["mask"]
    by_token = [(kind, (length,)) for kind in (_TOKENS, *logs, *masks)]
    others = [(np.dtype(kind), shape) for _, kind, shape in header["arrays"]]
    tokens, log_reference, *more = _unpack(body, at, by_token + others)
    completion = Completion(
        tokens=tokens,
        text=header["text"],
        stop_reason=StopReason(header["stop_reason"]),
        versions=(Version(*versions[:2]), Version(*versions[2:])),
        sampling=None if sampling is None else Sampling(*sampling),
        log_behavior=more.pop(0) if header["log_behavior"] else None,
        mask=more.pop(0) if header["mask"] else None,
    )
    return Trajectory(
        uid=header["uid"],
        prompt=prompt,
        completion=completion,
        reward=header["reward"],
        log_reference=log_reference,
        reference=Version(*header["reference"]),
        reward_parts=header["reward_parts"],
        arrays={name: array for (name, _, _), array in zip(header["arrays"], more, strict=True)},
        provenance=header["provenance"],
        created=header["created"],
    )


def facts_of(body: bytes) -> dict[str, Any]:
    """Returns the header of a trajectory: everything but its arrays and its prompt; `uid` is one of the facts.

    Raises `Damaged` when these are not the bytes that were written.
    """
    return _header(intact(body))[0]


def header_of(body: bytes) -> dict[str, Any]:
    """Returns the header of a prompt or a trajectory. Raises `Damaged` for what is neither."""
    if _is_sealed(body):
        return facts_of(body)
    try:
        header, _ = _header(body)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"a prompt cannot be read: {error}") from error
    return header


def intact(body: bytes, uid: str | None = None) -> bytes:
    """Returns the body of a trajectory. Raises `Damaged` when these are not the bytes that were written, or those of
    another trajectory than `uid`.
    """
    if not _is_sealed(body) or zlib.crc32(memoryview(body)[:-_CRC_BYTES]) != int.from_bytes(
        body[-_CRC_BYTES:], "little"
    ):
        raise Damaged("a trajectory's checksum differs from what was written")
    if uid is not None:
        _require_uid(_header(body)[0], uid)
    return body


def _require_uid(header: Mapping[str, Any], uid: str) -> None:
    if header["uid"] != uid:
        raise Damaged(f"its content is that of trajectory {str(header['uid'])[:80]!r}")


class Stored(NamedTuple):
    """A trajectory as bytes, with the facts that the replay buffer needs to keep it."""

    prompt: Prompt
    body: bytes
    uid: str
    length: int  # completion tokens
    reward: float
    version: Version  # the oldest weights that sampled a part of it
    reference: Version
    digest: int  # of the completion's tokens, 64 bits
    left_out: float  # answers to its prompt that were not stored, for what they say, for each that was
    place: int = 0  # its number in the journal, from 1 on; 0: it is in none

    @classmethod
    def of(cls, trajectory: Trajectory) -> Stored:
        """Encodes a trajectory. Raises as `encode_trajectory` does."""
        return cls.read(trajectory.prompt, encode_trajectory(trajectory))

    @classmethod
    def read(cls, prompt: Prompt, body: bytes, uid: str | None = None) -> Stored:
        """Reads the facts from an encoded body. Raises `Damaged` when these are not the bytes that were written, or
        those of another trajectory than `uid`.
        """
        facts = facts_of(body)
        if uid is not None:
            _require_uid(facts, uid)
        version, reference = Version(*facts["versions"][:2]), Version(*facts["reference"])
        digest = hashlib.blake2b(tokens_of(body, facts["length"]).data, digest_size=8).digest()
        return cls(
            *(prompt, body, facts["uid"], facts["length"], facts["reward"], version, reference),
            int.from_bytes(digest, "little"),
            float(facts["provenance"].get(LEFT_OUT, 0)),
        )

    @property
    def trajectory(self) -> Trajectory:
        """Decodes the trajectory. Raises `Damaged` when these are not the bytes that were written."""
        return decode_trajectory(self.body, self.prompt)

    @property
    def tokens(self) -> IntArray:
        """Returns the completion's tokens, [T]."""
        return tokens_of(self.body, self.length)


def tokens_of(body: bytes, length: int) -> IntArray:
    """Returns [T], the tokens of a trajectory whose body is intact, without decoding anything else; `length` is T."""
    return np.frombuffer(body, _TOKENS, length, _aligned(_header_end(body)))


def encode_logs(log_probabilities: FloatArray) -> bytes:
    """Encodes log-probabilities [T] alone, as a score is stored."""
    return np.ascontiguousarray(log_probabilities, _LOGS).tobytes()


def decode_logs(body: bytes) -> FloatArray:
    """Returns the log-probabilities [T] that `encode_logs` was given."""
    return np.frombuffer(body, _LOGS)


def pack_uses(used: npt.NDArray[np.int32]) -> str:
    """Encodes how often each place of the journal was used, [places + 1] (`Buffer.fates`); about a byte for three."""
    return base64.b64encode(zlib.compress(used.astype(_USES).tobytes(), 1)).decode("ascii")


def unpack_uses(text: str) -> npt.NDArray[np.int32]:
    """Returns [places + 1], what `pack_uses` was given. Raises `ValueError` for what is no such text."""
    try:
        packed = zlib.decompressobj()
        found = packed.decompress(base64.b64decode(text, validate=True), _MOST_USES)
    except (ValueError, zlib.error, TypeError) as error:
        raise ValueError(f"the record of uses cannot be read ({error})") from error
    if not packed.eof or len(found) % _USES.itemsize:
        raise ValueError("the record of uses is incomplete")
    return np.frombuffer(found, dtype=_USES).astype(np.int32)


def _plain(name: str, array: _Array) -> _Array:
    array = np.asarray(array)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"array {name!r} is of {array.dtype}, only plain numbers and booleans can be stored")
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def _pack(header: Mapping[str, Any], arrays: Sequence[_Array], flag: int = 0) -> bytes:
    text = _json(header).encode("ascii")
    pieces = [(flag | len(text)).to_bytes(4, "little") + text, *(array.tobytes() for array in arrays)]
    return b"".join(piece.ljust(_aligned(len(piece)), b"\0") for piece in pieces)


def _unpack(body: bytes, at: int, kinds: Iterable[tuple[np.dtype[Any], Sequence[int]]]) -> list[_Array]:
    """Returns the arrays of these types and shapes, the first of which begins at `at`."""
    arrays = []
    for kind, shape in kinds:
        arrays.append(np.frombuffer(body, kind, math.prod(shape), at).reshape(shape))
        at += _aligned(arrays[-1].nbytes)
    return arrays


def _is_sealed(body: bytes) -> bool:
    return len(body) > 3 and bool(body[3] & 0x80)


def _header(body: bytes) -> tuple[dict[str, Any], int]:
    """Returns the header, and where the arrays begin."""
    header = json.loads(body[4 : _header_end(body)].decode("ascii"))
    if not isinstance(header, dict):
        raise Damaged("its header is not an object")
    return header, _aligned(_header_end(body))


def _header_end(body: bytes) -> int:
    return 4 + (int.from_bytes(body[:4], "little") & ~_SEALED)


def _aligned(size: int) -> int:
    return (size + 7) & ~7


class Row(NamedTuple):
    """A trajectory's row in the journal: the known facts, and its body."""

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
    """Encodes trajectories; what is encoded already is returned as it is.

    Raises `ValueError` for arrays that do not fit their completion.
    """
    if isinstance(trajectories, Encoded):
        return trajectories
    by_object: dict[int, int] = {}
    prompts: dict[int, bytes] = {}
    rows = []
    for t in trajectories:
        prompt = by_object.get(id(t.prompt))
        if prompt is None:
            written = encode_prompt(t.prompt)
            prompt = by_object[id(t.prompt)] = prompt_id(written)
            prompts[prompt] = written
        version, body = t.version, encode_trajectory(t)
        rows.append(Row(t.uid, prompt, t.length, version.incarnation, version.step, t.reward, t.created, body))
    return Encoded(prompts, rows)


def packed(value: Any) -> Any:
    """Returns an argument or a result in the form in which it is sent: trajectories encoded, all else as it is."""
    some = isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Trajectory)
    return encoded(value) if some else value


def unpacked(value: Any) -> Any:
    """Returns what `packed` was given. Raises `Damaged` when the bytes are not those that were written."""
    if not isinstance(value, Encoded):
        return value
    prompts = {digest: decode_prompt(body) for digest, body in value.prompts.items()}
    return [decode_trajectory(row.body, prompts[row.prompt]) for row in value.rows]
