r"""Units of measurement after a number (`5 cm`, `12\text{ square feet}`, `60 km/h`), so that `5 cm` is not `5 m`.

Invariant: one unit has one name, however it is spelt; what is not in the table is not a unit (`5 apples`) and is
ignored. Nothing is converted: 50 mm and 5 cm are two answers. Any text is read in time linear in its length.
The half of the day (`3 p.m.`) counts as one too.
"""

from __future__ import annotations

import re

_SPELT = {
    "nanometer": "nm nanometer nanometre",
    "millimeter": "mm millimeter millimetre",
    "centimeter": "cm centimeter centimetre",
    "meter": "m meter metre",
    "kilometer": "km kilometer kilometre",
    "inch": "in inch inche",  # of inches, less its s
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "acre": "acre",
    "hectare": "ha hectare",
    "milligram": "mg milligram",
    "gram": "g gram gramme",
    "kilogram": "kg kilogram kilo",
    "ounce": "oz ounce",
    "pound": "lb pound",
    "ton": "ton tonne",
    "milliliter": "ml milliliter millilitre",
    "liter": "l liter litre",
    "cup": "cup",
    "pint": "pint",
    "quart": "quart",
    "gallon": "gal gallon",
    "second": "s sec second",
    "minute": "min minute",
    "hour": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "a.m.": "am",
    "p.m.": "pm",
    "volt": "V volt",
    "ohm": "Ω ohm",
    "watt": "W watt",
    "joule": "J joule",
    "newton": "N newton",
    "celsius": "C celsius centigrade",
    "fahrenheit": "F fahrenheit",
    "cent": "cent",
    "dollar": "dollar",
    "euro": "euro",
    "percent": "% percent",
}
_NAMES = {spelling: name for name, spellings in _SPELT.items() for spelling in spellings.split()}
LETTERS = {letter: name for letter, name in _NAMES.items() if len(letter) == 1 and letter.isalpha()} | {"L": "liter"}
CURRENCIES = {"$": "dollar", "€": "euro"}  # before a number; what is paid for is not said: $5 may be dollars per hour
_SPEEDS = {"mph": "mile per hour", "kph": "kilometer per hour", "kmh": "kilometer per hour"}
_GAP = r"(?>(?:[ {}~]|\\[,;:! ])*)"
_UNIT = re.compile(
    rf"-?{_GAP}(?>(?:(?P<kind>square|sq|cubic|cu)(?![A-Za-z])\.?{_GAP})?)"
    rf"(?>(?:(?:degrees?+|\^?{_GAP}°){_GAP}(?=[CF](?![A-Za-z])|[Cc]el|[Cc]ent|[Ff]ahr))?)"
    rf"(?P<word>%|Ω|[AaPp]\.[Mm](?![A-Za-z])|[A-Za-z]++)"
    rf"(?>(?:{_GAP}\^\{{?\s?(?P<raised>[23])(?![0-9])\}}?|(?P<small>[²³]))?)(?>(?:{_GAP}(?:/|per(?![A-Za-z])){_GAP}(?P<per>[A-Za-z]++))?)"
)
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3", "²": "2", "³": "3", "2": "2", "3": "3"}
_MORE = re.compile(r" ++[A-Za-z]")


def unit_after(text: str, at: int) -> tuple[str | None, int]:
    """Returns the name of the unit at `at` in a plain text (right after a number) and where it ends; None: no unit."""
    match = _UNIT.match(text, at)
    if match is None or (match["word"] == "in" and _MORE.match(text, match.end())):  # 5 in total
        return None, at
    word = match["word"].replace(".", "")
    name = _SPEEDS.get(word.lower()) or _named(word)
    if name is None:
        return None, at
    power = _POWERS.get(match["kind"] or match["raised"] or match["small"])
    per = _named(match["per"]) if match["per"] else None
    return name + (f"^{power}" if power else "") + (f" per {per}" if per else ""), match.end()


def differ(one: str | None, other: str | None) -> bool:
    """Whether both are units, and not the same; a sign of `CURRENCIES` is the same as its currency per anything."""
    if one is None or other is None or one == other:
        return False
    for sign, unit in ((one, other), (other, one)):
        if sign in CURRENCIES:
            return CURRENCIES[sign] != unit.partition(" per ")[0]
    return True


def _named(word: str) -> str | None:
    """A single letter is a unit only as written (`m`, not `M`), except the liter; a word in any case or number."""
    lower = word.lower()
    if len(word) == 1:
        return LETTERS.get(word) or _NAMES.get(word)
    return _NAMES.get(lower) or _NAMES.get(lower.removesuffix("s")) if len(lower) > 2 else _NAMES.get(lower)
