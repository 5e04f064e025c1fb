"""Checkpoints: whole, in the Hugging Face layout, and enough to go on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import BETA, Recycled, Sampled, groups_of, llama_policy, trainer_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tba.errors import UserError
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.schedules import WarmupConstant
from tba.training.checkpoint import Checkpoint, newest_checkpoint, save_checkpoint
from tba.training.optimizer import OptimizerSettings
from tba.training.tiny_models import train_bpe_tokenizer
from tba.training.trainer import Trainer
from tba.types import Version


def save(trainer: Trainer, folder: Path, keep: int = 2, **state: object) -> Checkpoint:
    policy = trainer.policy
    assert isinstance(policy, CausalPolicy)
    return save_checkpoint(folder, trainer.version, policy.save, trainer.optimizer, state, keep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    trainer = trainer_of(llama_policy(dtype=dtype), TrajectoryBalance(BETA), tmp_path)
    trainer.go()
    trainer.go()
    rng = np.random.default_rng(5)
    rng.random(7)
    source = trainer.batches
    assert isinstance(source, Sampled)
    assert isinstance(source.replay, Recycled)
    save(trainer, tmp_path / "checkpoints", asked=source.replay.asked, rng=rng.bit_generator.state)
    trainer.go()
    trainer.go()

    checkpoint = newest_checkpoint(tmp_path / "checkpoints")
    assert checkpoint is not None
    policy = CausalPolicy(AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=dtype))
    optimizer = OptimizerSettings(lr=1e-2, schedule=WarmupConstant(0)).start(policy.parameters())
    optimizer.load(checkpoint.path)
    replay = Recycled(groups_of([5] * 12), asked=checkpoint.state["asked"])
    resumed = trainer_of(
        policy,
        TrajectoryBalance(BETA),
        tmp_path,
        optimizer=optimizer,
        version=checkpoint.version,
        batches=Sampled(replay, 2, 5),
    )
    resumed.go()
    resumed.go()
    assert resumed.version == trainer.version == Version(0, 4)
    through, again = trainer.policy.weights(), resumed.policy.weights()
    assert all(torch.equal(again[name], through[name]) for name in through)
    drawn = np.random.default_rng()
    drawn.bit_generator.state = checkpoint.state["rng"]
    assert drawn.random() == rng.random()


def test_a_checkpoint_is_a_hugging_face_model_with_its_tokenizer(tmp_path: Path) -> None:
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path)
    tokenizer = train_bpe_tokenizer(["one two"], 300)
    policy = trainer.policy
    assert isinstance(policy, CausalPolicy)
    checkpoint = save_checkpoint(
        tmp_path, trainer.version, lambda path: policy.save(path, tokenizer), trainer.optimizer
    )
    assert checkpoint.path == tmp_path / "step-0"
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in policy.weights().items())
    assert AutoTokenizer.from_pretrained(checkpoint.path).encode("two") == tokenizer.encode("two")


def test_the_newest_versions_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path)
    (tmp_path / ".writing-step-1-0123456789ab").mkdir()
    for incarnation, step in ((0, 80), (0, 100), (1, 90)):  # resumed from step 80, because the newest was damaged
        trainer.version = Version(incarnation, step)
        save(trainer, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-80", "step-90"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.version == Version(1, 90)


def test_a_step_reached_again_after_a_resume_replaces_the_old_one(tmp_path: Path) -> None:
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path)
    save(trainer, tmp_path, note="before")
    trainer.version = Version(1, 0)
    save(trainer, tmp_path, note="after")
    (path,) = tmp_path.iterdir()
    assert Checkpoint.load(path) == Checkpoint(tmp_path / "step-0", Version(1, 0), {"note": "after"})


def test_it_is_said_which_of_its_files_is_the_model(tmp_path: Path) -> None:
    path = save(trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path), tmp_path).path
    index = json.loads((path / "model.safetensors.index.json").read_text())
    model = load_file(path / "model.safetensors")
    assert index["weight_map"] == dict.fromkeys(model, "model.safetensors")
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in model.values())}
    assert len(list(path.glob("*.safetensors"))) == 2  # the optimizer's too: vLLM would load both without the index
    AutoModelForCausalLM.from_pretrained(path)


def test_a_save_that_fails_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path)
    save(trainer, tmp_path, note="before")

    def full(path: Path) -> None:
        (path / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        save_checkpoint(tmp_path, Version(0, 0), full, trainer.optimizer)
    (path,) = tmp_path.iterdir()
    assert Checkpoint.load(path).state == {"note": "before"}


def test_a_model_that_does_not_fit_on_the_disk_leaves_no_part_of_it(tmp_path: Path) -> None:
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path)
    policy = trainer.policy
    assert isinstance(policy, CausalPolicy)

    class Full(PreTrainedTokenizerBase):
        """Written after the weights."""

        def __init__(self) -> None:
            pass

        def save_pretrained(self, *arguments: Any, **named: Any) -> Any:
            raise OSError("no space left on device")

    for act in (
        lambda: save_checkpoint(tmp_path, Version(0, 0), lambda path: policy.save(path, Full()), trainer.optimizer),
        lambda: policy.save(tmp_path / "own", Full()),
    ):
        with pytest.raises(OSError, match="no space"):
            act()
        assert list(tmp_path.iterdir()) == []
    (tmp_path / ".writing-.writing-step-1-0123456789ab-77").mkdir()  # of one that was killed
    save(trainer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]


def test_what_is_missing_or_damaged_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") is None
    with pytest.raises(UserError, match="there is no checkpoint at"):
        Checkpoint.load(tmp_path / "step-3")
    trainer = trainer_of(llama_policy(), TrajectoryBalance(BETA), tmp_path)
    path = save(trainer, tmp_path).path
    for text in ("{", '{"version": "x.y", "state": {}}', '{"state": {}}', "[]"):
        (path / "run.json").write_text(text)
        with pytest.raises(UserError, match="is damaged"):
            newest_checkpoint(tmp_path)
    with pytest.raises(UserError, match="0 checkpoints are to be kept"):
        save(trainer, tmp_path, keep=0)
