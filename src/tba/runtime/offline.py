"""Learning from the buffer alone: no searcher brings anything, so what is missing at the beginning stays missing.

Invariant: an offline run that cannot make its last step is refused before its first.
"""

from __future__ import annotations

import math

from tba.errors import UserError
from tba.recipe import Recipe
from tba.replay.follower import JournalFollower
from tba.replay.replay import Replay
from tba.replay.selection import SMALLEST_GROUP


def require_enough(recipe: Recipe, replay: Replay, journal: JournalFollower) -> None:
    """Takes in what there is. Raises `UserError`, with the journal closed, when that is too little for all steps."""
    try:
        replay.drain()
        _require_enough(recipe, replay)
    except UserError:
        journal.close()
        raise


def _require_enough(recipe: Recipe, replay: Replay) -> None:
    received = replay.buffer.received
    if not replay.buffer.prompts(SMALLEST_GROUP):
        raise UserError(
            f"--offline learns from groups of answers to one prompt, but of the {received} trajectories that are there "
            f"no {SMALLEST_GROUP} answer the same prompt: import several answers to each"
        )
    pacing = recipe.replay.pacing
    if received < pacing.warm_up:
        raise UserError(
            f"--offline there are {received} trajectories and no more will come, but --replay.pacing.warm-up is "
            f"{pacing.warm_up}: set it to 0, or import more"
        )
    batch = recipe.groups_per_step * recipe.group_size
    uses = recipe.steps * batch / received
    if uses > pacing.max_mean_uses:
        most = math.floor(pacing.max_mean_uses * received / batch)
        raise UserError(
            f"--offline {recipe.steps} steps would use each of {received} trajectories {uses:.1f} times on average, "
            f"but --replay.pacing.max-mean-uses is {pacing.max_mean_uses:g}: set it to {math.ceil(uses)}, or "
            f"--steps to at most {most}"
        )
    if pacing.held(received, (recipe.steps - 1) * batch, batch):
        raise UserError(
            f"--offline nothing more is received, but --replay.pacing.samples-per-insert is "
            f"{pacing.samples_per_insert}, which {recipe.steps} steps go beyond: set it to None"
        )


def nothing_more() -> None:
    """What to do while there is no batch: nothing will bring one."""
    raise UserError(
        "--offline there is no further batch to learn from, and no searcher brings one: set --replay.pacing."
        "max-mean-uses higher, import more, or train with searchers"
    )
