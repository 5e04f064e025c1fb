"""Reward models from pairs: the loss in numbers, its gradient in one pass and in many, and that it learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tba.apps.preference.options import PreferenceSettings
from tba.apps.preference.training import ReadPair, bradley_terry, fit_reward_model
from tba.errors import NonFiniteLoss, UserError


class Linear(nn.Module):
    """A score that is linear in a text, which is a row of numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.read: list[int] = []

    def scores(self, texts: Sequence[Tensor]) -> Tensor:
        self.read.append(len(texts))
        return torch.stack(list(texts)) @ self.weight


def one_pass(texts: Sequence[Tensor], most: int) -> list[list[int]]:
    return [list(range(len(texts)))[::-1]]  # in another order, as passes by length are


def many(texts: Sequence[Tensor], most: int) -> list[list[int]]:
    return [[i] for i in reversed(range(len(texts)))]


def texts_of(count: int, width: int = 3) -> list[Tensor]:
    return list(torch.randn(count, width, generator=torch.Generator().manual_seed(0)))


def test_the_loss_in_numbers() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    assert bradley_terry(zero, zero).item() == pytest.approx(math.log(2))
    assert bradley_terry(one, zero).item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert bradley_terry(zero, one).item() == pytest.approx(math.log(1 + math.exp(1)))


@pytest.mark.parametrize("split", [one_pass, many])
def test_a_batch_has_the_same_weights_after_it_in_one_pass_and_in_many(
    split: Callable[[Sequence[Tensor], int], list[list[int]]],
) -> None:
    texts = texts_of(6)
    pairs = [ReadPair(0, 1, "x"), ReadPair(0, 2, "x"), ReadPair(4, 3, "y"), ReadPair(5, 4, "y")]
    model = Linear(3)
    settings = PreferenceSettings(epochs=5, batch_size=4, lr=0.1)
    losses = fit_reward_model(model, [model.weight], texts, pairs, split, settings)
    reference = Linear(3)
    expected = fit_reward_model(reference, [reference.weight], texts, pairs, one_pass, settings)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert torch.allclose(model.weight, reference.weight, atol=1e-6)
    assert losses[0] == pytest.approx(math.log(2))


def test_a_text_of_many_pairs_is_read_once_in_a_batch() -> None:
    texts = texts_of(5)
    pairs = [ReadPair(a, b, "x") for a in range(5) for b in range(a + 1, 5)]
    model = Linear(3)
    fit_reward_model(model, [model.weight], texts, pairs, one_pass, PreferenceSettings(epochs=2, batch_size=10))
    assert model.read == [5, 5]


def test_it_finds_the_preference_behind_the_pairs() -> None:
    rng = np.random.default_rng(0)
    texts, wanted = texts_of(60), torch.tensor([1.0, -2.0, 0.0])
    pairs = []
    for n in range(300):
        a, b = rng.choice(60, 2, replace=False)
        better = (texts[a] - texts[b]) @ wanted > 0
        pairs.append(ReadPair(int(a if better else b), int(b if better else a), str(n)))
    model = Linear(3)
    fit_reward_model(
        model, [model.weight], texts, pairs, one_pass, PreferenceSettings(epochs=30, batch_size=50, lr=0.1)
    )
    found = model.weight.detach()
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.99


def test_what_cannot_be_trained_is_said() -> None:
    model = Linear(3)
    with pytest.raises(UserError, match="no pairs"):
        fit_reward_model(model, [model.weight], [], [], one_pass, PreferenceSettings())
    with pytest.raises(UserError, match="cannot be trained"):
        PreferenceSettings(epochs=0)
    texts = [torch.full((3,), math.inf), torch.zeros(3)]
    with pytest.raises(NonFiniteLoss, match="lower its lr"):
        fit_reward_model(model, [model.weight], texts, [ReadPair(0, 1, "x")], one_pass, PreferenceSettings())
