"""Says whether a recipe can run here, and what is odd about it, before anything is made."""

from __future__ import annotations

import importlib.util
import math
import os

import numpy as np

from tba.engines.vllm_surface import require_vllm, untested_warning
from tba.errors import UserError
from tba.gpus import visible_gpus
from tba.objectives.grpo import Grpo
from tba.objectives.policy_gradient import Reinforce
from tba.protocols import Acted, Examined, HasChatTemplate, HasGeneration, HasOffPolicy, Model, RunsPrograms
from tba.recipe import Recipe
from tba.record.text import plural
from tba.replay.selection import RecencyReward
from tba.rewards.functions import check_fields
from tba.runtime.graders import reward_of
from tba.runtime.hardware import Machine
from tba.runtime.prompt_sets import prompt_set_of
from tba.runtime.sizing import places_on
from tba.types import SPLITS, Sampling
from tba.user_code import problems_of

_EXPLORATION_DRAWS = 64  # of an exploration, to see how it samples
_LEAST_HELD_OUT = 25  # problems: the standard error of an accuracy on fewer is up to 10 points and more


def validate(recipe: Recipe) -> list[str]:
    """Returns warnings. Raises `UserError` for a recipe that cannot run."""
    warnings = []
    if fault := visible_gpus().fault:
        warnings.append(
            f"the GPUs of this machine are left alone, since CUDA cannot be started ({fault}): install the build of "
            "torch that suits their driver, which `python tools/preflight.py` names, or the CPU build (TORCH=cpu)"
        )
    recipe.record.has_tensorboard()
    recipe.record.prometheus.validate()
    if recipe.runtime == "cluster":
        require_ray()
        if recipe.run.backup is not None and not recipe.run.backup.is_absolute():
            raise UserError(
                f"--run.backup is {recipe.run.backup}, which is another folder on each node of a cluster: give an "
                "absolute path on the shared disk"
            )
    elif isinstance(recipe.model, HasGeneration) and recipe.model.generation.engine == "vllm":
        require_vllm()
        if warning := untested_warning():
            warnings.append(warning)
    if recipe.runtime == "processes":
        places_on(recipe, Machine.here())
    if not recipe.exploration.full_support:
        warnings.append(
            "no searcher's sampling has full support (top-p below 1, top-k, min-p or temperature 0): Trajectory "
            "Balance determines the policy only on what can be sampled; set --exploration.top-p 1, and no top-k or "
            "min-p, to determine it everywhere"
        )
    if recipe.model.never_sampled:
        warnings.append(
            f"no searcher samples {' or '.join(recipe.model.never_sampled)} (the engine's rules): Trajectory Balance "
            "determines the policy only on what can be sampled; elsewhere it stays as it happens to be"
        )
    warnings += [*_sampling_warnings(recipe), *_group_warnings(recipe), *_frequency_warnings(recipe)]
    if recipe.vine is not None and "step_value" not in recipe.objective.needs:
        warnings.append(
            "searchers continue answers from each step (the recipe's vine), but the objective uses no step values: "
            "leave the vine out"
        )
    if recipe.trainer.count > 1:
        warnings.append(
            "over several ranks the trainer's figures below are those of one rank, or computed where one would not fit"
        )
    if recipe.runtime == "cluster" and recipe.cluster.searcher_gpus and recipe.cluster.trainer_gpus == 0:
        warnings.append("searchers ask for GPUs and the trainer for none: set --cluster.trainer-gpus, or it has none")
    parts = recipe.searcher_count + recipe.trainer.count
    cores = os.cpu_count() or 1
    if recipe.runtime == "processes" and parts * recipe.run.threads > cores and not visible_gpus():
        warnings.append(f"{parts} processes share {cores} cores: they will slow each other down")
    return warnings


def _sampling_warnings(recipe: Recipe) -> list[str]:
    """Returns a warning about an objective of ratios whose answers are not sampled as the policy has them."""
    corrects_ratios = isinstance(recipe.objective, HasOffPolicy) and recipe.objective.off_policy != "none"
    if recipe.offline or not (corrects_ratios or "log_behavior" in recipe.objective.needs):
        return []
    rng, temperature = np.random.default_rng(0), recipe.policy_temperature
    samplings = [recipe.exploration.draw(rng) for _ in range(_EXPLORATION_DRAWS)]
    other_samplings = [sampling for sampling in samplings if sampling != Sampling(temperature)]
    if not other_samplings:
        return []
    share = len(other_samplings) / len(samplings)
    share_text = "answers are" if share == 1 else f"{share:.0%} of the rounds are"
    example = other_samplings[0]
    text = f"temperature {example.temperature:g}" + (f" and top-p {example.top_p:g}" if example.top_p < 1 else "")
    text += f" and top-k {example.top_k}" if example.top_k else ""
    text += f" and min-p {example.min_p:g}" if example.min_p else ""
    text += f" and a repetition penalty of {example.repetition_penalty:g}" if example.repetition_penalty != 1 else ""
    return [
        f"{share_text} sampled otherwise than from the policy that the objective takes their ratios to "
        f"({text}, the policy's is temperature {temperature:g} with all tokens): these ratios are then not 1 "
        f"even when nothing is stale; sample with --exploration.temperature {temperature:g} --exploration.top-p 1 and "
        "no top-k, min-p or repetition penalty, or set --policy-temperature to what is sampled at"
    ]


def _group_warnings(recipe: Recipe) -> list[str]:
    """Returns warnings about groups that a round does not fill."""
    selection, samples, fresh_answers = recipe.replay.selection, recipe.samples_per_prompt, recipe.group_size
    is_newest_only = False
    if isinstance(selection, RecencyReward):
        is_newest_only = selection.m == 1 and recipe.sync_every == 1
        if selection.mix == "group":  # a part of each group is from memory
            fresh_answers = math.ceil(round(selection.m * fresh_answers, 9))
    warnings = []
    if samples < fresh_answers:
        warnings.append(
            f"S = {samples} samples per prompt are fewer than K = {recipe.group_size}: groups stay ragged until a "
            "prompt comes round again; set --samples-per-prompt higher"
        )
    if is_newest_only and recipe.replay.buffer.deduplicate and samples <= fresh_answers:
        warnings.append(
            "all groups are to be of the newest round, but of equal answers one is kept, and older data fill a group "
            "that has fewer than K: set --replay.buffer.no-deduplicate to be on-policy"
        )
    return warnings


def _frequency_warnings(recipe: Recipe) -> list[str]:
    """Returns warnings where groups misrepresent how often an answer is sampled and the optimum depends on it
    (docs/method.md).
    """
    match recipe.objective:
        case Reinforce(baseline="none", beta=beta):
            method, remedy = "REINFORCE without a baseline", "--objective.baseline leave_one_out"
        case Grpo(penalty="loss", beta=beta):
            method, remedy = "GRPO or Dr. GRPO with the divergence in the loss", "--objective.penalty reward"
        case _:
            return []
    selection = recipe.replay.selection
    causes = {}
    if recipe.replay.buffer.deduplicate:
        causes["of equal answers one is kept"] = "--replay.buffer.no-deduplicate"
    if isinstance(selection, RecencyReward) and selection.inverse_temperature and selection.m < 1:
        causes["groups are drawn by reward"] = "--replay.selection.inverse-temperature 0"
    if not causes or not beta(1):
        return []
    return [
        f"{' and '.join(causes)}, which moves the optimum of {method}, since that depends on how often an answer "
        f"comes: set {' and '.join(causes.values())}, or {remedy}, whose optimum does not"
    ]


def notes_on_prompts(recipe: Recipe) -> list[str]:
    """Returns more warnings, those that need the task's problems, and how programs are isolated where a reward runs
    some. Raises `UserError` for a task that has no problems.
    """
    held_out, reward = problems_of(recipe.task, "eval"), reward_of(recipe.task)
    problems, buffer = problems_of(recipe.task, "train")[: recipe.prompts.limit], recipe.replay.buffer
    check_fields(reward, problems, recipe.task.name)
    if not isinstance(recipe.task, Examined):  # else they are graded by another
        check_fields(reward, held_out, f"{recipe.task.name} (held out)")
    runners: list[object] = [reward, *([recipe.task.environment] if isinstance(recipe.task, Acted) else [])]
    notes = [runner.isolation([*problems, *held_out]) for runner in runners if isinstance(runner, RunsPrograms)]
    has_arguments = isinstance(recipe.model, HasChatTemplate) and recipe.model.template_arguments
    if has_arguments and all(isinstance(p.prompt, str) for p in problems):
        return [
            *notes,
            "--model.template-arguments has no effect: the prompts are texts, to which no template is applied",
        ]
    if buffer.per_prompt < buffer.total and len({(str(p.prompt), p.seed) for p in problems}) == 1:
        return [
            *notes,
            f"the task has one prompt, of which replay keeps {buffer.per_prompt:,} trajectories, though there is room "
            f"for {buffer.total:,}: set --replay.buffer.per-prompt {buffer.total} to keep as many",
        ]
    return notes


def notes_on_data(recipe: Recipe, model: Model) -> list[str]:
    """Returns more warnings, those that need the prompts as the prepared model reads them: on prompts left out, prompts
    in both splits, and a held-out split that is too small. Raises `UserError` where none are left, or the model has no
    room for them.
    """
    pools = {split: prompt_set_of(recipe, model, split) for split in SPLITS}
    notes = [pool.note for pool in pools.values() if pool.note]
    train, held_out = ([(p.text.strip(), p.seed) for p in pools[split].prompts] for split in SPLITS)
    train_keys = set(train)
    if (shared_count := sum(key in train_keys for key in held_out)) and len(train_keys) > 1:
        notes.append(
            f"{shared_count:,} of {len(held_out):,} held-out problems are trained on too, so that their accuracy is "
            "not that of new ones: keep the splits apart"
        )
    if len(train_keys) > 1 and len(held_out) < min(_LEAST_HELD_OUT, recipe.evaluation.problems or _LEAST_HELD_OUT):
        notes.append(
            f"{plural(len(held_out), 'problem')} {'is' if len(held_out) == 1 else 'are'} held out, so that one answer "
            f"moves the accuracy by {100 / len(held_out):.0f} points: hold out {_LEAST_HELD_OUT} or more (another file "
            "or share of the data)"
        )
    answers: dict[tuple[str, int | None], set[str]] = {}
    for prompt in pools["train"].prompts:
        answers.setdefault((prompt.key, prompt.seed), set()).add(repr(prompt.fields.get("answer")))
    if conflicts := sum(len(right_answers) > 1 for right_answers in answers.values()):
        notes.append(
            f"{conflicts:,} training prompts come more than once, with different right answers: the rewards of a "
            "prompt contradict one another; keep one row of each"
        )
    return notes


def require_ray() -> None:
    """Raises `UserError` when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("a cluster needs Ray, which is not installed: pip install -e '.[cluster]'")
