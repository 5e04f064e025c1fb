"""Episodes of several segments are trained: resumed runs, passes of any size and several ranks change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_processes import ranks_of
from toys import BETA, Published, Recycled, Sampled, groups_of, llama, llama_policy, trainer_of
from transformers import AutoModelForCausalLM

from tba.batch import collate
from tba.errors import UserError
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.schedules import WarmupConstant
from tba.training.checkpoint import newest_checkpoint, save_checkpoint
from tba.training.optimizer import OptimizerSettings
from tba.training.ranks.messages import Ranks
from tba.training.ranks.policy import Follower, Rank0Optimizer, Rank0Policy
from tba.training.trainer import Trainer
from tba.types import Group

LIMIT = 10**6
SETTINGS = OptimizerSettings(lr=1e-2, schedule=WarmupConstant(0))


def segmented(groups: list[Group]) -> list[Group]:
    """Returns groups of which every other answer goes on, in later segments, with itself after a token or two."""

    def extended(group: Group) -> Group:
        rows = []
        for i, t in enumerate(group.trajectories):
            c, repeats = t.completion, i % 2 * (1 + i % 3)
            contexts = [np.full(1 + n % 2, 9 + n, np.int32) for n in range(repeats)]
            parts = [c.tokens, *(x for context in contexts for x in (context, c.tokens))]
            is_sampled = np.concatenate([np.full(len(part), n % 2 == 0) for n, part in enumerate(parts)])
            begins = np.cumsum([len(part) for part in parts])[:-1:2].astype(np.int32)
            log_reference = np.zeros(len(is_sampled), np.float32)
            log_reference[is_sampled] = np.tile(t.log_reference, 1 + repeats)
            longer = replace(c, tokens=np.concatenate(parts), mask=is_sampled, begins=begins if repeats else None)
            rows.append(replace(t, completion=longer, log_reference=log_reference))
        return Group.of(rows)

    return [extended(group) for group in groups]


GROUPS = segmented(groups_of([5] * 12))


def batches(asked: int = 0) -> Sampled:
    return Sampled(Recycled(GROUPS, asked), 2, 5)


def difference(one: Trainer, other: Trainer) -> float:
    weights, other_weights = ({n: x.clone() for n, x in t.policy.weights().items()} for t in (one, other))
    assert weights.keys() == other_weights.keys()
    return max(float((tensor - other_weights[name]).abs().max()) for name, tensor in weights.items())


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    assert any(len(t.completion.segments) == 3 for group in GROUPS for t in group.trajectories)
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path, batches=batches())
    for _ in range(2):
        trainer.go()
    assert isinstance(trainer.policy, CausalPolicy)
    save_checkpoint(tmp_path / "checkpoints", trainer.version, trainer.policy.save, trainer.optimizer, {}, 2)
    for _ in range(2):
        trainer.go()

    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    policy = CausalPolicy(AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32))
    optimizer = SETTINGS.start(policy.parameters())
    optimizer.load(checkpoint.path)
    resumed = trainer_of(
        policy,
        TrajectoryBalance(BETA),
        tmp_path,
        optimizer=optimizer,
        version=checkpoint.version,
        batches=batches(asked=4),
    )
    for _ in range(2):
        resumed.go()
    assert difference(trainer, resumed) == 0


def test_passes_of_any_size_and_rows_without_a_shared_prompt_learn_the_same(tmp_path: Path) -> None:
    """Adam divides each gradient by its size, so that rounding moves a weight by a share of the rate, 1e-2."""
    trainers = [
        trainer_of(policy, TrajectoryBalance(BETA), tmp_path, batches=batches(), max_tokens_per_pass=limit)
        for policy, limit in (
            (llama_policy(), LIMIT),
            (llama_policy(), 40),
            (CausalPolicy(llama(), share_prompt=False), 60),
        )
    ]
    losses = [trainer.go()["loss"] for trainer in trainers]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)
    assert max(difference(trainers[0], other) for other in trainers[1:]) < 1e-4


def test_two_ranks_are_one_and_a_model_that_they_cannot_train_on_is_refused(tmp_path: Path) -> None:
    def policy_of(ranks: Ranks, share_prompt: bool) -> CausalPolicy:
        policy = CausalPolicy(llama(), share_prompt=share_prompt)
        policy.shard(ranks.sharding(torch.float32))
        return policy

    def life(ranks: Ranks) -> None:
        for share_prompt in (True, False):
            policy = policy_of(ranks, share_prompt)
            Follower(policy, SETTINGS.start(policy.parameters()), ranks, LIMIT).follow()

    with ranks_of(2, tmp_path / "store", life) as ranks:
        policy = policy_of(ranks, share_prompt=True)
        both = trainer_of(
            Rank0Policy(policy, ranks, LIMIT),
            TrajectoryBalance(BETA),
            tmp_path,
            batches=batches(),
            optimizer=Rank0Optimizer(ranks, SETTINGS, policy.parameters(), []),
            weights=Published(),
            ranks=2,
        )
        single = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path, batches=batches())
        assert both.go()["loss"] == pytest.approx(single.go()["loss"], rel=1e-5)
        assert difference(single, both) < 1e-4  # as above
        ranks.broadcast("end")

        plain = Rank0Policy(policy_of(ranks, share_prompt=False), ranks, LIMIT)
        with pytest.raises(UserError, match="episodes of several segments, which a model whose prompts are not shared"):
            plain.evaluate(collate(GROUPS[:2]))
        ranks.broadcast("end")
