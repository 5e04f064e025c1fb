"""A study: variants of one recipe, each run over the same seeds, and compared.

A study file defines `study = Study(...)` and imports what it uses, as a recipe file does. Each variant is a recipe of
its own, named `FILE.py::VARIANT` (`tba train FILE.py::VARIANT --seed 1` makes one run of a study by hand).
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tba.errors import UserError
from tba.evaluation.estimators import SAMPLED
from tba.recipe import Recipe, settings_json
from tba.recipe_names import recipe_names
from tba.settings import load_definition, override
from tba.types import Json, is_name
from tba_lab import STUDIES
from tba_lab.comparison import Outcome
from tba_lab.figures import COLUMNS

_NAME = re.compile(r"[A-Za-z0-9][\w.+=]*(?:-[\w.+=]+)*")


@dataclass(frozen=True)
class Variant:
    """One recipe of a study. The variants of a family form one line of a plot."""

    recipe: Recipe
    family: str = ""


Fields: TypeAlias = Sequence[str]  # as on the command line: ("--sync-every", "4")


@dataclass(frozen=True)
class Plot:
    """A plot of a figure against something that varies."""

    x: str  # a field of the recipe by dotted name (sync_every, objective.beta.value), or a figure (lag)
    y: str = ""  # a figure; empty: the study's metric
    label: str = ""  # of x
    families: tuple[str, ...] = ("*",)  # patterns of the families that are drawn
    single_line: bool = False  # all families form one line


@dataclass(frozen=True)
class Study:
    """What is compared, over which seeds, and what is reported. Raises `UserError` for inconsistent fields."""

    name: str  # its folder under studies/
    recipe: Recipe  # the recipe to which variants given as fields apply
    variants: Mapping[str, Variant | Recipe | Fields]  # by name, of letters, digits, '.', '_', '+', '=' and '-'
    description: str = ""  # one line for people
    seeds: tuple[int, ...] = (0, 1, 2)
    metric: str = SAMPLED  # the figure by which variants are compared
    target: float | None = None  # a value of the metric, in 0..1; the wall-clock time to reach it is measured
    baseline: str = ""  # the variant that others are compared with; `{family}` stands for their family; empty: none
    margin: float = 0.03  # of the metric: "not worse" means surely less than this below the baseline
    columns: tuple[str, ...] = ()  # figures in the table; empty: all that were measured
    plots: tuple[Plot, ...] = ()  # plots besides accuracy over time and reward over divergence
    divergence_prompts: int = 500  # held-out prompts on which the distance to the reference is measured; 0: none
    divergence_samples: int = 4  # answers to each
    diversity_prompts: int = 100  # held-out prompts on which different right answers and pass@k are measured
    diversity_samples: int = 0  # answers to each, before and after the run; 0: not measured

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise UserError(
                f"a study is named {self.name!r}: use letters, digits, '.', '_' and '-' only, a letter, digit or '_' "
                "first"
            )
        for name in self.variants:
            if not _NAME.fullmatch(name):
                raise UserError(
                    f"study {self.name} has a variant {name!r}: use letters, digits, '.', '_', '+', '=' and single '-'"
                )
        if not self.variants:
            raise UserError(f"study {self.name} has no variants: give at least one")
        for name in self.variants:
            baseline = self.baseline_of(name)
            if self.baseline and baseline not in self.variants:
                raise UserError(f"study {self.name} has baseline {self.baseline!r}, but no variant {baseline!r}")
        check_seeds(self.seeds, f"study {self.name}")
        unknown = [c for c in self.columns if c not in COLUMNS and not c.startswith("pass@")]
        if unknown:
            raise UserError(f"study {self.name} has no column {unknown[0]!r}: use some of {', '.join(COLUMNS)}")

    def recipe_of(self, variant: str) -> Recipe:
        """Returns the recipe of a variant. Raises `UserError` when there is no such variant."""
        if variant not in self.variants:
            close_names = difflib.get_close_matches(variant, self.variants, n=1)
            hint = f"did you mean {close_names[0]!r}?" if close_names else f"it has {', '.join(self.variants)}"
            raise UserError(f"study {self.name} has no variant {variant!r}: {hint}")
        recipe = self.variants[variant]
        if isinstance(recipe, Variant):
            recipe = recipe.recipe
        if not isinstance(recipe, Recipe):
            recipe = override(self.recipe, recipe, f"variant {variant} of study {self.name}")
        return dataclasses.replace(recipe, name=f"{self.name}-{variant}")

    def family(self, variant: str) -> str:
        """Returns the family of a variant; "" if it has none."""
        definition = self.variants[variant]
        return definition.family if isinstance(definition, Variant) else ""

    def baseline_of(self, variant: str) -> str:
        """Returns the variant that this one is compared with; "" if there is none."""
        return self.baseline.replace("{family}", self.family(variant))

    def matching(self, patterns: Sequence[str]) -> list[str]:
        """Returns the variants that match a pattern (`tb-*`). Raises `UserError` for a pattern without matches."""
        for pattern in patterns:
            if not fnmatch.filter(self.variants, pattern):
                raise UserError(f"study {self.name} has no variant {pattern!r}: it has {', '.join(self.variants)}")
        return [v for v in self.variants if any(fnmatch.fnmatchcase(v, p) for p in patterns)]


def find_study(name: str) -> Study:
    """Returns the study of a name (`staleness`) or of a path to a Python file that defines `study`."""
    study = load_definition(file_of(name), "study")
    if not isinstance(study, Study):
        raise UserError(f"{name} defines no `study = Study(...)`: add one, see lab/src/tba_lab/studies/staleness.py")
    return study


def file_of(name: str) -> Path:
    """Returns the Python file of a study: of one that comes with the laboratory by its name, else the path itself."""
    if name.endswith(".py"):
        return Path(name)
    study_names = recipe_names(STUDIES)
    if name not in study_names:
        raise UserError(f"there is no study {name!r}; give one of {', '.join(study_names)} or a path to a .py file")
    return STUDIES / f"{name}.py"


def check_seeds(seeds: Sequence[int], owner: str) -> None:
    """Raises `UserError` unless there are seeds, all different and none negative."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UserError(f"{owner} has seeds {', '.join(map(str, seeds)) or 'none'}: give different ones, 0 or more")


def positions(x: str, recipes: Mapping[str, Recipe], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Returns each variant's position on an axis: the mean of a figure over its runs, or the value of a recipe's field.

    A variant without that figure, or without a number in that field (another objective, say), is left out.
    """
    figure_values = {v: [o.figures[x] for o in outcomes if o.variant == v and x in o.figures] for v in recipes}
    if any(figure_values.values()):
        return {variant: float(np.mean(values)) for variant, values in figure_values.items() if values}
    field_values = {
        variant: _numbers(settings_json(recipe)).get(x.replace("-", "_")) for variant, recipe in recipes.items()
    }
    return {variant: value for variant, value in field_values.items() if value is not None}


def varying_field_plots(recipes: Mapping[str, Recipe]) -> list[Plot]:
    """Returns a plot against every field in which the variants have different numbers."""
    tables = [_numbers(settings_json(recipe)) for recipe in recipes.values()]
    names = dict.fromkeys(name for table in tables for name in table)
    return [Plot(name) for name in names if len({table[name] for table in tables if name in table}) > 1]


def _numbers(value: Json, name: str = "") -> dict[str, float]:
    """Returns dotted name -> value of every number in a resolved recipe."""
    if isinstance(value, Mapping):
        inner = (_numbers(v, f"{name}.{k}" if name else k) for k, v in value.items())
        return {k: v for table in inner for k, v in table.items()}
    return {name: float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else {}
