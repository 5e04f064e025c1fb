"""A model that everybody knows, SmolLM2-135M-Instruct, learns to do what it is told, on two CPU cores.

    tba model smollm2 --out smollm2
    tba train instruct --model.path smollm2

Questions about everyday topics come with one to three instructions that a function can check (`tasks/instruct.py`).
Without `--model.path` the weights are the Hub's. Needs the extras `tba-rl[instruct,lora]`, and `gguf` for the first
command; docs/real_model.md says what comes out.
"""

from __future__ import annotations

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.lora import LoraSettings
from tba.recipe import Recipe, RuntimeSettings
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rollout.exploration import Fixed
from tba.rollout.prompts import PromptSettings
from tba.schedules import Constant, WarmupStableDecay
from tba.tasks.instruct import Instruct
from tba.training.optimizer import OptimizerSettings

recipe = Recipe(
    name="instruct",
    description="SmolLM2-135M-Instruct learns to fulfil instructions that a function can check, two CPU processes",
    task=Instruct(),
    model=HuggingFace(
        path="HuggingFaceTB/SmolLM2-135M-Instruct",
        generation=EngineSettings(slots=64, max_completion_tokens=64),
        lora=LoraSettings(rank=16),
    ),
    objective=TrajectoryBalance(beta=Constant(0.02)),
    policy_temperature=0.7,  # at 1 this base writes partly nonsense
    exploration=Fixed(temperature=0.7),
    optimizer=OptimizerSettings(lr=4e-4, schedule=WarmupStableDecay(10, 75, 35, final=0.1)),
    replay=ReplaySettings(
        selection=RecencyReward(m=0.95),
        pacing=Pacing(warm_up=32, max_mean_uses=2.0),
        buffer=BufferSettings(distinct=False),  # short answers repeat
    ),
    evaluation=EvaluationSettings(every=30, problems=100, problems_during=100, greedy=False, chunk=64, shown=1000),
    prompts=PromptSettings(max_tokens=192),
    run=RuntimeSettings(checkpoint_every=20),  # 20 steps take two to three minutes
    steps=120,
    max_tokens_per_pass=1024,  # a group of eight at a time: less memory, at the same speed
    groups_per_step=8,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=8,
    sync_every=1,
)
