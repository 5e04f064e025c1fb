"""Prompts and trajectories as bytes: a JSON header, then raw little-endian arrays. No pickle.

Invariant: `decode_trajectory(encode_trajectory(t), prompt)` equals `t` exactly, arrays and floats bit for bit (a scalar
NaN stays a NaN, whichever it was). Decoded arrays are read-only views of the bytes they came from.

Layout: header length (31 bits) and a bit that says "sealed" (uint32), header (ASCII JSON), zeros up to a multiple of 8;
then each array, padded to 8 bytes. A trajectory is sealed: its body ends with the CRC-32 of all that comes before, so
that bytes that have changed on the disk are found before anything is learnt from them. Bodies of earlier versions of
this format are not sealed and are read as they are. A prompt has its digest for its name.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.types import Completion, FloatArray, Json, Prompt, Sampling, StopReason, Trajectory, Version

_TOKENS = np.dtype("<i4")
_LOGS = np.dtype("<f4")
_MASK = np.dtype("?")
_STOP_REASONS = {reason.value: reason for reason in StopReason}
_SEALED = 1 << 31
_CRC_BYTES = 4
_PADDING = [bytes(n) for n in range(8)]
_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes one for each call
_quoted = json.encoder.encode_basestring_ascii
_parse = json.JSONDecoder().raw_decode  # json.loads without looking for blanks around it
_Array = npt.NDArray[Any]
_TRUE = ("false", "true")
UID_AT = 4  # where `uid_bytes` are found in a body


class Damaged(ValueError):
    """A body whose bytes are not what was written."""


def encode_prompt(prompt: Prompt) -> bytes:
    """The whole prompt, also what its key leaves out (text and fields)."""
    tokens = np.ascontiguousarray(prompt.tokens, _TOKENS)
    header = {"task": prompt.task, "text": prompt.text, "fields": dict(prompt.fields), "tokens": len(tokens)}
    return _pack(_json(header), [tokens])


def decode_prompt(body: bytes) -> Prompt:
    """The inverse of `encode_prompt`."""
    header, start = _header(body)
    return Prompt(
        task=header["task"],
        tokens=np.frombuffer(body, _TOKENS, header["tokens"], start),
        text=header["text"],
        fields=header["fields"],
    )


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Everything but the prompt, which is kept once.

    Raises `ValueError` when an array does not have the completion's length T, or is not of plain numbers; `TypeError`
    when the provenance is not JSON.
    """
    c = trajectory.completion
    length = len(c.tokens)
    core: list[_Array] = [np.asarray(c.tokens, _TOKENS), np.asarray(trajectory.log_reference, _LOGS)]
    if c.log_behavior is not None:
        core.append(np.asarray(c.log_behavior, _LOGS))
    if c.mask is not None:
        core.append(np.asarray(c.mask, _MASK))
    for array in core:
        if array.shape != (length,):
            raise ValueError(f"trajectory {trajectory.uid} has {length} tokens, but an array of shape {array.shape}")
    extra = {name: _plain(name, array) for name, array in trajectory.arrays.items()}
    first, last = c.versions
    rest: dict[str, Json] = {
        "sampling": None if c.sampling is None else [c.sampling.temperature, c.sampling.top_p],
        "reward": float(trajectory.reward),
        "reward_parts": {name: float(part) for name, part in trajectory.reward_parts.items()},
        "provenance": dict(trajectory.provenance),
        "created": float(trajectory.created),
        "arrays": [[name, array.dtype.str, array.shape] for name, array in extra.items()],
    }
    header = (  # written out where that is all there is to it: half the time that a JSON encoder takes
        f'{{"uid":{_quoted(trajectory.uid)},"length":{length},'  # first, see `uid_bytes`
        f'"log_behavior":{_TRUE[c.log_behavior is not None]},"mask":{_TRUE[c.mask is not None]},'
        f'"text":{_quoted(c.text)},"stop_reason":"{c.stop_reason.value}",'
        f'"versions":[{first.incarnation},{first.step},{last.incarnation},{last.step}],'
        f'"reference":[{trajectory.reference.incarnation},{trajectory.reference.step}],'
        f"{_json(rest)[1:]}"
    )
    return _sealed(_pack(header, [*core, *extra.values()], _SEALED))


def decode_trajectory(body: bytes, prompt: Prompt, compare: bool = True) -> Trajectory:
    """The inverse of `encode_trajectory`. Raises `Damaged` when these are not the bytes that were written.

    compare: with their checksum, which need not be done again for what has not been on the disk since.
    """
    header, at = _intact(body, compare)
    try:
        return _trajectory(body, header, at, prompt)
    except (ValueError, KeyError, TypeError, IndexError) as error:  # of a body that was not sealed
        raise Damaged(f"a trajectory cannot be read: {error}") from error


def header_of(body: bytes) -> dict[str, Any]:
    """What is written of a prompt or a trajectory apart from its arrays. Raises as `decode_trajectory` does."""
    return _intact(body)[0]


def facts_of(body: bytes) -> dict[str, Any]:
    """What is written of a trajectory apart from its arrays and its prompt; `uid` is one of the facts. Raises as
    `decode_trajectory` does.
    """
    header, _ = _intact(body)
    if not (isinstance(header.get("uid"), str) and isinstance(header.get("length"), int)):
        raise Damaged("these are not the facts of a trajectory")
    return header


def uid_bytes(uid: str) -> bytes:
    """What the body of the trajectory with this uid, and of no other, has at `UID_AT`."""
    return f'{{"uid":{_quoted(uid)},'.encode("ascii")


@dataclass(frozen=True, slots=True)
class Stored:
    """A trajectory as bytes, and what has to be known of it to keep it."""

    prompt: Prompt
    body: bytes
    uid: str
    length: int  # completion tokens
    reward: float
    version: Version  # the oldest weights that had a hand in it
    reference: Version
    digest: int  # of the completion's tokens, 64 bits

    @classmethod
    def of(cls, trajectory: Trajectory) -> Stored:
        """Raises as `encode_trajectory` does."""
        return cls.read(trajectory.prompt, encode_trajectory(trajectory))

    @classmethod
    def read(cls, prompt: Prompt, body: bytes) -> Stored:
        """Raises `Damaged` when these are not the bytes that were written."""
        header, at = _intact(body)
        try:
            length, versions, reference = header["length"], header["versions"], header["reference"]
            return cls(
                prompt,
                body,
                header["uid"],
                length,
                header["reward"],
                _version(versions[0], versions[1]),
                _version(reference[0], reference[1]),
                int.from_bytes(hashlib.blake2b(body[at : at + 4 * length], digest_size=8).digest(), "little"),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise Damaged(f"a trajectory cannot be read: {error}") from error

    @property
    def trajectory(self) -> Trajectory:
        """Raises `Damaged` as `read` does."""
        return decode_trajectory(self.body, self.prompt)


def _trajectory(body: bytes, header: dict[str, Any], at: int, prompt: Prompt) -> Trajectory:
    length = header["length"]
    step = _aligned(4 * length)
    tokens = np.frombuffer(body, _TOKENS, length, at)
    log_reference = np.frombuffer(body, _LOGS, length, at + step)
    at += 2 * step
    log_behavior = mask = None
    if header["log_behavior"]:
        log_behavior = np.frombuffer(body, _LOGS, length, at)
        at += step
    if header["mask"]:
        mask = np.frombuffer(body, _MASK, length, at)
        at += _aligned(length)
    sampling, versions = header["sampling"], header["versions"]
    completion = Completion(
        tokens=tokens,
        text=header["text"],
        stop_reason=_STOP_REASONS[header["stop_reason"]],
        versions=(_version(versions[0], versions[1]), _version(versions[2], versions[3])),
        sampling=None if sampling is None else _sampling(sampling[0], sampling[1]),
        log_behavior=log_behavior,
        mask=mask,
    )
    return Trajectory(
        uid=header["uid"],
        prompt=prompt,
        completion=completion,
        reward=header["reward"],
        log_reference=log_reference,
        reference=_version(*header["reference"]),
        reward_parts=header["reward_parts"],
        arrays=_arrays(body, at, header["arrays"]) if header["arrays"] else {},
        provenance=header["provenance"],
        created=header["created"],
    )


def encode_logs(log_probabilities: FloatArray) -> bytes:
    """[T] log-probabilities alone."""
    return np.ascontiguousarray(log_probabilities, _LOGS).tobytes()


def decode_logs(body: bytes) -> FloatArray:
    """The inverse of `encode_logs`."""
    return np.frombuffer(body, _LOGS)


def _plain(name: str, array: _Array) -> _Array:
    array = np.asarray(array)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"array {name!r} is of {array.dtype}, only plain numbers and booleans can be stored")
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def _arrays(body: bytes, at: int, specification: Sequence[Sequence[Any]]) -> dict[str, _Array]:
    arrays = {}
    for name, kind, shape in specification:
        array = np.frombuffer(body, np.dtype(kind), int(np.prod(shape, dtype=np.int64)), at).reshape(shape)
        arrays[name] = array
        at += _aligned(array.nbytes)
    return arrays


def _pack(header: str, arrays: Sequence[_Array], flag: int = 0) -> bytes:
    text = header.encode("ascii")
    pieces = [(flag | len(text)).to_bytes(4, "little"), text, _PADDING[-(4 + len(text)) & 7]]
    for array in arrays:
        data = array.tobytes()
        pieces += (data, _PADDING[-len(data) & 7])
    return b"".join(pieces)


def _sealed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")


def _intact(body: bytes, compare: bool = True) -> tuple[dict[str, Any], int]:
    """The header, and where the arrays begin; raises `Damaged`."""
    try:
        if (
            compare
            and body[3] & 0x80
            and zlib.crc32(memoryview(body)[:-_CRC_BYTES]) != int.from_bytes(body[-_CRC_BYTES:], "little")
        ):
            raise Damaged("a trajectory's checksum differs from what was written")
        header, at = _header(body)
    except (ValueError, IndexError, TypeError) as error:
        raise error if isinstance(error, Damaged) else Damaged(f"a trajectory cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise Damaged("a trajectory's header is not an object")
    return header, at


def _header(body: bytes) -> tuple[dict[str, Any], int]:
    """The header, and where the arrays begin."""
    end = 4 + (int.from_bytes(body[:4], "little") & ~_SEALED)
    text = body[4:end].decode("ascii")
    header, used = _parse(text)
    if used != len(text):
        raise Damaged("a trajectory's header ends too early")
    return header, _aligned(end)


def _aligned(size: int) -> int:
    return (size + 7) & ~7


@lru_cache(maxsize=4096)
def _version(incarnation: int, step: int) -> Version:
    return Version(incarnation, step)  # shared: a run has few versions and many trajectories


@lru_cache(maxsize=4096)
def _sampling(temperature: float, top_p: float) -> Sampling:
    return Sampling(temperature, top_p)
