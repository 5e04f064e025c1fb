"""Distillation over buckets: each divergence by its definition, and what the buckets leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_cases import perturbed, sampled
from torch import Tensor

from tba.batch import Batch
from tba.errors import UserError
from tba.objectives.distil import Distil
from tba.policy.head import split_buckets
from tba.protocols import PolicyOutput

DIVERGENCES = ["reverse", "forward", "js"]


def logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compared(student: Tensor, teacher: Tensor, top: Tensor) -> tuple[PolicyOutput, Batch]:
    """One answer, of which each row of logits is a place; `top` are the tokens that are compared."""
    batch = sampled(perturbed(), [1])
    ids = torch.cat([torch.zeros(len(top), 1, dtype=torch.int64), top], 1)
    student_TC, teacher_TC = (split_buckets(z, ids)[None, :, 1:] for z in (student, teacher))
    mask = torch.ones(1, len(top), dtype=torch.bool)
    output = PolicyOutput(torch.zeros(1, len(top), dtype=torch.float64), log_top_BTC=student_TC)
    return output, replace(batch, mask_BT=mask, log_top_BTC=teacher_TC)


def divergence(name: str, p: Tensor, q: Tensor) -> Tensor:
    """The divergence of distributions in the last dimension, by its definition."""
    if name == "js":
        mean = (p + q) / 2
        return (divergence("reverse", p, mean) + divergence("reverse", q, mean)) / 2
    if name == "forward":
        p, q = q, p
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_with_the_whole_vocabulary_it_is_the_divergence_and_its_gradient(name: Any) -> None:
    student, teacher = logits(0, 5, 7).requires_grad_(), logits(1, 5, 7)
    everything = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(t)) for t in range(5)])
    loss, metrics = Distil(name)(*compared(student, teacher, everything), 1)
    expected = divergence(name, student.softmax(-1), teacher.softmax(-1)).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert float(metrics["divergence"]) == pytest.approx(expected.item(), rel=1e-6)
    slopes = [torch.autograd.grad(value, student, retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_with_fewer_tokens_it_is_the_divergence_of_these_and_the_rest(name: Any) -> None:
    student, teacher = logits(0, 5, 7).requires_grad_(), logits(1, 5, 7)
    top = teacher.topk(2, -1).indices

    def merged(z: Tensor) -> Tensor:
        p = z.softmax(-1).gather(-1, top)
        return torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)

    loss, _ = Distil(name)(*compared(student, teacher, top), 1)
    expected = divergence(name, merged(student), merged(teacher)).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    slopes = [torch.autograd.grad(value, student, retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(*slopes)


def test_reverse_divergence_has_the_gradient_of_the_squared_log_ratio_weighted_by_the_policy() -> None:
    student, teacher = logits(0, 5, 7).requires_grad_(), logits(1, 5, 7)
    everything = torch.arange(7).expand(5, 7)
    loss, _ = Distil()(*compared(student, teacher, everything), 1)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    square = (log_p.exp().detach() * (log_p - log_q).square()).sum() / 2
    slopes = [torch.autograd.grad(value, student, retain_graph=True)[0] for value in (loss, square)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tokens_that_a_server_did_not_name_are_left_out(name: Any) -> None:
    student, teacher = logits(0, 5, 7).requires_grad_(), logits(1, 5, 7)
    top = teacher.topk(2, -1).indices
    loss, _ = Distil(name)(*compared(student, teacher, top), 1)
    output, batch = compared(student, teacher, torch.cat([top, top[:, :1]], 1))  # the first stands again, as -inf
    assert batch.log_top_BTC is not None
    absent = batch.log_top_BTC.clone()
    absent[:, :, 2] = -torch.inf
    fewer, _ = Distil(name)(output, replace(batch, log_top_BTC=absent), 1)
    slopes = [torch.autograd.grad(value, student, retain_graph=True)[0] for value in (loss, fewer)]
    torch.testing.assert_close(fewer, loss)
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tokens_that_only_the_policy_has_end_at_nothing(name: Any) -> None:
    """The teacher names its whole vocabulary of five, so that it has no rest; the policy has seven tokens."""
    student, teacher = logits(0, 5, 7).requires_grad_(), logits(1, 5, 5)
    everything = torch.arange(5).expand(5, 5)
    ids = torch.cat([everything[:, :1], everything], 1)
    optimizer = torch.optim.Adam([student], lr=0.1)
    for _ in range(400):
        output, batch = compared(student, logits(1, 5, 7), everything)
        batch = replace(batch, log_top_BTC=split_buckets(teacher, ids)[None, :, 1:])
        loss, _ = Distil(name)(output, batch, 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0 <= loss.item() < 0.01
    assert float((student.detach().softmax(-1)[:, :5] - teacher.softmax(-1)).abs().max()) < 0.02


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_policy_that_is_sure_of_what_the_teacher_never_says_has_a_finite_gradient(name: Any) -> None:
    student, teacher = (50 * logits(seed, 5, 7) for seed in (0, 1))
    student.requires_grad_()
    loss, _ = Distil(name)(*compared(student, teacher, teacher.topk(2, -1).indices), 1)
    (slope,) = torch.autograd.grad(loss, student)
    assert loss.isfinite()
    assert bool(slope.isfinite().all())


def test_the_pull_is_the_squared_log_ratio_to_the_reference() -> None:
    policy, batch = perturbed(), sampled(perturbed(1), [3, 2])
    output = policy.evaluate(batch)
    assert batch.log_anchor_BT is not None
    square_BT = torch.where(batch.mask_BT, (output.log_policy_BT - batch.log_anchor_BT).square(), 0.0)
    without, pulled = (Distil(pull=pull)(output, batch, 1)[0] for pull in (0.0, 0.4))
    assert (pulled - without).item() == pytest.approx(0.2 * square_BT.sum(1).mean().item())


def test_a_pull_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match="give a number, 0 or more"):
        Distil(pull=-1.0)
