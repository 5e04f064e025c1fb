"""GSM-Symbolic templates (reasoning-gym, the extra `tba-rl[reasoning-gym]`) in the GSM8K format, numbers held out.

The gsm8k recipe on problems that are made on the spot: 100 templates, endless numbers, worked answers ending in
`#### x`. For small policies, which GSM8K itself is too hard for; see docs/gsm8k.md.
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
