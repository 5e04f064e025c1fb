"""Options of commands that are no settings of a recipe and belong to no other module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainOptions:
    """Where a run goes."""

    run_name: str | None = None  # its folder's name; none: the recipe's, with a number
    runs: Path = Path("runs")  # the folder of runs
    data: Path | None = None  # a file of answers, or another run: imported before the run begins


@dataclass(frozen=True)
class ResumeOptions:
    """Which run goes on, and what is accepted for it."""

    resume: Path | None = None  # a run's folder
    accept_lost_rows: bool = False  # go on though the journal has lost trajectories; they are counted as damaged


@dataclass(frozen=True)
class OutOptions:
    """Where a model goes."""

    out: Path | None = None  # the folder to make


@dataclass(frozen=True)
class EvalOptions:
    """What `tba eval` evaluates, and where its figures go."""

    checkpoint: str | None = None  # a folder in the Hugging Face layout, a run (its newest checkpoint), or a Hub name
    split: str = "eval"  # whose problems, train or eval
    out: Path | None = None  # per-problem scores as JSON
    texts: Path | None = None  # the answers, as JSON Lines: prompt, response, what it was marked
    distance: int = 0  # prompts on which KL and perplexity to the recipe's own model are measured; 0: they are not
