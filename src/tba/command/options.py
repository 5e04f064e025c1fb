"""Options of commands that are not settings of a recipe. They stand apart from what the commands load.

Invariant: nothing heavy is imported here, so that `tba COMMAND --help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tba.errors import UserError


@dataclass(frozen=True)
class TrainOptions:
    """Says where a run is stored, and what it begins with."""

    run_name: str | None = None  # name of the run's folder; none: the recipe's name and a number
    runs: Path = Path("runs")  # the folder of all runs
    data: Path | None = None  # a file of answers, or another run, to import before the run begins
    epochs: float | None = None  # how long the run is, as passes over the training prompts; none: --steps says it


@dataclass(frozen=True)
class ResumeOptions:
    """Says whether lost data are accepted."""

    accept_lost_rows: bool = False  # resume even if the journal has lost trajectories; they are counted as damaged
    runs: Path = Path("runs")  # the folder to which a run is copied back from its backup


@dataclass(frozen=True)
class EvalOptions:
    """Says which model is evaluated on which problems, and where results are written."""

    checkpoint: str | None = None  # a folder in the Hugging Face layout, a run (its newest checkpoint), or a Hub name
    split: str = "eval"  # the problems' split, train or eval
    out: Path | None = None  # file for the scores of each problem, as JSON
    texts: Path | None = None  # file for the answers, as JSON Lines: prompt, response, score
    against: Path | None = None  # a file of --out, of the same problems: prints the paired differences to it
    distance: int = 0  # prompts on which KL and perplexity to the recipe's own model are measured; 0: none


@dataclass(frozen=True)
class SearchOptions:
    """Names the run that the searcher joins, and how it reaches it."""

    run: Path | None = None  # the folder of a run in progress on this machine; with --address, its name
    address: str | None = None  # HOST:PORT of the Ray cluster that the run is in
    endpoint: str | None = None  # base URL of an OpenAI-compatible API, whose model answers in place of the run's
    model: str | None = None  # its name there
    key_env: str = "OPENAI_API_KEY"  # the environment variable with its key; none is sent where that is unset
    api: Literal["chat", "completions"] | None = None  # none: chat if the run's prompts are chats, else completions
    temperature: float = 1.0  # at which it answers
    budget_tokens: int | None = None  # of prompts and answers together, before the searcher leaves
    budget_calls: int | None = None  # calls, each for one answer, before the searcher leaves

    def __post_init__(self) -> None:
        settings = ("model", "api", "budget_tokens", "budget_calls")
        lone_setting = next((name for name in settings if getattr(self, name) is not None), None)
        if self.endpoint is None and lone_setting is not None:
            raise UserError(f"--{lone_setting.replace('_', '-')} is of an endpoint: give --endpoint URL too")


@dataclass(frozen=True)
class ServeOptions:
    """Names the run that is served, and says who may call and how much."""

    run: Path | None = None  # the folder of a run in progress on this machine; with --address, its name
    address: str | None = None  # HOST:PORT of the Ray cluster that the run is in
    host: str = "127.0.0.1"  # the address to listen at; another than this machine's own needs --certificate
    port: int = 8077  # 0: any that is free
    names: str = ""  # further names under which agents reach the server, with commas between them
    certificate: Path | None = None  # a file with the TLS certificate and its key
    tokens: Path | None = None  # a JSON object of tokens by the name of their owner; none: one is made for this server
    max_tokens: int | None = None  # tokens of an episode in all; none: the longest answer of the run's engine
    max_calls: int = 256  # calls of an episode
    episodes: int = 256  # that are open at once, of one token
    idle_seconds: float = 600.0  # without a call, after which an episode is ended and graded as it is

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_calls", "episodes", "idle_seconds"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UserError(f"--{name.replace('_', '-')} is {value}: give a number above 0")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"--port is {self.port}: give a number from 0 (any that is free) to 65535")


@dataclass(frozen=True)
class ImportOptions:
    """Says how files are imported."""

    recipe: str | None = None  # the recipe of a new run that is made for the import
    source: str | None = None  # the source that the trajectories are recorded under; none: the file's name
    rewards: Literal["task", "claimed"] = "task"  # the task's own reward, or the one in the line (recorded as claimed)
    max_tokens: int | None = None  # longest answer that is imported; none: the longest that the run's engine samples
    trust: bool = False  # execute the recipe file that the run names


@dataclass(frozen=True)
class SampleOptions:
    """Says what is sampled, and where it is written."""

    out: Path | None = None  # the file to write answers to, as JSON Lines
    samples: int = 4  # answers to each prompt
    prompts: int = 0  # how many prompts of the split, from its beginning; 0: all
    split: str = "train"  # the prompts' split, train or eval
    checkpoint: str | None = None  # the model that answers: a folder, a run or a Hub name; none: the recipe's own

    def __post_init__(self) -> None:
        if self.samples < 1 or self.prompts < 0 or self.split not in ("train", "eval"):
            raise UserError(
                f"--samples is {self.samples}, --prompts {self.prompts}, --split {self.split!r}: give at least 1, "
                "0 (all) or more, and train or eval"
            )


@dataclass(frozen=True)
class PushOptions:
    """Says which checkpoint is shared, how, and what its model card says of the base."""

    out: Path | None = None  # write the folder that would be uploaded here, and upload nothing
    best: bool = False  # the evaluated checkpoint with the highest held-out accuracy, instead of the newest
    private: bool = False  # a new repository can be seen by its owner only
    base: str | None = None  # the base's name on the Hub; none: as the run knows it
    licence: str | None = None  # the model's licence, by the Hub's name for it, such as apache-2.0; none: the base's


@dataclass(frozen=True)
class ReportOptions:
    """Says where the report is written; the same data as JSON are written beside it."""

    out: Path = Path("report.html")  # the page; its data are written beside it, with the ending .json


@dataclass(frozen=True)
class ReplayOptions:
    """Says what to do with a run's journal; without options its contents are counted."""

    sql: str | None = None  # a SELECT over its tables; `facts(body)` returns the contents of a body as JSON
    export: Path | None = None  # a .jsonl or .parquet file to write all trajectories to
    seconds: float = 60.0  # time limit of a query
