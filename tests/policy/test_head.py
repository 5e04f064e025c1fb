"""The chunked head against torch's own linear, log-softmax and gather."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tba.policy import head as heads
from tba.policy.head import Head, ProbabilityBuffer, token_log_probabilities

TOKENS, WIDTH, VOCABULARY = 23, 8, 50
ROW_BYTES = VOCABULARY * 4


def leaves(scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).requires_grad_()

    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return normal(TOKENS, WIDTH), normal(VOCABULARY, WIDTH), normal(VOCABULARY), target


def plain(hidden: Tensor, head: Head, target: Tensor, temperature: float) -> Tensor:
    log_MV = torch.log_softmax(head.logits(hidden) / temperature, -1)
    return log_MV.gather(1, target[:, None])[:, 0]


def gradients(log_M: Tensor, of: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((log_M * torch.linspace(-1, 2, TOKENS)).sum(), of))


@pytest.mark.parametrize("kept_rows", [0, 5, 22, TOKENS])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_chunked_head_is_the_plain_head_whatever_it_may_keep(
    kept_rows: int, bias: bool, softcap: float | None, temperature: float
) -> None:
    hidden, weight, bias_V, target = leaves()
    head = Head(weight, bias_V if bias else None, softcap)
    of = [hidden, weight, *([bias_V] if bias else [])]
    kept = ProbabilityBuffer(kept_rows * ROW_BYTES)
    entropy = torch.full((TOKENS,), torch.nan)
    ours = token_log_probabilities(hidden, head, target, temperature, chunk=4, buffer=kept, entropy_M=entropy)
    theirs = plain(hidden, head, target, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(ours, of), gradients(theirs, of), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-5)  # 23 terms of up to 10: 10 * eps * sqrt(23)
    distribution = torch.distributions.Categorical(logits=head.logits(hidden.detach()) / temperature)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-5, atol=5e-5)  # of a difference of up to 60


def test_entropies_in_bfloat16_are_those_of_the_distribution_but_for_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 64, generator=generator, dtype=torch.bfloat16).requires_grad_()
    weight = 0.3 * torch.randn(500, 64, generator=generator, dtype=torch.bfloat16)
    log_MV = torch.log_softmax((hidden.detach() @ weight.T).float(), -1)
    target = torch.distributions.Categorical(logits=log_MV).sample()
    entropy = torch.empty(200)
    kept = ProbabilityBuffer(100 * 2 * 500)
    token_log_probabilities(hidden, Head(weight), target, 1.0, 16, kept, entropy).sum().backward()
    wrong = entropy - torch.special.entr(log_MV.exp()).sum(-1)
    assert wrong.abs().max() < 0.05  # products of 8 bits, each of up to 8 nats
    assert abs(float(wrong.mean())) < 0.005  # which way they are rounded is chance


def test_a_probability_far_below_the_smallest_float_keeps_its_logarithm() -> None:
    hidden, weight, _, _ = leaves(scale=12)
    target = torch.log_softmax(hidden @ weight.T, -1).argmin(-1)
    head = Head(weight)
    theirs = plain(hidden, head, target, 1.0)
    assert theirs.max() < -104  # exp of it is 0 in float32
    ours = token_log_probabilities(hidden, head, target, 1.0, 4, ProbabilityBuffer(9 * ROW_BYTES))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-4)
    for one, other in zip(gradients(ours, [hidden, weight]), gradients(theirs, [hidden, weight]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_forwards_that_await_their_backwards_do_not_share_what_is_kept() -> None:
    hidden, weight, _, target = leaves()
    head, kept = Head(weight), ProbabilityBuffer(TOKENS * ROW_BYTES)
    first = token_log_probabilities(hidden, head, target, 1.0, 4, kept)
    second = token_log_probabilities(hidden * 0.5, head, target.flip(0), 0.7, 4, kept)
    for ours, theirs in (
        (second, plain(hidden * 0.5, head, target.flip(0), 0.7)),
        (first, plain(hidden, head, target, 1.0)),
    ):
        one, other = (gradients(log_M, [hidden, weight]) for log_M in (ours, theirs))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_buffer_of_one_step_serves_the_next() -> None:
    hidden, weight, _, target = leaves()
    head, kept = Head(weight), ProbabilityBuffer(TOKENS * ROW_BYTES)
    gradients(token_log_probabilities(hidden, head, target, 1.0, 4, kept), [hidden, weight])
    assert kept.lend(3, weight).untyped_storage().nbytes() == TOKENS * ROW_BYTES
    fresh = kept.lend(3, weight)  # it is lent: this one is another
    assert fresh.untyped_storage().nbytes() == 3 * ROW_BYTES


def test_a_second_backward_is_refused_because_its_probabilities_are_gone() -> None:
    hidden, weight, _, target = leaves()
    log_M = token_log_probabilities(hidden, Head(weight), target, 1.0, 4, ProbabilityBuffer(10**6))
    log_M.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        log_M.sum().backward()


def test_half_precision_weights_give_float32_log_probabilities() -> None:
    hidden, weight, _, target = leaves(scale=0.5)
    ours = token_log_probabilities(
        hidden.bfloat16(), Head(weight.bfloat16()), target, 1.0, 4, ProbabilityBuffer(10 * ROW_BYTES)
    )
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain(hidden, Head(weight), target, 1.0), rtol=0, atol=0.05)


def test_half_precision_sums_the_heads_gradient_in_float32() -> None:
    """Thousands of occurrences of one token that is nearly sure: half precision keeps nothing of their sum."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, WIDTH, generator=generator).abs().bfloat16()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul(0.1).bfloat16()
    weight[3] += 1.5  # all hidden states point its way
    target = torch.full((4096,), 3)
    exact_leaf = weight.double().requires_grad_()
    exact = torch.log_softmax(hidden.double() @ exact_leaf.T, -1)[:, 3]
    exact_grad = torch.autograd.grad(exact.sum(), exact_leaf)[0]
    for rows in (0, 1000, 4096):  # whose probabilities are kept
        leaf = weight.clone().requires_grad_()
        kept = ProbabilityBuffer(rows * VOCABULARY * 2)
        ours = token_log_probabilities(hidden, Head(leaf), target, 1.0, 16, kept)
        grad = torch.autograd.grad(ours.sum(), leaf)[0]
        assert float((grad - exact_grad).norm() / exact_grad.norm()) < 0.01, rows


@pytest.mark.parametrize("kept_rows", [0, 9, TOKENS])
def test_what_is_kept_in_bfloat16_is_made_in_chunks_and_is_the_same_whatever_is_kept(kept_rows: int) -> None:
    """Of one chunk's logits everything is made where all is kept; the sums of gradients are in float32 either way."""
    hidden_MW, weight, _, target = leaves(scale=0.5)
    low_hidden, low_weight = (x.detach().bfloat16().requires_grad_() for x in (hidden_MW, weight))
    results = []
    for rows, chunk in ((kept_rows, 4), (TOKENS, TOKENS)):
        buffer = ProbabilityBuffer(rows * VOCABULARY * 2)
        log_M = token_log_probabilities(low_hidden, Head(low_weight), target, 0.7, chunk, buffer)
        results.append([log_M.detach(), *gradients(log_M, [low_hidden, low_weight])])
    for first_result, second_result in zip(*results, strict=True):
        torch.testing.assert_close(
            first_result, second_result, rtol=2**-6, atol=2**-6
        )  # of products rounded to 8 bits, in other chunks
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)


def test_a_gpu_keeps_what_its_free_memory_holds_beside_the_work_and_never_less_than_the_limit() -> None:
    weight, tokens, chunk = torch.empty(1000, 64, dtype=torch.bfloat16), 5000, 100
    row_bytes = 2 * 1000
    work_bytes = chunk * 10 * 1000 + 8 * 64 * 1000 + 3 * 2 * 64 * tokens
    for free_bytes, rows in (
        (0, 7),
        (work_bytes + 8 * row_bytes, 7),
        (work_bytes + 800 * row_bytes, 600),
        (10**9, tokens),
        (None, 7),
    ):
        buffer = ProbabilityBuffer(7 * row_bytes, lambda device, free_bytes=free_bytes: free_bytes)
        assert buffer.capacity(weight, chunk, tokens) == rows


class WeightOnFullDevice(Tensor):
    """A weight whose device has no room for more than six rows at once."""

    def new_empty(self, size: int) -> Tensor:  # type: ignore[override]  # as the buffer calls it
        if size > 6 * VOCABULARY:
            raise torch.OutOfMemoryError
        return torch.empty(size)


@pytest.mark.parametrize(("limit_rows", "rows"), [(2, 5), (6, 6)])
def test_fewer_rows_are_kept_where_free_memory_is_in_pieces_and_never_fewer_than_the_limit(
    limit_rows: int, rows: int
) -> None:
    weight = torch.empty(VOCABULARY, WIDTH).as_subclass(WeightOnFullDevice)
    assert ProbabilityBuffer(limit_rows * VOCABULARY * 4).lend(40, weight).shape == (rows, VOCABULARY)
    with pytest.raises(torch.OutOfMemoryError):
        ProbabilityBuffer(7 * VOCABULARY * 4).lend(40, weight)


@pytest.mark.parametrize("buckets", [False, True])
def test_an_accelerator_keeps_nothing_where_no_gradient_is_taken(buckets: bool) -> None:
    weight = torch.empty(VOCABULARY, WIDTH, device="meta", requires_grad=True)
    hidden, target = torch.empty(TOKENS, WIDTH, device="meta"), torch.empty(TOKENS, dtype=torch.int64, device="meta")
    requests: list[torch.device] = []
    buffer = ProbabilityBuffer(10**6, requests.append)
    for has_gradient in (False, True):
        with torch.set_grad_enabled(has_gradient):
            if buckets:
                heads.bucket_log_probabilities(hidden, Head(weight), target[:, None], 1.0, 4, buffer)
            else:
                token_log_probabilities(hidden, Head(weight), target, 1.0, 4, buffer)
        assert len(requests) == has_gradient


def test_the_function_that_is_compiled_for_kept_probabilities_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and not made into a kernel, which takes a compiler and half a minute."""
    traced = torch.compile(heads._surplus_of_logits, dynamic=True, backend="eager")
    monkeypatch.setattr(heads, "_compiled_surplus", lambda: traced)
    hidden_MW, weight, _, target = leaves(scale=0.5)
    low_hidden, low_weight = (x.detach().bfloat16().requires_grad_() for x in (hidden_MW, weight))
    results = []
    for compiled in (True, False):
        head, buffer = Head(low_weight, compiled=compiled), ProbabilityBuffer(20 * VOCABULARY * 2)
        log_M = token_log_probabilities(low_hidden, head, target, 0.7, 8, buffer)
        results.append([log_M.detach(), *gradients(log_M, [low_hidden, low_weight])])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    for first_result, second_result in zip(*results, strict=True):
        torch.testing.assert_close(
            first_result, second_result, rtol=2**-7, atol=2**-7
        )  # a probability between two of 8 bits
