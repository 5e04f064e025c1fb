"""One precision for trainer, reference and engine: a table of what is chosen, and runs in which every log-ratio
begins at 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tba.recipes
from tba.batch import collate
from tba.engines.transformers import EngineSettings
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.models.precision import Precision, PrecisionName, choose_precision
from tba.policy.lora import LoraSettings, read_adapters
from tba.record.metrics import read_metrics
from tba.runs.recipe_resolution import with_weights
from tba.runtime.inline import Inline
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.runtime.run_directory import RunDirectory
from tba.settings import find, override
from tba.training.checkpoint import newest_checkpoint
from tba.types import Group, Prompt, Sampling, Trajectory, Version

HALF, FULL = torch.bfloat16, torch.float32
BASE = Path(tba.recipes.__path__[0]) / "quickstart_base"
SUMS = Path(__file__).parents[1] / "tiny_sums.py"
TEXTS = ("123+456=", "99+1=", "700+250=")


@pytest.mark.parametrize("name", ["auto", "4-bit"])
def test_on_a_card_without_bfloat16_products_are_of_float32_unless_it_is_asked_for(name: PrecisionName) -> None:
    for adapters in (False, True):
        assert choose_precision(name, "cuda", adapters, has_bfloat16=False).compute == FULL
        assert choose_precision("bfloat16", "cuda", adapters, has_bfloat16=False).compute == HALF


@pytest.mark.parametrize(
    ("wanted", "device", "adapters", "expected"),
    [
        ("auto", "cpu", False, Precision(FULL, FULL, tf32=False)),
        ("auto", "cpu", True, Precision(FULL, FULL, tf32=False)),
        ("auto", "mps", False, Precision(FULL, FULL, tf32=False)),
        ("auto", "cuda", False, Precision(HALF, FULL, tf32=True)),  # float32 masters
        ("auto", "cuda", True, Precision(HALF, HALF, tf32=True)),  # a frozen base, held once, in half
        ("float32", "cuda", False, Precision(FULL, FULL, tf32=True)),
        ("float32", "cuda", True, Precision(FULL, FULL, tf32=True)),
        ("bfloat16", "cpu", False, Precision(HALF, FULL, tf32=False)),
        ("bfloat16", "cpu", True, Precision(HALF, HALF, tf32=False)),
        ("bfloat16", "mps", True, Precision(HALF, HALF, tf32=False)),
    ],
)
def test_precision_follows_from_device_setting_and_adapters(
    wanted: PrecisionName, device: str, adapters: bool, expected: Precision
) -> None:
    assert choose_precision(wanted, device, adapters) == expected


@pytest.mark.parametrize("name", ["gsm8k", "math", "tldr", "quickstart", "red_team_gpt2"])
def test_every_recipe_computes_in_bfloat16_on_cuda_and_in_float32_without(name: str) -> None:
    model = find(name).model
    assert isinstance(model, HuggingFace)
    for device, expected in (("cuda", HALF), ("cpu", FULL)):
        assert replace(model, device=device).compute == expected


@pytest.mark.parametrize("rank", [0, 4])
def test_reference_and_trainer_agree_to_the_bit_in_bfloat16_on_the_same_rows(rank: int) -> None:
    model = HuggingFace(
        path=str(BASE),
        device="cpu",
        dtype="bfloat16",
        generation=EngineSettings(max_completion_tokens=6),
        lora=LoraSettings(rank=rank),
    )
    tokenizer = model.tokenizer()
    prompts = [Prompt("sums", np.array(tokenizer.encode(text), np.int32), text) for text in TEXTS]
    engine, reference = model.engine(Version()), model.reference(1.0, Version())
    answered = generate(engine, prompts, 5, Sampling(), np.random.default_rng(5))
    scored = reference.log_probabilities_of(list(zip(prompts, answered, strict=True)))
    batch = collate(
        [
            Group.of(
                [Trajectory(f"{p.text}{i}", p, c, 0.0, s, Version()) for i, (c, s) in enumerate(zip(*row, strict=True))]
            )
            for p, row in zip(prompts, zip(answered, scored, strict=True), strict=True)
        ]
    )
    recipe = replace(find("quickstart"), model=model)
    ranks = start_ranks(recipe, 0)
    assert ranks is None
    policy, _ = start_policy(recipe, ranks, None)
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {FULL}  # masters
    with torch.no_grad():
        log_policy_BT = policy.evaluate(batch).log_policy_BT
    assert torch.equal(log_policy_BT, batch.log_reference_BT)
    engine.load(policy.weights(), Version(0, 1))
    again = generate(engine, prompts, 5, Sampling(), np.random.default_rng(5))
    assert [[c.tokens.tolist() for c in row] for row in again] == [[c.tokens.tolist() for c in row] for row in answered]


def test_at_another_precision_the_same_rows_would_begin_with_noise() -> None:
    """What one setting for both makes impossible: a float32 reference of a trainer that computes in bfloat16."""
    half = HuggingFace(
        path=str(BASE), device="cpu", dtype="bfloat16", generation=EngineSettings(max_completion_tokens=6)
    )
    prompt = Prompt("sums", np.array(half.tokenizer().encode(TEXTS[0]), np.int32), TEXTS[0])
    answers = generate(half.engine(Version()), [prompt], 20, Sampling(), np.random.default_rng(5))[0]
    low, high = (
        m.reference(1.0, Version()).log_probabilities_of([(prompt, answers)])[0]
        for m in (half, replace(half, dtype="float32"))
    )
    assert max(float(np.abs(a - b).max()) for a, b in zip(low, high, strict=True)) > 1e-3


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_in_bfloat16_begins_with_log_ratios_of_zero_and_again_after_a_reset(tmp_path: Path, rank: int) -> None:
    path, asked = tmp_path / "run", ["--model.dtype", "bfloat16", "--reference-reset", "2"]
    asked += ["--model.lora.rank", "2"] if rank else []
    recipe = override(find(str(SUMS)), asked, "tba train")
    run = RunDirectory.create(path, str(SUMS), asked, recipe)
    Inline(recipe, run, lambda phase, note: None).go()
    rows = {row["step"]: row for row in read_metrics(path)}
    assert rows[1]["log_ratio"] == 0.0
    assert rows[3]["log_ratio"] == 0.0  # the first step under the new reference, which is what was published
    assert rows[2]["log_ratio"] != 0.0
    newest = load_file(path / "weights" / "0.4.safetensors")
    assert {t.dtype for t in newest.values()} == {HALF}
    checkpoint = newest_checkpoint(path / "checkpoints")
    assert checkpoint is not None
    kept = read_adapters(checkpoint.path) if rank else load_file(checkpoint.path / "model.safetensors")
    assert {t.dtype for t in kept.values()} == {FULL}
    assert all(torch.equal(newest[name], tensor.to(HALF)) for name, tensor in kept.items())


def test_what_auto_means_is_recorded_with_the_run_for_parts_on_other_devices() -> None:
    recipe, overrides = with_weights(find("quickstart"), ["--model.device", "cpu"], lambda line: None)
    assert overrides[-2:] == ["--model.dtype", "float32"]
    assert isinstance(recipe.model, HuggingFace)
    assert replace(recipe.model, device="cuda").compute == FULL  # a searcher that joins from a machine with a GPU
    asked = ["--model.device", "cpu", "--model.dtype", "bfloat16"]
    assert with_weights(override(find("quickstart"), asked, ""), asked, lambda line: None)[1] == asked
