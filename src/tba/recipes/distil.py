"""Distillation: the quickstart's base learns from a teacher what sums are, without any reward.

The student is the base that forgets carries (shipped). The teacher is a model of the same size that was taught right
sums only; it is made on first use, in a minute or two. At each token of the student's answers the teacher names its
three most probable tokens, and the student learns their probabilities and that of all others together
(docs/distillation.md). The reward is evaluated and recorded, and not learnt from (`--teacher.no-reward`).

`--teacher.paths DIR` takes a teacher of your own in its place. A reward, or a teacher with another tokenizer, needs
whole answers: `objective=tba.TrajectoryBalance(beta=tba.Constant(1.0))` in a recipe, and a `top` of 0.
"""

from __future__ import annotations

from dataclasses import replace

import tba
from tba.recipes.quickstart import BASE
from tba.recipes.quickstart import recipe as quickstart

assert isinstance(quickstart.model, tba.HuggingFace)
recipe = replace(
    quickstart,
    name="distil",
    description="a small base that forgets carries learns from a teacher that does not, no reward, two CPU processes",
    task=tba.Arithmetic(digits=3),
    model=replace(quickstart.model, path=str(BASE), warm_start=None),
    teacher=tba.Teacher(
        top=3,
        reward=False,
        models=(
            tba.HuggingFace(
                device="cpu",
                warm_start=tba.WarmStart(
                    scratch=tba.ScratchModel(
                        hidden_size=96, layers=3, heads=4, ff_size=384, max_positions=32, tie_embeddings=False
                    ),
                    tokenizer="characters",
                    sft=tba.SupervisedSettings(steps=1000, batch_size=128, lr=2e-3, pool=1),
                ),
            ),
        ),
    ),
    objective=tba.Distil(),
    optimizer=replace(quickstart.optimizer, schedule=tba.WarmupStableDecay(20, 250, 130)),
    steps=400,
)
