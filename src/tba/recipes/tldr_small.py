"""Preference tuning on your own machine: a 1 M-parameter policy from scratch, posts of at most 600 characters.

docs/preference.md says how to make the data files: posts with a person's summary, a gold reward model, and a proxy
trained on answers that the gold model scored. The policy is trained on the proxy's score; an answer counts as a win if
the gold model scores it above the person's. The warm start (eight minutes of one core, once, cached) first learns the
language of the posts, then to repeat a sentence, then to answer with one sentence of the post: a model of this size
trained on people's summaries writes lines that could be about any post. Which sentence to choose is left to RL. With
`--model.path` there is no warm start. The form of the objective is the default, which is `exact` here, because answers
that are copies are left out (lab/default_form.md).
"""

from __future__ import annotations

import tba
from tba.apps.preference.tldr import Tldr

STEPS = 400

recipe = tba.Recipe(
    name="tldr_small",
    description="preference tuning of a 1 M-parameter policy, short posts: a proxy to train on, wins by a gold model",
    task=Tldr(
        path="posts.jsonl",
        reward_model="proxy",
        gold="gold",
        longest=600,
        max_tokens=256,
        held_out=0.15,
        demonstrated="sentence",
    ),
    model=tba.HuggingFace(
        device="cpu",
        generation=tba.EngineSettings(max_completion_tokens=48),
        warm_start=tba.WarmStart(
            scratch=tba.ScratchModel(
                hidden_size=128, layers=4, heads=4, kv_heads=2, ff_size=384, max_positions=1024, tie_embeddings=True
            ),
            tokenizer="bpe",
            vocab_size=2048,
            before=(
                tba.Lesson(tba.SupervisedSettings(epochs=1, batch_size=4, lr=1.5e-3), {"longest": 2000}, prompts=True),
                tba.Lesson(
                    tba.SupervisedSettings(epochs=1.25, batch_size=32, lr=2e-3, schedule="constant"),
                    {"longest": 2000, "demonstrated": "echo"},
                ),
                tba.Lesson(tba.SupervisedSettings(epochs=1, batch_size=16, lr=1e-3), {"demonstrated": "sentences"}),
            ),
            sft=tba.SupervisedSettings(epochs=0.5, batch_size=16, lr=1e-4),
        ),
    ),
    # Marks differ by some 3 between answers to a post. A sixth of that as beta, and old answers weighed, keep it within
    # a few nats of where it began; at twice the rate, or without weights, it wanders off first.
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.5)),
    exploration=tba.Fixed(temperature=0.7),
    optimizer=tba.OptimizerSettings(lr=1e-4, schedule=tba.WarmupLinear(STEPS, 10)),
    replay=tba.ReplaySettings(
        selection=tba.RecencyReward(m=0.9, inverse_temperature=1.0), pacing=tba.Pacing(warm_up=64, max_mean_uses=2.0)
    ),
    evaluation=tba.EvaluationSettings(problems=0, samples=4, greedy=False, batch_size=64, logged_problems=1000),
    prompts=tba.PromptSettings(max_tokens=256),
    record=tba.RecordSettings(tensorboard=False),
    steps=STEPS,
    groups_per_step=4,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=4,
    sync_every=2,
    policy_temperature=0.7,
)
