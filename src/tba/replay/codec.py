"""Prompts and trajectories as bytes: a JSON header, then raw little-endian arrays. No pickle.

Invariant: `decode_trajectory(encode_trajectory(t), prompt)` equals `t` exactly, arrays and floats bit for bit (a scalar
NaN stays a NaN, whichever it was). Decoded arrays are read-only views of the bytes they came from.

Layout: header length (31 bits) and a bit that says "sealed" (uint32), header (ASCII JSON), zeros up to a multiple of 8;
then each array, padded to 8 bytes. A trajectory is sealed: its body ends with the CRC-32 of all that comes before, so
that bytes that have changed on the disk are detected before anything is learnt from them. A prompt is not: its name is
its digest.

`Encoded` is what is sent when the journal is on another machine: plain values and bytes, which the receiver writes
without unpickling or decoding.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from tba.types import Completion, FloatArray, IntArray, Prompt, Sampling, StopReason, Trajectory, Version

_TOKENS = np.dtype("<i4")
_LOGS = np.dtype("<f4")
_MASK = np.dtype("?")
_STOP_REASONS = {reason.value: reason for reason in StopReason}
_SEALED = 1 << 31
_CRC_BYTES = 4
_PADDING = [bytes(n) for n in range(8)]
_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes an encoder for each call
_quoted = json.encoder.encode_basestring_ascii
_parse = json.JSONDecoder().raw_decode  # json.loads without skipping blanks around the value
_Array = npt.NDArray[Any]
_TRUE = ("false", "true")
_FACTS_AT = 4
_FACTS = re.compile(rb'\{"uid":"([^"\\]*)","length":(\d+),')
_VERSIONS = b',"versions":['
_MORE = re.compile(
    rb',"versions":\[(\d+),(\d+),\d+,\d+\],"reference":\[(\d+),(\d+)\],"sampling":[^"]*,"reward":([^,]+),'
)


class Damaged(ValueError):
    """Raised for a body whose bytes are not what was written."""


@dataclass(frozen=True, slots=True)
class Gone:
    """What a source of trajectories has on record and cannot give (any more): deleted by retention before it was read,
    or damaged.

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
    return _pack(_json(header), [tokens])


def decode_prompt(body: bytes) -> Prompt:
    """The inverse of `encode_prompt`."""
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
    return _encoded(trajectory, _origin(trajectory))


def encode_trajectories(trajectories: Sequence[Trajectory]) -> list[bytes]:
    """Encodes each as `encode_trajectory` does. A provenance and a time that they share are encoded once."""
    written: dict[tuple[int, int], str] = {}
    bodies = []
    for t in trajectories:
        same = (id(t.provenance), id(t.created))
        origin = written.get(same)
        if origin is None:
            origin = written[same] = _origin(t)
        bodies.append(_encoded(t, origin))
    return bodies


def _origin(trajectory: Trajectory) -> str:
    """Returns who made it and when, as JSON."""
    return f'"provenance":{_json(dict(trajectory.provenance))},"created":{_number(trajectory.created)},'


def _encoded(trajectory: Trajectory, origin: str) -> bytes:
    c, parts, reference = trajectory.completion, trajectory.reward_parts, trajectory.reference
    core: list[_Array] = [np.asarray(c.tokens, _TOKENS), np.asarray(trajectory.log_reference, _LOGS)]
    if c.log_behavior is not None:
        core.append(np.asarray(c.log_behavior, _LOGS))
    if c.mask is not None:
        core.append(np.asarray(c.mask, _MASK))
    length = len(core[0])
    shape = (length,)
    for array in core:
        if array.shape != shape:
            raise ValueError(f"trajectory {trajectory.uid} has {length} tokens, but an array of shape {array.shape}")
    arrays = []
    for name, extra in trajectory.arrays.items():
        core.append(_plain(name, extra))
        arrays.append([name, core[-1].dtype.str, core[-1].shape])
    first, last = c.versions
    header = (  # written out where that is all there is to it: half the time that a JSON encoder takes
        f'{{"uid":{_quoted(trajectory.uid)},"length":{length},'  # first, see `uid_of`
        f'"log_behavior":{_TRUE[c.log_behavior is not None]},"mask":{_TRUE[c.mask is not None]},'
        f'"text":{_quoted(c.text)},"stop_reason":"{c.stop_reason.value}",'
        f'"versions":[{first.incarnation},{first.step},{last.incarnation},{last.step}],'
        f'"reference":[{reference.incarnation},{reference.step}],'
        f'"sampling":{_sampling_json(c.sampling)},'
        f'"reward":{_number(trajectory.reward)},"reward_parts":{_numbers(parts) if parts else "{}"},'
        f'{origin}"arrays":{_json(arrays) if arrays else "[]"}}}'
    )
    body = _pack(header, core, _SEALED)
    return body + crc32(body).to_bytes(_CRC_BYTES, "little")


def _numbers(parts: Mapping[str, float]) -> str:
    return _json({name: float(part) for name, part in parts.items()})


def _number(value: float) -> str:
    """As the JSON module writes it, which reads NaN and infinities too."""
    value = float(value)
    return repr(value) if math.isfinite(value) else _json(value)


@lru_cache(maxsize=4096)
def _sampling_json(sampling: Sampling | None) -> str:
    if sampling is None:
        return "null"
    first = [sampling.temperature, sampling.top_p]
    more = [sampling.top_k, sampling.min_p, sampling.repetition_penalty]
    return _json(first if more == [0, 0, 1] else [*first, *more])


def decode_trajectory(body: bytes, prompt: Prompt, compare: bool = True) -> Trajectory:
    """The inverse of `encode_trajectory`. Raises `Damaged` when these are not the bytes that were written.

    compare: with their checksum, which need not be done again for what has not been on the disk since.
    """
    if compare:
        _compare(body)
    header, at = _header(body)
    return _trajectory(body, header, at, prompt)


def facts_of(body: bytes) -> dict[str, Any]:
    """Returns the header of a trajectory: everything but its arrays and its prompt; `uid` is one of the facts.

    Raises as `decode_trajectory` does.
    """
    _compare(body)
    return _header(body)[0]


def header_of(body: bytes) -> dict[str, Any]:
    """Returns the header of a prompt or a trajectory. Raises `Damaged` for what is neither."""
    if _is_sealed(body):
        return facts_of(body)
    try:
        header, _ = _header(body)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"a prompt cannot be read: {error}") from error
    return header


def intact(body: bytes) -> bytes:
    """Returns the body of a trajectory. Raises `Damaged` when these are not the bytes that were written."""
    _compare(body)
    return body


def uid_of(body: bytes) -> str:
    """Returns the uid of a trajectory whose body is intact."""
    facts = _FACTS.match(body, _FACTS_AT)
    return facts[1].decode("ascii") if facts else str(_header(body)[0]["uid"])


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
    place: int = 0  # its number in the journal, from 1 on; 0: it is in none

    @classmethod
    def of(cls, trajectory: Trajectory) -> Stored:
        """Encodes a trajectory. Raises as `encode_trajectory` does."""
        return cls.read(trajectory.prompt, encode_trajectory(trajectory))

    @classmethod
    def read(cls, prompt: Prompt, body: bytes) -> Stored:
        """Reads the facts from an encoded body. Raises `Damaged` when these are not the bytes that were written."""
        _compare(body)
        uid, length, version, reference, reward = _found(body) or _parsed(body)
        return cls(prompt, body, uid, length, reward, version, reference, _digest(tokens_of(body, length)))

    @property
    def trajectory(self) -> Trajectory:
        """Decodes the trajectory. Raises `Damaged` as `read` does."""
        return decode_trajectory(self.body, self.prompt)

    @property
    def tokens(self) -> IntArray:
        """Returns the completion's tokens, [T]."""
        return tokens_of(self.body, self.length)


def tokens_of(body: bytes, length: int) -> IntArray:
    """Returns [T], the tokens of a trajectory whose body is intact, without decoding anything else; `length` is T."""
    return np.frombuffer(body, _TOKENS, length, _arrays_at(body))


def _digest(tokens_T: IntArray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens_T.data, digest_size=8).digest(), "little")


_Facts: TypeAlias = tuple[str, int, Version, Version, float]  # uid, length, oldest weights, reference, reward


def _found(body: bytes) -> _Facts | None:
    """Finds the facts where `_encoded` puts them, in a third of the time of a JSON decoder; None where they are not
    there.
    """
    facts = _FACTS.match(body, _FACTS_AT)
    # this can only be the key: inside a JSON string its quotes would be escaped
    more = _MORE.match(body, max(0, body.find(_VERSIONS)))
    if facts is None or more is None:
        return None
    version, reference = _version(int(more[1]), int(more[2])), _version(int(more[3]), int(more[4]))
    return facts[1].decode("ascii"), int(facts[2]), version, reference, float(more[5])


def _parsed(body: bytes) -> _Facts:
    header, _ = _header(body)
    first, reference = header["versions"][:2], header["reference"]
    return header["uid"], header["length"], _version(*first), _version(*reference), header["reward"]


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
        sampling=None if sampling is None else _sampling(*sampling),
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
    """Encode log-probabilities [T] alone, as a score is stored."""
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


def _is_sealed(body: bytes) -> bool:
    return len(body) > 3 and bool(body[3] & 0x80)


def _compare(body: bytes) -> None:
    """Raises `Damaged` when a trajectory's body is not what was written."""
    if not _is_sealed(body) or crc32(memoryview(body)[:-_CRC_BYTES]) != int.from_bytes(body[-_CRC_BYTES:], "little"):
        raise Damaged("a trajectory's checksum differs from what was written")


def _header(body: bytes) -> tuple[dict[str, Any], int]:
    """Returns the header, and where the arrays begin."""
    text = body[4 : _header_end(body)].decode("ascii")
    header, used = _parse(text)
    if used != len(text) or not isinstance(header, dict):
        raise Damaged("its header is not an object")
    return header, _arrays_at(body)


def _header_end(body: bytes) -> int:
    return 4 + (int.from_bytes(body[:4], "little") & ~_SEALED)


def _arrays_at(body: bytes) -> int:
    return _aligned(_header_end(body))


def _aligned(size: int) -> int:
    return (size + 7) & ~7


@lru_cache(maxsize=4096)
def _version(incarnation: int, step: int) -> Version:
    return Version(incarnation, step)  # shared: a run has few versions and many trajectories


@lru_cache(maxsize=4096)
def _sampling(temperature: float, top_p: float, top_k: int = 0, min_p: float = 0, penalty: float = 1) -> Sampling:
    return Sampling(temperature, top_p, top_k, min_p, penalty)


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
    for t, body in zip(trajectories, encode_trajectories(trajectories), strict=True):
        prompt = by_object.get(id(t.prompt))
        if prompt is None:
            written = encode_prompt(t.prompt)
            prompt = by_object[id(t.prompt)] = prompt_id(written)
            prompts[prompt] = written
        version = t.version
        rows.append(Row(t.uid, prompt, t.length, version.incarnation, version.step, t.reward, t.created, body))
    return Encoded(prompts, rows)


def packed(value: Any) -> Any:
    """Returns an argument or a result in the form in which it is sent: trajectories encoded, all else as it is."""
    some = isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], Trajectory)
    return encoded(value) if some else value


def unpacked(value: Any) -> Any:
    """The inverse of `packed`. Raises `Damaged` when the bytes are not those that were written."""
    if not isinstance(value, Encoded):
        return value
    prompts = {digest: decode_prompt(body) for digest, body in value.prompts.items()}
    return [decode_trajectory(row.body, prompts[row.prompt]) for row in value.rows]
