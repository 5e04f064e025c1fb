"""Options of commands that are not settings of a recipe and belong to no other module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainOptions:
    """Where a run is stored, and what it begins with."""

    run_name: str | None = None  # name of the run's folder; none: the recipe's name and a number
    runs: Path = Path("runs")  # the folder of all runs
    data: Path | None = None  # a file of answers, or another run, to import before the run begins


@dataclass(frozen=True)
class ResumeOptions:
    """Which run is resumed, and whether lost data are accepted."""

    resume: Path | None = None  # the run's folder
    accept_lost_rows: bool = False  # resume even if the journal has lost trajectories; they are counted as damaged


@dataclass(frozen=True)
class OutOptions:
    """Where a model is written."""

    out: Path | None = None  # the folder to create


@dataclass(frozen=True)
class EvalOptions:
    """Which model is evaluated on which problems, and where results are written."""

    checkpoint: str | None = None  # a folder in the Hugging Face layout, a run (its newest checkpoint), or a Hub name
    split: str = "eval"  # the problems' split, train or eval
    out: Path | None = None  # file for the scores of each problem, as JSON
    texts: Path | None = None  # file for the answers, as JSON Lines: prompt, response, score
    distance: int = 0  # prompts on which KL and perplexity to the recipe's own model are measured; 0: none
