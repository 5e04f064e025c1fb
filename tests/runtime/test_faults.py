"""Whatever dies, fills up, hangs or lies, at whatever moment: the run goes on or says why in one sentence."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import (
    TOY,
    alive,
    children,
    command,
    distance,
    ended,
    final_weights,
    forked,
    inline,
    inline_again,
    made,
    processes,
    quiet,
    steps_of,
    train,
    until,
)
from test_resume import RUN, SECONDS, SHORT, assert_whole, uids_of

import tba.__main__
import tba.replay.journal
import tba.runtime.run_directory
import tba.training.checkpoint
import tba.weights.atomic_dir
import tba.weights.directory
from tba.__main__ import main
from tba.command.replay import uses_of
from tba.errors import NonFiniteLoss, UserError
from tba.record.faults import count_faults, read_faults
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.replay.journal import JournalWriter
from tba.runtime.disk import disk_full, outside_cause
from tba.runtime.inline import Inline
from tba.runtime.run_directory import RunDirectory
from tba.types import Version

FAULTY = Path(__file__).with_name("faulty.py")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function: Callable[..., Any], nth: int, when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """The same function, but at its nth call of that kind the process is killed before it does anything."""
    calls = [0]

    def call(*arguments: Any, **named: Any) -> Any:
        calls[0] += when(*arguments)
        if calls[0] == nth:
            die()
        return function(*arguments, **named)

    return call


def mid_append(patch: pytest.MonkeyPatch, nth: int) -> None:
    """Within the transaction of a round, some of its trajectories written."""
    writer = tba.replay.journal.JournalWriter
    whole, calls = writer._append, [0]

    def some(self: JournalWriter, connection: Any, rows: list[Any]) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            whole(self, connection, rows[:5])
            die()
        return whole(self, connection, rows)

    patch.setattr(writer, "_append", some)


def mid_publish(patch: pytest.MonkeyPatch, nth: int) -> None:
    """The tensors of a version are in their place, its manifest is not."""
    directory = tba.weights.directory.WeightDirectory
    a_manifest = dying(directory._write_file, nth, lambda self, version, suffix, value: suffix == ".json")
    patch.setattr(directory, "_write_file", a_manifest)


def mid_manifest(patch: pytest.MonkeyPatch, nth: int) -> None:
    """Half of a version's manifest is written, beside its place."""

    def half(path: Path, text: str, *arguments: Any) -> int:
        if path.name.startswith(".") and path.name.endswith(".json") and path.parent.name == "weights":
            mid_manifest.calls -= 1
            if mid_manifest.calls == 0:
                path.write_bytes(text.encode()[: len(text) // 2])
                die()
        return path.write_bytes(text.encode())

    mid_manifest.calls = nth
    patch.setattr(Path, "write_text", half)


def mid_checkpoint(patch: pytest.MonkeyPatch, nth: int) -> None:
    """All of a checkpoint's files are written, and some of them are on the disk."""
    patch.setattr(tba.weights.atomic_dir, "sync", dying(tba.weights.atomic_dir.sync, 5 * nth))


def before_the_rename(patch: pytest.MonkeyPatch, nth: int) -> None:
    """A checkpoint is whole, beside its place."""
    patch.setattr(tba.weights.atomic_dir, "_rename", dying(tba.weights.atomic_dir._rename, nth))


def mid_prune(patch: pytest.MonkeyPatch, nth: int) -> None:
    """A checkpoint is in its place, and the one too many is not yet taken away."""
    patch.setattr(tba.training.checkpoint, "remove_folder", dying(tba.training.checkpoint.remove_folder, nth))


@pytest.mark.parametrize(
    ("point", "nth"),
    [(mid_append, 9), (mid_publish, 8), (mid_manifest, 8), (mid_checkpoint, 2), (before_the_rename, 2), (mid_prune, 1)],
)
def test_a_run_killed_at_a_named_point_loses_nothing_acknowledged_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: Callable[[pytest.MonkeyPatch, int], None], nth: int
) -> None:
    path = tmp_path / "run"

    def run() -> None:
        point(monkeypatch, nth)
        inline(path, *RUN)

    assert ended(forked(run)) == -signal.SIGKILL
    done, uids_before = steps_of(path), uids_of(path)
    assert done >= 20
    summary = inline_again(path)
    assert summary.steps == 60
    assert_whole(path, summary, uids_before)
    assert not [p for p in path.rglob(".*") if p.is_dir()]
    assert max(int(row["step"]) for row in read_metrics(path)[:done]) == done


@pytest.mark.parametrize("nth", [1, 2])  # before anything is written, and with another mark in the journal
def test_a_run_killed_while_it_is_taken_up_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    path = tmp_path / "run"
    inline(path, *RUN, "--steps", "20")
    uids_before = uids_of(path)

    def again() -> None:
        patch = dying(tba.runtime.run_directory.write_json, nth)
        monkeypatch.setattr(tba.runtime.run_directory, "write_json", patch)
        main(["resume", str(path), "--steps", "40"])

    assert ended(forked(again)) == -signal.SIGKILL
    assert main(["resume", str(path), "--steps", "40", "--runtime", "inline"]) == 0
    summary = Summary.read(path)
    assert summary is not None
    assert summary.steps == 40
    assert_whole(path, summary, uids_before)


LONG = (
    *SHORT,
    "--replay.pacing.samples-per-insert",
    "4",
    "--replay.pacing.warm-up",
    "32",
    "--run.checkpoint-every",
    "20",
    "--searchers",
    "2",
)


@pytest.mark.parametrize("flows", [("--run.synchronous-rounds",), ()], ids=["rounds", "flow"])
def test_parts_killed_at_random_moments_are_started_again_and_the_trainer_goes_on_from_its_checkpoint(
    tmp_path: Path, flows: tuple[str, ...]
) -> None:
    """Searcher, trainer, searcher, trainer; then the run is let go to its end by a resume of all its steps."""
    rng, path = np.random.default_rng(3), tmp_path / "run"
    driver = train(path, *LONG, "--steps", "1000000", "--optimizer.lr", "0.1", *flows)
    try:
        for part in ("searcher-0", "trainer", "searcher-1", "trainer"):
            last_step = steps_of(path) + int(rng.integers(25, 60))
            until(lambda last_step=last_step: steps_of(path) > last_step, SECONDS, "steps")
            uids_before = uids_of(path)
            victim = children(driver.pid)[part]
            os.kill(victim, signal.SIGKILL)
            until(lambda: children(driver.pid).get(part) not in (None, victim), SECONDS, part)  # noqa: B023
            assert uids_of(path)[: len(uids_before)] == uids_before
        last_step = steps_of(path) + 30
        until(lambda: steps_of(path) > last_step, SECONDS, "steps after the last kill")
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=SECONDS)
    finally:
        driver.kill()
    assert (driver.returncode, errors) == (130, "")
    summary = Summary.read(path)
    assert summary is not None
    assert (summary.faults["searcher_restarts"], summary.faults["trainer_restarts"]) == (2, 2)
    assert_whole(path, summary, uids_before)
    versions = [Version.parse(row["version"]) for row in read_metrics(path)]
    assert versions == sorted(versions)
    assert versions[-1].incarnation == 2
    assert distance(path, 0.5) < 0.2


GIVES_WAY = {"trainer": 0, "searcher-0": 5}  # niceness beyond the driver's


def test_when_the_driver_is_killed_the_run_waits_for_its_parts_to_end_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    driver = train(path, *LONG, "--steps", "1000000")
    try:
        until(lambda: steps_of(path) > 45, SECONDS, "steps")
        parts = children(driver.pid)
        driver_priority = os.getpriority(os.PRIO_PROCESS, driver.pid)
        priorities = {part: os.getpriority(os.PRIO_PROCESS, pid) for part, pid in parts.items() if part in GIVES_WAY}
        assert priorities == {part: min(19, driver_priority + less) for part, less in GIVES_WAY.items()}
    finally:
        driver.kill()
        driver.communicate(timeout=SECONDS)
    again = command("resume", str(path), "--steps", "1000000")  # at once: the parts are still there
    try:
        until(lambda: any(row["version"].startswith("1.") for row in read_metrics(path)), SECONDS, "steps again")
        assert not [pid for pid in parts.values() if alive(pid)]
        uids_before = uids_of(path)
        done = steps_of(path)
        until(lambda: steps_of(path) > done + 20, SECONDS, "more steps")
        again.send_signal(signal.SIGINT)
        output, errors = again.communicate(timeout=SECONDS)
    finally:
        again.kill()
    assert (again.returncode, errors) == (130, "")
    assert "(it was killed)" in " ".join(output.split())
    summary = Summary.read(path)
    assert summary is not None
    assert summary.faults["resumes"] == 1
    assert_whole(path, summary, uids_before)


def test_parts_that_hang_are_found_killed_and_started_again(tmp_path: Path) -> None:
    """Stopped processes: alive, and never heard of again."""
    path = tmp_path / "run"
    driver = train(path, *LONG, "--steps", "1000000", "--run.silence-deadline", "20")
    try:
        until(lambda: steps_of(path) > 25, SECONDS, "steps")
        parts = children(driver.pid)
        for part in ("trainer", "searcher-0"):
            os.kill(parts[part], signal.SIGSTOP)
        until(
            lambda: (
                not {parts["trainer"], parts["searcher-0"]} & set(children(driver.pid).values())
                and len(children(driver.pid)) == 3
            ),
            SECONDS,
            "new ones",
        )
        done = steps_of(path)
        until(lambda: steps_of(path) > done, SECONDS, "steps again")
        driver.send_signal(signal.SIGINT)
        driver.communicate(timeout=SECONDS)
    finally:
        driver.kill()
    faults = count_faults(path)
    assert faults["silences"] == 2
    assert (faults["searcher_restarts"], faults["trainer_restarts"]) == (1, 1)
    summary = Summary.read(path)
    assert summary is not None
    assert summary.trajectories.closes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 256 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_ends_the_run_in_one_sentence_and_with_space_it_goes_on(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_disk / "run"
    filled = small_disk / "ballast"
    filled.write_bytes(bytes(248 << 20))
    begin = ["train", str(TOY), "--runs", str(small_disk), "--run-name", "run"]
    long = (
        "--steps",
        "1000000",
        "--runtime",
        "inline",
        "--record.samples-per-batch",
        "0",
        "--run.checkpoint-every",
        "20",
    )
    assert main([*begin, *long, "--evaluation.problems", "1"]) == 2
    assert capsys.readouterr().err == full_disk(path)
    filled.unlink()
    assert steps_of(path) > 30
    assert_goes_on(path, "inline")


def test_a_disk_that_becomes_full_ends_all_processes_in_one_sentence_too(small_disk: Path) -> None:
    path = small_disk / "run"
    filled = small_disk / "ballast"
    driver = train(path, "--steps", "1000000", "--run.checkpoint-every", "20", "--evaluation.problems", "1")
    try:
        until(lambda: steps_of(path) > 40, SECONDS, "steps")
        with suppress(OSError), filled.open("wb", buffering=0) as file:
            while True:  # ends: with no space left
                file.write(bytes(1 << 20))
        _, errors = driver.communicate(timeout=SECONDS)
    finally:
        driver.kill()
    assert (driver.returncode, errors) == (2, full_disk(path))
    assert not children(driver.pid)
    filled.unlink()
    assert_goes_on(path, "processes")


def full_disk(path: Path) -> str:
    """What is said of it."""
    return f"tba: the disk of {path} is full: free some space, then continue with `tba resume {path}`\n"


def assert_goes_on(path: Path, runtime: str) -> None:
    """Ten steps more, with all that was there."""
    uids_before = uids_of(path)
    steps = steps_of(path) + 10
    assert main(["resume", str(path), "--steps", str(steps), "--runtime", runtime]) == 0
    summary = Summary.read(path)
    assert summary is not None
    assert summary.steps == steps
    uids = uids_of(path)
    assert uids[: len(uids_before)] == uids_before
    assert summary.tokens.closes(), summary.tokens


def test_a_limit_on_the_size_of_files_is_a_full_disk_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where nobody may mount: the system's own error, of a write that does not fit."""
    path = tmp_path / "run"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        begin = ["train", str(TOY), "--runs", str(tmp_path), "--run-name", "run"]
        code = main([*begin, "--steps", "100000", "--runtime", "inline", *SHORT, "--run.checkpoint-every", "20"])
        os._exit(code)

    assert ended(forked(limited)) == 2
    assert "is full: free some space, then continue with `tba resume" in capfd.readouterr().err
    uids_before, steps = uids_of(path), steps_of(path) + 10
    assert_whole(path, inline_again(path, "--steps", str(steps)), uids_before)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_journal_that_was_cut_off_after_a_kill_leaves_the_account_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Rows from before the checkpoint are missing, and others from after it."""
    path = tmp_path / "run"

    def run() -> None:
        mid_append(monkeypatch, 9)
        inline(path, *RUN)

    assert ended(forked(run)) == -signal.SIGKILL
    row_count = len(uids_of(path))
    journal = path / "journal.sqlite"
    os.truncate(journal, int(journal.stat().st_size * share))
    assert main(["resume", str(path), "--runtime", "inline", "--accept-lost-rows"]) == 0
    summary = Summary.read(path)
    assert summary is not None
    assert summary.steps == 60
    assert summary.trajectories.generated >= row_count - 2 * 16  # of the newest weights; who knew of later ones is gone
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger


def test_bits_that_change_in_trajectories_are_counted_one_by_one_trained_on_or_not(tmp_path: Path) -> None:
    path = tmp_path / "run"
    inline(path, *RUN, "--steps", "20")
    uses = uses_of(RunDirectory.open(path))[1:]
    trained, untrained = (1 + np.flatnonzero(which) for which in (uses > 0, uses == 0))
    broken = {int(seq) for seq in (trained[0], trained[7], trained[-1], untrained[0])}
    with closing(sqlite3.connect(path / "journal.sqlite")) as connection, connection:
        for seq in broken:
            (body,) = connection.execute("SELECT body FROM bodies WHERE seq = ?", (seq,)).fetchone()
            changed = body[:-40] + bytes([body[-40] ^ 4]) + body[-39:]
            connection.execute("UPDATE bodies SET body = ? WHERE seq = ?", (changed, seq))
    summary = inline_again(path, "--steps", "40")
    assert summary.steps == 40
    assert summary.faults["damaged_trajectories"] == len(broken) == 4
    assert len({fault["what"] for fault in read_faults(path) if fault["kind"] == "damaged_trajectories"}) == 4
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    assert inline_again(path, "--steps", "60").faults["damaged_trajectories"] == 4


def test_other_errors_are_no_full_disk(tmp_path: Path) -> None:
    assert disk_full(ValueError("no"), tmp_path) is None
    assert disk_full(PermissionError(13, "Permission denied"), tmp_path) is None
    assert disk_full(OSError(28, "No space left on device"), tmp_path) is not None


def faulty(path: Path, *overrides: str) -> Summary:
    recipe, run = made(path, *RUN, *overrides, source=FAULTY)
    from tba.runtime.reporting import summarise

    return summarise(recipe, run, ["searcher-0"], Inline(recipe, run, quiet).go(), 0.0)


def test_a_reward_that_raises_now_and_then_is_asked_again_and_counted(tmp_path: Path) -> None:
    raises = tmp_path / "raises"
    raises.write_text("2")
    summary = faulty(tmp_path / "run", "--task.raises", str(raises))
    assert summary.steps == 60
    assert summary.faults["reward_retries"] == 2
    assert summary.trajectories.closes()
    sentences = [fault["what"] for fault in read_faults(tmp_path / "run") if fault["kind"] == "reward_retries"]
    assert sentences == 2 * ["the reward Reward: ConnectionError: the judge is not there"]
    undisturbed = faulty(tmp_path / "other")
    assert undisturbed.faults["reward_retries"] == 0
    weights, other_weights = (final_weights(tmp_path / name)["prefix.logits"] for name in ("run", "other"))
    assert torch.equal(weights, other_weights)  # what is asked again is the same question


@pytest.mark.parametrize(
    ("runtime", "flows"), [("inline", ()), ("processes", ("--run.synchronous-rounds",)), ("processes", ())]
)
@pytest.mark.parametrize(
    ("how", "sentence"), [("raises", "judge is not there"), ("hangs", "did not grade an answer within 0.5 s")]
)
def test_a_reward_that_always_fails_ends_the_run_which_goes_on_once_it_is_mended(
    tmp_path: Path, runtime: str, flows: tuple[str, ...], how: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "run", tmp_path / how
    seconds = "0.5" if how == "hangs" else "60"  # a busy machine must not make another fault of it
    patience = ("--run.reward-deadline", seconds, f"--task.{how}", str(file), *flows)
    file.write_text("0")
    begin = ["train", str(FAULTY), "--runs", str(tmp_path), "--run-name", "run", "--runtime", runtime]
    if runtime == "inline":
        recipe, run = made(path, *RUN, *patience, "--steps", "20", source=FAULTY)
        Inline(recipe, run, quiet).go()
        file.write_text("99")
        with pytest.raises((ConnectionError, UserError), match=sentence):
            inline_again(path, "--steps", "40")
    else:
        file.write_text("99")
        assert main([*begin, *RUN, *patience]) == (2 if how == "hangs" else 1)
        assert sentence in capsys.readouterr().err
        assert (path / "checkpoints" / "step-0").is_dir()  # of the trainer, which was asked to end in order
        assert not children(os.getpid())
    file.write_text("0")
    mended = ("--steps", "40", "--runtime", runtime, "--run.reward-deadline", "60")
    assert main(["resume", str(path), *mended]) == 0
    summary = Summary.read(path)
    assert summary is not None
    assert summary.steps == 40
    assert_whole(path, summary, [])


def test_a_run_that_ended_with_a_loss_that_is_no_number_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path, file = tmp_path / "run", tmp_path / "nan"
    file.write_text("0")
    recipe, run = made(path, *RUN, "--steps", "40", "--objective.nan", str(file), source=FAULTY)
    Inline(recipe, run, quiet).go()
    file.write_text("3")
    with pytest.raises(NonFiniteLoss, match=r"3 steps in a row after version 1\.40"):
        inline_again(path, "--steps", "60")
    uids_before = uids_of(path)
    summary = inline_again(path)
    assert summary.steps == 60
    assert read_metrics(path)[-1]["version"] == "2.60"
    assert_whole(path, summary, uids_before)
    assert np.isfinite(final_weights(path)["prefix.logits"].numpy()).all()


def test_a_clock_on_the_wall_that_jumps_changes_nothing_but_what_people_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour back and a day forth at every look: the same weights, the same account, and a wall-clock that rises."""
    steady = inline(tmp_path / "steady", *RUN)
    real, looks = time.time, [0]

    def jumping() -> float:
        looks[0] += 1
        return real() + (-3600.0 if looks[0] % 2 else 86400.0) * (1 + looks[0] % 7)

    monkeypatch.setattr(time, "time", jumping)
    jumped = inline(tmp_path / "jumped", *RUN)
    monkeypatch.undo()
    assert looks[0] > 10
    weights, other_weights = (final_weights(tmp_path / name)["prefix.logits"] for name in ("steady", "jumped"))
    assert torch.equal(weights, other_weights)
    assert (jumped.tokens, jumped.trajectories) == (steady.tokens, steady.trajectories)
    seconds = [row["wall_seconds"] for row in read_metrics(tmp_path / "jumped")]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] <= jumped.wall_seconds.total < 3600
    leases = json.loads((tmp_path / "jumped" / "logs" / "trainer.result.json").read_text())
    assert leases["clock"]["busy"] >= 0


def test_a_dead_part_is_given_up_after_so_many_restarts_and_the_run_can_be_taken_up(tmp_path: Path) -> None:
    broken = Path(__file__).with_name("broken_reward.py")
    with pytest.raises(Exception, match=r"searcher-0 \(process \d+\) was killed by signal 9"):
        processes(tmp_path / "run", "--task.deadly", "--run.restarts", "1", source=broken)
    assert count_faults(tmp_path / "run")["searcher_restarts"] == 1
    assert (tmp_path / "run" / "checkpoints" / "step-0").is_dir()


def test_a_run_whose_output_has_nowhere_to_go_trains_to_its_end(tmp_path: Path) -> None:
    few = ("--runtime", "inline", *SHORT, "--steps", "3")
    for name, message in (("full", "standard output cannot be written (No space left on device)"), ("closed", "")):
        if name == "full":
            out = os.open("/dev/full", os.O_WRONLY)
        else:
            unread, out = os.pipe()
            os.close(unread)
        run = command("train", str(TOY), "--runs", str(tmp_path), "--run-name", name, *few, out=out)
        os.close(out)
        until(lambda run=run: run.poll() is not None, SECONDS, "the run to end")
        complaints = os.pread(run.err, 1 << 16, 0).decode()
        assert run.returncode == 0, complaints
        assert message in complaints
        assert "Traceback" not in complaints
        summary = Summary.read(tmp_path / name)
        assert summary is not None
        assert summary.steps == 3


def test_a_command_that_computes_is_refused_where_its_libraries_cannot_be_loaded() -> None:
    words = f"ulimit -v 800000; exec {sys.executable} -m tba train quickstart"
    refused = subprocess.run(["/bin/sh", "-c", words], capture_output=True, text=True, timeout=SECONDS)
    sentence = (
        "tba: this process may have 0.8 GB of memory (`ulimit -v`), and its libraries alone map 1.2: raise the limit"
    )
    assert (refused.returncode, refused.stderr.strip()) == (2, sentence)


def test_a_command_that_gets_no_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tba.__main__, "run", lambda arguments: len(bytes(1 << 62)))
    assert main(["show", "runs"]) == 2
    assert capsys.readouterr().err.startswith("tba: this process could not get the memory it needs: give it more")


@pytest.mark.parametrize(("to", "code"), [(">&-", 0), ("> /dev/full", 2), (">&- 2>&- <&-", 0)])
def test_a_command_with_closed_or_full_streams_ends_without_a_traceback(to: str, code: int) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m tba recipes {to}"], capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr


def explained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(5, "Input/output error"), "cannot be read or written (Input/output error)"),
        (RuntimeError("Error while serializing: I/O error: Input/output error (os error 5)"), "(Input/output error)"),
        (MemoryError(), "could not get the memory it needs"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "could not get the memory",
        ),
        (RuntimeError("unable to mmap 1786008 bytes from file </w>: Cannot allocate memory (12)"), "get the memory"),
        (RuntimeError("can't start new thread"), "could not get the memory"),
        (OSError(12, "Cannot allocate memory"), "could not get the memory"),
        (explained(UserError("version 0.46 is damaged"), MemoryError()), "could not get the memory"),
        (OSError(28, "No space left on device"), "is full"),
        (FileNotFoundError(2, "No such file or directory", "/data/of/mine.jsonl"), None),
        (ValueError("no"), None),
    ],
)
def test_what_is_around_a_run_and_fails_is_told_in_one_sentence_and_other_errors_are_not(
    error: Exception, sentence: str | None, tmp_path: Path
) -> None:
    (tmp_path / "recipe.json").touch()
    cause = outside_cause(error, tmp_path)
    assert (cause is None) == (sentence is None)
    if cause is not None and sentence is not None:
        assert sentence in str(cause)
        assert f"tba resume {tmp_path}" in str(cause)
    of_the_run = FileNotFoundError(2, "No such file or directory", str(tmp_path / "weights"))
    assert "weights cannot be read or written" in str(outside_cause(of_the_run, tmp_path))
    (tmp_path / "recipe.json").unlink()
    assert "was moved or deleted" in str(outside_cause(error, tmp_path))


@pytest.mark.parametrize("place", ["the run", "weights"])
def test_a_folder_that_is_moved_away_under_a_run_ends_it_in_a_sentence_and_no_other_is_made(
    place: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    few = (*SHORT, "--replay.pacing.warm-up", "32", "--run.checkpoint-every", "20")
    run = train(path, "--runtime", "processes", "--steps", "100000", *few)
    until(lambda: steps_of(path) >= 25, SECONDS, "some steps")
    folder = path if place == "the run" else path / "weights"
    os.rename(folder, tmp_path / "away")
    try:
        _, complaints = run.communicate(SECONDS)
    finally:
        run.kill()
    assert run.returncode == 2, complaints
    assert f"continue with `tba resume {path}`" in complaints.splitlines()[-1]
    assert "Traceback" not in complaints
    if place == "the run":
        assert not path.exists()
    os.rename(tmp_path / "away", folder)
    steps = str(steps_of(path) + 5)
    assert main(["resume", str(path), "--steps", steps, "--runtime", "inline"]) == 0
    summary = Summary.read(path)
    assert summary is not None
    assert summary.trajectories.closes()
