"""The loss of generalised knowledge distillation is what TRL computes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import kl_div

from tba_lab.gkd import generalised_jsd


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_loss_and_its_gradient_are_those_of_trl_on_the_same_logits(beta: float) -> None:
    """`GKDTrainer.generalized_jsd_loss` with `batchmean`: torch's kl_div(log q, log p) is KL(p || q), summed
    over the positions that labels keep and divided by their number."""
    torch.manual_seed(0)
    student = (2 * torch.randn(2, 6, 11, dtype=torch.float64)).requires_grad_()
    teacher, mask = 2 * torch.randn(2, 6, 11, dtype=torch.float64), torch.rand(2, 6) > 0.4
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta in (0, 1):
        divergence = kl_div(s, t, reduction="none", log_target=True) if beta == 0 else kl_div(
            t, s, reduction="none", log_target=True
        )  # fmt: skip
    else:
        m = torch.logsumexp(torch.stack([s + math.log1p(-beta), t + math.log(beta)]), 0)
        of_teacher, of_student = (kl_div(m, p, reduction="none", log_target=True) for p in (t, s))
        divergence = beta * of_teacher + (1 - beta) * of_student
    expected = divergence[mask].sum() / mask.sum()
    (expected_gradient,) = torch.autograd.grad(expected, student, retain_graph=True)
    loss = generalised_jsd(s[mask], t[mask], beta)
    (gradient,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_equal_models_lose_nothing_and_others_do() -> None:
    p = torch.tensor([[0.5, 0.5]]).log()
    q = torch.tensor([[0.25, 0.75]]).log()
    for beta in (0.0, 0.5, 1.0):
        assert float(generalised_jsd(p, p, beta)) == pytest.approx(0, abs=1e-7)
    assert float(generalised_jsd(p, q, 1.0)) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert float(generalised_jsd(p, q, 0.0)) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
