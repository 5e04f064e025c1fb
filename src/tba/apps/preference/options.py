"""The options of `tba reward-model`. They stand apart from what the command loads.

Invariant: nothing heavy is imported here, so that `tba reward-model --help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tba.errors import UserError


@dataclass(frozen=True)
class PreferenceSettings:
    """How a reward model is trained. Raises `UserError` when a field makes no sense."""

    epochs: float = 1.0  # passes over the pairs
    batch_size: int = 64  # pairs
    lr: float = 1e-5  # peak learning rate; linear to 0 after the warm-up
    warmup: float = 0.03  # share of the updates in which the learning rate rises
    weight_decay: float = 0.0  # weight decay of AdamW
    clip_norm: float = 1.0  # largest norm of the gradient
    max_tokens_per_pass: int = 16384  # padded tokens of one forward and backward; larger batches go in parts
    seed: int = 0  # seed of the order of the pairs

    def __post_init__(self) -> None:
        if self.epochs <= 0 or self.batch_size < 1 or self.max_tokens_per_pass < 1 or not 0 <= self.warmup <= 1:
            raise UserError(
                f"a reward model of {self.epochs} epochs, {self.batch_size} pairs a batch, {self.max_tokens_per_pass} "
                f"tokens a pass and warmup {self.warmup} cannot be trained: give positive numbers, a share from 0 to 1"
            )

    def updates(self, pairs: int) -> int:
        return max(1, round(self.epochs * pairs / self.batch_size))


@dataclass(frozen=True)
class RewardModelOptions:
    """Names the backbone, and says how it is trained and measured."""

    model: str = ""  # the backbone: a folder or a Hub name, causal or for sequence classification
    held_out: float = 0.1  # share of the documents that is held out to measure the model
    folds: int = 0  # cross-validation with so many folds; 0: one held-out share
    score_field: str = "score"  # field of the score, if answers are scored one by one: two different scores are a pair
    label_with: Path | None = None  # a reward model that decides which answer is better, instead of the file
    frozen: bool = False  # do not train the backbone: train a linear head on its sentence similarities
    max_tokens: int = 640  # tokens of prompt and answer together; longer texts lose tokens of the prompt
    keep: Literal["beginning", "end"] = "end"  # which part of a longer prompt is kept
    device: str = "cpu"
    train: PreferenceSettings = field(default_factory=PreferenceSettings)

    def __post_init__(self) -> None:
        if self.folds < 0 or self.folds == 1 or not 0 < self.held_out < 1:
            raise UserError(
                f"--folds is {self.folds} and --held-out {self.held_out}: give 0 or at least 2 folds, and a share "
                "between 0 and 1"
            )
