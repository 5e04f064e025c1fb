"""A version's file in pieces: what travels is what was published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tba.weights.chunks import cut_pieces, map_tensors_file, tensors

WEIGHTS = {
    "a": torch.randn(33, 7),
    "b": torch.randn(5).to(torch.bfloat16),
    "c": torch.arange(6).reshape(2, 3),
    "d": torch.zeros(0, 4),
    "e": torch.tensor(2.5),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "0.1.safetensors"
    save_file(WEIGHTS, path, metadata={"format": "pt"})
    return path


@given(most=st.integers(8, 1200).map(lambda n: n // 8 * 8))
def test_however_it_is_cut_the_tensors_are_those_that_were_published_bit_for_bit(file: Path, most: int) -> None:
    header, whole = map_tensors_file(file)
    parts = [np.array(piece) for piece in cut_pieces(whole, most)]
    assert all(len(part) == most for part in parts[:-1])
    assert sum(len(part) for part in parts) == len(whole)
    read = tensors(header, parts)
    assert read.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


def test_a_tensor_that_lies_in_one_piece_is_not_copied(file: Path) -> None:
    header, whole = map_tensors_file(file)
    (part,) = cut_pieces(whole)
    assert tensors(header, [part])["a"].data_ptr() in range(part.ctypes.data, part.ctypes.data + len(part))


def test_what_was_opened_can_be_read_after_its_file_is_gone(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "gone.safetensors")
    header, whole = map_tensors_file(tmp_path / "gone.safetensors")
    (tmp_path / "gone.safetensors").unlink()
    assert torch.equal(tensors(header, list(cut_pieces(whole)))["a"], WEIGHTS["a"])
    with pytest.raises(FileNotFoundError):
        map_tensors_file(tmp_path / "gone.safetensors")
