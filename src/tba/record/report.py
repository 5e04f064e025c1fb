"""`curves.png`: the curves of a run, or of several in one figure, against wall-clock.

Invariant: drawn from what a run left on disk alone, so that it can be drawn again at any time; a panel whose numbers
were not recorded says so. Faint lines are the numbers as recorded, strong ones their running mean.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.errors import UserError
from tba.evaluation.estimators import wilson_interval
from tba.record import metrics
from tba.record.metrics import column
from tba.record.run import SAMPLED, RunRecord
from tba.record.text import literal

FILE = "curves.png"
COLOURS = ("#0b6fb8", "#d9601a", "#1f8a5b", "#a0468c", "#8a6d00", "#4b5563", "#c2304a", "#00858a")
STYLES = ("-", "--", ":")
INK, GREY, FAINT = "#1f2933", "#6b7280", "#e5e7eb"
DPI = 110
FEWEST_TO_SMOOTH = 20  # points; fewer are drawn as they are


@dataclass(frozen=True)
class Panel:
    """One of the small figures: its series are (metric name, label)."""

    title: str
    note: str
    series: tuple[tuple[str, str], ...] = ()
    percent: bool = False


ACCURACY = Panel("Accuracy", "held-out problems, 95 % interval", percent=True)
REWARDS = Panel("Reward", "mean of the trained batch, and of the reward's parts", ((metrics.REWARD, "reward"),))
RATES = Panel("Tokens per second", "completion tokens, of wall-clock; every use counted")
IDLE = Panel(
    "Not at work",
    "share of wall-clock so far",
    (
        (metrics.TRAINER_IDLE, "trainer idle"),
        (metrics.TRAINER_PACED, "trainer paced"),
        (metrics.SEARCHER_EVALUATING, "searchers evaluating"),
    ),
    percent=True,
)
PANELS = (
    REWARDS,
    ACCURACY,
    Panel(
        "Log-ratio to the reference",
        "log(policy / reference) of a trained completion, mean, nats",
        ((metrics.LOG_RATIO, "log-ratio"),),
    ),
    Panel("Lag", "trainer updates since sampling", ((metrics.LAG, "mean"), (metrics.LAG_MAX, "largest"))),
    Panel(
        "Age",
        "seconds of a trained trajectory, mean",
        ((metrics.WAITING, "journal to training"), (metrics.IN_FLIGHT, "round to journal")),
    ),
    Panel(
        "Off-policy",
        "log(behaviour / policy) of a trained completion, nats",
        ((metrics.OFF_POLICY, "mean"), (metrics.OFF_POLICY_LOW, "5 %"), (metrics.OFF_POLICY_HIGH, "95 %")),
    ),
    Panel(
        "Effective sample size, residual",
        "of the batch; spread of residual over rewards",
        ((metrics.ESS, "effective sample size"), (metrics.RESIDUAL, "residual")),
    ),
    Panel("Entropy", "of the policy, nats a token of the batch, mean", ((metrics.ENTROPY, "entropy"),)),
    Panel(
        "Engine against trainer",
        "|log(behaviour / policy)| of the same weights, mean, nats",
        ((metrics.MISMATCH, "a token"), (metrics.MISMATCH_ANSWER, "an answer")),
    ),
    Panel(
        "What teaches little",
        "share of groups, of answers, of ratios",
        (
            (metrics.WITHOUT_SIGNAL, "groups without signal"),
            (metrics.TRUNCATED, "answers cut off"),
            (metrics.CUT, "ratios cut"),
        ),
        percent=True,
    ),
    IDLE,
    RATES,
)


def draw_curves(runs: Sequence[RunRecord], path: Path) -> Path:
    """Draw the runs to a PNG (256 colours: at most about 150 kB), replaced in one rename; returns its path.

    Raises `UserError` when no run has recorded anything.
    """
    return save_figure(curves(runs), path)


def save_figure(figure: Any, path: Path) -> Path:
    """Save a matplotlib figure as a PNG of 256 colours, replaced in one rename; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # comes with matplotlib

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # reads the drawn pixels directly: writing a PNG and reading it again takes as long as drawing
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    drawn.quantize(256, dither=Image.Dither.NONE).save(temporary, format="PNG")
    os.replace(temporary, path)
    return path


def curves(runs: Sequence[RunRecord]) -> Any:
    """Returns the same as a matplotlib figure, one set of axes per panel of `PANELS`, in order."""
    if not any(run.metrics or run.evaluations for run in runs):
        names = ", ".join(str(run.directory) for run in runs) or "no run"
        raise UserError(f"{names}: there is nothing to draw yet; no step and no evaluation is recorded.")
    from matplotlib.figure import Figure  # a second to load; no state of pyplot's, no display

    unit, seconds_per_unit = _time_unit(max(run.wall_seconds for run in runs))
    figure = Figure(figsize=(12.6, 12.9), facecolor="white")
    grid = figure.subplots(4, 3, sharex=True)
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        frame(axes, panel.title, panel.note)
        drawn = [_draw(axes, panel, run, i, len(runs), seconds_per_unit) for i, run in enumerate(runs)]
        _finish(axes, panel, any(drawn))
    for axes in grid[-1]:
        axes.set_xlabel(f"wall-clock, {unit}", color=GREY, fontsize=9)
    grid[0, 0].set_xlim(left=0)
    figure.text(0.05, 0.988, literal(_headline(runs)), fontsize=13, fontweight="bold", color=INK, va="center")
    if len(runs) > 1:
        _name_runs(figure, runs)
    else:
        figure.text(0.05, 0.97, _caption(runs[0]), fontsize=8.5, color=GREY, va="center")
    figure.subplots_adjust(left=0.05, right=0.985, top=0.919, bottom=0.043, hspace=0.36, wspace=0.19)
    return figure


def smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The centred running mean over about a twentieth of the points, at least 5; shorter at the ends."""
    window = max(5, len(values) // 20)
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _draw(axes: Any, panel: Panel, run: RunRecord, index: int, runs: int, seconds_per_unit: float) -> bool:
    """Draw one run's part of a panel; returns whether there was any."""
    if runs == 1:
        for e in run.evaluations:  # a searcher that evaluates does not generate
            since = e.wall_seconds / seconds_per_unit
            axes.axvspan(since, since + e.seconds / seconds_per_unit, color="#eef4fb", lw=0, zorder=0)
    draw: Callable[..., bool] = {ACCURACY: _draw_accuracy, RATES: _draw_rates}.get(panel, _draw_series)
    if runs == 1 and run.summary is not None:
        before = (run.summary.wall_seconds.sft + run.summary.wall_seconds.warm_up) / seconds_per_unit
        axes.axvspan(0, before, color="#f3f4f6", lw=0, zorder=0)
    return draw(axes, panel, run, index, runs, seconds_per_unit)


def _draw_series(axes: Any, panel: Panel, run: RunRecord, index: int, runs: int, seconds_per_unit: float) -> bool:
    drawn = False
    for i, (name, label) in enumerate([*panel.series, *(_parts(run) if panel is REWARDS else ())]):
        x, y = column(run.metrics, name)
        if not len(x):
            continue
        drawn = True
        look = _look(index, i, runs) | {"label": label if index == 0 else None}
        if panel is IDLE:  # its shares are running means already
            axes.plot(x / seconds_per_unit, y * 100, lw=1.8, marker="" if len(y) > 2 else "o", **look)
        else:
            _draw_means(axes, x / seconds_per_unit, y * (100 if panel.percent else 1), runs, look)
    return drawn


def _draw_means(
    axes: Any, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], runs: int, look: dict[str, Any]
) -> None:
    """Draws the running mean of a series, of one run faintly the series too; few points are drawn as they are."""
    if len(y) >= FEWEST_TO_SMOOTH:
        if runs == 1:
            axes.plot(x, y, color=look["color"], lw=0.7, alpha=0.28)
        y = smooth(y)
    axes.plot(x, y, lw=1.8, marker="" if len(y) > 2 else "o", **look)


def _parts(run: RunRecord) -> list[tuple[str, str]]:
    """Returns the series of the reward's parts, where it has several."""
    names = [name for name in (run.metrics[-1] if run.metrics else ()) if name.startswith(metrics.PART)]
    return [(name, literal(name.removeprefix(metrics.PART), 40)) for name in names]


def _draw_rates(axes: Any, panel: Panel, run: RunRecord, index: int, runs: int, seconds_per_unit: float) -> bool:
    drawn = False
    for i, (label, (x, y)) in enumerate(metrics.rates(run.metrics).items()):
        if len(x):
            drawn = True
            look = _look(index, i, runs) | {"label": label if index == 0 else None}
            _draw_means(axes, x / seconds_per_unit, y, runs, look)
    return drawn


def _draw_accuracy(axes: Any, panel: Panel, run: RunRecord, index: int, runs: int, seconds_per_unit: float) -> bool:
    for i, name in enumerate(_accuracies(run, runs)):
        found = sorted((e for e in run.evaluations if e.metric == name), key=lambda e: e.wall_seconds)
        x = [e.wall_seconds / seconds_per_unit for e in found]
        intervals = [wilson_interval(e.value * e.n, e.n) for e in found]
        look = _look(index, i, runs)
        y = [100 * v.estimate for v in intervals]
        spread = [[100 * (v.estimate - v.low) for v in intervals], [100 * (v.high - v.estimate) for v in intervals]]
        axes.errorbar(x, y, spread, fmt="none", ecolor=look["color"], elinewidth=1.0, alpha=0.4)
        joined = look if len(found) > 2 else {**look, "linestyle": "none"}  # a line between two points would be a guess
        axes.plot(x, y, marker="o", ms=4, lw=1.8, label=literal(name) if index == 0 else None, **joined)
    return bool(run.evaluations)


def _accuracies(run: RunRecord, runs: int) -> list[str]:
    """Returns all figures for one run; for several only the most telling one, so that the runs can be told apart."""
    names = run.evaluated()
    return names if runs == 1 else [name for name in names if name == SAMPLED] or names[:1]


def _look(run: int, series: int, runs: int) -> dict[str, str]:
    """Returns the line's style. One run: a colour per series. Several: a colour per run and a line style per series."""
    if runs == 1:
        return {"color": COLOURS[series % len(COLOURS)], "linestyle": "-"}
    return {"color": COLOURS[run % len(COLOURS)], "linestyle": STYLES[series % len(STYLES)]}


def frame(axes: Any, title: str, note: str) -> None:
    """Set up axes in the common style of all figures, before anything is drawn."""
    axes.set_title(literal(title), loc="left", fontsize=11, fontweight="bold", color=INK, pad=20)
    axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=8.5, color=GREY, va="bottom")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.tick_params(colors=GREY, labelsize=8.5, length=3, color="#9ca3af", labelbottom=True)
    axes.grid(axis="y", color=FAINT, lw=0.8)
    axes.set_axisbelow(True)


def _finish(axes: Any, panel: Panel, drawn: bool) -> None:
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)
        axes.set_yticks([])
        return
    axes.margins(x=0.02, y=0.08)
    if panel.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        axes.set_ylim(0, 102 if panel is ACCURACY else max(10.0, axes.get_ylim()[1]))
        _legend(axes, panel)
        return
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # a power of ten above the axis would cover the note
    if min((float(np.min(line.get_ydata())) for line in axes.lines), default=0.0) >= 0:
        axes.set_ylim(bottom=0)
    _legend(axes, panel)


def _legend(axes: Any, panel: Panel) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1 or panel is ACCURACY:
        legend = axes.legend(handles, labels, frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.6)
        for handle in legend.legend_handles:
            handle.set_color(INK if len({line.get_color() for line in handles}) == 1 else handle.get_color())


def _name_runs(figure: Any, runs: Sequence[RunRecord]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLOURS[i % len(COLOURS)], lw=2.5) for i in range(len(runs))]
    names = [literal(run.name) for run in runs]
    figure.legend(
        handles,
        names,
        loc="upper right",
        ncols=min(4, len(runs)),
        frameon=False,
        fontsize=9,
        bbox_to_anchor=(0.99, 1.0),
    )


def _headline(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    run = runs[0]
    recipe = f"{run.summary.recipe}, seed {run.summary.seed}" if run.summary else "not finished"
    return f"{run.name}  ({recipe}, {run.steps} steps)"


def _caption(run: RunRecord) -> str:
    strong = "faint: as recorded; strong: running mean; blue: a searcher evaluates"
    return f"{strong}; grey: before the first step" if run.summary else strong


def _time_unit(seconds: float) -> tuple[str, float]:
    for name, size in (("seconds", 1.0), ("minutes", 60.0)):
        if seconds <= 240 * size:
            return name, size
    return "hours", 3600.0
