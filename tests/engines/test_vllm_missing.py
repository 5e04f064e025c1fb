"""What an environment without vLLM says of it."""

from __future__ import annotations

import importlib.util

import pytest

from tba.engines.transformers import EngineSettings
from tba.engines.vllm import VllmSettings
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
        EngineSettings(engine="vllm", never_first=("\n",))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"memory_share": 1.2}, "memory_share"),
        ({"cache_gb": 0.0}, "cache_gb"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], what: str) -> None:
    with pytest.raises(UserError, match=what):
        VllmSettings(**settings)  # type: ignore[arg-type]
