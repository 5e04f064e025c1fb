"""Fields of settings by dotted name: which count, what a word is read as, what is said of what does not fit."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tba.errors import UserError
from tba.fields import BY_CODE, as_declared, fields_of, flags, help_of
from tba.recipe_names import recipe_names
from tba.settings import find, override


@dataclass(frozen=True)
class Kettle:
    """Boils water. It whistles."""

    litres: float = 1.5  # of water
    whistles: bool = True  # when it boils
    pitch: int | None = None  # of the whistle; None: it is its own
    notes: tuple[int, int] = (1, 2)  # of the whistle, low and high
    tea: tuple[str, ...] = ()  # that is made
    shelf: Path | None = None  # where it stands
    heat: Literal["gas", "coal"] = "gas"  # what boils it
    model: str = field(default="K1", metadata=BY_CODE)  # stands on its base
    warm: bool | None = None  # None: as it comes

    @property
    def unused(self) -> Mapping[str, str]:
        return {} if self.whistles else {"pitch": "whistles", "notes": "whistles"}


@dataclass(frozen=True)
class Kitchen:
    """Has a kettle."""

    kettle: Kettle = Kettle()
    lit: bool = False  # by a lamp

    @property
    def unused(self) -> Mapping[str, str]:
        return {} if self.lit else {"kettle.shelf": "lit"}


def made(*arguments: str, recorded: bool = False) -> Kitchen:
    return override(Kitchen(), arguments, "it", recorded)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--kettle.litres 2", "litres", 2.0),
        ("--kettle.litres=-2e-1", "litres", -0.2),
        ("--kettle.litres -2", "litres", -2.0),
        ("--kettle.no-whistles", "whistles", False),
        ("--kettle.whistles", "whistles", True),
        ("--kettle.warm", "warm", True),
        ("--kettle.no-warm", "warm", False),
        ("--kettle.litres 2", "warm", None),
        ("--kettle.warm --kettle.warm None --kettle.litres 2", "warm", None),
        ("--kettle.warm --kettle.warm=None --kettle.litres 2", "warm", None),
        ("--kettle.pitch 3 --kettle.pitch None", "pitch", None),
        ("--kettle.pitch None --kettle.pitch 3", "pitch", 3),
        ("--kettle.notes 4 5", "notes", (4, 5)),
        ("--kettle.tea black --kettle.litres 1", "tea", ("black",)),
        ("--kettle.tea black green", "tea", ("black", "green")),
        ("--kettle.tea", "tea", ()),
        ("--kettle.heat=coal", "heat", "coal"),
        ("--lit --kettle.shelf None", "shelf", None),
        ("--kettle.shelf a/b --lit", "shelf", Path("a/b")),
    ],
)
def test_a_word_is_read_as_the_declared_type_says(words: str, name: str, value: Any) -> None:
    found = getattr(made(*words.split()).kettle, name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kettle.litres much", "it --kettle.litres takes a number, not 'much'"),
        ("--kettle.pitch high", "it --kettle.pitch takes a whole number or None, not 'high'"),
        ("--kettle.pitch 1.5", "it --kettle.pitch takes a whole number or None, not '1.5'"),
        ("--kettle.notes 4", "it --kettle.notes takes a whole number and a whole number, not '4'"),
        ("--kettle.heat wood", "it --kettle.heat takes one of gas, coal, not 'wood'"),
        ("--kettle.litres", "it --kettle.litres needs a value: it takes a number"),
        ("--kettle.litres --lit", "it --kettle.litres needs a value: it takes a number"),
        ("--kettle.whistles false", "--kettle.no-whistles to switch it off"),
        ("--kettle.whistles=1", "takes --kettle.whistles without a value"),
        ("--kettle.litres 1 2", "it does not take '2'"),
        ("--kettle.no-litres", "it has no field --kettle.no-litres"),
        ("--kettle.model K2", "it does not take --kettle.model: only a recipe's code can set it"),
        ("--kettle.litre 1", "did you mean --kettle.litres?"),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(words: str, said: str) -> None:
    with pytest.raises(UserError) as told:
        made(*words.split())
    assert said in str(told.value)


def test_a_field_without_effect_is_refused_until_what_it_waits_for_is_given_too() -> None:
    with pytest.raises(UserError, match=r"^it: --kettle.shelf has no effect without --lit: give that too, or leave"):
        made("--kettle.shelf", "a")
    assert made("--kettle.shelf", "a", "--lit") == Kitchen(Kettle(shelf=Path("a")), lit=True)
    with pytest.raises(UserError, match=r"--kettle.pitch has no effect without --kettle.whistles"):
        made("--kettle.pitch", "3", "--kettle.no-whistles")
    assert made("--kettle.shelf", "a", recorded=True) == Kitchen(Kettle(shelf=Path("a")))  # by a run that is there


def test_the_fields_that_count_are_those_that_are_shown_with_the_others_named_at_the_end() -> None:
    silent = Kitchen(Kettle(whistles=False))
    waiting = {"--kettle.pitch", "--kettle.notes", "--kettle.shelf"}
    assert set(flags(silent)) == {f.flag for f in fields_of(silent)} - waiting
    page, _, rest = help_of(silent, ["--kettle.heat"]).partition("there is more with:\n")
    assert page.startswith(
        "what is set most:\n  --kettle.heat           what boils it; one of gas, coal (default: gas)"
    )
    assert "\nkettle: Boils water.\n  --kettle.litres         of water (default: 1.5)\n" in page
    assert not any(flag in page for flag in waiting)
    assert rest.splitlines() == [
        "  --lit                   --kettle.shelf",
        "  --kettle.whistles       --kettle.pitch, --kettle.notes",
    ]


def test_what_is_for_code_can_be_set_by_a_run_that_is_there() -> None:
    assert made("--kettle.model", "K2", recorded=True) == Kitchen(replace(Kettle(), model="K2"))
    assert "--kettle.model" not in flags(Kitchen())


@dataclass(frozen=True)
class Flame:
    """Burns at a height."""

    height: float


@dataclass(frozen=True)
@as_declared
class Stove:
    """Has burners, and a flame that has one height or another shape."""

    burners: int = 4
    gas: float = 0.5
    name: str = "S1"
    manual: Path | None = None
    sizes: tuple[int, ...] = ()
    knobs: tuple[int, str] = (1, "a")
    heat: Literal["gas", "coal", 3] = "gas"
    safe: bool = True
    flame: Flame | Kettle = field(default_factory=lambda: Flame(1.0))
    watch: Any = None  # a component, of which nothing is known

    def __post_init__(self) -> None:
        if self.burners < 1:  # a text would not compare
            raise UserError("no burner")


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("burners", "6", 6),
        ("burners", 6.0, 6),
        ("burners", np.int64(6), 6),
        ("gas", "1e-5", 1e-5),
        ("gas", " .5 ", 0.5),
        ("gas", 2, 2),
        ("gas", np.float32(0.5), 0.5),
        ("name", Path("a/b"), "a/b"),
        ("manual", "a/b", Path("a/b")),
        ("manual", None, None),
        ("sizes", [1, "2", 3.0], (1, 2, 3)),
        ("sizes", (1, 2), (1, 2)),
        ("sizes", 3, (3,)),
        ("knobs", [2, "b"], (2, "b")),
        ("heat", 3, 3),
        ("heat", "coal", "coal"),
        ("flame", 0.05, Flame(0.05)),
        ("flame", "0.05", Flame(0.05)),
        ("flame", {"litres": 2.0}, Kettle(litres=2.0)),
        ("flame", Kettle(), Kettle()),
        ("watch", "whatever", "whatever"),
    ],
)
def test_in_code_a_field_takes_what_can_mean_only_one_value_of_its_type(name: str, given: Any, meant: Any) -> None:
    found = getattr(Stove(**{name: given}), name)
    assert (found, type(found)) == (meant, type(meant))
    assert getattr(replace(Stove(), **{name: given}), name) == meant


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("burners", "many", "Stove's burners is 'many': give a whole number"),
        ("burners", 1.5, "Stove's burners is 1.5: give a whole number"),
        ("burners", True, "Stove's burners is True: give a whole number"),
        ("burners", None, "Stove's burners is None: give a whole number"),
        ("burners", 0, "no burner"),
        ("gas", "high", "Stove's gas is 'high': give a number"),
        ("gas", "nan", "Stove's gas is 'nan': give a number"),
        ("name", 3, "Stove's name is 3: give a text"),
        ("manual", 3, "Stove's manual is 3: give a path or None"),
        ("sizes", True, "Stove's sizes is True: give any number of: a whole number"),
        ("sizes", [1, "b"], r"Stove's sizes is \[1, 'b'\]: give any number of: a whole number"),
        ("knobs", [1], r"Stove's knobs is \[1\]: give a whole number and a text"),
        ("heat", "wood", "Stove's heat is 'wood': give one of gas, coal, 3"),
        ("heat", ["gas"], r"Stove's heat is \['gas'\]: give one of gas, coal, 3"),
        ("safe", "true", "Stove's safe is 'true': give True or False"),
        ("flame", "hot", r"Stove's flame is 'hot': give a number or Kettle\(...\)"),
        ("flame", {"light": 1}, r"Stove's flame is \{'light': 1\}: give a number or Kettle\(...\)"),
    ],
)
def test_what_a_field_cannot_mean_is_one_sentence_in_code_too(name: str, given: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}$"):
        Stove(**{name: given})


def settings_in(found: Any) -> Iterator[Any]:
    """All settings that a recipe, or a part of it, is made of."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        yield found
        for f in dataclasses.fields(found):
            yield from settings_in(getattr(found, f.name))
    elif isinstance(found, tuple):
        for one in found:
            yield from settings_in(one)


def test_every_field_of_every_recipe_takes_its_value_as_a_text_where_that_has_one_meaning_and_no_other_text() -> None:
    every = {type(s): s for name in recipe_names() for s in settings_in(find(name))}
    assert len(every) > 30
    for settings in every.values():
        hints = typing.get_type_hints(type(settings))
        for f in dataclasses.fields(settings):
            value, hint = getattr(settings, f.name), hints[f.name]
            if hint is float or hint is int or hint is Path:
                assert replace(settings, **{f.name: str(value)}) == settings, (type(settings), f.name)
            if hint in (int, float, bool, int | None, float | None) or typing.get_origin(hint) is Literal:
                with pytest.raises(UserError, match=f"{type(settings).__name__}'s {f.name} is 'neither': give "):
                    replace(settings, **{f.name: "neither"})
