"""Computed memory equals what is counted, operation by operation, on torch's meta device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.scripts import script
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from tba.models import memory
from tba.models.huggingface import HuggingFace
from tba.models.memory import SearcherWorkload, Shape, TrainerWorkload
from tba.models.precision import choose_precision
from tba.policy.causal import KEPT_BYTES
from tba.policy.lora import LoraSettings, add_adapters
from tba.sharding import Sharding

counts = script("lab/benchmarks/kernel_counts.py")

QWEN = Qwen2Config(
    vocab_size=2000,
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=200,
    tie_word_embeddings=False,
)
BF16 = choose_precision("bfloat16", "cuda", adapters=False)


@pytest.mark.parametrize("config", [QWEN, LlamaConfig(**QWEN.to_diff_dict() | {"head_dim": 32}), GPT2Config(n_layer=2)])
def test_a_shape_counts_the_parameters_of_the_model_and_of_its_adapters(config: object) -> None:
    shape, model = Shape.of(config), AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.has_gate == (not isinstance(config, GPT2Config))
    if shape.has_gate:
        pytest.importorskip("peft")
        for targets in ((), ("q_proj", "down_proj")):
            adapted = add_adapters(AutoModelForCausalLM.from_config(config), LoraSettings(rank=4, targets=targets))
            trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
            assert shape.adapters(4, targets) == trained


@pytest.mark.parametrize("checkpointed", [True, False])
def test_what_a_pass_keeps_on_an_accelerator_is_within_5_percent_of_what_is_counted(
    checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model like Qwen2.5-0.5B, in which activations, the head and its logits all weigh, where the head keeps the
    least that it may.
    """
    monkeypatch.setattr(counts, "KEPT_BYTES", KEPT_BYTES)
    model, pack = counts.qwen(), counts.pack_of(*counts.gsm8k_like())
    if not checkpointed:
        model.gradient_checkpointing_disable()
    counted = counts.counted(lambda: counts.checkpointed_pass(model, pack)).peak
    of = TrainerWorkload(len(pack.token_N), BF16, "cuda", checkpointed=checkpointed)
    computed = memory.trainer_bytes(Shape.of(model.config), of)
    of_pass = computed["probabilities kept"] + computed["activations and temporaries"]
    assert of_pass == pytest.approx(counted, rel=0.05)


def test_the_rule_of_thumb_is_16_bytes_a_parameter_and_ranks_share_them() -> None:
    shape = Shape.of(QWEN)
    parts = memory.trainer_bytes(shape, TrainerWorkload(100, BF16))
    assert sum(parts[name] for name in ("weights", "gradients", "moments")) == 16 * shape.parameters
    shared = memory.trainer_bytes(shape, TrainerWorkload(100, BF16, ranks=4))
    assert shared["moments"] * 4 == parts["moments"]


def test_adapters_have_a_base_in_the_compute_type_and_its_reference_shares_the_engines() -> None:
    shape, low = Shape.of(QWEN), choose_precision("bfloat16", "cuda", adapters=True)
    own = shape.adapters(8)
    assert own == 3 * 8 * (2 * (96 + 96) + 2 * (96 + 32) + 3 * (96 + 200))
    parts = memory.trainer_bytes(shape, TrainerWorkload(100, low, "cuda", rank=8))
    assert (parts["weights"], parts["gradients"]) == (2 * shape.parameters + 4 * own, 4 * own)
    searcher = SearcherWorkload(low, slots=10, positions=50, device="cuda", rank=8)
    assert memory.engine_bytes(shape, searcher)["weights"] == 2 * (shape.parameters + own)
    assert memory.engine_bytes(shape, searcher)["keys and values"] == 10 * 64 * 3 * 2 * 32 * 2
    assert memory.reference_bytes(shape, searcher)["weights"] == 2 * own


def test_parked_keys_and_values_are_counted_beside_those_of_the_slots_and_what_reads_them_again() -> None:
    shape = Shape.of(QWEN)
    searcher = SearcherWorkload(BF16, slots=10, positions=5000, prompt=100)
    plain, parking, limited, empty = (
        memory.engine_bytes(shape, replace(searcher, parks=parks, parked_bytes=parked_bytes))
        for parks, parked_bytes in ((False, None), (True, None), (True, 7), (True, 0))
    )
    name = "parked keys and values"
    assert [parts[name] for parts in (plain, parking, limited, empty)] == [0, plain["keys and values"], 7, 0]
    assert plain["a step"] < parking["a step"] == limited["a step"] == empty["a step"]  # of 2,048 tokens, and of 5,000


def test_vllms_cache_is_what_the_slots_need_or_what_is_left_of_the_searchers_part() -> None:
    shape, low = Shape.of(QWEN), choose_precision("bfloat16", "cuda", adapters=False)
    searcher = SearcherWorkload(low, slots=10, positions=300, prompt=100, device="cuda")  # three blocks of 128
    of_block = 128 * 3 * 2 * 32 * 2  # layers, keys and values, their width, bytes of a number

    def cache(of: SearcherWorkload, **given: int) -> int:
        return memory.vllm_bytes(shape, of, **given)["keys and values"]

    assert cache(searcher) == cache(searcher, room=100 * 10**9) == (10 * 3 + 2) * of_block
    assert cache(searcher, gpus=2) == (10 * 3 + 2) * of_block // 2  # of each, half of the heads
    beside = 2 * shape.parameters + memory.engine_bytes(shape, searcher)["a step"] + 2**30
    scoring = memory.total(memory.reference_bytes(shape, searcher))
    assert cache(searcher, room=beside + scoring + 20 * of_block) == 20 * of_block
    assert cache(searcher, room=beside) == (3 + 2) * of_block  # the longest answer alone
    adapted = replace(searcher, rank=8)  # with a base in this process, which its reference shares
    kept = memory.engine_bytes(shape, adapted)["weights"] + memory.total(memory.reference_bytes(shape, adapted))
    assert cache(adapted, room=beside + kept + 9 * of_block) == 9 * of_block


def test_memory_grows_with_tokens_and_checkpointing_keeps_one_hidden_state_of_each_layer() -> None:
    shape = Shape.of(QWEN)

    def activations(tokens: int, checkpointed: bool) -> int:
        return memory.trainer_bytes(shape, TrainerWorkload(tokens, BF16, "cuda", checkpointed=checkpointed))[
            "activations and temporaries"
        ]

    for checkpointed in (False, True):
        assert activations(200_000, checkpointed) < 2 * activations(100_000, checkpointed)
    assert activations(100_000, True) < activations(100_000, False)


def test_a_pass_recomputes_its_activations_only_if_it_would_not_fit_with_them(caplog: pytest.LogCaptureFixture) -> None:
    shape, model = Shape.of(QWEN), HuggingFace(device="cuda", dtype="bfloat16")

    def needed(tokens: int, checkpointed: bool) -> int:
        return memory.total(
            memory.trainer_bytes(shape, TrainerWorkload(tokens, BF16, "cuda", checkpointed=checkpointed))
        )

    room = needed(100_000, checkpointed=False)
    assert needed(120_000, checkpointed=True) < room < needed(120_000, checkpointed=False)
    recomputes = model.recomputation_rule(shape, room)
    with caplog.at_level("INFO", "tba.trainer"):
        assert [recomputes(tokens) for tokens in (100_000, 120_000, 110_000, 50_000)] == [False, True, True, False]
    assert [message.split(":")[0] for message in caplog.messages] == [
        *("activations are kept", "activations are recomputed", "activations are kept"),  # not for each pass
    ]


def test_moments_on_the_host_leave_a_pass_room_for_its_activations() -> None:
    shape, model = Shape.of(QWEN), HuggingFace(device="cuda", dtype="bfloat16")
    room = memory.total(memory.trainer_bytes(shape, TrainerWorkload(100_000, BF16, "cuda", moments_on_host=True)))
    assert not model.recomputation_rule(shape, room, moments_on_host=True)(100_000)
    assert model.recomputation_rule(shape, room - 1, moments_on_host=True)(100_000)
    assert model.recomputation_rule(shape, room)(100_000)


def test_on_a_cpu_and_over_ranks_activations_are_kept_unless_it_is_said() -> None:
    model = HuggingFace(device="cpu")
    assert model._checkpointing(None, False, False) is False
    assert replace(model, gradient_checkpointing=True)._checkpointing(None, False, False) is True
    ranks = Sharding(None, torch.bfloat16)
    assert replace(model, device="cuda")._checkpointing(ranks, False, False) is False


def test_captured_steps_keep_logits_for_each_number_of_rows_and_what_the_largest_draw_needs() -> None:
    searcher = SearcherWorkload(BF16, slots=20, positions=64, prompt=16, device="cuda")
    assert memory.engine_bytes(Shape.of(QWEN), searcher)["captured steps"] == 2000 * ((8 + 16 + 20) * 2 + 20 * 12)
    assert memory.engine_bytes(Shape.of(QWEN), replace(searcher, device="cpu"))["captured steps"] == 0


def test_averages_take_four_bytes_of_each_trained_parameter_and_eight_of_a_checkpoint() -> None:
    shape = Shape.of(QWEN)
    for rank, trained in ((0, shape.parameters), (8, shape.adapters(8))):
        plain, averaged = (TrainerWorkload(4096, BF16, "cuda", rank, averaged=on) for on in (False, True))
        more = memory.total(memory.trainer_bytes(shape, averaged)) - memory.total(memory.trainer_bytes(shape, plain))
        assert more == 4 * trained
        stored = [sum(memory.disk_bytes(shape, of)[0].values()) for of in (plain, averaged)]
        assert stored[1] - stored[0] == 8 * trained
        assert (
            memory.disk_bytes(shape, averaged)[1] == memory.disk_bytes(shape, plain)[1]
        )  # a version is as large as ever


def test_an_engine_reads_as_many_prompts_together_as_its_share_of_a_gpu_has_room_for() -> None:
    shape = Shape.of(QWEN)
    searcher = SearcherWorkload(BF16, slots=8, positions=64, prompt=32, device="cuda")
    reference = memory.total(memory.reference_bytes(shape, searcher))
    rooms = {n: memory.total(memory.engine_bytes(shape, searcher, n)) + reference for n in (2048, 4096, 8192)}
    assert rooms[2048] < rooms[4096] < rooms[8192]
    for tokens, room in rooms.items():
        assert memory.prefill_tokens_within(shape, searcher, room) == tokens
    assert memory.prefill_tokens_within(shape, searcher, 10 * rooms[8192]) == 8192
    assert memory.prefill_tokens_within(shape, searcher, rooms[2048] - 1) == 2048  # no fewer, whoever checks the need
