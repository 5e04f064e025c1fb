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

from tba.assistant_turns import assistant_turn
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.recipe import Recipe
from tba.replay.buffer import NearSettings
from tba.replay.codec import StoredTrajectory
from tba.replay.follower import JournalFollower
from tba.replay.reading import JournalFile
from tba.runtime.run_directory import RunDirectory
from tba.training.supervised import Pair, SupervisedSettings
from tba.types import StopReason, Trajectory

_CHUNK_ROWS = 512  # trajectories of a journal


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
    omissions: Counter[str]

    def pairs(self, tokenizer: Any, chat: bool) -> list[Pair]:
        """Returns prompts and answers, each with the token that ended it; one that had none ends as a turn of a `chat`
        does, or a text.
        """
        text_turn = assistant_turn(tokenizer, chat=False)
        turn = assistant_turn(tokenizer) if chat else text_turn
        pairs = []
        for t in self.trajectories:
            has_end_token = t.completion.stop_reason is StopReason.EOS
            last_token = set(t.completion.tokens[-1:].tolist())
            end_tokens = last_token if has_end_token else turn.end_tokens | text_turn.end_tokens
            pairs.append(Pair.of(t.prompt.tokens.tolist(), t.completion, end_tokens, turn.final_frame.token))
        return pairs


def is_run(path: Path) -> bool:
    """Returns whether the path is a run's folder."""
    return (path / "recipe.json").is_file()


def collect(journal: Path, options: SmoothingOptions, near_rule: NearSettings | None = None) -> Collected:
    """Returns the trajectories of a journal to learn; of near duplicates by the run's own rule, one is learnt.

    Raises `UserError` when the options leave nothing, or there is no such journal or part of the reward."""
    if options.min_reward is None:
        raise UserError("`tba sft RUN` needs --min-reward: the least reward of an answer that is learnt")
    if options.most is not None and options.most < 1:
        raise UserError(f"--most is {options.most}: give the number of answers to learn at most, 1 or more")
    if not journal.is_file():
        raise UserError(f"there is no journal at {journal}: give the folder of a run that has one")
    omissions: Counter[str] = Counter()
    best_by_text: dict[tuple[str, str], Trajectory] = {}
    for t in _trajectories(journal):
        if (reason := _omission_reason(t, options, options.min_reward)) is not None:
            omissions[reason] += 1
            continue
        answer_key = (t.prompt.key, t.completion.digest)
        omissions["repeats another"] += answer_key in best_by_text
        if answer_key not in best_by_text or t.reward > best_by_text[answer_key].reward:
            best_by_text[answer_key] = t
    trajectories = _drop_near(list(best_by_text.values()), near_rule, omissions)
    trajectories.sort(key=attrgetter("reward"), reverse=True)
    if options.most is not None:
        omissions["beyond --most"] += len(trajectories[options.most :])
        del trajectories[options.most :]
    if not trajectories:
        reasons = ", ".join(f"{count} {reason}" for reason, count in omissions.items() if count) or "it is empty"
        raise UserError(f"no answer in {journal} can be learnt ({reasons}): lower --min-reward, or give another run")
    return Collected(trajectories, omissions)


def initial_model(recipe: Recipe, options: SmoothingOptions) -> tuple[str, Any, Sequence[str]]:
    """Returns (the model to train further, the tokenizer of the run's answers, the arguments of its template)."""
    if not isinstance(recipe.model, HuggingFace):
        raise UserError(f"the run's model is a {type(recipe.model).__name__}, which cannot be taught: give another run")
    run_model = recipe.model.prepared(recipe.task)
    tokenizer = run_model.tokenizer()
    if options.model and HuggingFace(options.model).tokenizer().get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{options.model} has another tokenizer than the run, whose answers are tokens: give another")
    return options.model or run_model.path, tokenizer, () if options.model else run_model.template_arguments


def run_recipe_of(path: Path, is_trusted: bool) -> tuple[Recipe, Path]:
    """Returns a run's recipe and journal. Raises `UserError` for a recipe file that is not `trusted`."""
    run = RunDirectory.open(path)
    return run.recipe_to_read(is_trusted), run.journal_to_read()


def _trajectories(journal: Path) -> Iterator[Trajectory]:
    with JournalFile(journal) as file, JournalFollower(journal, file=file) as follower:
        while chunk := follower.drain(_CHUNK_ROWS):
            yield from chunk


def _omission_reason(t: Trajectory, options: SmoothingOptions, min_reward: float) -> str | None:
    if options.part and options.part not in t.reward_parts:
        raise UserError(
            f"a trajectory's reward has no part {options.part!r} ({', '.join(t.reward_parts) or 'it has none'}): "
            "choose one of these, or leave --part out"
        )
    if (t.reward_parts[options.part] if options.part else t.reward) < min_reward:
        return "below --min-reward"
    if options.min_log_reference is not None and not t.has_reference:
        raise UserError(
            "--min-log-reference is given, but the run's reference had no part in its target, so that answers were not "
            "scored under it: leave it out"
        )
    if options.min_log_reference is not None and float(t.log_reference.sum()) < options.min_log_reference:
        return "below --min-log-reference"
    if t.completion.stop_reason is StopReason.LENGTH and not options.truncated:
        return "cut off"
    if t.completion.begins is not None:
        return "of several segments"
    return None


def _drop_near(
    trajectories: list[Trajectory], near_rule: NearSettings | None, omissions: Counter[str]
) -> list[Trajectory]:
    """Returns the trajectories without near duplicates. Of these the best stays, or the newest, as the rule says."""
    if near_rule is None:
        return trajectories
    by_reward = sorted(trajectories, key=attrgetter("reward"), reverse=True)
    tokens: list[StoredTrajectory] = []
    index = near_rule.start(lambda row: tokens[row].tokens)
    result: list[Trajectory] = []
    for t in by_reward if near_rule.keep == "better" else trajectories[::-1]:
        stored_answer = StoredTrajectory.of(t)
        if len(index.of(stored_answer)):
            omissions["near another"] += 1
            continue
        tokens.append(stored_answer)
        index.add(len(result), stored_answer)
        result.append(t)
    return result
