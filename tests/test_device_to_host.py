"""Copies beside what is computed: begun after the update, read when they are there, and the next update waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from lanes import ThreadLane, open_lane
from tba import device_to_host
from tba.device_to_host import HostCopies, register_with_gpu
from tba.streaming import write_tensors


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "across": torch.randn(4, 6).T,
        "wide": torch.randn(7, dtype=torch.float64),
        "large": torch.randn((1 << 23) + 3),  # several blocks when it is cast
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_file_of_copies_is_that_of_the_tensors(dtype: torch.dtype | None, tmp_path: Path) -> None:
    tensors = odd_tensors()
    write_tensors(tmp_path / "own", tensors, dtype)
    write_tensors(tmp_path / "copies", HostCopies(open_lane()).begin_copy(tensors, dtype), dtype)
    assert (tmp_path / "own").read_bytes() == (tmp_path / "copies").read_bytes()
    assert load_file(tmp_path / "copies").keys() == tensors.keys()


def test_a_copy_has_what_was_there_when_it_was_begun_because_what_changes_it_waits() -> None:
    lane, weight = ThreadLane(), torch.arange(4.0)
    copies = HostCopies(lane)
    leaving = copies.begin_copy({"w": weight})
    with ThreadPoolExecutor(2) as others:

        def update() -> None:
            assert copies.hold()
            weight.add_(1)

        updated, read = others.submit(update), others.submit(lambda: dict(leaving.items()))
        assert not updated.done()  # the copy is not there: neither changes the tensors nor reads it
        assert not read.done()
        lane.gate.set()
        updated.result(60)
        assert read.result(60)["w"].tolist() == [0, 1, 2, 3]
    assert weight.tolist() == [1, 2, 3, 4]


def test_versions_go_through_the_same_memory_until_the_tensors_are_others() -> None:
    lane = open_lane()
    copies, rooms = HostCopies(lane), []
    for value in range(3):
        there = dict(copies.begin_copy({"a": torch.full((5,), float(value)), "b": torch.full((2, 3), value)}).items())
        assert there["a"].tolist() == [value] * 5
        assert there["b"].tolist() == [[value] * 3] * 2
        rooms.append([t.data_ptr() for t in there.values()])
    assert rooms[0] == rooms[1] == rooms[2]
    assert lane.rooms == [128]  # 20 and 48 bytes, each from a multiple of 64
    copies.begin_copy({"a": torch.zeros(5)}, torch.bfloat16)
    assert lane.rooms == [128, 64]


def test_what_lies_on_the_host_is_not_copied_and_its_readers_are_waited_for() -> None:
    tensors, copies = {"w": torch.zeros(3)}, HostCopies()
    assert copies.begin_copy(tensors) is tensors
    assert not copies.hold()


def test_memory_that_a_gpu_refuses_is_reported_with_the_number_of_its_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = SimpleNamespace(value=304)
    cuda = SimpleNamespace(
        is_initialized=lambda: True, cudart=lambda: SimpleNamespace(cudaHostRegister=lambda *arguments: error)
    )
    monkeypatch.setattr(device_to_host, "torch", SimpleNamespace(cuda=cuda, zeros=lambda *sizes, device: None))
    assert register_with_gpu(0, 1 << 30, False) is None
    assert caplog.records[0].getMessage().startswith("1.07 GB of memory are not registered with the GPU: ")
    assert caplog.records[0].getMessage().endswith("(304)")
