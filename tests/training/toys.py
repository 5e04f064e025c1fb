"""Small real parts for the tests of training: groups of the enumerable toy, a small Llama, a policy with heads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tba.batch import Batch, FetchedBatch, collate
from tba.policy.causal import CausalPolicy
from tba.protocols import HEADS, Manifest, Objective, Policy, PolicyOutput
from tba.schedules import Constant, WarmupConstant
from tba.training.optimizer import OptimizerSettings
from tba.training.trainer import Trainer
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version, teacher_arrays
from toy.policy import TabularPolicy, TabularReference, TabularTask

TASK = TabularTask(symbols=3, length=4, prompts=4)
VOCABULARY = 32  # holds the toy's tokens and its prompts'


def groups_of(
    sizes: Sequence[int], seed: int = 0, versions: Sequence[Version] = (Version(),), top: int = 0
) -> list[Group]:
    """Uniformly random outcomes of the toy, a group of each size in turn; versions go round. With `top` tokens of a
    teacher, which is another toy.
    """
    rng = np.random.default_rng(seed)
    reference, reward, groups, count = TabularReference(TASK), TASK.reward(), [], 0
    teacher = TabularReference(replace(TASK, seed=7))
    for g, size in enumerate(sizes):
        letter = g % TASK.prompts
        prompt = Prompt("tabular", np.array([TASK.symbols + 1 + letter], np.int32), "abcd"[letter])
        trajectories = []
        for _ in range(size):
            version = versions[count % len(versions)]
            tokens = np.array(TASK.tokens(int(rng.integers(TASK.outcomes))), np.int32)
            completion = Completion(tokens, "", StopReason.EXTERNAL, (version, version))
            trajectories.append(
                Trajectory(
                    uid=f"{g}-{count}",
                    prompt=prompt,
                    completion=completion,
                    reward=reward.judge([(prompt, completion)])[0].reward,
                    log_reference=reference.log_probabilities(prompt, [completion])[0],
                    reference=Version(),
                    arrays=teacher_arrays([teacher.top_scores(prompt, completion, top)] if top else []),
                )
            )
            count += 1
        groups.append(Group.of(trajectories))
    return groups


def llama(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return copy.deepcopy(_llama(seed, dtype))


@cache
def _llama(seed: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def llama_policy(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    heads: Iterable[str] = (),
    compute: torch.dtype | None = None,
) -> CausalPolicy:
    return CausalPolicy(llama(seed, dtype), heads=heads, compute=compute)


def with_random_heads(policy: TabularPolicy | CausalPolicy) -> TabularPolicy | CausalPolicy:
    """The same policy, its heads no longer zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return policy


def tabular_policy_with_heads(dtype: torch.dtype = torch.float32) -> TabularPolicy:
    policy = with_random_heads(TabularPolicy(TASK, dtype=dtype, heads=HEADS))
    assert isinstance(policy, TabularPolicy)
    return policy


@dataclass(frozen=True)
class WhitenedPolicyGradient:
    """Advantages normalised over the *whole batch*: no sum over groups, however it is cut."""

    needs: frozenset[str] = frozenset()
    by_group: bool = False

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        log_policy_B = output.log_policy_BT.sum(1)
        score_B = batch.reward_B - 0.1 * log_policy_B
        white_B = (score_B - score_B.mean()) / score_B.std()
        return (white_B * (log_policy_B - log_policy_B.mean())).square().mean(), {}


@dataclass(frozen=True)
class LearnedBalance:
    """Trajectory Balance with a learned log Z, plus a regression of values on the reward."""

    needs: frozenset[str] = frozenset({"log_z", "value"})
    by_group: bool = False

    def __call__(self, output: PolicyOutput, batch: Batch, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        assert output.log_z_G is not None
        assert output.value_BT is not None
        log_ratio_B = (output.log_policy_BT - batch.log_reference_BT).sum(1)
        residual_B = output.log_z_G[batch.group_B] + log_ratio_B - batch.reward_B / 0.5
        miss_BT = (output.value_BT - batch.reward_B[:, None]) * batch.mask_BT
        return residual_B.square().mean() + miss_BT.square().mean(), {}


@dataclass
class Counted:
    """A policy whose forward passes are counted."""

    policy: Policy
    passes: int = 0

    @property
    def share_prompt(self) -> bool:
        return self.policy.share_prompt

    def evaluate(self, batch: Batch) -> PolicyOutput:
        self.passes += 1
        return self.policy.evaluate(batch)


@dataclass
class Recycled:
    """A replay of fixed groups, in turn: step n always sees the same ones."""

    groups: Sequence[Group]
    asked: int = 0

    def sample(self, groups: int, size: int) -> list[Group]:
        chosen = [self.groups[(self.asked + i) % len(self.groups)] for i in range(groups)]
        self.asked += groups
        return chosen


@dataclass(frozen=True)
class Sampled:
    """A source of batches that are sampled when they are asked for: B prompts with K trajectories each."""

    replay: Any
    groups_per_step: int  # B
    group_size: int  # K

    def next(self) -> FetchedBatch:
        groups = self.replay.sample(self.groups_per_step, self.group_size)
        return FetchedBatch(groups, collate(groups))


@dataclass
class Published:
    """Remembers what was published, as copies."""

    sent: list[tuple[Version, dict[str, torch.Tensor], Manifest]] = field(default_factory=list)

    def publish(self, weights: Mapping[str, torch.Tensor], version: Version, manifest: Manifest) -> None:
        self.sent.append((version, {name: tensor.clone() for name, tensor in weights.items()}, manifest))


@dataclass
class Scripted:
    """A source that gives prepared batches."""

    fetched: list[FetchedBatch]

    def next(self) -> FetchedBatch:
        return self.fetched.pop(0)


@dataclass
class ByHand(Trainer):
    """A trainer with its batches at hand, which sends weights out when they are due, as the trainer's loop does."""

    batches: Any = None
    manifest_of: Callable[[Version], Manifest | None] = lambda version: None

    def go(self) -> dict[str, float]:
        metrics = self.step(self.batches.next())
        if self.should_publish:
            self.publish(self.manifest_of(self.version))
        return metrics


def trainer_of(policy: Policy, objective: Objective, tmp_path: object, **changes: object) -> ByHand:
    """A trainer over twelve fixed groups of the toy, two per step."""
    arguments: dict[str, object] = {
        "policy": policy,
        "objective": objective,
        "batches": Sampled(Recycled(groups_of([5] * 12)), 2, 5),
        "weights": Published(),
        "optimizer": OptimizerSettings(lr=1e-2, schedule=WarmupConstant(0)).start(policy.parameters()),
        "sync_every": 2,
        "max_tokens_per_pass": 10**6,
        "directory": tmp_path,
    }
    return ByHand(**{**arguments, **changes})


BETA = Constant(0.5)
