"""Checkpoints: the model in the Hugging Face layout, the optimizer's state, and where the run stood.

    checkpoints/step-N/   config.json model.safetensors (tokenizer)   (heads.safetensors)
                          optimizer.safetensors optimizer.json   run.json

Invariant: a folder named step-N is whole and on the disk; the newest `keep` are there. `from_pretrained` takes one as
it is, and a run resumed from one goes on bit for bit as if it had not stopped. One process writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from tba.errors import UserError
from tba.train.optimizer import Optimizer
from tba.types import Json, Version
from tba.weights.beside import folder_beside, remove_folder, remove_leftovers

RUN = "run.json"
HEADS = "heads.safetensors"
STEP = re.compile(r"step-\d+")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that is there. `path` is what the model is loaded from."""

    path: Path
    version: Version
    state: Mapping[str, Json]  # what was given to `save_checkpoint`: generators, cursors

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

    def load_heads(self, heads: torch.nn.ModuleDict) -> None:
        """Put what was saved into a policy's heads. Raises `UserError` when they are missing, damaged or others."""
        if not heads:
            return
        try:
            heads.load_state_dict(safetensors.torch.load_file(self.path / HEADS))
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"the checkpoint at {self.path} cannot give the heads {', '.join(heads)} ({reason}); give one that was "
                "trained with the same objective"
            ) from error


def save_checkpoint(
    folder: Path,
    version: Version,
    save_model: Callable[[Path], None],
    optimizer: Optimizer,
    state: Mapping[str, Json] | None = None,
    keep: int = 2,
    heads: torch.nn.ModuleDict | None = None,
) -> Checkpoint:
    """Write `folder`/step-N and take away all but the newest `keep`; one of the same step is replaced.

    `save_model` writes the model (and its tokenizer) into the folder it is given; `state` is what JSON can hold;
    `heads` are the policy's, beside the model, which has no place for them.
    Raises `UserError` when `keep` is less than 1.
    """
    if keep < 1:
        raise UserError(f"{keep} checkpoints are to be kept, but the newest always is; give 1 or more")
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    path = folder / f"step-{version.step}"
    with folder_beside(path, durable=True) as beside:
        save_model(beside)
        optimizer.save(beside)
        if heads:
            safetensors.torch.save_file(heads.state_dict(), beside / HEADS)
        (beside / RUN).write_text(json.dumps({"version": str(version), "state": dict(state or {})}))
        if path.exists():
            remove_folder(path)
    for old in _folders(folder)[:-keep]:
        remove_folder(old)
    return Checkpoint.load(path)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """That of the latest version, None when there is none. Raises `UserError` when one is damaged."""
    folders = _folders(folder)
    return Checkpoint.load(folders[-1]) if folders else None


def _folders(folder: Path) -> list[Path]:
    """Oldest version first: by steps alone, a resume from an earlier step would count as older."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if STEP.fullmatch(path.name)]
    return sorted(named, key=lambda path: Checkpoint.load(path).version)
