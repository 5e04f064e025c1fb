"""The arrow up, on one machine: a folder of safetensors, one version of the weights in each subfolder.

    weights/0.12/   weights.safetensors   manifest.json   pins.json (while it is pinned)

Invariant: the rename of a version's folder *is* its publication, so that a listing of the folder is the whole truth
and a reader sees a version entirely or not at all. One process publishes, pins and prunes; any number read. The
newest `keep` versions and every pinned one are kept. What `newer_than` and `at` hand out is open already: it can be
read even after its version has been pruned.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch

from tba.errors import UserError
from tba.protocols import PublishedWeights
from tba.types import Json, Version
from tba.weights.beside import folder_beside, remove_folder, remove_leftovers, sync_folder

if TYPE_CHECKING:
    import torch

TENSORS = "weights.safetensors"
MANIFEST = "manifest.json"
PINS = "pins.json"
VERSION = re.compile(r"\d+\.\d+")  # a published one's folder; what is being written or removed begins with a dot


class WeightDirectory:
    """A `WeightPublisher` and a `WeightSource` over one folder, which is made if it is missing.

    Raises `UserError` when `keep` is less than 1.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        if keep < 1:
            raise UserError(f"{keep} versions of the weights are to be kept, but searchers need the newest; give 1")
        self.path = path
        self.keep = keep
        self._clean = False  # nobody but the publisher may take leftovers away: a reader cannot tell them from work
        path.mkdir(parents=True, exist_ok=True)

    def publish(self, weights: Mapping[str, torch.Tensor], version: Version, manifest: Mapping[str, Json]) -> None:
        """Write `weights` (any dtype, copied at once) and `manifest` as `version`, then prune.

        Raises `ValueError` unless `version` is newer than all that are there: no two sets of weights share a name.
        """
        if not self._clean:
            remove_leftovers(self.path)
            self._clean = True
        newest = self.newest()
        if newest is not None and version <= newest:
            raise ValueError(f"version {version} cannot be published after {newest}: versions only rise")
        with folder_beside(self._folder(version)) as folder:
            tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
            safetensors.torch.save_file(tensors, folder / TENSORS)
            head = {"version": str(version), "names": sorted(tensors), "notes": dict(manifest)}
            (folder / MANIFEST).write_text(json.dumps(head, indent=1))
        self._prune()

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        """The newest version if it is newer than `version` (None: any), else None. Costs one listing; never waits.

        Raises `UserError` when its files are damaged.
        """
        while True:  # ends: a version that is gone has made room for a newer one, and publishing takes longer
            newest = self.newest()
            if newest is None or (version is not None and newest <= version):
                return None
            published = self._open(newest)
            if published is not None:
                return published

    def at(self, version: Version) -> PublishedWeights:
        """That very version. Raises `UserError` when it is not (or no longer) there, or damaged."""
        published = self._open(version)
        if published is None:
            there = ", ".join(map(str, self.versions())) or "none"
            raise UserError(f"{self.path} does not hold version {version} of the weights; it holds {there}")
        return published

    def versions(self) -> list[Version]:
        """What is published and kept, oldest first."""
        return sorted(Version.parse(name) for name in os.listdir(self.path) if VERSION.fullmatch(name))

    def newest(self) -> Version | None:
        """The newest published version, None before the first."""
        return max(self.versions(), default=None)

    def pin(self, version: Version, why: str) -> None:
        """Keep `version` until it is unpinned for the same reason; from here on it outlives a power cut.

        Raises `UserError` when it is not there.
        """
        if not self._folder(version).is_dir():
            raise UserError(f"version {version} cannot be pinned: {self.path} does not hold it (any longer)")
        self._write_pins(version, [*self.pins(version), why])
        sync_folder(self._folder(version))

    def unpin(self, version: Version, why: str) -> None:
        """Take back one `pin` of the same reason; with the last of them the version may be pruned.

        Raises `ValueError` when it is not pinned for that reason.
        """
        reasons = self.pins(version)
        if why not in reasons:
            raise ValueError(f"version {version} is not pinned for {why!r}, but for {reasons}")
        reasons.remove(why)
        self._write_pins(version, reasons)
        self._prune()

    def pins(self, version: Version) -> list[str]:
        """Why `version` is pinned; empty when it is not."""
        try:
            reasons: list[str] = json.loads((self._folder(version) / PINS).read_text())
        except FileNotFoundError:
            return []
        return reasons

    def _folder(self, version: Version) -> Path:
        return self.path / str(version)

    def _write_pins(self, version: Version, reasons: list[str]) -> None:
        file = self._folder(version) / PINS
        if not reasons:
            file.unlink()
            return
        beside = file.with_name(f".{PINS}")
        beside.write_text(json.dumps(reasons))
        os.replace(beside, file)

    def _prune(self) -> None:
        for version in self.versions()[: -self.keep]:
            if not self.pins(version):
                remove_folder(self._folder(version))

    def _open(self, version: Version) -> PublishedWeights | None:
        """A version with its tensors mapped, or None when it has been pruned."""
        folder = self._folder(version)
        try:
            notes = json.loads((folder / MANIFEST).read_text())["notes"]
            tensors = safetensors.safe_open(folder / TENSORS, framework="pt")
        except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
            if folder.is_dir():
                raise UserError(f"the weights in {folder} are damaged ({error}); remove that folder") from error
            return None

        def read() -> dict[str, torch.Tensor]:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)

        return PublishedWeights(version, notes, read)
