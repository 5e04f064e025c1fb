"""SmolLM2-135M-Instruct learns from a teacher, on questions with instructions, without a reward, on two CPU cores.

    tba model smollm2 --out smollm2
    tba train distil_smollm2 --model.path smollm2 --teacher.paths runs/NAME/checkpoints/step-120

The teacher is here what a run of the recipe `instruct` has trained. Any model with the tokenizer of SmolLM2 is one,
such as SmolLM2-1.7B-Instruct; one with another tokenizer needs whole answers (docs/distillation.md). Without
`--teacher.paths` it is SmolLM2-360M-Instruct of the Hub. The reward is evaluated and recorded, and not learnt from.
docs/distillation.md says what is learnt, and what came of it.
"""

from __future__ import annotations

from dataclasses import replace

import tba
from tba.recipes.instruct import recipe as instruct

recipe = replace(
    instruct,
    name="distil_smollm2",
    description="SmolLM2-135M-Instruct learns from a larger model or a trained one, no reward, two CPU processes",
    teacher=tba.Teacher(("HuggingFaceTB/SmolLM2-360M-Instruct",), top=16, reward=False),
    objective=tba.Distil(),
    optimizer=replace(instruct.optimizer, lr=2e-4),
)
