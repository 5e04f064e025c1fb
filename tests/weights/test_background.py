"""Publishing in the background: nobody waits but who would change the weights."""

from __future__ import annotations

import filecmp
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lanes import ThreadLane, open_lane
from tba.device_to_host import HostCopies
from tba.errors import DeadlineExceeded
from tba.protocols import Manifest
from tba.streaming import TensorStream
from tba.types import Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import PublishSettings, WeightDirectory

ONE, TWO = Version(0, 1), Version(0, 2)


def held(gate: threading.Event, value: float = 1.0) -> TensorStream:
    """Weights that come once the gate is open."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        assert gate.wait(60)
        yield "w", torch.full((4,), value)

    return TensorStream({"w": torch.empty(4, device="meta")}, tensors)


def test_publishing_returns_at_once_and_what_is_asked_meanwhile_comes_after_it(tmp_path: Path) -> None:
    gate, there = threading.Event(), WeightDirectory(tmp_path)
    publisher = BackgroundPublisher(WeightDirectory(tmp_path), deadline=60)
    publisher.publish(held(gate), ONE, Manifest(wanted=1))
    publisher.pin(ONE, "evaluate")
    assert publisher.pins(ONE) == ["evaluate"]
    assert there.newest() is None

    gate.set()
    publisher.settle()
    assert there.newest() == ONE
    assert there.pins(ONE) == publisher.pins(ONE) == ["evaluate"]
    assert there.at(ONE).read()["w"].tolist() == [1.0] * 4
    publisher.publish(held(gate, 2.0), TWO, Manifest())
    publisher.unpin(ONE, "evaluate")
    assert publisher.versions() == [ONE, TWO]  # which settles
    assert there.pins(ONE) == []
    publisher.close()


def test_what_fails_there_is_raised_by_whoever_settles_next(tmp_path: Path) -> None:
    gate = threading.Event()
    gate.set()
    publisher = BackgroundPublisher(WeightDirectory(tmp_path), deadline=60)
    publisher.publish(held(gate), TWO, Manifest())
    publisher.publish(held(gate), ONE, Manifest())
    with pytest.raises(ValueError, match="versions must increase"):
        publisher.settle()
    publisher.close()


def test_weights_that_do_not_come_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    gate = threading.Event()
    publisher = BackgroundPublisher(WeightDirectory(tmp_path), deadline=0.01)
    publisher.publish(held(gate), ONE, Manifest())
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        publisher.settle()
    gate.set()
    publisher.close()


class Slow(WeightDirectory):
    """A disk that writes nothing until its gate is open."""

    gate: threading.Event

    def publish(self, weights: Mapping[str, Tensor], version: Version, manifest: Manifest) -> None:
        assert self.gate.wait(60)
        super().publish(weights, version, manifest)


def slow(path: Path) -> Slow:
    directory = Slow(path)
    directory.gate = threading.Event()
    return directory


def test_an_update_waits_for_the_copy_of_a_gpus_weights_and_not_for_the_disk(tmp_path: Path) -> None:
    lane, directory, weight = ThreadLane(), slow(tmp_path), torch.zeros(4)
    publisher = BackgroundPublisher(directory, deadline=60, copies=HostCopies(lane))
    with ThreadPoolExecutor(1) as trainer:

        def update() -> None:
            publisher.hold()
            weight.add_(1)

        publisher.publish({"w": weight}, ONE, Manifest())
        updated = trainer.submit(update)
        assert not updated.done()
        lane.gate.set()
        updated.result(60)  # with nothing on the disk
        assert directory.newest() is None
        assert publisher.busy
        second = trainer.submit(publisher.publish, {"w": weight}, TWO, {})
        assert not second.done()  # there is one set of copies, and the disk has not read it
        directory.gate.set()
        second.result(60)
    assert publisher.versions() == [ONE, TWO]
    assert not publisher.busy
    assert [directory.at(v).read()["w"].tolist() for v in (ONE, TWO)] == [[0.0] * 4, [1.0] * 4]
    assert lane.rooms == [64]
    publisher.close()


def test_an_update_of_weights_on_the_host_waits_for_the_disk_which_reads_them(tmp_path: Path) -> None:
    directory, weight = slow(tmp_path), torch.zeros(4)
    publisher = BackgroundPublisher(directory, deadline=60)
    with ThreadPoolExecutor(1) as trainer:
        publisher.publish({"w": weight}, ONE, Manifest())
        held = trainer.submit(publisher.hold)
        assert not held.done()
        directory.gate.set()
        held.result(60)
    assert directory.newest() == ONE
    publisher.close()


def test_what_fails_is_raised_by_the_next_update_though_it_waits_for_the_copy_alone(tmp_path: Path) -> None:
    publisher = BackgroundPublisher(WeightDirectory(tmp_path), deadline=60, copies=HostCopies(open_lane()))
    publisher.publish({"w": torch.zeros(1)}, TWO, Manifest())
    publisher.publish({"w": torch.zeros(1)}, ONE, Manifest())
    with ThreadPoolExecutor(1) as others:
        others.submit(lambda: publisher._jobs[-1].exception(60)).result(60)
    with pytest.raises(ValueError, match="versions must increase"):
        publisher.hold()
    publisher.close()


def test_changes_are_found_in_copies_as_they_are_in_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = {"a": torch.randn(40, 8), "b": torch.randn(64)}
    after = {"a": before["a"].clone(), "b": before["b"] + 1}
    after["a"][3, 4] += 1
    settings, kind = PublishSettings(full_version_every=2), torch.bfloat16
    for name, copies in (("own", None), ("copied", HostCopies(open_lane()))):
        publisher = BackgroundPublisher(WeightDirectory(tmp_path / name, 2, settings, kind), 60, copies)
        for version, weights in ((ONE, before), (TWO, after)):
            publisher.publish(weights, version, Manifest())
        publisher.close()
    for version in (ONE, TWO):
        own, copied = (tmp_path / name / f"{version}.safetensors" for name in ("own", "copied"))
        assert filecmp.cmp(own, copied, shallow=False)
    assert (tmp_path / "own" / f"{TWO}.json").read_text().count(str(ONE)) == 1  # they are changes
