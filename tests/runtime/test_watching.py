"""The best checkpoint of a run: which it is, that it stays, and what is gone on from; what a collapse is told by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runs import inline, inline_again, made

from tba.recipes.quickstart import BASE
from tba.record.evaluations import EvaluationWriter
from tba.record.faults import count_faults, read_faults
from tba.record.run_record import RunRecord
from tba.record.run_warnings import ENTROPY_FALLS, LARGE_STEPS, LOST_SAMPLES, MISMATCHES, NO_SIGNAL, SHORT
from tba.runtime.searcher_loop import start_searching
from tba.runtime.trainer_loop import TrainerLoop, start_training
from tba.runtime.watching import answer_watch_of
from tba.settings import find
from tba.training.checkpoint import Checkpoint, checkpoints_in, newest_checkpoint
from tba.types import Completion, Evaluation, Judgement, Problem, Prompt, Split, Version
from toy.policy import TabularTask

SETTINGS = (
    *("--steps", "60", "--run.checkpoint-every", "10", "--evaluation.every", "10", "--replay.pacing.warm-up", "64"),
    *("--evaluation.problems", "1"),
)
FOUND = {0: 0.1, 10: 0.5, 20: 0.9, 30: 0.8, 40: 0.2, 50: 0.3, 60: 0.3}  # accuracy by step


def evaluated(train: TrainerLoop, step: int) -> None:
    """As a searcher would, with the figure above over 500 problems."""
    version = Version(train.trainer.version.incarnation, step)
    evaluations = [Evaluation(version, 0.0, "pass@1/sampled", FOUND[step], 500)]
    records = EvaluationWriter(train.run.path)
    records.write(evaluations)
    records.close()
    assert train.turn_taker is not None  # inline has one
    train.turn_taker.journal.claim(f"evaluate {version}", 60.0)
    train.turn_taker.journal.finish(f"evaluate {version}", evaluations)
    train._record_evaluations()


def test_the_best_checkpoint_and_those_still_to_be_evaluated_stay_beside_the_newest(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", *SETTINGS)
    search = start_searching(recipe, run, 0)
    train = start_training(recipe, run, lambda: False, prefetch=False, turn_taker=search)
    links, best = {}, {}
    try:
        while not train.finished:
            train.step()
            step = train.trainer.version.step
            if step % 10 == 0:
                if step >= 20:
                    evaluated(train, step - 20)  # each comes 20 steps late
                links[step] = [version.step for _, version in checkpoints_in(run.checkpoints)]
                link = run.path / "best"
                best[step] = link.readlink().name if link.is_symlink() else None
        newest = newest_checkpoint(run.checkpoints)
        assert newest is not None
        assert newest.version == Version(0, 60)
    finally:
        train.close()
        search.close()
    assert {step: [s for s in steps if s] for step, steps in links.items()} == {
        10: [10],
        20: [10, 20],
        30: [10, 20, 30],
        40: [10, 20, 30, 40],
        50: [20, 30, 40, 50],
        60: [20, 40, 50, 60],
    }
    assert best[40] == best[50] == best[60] == "step-20"
    assert Checkpoint.load(run.path / "best").version == Version(0, 20)
    record = RunRecord.read(run.path)
    assert record.best == "checkpoints/step-20 (pass@1/sampled 90.0 %); the link `best` leads to it"
    fallen = [sentence for sentence in record.warnings if "cut off" not in sentence]  # the toy's answers are
    assert fallen == ["pass@1/sampled is 20.0 % at step 40: it was 90.0 % at step 20"]


def test_a_run_goes_on_from_its_newest_checkpoint_with_the_best_beside_it(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", *SETTINGS)
    search = start_searching(recipe, run, 0)
    train = start_training(recipe, run, lambda: False, prefetch=False, turn_taker=search)
    while not train.finished:
        train.step()
        if train.trainer.version.step == 30:
            evaluated(train, 10)
    train.finish()
    train.close()
    search.close()
    summary = inline_again(run.path, "--steps", "70")
    assert summary.steps == 70
    assert [e.version for e in summary.evaluations][-1] == Version(1, 70)
    versions = {version for _, version in checkpoints_in(run.checkpoints)}
    assert {Version(1, 70), Version(0, 60)} <= versions


def test_thirty_times_the_rate_is_warned_of_before_half_of_the_accuracy_is_lost_and_the_rate_itself_never(
    tmp_path: Path,
) -> None:
    few = ("--steps", "24", "--replay.pacing.warm-up", "140", "--evaluation.no-greedy", "--evaluation.pass-k", "0")
    quickstart, quietly = Path("quickstart"), ("--record.no-tensorboard", "--record.samples-per-batch", "0")
    few += ("--model.path", str(BASE), "--task.train-problems", "1000", "--task.eval-problems", "100")
    flags = (*few, *quietly, "--evaluation.every", "4", "--evaluation.problems", "100")
    summary = inline(tmp_path / "thirty", *flags, "--optimizer.lr", "3e-3", source=quickstart)
    sentences = [fault["what"] for fault in read_faults(tmp_path / "thirty") if fault["kind"] == LARGE_STEPS]
    warned = [int(match[1]) for sentence in sentences if (match := re.search(r"by step (\d+) each", sentence))]
    accuracy = {e.version.step: e.value for e in summary.evaluations}
    lost = [step for step, value in accuracy.items() if value < accuracy[0] / 2]
    assert len(warned) == 1
    assert warned[0] < min(lost)
    calm = inline(tmp_path / "one", *few, *quietly, "--evaluation.problems", "1", source=quickstart)
    assert not any(calm.faults[kind] for kind in (LARGE_STEPS, ENTROPY_FALLS, LOST_SAMPLES, MISMATCHES))


class Nothing:
    """Gives every answer the same reward."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [Judgement(0.0) for _ in answered]


@dataclass(frozen=True)
class NothingToLearn:
    """Asks what the toy asks; all answers are worth nothing."""

    name: str = "tabular"

    def problems(self, split: Split) -> Sequence[Problem]:
        return TabularTask().problems(split)

    def reward(self) -> Nothing:
        return Nothing()


def test_a_run_of_six_steps_says_at_its_end_that_all_rewards_were_equal(tmp_path: Path) -> None:
    summary = inline(tmp_path / "run", "--steps", "6", task=NothingToLearn())
    assert summary.steps == 6
    assert [
        sentence for sentence in RunRecord.read(tmp_path / "run").warnings if "nothing can be learnt" in sentence
    ] == [
        "nothing can be learnt: in steps 1 to 6 all answers to a prompt got the same reward. `tba check` shows answers "
        "with their rewards, and what to change"
    ]
    assert not inline(tmp_path / "other", "--steps", "6").faults[NO_SIGNAL]


def test_a_run_whose_new_answers_lose_half_of_their_tokens_says_so_but_not_of_episodes(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    for task, times in ((find("guess_number").task, 0), (recipe.task, 1)):
        arrivals = answer_watch_of(replace(recipe, task=task), run)
        for start, tokens in ((0, 33), (100, 16), (200, 10)):
            arrivals.see([(f"prompt {start + i}", 1.0, tokens + i % 2) for i in range(100)])
        arrivals.finish()
        assert count_faults(run.path)[SHORT] == times
    (sentence,) = RunRecord.read(run.path).warnings
    assert sentence.startswith("answers became short: new answers have 16.5 tokens on average, 33.5 when the run began")
