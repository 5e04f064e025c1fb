"""GGUF files (llama.cpp's format) as ordinary Hugging Face folders, with the float32 weights that the file stands for.

Invariant: a file is read once; the folder is under a digest of what is in the file, and is whole or not there. Which
architectures and quantisations can be read is transformers' affair, which does it with the package gguf.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.errors import UserError
from tba.foreign import SAFE
from tba.policy.loading import pretrained, readable
from tba.training.cache import cached_folder
from tba.weights.atomic_dir import cache_folder

SUFFIX = ".gguf"
_FORMAT = b"gguf 1"  # raised when the same file is to give another folder


def converted(path: Path, log: Callable[[str], None]) -> Path:
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
    return saved_once(cache, digest, lambda folder: write_folder(path, folder))


def saved_once(cache: Path, key: str, make: Callable[[Path], None]) -> Path:
    """Returns `cache / key`, made by `make` unless it is there. Raises `UserError` where it cannot be written."""
    try:
        return cached_folder(cache, key, make)
    except (OSError, SafetensorError) as error:
        raise no_room(cache, error) from error


def no_room(folder: Path, error: Exception) -> UserError:
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
    place: dict[str, Any] = {"gguf_file": path.name}
    other = "give one of an architecture and a quantisation that it can, or a Hugging Face folder"
    with readable(f"transformers cannot read the GGUF file {path}", other):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **place, **SAFE)
        return made_plain(pretrained(AutoModelForCausalLM, path.parent, torch.float32, **place)), tokenizer


def made_plain(model: Any) -> Any:
    """Returns a model of the weights of one that was read from quantized files and is whole now, to be saved: of the
    one that was read transformers would not do that.
    """
    vars(model.config).pop("quantization_config", None)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
