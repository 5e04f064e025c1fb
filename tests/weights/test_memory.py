"""Weights in shared memory: what another process reads is what was published, or it reads the file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing.process import current_process
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tba.protocols import PublishedWeights
from tba.types import Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import WeightDirectory
from tba.weights.memory import ADDRESS, MemoryFirst, WeightMemory

ONE, TWO = Version(0, 1), Version(3, 2)


def weights_of(value: float) -> dict[str, Tensor]:
    """Of two types and several shapes."""
    return {
        "matrix": torch.full((3, 5), value),
        "row": torch.arange(4) + value,
        "count": torch.tensor([int(value)]),
        "none": torch.empty(0, 2),
    }


class Announced:
    """A source whose newest version is in memory, and whose file says so."""

    def __init__(self, address: str, version: Version) -> None:
        self.address, self.version = address, version

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        return PublishedWeights(self.version, {ADDRESS: self.address}, lambda: {"file": torch.zeros(1)})

    def at(self, version: Version) -> PublishedWeights:
        raise AssertionError("nobody asks")


def taken(source: MemoryFirst) -> dict[str, Tensor]:
    found = source.newer_than(None)
    assert found is not None
    return found.read()


def waits(gate: threading.Event) -> None:
    assert gate.wait(60)


def in_another_process(act: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_another_process_reads_what_was_written_and_later_what_was_written_then(dtype: torch.dtype | None) -> None:
    memory = WeightMemory(weights_of(0.0), dtype)
    memory.write(weights_of(1.3), ONE)
    read, write = os.pipe()
    answer, answered = os.pipe()

    def reader() -> None:
        announced = Announced(memory.address, ONE)
        source = MemoryFirst(announced)
        for value, version in ((1.3, ONE), (7.0, TWO)):
            announced.version = version
            found, expected = taken(source), weights_of(value)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                wanted = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
                assert torch.equal(found[name], wanted)
                assert found[name].dtype == wanted.dtype
            os.write(answered, b"x")
            os.read(read, 1)

    child = threading.Thread(target=in_another_process, args=(reader,))
    child.start()
    os.read(answer, 1)
    memory.write(weights_of(7.0), TWO)
    os.write(write, b"x")
    os.read(answer, 1)
    os.write(write, b"x")
    child.join()
    memory.close()


def test_what_is_being_written_or_is_another_version_or_is_not_to_be_had_is_read_from_the_file() -> None:
    memory = WeightMemory(weights_of(0.0), None)
    memory.write(weights_of(1.0), ONE)
    source = MemoryFirst(Announced(memory.address, ONE))
    assert torch.equal(taken(source)["matrix"], weights_of(1.0)["matrix"])
    assert "file" in taken(MemoryFirst(Announced(memory.address, TWO)))
    assert source._shared is not None
    source._shared.state[0] += 1
    assert "file" in taken(source)
    source._shared.state[0] += 1
    assert "matrix" in taken(source)

    def stranger() -> None:
        current_process().authkey = b"another"
        assert "file" in taken(MemoryFirst(Announced(memory.address, ONE)))

    in_another_process(stranger)
    memory.close()
    assert "matrix" in taken(source)  # it has it
    assert "file" in taken(MemoryFirst(Announced(memory.address, ONE)))
    assert not Path(memory.address).parent.exists()


def test_a_write_while_somebody_copies_is_seen_by_whoever_copied() -> None:
    memory = WeightMemory(weights_of(0.0), None)
    memory.write(weights_of(1.0), ONE)
    source = MemoryFirst(Announced(memory.address, ONE))
    taken(source)
    shared = source._shared
    assert shared is not None
    views = shared.views()

    class Slow(type(shared)):  # type: ignore[misc]
        """In the middle of the copy a newer version is written."""

        def views(self) -> dict[str, Tensor]:
            memory.write(weights_of(2.0), ONE)
            return views

    source._shared = Slow(shared.state, shared.flat, shared.places)
    assert "file" in taken(source)
    memory.close()


def test_with_a_copy_in_memory_the_next_update_waits_for_no_file(tmp_path: Path) -> None:
    weights = weights_of(1.0)
    memory = WeightMemory(weights, None)
    publisher = BackgroundPublisher(WeightDirectory(tmp_path), 60.0, memory)
    gate = threading.Event()
    publisher._later(lambda: waits(gate))  # a disk that is slow
    publisher._jobs.clear()
    publisher.publish(weights, ONE, {"step": 1})
    publisher.release()
    weights["matrix"] += 1  # the update
    assert WeightDirectory(tmp_path).newest() is None
    gate.set()
    publisher.settle()
    found = WeightDirectory(tmp_path).newer_than(None)
    assert found is not None
    assert found.manifest == {"step": 1, ADDRESS: memory.address}
    assert torch.equal(load_file(WeightDirectory(tmp_path).file(ONE))["matrix"], weights_of(1.0)["matrix"])
    assert torch.equal(taken(MemoryFirst(WeightDirectory(tmp_path)))["matrix"], weights_of(1.0)["matrix"])
    publisher.close()
    assert not Path(memory.address).exists()
