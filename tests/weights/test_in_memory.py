"""Versions of the weights in the machine's memory: read as from the disk, on it once they are needed for longer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tba.errors import UserError
from tba.protocols import Manifest
from tba.types import Version
from tba.weights import in_memory
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import PublishSettings, WeightDirectory

SETTINGS = PublishSettings(in_memory=True)


def weights_of(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300,), float(step)), "b": torch.full((7, 5), step + 0.5)}


def publish(directory: WeightDirectory | BackgroundPublisher, *steps: int) -> None:
    for step in steps:
        directory.publish(weights_of(step), Version(0, step), Manifest())


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the machine's memory."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(in_memory, "MEMORY_ROOT", tmp_path / "memory")
    return tmp_path / "memory"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def held(place: Path) -> list[str]:
    return sorted(file.name for folder in place.iterdir() for file in folder.iterdir() if not file.is_symlink())


def read(path: Path, step: int) -> bool:
    there = WeightDirectory(path).at(Version(0, step)).read()
    return all(torch.equal(there[name], tensor) for name, tensor in weights_of(step).items())


def test_the_newest_versions_are_in_memory_and_read_like_any_other(path: Path, place: Path) -> None:
    directory = WeightDirectory(path, settings=SETTINGS)
    publish(directory, 0, 1, 2)
    assert held(place) == ["0.1.safetensors", "0.2.safetensors"]
    assert all(file.is_symlink() == (file.suffix == ".safetensors") for file in path.iterdir())
    assert read(path, 1)
    assert read(path, 2)
    assert [folder.stat().st_mode & 0o077 for folder in place.iterdir()] == [0]  # nobody else's to read


def test_a_pinned_version_is_on_the_disk_and_so_is_every_one_once_the_publisher_has_ended(
    path: Path, place: Path
) -> None:
    publisher = BackgroundPublisher(WeightDirectory(path, settings=SETTINGS), 60.0)
    publish(publisher, 0)
    early = publisher.at(Version(0, 0))
    publisher.pin(Version(0, 0), "evaluation")
    publish(publisher, 1, 2, 3)
    publisher.settle()
    assert held(place) == ["0.2.safetensors", "0.3.safetensors"]
    assert not (path / "0.0.safetensors").is_symlink()
    assert torch.equal(early.read()["a"], weights_of(0)["a"])  # it was open while it moved
    publisher.close()
    assert list(place.iterdir()) == []
    assert not any(file.is_symlink() for file in path.iterdir())
    assert [read(path, step) for step in (0, 2, 3)] == [True] * 3


def test_without_room_versions_are_written_to_the_disk_and_that_is_said_once(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(in_memory, "_SPARE_BYTES", 1 << 60)
    directory = WeightDirectory(path, settings=SETTINGS)
    publish(directory, 0, 1)
    assert list(place.iterdir()) == []
    assert read(path, 1)
    assert [r.getMessage().startswith("weights are written to the disk") for r in caplog.records] == [True]


def test_what_a_restart_of_the_machine_takes_is_said_and_the_next_publisher_begins_without_it(
    path: Path, place: Path
) -> None:
    directory = WeightDirectory(path, settings=SETTINGS)
    publish(directory, 0, 1)
    directory.pin(Version(0, 0), "reference")
    for folder in place.iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    with pytest.raises(UserError, match=r"memory, and is gone from there \(.*\): continue the run"):
        WeightDirectory(path).newer_than(None)
    again = WeightDirectory(path, settings=SETTINGS)
    again.clean()
    assert again.versions() == [Version(0, 0)]
    publish(again, 5)
    assert read(path, 0)
    assert read(path, 5)


def test_memory_that_a_killed_publisher_left_is_freed_by_the_next_one_and_another_runs_is_not(
    tmp_path: Path, path: Path, place: Path
) -> None:
    other, gone = tmp_path / "other", tmp_path / "gone"
    for folder in (path, other, gone):
        publish(WeightDirectory(folder, settings=SETTINGS), 1, 2)  # never closed
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    publish(WeightDirectory(path, settings=SETTINGS), 3)
    assert held(place) == ["0.1.safetensors", "0.2.safetensors", "0.2.safetensors", "0.3.safetensors"]
    publish(WeightDirectory(path, settings=SETTINGS), 4, 5)
    publish(WeightDirectory(path, settings=SETTINGS), 6)  # nothing links any longer to what the first one wrote
    assert sorted(held(place)) == sorted(["0.1.safetensors", "0.2.safetensors", "0.5.safetensors", "0.6.safetensors"])
    assert read(other, 2)


@pytest.mark.parametrize("disturb", ["clean", "publish", "close"])
def test_a_copy_of_a_run_deletes_nothing_of_the_run_that_it_was_copied_from(
    disturb: str, tmp_path: Path, path: Path, place: Path
) -> None:
    original = WeightDirectory(path, settings=SETTINGS)
    publish(original, 1, 2)
    (path / ".3.safetensors").symlink_to((path / "0.2.safetensors").readlink())  # which it is writing
    copy = shutil.copytree(path, tmp_path / "copy", symlinks=True)
    directory = WeightDirectory(copy, settings=SETTINGS)
    if disturb == "clean":
        directory.clean()
    elif disturb == "publish":
        publish(directory, 4, 5, 6)
    else:
        directory.close()
    assert read(path, 1)
    assert read(path, 2)
    assert all(read(copy, step) for step in ((5, 6) if disturb == "publish" else (1, 2)))
    directory.close()
    assert held(place) == ["0.1.safetensors", "0.2.safetensors"]
    original.close()
    assert read(path, 2)
    assert list(place.iterdir()) == []


def test_a_run_that_was_moved_keeps_what_it_has_in_memory(tmp_path: Path, path: Path, place: Path) -> None:
    publish(WeightDirectory(path, settings=SETTINGS), 1, 2)  # and is killed
    moved = path.rename(tmp_path / "moved")
    directory = WeightDirectory(moved, settings=SETTINGS)
    publish(directory, 3)
    assert read(moved, 2)
    directory.close()
    assert list(place.iterdir()) == []


def test_nothing_stays_in_memory_of_a_killed_run_that_was_resumed_and_has_ended(path: Path, place: Path) -> None:
    publish(WeightDirectory(path, settings=SETTINGS), 1, 2)  # and is killed
    resumed = WeightDirectory(path, settings=SETTINGS)
    publish(resumed, 3, 4)
    resumed.close()
    assert list(place.iterdir()) == []
    assert all(read(path, step) for step in (3, 4))


def test_a_publisher_whose_memory_was_emptied_makes_room_anew(path: Path, place: Path) -> None:
    directory = WeightDirectory(path, settings=SETTINGS)
    publish(directory, 1)
    shutil.rmtree(place)
    place.mkdir()
    with pytest.raises(UserError, match=r"memory, and is gone from there \(.*\): continue the run"):
        directory.pin(Version(0, 1), "evaluation")
    publish(directory, 2)
    assert read(path, 2)


def test_a_publisher_whose_memory_was_emptied_ends_and_says_what_is_gone(
    path: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = WeightDirectory(path, settings=SETTINGS)
    publish(directory, 1)
    shutil.rmtree(place)
    directory.close()
    assert f"version 0.1 in {path} was in the machine's memory, and is gone from there" in caplog.text


def test_a_link_that_leads_anywhere_else_costs_only_itself(tmp_path: Path, path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    path.mkdir()
    os.symlink(precious, path / "0.1.safetensors")  # no manifest: a leftover
    publish(WeightDirectory(path, settings=SETTINGS), 2)
    assert precious.read_text() == "kept"
    assert not (path / "0.1.safetensors").is_symlink()


def test_changes_and_memory_exclude_each_other() -> None:
    with pytest.raises(UserError, match="choose one of them"):
        PublishSettings(full_version_every=2, in_memory=True)
