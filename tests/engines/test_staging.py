"""Weights on their way to the engine's device: decoding goes on, and loading them gives what it gives otherwise."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from engine_families import build, ragged_prompts
from test_transformers_engine import engine_of, tokens_of

from lanes import ThreadLane, open_lane
from tba.engines.staging import Staging
from tba.generation import generate
from tba.streaming import shapes_of
from tba.types import Sampling, Version

CPU = torch.device("cpu")


def test_an_engine_decodes_while_weights_are_staged_and_then_has_those_weights() -> None:
    new, prompts, lane = build("llama", seed=1), ragged_prompts(4, 7), ThreadLane()
    weights = {name: parameter.detach().clone() for name, parameter in new.named_parameters()}
    engine, plain = engine_of(build("llama", seed=0)), engine_of(build("llama", seed=0))
    engine._staging = Staging(CPU, lane)

    def sampled_tokens(from_engine: object) -> list[list[int]]:
        return tokens_of(generate(from_engine, prompts, 3, Sampling(), np.random.default_rng(0)))

    staged_weights = engine.stage(weights)
    assert sampled_tokens(engine) == sampled_tokens(plain)  # nothing has been copied yet
    lane.gate.set()
    engine.load(staged_weights, Version(1, 0))
    plain.load(weights, Version(1, 0))
    assert sampled_tokens(engine) == sampled_tokens(plain) == sampled_tokens(engine_of(new))


def test_weights_that_do_not_fit_are_refused_before_any_is_copied_although_they_are_staged() -> None:
    engine = engine_of(build("llama", seed=0))
    engine._staging = Staging(CPU, open_lane())
    initial_weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    weights = {name: p.detach() + 1 for name, p in engine.model.named_parameters()}
    with pytest.raises(KeyError, match="no weight named other"):
        engine.load(engine.stage(weights | {"other": torch.zeros(2)}), Version(1, 0))
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, initial_weights[name])


def test_staged_weights_are_copies_with_declared_shapes_and_the_memory_of_each_is_given_back() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.int64)}
    staged_weights = Staging(CPU, open_lane()).begin_copy(weights)
    assert {name: (t.shape, t.dtype) for name, t in shapes_of(staged_weights).items()} == {
        name: (t.shape, t.dtype) for name, t in weights.items()
    }
    for (name, tensor), expected_name in zip(staged_weights.items(), ("a", "b"), strict=True):
        assert name == expected_name
        assert torch.equal(tensor, weights[name])
        assert tensor.data_ptr() != weights[name].data_ptr()
    assert list(staged_weights.items()) == []  # none is held for longer


@pytest.mark.parametrize(("free_bytes", "is_staged"), [(199, False), (201, True), (None, True)])
def test_weights_are_staged_where_half_of_the_free_memory_holds_them(free_bytes: int | None, is_staged: bool) -> None:
    weights = {"a": torch.zeros(25)}  # 100 bytes
    staged_weights = Staging(CPU, open_lane(), lambda device: free_bytes).begin_copy(weights)
    assert (staged_weights is not weights) == is_staged


def test_an_engine_on_the_host_reads_weights_in_place() -> None:
    weights = {"a": torch.zeros(3)}
    assert Staging(CPU).begin_copy(weights) is weights


def test_what_is_copied_from_is_held_until_the_copy_is_made() -> None:
    lane, weights = ThreadLane(), {"a": torch.zeros(3)}
    source = weakref.ref(weights["a"])
    staging = Staging(CPU, lane)
    staged_weights = staging.begin_copy(weights)
    del weights
    gc.collect()
    assert source() is not None
    lane.gate.set()
    assert dict(staged_weights.items())["a"].tolist() == [0, 0, 0]
    gc.collect()
    assert source() is None


@pytest.mark.parametrize("has_begun", [True, False])
def test_what_is_copied_from_is_given_free_where_loading_fails_or_never_begins(has_begun: bool) -> None:
    weights = {"a": torch.zeros(3), "b": torch.zeros(3)}
    source = weakref.ref(weights["a"])
    staging = Staging(CPU, open_lane())
    staged_weights = staging.begin_copy(weights)
    del weights
    if has_begun:
        next(iter(staged_weights.items()))
    del staged_weights
    gc.collect()
    assert source() is None
