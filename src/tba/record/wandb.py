"""Weights & Biases, for users who name a project; nothing is sent otherwise.

Invariant: the same numbers as `metrics.jsonl`, under the same names, by optimizer step. No text is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.errors import UserError
from tba.types import Json


class WandbRun:
    """One run of a W&B project. Raises `UserError` when the package is not installed."""

    def __init__(self, project: str, directory: Path, recipe: Mapping[str, Json]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"W&B project {project!r} was asked for, but the package wandb is not installed; "
                "run `pip install wandb` or leave the field empty."
            ) from None
        self._run: Any = wandb.init(
            project=project, name=directory.name, dir=str(directory), config=dict(recipe), resume="allow"
        )
        # its own axis: an evaluation comes later than the step of the weights it measured, and W&B's own
        # counter refuses to go back
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """`metrics` at an optimizer step."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()
