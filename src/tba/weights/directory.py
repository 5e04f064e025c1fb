"""The arrow up, on one machine: a folder of safetensors, each version of the weights with its manifest.

    weights/   0.12.safetensors   0.12.json (its manifest)   0.12.pins (while it is pinned: why)

Invariant: a version is published while its manifest is there, which is renamed into place after the tensors and is
taken away before them. So a listing of the folder is the whole truth, and a reader sees a version entirely or not at
all. One process publishes, pins and prunes; any number read. The newest `keep` versions and every pinned one are kept.
What `newer_than` and `at` hand out is open already: it can be read even after its version has been pruned.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors

from tba.errors import UserError
from tba.protocols import PublishedWeights
from tba.streaming import write_tensors
from tba.types import Json, Version
from tba.weights.beside import sync

if TYPE_CHECKING:
    import torch

TENSORS = ".safetensors"
MANIFEST = ".json"
PINS = ".pins"
NAME = re.compile(r"(\d+\.\d+)\.json")  # what is still being written begins with a dot


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
        """Write `weights` (any dtype, one after the other) and `manifest` as `version`, then prune.

        Raises `ValueError` unless `version` is newer than all that are there: no two sets of weights share a name.
        """
        newest = self.newest()
        if newest is not None and version <= newest:
            raise ValueError(f"version {version} cannot be published after {newest}: versions only rise")
        if not self._clean:
            self._remove_leftovers()
            self._clean = True
        beside = self.path / f".{version}{TENSORS}"
        write_tensors(beside, weights)
        os.replace(beside, self._file(version, TENSORS))
        head = {"version": str(version), "names": sorted(weights), "notes": dict(manifest)}
        self._write(version, MANIFEST, head)
        self._prune()

    def settle(self) -> None:
        """Nothing is being written after `publish` has returned."""

    def close(self) -> None:
        """There is nothing to end."""

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        """The newest version if it is newer than `version` (None: any), else None. Costs one listing; never waits.

        Raises `UserError` when its files are damaged.
        """
        while True:  # ends: a version that is gone has made room for a newer one, and publishing takes longer
            newest = self.newest()
            if newest is None or (version is not None and newest <= version):
                return None
            published = self.find(newest)
            if published is not None:
                return published

    def at(self, version: Version) -> PublishedWeights:
        """That very version. Raises `UserError` when it is not (or no longer) there, or damaged."""
        published = self.find(version)
        if published is None:
            there = ", ".join(map(str, self.versions())) or "none"
            raise UserError(
                f"{self.path} does not hold version {version} of the weights, but {there}; give one of these"
            )
        return published

    def find(self, version: Version) -> PublishedWeights | None:
        """That version with its tensors mapped, None when it is not (or no longer) there.

        Raises `UserError` when its files are damaged.
        """
        manifest = self._file(version, MANIFEST)
        try:
            notes = json.loads(manifest.read_text())["notes"]
            tensors = safetensors.safe_open(self.file(version), framework="pt")
        except (OSError, RuntimeError, ValueError, KeyError, safetensors.SafetensorError) as error:
            if manifest.exists():
                raise UserError(f"version {version} in {self.path} is damaged ({error}); remove its files") from error
            return None

        def read() -> dict[str, torch.Tensor]:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)

        return PublishedWeights(version, notes, read)

    def file(self, version: Version) -> Path:
        """Where its tensors lie, if it is there."""
        return self._file(version, TENSORS)

    def versions(self) -> list[Version]:
        """What is published and kept, oldest first."""
        names = map(NAME.fullmatch, os.listdir(self.path))
        return sorted(Version.parse(name[1]) for name in names if name)

    def newest(self) -> Version | None:
        """The newest published version, None before the first."""
        return max(self.versions(), default=None)

    def pin(self, version: Version, why: str) -> None:
        """Keep `version` until it is unpinned for the same reason; from here on it outlives a power cut.

        Raises `UserError` when it is not there.
        """
        if not self._file(version, MANIFEST).exists():
            raise UserError(f"version {version} cannot be pinned: {self.path} does not hold it (any longer)")
        self._write(version, PINS, [*self.pins(version), why])
        for suffix in (TENSORS, MANIFEST, PINS):
            sync(self._file(version, suffix))
        sync(self.path)

    def unpin(self, version: Version, why: str) -> None:
        """Take back one `pin` of the same reason; with the last of them the version may be pruned.

        Raises `ValueError` when it is not pinned for that reason.
        """
        reasons = self.pins(version)
        if why not in reasons:
            raise ValueError(f"version {version} is not pinned for {why!r}, but for {reasons}")
        reasons.remove(why)
        if reasons:
            self._write(version, PINS, reasons)
        else:
            self._file(version, PINS).unlink()
        self._prune()

    def pins(self, version: Version) -> list[str]:
        """Why `version` is pinned; empty when it is not."""
        try:
            reasons: list[str] = json.loads(self._file(version, PINS).read_text())
        except FileNotFoundError:
            return []
        return reasons

    def _file(self, version: Version, suffix: str) -> Path:
        return self.path / f"{version}{suffix}"

    def _write(self, version: Version, suffix: str, value: Json) -> None:
        """A small file, beside and renamed."""
        beside = self.path / f".{version}{suffix}"
        beside.write_text(json.dumps(value))
        os.replace(beside, self._file(version, suffix))

    def _prune(self) -> None:
        for version in self.versions()[: -self.keep]:
            if not self.pins(version):
                self._file(version, MANIFEST).unlink()
                self._file(version, TENSORS).unlink()

    def _remove_leftovers(self) -> None:
        """What a crash left: files begun, and tensors whose manifest is not there yet or not any longer."""
        for tensors in self.path.glob(f"*{TENSORS}"):
            if not tensors.with_suffix(MANIFEST).exists():
                tensors.unlink()
        for suffix in (TENSORS, MANIFEST, PINS):
            for begun in self.path.glob(f".*{suffix}"):
                begun.unlink(missing_ok=True)
