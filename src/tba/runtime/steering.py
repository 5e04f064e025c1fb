"""What the controller of staleness moves, and how far searchers may be ahead: the runtime's end of both.

Invariant: with `control.signal` none nothing is moved and nothing is recorded of it. A change holds from the next batch
that is drawn, and from the next update on for the sync interval.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tba.recipe import Recipe
from tba.replay.replay import Replay
from tba.train.control import Controller
from tba.train.trainer import Trainer
from tba.types import Json

log = logging.getLogger("tba.trainer")


@dataclass
class Steering:
    """The controller at its levers: the trainer's sync interval and the replay's share of recent groups."""

    recipe: Recipe
    trainer: Trainer
    replay: Replay
    controller: Controller

    @classmethod
    def of(cls, recipe: Recipe, trainer: Trainer, replay: Replay) -> Steering:
        """Before anything was moved."""
        selection: Any = recipe.replay.selection  # with control on the recipe has seen to it that there is an m
        m = getattr(selection, "m", math.nan)
        return cls(recipe, trainer, replay, recipe.control.start(recipe.sync_every, m))

    def after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Show the controller a step's metrics; what held during it, for the step's line."""
        controller = self.controller
        if not controller.on:
            return {}
        held = {"sync_every": float(controller.sync_every), "m": controller.m}
        if (change := controller.observe(step, metrics)) is not None:
            self._apply()
            log.info(
                "%s was %.3g: k = %d and m = %g from step %d on",
                change.signal, change.value, change.sync_every, change.m, step,
            )  # fmt: skip
        return held

    def notes(self) -> dict[str, Json]:
        """For the manifest: how many trajectories are wanted in all before searchers ease off, if that is bounded."""
        batch = self.recipe.groups_per_step * self.recipe.group_size
        wanted = self.replay.wanted(batch, self.trainer.sync_every)
        return {} if wanted is None else {"wanted": wanted}

    def changes(self) -> list[dict[str, Json]]:
        """Every move so far, for the summary."""
        return [change.to_json() for change in self.controller.changes]

    def state(self) -> Json:
        """What `restore` takes."""
        return self.controller.state() if self.controller.on else None

    def restore(self, state: Json) -> None:
        """Go on where `state` was taken."""
        if self.controller.on and state is not None:
            self.controller.restore(state)
            self._apply()

    def _apply(self) -> None:
        self.trainer.sync_every = self.controller.sync_every
        self.replay.steer(self.controller.m, self.controller.sync_every)
