r"""Signs of Unicode as ASCII and LaTeX: `２½`, `x²`, `√2`, `−5`, `θ`, `x ≤ 2`.

Invariant: a text in ASCII is not changed, and a sign that is not known here stays as it is.
"""

# ruff: noqa: RUF001  (the signs themselves, many of which look like others)
from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

FRACTIONS = {sign: Fraction(unicodedata.numeric(sign)).limit_denominator(9) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_ZEROS = (0x0660, 0x06F0, 0x0966, 0x09E6, 0x0E50, *range(0x1D7CE, 0x1D800, 10))  # of other scripts, of mathematics
_LETTERS_AND_SIGNS = {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)}  # as wide as a Chinese sign
_DIGITS = {zero + digit: str(digit) for zero in _ZEROS for digit in range(10)}
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff"  # soft hyphen, spaces and joiners of no width, byte order mark
_DASHES = "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"  # minus sign, hyphens, dashes, small and wide ones
WIDE = _LETTERS_AND_SIGNS | {0x3000: " "} | _DIGITS | dict.fromkeys(map(ord, _INVISIBLE), "")
WIDE |= dict.fromkeys(map(ord, _DASHES), "-")

_COMMANDS = {
    "√": "sqrt",
    "×": "times",
    "·": "cdot",
    "⋅": "cdot",
    "∞": "infty",
    "≤": "le",
    "≥": "ge",
    "≠": "ne",
    "≈": "approx",
    "±": "pm",
    "∓": "mp",
    "∪": "cup",
    "∩": "cap",
    "∈": "in",
    "∅": "emptyset",
    "∖": "setminus",
    "∧": "land",
    "∨": "lor",
}
_TEXTS = {"∛": "\\sqrt[3]", "÷": "/", "∕": "/", "⁄": "/", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "’": "'", "º": "°"}
_TEXTS |= dict.fromkeys("⟨〈", "(") | dict.fromkeys("⟩〉", ")")


def _greek(letter: str) -> str:
    name = unicodedata.name(letter).split()[-1].lower().replace("lamda", "lambda")
    return name.capitalize() if letter.isupper() else name


_COMMANDS |= {letter: _greek(letter) for letter in "αβγδεθλμνξπρστφχψωΓΔΘΛΠΣΦΨΩ"}
_LATEX = str.maketrans(
    {ord(sign): text for sign, text in _TEXTS.items()}
    | {ord(sign): f"\\{name} " for sign, name in _COMMANDS.items()}
    | {ord(sign): f"\\frac{{{value.numerator}}}{{{value.denominator}}}" for sign, value in FRACTIONS.items()}
    | WIDE
)
_ROOT = re.compile(r"([√∛])\s{0,9}(?:\(([^()]{1,99})\)|([0-9]{1,30}))")
_SUPERSCRIPTS = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]++")
_POWER = re.compile(r"(?<=[0-9])[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]++")
_SUBSCRIPTS = re.compile(r"[₀₁₂₃₄₅₆₇₈₉₊₋]++")
_LEVEL_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-n0123456789+-")


def with_powers(text: str) -> str:
    """Returns the text with raised digits behind a digit as a power: `10²` as `10^2`, but `cm²` as it is."""
    return _POWER.sub(lambda m: f"^{m[0].translate(_LEVEL_DIGITS)}", text)


def to_latex(text: str) -> str:
    r"""Returns the text with Unicode's mathematics as LaTeX: `2√3` as `2\sqrt {3}`, `x₁²` as `x_{1}^{2}`."""
    if text.isascii():
        return text
    text = _ROOT.sub(lambda m: f"{m[1]}{{{m[2] or m[3]}}}", text)
    text = _SUPERSCRIPTS.sub(lambda m: f"^{{{m[0].translate(_LEVEL_DIGITS)}}}", text)
    text = _SUBSCRIPTS.sub(lambda m: f"_{{{m[0].translate(_LEVEL_DIGITS)}}}", text)
    return unicodedata.normalize("NFC", text.translate(_LATEX))
