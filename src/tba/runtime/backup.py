"""Backups of a run in a folder on a shared disk, from which it is resumed where its own disk is gone.

    FOLDER/NAME/  backup.json        the manifest: what belongs to the newest backup, and when that was made
                  increments/        the journal, as `replay.increments` writes it
                  state-N/           recipe.json and the records (*.json, *.jsonl)
                  checkpoints/  weights/ (versions that are a reference)
                  acknowledged       how many rows and tokens the journal had some seconds ago

Invariant: a backup is what its manifest names, and the manifest is renamed into place last: killed at any step, the
last complete backup stays. SQLite opens no file on the shared disk: increments are written on the journal's disk and
then copied, and copied back before they are read. Checkpoints are copied before the journal, which so has every row
that they refer to.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tba.errors import TbaError, UserError
from tba.json_input import read_json
from tba.recipe import Recipe
from tba.record.faults import record_fault
from tba.record.jsonl import atomic_replacement, write_json
from tba.record.run_record import BackupFacts
from tba.replay.database import acknowledged_folder
from tba.replay.increments import IncrementEnd, end_of, restore_journal, write_increment
from tba.runtime.reference import PIN_REASON, checkpoint_reference
from tba.runtime.run_directory import RunDirectory
from tba.training.checkpoint import RUN, checkpoints_in
from tba.types import Version
from tba.weights.atomic_dir import atomic_folder, remove_folder, remove_leftovers, sync
from tba.weights.directory import MANIFEST, PINS, TENSORS, WeightDirectory

log = logging.getLogger("tba.backup")
NAME = "backup.json"
_ACKNOWLEDGED = "acknowledged"
_ACKNOWLEDGED_SECONDS = 10.0  # between two notes of how much the journal has
END_SECONDS = 600.0  # that a backup in progress has to end
_BLOCK = 1 << 22  # bytes copied at a time
_SPARE_BYTES = 64 << 20  # that increments may have beyond twice the journal's own
_NAMES = re.compile(r"step-\d+-[0-9a-f]{8}|\d{6,}\.sqlite")  # of copies of checkpoints, and of increments
_REMEDY = "choose another folder, or another backup"


@dataclass(frozen=True)
class IncrementFile:
    """Names a file of the journal's rows, with its size and checksum (CRC-32)."""

    name: str
    size: int
    checksum: int


@dataclass(frozen=True)
class Backup:
    """Says what belongs to a backup: the contents of its manifest."""

    time: float  # seconds since the epoch, when it began
    number: int
    writer: str  # the process that made it, by a random name
    end: IncrementEnd
    increments: tuple[IncrementFile, ...]
    checkpoints: tuple[str, ...]  # names of folders: step-N, and of which manifest it has

    @property
    def state(self) -> str:
        return f"state-{self.number:06}"

    @property
    def size(self) -> int:
        """Returns the bytes of the journal's increments."""
        return sum(file.size for file in self.increments)

    @classmethod
    def read(cls, place: Path) -> Backup | None:
        """Returns the newest backup at `place`; None where there is none. Raises `UserError` when it is damaged."""
        if not (place / NAME).exists():
            return None
        backup: Backup = read_json(place / NAME, _REMEDY, cls)
        for name in (*backup.checkpoints, *(file.name for file in backup.increments)):
            if not _NAMES.fullmatch(name):
                raise UserError(f"the backup at {place} names a file outside of it ({name!r}): {_REMEDY}")
        return backup


class BackupThread:
    """Backs a run up every so many seconds, and once more when it is closed.

    A failure is recorded and repeated at the next time; the run goes on. Raises `UserError` where the folder cannot be
    made, or has the backup of another run. is_restarted: the folder may be out of reach, and come back later.
    """

    def __init__(
        self, run: RunDirectory, journal: Path, folder: Path, every: float, is_restarted: bool = False
    ) -> None:
        self._writer = BackupWriter(run, journal, run.base / folder / run.path.name, is_restarted)
        self._run, self._every = run, every
        self._is_closed = threading.Event()
        self._began = time.time()
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="backup", daemon=True)
        self._thread.start()

    @property
    def age(self) -> float:
        """Returns the seconds since the newest backup began, or since this began where there is none yet."""
        backup = self._writer.newest
        return time.time() - (self._began if backup is None else backup.time)

    def _work(self) -> None:
        """Make backups until it is stopped; the last one is made by `close`."""
        next_time = time.monotonic()
        while not self._is_closed.wait(min(self._every, _ACKNOWLEDGED_SECONDS)):
            is_due = time.monotonic() >= next_time
            self._write(is_due)
            next_time = time.monotonic() + self._every if is_due else next_time

    def _write(self, is_due: bool) -> None:
        """Make a backup if one is due, else only note how much the journal has; the first of several failures is
        recorded.
        """
        try:
            if is_due:
                self._writer.back_up()
                self._has_failed = False
            else:
                self._writer.note_acknowledged()
        except (OSError, TbaError) as error:
            if not self._has_failed:
                log.warning("the backup failed: %s", error)
                record_fault(self._run.path, "backup_failures", str(error))
            self._has_failed = True

    def stop(self, patience: float) -> bool:
        """Begin no further backup; returns whether the one in progress, if any, has ended within `patience` seconds. A
        process that ends in the middle of a backup leaves the one before.
        """
        self._is_closed.set()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Make the last backup, after the one in progress."""
        if self.stop(END_SECONDS):
            self._write(is_due=True)
        else:
            record_fault(self._run.path, "backup_failures", f"a backup took more than {END_SECONDS:g} s")


def start_backup(recipe: Recipe, run: RunDirectory, is_restarted: bool = False) -> BackupThread | None:
    """Returns the thread that backs a run up; None where its recipe names no folder."""
    settings = recipe.run
    if settings.backup is None:
        return None
    return BackupThread(run, run.journal(recipe), settings.backup, settings.backup_every, is_restarted)


def back_up_once(recipe: Recipe, run: RunDirectory) -> None:
    """Back up a run whose parts have ended, with its summary, if its recipe names a folder. A failure is recorded: the
    run itself has ended well.
    """
    try:
        thread = start_backup(recipe, run)
    except (OSError, TbaError) as error:
        record_fault(run.path, "backup_failures", str(error))
        return
    if thread is not None:
        thread.close()


class BackupWriter:
    """Makes backups of a run at `place`, one after another."""

    def __init__(self, run: RunDirectory, journal: Path, place: Path, is_restarted: bool = False) -> None:
        self._run, self._journal, self._place = run, journal, place
        self._name = secrets.token_hex(8)
        self.newest: Backup | None = None
        try:
            self._make_folders()
        except OSError as error:
            if not is_restarted:
                raise UserError(
                    f"--run.backup: {place} cannot be made ({error.strerror}): choose another folder"
                ) from error
        else:
            self.newest = self._read_own(end_of(journal))

    def _make_folders(self) -> None:
        for name in ("increments", "checkpoints", "weights"):
            (self._place / name).mkdir(parents=True, exist_ok=True)

    def _read_own(self, end: IncrementEnd) -> Backup | None:
        """Returns the backup of this run that is there. Raises `UserError` when it is another's."""
        backup = Backup.read(self._place)
        if backup is None:
            return None
        marks = [mark for marks in self._run.marks for mark in marks]
        if backup.end.identity != end.identity or backup.end.mark not in marks:
            raise UserError(
                f"--run.backup: {self._place} has the backup of another run, or of a copy that went on elsewhere: "
                "choose another folder, or move it away"
            )
        return backup

    def note_acknowledged(self) -> None:
        """Write how much the journal has now, so that a loss is known by its number."""
        end = end_of(self._journal)
        with atomic_replacement(self._place / _ACKNOWLEDGED) as temporary:
            temporary.write_text(f"{end.rows} {end.tokens}\n")

    def back_up(self) -> Backup:
        """Make one backup. Raises `UserError` when another process has made one meanwhile, `OSError` of a disk."""
        self._make_folders()
        began, previous = time.time(), self._read_own(end_of(self._journal))
        if previous is not None and self.newest is not None and previous.writer != self.newest.writer:
            raise UserError(f"another process writes backups to {self._place}: end it, or choose another folder")
        number = 1 if previous is None else previous.number + 1
        remove_leftovers(self._place)
        weight_files = self._copy_references()  # before the checkpoints made under them, and those that came meanwhile
        checkpoints = self._copy_checkpoints()
        weight_files |= self._copy_references()
        checkpoints = self._sound_copies(checkpoints, () if previous is None else previous.checkpoints, weight_files)
        increment, end, increments = self._copy_increment(number, previous)
        backup = Backup(began, number, self._name, end, (*increments, increment), checkpoints)
        self._copy_records(backup.state)
        self.note_acknowledged()
        write_json(self._place / NAME, backup)
        sync(self._place)
        self.newest = backup
        _remove_others(self._place / "increments", {file.name for file in backup.increments})
        _remove_others(self._place / "checkpoints", set(checkpoints))
        _remove_others(self._place / "weights", weight_files)
        for folder in self._place.glob("state-*"):
            if folder.name != backup.state:
                remove_folder(folder)
        seconds = round(time.time() - began, 3)
        BackupFacts(began, seconds, end.rows, end.tokens, backup.size, str(self._place)).write(self._run.path)
        return backup

    def _copy_checkpoints(self) -> tuple[str, ...]:
        """Copy the checkpoints that are not there yet; returns the names of the copies that are to stay."""
        folder, names = self._place / "checkpoints", []
        remove_leftovers(folder)
        for path, _ in checkpoints_in(self._run.checkpoints):
            try:
                name = f"{path.name}-{zlib.crc32((path / RUN).read_bytes()):08x}"  # a resumed run makes a step again
                if not (folder / name).exists():
                    with atomic_folder(folder / name, durable=True) as temporary:
                        shutil.copytree(path, temporary, dirs_exist_ok=True)
                names.append(name)
            except (FileNotFoundError, shutil.Error):  # copytree raises the latter, for whatever it could not copy
                if (path / RUN).exists():
                    raise
                # it was deleted meanwhile, because a newer one took its place, or its manifest is missing
        return tuple(names)

    def _sound_copies(
        self, names: Sequence[str], earlier_names: Sequence[str], weight_files: Collection[str]
    ) -> tuple[str, ...]:
        """Returns the copies of checkpoints that have a manifest and the reference that they were made under: a run may
        have made a checkpoint and deleted it, and unpinned its reference, between two looks at its folder. The place of
        one that lacks either is taken by its copy of the backup before.
        """

        def is_sound(name: str) -> bool:
            reference = checkpoint_reference(self._place / "checkpoints" / name)
            return reference == Version() or f"{reference}{MANIFEST}" in weight_files

        sound_names = [name for name in names if is_sound(name)]
        missing_steps = {path.name for path, _ in checkpoints_in(self._run.checkpoints)}
        missing_steps -= {name.rpartition("-")[0] for name in sound_names}
        kept_names = [n for n in earlier_names if n.rpartition("-")[0] in missing_steps and is_sound(n)]
        return (*sound_names, *kept_names)

    def _copy_references(self) -> set[str]:
        """Copy the versions of the weights that are a reference, and their bases; returns the names of their files."""
        weights, names = WeightDirectory(self._run.weights), set()
        for version in weights.versions():
            with suppress(FileNotFoundError):  # it is no reference any more
                if PIN_REASON in weights.pins(version):
                    base = weights.base(version)
                    for needed_version in (version,) if base is None else (base, version):
                        for suffix in (TENSORS, PINS, MANIFEST):
                            file = weights.path / f"{needed_version}{suffix}"
                            target = self._place / "weights" / file.name
                            if file.exists() and not (target.exists() and suffix == TENSORS):
                                _copy_file(file, target)
                            names.add(file.name)
        return names

    def _copy_increment(
        self, number: int, previous: Backup | None
    ) -> tuple[IncrementFile, IncrementEnd, tuple[IncrementFile, ...]]:
        """Copy the rows since the last backup, or all of them where these increments cannot be continued or have become
        too large; returns the new file, its end, and the increments before it.
        """
        previous_increments: tuple[IncrementFile, ...] = ()
        previous_end = IncrementEnd()
        most_bytes = 2 * self._journal.stat().st_size + _SPARE_BYTES
        if previous is not None and previous.end.is_before(end_of(self._journal)) and previous.size <= most_bytes:
            previous_increments, previous_end = previous.increments, previous.end
        local_file, name = Path(f"{self._journal}-increment"), f"{number:06}.sqlite"
        try:
            end = write_increment(self._journal, local_file, previous_end)
            size, checksum = _copy_file(local_file, self._place / "increments" / name)
        finally:
            local_file.unlink(missing_ok=True)
        return IncrementFile(name, size, checksum), end, previous_increments

    def _copy_records(self, name: str) -> None:
        folder = self._place / name
        if folder.exists():  # of a backup that was not completed
            remove_folder(folder)
        with atomic_folder(folder, durable=True) as temporary:
            for file in (*self._run.path.glob("*.json"), *self._run.path.glob("*.jsonl")):
                if not file.name.startswith("."):
                    shutil.copyfile(file, temporary / file.name)


def is_backup(path: Path) -> bool:
    """Returns whether `path` is the folder of a backup, and of no run."""
    return (path / NAME).is_file() and not (path / "recipe.json").exists()


def backed_up_recipe(place: Path) -> Recipe:
    """Returns the recipe of the run whose backup is at `place`."""
    return RunDirectory(place / _newest_backup(place).state).recipe()


def _newest_backup(place: Path) -> Backup:
    backup = Backup.read(place)
    if backup is None:
        raise UserError(f"there is no backup at {place} (no {NAME}): give the folder of one")
    return backup


def restore_run(place: Path, target: Path) -> tuple[RunDirectory, Backup]:
    """Copy a run back from its backup to `target`, which is not there yet; returns the run and the backup.

    Raises `UserError` when the backup is damaged, or the target is there.
    """
    backup = _newest_backup(place)
    if target.exists():
        raise UserError(f"{target} is there already: continue it (tba resume {target}), or move it away first")
    run = RunDirectory(target)
    resolved_recipe = read_json(place / backup.state / "recipe.json", _REMEDY)["resolved"]
    with atomic_folder(run.path, durable=True) as temporary:
        checkpoints = [
            (f"checkpoints/{name}", f"checkpoints/{name[: name.rindex('-')]}") for name in backup.checkpoints
        ]
        for source, name in ((backup.state, "."), ("weights", "weights"), *checkpoints):
            shutil.copytree(place / source, temporary / name, dirs_exist_ok=True)
        for name in ("logs", "checkpoints"):
            (temporary / name).mkdir(exist_ok=True)
        journal = run.journal_by(resolved_recipe)
        is_inside = journal.parent == run.path
        if not is_inside and journal.exists():
            raise UserError(f"{journal} is there already: move it away first")
        new_journal = temporary / journal.name if is_inside else Path(f"{journal}.restoring")
        new_journal.unlink(missing_ok=True)
        restore_journal(new_journal, _local_increments(place, backup, Path(f"{new_journal}-increment")))
        if not is_inside:
            os.replace(new_journal, journal)
        acknowledged = acknowledged_folder(temporary / journal.name if is_inside else journal)
        acknowledged.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(place / _ACKNOWLEDGED, acknowledged / "backup")
    return run, backup


def _local_increments(place: Path, backup: Backup, local_file: Path) -> Iterator[Path]:
    """Yields each increment as a file on the local disk, which is there until the next is asked for."""
    for file in backup.increments:
        try:
            size, checksum = _copy_file(place / "increments" / file.name, local_file)
        except FileNotFoundError:
            size = checksum = 0
        if (size, checksum) != (file.size, file.checksum):
            raise UserError(
                f"the backup at {place} is damaged ({file.name} has {size:,} bytes instead of {file.size:,}, or "
                f"another checksum): {_REMEDY}"
            )
        yield local_file
        local_file.unlink()


def _copy_file(source: Path, target: Path) -> tuple[int, int]:
    """Copy a file beside its target and rename it there; returns its bytes and checksum."""
    size = checksum = 0
    with atomic_replacement(target) as temporary, source.open("rb") as reader, temporary.open("wb") as writer:
        while block := reader.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    return size, checksum


def _remove_others(folder: Path, names: set[str]) -> None:
    """Delete what is in a folder and has none of these names."""
    for path in folder.iterdir():
        if path.name not in names:
            remove_folder(path) if path.is_dir() else path.unlink()
