"""The reference policy during a run: which version it is, when it is reset, and which versions are pinned for it.

Invariant: a reference is a published version that is pinned while it is the newest or the one before (a searcher may be
loading it), while a trajectory in memory has its log-probabilities, and while a checkpoint that was made under it is
kept. Every published manifest names the current reference; the first is the model that the run begins with, which needs
no version of its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from tba.errors import UserError
from tba.protocols import KeptWeights
from tba.replay.replay import Replay
from tba.training.checkpoint import Checkpoint, checkpoints_in
from tba.types import Json, Version

log = logging.getLogger("tba.trainer")
PIN_REASON = "reference"


@dataclass
class References:
    """Resets the reference to the policy every so many optimizer steps."""

    every: int  # optimizer steps; 0: never
    steps: int  # of the run: its last step resets nothing
    checkpoints: Path  # the folder of those that are kept
    replay: Replay
    weights: KeptWeights
    resets: list[dict[str, Json]] = field(default_factory=list)  # {"step", "version", "wall_seconds"}, for the summary
    _pinned: list[Version] = field(default_factory=list)

    def is_due(self, version: Version) -> bool:
        """Returns whether the reference is to become `version`."""
        step = version.step
        return 0 < step < self.steps and self.every > 0 and step % self.every == 0 and self.current.step != step

    @property
    def current(self) -> Version:
        """Returns the reference under which the trainer trains."""
        return self.replay.reference

    def reset(self, version: Version, wall_seconds: float) -> None:
        """Make `version`, which is published, the reference from here on. No checkpoint is being written meanwhile."""
        self.weights.pin(version, PIN_REASON)
        of_checkpoints = {checkpoint_reference(path) for path, _ in checkpoints_in(self.checkpoints)}
        versions_kept = {version, self.current, *self.replay.references, *of_checkpoints}
        for unused_version in [v for v in self._pinned if v not in versions_kept]:
            self.weights.unpin(unused_version, PIN_REASON)
            self._pinned.remove(unused_version)
        self._pinned.append(version)
        self.replay.reference = version
        self.resets.append({"step": version.step, "version": str(version), "wall_seconds": round(wall_seconds, 3)})
        log.info("the reference is version %s of the policy from now on", version)

    def state(self) -> Json:
        """Returns what `restore` takes: the resets so far."""
        return {"resets": list(self.resets)}

    def restore(self, state: Json) -> None:
        """Continue from `state`. Pinned versions stay pinned until the next reset."""
        self.resets[:] = state["resets"]
        self._pinned[:] = [version for version in self.weights.versions() if PIN_REASON in self.weights.pins(version)]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the step, where there are resets."""
        return {"reference_step": float(self.current.step)} if self.every else {}


def checkpoint_reference(checkpoint: Path) -> Version | None:
    """Returns the reference that a checkpoint was made under; None for one that is damaged."""
    try:
        return Version.parse(Checkpoint.load(checkpoint).state.get("reference", str(Version())))
    except UserError:
        return None
