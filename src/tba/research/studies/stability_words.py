"""What staleness costs on word problems that are worked out in a line: on-policy and stale, at one rate.

As `stability_countdown`, on the 26 trained templates of `word_problems` and a small base of its own: prompts of some
forty tokens, answers of some fifteen. It stands in for gsm_symbolic, whose base alone takes hours on two cores.
"""

from __future__ import annotations

from dataclasses import replace

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.models.huggingface import HuggingFace, WarmStart
from tba.recipes.countdown import recipe as countdown
from tba.record.recorder import RecordSettings
from tba.replay.pacing import Pacing
from tba.research.studies._base import objectives, stale, synchronous, with_objective
from tba.research.study import Study, Variant
from tba.schedules import WarmupStableDecay
from tba.tasks.word_problems import WordProblems
from tba.training.supervised import SupervisedSettings
from tba.training.tiny_models import ScratchModel

_base = replace(
    countdown,
    task=WordProblems(eval_problems=2000, style="plain"),
    model=HuggingFace(
        device="cpu",
        generation=EngineSettings(slots=140, max_completion_tokens=32),
        warm_start=WarmStart(
            scratch=ScratchModel(hidden_size=128, layers=4, heads=4, ff_size=512, max_positions=160),
            tokenizer="bpe",
            vocab_size=768,
            sft=SupervisedSettings(steps=1200, batch_size=64, lr=2e-3),
        ),
    ),
    steps=240,
    optimizer=replace(countdown.optimizer, lr=1e-4, schedule=WarmupStableDecay(10, 170, 60)),
    evaluation=EvaluationSettings(
        every=20, problems=2000, problems_during=500, greedy=False, samples=2, pass_k=0, chunk=500
    ),
    record=RecordSettings(tensorboard=False, samples=0),
    replay=replace(countdown.replay, pacing=Pacing(warm_up=280)),
)
NAMES = ("tb", "tb-weighted", "tb-robust", "tba-prime", "grpo", "ppo", "reinforce", "raft")

variants: dict[str, Variant] = {}
for _name in NAMES:
    _recipe = with_objective(_base, objectives()[_name])
    variants[f"{_name}-sync"] = Variant(synchronous(_recipe), _name)
    for _k in (10, 64):
        variants[f"{_name}-k{_k}"] = Variant(stale(_recipe, _k, m=0.5), _name)

study = Study(
    name="stability_words",
    description="Word problems, on-policy and stale (k = 10, 64; half of the groups old): success and falls.",
    recipe=_base,
    variants=variants,
    seeds=(0, 1, 2, 3, 4),
    target=0.80,
    baseline="{family}-sync",
    margin=0.015,
    divergence_prompts=0,
)
