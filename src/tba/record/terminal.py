"""Where people are told things.

Invariant: what is printed is text: nothing in it stands for a style, a picture or a command to the terminal.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from tba.record.text import printable


class Terminal(Console):
    """rich's, with every text made harmless, in tables too. A `Text` is taken as it is: who makes one sees to it."""

    def render_str(self, text: str, **how: Any) -> Text:
        """What a text is shown as."""
        return super().render_str(printable(text, sys.maxsize), **how)


def terminal(quiet: bool = False) -> Terminal:
    """Standard output; quiet: nothing is printed."""
    return Terminal(markup=False, emoji=False, quiet=quiet)
