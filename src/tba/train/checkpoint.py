"""Checkpoints: the model in the Hugging Face layout, the optimizer's state, and where the run stood.

    checkpoints/step-N/   config.json model.safetensors (tokenizer)   optimizer.safetensors optimizer.json   run.json

Invariant: a folder named step-N is whole and on the disk; the newest `keep` are there. `from_pretrained` takes one as
it is, and a run resumed from one goes on bit for bit as if it had not stopped. One process writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tba.errors import UserError
from tba.train.optimizer import Optimizer
from tba.types import Json, Version
from tba.weights.beside import folder_beside, remove_folder, remove_leftovers

RUN = "run.json"
STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that is there. `path` is what the model is loaded from."""

    path: Path
    version: Version
    state: Mapping[str, Json]  # what was given to `save`: generators, cursors

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Raises `UserError` when there is none, or it is damaged."""
        try:
            run = json.loads((path / RUN).read_text())
            return cls(path, Version.parse(run["version"]), run["state"])
        except FileNotFoundError as error:
            raise UserError(f"there is no checkpoint at {path} (no {RUN}); give a folder checkpoints/step-N") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"the checkpoint at {path} is damaged ({RUN}: {error}); give an older one") from error


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. Raises `UserError` when `keep` is less than 1."""

    path: Path
    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"{self.keep} checkpoints are to be kept, but the newest always is; give 1 or more")

    def save(
        self,
        version: Version,
        save_model: Callable[[Path], None],
        optimizer: Optimizer,
        state: Mapping[str, Json],
    ) -> Checkpoint:
        """Write step-N; one of the same step is replaced, as after a resume.

        `save_model` writes the model (and its tokenizer) into the folder it is given; `state` is JSON.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path)
        folder = self.path / f"step-{version.step}"
        with folder_beside(folder, durable=True) as beside:
            save_model(beside)
            optimizer.save(beside)
            (beside / RUN).write_text(json.dumps({"version": str(version), "state": dict(state)}))
            if folder.exists():
                remove_folder(folder)
        for old in self._folders()[: -self.keep]:
            remove_folder(old)
        return Checkpoint(folder, version, state)

    def newest(self) -> Checkpoint | None:
        """The checkpoint of the latest version, None when there is none. Raises `UserError` when it is damaged."""
        folders = self._folders()
        return Checkpoint.load(folders[-1]) if folders else None

    def _folders(self) -> list[Path]:
        """Oldest version first: a resume may have gone back to an earlier step."""
        if not self.path.is_dir():
            return []
        named = [folder for folder in self.path.iterdir() if STEP.fullmatch(folder.name)]
        return sorted(named, key=lambda folder: Checkpoint.load(folder).version)
