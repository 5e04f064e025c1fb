"""IFEval, for evaluation only: what `tba eval ifeval` asks of a model, with answers of at most 512 tokens.

tba eval ifeval --task.path input_data.jsonl --checkpoint runs/instruct-1
"""

from __future__ import annotations

from dataclasses import replace

import tba
from tba.recipes.instruct import recipe as instruct
from tba.tasks.ifeval import IfEval

recipe = replace(
    instruct,
    name="ifeval",
    description="IFEval: instructions that a function can check; for `tba eval` only, nothing is trained on it",
    task=IfEval(),
    model=tba.HuggingFace(
        path="HuggingFaceTB/SmolLM2-135M-Instruct", generation=tba.EngineSettings(max_completion_tokens=512)
    ),
    evaluation=tba.EvaluationSettings(problems=0, samples=0, batch_size=64),
    prompts=tba.PromptSettings(max_tokens=2048),
)
