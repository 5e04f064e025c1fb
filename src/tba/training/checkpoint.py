"""Checkpoints: the model in the Hugging Face layout, the optimizer's state, and the state of the run.

    checkpoints/step-N/   config.json model.safetensors model.safetensors.index.json (tokenizer)
                          (adapter/, as peft reads it) (heads.safetensors)
                          optimizer.safetensors optimizer.json   run.json (the manifest)

Invariant: a folder named step-N is whole and on the disk; the newest `keep` are there, and the best. `run.json` ties
all of it to one version: it holds the rest of the run's state at that step, size and checksum of every other file, and
a digest of all that, so that damage is detected before anything is used. A folder with a file that is not listed there
is refused, because `from_pretrained` loads whatever is in a folder. One process writes; of a trainer over several ranks
each writes its rows into that one's files (`ranks.checkpoint`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba.errors import UserError
from tba.json_input import parse_json
from tba.types import Json, Version
from tba.weights.atomic_dir import atomic_folder, remove_folder, remove_leftovers

if TYPE_CHECKING:
    import torch

    from tba.training.optimizer import Optimizer
    from tba.training.ranks.checkpoint import AllRows

RUN = "run.json"
HEADS = "heads.safetensors"
MODEL = "model.safetensors"
STEP = re.compile(r"step-\d+")
_BLOCK = 1 << 22  # bytes read at a time
_MANIFEST = {  # `digest`: of the other fields, if there is one
    "version": Version,
    "state": dict[str, Any],
    "files": dict[str, tuple[int, int]],  # bytes and CRC-32 of each
    "digest": str | None,
}
_UNKNOWN = Version(-1)  # of a checkpoint whose manifest cannot be read


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk. `path` is what the model is loaded from."""

    path: Path
    version: Version
    state: Mapping[str, Json]  # of the run, as passed to `save_checkpoint`: generators, cursors

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Load the manifest. Raises `UserError` when there is none, or it is damaged."""
        manifest = _read_manifest(path)
        for name in _files_by_name(path):
            if name not in manifest["files"] and name != RUN and not name.startswith("."):
                raise UserError(f"the checkpoint at {path} has a file that it was not made with ({name}): remove it")
        return cls(path, Version.parse(manifest["version"]), manifest["state"])

    def verify(self) -> None:
        """Read every file once. Raises `UserError` when one is missing, cut or changed since it was written."""
        files, message = _files_by_name(self.path), f"the checkpoint at {self.path} is damaged"
        for name, (size, checksum) in _read_manifest(self.path)["files"].items():
            try:
                if name not in files:  # only names listed in the folder itself: any other could lead anywhere
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                actual_size, actual_checksum = _size_and_checksum(files[name])
            except OSError as error:
                raise UserError(f"{message} ({name}: {error.strerror})") from error
            if actual_size != size:
                raise UserError(f"{message} ({name}: {actual_size} bytes instead of {size})")
            if actual_checksum != checksum:
                raise UserError(f"{message} ({name}: its checksum differs)")

    def load_heads(self, heads: torch.nn.ModuleDict) -> None:
        """Load the saved heads into a policy's. Raises `UserError` when they are missing, damaged or different."""
        if not heads:
            return
        import safetensors.torch  # here, so that a checkpoint can be inspected without torch

        try:
            heads.load_state_dict(safetensors.torch.load_file(self.path / HEADS))
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"the checkpoint at {self.path} cannot give the heads {', '.join(heads)} ({reason}); give one that was "
                "trained with the same objective"
            ) from error


def save_checkpoint(
    folder: Path,
    version: Version,
    save_model: Callable[[Path], None],
    optimizer: Optimizer | AllRows,
    state: Mapping[str, Json] | None = None,
    keep: int = 2,
    heads: torch.nn.ModuleDict | None = None,
    pinned_versions: Collection[Version] = (),
) -> Checkpoint:
    """Write `folder`/step-N, and delete all but the newest `keep` and those of `pinned_versions`; one of the same step
    is replaced, and those of later steps, which a resume has passed over as damaged, are deleted first.

    `save_model` writes the model (and its tokenizer) into the folder it is given; `state` is what JSON can hold;
    `heads` are the policy's, which the model's own files have no place for. Raises `UserError` when `keep` is less than
    1.
    """
    if keep < 1:
        raise UserError(f"{keep} checkpoints are to be kept, but the newest always is; give 1 or more")
    folder.mkdir(exist_ok=True)
    remove_leftovers(folder)
    path = folder / f"step-{version.step}"
    with atomic_folder(path, durable=True) as temporary:
        save_model(temporary)
        optimizer.save(temporary)
        if heads:
            import safetensors.torch

            safetensors.torch.save_file(heads.state_dict(), temporary / HEADS)
        _write_model_index(temporary)
        files = {name: _size_and_checksum(file) for name, file in _files_by_name(temporary).items()}
        manifest = json.dumps({"version": str(version), "state": dict(state or {}), "files": files})
        (temporary / RUN).write_text(json.dumps({**json.loads(manifest), "digest": _digest(json.loads(manifest))}))
        if path.exists():
            remove_folder(path)
    for old_path, old_version in sorted(checkpoints_in(folder), key=lambda c: c[1].step <= version.step)[:-keep]:
        if old_version not in pinned_versions:
            remove_folder(old_path)
    return Checkpoint.load(path)


def _write_model_index(folder: Path) -> None:
    """Write which file has the model's tensors: without it vLLM takes those of every safetensors file for its own."""
    path = folder / MODEL
    if not path.exists():
        return
    with path.open("rb") as model_file:  # of the format: the header's length, and the header as JSON
        header = json.loads(model_file.read(int.from_bytes(model_file.read(8), "little")))
    header.pop("__metadata__", None)
    size = sum(end - start for start, end in (tensor["data_offsets"] for tensor in header.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(header), MODEL)}
    (folder / f"{MODEL}.index.json").write_text(json.dumps(index, indent=2))


def checkpoints_in(folder: Path) -> list[tuple[Path, Version]]:
    """Returns the path and version of each checkpoint in `folder`, the oldest version first."""
    return [(path, _read_version(path)) for path in _sorted_folders(folder)]


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Returns the checkpoint of the latest version, None when there is none. Raises `UserError` if it is damaged."""
    folders = _sorted_folders(folder)
    return Checkpoint.load(folders[-1]) if folders else None


def newest_sound_checkpoint(folder: Path, verify: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """Returns the latest checkpoint that is whole to the last byte (None when there is none), and what is wrong with
    each later one, and with each whose version cannot be read.

    `verify` reads all files; without it only the manifest is read.
    """
    damage_messages = []
    folders = _sorted_folders(folder)
    unreadable_folders = [path for path in folders if _read_version(path) == _UNKNOWN]
    for path in [*unreadable_folders, *reversed(folders[len(unreadable_folders) :])]:
        try:
            checkpoint = Checkpoint.load(path)
            if verify:
                checkpoint.verify()
        except UserError as error:
            damage_messages.append(str(error))
        else:
            return checkpoint, damage_messages
    return None, damage_messages


def _sorted_folders(folder: Path) -> list[Path]:
    """Returns the checkpoints' folders, oldest version first; by steps, a resume from an earlier step would be older.

    Those whose version cannot be read come before all others.
    """
    if not folder.is_dir():
        return []
    step_folders = sorted((path for path in folder.iterdir() if STEP.fullmatch(path.name)), key=lambda path: path.name)
    return sorted(step_folders, key=_read_version)


def _read_version(path: Path) -> Version:
    try:
        return Version.parse(_read_manifest(path)["version"])
    except UserError:
        return _UNKNOWN


def _read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of the checkpoint at `path`. Raises `UserError` when there is none, or it is not what was
    written.

    One that was written by hand, without a digest, has exactly the other fields.
    """
    try:
        manifest: dict[str, Any] = parse_json((path / RUN).read_bytes(), **_MANIFEST)
        digest = manifest.pop("digest", None)
        if digest is None and manifest.keys() != _MANIFEST.keys() - {"digest"}:
            raise ValueError("its digest is missing")
        if digest is not None and digest != _digest(manifest):
            raise ValueError("its digest differs")
        return manifest
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint at {path} (no {RUN}); give a folder checkpoints/step-N") from error
    except (OSError, ValueError) as error:
        raise UserError(f"the checkpoint at {path} is damaged ({RUN}: {error}); give an older one") from error


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Returns all files in and below `folder`, by their path relative to it."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _digest(manifest: Mapping[str, Json]) -> str:
    """Returns a digest of a manifest's content, however it is formatted."""
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _size_and_checksum(path: Path) -> tuple[int, int]:
    """Returns (bytes, CRC-32) of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return size, checksum
