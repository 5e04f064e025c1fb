"""A journal that has lost rows is noticed, and a run that nothing but its journal is left of goes on."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import SECONDS, ended, forked, inline, inline_again, processes, steps_of, train, until

from replay.trajectory_cases import trajectory
from tba.__main__ import main
from tba.errors import UserError
from tba.record.failure import Failure
from tba.record.faults import count_faults
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.missing_rows import JournalCounts, accept_loss, find_loss
from tba.replay.replay import Replay, ReplaySettings
from tba.runs.running import failure_recorded
from tba.runtime.run_directory import RunDirectory
from tba.types import Score, Version

SHORT = (
    "--evaluation.problems",
    "1",
    "--samples-per-prompt",
    "8",
    "--group-size",
    "8",
    "--record.samples-per-batch",
    "0",
)
RUN = (
    *SHORT,
    *("--runtime", "inline"),
    "--replay.buffer.no-deduplicate",  # so that there is always something that waits
    "--run.inline-rounds-per-sync",
    "9",
    "--replay.pacing.warm-up",
    "32",
    "--steps",
    "60",
    "--run.checkpoint-every",
    "20",
)
PARTS = ("", "-wal", "-shm")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps, with checkpoints, and beside it its journal as it was after 20 (`earlier`)."""
    path = tmp_path_factory.mktemp("runs") / "run"
    inline(path, *RUN, "--steps", "20")
    shutil.copy(path / "journal.sqlite", path / "earlier")
    inline_again(path, "--steps", "40")
    return path


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it, to be harmed."""
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def gone(run: Path, parts: Sequence[str] = PARTS) -> None:
    for part in parts:
        (run / f"journal.sqlite{part}").unlink(missing_ok=True)


def emptied(run: Path) -> None:
    (run / "nothing").touch()
    os.replace(run / "nothing", run / "journal.sqlite")  # at no moment is there none
    gone(run, PARTS[1:])


def an_earlier_copy(run: Path) -> None:
    gone(run)
    shutil.copy(run / "earlier", run / "journal.sqlite")


def another(run: Path) -> None:
    inline(run.parent / "other", *RUN, "--steps", "40", "--seed", "7")
    gone(run)
    shutil.copy(run.parent / "other" / "journal.sqlite", run / "journal.sqlite")


def held(path: Path) -> JournalCounts:
    with JournalFollower(path) as journal:
        return JournalCounts.of(journal)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (gone, "is gone"),
        (emptied, "is empty"),
        (an_earlier_copy, "is shorter than it was"),
        (another, "is another file than it was"),
    ],
)
def test_a_journal_without_its_rows_is_told_with_their_number_and_the_run_goes_on_when_told_to(
    run: Path, harm: Callable[[Path], None], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, early = held(run / "journal.sqlite"), held(run / "earlier")
    missing = before.rows - (early.rows if harm is an_earlier_copy else 0)
    assert missing > 100
    harm(run)
    recipe = (run / "recipe.json").read_bytes()
    resume = ["resume", str(run), "--steps", "60", "--runtime", "inline"]
    assert main(resume) == 2
    error = capsys.readouterr().err
    assert f"{why}: at least {missing:,} of the {before.rows:,} trajectories that it held are missing" in error
    assert error.count("\n") == 1
    assert (run / "recipe.json").read_bytes() == recipe
    assert main([*resume, "--accept-lost-rows"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    if harm is another:
        assert f"the journal was damaged ({why}); it was set aside as journal.sqlite.other-1" in out
    else:
        assert f"the journal {why}: {missing} trajectories are missing" in out
    summary = Summary.read(run)
    assert summary is not None
    assert summary.steps == 60
    assert summary.faults["journal_recoveries"] == 1
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    account, after = summary.trajectories, held(run / "journal.sqlite")
    assert after.identity == before.identity
    assert account.generated - account.rejected - account.in_flight_at_stop == after.rows > before.rows
    assert 0 < account.damaged < missing  # what had been trained before stays trained
    if harm is another:
        assert held(run / "journal.sqlite.other-1").rows == held(run.parent / "other" / "journal.sqlite").rows
    assert main([*resume[:-4], "--steps", "61", "--runtime", "inline"]) == 0


def test_a_journal_that_is_cut_to_its_first_pages_tells_of_every_row_and_the_run_goes_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = held(run / "journal.sqlite")
    os.truncate(run / "journal.sqlite", 3 * 8192)
    assert main(["resume", str(run), "--steps", "60", "--runtime", "inline"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"0 trajectories were recovered, {before.rows} could not be read" in out
    summary = Summary.read(run)
    assert summary is not None
    assert (summary.steps, summary.faults["journal_recoveries"]) == (60, 1)
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    assert 0 < summary.trajectories.damaged < before.rows  # what had been trained before stays trained
    assert held(run / "journal.sqlite").identity == before.identity


def test_rows_that_came_after_the_checkpoint_are_missed_by_what_lies_beside_the_weights(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints" / "step-40")
    rows = held(run / "journal.sqlite").rows
    gone(run)
    assert main(["resume", str(run), "--steps", "60", "--runtime", "inline"]) == 2
    assert f"at least {rows:,} of the {rows:,} trajectories" in capsys.readouterr().err


def test_an_accepted_loss_leaves_the_journal_its_identity_when_nothing_else_is_left_to_know_it(run: Path) -> None:
    an_earlier_copy(run)
    identity = held(run / "journal.sqlite").identity
    for folder in ("checkpoints", "weights"):
        shutil.rmtree(run / folder)
    resume = ["resume", str(run), "--steps", "60", "--runtime", "inline"]
    assert main(resume) == 2
    assert main([*resume, "--accept-lost-rows"]) == 0
    assert held(run / "journal.sqlite").identity == identity != 0
    summary = Summary.read(run)
    assert summary is not None
    assert summary.trajectories.closes()


@pytest.mark.parametrize(("how", "word"), [(gone, "was deleted"), (emptied, "was replaced by another file")])
def test_a_journal_that_is_taken_away_under_a_running_run_ends_it_in_one_sentence(
    tmp_path: Path, how: Callable[[Path], None], word: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    child = forked(lambda: processes(path, *SHORT, "--steps", "100000", "--replay.pacing.warm-up", "32"))
    until(lambda: steps_of(path) >= 20, SECONDS, "some steps")
    how(path)
    assert ended(child) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("tba.errors.UserError: ")
    assert f"journal.sqlite {word} while it was in use, and with it " in error
    rows = int(error.split("with it ")[1].split(" ")[0].replace(",", ""))
    assert rows >= 20 * 16 / 8  # at most eight uses of each


def test_a_journal_that_is_cut_in_place_under_a_running_run_ends_it_with_the_number_of_its_missing_rows(
    tmp_path: Path,
) -> None:
    path, journal = tmp_path / "run", tmp_path / "run" / "journal.sqlite"
    flags = ("--replay.pacing.warm-up", "32", "--run.checkpoint-every", "20")
    command = train(path, *SHORT, "--runtime", "processes", "--steps", "100000", *flags)
    until(lambda: journal.exists() and journal.stat().st_size > 40 * 8192, SECONDS, "rows in the file, not its log")
    then = steps_of(path)
    until(lambda: steps_of(path) >= then + 3, SECONDS, "the checkpoint to be over")
    os.truncate(journal, max(3, journal.stat().st_size // 8192 // 4) * 8192)
    try:
        _, complaints = command.communicate(SECONDS)
    finally:
        command.kill()
    assert command.returncode == 2
    error = complaints.splitlines()[-1]
    recovery = re.search(
        r"was damaged while it was in use: .* (\d+) trajectories were recovered, (\d+) could not", error
    )
    assert recovery is not None, error
    assert error.endswith(f"continue with `tba resume {path}`")
    rows, lost = map(int, recovery.groups())
    assert lost > 0
    assert held(journal).rows == rows + lost
    failure = Failure.read(path)
    assert failure is not None
    assert failure.message == error.removeprefix("tba: ")
    assert main(["resume", str(path), "--steps", str(steps_of(path) + 5), "--runtime", "inline"]) == 0
    summary = Summary.read(path)
    assert summary is not None
    assert summary.faults["journal_recoveries"] == 1
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger


def test_an_error_that_a_damaged_journal_may_have_caused_is_told_as_that_and_others_stand(run: Path) -> None:
    """What a part reads in a file that another program writes into may be anything, and raise anything."""
    here = RunDirectory.open(run)
    recipe, strange = here.recipe(), AttributeError("'NoneType' object has no attribute 'split'")
    with pytest.raises(AttributeError), failure_recorded(recipe, here):
        raise strange
    journal = run / "journal.sqlite"
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("UPDATE totals SET again = again + 1 WHERE name = 'rows'")
    damaged = r"was damaged while it was in use: .* could not be read"
    with pytest.raises(UserError, match=damaged) as caught, failure_recorded(recipe, here):
        raise strange
    assert str(caught.value).endswith(f"continue with `tba resume {run}`")


def test_a_run_without_a_checkpoint_begins_again_with_all_of_its_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    inline(path, *RUN, "--steps", "15")
    shutil.rmtree(path / "checkpoints")
    (path / "summary.json").unlink()
    before = held(path / "journal.sqlite")
    assert main(["resume", str(path), "--steps", "30", "--runtime", "inline"]) == 0
    assert "resuming from step 0, for there is no checkpoint yet, (it was killed)" in " ".join(
        capsys.readouterr().out.split()
    )
    summary = Summary.read(path)
    assert summary is not None
    assert summary.trajectories.closes()
    assert [row["version"] for row in read_metrics(path)][15:] == [f"1.{step}" for step in range(1, 31)]
    assert held(path / "journal.sqlite").rows > before.rows
    with JournalFollower(path / "journal.sqlite") as journal:
        assert len({t.uid for t in journal.drain()}) == held(path / "journal.sqlite").rows


def test_records_with_damaged_lines_are_told_and_the_run_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl", "faults.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b"\xff nonsense\n")
    (run / "samples.jsonl").unlink(missing_ok=True)
    assert main(["resume", str(run), "--steps", "45", "--runtime", "inline"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name in ("metrics.jsonl", "evaluations.jsonl", "faults.jsonl"):
        assert f"{name}: line" in out
    assert count_faults(run)["unreadable_lines"] == 3
    summary = Summary.read(run)
    assert summary is not None
    assert (summary.steps, summary.faults["unreadable_lines"]) == (45, 3)


def test_what_is_known_of_a_run_without_its_weights_and_checkpoints_tells_of_an_older_journal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, earlier = held(run / "journal.sqlite").rows, held(run / "earlier").rows
    read = int(read_metrics(run)[-1]["journal_rows"])
    assert earlier < read <= rows
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "weights")
    an_earlier_copy(run)
    resume = ["resume", str(run), "--steps", "60", "--runtime", "inline"]
    for name in ("summary.json", "logs/searcher-0.result.json"):
        assert main(resume) == 2  # by the summary; by a searcher, which may have seen the last rows alone
        error = capsys.readouterr().err
        assert f"at least {rows - earlier:,} of the {rows:,} trajectories that it held are missing" in error
        (run / name).unlink()
    assert main(resume) == 2  # by the last line of metrics
    assert (
        f"at least {read - earlier:,} of the {read:,} trajectories that it held are missing" in capsys.readouterr().err
    )


def test_a_copy_of_the_journal_from_before_a_resume_is_told_though_nothing_knows_of_more_rows(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(run), "--steps", "45", "--runtime", "inline"]) == 0
    for folder in ("weights", "checkpoints", "journal.sqlite-acknowledged"):
        shutil.rmtree(run / folder)
    for file in ("metrics.jsonl", "summary.json", "logs/searcher-0.result.json"):
        (run / file).unlink()
    an_earlier_copy(run)
    earlier = held(run / "earlier").rows
    capsys.readouterr()
    assert main(["replay", str(run)]) == 0
    assert "the journal is an older copy, or of a copy of the run" in " ".join(capsys.readouterr().out.split())
    resume = ["resume", str(run), "--steps", "10", "--runtime", "inline"]
    assert main(resume) == 2
    error = capsys.readouterr().err
    assert (
        "is a copy from before the run was last resumed: what was acknowledged since is missing; put it back" in error
    )
    assert error.count("\n") == 1
    assert main([*resume, "--accept-lost-rows"]) == 0
    assert f"0 trajectories are missing, {earlier} are there" in " ".join(capsys.readouterr().out.split())
    summary = Summary.read(run)
    assert summary is not None
    assert (summary.steps, summary.faults["journal_recoveries"]) == (10, 1)
    assert summary.trajectories.closes()
    assert main([*resume, "--steps", "11"]) == 0  # its mark is that of the run again


def test_the_journal_of_a_copied_run_that_went_on_by_itself_is_another_with_however_many_rows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "copied")
    inline_on = ("--runtime", "inline", "--steps")
    assert main(["resume", str(tmp_path / "copied"), *inline_on, "60"]) == 0
    assert main(["resume", str(run), *inline_on, "50"]) == 0
    rows = held(run / "journal.sqlite").rows
    gone(run)
    shutil.copy(tmp_path / "copied" / "journal.sqlite", run / "journal.sqlite")
    row_count = held(run / "journal.sqlite").rows
    assert row_count > rows
    capsys.readouterr()
    assert main(["resume", str(run), *inline_on, "60"]) == 2
    error = capsys.readouterr().err
    assert f"is of a copy of the run, which went another way: at least {rows:,} of the {rows:,} trajectories" in error
    assert main(["resume", str(run), *inline_on, "60", "--accept-lost-rows"]) == 0
    assert held(run / "journal.sqlite.other-1").rows == row_count
    summary = Summary.read(run)
    assert summary is not None
    assert summary.steps == 60
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger


def test_commands_that_read_or_add_to_a_run_say_that_its_journal_is_an_older_copy(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, earlier = held(run / "journal.sqlite").rows, held(run / "earlier").rows
    an_earlier_copy(run)
    assert main(["replay", str(run)]) == 0
    sentence = f"{rows - earlier:,} of the {rows:,} trajectories that the run had are missing"
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert sentence in (tmp_path / "report.json").read_text()
    capsys.readouterr()
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": "1+2=", "completion": "3"}\n')
    assert main(["import", str(run), str(answers), "--trust"]) == 2
    assert f"at least {rows - earlier:,} of the {rows:,} trajectories that it held" in capsys.readouterr().err
    assert held(run / "journal.sqlite").rows == earlier


def test_scores_that_come_after_the_journal_was_lost_are_read(tmp_path: Path) -> None:
    """A new journal numbers its scores from 1 again, which is before where the checkpoint has read to."""
    path, reference = tmp_path / "journal.sqlite", Version(0, 3)

    def put(name: str) -> None:
        with JournalWriter(path, "searcher-0") as writer:
            writer.put([replace(trajectory(i), uid=f"{name}-{i}") for i in range(6)], ())
            replay.drain()
            unscored = writer.unscored(reference, 100, 60.0)
            writer.put_scores([Score(t.uid, reference, np.zeros(t.length, np.float32)) for t in unscored])
            replay.drain()

    with JournalFollower(path) as journal:
        replay = Replay(journal, ReplaySettings(), resets=True)
        replay.reference = reference
        put("earlier")
        assert replay.buffer.sampleable == 6
        state, counts = replay.state(), JournalCounts.of(journal)
    for part in tmp_path.glob("journal.sqlite*"):
        if part.is_file():
            part.unlink()
    loss = find_loss(path, counts)
    assert loss is not None
    accept_loss(loss)
    with JournalFollower(path) as journal:
        replay = Replay(journal, ReplaySettings(), resets=True)
        replay.restore(state, Version(1, 5))
        put("later")
        assert replay.buffer.sampleable == 6
