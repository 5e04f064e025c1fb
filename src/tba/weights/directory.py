"""The weights' way from the trainer to searchers on one machine: a folder of safetensors files, each version with its
manifest.

    weights/   0.12.safetensors   0.12.json (its manifest)   0.12.pins (while it is pinned: why)

Invariant: a version is published while its manifest is there, which is renamed into place after the tensors and is
deleted before them. So a listing of the folder is the whole truth, and a reader sees a version entirely or not at all.
One process publishes, pins and prunes; any number read. The newest `keep` versions and every pinned one are kept. What
`newer_than` and `at` return is open already: it can be read even after its version has been pruned. A version lies in
the machine's memory (`in_memory`), where that has room, until it is pinned or the publisher ends.

With `full_version_every` above 1 the versions between two whole ones hold only their changes since the earlier of them
(`deltas`), their base: it is kept as long as any of them, and readers always get whole tensors.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from tba.device_to_host import register_with_gpu
from tba.errors import UserError
from tba.fields import as_declared
from tba.json_input import json_fields_of, parse_json
from tba.protocols import Manifest, PublishedWeights
from tba.streaming import FileLayout, TensorStream, changes_since, shapes_of, write_tensors
from tba.types import Version
from tba.weights.atomic_dir import sync
from tba.weights.chunks import FlatBytes, map_tensors_file, split_header
from tba.weights.chunks import tensors as tensors_of
from tba.weights.deltas import Restored, write_changes
from tba.weights.in_memory import InMemory, bring_to_disk, is_lost, memory_target, remove
from tba.weights.slots import ReadLock, Register, SlotMappings

log = logging.getLogger("tba.weights")
TENSORS = ".safetensors"
MANIFEST = ".json"
PINS = ".pins"
NAME = re.compile(r"(\d+\.\d+a?)\.json")  # what is still being written begins with a dot


@dataclass(frozen=True)
@as_declared
class PublishSettings:
    """Sets how weights are written for searchers. It does not affect checkpoints."""

    full_version_every: int = 1  # every so many versions one is full; the others hold only the numbers that changed
    in_memory: bool | None = None  # versions lie in /dev/shm until pinned or the run's end; None: where it has room

    def __post_init__(self) -> None:
        if self.full_version_every < 1:
            raise UserError(f"--publish.full-version-every is {self.full_version_every}, give 1 (all whole) or more")
        if self.in_memory and self.full_version_every > 1:
            raise UserError(
                "--publish.in-memory keeps whole versions off the disk, --publish.full-version-every above 1 writes "
                "less of each: choose one of them"
            )


@dataclass(frozen=True)
class _VersionFacts:
    """Holds what the file beside a version's tensors has."""

    version: Version
    names: list[str]  # of the tensors
    notes: Manifest
    base: Version | None = None  # of the changes; None: all tensors are there


def _age_key(version: Version) -> Version:
    """Returns the key that orders averages among themselves, and other versions likewise."""
    return version.average if version.is_average else version


class WeightDirectory:
    """A `WeightPublisher` and a `WeightSource` over one folder, which is made if it is missing.

    Published numbers of floating point are written as `dtype`, that of the engines (None: as they are). Raises
    `UserError` when `keep` is less than 1.
    """

    def __init__(
        self,
        path: Path,
        keep: int = 2,
        settings: PublishSettings | None = None,
        dtype: torch.dtype | None = None,
        register: Register = register_with_gpu,
    ) -> None:
        if keep < 1:
            raise UserError(f"{keep} versions of the weights are to be kept, but searchers need the newest; give 1")
        self.path = path
        self.keep = keep
        self._settings = settings or PublishSettings(in_memory=False)
        self.dtype = dtype
        self._base: Version | None = None  # the newest whole version of this publisher, and how many came since
        self._base_uses = 0
        # only the publisher may delete leftovers: a reader cannot tell them from files being written
        self._is_clean = False
        path.mkdir(parents=True, exist_ok=True)
        in_memory = self._settings.in_memory if self._settings.full_version_every == 1 else False
        self._memory = InMemory(path, in_memory, register)
        self._mappings = SlotMappings(register)
        self._lost_versions: set[Version] = set()  # that were reported

    def publish(self, weights: Mapping[str, torch.Tensor], version: Version, manifest: Manifest) -> None:
        """Write `weights` (any dtype, one after the other) and `manifest` as `version`, then prune.

        Raises `ValueError` unless `version` is newer than all that are there: no two sets of weights share a name.
        """
        newest = max((v for v in self.versions() if v.is_average == version.is_average), key=_age_key, default=None)
        if newest is not None and _age_key(version) <= _age_key(newest):
            raise ValueError(f"version {version} cannot be published after {newest}: versions must increase")
        if not self._is_clean:
            self.clean()
            self._is_clean = True
        temporary = self.path / f".{version}{TENSORS}"
        base = self._write_tensors(temporary, weights, is_full=version.is_average)
        os.replace(temporary, self._path_of(version, TENSORS))
        self._write_file(version, MANIFEST, _VersionFacts(version, sorted(weights), manifest, base))
        if not version.is_average:
            self._base, self._base_uses = (version, 1) if base is None else (base, self._base_uses + 1)
        self._prune()

    def _write_tensors(self, temporary: Path, weights: Mapping[str, torch.Tensor], is_full: bool) -> Version | None:
        """Write all tensors, or their changes; returns the base of the changes, None for all tensors."""
        if is_full or self._base is None or self._base_uses >= self._settings.full_version_every:
            if not self._memory.write(temporary, weights, FileLayout.of(weights, self.dtype)):
                write_tensors(temporary, weights, self.dtype)
            return None
        with safetensors.safe_open(self.file(self._base), framework="pt") as base:
            if sorted(base.keys()) != sorted(weights):
                raise ValueError(f"these weights have other names than those of version {self._base}")
            rank_changes = weights.changes if isinstance(weights, TensorStream) else None
            changes = (
                changes_since(base.get_tensor, weights, self.dtype)
                if rank_changes is None
                else rank_changes(self.file(self._base))
            )
            write_changes(temporary, shapes_of(weights), changes, self.dtype)
        return self._base

    def reserve(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        """Returns the places in memory where tensors like `weights` lie once they are published next, for those who
        can put them there themselves; None where they are written to the disk.
        """
        return self._memory.reserve(FileLayout.of(weights, self.dtype))

    @property
    def busy(self) -> bool:
        """Returns False: nothing is being written after `publish` has returned."""
        return False

    def settle(self) -> None:
        """Returns at once: nothing is being written after `publish` has returned."""

    hold = settle

    def close(self) -> None:
        """Move the versions that this publisher has in memory to the disk."""
        for version in self.versions():
            if not self.is_lost(version) and memory_target(self.file(version)) is not None:
                bring_to_disk(self.file(version))
        self._memory.close()

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        """Returns the newest version if it is newer than `version` (None: any), else None. Costs one listing; never
        waits. One that is gone from the machine's memory is logged and left out: its publisher makes a newer one.

        Raises `UserError` when its files are damaged.
        """
        self._mappings.forget_deleted()  # also where no newer version comes, or comes by the disk
        # terminates: a version is only pruned after a newer one came, and publishing takes longer than reading
        while True:
            newest = self.newest()
            if newest is None or (version is not None and newest <= version):
                return None
            published = self.find(newest)
            if published is not None:
                return published
            if self.is_lost(newest):
                return None

    def is_lost(self, version: Version) -> bool:
        """Returns whether a version is gone from the machine's memory, and logs it the first time."""
        if not is_lost(self.file(version)):
            return False
        if version not in self._lost_versions:
            log.warning("%s", self._lost_error(version))
            self._lost_versions.add(version)
        return True

    def at(self, version: Version) -> PublishedWeights:
        """Returns the weights of exactly that version. Raises `UserError` when they are not there, or damaged."""
        published = self.find(version)
        if published is None:
            if is_lost(self.file(version)):
                raise self._lost_error(version)
            versions = ", ".join(map(str, self.versions())) or "none"
            raise UserError(f"{self.path} has no version {version} of the weights, but {versions}; give one of these")
        return published

    def manifest(self, version: Version) -> Manifest:
        """Returns the manifest of that version; an empty one when it is not there, or cannot be read."""
        try:
            return self._facts(version).notes
        except (OSError, UserError):
            return Manifest()

    def find(self, version: Version) -> PublishedWeights | None:
        """Returns that version with its tensors mapped, None when it is not (or no longer) there.

        Raises `UserError` when its files are damaged, or in memory that only another user can read.
        """
        self._mappings.forget_deleted()
        manifest_path, tensors_path = self._path_of(version, MANIFEST), self.file(version)
        target = memory_target(tensors_path)
        try:
            facts: _VersionFacts = parse_json(manifest_path.read_bytes(), _VersionFacts)
            if target is not None:
                lock = ReadLock(target)
                return PublishedWeights(version, facts.notes, lambda: self._read_slot(lock))
            tensors = safetensors.safe_open(tensors_path, framework="pt")
            base = None if facts.base is None else safetensors.safe_open(self.file(facts.base), framework="pt")
        except (OSError, RuntimeError, ValueError, KeyError, safetensors.SafetensorError) as error:
            if target is not None and isinstance(error, PermissionError):
                raise UserError(
                    f"version {version} in {self.path} lies in memory that only the user of the trainer can read: "
                    "read it as that user, or train with --publish.no-in-memory"
                ) from error
            if target is not None and memory_target(tensors_path) is None and tensors_path.exists():
                return self.find(version)  # it was brought to the disk meanwhile
            if manifest_path.exists() and not is_lost(tensors_path):
                raise UserError(f"version {version} in {self.path} is damaged ({error}); remove its files") from error
            return None

        def load() -> Mapping[str, torch.Tensor]:
            by_name = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
            if base is None:
                return by_name
            return Restored({name: base.get_tensor(name) for name in base.keys()}, by_name)  # noqa: SIM118

        return PublishedWeights(version, facts.notes, load)

    def map(self, version: Version) -> tuple[str, FlatBytes]:
        """Returns the header of a version's tensors (JSON) and their bytes, mapped: they outlive their version.

        Raises `OSError` when it is not (or no longer) there.
        """
        target = memory_target(self.file(version))
        if target is None:
            return map_tensors_file(self.file(version))
        return split_header(self._mappings.map(ReadLock(target)))

    def _read_slot(self, lock: ReadLock) -> Mapping[str, torch.Tensor]:
        header, content = split_header(self._mappings.map(lock))
        return tensors_of(header, [content])

    def _lost_error(self, version: Version) -> UserError:
        return UserError(
            f"version {version} in {self.path} was in the machine's memory, and is gone from there (a restart of the "
            "machine empties it, and so may other programs; another container has its own): a run in progress "
            "publishes a newer one, and one that has ended does so once it is continued (tba resume)"
        )

    def base(self, version: Version) -> Version | None:
        """Returns the base of a version's changes; None: its file has all tensors.

        Raises `FileNotFoundError` when the version is gone.
        """
        return self._facts(version).base

    def file(self, version: Version) -> Path:
        """Returns the path of a version's tensors."""
        return self._path_of(version, TENSORS)

    def versions(self) -> list[Version]:
        """Returns the versions that are published and kept, oldest first; averages before all others."""
        return sorted(Version.parse(name[1]) for name in map(NAME.fullmatch, os.listdir(self.path)) if name)

    def newest(self) -> Version | None:
        """Returns the newest published version that is no average, None before the first."""
        return max((v for v in self.versions() if not v.is_average), default=None)

    def pin(self, version: Version, reason: str) -> None:
        """Keep `version` until it is unpinned for the same reason; from here on it survives a power cut.

        Raises `UserError` when it is not there, or gone from the machine's memory.
        """
        if not self._path_of(version, MANIFEST).exists():
            raise UserError(f"version {version} cannot be pinned: {self.path} does not hold it (any longer)")
        base = self.base(version)
        for needed_version in (version,) if base is None else (version, base):
            if is_lost(self.file(needed_version)):
                raise self._lost_error(needed_version)
            bring_to_disk(self.file(needed_version))
            sync(self._path_of(needed_version, MANIFEST))
        self._write_file(version, PINS, [*self.pins(version), reason])  # last: what is pinned may be copied (backups)
        sync(self._path_of(version, PINS))
        sync(self.path)

    def unpin(self, version: Version, reason: str) -> None:
        """Undo one `pin` of the same reason; with the last of them the version may be pruned.

        Raises `ValueError` when it is not pinned for that reason.
        """
        reasons = self.pins(version)
        if reason not in reasons:
            raise ValueError(f"version {version} is not pinned for {reason!r}, but for {reasons}")
        reasons.remove(reason)
        if reasons:
            self._write_file(version, PINS, reasons)
        else:
            self._path_of(version, PINS).unlink()
        self._prune()

    def pins(self, version: Version) -> list[str]:
        """Returns why `version` is pinned; empty when it is not."""
        try:
            reasons: list[str] = self._read_file(version, PINS, list[str])
        except FileNotFoundError:
            return []
        return reasons

    def _facts(self, version: Version) -> _VersionFacts:
        facts: _VersionFacts = self._read_file(version, MANIFEST, _VersionFacts)
        return facts

    def _read_file(self, version: Version, suffix: str, kind: Any) -> Any:
        """Reads a small file. Raises `FileNotFoundError` when it is gone, `UserError` when it is damaged."""
        try:
            return parse_json(self._path_of(version, suffix).read_bytes(), kind)
        except ValueError as error:
            raise UserError(f"version {version} in {self.path} is damaged ({error}); remove its files") from error

    def _path_of(self, version: Version, suffix: str) -> Path:
        return self.path / f"{version}{suffix}"

    def _write_file(self, version: Version, suffix: str, value: object) -> None:
        """Write a small file, under a temporary name that is then replaced by its own."""
        temporary = self.path / f".{version}{suffix}"
        temporary.write_text(json.dumps(value, default=json_fields_of))
        os.replace(temporary, self._path_of(version, suffix))

    def _prune(self) -> None:
        versions = self.versions()
        retained = set(versions[-self.keep :]) | {v for v in versions if self.pins(v)}
        retained |= {max((v for v in versions if v.is_average), key=_age_key, default=versions[-1])}  # pinned soon
        retained |= {base for v in retained if (base := self.base(v)) is not None} | (
            {self._base} if self._base else set()
        )
        # changes before their base, so that a reader who finds changes finds their base too
        for version in reversed(versions):
            if version not in retained:
                for suffix in (MANIFEST, TENSORS):
                    remove(self._path_of(version, suffix))

    def clean(self) -> None:
        """Delete the leftovers of a crash (temporary files, tensors without a manifest, what it left in memory), and
        unusable versions: the trainer publishes anew.
        """
        for version in self.versions():
            try:
                self.base(version)
                self.pins(version)
                is_sound = self._path_of(version, TENSORS).exists()
            except (UserError, FileNotFoundError):
                is_sound = False
            if not is_sound:
                log.warning("version %s in %s is damaged; it is removed", version, self.path)
                for suffix in (MANIFEST, PINS, TENSORS):
                    remove(self._path_of(version, suffix))
        for tensors_path in self.path.glob(f"*{TENSORS}"):
            if not tensors_path.with_suffix(MANIFEST).exists():
                remove(tensors_path)
        for suffix in (TENSORS, MANIFEST, PINS):
            for temporary in self.path.glob(f".*{suffix}"):
                remove(temporary)
        self._memory.remove_leftovers()
