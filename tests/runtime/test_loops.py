"""The two halves of a run, called by hand: waiting, pacing, fetching ahead, evaluating."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from runs import made
from torch import Tensor

from lanes import open_lane
from tba.device_to_host import HostCopies
from tba.errors import DeadlineExceeded
from tba.objectives.trajectory_balance import Asymmetric
from tba.protocols import Manifest
from tba.record.evaluations import read_evaluations
from tba.record.faults import read_faults
from tba.record.run_record import RunRecord
from tba.replay.codec import MissingCounts
from tba.replay.follower import JournalFollower
from tba.runtime.batch_queue import StopRequested
from tba.runtime.searcher_loop import SearcherLoop, start_searching
from tba.runtime.trainer_loop import TrainerLoop, start_training
from tba.types import Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import WeightDirectory

Start = Callable[..., tuple[SearcherLoop, TrainerLoop]]
QUICK = ("--evaluation.problems", "1", "--replay.pacing.warm-up", "64", "--group-size", "8")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Both halves of a run of the toy in this process, as a runtime would start them."""
    with ExitStack() as closers:

        def started(*overrides: str, ahead: bool = True, close: bool = True) -> tuple[SearcherLoop, TrainerLoop]:
            recipe, run = made(tmp_path / "run", *QUICK, *overrides)
            search = start_searching(recipe, run, 0)
            closers.callback(search.close)
            train = start_training(recipe, run, stop=lambda: False, prefetch=ahead)
            if close:
                closers.callback(train.close)
            return search, train

        yield started


def rounds(search: SearcherLoop, count: int) -> None:
    for _ in range(count):
        search.searcher.round()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_trainer_trains_exactly_what_it_is_given_with_and_without_fetching_ahead(start: Start, ahead: bool) -> None:
    search, train = start("--steps", "9", ahead=ahead, close=False)
    rounds(search, 5)
    while not train.finished:
        train.step()
    train.batches.wait_for_prefetch()
    fetched = train.replay.buffer.trained_total
    train.close()
    result = json.loads(train.run.result("trainer").read_text())
    assert result["ledger"]["trained_total_trajectories"] == 9 * 2 * 8 == sum(result["lags"].values())
    assert fetched == (10 if ahead else 9) * 2 * 8  # one batch ahead of the last was taken back


@pytest.mark.parametrize("form", ["exact", "asymmetric"])
def test_a_gpu_s_updates_are_recorded_a_step_later_and_nothing_is_lost_or_out_of_order(
    start: Start, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Decided on by the device, here the CPU: every third is published and waited for, a checkpoint follows it. The
    default form remembers earlier batches: a checkpoint has the batches of its own steps, and no more.
    """
    words = ("--steps", "9", "--sync-every", "3", "--run.checkpoint-every", "3", "--objective.off-policy", form)
    search, train = start(*words, close=False)
    train.trainer.optimizer.device_decides = True
    remembered_steps: list[int] = []
    checkpoint = train.checkpoint

    def note_memory() -> None:
        if isinstance(train.trainer.objective, Asymmetric):
            remembered_steps.append(train.trainer.objective.state()[0] - train.trainer.version.step)
        checkpoint()

    monkeypatch.setattr(train, "checkpoint", note_memory)
    rounds(search, 5)
    recorded: list[int] = []
    record = train._record

    def note_version(version_before: Version, *arguments: Any) -> None:
        recorded.append(version_before.step + 1)
        record(version_before, *arguments)

    monkeypatch.setattr(train, "_record", note_version)
    counts = []
    while not train.finished:
        train.batches.wait_for_prefetch()
        train.step()
        counts.append(len(recorded))
    assert counts == [0, 1, 3, 3, 4, 6, 6, 7, 9]
    assert recorded == list(range(1, 10))
    assert [version.step for version in train.weights.versions()][-1] == 9
    train.finish()
    train.close()
    rows = [json.loads(line) for line in (train.run.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 10))
    result = json.loads(train.run.result("trainer").read_text())
    assert result["ledger"]["trained_total_trajectories"] == 9 * 2 * 8 == sum(result["lags"].values())
    assert train.checkpointed_version == Version(0, 9)
    assert remembered_steps == ([0, 0, 0] if form == "asymmetric" else [])


def test_an_update_is_finished_before_the_trainer_waits_for_a_batch(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, train = start("--steps", "9", "--sync-every", "5", "--replay.pacing.max-mean-uses", "0.25")
    train.trainer.optimizer.device_decides = True
    rounds(search, 1)  # for one batch
    train.step()
    assert train.trainer.version.step == 0
    waits: list[int] = []

    def wait_for_batch(*_: object) -> None:
        waits.append(train.trainer.version.step)
        raise StopRequested

    monkeypatch.setattr(train.batches, "next", wait_for_batch)
    train.step()
    assert waits == [1]


def test_fetching_ahead_ends_at_once_even_while_it_is_held_by_the_limit_on_reuse(start: Start) -> None:
    """One batch of 16 for 64 trajectories is all that 0.25 uses allow; the next is waited for until the end."""
    search, train = start("--replay.pacing.max-mean-uses", "0.25", "--steps", "1", close=False)
    rounds(search, 1)
    train.step()
    assert train.finished
    prefetch = train.batches._prefetch
    assert prefetch is not None
    train.close()
    # not its deadline; one that a busy machine has not begun is cancelled
    assert prefetch.cancelled() or isinstance(prefetch.exception(timeout=0), StopRequested)
    assert train.replay.ledger()["trained_total_trajectories"] == 16


def test_steps_go_on_while_a_version_is_written_and_the_next_free_one_publishes(start: Start) -> None:
    search, train = start("--steps", "9", "--sync-every", "1", close=False)
    rounds(search, 5)
    gate = threading.Event()

    class Disk(WeightDirectory):
        def publish(self, weights: Mapping[str, Tensor], version: Version, manifest: Manifest) -> None:
            assert gate.wait(60)
            super().publish(weights, version, manifest)

    disk = Disk(train.run.weights)
    publisher = BackgroundPublisher(disk, deadline=60, copies=HostCopies(open_lane()))  # as of a GPU
    train.weights = train.trainer.weights = publisher
    train.trainer.wait_for_readers = publisher.hold
    for _ in range(3):
        train.step()  # the first is being written
    assert disk.newest() == Version()
    gate.set()
    publisher.settle()
    train.step()
    assert [version.step for version in publisher.versions() if version.step] == [1, 4]
    assert train.versions_left_out == 2
    train.finish()
    assert publisher.newest() == train.trainer.version
    train.close()


def test_a_disk_that_hangs_is_noticed_after_some_versions(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.runtime.trainer_loop._LEFT_OUT", 3)
    search, train = start("--steps", "9", "--sync-every", "1", close=False)
    rounds(search, 5)
    gate = threading.Event()

    class Disk(WeightDirectory):
        def publish(self, weights: Mapping[str, Tensor], version: Version, manifest: Manifest) -> None:
            gate.wait(60)

    publisher = BackgroundPublisher(Disk(train.run.weights), deadline=0.01, copies=HostCopies(open_lane()))
    train.weights = train.trainer.weights = publisher
    train.trainer.wait_for_readers = publisher.hold
    for _ in range(3):
        train.step()
    with pytest.raises(DeadlineExceeded, match="the weights had not been written"):
        train.step()
    gate.set()
    train.close()


def test_a_fault_with_which_an_engine_goes_on_is_recorded_once(start: Start) -> None:
    search, train = start("--steps", "1")
    engine: Any = search.searcher.engine
    search.round()
    engine.fault = "steps are not captured"
    search.round()
    search.round()
    faults = [line["what"] for line in read_faults(train.run.path) if line["kind"] == "slow_engine"]
    assert faults == ["searcher-0: steps are not captured"]


def test_mean_uses_stay_within_the_limit_and_the_waiting_is_called_paced(start: Start) -> None:
    limit, search, train = 0.5, *start("--replay.pacing.max-mean-uses", "0.5", "--steps", "40", ahead=False)
    train.batches.fill = lambda: rounds(search, 1)
    reasons = set()
    while not train.finished:
        train.step()
        used, received = train.replay.buffer.trained_total, train.replay.buffer.received
        assert used <= limit * received
        assert used + 16 + 0.5 * 64 > limit * received  # not held back further than by a batch and a round
        reasons.add(train.replay.ready(2, 8))
    assert reasons == {None, "paced"}


def test_a_trainer_whose_searcher_stands_still_is_held_after_a_few_steps_says_why_and_goes_on_with_the_next_round(
    start: Start,
) -> None:
    """64 trajectories a round, 16 a batch: 8 uses of the newest round are 32 batches, of 640 they would be 320."""
    search, train = start("--run.idle-deadline", "0.2", ahead=False)
    for _ in range(10):
        rounds(search, 1)
        train.step()
    step_before = train.trainer.version.step
    for _ in range(31):
        train.step()
    with pytest.raises(DeadlineExceeded, match=r"for a batch \(paced\): .*--replay\.pacing\.max-mean-uses"):
        train.step()
    assert train.trainer.version.step == step_before + 31
    rounds(search, 1)
    train.step()
    assert train.trainer.version.step == step_before + 32


def test_a_searcher_makes_rounds_between_the_chunks_of_an_evaluation_and_finds_the_same(start: Start) -> None:
    search, train = start("--evaluation.problems", "2", "--evaluation.batch-size", "1", ahead=False)
    rounds(search, 3)
    before = search.searcher.rounds
    search.evaluate(search.round_between)
    assert search.searcher.rounds == before + 3  # two chunks of greedy and two of sampled answers
    assert search.searcher.engine.version == Version()
    counted = read_evaluations(train.run.path)
    again = start_searching(train.recipe, train.run, 1)
    again.examiner.evaluate(Version(), 0.0, train.recipe.evaluation)
    again.close()
    alone = read_evaluations(train.run.path)[len(counted) :]
    assert [(e.metric, e.value, e.n, e.tokens) for e in alone] == [(e.metric, e.value, e.n, e.tokens) for e in counted]


def test_between_the_chunks_of_an_older_versions_evaluation_rounds_have_the_newest_weights(start: Start) -> None:
    search, train = start(
        "--evaluation.problems", "2", "--evaluation.batch-size", "1", "--sync-every", "1", ahead=False
    )
    train.batches.fill = lambda: rounds(search, 1)
    for _ in range(4):
        train.step()
    train.replay.drain()
    before = search.searcher.rounds
    search.evaluate(search.round_between)
    assert {e.version for e in read_evaluations(train.run.path)} == {Version()}
    with JournalFollower(train.run.path / "journal.sqlite") as journal:
        versions = [t.version for t in journal.drain() if t.provenance["round"] >= before]
    assert set(versions) == {Version(0, 4)}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("warm_up", "reason"), [("1000000", "warm_up"), ("0", "empty")])
def test_waiting_for_a_batch_that_never_comes_ends_with_the_reason(
    start: Start, ahead: bool, warm_up: str, reason: str
) -> None:
    _, train = start("--run.idle-deadline", "0.1", "--replay.pacing.warm-up", warm_up, ahead=ahead)
    with pytest.raises(DeadlineExceeded, match=rf"waited 0.1 s for a batch \({reason}\): look at logs/searcher"):
        train.step()


def test_time_held_by_the_limit_on_reuse_is_counted_as_paced_and_not_as_idle(start: Start) -> None:
    search, train = start("--replay.pacing.max-mean-uses", "0.25", "--steps", "2")
    looks = iter(range(30))

    def fill() -> None:  # called in the fetching thread while there is no batch
        if next(looks, None) is None:
            rounds(search, 1)
        else:
            threading.Event().wait(0.01)

    train.batches.fill = fill
    rounds(search, 1)
    train.step()
    train.step()
    assert train.clock.seconds()["paced"] > 0.2
    assert train.clock.share("paced") > train.clock.share("idle")


def test_with_take_in_at_syncs_new_data_are_seen_when_weights_go_out_and_not_before(start: Start) -> None:
    search, train = start("--replay.ingest", "sync", "--sync-every", "3", "--steps", "6", ahead=False)
    rounds(search, 1)
    seen = []
    while not train.finished:
        train.step()
        rounds(search, 1)
        seen.append(train.replay.buffer.received // 64)
    assert seen == [1, 1, 1, 4, 4, 4]


def test_the_journal_keeps_to_the_size_it_is_told_and_what_leaves_is_counted(start: Start) -> None:
    search, train = start("--replay.keep-gb", "0.0006", "--steps", "30", ahead=False)
    train.batches.fill = lambda: rounds(search, 1)
    for _ in range(20):
        rounds(search, 1)
        train.step()
    totals = train.journal.totals()
    assert totals.rows == 20 * 64
    with JournalFollower(train.run.journal(train.recipe)) as follower:
        rows = follower.drain()
        assert len(rows) == totals.rows - totals.retired_rows
        assert follower.take_missing_counts() == MissingCounts(totals.retired_rows, totals.retired_tokens)
    assert 64 <= len(rows) <= 19 * 64


def test_an_evaluation_is_asked_for_at_the_start_every_so_often_and_at_the_end_and_done_once(start: Start) -> None:
    search, train = start("--steps", "10", "--sync-every", "2", "--evaluation.every", "4", ahead=False)
    other_search = start_searching(train.recipe, train.run, 1)
    train.batches.fill = lambda: rounds(search, 1)
    while not train.finished:
        train.step()
        stopping = [half.evaluate() for half in (other_search, search)]
        assert stopping == [train.finished] * 2
    other_search.close()
    evaluations = read_evaluations(train.run.path)
    versions = [e.version for e in evaluations if e.metric == "pass@1/greedy"]
    assert versions == [Version(0, s) for s in (0, 4, 8, 10)]
    assert len(evaluations) == 2 * len(versions)
    counts = train.journal.counters()
    assert counts["searcher-1"]["evaluation_trajectories"] == 2 * len(versions)
    assert "evaluation_trajectories" not in counts["searcher-0"]


def test_what_is_to_be_evaluated_is_kept_until_it_has_been(start: Start) -> None:
    search, train = start("--steps", "12", "--sync-every", "1", ahead=False)
    train.batches.fill = lambda: rounds(search, 1)
    for _ in range(6):
        train.step()
    assert train.weights.versions() == [Version(0, s) for s in (0, 5, 6)]
    search.evaluate()
    assert [e.version for e in read_evaluations(train.run.path)] == [Version(), Version()]
    assert search.searcher.engine.version == Version()
    rounds(search, 1)
    assert search.searcher.engine.version == Version(0, 6)
    train.step()
    assert train.weights.versions() == [Version(0, s) for s in (6, 7)]


def test_an_evaluation_whose_searcher_died_is_done_by_its_successor(start: Start) -> None:
    search, train = start()
    assert search.journal.claim("evaluate 0.0", 3600.0)  # and then it is killed
    search.evaluate()
    assert read_evaluations(train.run.path) == []
    again = start_searching(train.recipe, train.run, 0, attempt=1)
    again.evaluate()
    again.close()
    assert {e.version for e in read_evaluations(train.run.path)} == {Version()}


def test_a_restarted_searcher_draws_other_numbers_than_its_former_self(start: Start) -> None:
    search, train = start()
    again = start_searching(train.recipe, train.run, 0, attempt=1)
    assert search.searcher.rng.random() != again.searcher.rng.random()
    again.close()


@pytest.mark.parametrize("hidden", [True, False])
def test_hidden_text_is_written_nowhere_but_in_the_journal(start: Start, hidden: bool) -> None:
    flag = "--record.hide-text" if hidden else "--record.no-hide-text"
    search, train = start("--record.samples-per-batch", "4", "--record.samples-every", "1", flag, ahead=False)
    rounds(search, 1)
    train.step()
    search.evaluate()
    texts = {t.completion.text for g in train.trainer.groups for t in g.trajectories} - {""}
    written = [p.read_text() for p in train.run.path.glob("*.jsonl")]
    visible_texts = {text for text in texts if any(f'"{text}"' in file for file in written)}
    assert bool(visible_texts) is not hidden
    assert bool(RunRecord.read(train.run.path).answers) is not hidden


def test_lag_is_counted_before_the_update_so_that_fresh_samples_have_none(start: Start) -> None:
    search, train = start("--sync-every", "1", "--replay.selection.m", "1")
    rounds(search, 1)
    train.batches.fill = lambda: rounds(search, 1)
    train.step()
    assert dict(train.lags) == {0: 16}
