"""Data sets by their name on the Hugging Face Hub (the extra `tba-rl[hub]`).

Invariant: what cannot be loaded ends in one sentence: the name, why, and what to give instead.
"""

from __future__ import annotations

import re

from tba.errors import UserError
from tba.tables import is_file_of_rows
from tba.tasks.rows import Row

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def rows_from_hub(task: str, name: str, split: str, local: str, configuration: str | None = None) -> list[Row]:
    """Returns all rows of a split. `local` says what the user can give instead of a Hub name. Raises `UserError`."""
    if not _NAME.fullmatch(name) or is_file_of_rows(name):
        raise UserError(f"{task} has path {name!r}, which does not exist: give a Hub name or {local}")
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{task} has path {name!r}, which is no local folder or file, and a Hub name needs `pip install datasets`: "
            f"install it, or give {local}"
        ) from error
    try:
        rows = datasets.load_dataset(name, configuration, split=split)
    except (OSError, ValueError) as error:  # no network, no such data set, no such configuration
        raise UserError(
            f"{task} could not load {name!r} from the Hub ({type(error).__name__}: {error}): check the name and the "
            f"network, or give {local}"
        ) from error
    return [Row(dict(row), f"row {n} of {name} ({split})") for n, row in enumerate(rows)]
