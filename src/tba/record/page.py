"""A report as one HTML file: the data as JSON, with the scripts and styles that show them.

Invariant: the file asks nothing of anybody and executes nothing of the data. Its Content-Security-Policy allows these
scripts and styles by their hashes and nothing else; the data stand in an element that is never executed, in which every
`<`, `>` and `&` is written as an escape, and the script puts them on the page as text only.

Charts are drawn by uPlot (MIT, `page/uPlot-LICENSE.txt`), a copy of its own bundle.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from tba.types import Json

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = ("uPlot.js", "report.js")
_STYLES = ("uPlot.css", "report.css")


def page(data: Json) -> bytes:
    """Returns the HTML of a report on `data`."""
    scripts = [_read(name) for name in _SCRIPTS]
    styles = [_read(name) for name in _STYLES]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "STYLES": "".join(f"<style>{style}</style>" for style in styles),
        "DATA": embedded(data),
        "SCRIPTS": "".join(f"<script>{script}</script>" for script in scripts),
    }
    text = _read("report.html")
    for name, part in parts.items():
        before, _, after = text.partition(f"<!--{name}-->" if name != "POLICY" else name)
        text = before + part + after
    return text.encode(errors="replace")


def embedded(data: Json) -> str:
    """Returns JSON that can stand inside a script element: it has neither `<`, `>` nor `&`."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
