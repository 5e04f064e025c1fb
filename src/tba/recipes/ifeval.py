"""IFEval, for evaluation only: what `tba eval ifeval` asks of a model, with answers of at most 512 tokens.

tba eval ifeval --task.path input_data.jsonl --checkpoint runs/instruct-1
"""

from __future__ import annotations

from dataclasses import replace

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.recipes.instruct import recipe as instruct
from tba.rollout.prompts import PromptSettings
from tba.tasks.ifeval import IfEval

recipe = replace(
    instruct,
    name="ifeval",
    description="IFEval: instructions that a function can check; for `tba eval` only, nothing is trained on it",
    task=IfEval(),
    model=HuggingFace(
        path="HuggingFaceTB/SmolLM2-135M-Instruct", generation=EngineSettings(slots=64, max_completion_tokens=512)
    ),
    evaluation=EvaluationSettings(problems=0, samples=0, chunk=64),
    prompts=PromptSettings(max_tokens=2048),
)
