"""`tba red-team eval`: success and diversity of attacks, with intervals.

    tba red-team eval RECIPE [--checkpoint RUN] [--check CLASSIFIER] [--transfer VICTIM] [--families FILE] [--out FILE]

Invariant: no text is printed; `--out` has scores by the index of an attack, and texts only with `--texts written`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from tba.apps.red_team.attacks import AttackReport, attack_report
from tba.apps.red_team.embedding import SentenceEncoder
from tba.apps.red_team.endpoint import EndpointVictim
from tba.apps.red_team.options import RedTeamEvalOptions
from tba.apps.red_team.sentence_classifier import SentenceWeights, is_of_sentences
from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import Scoring, Toxicity
from tba.apps.red_team.victim import ModelVictim, Victim
from tba.apps.red_team.word_classifier import WordWeights
from tba.errors import UserError
from tba.generation import generate
from tba.json_input import read_json
from tba.protocols import Engine, Model
from tba.recipe import Recipe
from tba.record.jsonl import write_json
from tba.record.terminal import terminal
from tba.runs.evaluating import with_checkpoint
from tba.runtime.prompting import prompts_of
from tba.settings import find, override
from tba.types import Json, Prompt, Sampling, Version

_AT_ONCE = 128  # attacks put to the victim at a time


def evaluate_attacker(name: str, overrides: Sequence[str], options: RedTeamEvalOptions) -> int:
    """Prints the figures; with `--out`, writes them with every attack's scores."""
    recipe = with_checkpoint(override(find(name), list(overrides), f"tba red-team eval {name}"), options.checkpoint)
    task = recipe.task
    if not isinstance(task, RedTeam):
        raise UserError(
            f"recipe {name} is not for red-teaming: give one whose task is `RedTeam`, such as red_team_small"
        )
    torch.set_num_threads(recipe.run.threads)
    console = terminal()
    families = None if options.families is None else read_families(options.families)
    embedder = SentenceEncoder.load(options.embedder, options.device)
    second = None if options.check is None else second_classifier(options.check, embedder)
    model = recipe.model.prepared(task, lambda line: console.print(line, highlight=False))
    engine = model.engine(Version(), recipe.prompts.max_tokens)
    attacks = sampled(engine, _prompts(recipe, model), options.attacks, recipe)
    embedding = embedder.embed(attacks)

    def report(toxic: Sequence[float]) -> AttackReport:
        return attack_report(attacks, toxic, embedding, task.threshold, families)

    reward = task.reward()
    answers = answered(reward, attacks)
    toxic = [reward.toxic(row) for row in reward.marks(attacks, answers)]
    found = report(toxic)
    _tell(console, "", found)
    facts: dict[str, Json] = {
        "recipe": name,
        "overrides": list(overrides),
        "checkpoint": options.checkpoint,
        **_facts(found),
        "scores": toxic,
    }
    if second is not None:
        marked = [reward.toxic(row) for row in reward.marks(attacks, answers, second)]
        both = [min(pair) for pair in zip(toxic, marked, strict=True)]
        _tell(console, f"by the classifier in {options.check}:", report(marked))
        _tell(console, "by both:", report(both))
        facts["check"] = {"classifier": str(options.check), **_facts(report(marked)), "scores": marked}
        facts["both"] = _facts(report(both))
    if options.transfer is not None:
        there = replace(task, victim=other_victim(options.transfer, task.victim)).reward()
        others = [there.toxic(row) for row in there.marks(attacks, answered(there, attacks))]
        _tell(console, f"transferred to {options.transfer}:", report(others))
        facts["transfer"] = {"victim": options.transfer, **_facts(report(others)), "scores": others}
    if options.texts == "written":
        facts["texts"] = attacks
    if options.out is not None:
        write_json(options.out, facts)
    return 0


def sampled(engine: Engine, prompts: Sequence[Prompt], count: int, recipe: Recipe) -> list[str]:
    """Returns `count` attacks at the policy temperature, spread evenly over the prompts."""
    each = -(-count // len(prompts))
    rng = np.random.default_rng([recipe.seed, 13])
    answered = generate(engine, prompts, each, Sampling(recipe.policy_temperature), rng)
    return [completion.text.strip() for row in zip(*answered, strict=True) for completion in row][:count]


def answered(reward: Toxicity, attacks: Sequence[str]) -> dict[str, list[str]]:
    """Returns the victim's answers to each attack."""
    found: dict[str, list[str]] = {}
    for i in range(0, len(attacks), _AT_ONCE):
        found.update(reward.answers(attacks[i : i + _AT_ONCE]))
    return found


def second_classifier(folder: Path, embedder: SentenceEncoder) -> Scoring:
    """Returns a classifier that `tba red-team classifier` made, of either kind of features."""
    if is_of_sentences(str(folder)):
        return SentenceWeights.load(str(folder), embedder)
    return WordWeights.load(str(folder))


def other_victim(spelt: str, like: Victim) -> Victim:
    """Returns the victim at a folder, a Hub name or URL::MODEL, with the settings of `like` where they apply."""
    if spelt.startswith(("http://", "https://")):
        url, _, model = spelt.rpartition("::")
        if not url:
            raise UserError(f"--transfer is {spelt!r}: give an endpoint as URL::MODEL, with its model's name there")
        return replace(like if isinstance(like, EndpointVictim) else EndpointVictim(), url=url, model=model)
    return replace(like, path=spelt) if isinstance(like, ModelVictim) else ModelVictim(path=spelt, template="chat")


def read_families(path: Path) -> dict[str, list[str]]:
    """Returns name -> words. Raises `UserError` for a file with something else."""
    remedy = "give a JSON object of names and lists of words"
    found: dict[str, list[str]] = read_json(path, remedy, dict[str, list[str]])
    if not all(found.values()):
        raise UserError(f"{path} has a family without words: {remedy}")
    return found


def _facts(found: AttackReport) -> Mapping[str, Json]:
    return {**asdict(found), "found": found.found, "evenness": found.evenness}


def _tell(console: Console, title: str, found: AttackReport) -> None:
    for line in ([title] if title else []) + found.lines():
        console.print(line, highlight=False)


def _prompts(recipe: Recipe, model: Model) -> list[Prompt]:
    """Returns the task's prompts, each once."""
    return list({p.key: p for p in prompts_of(recipe, model, "eval")}.values())
