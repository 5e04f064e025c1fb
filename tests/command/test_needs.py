"""What a recipe needs is told before anything runs, and what cannot fit is refused with a field that helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from tba.command.needs import Need, Room, needs, refuse_what_cannot_fit
from tba.errors import UserError
from tba.models.arithmetic import shape_of
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape, total
from tba.recipe import Recipe
from tba.replay.buffer import BufferSettings
from tba.settings import find

GB = 10**9
RHO = Shape.of(  # realtreetune/rho-1b-sft-GSM8K
    LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        max_position_embeddings=2048,
    )
)
SEVEN = Shape.of(  # Qwen2.5-7B
    Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18_944,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    )
)


def gsm8k(device: str = "cuda", **changes: Any) -> Recipe:
    recipe = find("gsm8k")
    assert isinstance(recipe.model, HuggingFace)
    return replace(recipe, model=replace(recipe.model, device=device, **changes))


def by_part(recipe: Recipe, shape: Shape = RHO) -> dict[str, Need]:
    return {need.part: need for need in needs(recipe, shape)}


def refusal(recipe: Recipe, shape: Shape, room: Room) -> str:
    with pytest.raises(UserError) as refused:
        refuse_what_cannot_fit(recipe, shape, room)
    return str(refused.value)


def test_each_part_is_on_its_device_and_the_rule_of_thumb_is_in_it() -> None:
    on_gpu, on_cpu = by_part(gsm8k()), by_part(gsm8k("cpu"))
    assert [need.device for need in on_gpu.values()] == ["cuda", "cuda", "cuda", "cpu"]
    assert {need.device for need in on_cpu.values()} == {"cpu"}
    state = sum(on_gpu["trainer"].parts[name] for name in ("weights", "gradients", "moments"))
    assert state == 16 * RHO.parameters
    assert on_gpu["searcher"].parts["weights"] == 2 * RHO.parameters  # bfloat16 on CUDA
    assert on_cpu["reference"].parts["weights"] == 4 * RHO.parameters
    assert "moments 8.2 GiB" in str(on_gpu["trainer"])


def test_a_vllm_searcher_is_refused_where_it_has_no_room_for_weights_reference_and_one_answer() -> None:
    served = gsm8k(generation=replace(gsm8k().model.generation, engine="vllm"))
    need = by_part(served)["searcher"]
    of_position = 22 * 2 * 4 * 64 * 2  # layers, keys and values, heads, their width, bytes of a number
    assert need.parts["weights"] == 2 * RHO.parameters
    assert need.parts["keys and values"] == (8 + 2) * 128 * of_position  # 512 tokens of a prompt, as many of an answer
    wanted = total(need.parts) + total(by_part(served)["reference"].parts)
    refuse_what_cannot_fit(served, RHO, Room(searcher_gpu=wanted))
    assert "the searcher needs" in refusal(served, RHO, Room(searcher_gpu=wanted - 2**27))
    auto = gsm8k(generation=replace(gsm8k().model.generation, engine="auto"))  # it may come to be transformers
    assert by_part(auto)["searcher"].parts == by_part(gsm8k())["searcher"].parts


def test_a_full_buffer_takes_no_more_than_its_budget_for_tokens() -> None:
    long, short = BufferSettings().memory(8000), BufferSettings().memory(100)
    assert long["tokens"] == 4 * GB
    assert short["tokens"] < 0.3 * GB
    assert sum(BufferSettings(memory_gb=20.0).memory(8000).values()) == pytest.approx(13.6 * GB, rel=0.01)


def test_what_fits_is_not_refused() -> None:
    small = gsm8k(gradient_checkpointing=True)
    refuse_what_cannot_fit(small, RHO, Room(64 * GB, 80 * GB, 80 * GB))
    refuse_what_cannot_fit(small, RHO, Room())  # nothing is known of this machine


def test_a_refusal_names_a_field_with_which_the_recipe_fits() -> None:
    said = refusal(gsm8k(), RHO, Room(64 * GB, 40 * GB, 40 * GB))
    assert said.startswith("the trainer needs")
    assert said.endswith("set --max-tokens-per-pass 8192, with which it fits")
    trainer = Room(64 * GB, 27 * GB, 40 * GB)
    assert refusal(gsm8k(), RHO, trainer).endswith("set --model.gradient-checkpointing, with which it fits")
    refuse_what_cannot_fit(gsm8k(gradient_checkpointing=True), RHO, trainer)

    said = refusal(gsm8k(gradient_checkpointing=True), SEVEN, Room(64 * GB, 48 * GB, 48 * GB))
    assert "--model.lora.rank 16" in said
    assert "--model.lora.rank" not in refusal(gsm8k(gradient_checkpointing=True), RHO, Room(64 * GB, 21 * GB, 40 * GB))

    said = refusal(gsm8k(gradient_checkpointing=True), RHO, Room(64 * GB, 40 * GB, 7_500_000_000))
    assert "the searcher needs" in said
    assert "set --model.generation.slots" in said
    assert refusal(gsm8k(), SEVEN, Room(64 * GB, 4 * GB, 4 * GB)).endswith("or a machine with more memory")


def test_on_a_cpu_all_parts_share_the_machines_memory() -> None:
    recipe = gsm8k("cpu", gradient_checkpointing=True)
    whole = sum(
        total(n.parts) * (recipe.searchers if n.part in ("searcher", "reference") else 1) for n in needs(recipe, RHO)
    )
    refuse_what_cannot_fit(recipe, RHO, Room(whole))
    said = refusal(recipe, RHO, Room(whole - 1))
    assert "the run needs" in said
    assert "and this machine has" in said


def test_a_model_without_a_configuration_has_no_shape() -> None:
    assert shape_of(find("quickstart").model) is None  # not prepared: it has no path yet
    assert shape_of(object()) is None
