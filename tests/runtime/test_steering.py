"""The controller in a run, and both sides easing off: what is moved and recorded, and that nothing waits for ever."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import final_weights, inline, made

from tba.errors import UserError
from tba.record.metrics import read_metrics
from tba.replay.buffer import Buffer
from tba.replay.selection import BatchRequest
from tba.runtime.searcher_loop import LONGEST_HELD_BACK, SearcherLoop, start_searching
from tba.runtime.trainer_loop import TrainerLoop, start_training
from tba.types import Group

Start = Callable[..., tuple[SearcherLoop, TrainerLoop]]
SMALL = (
    "--evaluation.problems",
    "1",
    "--replay.pacing.warm-up",
    "64",
    "--group-size",
    "8",
)  # batches of 16, rounds of 64
STALE = (*SMALL, "--steps", "60", "--sync-every", "8", "--replay.selection.m", "0.5", "--control.every", "5")
LAG = ("--control.signal", "lag", "--control.lower-bound", "4", "--control.upper-bound", "6")
ESS = ("--control.signal", "ess", "--control.lower-bound", "0.97", "--control.upper-bound", "0.995")

MOVED = ("sync_every", "m")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Both halves of a run of the toy in this process, as a runtime would start them."""
    with ExitStack() as closers:

        def started(*overrides: str) -> tuple[SearcherLoop, TrainerLoop]:
            # what flows is sent by the clock; these tests count what each round has brought
            recipe, run = made(tmp_path / "run", *SMALL, "--run.synchronous-rounds", *overrides)
            search = start_searching(recipe, run, 0)
            closers.callback(search.close)
            train = start_training(recipe, run, stop=lambda: False, prefetch=False)
            closers.callback(lambda: train.close())  # unless the test has ended it
            return search, train

        yield started


def test_the_controller_moves_k_and_m_and_every_move_is_on_record(tmp_path: Path) -> None:
    summary = inline(tmp_path / "run", *STALE, *LAG)
    assert len(summary.control) >= 2
    k, m = 8, 0.5
    for change in summary.control:
        assert (change["signal"], change["step"] % 5) == ("lag", 0)
        stale = change["value"] > 6
        assert change["sync_every"] == (max(1, k // 2) if stale else min(16, 2 * k))
        assert change["m"] == pytest.approx(min(1.0, m + 0.1) if stale else max(0.5, m - 0.1))
        k, m = change["sync_every"], change["m"]
    values, moves = (8, 0.5), {change["step"]: change for change in summary.control}
    for row in read_metrics(tmp_path / "run"):
        assert tuple(row[name] for name in MOVED) == values
        if row["step"] in moves:
            values = tuple(moves[row["step"]][name] for name in MOVED)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["control"] == list(summary.control)


def test_equal_runs_are_steered_equally_to_the_same_weights(tmp_path: Path) -> None:
    summary, other_summary = (inline(tmp_path / name, *STALE, *ESS) for name in ("first", "second"))
    assert summary.control == other_summary.control
    assert summary.control
    weights, other_weights = final_weights(tmp_path / "first"), final_weights(tmp_path / "second")
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_with_the_controller_off_nothing_is_moved_and_nothing_recorded_of_it(start: Start) -> None:
    search, train = start("--sync-every", "1")
    search.round()
    train.step()
    assert not {*MOVED} & read_metrics(train.run.path)[-1].keys()
    assert train.controller.changes == []
    assert train.state().steering is None
    newest = train.weights.newer_than(None)
    assert newest is not None
    assert newest.manifest.wanted is None


def test_a_move_holds_for_the_trainer_and_the_replay_and_after_a_resume(start: Start, tmp_path: Path) -> None:
    """Any lag is fresh: k doubles up to its bound, while m is at its own from the beginning."""
    flags = ("--sync-every", "4", "--steps", "100", "--control.signal", "lag", "--control.every", "1")
    search, train = start(*flags, "--control.lower-bound", "1e8", "--control.upper-bound", "1e9")
    assert (train.trainer.sync_every, train.replay.sync_every) == (4, 4)
    for _ in range(12):
        search.searcher.round()
        train.step()
    moved = train.controller.sync_every, train.controller.m
    assert moved == (16, 0.5)
    assert (train.trainer.sync_every, train.replay.sync_every, train.replay.m) == (16, 16, 0.5)
    train.checkpoint()
    train.close()  # a run has one trainer
    train.close = lambda: None
    train.run.begin_again("resumed")
    again = start_training(train.recipe, train.run, stop=lambda: False, prefetch=False)
    assert (again.trainer.sync_every, again.replay.sync_every, again.replay.m) == (16, 16, 0.5)
    assert again.controller.changes == train.controller.changes
    again.close()


def test_a_selection_without_an_m_cannot_be_controlled(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Oldest:
        """No setting at all."""

        def start(self) -> Oldest:
            return self

        def select(self, store: Buffer, request: BatchRequest, rng: np.random.Generator) -> list[Group]:
            return []

    recipe, _ = made(tmp_path / "run")
    odd = replace(recipe.replay, selection=Oldest())
    with pytest.raises(UserError, match="Oldest has no m to adjust"):
        replace(recipe, replay=odd, control=replace(recipe.control, signal="ess"))


def test_searchers_that_are_ahead_ease_off_until_the_trainer_has_caught_up(start: Start) -> None:
    search, train = start(
        "--replay.pacing.samples-per-insert", "1", "--replay.pacing.saved-batches", "1", "--sync-every", "5"
    )
    for _ in range(3):
        search.round()
    assert search.journal.rows() == 192 >= 64 + (5 + 1) * 16  # what version 0 wants
    for _ in range(3):
        search.round()
    assert (search.journal.rows(), search.searcher.rounds) == (192, 3)
    assert search.clock.seconds()["paced"] > 0
    for _ in range(5):
        train.step()
    search.round()
    assert (search.journal.rows(), search.searcher.rounds) == (256, 4)


def test_a_searcher_does_not_ease_off_for_ever(start: Start) -> None:
    search, _ = start(
        "--replay.pacing.samples-per-insert", "1", "--replay.pacing.saved-batches", "1", "--sync-every", "5"
    )
    for _ in range(4):
        search.round()
    assert search.searcher.rounds == 3
    search.held_back_since = time.monotonic() - LONGEST_HELD_BACK - 1
    search.round()
    assert (search.searcher.rounds, search.held_back_since) == (4, None)


@pytest.mark.parametrize("uses", [0.5, 1.0, 8.0])
def test_taking_turns_uses_keep_up_with_what_comes_within_the_band(tmp_path: Path, uses: float) -> None:
    """By itself a turn is 5 batches of 16 for a round of 64: 1.25 uses."""
    summary = inline(
        tmp_path / "run", *SMALL, "--sync-every", "5", "--steps", "60", "--replay.pacing.saved-batches", "2",
        "--replay.pacing.samples-per-insert", str(uses),
    )  # fmt: skip
    account = summary.trajectories
    balance = uses * (account.generated - 64) - account.trained_total
    assert account.trained_total == 60 * 16
    assert -2 * 16 <= balance <= (2 + 5) * 16 + uses * (64 + 1)
