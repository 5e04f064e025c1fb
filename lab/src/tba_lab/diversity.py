"""Measures how many different right answers a policy gives to a problem, and how much more attempts find (pass@k).

Invariant: all figures are on-policy, like `divergence`: computed from the same samples of the measured weights, at the
policy temperature. Two answers are different when their texts differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tba.errors import UserError
from tba.evaluation.estimators import pass_at_k
from tba.generation import generate
from tba.grading import Grader
from tba.protocols import Engine, Reward
from tba.types import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Diversity:
    """Means over prompts, each answered `samples` times."""

    distinct: float  # different right answers among the samples
    distinct_error: float  # standard error of that mean, over prompts
    differ: float | None  # the chance that two right answers to a prompt differ; None: no prompt has two
    pass_at: tuple[float, ...]  # pass@k at k - 1, k from 1 to `samples`, unbiased; the first is the accuracy
    prompts: int
    samples: int


def diversity(
    engine: Engine,
    reward: Reward,
    prompts: Sequence[Prompt],
    samples: int,
    rng: np.random.Generator,
    *,
    threshold: float = 1.0,
    policy_temperature: float = 1.0,
    chunk: int = 64,
) -> Diversity:
    """Measures the engine's current weights; an answer is right if its reward is at least `threshold`.

    Raises `UserError` when there is nothing to sample.
    """
    if not prompts or samples < 1:
        raise UserError(f"the diversity was asked of {len(prompts)} prompts and {samples} samples: give at least 1")
    correct_texts: list[list[str]] = []
    grader = Grader(reward)
    for start in range(0, len(prompts), chunk):
        chunk_prompts = prompts[start : start + chunk]
        completion_rows = generate(engine, chunk_prompts, samples, Sampling(policy_temperature), rng)
        pairs = [(p, c) for p, row in zip(chunk_prompts, completion_rows, strict=True) for c in row]
        judgements = iter(grader.judge(pairs))
        for row in completion_rows:
            marks = islice(judgements, len(row))
            correct_texts.append([c.text for c, mark in zip(row, marks, strict=True) if mark.reward >= threshold])
    return diversity_of(correct_texts, samples)


def diversity_of(texts_by_prompt: Sequence[Sequence[str]], samples: int) -> Diversity:
    """Returns the figures, given the texts of the right answers among `samples` to each prompt."""
    counts = [len(set(texts)) for texts in texts_by_prompt]
    chances = [chance for texts in texts_by_prompt if (chance := chance_to_differ(texts)) is not None]
    return Diversity(
        distinct=float(np.mean(counts)),
        distinct_error=float(np.std(counts, ddof=1)) / math.sqrt(len(counts)) if len(counts) > 1 else math.inf,
        differ=float(np.mean(chances)) if chances else None,
        pass_at=tuple(
            float(np.mean([pass_at_k(samples, len(texts), k) for texts in texts_by_prompt]))
            for k in range(1, samples + 1)
        ),
        prompts=len(texts_by_prompt),
        samples=samples,
    )


def chance_to_differ(texts: Sequence[str]) -> float | None:
    """Returns the chance that two of the texts, drawn without replacement, differ; None for fewer than two.

    It is 1 - sum of n (n - 1) over N (N - 1), n the count of a text: unbiased for that of two fresh draws (Simpson
    1949), so that policies with different accuracies can be compared.
    """
    total = len(texts)
    if total < 2:
        return None
    equal_pairs = sum(n * (n - 1) for n in Counter(texts).values())
    return 1.0 - equal_pairs / (total * (total - 1))
