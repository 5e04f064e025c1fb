"""SmolLM2-135M-Instruct learns to solve word problems of one or two steps, on two CPU cores.

    tba model smollm2 --out smollm2
    tba sft word_problems --model.path smollm2 --out taught
    tba train word_problems --model.path taught

Everyday problems of 36 templates, ten of which are never trained (`tasks/word_problems.py`); the reward is 1 for the
right number. Without `--model.path` the weights are the Hub's. Needs the extra `tba-rl[lora]`, and `gguf` for the first
command. The base is right at 8 %, after the supervised part at 65 %, after reinforcement learning at 72 %
(docs/real_model.md).
"""

from __future__ import annotations

from dataclasses import replace

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.models.warm_start import WarmStart
from tba.recipes.instruct import recipe as instruct
from tba.replay.buffer import BufferSettings
from tba.tasks.word_problems import WordProblems
from tba.training.supervised import SupervisedSettings

assert isinstance(instruct.model, HuggingFace)
recipe = replace(
    instruct,
    name="word_problems",
    description="SmolLM2-135M-Instruct learns to solve word problems of one or two steps, two CPU processes",
    task=WordProblems(largest=12),  # this model hardly learns sums of larger numbers
    model=replace(
        instruct.model,
        generation=EngineSettings(slots=64, max_completion_tokens=48),
        warm_start=WarmStart(sft=SupervisedSettings(steps=60, batch_size=16, lr=1e-4)),  # of `tba sft word_problems`
    ),
    replay=replace(instruct.replay, buffer=BufferSettings(distinct=False)),  # most answers are a number alone
    evaluation=EvaluationSettings(every=40, problems=200, problems_during=200, greedy=False, chunk=64, shown=1000),
)
