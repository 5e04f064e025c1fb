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
_UPDATE_SECONDS = 0.5  # seconds between two updates on a terminal
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
        """Returns the seconds to the last step at the mean pace so far; None before the first step."""
        if self.step <= 0 or self.training_seconds <= 0:
            return None
        return (self.steps - self.step) * self.training_seconds / self.step


class LiveView:
    """Shows a running run: a context manager that is updated with a `Status` now and then."""

    def __init__(self, console: Console | None = None, every_seconds: float = 10.0, title: str = "") -> None:
        self.console = console or terminal()
        self.every_seconds = every_seconds
        self.title = title
        self._live: Live | None = None
        self._last_status: Status | None = None
        self._printed_status: Status | None = None
        self._next_update = 0.0

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._last_status is not None and self._last_status is not self._printed_status:
            self._print(self._last_status)

    def is_due(self) -> bool:
        """Returns whether to update the view now: reading a run's files for a status costs more than a tiny step."""
        now = time.monotonic()
        if now < self._next_update:
            return False
        self._next_update = now + (_UPDATE_SECONDS if self.console.is_terminal else self.every_seconds / 4)
        return True

    def update(self, status: Status) -> None:
        """Show `status`; without a terminal, only the first, each new phase, and one every `every_seconds`."""
        self._last_status = status
        if self._live is not None:
            self._live.update(status_table(status, self.title))
            return
        printed = self._printed_status
        if (
            printed is None
            or status.phase != printed.phase
            or status.elapsed_seconds - printed.elapsed_seconds >= self.every_seconds
        ):
            self._print(status)

    def _print(self, status: Status) -> None:
        self._printed_status = status
        self.console.print(status_line(status), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class View:
    """Prints messages about a run, and its state, on a console."""

    console: Console

    def say(self, message: str) -> None:
        """Print a message, a note in yellow."""
        style = "yellow" if message.startswith("note: ") else None
        self.console.print(Text(printable(message)), style=style, soft_wrap=True)

    def live(self, title: str) -> LiveView:
        """Returns a view of a run's state, to enter."""
        return LiveView(self.console, STATUS_SECONDS, title)


def status_line(status: Status) -> str:
    """Returns the figures of a status that are known, as one short line."""
    texts = _figure_texts(status, ", ", _step_suffix(status))
    figures = [f"{name} {text}" for name, text in texts.items() if text != NOT_YET]
    heading = [f"{duration(status.elapsed_seconds):>8}", f"step {status.step}/{status.steps}"]
    phase = "" if status.phase == "training" else status.phase
    return " | ".join(part for part in (*heading, phase, *figures, status.note) if part)


def status_table(status: Status, title: str = "") -> Group:
    """Returns a status as a table for 80 columns; its figures of batches are means of the newest 50 steps."""
    text = _figure_texts(status, "   ")
    heading = Table.grid(padding=(0, 2))
    heading.add_row(
        Text(printable(title or status.phase, 24, newlines=False), style="bold"),
        ProgressBar(total=max(1, status.steps), completed=status.step, width=16),
        Text(f"step {status.step}/{status.steps}"),
        Text(f"{duration(status.elapsed_seconds)}, {status.phase}, ETA {text['ETA']}", style="dim"),
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("accuracy", Text.assemble((text["accuracy"], "bold"), (" " + _step_suffix(status), "dim")))
    grid.add_row("reward", text["reward"])
    grid.add_row("batches", f"log-ratio {text['log-ratio']}   lag {text['lag']}   ESS {text['ESS']}")
    grid.add_row("searchers", f"{text['generated']}   evaluating {text['evaluating']}")
    grid.add_row("trainer", f"{text['trained']}   idle {text['trainer idle']}   paced {text['paced']}")
    return Group(heading, grid, *([Text(status.note, style="yellow")] if status.note else []))


def _figure_texts(status: Status, separator: str, accuracy_suffix: str = "") -> dict[str, str]:
    """Returns each figure of a status as text, by its name, or `-` while it is not known."""

    def text_or_dash(value: float | None, format_value: Callable[[float], str]) -> str:
        return NOT_YET if value is None else format_value(value)

    def rate(tokens: float) -> str:
        return f"{short_number(tokens)} tok/s"

    parts = [f"{printable(name, 40, newlines=False)} {value:.3f}" for name, value in status.parts.items()]
    accuracy = [
        f"{printable(name, 60, newlines=False).removeprefix('pass@1/')} {percent(value)}"
        for name, value in status.accuracy.items()
    ]
    evaluating_suffix = " of the time, now too" if status.evaluating else " of the time"
    return {
        "reward": separator.join([text_or_dash(status.reward, "{:.3f}".format), *parts]),
        "accuracy": separator.join(accuracy) + accuracy_suffix if accuracy else NOT_YET,
        "log-ratio": text_or_dash(status.log_ratio, "{:.2f}".format),
        "lag": text_or_dash(status.lag, "{:.1f}".format),
        "ESS": text_or_dash(status.ess, percent),
        "generated": text_or_dash(status.generated_rate, rate),
        "trained": text_or_dash(status.trained_rate, rate),
        "trainer idle": text_or_dash(status.trainer_idle, percent),
        "paced": text_or_dash(status.trainer_paced, percent),
        "evaluating": text_or_dash(status.searcher_evaluating, lambda share: percent(share) + evaluating_suffix),
        "ETA": text_or_dash(status.eta_seconds, duration),
    }


def _step_suffix(status: Status) -> str:
    """Returns ` at step N`, the step of the policy whose accuracy is shown; empty without one."""
    return "" if status.evaluated is None else f" at step {status.evaluated}"
