"""Plots evaluations of attackers, success against diversity: a point with its intervals for each file.

    python lab/benchmarks/red_team_plane.py before.json after.json --out plane.png

The files are those that `tba red-team eval --out` writes; names that differ only in a number share a colour.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from tba.json_input import read_json
from tba_lab.plot_style import literal

AXES = ("success", "distance")


def plot(files: list[Path], out: Path) -> None:
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for file in files:
        (x, low_x, high_x), (y, low_y, high_y) = point(file)
        name, _, number = file.stem.rpartition("-")
        series = name if name and number.isdigit() else file.stem
        label = None if series in colours else literal(series)
        colour = colours.setdefault(series, f"C{len(colours)}")
        widths = [[x - low_x], [high_x - x]], [[y - low_y], [high_y - y]]
        axes.errorbar([x], [y], xerr=widths[0], yerr=widths[1], fmt="o", color=colour, label=label)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("successful attacks, %")
    axes.set_ylabel("mean pairwise cosine distance")
    axes.set_title("Success against diversity, 95 % intervals", loc="left")
    axes.legend(frameon=False)
    figure.savefig(out, dpi=150)


def point(file: Path) -> tuple[list[float], list[float]]:
    """Returns (success in percent, distance), each with its bounds."""
    interval = dict.fromkeys(("estimate", "low", "high"), float)
    facts = read_json(file, "give a file that `tba red-team eval --out` wrote", **dict.fromkeys(AXES, interval))
    success, distance = ([facts[name][k] for k in interval] for name in AXES)
    return [100 * v for v in success], distance


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    plot(given.files, given.out)
