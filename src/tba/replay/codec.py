"""Prompts and trajectories as bytes: a JSON header, then raw little-endian arrays. No pickle.

Invariant: `decode_trajectory(encode_trajectory(t), prompt)` equals `t` exactly, arrays and floats bit for bit (a scalar
NaN stays a NaN, whichever it was). Decoded arrays are read-only views of the bytes they came from.

Layout: header length (uint32), header (ASCII JSON), zeros up to a multiple of 8; then each array, padded to 8 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.types import Completion, FloatArray, Json, Prompt, Sampling, StopReason, Trajectory, Version

_TOKENS = np.dtype("<i4")
_LOGS = np.dtype("<f4")
_MASK = np.dtype("?")
_STOP_REASONS = {reason.value: reason for reason in StopReason}
_Array = npt.NDArray[Any]


def encode_prompt(prompt: Prompt) -> bytes:
    """The whole prompt, also what its key leaves out (text and fields)."""
    tokens = np.ascontiguousarray(prompt.tokens, _TOKENS)
    header = {"task": prompt.task, "text": prompt.text, "fields": dict(prompt.fields), "tokens": len(tokens)}
    return _pack(header, [tokens])


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
    core = [np.ascontiguousarray(c.tokens, _TOKENS), np.ascontiguousarray(trajectory.log_reference, _LOGS)]
    if c.log_behavior is not None:
        core.append(np.ascontiguousarray(c.log_behavior, _LOGS))
    if c.mask is not None:
        core.append(np.ascontiguousarray(c.mask, _MASK))
    for array in core:
        if array.shape != (length,):
            raise ValueError(f"trajectory {trajectory.uid} has {length} tokens, but an array of shape {array.shape}")
    extra = {name: _plain(name, array) for name, array in trajectory.arrays.items()}
    first, last = c.versions
    header = {
        "uid": trajectory.uid,
        "length": length,
        "log_behavior": c.log_behavior is not None,
        "mask": c.mask is not None,
        "arrays": [[name, array.dtype.str, array.shape] for name, array in extra.items()],
        "text": c.text,
        "stop_reason": c.stop_reason.value,
        "versions": [first.incarnation, first.step, last.incarnation, last.step],
        "sampling": None if c.sampling is None else [c.sampling.temperature, c.sampling.top_p],
        "reward": float(trajectory.reward),
        "reward_parts": {name: float(part) for name, part in trajectory.reward_parts.items()},
        "reference": [trajectory.reference.incarnation, trajectory.reference.step],
        "provenance": dict(trajectory.provenance),
        "created": float(trajectory.created),
    }
    return _pack(header, [*core, *extra.values()])


def decode_trajectory(body: bytes, prompt: Prompt) -> Trajectory:
    """The inverse of `encode_trajectory`."""
    header, at = _header(body)
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


def _pack(header: Json, arrays: Sequence[_Array]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    pieces = [len(text).to_bytes(4, "little"), text, bytes(_aligned(4 + len(text)) - 4 - len(text))]
    for array in arrays:
        pieces += (array.tobytes(), bytes(_aligned(array.nbytes) - array.nbytes))
    return b"".join(pieces)


def _header(body: bytes) -> tuple[dict[str, Any], int]:
    """The header, and where the arrays begin."""
    end = 4 + int.from_bytes(body[:4], "little")
    return json.loads(body[4:end].decode("ascii")), _aligned(end)


def _aligned(size: int) -> int:
    return (size + 7) & ~7


@lru_cache(maxsize=4096)
def _version(incarnation: int, step: int) -> Version:
    return Version(incarnation, step)  # shared: a run has few versions and many trajectories


@lru_cache(maxsize=4096)
def _sampling(temperature: float, top_p: float) -> Sampling:
    return Sampling(temperature, top_p)
