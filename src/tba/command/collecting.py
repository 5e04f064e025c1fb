"""Collects the best answers of a run, each once, for supervised training: the smoothing phase of Lee et al. 2024
(arXiv 2405.18540).

Invariant: every trajectory of the journal is either learnt or counted under exactly one reason why not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.recipe import Recipe
from tba.replay.buffer import NearSettings
from tba.replay.codec import StoredTrajectory
from tba.replay.follower import JournalFollower
from tba.replay.reading import JournalFile
from tba.runtime.run_directory import RunDirectory
from tba.training.supervised import Pair, SupervisedSettings
from tba.turns import assistant_turn
from tba.types import StopReason, Trajectory

_AT_ONCE = 512  # trajectories of a journal


@dataclass(frozen=True)
class SmoothingOptions:
    """Says which of a run's answers are learnt, and by which model."""

    min_reward: float | None = None  # the least reward of an answer that is learnt; required
    part: str = ""  # the reward part that min_reward applies to; empty: the reward itself
    min_log_reference: float | None = None  # the least log-probability of a whole answer under the reference
    truncated: bool = False  # learn truncated answers too, as if they ended there
    most: int | None = None  # the most answers to learn, those with the highest reward; None: all
    model: str = ""  # a folder or Hub name with the run's tokenizer; empty: the model that the run began with
    trust: bool = False  # execute the recipe file that the run names
    sft: SupervisedSettings = field(default_factory=SupervisedSettings)


@dataclass(frozen=True)
class Collected:
    """Holds the trajectories to learn, best first, and how many are left out for which reason."""

    trajectories: list[Trajectory]
    left_out: Counter[str]

    def pairs(self, tokenizer: Any, chat: bool) -> list[Pair]:
        """Returns prompts and answers, each with the token that ended it; one that had none ends as a turn of a `chat`
        does, or a text.
        """
        text = assistant_turn(tokenizer, chat=False)
        form = assistant_turn(tokenizer) if chat else text
        pairs = []
        for t in self.trajectories:
            by_token = t.completion.stop_reason is StopReason.EOS
            known = set(t.completion.tokens[-1:].tolist()) if by_token else form.ends | text.ends
            pairs.append(Pair.of(t.prompt.tokens.tolist(), t.completion, known, form.last.token))
        return pairs


def is_run(path: Path) -> bool:
    """Returns whether the path is a run's folder."""
    return (path / "recipe.json").is_file()


def collect(journal: Path, options: SmoothingOptions, near: NearSettings | None = None) -> Collected:
    """Returns what is learnt of a journal; of answers that are near duplicates by the run's own rule, one is.

    Raises `UserError` when the options leave nothing, or there is no such journal or part of the reward."""
    if options.min_reward is None:
        raise UserError("`tba sft RUN` needs --min-reward: the least reward of an answer that is learnt")
    if options.most is not None and options.most < 1:
        raise UserError(f"--most is {options.most}: give the number of answers to learn at most, 1 or more")
    if not journal.is_file():
        raise UserError(f"there is no journal at {journal}: give the folder of a run that has one")
    left_out: Counter[str] = Counter()
    found: dict[tuple[str, str], Trajectory] = {}
    for t in _trajectories(journal):
        if (reason := _why_not(t, options, options.min_reward)) is not None:
            left_out[reason] += 1
            continue
        same = (t.prompt.key, t.completion.digest)
        left_out["repeats another"] += same in found
        if same not in found or t.reward > found[same].reward:
            found[same] = t
    kept = _apart(list(found.values()), near, left_out)
    kept.sort(key=attrgetter("reward"), reverse=True)
    if options.most is not None:
        left_out["beyond --most"] += len(kept[options.most :])
        del kept[options.most :]
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count) or "it is empty"
        raise UserError(f"no answer in {journal} can be learnt ({reasons}): lower --min-reward, or give another run")
    return Collected(kept, left_out)


def began_with(recipe: Recipe, options: SmoothingOptions) -> tuple[str, Any, Sequence[str]]:
    """Returns (the model to train further, the tokenizer of the run's answers, the arguments of its template)."""
    if not isinstance(recipe.model, HuggingFace):
        raise UserError(f"the run's model is a {type(recipe.model).__name__}, which cannot be taught: give another run")
    own = recipe.model.prepared(recipe.task)
    tokenizer = own.tokenizer()
    if options.model and HuggingFace(options.model).tokenizer().get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{options.model} has another tokenizer than the run, whose answers are tokens: give another")
    return options.model or own.path, tokenizer, () if options.model else own.template_arguments


def run_recipe_of(path: Path, trusted: bool) -> tuple[Recipe, Path]:
    """Returns a run's recipe and journal. Raises `UserError` for a recipe file that is not `trusted`."""
    run = RunDirectory.open(path)
    return run.recipe_to_read(trusted), run.journal_there()


def _trajectories(journal: Path) -> Iterator[Trajectory]:
    with JournalFile(journal) as file, JournalFollower(journal, file=file) as follower:
        while chunk := follower.drain(_AT_ONCE):
            yield from chunk


def _why_not(t: Trajectory, options: SmoothingOptions, least: float) -> str | None:
    if options.part and options.part not in t.reward_parts:
        raise UserError(
            f"a trajectory's reward has no part {options.part!r} ({', '.join(t.reward_parts) or 'it has none'}): "
            "choose one of these, or leave --part out"
        )
    if (t.reward_parts[options.part] if options.part else t.reward) < least:
        return "below --min-reward"
    if options.min_log_reference is not None and float(t.log_reference.sum()) < options.min_log_reference:
        return "below --min-log-reference"
    if t.completion.stop_reason is StopReason.LENGTH and not options.truncated:
        return "cut off"
    return None


def _apart(found: list[Trajectory], near: NearSettings | None, left_out: Counter[str]) -> list[Trajectory]:
    """Returns the trajectories without those that are near an earlier, that is a better or newer, one."""
    if near is None:
        return found
    order = sorted(found, key=attrgetter("reward"), reverse=True) if near.keep == "better" else found[::-1]
    tokens: list[StoredTrajectory] = []
    index = near.start(lambda row: tokens[row].tokens)
    kept: list[Trajectory] = []
    for t in order:
        stored = StoredTrajectory.of(t)
        if len(index.of(stored)):
            left_out["near another"] += 1
            continue
        tokens.append(stored)
        index.add(len(kept), stored)
        kept.append(t)
    return kept
