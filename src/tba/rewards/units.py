r"""Units of measurement after a number (`5 cm`, `12\text{ square feet}`, `60 km/h`), so that `5 cm` is not `5 m`.

Invariant: one unit has one name, however it is spelt; what is not in the table is not a unit (`5 apples`) and is
ignored. Nothing is converted: 50 mm and 5 cm are two answers. Any text is read in time linear in its length.
The half of the day (`3 p.m.`) counts as one too. Decimal prefixes are read by their case: mW and MW, Mb and MB differ.
"""

from __future__ import annotations

import re
from collections import Counter

_SPELLINGS = {
    "inch": "in inch inche",  # of inches, less its s
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "acre": "acre",
    "hectare": "ha hectare",
    "ounce": "oz ounce",
    "pound": "lb pound",
    "ton": "ton tonne",
    "stone": "stone",
    "cup": "cup",
    "pint": "pint",
    "quart": "quart",
    "gallon": "gal gallon",
    "tablespoon": "tbsp tablespoon",
    "teaspoon": "tsp teaspoon",
    "minute": "min minute",
    "hour": "h hr hour",
    "day": "day",
    "week": "week",
    "fortnight": "fortnight",
    "month": "month",
    "year": "yr year",
    "decade": "decade",
    "century": "century centurie",
    "millennium": "millennium millennia millenium",
    "a.m.": "am",
    "p.m.": "pm",
    "celsius": "C celsius centigrade",
    "fahrenheit": "F fahrenheit",
    "degree": "° degree deg",
    "radian": "rad radian",
    "revolution": "rev revolution",
    "atmosphere": "atm atmosphere",
    "knot": "knot",
    "horsepower": "hp horsepower",
    "dozen": "dozen",
    "cent": "cent ¢",
    "penny": "penny pence pennie",
    "nickel": "nickel",
    "dime": "dime",
    "quarter": "quarter",
    "dollar": "dollar usd",
    "euro": "euro eur",
    "yen": "¥ yen jpy",
    "rupee": "₹ rupee inr",
    "franc": "franc",
    "peso": "peso",
    "yuan": "yuan cny rmb",
    "percent": "% percent",
    "unit": "unit",  # whichever they are
}
_PREFIXED_SPELLINGS = {  # these also with a decimal prefix, except as given
    "meter": "m meter metre",
    "gram": "g gram gramme",
    "liter": "l L liter litre",
    "second": "s sec second",
    "volt": "V volt",
    "ampere": "amp ampere",
    "ohm": "Ω ohm",
    "watt": "W watt",
    "joule": "J joule",
    "newton": "N newton",
    "hertz": "Hz hertz",
    "pascal": "Pa pascal",
    "kelvin": "K kelvin",
    "mole": "mol mole",
    "calorie": "cal calorie",
    "electronvolt": "eV electronvolt",
    "farad": "farad",
    "coulomb": "coulomb",
    "tesla": "tesla",
    "henry": "henry",
    "lumen": "lumen",
    "candela": "candela",
    "becquerel": "Bq becquerel",
    "bar": "bar",
    "bit": "bit",
    "byte": "byte",
}
_PREFIXES = {
    "p": "pico",
    "n": "nano",
    "µ": "micro",
    "m": "milli",
    "c": "centi",
    "d": "deci",
    "k": "kilo",
    "M": "mega",
    "G": "giga",
    "T": "tera",
}
_ONLY_PREFIXED = {"b": "bit", "B": "byte", "A": "ampere"}  # 5 A may be a grade: alone no unit
_ABBREVIATIONS = {
    "gm": "gram",
    "cc": "centimeter^3",
    "kilo": "kilogram",
    "KB": "kilobyte",
    "Kb": "kilobit",
    "mcg": "microgram",
    "lbs": "pound",
    "mph": "mile per hour",
    "kph": "kilometer per hour",
    "kmh": "kilometer per hour",
    "fps": "foot per second",
    "rpm": "revolution per minute",
    "mpg": "mile per gallon",
    "kmph": "kilometer per hour",
    "bps": "bit per second",
    "kbps": "kilobit per second",
    "Mbps": "megabit per second",
}


def _unit_names() -> dict[str, str]:
    """Returns the name of every spelling."""
    names = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
    for name, spellings in _PREFIXED_SPELLINGS.items():
        for spelling in spellings.split():
            names[spelling] = name
            is_word = len(spelling) > 2 and spelling.islower() and spelling not in ("mol", "cal", "bar", "sec", "amp")
            for sign, prefix in _PREFIXES.items():
                names.setdefault((prefix if is_word else sign) + spelling, prefix + name)
    for letter, name in _ONLY_PREFIXED.items():
        names |= {sign + letter: prefix + name for sign, prefix in _PREFIXES.items() if letter == "A" or sign in "kMGT"}
    names |= {sign + "Wh": f"hour {prefix}watt" for sign, prefix in (*_PREFIXES.items(), ("", ""))}
    return names | _ABBREVIATIONS


_NAMES = _unit_names()
_CASELESS_SPELLINGS = ["km", "cm", "mm", "kg", "mg", "ml", "khz", "ghz", "kw", "kwh", "kj"]
_CASELESS_NAMES = {
    **{
        spelling.lower(): _NAMES[spelling]
        for _, spellings in (*_SPELLINGS.items(), *_PREFIXED_SPELLINGS.items())
        for spelling in spellings.split()
    },
    **{spelling: name for spelling, name in _NAMES.items() if len(spelling) > 4 and spelling.islower()},
    **{spelling.lower(): name for spelling, name in _ABBREVIATIONS.items()},
    **{name: next(n for s, n in _NAMES.items() if s.lower() == name) for name in _CASELESS_SPELLINGS},
    "mhz": "megahertz",
    "kb": "kilobyte",
    "mb": "megabyte",
    "gb": "gigabyte",
    "tb": "terabyte",
}
LETTERS = {letter: name for letter, name in _NAMES.items() if len(letter) == 1 and letter.isalpha()}
# before a number; what is paid for is not said: $5 may be dollars per hour
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_TEMPERATURES = ("celsius", "fahrenheit")
_GAP = r"(?>(?:[ {}~]|\\[,;:! ])*)"
_UNIT = re.compile(
    rf"-?{_GAP}(?>(?:(?P<kind>square|sq|cubic|cu)(?![A-Za-z])\.?{_GAP}-?)?)"
    rf"(?>(?:(?:degrees?+|\^?{_GAP}°){_GAP}(?=[CF](?![A-Za-z])|[Cc]el|[Cc]ent|[Ff]ahr))?)"
    rf"(?P<word>%|Ω|[¢¥₹]|\^?{_GAP}°|[AaPp]\.[Mm](?![A-Za-z])|µ?{_GAP}[A-Za-zΩ]++)"
    rf"(?P<power>(?>(?:{_GAP}(?:\^\{{?\s?-?[0-9]\}}?|[²³]|squared|cubed))?))"
    rf"(?P<times>(?>(?:{_GAP}[*·]{_GAP}[A-Za-zΩ]++|{_GAP}-?(?:hour|meter|metre|pound)s?(?![A-Za-z])|{_GAP}[A-Za-z]++{_GAP}\^\{{?\s?-[0-9]\}}?)?))"
    rf"(?P<per>(?>(?:{_GAP}(?:/|per(?![A-Za-z])){_GAP}(?:square |cubic )?[A-Za-z]++"
    rf"(?:{_GAP}(?:\^\{{?\s?[0-9](?![0-9])\}}?|[²³]|squared))?)?))"
    rf"(?P<again>(?>(?:{_GAP}(?:/|per(?![A-Za-z])){_GAP}[A-Za-z]++)?))"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "²": 2, "cubic": 3, "cu": 3, "cubed": 3, "³": 3}
_FACTOR = re.compile(
    rf"(?>(?:{_GAP}(?:[*·/-]|per(?![A-Za-z])))?){_GAP}(?P<kind>(?>(?:(?:square|cubic)(?= ))?)){_GAP}"
    r"(?P<word>[A-Za-zΩ]++)"
    rf"(?P<power>(?>(?:{_GAP}(?:\^\{{?\s?-?[0-9]|[²³]|squared))?))"
)
_NEXT_WORD = re.compile(r" ++[A-Za-z]")


def unit_after(text: str, position: int) -> tuple[str | None, int]:
    """Returns the name of the unit at a position of a plain text (behind a number) and where it ends; None: no unit."""
    match = _UNIT.match(text, position)
    if match is None or (match["word"] == "in" and _NEXT_WORD.match(text, match.end())):  # 5 in total
        return None, position
    name = _find_unit("".join(match["word"].strip("^ {}~").replace(".", "").split()))
    if name is None:
        return None, position
    end = match.end("power")
    exponent = _exponent(match["kind"]) or _exponent(match["power"]) or 1
    if name in ("a.m.", "p.m.", "percent") and exponent == 1:
        return name, match.end("word")
    powers = Counter({name: exponent})
    for group, sign in (("times", 1), ("per", -1), ("again", -1)):
        if not match[group]:
            continue
        factor = _FACTOR.match(match[group])
        factor_name = _find_unit(factor["word"]) if factor else None
        if factor is None or factor_name is None:
            break
        powers[factor_name] += sign * (_exponent(factor["kind"]) or _exponent(factor["power"]) or 1)
        end = match.end(group)
    return _unit_name(powers), end


def differ(a: str | None, b: str | None) -> bool:
    """Returns whether both are units, and differ.

    A sign of `CURRENCIES` is the same as its currency per anything, a degree the same as one of a temperature, a unit
    the same as any, and square units the same as the square of any.
    """
    if a is None or b is None or a == b:
        return False
    for sign, unit in ((a, b), (b, a)):
        if sign in CURRENCIES:
            return CURRENCIES[sign] != unit.partition(" per ")[0]
        if sign == "unit" or (sign == "degree" and unit in _TEMPERATURES):
            return False
        if sign.startswith("unit^"):
            return sign[-2:] != unit[-2:]
    return True


def _unit_name(powers: Counter[str]) -> str:
    numerator = sorted(name + (f"^{n}" if n > 1 else "") for name, n in powers.items() if n > 0)
    denominator = sorted(name + (f"^{-n}" if n < -1 else "") for name, n in powers.items() if n < 0)
    return " ".join(numerator) + (f" per {' '.join(denominator)}" if denominator else "")


def _exponent(text: str | None) -> int | None:
    """Returns the exponent that a word or a raised number stands for."""
    if not text:
        return None
    word = text.strip(" {}~\\,;:!")
    digits = word.strip("^{ }")
    return _POWERS.get(word) or (int(digits) if digits.lstrip("-").isdigit() else None)


def _find_unit(word: str) -> str | None:
    """Returns the unit that a word names: a single letter as written (`m`, not `M`), others in any case or number."""
    name = _NAMES.get(word)
    if name is not None or len(word) == 1:
        return name
    lowercase = word.lower()
    name = _CASELESS_NAMES.get(lowercase)
    return _CASELESS_NAMES.get(lowercase.removesuffix("s")) if name is None and len(lowercase) > 2 else name
