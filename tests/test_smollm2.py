"""What needs a real instruction-tuned model, SmolLM2-135M-Instruct (`make test-real`); without it, it is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tba.__main__ import main
from tba.chat_prompts import chat_markup
from tba.engines.transformers import EngineSettings
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.record.summary import Summary
from tba.types import Prompt, Sampling, Version

FOLDER = os.environ.get("TBA_TEST_SMOLLM2", "")
pytestmark = [pytest.mark.real, pytest.mark.skipif(not FOLDER, reason="needs SmolLM2: make test-real")]
MODEL = HuggingFace(path=FOLDER, device="cpu", generation=EngineSettings(max_completion_tokens=16))


def asked(question: str) -> Prompt:
    tokenizer = MODEL.tokenizer()
    text = chat_markup(tokenizer, [{"role": "user", "content": question}])
    return Prompt("real", np.array(tokenizer.encode(text, add_special_tokens=False), np.int32), text)


def test_it_answers_a_question_and_scores_its_answer_as_it_sampled_it() -> None:
    """Engine and reference compute the same sum of 16 log-probabilities of some 5 nats each, in another order."""
    prompt = asked("What is the capital of France?")
    (greedy,) = generate(MODEL.engine(Version()), [prompt], 1, Sampling(0.0), np.random.default_rng(0))
    assert "Paris" in greedy[0].text
    (row,) = generate(MODEL.engine(Version()), [prompt], 4, Sampling(1.0), np.random.default_rng(0))
    (scored,) = MODEL.reference(1.0, Version()).log_probabilities_of([(prompt, row)])
    for completion, log_reference in zip(row, scored, strict=True):
        assert completion.log_behavior is not None
        assert np.abs(completion.log_behavior - log_reference).max() < 1e-3


def test_two_updates_of_the_recipe_close_their_account_and_leave_a_plain_folder(tmp_path: Path) -> None:
    small = ["--runtime", "inline", "--steps", "2", "--replay.pacing.warm-up", "32", "--evaluation.problems", "8"]
    where = ["--model.path", FOLDER, "--runs", str(tmp_path), "--run-name", "run"]
    assert main(["train", "instruct", *where, *small]) == 0
    summary = Summary.read(tmp_path / "run")
    assert summary is not None
    assert summary.steps == 2
    assert summary.trajectories.closes()
    assert (next((tmp_path / "run" / "checkpoints").glob("*/model.safetensors"))).stat().st_size > 500_000_000
