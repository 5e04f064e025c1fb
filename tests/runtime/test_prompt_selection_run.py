"""Runs that choose their prompts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from runs import final_weights, inline, made

from tba.errors import UserError
from tba.replay.follower import JournalFollower
from tba.runtime.searcher_loop import start_searching
from tba.runtime.trainer_loop import start_training
from toy.policy import WEIGHT

SHORT = ("--steps", "20", "--samples-per-prompt", "8", "--replay.pacing.warm-up", "16", "--evaluation.problems", "1")


@pytest.mark.parametrize("selection", ["uniform", "posterior"])
def test_a_run_that_chooses_is_reproducible_to_the_bit_and_its_account_closes(tmp_path: Path, selection: str) -> None:
    weights = []
    for name in ("a", "b"):
        chosen = ("--prompts.selection", selection, "--prompts-per-round", "1")
        summary = inline(tmp_path / name, *SHORT, *chosen)
        weights.append(final_weights(tmp_path / name)[WEIGHT])
        assert summary.trajectories.closes()
        assert summary.tokens.closes()
    assert torch.equal(weights[0], weights[1])


def test_two_searchers_never_hold_one_prompt_and_each_learns_from_both(tmp_path: Path) -> None:
    overrides = ("--prompts.selection", "posterior", "--prompts-per-round", "1", "--searchers", "2")
    recipe, run = made(tmp_path / "run", *SHORT, *overrides)
    train = start_training(recipe, run, stop=lambda: False, prefetch=False)
    halves = [start_searching(recipe, run, i) for i in range(2)]
    prompts = [half.searcher.prompts.take(1)[0] for half in halves]
    assert sorted(prompts) == [[0], [1]]  # there are two prompts
    for half, positions in zip(halves, prompts, strict=True):
        half.journal.put([], positions)
    for _ in range(4):
        for half in halves:
            half.searcher.round()
    outcomes = halves[0].journal.outcomes(0)
    assert len(outcomes) == 8
    assert {successes + failures for _, _, successes, failures in outcomes} == {8.0}
    train.replay.drain()
    with JournalFollower(run.journal(recipe)) as journal:
        sums = Counter[int]()
        positions = {key: i for i, key in enumerate(p.key for p in halves[0].searcher.prompts.prompts)}
        for t in journal.drain():
            sums[positions[t.prompt.key]] += t.reward
    for position, total in sums.items():
        assert sum(s for _, p, s, _ in outcomes if p == position) == pytest.approx(total)
    for half in halves:
        half.close()
    train.close()


def test_choosing_needs_as_many_prompts_as_are_answered_at_once(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", "--prompts.selection", "uniform", "--searchers", "2")
    with pytest.raises(
        UserError, match=r"--prompts.selection is uniform, but 2 searchers answer 4 different prompts at"
    ):
        start_searching(recipe, run, 0)
