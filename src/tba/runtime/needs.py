"""Computes what each part of a run needs of the memory of its device, from the recipe before anything is loaded.

Invariant: a pure function of a recipe whose model is prepared (`Model.memory`). It is what tensors hold at the worst
moment; an allocator holds a few percent more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tba.protocols import (
    Acted,
    HasAdapters,
    HasGradientCheckpointing,
    JudgedByModels,
    LoadedOnDevice,
    ScoresInTrainer,
    Work,
)
from tba.recipe import Recipe
from tba.record.text import size
from tba.runtime.teaching import loads_reference, scorers_of
from tba.weights.in_memory import SLOTS


@dataclass(frozen=True)
class Need:
    """Holds what one part needs on its device."""

    # trainer (each rank), host (what it has there besides), searcher, reference, rewards on ..., weights in memory, or
    # replay
    part: str
    device: str  # cpu, cuda or mps: the memory of the machine, or of a GPU
    parts: Mapping[str, int]  # bytes

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda item: -item[1])
        listing = ", ".join(f"{name} {size(n)}" for name, n in largest if n >= 2**19)  # what reads as 0 MiB is left out
        location = "its GPU's memory" if self.device == "cuda" else "the machine's memory"
        return f"{size(self.total)} of {location} ({listing})"


def needs(recipe: Recipe) -> list[Need]:
    """Returns the most that a rank of the trainer, a searcher, its reference, the models of its rewards, published
    weights that are wanted in the machine's memory, and the replay buffer need; nothing for a model of unknown shape.
    """
    bytes_by_part = recipe.model.memory(work_of(recipe))
    if bytes_by_part is None:
        return []
    device = recipe.model.trainer_device.type
    result = [Need(part, device, bytes_by_part[part]) for part in ("trainer", "searcher", "reference")]
    for name, scorer in scorers_of(recipe, recipe.model).items():
        if (memory := scorer.memory(work_of(recipe))) is not None:
            result = [need for need in result if need.part != name]
            device_owner = scorer if isinstance(scorer, LoadedOnDevice) else recipe.model
            result.append(Need(name, device_owner.trainer_device.type, memory["reference"]))
    if recipe.has_trainer_scores:
        result = _with_reference_in_trainer(recipe, result)
    if not loads_reference(recipe, recipe.model):
        result = [need for need in result if need.part != "reference"]
    result += [Need("host", "cpu", bytes_by_part["host"])] if bytes_by_part["host"] else []
    if isinstance(recipe.task, JudgedByModels):
        result += [Need(f"rewards on {place}", place, parts) for place, parts in recipe.task.memory().items()]
    if recipe.publish.in_memory:
        version_bytes = sum(bytes_by_part["weights"].values())
        result.append(Need("weights in memory", "cpu", {"versions": SLOTS * version_bytes}))
    return [*result, Need("replay", "cpu", recipe.replay.buffer.memory(recipe.model.max_completion_tokens))]


def with_checkpointing(recipe: Recipe) -> Recipe | None:
    """Returns the recipe with gradient checkpointing, if GPUs train and the recipe leaves it open; else None."""
    model: Any = recipe.model
    is_open = isinstance(recipe.model, HasGradientCheckpointing) and recipe.model.gradient_checkpointing is None
    if model.trainer_device.type != "cuda" or not is_open:
        return None
    return replace(recipe, model=replace(model, gradient_checkpointing=True))


def with_trainer_scores(recipe: Recipe) -> Recipe | None:
    """Returns the recipe with a trainer that scores answers under the reference, if searchers do and it can; else None.
    Searchers then need no memory for it, and each rank of the trainer needs its part.
    """
    is_base_reset = recipe.reference_reset > 0 and isinstance(recipe.model, HasAdapters) and recipe.model.lora.rank > 0
    if not recipe.scores_reference or recipe.has_trainer_scores or recipe.offline or is_base_reset:
        return None
    return replace(recipe, reference_scorer="trainer") if isinstance(recipe.model, ScoresInTrainer) else None


def _with_reference_in_trainer(recipe: Recipe, part_needs: Sequence[Need]) -> list[Need]:
    """Returns the needs with a rank's rows of the reference's weights in the trainer's: none under adapters, whose base
    is the reference. Its passes are smaller than those of training.
    """
    weights = sum(need.parts["weights"] for need in part_needs if need.part == "reference")
    is_base = recipe.reference is None and isinstance(recipe.model, HasAdapters) and recipe.model.lora.rank > 0
    rows = {"reference": 0 if is_base else weights // recipe.trainer.count}
    return [replace(n, parts={**n.parts, **rows}) if n.part == "trainer" else n for n in part_needs]


def longest_prompt(recipe: Recipe) -> int:
    """Returns the tokens of the longest prompt that an engine reads."""
    begun_answer = recipe.model.max_completion_tokens if recipe.vine else 0  # answers begun are prompts there
    return recipe.prompts.max_tokens + begun_answer


def work_of(recipe: Recipe) -> Work:
    """Returns the work that the recipe asks of its model, by which the model computes its memory."""
    return Work(
        prompt_tokens=recipe.prompts.max_tokens,
        pass_tokens=recipe.max_tokens_per_pass,
        groups=recipe.groups_per_step,
        group_size=recipe.group_size,
        ranks=recipe.trainer.count,
        moments_on_host=recipe.optimizer.moments_on_host,
        averaged=recipe.optimizer.weight_average,
        parks=isinstance(recipe.task, Acted) and recipe.runtime != "inline",
    )


# GB/s between pinned memory and an NVIDIA H200, there and back
_TO_GPU, _FROM_GPU = 42.9, 55.1


def seconds_to_move(recipe: Recipe) -> float:
    """Returns the seconds in which an update's moments go to a GPU and back; 0 where they stay on the GPU."""
    return sum(need.total for need in needs(recipe) if need.part == "host") / 1e9 * (1 / _TO_GPU + 1 / _FROM_GPU)


@dataclass(frozen=True)
class DiskUse:
    """Holds what a run keeps on the disk besides its journal, at most, in bytes."""

    checkpoint: int
    checkpoints: int  # of them, one of which is being written
    version: int  # of the published weights, whole
    versions: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.version * self.versions


def disk_use(recipe: Recipe) -> DiskUse | None:
    """Returns the checkpoints and versions that are on the disk at once; None for a model of unknown shape. References
    that are kept for old rows come on top.
    """
    bytes_by_part = recipe.model.memory(work_of(recipe))
    if bytes_by_part is None:
        return None
    checkpoint, version = (sum(bytes_by_part[kind].values()) for kind in ("checkpoint", "weights"))
    average_count = 2 if recipe.optimizer.weight_average else 0  # one that is evaluated, and the next
    return DiskUse(checkpoint, recipe.run.checkpoints + 1, version, 3 + average_count)
