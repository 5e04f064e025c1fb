"""`tba eval`: the held-out (or training) accuracy of any checkpoint on a recipe's task."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from rich.console import Console

from tba.command.options import EvalOptions
from tba.errors import UserError
from tba.evaluation.accuracy import Answer, Assessment, EvaluationSettings
from tba.evaluation.divergence import Divergence, divergence
from tba.evaluation.estimators import paired_difference, wilson_interval
from tba.json_input import read_json
from tba.protocols import Engine
from tba.recipe import Recipe, differences, resolved
from tba.record.jsonl import plain, replaced, write_json
from tba.record.terminal import terminal
from tba.record.text import hundredfold
from tba.runs.evaluating import measured, recipe_of, with_checkpoint
from tba.runtime.isolation import Rebuilt
from tba.runtime.prompting import grader_of
from tba.runtime.run_directory import RunDirectory
from tba.types import Prompt, Version

Scores: TypeAlias = Mapping[str, Sequence[float]]  # metric -> one for each problem, in order
_MATTERS = ("task.", "prompts.", "policy_temperature", "model.generation.")  # to the result of an evaluation
_QUIET = 20.0  # seconds between two lines on how far it is


def evaluate_model(name: str, overrides: list[str], options: EvalOptions) -> int:
    """Prints each metric with its 95 % interval; per-problem scores and answers go to files."""
    split, checkpoint, out, distance = options.split, options.checkpoint, options.out, options.distance
    if distance < 0:
        raise UserError(f"--distance is {distance}: give the number of prompts to measure it on, 0 for none")
    before = None if options.against is None else _scores_in(options.against, split)
    for flag, file in (("out", out), ("texts", options.texts)):
        if file is not None and file.is_dir():
            raise UserError(f"--{flag} is {file}, a folder: give the name of a file")
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    if out is not None and options.texts is not None and out.resolve() == options.texts.resolve():
        raise UserError(f"--out and --texts are both {out}: give two names")
    begun, checkpoint = recipe_of(name, overrides, f"tba eval {name}", checkpoint)
    recipe = with_checkpoint(begun, checkpoint)
    console = terminal()
    for line in [] if checkpoint is None else _unlike(begun, Path(checkpoint)):
        console.print(line, style="yellow", highlight=False)
    source = Rebuilt(name, overrides)
    assessment, engine, prompts = measured(recipe, split, _shown(recipe, options), _Progress(), source)
    for e in assessment.evaluations:
        interval = wilson_interval(e.value * e.n, e.n)
        console.print(
            f"{e.metric:16} {e.value:7.2%}   95 % interval {interval.low:.2%} to {interval.high:.2%}   "
            f"{e.n} {split} problems",
            highlight=False,
        )
    of = f"{assessment.version.in_words}: " if assessment.version.step else ""
    console.print(f"{of}{assessment.tokens} tokens in {assessment.seconds:.1f} s", highlight=False)
    scores = {metric: [float(v) for v in values] for metric, values in assessment.scores.items()}
    facts = {"recipe": name, "overrides": overrides, "checkpoint": checkpoint, "split": split, "scores": scores}
    if distance:
        far = _distance(begun, engine, recipe, prompts[:distance], source)
        _tell_distance(console, far)
        facts["distance"] = asdict(far)
    if out is not None:
        write_json(out, facts)
    if options.texts is not None:
        _write_texts(options.texts, assessment.answers, console)
    if before is not None:  # last: what cannot be compared has been written all the same
        _tell_difference(console, before, assessment, options.against)
    return 0


def _unlike(recipe: Recipe, run: Path) -> Iterator[str]:
    """Yields what is asked or sampled otherwise than in the run whose checkpoint it is."""
    if not (run / "recipe.json").is_file():
        return
    for name, then, now in differences(RunDirectory.open(run).facts["resolved"], plain(resolved(recipe))):
        if name.startswith(_MATTERS):
            yield f"unlike the run at {run}: {name} is {now!r} here, {then!r} there"


def _scores_in(path: Path, split: str) -> Scores:
    facts = read_json(path, "give a file that `tba eval --out` wrote", scores=dict[str, list[float]])
    if facts.get("split", split) != split:
        raise UserError(f"{path} is of {facts['split']} problems, and this evaluation of {split}: give one of the same")
    scores: Scores = facts["scores"]
    return scores


def _tell_difference(console: Console, before: Scores, found: Assessment, path: Path | None) -> None:
    """Print, problem by problem, what changed since another evaluation. Raises `UserError` if it was of others."""
    shared = [metric for metric in found.scores if metric in before]
    if not shared:
        raise UserError(
            f"{path} has {', '.join(before) or 'no metric'}, and this evaluation {', '.join(found.scores)}: give one "
            "of the same metrics"
        )
    for metric in shared:
        others, values = before[metric], found.scores[metric]
        if len(others) != len(values):
            raise UserError(
                f"{path} has {len(others)} problems and this evaluation {len(values)}: give one of the same problems "
                "(--evaluation.problems)"
            )
        d = paired_difference(others, values)
        change, low, high = (hundredfold(share, sign=True) for share in (d.estimate, d.low, d.high))
        console.print(
            f"{metric:16} {change} points against {path} [{low}, {high}], paired by problem",
            highlight=False,
        )


class _Progress:
    """Says on standard error how far an evaluation of minutes is, now and then."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() - self.said >= _QUIET:
            self.said = time.monotonic()
            print(f"{done:,} of {of:,} questions", file=sys.stderr, flush=True)  # noqa: T201


def _shown(recipe: Recipe, options: EvalOptions) -> EvaluationSettings:
    """Returns the recipe, which keeps all answers if they are to be written."""
    if options.texts is None:
        return recipe.evaluation
    if recipe.record.hide_text:
        raise UserError(
            f"recipe {recipe.name} hides its texts, which --texts would write: give --record.no-hide-text with it"
        )
    return replace(recipe.evaluation, shown=1_000_000_000)


def _write_texts(path: Path, answers: Sequence[Answer], console: Console) -> None:
    """Write one line per answer, and print how long they are."""
    lines = [
        {"prompt": a.prompt, "response": a.completion, "reward": a.reward, "correct": a.correct, "metric": a.metric}
        for a in answers
    ]
    with replaced(path) as temporary:
        temporary.write_text("".join(json.dumps(plain(line)) + "\n" for line in lines), encoding="utf-8")
    words = np.mean([len(a.completion.split()) for a in answers]) if answers else 0.0
    console.print(f"{len(answers):,} answers of {words:.1f} words on average in {path}", highlight=False)


def _distance(begun: Recipe, engine: Engine, recipe: Recipe, prompts: Sequence[Prompt], source: Rebuilt) -> Divergence:
    """Print the distance to the recipe's initial model, from one answer to each prompt at the policy temperature."""
    with chdir("."):
        return divergence(
            engine,
            begun.model.prepared(begun.task).reference(recipe.policy_temperature, Version()),
            grader_of(recipe, source),
            prompts,
            1,
            np.random.default_rng([recipe.seed, 11]),
            policy_temperature=recipe.policy_temperature,
            chunk=recipe.evaluation.chunk,
        )


def _tell_distance(console: Console, found: Divergence) -> None:
    for line in (
        f"reward           {found.reward:.3f} (standard error {found.reward_error:.3f}), {found.prompts} answers of "
        f"{found.tokens:.1f} tokens on average",
        f"KL to the model that the recipe begins with: {found.kl:.2f} nats an answer (standard error "
        f"{found.kl_error:.2f}), {found.kl_per_token:.4f} a token",
        f"perplexity under that model: {found.perplexity:.3f} per token of an answer; by the tokens of prompts too, as "
        f"the paper counts, {found.perplexity_with_prompt:.3f}",
    ):
        console.print(line, highlight=False)
