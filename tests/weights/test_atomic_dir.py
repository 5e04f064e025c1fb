"""Folders that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tba.weights.atomic_dir import atomic_folder


def test_what_is_filled_while_a_folder_above_it_is_moved_takes_no_place(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    (run / "checkpoints").mkdir(parents=True)

    def fill(folder: Path) -> None:
        (folder / "before").touch()
        run.rename(away)
        folder.mkdir(parents=True)  # as save_pretrained does
        (folder / "after").touch()

    with pytest.raises(FileNotFoundError), atomic_folder(run / "checkpoints" / "step-1") as folder:
        fill(folder)
    assert not run.exists()
    assert [path.name for path in away.rglob("before")] == ["before"]


def test_a_failure_leaves_an_empty_folder_of_others_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it fails"), atomic_folder(tmp_path / "new" / "model"):
        raise ValueError("it fails")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert not list((tmp_path / "new").iterdir())
