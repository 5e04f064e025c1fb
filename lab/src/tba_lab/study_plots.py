"""A study's plots: accuracy over wall-clock time, reward over divergence, a figure against whatever varies.

Invariant: every run is drawn as a faint point or line, and the mean over runs as a strong one. A plot for which nothing
was measured is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tba_lab.comparison import Outcome
from tba_lab.figures import COLUMNS, heading
from tba_lab.plot_style import COLOURS, GREY, INK, STYLES, frame, literal, save_figure

Curve = Sequence[tuple[float, float]]  # (seconds, accuracy)
_GRID = 200  # points of a mean curve
_LOG_FROM = 16.0  # largest over smallest x from which an axis is logarithmic
_NAME_ROOM = (45.0, 12.0)  # pixels that a point's name takes
_PERCENT = ("pass@", "fall", "differ")  # figures that are drawn in percent


@dataclass(frozen=True)
class Line:
    """A family of variants, in order."""

    family: str
    variants: Sequence[str]


def lines_of(variants: Sequence[str], families: Mapping[str, str]) -> list[Line]:
    """Returns the families in order of appearance; variants without one form a family together."""
    names = list(dict.fromkeys(families[v] for v in variants))
    return [Line(name, [v for v in variants if families[v] == name]) for name in names]


def draw_over_time(
    path: Path, title: str, metric: str, curves: Mapping[str, Sequence[Curve]], lines: Sequence[Line]
) -> Path | None:
    """Draw accuracy over seconds since the first step: a panel per family, a colour per variant (paper: Figure 1)."""
    lines = [Line(line.family, [v for v in line.variants if any(curves.get(v, ()))]) for line in lines]
    lines = [line for line in lines if line.variants]
    if not lines:
        return None
    figure, panels = _panels(len(lines), title)
    for axes, line in zip(panels, lines, strict=False):
        frame(axes, line.family or "all variants", f"{heading(metric)}, mean over runs and each run")
        for i, variant in enumerate(line.variants):
            colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
            for curve in curves[variant]:
                axes.plot([x for x, _ in curve], [100 * y for _, y in curve], color=colour, lw=0.7, alpha=0.3)
            x, y = mean_curve(curves[variant])
            axes.plot(x, 100 * y, color=colour, ls=style, lw=1.8, label=literal(variant))
        axes.set_xlabel("seconds since the first step", color=GREY, fontsize=9)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return save_figure(figure, path)


def draw_frontier(
    path: Path,
    title: str,
    outcomes: Sequence[Outcome],
    lines: Sequence[Line],
    x: str = "kl",
    y: str = "reward",
    start: tuple[float, float] | None = None,
) -> Path | None:
    """Draw one figure over another, a line per family. Reward over divergence is the paper's Figure 4.

    `start` is where all runs began, in the figures' units.
    """
    if not any({x, y} <= o.figures.keys() for o in outcomes):
        return None
    figure, (axes,) = _panels(1, title)
    scale = np.array([100.0 if name.startswith(_PERCENT) else 1.0 for name in (x, y)])
    frame(axes, heading(y), "held-out prompts, after the run; mean over runs and each run")
    if start is not None:
        axes.plot(*(scale * start), "+", ms=9, mew=2, color=INK, label="before")
    names: list[tuple[str, Any]] = []
    for i, line in enumerate(lines):
        colour, means = COLOURS[i % len(COLOURS)], []
        for variant in line.variants:
            points = [scale * (o.figures[x], o.figures[y]) for o in _outcomes_with(outcomes, variant, x, y)]
            if not points:
                continue
            axes.plot(*np.transpose(points), "o", ms=3, color=colour, alpha=0.3)
            mean = np.mean(points, axis=0)
            means.append(mean)
            names.append((variant.removeprefix(f"{line.family}-"), mean))
        if means:
            style = STYLES[i // len(COLOURS) % len(STYLES)]
            label = literal(line.family or "all variants")
            axes.plot(*np.transpose(means), "o", ls=style, ms=5, lw=1.2, color=colour, label=label)
    axes.set_xlabel("KL to the reference, nats" if x == "kl" else literal(heading(x)), color=GREY, fontsize=9)
    axes.set_ylabel(literal(heading(y)), color=GREY, fontsize=9)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    _name_points(axes, names)
    return save_figure(figure, path)


def _name_points(axes: Any, names: Sequence[tuple[str, Any]]) -> None:
    """Write each name next to its point, unless it would overlap another name."""
    axes.autoscale_view()  # else it is done when the figure is drawn, and pixels are not known before
    positions: list[Any] = []
    for name, point in names:
        position = axes.transData.transform(point)
        if all(np.any(np.abs(position - placed_position) > _NAME_ROOM) for placed_position in positions):
            axes.annotate(literal(name), point, xytext=(4, 4), textcoords="offset points", fontsize=7, color=GREY)
            positions.append(position)


def draw_pass_at_k(
    path: Path,
    title: str,
    runs_before: Sequence[Sequence[float]],
    runs_after: Mapping[str, Sequence[Sequence[float]]],
    lines: Sequence[Line],
) -> Path | None:
    """Draw pass@k over k, means over runs: of the first weights (`runs_before`) and of the last (`runs_after`, by
    variant).

    A colour per family and a style per variant in it; in a family alone, a colour per variant.
    """
    if not runs_before:
        return None
    figure, (axes,) = _panels(1, title)
    frame(axes, "pass@k, %", "a right answer among k attempts; held-out prompts, mean over runs")
    mean_K = np.mean(runs_before, axis=0)
    axes.plot(range(1, len(mean_K) + 1), 100 * mean_K, color=GREY, ls=":", lw=2, label="before")
    for i, line in enumerate(lines):
        for j, variant in enumerate(v for v in line.variants if runs_after.get(v)):
            colour, style = (i, j) if len(lines) > 1 else (j, 0)
            mean_K = np.mean(runs_after[variant], axis=0)
            line_style = {"color": COLOURS[colour % len(COLOURS)], "ls": STYLES[style % len(STYLES)]}
            axes.plot(range(1, len(mean_K) + 1), 100 * mean_K, lw=1.6, label=literal(variant), **line_style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("k", color=GREY, fontsize=9)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return save_figure(figure, path)


def draw_against(
    path: Path,
    title: str,
    y: str,
    label: str,
    positions: Mapping[str, float],
    outcomes: Sequence[Outcome],
    lines: Sequence[Line],
) -> Path | None:
    """Draw figure `y` over the variants' `positions`, a line per family, a cross for failed runs."""
    drawn_variants = [v for line in lines for v in line.variants if v in positions and _outcomes_with(outcomes, v, y)]
    if not drawn_variants:
        return None
    figure, (axes,) = _panels(1, title)
    scale = 100.0 if y.startswith(_PERCENT) else 1.0
    frame(axes, COLUMNS[y][0] if y in COLUMNS else heading(y), "mean and standard deviation over runs, and each run")
    for i, line in enumerate(lines):
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
        points = []
        for variant in line.variants:
            values = [scale * o.figures[y] for o in _outcomes_with(outcomes, variant, y)]
            failed_runs = [o for o in outcomes if o.variant == variant and o.failure]
            if variant not in positions:
                continue
            axes.plot([positions[variant]] * len(values), values, "o", ms=3, color=colour, alpha=0.3)
            if values:
                spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                points.append((positions[variant], float(np.mean(values)), spread))
            if failed_runs:
                axes.plot([positions[variant]], [0.02], "x", transform=axes.get_xaxis_transform(), color=colour)
        if points:
            x, mean, spread = np.transpose(sorted(points))
            axes.errorbar(
                x, mean, spread, ls=style, lw=1.5, color=colour, label=literal(line.family) or None, capsize=2
            )
    _axis(axes, sorted({positions[v] for v in drawn_variants}))
    axes.set_xlabel(literal(label), color=GREY, fontsize=9)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return save_figure(figure, path)


def mean_curve(curves: Sequence[Curve]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns the mean of several linearly interpolated curves, over the time that all of them cover."""
    full_curves = [curve for curve in curves if curve]
    end = min(curve[-1][0] for curve in full_curves)
    x = np.linspace(max(curve[0][0] for curve in full_curves), end, _GRID)
    return x, np.mean([np.interp(x, [t for t, _ in c], [v for _, v in c]) for c in full_curves], axis=0)


def _outcomes_with(outcomes: Sequence[Outcome], variant: str, *names: str) -> list[Outcome]:
    return [o for o in outcomes if o.variant == variant and all(name in o.figures for name in names)]


def _panels(count: int, title: str) -> tuple[Any, list[Any]]:
    """Returns a figure with `count` axes, at most 3 in a row, that share their scales."""
    from matplotlib.figure import Figure  # a second to load; no state of pyplot's, no display

    columns = min(3, count)
    row_count = math.ceil(count / columns)
    figure = Figure(figsize=(max(6.6, 4.4 * columns), 1.0 + 3.8 * row_count), facecolor="white", layout="constrained")
    grid = figure.subplots(row_count, columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    figure.suptitle(literal(title), x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure, list(grid.flat[:count])


def _axis(axes: Any, values: Sequence[float]) -> None:
    """Set the ticks to the values if these are few, and the scale to logarithmic if they span much."""
    if values[0] > 0 and values[-1] / values[0] >= _LOG_FROM:
        axes.set_xscale("log")
    if len(values) <= 10:
        axes.set_xticks(values, [f"{v:g}" for v in values])
        axes.minorticks_off()
