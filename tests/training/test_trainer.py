"""The trainer's step: what it changes, what it reports, when it publishes, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from toys import (
    BETA,
    TASK,
    LearnedBalance,
    Published,
    Scripted,
    groups_of,
    llama_policy,
    tabular_policy_with_heads,
    trainer_of,
)

from tba.batch import FetchedBatch, collate
from tba.errors import NonFiniteLoss, UserError
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Manifest
from tba.schedules import WarmupLinear
from tba.training.optimizer import OptimizerSettings
from tba.training.trainer import Trainer, load_batch
from tba.types import Version
from toy.policy import WEIGHT, TabularPolicy


def fetched(reward: float | None = None, versions: tuple[Version, ...] = (Version(),), seed: int = 0) -> FetchedBatch:
    groups = groups_of([4, 4], seed, versions)
    batch = collate(groups)
    if reward is not None:
        batch.reward_B[:] = reward
    return FetchedBatch(groups, batch)


def test_a_step_is_the_plain_loop_written_out(tmp_path: Path) -> None:
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path)
    for _ in range(4):
        trainer.go()

    policy, groups = llama_policy(), groups_of([5] * 12)
    adamw = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(4):
        batch = collate(groups[2 * step : 2 * step + 2])
        loss, _ = TrajectoryBalance(BETA)(policy.evaluate(batch), batch, step + 1)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adamw.step()
    weights, plain = trainer.policy.weights(), policy.weights()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_after_a_version_that_was_left_out_the_next_is_due_and_then_the_next_multiple_of_k(tmp_path: Path) -> None:
    trainer = trainer_of(TabularPolicy(TASK), TrajectoryBalance(BETA), tmp_path, weights=Published(), sync_every=3)
    due_steps = []
    for step in range(1, 10):
        trainer.step(trainer.batches.next())
        if trainer.should_publish:
            due_steps.append(step)
            if step not in (3, 4):  # as while a version is being written
                trainer.publish()
    assert due_steps == [3, 4, 5, 6, 9]


def test_weights_are_published_every_k_updates_as_they_are_then(tmp_path: Path) -> None:
    published = Published()
    manifest = Manifest(reference=Version(3, 0))
    trainer = trainer_of(
        TabularPolicy(TASK),
        TrajectoryBalance(BETA),
        tmp_path,
        weights=published,
        version=Version(3, 0),
        manifest_of=lambda version: manifest if version == Version(3, 2) else None,
    )
    snapshots = []
    for _ in range(5):
        trainer.go()
        snapshots.append(trainer.policy.weights()[WEIGHT].clone())
    assert [version for version, _, _ in published.sent] == [Version(3, 2), Version(3, 4)]
    assert [sent_manifest for _, _, sent_manifest in published.sent] == [manifest, Manifest()]
    assert torch.equal(published.sent[0][1][WEIGHT], snapshots[1])
    assert torch.equal(published.sent[1][1][WEIGHT], snapshots[3])
    assert trainer.version == Version(3, 5)
    assert trainer.published == Version(3, 4)


def test_metrics_say_what_the_step_did(tmp_path: Path) -> None:
    versions = (Version(1, 7), Version(1, 3), Version(0, 9))
    source = Scripted([fetched(versions=versions)])
    optimizer = OptimizerSettings(lr=0.1, schedule=WarmupLinear(steps=20))
    policy = TabularPolicy(TASK)
    trainer = trainer_of(
        policy,
        TrajectoryBalance(BETA),
        tmp_path,
        batches=source,
        version=Version(1, 10),
        optimizer=optimizer.start(policy.parameters()),
    )
    batch = source.fetched[0].batch
    metrics = trainer.go()
    lags = [3, 7, 11] * 2 + [3, 7]  # of 1.7, 1.3 and an earlier incarnation, seen from 1.10
    assert metrics["lag"] == pytest.approx(sum(lags) / 8)
    assert metrics["lag_max"] == 11
    assert metrics["reward"] == pytest.approx(float(batch.reward_B.mean()))
    assert metrics["tokens"] == int(batch.length_B.sum())
    assert metrics["trajectories"] == 8
    assert metrics["length"] == metrics["tokens"] / 8
    assert (metrics["truncated"], metrics["without_signal"]) == (0, 0)  # its answers came from elsewhere
    assert metrics["lr"] == pytest.approx(0.1 * 0.5)  # update 11 of 20
    assert metrics["beta"] == 0.5
    assert metrics["log_ratio"] == pytest.approx(0.0, abs=1e-6)  # the toy's policy begins as its reference
    assert metrics["grad_norm"] > 0
    assert metrics["skipped"] == 0
    assert len(trainer.groups) == 2


def test_training_lowers_the_loss_on_stale_uniform_data(tmp_path: Path) -> None:
    trainer = trainer_of(TabularPolicy(TASK), TrajectoryBalance(BETA), tmp_path)
    losses = [trainer.go()["loss"] for _ in range(60)]  # each group ten times
    assert sum(losses[-6:]) < 0.1 * sum(losses[:6])


def test_a_step_that_is_not_finite_is_skipped_and_counted_and_a_good_one_starts_the_count_anew(tmp_path: Path) -> None:
    script = [fetched(), fetched(math.nan), fetched(math.inf), fetched(), fetched(math.nan), fetched(math.nan)]
    trainer = trainer_of(TabularPolicy(TASK), TrajectoryBalance(BETA), tmp_path, batches=Scripted(script))
    versions, skipped, weights = [], [], []
    for _ in range(len(script)):
        skipped.append(trainer.go()["skipped"])
        versions.append(trainer.version.step)
        weights.append(trainer.policy.weights()[WEIGHT].clone())
    assert versions == [1, 1, 1, 2, 2, 2]
    assert skipped == [0, 1, 2, 2, 3, 4]
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[3], weights[5])
    assert not torch.equal(weights[2], weights[3])
    assert torch.isfinite(weights[5]).all()


def test_the_third_in_a_row_saves_its_batch_and_ends_the_run_with_the_weights_untouched(tmp_path: Path) -> None:
    bad = [fetched(math.nan, seed=seed) for seed in range(3)]
    policy = TabularPolicy(TASK)
    before = policy.weights()[WEIGHT].clone()
    trainer = trainer_of(policy, TrajectoryBalance(BETA), tmp_path, batches=Scripted(bad.copy()))
    trainer.go()
    trainer.go()
    with pytest.raises(NonFiniteLoss, match="3 steps in a row") as caught:
        trainer.go()
    (saved,) = tmp_path.glob("*.safetensors")
    assert str(saved) in str(caught.value)
    assert torch.equal(load_batch(saved).completion_BT, bad[2].batch.completion_BT)
    assert torch.equal(policy.weights()[WEIGHT], before)


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_too(tmp_path: Path) -> None:
    policy = TabularPolicy(TASK)
    policy.logits_QNV.register_hook(lambda gradient: gradient * math.inf)
    trainer = trainer_of(policy, TrajectoryBalance(BETA), tmp_path)
    before = policy.weights()[WEIGHT].clone()
    metrics = trainer.go()
    assert math.isfinite(metrics["loss"])
    assert not math.isfinite(metrics["grad_norm"])
    assert metrics["skipped"] == 1
    assert torch.equal(policy.weights()[WEIGHT], before)
    assert trainer.version == Version()


def test_the_size_of_a_pass_does_not_change_what_is_learned(tmp_path: Path) -> None:
    whole, cut = (
        trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path, max_tokens_per_pass=tokens)
        for tokens in (10**6, 8)
    )
    for _ in range(3):
        a, b = whole.go(), cut.go()
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("max_tokens", [10_000, 40, 7])  # all at once, by groups, by rows
def test_what_the_policy_gave_each_token_of_the_last_batch_can_be_asked_for(max_tokens: int, tmp_path: Path) -> None:
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path, max_tokens_per_pass=max_tokens)
    before, batch = llama_policy(), fetched(seed=3)
    trainer.step(batch)
    trajectories = [t for group in batch.groups for t in group.trajectories]
    with torch.no_grad():
        log_policy_BT = before.evaluate(batch.batch).log_policy_BT
    for logs, log_policy_T, t in zip(trainer.log_policy(trajectories), log_policy_BT, trajectories, strict=True):
        assert logs == pytest.approx(log_policy_T[: t.length].tolist(), abs=1e-5)
    assert trainer.log_policy(trajectories[5:2:-1]) == trainer.log_policy(trajectories)[5:2:-1]


def test_an_objective_that_needs_a_head_the_policy_lacks_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LearnedBalance needs log_z and value of the policy, but TabularPolicy"):
        trainer_of(TabularPolicy(TASK), LearnedBalance(), tmp_path)
    trainer: Trainer = trainer_of(tabular_policy_with_heads(), LearnedBalance(), tmp_path)
    assert math.isfinite(trainer.go()["loss"])


def test_data_without_behaviour_log_probabilities_is_refused_when_the_objective_needs_them(tmp_path: Path) -> None:
    trainer = trainer_of(TabularPolicy(TASK), Reinforce(BETA, penalised="behavior"), tmp_path)
    with pytest.raises(UserError, match="Reinforce needs the log-probabilities of the behaviour"):
        trainer.go()


def test_who_reads_the_weights_is_waited_for_before_they_change(tmp_path: Path) -> None:
    published, seen = Published(), []
    policy = TabularPolicy(TASK)

    def settle() -> None:
        seen.append((len(published.sent), policy.weights()[WEIGHT].clone()))

    trainer = trainer_of(
        policy, TrajectoryBalance(BETA), tmp_path, weights=published, wait_for_readers=settle, sync_every=1
    )
    for _ in range(3):
        trainer.go()
    assert [count for count, _ in seen] == [0, 1, 2]  # each before the update that follows it
    for (_, weights, _), (_, as_settled) in zip(published.sent, seen[1:], strict=False):
        assert torch.equal(weights[WEIGHT], as_settled)


def test_steps_that_are_read_after_the_next_has_begun_are_the_same_and_one_that_is_not_finite_is_none(
    tmp_path: Path,
) -> None:
    """The third of five batches has a reward that is not a number."""
    batches = [fetched(math.nan if i == 2 else None, seed=i) for i in range(5)]
    trainers = [trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path) for _ in range(2)]
    late, plain = trainers
    for trainer in trainers:
        trainer.optimizer.device_decides = True  # as on a GPU
    metrics, pending_step = [], None
    for batch in batches:
        next_step = late.begin(batch)
        if pending_step is not None:
            metrics.append(late.finish(pending_step))
        late.launch(next_step)
        pending_step = next_step
    assert pending_step is not None
    metrics.append(late.finish(pending_step))
    expected_metrics = [plain.step(batch) for batch in batches]
    assert late.version == plain.version == Version(0, 4)
    assert late.skipped == plain.skipped == 1
    weights, expected_weights = late.policy.weights(), plain.policy.weights()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    clock = {"waiting_seconds", "in_flight_seconds"}
    for i, (late_metrics, plain_metrics) in enumerate(zip(metrics, expected_metrics, strict=True)):
        # the lag of the fourth batch counts the update before it, which was not known then to be none
        unequal_names = clock | ({"lag", "lag_max"} if i == 3 else set())
        assert late_metrics.keys() == plain_metrics.keys()
        for name in late_metrics.keys() - unequal_names:
            assert late_metrics[name] == pytest.approx(plain_metrics[name], nan_ok=True, rel=1e-6), (i, name)
