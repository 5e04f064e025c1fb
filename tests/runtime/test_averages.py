"""Averaged weights: evaluated, saved and linked as the best; never sampled from, and no reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from runs import inline, made
from safetensors.torch import load_file

from tba.record.evaluations import read_evaluations
from tba.replay.follower import JournalFollower
from tba.runtime.searcher_loop import start_searching
from tba.runtime.trainer_loop import start_training
from tba.types import Version
from tba.weights.directory import WeightDirectory
from toy.policy import WEIGHT

SHORT = ("--steps", "30", "--evaluation.every", "10", "--sync-every", "1", "--run.checkpoint-every", "10")


def saved(run: Path, file: str) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-30" / file)


def test_a_run_with_averages_is_the_run_without_but_for_what_it_evaluates_and_saves(tmp_path: Path) -> None:
    """The reference is reset twice, so that any average among references or behaviour would change the weights.

    They agree to 1e-4, not to the bit: after the first evaluation of an average the engine reads version 0 in float32,
    which otherwise it has from the task in float64.
    """
    resets = ("--reference-reset", "12")
    inline(tmp_path / "plain", *SHORT, *resets)
    summary = inline(tmp_path / "run", *SHORT, *resets, "--optimizer.weight-average")
    optimizer = saved(tmp_path / "run", "optimizer.safetensors")
    weights, average = saved(tmp_path / "plain", "model.safetensors")[WEIGHT], optimizer["0.average"]
    raw = optimizer["0.raw"]
    torch.testing.assert_close(raw, weights, rtol=0, atol=1e-4)
    assert torch.equal(saved(tmp_path / "run", "model.safetensors")[WEIGHT], average)
    assert 0.01 < float((average - raw).abs().max()) < 1
    directory = WeightDirectory(tmp_path / "run" / "weights")
    assert directory.newest() == Version(0, 30)
    assert torch.equal(directory.at(Version(0, 30)).read()[WEIGHT], raw)
    assert torch.equal(directory.at(Version.parse("0.30a")).read()[WEIGHT], average)
    assert sorted({e.version for e in summary.evaluations}) == [Version(0, step) for step in (0, 10, 20, 30)]
    with JournalFollower(tmp_path / "run" / "journal.sqlite") as journal:
        assert not any(v.is_average for t in journal.drain() for v in t.completion.versions)


def test_what_is_evaluated_is_the_average_and_the_next_round_is_of_the_weights(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", *SHORT, "--optimizer.weight-average")
    search = start_searching(recipe, run, 0)
    train = start_training(recipe, run, lambda: False, prefetch=False, turn_taker=search)
    loaded: list[tuple[Version, torch.Tensor]] = []
    load = search.searcher.engine.load

    def told(weights: Any, version: Version) -> None:
        loaded.append((version, weights[WEIGHT].clone()))
        load(weights, version)

    search.searcher.engine.load = told
    try:
        while train.trainer.version.step < 10:
            train.step()
        search.evaluate()
        search.searcher.round()
        measured = [(v, w) for v, w in loaded if v.is_average]
        assert [v for v, _ in measured] == [Version(0, 0).average, Version(0, 10).average]
        weights = train.trainer.policy.weights()[WEIGHT].clone()
        assert loaded[-1][0] == Version(0, 10)
        assert torch.equal(loaded[-1][1], weights)
        with train.trainer.optimizer.averages():
            assert torch.equal(measured[-1][1], train.trainer.policy.weights()[WEIGHT])
        assert {str(e.version) for e in read_evaluations(run.path)} == {"0.0", "0.10"}
    finally:
        train.close()
        search.close()
