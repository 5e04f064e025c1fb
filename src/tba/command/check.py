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
from tba.record.show import pairs, section
from tba.record.terminal import terminal
from tba.record.text import count, duration, percent, printable, size
from tba.replay.buffer import OF_BODY, OF_TOKEN
from tba.runs.estimate import Estimate, estimate
from tba.runs.probe import UPDATES
from tba.runs.validating import notes_on_data, notes_on_prompts, validate
from tba.runtime.cluster.placement import Placed, plan, table, this_machine, whereabouts
from tba.runtime.local.forkserver import prepare
from tba.runtime.needs import Kept, kept_on_disk, needs, seconds_to_move
from tba.runtime.sizing import Machine, places_on, refuse_what_cannot_fit, searchers_of, sized, unused
from tba.settings import find, keep_last_values, override

# by which two passes over the same token may differ, in which it has other neighbours: a few units of the last place of
# logits of up to 20
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.5}
_TAUGHT = "Nothing stands in the way: the teacher tells answers apart, and few are cut off or empty."


def check_recipe(name: str, overrides: list[str]) -> int:
    """Prints the recipe, what there is to learn from, the estimate, what to change, and what to try besides."""
    prepare()  # while there is one thread
    overrides = keep_last_values(overrides)
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
    console.print(
        section("What there is to learn from", pairs(e.signal.facts(any(recipe.teachers.shares(1)), recipe.group_size)))
    )
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
    if not recipe.offline and (faster := e.round_time.advice()):
        console.print(section("What slows it", Group(*(Text(printable(line), style="yellow") for line in faster))))
    good = _TAUGHT if any(recipe.teachers.shares(1)) else e.signal.good
    console.print(section("Will it learn?", Group(*lines or [Text(good)])))
    if proposals := e.signal.proposals(recipe, e.effective):
        console.print(section("Worth a try", Group(*(Text(line) for line in proposals))))
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
        "round": e.round_time.facts(recipe.runtime == "inline"),
        "trainer": f"a step takes {at_least}{e.step_seconds:.3f} s: {count(trained)} tokens/s"
        + ("" if e.trainer_measured else f" (computed: its products alone, over {recipe.trainer.count} ranks)"),
        "measured": e.smaller,
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
        if e.log_ratio is None
        else f"not measured: {UPDATES} updates take {duration(UPDATES * e.step_seconds)}"
        if e.effective is None
        else f"after {UPDATES} updates the answers from before them have an effective sample size of "
        f"{percent(e.effective)}",
    }
    if recipe.offline:
        del found["searcher"], found["round"], found["uses"]
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
