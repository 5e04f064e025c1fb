"""GSM-Symbolic templates (reasoning-gym, the extra `tba-rl[reasoning-gym]`) in the GSM8K format, numbers held out.

The gsm8k recipe on generated problems: 100 templates, any numbers, worked answers ending in `#### x`. It is for small
policies, for which GSM8K itself is too hard; see lab/gsm8k.md.
"""

from __future__ import annotations

from dataclasses import replace

from tba.recipes.gsm8k import recipe as gsm8k
from tba.tasks.reasoning_gym import ReasoningGym

recipe = replace(
    gsm8k,
    name="gsm_symbolic",
    description="procedural word problems in the GSM8K format, held-out numbers",
    task=ReasoningGym(dataset="gsm_symbolic", train_problems=6000, style="tba"),
)
