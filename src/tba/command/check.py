"""`tba check`: says whether a recipe can learn and estimates the memory and time of its run, without making a run.

What each part needs at most is computed first (`tba.runtime.needs`), and what cannot fit is refused before it is tried
(`tba.runtime.sizing`).

The estimate multiplies the times of a few rounds and steps of the recipe's own searcher and trainer. Each is timed in a
process of its own, both at the same time, as in a run (`tba.command.probe`). Nothing is written or learnt.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.text import Text

from tba.cards import cards
from tba.command.probe import UPDATES
from tba.command.signal import Signal
from tba.engines.vllm import require_vllm
from tba.errors import DeadlineExceeded, UserError
from tba.foreign import problems_of
from tba.models.arithmetic import passes, shape_of
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape
from tba.objectives.grpo import Grpo
from tba.objectives.policy_gradient import Reinforce
from tba.protocols import Examined, Model
from tba.recipe import Recipe
from tba.record.memory import machine_memory_bytes
from tba.record.show import pairs, section
from tba.record.terminal import Shown, terminal
from tba.record.text import count, duration, percent, printable, size
from tba.replay.buffer import OF_BODY, OF_TOKEN
from tba.replay.selection import RecencyReward
from tba.rewards.functions import check_fields
from tba.runtime.cluster.placement import Placed, plan, table, this_machine, whereabouts
from tba.runtime.devices import USABLE, environment_of, visible
from tba.runtime.local.forkserver import Program, prepare, start
from tba.runtime.needs import Kept, kept_on_disk, needs, seconds_to_move
from tba.runtime.prompting import asked_of, reward_of
from tba.runtime.sizing import Machine, places_on, refuse_what_cannot_fit, searchers_of, sized, unused
from tba.settings import find, override
from tba.training.ranks.messages import RankSettings
from tba.types import SPLITS, Sampling

_DEADLINE = 1800.0  # seconds for one probe
_SECONDS = 3.0  # for which searcher and trainer are timed at least, at the same time
_DRAWS = 64  # of an exploration, to see how it samples
_POLL = 0.02  # seconds between two checks whether a probe has ended
# by which two passes over the same token may differ, in which it has other neighbours: a few units of the last place of
# logits of up to 20
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.5}
_TAUGHT = "Nothing stands in the way: the teacher tells answers apart, and few are cut off or empty."


def validate(recipe: Recipe) -> list[str]:
    """Returns warnings. Raises `UserError` for a recipe that cannot run."""
    warnings = []
    if fault := cards().fault:
        warnings.append(
            f"the GPUs of this machine are left alone, since CUDA cannot be started ({fault}): install the build of "
            "torch that suits their driver, which `python tools/preflight.py` names, or the CPU build (TORCH=cpu)"
        )
    recipe.record.has_tensorboard()
    if recipe.runtime == "cluster":
        require_ray()
    elif getattr(getattr(recipe.model, "generation", None), "engine", "") == "vllm":
        require_vllm()
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
    warnings += [*_on_sampling(recipe), *_on_groups(recipe), *_on_frequencies(recipe)]
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
    if recipe.runtime == "processes" and parts * recipe.run.threads > cores and not cards():
        warnings.append(f"{parts} processes share {cores} cores: they will slow each other down")
    return warnings


def _on_sampling(recipe: Recipe) -> list[str]:
    """Returns a warning about an objective of ratios whose answers are not sampled as the policy has them."""
    corrects = getattr(recipe.objective, "off_policy", "none") != "none"  # of Trajectory Balance, which can do without
    if recipe.offline or not (corrects or "log_behavior" in recipe.objective.needs):
        return []
    rng, own = np.random.default_rng(0), recipe.policy_temperature
    drawn = [recipe.exploration.draw(rng) for _ in range(_DRAWS)]
    other = [sampling for sampling in drawn if sampling != Sampling(own)]
    if not other:
        return []
    share = "answers are" if len(other) == len(drawn) else f"{len(other) / len(drawn):.0%} of the rounds are"
    first = other[0]
    how = f"temperature {first.temperature:g}" + (f" and top-p {first.top_p:g}" if first.top_p < 1 else "")
    how += f" and top-k {first.top_k}" if first.top_k else ""
    how += f" and min-p {first.min_p:g}" if first.min_p else ""
    how += f" and a repetition penalty of {first.repetition_penalty:g}" if first.repetition_penalty != 1 else ""
    return [
        f"{share} sampled otherwise than from the policy that the objective takes their ratios to ({how}, the policy's "
        f"is temperature {own:g} with all tokens): these ratios are then not 1 even when nothing is stale; sample with "
        f"--exploration.temperature {own:g} --exploration.top-p 1 and no top-k, min-p or repetition penalty, or set "
        "--policy-temperature to what is sampled at"
    ]


def _on_groups(recipe: Recipe) -> list[str]:
    """Returns warnings about groups that a round does not fill."""
    selection, sampled, fresh = recipe.replay.selection, recipe.samples_per_prompt, recipe.group_size
    newest = False
    if isinstance(selection, RecencyReward):
        newest = selection.m == 1 and recipe.sync_every == 1
        if selection.mix == "group":  # a part of each group is from memory
            fresh = math.ceil(round(selection.m * fresh, 9))
    warnings = []
    if sampled < fresh:
        warnings.append(
            f"S = {sampled} samples per prompt are fewer than K = {recipe.group_size}: groups stay ragged until a "
            "prompt comes round again; set --samples-per-prompt higher"
        )
    if newest and recipe.replay.buffer.distinct and sampled <= fresh:
        warnings.append(
            "all groups are to be of the newest round, but of equal answers one is kept, and older data fill a group "
            "that has fewer than K: set --replay.buffer.no-distinct to be on-policy"
        )
    return warnings


def _on_frequencies(recipe: Recipe) -> list[str]:
    """Returns warnings where groups misrepresent how often an answer is sampled and the optimum depends on it
    (docs/method.md).
    """
    match recipe.objective:
        case Reinforce(baseline="none", beta=beta):
            what, other = "REINFORCE without a baseline", "--objective.baseline leave_one_out"
        case Grpo(penalty="loss", beta=beta):
            what, other = "GRPO or Dr. GRPO with the divergence in the loss", "--objective.penalty reward"
        case _:
            return []
    selection = recipe.replay.selection
    causes = {}
    if recipe.replay.buffer.distinct:
        causes["of equal answers one is kept"] = "--replay.buffer.no-distinct"
    if isinstance(selection, RecencyReward) and selection.inverse_temperature and selection.m < 1:
        causes["groups are drawn by reward"] = "--replay.selection.inverse-temperature 0"
    if not causes or not beta(1):
        return []
    return [
        f"{' and '.join(causes)}, which moves the optimum of {what}, since that depends on how often an answer comes: "
        f"set {' and '.join(causes.values())}, or {other}, whose optimum does not"
    ]


def notes_on_prompts(recipe: Recipe) -> list[str]:
    """Returns more warnings, those that need the task's problems. Raises `UserError` for a task that has none."""
    held_out, reward = problems_of(recipe.task, "eval"), reward_of(recipe.task)
    problems, buffer = problems_of(recipe.task, "train")[: recipe.prompts.limit], recipe.replay.buffer
    check_fields(reward, problems, recipe.task.name)
    if not isinstance(recipe.task, Examined):  # else they are graded by another
        check_fields(reward, held_out, f"{recipe.task.name} (held out)")
    if getattr(recipe.model, "template_arguments", ()) and all(isinstance(p.prompt, str) for p in problems):
        return ["--model.template-arguments has no effect: the prompts are texts, to which no template is applied"]
    if buffer.per_prompt < buffer.total and len({(str(p.prompt), p.seed) for p in problems}) == 1:
        return [
            f"the task has one prompt, of which replay keeps {buffer.per_prompt:,} trajectories, though there is room "
            f"for {buffer.total:,}: set --replay.buffer.per-prompt {buffer.total} to keep as many"
        ]
    return []


def notes_on_data(recipe: Recipe, model: Model) -> list[str]:
    """Returns more warnings, those that need the prompts as the prepared model reads them: what is left out, and what
    is in both splits. Raises `UserError` where none are left, or the model has no room for them.
    """
    asked = {split: asked_of(recipe, model, split) for split in SPLITS}
    found = [each.note for each in asked.values() if each.note]
    train, held_out = ([(p.text.strip(), p.seed) for p in asked[split].prompts] for split in SPLITS)
    known = set(train)
    if (both := sum(one in known for one in held_out)) and len(known) > 1:
        found.append(
            f"{both:,} of {len(held_out):,} held-out problems are trained on too, so that their accuracy is not that "
            "of new ones: keep the splits apart"
        )
    answers: dict[tuple[str, int | None], set[str]] = {}
    for prompt in asked["train"].prompts:
        answers.setdefault((prompt.key, prompt.seed), set()).add(repr(prompt.fields.get("answer")))
    if several := sum(len(own) > 1 for own in answers.values()):
        found.append(
            f"{several:,} training prompts come more than once, with different right answers: the rewards of a prompt "
            "contradict one another; keep one row of each"
        )
    return found


def require_ray() -> None:
    """Raises `UserError` when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("a cluster needs Ray, which is not installed: pip install -e '.[cluster]'")


def check_recipe(name: str, overrides: list[str]) -> int:
    """Prints the recipe, what there is to learn from, the estimate, and what to change."""
    prepare()  # while there is one thread
    recipe = override(find(name), overrides, f"tba check {name}")
    console = terminal()
    console.print(": ".join(filter(None, (recipe.name, recipe.description))), highlight=False)
    warnings = [*validate(recipe), *notes_on_prompts(recipe)]
    prepared = recipe.model.prepared(recipe.task, lambda line: console.print(line, highlight=False))
    warnings += notes_on_data(recipe, prepared)
    placed = planned(recipe) if recipe.runtime == "cluster" else []
    made, decided, computed = fitted(replace(recipe, model=prepared), Machine.here())
    recipe, overrides = override(recipe, decided, f"tba check {name}", recorded=True), [*overrides, *decided]
    for title, found in computed.items():
        console.print(section(title, pairs(found)))
    warnings += [] if (idle := unused(made, Machine.here())) is None else [idle]
    refuse_what_cannot_fit(made, Machine.here())
    shape = shape_of(prepared)
    console.print()
    try:
        e = estimate(made, name, overrides, shape, lambda line: console.print(f"{line} ...", style="dim"))
    except UserError:
        for line in whereabouts(placed):
            console.print(f"on {line}", highlight=False)
        raise
    console.print(section("What there is to learn from", pairs(e.signal.facts(any(recipe.teachers.shares(1))))))
    if not recipe.record.hide_text:
        console.print(section("Prompts and answers", e.signal.examples()))
    own = machine_memory_bytes()
    console.print(section("What a run takes", pairs(_figures(made, e, own))))
    for line in table(placed, e.trainer_bytes, e.searcher_bytes, e.weights_bytes) if placed else ():
        console.print(f"on {line}", highlight=False)
    if e.log_ratio is not None and e.log_ratio > _ROUNDING.get(recipe.model.compute, 0.5):
        warnings.append(
            f"at the same weights the trainer's log-probabilities differ by {e.log_ratio:.1g} from those of the "
            "searchers' reference: log-ratios begin with noise"
        )
    if e.effective is not None and e.effective < 0.5:
        warnings.append(
            f"within {UPDATES} updates the policy has left the answers that it began with (effective sample size "
            f"{percent(e.effective)}), so that what it learns from is stale at once: set --optimizer.lr to a third of "
            f"{recipe.optimizer.lr:g}, or a longer --optimizer.schedule.warmup"
        )
    advice = [*warnings, *e.signal.advice(recipe)]
    lines = [Text(f"warning: {printable(line)}", style="yellow") for line in advice]
    good = _TAUGHT if any(recipe.teachers.shares(1)) else e.signal.good
    console.print(section("Will it learn?", Group(*lines or [Text(good)])))
    total = e.trainer_bytes + recipe.searcher_count * e.searcher_bytes
    if own and total > own and recipe.runtime != "cluster":
        raise UserError(
            f"the run needs about {size(total)} of memory and this machine has {size(own)}: "
            "use a smaller model, fewer searchers or a smaller --max-tokens-per-pass"
        )
    return 0


def fitted(recipe: Recipe, machine: Machine) -> tuple[Recipe, list[str], dict[str, dict[str, str]]]:
    """Returns a recipe whose model is prepared with what it leaves open decided, the flags of that, and for people, by
    title: where its workers run, and what they need at most.
    """
    decided = sized(recipe, machine)
    recipe = override(recipe, decided, "", recorded=True)
    said = {}
    if recipe.runtime != "cluster":
        said["Where it runs"] = {part: str(place) for part, place in places_on(recipe, machine).items()}
    if computed := {need.part: str(need) for need in needs(recipe)}:
        said["Needed at most, computed (docs/scaling.md)"] = computed
    return recipe, decided, said


def _figures(recipe: Recipe, e: Estimate, own: int | None) -> dict[str, str]:
    """Returns what was measured, and what follows from it for a run, by name; own: the machine's memory."""
    answered = e.tokens_per_round / e.round_seconds
    trained = e.tokens_per_trajectory * recipe.groups_per_step * recipe.group_size / e.step_seconds
    compute = str(recipe.model.compute).removeprefix("torch.")
    at_least = "" if e.trainer_measured else "at least "
    found = {
        "searcher": f"{e.tokens_per_round:,.0f} tokens of answers in a round of {e.round_seconds:.3f} s: "
        f"{count(answered)} tokens/s each",
        "trainer": f"a step takes {at_least}{e.step_seconds:.3f} s: {count(trained)} tokens/s"
        + ("" if e.trainer_measured else f" (computed: its products alone, over {recipe.trainer.count} ranks)"),
        "moments": _of_moments(recipe),
        "processor": _of_products(e, compute),
        "uses": f"{e.uses or 0:.1f} per trajectory on average (limit {recipe.replay.pacing.max_mean_uses:g})",
        "time": f"{duration(e.total_seconds)} for {recipe.steps} steps, of which start-up {duration(e.start_seconds)} "
        f"and evaluations before and after {duration(e.evaluation_seconds)}",
        "disk": _on_disk(recipe, e),
        "memory": f"at its peak: {f'trainer {size(e.trainer_bytes)}, ' if e.trainer_bytes else ''}each searcher "
        + size(e.searcher_bytes)
        + (f"; this machine has {size(own)}" if own else ""),
        "GPU memory": _on_gpus(e),
        "precision": ""
        if e.log_ratio is None
        else f"before any update the trainer and the reference differ by at most {e.log_ratio:.1g} in a token's "
        f"log-probability ({compute})",
        "drift": ""
        if e.effective is None
        else f"after {UPDATES} updates the answers from before them have an effective sample size of "
        f"{percent(e.effective)}",
    }
    if recipe.offline:
        del found["searcher"], found["uses"]
    return {name: value for name, value in found.items() if value}


def _of_moments(recipe: Recipe) -> str:
    """Returns what moments in the host's memory cost; nothing where there are none."""
    moved = [need.total for need in needs(recipe) if need.part == "host"]
    if not moved:
        return ""
    return (
        f"{size(moved[0])} of each rank's are in the host's memory: to the GPU and back they take about "
        f"{seconds_to_move(recipe):.1f} s of an update (43 GB/s there and 55 back, as measured on an H200)"
    )


def _of_products(e: Estimate, compute: str) -> str:
    """Returns how near both halves are to what the processor does at best; nothing for a model of unknown shape."""
    if e.step_operations is None:
        return ""
    most = e.product_rates[compute]
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in e.product_rates.items())
    shares = f"a step {100 * e.step_operations / e.step_seconds / most:.0f} %"
    if e.generation_operations is not None:
        shares = f"generation {100 * e.generation_operations / e.generation_seconds / most:.0f} %, {shares}"
    return f"a product of matrices runs at {rates}; of that in {compute} reach: {shares}"


def _on_gpus(e: Estimate) -> str:
    """Returns the GPU memory that the searcher and the trainer use, if any."""
    trainer = "trainer" if e.trainer_measured else "each rank of the trainer (computed)"
    halves = {trainer: e.trainer_gpu_bytes, "each searcher": e.searcher_gpu_bytes}
    held = ", ".join(f"{half} {size(held)}" for half, held in halves.items() if held is not None)
    return held and f"at its peak: {held}"


def _on_disk(recipe: Recipe, e: Estimate) -> str:
    """Returns what checkpoints and versions take, and how long the journal's limit lasts at these speeds."""
    kept = kept_on_disk(recipe)
    said = [] if kept is None else [of_disk(kept)]
    a_day = 86_400 * e.trajectories_per_second * (OF_BODY + e.tokens_per_trajectory * OF_TOKEN) / 1e9
    keep = recipe.replay.keep_gb
    if a_day:
        lasts = "all is kept" if keep is None else f"--replay.keep-gb {keep:g} holds {keep / a_day:,.1f} days of it"
        said.append(f"the journal grows by {a_day:,.1f} GB a day, {lasts}")
    return "; ".join(said)


def of_disk(kept: Kept) -> str:
    """Returns what checkpoints and versions take on the disk, in words."""
    return (
        f"{_gb(kept.total)} for {kept.checkpoints} checkpoints of {_gb(kept.checkpoint)} (--run.checkpoints, and one "
        f"that is being written) and {kept.versions} versions of the weights of {_gb(kept.version)}"
    )


def _gb(n: int) -> str:
    return f"{n / 1e9:,.0f} GB" if n >= 1e10 else f"{n / 1e9:,.1f} GB" if n >= 1e8 else f"{n / 1e6:,.1f} MB"


def planned(recipe: Recipe) -> list[Placed]:
    """Returns where everything will run: on the nodes of the cluster at `--address`, else on this machine.

    Raises `UserError` when it does not fit.
    """
    searchers = searchers_of(recipe)
    if recipe.address is None:
        return plan(recipe, [this_machine()], searchers)
    from tba.runtime.cluster.client import connected  # needs Ray

    with connected(recipe.address) as nodes:
        return plan(recipe, nodes, searchers)


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """Seconds and bytes of a run, extrapolated from a few rounds and steps."""

    start_seconds: float  # until both halves are up
    round_seconds: float
    step_seconds: float  # measured, or at least: its products alone, over all ranks
    tokens_per_round: float
    tokens_per_trajectory: float
    trajectories_per_second: float  # of all searchers together
    evaluation_seconds: float  # before and after; those in between overlap training
    total_seconds: float
    product_rates: dict[str, float]  # operations a second of a product of matrices, by precision
    generation_seconds: float  # of a round, without its judgement and the reference
    generation_operations: float | None  # of a round; None offline, or where the model's shape is unknown
    step_operations: float | None  # of a step, forward and backward
    uses: float | None  # None offline: what was imported decides
    trainer_bytes: int
    searcher_bytes: int
    weights_bytes: int  # of one published version
    log_ratio: float | None  # the largest of any token, between the trainer's weights and the reference at version 0
    effective: float | None  # share of answers from before the first updates (`probe.UPDATES`) that still count after
    signal: Signal  # whether there is anything to learn from
    trainer_gpu_bytes: int | None  # of each rank; None: it uses no GPU
    searcher_gpu_bytes: int | None
    trainer_measured: bool = True  # otherwise what the trainer takes is computed

    def _shown(self) -> RenderableType:
        took = {
            "time": f"{duration(self.total_seconds)}, of which start-up {duration(self.start_seconds)} and evaluations "
            f"{duration(self.evaluation_seconds)}",
            "searcher": f"a round takes {self.round_seconds:.3f} s, {self.tokens_per_round:,.0f} tokens of answers",
            "trainer": f"a step takes {self.step_seconds:.3f} s",
            "memory": f"trainer {size(self.trainer_bytes)}, each searcher {size(self.searcher_bytes)}",
        }
        learnt = section("What there is to learn from", pairs(self.signal.facts()))
        return Group(learnt, section("What a run takes", pairs(took)))


def estimate(
    recipe: Recipe,
    name: str,
    overrides: list[str],
    shape: Shape | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Estimate:
    """Probes searcher and trainer at the same time, after a first probe of how long answers are.

    Each sees the GPUs of its place and keeps to its share of them. A trainer that does not fit as one rank is computed.
    say: is told what is being done.
    """
    machine = Machine.here()
    where = _environments(recipe, machine)
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"
        say("sampling answers")
        with _Probe("searcher", name, overrides, answers, at_least=0.0, seed=0, own=where["searcher-0"]) as looking:
            first = looking.result()
        answers.write_text(json.dumps(first["answers"]))
        say("timing rounds of the searcher and steps of the trainer, at the same time")
        with ExitStack() as ends:
            searching = ends.enter_context(
                _Probe("searcher", name, overrides, answers, at_least=_SECONDS, seed=1, own=where["searcher-0"])
            )
            training = None
            if one_rank_fits(recipe, machine):
                training = ends.enter_context(
                    _Probe("trainer", name, overrides, answers, at_least=_SECONDS, own=where["trainer"])
                )
            searcher = searching.result()
            trainer = _computed(recipe, shape, searcher) if training is None else training.result()
    per_round = recipe.prompts_per_round * recipe.samples_per_prompt
    per_step = recipe.groups_per_step * recipe.group_size
    round_seconds, step_seconds = searcher["round_seconds"], trainer["step_seconds"]
    start = searcher["seconds"] - searcher["timed_seconds"]
    settings = recipe.evaluation
    answers = searcher["held_out"] * (int(settings.greedy) + settings.draws)
    evaluation = answers * searcher["generation_seconds"] / per_round
    limit = recipe.replay.pacing.max_mean_uses
    if recipe.offline:
        rate, working = 0.0, recipe.steps * step_seconds
    elif recipe.runtime == "inline":
        turns = recipe.steps / recipe.sync_every * recipe.run.inline_rounds_per_sync
        working = recipe.steps * step_seconds + turns * round_seconds
        rate = turns * per_round / working
    else:
        rate = recipe.searcher_count * per_round / round_seconds
        working = recipe.steps * max(step_seconds, per_step / limit / rate)
    warm_up = recipe.replay.pacing.warm_up / rate if rate else 0.0
    kept = min(recipe.replay.buffer.total, rate * working) if rate else recipe.replay.buffer.total
    lengths = [len(tokens) for _, rows in first["answers"] for tokens, *_ in rows]
    length = sum(lengths) / len(lengths)
    generation_operations = step_operations = None
    if shape is not None:
        (read, generated), (asked, answered) = searcher["tokens"], trainer["tokens"]
        if not recipe.offline:
            generation_operations = shape.operations(read + generated, generated)
        assert isinstance(recipe.model, HuggingFace)  # other models have no shape
        step_operations = passes(recipe.model.lora.rank) * shape.operations(asked + answered, answered)
    return Estimate(
        start_seconds=start,
        round_seconds=round_seconds,
        step_seconds=step_seconds,
        product_rates=trainer["product_rates"],
        generation_seconds=searcher["generation_seconds"],
        generation_operations=generation_operations,
        step_operations=step_operations,
        tokens_per_round=per_round * length,
        tokens_per_trajectory=length,
        trajectories_per_second=rate,
        evaluation_seconds=2 * evaluation,
        total_seconds=start + 2 * evaluation + warm_up + working,
        uses=min(recipe.steps * per_step / (rate * working), limit) if rate else None,
        trainer_bytes=trainer["peak_memory_bytes"] + int(kept * trainer["trajectory_bytes"]),
        trainer_measured=training is not None,
        searcher_bytes=searcher["peak_memory_bytes"],
        weights_bytes=trainer["weights_bytes"],
        log_ratio=trainer["log_ratio"],
        effective=trainer["effective"],
        signal=Signal.of([first, searcher]),
        trainer_gpu_bytes=trainer["peak_gpu_bytes"],
        searcher_gpu_bytes=searcher["peak_gpu_bytes"],
    )


def one_rank_fits(recipe: Recipe, machine: Machine) -> bool:
    """Whether the trainer can be measured as one process: it is one, or would fit into the memory of one place."""
    if recipe.trainer.count == 1:
        return True
    found = {need.part: need for need in needs(replace(recipe, trainer=RankSettings(1)))}
    if not found:
        return True
    alone = found["trainer"]
    there = USABLE * min(machine.gpus) if alone.device == "cuda" and machine.gpus else machine.memory
    return there is None or alone.total <= there


def _environments(recipe: Recipe, machine: Machine) -> dict[str, dict[str, str]]:
    """Returns what a searcher's and the trainer's environment say of GPUs, as in a run."""
    if recipe.runtime != "processes":
        return {"trainer": {}, "searcher-0": {}}
    return {worker: environment_of(place, visible()) for worker, place in places_on(recipe, machine).items()}


def _computed(recipe: Recipe, shape: Shape | None, searcher: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a trainer over several ranks that was not measured, from its needs and the products of
    matrices in a step; searcher: what was measured of one.
    """
    assert shape is not None  # else it is measured
    assert isinstance(recipe.model, HuggingFace)
    trainer = next(need for need in needs(recipe) if need.part == "trainer")
    kept, (asked, _) = kept_on_disk(recipe), searcher["tokens"]
    assert kept is not None
    lengths = [len(tokens) for _, rows in searcher["answers"] for tokens, *_ in rows]
    prompts = recipe.groups_per_step * asked / recipe.prompts_per_round
    answers = recipe.groups_per_step * recipe.group_size * sum(lengths) / len(lengths)
    operations = passes(recipe.model.lora.rank) * shape.operations(prompts + answers, answers)
    rate = searcher["product_rates"][str(recipe.model.compute).removeprefix("torch.")]
    on_gpu = trainer.device == "cuda"
    return {
        "step_seconds": operations / rate / recipe.trainer.count,
        "tokens": [prompts, answers],
        "product_rates": searcher["product_rates"],
        "peak_memory_bytes": 0 if on_gpu else trainer.total,
        "peak_gpu_bytes": trainer.total if on_gpu else None,
        "trajectory_bytes": 0,
        "weights_bytes": kept.version,
        "log_ratio": None,
        "effective": None,
    }


class _Probe:
    """A searcher or a trainer in a process of its own (`tba.command.probe`), which ends with the `with` block.

    at_least: seconds for which it is timed, so that probes that are started together overlap. own: what its environment
    has besides this process's.
    """

    def __init__(
        self,
        half: str,
        name: str,
        overrides: list[str],
        answers: Path,
        at_least: float,
        own: Mapping[str, str],
        seed: int = 0,
    ) -> None:
        self.half, self.name = half, name
        self.began = time.perf_counter()
        self.log = answers.with_name(f"{half}.log")
        arguments = (half, name, json.dumps(overrides), str(at_least), str(seed), str(answers))
        with self.log.open("wb") as log:
            program = Program(half, "tba.command.probe", arguments, ("tba.command.probe",))
            self.process = start(program, {**os.environ, **own}, log.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def result(self) -> dict[str, Any]:
        """Returns what it measured; `seconds` is how long the process took in all."""
        while (code := self.process.poll()) is None:
            if time.perf_counter() - self.began > _DEADLINE:
                raise DeadlineExceeded(f"the {self.half}'s probe had not ended after {_DEADLINE:g} s")
            time.sleep(_POLL)
        said = self.log.read_text(errors="replace").strip().splitlines()
        last = said[-1] if said else f"exit code {code}"
        if not code:
            found: dict[str, Any] = json.loads(last)
            return found | {"seconds": time.perf_counter() - self.began}
        if "OutOfMemoryError" in last or code == -signal.SIGKILL:
            raise UserError(
                f"the {self.half} of {self.name} does not fit into this machine's memory by itself ({last}): it is "
                "measured here, by one process of each half. Measure it with a smaller --model.path or "
                "--max-tokens-per-pass; docs/scaling.md says what several ranks hold"
            )
        raise UserError(f"the {self.half} of {self.name} cannot be started: {last.partition(': ')[2] or last}")
