"""A checkpoint of several ranks, each of which writes its own rows."""

from __future__ import annotations

import filecmp
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from rank_processes import ranks_of, risen
from safetensors.torch import load_file
from test_rank_policy import WHOLE, alone, checkpoint, follow, spread
from toys import BETA, ByHand, llama_policy
from transformers import LlamaConfig, LlamaForCausalLM

from tba.errors import PartFailed
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.sharding import local_part
from tba.training.checkpoint import Checkpoint, newest_sound_checkpoint, save_checkpoint
from tba.training.optimizer import Optimizer, OptimizerSettings
from tba.training.ranks.checkpoint import Shards
from tba.training.ranks.messages import Ranks
from tba.training.ranks.policy import Follower, Rank0Policy
from tba.types import Version

BALANCE = TrajectoryBalance(BETA)
FILES = ("model.safetensors", "optimizer.safetensors", "optimizer.json", "config.json", "heads.safetensors")


def begin(trainer: ByHand, folder: Path, when: threading.Event | None = None) -> None:
    """Begin a checkpoint of all ranks, as the trainer's loop does. when: before that nothing is written."""
    policy = trainer.policy
    assert isinstance(policy, Rank0Policy)
    laid_out = policy.copy_rows(trainer.optimizer, folder)
    assert laid_out is not None
    model, rows = laid_out
    version, heads = trainer.version, llama_policy(heads=("log_z", "value")).heads
    heads.load_state_dict(policy.heads.state_dict())

    def save() -> None:
        assert when is None or when.wait(60.0)
        save_checkpoint(folder, version, model.save, rows, heads=heads)

    policy.checkpoint_thread.start(save)


def written(trainer: ByHand) -> None:
    assert isinstance(trainer.policy, Rank0Policy)
    trainer.policy.checkpoint_thread.wait()


@pytest.mark.parametrize(("count", "others"), [(2, 4), (4, 2)])
def test_ranks_write_the_bytes_that_gathering_would_and_any_number_of_ranks_goes_on_from_them(
    count: int, others: int, tmp_path: Path
) -> None:
    """Though steps follow at once. As many ranks go on with the same losses, more, fewer and one with the same bits,
    and the same losses up to the order of sums.
    """
    shards_folder, gathered, again = tmp_path / "shards", tmp_path / "gathered", tmp_path / "again"

    def goes_on(trainer: ByHand) -> ByHand:
        trainer.version, trainer.batches.replay.asked = saved.version, asked
        return trainer

    def life(ranks: Ranks) -> None:
        follow(ranks, WHOLE)
        follow(ranks, WHOLE, Checkpoint.load(shards_folder / "step-3"))

    with ranks_of(count, tmp_path / "store", life) as ranks:
        trainer = spread(ranks, BALANCE, tmp_path, WHOLE)
        for _ in range(3):
            trainer.go()
        checkpoint(trainer, gathered)
        begin(trainer, shards_folder, stepped := threading.Event())
        asked = trainer.batches.replay.asked
        expected = [trainer.go()["loss"] for _ in range(2)]
        stepped.set()
        written(trainer)
        ranks.broadcast("end")
        saved = Checkpoint.load(shards_folder / "step-3")
        saved.verify()
        assert filecmp.cmpfiles(gathered / "step-3", saved.path, FILES, shallow=False)[0] == list(FILES)
        assert sorted(path.name for path in shards_folder.iterdir()) == ["step-3"]

        trainer = goes_on(spread(ranks, BALANCE, tmp_path, WHOLE, saved))
        assert [trainer.go()["loss"] for _ in range(2)] == expected
        single = goes_on(alone(BALANCE, tmp_path, saved=saved))
        assert [single.go()["loss"] for _ in range(2)] == pytest.approx(expected, rel=1e-5)
        ranks.broadcast("end")

    with ranks_of(others, tmp_path / "another", lambda ranks: follow(ranks, WHOLE, saved)) as ranks:
        trainer = goes_on(spread(ranks, BALANCE, tmp_path, WHOLE, saved))
        checkpoint(trainer, again)
        again_state, saved_state = (
            load_file(path / "optimizer.safetensors") for path in (again / "step-3", saved.path)
        )
        assert again_state.keys() == saved_state.keys()
        assert all(torch.equal(again_state[name], tensor) for name, tensor in saved_state.items())
        same = [name for name in FILES if name != "optimizer.safetensors"]  # whose tensors are in another order
        assert filecmp.cmpfiles(again / "step-3", saved.path, same, shallow=False)[0] == same
        assert [trainer.go()["loss"] for _ in range(2)] == pytest.approx(expected, rel=1e-5)
        ranks.broadcast("end")


LARGE = {  # 14 M parameters: 56 MB, and 167 MB with two moments; 13 MB of it are a layer's weights
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("count", [2, 4])
def test_a_checkpoint_raises_a_rank_by_its_share_and_at_most_a_layer(count: int, tmp_path: Path) -> None:
    """The rise of the largest resident memory of each forked rank, until its rows are on the disk."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LARGE))
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    weights, layer = sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers.0." in name)

    def stepped(ranks: Ranks) -> tuple[CausalPolicy, Optimizer]:
        policy = CausalPolicy(model)
        policy.shard(ranks.sharding(torch.float32))
        optimizer = OptimizerSettings().start(policy.parameters())
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(1)
        return policy, optimizer

    def life(ranks: Ranks) -> None:
        follower = Follower(*stepped(ranks), ranks, WHOLE)

        def checkpoint_of_all() -> None:
            follower._checkpoint(ranks.receive_command())
            follower._checkpoint_thread.wait()

        rise = risen(checkpoint_of_all)
        copies = Shards.of(follower.local_policy, follower.optimizer)
        copied_bytes = sum(rows.nbytes for part in (copies.model, copies.optimizer) for _, rows in part.values())
        assert copied_bytes < rise < copied_bytes + layer

    with ranks_of(count, tmp_path / "store", life) as ranks:
        policy, optimizer = stepped(ranks)
        led = Rank0Policy(policy, ranks, WHOLE)
        laid_out = led.copy_rows(optimizer, tmp_path / "checkpoints")
        assert laid_out is not None
        whole, rows = laid_out
        save_checkpoint(tmp_path / "checkpoints", Version(0, 1), whole.save, rows, heads=policy.heads)
    moments = (tmp_path / "checkpoints" / "step-1" / "optimizer.safetensors").stat().st_size
    assert moments > 2 * weights


def test_a_rank_copies_its_share_and_nothing_else(tmp_path: Path) -> None:
    def size(copies: Shards) -> int:
        return sum(rows.nbytes for part in (copies.model, copies.optimizer) for _, rows in part.values())

    def life(ranks: Ranks) -> None:
        policy = llama_policy()
        policy.shard(ranks.sharding(torch.float32))
        optimizer = OptimizerSettings().start(policy.parameters())
        assert size(Shards.of(policy, optimizer)) == sum(local_part(p).nbytes for p in policy.parameters())

    with ranks_of(2, tmp_path / "store", life) as ranks:
        policy = llama_policy()
        policy.shard(ranks.sharding(torch.float32))


def small_files(action: signal.Handlers) -> None:
    """From here on a write beyond the first 4 kB of a file fails in this process, or by default (`SIG_DFL`) ends it."""
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def test_a_rank_that_dies_in_the_middle_of_its_rows_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def life(ranks: Ranks) -> None:
        small_files(signal.SIG_DFL)  # rank 0 lays the files out; this one writes its rows only
        follow(ranks, WHOLE)

    with ranks_of(2, tmp_path / "store", life, code=-signal.SIGXFSZ) as ranks:
        trainer = spread(ranks, BALANCE, tmp_path, WHOLE)
        trainer.go()
        checkpoint(trainer, folder)  # gathered: all of it is written by rank 0
        trainer.go()
        begin(trainer, folder)
        with pytest.raises(PartFailed, match="for the other ranks to write their rows of a checkpoint"):
            written(trainer)
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    sound_checkpoint, damaged = newest_sound_checkpoint(folder)
    assert sound_checkpoint is not None
    assert sound_checkpoint.version.step == 1
    assert damaged == []


def test_a_rank_that_cannot_write_ends_the_checkpoint_in_an_error_that_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def life(ranks: Ranks) -> None:
        small_files(signal.SIG_IGN)
        with pytest.raises(OSError, match="File too large"):
            follow(ranks, WHOLE)

    with ranks_of(2, tmp_path / "store", life) as ranks:
        trainer = spread(ranks, BALANCE, tmp_path, WHOLE)
        begin(trainer, folder)
        with pytest.raises(PartFailed, match="trainer-1 could not write its rows of a checkpoint"):
            written(trainer)
        ranks.broadcast("end")
    assert list(folder.iterdir()) == []
