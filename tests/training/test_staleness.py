"""How stale a batch is, against numbers that can be worked out on paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import BETA, TASK, Scripted, groups_of, llama_policy, trainer_of

from tba.batch import Batch, FetchedBatch, collate
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import PolicyOutput
from tba.training.gradients import backward
from tba.training.staleness import Staleness, effective_share, nearest_rank_quantile
from tba.training.trainer import ages
from tba.types import Group, Sampling, Trajectory, Version
from toy.engine import sample_groups, tabular_prompts
from toy.policy import TabularPolicy

LOG_TWO = math.log(2)


def batch_of(
    log_mu: Sequence[Sequence[float] | None], reward: Sequence[float], group: Sequence[int], width: int = 2
) -> Batch:
    """Rows of `width` tokens whose reference gives every token log-probability 0; None: it came without log mu."""
    rows, groups = len(log_mu), max(group) + 1
    behavior_BT = torch.tensor([[math.nan] * width if row is None else list(row) for row in log_mu])
    every = all(row is not None for row in log_mu)
    return Batch(
        prompt_GP=torch.zeros(groups, 1, dtype=torch.int64),
        prompt_length_G=torch.ones(groups, dtype=torch.int64),
        completion_BT=torch.zeros(rows, width, dtype=torch.int64),
        length_B=torch.full((rows,), width),
        mask_BT=torch.ones(rows, width, dtype=torch.bool),
        log_reference_BT=torch.zeros(rows, width),
        reward_B=torch.tensor(reward),
        group_B=torch.tensor(group),
        log_behavior_BT=behavior_BT if every else None,
        some_behavior_BT=None if every else behavior_BT,
    )


def signals(batch: Batch, log_pi: Sequence[Sequence[float]], beta: float | None = None) -> dict[str, float]:
    staleness = Staleness()
    staleness.add(PolicyOutput(torch.tensor(log_pi)), batch)
    return {name: float(value) for name, value in staleness.metrics(beta).items()}


def test_two_answers_one_twice_and_one_half_as_likely_as_when_sampled() -> None:
    batch = batch_of([[-1.0, -1.0], [-1.0, -1.0]], [0.0, 1.0], [0, 0])
    metrics = signals(batch, [[-1.0, -1.0 + LOG_TWO], [-1.0 - LOG_TWO, -1.0]])
    assert metrics["off_policy"] == pytest.approx(0.0, abs=1e-6)
    assert (metrics["off_policy_p05"], metrics["off_policy_p95"]) == pytest.approx((-LOG_TWO, LOG_TWO))
    assert metrics["off_policy_token"] == pytest.approx(0.0, abs=1e-6)
    assert (metrics["off_policy_token_p05"], metrics["off_policy_token_p95"]) == pytest.approx((-LOG_TWO, LOG_TWO))
    assert metrics["ess"] == pytest.approx((2 + 0.5) ** 2 / (2 * (4 + 0.25)))
    assert metrics["behavior_share"] == 1
    assert "residual_spread" not in metrics  # it takes a beta


def test_where_the_policy_is_the_behaviour_nothing_is_off_policy_and_every_row_counts() -> None:
    log_mu = [[-0.5, -2.0], [-3.0, -0.1], [-1.0, -1.0]]
    metrics = signals(batch_of(log_mu, [0.0, 1.0, 1.0], [0, 0, 0]), log_mu)
    names = ("off_policy", "off_policy_p05", "off_policy_p95", "off_policy_token")
    assert [metrics[name] for name in names] == [0.0] * 4
    assert metrics["ess"] == pytest.approx(1.0)


def test_off_policy_is_the_divergence_from_the_behaviour_where_the_rows_are_as_frequent_as_it_has_them() -> None:
    mu, pi = np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.2, 0.6])
    rows = [0, 0, 1, 2]  # of one token each
    batch = batch_of([[float(np.log(mu[i]))] for i in rows], [0.0] * 4, [0] * 4, width=1)
    metrics = signals(batch, [[float(np.log(pi[i]))] for i in rows])
    assert metrics["off_policy"] == pytest.approx(float((mu * np.log(mu / pi)).sum()))
    assert metrics["ess"] == pytest.approx(1 / float((pi**2 / mu).sum()))  # 1 / (1 + chi-squared)


def test_only_rows_with_a_behaviour_are_asked_how_far_it_is() -> None:
    whole = batch_of([[-1.0, -1.0], [-1.0, -2.0]], [0.0, 1.0], [0, 0])
    log_pi = [[-1.5, -1.0], [-1.0, -1.0]]
    mixed = batch_of([[-1.0, -1.0], None, [-1.0, -2.0], None], [0.0, 5.0, 1.0, 5.0], [0, 0, 0, 0])
    few, all_of_them = signals(mixed, [log_pi[0], [-9.0, -9.0], log_pi[1], [-8.0, -8.0]]), signals(whole, log_pi)
    assert few.pop("behavior_share") == 0.5
    assert all_of_them.pop("behavior_share") == 1.0
    assert few == all_of_them
    none = batch_of([None, None], [0.0, 1.0], [0, 0])
    assert signals(none, log_pi) == {"behavior_share": 0.0}


def test_rows_of_the_present_weights_show_the_engine_and_older_ones_how_far_an_update_goes() -> None:
    log_mu = [[-1.0, -2.0], [-1.0, -1.0], None, [-1.0, -1.0], [-1.0, -1.0]]
    log_pi = [[-1.1, -1.8], [-1.3, -1.0], [-5.0, -5.0], [-1.5, -1.3], [-9.0, -9.0]]
    batch = replace(batch_of(log_mu, [0.0] * 5, [0, 0, 0, 1, 1]), lag_B=torch.tensor([0, 0, 0, 4, -1]))
    expected = {
        "mismatch": (0.1 + 0.2 + 0.3 + 0.0) / 4,
        "mismatch_answer": (abs(0.1 - 0.2) + 0.3) / 2,
        "fresh_share": 2 / 5,
        "drift": (0.5 + 0.3) / (2 * 4),
    }
    whole = signals(batch, log_pi)
    in_parts = Staleness()
    for rows in ([0, 1, 2], [3, 4]):
        in_parts.add(PolicyOutput(torch.tensor(log_pi)[rows]), batch.select(torch.tensor(rows)))
    for metrics in (whole, in_parts.metrics()):
        assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, abs=1e-6)
    older = signals(replace(batch, lag_B=torch.full((5,), -1)), log_pi)
    assert older["fresh_share"] == 0
    assert not {"mismatch", "drift"} & older.keys()


def test_the_residual_spreads_as_the_rewards_do_at_the_reference_and_not_at_all_in_balance() -> None:
    batch = batch_of([[0.0, 0.0]] * 4, [0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1])
    reference = signals(batch, [[0.0, 0.0]] * 4, beta=0.25)
    assert reference["residual_spread"] == pytest.approx(math.sqrt(4 * 0.25 / 2) / 0.25)  # 4 of (1/2)^2, B - G = 2
    assert reference["residual_relative"] == pytest.approx(1.0)
    # log(pi / pi_ref) = r / beta - log Z, whatever log Z is in a group
    balance = signals(batch, [[-1.0, 0.0], [2.0, 1.0], [0.0, -9.0], [-2.0, -3.0]], beta=0.25)
    assert balance["residual_spread"] == pytest.approx(0.0, abs=1e-5)
    beyond = signals(batch, [[0.0, 0.0], [4.0, 8.0], [0.0, 0.0], [6.0, 6.0]], beta=0.25)
    assert beyond["residual_relative"] == pytest.approx(
        2.0
    )  # 12 nats where 4 are balance: as far off as at first, twice
    same = signals(batch_of([[0.0, 0.0]] * 2, [1.0, 1.0], [0, 0]), [[1.0, 0.0], [0.0, 0.0]], beta=0.5)
    assert same["residual_spread"] == pytest.approx(math.sqrt(0.5))
    assert math.isnan(same["residual_relative"])  # the rewards do not vary


def test_groups_of_one_row_have_no_residual_to_spread() -> None:
    metrics = signals(batch_of([[0.0, 0.0]] * 2, [0.0, 1.0], [0, 1]), [[0.0, 0.0]] * 2, beta=0.5)
    assert "residual_spread" not in metrics


@given(st.lists(st.floats(-300, 300), min_size=1, max_size=30))
def test_the_effective_share_is_between_one_row_and_all_however_far_the_weights_are_apart(log_w: list[float]) -> None:
    share = float(effective_share(torch.tensor(log_w, dtype=torch.float64)))
    assert 1 / len(log_w) - 1e-9 <= share <= 1 + 1e-9
    assert float(effective_share(torch.tensor([log_w[0]] * 7))) == pytest.approx(1.0)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=60), st.sampled_from([0.05, 0.5, 0.95]))
def test_the_quantile_is_the_smallest_value_with_so_many_at_or_below_it(values: list[int], share: float) -> None:
    quantile = float(nearest_rank_quantile(torch.tensor(values, dtype=torch.float64), share))
    least = math.ceil(share * len(values) - 1e-9)
    assert sum(v <= quantile for v in values) >= least
    assert sum(v < quantile for v in values) < max(1, least)


def test_quantiles_are_bounded_and_means_are_not() -> None:
    metrics = signals(batch_of([[0.0, 0.0]] * 2, [0.0, 1.0], [0, 0]), [[-300.0, 0.0], [0.0, 0.0]])
    assert metrics["off_policy_p95"] == 20.0
    assert metrics["off_policy"] == 150.0
    assert metrics["ess"] == pytest.approx(0.5)


def test_the_same_is_said_however_a_batch_is_cut() -> None:
    groups, policy = groups_of([5, 3, 4]), llama_policy()
    groups = [Group.of([with_behavior(t, i) for i, t in enumerate(g.trajectories)]) for g in groups]
    batch, results = collate(groups), []
    for max_tokens in (10**6, 40, 8):  # whole, by groups, by slices
        staleness = Staleness()
        backward(policy, TrajectoryBalance(BETA), batch, 1, max_tokens, staleness.add)
        results.append({name: float(value) for name, value in staleness.metrics(BETA(1)).items()})
    assert results[1] == pytest.approx(results[0], rel=1e-4, abs=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-4, abs=1e-5)
    assert results[0]["behavior_share"] == 9 / 12


def with_behavior(t: Trajectory, row: int) -> Trajectory:
    """Three in four have log-probabilities of the behaviour."""
    log_behavior = np.full(t.length, -1.0 - 0.1 * row, np.float32) if row != 2 else None
    return replace(t, completion=replace(t.completion, log_behavior=log_behavior))


def test_a_step_on_its_own_samples_is_on_policy_and_on_anothers_is_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    groups = sample_groups(TASK, tabular_prompts(TASK), 64, Sampling(), rng)
    source = Scripted([FetchedBatch(groups, collate(groups))] * 12)
    trainer = trainer_of(TabularPolicy(TASK), TrajectoryBalance(BETA), tmp_path, batches=source)
    metrics = [trainer.go() for _ in range(12)]
    assert metrics[0]["off_policy"] == pytest.approx(0.0, abs=1e-5)
    assert metrics[0]["ess"] == pytest.approx(1.0, abs=1e-5)
    assert metrics[0]["residual_relative"] == pytest.approx(1.0, abs=1e-5)
    ess, residual = ([m[name] for m in metrics] for name in ("ess", "residual_relative"))
    assert all(later < earlier for earlier, later in itertools.pairwise(ess))
    assert all(later < earlier for earlier, later in itertools.pairwise(residual))


def test_seconds_are_in_flight_up_to_the_journal_and_waiting_from_there() -> None:
    (group,) = groups_of([4], versions=(Version(),))
    trajectories = [
        replace(group.trajectories[0], created=100.0, provenance={"seconds": 2.5}),
        replace(group.trajectories[1], created=104.0, provenance={"seconds": 0.5}),
        replace(group.trajectories[2], created=130.0),  # without a duration, and by its clock of the future
        group.trajectories[3],  # from elsewhere
    ]
    assert ages(trajectories, 110.0) == {"in_flight_seconds": 1.5, "waiting_seconds": (10 + 6 + 0) / 3}
    assert ages(trajectories[3:], 110.0) == {}
