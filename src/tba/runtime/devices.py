"""Assigns the GPUs of this machine to the workers of a run, before anything starts.

Invariant: a pure function of what the workers need and the GPUs that there are. What a worker is given is all that it
sees (CUDA_VISIBLE_DEVICES), and the shares of memory on one GPU never add up to more than `USABLE`.

- Enough GPUs: each rank of the trainer has one, each searcher one (several for an engine that is spread over them).
- Fewer: the trainer's ranks keep one each, and searchers share those that are left.
- One GPU, one rank: all workers share it. The trainer has what it needs and `SLACK` or `LOST` more, the searchers the
  rest; where they would lack something then, less.
- No GPU: everything runs on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tba.cards import GPU_SHARE, VISIBLE_DEVICES
from tba.errors import UserError
from tba.recipe import Recipe
from tba.runtime.needs import checkpointed, needs
from tba.training.ranks.messages import name_of_rank

USABLE = 0.95  # of a GPU's memory: the rest is each process's context and what the driver holds
TRAINER = 0.5  # of it, where searchers are on the same GPU and nobody knows what the trainer needs
SLACK = 0.15  # of what is computed, for what an allocator loses
LOST = 2 << 30  # bytes, if there are as many: of a small model's passes of unequal lengths it loses a larger share


@dataclass(frozen=True)
class Place:
    """The GPUs of one worker, by number among those that are visible, and its share of the memory of each."""

    gpus: tuple[int, ...] = ()
    share: float = 0.0

    def __str__(self) -> str:
        if not self.gpus:
            return "CPU"
        numbers = ", ".join(map(str, self.gpus))
        alone = "" if self.share >= USABLE else f" ({self.share:.0%} of its memory)"
        return f"GPU{'s' if len(self.gpus) > 1 else ''} {numbers}{alone}"


def placed(
    ranks: Sequence[str],
    searchers: Sequence[str],
    gpus: int,
    each: int = 1,
    whose: str = "this machine shows",
    trainer: float = TRAINER,
) -> dict[str, Place]:
    """A place for each rank of the trainer and each searcher, whose engine is spread over `each` GPUs.

    trainer: its share of a GPU that it has with searchers. Raises `UserError` where they do not fit; `whose` GPUs they
    are is said there.
    """
    if not gpus:
        return dict.fromkeys((*ranks, *searchers), Place())
    if gpus == len(ranks) == 1 and each == 1:
        left = (USABLE - trainer) / max(1, len(searchers))
        alone = Place((0,), USABLE if not searchers else trainer)
        return {ranks[0]: alone} | dict.fromkeys(searchers, Place((0,), left))
    rest = gpus - len(ranks)
    teams = min(rest // each, len(searchers))  # of GPUs, of which each is for one searcher or shared by several
    if rest < 0 or (searchers and not teams) or (each > 1 and teams < len(searchers)):
        raise UserError(_too_few(len(ranks), len(searchers), gpus, each, whose))
    places = {rank: Place((i,), USABLE) for i, rank in enumerate(ranks)}
    for i, searcher in enumerate(searchers):
        team = i % teams
        first = len(ranks) + team * each
        sharing = len(range(team, len(searchers), teams))
        places[searcher] = Place(tuple(range(first, first + each)), USABLE / sharing)
    return places


def _too_few(ranks: int, searchers: int, gpus: int, each: int, whose: str) -> str:
    of_one = "one GPU" if each == 1 else f"{each} GPUs, unshared"
    wanted = f"{ranks} rank{'s' if ranks > 1 else ''} of the trainer want one GPU each"
    least = ranks + (each * searchers if each > 1 else 1)
    less = "use fewer --trainer.ranks" if ranks > 1 else "use fewer --searchers"
    if each > 1:
        less += " or a smaller --model.vllm.tensor-parallel"
    some = f"{searchers} searcher{'s' if searchers > 1 else ''}"
    return (
        f"{wanted}, {some} {of_one} each: at least {least}, and {whose} {gpus}; {less}, or let there be more of "
        f"them ({VISIBLE_DEVICES})"
    )


def places(recipe: Recipe, searchers: Sequence[str], gpus: Sequence[int]) -> dict[str, Place]:
    """A place for each worker of the run on a machine whose GPUs have so many bytes. Raises `UserError` where they are
    too few.
    """
    ranks = [name_of_rank(rank) for rank in range(recipe.trainer.count)]
    each = recipe.model.gpus_per_searcher
    if each and not gpus:
        raise UserError(
            f"the model should run on GPUs, but this machine shows none ({VISIBLE_DEVICES}): set --model.device cpu"
        )
    share = _trainer_share(recipe, gpus[0], len(searchers)) if each and len(gpus) == 1 else TRAINER
    return placed(ranks, searchers, len(gpus) if each else 0, max(1, each), trainer=share)


def _trainer_share(recipe: Recipe, memory: int, searchers: int) -> float:
    """The trainer's share of a GPU of so many bytes, which it has with the searchers."""
    found = {need.part: need.total for need in needs(recipe) if need.device == "cuda"}
    if not found:
        return TRAINER
    own, others = found.pop("trainer"), searchers * sum(found.values())  # engine, reference, rewards
    if own + others > USABLE * memory and (least := checkpointed(recipe)) is not None:
        return _trainer_share(least, memory, searchers)
    if own + others > USABLE * memory:  # which is refused; a run that is started all the same shares what there is
        return USABLE * own / (own + others)
    return min(own + max(SLACK * own, LOST), USABLE * memory - others) / memory


def environment_of(place: Place, visible: str | None = None) -> dict[str, str]:
    """Returns what a worker's process is given so that it sees its own GPUs only; without any, none.

    visible: the driver's own CUDA_VISIBLE_DEVICES, whose entries are what is counted; None: all of the machine's.
    """
    if not place.gpus:
        return {VISIBLE_DEVICES: ""}
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    numbers = [str(gpu) if names is None else names[gpu] for gpu in place.gpus]
    return {VISIBLE_DEVICES: ",".join(numbers), GPU_SHARE: f"{place.share:.4f}"}


def visible() -> str | None:
    """Returns the driver's own CUDA_VISIBLE_DEVICES."""
    return os.environ.get(VISIBLE_DEVICES)


def keep_to_share() -> None:
    """Hold this process to its share of its GPU's memory, if it has been given one."""
    share = float(os.environ.get(GPU_SHARE, "0"))
    if 0 < share < USABLE and torch.cuda.is_available():
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(share, gpu)
