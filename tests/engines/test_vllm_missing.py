"""What an environment without vLLM says of it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tba.engines.transformers import EngineSettings
from tba.engines.vllm import VllmSettings, folder_with_room
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.types import Version

VLLM = HuggingFace(path="nowhere", device="cpu", generation=EngineSettings(engine="vllm"))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="says what there is where vLLM is missing")
def test_a_missing_vllm_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HuggingFace, "tokenizer", lambda self: None)
    with pytest.raises(UserError, match=r"not installed: pip install -e '\.\[vllm\]' -c constraints-vllm.txt"):
        VLLM.engine(Version())


def test_what_the_engine_cannot_do_is_said_when_the_recipe_is_made() -> None:
    with pytest.raises(UserError, match="first token"):
        EngineSettings(engine="vllm", forbidden_first_tokens=("\n",))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"cache_gb": 0.0}, "cache_gb"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], what: str) -> None:
    with pytest.raises(UserError, match=what):
        VllmSettings(**settings)


def test_weights_that_go_through_a_file_take_the_first_folder_that_has_room(tmp_path: Path) -> None:
    """As in a container, whose /dev/shm has 64 MB unless it is asked for more."""
    small, large, missing = "/dev/shm", str(tmp_path), str(tmp_path / "nothing")
    there = {place: shutil.disk_usage(place).free for place in (small, large)}
    few, many = sorted(there, key=lambda place: there[place])
    assert folder_with_room(1000, (missing, few, many)) == few
    if there[few] < there[many] - 2**28:  # files that others write meanwhile
        assert folder_with_room(there[few], (few, many)) == many
    with pytest.raises(UserError, match=r"start the container with a larger --shm-size, or set TMPDIR") as told:
        folder_with_room(10**18, (missing, few, many))
    assert f"GB in {few} and" in str(told.value)
