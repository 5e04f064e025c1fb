"""The terminals to which messages for people are printed.

Invariant: what is printed is text: nothing in it stands for a style, a picture or a command to the terminal. What
cannot be printed any more ends no run.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from io import StringIO
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.text import Text

from tba.record.text import printable

_WIDTH = 100  # columns of what is shown where there is no terminal


class LossyOutput:
    """Writes to standard output until it fails (a full disk, a reader that has gone), and then drops what follows."""

    def write(self, text: str) -> int:
        """Write the text; returns its length."""
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError as error:
            self.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush standard output."""
        try:
            sys.stdout.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())  # which then takes what is buffered, too
        os.close(devnull)
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"tba: standard output cannot be written ({error.strerror}): it goes on without\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


class Terminal(Console):
    """rich's console, with every text made harmless, in tables too. A `Text` is printed unchanged."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns the text with control characters spelt out."""
        return super().render_str(printable(text, sys.maxsize), **options)


def terminal(quiet: bool = False) -> Terminal:
    """Returns a terminal on standard output. quiet: it prints nothing."""
    return Terminal(markup=False, emoji=False, quiet=quiet, file=cast(IO[str], LossyOutput()))


class Displayable(ABC):
    """Shows itself to people: as text for `repr`, as HTML in a notebook."""

    @abstractmethod
    def _content(self) -> RenderableType:
        """Returns the content to show."""

    def __repr__(self) -> str:
        return "\n".join(line.rstrip() for line in self._rendered().export_text().strip().splitlines())

    def _repr_html_(self) -> str:
        style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace"
        return self._rendered().export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')

    def _rendered(self) -> Terminal:
        console = Terminal(markup=False, emoji=False, file=StringIO(), record=True, width=_WIDTH)
        console.print(self._content())
        return console
