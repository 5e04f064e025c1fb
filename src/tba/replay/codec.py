"""Prompts and trajectories as bytes: a JSON header, then raw little-endian arrays. No pickle.

Invariant: `decode_trajectory(encode_trajectory(t), prompt)` equals `t` exactly, arrays and floats bit for bit (a scalar
NaN stays a NaN, whichever it was). Decoded arrays are read-only views of the bytes they came from, except the few
numbers of where segments begin, which are in the header.

Layout: header length (31 bits) and a bit that says "sealed" (uint32), header (ASCII JSON), zeros up to a multiple of 8;
then each array, padded to 8 bytes. A trajectory is sealed: its body ends with the CRC-32 of all that comes before, so
that bytes that have changed on the disk are detected before anything is learnt from them. A prompt is not: its name is
its digest.

`EncodedTrajectories` are sent when the journal is on another machine: plain values and bytes, which the receiver writes
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

_TOKENS_DTYPE = np.dtype("<i4")
_LOGS_DTYPE = np.dtype("<f4")
_MASK_DTYPE = np.dtype("?")
_USES_DTYPE = np.dtype("<i4")
_MOST_USES_BYTES = 1 << 31  # bytes: half a thousand million trajectories
_SEALED_BIT = 1 << 31
_CRC_BYTES = 4
_encode_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes an encoder for each call
_Array = npt.NDArray[Any]


class Damaged(ValueError):
    """Raised for a body whose bytes are not what was written."""


@dataclass(frozen=True, slots=True)
class MissingCounts:
    """Counts trajectories that a source has on record and cannot give (any more): deleted by retention before they were
    read, or damaged.

    Each reader counts them, once for each time that it passes over them.
    """

    retired_trajectories: int = 0
    retired_tokens: int = 0
    damaged_trajectories: int = 0
    damaged_tokens: int = 0

    def __add__(self, addend: MissingCounts) -> MissingCounts:
        return MissingCounts(*(a + b for a, b in zip(astuple(self), astuple(addend), strict=True)))


def encode_prompt(prompt: Prompt) -> bytes:
    """Encodes a whole prompt, also its text and fields, which its key leaves out."""
    tokens = np.ascontiguousarray(prompt.tokens, _TOKENS_DTYPE)
    header = {"task": prompt.task, "text": prompt.text, "fields": dict(prompt.fields), "tokens": len(tokens)}
    if prompt.seed is not None:  # else as it was written before there were environments
        header["seed"] = prompt.seed
    return _pack(header, [tokens])


def decode_prompt(body: bytes) -> Prompt:
    """Returns the prompt that `encode_prompt` was given."""
    header, start = _parse_header(body)
    return Prompt(
        task=header["task"],
        tokens=np.frombuffer(body, _TOKENS_DTYPE, header["tokens"], start),
        text=header["text"],
        fields=header["fields"],
        seed=header.get("seed"),
    )


def prompt_id(body: bytes) -> int:
    """Returns 64 bits of the content's digest, as SQLite's signed integer."""
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little", signed=True)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Encodes a trajectory without its prompt, which is stored once.

    Raises `ValueError` when an array does not have the completion's length T, or is not of plain numbers; `TypeError`
    when the provenance is not JSON.
    """
    completion, reference = trajectory.completion, trajectory.reference
    token_arrays: list[_Array] = [np.asarray(completion.tokens, _TOKENS_DTYPE)]
    token_arrays.append(np.asarray(trajectory.log_reference, _LOGS_DTYPE))
    if completion.log_behavior is not None:
        token_arrays.append(np.asarray(completion.log_behavior, _LOGS_DTYPE))
    if completion.mask is not None:
        token_arrays.append(np.asarray(completion.mask, _MASK_DTYPE))
    length = len(token_arrays[0])
    for array in token_arrays:
        if array.shape != (length,):
            raise ValueError(f"trajectory {trajectory.uid} has {length} tokens, but an array of shape {array.shape}")
    arrays = {name: _as_stored_array(name, array) for name, array in trajectory.arrays.items()}
    header = {
        "uid": trajectory.uid,
        "length": length,
        "log_behavior": completion.log_behavior is not None,
        "mask": completion.mask is not None,
        "text": completion.text,
        "stop_reason": completion.stop_reason.value,
        "versions": [number for version in completion.versions for number in (version.incarnation, version.step)],
        "reference": [reference.incarnation, reference.step],
        "sampling": None if completion.sampling is None else astuple(completion.sampling),
        "reward": float(trajectory.reward),
        "reward_parts": {name: float(part) for name, part in trajectory.reward_parts.items()},
        "provenance": dict(trajectory.provenance),
        "created": float(trajectory.created),
        "arrays": [(name, array.dtype.str, array.shape) for name, array in arrays.items()],
    }
    if completion.begins is not None:  # else as it was written before there were segments
        header["begins"] = completion.begins.tolist()
    body = _pack(header, [*token_arrays, *arrays.values()], _SEALED_BIT)
    return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")


def decode_trajectory(body: bytes, prompt: Prompt, verify: bool = True) -> Trajectory:
    """Returns the trajectory that `encode_trajectory` was given. Raises `Damaged` when these are not the bytes that
    were written.

    verify: compare the bytes with their checksum, which bytes that have not been on the disk since need no more.
    """
    header, start = _parse_header(check_body(body) if verify else body)
    length, sampling, versions = header["length"], header["sampling"], header["versions"]
    log_kinds, mask_kinds = [_LOGS_DTYPE] * (1 + header["log_behavior"]), [_MASK_DTYPE] * header["mask"]
    token_kinds = [(dtype, (length,)) for dtype in (_TOKENS_DTYPE, *log_kinds, *mask_kinds)]
    other_kinds = [(np.dtype(dtype), shape) for _, dtype, shape in header["arrays"]]
    tokens, log_reference, *later_arrays = _unpack(body, start, token_kinds + other_kinds)
    completion = Completion(
        tokens=tokens,
        text=header["text"],
        stop_reason=StopReason(header["stop_reason"]),
        versions=(Version(*versions[:2]), Version(*versions[2:])),
        sampling=None if sampling is None else Sampling(*sampling),
        log_behavior=later_arrays.pop(0) if header["log_behavior"] else None,
        mask=later_arrays.pop(0) if header["mask"] else None,
        begins=np.array(header["begins"], np.int32) if "begins" in header else None,
    )
    return Trajectory(
        uid=header["uid"],
        prompt=prompt,
        completion=completion,
        reward=header["reward"],
        log_reference=log_reference,
        reference=Version(*header["reference"]),
        reward_parts=header["reward_parts"],
        arrays={name: array for (name, _, _), array in zip(header["arrays"], later_arrays, strict=True)},
        provenance=header["provenance"],
        created=header["created"],
    )


def trajectory_header(body: bytes) -> dict[str, Any]:
    """Returns the header of a trajectory: everything but its arrays and its prompt; `uid` is one of the facts.

    Raises `Damaged` when these are not the bytes that were written.
    """
    return _parse_header(check_body(body))[0]


def read_header(body: bytes) -> dict[str, Any]:
    """Returns the header of a prompt or a trajectory. Raises `Damaged` for what is neither."""
    if _is_sealed(body):
        return trajectory_header(body)
    try:
        header, _ = _parse_header(body)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"a prompt cannot be read: {error}") from error
    return header


def check_body(body: bytes, uid: str | None = None) -> bytes:
    """Returns the body of a trajectory. Raises `Damaged` when these are not the bytes that were written, or those of
    another trajectory than `uid`.
    """
    if not _is_sealed(body) or zlib.crc32(memoryview(body)[:-_CRC_BYTES]) != int.from_bytes(
        body[-_CRC_BYTES:], "little"
    ):
        raise Damaged("a trajectory's checksum differs from what was written")
    if uid is not None:
        _require_uid(_parse_header(body)[0], uid)
    return body


def _require_uid(header: Mapping[str, Any], uid: str) -> None:
    if header["uid"] != uid:
        raise Damaged(f"its content is that of trajectory {str(header['uid'])[:80]!r}")


class StoredTrajectory(NamedTuple):
    """Holds a trajectory as bytes, with the facts that the replay buffer needs to keep it."""

    prompt: Prompt
    body: bytes
    uid: str
    length: int  # completion tokens
    reward: float
    version: Version  # the oldest weights that sampled a part of it
    reference: Version
    digest: int  # of the completion's tokens and segments, 64 bits
    left_out: float  # answers to its prompt that were not stored, for what they say, for each that was
    place: int = 0  # its number in the journal, from 1 on; 0: it is in none

    @classmethod
    def of(cls, trajectory: Trajectory) -> StoredTrajectory:
        """Encodes a trajectory. Raises as `encode_trajectory` does."""
        return cls.read(trajectory.prompt, encode_trajectory(trajectory))

    @classmethod
    def read(cls, prompt: Prompt, body: bytes, uid: str | None = None) -> StoredTrajectory:
        """Reads the facts from an encoded body. Raises `Damaged` when these are not the bytes that were written, or
        those of another trajectory than `uid`.
        """
        facts = trajectory_header(body)
        if uid is not None:
            _require_uid(facts, uid)
        version, reference = Version(*facts["versions"][:2]), Version(*facts["reference"])
        digest = hashlib.blake2b(tokens_of(body, facts["length"]).data, digest_size=8)
        if "begins" in facts:
            digest.update(np.array(facts["begins"], _TOKENS_DTYPE).tobytes())
        return cls(
            *(prompt, body, facts["uid"], facts["length"], facts["reward"], version, reference),
            int.from_bytes(digest.digest(), "little"),
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
    return np.frombuffer(body, _TOKENS_DTYPE, length, _aligned(_header_end(body)))


def encode_logs(log_probabilities: FloatArray) -> bytes:
    """Encodes log-probabilities [T] alone, as a score is stored."""
    return np.ascontiguousarray(log_probabilities, _LOGS_DTYPE).tobytes()


def decode_logs(body: bytes) -> FloatArray:
    """Returns the log-probabilities [T] that `encode_logs` was given."""
    return np.frombuffer(body, _LOGS_DTYPE)


def pack_uses(uses: npt.NDArray[np.int32]) -> str:
    """Encodes how often each place of the journal was used, [places + 1] (`Buffer.fates`); about a byte for three."""
    return base64.b64encode(zlib.compress(uses.astype(_USES_DTYPE).tobytes(), 1)).decode("ascii")


def unpack_uses(text: str) -> npt.NDArray[np.int32]:
    """Returns the uses, [places + 1], that `pack_uses` encoded. Raises `ValueError` for any other text."""
    try:
        decompressor = zlib.decompressobj()
        content = decompressor.decompress(base64.b64decode(text, validate=True), _MOST_USES_BYTES)
    except (ValueError, zlib.error, TypeError) as error:
        raise ValueError(f"the record of uses cannot be read ({error})") from error
    if not decompressor.eof or len(content) % _USES_DTYPE.itemsize:
        raise ValueError("the record of uses is incomplete")
    return np.frombuffer(content, dtype=_USES_DTYPE).astype(np.int32)


def _as_stored_array(name: str, array: _Array) -> _Array:
    array = np.asarray(array)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"array {name!r} is of {array.dtype}, only plain numbers and booleans can be stored")
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def _pack(header: Mapping[str, Any], arrays: Sequence[_Array], flag: int = 0) -> bytes:
    text = _encode_json(header).encode("ascii")
    pieces = [(flag | len(text)).to_bytes(4, "little") + text, *(array.tobytes() for array in arrays)]
    return b"".join(piece.ljust(_aligned(len(piece)), b"\0") for piece in pieces)


def _unpack(body: bytes, start: int, dtypes_and_shapes: Iterable[tuple[np.dtype[Any], Sequence[int]]]) -> list[_Array]:
    """Returns the arrays of these types and shapes, the first of which begins at `at`."""
    arrays = []
    for dtype, shape in dtypes_and_shapes:
        arrays.append(np.frombuffer(body, dtype, math.prod(shape), start).reshape(shape))
        start += _aligned(arrays[-1].nbytes)
    return arrays


def _is_sealed(body: bytes) -> bool:
    return len(body) > 3 and bool(body[3] & 0x80)


def _parse_header(body: bytes) -> tuple[dict[str, Any], int]:
    """Returns the header of a body, and the byte at which its arrays begin."""
    header = json.loads(body[4 : _header_end(body)].decode("ascii"))
    if not isinstance(header, dict):
        raise Damaged("its header is not an object")
    return header, _aligned(_header_end(body))


def _header_end(body: bytes) -> int:
    return 4 + (int.from_bytes(body[:4], "little") & ~_SEALED_BIT)


def _aligned(size: int) -> int:
    return (size + 7) & ~7


class TrajectoryRow(NamedTuple):
    """Holds a trajectory's row of the journal: its facts and its body."""

    uid: str
    prompt: int  # the digest of its body
    tokens: int
    incarnation: int
    step: int
    reward: float
    created: float
    body: bytes


class EncodedTrajectories(NamedTuple):
    """Holds encoded trajectories and their prompts, each prompt once."""

    prompts: Mapping[int, bytes]  # by digest
    rows: Sequence[TrajectoryRow]


def encode_trajectories(trajectories: Sequence[Trajectory] | EncodedTrajectories) -> EncodedTrajectories:
    """Encodes trajectories with their prompts; those that are encoded already are returned unchanged.

    Raises `ValueError` for arrays that do not fit their completion.
    """
    if isinstance(trajectories, EncodedTrajectories):
        return trajectories
    ids_by_object: dict[int, int] = {}
    prompts: dict[int, bytes] = {}
    rows = []
    for t in trajectories:
        prompt = ids_by_object.get(id(t.prompt))
        if prompt is None:
            body = encode_prompt(t.prompt)
            prompt = ids_by_object[id(t.prompt)] = prompt_id(body)
            prompts[prompt] = body
        facts = (t.uid, prompt, t.length, t.version.incarnation, t.version.step, t.reward, t.created)
        rows.append(TrajectoryRow(*facts, encode_trajectory(t)))
    return EncodedTrajectories(prompts, rows)


def to_wire(value: Any) -> Any:
    """Returns an argument or a result as it is sent to another machine: trajectories encoded, all else unchanged."""
    is_trajectories = isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Trajectory)
    return encode_trajectories(value) if is_trajectories else value


def from_wire(value: Any) -> Any:
    """Returns the value that `to_wire` was given. Raises `Damaged` when the bytes are not those that were written."""
    if not isinstance(value, EncodedTrajectories):
        return value
    prompts = {digest: decode_prompt(body) for digest, body in value.prompts.items()}
    return [decode_trajectory(row.body, prompts[row.prompt]) for row in value.rows]
