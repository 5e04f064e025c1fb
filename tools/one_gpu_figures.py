"""The sections of docs/hardware.md on what one GPU was measured to do, which `hardware_page.py` puts there.

Invariant: what was measured is from files that `lab/benchmarks/one_gpu.py` writes; what is in none of them was not
measured, and the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "lab" / "results"
BEFORE = RESULTS / "one_gpu_before.json"
AFTER = RESULTS / "one_gpu.json"  # as `lab/benchmarks/one_gpu.py --out` writes it
GB = 10**9
MEASURED = """\
## What one card does

`make test-gpu` measures this, the most important parts first. The model has random weights of Qwen2.5-0.5B's shape in
bfloat16, so that nothing is downloaded. `make runs/smollm2` before it adds SmolLM2 on `instruct`.

- *Before*: {before}. This is the code of the first run on a GPU. Since then a decode step is captured as a graph, the
  trainer launches fewer kernels, and weights leave while the next step is computed. Its log-ratios are from 12 updates
  without a gradient, and answers of 200 tokens. The trainer of this run used checkpointing.
- *After*: {after}. No card has run what came later: weights in shared memory, loads that are staged, a head that keeps
  what the card has room for, a draw in blocks, prompts read in one call, slots by memory, and torch 2.13, which is the
  pinned release.
"""
LACKING = "\nNot measured, by part:\n"
SHARED = """\
## Two halves on one card

By default trainer and searcher are two processes on one card. So a fault of one does not end the other, neither waits
for the other's Python, and the same code runs on two cards. `make test-gpu GPU_ARGS="--only sharing arrangements"`
measures how fast each half then is, and how fast with the alternatives. {measured}.
"""
COLUMNS = """\
*Share left* is a half's speed as a share of its speed without the other half. Two halves that take turns have 1
together. The last column has the updates a second for which the searcher's tokens suffice, each used once, as a share
of what the slower half reaches alone.
"""
ALTERNATIVES = """\
- *Processes* is the default. The card belongs to one process at a time. A half that waits for its launches wastes its
  share of the time.
- *MPS*, NVIDIA's Multi-Process Service, runs kernels of several processes side by side. `--run.mps` (with
  `--model.device cuda`) starts a daemon of MPS for the run and ends it afterwards ([how](#mps)).
- *Pinned cores* gives each half half of the cores to itself.
- *Threads, a stream each* is one process. The card does not switch between processes, but each half's Python waits for
  the other's.
- *Turns* is one process that makes an update, then generates as many tokens as the next update needs. An arrangement
  that overlaps the halves has to be faster than this.

MPS is off, and no other alternative is a setting, until a card shows that it is better than the default.

### MPS

With `--run.mps` both halves on one card are clients of a daemon that the run starts. The trainer's kernels go first.

- *Before the workers start*, a process computes something under MPS. If there is no daemon, if it does not start in
  20 s, if its files cannot be written, or if the card does not permit it (by its compute mode, a divided card, a
  container), the run goes on without MPS. The status and `faults.jsonl` (`without_mps`) say why. Ctrl-C ends the wait.
- *A worker that dies*, or that has a CUDA error, starts again without MPS, because the death of a client can harm the
  others. On a card in the mode *exclusive process* it cannot, and the run ends; `tba resume` continues it.
- *Nothing stays.* The daemon ends with the run. If the run's driver was killed, the next run on a GPU ends its daemon.
- *Logs* of the daemon are in `logs/mps` of the run.

Tests run a stand-in for the daemon on CPUs. NVIDIA's daemon was never started by this program.
"""
NEVER, PENDING = "not measured", "not measured yet"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def gigabytes(value: float) -> str:
    return f"{value / GB:.1f} GB"


def passed(value: float) -> str:
    return "all" if value else "**not all**"


OF_ENGINE, OF_REFERENCE = "trainer_against_engine.", "trainer_against_reference."
# part, words, path in the part, what is aimed at, how it is written
FIGURES: tuple[tuple[str, str, str, str, Callable[[float], str]], ...] = (
    ("environment", "time to launch a kernel, microseconds", "microseconds_a_launch", "", number),
    (
        "environment",
        "time of a kernel in a captured graph, microseconds",
        "microseconds_a_kernel_of_a_graph",
        "",
        number,
    ),
    ("environment", "copy from pinned memory to the card, GB/s", "pinned_to_device_GB_per_second", "", number),
    ("environment", "copy from the card to pinned memory, GB/s", "pinned_to_host_GB_per_second", "", number),
    ("environment", "copy from pageable memory to the card, GB/s", "pageable_to_device_GB_per_second", "", number),
    ("environment", "copy from the card to pageable memory, GB/s", "pageable_to_host_GB_per_second", "", number),
    ("engine", "72 slots: launches in a decode step", "launches_a_step", "60", number),
    ("engine", "kernels in a decode step", "kernels_a_step", "", number),
    ("engine", "a decode step, ms", "milliseconds_a_step", "", number),
    ("engine", "of these in kernels, ms", "kernel_milliseconds_a_step", "", number),
    ("engine", "first round of 3 x 24 answers of 7 to 256 tokens, s", "round_cold_seconds", "", number),
    ("engine", "the same round again, s", "round_again_seconds", "", number),
    ("engine", "tokens/s in a continuous flow", "flow_tokens_per_second", "12,000", number),
    (
        "engine",
        "tokens/s in a continuous flow with a version every 0.4 s",
        "flow_with_loads_tokens_per_second",
        "32,000",
        number,
    ),
    ("engine", "time to load the engine and run its self-test, s", "start_seconds", "", number),
    ("engine compiled", "with `--model.torch-compile`: kernels in a decode step", "kernels_a_step", "340", number),
    ("engine compiled", "a decode step, ms", "milliseconds_a_step", "", number),
    ("engine compiled", "tokens/s in a continuous flow", "flow_tokens_per_second", "", number),
    ("engine compiled", "first round, in which it is compiled, s", "round_cold_seconds", "", number),
    ("engine-256", "256 slots: tokens/s in a continuous flow", "flow_tokens_per_second", "25,000", number),
    ("engine-144", "144 slots: tokens/s in a continuous flow", "flow_tokens_per_second", "", number),
    ("trainer", "60 answers of 200 tokens to 3 prompts: a step, s", "seconds_a_step", "", number),
    ("trainer", "tokens/s", "tokens_per_second", "", number),
    ("trainer", "speed as a share of a matrix product's", "share_of_product_rate", "35 %", percent),
    ("trainer", "speed as a share of 989e12 operations a second", "share_of_989_teraflops", "36 %", percent),
    ("trainer", "launches in a step", "launches_a_step", "3,000", number),
    ("trainer", "peak memory", "peak_bytes", "", gigabytes),
    ("trainer", "peak memory as computed", "computed_bytes", "", gigabytes),
    ("trainer", "memory that the allocator holds", "reserved_bytes", "", gigabytes),
    ("trainer compiled", "with `--model.torch-compile`: a step, s", "seconds_a_step", "", number),
    ("trainer compiled", "the first step, s", "first_step_seconds", "", number),
    ("trainer compiled", "launches in a step", "launches_a_step", "2,000", number),
    ("trainer compiled", "peak memory", "peak_bytes", "", gigabytes),
    ("fixed segments", "the same with segments that do not grow", "reserved_bytes", "", gigabytes),
    ("trainer", "time to publish 1 GB alone, s", "publication_seconds", "", number),
    (
        "trainer",
        "time of a step during a publication that ends before the next, relative to one alone",
        "beside_over_alone",
        "1.1",
        number,
    ),
    (
        "trainer",
        "a step with a version due at each, relative to one alone",
        "step_every_1_steps_over_alone",
        "1.1",
        number,
    ),
    ("trainer", "share of these versions that were written", "versions_written_every_1_steps", "", percent),
    ("trainer", "updates that the newest version lacks, mean", "mean_lag_every_1_steps", "", number),
    ("trainer", "a step with a version due at every second", "step_every_2_steps_over_alone", "1.1", number),
    ("trainer", "share of these versions that were written", "versions_written_every_2_steps", "90 %", percent),
    ("trainer", "updates that the newest version lacks, mean", "mean_lag_every_2_steps", "", number),
    ("trainer", "time from an update to its weights in the engine, s", "version_in_engine_seconds", "0.1", number),
    ("trainer-checkpointed", "the same step (60 answers of 200 tokens to 3 prompts), s", "seconds_a_step", "", number),
    ("trainer-checkpointed", "tokens/s", "tokens_per_second", "", number),
    ("trainer-checkpointed", "speed as a share of a matrix product's", "share_of_product_rate", "", percent),
    ("trainer-checkpointed", "launches in a step", "launches_a_step", "", number),
    ("trainer-checkpointed", "peak memory", "peak_bytes", "", gigabytes),
    ("trainer-checkpointed", "peak memory as computed", "computed_bytes", "", gigabytes),
    ("trainer-checkpointed", "time to publish 1 GB alone, s", "publication_seconds", "", number),
    (
        "trainer-checkpointed",
        "time of a step during a publication that ends before the next, relative to one alone",
        "beside_over_alone",
        "1.1",
        number,
    ),
    (
        "trainer-checkpointed",
        "time from an update to its weights in the engine, s",
        "version_in_engine_seconds",
        "0.1",
        number,
    ),
    (
        "log-ratio",
        "engine and trainer at version 0: mean square, by token",
        OF_ENGINE + "mean_square_of_a_token",
        "",
        number,
    ),
    ("log-ratio", "the same, by answer", OF_ENGINE + "mean_square_of_an_answer", "", number),
    ("log-ratio", "engine and trainer at version 0: 5 % quantile, by token", OF_ENGINE + "p05_of_a_token", "", number),
    ("log-ratio", "the same, 95 % quantile", OF_ENGINE + "p95_of_a_token", "", number),
    ("log-ratio", "effective sample size", OF_ENGINE + "effective_sample_size", "", number),
    (
        "log-ratio",
        "reference and trainer: mean square, by answer",
        OF_REFERENCE + "mean_square_of_an_answer",
        "0",
        number,
    ),
    ("both", "trainer and searcher with `tba train`: a step, s", "seconds_a_step", "", number),
    ("both", "the longest step, s", "longest_step_seconds", "", number),
    ("both", "updates a second", "updates_per_second", "", number),
    (
        "sharing",
        "updates a second, as a share of the slower half's alone",
        "processes.of_the_slower_half",
        "0.7",
        number,
    ),
    ("tests", "tests of `tests/test_gpu.py` that pass", "passed", "all", passed),
    ("quickstart", "seconds of training", "wall_seconds.train", "", number),
    ("quickstart", "`pass@1/sampled`", "evaluations.pass@1/sampled", "", percent),
    ("1.5 B", "a step of 1.5 B parameters, checkpointed: peak memory", "peak_bytes", "", gigabytes),
    ("1.5 B", "peak memory as computed", "computed_bytes", "", gigabytes),
    ("8k", "4 answers of 2,048 tokens to a prompt of 4,000, checkpointed: a step, s", "seconds_a_step", "", number),
    ("8k", "peak memory", "peak_bytes", "", gigabytes),
    (
        "8k",
        "prompts of up to 8,000 tokens, 16 slots: tokens/s in a continuous flow",
        "flow_tokens_per_second",
        "",
        number,
    ),
    ("LoRA", "a step with LoRA: peak memory", "peak_bytes", "", gigabytes),
    ("LoRA", "peak memory as computed", "computed_bytes", "", gigabytes),
    ("smollm2", "SmolLM2-135M with LoRA, trainer and searcher: a step, s", "seconds_a_step", "", number),
    ("smollm2", "tokens/s generated", "generated_tokens_per_second", "", number),
)
ARRANGEMENTS = {  # of which part
    "processes": "sharing",
    "processes, pinned cores": "arrangements",
    "processes, MPS": "arrangements",
    "threads, a stream each": "arrangements",
    "turns": "arrangements",
}


def measured() -> Iterator[str]:
    """What a card was found to do; a row that no file has is named below the table."""
    before, after = (json.loads(file.read_text()) if file.exists() else {} for file in (BEFORE, AFTER))
    yield MEASURED.format(before=card_of(before), after=card_of(after))
    with_after = " after |" if after else ""
    yield f"| part | figure | before | aim |{with_after}\n|---|---|---|---|{'---|' if after else ''}"
    previous_part = ""
    missing_figures: dict[str, list[str]] = {}
    for part, words, path, aim, written in FIGURES:
        figure_before, figure_after = figure(before, part, path, written), figure(after, part, path, written)
        if not figure_before and not figure_after:
            missing_figures.setdefault(part, []).append(f"{words}{f' (aimed at {aim})' if aim else ''}")
            continue
        last = f" {figure_after or NEVER} |" if after else ""
        yield f"| {'' if part == previous_part else part} | {words} | {figure_before or NEVER} | {aim} |{last}"
        previous_part = part
    if missing_figures:
        yield LACKING
        yield from (f"- *{part}*: {'; '.join(figures)}." for part, figures in missing_figures.items())
    shared = after if "sharing" in after.get("parts", {}) else {}
    yield "\n" + SHARED.format(
        measured=f"The card is {card_of(after)}" if shared else f"This was {NEVER} on a card yet"
    )
    if shared:
        yield COLUMNS
        yield "| arrangement | trainer, share left | searcher, share left | updates, share |\n|---|---|---|---|"
        for name, part in ARRANGEMENTS.items():
            paths = (f"{name}.left.trainer", f"{name}.left.searcher", f"{name}.of_the_slower_half")
            yield f"| {name} | {' | '.join(figure(shared, part, path, number) or NEVER for path in paths)} |"
        yield ""
    yield ALTERNATIVES


def card_of(found: Mapping[str, Any]) -> str:
    """The machine and the software that a file is of."""
    if not found:
        return f"**{PENDING}**"
    about = found["about"]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    return f"one {' and '.join(about['machine']['gpus'])}, {about['machine']['cores']} cores, {versions}"


def figure(found: Mapping[str, Any], part: str, path: str, written: Callable[[float], str]) -> str:
    """One figure of a file; empty where it has none."""
    value: Any = found.get("parts", {}).get(part, {})
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else written(value)
