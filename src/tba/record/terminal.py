"""The terminals to which messages for people are printed.

Invariant: what is printed is text: nothing in it stands for a style, a picture or a command to the terminal.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from tba.record.text import printable


class Terminal(Console):
    """rich's console, with every text made harmless, in tables too. A `Text` is printed unchanged."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Returns the text to show."""
        return super().render_str(printable(text, sys.maxsize), **how)


def terminal(quiet: bool = False) -> Terminal:
    """Standard output; quiet: nothing is printed."""
    return Terminal(markup=False, emoji=False, quiet=quiet)
