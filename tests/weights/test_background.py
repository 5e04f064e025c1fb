"""Publishing in the background: nobody waits but who would change the weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tba.errors import DeadlineExceeded
from tba.streaming import Streamed
from tba.types import Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import WeightDirectory

ONE, TWO = Version(0, 1), Version(0, 2)


def held(gate: threading.Event, value: float = 1.0) -> Streamed:
    """Weights that come once the gate is open."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        assert gate.wait(60)
        yield "w", torch.full((4,), value)

    return Streamed({"w": torch.empty(4, device="meta")}, tensors)


def test_publishing_returns_at_once_and_what_is_asked_meanwhile_comes_after_it(tmp_path: Path) -> None:
    gate, there = threading.Event(), WeightDirectory(tmp_path)
    publisher = BackgroundPublisher(WeightDirectory(tmp_path), deadline=60)
    publisher.publish(held(gate), ONE, {"step": 1})
    publisher.pin(ONE, "evaluate")
    assert publisher.pins(ONE) == ["evaluate"]
    assert there.newest() is None

    gate.set()
    publisher.settle()
    assert there.newest() == ONE
    assert there.pins(ONE) == publisher.pins(ONE) == ["evaluate"]
    assert there.at(ONE).read()["w"].tolist() == [1.0] * 4
    publisher.publish(held(gate, 2.0), TWO, {})
    publisher.unpin(ONE, "evaluate")
    assert publisher.versions() == [ONE, TWO]  # which settles
    assert there.pins(ONE) == []
    publisher.close()


def test_what_fails_there_is_raised_by_whoever_settles_next(tmp_path: Path) -> None:
    gate = threading.Event()
    gate.set()
    publisher = BackgroundPublisher(WeightDirectory(tmp_path), deadline=60)
    publisher.publish(held(gate), TWO, {})
    publisher.publish(held(gate), ONE, {})
    with pytest.raises(ValueError, match="versions must increase"):
        publisher.settle()
    publisher.close()


def test_weights_that_do_not_come_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    gate = threading.Event()
    publisher = BackgroundPublisher(WeightDirectory(tmp_path), deadline=0.01)
    publisher.publish(held(gate), ONE, {})
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        publisher.settle()
    gate.set()
    publisher.close()
