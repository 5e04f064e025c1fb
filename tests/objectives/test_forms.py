"""The forms of Trajectory Balance against their formulas, written once more: loops over groups in plain floats."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from objective_cases import BETA, random_batch, slopes
from torch import Tensor

from tba.batch import Batch
from tba.objectives.trajectory_balance import Asymmetric, Memory, TrajectoryBalance, slant_B
from tba.protocols import Objective, PolicyOutput
from tba_lab.tb_forms import LeastVarianceBalance, lowered

beta = BETA(1)


@dataclass
class Row:
    """One answer, as plain numbers."""

    reward: float
    log_ratio: float  # log(pi / pi_ref)
    log_rho: float | None  # log(pi / mu); None: unknown

    @property
    def h(self) -> float:
        return self.reward - beta * self.log_ratio


def groups_of(batch: Batch, log_policy_BT: Tensor) -> list[list[tuple[int, Row]]]:
    """Rows by group, each with its place in the batch."""
    behavior_BT = batch.some_behavior_BT if batch.log_behavior_BT is None else batch.log_behavior_BT
    groups: list[list[tuple[int, Row]]] = [[] for _ in range(batch.groups)]
    for b in range(batch.rows):
        places = [t for t in range(int(batch.length_B[b])) if batch.mask_BT[b, t]]
        pi = sum(float(log_policy_BT[b, t]) for t in places)
        reference = sum(float(batch.log_reference_BT[b, t]) for t in places)
        mu = math.nan if behavior_BT is None else sum(float(behavior_BT[b, t]) for t in places)
        row = Row(float(batch.reward_B[b]), pi - reference, None if math.isnan(mu) else pi - mu)
        groups[int(batch.group_B[b])].append((b, row))
    return groups


def weights(form: str, rows: Sequence[Row]) -> list[float]:
    """Of mean 1: min(rho, 8), log rho scaled to a spread of 2 nats; tapered: min(rho, 1) below the mean, else 1."""
    log_rho = [row.log_rho or 0.0 for row in rows]
    mean = sum(log_rho) / len(rows)
    spread = math.sqrt(sum((x - mean) ** 2 for x in log_rho) / len(rows))
    if spread > 2:
        log_rho = [x * 2 / spread for x in log_rho]
    average = sum(row.h for row in rows) / len(rows)
    if form == "none":
        values = [1.0] * len(rows)
    elif form == "tapered":
        values = [1.0 if row.h > average else min(math.exp(x), 1.0) for row, x in zip(rows, log_rho, strict=True)]
    else:
        values = [min(math.exp(x), 8.0) for x in log_rho]
    return [w * len(rows) / sum(values) for w in values]


def pushed(form: str, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(w, h minus its centre) of each row, in units of reward."""
    w = weights(form, rows)
    mean = sum(a * row.h for a, row in zip(w, rows, strict=True)) / len(rows)
    low = mean - 0.5 * (mean - min(row.h for row in rows))
    return [(a, row.h - (low if form == "lowered" else mean)) for a, row in zip(w, rows, strict=True)]


def tilted(seed: int) -> tuple[Batch, Tensor]:
    """A batch in which what the policy is less likely to give has lower rewards."""
    batch, log_policy_BT = far(seed, 1.0)
    likely_B = (log_policy_BT.exp() * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
    return replace(batch, reward_B=likely_B.detach() * 10), log_policy_BT


def far(seed: int, times: float) -> tuple[Batch, Tensor]:
    """A batch, and a policy so many times as far from the behaviour as `random_batch` has it."""
    batch, log_policy_BT = random_batch(seed, rows=14)
    assert batch.log_behavior_BT is not None
    return batch, batch.log_behavior_BT + times * (log_policy_BT - batch.log_behavior_BT)


@pytest.mark.parametrize("times", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("form", ["none", "exact", "asymmetric", "tapered"])
@pytest.mark.parametrize("known", ["all", "some", "none"])
def test_value_and_gradient_are_those_of_the_formula(form: str, times: float, known: str) -> None:
    for seed in range(8):
        batch, log_policy_BT = far(seed, times)
        assert batch.log_behavior_BT is not None
        if known != "all":
            unknown_B1 = torch.arange(batch.rows)[:, None] % (3 if known == "some" else 1) == 0
            there_BT = batch.log_behavior_BT.masked_fill(unknown_B1, torch.nan) if known == "some" else None
            batch = replace(batch, log_behavior_BT=None, some_behavior_BT=there_BT)
        objective = TrajectoryBalance(BETA, off_policy=form)
        loss, metrics = objective(PolicyOutput(log_policy_BT), batch, 1)
        expected_loss, expected_BT, size = 0.0, torch.zeros_like(log_policy_BT), 0.0
        for group in groups_of(batch, log_policy_BT):
            terms = pushed(form, [row for _, row in group])
            for (b, _), (w, a) in zip(group, terms, strict=True):
                expected_loss += w * a * a / (2 * beta) / batch.rows
                expected_BT[b] = -w * a / batch.rows * batch.mask_BT[b].double()
                size += abs(a) / beta / batch.rows
        assert float(loss) == pytest.approx(expected_loss, rel=1e-12, abs=1e-12)
        assert float(metrics["residual"]) == pytest.approx(size, rel=1e-6)
        torch.testing.assert_close(slopes(objective, batch, log_policy_BT)[0], expected_BT, rtol=0, atol=1e-12)


def squared_gradient(log_probabilities: Sequence[float]) -> float:
    """What a row weighs in log Z with least variance: the square of its gradient in the logits, nearly."""
    return sum((1 - math.exp(x)) ** 2 for x in log_probabilities) + 1e-6


@pytest.mark.parametrize("form", ["none", "exact"])
@pytest.mark.parametrize("times", [0.0, 1.0, 5.0])
def test_log_z_with_least_variance_is_a_mean_by_squared_gradients(form: str, times: float) -> None:
    for seed in range(8):
        batch, log_policy_BT = far(seed, times)
        objective = LeastVarianceBalance(BETA, off_policy=form)
        expected_loss, expected_BT = 0.0, torch.zeros_like(log_policy_BT)
        for group in groups_of(batch, log_policy_BT):
            rows = [row for _, row in group]
            squares = [squared_gradient(log_policy_BT[b][batch.mask_BT[b]].tolist()) for b, _ in group]
            centre = sum(v * row.h for v, row in zip(squares, rows, strict=True)) / sum(squares)
            for (b, row), w in zip(group, weights(form, rows), strict=True):
                expected_loss += w * (row.h - centre) ** 2 / (2 * beta) / batch.rows
                expected_BT[b] = -w * (row.h - centre) / batch.rows * batch.mask_BT[b].double()
        loss, _ = objective(PolicyOutput(log_policy_BT), batch, 1)
        assert float(loss) == pytest.approx(expected_loss, rel=1e-12, abs=1e-12)
        torch.testing.assert_close(slopes(objective, batch, log_policy_BT)[0], expected_BT, rtol=0, atol=1e-12)


def test_its_weight_of_a_token_is_between_half_and_all_of_the_square_of_the_gradient_in_the_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    p_RV = (4 * torch.randn(200, 7, dtype=torch.float64, generator=generator)).softmax(1)
    gradient_RV = torch.eye(7, dtype=torch.float64)[0] - p_RV
    ratio_R = (1 - p_RV[:, 0]).square() / gradient_RV.square().sum(1)
    assert 0.5 <= float(ratio_R.min()) < 0.6
    assert 0.75 < float(ratio_R.max()) <= 6 / 7  # where the other six are alike


def test_where_two_answers_are_possible_its_baseline_is_the_one_with_the_least_variance() -> None:
    """By enumeration: of all constants b, the variance of (h - b) grad log pi is least at the mean by its weights."""
    p, h = torch.tensor([0.9, 0.1], dtype=torch.float64), torch.tensor([0.8, 0.1], dtype=torch.float64)
    gradient_YV = torch.eye(2, dtype=torch.float64) - p

    def variance(b: float) -> float:
        sample_YV = (h - b)[:, None] * gradient_YV
        mean_V = p @ sample_YV
        return float(p @ (sample_YV - mean_V).square().sum(1))

    weight = p * (1 - p).square()
    least = float(weight @ h / weight.sum())
    assert variance(least) < min(variance(least + 1e-3), variance(least - 1e-3))
    assert variance(least) < 0.2 * variance(float(p @ h))


def test_lowered_is_exact_about_a_log_z_half_way_to_the_lowest() -> None:
    for seed in range(8):
        batch, log_policy_BT = far(seed, 3.0)
        expected_BT = torch.zeros_like(log_policy_BT)
        for group in groups_of(batch, log_policy_BT):
            for (b, _), (w, a) in zip(group, pushed("lowered", [row for _, row in group]), strict=True):
                expected_BT[b] = -w * a / batch.rows * batch.mask_BT[b].double()
        torch.testing.assert_close(slopes(lowered(BETA), batch, log_policy_BT)[0], expected_BT, rtol=0, atol=1e-12)


def slant_of(group: Sequence[tuple[int, Row]], batch: Batch, log_policy_BT: Tensor) -> float:
    """The mean of h by squared gradients less that by the weights of `exact`."""
    rows = [row for _, row in group]
    squares = [squared_gradient(log_policy_BT[b][batch.mask_BT[b]].tolist()) for b, _ in group]
    w = weights("exact", rows)
    return sum((v / sum(squares) - x / sum(w)) * row.h for v, x, row in zip(squares, w, rows, strict=True))


def test_what_is_pushed_up_is_the_slant_of_earlier_batches_beyond_chance() -> None:
    objective, pushes = started(), []
    mean, square = 0.0, 0.0
    for step in range(1, 9):
        batch, log_policy_BT = tilted(step)
        error = math.sqrt(max(0.0, square - mean**2) * 0.1 / 1.9)
        c = max(0.0, -mean - 2 * error)
        expected_BT, slants = torch.zeros_like(log_policy_BT), []
        for group in groups_of(batch, log_policy_BT):
            for (b, row), (w, a) in zip(group, pushed("exact", [row for _, row in group]), strict=True):
                assert row.log_rho is not None
                push = w * a + c * min(math.exp(row.log_rho), 8.0)
                expected_BT[b] = -push / batch.rows * batch.mask_BT[b].double()
            slants.append(slant_of(group, batch, log_policy_BT))
        slant = sum(slants) / len(slants)
        mean, square = (slant, slant**2) if step == 1 else (0.9 * mean + 0.1 * slant, 0.9 * square + 0.1 * slant**2)
        gradient_BT, loss, metrics = _slopes(objective, batch, log_policy_BT, step)
        torch.testing.assert_close(gradient_BT, expected_BT, rtol=0, atol=1e-12)
        exact, _ = TrajectoryBalance(BETA, off_policy="exact")(PolicyOutput(log_policy_BT), batch, 1)
        assert loss == pytest.approx(float(exact), abs=1e-12)
        assert float(metrics["push"]) == pytest.approx(c, abs=1e-12)
        pushes.append(c)
    assert pushes[0] == 0
    assert min(pushes[1:]) > 0.05


def test_a_slant_that_may_be_chance_or_that_favours_unlikely_answers_pushes_nothing() -> None:
    for slants, expected in (((0.5, 0.3, 0.4), 0.0), ((0.0, -0.5, 0.5, -0.5, 0.4), 0.0), ((-0.5, -0.5, -0.5), 0.5)):
        memory = Memory()
        batch, _ = far(0, 1.0)
        pushes = [
            float(memory.push(step, torch.full((batch.rows,), slant, dtype=torch.float64), batch))
            for step, slant in enumerate((*slants, 0.0), 1)
        ]
        assert pushes[-1] == pytest.approx(expected)


def test_a_constant_height_has_no_slant_whatever_the_weights() -> None:
    """As at the optimum, where r / beta - log(pi / pi_ref) is log Z for every answer."""
    batch, log_policy_BT = far(3, 5.0)
    weight_B = torch.rand(batch.rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_z_B = torch.arange(batch.groups, dtype=torch.float64)[batch.group_B]
    torch.testing.assert_close(
        slant_B(log_z_B, weight_B, PolicyOutput(log_policy_BT), batch), torch.zeros_like(log_z_B)
    )


def test_neither_rows_of_unknown_behaviour_nor_groups_that_are_not_as_sampled_are_pushed_up() -> None:
    objective, exact = started(), TrajectoryBalance(BETA, off_policy="exact")
    _slopes(objective, *tilted(0), 1)
    batch, log_policy_BT = tilted(1)
    assert batch.log_behavior_BT is not None
    unknown_B = torch.arange(batch.rows) == 2
    some_BT = batch.log_behavior_BT.masked_fill(unknown_B[:, None], torch.nan)
    as_sampled_G = torch.arange(batch.groups) != 1
    batch = replace(batch, log_behavior_BT=None, some_behavior_BT=some_BT, as_sampled_G=as_sampled_G)
    found_BT = _slopes(objective, batch, log_policy_BT, 2)[0]
    same_B = (found_BT == slopes(exact, batch, log_policy_BT)[0]).all(1)
    assert same_B.tolist() == (unknown_B | ~as_sampled_G[batch.group_B]).tolist()


def test_the_raw_form_is_pushed_by_as_much_more_as_all_of_it_is() -> None:
    pushes = []
    for form in ("advantage", "raw"):
        objective = TrajectoryBalance(BETA, form, off_policy="asymmetric").start()
        _slopes(objective, *tilted(0), 1)
        pushes.append(_slopes(objective, *tilted(1), 2)[0])
    torch.testing.assert_close(pushes[0] * 2 / beta, pushes[1], rtol=1e-12, atol=0)


def test_micro_batches_of_groups_and_a_memory_that_was_kept_see_what_the_whole_shows() -> None:
    whole, parts = started(), started()
    for step in (1, 2, 3):
        batch, log_policy_BT = tilted(step)
        saved_state = json.loads(json.dumps(parts.state()))
        parts = started()
        parts.restore(saved_state)
        found_BT = torch.zeros_like(log_policy_BT)
        for g in range(batch.groups):
            rows = (batch.group_B == g).nonzero()[:, 0]
            part = batch.select(rows)
            width = part.completion_BT.shape[1]
            own_BT = _slopes(parts, part, log_policy_BT[rows][:, :width], step)[0]
            found_BT[rows, :width] = own_BT * len(rows) / batch.rows
        torch.testing.assert_close(found_BT, _slopes(whole, batch, log_policy_BT, step)[0], rtol=0, atol=1e-12)


def test_a_batch_that_is_not_finite_is_forgotten() -> None:
    objective, undisturbed = started(), started()
    for form in (objective, undisturbed):
        _slopes(form, *tilted(0), 1)
    batch, log_policy_BT = tilted(1)
    _slopes(objective, batch, log_policy_BT * torch.nan, 2)
    assert float(_slopes(objective, *tilted(2), 3)[2]["push"]) == float(_slopes(undisturbed, *tilted(2), 2)[2]["push"])


def test_the_batch_after_a_step_that_was_skipped_counts_as_if_that_had_not_been() -> None:
    objective, undisturbed = started(), started()
    for step in (1, 2, 3):
        batch, log_policy_BT = tilted(step)
        _slopes(objective, batch, log_policy_BT * torch.nan, step)  # skipped: the next has the number of this one
        pushes = [float(_slopes(form, batch, log_policy_BT, step)[2]["push"]) for form in (objective, undisturbed)]
        assert pushes[0] == pushes[1]
        assert (pushes[0] > 0) == (step > 1)


def started() -> Asymmetric:
    objective = TrajectoryBalance(BETA, off_policy="asymmetric").start()
    assert isinstance(objective, Asymmetric)
    return objective


def _slopes(
    objective: Objective, batch: Batch, log_policy_BT: Tensor, step: int
) -> tuple[Tensor, float, Mapping[str, float | Tensor]]:
    leaf_BT = log_policy_BT.clone().requires_grad_()
    loss, metrics = objective(PolicyOutput(leaf_BT), batch, step)
    return torch.autograd.grad(loss, leaf_BT)[0], float(loss.detach()), metrics
