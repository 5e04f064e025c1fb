"""The supervised warm start: cross-entropy on responses, so that RL begins with a policy that succeeds now and then.

Invariant: exactly the response's tokens are trained, the one that ends it among them (also where padding has the same
id) and nothing behind it; equal settings, pairs and weights give equal weights on one machine.

Shape legend: B pairs, T input positions, K positions from the first response token of any pair on, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.errors import NonFiniteLoss, UserError
from tba.fields import as_declared
from tba.pretrained import most_positions, require_embedded
from tba.protocols import Tokenizer
from tba.schedules import RateShape, WarmupConstant, WarmupCosine, WarmupLinear
from tba.training.optimizer import OptimizerSettings
from tba.types import Completion

IGNORED = -100  # torch's label for a position that is not trained

Progress: TypeAlias = Callable[[int, int, float], None]  # (step, of how many, loss of its batch)


@dataclass(frozen=True)
class Pair:
    """A prompt and the response to learn, as token ids without the one that ends it."""

    prompt: Sequence[int]  # at least one token
    response: Sequence[int]
    observed: tuple[tuple[int, int], ...] = ()  # parts of the response that are read and not learnt, as (begin, end)
    end: int | None = None  # the token that ends it; None: the tokenizer's EOS

    @classmethod
    def of(cls, prompt: Sequence[int], answer: Completion, end_tokens: Container[int], end: int | None = None) -> Pair:
        """Returns the pair of a completion, whose own turns are learnt. A completion that ends in none of `end_tokens`
        gets `end`.
        """
        tokens: list[int] = answer.tokens.tolist()
        boundaries = [0, *(edge for turn in answer.turns for edge in turn), len(tokens)]
        observed = tuple((a, b) for a, b in zip(boundaries[::2], boundaries[1::2], strict=True) if a < b)
        if tokens[-1] in end_tokens:
            return cls(prompt, tokens[:-1], observed, tokens[-1])
        return cls(prompt, tokens, observed, end)


@dataclass(frozen=True)
@as_declared
class SupervisedSettings:
    """Sets how a warm start is run. Raises `UserError` when a field makes no sense."""

    epochs: float = 1.0  # passes over the pairs
    steps: int | None = None  # updates; None: as many as `epochs` gives
    batch_size: int = 128  # pairs in a batch
    lr: float = 1e-3  # peak learning rate
    schedule: Literal["constant", "linear", "cosine"] = "cosine"  # shape after the warm-up; the last two go down to 0
    warmup: float = 0.03  # share of the updates in which the learning rate rises
    weight_decay: float = 0.0  # weight decay of AdamW
    betas: tuple[float, float] = (0.9, 0.99)  # decay of AdamW's two moments
    clip_norm: float | None = 1.0  # largest norm of the gradient; None: no clipping
    max_length: int = 1024  # most tokens of a pair; longer pairs are left out
    max_tokens_per_pass: int = 16384  # padded tokens of one forward and backward pass; larger batches are split
    pool: int = 32  # batches whose pairs are sorted by length together; 1: no sorting (batches of equal length mislead
    # if the length is part of the answer, as in sums)
    held_out: float = 0.0  # share of the pairs that is not trained, but measured at the end
    seed: int = 0  # seed of the order of the pairs, of those held out and of dropout

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf or (self.steps is not None and self.steps < 1):
            raise UserError(f"a warm start of {self.epochs} epochs or {self.steps} steps trains nothing; give more")
        for name in ("batch_size", "max_length", "max_tokens_per_pass", "pool"):
            if getattr(self, name) < 1:
                raise UserError(f"the warm start's {name} is {getattr(self, name)}, it must be at least 1")
        if self.seed < 0:
            raise UserError(f"the warm start's seed is {self.seed}: give a whole number from 0")
        if not 0 <= self.held_out < 1 or not 0 <= self.warmup <= 1:
            raise UserError(f"held_out is {self.held_out} and warmup {self.warmup}, but these are shares; give 0 to 1")
        self.optimizer(1)  # says what it cannot be

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the field without effect: the number of epochs, where that of updates is given."""
        return {} if self.steps is None else {"epochs": "steps None"}

    def updates(self, pairs: int) -> int:
        """Returns the number of updates over `pairs` trained pairs."""
        return self.steps or max(1, round(self.epochs * pairs / self.batch_size))

    def optimizer(self, updates: int) -> OptimizerSettings:
        """Returns AdamW's settings, with the learning-rate schedule spread over `updates`."""
        warmup = min(round(self.warmup * updates), updates - 1)
        shapes: dict[str, RateShape] = {
            "constant": WarmupConstant(warmup),
            "linear": WarmupLinear(updates, warmup),
            "cosine": WarmupCosine(updates, warmup),
        }
        return OptimizerSettings(
            lr=self.lr,
            schedule=shapes[self.schedule],
            betas=self.betas,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
        )


@dataclass(frozen=True)
class Losses:
    """Cross-entropy in nats per trained token."""

    steps: tuple[float, ...]  # of each update's batch, before the update
    held_out: float | None  # of the pairs held out, after the last update
    too_long: int  # pairs left out


def supervise(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    pairs: Sequence[Pair],
    settings: SupervisedSettings,
    progress: Progress | None = None,
) -> Losses:
    """Train `model` in place on the responses of `pairs`; it is left in evaluation mode.

    Raises `UserError` when no pair is short enough or nothing says what ends a response, and `NonFiniteLoss` at the
    first loss or gradient that is not finite (the weights are those before it).
    """
    eos = tokenizer.eos_token_id
    end_tokens = [eos if pair.end is None else pair.end for pair in pairs]
    if None in end_tokens:
        raise UserError("the tokenizer has no EOS token, so that no response would ever end; give one that has it")
    encoded_pairs = [
        (len(p.prompt), [*p.prompt, *p.response, int(end)], p.observed)
        for p, end in zip(pairs, end_tokens, strict=True)
        if p.prompt and end is not None
    ]
    largest_id = max((max(ids) for _, ids, _ in encoded_pairs), default=0)
    require_embedded(largest_id, len(model.get_input_embeddings().weight))
    max_length = min(settings.max_length, most_positions(model.config) or settings.max_length)
    rows = [_Row(*encoded_pair) for encoded_pair in encoded_pairs if len(encoded_pair[1]) <= max_length]
    rng = np.random.default_rng(settings.seed)
    order = rng.permutation(len(rows))
    held_out_rows = [rows[i] for i in order[: round(settings.held_out * len(rows))]]
    training_rows = [rows[i] for i in order[len(held_out_rows) :]]
    if not training_rows:
        raise UserError(
            f"none of the {len(pairs)} pairs can be trained on: each needs a prompt and at most {max_length} tokens "
            "(max_length, and the model's positions); give other pairs"
        )
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        model.train()
        losses = _train(model, training_rows, settings, rng, progress)
        model.eval()
    return Losses(losses, _mean_loss(model, held_out_rows, settings) if held_out_rows else None, len(pairs) - len(rows))


@dataclass(frozen=True)
class _Row:
    start: int  # of the response, at least 1
    ids: list[int]  # prompt, response, the token that ends it
    observed: tuple[tuple[int, int], ...] = ()  # parts of the response that are not trained

    @property
    def trained_tokens(self) -> int:
        """Returns the number of tokens that are trained."""
        return len(self.ids) - self.start - sum(end - begin for begin, end in self.observed)


def _train(
    model: PreTrainedModel,
    rows: Sequence[_Row],
    settings: SupervisedSettings,
    rng: np.random.Generator,
    progress: Progress | None,
) -> tuple[float, ...]:
    updates = settings.updates(len(rows))
    optimizer = settings.optimizer(updates).start([p for p in model.parameters() if p.requires_grad])
    batches = _batches(rows, settings.batch_size, settings.pool, rng)
    losses = []
    for step in range(1, updates + 1):
        batch = next(batches)
        tokens, loss = sum(row.trained_tokens for row in batch), 0.0
        for part in _split_by_length(batch, settings.max_tokens_per_pass):
            loss_share = _summed_loss(model, part) / tokens
            loss_share.backward()
            loss += loss_share.item()
        if not math.isfinite(optimizer.step(step)):
            raise NonFiniteLoss(f"the warm start's loss is {loss} at step {step} of {updates}; lower its lr")
        losses.append(loss)
        if progress is not None:
            progress(step, updates, loss)
    return tuple(losses)


@torch.no_grad()
def _mean_loss(model: PreTrainedModel, rows: Sequence[_Row], settings: SupervisedSettings) -> float:
    parts = _split_by_length(rows, settings.max_tokens_per_pass)
    return sum(float(_summed_loss(model, part)) for part in parts) / sum(row.trained_tokens for row in rows)


def _batches(rows: Sequence[_Row], size: int, batches_per_pool: int, rng: np.random.Generator) -> Iterator[list[_Row]]:
    """Yields batches for ever: epochs of batches of similar length, each row once per epoch, in a new random order."""
    size = min(size, len(rows))
    while True:
        order = rng.permutation(len(rows))
        for begin in range(0, len(rows), batches_per_pool * size):
            pooled_rows = (rows[i] for i in order[begin : begin + batches_per_pool * size])
            pool = sorted(pooled_rows, key=lambda row: len(row.ids))
            batches = [pool[i : i + size] for i in range(0, len(pool), size)]
            for i in rng.permutation(len(batches)):
                yield batches[i]


def _split_by_length(rows: Sequence[_Row], max_tokens: int) -> Iterator[list[_Row]]:
    """Yields rows by length, cut so that a part has at most `max_tokens` padded tokens (or is a single row)."""
    part: list[_Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if part and (len(part) + 1) * len(row.ids) > max_tokens:
            yield part
            part = []
        part.append(row)
    yield part


def _summed_loss(model: PreTrainedModel, rows: Sequence[_Row]) -> Tensor:
    """Returns the summed cross-entropy of the trained tokens. Padding comes last, so causality hides it: no mask."""
    max_length = max(len(row.ids) for row in rows)
    first_position = min(row.start for row in rows) - 1  # the position that predicts the first response token
    ids = np.zeros((len(rows), max_length), dtype=np.int64)
    labels = np.full((len(rows), max_length), IGNORED, dtype=np.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row.ids)] = row.ids
        labels[b, row.start : len(row.ids)] = row.ids[row.start :]
        for begin, end in row.observed:
            labels[b, row.start + begin : row.start + end] = IGNORED
    device = model.device
    input_BT = torch.from_numpy(ids[:, :-1]).to(device)
    label_BK = torch.from_numpy(labels[:, 1 + first_position :]).to(device)
    logits_BKV = model(input_ids=input_BT, use_cache=False, logits_to_keep=label_BK.shape[1]).logits
    return torch.nn.functional.cross_entropy(
        logits_BKV.float().flatten(0, 1), label_BK.flatten(), ignore_index=IGNORED, reduction="sum"
    )
