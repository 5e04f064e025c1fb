"""What vLLM cannot do is said with what helps against it. Without vLLM."""

from __future__ import annotations

import errno

import pytest
import torch

from tba.engines.vllm import refusal


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            torch.OutOfMemoryError("tried to allocate"),
            "with a cache of 2 GB (tried to allocate): set --model.vllm.cache-gb",
        ),
        (ValueError("To serve at least one request, 3 GiB KV cache is needed"), "set --model.vllm.cache-gb"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/tmp/x"),
            "see that the file can be used, and TMPDIR",
        ),
        (ImportError("no module named quark"), "install what is missing beside vllm"),
        (ValueError("Model architectures ['X'] are not supported"), "give a model that it serves"),
    ],
)
def test_each_cause_has_its_own_remedy(error: Exception, remedy: str) -> None:
    sentence = str(refusal("m", 2_000_000_000, error))
    assert remedy in sentence
    assert ("cache-gb" in sentence) == ("cache-gb" in remedy)
    assert sentence.endswith("or --model.generation.engine transformers")
