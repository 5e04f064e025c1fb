"""A run that is left at one step and taken up again: the same run, where it was, with all that it had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import final_weights, inline, inline_again
from safetensors.torch import load_file

from tba.record.metrics import read_metrics
from tba.replay.journal import JournalFollower
from tba.train.checkpoint import newest_checkpoint
from tba.types import Sampling, Version

SHORT = ("--evaluation.problems", "1", "--samples-per-prompt", "8", "--group-size", "8", "--record.samples", "0")
RUN = (*SHORT, "--replay.pacing.warm-up", "32", "--steps", "60", "--run.checkpoint-every", "20")
SAME = ("loss", "reward", "lag", "lag_max", "log_ratio", "grad_norm", "lr", "replay_trajectories", "groups_recent")


class PowerCut(Exception):
    """Where a run is cut off."""


@dataclass
class Cut:
    """Draws plain settings until the first round after `step` steps of the run at `path`."""

    path: Path
    step: int
    cut: list[int]

    def draw(self, rng: np.random.Generator) -> Sampling:
        rows = read_metrics(self.path)
        if not self.cut and rows and rows[-1]["step"] >= self.step:
            self.cut.append(1)
            raise PowerCut
        return Sampling()

    full_support = True
    greedy = False


def test_a_run_cut_off_at_a_checkpoint_and_taken_up_again_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path,
) -> None:
    """The round that was under way had leased its prompts; they are handed out again, to the same draws."""
    whole = inline(tmp_path / "whole", *RUN)
    path = tmp_path / "cut"
    exploration = Cut(path, 20, [])
    with pytest.raises(PowerCut):
        inline(path, *RUN, exploration=exploration)
    assert not (path / "summary.json").exists()
    again = inline_again(path, exploration=exploration)
    assert torch.equal(final_weights(path)["prefix.logits"], final_weights(tmp_path / "whole")["prefix.logits"])
    for file in ("optimizer.safetensors",):
        one, other = (load_file(run / "checkpoints" / "step-60" / file) for run in (path, tmp_path / "whole"))
        assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    rows = [read_metrics(run) for run in (tmp_path / "whole", path)]
    assert [row["step"] for row in rows[1]] == list(range(1, 61))
    assert [[row[name] for name in SAME] for row in rows[0]] == [[row[name] for name in SAME] for row in rows[1]]
    assert [row["version"] for row in rows[1]][19:21] == ["0.20", "1.21"]
    assert (again.tokens, again.trajectories, again.lag) == (whole.tokens, whole.trajectories, whole.lag)
    assert (tmp_path / "whole" / "uses.jsonl").read_bytes() == (path / "uses.jsonl").read_bytes()
    assert again.trajectories.closes()
