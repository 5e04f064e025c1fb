"""How often each trajectory was used, as a checkpoint stores it.

Invariant: one number for each place of the journal, from place 0 (which nothing has) to the last that was taken in; a
negative one says how a trajectory has left that was never used (`replay.buffer.LEFT`).
Together with the journal it is the whole record: no other file is needed to resume.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
import numpy.typing as npt

_MOST = 1 << 31  # bytes: half a thousand million trajectories
_NUMBER = np.dtype("<i4")


def pack_uses(used: npt.NDArray[np.int32]) -> str:
    """Encodes [places + 1] as text; about a byte for three trajectories."""
    return base64.b64encode(zlib.compress(used.astype(_NUMBER).tobytes(), 1)).decode("ascii")


def unpack_uses(text: str) -> npt.NDArray[np.int32]:
    """The inverse. Raises `ValueError` for what is no such text."""
    try:
        packed = zlib.decompressobj()
        found = packed.decompress(base64.b64decode(text, validate=True), _MOST)
    except (ValueError, zlib.error, TypeError) as error:
        raise ValueError(f"the record of uses cannot be read ({error})") from error
    if not packed.eof or len(found) % _NUMBER.itemsize:
        raise ValueError("the record of uses is incomplete")
    return np.frombuffer(found, dtype=_NUMBER).astype(np.int32)
