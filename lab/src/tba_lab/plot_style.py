"""The look of plots: colours, line styles, axes, and PNG files of 256 colours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tba.record.text import printable

COLOURS = ("#0b6fb8", "#d9601a", "#1f8a5b", "#a0468c", "#8a6d00", "#4b5563", "#c2304a", "#00858a")
STYLES = ("-", "--", ":")
INK, GREY, FAINT = "#1f2933", "#6b7280", "#e5e7eb"
DPI = 110


def frame(axes: Any, title: str, note: str) -> None:
    """Set up axes in the common style of all figures, before anything is drawn."""
    axes.set_title(literal(title), loc="left", fontsize=11, fontweight="bold", color=INK, pad=20)
    axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=8.5, color=GREY, va="bottom")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.tick_params(colors=GREY, labelsize=8.5, length=3, color="#9ca3af", labelbottom=True)
    axes.grid(axis="y", color=FAINT, lw=0.8)
    axes.set_axisbelow(True)


def save_figure(figure: Any, path: Path) -> Path:
    """Save a matplotlib figure as a PNG of 256 colours, replaced in one rename; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # comes with matplotlib

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # reads the drawn pixels directly: writing a PNG and reading it again takes as long as drawing
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    image.quantize(256, dither=Image.Dither.NONE).save(temporary, format="PNG")
    os.replace(temporary, path)
    return path


def literal(text: str, longest: int = 120) -> str:
    """Returns `text` as a plot shows it letter by letter: between two dollars it would be a formula."""
    return printable(text, longest, newlines=False).replace("$", r"\$")
