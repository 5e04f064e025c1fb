"""A run that is left at one step and taken up again: the same run, where it was, with all that it had."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import (
    SECONDS,
    TOY,
    distance,
    ended,
    final_weights,
    forked,
    inline,
    inline_again,
    made,
    quiet,
    steps_of,
    until,
)
from safetensors.torch import load_file

from tba.__main__ import main
from tba.command.replay import uses_of
from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.record.evaluations import read_evaluations
from tba.record.faults import read_faults
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.replay.missing_rows import JournalCounts
from tba.rollout.exploration import Fixed
from tba.runtime.checkpointing import LoopState, generators, set_generators
from tba.runtime.evaluation import evaluated_to_the_end
from tba.runtime.inline import Inline
from tba.runtime.run_directory import RunDirectory
from tba.runtime.run_lock import driver_lives
from tba.runtime.searcher_loop import run_searcher, start_searching
from tba.runtime.trainer_loop import TrainerLoop, start_training
from tba.tasks.arithmetic import Arithmetic
from tba.training.checkpoint import Checkpoint, newest_checkpoint, newest_sound_checkpoint
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import Sampling, Version
from tba.weights.directory import WeightDirectory

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
RUN = (*SHORT, "--replay.pacing.warm-up", "32", "--steps", "60", "--run.checkpoint-every", "20")
SAME = ("loss", "reward", "lag", "lag_max", "log_ratio", "grad_norm", "lr", "replay_trajectories", "groups_recent")


class PowerCut(Exception):
    """Where a run is cut off."""


@dataclass
class Cut:
    """Draws plain settings until the first round after `step` steps of the run at `path`, in which it cuts it off."""

    path: Path
    step: int
    cut: list[int]

    def draw(self, rng: np.random.Generator) -> Sampling:
        if not self.cut and steps_of(self.path) >= self.step:
            self.cut.append(1)
            raise PowerCut
        return Sampling()

    full_support = True
    greedy = False


def toy(folder: Path) -> dict[str, Any]:
    """The enumerable toy."""
    return {}


def llama(folder: Path) -> dict[str, Any]:
    """A random Llama on one-digit sums."""
    task = Arithmetic(digits=1, train_problems=40, eval_problems=1)
    tokenizer = character_tokenizer(task.alphabet)
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=16).start(tokenizer).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    model = HuggingFace(str(folder), device="cpu", generation=EngineSettings(slots=5, max_completion_tokens=4))
    return {"task": task, "model": model}


@pytest.mark.parametrize(
    ("setting", "overrides"),
    [
        (toy, ()),
        (toy, ("--objective.off-policy", "asymmetric", "--replay.buffer.no-deduplicate")),
        (toy, ("--reference-reset", "15", "--rescored-per-round", "20")),  # nothing is left to score at the cut
        (toy, ("--prompts.selection", "posterior", "--prompts-per-round", "1", "--replay.buffer.per-prompt", "40")),
        (toy, ("--replay.pacing.max-mean-uses", "1.5", "--evaluation.every", "10", "--replay.ingest", "sync")),
        (
            toy,
            (
                "--control.signal",
                "lag",
                "--control.lower-bound",
                "2",
                "--control.upper-bound",
                "3",
                "--control.every",
                "4",
            ),
        ),
        (toy, ("--optimizer.weight-average", "--evaluation.every", "10")),
        (
            llama,
            (
                "--replay.pacing.warm-up",
                "64",
            ),
        ),
    ],
)
def test_a_run_cut_off_at_a_checkpoint_and_taken_up_again_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, setting: Callable[[Path], dict[str, Any]], overrides: tuple[str, ...]
) -> None:
    """The round that was under way had leased its prompts; they are handed out again, to the same draws."""
    changes = setting(tmp_path / "model")
    whole = inline(tmp_path / "whole", *RUN, *overrides, exploration=Fixed(), **changes)
    path = tmp_path / "cut"
    exploration = Cut(path, 20, [])
    with pytest.raises(PowerCut):
        inline(path, *RUN, *overrides, exploration=exploration, **changes)
    again = inline_again(path, exploration=exploration, **changes)
    weights, other_weights = final_weights(path), final_weights(tmp_path / "whole")
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights.keys() | other_weights.keys())
    weights, other_weights = (
        load_file(run / "checkpoints/step-60/optimizer.safetensors") for run in (path, tmp_path / "whole")
    )
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights.keys() | other_weights.keys())
    rows = [read_metrics(run) for run in (tmp_path / "whole", path)]
    assert [row["step"] for row in rows[1]] == list(range(1, 61))
    assert [[row[name] for name in SAME] for row in rows[0]] == [[row[name] for name in SAME] for row in rows[1]]
    assert [row.get("push") for row in rows[0]] == [row.get("push") for row in rows[1]]
    states = [json.loads((run / "checkpoints/step-60/run.json").read_text()) for run in (tmp_path / "whole", path)]
    assert states[0]["state"]["objective"] == states[1]["state"]["objective"]
    assert states[0]["state"]["objective"] is not None or "asymmetric" not in overrides
    assert [row["version"] for row in rows[1]][19:21] == ["0.20", "1.21"]
    assert (again.tokens, again.trajectories, again.lag) == (whole.tokens, whole.trajectories, whole.lag)
    assert [(e.metric, e.value) for e in again.evaluations] == [(e.metric, e.value) for e in whole.evaluations]
    assert uses(tmp_path / "whole").tolist() == uses(path).tolist()
    assert again.trajectories.closes()


def test_a_checkpoint_changes_nothing_in_the_run_that_makes_it(tmp_path: Path) -> None:
    inline(tmp_path / "one", *RUN)
    inline(tmp_path / "other", *RUN, "--run.checkpoint-every", "0")
    assert torch.equal(
        final_weights(tmp_path / "one")["prefix.logits"], final_weights(tmp_path / "other")["prefix.logits"]
    )


def uses(path: Path) -> Any:
    """[places + 1] how often each trajectory was trained on, as the newest checkpoint has it."""
    return uses_of(RunDirectory.open(path))


def uids_of(path: Path) -> list[str]:
    """Of all trajectories that were acknowledged, in order."""
    with JournalFollower(path / "journal.sqlite") as journal:
        return [t.uid for t in journal.drain()]


def assert_whole(path: Path, summary: Summary, acknowledged: list[str]) -> None:
    """Nothing lost, nothing counted twice: in the journal, in the record of uses, in the account, in the steps."""
    uids = uids_of(path)
    assert uids[: len(acknowledged)] == acknowledged
    assert len(set(uids)) == len(uids)
    account = summary.trajectories
    assert len(uids) == account.generated - account.rejected - account.in_flight_at_stop
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    assert uses(path).sum() == summary.trajectories.trained_total
    assert np.count_nonzero(uses(path)) == summary.trajectories.trained_once
    branch: dict[int, float] = {}
    for row in read_metrics(path):  # a step that was trained again replaces the one whose weights are gone
        branch[int(row["step"])] = row["trajectories"]
    assert list(branch) == list(range(1, summary.steps + 1))
    assert sum(branch.values()) == summary.trajectories.trained_total


def test_what_was_sampled_after_the_checkpoint_stays_and_counts_as_older_than_all_since(tmp_path: Path) -> None:
    path = tmp_path / "run"
    exploration = Cut(path, 33, [])
    with pytest.raises(PowerCut):
        inline(path, *RUN, exploration=exploration)
    checkpoint = newest_checkpoint(path / "checkpoints")
    assert checkpoint is not None
    position = checkpoint.state["replay"]["position"]
    uids_before = uids_of(path)
    late = set(uids_before[position:])
    assert len(late) > 0
    assert uses(path).sum() == 20 * 16
    run = RunDirectory.open(path)
    run.begin_again("resumed")
    half = start_training(run.recipe(), run, stop=lambda: False, prefetch=False)
    assert half.trainer.version == half.trainer.published == Version(1, 20)
    assert half.replay.buffer.trained_total == 20 * 16
    half.replay.drain()
    rows_by_uid = {t.uid: t for key in half.replay.buffer.prompts() for t in half.replay.buffer.of(key)}
    assert late & rows_by_uid.keys()
    past = rows_by_uid.keys() - late  # what the checkpoint's own past had sampled is as old as it was
    assert {rows_by_uid[uid].version.incarnation for uid in past} == {1}
    assert {rows_by_uid[uid].version.lag(half.trainer.version) for uid in late & rows_by_uid.keys()} == {21}
    half.close()
    assert_whole(path, inline_again(path, exploration=exploration), uids_before)


class Halves:
    """A searcher, and a trainer that can be killed and resumes. Every third step is evaluated."""

    def __init__(self, path: Path, steps: int) -> None:
        quick = (
            "--sync-every",
            "1",
            "--replay.pacing.warm-up",
            "0",
            "--evaluation.every",
            "3",
            "--evaluation.problems",
            "4",
        )
        self.recipe, self.run = made(path, "--steps", str(steps), *quick)
        self.search = start_searching(self.recipe, self.run, 0)
        self.train = start_training(self.recipe, self.run, stop=lambda: False, prefetch=False)
        self.search.evaluate()

    def make_steps(self, count: int) -> None:
        self.train.batches.fill = self.search.searcher.round
        for _ in range(count):
            self.train.step()

    def kill_and_resume(self) -> None:
        for part in (self.train.weights, self.train.journal, self.train.recorder):
            part.close()
        self.run.begin_again("trainer was killed by signal 9")
        self.train = start_training(self.recipe, self.run, stop=lambda: False, prefetch=False)


def test_an_evaluation_that_the_resumed_trainer_has_forgotten_does_not_end_the_searcher(tmp_path: Path) -> None:
    halves = Halves(tmp_path / "run", steps=100)
    search = halves.search
    halves.make_steps(2)
    halves.train.checkpoint()
    halves.make_steps(1)
    assert Version(0, 3) in {request.version for request in search.newest_manifest().evaluate}

    def resume_between_chunks() -> None:
        if not halves.run.incarnation:
            halves.kill_and_resume()
            halves.make_steps(2)
        search.searcher.round()
        search.searcher.free_engine()

    with closing(search):
        search.evaluate(resume_between_chunks)
        assert Version(0, 3) not in WeightDirectory(halves.run.weights).versions()
        search.evaluate()
    assert {evaluation.version for evaluation in read_evaluations(halves.run.path)} == {Version(), Version(1, 3)}
    halves.train.close()


def test_the_last_version_of_a_restarted_trainer_is_evaluated(tmp_path: Path, monkeypatch: Any) -> None:
    """The only searcher evaluates the last version of a trainer that has died, while the next trainer ends the run."""
    halves = Halves(tmp_path / "run", steps=6)
    search, evaluate, awaited_versions = halves.search, halves.search.examiner.evaluate, []
    halves.make_steps(4)
    halves.train.checkpoint()
    search.evaluate()
    halves.make_steps(2)
    assert search.newest_manifest().stop

    def evaluate_meanwhile(*arguments: Any) -> None:
        evaluate(*arguments)
        if not halves.run.incarnation:
            halves.kill_and_resume()
            halves.make_steps(2)
            halves.train.finish()
            awaited_versions.extend(halves.train.result().awaited_evaluations)
            halves.train.close()

    monkeypatch.setattr(search.examiner, "evaluate", evaluate_meanwhile)
    run_searcher(halves.recipe, lambda: search, lambda: False)
    assert awaited_versions == [Version(1, 6)]
    assert evaluated_to_the_end(halves.run.path, 6, awaited_versions)


def test_killed_at_random_moments_again_and_again_a_run_loses_nothing_and_arrives(tmp_path: Path) -> None:
    """Ten kills of one run, each a random number of steps after the last; then it goes to its end."""
    rng, path = np.random.default_rng(11), tmp_path / "run"
    run = (*SHORT, "--steps", "400", "--run.checkpoint-every", "10", "--replay.pacing.warm-up", "32")
    child = forked(lambda: inline(path, *run, "--optimizer.lr", "0.1"))
    seen: list[str] = []
    for _ in range(10):
        lines = steps_of(path) + int(rng.integers(12, 40))
        until(lambda lines=lines: steps_of(path) >= lines, SECONDS, "some steps")
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        now = uids_of(path)
        assert now[: len(seen)] == seen
        seen = now
        child = forked(lambda: inline_again(path))
    assert ended(child) == 0
    summary = Summary.read(path)
    assert summary is not None
    assert summary.steps == 400
    assert_whole(path, summary, seen)
    assert distance(path, 0.5) < 0.1
    versions = [Version.parse(row["version"]) for row in read_metrics(path)]
    assert versions == sorted(versions)
    assert {v.incarnation for v in versions} == set(range(11))


def test_prompts_in_flight_are_issued_again_first_and_every_prompt_has_its_answers(tmp_path: Path) -> None:
    """Whatever was cut off: each position up to the last was answered, exactly once, by all S samples."""
    path = tmp_path / "run"
    changes = llama(tmp_path / "model")
    for step in (10, 25, 40):
        with pytest.raises(PowerCut):
            (inline_again if path.exists() else inline)(
                path, *(() if path.exists() else RUN), exploration=Cut(path, step, []), **changes
            )
        with JournalFollower(path / "journal.sqlite") as journal:
            assert len(journal.leases()) == 2
    inline_again(path, exploration=Fixed(), **changes)
    with JournalFollower(path / "journal.sqlite") as journal:
        issued, in_flight = journal.totals().positions, journal.leases()
        answers = len(journal.drain())
    assert in_flight == []
    assert answers == issued * 8


def flip(path: Path, at: int = -9) -> None:
    """One byte of a file is changed."""
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.write_bytes(body)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "damage", "sentence"),
    [
        ("model.safetensors", flip, "model.safetensors: its checksum differs"),
        ("optimizer.safetensors", cut_in_half, r"optimizer.safetensors: \d+ bytes instead of \d+"),
        ("optimizer.json", Path.unlink, "optimizer.json: No such file"),
        ("run.json", cut_in_half, r"is damaged \(run.json"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_said_so(
    tmp_path: Path, file: str, damage: Callable[[Path], object], sentence: str
) -> None:
    path = tmp_path / "run"
    exploration = Cut(path, 45, [])
    with pytest.raises(PowerCut):
        inline(path, *RUN, exploration=exploration)
    uids_before = uids_of(path)
    damage(path / "checkpoints" / "step-40" / file)
    summary = inline_again(path, exploration=exploration)
    assert [row["version"] for row in read_metrics(path)][44:46] == ["0.45", "1.21"]
    (fault,) = (fault for fault in read_faults(path) if fault["kind"] == "damaged_checkpoints")
    assert "step-40" in fault["what"]
    assert pytest.importorskip("re").search(sentence, fault["what"])
    assert summary.faults["damaged_checkpoints"] == 1
    assert_whole(path, summary, uids_before)
    checkpoint, damaged = newest_sound_checkpoint(path / "checkpoints")
    assert (checkpoint.version if checkpoint else None, damaged) == (Version(1, 60), [])
    assert {p.name for p in (path / "checkpoints").iterdir()} == {"step-40", "step-60"}


def test_where_all_checkpoints_are_damaged_one_sentence_says_so(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run"
    inline(path, *RUN, "--steps", "40")
    for checkpoint in (path / "checkpoints").iterdir():
        flip(checkpoint / "model.safetensors")
    assert main(["resume", str(path), "--steps", "60", "--runtime", "inline"]) == 2
    assert "every checkpoint of the run at" in capsys.readouterr().err


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    inline(tmp_path / "run", *RUN, "--steps", "20")
    return tmp_path / "run"


def refused(arguments: list[str], capsys: Any) -> str:
    """The one sentence with which a command ends."""
    assert main(arguments) == 2
    output: str = capsys.readouterr().err
    assert output.startswith("tba: ")
    assert output.count("\n") == 1
    return output


def test_a_run_that_cannot_go_on_says_why_in_one_sentence(tmp_path: Path, finished: Path, capsys: Any) -> None:
    resume = ["resume", str(finished)]
    assert "has made 20 steps, all that were asked for: give more with --steps" in refused(resume, capsys)
    assert "has made 20 steps" in refused([*resume, "--steps", "10"], capsys)
    assert "there is no such run" in refused(["resume", str(tmp_path / "none")], capsys)
    assert "needs a run's folder" in refused(["resume"], capsys)
    assert "does not take 'quickstart'" in refused([*resume, "quickstart"], capsys)
    output = refused([*resume, "--steps", "40", "--task.symbols", "5"], capsys)
    assert "a run keeps its task.symbols, which is 4: start a new run for 5" in output
    assert "has no field --step" in refused([*resume, "--step", "40"], capsys)
    with RunDirectory.open(finished).hold_lock(0.0):
        assert "is still in progress (process" in refused_soon([*resume, "--steps", "40"], capsys)
    assert RunDirectory.open(finished).incarnation == 0


def test_a_run_whose_journal_an_earlier_version_made_is_refused_and_nothing_of_it_is_changed(
    finished: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "earlier"
    shutil.copytree(finished, run)
    with closing(sqlite3.connect(run / "journal.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 6")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for command in (["resume", str(run), "--steps", "40"], ["replay", str(run)]):
        assert "journal.sqlite has schema version 6, this program reads version 7" in refused(command, capsys)
    assert {path: path.read_bytes() for path in before} == before


def refused_soon(arguments: list[str], capsys: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tba.command.resume._PATIENCE", 0.0)
        return refused(arguments, capsys)


def test_whether_the_driver_of_a_run_lives_is_read_from_its_lock(finished: Path) -> None:
    """For one that is dead, a resume waits longer: its parts are ending."""
    with RunDirectory.open(finished).hold_lock(0.0):
        assert driver_lives(finished)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for driver in (dead.pid, "", "no number", "9" * 40):
        (finished / "lock").write_text(f"{driver}")
        assert not driver_lives(finished)


def test_a_run_whose_recipe_has_changed_is_not_gone_on_with(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "mine.py"
    source.write_text(TOY.read_text())
    recipe, run = made(tmp_path / "run", *RUN, "--steps", "20", source=source)
    Inline(recipe, run, quiet).go()
    source.write_text(TOY.read_text().replace("steps=600", "steps=601"))
    assert "mine.py has changed since the run at" in refused(["resume", str(run.path)], capsys)
    facts = json.loads((run.path / "recipe.json").read_text())
    facts |= {"recipe": str(TOY), "digest": None}
    facts["resolved"]["sync_every"] = 4
    run.write_facts(facts)
    output = refused(["resume", str(run.path)], capsys)
    assert "(sync_every was 4 and is 5): start a new run, or set it back" in output
    facts["resolved"]["sync_every"] = 5
    facts["resolved"]["run"]["prefetch"] = False
    run.write_facts(facts)
    assert "has a field run.prefetch, which recipes do not have" in refused(["resume", str(run.path)], capsys)


def test_a_recipe_json_with_a_flipped_bit_is_said_to_be_damaged(tmp_path: Path, capsys: Any) -> None:
    _, run = made(tmp_path / "run", *RUN, "--steps", "20")
    file = run.path / "recipe.json"
    whole = file.read_bytes()
    for text in (b'"sync_every"', b'"5"', b'"20"', b'"incarnations"', b'"marks"', b'"TabularTask', b'"resolved"'):
        if (place := whole.find(text) + 2) < 2:
            continue
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        output = refused(["resume", str(run.path)], capsys)
        assert "recipe.json is damaged or was edited" in output or "recipe.json has unexpected contents" in output
        assert "put it back as it was, or start a new run" in output
    file.write_bytes(whole)
    assert run.recipe().steps == 20


def test_a_finished_run_is_given_more_steps(finished: Path, capsys: Any) -> None:
    before = json.loads((finished / "summary.json").read_text())["wall_seconds"]["total"]
    assert main(["resume", str(finished), "--steps", "40", "--runtime", "inline"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "resuming from" in output
    assert "(it had finished)" in output
    summary = Summary.read(finished)
    assert summary is not None
    assert (summary.steps, summary.faults["resumes"]) == (40, 1)
    assert summary.wall_seconds.total > before
    assert_whole(finished, summary, [])
    rows = read_metrics(finished)
    assert [row["wall_seconds"] for row in rows] == sorted(row["wall_seconds"] for row in rows)
    assert {str(e.version) for e in summary.evaluations} == {"0.0", "0.20", "1.40"}
    assert main(["show", str(finished)]) == 0


def test_every_generator_of_the_process_is_part_of_the_state() -> None:
    import random

    state = json.loads(json.dumps(generators()))
    drawn = [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]
    set_generators(state)
    assert [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()] == drawn


def test_the_manifest_ties_everything_to_one_step(finished: Path) -> None:
    checkpoint = newest_checkpoint(finished / "checkpoints")
    assert checkpoint is not None
    state = checkpoint.state
    assert checkpoint.version == Version(0, 20)
    with JournalFollower(finished / "journal.sqlite") as journal:
        assert JournalCounts.parse(state["journal"]) == JournalCounts.of(journal)
    assert state["journal"]["prompts_in_flight"] == []
    assert uses(finished).sum() == 20 * 16
    assert state["replay"]["counts"]["trained_total"][0] == 20 * 16 == sum(count for _, count in state["lags"])
    assert set(state) >= {"reference", "generators", "searcher", "evaluations", "clock", "skipped"}
    files = json.loads((checkpoint.path / "run.json").read_text())["files"]
    assert set(files) == {p.name for p in checkpoint.path.iterdir()} - {"run.json"}


def test_what_was_fetched_ahead_of_a_checkpoint_is_not_counted_as_trained(tmp_path: Path) -> None:

    recipe, run = made(tmp_path / "run", *RUN, "--steps", "9", "--sync-every", "1")
    search = start_searching(recipe, run, 0)
    for _ in range(9):
        search.searcher.round()
    search.close()
    half = start_training(recipe, run, stop=lambda: False, prefetch=True)
    for _ in range(3):
        half.step()
    half.batches.wait_for_prefetch()
    assert half.replay.buffer.trained_total == 4 * 16
    half.checkpoint()
    half.batches.close()
    half.recorder.close()
    half.journal.close()  # as a kill would leave it
    run.begin_again("resumed")
    again = start_training(recipe, run, stop=lambda: False, prefetch=False)
    assert again.replay.ledger()["trained_total_trajectories"] == 3 * 16 == sum(again.lags.values())
    assert again.replay.buffer.fates().clip(min=0).sum() == uses(run.path).sum() == 3 * 16
    again.close()


def restarted(path: Path) -> TrainerLoop:
    run = RunDirectory.open(path)
    run.begin_again("trainer was killed by signal 9")
    return start_training(run.recipe(), run, stop=lambda: False, prefetch=False)


def test_without_a_checkpoint_a_trainer_begins_again_with_all_there_is_as_old_data(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(PowerCut):
        inline(path, *RUN, "--run.checkpoint-every", "0", exploration=Cut(path, 30, []))
    half = restarted(path)
    assert half.trainer.version == Version(1, 0)
    half.replay.drain()
    buffer = half.replay.buffer
    assert buffer.received == len(uids_of(path)) > 0
    assert buffer.trained_total == buffer.fates().clip(min=0).sum() == 0
    assert {t.version.lag(half.trainer.version) for key in buffer.prompts() for t in buffer.of(key)} == {1}
    half.close()


def test_a_checkpoint_without_later_fields_has_their_defaults_and_one_with_unknown_fields_is_refused() -> None:
    parts = {"replay": {}, "references": {}, "evaluations": {}, "generators": {}, "journal": {"rows": 3}}
    state = LoopState.of(Checkpoint(Path("step-3"), Version(0, 3), {**parts, "lags": [[1, 8], [2, 4]]}))
    assert state == LoopState(**parts, lags=[(1, 8), (2, 4)])
    assert (state.skipped, state.searcher, state.began_training) == (0, None, None)
    with pytest.raises(UserError, match=r"step-4 cannot be resumed .*'mood' that is unknown"):
        LoopState.of(Checkpoint(Path("step-4"), Version(0, 4), {**parts, "mood": 1}))
