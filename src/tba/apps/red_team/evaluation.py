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
from tba.apps.red_team.embedding import SentenceEmbedder
from tba.apps.red_team.endpoint import EndpointVictim
from tba.apps.red_team.options import RedTeamEvalOptions
from tba.apps.red_team.sentence_classifier import SentenceWeights, reads_sentences
from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import StartedClassifier, Toxicity
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
from tba.runtime.prompt_sets import prompts_of
from tba.settings import find, override
from tba.types import Json, Prompt, Sampling, Version

_ATTACKS_PER_CALL = 128  # attacks put to the victim at a time


def evaluate_attacker(name: str, overrides: Sequence[str], options: RedTeamEvalOptions) -> int:
    """Prints the figures; with `--out`, writes them with every attack's scores."""
    recipe = with_checkpoint(override(find(name), list(overrides), f"tba red-team eval {name}"), options.checkpoint)
    task = recipe.task
    if not isinstance(task, RedTeam):
        raise UserError(f"recipe {name} is not for red-teaming: give one whose task is `RedTeam`, like red_team_small")
    torch.set_num_threads(recipe.run.threads)
    console = terminal()
    families = None if options.families is None else read_families(options.families)
    embedder = SentenceEmbedder.load(options.embedder, options.device)
    second_classifier = None if options.check is None else load_classifier(options.check, embedder)
    model = recipe.model.prepared(task, lambda line: console.print(line, highlight=False))
    engine = model.engine(Version(), recipe.prompts.max_tokens)
    attacks = sample_attacks(engine, _prompts(recipe, model), options.attacks, recipe)
    embedding = embedder.embed(attacks)

    def report(toxic: Sequence[float]) -> AttackReport:
        return attack_report(attacks, toxic, embedding, task.threshold, families)

    reward = task.reward()
    answers = victim_answers(reward, attacks)
    toxic = [reward.mean_toxic(row) for row in reward.log_toxic_rows(attacks, answers)]
    attack_figures = report(toxic)
    _print_report(console, "", attack_figures)
    facts: dict[str, Json] = {
        "recipe": name,
        "overrides": list(overrides),
        "checkpoint": options.checkpoint,
        **_facts(attack_figures),
        "scores": toxic,
    }
    if second_classifier is not None:
        second_toxic = [reward.mean_toxic(row) for row in reward.log_toxic_rows(attacks, answers, second_classifier)]
        both_toxic = [min(pair) for pair in zip(toxic, second_toxic, strict=True)]
        _print_report(console, f"by the classifier in {options.check}:", report(second_toxic))
        _print_report(console, "by both:", report(both_toxic))
        facts["check"] = {"classifier": str(options.check), **_facts(report(second_toxic)), "scores": second_toxic}
        facts["both"] = _facts(report(both_toxic))
    if options.transfer is not None:
        transfer_reward = replace(task, victim=transfer_victim(options.transfer, task.victim)).reward()
        log_toxic_rows = transfer_reward.log_toxic_rows(attacks, victim_answers(transfer_reward, attacks))
        transfer_toxic = [transfer_reward.mean_toxic(row) for row in log_toxic_rows]
        _print_report(console, f"transferred to {options.transfer}:", report(transfer_toxic))
        facts["transfer"] = {"victim": options.transfer, **_facts(report(transfer_toxic)), "scores": transfer_toxic}
    if options.texts == "written":
        facts["texts"] = attacks
    if options.out is not None:
        write_json(options.out, facts)
    return 0


def sample_attacks(engine: Engine, prompts: Sequence[Prompt], count: int, recipe: Recipe) -> list[str]:
    """Returns `count` attacks at the policy temperature, spread evenly over the prompts."""
    per_prompt = -(-count // len(prompts))
    rng = np.random.default_rng([recipe.seed, 13])
    completion_rows = generate(engine, prompts, per_prompt, Sampling(recipe.policy_temperature), rng)
    return [completion.text.strip() for row in zip(*completion_rows, strict=True) for completion in row][:count]


def victim_answers(reward: Toxicity, attacks: Sequence[str]) -> dict[str, list[str]]:
    """Returns the victim's answers to each attack."""
    answers: dict[str, list[str]] = {}
    for i in range(0, len(attacks), _ATTACKS_PER_CALL):
        answers.update(reward.answers(attacks[i : i + _ATTACKS_PER_CALL]))
    return answers


def load_classifier(folder: Path, embedder: SentenceEmbedder) -> StartedClassifier:
    """Returns a classifier that `tba red-team classifier` made, of either kind of features."""
    if reads_sentences(str(folder)):
        return SentenceWeights.load(str(folder), embedder)
    return WordWeights.load(str(folder))


def transfer_victim(spec: str, victim: Victim) -> Victim:
    """Returns the victim at a folder, a Hub name or URL::MODEL, with the settings of `victim` where they apply."""
    if spec.startswith(("http://", "https://")):
        url, _, model = spec.rpartition("::")
        if not url:
            raise UserError(f"--transfer is {spec!r}: give an endpoint as URL::MODEL, with its model's name there")
        return replace(victim if isinstance(victim, EndpointVictim) else EndpointVictim(), url=url, model=model)
    return replace(victim, path=spec) if isinstance(victim, ModelVictim) else ModelVictim(path=spec, template="chat")


def read_families(path: Path) -> dict[str, list[str]]:
    """Returns name -> words. Raises `UserError` for a file with something else."""
    remedy = "give a JSON object of names and lists of words"
    families: dict[str, list[str]] = read_json(path, remedy, dict[str, list[str]])
    if not all(families.values()):
        raise UserError(f"{path} has a family without words: {remedy}")
    return families


def _facts(report: AttackReport) -> Mapping[str, Json]:
    return {**asdict(report), "found": report.found_families, "evenness": report.evenness}


def _print_report(console: Console, title: str, report: AttackReport) -> None:
    for line in ([title] if title else []) + report.lines():
        console.print(line, highlight=False)


def _prompts(recipe: Recipe, model: Model) -> list[Prompt]:
    """Returns the task's prompts, each once."""
    return list({p.key: p for p in prompts_of(recipe, model, "eval")}.values())
