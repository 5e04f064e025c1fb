"""The arrow up: no reader ever sees half a version, and what is needed is kept."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.protocols import EvaluationRequest, Manifest
from tba.types import Version
from tba.weights.directory import WeightDirectory

SHAPES = {"a": (64, 64), "b": (300,), "c": (7, 5)}


def weights_of(version: Version, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every element says which version it is of."""
    return {name: torch.full(shape, float(version.step), dtype=dtype) for name, shape in SHAPES.items()}


def publish(directory: WeightDirectory, *versions: Version) -> None:
    for version in versions:
        directory.publish(weights_of(version), version, Manifest(wanted=version.step))


def steps(*numbers: int) -> list[Version]:
    return [Version(0, n) for n in numbers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_published_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = WeightDirectory(tmp_path / "weights")
    weights = {"a": torch.randn(4, 6).to(dtype).T, "b": torch.randn(3, requires_grad=True).to(dtype)}
    request = EvaluationRequest(Version(2, 5), 1.5, during=True, weights=Version(2, 5).average)
    manifest = Manifest((request,), stop=True, reference=Version(2, 0), journal={"rows": 3}, wanted=64)
    directory.publish(weights, Version(2, 5), manifest)
    published = WeightDirectory(tmp_path / "weights").newer_than(None)
    assert published is not None
    assert published.version == Version(2, 5)
    assert published.manifest == manifest
    read = published.read()
    assert {name: tensor.dtype for name, tensor in read.items()} == {"a": dtype, "b": dtype}
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_a_reader_is_given_the_newest_if_it_is_newer_than_its_own(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path)
    assert directory.newer_than(None) is None
    publish(directory, Version(0, 0), Version(0, 9), Version(1, 4))
    for own in (
        None,
        Version(0, 0),
        Version(0, 99),
        Version(1, 3),
    ):  # an earlier incarnation is older whatever its step
        published = directory.newer_than(own)
        assert published is not None
        assert published.version == Version(1, 4)
    assert directory.newer_than(Version(1, 4)) is None
    assert directory.newer_than(Version(2, 0)) is None


def test_versions_only_rise_so_that_no_two_sets_of_weights_share_a_name(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path)
    publish(directory, Version(1, 4))
    for version in (Version(1, 4), Version(1, 3), Version(0, 50)):
        with pytest.raises(ValueError, match="versions must increase"):
            publish(directory, version)
    assert directory.versions() == [Version(1, 4)]


def test_the_newest_two_and_every_pinned_version_are_kept(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path)
    publish(directory, *steps(0, 1))
    directory.pin(Version(0, 0), "reference")
    directory.pin(Version(0, 1), "reference")
    directory.pin(Version(0, 1), "evaluate")
    publish(directory, *steps(2, 3, 4))
    assert directory.versions() == steps(0, 1, 3, 4)
    directory.unpin(Version(0, 0), "reference")
    directory.unpin(Version(0, 1), "reference")
    assert directory.versions() == steps(1, 3, 4)
    assert directory.pins(Version(0, 1)) == ["evaluate"]
    directory.unpin(Version(0, 1), "evaluate")
    assert directory.versions() == steps(3, 4)
    assert len(list(tmp_path.iterdir())) == 4  # nothing of the others is left


def test_pins_outlive_the_publisher(tmp_path: Path) -> None:
    publish(WeightDirectory(tmp_path), Version(0, 1))
    WeightDirectory(tmp_path).pin(Version(0, 1), "reference")
    publish(WeightDirectory(tmp_path), *steps(2, 3, 4))
    reference = WeightDirectory(tmp_path).at(Version(0, 1)).read()
    assert torch.equal(reference["b"], torch.ones(300))


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path)
    publish(directory, *steps(1, 2, 3))
    with pytest.raises(UserError, match=r"has no version 0\.1 of the weights, but 0\.2, 0\.3"):
        directory.at(Version(0, 1))
    with pytest.raises(UserError, match=r"version 0\.1 cannot be pinned"):
        directory.pin(Version(0, 1), "reference")
    with pytest.raises(ValueError, match="not pinned for 'reference'"):
        directory.unpin(Version(0, 2), "reference")
    with pytest.raises(UserError, match="0 versions of the weights are to be kept"):
        WeightDirectory(tmp_path, keep=0)


def test_a_version_at_hand_can_be_read_after_it_was_pruned(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path)
    publish(directory, Version(0, 1))
    held = WeightDirectory(tmp_path).newer_than(None)
    assert held is not None
    publish(directory, *steps(2, 3))
    assert directory.versions() == steps(2, 3)
    assert torch.equal(held.read()["a"], torch.ones(64, 64))


def test_a_version_pruned_between_listing_and_opening_gives_way_to_the_newest(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path)
    publish(directory, Version(0, 1))

    class Overtaken(WeightDirectory):
        """Its first look is of a moment ago."""

        looks = 0

        def newest(self) -> Version | None:
            self.looks += 1
            seen = super().newest()
            if self.looks == 1:
                publish(directory, *steps(2, 3))
            return seen

    reader = Overtaken(tmp_path)
    published = reader.newer_than(None)
    assert reader.looks == 2
    assert published is not None
    assert published.version == Version(0, 3)
    assert published.read()["c"].unique().tolist() == [3.0]


def test_what_a_reader_does_to_its_tensors_does_not_reach_the_file(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path)
    publish(directory, Version(0, 1))
    directory.at(Version(0, 1)).read()["a"].zero_()
    assert directory.at(Version(0, 1)).read()["a"].unique().tolist() == [1.0]


def test_a_crash_before_the_manifest_is_as_if_nothing_was_published_and_is_cleaned_up(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path)
    publish(directory, *steps(1, 2))
    (tmp_path / "0.3.safetensors").write_bytes(b"tensors without a manifest")
    (tmp_path / ".0.3.json").write_text("{")
    (tmp_path / ".0.4.safetensors").write_bytes(b"half")
    reader = WeightDirectory(tmp_path)
    published = reader.newer_than(None)
    assert published is not None
    assert published.version == Version(0, 2)
    assert (tmp_path / ".0.4.safetensors").exists()  # a reader takes nothing away: it might be being written
    publish(WeightDirectory(tmp_path), Version(0, 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.2.json", "0.2.safetensors", "0.3.json", "0.3.safetensors"
    ]  # fmt: skip
    assert reader.at(Version(0, 3)).read()["b"].unique().tolist() == [3.0]


@pytest.mark.parametrize("damage", ["tensors", "manifest"])
def test_damaged_files_are_named_and_not_retried_for_ever(tmp_path: Path, damage: str) -> None:
    directory = WeightDirectory(tmp_path)
    publish(directory, Version(0, 1))
    file = tmp_path / {"tensors": "0.1.safetensors", "manifest": "0.1.json"}[damage]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"version 0\.1 in .* is damaged"):
        directory.newer_than(None)


PUBLISHER = """
import sys, torch
from pathlib import Path
from tba.protocols import Manifest
from tba.types import Version
from tba.weights.directory import WeightDirectory
torch.set_num_threads(1)
directory = WeightDirectory(Path(sys.argv[1]), keep=1)
print("ready", flush=True)
for step in range(1, int(sys.argv[2]) + 1):
    tensors = {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}
    directory.publish(tensors, Version(0, step), Manifest(wanted=step))
"""


def test_readers_beside_a_publishing_process_see_whole_versions_in_rising_order(tmp_path: Path) -> None:
    """Three threads read as fast as they can, with nothing but the newest kept: every look is a race."""
    last, faults, counts = 150, [], [0, 0, 0]

    def read(reader: int) -> None:
        directory, own = WeightDirectory(tmp_path), None
        while own is None or own.step < last:
            if faults or (own is None and publisher.poll() not in (None, 0)):
                return
            published = directory.newer_than(own)
            if published is None:
                continue
            values = {float(v) for tensor in published.read().values() for v in tensor.unique()}
            if values != {float(published.version.step)} or published.manifest != Manifest(
                wanted=published.version.step
            ):
                faults.append((published.version, values, published.manifest))
            if own is not None and published.version <= own:
                faults.append((own, published.version))
            own, counts[reader] = published.version, counts[reader] + 1

    script = f"SHAPES = {SHAPES!r}\n{PUBLISHER}"
    publisher = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(last)], stdout=subprocess.PIPE, text=True
    )
    assert publisher.stdout is not None
    assert publisher.stdout.readline() == "ready\n"
    readers = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(3)]
    for thread in readers:
        thread.start()
    publisher.communicate(timeout=120)
    assert publisher.returncode == 0
    for thread in readers:
        thread.join(60)
        assert not thread.is_alive()
    assert faults == []
    assert min(counts) >= 1


@settings(deadline=None, max_examples=30)
@given(
    keep=st.integers(1, 3),
    actions=st.lists(st.tuples(st.sampled_from(["publish", "resume", "pin", "unpin"]), st.integers(0, 5)), max_size=20),
)
def test_after_any_sequence_the_newest_and_the_pinned_are_there_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, keep: int, actions: list[tuple[str, int]]
) -> None:
    """A model beside it: all versions ever, those pinned, those pruned."""
    path = tmp_path_factory.mktemp("weights")
    directory, there, pinned = WeightDirectory(path, keep), [], set()
    version = Version()
    for action, number in actions:
        if action in ("publish", "resume"):
            if action == "resume":
                directory, version = WeightDirectory(path, keep), Version(version.incarnation + 1, number)
            else:
                version = Version(version.incarnation, version.step + 1 + number)
            publish(directory, version)
            there.append(version)
        elif there and action == "pin" and there[number % len(there)] not in pinned:
            pinned.add(there[number % len(there)])
            directory.pin(there[number % len(there)], "why")
        elif pinned and action == "unpin":
            loosened = sorted(pinned)[number % len(pinned)]
            pinned.remove(loosened)
            directory.unpin(loosened, "why")
        there = [v for v in there if v in pinned or v in there[-keep:]]
        assert directory.versions() == there
        for kept in there:
            assert directory.at(kept).read()["b"].unique().tolist() == [float(kept.step)]


def test_averages_are_never_the_newest_and_stay_while_they_are_pinned_or_the_newest_of_their_kind(
    tmp_path: Path,
) -> None:
    directory = WeightDirectory(tmp_path / "weights")
    for step in range(5):
        if step % 2 == 0:
            directory.publish(weights_of(Version(0, step)), Version(0, step).average, Manifest())
            assert directory.newest() in (None, Version(0, step - 1))
        publish(directory, Version(0, step))
        if step == 0:
            directory.pin(Version.parse("0.0a"), "evaluate")
    assert list(map(str, directory.versions())) == ["0.0a", "0.4a", "0.3", "0.4"]
    assert directory.newest() == Version(0, 4)
    with pytest.raises(ValueError, match=r"0\.3a cannot be published after 0\.4a"):
        directory.publish(weights_of(Version(0, 3)), Version(0, 3).average, Manifest())
    directory.unpin(Version.parse("0.0a"), "evaluate")
    assert list(map(str, directory.versions())) == ["0.4a", "0.3", "0.4"]
    assert Version(0, 4).average < Version(0, 0)  # whoever has evaluated one loads whatever weights are the newest
