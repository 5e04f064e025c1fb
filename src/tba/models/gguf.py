"""GGUF files (llama.cpp's format) as ordinary Hugging Face folders, with the float32 weights that the file stands for.

Invariant: a file is read once; the folder is under a digest of what is in the file, and is whole or not there. Which
architectures and quantisations can be read is transformers' affair, which does it with the package gguf.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.errors import UserError
from tba.policy.loading import pretrained, readable
from tba.pretrained import MOST_COUNTED, SAFE
from tba.training.cache import cached_folder
from tba.types import quote
from tba.weights.atomic_dir import cache_folder

SUFFIX = ".gguf"
_FORMAT = b"gguf 1"  # raised when the same file is to give another folder
_VERSIONS = (2, 3)  # of the format
_TEXT, _ARRAY = 8, 9  # kinds of a field's value, and
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LEAST_FIELD, _LEAST_TENSOR = 13, 24  # bytes of one in a header
_LONGEST_NAME = 1 << 16  # bytes
_MOST_AXES = 8
_COUNT_NAMES = re.compile(r"\.(?:\w*_)?(?:block|head|expert)_\w*count")  # names of what MOST_COUNTED bounds
_SIZES = (".embedding_length", ".feed_forward_length", ".vocab_size")  # a tensor of a model is as long


def convert_once(path: Path, log: Callable[[str], None]) -> Path:
    """Returns the folder of a GGUF file: cached, or written now.

    Raises `UserError` without the package gguf, for a file that cannot be read, and where there is no room.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(_FORMAT, digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a GGUF file") from error
    cache = cache_folder("gguf")
    if not (cache / digest).is_dir():
        log(f"{path.name} becomes a folder of float32 weights, once: {cache / digest}")
    return save_once(cache, digest, lambda folder: write_folder(path, folder))


def save_once(cache: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Returns `cache / key`, made by `make` unless it is there. Raises `UserError` where it cannot be written."""
    try:
        return cached_folder(cache, key, make)
    except (OSError, SafetensorError) as error:
        raise write_error(cache, error) from error


def write_error(folder: Path, error: Exception) -> UserError:
    """Returns the error that says that a model could not be written."""
    return UserError(
        f"the model cannot be written to {folder} ({error}): make room, or choose another folder (TBA_CACHE for the "
        "cache)"
    )


def write_folder(path: Path, folder: Path) -> None:
    """Writes a GGUF file's model and tokenizer into `folder` in the Hugging Face layout."""
    try:
        import gguf  # noqa: F401 - transformers asks only the index of packages
    except ModuleNotFoundError as error:
        raise UserError(f"to read {path.name}, install the package gguf: pip install 'tba-rl[gguf]'") from error
    with redirect_stderr(StringIO()):  # transformers' progress bars: those of a GGUF file cannot be switched off
        model, tokenizer = _read(path)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _read(path: Path) -> tuple[Any, Any]:
    options: dict[str, Any] = {"gguf_file": path.name}
    remedy = "give one of an architecture and a quantisation that it can, or a Hugging Face folder"
    with readable(f"transformers cannot read the GGUF file {path}", remedy):
        _check_header(path)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **options, **SAFE)
        return as_plain_model(pretrained(AutoModelForCausalLM, path.parent, torch.float32, **options)), tokenizer


def _check_header(path: Path) -> None:
    """Raises `ValueError` for a file whose header counts more than the file can hold, or sizes that none of its tensors
    has: to read it, or to make such a model, might not end. What is no GGUF file is left to who reads it.
    """
    with path.open("rb") as file:
        magic, version = struct.unpack("<4sI", file.read(8).ljust(8, b"\0"))
        if magic == b"GGUF" and version in _VERSIONS:
            _check_counts(_Header(file, path.stat().st_size))


@dataclass
class _Header:
    """Reads the header of a GGUF file: each read is of bytes that are there."""

    file: BinaryIO
    size: int  # bytes of the file

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """Returns so many numbers of a form of `struct`. Raises `ValueError` where the file ends before."""
        width = struct.calcsize(f"<{form}")
        self.require(count, width)
        return struct.unpack(f"<{count}{form}", self.file.read(count * width))

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def text(self) -> str:
        """Returns a name."""
        length = self.number("Q")
        self.require(length, 1)
        if length > _LONGEST_NAME:
            raise ValueError(f"a name in it has {length:,} bytes")
        return self.file.read(length).decode("utf-8", "replace")

    def require(self, count: int, width: int) -> None:
        """Raises `ValueError` where the file has no room for so many parts of at least so many bytes."""
        if count * width > self.size - self.file.tell():
            raise ValueError(f"its header counts {count:,} parts, and it has {self.size:,} bytes")

    def skip(self, count: int, width: int) -> None:
        self.require(count, width)
        self.file.seek(count * width, 1)

    def value(self) -> tuple[Any, ...]:
        """Returns the numbers of a field; nothing for texts, and for more numbers than any model has layers."""
        kind, count = self.number("I"), 1
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
        if kind == _TEXT:
            self.require(count, struct.calcsize("<Q"))
            for _ in range(count):
                self.skip(self.number("Q"), 1)
            return ()
        if kind not in _NUMBERS:
            raise ValueError(f"a field of it is of the unknown kind {kind}")
        if count > MOST_COUNTED:
            self.skip(count, struct.calcsize(f"<{_NUMBERS[kind]}"))
            return ()
        return self.numbers(_NUMBERS[kind], count)


def _check_counts(header: _Header) -> None:
    tensors, fields = header.numbers("Q", 2)
    header.require(tensors, _LEAST_TENSOR)
    header.require(fields, _LEAST_FIELD)
    values = {header.text(): header.value() for _ in range(fields)}
    longest_axis = 0
    for _ in range(tensors):
        name, axes = header.text(), header.number("I")
        if axes > _MOST_AXES:
            raise ValueError(f"its tensor {quote(name, 40)} has {axes:,} axes")
        shape = header.numbers("Q", axes)
        header.numbers("I"), header.numbers("Q")  # its kind, and where it is
        if math.prod(shape) > 8 * header.size:  # no kind has less than a bit for each
            raise ValueError(f"its tensor {quote(name, 40)} is {list(shape)!s:.60}, and it has {header.size:,} bytes")
        longest_axis = max(longest_axis, *shape, 0)
    for name, numbers in values.items():
        limit = MOST_COUNTED if _COUNT_NAMES.search(name) else longest_axis if name.endswith(_SIZES) else math.inf
        if numbers and not max(numbers) <= limit:
            raise ValueError(f"its {quote(name, 60)} is {max(numbers)!s:.20}, more than {limit:,}")


def as_plain_model(model: Any) -> Any:
    """Returns an ordinary model with the weights of one that was read from quantized files: transformers would not save
    the latter.
    """
    vars(model.config).pop("quantization_config", None)
    with torch.device("meta"):
        plain_model = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain_model.load_state_dict(model.state_dict(), assign=True)
    plain_model.tie_weights()
    plain_model.generation_config = model.generation_config
    return plain_model
