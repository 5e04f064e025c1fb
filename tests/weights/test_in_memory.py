"""Versions of the weights in the machine's memory: read as from the disk, on it once they are needed for longer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from lanes import open_lane
from tba.device_to_host import HostCopies
from tba.errors import UserError
from tba.protocols import Manifest, PublishedWeights
from tba.streaming import FileLayout, TensorStream
from tba.types import Version
from tba.weights import directory as directory_module
from tba.weights import in_memory, slots
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import PublishSettings, WeightDirectory

SETTINGS = PublishSettings(in_memory=True)

READER = """
import sys
from pathlib import Path
from tba.types import Version
from tba.weights.directory import WeightDirectory

reader, version, count = WeightDirectory(Path(sys.argv[1])), None, 0
while count < 300:
    published = reader.newer_than(version)
    if published is not None:
        tensors, version, count = published.read(), published.version, count + 1
        for _ in range(3):
            assert all((tensor == version.step).all() for tensor in tensors.values()), version
print("whole")
"""
HOLDER = """
import sys
from pathlib import Path
from tba.weights.directory import WeightDirectory

tensors = WeightDirectory(Path(sys.argv[1])).newer_than(None).read()
print("holds", flush=True)
sys.stdin.read()
"""
FORKER = """
import os
import sys
from pathlib import Path
from test_in_memory import SETTINGS, publish
from tba.types import Version
from tba.weights import in_memory
from tba.weights.directory import WeightDirectory

in_memory.MEMORY_ROOT = Path(sys.argv[2])
publisher = WeightDirectory(Path(sys.argv[1]), settings=SETTINGS)
publish(publisher, 0)
published = WeightDirectory(Path(sys.argv[1])).at(Version(0, 0))
child = os.fork()
if not child:
    del published
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
publish(publisher, 1, 2, 3, 4)
assert (published.read()["a"] == 0).all()
print("whole")
"""


def weights_of(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300,), float(step)), "b": torch.full((7, 5), step + 0.5)}


def publish(directory: WeightDirectory | BackgroundPublisher, *steps: int) -> None:
    for step in steps:
        directory.publish(weights_of(step), Version(0, step), Manifest())


def kill(directory: WeightDirectory) -> None:
    """Leaves what a killed publisher leaves: the system frees its locks on folders in memory."""
    while directory._memory._folder_locks:
        os.close(directory._memory._folder_locks.pop())


def publish_and_kill(path: Path, *steps: int) -> None:
    directory = WeightDirectory(path, settings=SETTINGS)
    publish(directory, *steps)
    kill(directory)


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
    return sorted(file.name for folder in place.iterdir() for file in folder.glob("*.safetensors"))


def slot_count(place: Path) -> int:
    """How many files there are in memory: a version is one more name of its slot."""
    files = [f.stat().st_ino for folder in place.iterdir() for f in folder.iterdir() if not f.is_symlink()]
    return len(set(files))


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


def test_memory_is_the_default_where_it_has_room_for_all_slots_and_else_the_disk_which_is_said_once(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tba.weights")
    size = FileLayout.of(weights_of(0)).size
    monkeypatch.setattr(in_memory, "_SPARE_BYTES", 0)
    for room, versions_in_memory in ((8 * size, ["0.0.safetensors", "0.1.safetensors"]), (8 * size - 1, [])):
        monkeypatch.setattr(in_memory, "free_host_bytes", lambda room=room: room)
        directory = WeightDirectory(path, settings=PublishSettings())
        publish(directory, 0, 1)
        assert held(place) == versions_in_memory
        assert read(path, 1)
        directory.close()
        shutil.rmtree(path)
    assert [r.getMessage().startswith("weights are written to the disk") for r in caplog.records] == [True]


def test_memory_that_is_asked_for_and_has_no_room_is_refused_in_a_sentence_and_off_is_the_disk(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(WeightDirectory(path, settings=PublishSettings(in_memory=False)), 0)
    assert list(place.iterdir()) == []
    monkeypatch.setattr(in_memory, "free_host_bytes", lambda: 0)
    with pytest.raises(
        UserError,
        match=r"--publish.in-memory: the machine's memory has 0.00 GB free, and .* need 0.27 GB; give a container more",
    ):
        publish(WeightDirectory(path, settings=SETTINGS), 1)


def test_versions_take_turns_in_the_same_files(path: Path, place: Path) -> None:
    reader, publisher = WeightDirectory(path), WeightDirectory(path, settings=SETTINGS)
    for step in range(12):
        publish(publisher, step)
        assert torch.equal(reader.newer_than(None).read()["a"], weights_of(step)["a"])
        assert slot_count(place) == min(step + 1, 3)
    assert len(reader._mappings._mappings) == 3  # of which each was mapped once


def test_a_file_that_somebody_reads_is_not_written_until_the_last_tensor_of_it_is_gone(path: Path, place: Path) -> None:
    publisher = WeightDirectory(path, settings=SETTINGS)
    publish(publisher, 0)
    opened = WeightDirectory(path).newer_than(None)
    publish(publisher, 1, 2, 3, 4)
    bias = opened.read()["b"]
    del opened
    publish(publisher, 5, 6, 7, 8)
    assert torch.equal(bias, weights_of(0)["b"])
    assert slot_count(place) == 4
    del bias
    publish(publisher, 9, 10, 11, 12)
    assert slot_count(place) == 4  # and the fourth is used again
    publisher.close()


def test_readers_in_other_processes_find_each_version_whole_while_files_are_written_again(path: Path) -> None:
    publisher = WeightDirectory(path, settings=SETTINGS)
    tensors = {"a": torch.empty(1 << 16), "b": torch.empty(1 << 16)}
    publisher.publish({name: t.fill_(0.0) for name, t in tensors.items()}, Version(0, 0), Manifest())
    with subprocess.Popen([sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        step = 0
        while process.poll() is None:
            step += 1
            publisher.publish({name: t.fill_(step) for name, t in tensors.items()}, Version(0, step), Manifest())
        assert process.stdout.read() == "whole\n"
    publisher.close()


def test_a_version_that_is_written_over_between_being_opened_and_being_locked_is_left_for_the_newest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, lock = WeightDirectory(path, settings=SETTINGS), slots.fcntl.flock
    publish(publisher, 0)

    def lock_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(slots.fcntl, "flock", lock)
        publish(publisher, 1, 2, 3, 4)
        lock(descriptor, operation)

    monkeypatch.setattr(slots.fcntl, "flock", lock_late)
    published = WeightDirectory(path).newer_than(None)
    assert published.version == Version(0, 4)
    assert torch.equal(published.read()["a"], weights_of(4)["a"])


def test_a_file_whose_reader_was_killed_is_used_again(path: Path, place: Path) -> None:
    publisher = WeightDirectory(path, settings=SETTINGS)
    publish(publisher, 0)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        publish(publisher, 1, 2, 3, 4)
        assert slot_count(place) == 4
        process.kill()
        process.wait(60)
        publish(publisher, 5, 6, 7, 8)
    assert slot_count(place) == 4


def test_what_opens_a_version_without_a_lock_gets_a_file_that_is_refused(tmp_path: Path, path: Path) -> None:
    publish(WeightDirectory(path, settings=SETTINGS), 1)
    copy = shutil.copytree(path, tmp_path / "copy")  # which follows the link
    with pytest.raises(UserError, match="damaged"):
        WeightDirectory(copy).newer_than(None)


def test_what_copies_from_a_gpu_copies_into_the_file_and_both_sides_register_its_memory_once(path: Path) -> None:
    registered: dict[str, list[tuple[int, int, bool]]] = {"publisher": [], "reader": []}
    undone: list[int] = []

    def register(side: str, address: int, size: int, is_read_only: bool) -> Callable[[], None]:
        registered[side].append((address, size, is_read_only))
        return lambda: undone.append(address)

    lane = open_lane()
    directory = WeightDirectory(path, settings=SETTINGS, register=partial(register, "publisher"))
    publisher = BackgroundPublisher(directory, 60.0, HostCopies(lane))
    reader = WeightDirectory(path, register=partial(register, "reader"))
    for step in range(8):
        publish(publisher, step)
        publisher.settle()
        there = reader.at(Version(0, step)).read()
        assert all(torch.equal(there[name], tensor) for name, tensor in weights_of(step).items())
        del there
    assert lane.rooms == []  # no memory but the files'
    assert {side: len(set(calls)) for side, calls in registered.items()} == {"publisher": 3, "reader": 3}
    assert [is_read_only for calls in registered.values() for *_, is_read_only in calls] == [False] * 3 + [True] * 3
    publisher.close()
    assert set(undone) == {address for address, *_ in registered["publisher"]}
    del reader
    assert set(undone) == {address for calls in registered.values() for address, *_ in calls}


def test_memory_that_is_emptied_while_a_version_is_written_costs_only_its_place(path: Path, place: Path) -> None:
    def emptying() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", weights_of(1)["a"]
        shutil.rmtree(place)
        place.mkdir()
        yield "b", weights_of(1)["b"]

    publisher = WeightDirectory(path, settings=SETTINGS)
    publisher.publish(TensorStream(weights_of(1), emptying), Version(0, 1), Manifest())
    assert read(path, 1)
    assert not (path / "0.1.safetensors").is_symlink()
    publish(publisher, 2)
    assert held(place) == ["0.2.safetensors"]


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
    reader = WeightDirectory(path)
    assert reader.newer_than(None) is None
    with pytest.raises(UserError, match=r"memory, and is gone from there \(.*\): a run in progress"):
        reader.at(Version(0, 1))
    again = WeightDirectory(path, settings=SETTINGS)
    again.clean()
    assert again.versions() == [Version(0, 0)]
    publish(again, 5)
    assert read(path, 0)
    assert read(path, 5)
    assert torch.equal(reader.newer_than(None).read()["a"], weights_of(5)["a"])


def test_memory_that_a_killed_publisher_left_is_freed_by_the_next_one_and_another_runs_is_not(
    tmp_path: Path, path: Path, place: Path
) -> None:
    other, gone = tmp_path / "other", tmp_path / "gone"
    for folder in (path, other, gone):
        publish_and_kill(folder, 1, 2)
    for file in gone.iterdir():
        file.unlink()
    gone.rmdir()
    publish_and_kill(path, 3)
    assert held(place) == ["0.1.safetensors", "0.2.safetensors", "0.2.safetensors", "0.3.safetensors"]
    publish_and_kill(path, 4, 5)
    publish_and_kill(path, 6)  # nothing links any longer to what the first one wrote
    assert sorted(held(place)) == sorted(["0.1.safetensors", "0.2.safetensors", "0.5.safetensors", "0.6.safetensors"])
    assert read(other, 2)


def test_a_live_run_keeps_its_memory_although_another_container_does_not_see_its_folder(
    tmp_path: Path, path: Path, place: Path
) -> None:
    unseen, same_path = (
        WeightDirectory(tmp_path / "unseen", settings=SETTINGS),
        WeightDirectory(path, settings=SETTINGS),
    )
    publish(unseen, 1, 2)
    publish(same_path, 3, 4)
    (tmp_path / "unseen").rename(tmp_path / "elsewhere")
    path.rename(tmp_path / "other_container")
    publish(WeightDirectory(path, settings=SETTINGS), 5)
    names = ["0.1.safetensors", "0.2.safetensors", "0.3.safetensors", "0.4.safetensors", "0.5.safetensors"]
    assert held(place) == names
    kill(unseen)
    kill(same_path)
    publish(WeightDirectory(tmp_path / "new", settings=SETTINGS), 6)  # which sees the path, and no links to 3 and 4
    assert held(place) == ["0.5.safetensors", "0.6.safetensors"]


def test_a_resumed_run_has_the_versions_of_the_killed_one_although_another_container_does_not_see_its_folder(
    tmp_path: Path, path: Path, place: Path
) -> None:
    publish_and_kill(path, 1, 2)
    resumed = WeightDirectory(path, settings=SETTINGS)
    resumed.clean()
    path.rename(tmp_path / "elsewhere")
    publish(WeightDirectory(tmp_path / "other", settings=SETTINGS), 3)
    assert held(place) == ["0.1.safetensors", "0.2.safetensors", "0.3.safetensors"]
    (tmp_path / "elsewhere").rename(path)
    publish(resumed, 4)
    assert read(path, 2)
    resumed.close()
    assert held(place) == ["0.3.safetensors"]


def test_of_what_a_killed_run_left_any_publisher_frees_all_but_its_versions(
    tmp_path: Path, path: Path, place: Path
) -> None:
    other = WeightDirectory(tmp_path / "other", settings=SETTINGS)
    publish(other, 0, 1, 2)  # in three slots
    memory_folder = other._memory._memory_folder
    (memory_folder / "0.3.safetensors").hardlink_to(memory_folder / "slot-1")  # killed before it made the link to it
    kill(other)
    publish_and_kill(path, 4)
    assert sorted(file.name for file in memory_folder.iterdir()) == ["0.1.safetensors", "0.2.safetensors", "of"]
    assert read(tmp_path / "other", 2)


@pytest.mark.parametrize("in_memory_setting", [True, None])
def test_a_restarted_publisher_waits_for_the_room_of_the_versions_before_it(
    in_memory_setting: bool | None, path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, size = PublishSettings(in_memory=in_memory_setting), FileLayout.of(weights_of(0)).size
    monkeypatch.setattr(in_memory, "_SPARE_BYTES", 0)
    publish_and_kill(path, 0, 1)
    monkeypatch.setattr(in_memory, "free_host_bytes", lambda: 0)
    restarted = WeightDirectory(path, settings=settings)
    publish(restarted, 2, 3, 4)  # nothing is free: to the disk, and no error
    assert held(place) == []
    monkeypatch.setattr(in_memory, "free_host_bytes", lambda: 4 * size)
    publish(restarted, 5)
    assert held(place) == ["0.5.safetensors"]


def test_a_restarted_publisher_needs_room_only_beside_the_versions_before_it(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = FileLayout.of(weights_of(0)).size
    monkeypatch.setattr(in_memory, "_SPARE_BYTES", 0)
    publish_and_kill(path, 0, 1)
    monkeypatch.setattr(in_memory, "free_host_bytes", lambda: 2 * size)
    publish(WeightDirectory(path, settings=PublishSettings()), 2)
    assert held(place) == ["0.1.safetensors", "0.2.safetensors"]


def test_a_reader_lets_go_of_deleted_files_once_versions_come_by_the_disk(path: Path) -> None:
    reader, publisher = WeightDirectory(path), WeightDirectory(path, settings=SETTINGS)
    publish(publisher, 0, 1)
    for step in (0, 1):
        reader.at(Version(0, step)).read()
    assert len(reader._mappings._mappings) == 2
    publisher.close()
    assert reader.newer_than(Version(0, 1)) is None
    assert not reader._mappings._mappings


def test_a_process_that_was_forked_from_a_reader_does_not_take_its_lock(path: Path, place: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    words = [sys.executable, "-W", "ignore", "-c", FORKER, str(path), str(place)]
    forker = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert (forker.stdout, forker.returncode) == ("whole\n", 0), forker.stderr


@pytest.mark.parametrize("change", ["pin", "prune"])
def test_a_version_that_moves_or_goes_while_its_link_is_read_is_no_error(
    change: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, is_symlink, readlink = WeightDirectory(path, settings=SETTINGS), Path.is_symlink, Path.readlink
    publish(publisher, 0)

    def act() -> None:
        monkeypatch.setattr(Path, "is_symlink", is_symlink)
        monkeypatch.setattr(Path, "readlink", readlink)
        publisher.pin(Version(0, 0), "reference") if change == "pin" else publish(publisher, 1, 2)

    def look_then_act(file: Path) -> bool:
        result = is_symlink(file)
        act()
        return result

    def act_then_read(file: Path) -> Path:
        act()
        return readlink(file)

    monkeypatch.setattr(Path, "is_symlink", look_then_act)
    monkeypatch.setattr(Path, "readlink", act_then_read)
    published = WeightDirectory(path).find(Version(0, 0))
    assert (published is None) == (change == "prune")
    assert published is None or torch.equal(published.read()["a"], weights_of(0)["a"])


def test_a_version_in_the_memory_of_another_user_is_refused_in_a_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(WeightDirectory(path, settings=SETTINGS), 0)

    def refuse(target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(target))

    monkeypatch.setattr(directory_module, "ReadLock", refuse)
    with pytest.raises(UserError, match=r"only the user of the trainer can read: .* --publish.no-in-memory"):
        WeightDirectory(path).newer_than(None)


def test_each_reason_for_the_disk_is_said_once(
    path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tba.weights")
    publisher, reader = WeightDirectory(path, settings=SETTINGS), WeightDirectory(path)
    opened: list[PublishedWeights] = []
    for step in range(8):
        publish(publisher, step)
        opened.append(reader.at(Version(0, step)))
    publish(publisher, 8, 9)
    assert [record.getMessage() for record in caplog.records] == [
        "weights are written to the disk: 8 versions in memory are all published or still being read"
    ]
    for file in place.glob("*/slot-*"):
        file.unlink()
    monkeypatch.setattr(in_memory, "free_host_bytes", lambda: 0)
    publish(publisher, 10, 11)
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "weights are written to the disk: the machine's memory has 0.00 GB free, and weights in memory need 0.27 GB"
    ]


@pytest.mark.parametrize("is_wanted", [True, None])
def test_memory_that_takes_no_file_at_the_start_is_refused_or_not_tried_again(
    is_wanted: bool | None, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tba.weights")

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slots.os, "posix_fallocate", refuse)
    directory = WeightDirectory(path, settings=PublishSettings(in_memory=is_wanted))
    if is_wanted:
        with pytest.raises(UserError, match=r"--publish.in-memory: .* takes no file \(.*No space left"):
            publish(directory, 0)
    else:
        publish(directory, 0, 1)
        assert [r.getMessage().startswith("weights are written to the disk") for r in caplog.records] == [True]
        assert read(path, 1)


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
    publish_and_kill(path, 1, 2)
    moved = path.rename(tmp_path / "moved")
    directory = WeightDirectory(moved, settings=SETTINGS)
    publish(directory, 3)
    assert read(moved, 2)
    directory.close()
    assert list(place.iterdir()) == []


def test_nothing_stays_in_memory_of_a_killed_run_that_was_resumed_and_has_ended(path: Path, place: Path) -> None:
    publish_and_kill(path, 1, 2)
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
    with pytest.raises(UserError, match=r"memory, and is gone from there \(.*\): a run in progress"):
        directory.pin(Version(0, 1), "evaluation")
    publish(directory, 2)
    assert read(path, 2)


def test_a_version_is_on_the_disk_before_it_says_that_it_is_pinned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, is_link_when_pinned = WeightDirectory(path, settings=SETTINGS), []
    publish(directory, 1)
    write = directory._write_file

    def note(version: Version, suffix: str, value: object) -> None:
        is_link_when_pinned.append((path / "0.1.safetensors").is_symlink())
        write(version, suffix, value)

    monkeypatch.setattr(directory, "_write_file", note)
    directory.pin(Version(0, 1), "reference")
    assert is_link_when_pinned == [False]
    assert read(path, 1)


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
