"""Resets of the reference: where they lead, what they keep, and that nobody is left behind."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import TASK, distance, final_weights, inline, made, processes

from tba.errors import UserError
from tba.record.evaluations import EvaluationWriter
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runtime.searcher_loop import SearcherLoop, start_searching
from tba.runtime.trainer_loop import TrainerLoop, start_training
from tba.training.checkpoint import checkpoints_in, newest_checkpoint
from tba.types import Evaluation, Version
from tba.weights.directory import WeightDirectory
from toy.model import TabularModel
from toy.policy import WEIGHT, TabularPolicy, TabularReference, distribution, ideal, total_variation

BETA = 0.5
ORACLE = (
    *(
        "--objective.off-policy",
        "none",
        "--objective.beta.value",
        str(BETA),
        "--optimizer.lr",
        "0.1",
        "--optimizer.schedule.steps",
        "3000",
    ),
    *("--groups-per-step", "4", "--group-size", "32", "--samples-per-prompt", "16", "--evaluation.problems", "1"),
    *("--exploration.temperature", "1e6", "--sync-every", "20"),
)


def distance_at(path: Path, version: Version, beta: float) -> float:
    """Total variation between published weights and pi_0 exp(r / beta) / Z, the worst over training prompts."""
    policy = TabularPolicy(TASK)
    policy.load(WeightDirectory(path / "weights").at(version).read())
    return float(total_variation(distribution(policy), ideal(TASK, beta))[: TASK.prompts].max())


def assert_scored_afresh(path: Path, resets: list[Version]) -> None:
    """Every score that was put down is what that reference says when it is asked again, bit for bit."""
    reference, weights = TabularReference(TASK), WeightDirectory(path / "weights")
    with JournalFollower(path / "journal.sqlite") as journal:
        trajectories = {t.uid: t for t in journal.drain()}
        scores = journal.drain_scores()
    assert {score.reference for score in scores} == set(resets)
    rows = [(t.reference, t, t.log_reference) for t in trajectories.values() if t.reference in resets]
    rows += [(s.reference, trajectories[s.uid], s.log_reference) for s in scores]
    for version in resets:
        reference.load(weights.at(version).read(), version)
        for _, t, log_reference in (row for row in rows if row[0] == version):
            np.testing.assert_array_equal(log_reference, reference.log_probabilities(t.prompt, [t.completion])[0])


def test_resets_at_constant_beta_sharpen_the_fixed_point_by_one_tilt_each(tmp_path: Path) -> None:
    """pi_n = pi_0 exp(n r / beta) / Z after n converged intervals, each of which tilts its reference once."""
    path = tmp_path / "run"
    summary = inline(path, *ORACLE, "--steps", "300", "--reference-reset", "100")
    resets = [Version(0, 100), Version(0, 200)]
    assert [(r["step"], r["version"]) for r in summary.reference_resets] == [(100, "0.100"), (200, "0.200")]
    for count, version in enumerate(resets, start=1):
        assert distance_at(path, version, BETA / count) <= 0.02
    assert distance(path, BETA / 3) <= 0.02
    assert distance(path, BETA) > 0.4
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    assert summary.trajectories.trained_once + summary.trajectories.duplicate > 0.9 * summary.trajectories.generated
    rows = {row["step"]: row for row in read_metrics(path)}
    assert [rows[step]["reference_step"] for step in (99, 100, 200, 300)] == [0, 100, 200, 200]
    assert [rows[step]["log_ratio"] for step in (101, 201)] == pytest.approx([0, 0], abs=1e-5)  # pi is pi_ref again
    assert rows[100]["replay_unscored"] > rows[101]["replay_unscored"] == 0
    assert_scored_afresh(path, resets)
    assert Summary.read(path) is not None
    checkpoint = newest_checkpoint(path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.state["reference"] == "0.200"


def test_equal_seeds_give_equal_weights_through_resets_and_a_fresh_optimizer_gives_others(tmp_path: Path) -> None:
    short = ("--steps", "40", "--reference-reset", "7", "--sync-every", "2", "--evaluation.problems", "1")
    weights = []
    for name, extra in (("a", ()), ("b", ()), ("c", ("--reset-optimizer",)), ("d", ("--reference-reset", "0"))):
        inline(tmp_path / name, *short, *extra)
        weights.append(final_weights(tmp_path / name)[WEIGHT])
    assert torch.equal(weights[0], weights[1])
    assert len({tuple(w.flatten().tolist()) for w in weights}) == 3


@pytest.mark.parametrize("flows", [("--run.synchronous-rounds",), ()], ids=["rounds", "flow"])
def test_processes_sharpen_alike_and_their_account_closes(tmp_path: Path, flows: tuple[str, ...]) -> None:
    path = tmp_path / "run"
    summary = processes(path, *ORACLE, "--steps", "300", "--reference-reset", "150", "--searchers", "2", *flows)
    assert distance_at(path, Version(0, 150), BETA) <= 0.02
    assert distance(path, BETA / 2) <= 0.02
    assert [r["step"] for r in summary.reference_resets] == [150]
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    assert_scored_afresh(path, [Version(0, 150)])


Start = Callable[..., tuple[SearcherLoop, TrainerLoop]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Both halves of a run in this process: the reference is reset after every 3rd step."""
    with ExitStack() as closers:

        def started(
            *overrides: str, ahead: bool = False, close: bool = True, background: bool = False
        ) -> tuple[SearcherLoop, TrainerLoop]:
            quick = ("--evaluation.problems", "1", "--replay.pacing.warm-up", "64", "--group-size", "8")
            recipe, run = made(tmp_path / "run", *quick, "--reference-reset", "3", "--steps", "12", *overrides)
            search = start_searching(recipe, run, 0, background=background)
            closers.callback(search.close)
            train = start_training(recipe, run, stop=lambda: False, prefetch=ahead)
            if close:
                closers.callback(train.close)
            train.batches.fill = search.searcher.round
            return search, train

        yield started


def steps(train: TrainerLoop, count: int) -> None:
    for _ in range(count):
        train.step()


@pytest.mark.parametrize("ahead", [True, False])
def test_the_step_after_a_reset_trains_under_the_new_reference_also_when_a_batch_was_fetched_ahead(
    start: Start, ahead: bool
) -> None:
    search, train = start("--replay.pacing.max-mean-uses", "100", ahead=ahead, close=False)
    search.searcher.round()
    references = []
    while not train.finished:
        train.batches.wait_for_prefetch()  # at each reset but the last a batch of the old one is there
        steps(train, 1)
        references.append({g.reference for g in train.trainer.groups})
    assert references == [{Version(0, 3 * (step // 3))} for step in range(12)]
    train.close()
    assert train.replay.ledger()["trained_total_trajectories"] == sum(train.lags.values()) == 12 * 2 * 8
    assert [r["step"] for r in train.references.resets] == [3, 6, 9]  # nothing would be trained under a fourth


def test_a_reset_between_two_syncs_sends_its_weights_out_and_names_itself_beside_them(start: Start) -> None:
    _, train = start("--sync-every", "5")
    named = []
    for _ in range(12):
        steps(train, 1)
        newest = train.weights.newer_than(None)
        assert newest is not None
        named.append((newest.version.step, newest.manifest.reference))
    expected = [0, 0, 3, 3, 5, 6, 6, 6, 9, 10, 10, 10]
    assert named == [(step, Version(0, min(9, 3 * (step // 3)))) for step in expected]


def pinned(train: TrainerLoop) -> list[int]:
    return [v.step for v in train.weights.versions() if "reference" in train.weights.pins(v)]


def test_a_reference_is_kept_while_trajectories_or_a_checkpoint_need_it_and_then_it_goes(start: Start) -> None:
    search, train = start("--steps", "100", "--rescored-per-round", "10")
    for _ in range(10):
        steps(train, 1)
        needed = {v.step for v in (*train.replay.references, train.references.current)} - {0}
        assert needed <= set(pinned(train))
    assert pinned(train) == [3, 6, 9]  # 10 a round are too few to have all of them moved to the newest

    def steps_all_scored(count: int) -> None:
        for _ in range(count):
            while train.replay.metrics()["replay_unscored"]:
                search.searcher.round()
                train.replay.drain()
            steps(train, 1)

    steps_all_scored(6)
    assert pinned(train) == [12, 15]
    train.checkpoint()
    steps_all_scored(12)
    assert pinned(train) == [15, 24, 27]
    train.checkpoint()
    steps_all_scored(1)
    train.checkpoint()  # and the one that was made under version 15 goes
    steps_all_scored(2)
    assert pinned(train) == [27, 30]


def test_a_searcher_that_restarts_after_a_reset_scores_under_the_reference_of_now(start: Start) -> None:
    _, train = start()
    steps(train, 8)
    train.replay.drain()
    again = start_searching(train.recipe, train.run, 0, attempt=1)
    assert again.searcher.reference.version == Version()
    count = again.searcher.round()
    again.close()
    with JournalFollower(train.run.journal(train.recipe)) as journal:
        sent = journal.drain()[-count:]
    reference = TabularReference(TASK)
    reference.load(train.weights.at(Version(0, 6)).read(), Version(0, 6))
    for t in sent:
        assert t.reference == Version(0, 6)
        np.testing.assert_array_equal(t.log_reference, reference.log_probabilities(t.prompt, [t.completion])[0])


def test_a_searcher_goes_back_to_the_first_reference_with_a_trainer_that_resumes_from_before_the_first_reset(
    start: Start,
) -> None:
    search, train = start("--steps", "100", close=False)
    steps(train, 2)
    train.checkpoint()
    steps(train, 1)
    search.searcher.round()
    assert search.searcher.reference.version == Version(0, 3)
    train.close()
    train.run.begin_again("resumed")
    resumed = start_training(train.recipe, train.run, stop=lambda: False, prefetch=False)
    with closing(resumed):
        assert resumed.references.current == Version()
        search.searcher.round()
        assert search.searcher.reference.version == Version()
        with JournalFollower(train.run.journal(train.recipe)) as journal:
            t = journal.drain()[-1]
        assert t.reference == Version()
        expected = TabularReference(TASK).log_probabilities(t.prompt, [t.completion])[0]
        np.testing.assert_array_equal(t.log_reference, expected)
        resumed.batches.fill = search.searcher.round
        steps(resumed, 2)
        assert search.searcher.reference.version == Version(1, 3)


def test_the_reference_of_the_best_checkpoint_stays_with_it(start: Start) -> None:
    search, train = start("--steps", "100", "--run.checkpoints", "2", close=False)
    steps(train, 4)
    train.checkpoint()
    with closing(EvaluationWriter(train.run.path)) as writer:
        writer.write([Evaluation(Version(0, 4), 1.0, "greedy", 1.0, 100)])
    for _ in range(12):
        steps(train, 1)
        train.checkpoint()
    best, *newer_checkpoints = checkpoints_in(train.run.checkpoints)
    assert best[1] == Version(0, 4)
    for path, _ in newer_checkpoints:
        shutil.rmtree(path)
    train.close()
    train.run.begin_again("resumed")
    with closing(start_training(train.recipe, train.run, stop=lambda: False, prefetch=False)) as resumed:
        assert resumed.references.current == Version(0, 3)
        search.searcher.round()
        assert search.searcher.reference.version == Version(0, 3)


def test_a_reference_that_its_thread_is_using_is_not_replaced_meanwhile(start: Start, monkeypatch: Any) -> None:
    search, train = start(background=True)
    searcher, reference = search.searcher, search.searcher.reference
    entered, leave = threading.Event(), threading.Event()
    score, used_versions = reference.log_probabilities_of, []

    def slow(answers: Any) -> Any:
        entered.set()
        leave.wait(20)
        used_versions.append(reference.version)
        return score(answers)

    def round_and_drain() -> None:
        searcher.round()
        searcher.drain()

    train.batches.fill = round_and_drain
    steps(train, 2)
    monkeypatch.setattr(reference, "concurrent", True, raising=False)
    monkeypatch.setattr(reference, "log_probabilities_of", slow)
    for _ in range(1000):
        if not entered.is_set():
            searcher.round()
    assert entered.is_set()
    assert reference.version == Version()
    train.batches.fill = lambda: None
    steps(train, 1)  # resets the reference
    threading.Timer(0.2, leave.set).start()
    searcher.pull()  # as one does that is ahead: the newer weights have another reference
    assert used_versions[0] == Version()
    assert reference.version == Version(0, 3)
    searcher.drain()
    with JournalFollower(train.run.journal(train.recipe)) as journal:
        trajectories = journal.drain()
    for t in trajectories:
        if t.reference == Version():
            expected = TabularReference(TASK).log_probabilities(t.prompt, [t.completion])[0]
            np.testing.assert_array_equal(t.log_reference, expected)


def test_a_searcher_that_has_just_evaluated_the_newest_version_sees_its_reference_all_the_same(start: Start) -> None:
    search, train = start("--sync-every", "3", "--evaluation.every", "3")
    search.evaluate()
    steps(train, 3)
    search.evaluate()
    assert search.searcher.engine.version == Version(0, 3)
    assert search.searcher.reference.version == Version()
    search.searcher.round()
    assert search.searcher.reference.version == Version(0, 3)


def test_a_fresh_optimizer_counts_its_updates_from_the_reset(start: Start) -> None:
    _, train = start("--reset-optimizer")
    counts = []
    for _ in range(7):
        steps(train, 1)
        state = train.trainer.optimizer._adamw.state_dict()["state"]
        counts.append([int(s["step"]) for s in state.values()])
    assert counts == [[1], [2], [], [1], [2], [], [1]]


def test_what_a_searcher_scored_again_is_counted_apart(start: Start) -> None:
    search, train = start("--rescored-per-round", "5")
    search.searcher.round()
    steps(train, 4)
    counts = train.journal.counters()["searcher-0"]
    assert counts["rescored_trajectories"] > 0
    assert counts["rescored_trajectories"] % 5 == 0
    assert counts["rescored_tokens"] >= counts["rescored_trajectories"]


def test_a_reference_that_the_run_began_again_with_is_not_due_once_more(start: Start) -> None:
    """A first step after the resume that is skipped leaves the version as it was published."""
    _, train = start("--steps", "100")
    steps(train, 3)
    assert train.references.current == Version(0, 3)
    assert not train.references.is_due(Version(1, 3))
    assert train.references.is_due(Version(1, 6))


def test_settings_that_no_reset_could_keep_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--reference-reset is -1: give a number of updates, or 0 for never"):
        made(tmp_path / "a", "--reference-reset", "-1")
    with pytest.raises(UserError, match=r"--rescored-per-round is 0, it must be at least 1"):
        made(tmp_path / "c", "--rescored-per-round", "0")


def test_without_resets_nothing_is_asked_pinned_or_recorded(tmp_path: Path) -> None:
    summary = inline(tmp_path / "run", "--steps", "5", "--evaluation.problems", "1")
    assert summary.reference_resets == []
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["reference_resets"] == []
    assert {"reference_step"} & set(read_metrics(tmp_path / "run")[0]) == set()
    assert TabularModel(TASK).reference(1.0, Version()).version == Version()
