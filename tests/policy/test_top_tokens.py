"""A teacher's top tokens and the policy's probabilities of them, against log-softmax by its definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_head import ROW_BYTES, TOKENS, VOCABULARY, leaves
from test_segments import EPISODES, PROMPTS, built, episodes, one_row_each
from torch import Tensor

from tba.batch import collate
from tba.objectives.distil import Distil
from tba.policy.causal import CausalPolicy
from tba.policy.head import Head, ProbabilityBuffer, bucket_log_probabilities, top_tokens
from tba.policy.reference import FrozenReference
from tba.replay.codec import decode_trajectory, encode_trajectory
from tba.types import Group, Version, teacher_arrays


def by_definition(logits_MV: Tensor, bucket_MJ: Tensor) -> Tensor:
    """The log-probabilities of the given tokens, and of all tokens but the second and later ones."""
    log_MV = logits_MV.log_softmax(-1)
    log_rest_M1 = log_MV.exp().scatter(1, bucket_MJ[:, 1:], 0.0).sum(-1, keepdim=True).log()
    return torch.cat([log_MV.gather(1, bucket_MJ), log_rest_M1], 1)


@pytest.mark.parametrize("kept_rows", [0, 5, TOKENS])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_chunked_head_gives_several_tokens_as_the_plain_head_does(
    kept_rows: int, bias: bool, softcap: float | None, temperature: float
) -> None:
    hidden, weight, bias_V, target = leaves(0.7)
    head = Head(weight, bias_V if bias else None, softcap)
    top_MK, scored_MJ = top_tokens(hidden, head, target, 3, temperature, 4, None)
    plain_MV = head.logits(hidden) / temperature
    assert torch.equal(top_MK, plain_MV.topk(3, -1).indices)
    bucket_MJ = torch.cat([target[:, None], top_MK], 1)
    entropy = torch.full((TOKENS,), torch.nan)
    buffer = ProbabilityBuffer(kept_rows * ROW_BYTES)
    log_MJ = bucket_log_probabilities(hidden, head, bucket_MJ, temperature, 4, buffer, entropy)
    expected_MJ = by_definition(plain_MV, bucket_MJ)
    torch.testing.assert_close(log_MJ, expected_MJ, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scored_MJ, expected_MJ.detach(), rtol=1e-5, atol=1e-5)
    slope = torch.linspace(-1, 2, log_MJ.numel()).view_as(log_MJ)
    parts = [hidden, weight, *([bias_V] if bias else [])]
    gradients = [torch.autograd.grad((log * slope).sum(), parts) for log in (log_MJ, expected_MJ)]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=5e-5)  # as in `test_head`
    distribution = torch.distributions.Categorical(logits=plain_MV.detach())
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-5, atol=5e-5)


def test_in_bfloat16_the_gradient_near_the_teacher_is_rounded_once() -> None:
    """The derivative at a token of probability near 1 is a difference of two numbers near 1."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(200, 32, generator=generator, dtype=torch.bfloat16)
    logits_MV = (hidden.detach() @ weight.T).float()
    top_MK = logits_MV.topk(4, -1).indices
    bucket_MJ = torch.cat([top_MK[:, :1], top_MK], 1)
    log_MJ = bucket_log_probabilities(hidden, Head(weight), bucket_MJ, 1.0, 16, ProbabilityBuffer(1 << 20))
    leaf_MV = logits_MV.requires_grad_()
    expected_MJ = by_definition(leaf_MV, bucket_MJ)
    target_MJ = (expected_MJ.detach() + 1e-3 * torch.randn(expected_MJ.shape, generator=generator))[:, 1:]
    slopes = []
    for log, leaf in ((log_MJ, hidden), (expected_MJ, leaf_MV)):
        loss = (log[:, 1:].exp() * (log[:, 1:] - target_MJ)).sum()
        slopes.append(torch.autograd.grad(loss, leaf)[0].float())
    exact_MW = slopes[1] @ weight.float()
    assert float((slopes[0] - exact_MW).norm() / exact_MW.norm()) < 0.02


def test_where_others_leave_next_to_nothing_values_and_gradients_are_finite() -> None:
    hidden = torch.full((1, 1), 200.0, requires_grad=True)
    head, bucket_MJ = Head(torch.tensor([[1.0], [0.0], [-1.0]])), torch.tensor([[0, 0]])
    log_MJ = bucket_log_probabilities(hidden, head, bucket_MJ, 1.0, 4, ProbabilityBuffer(0))
    assert bool(log_MJ.isfinite().all())
    p_MJ = log_MJ[:, 1:].exp()
    (gradient,) = torch.autograd.grad((p_MJ * (log_MJ[:, 1:] + 1)).sum(), hidden)
    assert bool(gradient.isfinite().all())


def test_only_tokens_below_a_bound_are_named_and_the_others_are_in_the_rest() -> None:
    hidden, weight, _, target = leaves(0.7)
    top_MK, log_MJ = top_tokens(hidden, Head(weight), target, 3, 1.0, 4, below=5)
    assert int(top_MK.max()) < 5
    bucket_MJ = torch.cat([target[:, None], top_MK], 1)
    torch.testing.assert_close(log_MJ, by_definition(hidden @ weight.T, bucket_MJ).detach(), rtol=1e-5, atol=1e-5)


def test_where_nothing_was_sampled_nothing_is_named() -> None:
    hidden, weight, _, target = leaves(0.7)
    top_MK, log_MJ = top_tokens(hidden[:0], Head(weight), target[:0], 3, 1.0, 4, None)
    assert (top_MK.shape, log_MJ.shape) == ((0, 3), (0, 5))


def test_of_a_whole_vocabulary_nothing_is_left_and_the_gradient_is_finite() -> None:
    hidden, weight, _, target = leaves(0.7)
    bucket_MJ = torch.cat([target[:, None], torch.arange(VOCABULARY).expand(TOKENS, -1)], 1)
    log_MJ = bucket_log_probabilities(hidden, Head(weight), bucket_MJ, 1.0, 4, ProbabilityBuffer(0))
    assert bool(log_MJ[:, -1].isneginf().all())
    (gradient,) = torch.autograd.grad(log_MJ[:, :-1].sum(), hidden)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("name", "share_prompt"),
    [("full", True), ("window", True), ("both", True), ("full", False), ("both", False), ("recurrent", False)],
)
def test_what_a_model_says_of_episodes_of_several_segments_is_what_the_policy_compares(
    name: str, share_prompt: bool
) -> None:
    groups = episodes(PROMPTS, EPISODES)
    teacher = FrozenReference(built(name), Version(), 0.7, tokens_per_pass=60, share_prompt=share_prompt)
    answers = [(g.prompt, [t.completion for t in g.trajectories]) for g in groups]
    scored = teacher.with_top(3).log_probabilities_of(answers)
    plain_scores = teacher.log_probabilities_of(answers)
    pairs = zip(groups, scored, strict=True)
    rows = [
        [replace(t, arrays=teacher_arrays([s])) for t, s in zip(g.trajectories, row, strict=True)] for g, row in pairs
    ]
    for row, plain_row in zip(scored, plain_scores, strict=True):
        for scores, log_T in zip(row, plain_row, strict=True):
            np.testing.assert_allclose(scores.log_T, log_T, rtol=1e-5, atol=5e-5)
            assert scores.ids_MK.dtype == np.uint16
            np.testing.assert_allclose(np.exp(scores.logs_MC.astype(float)).sum(1), 1, atol=2e-3)  # half precision
    batch = collate([Group.of(row) for row in rows])
    assert batch.log_top_BTC is not None
    policy = CausalPolicy(built(name), 0.7, share_prompt)
    output = policy.evaluate(batch)
    assert output.log_top_BTC is not None
    torch.testing.assert_close(output.log_top_BTC.detach(), batch.log_top_BTC, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(output.log_policy_BT, policy.evaluate(replace(batch, top_id_BTK=None)).log_policy_BT)
    assert Distil()(output, batch, 1)[0].item() == pytest.approx(0, abs=2e-3)  # of 15 places in half precision

    segments, places = one_row_each(groups)  # each is scored by itself as it was in its episode
    of_rows = iter(
        [
            s
            for g in teacher.with_top(3).log_probabilities_of(
                [(g.prompt, [t.completion for t in g.trajectories]) for g in segments]
            )
            for s in g
        ]
    )
    for row, begin, end in places:
        alone = next(of_rows)
        mask_T = batch.mask_BT[row, begin:end]
        torch.testing.assert_close(
            batch.log_top_BTC[row, begin:end][mask_T],
            torch.from_numpy(alone.logs_MC.astype(np.float32)),
            rtol=1e-3,
            atol=1e-3,
        )


def test_top_tokens_are_stored_as_they_are_and_rows_that_are_selected_keep_them() -> None:
    groups = episodes(PROMPTS, EPISODES)
    teacher = FrozenReference(built("full"), Version()).with_top(2)
    (first,) = teacher.log_probabilities_of([(groups[0].prompt, [t.completion for t in groups[0].trajectories])])
    rows = [replace(t, arrays=teacher_arrays([s])) for t, s in zip(groups[0].trajectories, first, strict=True)]
    again = [decode_trajectory(encode_trajectory(t), t.prompt) for t in rows]
    for t, read in zip(rows, again, strict=True):
        assert t.arrays.keys() == read.arrays.keys()
        for name, array in t.arrays.items():
            assert np.array_equal(array, read.arrays[name])
            assert array.dtype == read.arrays[name].dtype
    batch = collate([Group.of(rows)])
    chosen = batch.select(torch.tensor([2, 0]))
    assert chosen.top_id_BTK is not None
    assert batch.top_id_BTK is not None
    width = chosen.completion_BT.shape[1]
    assert torch.equal(chosen.top_id_BTK, batch.top_id_BTK[[2, 0], :width])
    assert collate([Group.of([rows[0], groups[0].trajectories[1]])]).top_id_BTK is None  # not all rows have them
