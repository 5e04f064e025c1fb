"""AdamW against its equations, clipping, master weights, and what is kept across a restart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Parameter
from toys import BETA, groups_of, llama

from tba.batch import collate
from tba.errors import UserError
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.policy.lora import LoraSettings, add_adapters
from tba.schedules import WarmupConstant, WarmupLinear
from tba.training.gradients import backward
from tba.training.optimizer import Optimizer, OptimizerSettings


def test_updates_are_those_of_the_equations_with_the_schedule_as_a_factor() -> None:
    settings = OptimizerSettings(lr=0.1, schedule=WarmupLinear(4), betas=(0.9, 0.99), weight_decay=0.01, clip_norm=None)
    parameter = Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = settings.start([parameter])
    x, m, v = parameter.detach().clone(), torch.zeros(2).double(), torch.zeros(2).double()
    for step, g in enumerate(([0.5, -1.0], [0.1, 3.0], [-2.0, 0.0]), start=1):
        parameter.grad = gradient = torch.tensor(g, dtype=torch.float64)
        assert optimizer.step(step) == pytest.approx(math.hypot(*g))
        lr = 0.1 * (1 - (step - 1) / 4)
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        x = x - lr * 0.01 * x - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach(), x, rtol=1e-12, atol=0)
        assert parameter.grad is None
        assert optimizer.rate(step) == pytest.approx(lr)


def first_moment(settings: OptimizerSettings, gradient: list[float]) -> tuple[float, torch.Tensor]:
    parameter = Parameter(torch.zeros(2))
    optimizer = settings.start([parameter])
    parameter.grad = torch.tensor(gradient)
    norm = optimizer.step(1)
    return norm, optimizer._adamw.state[parameter]["exp_avg"] / (1 - settings.betas[0])


def test_the_gradient_is_clipped_to_the_norm_and_reported_as_it_was() -> None:
    norm, moment = first_moment(OptimizerSettings(clip_norm=1.0), [3.0, 4.0])
    assert norm == 5.0
    torch.testing.assert_close(moment, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize(("clip", "gradient"), [(None, [3.0, 4.0]), (1.0, [0.3, 0.4])])
def test_without_a_limit_or_below_it_the_gradient_is_taken_as_it_is(clip: float | None, gradient: list[float]) -> None:
    _, moment = first_moment(OptimizerSettings(clip_norm=clip), gradient)
    torch.testing.assert_close(moment, torch.tensor(gradient))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments(bad: float) -> None:
    parameter = Parameter(torch.ones(3))
    optimizer = OptimizerSettings(lr=0.1).start([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step(1)
    weights = parameter.detach().clone()
    state = {key: tensor.clone() for key, tensor in optimizer._adamw.state[parameter].items()}
    parameter.grad = torch.tensor([0.0, bad, 0.0])
    assert not math.isfinite(optimizer.step(2))
    assert torch.equal(parameter, weights)
    assert all(torch.equal(tensor, state[key]) for key, tensor in optimizer._adamw.state[parameter].items())
    assert parameter.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_forgot_its_moments_goes_on_like_a_new_one_from_the_same_weights(dtype: torch.dtype) -> None:
    settings = OptimizerSettings(lr=0.1, schedule=WarmupConstant(0), clip_norm=None)
    parameter = Parameter(torch.tensor([1.0, -2.0], dtype=dtype))
    optimizer = settings.start([parameter])
    parameter.grad = torch.tensor([0.25, -3.0], dtype=dtype)
    optimizer.step(1)
    before = optimizer._masters[0].detach().clone()
    optimizer.reset_moments()
    assert torch.equal(optimizer._masters[0], before)
    parameter.grad = torch.tensor([-2.0, -0.5], dtype=dtype)
    optimizer.step(2)
    expected = before + 0.1 * torch.tensor([1.0, 1.0])  # a first step is lr against the sign, whatever the size
    torch.testing.assert_close(optimizer._masters[0].detach(), expected)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_rate_rises_with_the_updates_that_the_moments_are_of(tmp_path: Path, resumed: bool) -> None:
    parameter = Parameter(torch.zeros(1))
    optimizer = OptimizerSettings(lr=0.3).start([parameter])  # a rise over 30 updates
    rates = []
    for step in range(1, 7):
        if step == 4 and resumed:
            optimizer.save(tmp_path)
            optimizer = OptimizerSettings(lr=0.3).start([parameter])
            optimizer.load(tmp_path)
        if step == 5:
            optimizer.reset_moments()
        before, parameter.grad = parameter.item(), torch.ones(1)
        optimizer.step(step)
        rates.append(before - parameter.item())
        assert optimizer.rate(step) == pytest.approx(rates[-1], rel=1e-5)  # the first steps of AdamW are as long
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.01, 0.02], rel=1e-5)


def test_steps_too_small_for_bfloat16_add_up_in_the_float32_master() -> None:
    """One step of 1e-3 from 1.0 rounds back to 1.0 in bfloat16 (spacing 2^-8 below 1); sixteen steps do not."""
    parameter = Parameter(torch.ones(1, dtype=torch.bfloat16))
    assert torch.equal(parameter - 1e-3, parameter)
    optimizer = OptimizerSettings(lr=1e-3, schedule=WarmupConstant(0)).start([parameter])
    for step in range(1, 17):
        parameter.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.step(step)
    assert 1 - parameter.item() == pytest.approx(0.016, abs=0.002)


def test_heads_have_a_rate_of_their_own() -> None:
    body, head = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    optimizer = OptimizerSettings(lr=0.01, head_lr=0.5, schedule=WarmupConstant(0)).start([body, head], heads=[head])
    body.grad, head.grad = torch.ones(1), torch.ones(1)
    optimizer.step(1)
    assert (body.item(), head.item()) == pytest.approx((-0.01, -0.5))


def trained(optimizer: Optimizer, parameters: list[Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    settings = OptimizerSettings(lr=0.03, head_lr=0.01, weight_decay=0.1)
    through = [Parameter(torch.ones(3, 2, dtype=dtype)), Parameter(torch.ones(2, dtype=dtype))]
    optimizer = settings.start(through, heads=through[:1])
    trained(optimizer, through, range(1, 4))
    optimizer.save(tmp_path)
    resumed = [Parameter(p.detach().clone()) for p in through]
    again = settings.start(resumed, heads=resumed[:1])
    again.load(tmp_path)
    trained(optimizer, through, range(4, 7))
    trained(again, resumed, range(4, 7))
    assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))
    for master, loaded_master in zip(optimizer._masters, again._masters, strict=True):
        assert torch.equal(master, loaded_master)


def test_a_state_that_is_missing_damaged_or_of_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    parameter = Parameter(torch.ones(3))
    optimizer = OptimizerSettings().start([parameter])
    with pytest.raises(UserError, match="cannot be read"):
        optimizer.load(tmp_path)
    trained(optimizer, [parameter], range(1, 2))
    optimizer.save(tmp_path)
    with pytest.raises(UserError, match="another model"):
        OptimizerSettings().start([Parameter(torch.ones(4))]).load(tmp_path)
    with pytest.raises(UserError, match="another model"):
        OptimizerSettings().start([Parameter(torch.ones(3, dtype=torch.bfloat16))]).load(tmp_path)
    file = tmp_path / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match="cannot be read"):
        optimizer.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", 0.0), ("lr", math.nan), ("clip_norm", -1.0), ("betas", (0.9, 1.0)), ("weight_decay", -1)],
)
def test_settings_that_cannot_work_are_refused(field: str, value: object) -> None:
    with pytest.raises(UserError, match=field.replace("_", "-")):
        OptimizerSettings(**{field: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_moments_on_the_host_change_no_bit_of_an_update_nor_of_what_is_saved(
    dtype: torch.dtype, before: bool, after: bool, tmp_path: Path
) -> None:
    """Three updates, saved, loaded, three more: parameters of several sizes, one of which has no gradient at first."""

    def trained(moments: tuple[bool, bool], folder: Path) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = ((7, 5), (3,), (40, 11))
        weights = [Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]

        def update(optimizer: Optimizer, step: int) -> None:
            for i, weight in enumerate(weights):
                gradient = torch.randn(weight.shape, generator=generator).to(dtype)
                weight.grad = None if i == 1 and step == 1 else gradient
            optimizer.step(step)

        parts = [
            OptimizerSettings(lr=0.1, weight_decay=0.01, clip_norm=2.0, moments_on_host=on_host) for on_host in moments
        ]
        first = parts[0].start(weights, weights[:1])
        for step in (1, 2, 3):
            update(first, step)
        folder.mkdir()
        first.save(folder)
        second = parts[1].start(weights, weights[:1])
        second.load(folder)
        for step in (4, 5, 6):
            update(second, step)
        return [weight.detach() for weight in weights]

    expected = trained((False, False), tmp_path / "plain")
    result = trained((before, after), tmp_path / "host")
    assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))
    saved = [(tmp_path / folder / "optimizer.safetensors").read_bytes() for folder in ("plain", "host")]
    assert saved[0] == saved[1]


def test_of_moments_on_the_host_one_parameter_s_are_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [Parameter(torch.ones(4)), Parameter(torch.ones(3))]
    optimizer = OptimizerSettings(moments_on_host=True).start(weights)
    device_bytes: list[int] = []
    stepped = optimizer._adamw.step

    def step() -> None:
        device_bytes.append(sum(weight.grad is not None for weight in weights))
        stepped()

    monkeypatch.setattr(optimizer._adamw, "step", step)
    for number in (1, 2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step(number)
    assert device_bytes == [1] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_the_recurrence_it_changes_no_update_and_swapping_twice_no_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    averaged, plain = (Parameter(start.to(dtype).clone()) for _ in range(2))
    optimizer = OptimizerSettings(lr=0.05, weight_average=True).start([averaged])
    plain_optimizer = OptimizerSettings(lr=0.05).start([plain])
    expected = start.to(dtype).double()
    for step in range(1, 41):
        gradient = torch.randn(50, generator=generator).to(dtype)
        for parameter, each in ((averaged, optimizer), (plain, plain_optimizer)):
            parameter.grad = gradient.clone()
            each.step(step)
        assert torch.equal(averaged, plain)
        decay = min(0.9, (1 + step) / (10 + step))  # 2/11 after the first, 0.9 from update 80 on
        expected = decay * expected + (1 - decay) * optimizer._masters[0].detach().double()
    before = averaged.detach().clone()
    with optimizer.averages():
        torch.testing.assert_close(
            averaged.detach().double(), expected, rtol=2e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
        )
        assert not torch.equal(averaged, before)
    assert torch.equal(averaged, before)
    averaged.grad = torch.full_like(averaged, math.nan)
    optimizer.step(41)
    with optimizer.averages():  # a step that was skipped leaves it as it is
        torch.testing.assert_close(
            averaged.detach().double(), expected, rtol=2e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("then", [True, False])
def test_weights_and_averages_come_back_to_the_bit_and_the_weights_where_averages_are_no_longer_wanted(
    dtype: torch.dtype, then: bool, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = Parameter(torch.randn(50, generator=generator).to(dtype))
    optimizer = OptimizerSettings(lr=0.05, weight_average=True).start([parameter])
    gradients = torch.randn(8, 50, generator=generator).to(dtype)

    def go(of: Optimizer, steps: range) -> None:
        for step in steps:
            of.parameters[0].grad = gradients[step - 1].clone()
            of.step(step)

    go(optimizer, range(1, 5))
    optimizer.save(tmp_path)
    with optimizer.averages():
        saved = Parameter(parameter.detach().clone())  # as the model is saved
    go(optimizer, range(5, 9))
    again = OptimizerSettings(lr=0.05, weight_average=then).start([saved])
    again.load(tmp_path)
    go(again, range(5, 9))
    assert torch.equal(saved, parameter)
    if then:
        assert torch.equal(again._averages[0], optimizer._averages[0])


def test_of_adapters_the_average_is_published_and_saved_and_the_base_stays(tmp_path: Path) -> None:
    model = llama()
    add_adapters(model, LoraSettings(rank=2), torch.float32)
    policy, batch = CausalPolicy(model), collate(groups_of([4, 4]))
    optimizer = OptimizerSettings(lr=1e-2, schedule=WarmupConstant(0), weight_average=True).start(policy.parameters())
    expected = {name: tensor.clone() for name, tensor in policy.weights().items()}
    for step in range(1, 4):
        backward(policy, TrajectoryBalance(BETA), batch, step, 10**6)
        optimizer.step(step)
        decay = (1 + step) / (10 + step)
        expected = {name: decay * expected[name] + (1 - decay) * t for name, t in policy.weights().items()}
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    with optimizer.averages():
        for name, tensor in policy.weights().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)
        published = {name: tensor.clone() for name, tensor in policy.weights().items()}
        policy.save(tmp_path / "saved")
    (file,) = (tmp_path / "saved").rglob("adapter*.safetensors")
    saved = load_file(file)
    assert all(
        any(torch.equal(tensor, saved_tensor) for saved_tensor in saved.values()) for tensor in published.values()
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in policy.weights().items())
    assert any(not torch.equal(weights[name], published[name]) for name in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_update_that_the_device_decides_on_is_launched_before_the_norm_is_read_and_is_the_same(
    dtype: torch.dtype, clip_norm: float | None
) -> None:
    """As on a GPU: gradients below and above the limit, and between them one that is not finite, which changes no bit
    of weights and moments and does not count as an update.
    """
    generator = torch.Generator().manual_seed(0)
    initial_values = torch.randn(5, 7, generator=generator).to(dtype)
    gradients = [scale * torch.randn(5, 7, generator=generator).to(dtype) for scale in (0.01, 1.0, math.nan, 3.0)]
    settings = OptimizerSettings(lr=0.1, schedule=WarmupConstant(3), clip_norm=clip_norm)
    parameters = [Parameter(initial_values.clone()) for _ in range(2)]
    optimizers = [settings.start([parameter]) for parameter in parameters]
    deciding_optimizer, plain_optimizer = optimizers
    deciding_optimizer.device_decides = True
    for step, gradient in zip((1, 2, 3, 3), gradients, strict=True):
        weights_before, master = parameters[0].detach().clone(), deciding_optimizer._masters[0]
        weights_at_reading: list[torch.Tensor] = []

        def read_norm(norm: torch.Tensor, master: Parameter = master, seen: Any = weights_at_reading) -> float:
            seen.append(master.detach().clone())
            return float(norm)

        for parameter in parameters:
            parameter.grad = gradient.clone()
        norms = [deciding_optimizer.step(step, read_norm=read_norm), plain_optimizer.step(step)]
        assert torch.equal(weights_at_reading[0], master)  # it has been made
        if math.isnan(norms[0]):
            assert math.isnan(norms[1])
            assert torch.equal(parameters[0], weights_before)
        else:
            assert norms[0] == norms[1]
            assert not torch.equal(master.to(dtype), weights_before)
        assert deciding_optimizer._moment_updates == plain_optimizer._moment_updates
        for key, value in deciding_optimizer._adamw.state[master].items():
            torch.testing.assert_close(
                value, plain_optimizer._adamw.state[plain_optimizer._masters[0]][key], rtol=1e-6, atol=1e-9
            )
        torch.testing.assert_close(parameters[0], parameters[1], rtol=1e-5, atol=1e-6)
