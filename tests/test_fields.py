"""Fields of settings by dotted name: which count, what a word is read as, what is said of what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tba.errors import UserError
from tba.fields import BY_CODE, fields_of, flags, help_of
from tba.settings import override


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
