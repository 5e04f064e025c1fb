"""Attention of many sequences in one call against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tba.policy import varlen
from tba.policy.varlen import Attention, Sequences

CPU = torch.device("cpu")
SELF = [50, 3, 1, 49, 3, 2, 17]  # lone sequences and shared calls
CASES = {
    "each to itself": (SELF, SELF, True, None),
    "to a prompt": ([9, 0, 4], [5, 7, 1], False, None),
    "window 4": ([6, 1, 9], [8, 4, 9], True, 4),
    "window 1": ([3, 2], [3, 2], True, 1),
    "after a prefix": ([6, 2], [8, 5], True, None),
}


def inputs(sequences: Sequences, heads: int, dtype: torch.dtype = torch.float32, width: int = 8) -> list[Tensor]:
    """Query, key and value with 4 and `heads` heads."""
    generator = torch.Generator().manual_seed(0)
    rows = (sum(sequences.query_lengths), sum(sequences.key_lengths), sum(sequences.key_lengths))
    return [
        torch.randn(n, h, width, generator=generator).to(dtype).requires_grad_()
        for n, h in zip(rows, (4, heads, heads), strict=True)
    ]


def defined(query: Tensor, key: Tensor, value: Tensor, of: Sequences, attention: Attention) -> tuple[Tensor, Tensor]:
    """Each sequence alone, each query by its own softmax."""
    outs, lses = [], []
    for queries, keys in of.slices():
        q, k, v = query[queries], key[keys], value[keys]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) * attention.scale
        if attention.softcap is not None:
            score = torch.tanh(score / attention.softcap) * attention.softcap
        for i in range(len(q)):
            last = len(k) - len(q) + i if of.causal else len(k) - 1
            first = 0 if of.window is None else max(0, last - of.window + 1)
            seen = score[:, i, first : last + 1]
            outs.append(torch.einsum("hk,khd->hd", seen.softmax(-1), v[first : last + 1]))
            lses.append(seen.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses, 1)


def ours(
    leaves: list[Tensor], grad: Tensor, of: Sequences, attention: Attention
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    with torch.no_grad():
        out, lse = attention.forward(*leaves, of)
        return out, lse, attention.backward(grad, *leaves, out, lse, of)


@pytest.mark.parametrize("block", [2**26, 40], ids=["at once", "in blocks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_output_log_sum_exp_and_gradients_are_those_of_each_query_alone(
    case: str, heads: int, softcap: float | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "_SCORES", block)
    query_lengths, key_lengths, causal, window = CASES[case]
    of = Sequences.of(query_lengths, key_lengths, CPU, causal, window)
    attention = Attention(0.6, softcap)
    leaves = inputs(of, heads)
    expected_out, expected_lse = defined(*leaves, of, attention)
    grad = torch.linspace(-1, 1, expected_out.numel()).view(expected_out.shape)
    expected = torch.autograd.grad((expected_out * grad).sum(), leaves, allow_unused=True)
    out, lse, grads = ours(leaves, grad, of, attention)
    # sums of up to 50 terms of size 3: 3 * eps * sqrt(50) is 2.5e-6
    torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


def test_with_the_log_sum_exp_of_a_larger_softmax_the_parts_of_its_gradient_add_up() -> None:
    whole, half = Sequences.of([5], [6], CPU, causal=False), Sequences.of([5], [3], CPU, causal=False)
    attention = Attention(1.0)
    query, key, value = inputs(whole, 2)
    grad = torch.linspace(-1, 1, query.numel()).view(query.shape)
    out, lse, (grad_query, grad_key, grad_value) = ours([query, key, value], grad, whole, attention)
    with torch.no_grad():
        parts = [attention.backward(grad, query, key[i : i + 3], value[i : i + 3], out, lse, half) for i in (0, 3)]
    # eps times the sizes summed, at most 4, of 6 terms
    torch.testing.assert_close(parts[0][0] + parts[1][0], grad_query, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), grad_key, rtol=1e-6, atol=3e-6)
    torch.testing.assert_close(torch.cat([p[2] for p in parts]), grad_value, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 60, 264])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_kernel_of_gpus_is_called_where_it_can_be_and_then_never_sees_all_pairs(
    dtype: torch.dtype, width: int, softcap: float | None
) -> None:
    of = Sequences.of([30], [30], torch.device("meta"), causal=True)
    leaves = [x.to("meta") for x in inputs(Sequences.of([30], [30], CPU, causal=True), 2, dtype, width)]
    fits = dtype == torch.bfloat16 and width == 64 and softcap is None
    attention = Attention(1 / math.sqrt(width), softcap)
    names = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Names():
        out, lse, _ = ours(leaves, leaves[0], of, attention)
    assert (out.shape, lse.shape) == (leaves[0].shape, (4, 30))
    assert ("aten::_flash_attention_forward" in names) == ("aten::_flash_attention_backward" in names) == fits


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the kernel of a GPU with its stand-in")
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_the_kernel_gives_what_its_stand_in_gives(case: str, heads: int) -> None:
    query_lengths, key_lengths, causal, window = CASES[case]
    on_cpu, on_gpu = (
        Sequences.of(query_lengths, key_lengths, torch.device(d), causal, window) for d in ("cpu", "cuda")
    )
    attention = Attention(0.3)
    leaves = [x.detach() for x in inputs(on_cpu, heads, torch.bfloat16, width=64)]
    grad = torch.linspace(-1, 1, leaves[0].numel()).view(leaves[0].shape).bfloat16()
    out, lse, grads = ours([x.float() for x in leaves], grad.float(), on_cpu, attention)
    theirs = ours([x.cuda() for x in leaves], grad.cuda(), on_gpu, attention)
    # bfloat16 rounds by 2^-9 of a value; gradients are sums of up to 50 of these
    for one, other in zip((out, lse, *grads), (theirs[0], theirs[1], *theirs[2]), strict=True):
        assert float((other.float().cpu() - one).norm()) <= 0.02 * float(one.norm())
