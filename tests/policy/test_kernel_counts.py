"""What a pass asks of an accelerator stays within budgets (`lab/benchmarks/kernel_counts.py`, on the meta device)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.scripts import script

counts = script("lab/benchmarks/kernel_counts.py")


def test_a_count_is_of_what_is_launched_read_written_and_alive() -> None:
    a = torch.empty(8, 4, device="meta")

    def work() -> None:
        b = a @ a.T  # reads 2 * 128 bytes, writes 256
        b.view(64).add_(1)  # a view and 256 bytes each way
        c = b[:2].clone()  # a view and 64 bytes each way; 320 are alive
        del b
        c.index_select(0, torch.empty(1, dtype=torch.int64, device="meta"))  # 32 bytes each way and an index of 8

    count = counts.counted(work)
    assert count.by_name == {"mm": 1, "add_": 1, "clone": 1, "index_select": 1}
    assert (count.kernels, count.moved) == (4, 512 + 512 + 128 + 72)
    assert (count.peak, count.waits) == (256 + 64, 0)


@pytest.mark.parametrize(("checkpointed", "kernel_limit"), [(False, 2750), (True, 3500)])
def test_a_step_of_the_trainer_is_at_most_2750_kernels_and_waits_for_nothing(
    checkpointed: bool, kernel_limit: int
) -> None:
    """Of Qwen2.5-0.5B's shape: 24 layers, a vocabulary of 151,936, 290 parameters."""
    parts = counts.step(counts.policy_on_meta(checkpointed), counts.batch_of())
    of_head = parts.pop("(of these the head)")
    assert sum(count.kernels for count in parts.values()) <= kernel_limit
    assert parts["optimizer"].kernels <= 70
    assert parts["rounding"].kernels <= 30
    assert of_head.kernels <= 85  # with memory for all its probabilities
    assert of_head.moved <= 60e9
    assert of_head.peak <= 7e9
    assert sum(count.waits for count in parts.values()) == 0


def test_prompts_of_many_lengths_are_read_by_as_many_kernels_as_one() -> None:
    many, one = (counts.counted(counts.prefill(lengths)) for lengths in (range(60, 140, 5), [100]))
    assert many.kernels == one.kernels <= 650
    assert many.waits == 0


def test_launches_of_lists_are_as_many_as_their_tensors_and_chunks_fill() -> None:
    def launches(shapes: list[int], operation: Callable[[list[torch.Tensor]], object]) -> int:
        tensors = [torch.empty(n, device="meta") for n in shapes]
        count: int = counts.counted(lambda: operation(tensors)).kernels
        return count

    def twice(tensors: list[torch.Tensor]) -> None:
        torch._foreach_mul_(tensors, 2.0)

    assert launches([10] * 110, twice) == 1
    assert launches([10] * 111, twice) == 2  # one launch takes 110 tensors
    assert launches([320 * 65_536], twice) == 1
    assert launches([320 * 65_536 + 1], twice) == 2  # and 320 chunks
    assert launches([10] * 64, lambda tensors: torch._foreach_copy_(tensors, tensors)) == 1
    assert launches([10] * 65, lambda tensors: torch._foreach_copy_(tensors, tensors)) == 2  # of two lists 64


def test_a_token_step_never_waits_and_the_flash_kernel_spares_it_a_quarter_of_the_kernels_and_half_of_the_bytes() -> (
    None
):
    flash, bias = (counts.counted(counts.token_step(flash)[0]) for flash in (True, False))
    draw = counts.counted(counts.token_step(flash=True)[1])
    assert flash.kernels <= 670
    assert bias.kernels - flash.kernels >= 24 * 9  # a layer's attention written out; nothing is made for a mask either
    assert flash.moved < bias.moved / 2
    assert draw.kernels <= 50
    assert draw.moved <= 0.35e9  # logits of 72 rows are 22 MB, and cumulative sums of blocks next to nothing
    assert flash.waits == bias.waits == draw.waits == 0


def test_the_kernels_of_a_pass_do_not_grow_with_its_groups_and_answers() -> None:
    def kernels(prompts: list[int], completions: list[list[int]]) -> int:
        model, pack = counts.qwen(112, layers=2, ff=256, vocabulary=1000), counts.pack_of(prompts, completions)
        return counts.counted(lambda: counts.checkpointed_pass(model, pack)).kernels

    assert kernels([10], [[5, 6]]) == kernels(*counts.gsm8k_like(groups=8))


def test_the_head_of_7b_moves_at_most_100_gb_for_8192_tokens_and_never_waits() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        count = counts.counted(counts.head_alone(dtype=dtype))
        assert count.waits == 0
        assert count.moved <= 100e9 * dtype.itemsize / 2
        assert count.kernels <= 100


def test_attention_is_linear_in_memory_from_8k_to_32k_tokens() -> None:
    short, long = (counts.counted(counts.attention_alone(tokens)).peak for tokens in (8192, 32_768))
    assert long <= 4.5 * short
    assert long <= 2e9
    windows = [counts.counted(counts.attention_alone(n, prompt=1000, window=1024)).peak for n in (8192, 32_768)]
    assert windows[1] <= 4.5 * windows[0]


def test_attention_that_is_written_out_is_linear_in_memory_too() -> None:
    short, long = (counts.counted(counts.attention_alone(n, softcap=50.0)).peak for n in (4096, 16_384))
    assert long <= 4.5 * short
    assert long <= 4e9
