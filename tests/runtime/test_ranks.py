"""A trainer of two ranks, in processes: it trains, outlives the death of a rank, and one process can go on from it."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import SECONDS, children, inline_again, made, quiet, steps_of, until

from tba.errors import UserError
from tba.runtime.local.processes import Processes
from tba.runtime.reporting import summarise
from tba.sharding import Sharding
from tba.training.ranks.messages import RankSettings
from toy.recipe import recipe

SUMS = Path(__file__).parents[1] / "tiny_sums.py"


def test_a_run_on_two_ranks_survives_the_death_of_either_and_goes_on_with_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    several = ("--runtime", "processes", "--trainer.ranks", "2", "--run.checkpoint-every", "2", "--steps", "24")
    recipe, run = made(path, *several, source=SUMS)
    recipe.model.prepared(recipe.task)
    killed = []

    def kill_one() -> None:
        until(lambda: steps_of(path) >= 3, SECONDS, "the first steps")
        killed.append(children(os.getpid()))
        os.kill(killed[0]["trainer-1"], signal.SIGKILL)

    murder = threading.Thread(target=kill_one)
    murder.start()
    driver = Processes(recipe, run, quiet)
    faults = driver.go()
    murder.join()
    summary = summarise(recipe, run, driver.searchers, faults, 0.0)
    assert set(killed[0]) == {"trainer", "trainer-1", "searcher-0"}
    assert summary.steps == 24
    assert summary.faults["trainer_restarts"] == 1
    assert summary.trajectories.closes()
    assert children(os.getpid()) == {}

    again = inline_again(path, "--runtime", "inline", "--trainer.ranks", "1", "--steps", "26")
    assert again.steps == 26
    assert again.trajectories.closes()


def test_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"--trainer\.ranks is 0"):
        RankSettings(ranks=0)
    with pytest.raises(UserError, match="inline runtime has one process"):
        replace(recipe, runtime="inline", trainer=RankSettings(ranks=2))
    with pytest.raises(UserError, match="tabular"):
        recipe.model.policy(1.0, sharding=Sharding(None, torch.float32))
