"""The trainer's policy and optimizer, in one process or over ranks; and the whole life of every rank but the first.

Invariant: all ranks begin from the same weights: rank 0 first tells the others what it trains from, a checkpoint or the
recipe's model. A rank other than 0 waits for nothing but the commands of rank 0, and ends with it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from tba.errors import UserError
from tba.protocols import HEADS, Policy, SavedPolicy, ScoresInTrainer, ScoringPolicy, path_of
from tba.recipe import Recipe
from tba.record.memory import keep_few_kernels
from tba.runtime.teaching import reference_model_of
from tba.training.checkpoint import Checkpoint
from tba.training.optimizer import Optimizer
from tba.training.ranks.messages import Ranks, Rendezvous, name_of_rank
from tba.training.ranks.policy import Follower, Rank0Optimizer, Rank0Policy

if TYPE_CHECKING:
    from tba.runtime.run_directory import RunDirectory

_FINGERPRINT_BYTES = 1 << 24  # bytes of a file that its fingerprint reads
STORE = "TBA_RANKS"  # names the file through which the ranks of this machine find each other


def start_ranks(recipe: Recipe, rank: int, meeting: Rendezvous | None = None) -> Ranks | None:
    """Returns this process's place among the trainer's ranks; None where the trainer is one plain process.

    Without a `meeting` they find each other through the file that the environment names.
    """
    ranks = recipe.trainer.count
    if ranks == 1:
        return None
    device = recipe.model.trainer_device
    meeting = meeting or Rendezvous(_store_here(ranks))
    # a rank that hangs is silent, and so is rank 0 then: it is killed before this ends
    deadline = recipe.run.journal_deadline
    patience = recipe.run.idle_deadline + recipe.run.silence_deadline  # rank 0 sends nothing while it waits for a batch
    return Ranks(rank, ranks, meeting, device, deadline, patience)


def _store_here(ranks: int) -> Any:
    if STORE not in os.environ:
        raise UserError(f"--trainer.ranks is {ranks}, but this trainer is one process: use processes or a cluster")
    from torch._C._distributed_c10d import FileStore  # which not every build of torch has

    return FileStore(os.environ[STORE], ranks)


def start_policy(recipe: Recipe, ranks: Ranks | None, saved: Path | None) -> tuple[Policy, Optimizer]:
    """Returns the policy and its optimizer: those of this process, or of all ranks, which this one leads.

    `recipe` has its model prepared; `saved` is the checkpoint to resume from.
    """
    if ranks is None:
        inputs = (recipe.policy_temperature, recipe.objective.needs & HEADS, saved)
        settings = recipe.optimizer
        policy = recipe.model.policy(
            *inputs, moments_on_host=settings.moments_on_host, averaged=settings.weight_average
        )
        return policy, recipe.optimizer.start(policy.parameters(), list(policy.heads.parameters()))
    ranks.broadcast("begin", saved=None if saved is None else str(saved), model=_fingerprint(recipe))
    sharded = _sharded(recipe, ranks, saved)
    optimizer = Rank0Optimizer(ranks, recipe.optimizer, sharded.parameters(), list(sharded.heads.parameters()))
    reference = reference_part(recipe, sharded, ranks)
    ranks.wait_until_loaded()
    return Rank0Policy(sharded, ranks, recipe.max_tokens_per_pass, recipe.model.compute, reference), optimizer


def follow(
    run: RunDirectory,
    rank: int,
    meeting: Rendezvous | None = None,
    fetch: Callable[[Path], AbstractContextManager[Path]] = nullcontext,
) -> None:
    """Run the whole life of a rank other than 0. `fetched`: where a checkpoint of rank 0's machine can be read here.

    Raises `UserError` where the recipe's model is not rank 0's.
    """
    recipe = run.recipe()
    torch.set_num_threads(recipe.run.threads)
    keep_few_kernels()
    ranks = start_ranks(recipe, rank, meeting)
    assert ranks is not None
    try:
        command = ranks.receive_command()
        with nullcontext() if command.arguments["saved"] is None else fetch(Path(command.arguments["saved"])) as saved:
            recipe = replace(recipe, model=recipe.model.prepared(recipe.task))
            if saved is None and _fingerprint(recipe) != command.arguments["model"]:
                raise UserError(
                    f"the model of {name_of_rank(rank)} on this machine is not the trainer's: put the same files on "
                    "each machine and give --model.path (a warm start: make it once, with tba sft)"
                )
            policy = _sharded(recipe, ranks, saved)
            optimizer = recipe.optimizer.start(policy.parameters(), list(policy.heads.parameters()))
            if saved is not None:
                Checkpoint.load(saved).load_heads(policy.heads)
                optimizer.load(saved)
        reference = reference_part(recipe, policy, ranks)
        ranks.wait_until_loaded()
        Follower(policy, optimizer, ranks, recipe.max_tokens_per_pass, reference).follow()
    finally:
        ranks.close()


def reference_part(recipe: Recipe, policy: Policy, ranks: Ranks | None) -> ScoringPolicy | None:
    """Returns this process's part of the reference by which the trainer scores answers: under adapters the policy's own
    base. None where searchers score, or where one process loads all of it. Raises `UserError` for a model that cannot.

    recipe: its model is prepared.
    """
    if not recipe.has_trainer_scores:
        return None
    model = reference_model_of(recipe, recipe.model)
    if isinstance(model, ScoresInTrainer):
        sharding = None if ranks is None else ranks.sharding(recipe.model.compute)
        return model.frozen_policy(recipe.policy_temperature, sharding, policy)
    if ranks is not None:
        raise UserError(
            f"--reference-scorer is trainer, but {type(model).__name__} has no reference that several ranks share: set "
            "it to searchers, or --trainer.ranks to 1"
        )
    return None


def _fingerprint(recipe: Recipe) -> str:
    """Returns a digest of the files of a prepared model, from their names, sizes and beginnings; of a model that is no
    folder, its name.
    """
    path = Path(path_of(recipe.model))
    if not path.is_dir():
        return str(path)
    file_digests = []
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as weights:
            file_digests.append(f"{file.name} {file.stat().st_size} {zlib.crc32(weights.read(_FINGERPRINT_BYTES))}")
    return "; ".join(file_digests)


def _sharded(recipe: Recipe, ranks: Ranks, saved: Path | None) -> SavedPolicy:
    """Returns the policy over all ranks; `recipe` has its model prepared."""
    sharding = ranks.sharding(recipe.model.compute)
    policy = recipe.model.policy(recipe.policy_temperature, recipe.objective.needs & HEADS, saved, sharding)
    return cast(SavedPolicy, policy)  # every policy that can be sharded is one
