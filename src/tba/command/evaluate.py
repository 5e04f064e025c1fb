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
from tba.evaluation.accuracy import AssessedAnswer, Assessment, EvaluationSettings
from tba.evaluation.divergence import Divergence, divergence
from tba.evaluation.estimators import paired_difference, wilson_interval
from tba.json_input import read_json
from tba.protocols import Engine
from tba.recipe import Recipe, differences, settings_json
from tba.record.jsonl import as_json, atomic_replacement, write_json
from tba.record.terminal import terminal
from tba.record.text import hundredfold
from tba.runs.evaluating import assess_recipe, recipe_of, with_checkpoint
from tba.runtime.graders import grader_of
from tba.runtime.isolation import RecipeSource
from tba.runtime.run_directory import RunDirectory
from tba.types import Prompt, Version

Scores: TypeAlias = Mapping[str, Sequence[float]]  # metric -> one for each problem, in order
# Of settings that change an evaluation's result.
_RELEVANT_PREFIXES = ("task.", "prompts.", "policy_temperature", "model.generation.")
_PROGRESS_SECONDS = 20.0  # seconds between two lines about the progress


def evaluate_model(name: str, overrides: list[str], options: EvalOptions) -> int:
    """Prints each metric with its 95 % interval; per-problem scores and answers go to files."""
    split, checkpoint, out, distance = options.split, options.checkpoint, options.out, options.distance
    if distance < 0:
        raise UserError(f"--distance is {distance}: give the number of prompts to measure it on, 0 for none")
    earlier_scores = None if options.against is None else _read_scores(options.against, split)
    for flag, file in (("out", out), ("texts", options.texts)):
        if file is not None and file.is_dir():
            raise UserError(f"--{flag} is {file}, a folder: give the name of a file")
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    if out is not None and options.texts is not None and out.resolve() == options.texts.resolve():
        raise UserError(f"--out and --texts are both {out}: give two names")
    initial_recipe, checkpoint = recipe_of(name, overrides, f"tba eval {name}", checkpoint)
    recipe = with_checkpoint(initial_recipe, checkpoint)
    console = terminal()
    for line in [] if checkpoint is None else _differences_to_run(initial_recipe, Path(checkpoint)):
        console.print(line, style="yellow", highlight=False)
    source = RecipeSource(name, overrides)
    assessment, engine, prompts = assess_recipe(recipe, split, _eval_settings(recipe, options), _Progress(), source)
    for e in assessment.evaluations:
        interval = wilson_interval(e.value * e.n, e.n)
        console.print(
            f"{e.metric:16} {e.value:7.2%}   95 % interval {interval.low:.2%} to {interval.high:.2%}   "
            f"{e.n} {split} problems",
            highlight=False,
        )
    version_prefix = f"{assessment.version.in_words}: " if assessment.version.step else ""
    console.print(f"{version_prefix}{assessment.tokens} tokens in {assessment.seconds:.1f} s", highlight=False)
    scores = {metric: [float(v) for v in values] for metric, values in assessment.scores.items()}
    facts = {"recipe": name, "overrides": overrides, "checkpoint": checkpoint, "split": split, "scores": scores}
    if distance:
        measured_distance = _measure_distance(initial_recipe, engine, recipe, prompts[:distance], source)
        _print_distance(console, measured_distance)
        facts["distance"] = asdict(measured_distance)
    if out is not None:
        write_json(out, facts)
    if options.texts is not None:
        _write_texts(options.texts, assessment.answers, console)
    if earlier_scores is not None:  # last: what cannot be compared has been written all the same
        _print_difference(console, earlier_scores, assessment, options.against)
    return 0


def _differences_to_run(recipe: Recipe, run: Path) -> Iterator[str]:
    """Yields a line for each setting of tasks or sampling that differs from the run that made the checkpoint."""
    if not (run / "recipe.json").is_file():
        return
    for name, run_value, value in differences(RunDirectory.open(run).facts["resolved"], as_json(settings_json(recipe))):
        if name.startswith(_RELEVANT_PREFIXES):
            yield f"unlike the run at {run}: {name} is {value!r} here, {run_value!r} there"


def _read_scores(path: Path, split: str) -> Scores:
    facts = read_json(path, "give a file that `tba eval --out` wrote", scores=dict[str, list[float]])
    if facts.get("split", split) != split:
        raise UserError(f"{path} is of {facts['split']} problems, and this evaluation of {split}: give one of the same")
    scores: Scores = facts["scores"]
    return scores


def _print_difference(console: Console, earlier_scores: Scores, assessment: Assessment, path: Path | None) -> None:
    """Print the change since an earlier evaluation, paired by problem. Raises `UserError` for one of other problems."""
    shared_metrics = [metric for metric in assessment.scores if metric in earlier_scores]
    if not shared_metrics:
        raise UserError(
            f"{path} has {', '.join(earlier_scores) or 'no metric'}, and this evaluation "
            f"{', '.join(assessment.scores)}: give one of the same metrics"
        )
    for metric in shared_metrics:
        earlier_values, values = earlier_scores[metric], assessment.scores[metric]
        if len(earlier_values) != len(values):
            raise UserError(
                f"{path} has {len(earlier_values)} problems and this evaluation {len(values)}: give one of the same "
                "problems (--evaluation.problems)"
            )
        d = paired_difference(earlier_values, values)
        change, low, high = (hundredfold(share, sign=True) for share in (d.estimate, d.low, d.high))
        console.print(f"{metric:16} {change} points against {path} [{low}, {high}], paired by problem", highlight=False)


class _Progress:
    """Prints the progress of a long evaluation to standard error, now and then."""

    def __init__(self) -> None:
        self.printed_at = time.monotonic()

    def __call__(self, answered_count: int, total: int) -> None:
        if time.monotonic() - self.printed_at >= _PROGRESS_SECONDS:
            self.printed_at = time.monotonic()
            print(f"{answered_count:,} of {total:,} questions", file=sys.stderr, flush=True)  # noqa: T201


def _eval_settings(recipe: Recipe, options: EvalOptions) -> EvaluationSettings:
    """Returns the recipe's settings of evaluation, with all answers recorded if they are to be written."""
    if options.texts is None:
        return recipe.evaluation
    if recipe.record.hide_text:
        raise UserError(f"recipe {recipe.name} hides its texts, which --texts would write: add --record.no-hide-text")
    return replace(recipe.evaluation, logged_problems=1_000_000_000)


def _write_texts(path: Path, answers: Sequence[AssessedAnswer], console: Console) -> None:
    """Write one line per answer, and print how long they are."""
    lines = [
        {"prompt": a.prompt, "response": a.completion, "reward": a.reward, "correct": a.correct, "metric": a.metric}
        for a in answers
    ]
    with atomic_replacement(path) as temporary_path:
        temporary_path.write_text("".join(json.dumps(as_json(line)) + "\n" for line in lines), encoding="utf-8")
    words = np.mean([len(a.completion.split()) for a in answers]) if answers else 0.0
    console.print(f"{len(answers):,} answers of {words:.1f} words on average in {path}", highlight=False)


def _measure_distance(
    base: Recipe, engine: Engine, recipe: Recipe, prompts: Sequence[Prompt], source: RecipeSource
) -> Divergence:
    """Returns the distance to the recipe's initial model, from one answer to each prompt at the policy temperature."""
    with chdir("."):
        return divergence(
            engine,
            base.model.prepared(base.task).reference(recipe.policy_temperature, Version()),
            grader_of(recipe, source),
            prompts,
            1,
            np.random.default_rng([recipe.seed, 11]),
            policy_temperature=recipe.policy_temperature,
            chunk=recipe.evaluation.batch_size,
        )


def _print_distance(console: Console, result: Divergence) -> None:
    for line in (
        f"reward           {result.reward:.3f} (standard error {result.reward_error:.3f}), {result.prompts} answers of "
        f"{result.tokens:.1f} tokens on average",
        f"KL to the model that the recipe begins with: {result.kl:.2f} nats an answer (standard error "
        f"{result.kl_error:.2f}), {result.kl_per_token:.4f} a token",
        f"perplexity under that model: {result.perplexity:.3f} per token of an answer; by the tokens of prompts too, "
        f"as the paper counts, {result.perplexity_with_prompt:.3f}",
    ):
        console.print(line, highlight=False)
