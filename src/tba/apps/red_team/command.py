"""`tba red-team`: its four commands read from their arguments."""

from __future__ import annotations

from pathlib import Path

from tba.apps.red_team.options import ClassifierPlaces, PlotOptions, RedTeamEvalOptions, WorldPlaces
from tba.errors import UserError
from tba.settings import split_options


def red_team_command(arguments: list[str]) -> int:
    """Returns the exit code. Raises `UserError` for anything but the four commands."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    commands = {"world": _world, "classifier": _classifier, "eval": _evaluate, "plot": _plot}
    if verb not in commands:
        given = f"there is no `tba red-team {verb}`" if verb else "`tba red-team` needs to know what to do"
        raise UserError(f"{given}: use world, classifier, eval or plot; `tba red-team --help` shows how")
    return commands[verb](rest)


def _world(arguments: list[str]) -> int:
    from tba.apps.red_team.world import make_world

    options, overrides = split_options(WorldPlaces(), arguments, "tba red-team world")
    return make_world(overrides, _given(options.out, "world", "folder"), options.labelled)


def _classifier(arguments: list[str]) -> int:
    from tba.apps.red_team.toxicity_classifier import make_classifier

    files, rest = _first(arguments, "classifier FILE --out DIR", "a file of labelled texts")
    options, overrides = split_options(ClassifierPlaces(), rest, "tba red-team classifier")
    return make_classifier(files[0], overrides, _given(options.out, "classifier", "folder"))


def _evaluate(arguments: list[str]) -> int:
    from tba.apps.red_team.evaluation import evaluate_attacker

    names, rest = _first(arguments, "eval RECIPE", "a recipe's name or a path to a .py file")
    options, overrides = split_options(RedTeamEvalOptions(), rest, "tba red-team eval")
    return evaluate_attacker(names[0], overrides, options)


def _plot(arguments: list[str]) -> int:
    from tba.apps.red_team.evaluation import plot_plane

    files, rest = _first(
        arguments, "plot FILE... --out FILE.png", "one or more files that `tba red-team eval --out` wrote", None
    )
    options, left = split_options(PlotOptions(), rest, "tba red-team plot")
    if left:
        raise UserError(f"`tba red-team plot` does not take {left[0]!r}: give files, and --out")
    return plot_plane([Path(file) for file in files], _given(options.out, "plot", "picture"))


def _first(arguments: list[str], usage: str, what: str, most: int | None = 1) -> tuple[list[str], list[str]]:
    """Returns the arguments before the first option, and the rest."""
    end = next((i for i, argument in enumerate(arguments) if argument.startswith("--")), len(arguments))
    if not end:
        raise UserError(f"`tba red-team {usage}` needs {what} first")
    if most is not None and end > most:
        raise UserError(f"`tba red-team {usage}` does not take {arguments[most]!r}")
    return arguments[:end], arguments[end:]


def _given(out: Path | None, verb: str, what: str) -> Path:
    if out is None:
        raise UserError(f"tba red-team {verb} needs --out: the {what} to write")
    return out
