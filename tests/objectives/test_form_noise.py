"""Where forms settle when rewards are noisy, by enumeration: the table of `lab/benchmarks/form_noise.py`."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from tests.scripts import script

from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.schedules import Constant

LINEAR = ("none", "exact", "least_variance")  # in the reward, with weights that depend on the answer alone
AS_SAMPLED = ("fresh", "fixed_9", "fixed_1")
HARDER = ("copies", "rejected", "deadline", "mixed", "again", "recorded", "top_p")


@pytest.fixture(scope="module")
def noise() -> Any:
    return script("lab/benchmarks/form_noise.py")


def cells(noise: Any, form: str, data: tuple[str, ...]) -> list[Any]:
    """All rewards and sizes of these data, save normal rewards at K = 20, which are a matter of seconds each."""
    all_cells = [
        noise.Cell(reward, d, size, form) for reward, d, size in product(noise.REWARDS, data, noise.GROUP_SIZES)
    ]
    return [c for c in all_cells if (c.reward, c.size) != ("gaussian", 20)]


@pytest.mark.parametrize("form", LINEAR)
def test_noise_does_not_move_a_form_that_is_linear_in_the_reward_on_any_data(noise: Any, form: str) -> None:
    biases = {c: c.bias for c in cells(noise, form, (*AS_SAMPLED, "distinct"))}
    assert len(biases) == 56
    assert {c: b for c, b in biases.items() if abs(b) > 1e-3} == {}


@pytest.mark.parametrize("form", LINEAR)
@pytest.mark.parametrize("data", HARDER)
def test_nor_do_copies_rejections_mixed_behaviours_repeats_of_a_group_wrong_records_and_top_p(
    noise: Any, form: str, data: str
) -> None:
    for reward, size in product(("zero_one", "mostly"), (4, 8)):
        assert abs(noise.Cell(reward, data, size, form).bias) < 1e-3


@pytest.mark.parametrize("data", HARDER)
def test_what_is_pushed_up_moves_nothing_there_either_since_it_vanishes_at_the_optimum(noise: Any, data: str) -> None:
    for reward, size in product(("zero_one", "mostly"), (4, 8)):
        assert abs(noise.Cell(reward, data, size, "asymmetric").bias) < 0.004


@pytest.mark.parametrize("form", LINEAR)
@pytest.mark.parametrize("reward", ["plus_minus", "zero_one", "world", "gaussian", "mostly"])
def test_nor_do_data_of_ten_updates_ago(noise: Any, form: str, reward: str) -> None:
    assert abs(noise.Cell(reward, "stale", 4, form).bias) < 1e-3


def test_what_earlier_batches_push_up_moves_nothing_on_data_that_are_as_recorded(noise: Any) -> None:
    assert TrajectoryBalance(Constant(0.05)).off_policy == "asymmetric"
    biases = {c: c.bias for c in cells(noise, "asymmetric", (*AS_SAMPLED, "distinct", "stale"))}
    assert len(biases) == 70
    assert {c: b for c, b in biases.items() if abs(b) > 1e-3} == {}
    for c in cells(noise, "asymmetric", ("selected",)):  # there selection itself biases, and every form alike
        assert c.bias == pytest.approx(noise.Cell(c.reward, "selected", c.size, "none").bias, abs=1e-3)


def test_it_does_push_up_while_unlikely_answers_are_worse(noise: Any) -> None:
    slants = []
    for risk in (0.9, 0.1, noise.BEST, 0.4):
        cell = noise.Cell("zero_one", "fresh", 8, "asymmetric")
        sources = cell.sources(risk)
        slants.append(noise._moments(sources, [noise._slants(s, *cell._batch(s, risk)) for s in sources])[0])
    assert slants[0] > 0.01  # the policy takes a risk too often: the unlikely safe answer is the better one
    assert slants[1] > 0.01  # too rarely: the unlikely risk is
    assert slants[2] == pytest.approx(0, abs=1e-7)
    assert slants[3] < -0.001  # risks are unlikely, and should be more so


@pytest.mark.parametrize(
    ("form", "reward", "data", "size", "bias"),
    [
        ("lowered", "plus_minus", "fresh", 4, 0.225),  # the group's lowest contains the answer's own reward
        ("lowered", "plus_minus", "fresh", 20, 0.148),
        ("lowered", "zero_one", "fresh", 4, 0.257),
        ("lowered", "world", "fresh", 4, 0.117),
        ("lowered", "plus_minus", "fixed_9", 4, 0.508),
        ("lowered", "zero_one", "fixed_1", 4, 0.652),
        ("lowered", "zero_one", "distinct", 20, -0.187),
        ("tapered", "plus_minus", "fresh", 4, 0.0),  # its weights are all 1
        ("tapered", "plus_minus", "fixed_9", 4, 0.159),  # they depend on the sign of A, and so on luck
        ("tapered", "zero_one", "fixed_1", 20, 0.612),
        ("tapered", "zero_one", "distinct", 20, 0.0),
    ],
)
def test_other_forms_are_moved_so_far(noise: Any, form: str, reward: str, data: str, size: int, bias: float) -> None:
    assert noise.Cell(reward, data, size, form).bias == pytest.approx(bias, abs=0.001)


@pytest.mark.parametrize(("reward", "bias"), [("plus_minus", 0.403), ("zero_one", 0.709), ("gaussian", 0.0)])
def test_selection_by_reward_moves_every_form_as_far_as_it_moves_the_mean_reward(
    noise: Any, reward: str, bias: float
) -> None:
    """It keeps what was lucky: among the selected the risky answer gives more. The optimum of these is found."""
    (world,) = noise.WORLDS[reward]
    means = []
    for chances in (world.risky, world.safe):
        weighted_chances = [(r, p * noise.math.exp(r)) for r, p in chances]
        means.append(sum(r * p for r, p in weighted_chances) / sum(p for _, p in weighted_chances))
    best = 1 / (1 + noise.math.exp((means[1] - means[0]) / noise.BETA))
    assert best - noise.BEST == pytest.approx(bias, abs=0.001)
    for form in ("none", "exact", "tapered", "asymmetric"):
        assert noise.Cell(reward, "selected", 8, form).bias == pytest.approx(bias, abs=0.001)


def test_lowered_without_noise_is_not_moved(noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    certain = noise.World(1.0, ((0.90, 1.0),), ((0.95, 1.0),))
    monkeypatch.setitem(noise.WORLDS, "plus_minus", (certain,))
    for data in AS_SAMPLED:
        assert abs(noise.Cell("plus_minus", data, 4, "lowered").bias) < 1e-3
