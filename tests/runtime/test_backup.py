"""A run whose own disk is gone goes on from its backup, and what came after that is told by its number."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runs import SECONDS, command, ended, forked, inline, inline_again, steps_of, train, until

from tba.__main__ import main
from tba.errors import UserError
from tba.record.faults import read_faults
from tba.record.metrics import BACKUP_AGE, read_metrics
from tba.record.run_record import BackupFacts
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runs.validating import validate
from tba.runtime.backup import Backup, BackupThread, BackupWriter, back_up_once, restore_run
from tba.runtime.reference import PIN_REASON
from tba.runtime.run_directory import RunDirectory
from tba.training.checkpoint import newest_sound_checkpoint
from tba.types import Version
from tba.weights.atomic_dir import remove_folder
from tba.weights.directory import WeightDirectory

STRIDE = 9  # calls between two kills; with 1 the test takes 255 s
SHORT = (
    *("--evaluation.problems", "1", "--samples-per-prompt", "8", "--group-size", "8"),
    *("--record.samples-per-batch", "0", "--replay.pacing.warm-up", "32", "--run.checkpoint-every", "20"),
)
RUN = (*SHORT, "--runtime", "inline", "--steps", "40", "--reference-reset", "15")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps, with checkpoints and two resets of its reference."""
    path = tmp_path_factory.mktemp("runs") / "run"
    inline(path, *RUN)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, in a folder for runs."""
    (tmp_path / "runs").mkdir()
    shutil.copytree(finished, tmp_path / "runs" / "run")
    return tmp_path / "runs" / "run"


def writer_of(run: Path, place: Path) -> BackupWriter:
    return BackupWriter(RunDirectory.open(run), run / "journal.sqlite", place)


def rows_of(run: Path) -> int:
    with JournalFollower(run / "journal.sqlite", create=False) as journal:
        return journal.totals().rows


def resume(place: Path, runs: Path, *arguments: str) -> int:
    return main(["resume", str(place), "--runs", str(runs), "--runtime", "inline", *arguments])


def test_a_killed_run_whose_folder_is_gone_goes_on_from_its_backup(tmp_path: Path) -> None:
    run, shared = tmp_path / "runs" / "run", tmp_path / "shared"
    backed_up = ("--run.backup", str(shared), "--run.backup-every", "0.2")
    running = train(run, *SHORT, *backed_up, "--steps", "100000", "--reference-reset", "30")
    until(lambda: (b := Backup.read(shared / "run")) and b.number > 1 and b.checkpoints, SECONDS, "a third backup")
    running.kill()
    until(lambda: running.poll() is not None, SECONDS, "its end")
    made_backup = BackupFacts.read(run)
    assert made_backup is not None
    assert made_backup.place == str(shared / "run")
    assert read_metrics(run)[-1][BACKUP_AGE] >= 0
    with RunDirectory.open(run).hold_lock(SECONDS):  # its parts have ended
        shutil.rmtree(tmp_path / "runs")
    newest = Backup.read(shared / "run")
    assert newest is not None
    steps = steps_of(shared / "run" / newest.state)
    resumed_command = command(
        "resume",
        str(shared / "run"),
        "--runs",
        str(tmp_path / "runs"),
        "--accept-lost-rows",
        "--steps",
        str(steps + 20),
    )
    out, err = resumed_command.communicate(SECONDS)
    assert resumed_command.returncode == 0, err
    assert f"copied back from the backup at {shared / 'run'}" in " ".join(out.split())
    summary = Summary.read(run)
    assert summary is not None
    assert summary.trajectories.closes()
    assert summary.tokens.closes()
    assert summary.steps == steps + 20
    last_backup = Backup.read(shared / "run")  # the run that goes on is backed up, too, with its summary
    assert last_backup is not None
    assert last_backup.end.rows == rows_of(run)
    assert (shared / "run" / last_backup.state / "summary.json").exists()


def test_the_number_of_rows_after_the_backup_is_reported_and_the_account_closes_without_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = writer_of(run, tmp_path / "shared")
    writer.back_up()
    rows = rows_of(run)
    inline_again(run, "--steps", "60")
    writer.note_acknowledged()
    missing_count = rows_of(run) - rows
    assert missing_count > 10
    shutil.rmtree(run)
    assert resume(tmp_path / "shared", tmp_path / "runs", "--steps", "60") == 2
    restored_run = tmp_path / "runs" / "shared"
    error = capsys.readouterr().err
    assert f"at least {missing_count:,} of the {rows + missing_count:,} trajectories that it held are missing" in error
    assert main(["resume", str(restored_run), "--runtime", "inline", "--steps", "60", "--accept-lost-rows"]) == 0
    summary = Summary.read(restored_run)
    assert summary is not None
    assert (summary.steps, summary.trajectories.damaged) == (60, missing_count)
    assert summary.trajectories.closes()
    assert summary.tokens.closes()


def test_a_backup_that_is_killed_at_any_step_leaves_the_last_complete_backup(
    run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    place, restored_run = tmp_path / "shared", tmp_path / "restored"
    writer_of(run, place).back_up()
    rows_before = rows_of(run)
    inline_again(run, "--steps", "60")
    rows_after, kills, code, restored_rows = rows_of(run), 1 - STRIDE, -signal.SIGKILL, set()
    while code == -signal.SIGKILL:
        kills += STRIDE
        code = ended(forked(partial(back_up_until_killed, run, place, kills)))
        restore_run(place, restored_run)
        restored_rows.add(rows_of(restored_run))
        checkpoint, damage = newest_sound_checkpoint(restored_run / "checkpoints")
        assert checkpoint is not None
        assert checkpoint.version.step == (40 if rows_of(restored_run) == rows_before else 60)
        assert not damage
        shutil.rmtree(restored_run)
    assert (code, restored_rows) == (0, {rows_before, rows_after})
    assert kills > 5 * STRIDE


def test_a_reference_and_a_checkpoint_that_a_run_replaces_during_a_backup_leave_one_that_resumes(
    run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    place, weights = tmp_path / "shared", WeightDirectory(run / "weights")
    copy_checkpoints = BackupWriter._copy_checkpoints

    def replace_meanwhile(writer: BackupWriter) -> tuple[str, ...]:
        names = copy_checkpoints(writer)
        weights.unpin(Version(0, 30), PIN_REASON)
        return names

    def delete_meanwhile(source: Any, target: Any) -> Any:
        if (run / "checkpoints" / "step-20").exists():
            remove_folder(run / "checkpoints" / "step-20")
        return shutil.copyfile(source, target)

    assert [v.step for v in weights.versions() if PIN_REASON in weights.pins(v)] == [15, 30]
    monkeypatch.setattr(BackupWriter, "_copy_checkpoints", replace_meanwhile)
    monkeypatch.setattr(shutil, "copytree", partial(shutil.copytree, copy_function=delete_meanwhile))
    backup = writer_of(run, place).back_up()
    assert [name[: name.rindex("-")] for name in backup.checkpoints] == ["step-40"]
    monkeypatch.undo()
    shutil.rmtree(run)
    assert resume(place, tmp_path / "runs", "--steps", "45") == 0


def test_a_checkpoint_with_a_damaged_manifest_ends_no_backups(run: Path, tmp_path: Path) -> None:
    file = run / "checkpoints" / "step-40" / "run.json"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    backup = writer_of(run, tmp_path / "shared").back_up()
    assert [name[: name.rindex("-")] for name in backup.checkpoints] == ["step-20"]


def test_a_checkpoint_without_a_manifest_ends_no_backups(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-40" / "run.json").unlink()
    backup = writer_of(run, tmp_path / "shared").back_up()
    assert [name[: name.rindex("-")] for name in backup.checkpoints] == ["step-20"]


def test_a_checkpoint_that_is_damaged_after_a_backup_leaves_its_sound_copy(run: Path, tmp_path: Path) -> None:
    writer, file = writer_of(run, tmp_path / "shared"), run / "checkpoints" / "step-40" / "run.json"
    shutil.rmtree(run / "checkpoints" / "step-20")
    (name,) = writer.back_up().checkpoints
    file.write_bytes(file.read_bytes()[:100])
    assert writer.back_up().checkpoints == (name,)
    file.unlink()
    assert writer.back_up().checkpoints == (name,)


def test_a_reference_that_only_an_earlier_backup_had_does_not_count(run: Path, tmp_path: Path) -> None:
    writer = writer_of(run, tmp_path / "shared")
    assert len(writer.back_up().checkpoints) == 2
    WeightDirectory(run / "weights").unpin(Version(0, 15), PIN_REASON)
    assert [name[: name.rindex("-")] for name in writer.back_up().checkpoints] == ["step-40"]


def test_a_checkpoint_of_before_there_were_resets_is_backed_up(run: Path, tmp_path: Path) -> None:
    file = run / "checkpoints" / "step-20" / "run.json"
    manifest = json.loads(file.read_text())
    del manifest["digest"], manifest["state"]["reference"]
    file.write_text(json.dumps(manifest))
    assert len(writer_of(run, tmp_path / "shared").back_up().checkpoints) == 2


def test_a_checkpoint_whose_reference_is_gone_is_left_out_of_a_backup(run: Path, tmp_path: Path) -> None:
    WeightDirectory(run / "weights").unpin(Version(0, 15), PIN_REASON)
    backup = writer_of(run, tmp_path / "shared").back_up()
    assert [name[: name.rindex("-")] for name in backup.checkpoints] == ["step-40"]


def back_up_until_killed(run: Path, place: Path, calls: int) -> None:
    """Back up, and be killed at the call of this number that changes names or flushes a file, if there are as many."""
    calls_left = iter(range(calls - 1))

    def deadly_function(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls_left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in ("replace", "rename", "fsync", "unlink"):
        setattr(os, name, deadly_function(getattr(os, name)))
    writer_of(run, place).back_up()


def test_a_folder_with_the_backup_of_another_run_or_of_a_copy_is_refused(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "shared"
    inline(tmp_path / "other", *RUN, "--steps", "5")
    writer_of(tmp_path / "other", place).back_up()
    with pytest.raises(UserError, match="has the backup of another run"):
        writer_of(run, place)
    shutil.rmtree(place)
    writer_of(run, place).back_up()
    copied, _ = restore_run(place, tmp_path / "copy")
    assert resume(tmp_path / "copy", tmp_path, "--steps", "50") == 0
    writer_of(copied.path, place).back_up()
    with pytest.raises(UserError, match="or of a copy that went on elsewhere"):
        writer_of(run, place)


def test_a_damaged_backup_is_refused_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "shared"
    writer_of(run, place).back_up()
    (increment,) = (place / "increments").iterdir()
    with increment.open("r+b") as file:
        file.seek(5000)
        file.write(b"something else")
    with pytest.raises(UserError, match=r"is damaged \(000001.sqlite has"):
        restore_run(place, tmp_path / "restored")
    assert not [path for path in tmp_path.iterdir() if "restored" in path.name]
    manifest = (place / "backup.json").read_text()
    for name, other in (("000001.sqlite", "../000001.sqlite"), ("step-40-", "..-"), ('"step-40-', '"..","step-40-')):
        assert name in manifest
        (place / "backup.json").write_text(manifest.replace(name, other))
        with pytest.raises(UserError, match="names a file outside of it"):
            restore_run(place, tmp_path / "restored")
    (place / "backup.json").write_text(manifest)
    with pytest.raises(UserError, match="is there already"):
        restore_run(place, run)


def test_a_last_backup_whose_folder_is_gone_is_recorded_and_the_run_has_ended_well(run: Path, tmp_path: Path) -> None:
    place, stopped_run = tmp_path / "shared", RunDirectory.open(run)
    place.touch()
    recipe = stopped_run.recipe()
    back_up_once(replace(recipe, run=replace(recipe.run, backup=place)), stopped_run)
    assert [fault["kind"] for fault in read_faults(run)].count("backup_failures") == 1


def test_a_trainer_that_is_restarted_waits_for_a_backup_folder_that_is_out_of_reach(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "shared"
    place.touch()
    with pytest.raises(UserError, match="cannot be made"):
        BackupThread(RunDirectory.open(run), run / "journal.sqlite", place, every=0.01)
    with closing(BackupThread(RunDirectory.open(run), run / "journal.sqlite", place, every=0.01, is_restarted=True)):
        until(lambda: read_faults(run), SECONDS, "a fault")
        place.unlink()
        until(lambda: Backup.read(place / "run"), SECONDS, "a backup")


def test_a_cluster_needs_an_absolute_path_of_a_backup(run: Path) -> None:
    recipe = RunDirectory.open(run).recipe()
    recipe = replace(recipe, runtime="cluster", run=replace(recipe.run, backup=Path("shared")))
    with pytest.raises(UserError, match=r"--run\.backup is shared, which is another folder on each node"):
        validate(recipe)


def test_a_backup_that_fails_is_recorded_once_and_the_run_goes_on(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "shared"
    with closing(BackupThread(RunDirectory.open(run), run / "journal.sqlite", place, every=0.01)):
        while not (place / "run").is_file():  # the thread may make the folder again at any moment
            (place / "run").rename(tmp_path / f"removed-{len(list(tmp_path.iterdir()))}")
            with suppress(FileExistsError):
                (place / "run").touch(exist_ok=False)
        until(lambda: read_faults(run), SECONDS, "a fault")
    assert [fault["kind"] for fault in read_faults(run)].count("backup_failures") == 1
