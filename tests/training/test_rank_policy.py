"""Several ranks are one trainer: the same weights after the same steps, whatever is dealt to whom.

The other ranks are forked from this process, which is rank 0: nothing is imported anew.
"""

from __future__ import annotations

import filecmp
import gc
import os
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import ranks_of
from safetensors.torch import load_file
from toys import BETA, TASK, ByHand, LearnedBalance, Published, Recycled, Sampled, groups_of, llama, llama_policy
from transformers import AutoModelForCausalLM

from lanes import open_lane
from tba.batch import collate, deal
from tba.device_to_host import HostCopies
from tba.errors import DeadlineExceeded, PartFailed
from tba.objectives.distil import Distil
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.policy.lora import LoraSettings, add_adapters
from tba.protocols import Manifest, Objective
from tba.sharding import gather_rows, row_range
from tba.training.checkpoint import Checkpoint, save_checkpoint
from tba.training.optimizer import Optimizer, OptimizerSettings
from tba.training.ranks.messages import RankCommand, Ranks
from tba.training.ranks.policy import Follower, Rank0Optimizer, Rank0Policy
from tba.training.trainer import Trainer
from tba.types import Version
from tba.weights.directory import PublishSettings, WeightDirectory

WHOLE, BY_GROUPS, BY_SLICES = 10**6, 30, 25  # tokens of a pass; the groups below have up to 40
SETTINGS = OptimizerSettings(lr=1e-3)
HEADS = ("log_z", "value")
SIZES = [5, 1, 8, 3, 6, 4, 2]  # B = 7, ragged


def trainer_of(policy: object, optimizer: Optimizer, objective: Objective, path: Path, limit: int) -> ByHand:
    return ByHand(
        policy=policy,
        objective=objective,
        batches=Sampled(Recycled(groups_of(SIZES * 3)), len(SIZES), 5),
        weights=Published(),
        optimizer=optimizer,
        sync_every=5,
        max_tokens_per_pass=limit,
        directory=path,
        ranks=policy.ranks.count if isinstance(policy, Rank0Policy) else 1,
    )


def alone(objective: Objective, path: Path, limit: int = WHOLE, saved: Checkpoint | None = None) -> ByHand:
    """One process and no shards."""
    policy = llama_policy(heads=HEADS)
    optimizer = SETTINGS.start(policy.parameters(), list(policy.heads.parameters()))
    if saved is not None:
        policy.load(load_file(saved.path / "model.safetensors"))
        saved.load_heads(policy.heads)
        optimizer.load(saved.path)
    return trainer_of(policy, optimizer, objective, path, limit)


def spread(
    ranks: Ranks,
    objective: Objective,
    path: Path,
    limit: int,
    saved: Checkpoint | None = None,
    compute: torch.dtype = torch.float32,
) -> ByHand:
    """The same over `ranks`, of which this process is the first."""
    policy = shard_of(ranks, saved, compute)
    optimizer = Rank0Optimizer(ranks, SETTINGS, policy.parameters(), list(policy.heads.parameters()))
    if saved is not None:
        optimizer.load(saved.path)
    return trainer_of(Rank0Policy(policy, ranks, limit), optimizer, objective, path, limit)


def follow(ranks: Ranks, limit: int, saved: Checkpoint | None = None) -> None:
    """What the other ranks do meanwhile."""
    policy = shard_of(ranks, saved)
    optimizer = SETTINGS.start(policy.parameters(), list(policy.heads.parameters()))
    if saved is not None:
        optimizer.load(saved.path)
    Follower(policy, optimizer, ranks, limit).follow()


def shard_of(ranks: Ranks, saved: Checkpoint | None, compute: torch.dtype = torch.float32) -> CausalPolicy:
    policy = llama_policy(heads=HEADS)
    policy.shard(ranks.sharding(compute))
    if saved is not None:
        policy.load(load_file(saved.path / "model.safetensors"))
        saved.load_heads(policy.heads)
    return policy


def rounding(trainer: Trainer, steps: int) -> float:
    """By how much float32 lets weights differ after so many steps of Adam, which divides each gradient by its own size.

    A gradient is a sum over n tokens and is right to eps * sqrt(n) of the usual size. Of N weights the least one's is
    an N-th of that, so its move of one learning rate is right to N times as much. A lost or doubled share of a
    gradient turns some of them round: two learning rates, tens of times what is let pass here.
    """
    weights = sum(tensor.numel() for _, tensor in trainer.policy.weights().items())
    tokens = sum(SIZES) * TASK.length
    return steps * SETTINGS.lr * float(torch.finfo(torch.float32).eps) * tokens**0.5 * weights


def difference(trainer: Trainer, its: Trainer) -> float:
    """The largest of any weight; a led policy's come one after the other."""
    weights, other_weights = (
        trainer.policy.weights(),
        {name: tensor.clone() for name, tensor in its.policy.weights().items()},
    )
    assert weights.keys() == other_weights.keys()
    return max(float((weights[name] - other_weights[name]).abs().max()) for name in weights)


def step_both(single: Trainer, several: Trainer, steps: int) -> None:
    for _ in range(steps):
        expected, metrics = single.go(), several.go()
        for name in ("loss", "grad_norm", "log_ratio", "reward", "entropy"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def checkpoint(trainer: Trainer, folder: Path) -> Checkpoint:
    policy = trainer.policy
    return save_checkpoint(
        folder, trainer.version, policy.save, trainer.optimizer, heads=policy.heads
    )  # fmt: skip


def test_two_ranks_are_one_for_any_objective_and_what_they_saved_goes_on_with_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def life(ranks: Ranks) -> None:
        for limit in (WHOLE, BY_GROUPS, BY_SLICES):
            follow(ranks, limit)
        follow(ranks, WHOLE, Checkpoint.load(folder / "step-5"))

    with ranks_of(2, tmp_path / "store", life) as ranks:
        balance = TrajectoryBalance(BETA)
        single, two = alone(balance, tmp_path), spread(ranks, balance, tmp_path, WHOLE)
        step_both(single, two, 5)
        assert difference(single, two) < rounding(single, 5)
        weights, its = single.weights.sent[-1][1], two.weights.sent[-1][1]
        assert max(float((weights[name] - its[name]).abs().max()) for name in weights) < rounding(
            single, 5
        )  # as published
        saved = checkpoint(two, folder)
        saved.verify()
        ranks.broadcast("end")

        for objective, limit in ((balance, BY_GROUPS), (LearnedBalance(), BY_SLICES)):
            single, two = alone(objective, tmp_path, limit), spread(ranks, objective, tmp_path, limit)
            step_both(single, two, 2)
            assert difference(single, two) < rounding(single, 2)
            ranks.broadcast("end")

        resumed, again = alone(balance, tmp_path, saved=saved), spread(ranks, balance, tmp_path, WHOLE, saved)
        step_both(resumed, again, 1)
        assert difference(resumed, again) < rounding(resumed, 1)
        ranks.broadcast("end")

    named = AutoModelForCausalLM.from_pretrained(saved.path).state_dict()  # any program can read it
    written = load_file(saved.path / "model.safetensors")
    assert all(torch.equal(named[name], tensor) for name, tensor in written.items())


def test_two_ranks_learn_a_teacher_s_top_tokens_as_one_does(tmp_path: Path) -> None:
    def life(ranks: Ranks) -> None:
        for limit in (BY_GROUPS, BY_SLICES):
            follow(ranks, limit)

    with ranks_of(2, tmp_path / "store", life) as ranks:
        for objective, limit in ((Distil(), BY_GROUPS), (Distil("js", loss_aggregation="token"), BY_SLICES)):
            single, two = alone(objective, tmp_path, limit), spread(ranks, objective, tmp_path, limit)
            for trainer in (single, two):
                trainer.batches = Sampled(Recycled(groups_of(SIZES * 3, top=2)), len(SIZES), 5)
            step_both(single, two, 2)
            assert difference(single, two) < rounding(single, 2)
            ranks.broadcast("end")


def test_seven_groups_on_three_ranks_end_as_on_one_also_when_a_rank_gets_none(tmp_path: Path) -> None:
    def life(ranks: Ranks) -> None:
        follow(ranks, WHOLE)

    with ranks_of(3, tmp_path / "store", life) as ranks:
        balance = TrajectoryBalance(BETA)
        single, three = alone(balance, tmp_path), spread(ranks, balance, tmp_path, WHOLE)
        step_both(single, three, 2)
        for trainer in (single, three):
            trainer.batches = Sampled(Recycled(groups_of([4, 4])), 2, 4)  # for three
        step_both(single, three, 2)
        assert difference(single, three) < rounding(single, 4)
        ranks.broadcast("end")


def test_adapters_over_two_ranks_are_those_of_one_and_are_saved_merged(tmp_path: Path) -> None:
    balance = TrajectoryBalance(BETA)

    def adapted() -> CausalPolicy:
        return CausalPolicy(add_adapters(llama(), LoraSettings(rank=3)))

    def life(ranks: Ranks) -> None:
        policy = adapted()
        policy.shard(ranks.sharding(torch.float32))
        Follower(policy, SETTINGS.start(policy.parameters()), ranks, WHOLE).follow()

    with ranks_of(2, tmp_path / "store", life) as ranks:
        policy = adapted()
        single = trainer_of(policy, SETTINGS.start(policy.parameters()), balance, tmp_path, WHOLE)
        sharded_policy = adapted()
        sharded_policy.shard(ranks.sharding(torch.float32))
        optimizer = Rank0Optimizer(ranks, SETTINGS, sharded_policy.parameters(), [])
        two = trainer_of(Rank0Policy(sharded_policy, ranks, WHOLE), optimizer, balance, tmp_path, WHOLE)
        step_both(single, two, 3)
        assert difference(single, two) < rounding(single, 3)
        two.policy.save(tmp_path / "two")
        ranks.broadcast("end")
    policy.save(tmp_path / "one")
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        tensors, its = (load_file(tmp_path / folder / name) for folder in ("one", "two"))
        assert tensors.keys() == its.keys()
        assert max(float((tensors[name] - its[name]).abs().max()) for name in tensors) < rounding(single, 3)
    merged = CausalPolicy(AutoModelForCausalLM.from_pretrained(tmp_path / "two"))
    batch = collate(groups_of(SIZES))
    expected = policy.evaluate(batch).log_policy_BT
    torch.testing.assert_close(merged.evaluate(batch).log_policy_BT, expected, rtol=0, atol=1e-4)


def test_weights_are_cast_before_they_are_gathered_and_have_the_bits_of_casting_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def counted(rows: torch.Tensor, shape: Sequence[int], group: Any) -> torch.Tensor | None:
        sent.append(rows.nbytes)
        return gather_rows(rows, shape, group)

    monkeypatch.setattr("tba.training.ranks.weights.gather_rows", counted)

    def life(ranks: Ranks) -> None:
        follow(ranks, WHOLE)
        assert sum(sent) > 0

    with ranks_of(2, tmp_path / "store", life) as ranks:
        trained = shard_of(ranks, None)
        led = Rank0Policy(trained, ranks, WHOLE, torch.bfloat16)
        directory = WeightDirectory(tmp_path / "weights", dtype=torch.bfloat16)
        directory.publish(led.weights(), Version(), Manifest())
        ranks.broadcast("end")
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in llama_policy().weights().items()}
    weights = directory.at(Version()).read()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    whole = sum(tensor.nbytes for tensor in expected.values())
    assert whole / 2 <= sum(sent) <= whole / 2 + max(t[:1].nbytes for t in expected.values())  # this rank's half


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("share", "whole"), [(0.01, False), (0.9, True)], ids=["few", "most"])
def test_of_changes_ranks_send_what_is_written_and_the_file_is_the_one_that_gathering_all_gave(
    count: int, share: float, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = dist.send

    def counted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> None:
        sent.append(tensor.nbytes)
        send(tensor, *arguments, **named)

    def counted_rows(rows: torch.Tensor, shape: Sequence[int], group: Any) -> torch.Tensor | None:
        sent.append(rows.nbytes)
        return gather_rows(rows, shape, group)

    monkeypatch.setattr("torch.distributed.send", counted)
    monkeypatch.setattr("tba.training.ranks.weights.gather_rows", counted_rows)

    def life(ranks: Ranks) -> None:
        follow(ranks, WHOLE)
        (tmp_path / f"sent-{ranks.rank}").write_text(str(sum(sent)))

    def published(weights: Callable[[], Mapping[str, torch.Tensor]], to: str, step: int) -> dict[str, torch.Tensor]:
        directories[to].publish(weights(), Version(0, step), Manifest())
        return load_file(directories[to].file(Version(0, step)))

    kinds = {"dtype": torch.bfloat16, "settings": PublishSettings(full_version_every=2)}
    directories = {to: WeightDirectory(tmp_path / to, **kinds) for to in ("ranks", "one")}
    before = llama_policy().weights()
    torch.manual_seed(1)
    after = {name: torch.where(torch.rand(t.shape) < share, t + 1, t) for name, t in before.items()}
    with ranks_of(count, tmp_path / "store", life) as ranks:
        led = Rank0Policy(shard_of(ranks, None), ranks, WHOLE, torch.bfloat16)
        first_file = published(led.weights, "ranks", 0)
        led.load(after)
        changes = published(led.weights, "ranks", 1)
        ranks.broadcast("end")
    published(lambda: before, "one", 0)
    published(lambda: after, "one", 1)
    single_file, several = (directories[to].file(Version(0, 1)) for to in ("one", "ranks"))
    assert filecmp.cmp(single_file, several, shallow=False)

    rows = {name: len(tensor) for name, tensor in before.items()}
    for rank in range(1, count):
        row_slices = {name: slice(*row_range(n, rank, count)) for name, n in rows.items()}
        expected = 0
        for name, tensor in first_file.items():
            own = tensor[row_slices[name]]
            changed = int((own != after[name].bfloat16()[row_slices[name]]).sum())
            # the whole version, and then rows of a whole tensor, or an index and a number for each that has changed
            expected += own.nbytes + (own.nbytes if name in changes else changed * (4 + 2))
        assert int((tmp_path / f"sent-{rank}").read_text()) == expected
    assert sum(name in changes for name in rows) == (len(rows) if whole else 0)
    written = sum(tensor.nbytes for tensor in changes.values())
    assert written < 0.1 * sum(tensor.nbytes for tensor in first_file.values()) or whole


@pytest.mark.parametrize("limit", [WHOLE, BY_GROUPS, BY_SLICES], ids=["whole", "by groups", "by slices"])
def test_one_process_in_bfloat16_is_one_rank_of_shards_to_the_bit(limit: int, tmp_path: Path) -> None:
    """Its weights are rounded once an update, and gradients are added up in float32, as FSDP does it."""
    balance = TrajectoryBalance(BETA)
    low = llama_policy(heads=HEADS, compute=torch.bfloat16)
    single = trainer_of(low, SETTINGS.start(low.parameters(), list(low.heads.parameters())), balance, tmp_path, limit)
    with ranks_of(1, tmp_path / "store", lambda ranks: None) as ranks:
        sharded = spread(ranks, balance, tmp_path, limit, compute=torch.bfloat16)
        for _ in range(2):
            assert single.go()["grad_norm"] == sharded.go()["grad_norm"]
        sharded_weights = dict(sharded.policy._stream_weights(everything=True).items())
    weights = single.policy.weights()
    assert weights.keys() == sharded_weights.keys()
    assert all(
        torch.equal(tensor, sharded_weights[name]) and tensor.dtype == torch.float32 for name, tensor in weights.items()
    )
    assert {p.dtype for p in low.model.parameters()} == {torch.bfloat16}
    assert all(p.grad is None for p in low.model.parameters())

    saved = checkpoint(single, tmp_path / "checkpoints")
    assert all(torch.equal(t, weights[name]) for name, t in load_file(saved.path / "model.safetensors").items())
    again = llama_policy(heads=HEADS, compute=torch.bfloat16)
    again.load(load_file(saved.path / "model.safetensors"))
    batch = collate(groups_of(SIZES))
    assert torch.equal(again.evaluate(batch).log_policy_BT, low.evaluate(batch).log_policy_BT)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("full_version_every", [1, 2], ids=["whole", "changes"])
def test_ranks_that_copy_their_rows_go_on_while_the_files_are_written_which_are_those_of_one(
    count: int, full_version_every: int, tmp_path: Path
) -> None:
    """As on GPUs; the files are written only when the next step is over."""

    def life(ranks: Ranks) -> None:
        policy = shard_of(ranks, None, torch.bfloat16)
        optimizer = SETTINGS.start(policy.parameters(), list(policy.heads.parameters()))
        Follower(policy, optimizer, ranks, WHOLE, copies=HostCopies(open_lane())).follow()

    settings = PublishSettings(full_version_every)
    directory = WeightDirectory(tmp_path / "ranks", settings=settings, dtype=torch.bfloat16)
    plain = WeightDirectory(tmp_path / "one", settings=settings, dtype=torch.bfloat16)
    with ranks_of(count, tmp_path / "store", life) as ranks:
        trainer = spread(ranks, TrajectoryBalance(BETA), tmp_path, WHOLE, compute=torch.bfloat16)
        led = trainer.policy
        assert isinstance(led, Rank0Policy)
        led.published_dtype, led.copies = torch.bfloat16, HostCopies(open_lane())
        for version in (Version(0, 0), Version(0, 1)):
            whole = {name: tensor.clone() for name, tensor in led._stream_weights(everything=True).items()}
            leaving = led.weights()
            assert leaving.hold()
            trainer.go()
            directory.publish(leaving, version, Manifest())
            plain.publish(whole, version, Manifest())
        ranks.broadcast("end")
    for version in (Version(0, 0), Version(0, 1)):
        assert filecmp.cmp(directory.file(version), plain.file(version), shallow=False)
    assert directory.base(Version(0, 1)) == (Version(0, 0) if full_version_every == 2 else None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process another root folder")
def test_changes_since_a_file_that_another_rank_does_not_see_are_found_by_rank_0(tmp_path: Path) -> None:
    """A rank on another machine is simulated by one that sees another file system."""
    (tmp_path / "another").mkdir()

    def life(ranks: Ranks) -> None:
        policy = shard_of(ranks, None)
        follower = Follower(policy, SETTINGS.start(policy.parameters()), ranks, WHOLE)
        os.chroot(tmp_path / "another")  # nothing more is imported
        follower.follow()

    before = llama_policy().weights()
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        tensor.view(-1)[-1] += 1
    with ranks_of(2, tmp_path / "store", life) as ranks:
        led = Rank0Policy(shard_of(ranks, None), ranks, WHOLE)
        directory = WeightDirectory(tmp_path / "weights", settings=PublishSettings(full_version_every=2))
        directory.publish(led.weights(), Version(0, 0), Manifest())
        led.load(after)
        directory.publish(led.weights(), Version(0, 1), Manifest())
        assert led.copy_rows(Rank0Optimizer(ranks, SETTINGS, led.parameters(), []), tmp_path / "checkpoints") is None
        ranks.broadcast("end")
    changes = load_file(directory.file(Version(0, 1)))
    assert {name for name in changes if name.endswith("@at")} == {f"{name}@at" for name in after}
    weights = directory.at(Version(0, 1)).read()
    assert all(torch.equal(weights[name], tensor) for name, tensor in after.items())


def test_a_rank_lets_go_of_what_is_sharded(tmp_path: Path) -> None:
    with ranks_of(1, tmp_path / "store", lambda ranks: None) as ranks:
        policy = llama_policy()
        whole = {name: weakref.ref(p) for name, p in policy.model.named_parameters()}
        policy.shard(ranks.sharding(torch.float32))
        gc.collect()
        assert [name for name, parameter in whole.items() if parameter() is not None] == []


def test_computing_in_bfloat16_leaves_weights_and_moments_in_float32(tmp_path: Path) -> None:
    balance = TrajectoryBalance(BETA)
    single = alone(balance, tmp_path)
    with ranks_of(1, tmp_path / "store", lambda ranks: None) as ranks:
        half = spread(ranks, balance, tmp_path, WHOLE, compute=torch.bfloat16)
        expected, metrics = single.go(), half.go()
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=0.05)
        assert metrics["loss"] != expected["loss"]
        assert {p.dtype for p in half.policy.parameters()} == {torch.float32}
        half.optimizer.save(tmp_path)
        assert {t.dtype for t in load_file(tmp_path / "optimizer.safetensors").values()} == {torch.float32}
        # after one step of Adam each weight has moved by the learning rate, nearly all to the same side
        assert difference(single, half) <= 2 * SETTINGS.lr + 1e-6


def test_a_rank_that_says_nothing_is_not_waited_for_for_ever_nor_one_that_is_gone(tmp_path: Path) -> None:
    def life(ranks: Ranks) -> None:
        with pytest.raises(PartFailed, match="rank 1 waited for what rank 0 says next, which is gone"):
            ranks.receive_command()

    with (
        ranks_of(2, tmp_path / "store", life, patience=5.0) as ranks,
        pytest.raises(DeadlineExceeded, match="for rank 1"),
    ):
        ranks.receive([(1,)], 1)


@pytest.mark.parametrize(
    ("hangs_in", "named"),
    [
        ("evaluate", "trainer rank 0 waited 5 s in all_gather_single, while executing 'evaluate'"),
        ("backpropagate", "trainer rank 0 waited 5 s to send to rank 1"),
        ("step", "trainer rank 0 waited 5 s in all_reduce, while executing 'step'"),
    ],
)
def test_a_rank_that_hangs_inside_a_step_ends_it_in_an_error_that_names_the_collective(
    tmp_path: Path, hangs_in: str, named: str
) -> None:
    def life(ranks: Ranks) -> None:
        policy = shard_of(ranks, None)
        follower = Follower(policy, SETTINGS.start(policy.parameters()), ranks, WHOLE)
        acts: dict[str, Callable[[RankCommand], object]] = {
            "evaluate": follower._evaluate,
            "backpropagate": follower._backpropagate,
            "step": follower._step,
        }
        while (message := ranks.receive_command()).name != hangs_in:
            acts[message.name](message)
        with pytest.raises(PartFailed):  # it does nothing of it, until rank 0 is gone
            ranks.receive_command()

    with ranks_of(2, tmp_path / "store", life, patience=5.0) as ranks:
        two = spread(ranks, TrajectoryBalance(BETA), tmp_path, WHOLE)
        with pytest.raises(DeadlineExceeded, match=re.escape(named)):
            two.go()


def test_while_rank_0_waits_for_a_batch_nobody_counts_as_hanging(tmp_path: Path) -> None:
    """What rank 0 says next has a deadline of its own, which is not that of a wait inside a step."""

    def life(ranks: Ranks) -> None:
        with pytest.raises(DeadlineExceeded, match="trainer rank 1 waited 4 s for what rank 0 says next"):
            ranks.receive_command()
        dist.barrier(ranks.weights_group)

    with ranks_of(2, tmp_path / "store", life, patience=2.0, word=4.0) as ranks:
        dist.barrier(ranks.weights_group)


def test_an_error_of_the_model_itself_stays_what_it_is(tmp_path: Path) -> None:
    with (
        ranks_of(1, tmp_path / "store", lambda ranks: None) as ranks,
        pytest.raises(RuntimeError, match="must match"),
        ranks.name_collectives("evaluate"),
    ):
        torch.ones(2) + torch.ones(3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_every_row_is_dealt_once_and_groups_stay_whole(sizes: list[int], ranks: int) -> None:
    batch = collate(groups_of(sizes))
    shares = deal(batch, ranks, WHOLE)
    assert len(shares) == ranks
    assert sorted(torch.cat(shares).tolist()) == list(range(batch.rows))
    owners = [set(batch.group_B[share].tolist()) for share in shares]
    assert sum(map(len, owners)) == batch.groups
    load = [int(batch.length_B[share].sum()) + len(groups) for share, groups in zip(shares, owners, strict=True)]
    largest = max(int(batch.length_B[batch.group_B == g].sum()) + 1 for g in range(batch.groups))
    assert max(load) - min(load) <= largest


def test_a_group_larger_than_a_pass_is_split_where_there_are_ranks_for_its_parts() -> None:
    batch = collate(groups_of([8]))
    tokens = int(batch.length_B.sum()) + 1
    half = tokens // 2 + 4
    shares = deal(batch, 2, half)
    assert sorted(torch.cat(shares).tolist()) == list(range(8))
    assert all(0 < int(batch.length_B[share].sum()) + 1 <= half for share in shares)


@pytest.mark.parametrize("spread_out", [True, False])
def test_averages_over_two_ranks_are_those_of_one_in_what_is_saved_published_and_gone_on_from(
    spread_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is written by all ranks, or gathered."""
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", replace(SETTINGS, weight_average=True))
    objective, folders = TrajectoryBalance(BETA), (tmp_path / "one", tmp_path / "two")
    single = alone(objective, tmp_path)
    directory = WeightDirectory(tmp_path / "weights")
    with ranks_of(2, tmp_path / "store", lambda ranks: follow(ranks, WHOLE)) as ranks:
        two = spread(ranks, objective, tmp_path, WHOLE)
        step_both(single, two, 3)
        led = two.policy
        assert isinstance(led, Rank0Policy)
        with two.optimizer.averages():
            directory.publish(led.weights(), two.version.average, Manifest())
        if spread_out:
            laid_out = led.copy_rows(two.optimizer, folders[1])
            assert laid_out is not None
            led.checkpoint_thread.start(lambda: save_checkpoint(folders[1], two.version, laid_out[0].save, laid_out[1]))
            led.checkpoint_thread.wait()
        else:

            def gathered_save(path: Path) -> None:
                with two.optimizer.averages():
                    led.save(path)

            save_checkpoint(folders[1], two.version, gathered_save, two.optimizer)
        step_both(single, two, 1)  # the weights are back in their place
        ranks.broadcast("end")
    saved = load_file(folders[1] / "step-3" / "model.safetensors")
    state = load_file(folders[1] / "step-3" / "optimizer.safetensors")
    published = directory.at(Version(0, 3).average).read()
    resumed = alone(objective, tmp_path)
    for _ in range(3):
        resumed.go()
    assert {f"{i}.average" for i in range(len(resumed.optimizer.parameters))} < state.keys()
    with resumed.optimizer.averages():
        for name, tensor in resumed.policy.weights().items():
            for found in (saved[name], published[name]):
                torch.testing.assert_close(found, tensor, rtol=0, atol=rounding(resumed, 3))
