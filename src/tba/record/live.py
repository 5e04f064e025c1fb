"""The live view of a run: a table on a terminal, a short line now and then when there is none.

Invariant: it shows snapshots that it is given and does not touch the run; a number that is not known yet is shown as
`-`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tba.record.terminal import terminal
from tba.record.text import duration, percent, printable, short_number

NOT_YET = "-"
_LOOK = 0.5  # seconds between two updates on a terminal
STATUS_SECONDS = 10.0  # between two lines of progress when there is no terminal


@dataclass(frozen=True)
class Status:
    """One snapshot of a run. Shares are of wall-clock after warm-up, 0..1; None: not known yet."""

    step: int
    steps: int  # optimizer steps the run is to take
    elapsed_seconds: float  # since the run began
    training_seconds: float = 0.0  # of these, since the first optimizer step of this process
    phase: str = "training"  # starting, warm-up, training, evaluating, stopping
    reward: float | None = None  # this and the next four are means of the newest 50 steps
    parts: Mapping[str, float] = field(default_factory=dict)  # of the reward, by name, where it has several
    log_ratio: float | None = None  # of policy to reference, nats per completion
    lag: float | None = None  # trainer updates since sampling
    ess: float | None = None  # effective sample size, as a share of a batch's rows
    accuracy: Mapping[str, float] = field(default_factory=dict)  # held-out figures of `evaluated`, by metric
    evaluated: int | None = None  # the step of the newest version that has such figures
    evaluating: int = 0  # versions that a searcher evaluates, or is to
    generated_rate: float | None = None  # completion tokens per second, all searchers
    trained_rate: float | None = None  # completion tokens per second, every use counted
    trainer_idle: float | None = None
    trainer_paced: float | None = None
    searcher_evaluating: float | None = None  # of the searchers' wall-clock
    note: str = ""  # something that went wrong and was survived

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the last step at the mean pace so far; None before the first step."""
        if self.step <= 0 or self.training_seconds <= 0:
            return None
        return (self.steps - self.step) * self.training_seconds / self.step


class LiveView:
    """Shows a run while it goes: a context manager, given a `Status` when one is due."""

    def __init__(self, console: Console | None = None, every_seconds: float = 10.0, title: str = "") -> None:
        self.console = console or terminal()
        self.every_seconds = every_seconds
        self.title = title
        self._table: Live | None = None
        self._last: Status | None = None
        self._printed: Status | None = None
        self._next = 0.0

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self._table = Live(console=self.console, refresh_per_second=4)
            self._table.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._table is not None:
            self._table.stop()
            self._table = None
        elif self._last is not None and self._last is not self._printed:
            self._print(self._last)

    def due(self) -> bool:
        """Returns whether to update it now: reading the run's files for a status costs more than a tiny step."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + (_LOOK if self.console.is_terminal else self.every_seconds / 4)
        return True

    def update(self, status: Status) -> None:
        """Show `status`; without a terminal, only the first, each new phase, and one every `every_seconds`."""
        self._last = status
        if self._table is not None:
            self._table.update(status_table(status, self.title))
            return
        before = self._printed
        if (
            before is None
            or status.phase != before.phase
            or status.elapsed_seconds - before.elapsed_seconds >= self.every_seconds
        ):
            self._print(status)

    def _print(self, status: Status) -> None:
        self._printed = status
        self.console.print(status_line(status), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class View:
    """Shows the lines that are said of a run, and its state, on a console."""

    console: Console

    def say(self, message: str) -> None:
        """Print a line for people, a note in yellow."""
        style = "yellow" if message.startswith("note: ") else None
        self.console.print(Text(printable(message)), style=style, soft_wrap=True)

    def live(self, title: str) -> LiveView:
        """Returns a view of a run's state, to enter."""
        return LiveView(self.console, STATUS_SECONDS, title)


def status_line(status: Status) -> str:
    """Returns one short line of what is known by now."""
    known = [f"{name} {text}" for name, text in _texts(status, ", ", _at(status)).items() if text != NOT_YET]
    head = [f"{duration(status.elapsed_seconds):>8}", f"step {status.step}/{status.steps}"]
    phase = "" if status.phase == "training" else status.phase
    return " | ".join(part for part in (*head, phase, *known, status.note) if part)


def status_table(status: Status, title: str = "") -> Group:
    """Returns a status as a table for 80 columns; its figures of batches are means of the newest 50 steps."""
    text = _texts(status, "   ")
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(printable(title or status.phase, 24, newlines=False), style="bold"),
        ProgressBar(total=max(1, status.steps), completed=status.step, width=16),
        Text(f"step {status.step}/{status.steps}"),
        Text(f"{duration(status.elapsed_seconds)}, {status.phase}, ETA {text['ETA']}", style="dim"),
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("accuracy", Text.assemble((text["accuracy"], "bold"), (" " + _at(status), "dim")))
    grid.add_row("reward", text["reward"])
    grid.add_row("batches", f"log-ratio {text['log-ratio']}   lag {text['lag']}   ESS {text['ESS']}")
    grid.add_row("searchers", f"{text['generated']}   evaluating {text['evaluating']}")
    grid.add_row("trainer", f"{text['trained']}   idle {text['trainer idle']}   paced {text['paced']}")
    return Group(head, grid, *([Text(status.note, style="yellow")] if status.note else []))


def _texts(status: Status, between: str, at: str = "") -> dict[str, str]:
    """Returns each figure as text, by its name; `-` for what is not known yet. at: what follows the accuracy."""

    def text(value: float | None, form: Callable[[float], str]) -> str:
        return NOT_YET if value is None else form(value)

    def rate(tokens: float) -> str:
        return f"{short_number(tokens)} tok/s"

    parts = [f"{printable(name, 40, newlines=False)} {value:.3f}" for name, value in status.parts.items()]
    accuracy = [
        f"{printable(name, 60, newlines=False).removeprefix('pass@1/')} {percent(value)}"
        for name, value in status.accuracy.items()
    ]
    now = " of the time, now too" if status.evaluating else " of the time"
    return {
        "reward": between.join([text(status.reward, "{:.3f}".format), *parts]),
        "accuracy": between.join(accuracy) + at if accuracy else NOT_YET,
        "log-ratio": text(status.log_ratio, "{:.2f}".format),
        "lag": text(status.lag, "{:.1f}".format),
        "ESS": text(status.ess, percent),
        "generated": text(status.generated_rate, rate),
        "trained": text(status.trained_rate, rate),
        "trainer idle": text(status.trainer_idle, percent),
        "paced": text(status.trainer_paced, percent),
        "evaluating": text(status.searcher_evaluating, lambda share: percent(share) + now),
        "ETA": text(status.eta_seconds, duration),
    }


def _at(status: Status) -> str:
    """Returns of which step's policy the accuracy is."""
    return "" if status.evaluated is None else f" at step {status.evaluated}"
