"""Noise in the data: flipped rewards, or junk in the buffer with the reward of a right answer.

Each is at 1, 5 and 20 %, with half of the groups old and drawn either uniformly or by reward: does prioritising by
reward amplify the noise? A prompt has 70 answers, of which a group takes 20; with 20 there would be nothing to choose
from. Evaluation uses the true reward. `clean` is the baseline of each.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from tba.recipe import Recipe
from tba.recipes import quickstart
from tba_lab.corrupted_task import Corrupted
from tba_lab.fabricating import Fabricating
from tba_lab.studies._base import TARGET, base, model, more_answers, stale, task
from tba_lab.study import Plot, Study, Variant

SHARES = (0.01, 0.05, 0.2)
SELECTIONS = {"uniform": 0.0, "reward": 3.0}  # inverse temperature of the old half

_base_model = Path(quickstart.__file__).parent / "quickstart_base"  # what the warm start of the plain task has given
_given = {f.name: getattr(model, f.name) for f in fields(model)} | {"path": str(_base_model), "warm_start": None}


def _noisy(recipe: Recipe, flipped_share: float, junk_share: float) -> Recipe:
    return replace(recipe, task=Corrupted(task, flipped_share), model=Fabricating(**_given, junk=junk_share))


variants: dict[str, Variant] = {}
for _name, _tau in SELECTIONS.items():
    _recipe = more_answers(stale(base, 2, 0.5, _tau))
    variants[f"{_name}-clean"] = Variant(_noisy(_recipe, 0.0, 0.0), _name)
    for _share in SHARES:
        variants[f"{_name}-flipped-{_share:g}"] = Variant(_noisy(_recipe, _share, 0.0), _name)
        variants[f"{_name}-junk-{_share:g}"] = Variant(_noisy(_recipe, 0.0, _share), _name)

study = Study(
    name="noise",
    description="Flipped rewards and fabricated answers of high reward, at 1, 5 and 20 %, with and without priority.",
    recipe=base,
    variants=variants,
    target=TARGET,
    baseline="{family}-clean",
    plots=(
        Plot("task.flipped", label="share of rewards turned over"),
        Plot("model.junk", label="share of the buffer that is junk"),
    ),
)
