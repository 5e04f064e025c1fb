"""Tensors one after the other: the file is the library's, and there is never a second copy of all."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tba.streaming import TensorStream, write_tensors


def test_the_file_is_read_by_safetensors_whatever_types_and_shapes_follow_each_other(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.randn(3, 5).bfloat16(),  # an odd number of two-byte elements, and then wider ones
        "wide": torch.randn(7, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "across": torch.randn(4, 6).T,  # not contiguous
        "whole": torch.arange(5),
    }
    path = tmp_path / "t.safetensors"
    assert write_tensors(path, tensors) == path.stat().st_size
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in tensors.items())

    write_tensors(path, tensors, torch.bfloat16)
    halved = load_file(path)
    assert torch.equal(halved["across"], tensors["across"].bfloat16())
    assert halved["flags"].dtype == torch.bool


def test_a_stream_is_written_with_one_of_its_tensors_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for i in range(20):
            tensor = torch.full((1000,), float(i))
            alive.add(tensor)
            most = max(most, len(alive))
            yield str(i), tensor
            del tensor

    like = {str(i): torch.empty(1000, device="meta") for i in range(20)}
    write_tensors(tmp_path / "t", TensorStream(like, tensors))
    assert most <= 2  # the one that is written, and the next
    assert float(load_file(tmp_path / "t")["19"][999]) == 19


@pytest.mark.parametrize(
    ("come", "what"),
    [({"a": torch.zeros(3)}, "ended before"), ({"b": torch.zeros(9), "a": torch.zeros(3)}, "was read")],
)
def test_a_stream_that_is_not_what_was_said_is_refused(tmp_path: Path, come: dict[str, Tensor], what: str) -> None:
    like = {"a": torch.empty(3, device="meta"), "b": torch.empty(2, device="meta")}
    with pytest.raises(ValueError, match=what):
        write_tensors(tmp_path / "t", TensorStream(like, lambda: iter(come.items())))
