"""The few errors a caller may catch.

TbaError
├── UserError          bad input: one sentence saying what was given, what is wanted, what to do; exit code 2
│   └── SeveralSegments an episode of several segments is given to what reads one
├── DeadlineExceeded   a wait expired: names the part, its process id and its log file
├── PartFailed         a searcher or the trainer ended with an error of its own
├── HandedOutLost      what was offered to be fetched is gone with the process that held it: ask again
└── NonFiniteLoss      three non-finite steps in a row; the batch was saved
"""

from __future__ import annotations


class TbaError(Exception):
    """Everything this project raises on purpose."""


class UserError(TbaError):
    """Input that cannot be used. The message is one clear sentence; the command line prints it and exits with 2."""


class SeveralSegments(UserError):
    """An episode has several segments, of which each reads only itself, and `reader`, in words, needs one."""

    def __init__(self, segments: int, reader: str) -> None:
        super().__init__(
            f"an episode has {segments} segments, of which each reads only itself, but {reader} one text from its "
            "beginning to its end: leave such episodes out, or do without"
        )


class DeadlineExceeded(TbaError):
    """A wait with a deadline expired; the message names what was waited for."""


class PartFailed(TbaError):
    """A part of a run (a searcher, the trainer) ended with an error; the message holds its own traceback's tail."""


class HandedOutLost(TbaError):
    """Says that what was offered to be fetched is gone with the process that held it: ask for another offer."""


class NonFiniteLoss(TbaError):
    """Three steps in a row had a non-finite loss or gradient; the weights are untouched and the batch is saved."""
