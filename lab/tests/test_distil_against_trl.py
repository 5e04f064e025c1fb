"""The measurement beside TRL's distillation: divergences of real models, and what a run has cost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.scripts import script
from transformers import LlamaConfig, LlamaForCausalLM

from tba.types import Prompt

benchmark = script("lab/benchmarks/distil_against_trl.py")
ROW = benchmark.Row(
    "trl", 1e-3, 0, 0, wall=0.0, cpu=0.0, answers=0, tokens=0, kl=8.0, kl_error=0.1, kl_back=9.0, length=50.0
)


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, initializer_range=1.0)).eval()


def test_divergence_of_an_answer_is_the_sum_over_its_tokens_whatever_it_is_padded_to() -> None:
    student, teacher = tiny(0), tiny(1)
    judge, answers = benchmark.Judge("", "", 2), [[3, 4, 5, 6], [7]]
    prompts = [[1, 2], [1, 2, 3, 9, 10]]
    judge.__dict__["prompts"] = [Prompt("toy", np.array(tokens, np.int32), "") for tokens in prompts]

    def side(model: LlamaForCausalLM) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        return model.get_output_embeddings(), judge.states(model, answers)

    divergences = benchmark.divergences_of(side(student), side(teacher))
    for prompt, answer, kl in zip(prompts, answers, divergences, strict=True):
        with torch.inference_mode():
            logs = [m(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1) for m in (student, teacher)]
        p, q = (log[len(prompt) - 1 : -1] for log in logs)
        assert kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)
    assert benchmark.divergences_of(side(student), side(student)) == pytest.approx([0.0, 0.0])


def test_cost_of_a_divergence_is_linear_between_two_measurements() -> None:
    rows = [ROW, replace(ROW, update=8, wall=10.0, kl=6.0), replace(ROW, update=16, wall=30.0, kl=2.0)]
    assert benchmark.cost_to_reach(rows, 4.0, "wall") == 20.0
    assert benchmark.cost_to_reach(rows, 1.0, "wall") is None
    lines = benchmark.table([replace(ROW, way="start"), *rows[1:]], [0.5, 0.1]).splitlines()
    assert lines[-2].startswith("| trl | 0.001 | 0 | 0.5 | 20 |")
    assert lines[-1].startswith("| trl | 0.001 | 0 | 0.1 | never |")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc is of Linux")
def test_cpu_seconds_of_a_process_are_also_those_of_its_children() -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass"
    before = benchmark.cpu_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"])
    assert benchmark.cpu_seconds(os.getpid()) - before >= 0.3
