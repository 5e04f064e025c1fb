"""How far a policy is from its reference, and what reward it gets: one point of the frontier.

Invariant: on-policy. The answers are sampled from the weights that are measured, at the policy temperature, whole; the
log-ratio of the trainer's batches depends on how old they are and which were selected, this one does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.errors import UserError
from tba.generation import generate
from tba.grading import Grader
from tba.protocols import Engine, Reference, Reward
from tba.types import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over sampled answers, and the standard errors of these means over prompts."""

    kl: float  # log pi - log pi_ref summed over an answer, nats: an unbiased estimate of KL(pi || pi_ref)
    kl_error: float
    reward: float
    reward_error: float
    tokens: float  # of an answer
    prompts: int
    samples: int  # of each prompt
    kl_per_token: float  # the sum of log pi - log pi_ref over all answers, by the number of their tokens
    perplexity: float  # of the answers under the reference, per token of an answer
    perplexity_with_prompt: float  # the same sum by the tokens of prompts and answers: what the paper's code reports


def divergence(
    engine: Engine,
    reference: Reference,
    reward: Reward,
    prompts: Sequence[Prompt],
    samples: int,
    rng: np.random.Generator,
    *,
    policy_temperature: float = 1.0,
    chunk: int = 64,
) -> Divergence:
    """Measures the engine's present weights, by `samples` answers to each of `prompts`.

    Raises `UserError` when there is nothing to sample.
    """
    if not prompts or samples < 1:
        raise UserError(f"the divergence was asked of {len(prompts)} prompts and {samples} samples: give at least 1")
    sampling = Sampling(policy_temperature)
    kl_P: list[float] = []
    reward_P: list[float] = []
    tokens = prompt_tokens = 0
    log_policy_sum = log_reference_sum = 0.0
    grader = reward if isinstance(reward, Grader) else Grader(reward)
    for start in range(0, len(prompts), chunk):
        chunk_prompts = prompts[start : start + chunk]
        groups = generate(engine, chunk_prompts, samples, sampling, rng)
        log_reference = reference.log_probabilities_of(list(zip(chunk_prompts, groups, strict=True)))
        pairs = [(p, c) for p, group in zip(chunk_prompts, groups, strict=True) for c in group]
        judgements = iter(grader.judge(pairs))
        for prompt, group, scores in zip(chunk_prompts, groups, log_reference, strict=True):
            ratios = []
            for completion, log_reference_T in zip(group, scores, strict=True):
                assert completion.log_behavior is not None  # an engine's own samples have them
                log_policy = float(completion.log_behavior.sum(dtype=np.float64))
                log_prior = float(log_reference_T.sum(dtype=np.float64))
                ratios.append(log_policy - log_prior)
                log_policy_sum, log_reference_sum = log_policy_sum + log_policy, log_reference_sum + log_prior
                tokens += len(completion.tokens) - completion.observed
                prompt_tokens += len(prompt.tokens) + completion.observed
            kl_P.append(float(np.mean(ratios)))
            reward_P.append(float(np.mean([next(judgements).reward for _ in group])))
    return Divergence(
        kl=float(np.mean(kl_P)),
        kl_error=_standard_error(kl_P),
        reward=float(np.mean(reward_P)),
        reward_error=_standard_error(reward_P),
        tokens=tokens / (len(prompts) * samples),
        prompts=len(prompts),
        samples=samples,
        kl_per_token=(log_policy_sum - log_reference_sum) / tokens,
        perplexity=math.exp(-log_reference_sum / tokens),
        perplexity_with_prompt=math.exp(-log_reference_sum / (tokens + prompt_tokens)),
    )


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
