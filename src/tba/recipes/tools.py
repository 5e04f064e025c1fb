"""SmolLM2-135M-Instruct learns to call a tool, on two CPU cores.

    tba model smollm2 --out smollm2
    tba train tools --model.path smollm2

It is asked for products that it cannot work out; a tool knows them (`environments/calculator.py`). The tool is
described, and called, as its chat template has it, after one example. The reward is 1 for the right product. What the
tool says is read and never trained. Without `--model.path` the weights are the Hub's. Needs the extra `tba-rl[lora]`,
and `gguf` for the first command; docs/real_model.md says what comes out.

The form of the objective is the default. On stale data the paper's (`--objective.off-policy none`) was not worse on
SmolLM2, and the rule that decides between them has not run yet (docs/objectives.md).
"""

from __future__ import annotations

from dataclasses import replace

import tba
from tba.environments.calculator import EXAMPLE, Multiplication
from tba.recipes.instruct import recipe as instruct

assert isinstance(instruct.model, tba.HuggingFace)
recipe = replace(
    instruct,
    name="tools",
    description="SmolLM2-135M-Instruct learns to call a tool by its chat template, two CPU processes",
    task=tba.EnvironmentTask(Multiplication, "tools", EXAMPLE, turns=3, worlds=4000, held_out=500),
    model=replace(instruct.model, generation=tba.EngineSettings(max_completion_tokens=112)),
    optimizer=replace(instruct.optimizer, lr=2e-4, schedule=tba.WarmupStableDecay(5, 20, 15, final=0.1)),
    evaluation=tba.EvaluationSettings(
        every=10, problems=200, problems_during=64, greedy=False, batch_size=64, logged_problems=1000
    ),
    prompts=tba.PromptSettings(max_tokens=384),
    steps=40,
)
