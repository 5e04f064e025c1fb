"""Trains a reward model on pairs: the Bradley-Terry loss, -log sigmoid(score of the chosen - score of the rejected).

Invariant: a text is read once per batch, however many pairs it is in; a batch that does not fit in one pass has the
same gradient (scores first, then the passes again with what each score's derivative is).

Shape legend: N texts of a batch, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from tba.apps.preference.options import PreferenceSettings
from tba.errors import NonFiniteLoss, UserError
from tba.schedules import WarmupLinear
from tba.training.optimizer import OptimizerSettings

S = TypeVar("S")
R = TypeVar("R", contravariant=True)
Progress: TypeAlias = Callable[[int, int, float], None]  # (step, of how many, loss of its batch)


class Scorer(Protocol[R]):
    """Anything that scores texts."""

    def scores(self, texts: Sequence[R]) -> Tensor:
        """Returns scores [N] of answers, with gradients."""


@dataclass(frozen=True, slots=True)
class ReadPair:
    """A pair by the indices of its texts, and its document."""

    chosen: int
    rejected: int
    document: str


def fit_reward_model(
    scorer: Scorer[S],
    parameters: Sequence[Parameter],
    texts: Sequence[S],
    pairs: Sequence[ReadPair],
    split: Callable[[Sequence[S], int], list[list[int]]],
    settings: PreferenceSettings,
    progress: Progress | None = None,
) -> list[float]:
    """Train on the pairs; returns the loss of each batch before its update, in nats per pair.

    `split` cuts texts into passes of at most so many tokens. Raises `UserError` without pairs, `NonFiniteLoss` at the
    first gradient that is not finite.
    """
    if not pairs:
        raise UserError("there are no pairs to train a reward model on: give more, or hold fewer out")
    updates = settings.updates(len(pairs))
    optimizer = OptimizerSettings(
        lr=settings.lr,
        schedule=WarmupLinear(updates, min(round(settings.warmup * updates), updates - 1)),
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
    ).start(list(parameters))
    batches = _batches(pairs, settings.batch_size, np.random.default_rng(settings.seed))
    losses = []
    for step in range(1, updates + 1):
        loss = _accumulate(scorer, texts, next(batches), split, settings.max_tokens_per_pass)
        if not math.isfinite(optimizer.step(step)):
            raise NonFiniteLoss(f"the reward model's loss is {loss} at step {step} of {updates}: lower its lr")
        losses.append(loss)
        if progress is not None:
            progress(step, updates, loss)
    return losses


def _accumulate(
    scorer: Scorer[S],
    texts: Sequence[S],
    batch: Sequence[ReadPair],
    split: Callable[[Sequence[S], int], list[list[int]]],
    max_tokens: int,
) -> float:
    """Accumulate gradients of the batch's mean loss; returns the loss."""
    text_indices = sorted({index for pair in batch for index in (pair.chosen, pair.rejected)})
    local_index = {index: n for n, index in enumerate(text_indices)}
    chosen_P, rejected_P = (
        torch.tensor([local_index[getattr(pair, side)] for pair in batch]) for side in ("chosen", "rejected")
    )
    local_texts = [texts[index] for index in text_indices]
    passes = split(local_texts, max_tokens)
    if len(passes) == 1:
        (order,) = passes
        score_N = scorer.scores([local_texts[i] for i in order])[torch.argsort(torch.tensor(order))]
        loss = bradley_terry(score_N[chosen_P], score_N[rejected_P])
        loss.backward()
        return loss.item()
    with torch.no_grad():
        score_N = torch.zeros(len(local_texts), dtype=torch.float32)
        for part in passes:
            score_N[part] = scorer.scores([local_texts[i] for i in part]).cpu()
    score_N.requires_grad_()
    loss = bradley_terry(score_N[chosen_P], score_N[rejected_P])
    loss.backward()
    assert score_N.grad is not None
    for part in passes:
        part_score_N = scorer.scores([local_texts[i] for i in part])
        part_score_N.backward(score_N.grad[part].to(part_score_N.device))
    return loss.item()


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Returns the mean loss over pairs, in nats (Bradley and Terry 1952; Stiennon et al., arXiv 2009.01325, eq. 1)."""
    return -torch.nn.functional.logsigmoid(chosen_P - rejected_P).mean()


def _batches(pairs: Sequence[ReadPair], size: int, rng: np.random.Generator) -> Iterator[list[ReadPair]]:
    """Yields batches of endless shuffled epochs; pairs of a document stay together, so that its texts are read once."""
    by_document: dict[str, list[ReadPair]] = {}
    for pair in pairs:
        by_document.setdefault(pair.document, []).append(pair)
    documents = list(by_document.values())
    while True:
        epoch = [documents[d][i] for d in rng.permutation(len(documents)) for i in rng.permutation(len(documents[d]))]
        for start in range(0, len(epoch), size):
            yield epoch[start : start + size]
