"""`tba check`: says whether a recipe can learn and estimates the memory and time of its run, without making a run.

What each part needs at most is computed first (`tba.runtime.needs`), and what cannot fit is refused before it is tried
(`tba.runtime.sizing`).

The estimate multiplies the times of a few rounds and steps (`tba.runs.estimate`). Nothing is written or learnt.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from rich.console import Group
from rich.text import Text

from tba.errors import UserError
from tba.models.arithmetic import shape_of
from tba.recipe import Recipe
from tba.record.memory import machine_memory_bytes
from tba.record.show import facts_table, section
from tba.record.terminal import terminal
from tba.record.text import duration, percent, printable, short_number, size
from tba.replay.buffer import BODY_BYTES, TOKEN_BYTES
from tba.runs.estimate import Estimate, estimate
from tba.runs.probe import DRIFT_UPDATES
from tba.runs.validating import notes_on_data, notes_on_prompts, validate
from tba.runtime.cluster.placement import Placement, address_of, memory_lines, placement_lines, plan, this_machine
from tba.runtime.local.forkserver import prepare_forkserver
from tba.runtime.needs import DiskUse, disk_use, needs, seconds_to_move
from tba.runtime.sizing import Machine, places_on, refuse_what_cannot_fit, searchers_of, sizing_flags, unused_gpus
from tba.settings import find, keep_last_values, override

# How much log-probabilities of a token may differ between two passes that batch it with other neighbours: a few units
# in the last place of logits of up to 20.
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.5}
_TEACHER_VERDICT = "Nothing stands in the way: the teacher tells answers apart, and few are cut off or empty."


def check_recipe(name: str, overrides: list[str]) -> int:
    """Prints the recipe, the signal to learn from, the estimate, warnings and what to try."""
    prepare_forkserver()  # while there is one thread
    overrides = keep_last_values(overrides)
    recipe = override(find(name), overrides, f"tba check {name}")
    console = terminal()
    console.print(": ".join(filter(None, (recipe.name, recipe.description))), highlight=False)
    warnings = [*validate(recipe), *notes_on_prompts(recipe)]
    prepared_model = recipe.model.prepared(recipe.task, lambda line: console.print(line, highlight=False))
    warnings += notes_on_data(recipe, prepared_model)
    placements = plan_placements(recipe) if recipe.runtime == "cluster" else []
    prepared_recipe, flags, fact_tables = decide_open_settings(replace(recipe, model=prepared_model), Machine.here())
    recipe, overrides = override(recipe, flags, f"tba check {name}", recorded=True), [*overrides, *flags]
    for title, facts in fact_tables.items():
        console.print(section(title, facts_table(facts)))
    warnings += [] if (idle_note := unused_gpus(prepared_recipe, Machine.here())) is None else [idle_note]
    refuse_what_cannot_fit(prepared_recipe, Machine.here())
    shape = shape_of(prepared_model)
    console.print()
    try:
        e = estimate(prepared_recipe, name, overrides, shape, lambda line: console.print(f"{line} ...", style="dim"))
    except UserError:
        for line in placement_lines(placements):
            console.print(line, highlight=False)
        raise
    facts = e.signal.facts(any(recipe.teachers.shares(1)), recipe.group_size)
    console.print(section("What there is to learn from", facts_table(facts)))
    if not recipe.record.hide_text:
        console.print(section("Prompts and answers", e.signal.examples()))
    memory_bytes = machine_memory_bytes()
    console.print(section("What a run takes", facts_table(_figures(prepared_recipe, e, memory_bytes))))
    for line in memory_lines(placements, e.trainer_bytes, e.searcher_bytes, e.weights_bytes) if placements else ():
        console.print(line, highlight=False)
    if e.log_ratio is not None and e.log_ratio > _ROUNDING.get(recipe.model.compute, 0.5):
        warnings.append(
            f"at the same weights the trainer's log-probabilities differ by {e.log_ratio:.1g} from those of the "
            "searchers' reference: log-ratios begin with noise"
        )
    if e.effective is not None and e.effective < 0.5:
        warnings.append(
            f"within {DRIFT_UPDATES} updates the policy has left the answers that it began with (effective sample size "
            f"{percent(e.effective)}), so that what it learns from is stale at once: set --optimizer.lr to a third of "
            f"{recipe.optimizer.lr:g}, or a longer --optimizer.schedule.warmup"
        )
    lines = [Text(f"warning: {printable(line)}", style="yellow") for line in [*warnings, *e.signal.advice(recipe)]]
    if not recipe.offline and (remedies := e.round_time.advice()):
        console.print(section("What slows it", Group(*(Text(printable(line), style="yellow") for line in remedies))))
    verdict = _TEACHER_VERDICT if any(recipe.teachers.shares(1)) else e.signal.encouragement
    console.print(section("Will it learn?", Group(*lines or [Text(verdict)])))
    if proposals := e.signal.proposals(recipe, e.effective):
        console.print(section("Worth a try", Group(*(Text(line) for line in proposals))))
    total_bytes = e.trainer_bytes + recipe.searcher_count * e.searcher_bytes
    if memory_bytes and total_bytes > memory_bytes and recipe.runtime != "cluster":
        raise UserError(
            f"the run needs about {size(total_bytes)} of memory and this machine has {size(memory_bytes)}: "
            "use a smaller model, fewer searchers or a smaller --max-tokens-per-pass"
        )
    return 0


def decide_open_settings(recipe: Recipe, machine: Machine) -> tuple[Recipe, list[str], dict[str, dict[str, str]]]:
    """Returns the recipe, whose model is prepared, with its open settings decided; the flags that set them; and, to
    print by title, where its workers run and what they need at most.
    """
    flags = sizing_flags(recipe, machine)
    recipe = override(recipe, flags, "", recorded=True)
    fact_tables = {}
    if recipe.runtime != "cluster":
        fact_tables["Where it runs"] = {part: str(place) for part, place in places_on(recipe, machine).items()}
    if computed_needs := {need.part: str(need) for need in needs(recipe)}:
        fact_tables["Needed at most, computed (docs/scaling.md)"] = computed_needs
    return recipe, flags, fact_tables


def _figures(recipe: Recipe, e: Estimate, memory_bytes: int | None) -> dict[str, str]:
    """Returns by name the measurements and what they mean for a run on a machine with `memory_bytes` of memory."""
    answer_rate = e.tokens_per_round / e.round_seconds
    training_rate = e.tokens_per_trajectory * recipe.groups_per_step * recipe.group_size / e.step_seconds
    compute_type = str(recipe.model.compute).removeprefix("torch.")
    at_least = "" if e.trainer_measured else "at least "
    figures = {
        "searcher": f"{e.tokens_per_round:,.0f} tokens of answers in a round of {e.round_seconds:.3f} s: "
        f"{short_number(answer_rate)} tokens/s each",
        "round": e.round_time.facts(recipe.runtime == "inline"),
        "trainer": f"a step takes {at_least}{e.step_seconds:.3f} s: {short_number(training_rate)} tokens/s"
        + ("" if e.trainer_measured else f" (computed: its products alone, over {recipe.trainer.count} ranks)"),
        "measured": e.smaller,
        "moments": _moments_figure(recipe),
        "processor": _processor_figure(e, compute_type),
        "uses": f"{e.uses or 0:.1f} per trajectory on average (limit {recipe.replay.pacing.max_mean_uses:g})",
        "time": f"{duration(e.total_seconds)} for {recipe.steps} steps, of which start-up {duration(e.start_seconds)} "
        f"and evaluations before and after {duration(e.evaluation_seconds)}",
        "disk": _disk_figure(recipe, e),
        "memory": f"at its peak: {f'trainer {size(e.trainer_bytes)}, ' if e.trainer_bytes else ''}each searcher "
        + size(e.searcher_bytes)
        + (f"; this machine has {size(memory_bytes)}" if memory_bytes else ""),
        "GPU memory": _gpu_memory_figure(e),
        "precision": ""
        if e.log_ratio is None
        else f"before any update the trainer and the reference differ by at most {e.log_ratio:.1g} in a token's "
        f"log-probability ({compute_type})",
        "drift": ""
        if e.log_ratio is None
        else f"not measured: {DRIFT_UPDATES} updates take {duration(DRIFT_UPDATES * e.step_seconds)}"
        if e.effective is None
        else f"after {DRIFT_UPDATES} updates the answers from before them have an effective sample size of "
        f"{percent(e.effective)}",
    }
    if recipe.offline:
        del figures["searcher"], figures["round"], figures["uses"]
    return {name: value for name, value in figures.items() if value}


def _moments_figure(recipe: Recipe) -> str:
    """Returns a sentence on the cost of optimizer moments in the host's memory; empty where there are none."""
    host_bytes = [need.total for need in needs(recipe) if need.part == "host"]
    if not host_bytes:
        return ""
    return (
        f"{size(host_bytes[0])} of each rank's are in the host's memory: to the GPU and back they take about "
        f"{seconds_to_move(recipe):.1f} s of an update (43 GB/s there and 55 back, as measured on an H200)"
    )


def _processor_figure(e: Estimate, compute_type: str) -> str:
    """Returns how near generation and training are to the processor's best rate; empty for a model of unknown shape."""
    if e.step_operations is None:
        return ""
    best_rate = e.product_rates[compute_type]
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in e.product_rates.items())
    shares = f"a step {100 * e.step_operations / e.step_seconds / best_rate:.0f} %"
    if e.generation_operations is not None:
        shares = f"generation {100 * e.generation_operations / e.generation_seconds / best_rate:.0f} %, {shares}"
    return f"a product of matrices runs at {rates}; of that in {compute_type} reach: {shares}"


def _gpu_memory_figure(e: Estimate) -> str:
    """Returns the GPU memory that the searcher and the trainer use, if any."""
    trainer = "trainer" if e.trainer_measured else "each rank of the trainer (computed)"
    bytes_by_process = {trainer: e.trainer_gpu_bytes, "each searcher": e.searcher_gpu_bytes}
    peaks = ", ".join(f"{process} {size(peak)}" for process, peak in bytes_by_process.items() if peak is not None)
    return peaks and f"at its peak: {peaks}"


def _disk_figure(recipe: Recipe, e: Estimate) -> str:
    """Returns what checkpoints and versions take, and how long the journal's limit lasts at these speeds."""
    files = disk_use(recipe)
    parts = [] if files is None else [disk_use_text(files)]
    gb_a_day = 86_400 * e.trajectories_per_second * (BODY_BYTES + e.tokens_per_trajectory * TOKEN_BYTES) / 1e9
    limit_gb = recipe.replay.keep_gb
    if gb_a_day:
        days = "" if limit_gb is None else f"--replay.keep-gb {limit_gb:g} holds {limit_gb / gb_a_day:,.1f} days of it"
        parts.append(f"the journal grows by {gb_a_day:,.1f} GB a day, {days or 'all is kept'}")
    return "; ".join(parts)


def disk_use_text(files: DiskUse) -> str:
    """Returns what checkpoints and versions take on the disk, in words."""
    return (
        f"{_gigabytes(files.total)} for {files.checkpoints} checkpoints of {_gigabytes(files.checkpoint)} "
        f"(--run.checkpoints, and one that is being written) and {files.versions} versions of the weights of "
        f"{_gigabytes(files.version)}"
    )


def _gigabytes(n: int) -> str:
    return f"{n / 1e9:,.0f} GB" if n >= 1e10 else f"{n / 1e9:,.1f} GB" if n >= 1e8 else f"{n / 1e6:,.1f} MB"


def plan_placements(recipe: Recipe) -> list[Placement]:
    """Returns where each part of a cluster run will be: on nodes of the cluster to join, else on this machine.

    Raises `UserError` when the parts do not fit.
    """
    searchers = searchers_of(recipe)
    if (address := address_of(recipe)) is None:
        return plan(recipe, [this_machine()], searchers)
    from tba.runtime.cluster.client import connect_to_ray  # needs Ray

    with connect_to_ray(address) as nodes:
        return plan(recipe, nodes, searchers)
