"""What one card does with this program, what was asked for first, in 240 s at most.

    make test-gpu                                                   # on a machine with a GPU, in 10 minutes at most
    PYTHONPATH=src:lab/src:lab/benchmarks python lab/benchmarks/one_gpu.py   # in 4 minutes, where nothing is installed
    ... --only engine trainer                                        # these parts; the others of --out are kept
    ... --dry-run                                      # all of it small on a CPU, to see that the script works

Needs no network: weights of Qwen2.5-0.5B's shape are drawn on the spot, the quickstart's model is shipped. Every part
is a process of its own with its own limit, in proportion to `--seconds`. What it has found is written at once, so that
one that reaches its limit still leaves what it had. `--out` (one_gpu.json) is rewritten after every part; one_gpu.log
beside it has what they said.

- *environment*: microseconds to launch a kernel, and a kernel's share of a captured graph; GB/s from and to pinned and
  pageable memory; the rate of a large product of matrices.
- *engine*, *engine-256*, *engine-144*: the transformers engine with 72, 256 and 144 slots, which a batch of 140 answers
  gives where they are left open. A token step of all slots, but the first:
  milliseconds, launches, kernels and their milliseconds (the difference of two runs that end a few tokens apart,
  so that prompts do not count). A round of answers of geometric lengths, cold and the same again; the same as flow.
  The flow again while a version comes every 0.4 s, read in a thread and loaded as a searcher does. Peak memory, and
  what `tba.models.memory` computes.
- *trainer*, *trainer-checkpointed*: a step of the trainer as `start_policy` builds it, 3 groups of 20 answers of 200
  tokens to prompts of 100: tokens/s, launches, kernels, the ten kernels that take most time, the parts of a step in
  ms; FLOP that a step needs (6 for each parameter and token; recomputing is not needed) as a share of the product's
  rate, and of 989e12 a second, nanochat's unit; peak memory and the formula's, which is the least that is needed: a
  card keeps more where memory is free. A publication alone, a step beside one, steps with a version due at each and at
  every second, and how long after an update its weights are in an engine of the same process.
- *fixed segments*: the same step with an allocator whose segments do not grow, as they do in a run. *trainer compiled*,
  *engine compiled*: the step and the engine of 72 slots with `--model.torch-compile`.
- *log-ratio*: of engine, reference and trainer at version 0: mean squares for each token and each answer, and the
  effective sample size.
- *both*: a short run of that model by `tba train`.
- *sharing*: what both halves on one card leave of each (`one_gpu_sharing`); *arrangements*: the alternatives.
- *tests*: those marked `gpu` (tests/test_gpu.py), and what they measured. *quickstart*: `tba train quickstart`.
- *1.5 B*, *LoRA*, *1.5 B, LoRA*: a trainer's step and its peak. *8k*: a step of answers in contexts of 6,048 tokens,
  and the flow of an engine with prompts of up to 8,000.
- *smollm2*, with `--smollm2 FOLDER` (from `tba model smollm2`): both halves under LoRA, by `tba train instruct`.

On a CPU an operation that would launch something counts as a launch, and memory is that of the process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it: as the processes of a run have it

import numpy as np
import torch
from one_gpu_halves import (
    SAMPLES,
    SIZES,
    LoadingHalf,
    PeakMemory,
    SearcherHalf,
    Size,
    TrainerHalf,
    arguments_of,
    model_of,
    prompts_of,
    ready_to_count,
    recipe_of,
    synchronize,
    time_call,
    tokens_in,
    tokens_of,
    work_of,
    write_models,
)
from one_gpu_sharing import BY_DEFAULT, OTHERS, time_arrangements

from tba.__main__ import main as tba
from tba.batch import collate
from tba.engines.transformers import EngineSettings
from tba.generation import generate
from tba.gpus import visible_gpus
from tba.models.arithmetic import forwards_per_update, product_rate
from tba.models.memory import SearcherWorkload, Shape, TrainerWorkload, engine_bytes, total, trainer_bytes
from tba.policy.lora import LoraSettings
from tba.record.jsonl import write_json
from tba.record.memory import keep_few_kernels, machine, versions
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.types import Group, Sampling, Trajectory, Version

ROOT = Path(__file__).parents[2]
TOTAL_SECONDS = 240.0  # for everything, unless told otherwise
TIMED_STEPS = 5  # timed
RANK = 16  # of adapters
POLL_COUNTS = (2, 7)  # how often an engine asks whether to go on, in a shorter and a longer run of token steps
DRY_RUN_SECONDS = 2400.0  # for everything small on a CPU that others use too
LOAD_SECONDS = 0.4  # between two versions that an engine loads
NANOCHAT_RATE = 989e12  # operations a second: an H100's in bfloat16, of which nanochat gives its speed as a share
LEAST_SECONDS = 8.0  # seconds without which no part is begun

Note = Callable[..., None]  # adds figures to what a part has found


@dataclass(frozen=True)
class Context:
    """Holds what every part works with: device, model and folder."""

    device: str
    size: str  # of `SIZES`
    folder: Path  # with the models `endless` and `ending`; a part may write there
    small: bool = False  # short runs
    smollm2: str = ""

    @property
    def shape(self) -> Size:
        return SIZES[self.size]


# The parts


def measure_environment(context: Context, note: Note) -> None:
    device = torch.device(context.device)
    on_gpu = device.type == "cuda"
    note(product_flop_per_second=product_rate(torch.bfloat16, device))
    x, times = torch.zeros(1, device=device), 10_000

    def launch(count: int) -> None:
        for _ in range(count):
            x.add_(1)

    launch(100)
    note(microseconds_a_launch=1e6 * time_call(lambda: launch(times), context.device) / times)
    if on_gpu:
        graph, length = torch.cuda.CUDAGraph(), 100
        with torch.cuda.graph(graph):
            launch(length)
        graph.replay()

        def replay() -> None:
            for _ in range(times // length):
                graph.replay()

        seconds = time_call(replay, context.device)
        note(microseconds_a_kernel_of_a_graph=1e6 * seconds / times)
    size = 1 << (24 if context.small else 29)  # bytes
    device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
    for memory in ("pinned", "pageable") if on_gpu else ("pageable",):
        host_bytes = torch.ones(size, dtype=torch.uint8, pin_memory=memory == "pinned")
        device_bytes.copy_(host_bytes)  # which are there from here on
        for target, direction in ((device_bytes, "to_device"), (host_bytes, "to_host")):
            copy = partial(target.copy_, host_bytes if target is device_bytes else device_bytes)
            seconds = min(time_call(copy, context.device) for _ in range(3))
            note(**{f"{memory}_{direction}_GB_per_second": size / 1e9 / seconds})


def measure_engine(context: Context, note: Note, slots: int, compiled: bool = False) -> None:
    peak, device, shape = PeakMemory(), context.device, context.shape
    slots = slots // 32 * 8 if context.small else slots
    settings = EngineSettings(slots=slots, max_completion_tokens=shape.longest)
    recipe = recipe_of(context.folder / "ending", device, shape, generation=settings, torch_compile=compiled)
    start = time.perf_counter()
    half = SearcherHalf(recipe, shape)
    note(slots=slots, start_seconds=time.perf_counter() - start)
    prompts, state = prompts_of(shape, max(1, slots // SAMPLES), half.rng), half.rng.bit_generator.state
    for name in ("cold", "again"):  # the second time without what is made once for a shape
        half.rng.bit_generator.state = state
        start = time.perf_counter()
        tokens = tokens_of(sample_round(half, prompts))
        seconds = time.perf_counter() - start
        note(**{f"round_{name}_seconds": seconds, f"round_{name}_tokens_per_second": tokens / seconds})
    half.warm()
    note(flow_tokens_per_second=half.work(shape.window, device).a_second)
    loading = LoadingHalf(recipe, shape, LOAD_SECONDS, half.engine)
    loading.warm()
    note(flow_with_loads_tokens_per_second=loading.work(shape.window, device).a_second, loads=loading.loads)
    longest = 2 * shape.prompt
    sampling = SearcherWorkload(model_of(recipe).precision, slots, longest + shape.longest, longest, device=device)
    note(peak_bytes=peak.bytes(), computed_bytes=total(engine_bytes(Shape.of(shape.config), sampling)))
    del half, loading
    recipe = recipe_of(context.folder / "endless", device, shape, generation=settings, torch_compile=compiled)
    half = SearcherHalf(recipe, shape)
    token_step_seconds(half, slots, device)  # makes what is made once
    note(milliseconds_a_step=1e3 * min(token_step_seconds(half, slots, device) for _ in range(3)))
    del half
    ready_to_count(device)
    half = SearcherHalf(recipe, shape)
    few_polls, many_polls = 2, 3 if context.small else 4
    grow_answers(half, slots, many_polls)
    lengths: list[int] = []

    def grow(polls: int) -> None:
        lengths.append(grow_answers(half, slots, polls))

    few_work, many_work = (work_of(partial(grow, polls), device) for polls in (few_polls, many_polls))
    work, steps = many_work - few_work, lengths[-1] - lengths[0]
    note(
        launches_a_step=work.launches / steps,
        kernels_a_step=work.kernels / steps,
        kernel_milliseconds_a_step=1e3 * work.seconds / steps,
        top_kernels=work.top(steps),
    )


def grow_answers(half: SearcherHalf, slots: int, polls: int) -> int:
    """Begin an answer in every slot, and stop after so many polls of the engine; returns the tokens of each."""
    poll_answers, flow = iter([False] * (polls - 1)), half.engine.flow(8, Sampling(1.0, 1.0), half.rng)
    flow.submit(prompts_of(half.size, slots // 8, np.random.default_rng(0)))
    answers = flow.next(lambda: next(poll_answers, True), until_needed=False)
    return max(len(completion.tokens) for _, completions in answers for completion in completions)


def token_step_seconds(half: SearcherHalf, slots: int, device: str) -> float:
    """Returns the seconds of a token step: the difference of two runs that end a few tokens apart, without prompts."""
    timings = []
    for polls in POLL_COUNTS:
        synchronize(device)
        start = time.perf_counter()
        tokens = grow_answers(half, slots, polls)
        synchronize(device)
        timings.append((time.perf_counter() - start, tokens))
    (few_seconds, few_tokens), (many_seconds, many_tokens) = timings
    return (many_seconds - few_seconds) / (many_tokens - few_tokens)


def sample_round(half: SearcherHalf, prompts: list[Any]) -> list[Any]:
    """Returns `SAMPLES` answers to each prompt, once the last one is complete."""
    return generate(half.engine, prompts, SAMPLES, Sampling(1.0, 1.0), half.rng)


def measure_trainer(
    context: Context,
    note: Note,
    checkpointed: bool = False,
    rank: int = 0,
    size: str = "",
    has_fixed: bool = False,
    compiled: bool = False,
) -> None:
    """Measures the trainer. `rank`: of adapters. With adapters, or another size, it measures no more than a step.
    has_fixed: the allocator's segments do not grow, as they do in a run. compiled: with `torch.compile`; without
    publications.
    """
    if has_fixed:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    shape, folder = context.shape, context.folder
    if size:
        shape, folder = shape if context.small else SIZES[size], folder / f"of {size}"
        draw_model(folder, shape)
    peak = PeakMemory()
    lora: dict[str, Any] = {"lora": LoraSettings(rank=rank)} if rank else {}
    fields = {"gradient_checkpointing": checkpointed, "torch_compile": compiled, **lora}
    recipe = recipe_of(folder / "endless", context.device, shape, **fields)
    with tempfile.TemporaryDirectory(dir=context.folder) as weights_folder:
        half = TrainerHalf(recipe, shape, Path(weights_folder))
        note(**time_steps(half, context.device, shape, checkpointed, rank, peak))
        if rank or size:
            return
        work = work_of(half.act, context.device, shape.vocabulary)
        note(
            launches_a_step=work.launches,
            kernels_a_step=work.kernels,
            kernel_milliseconds_a_step=1e3 * work.seconds,
            top_kernels=work.top(),
            shares_of_kernel_time=work.shares(),
            milliseconds_by_part={part: 1e3 * seconds for part, seconds in work.by_part.items()},
        )
        if compiled:
            return
        note(**time_publications(half, context.device))
        for k in (1, 2):
            note(**time_steps_with_publications(half, context.device, k))
        note(version_in_engine_seconds=arrival_seconds(half, recipe.model.engine(Version()), context.device))
        half.weights.close()


def measure_contexts(context: Context, note: Note) -> None:
    """Measures a checkpointed step and the flow of an engine in long contexts."""
    name = "0.5 B, 8k"
    measure_trainer(context, note, checkpointed=True, size=name)
    shape = context.shape if context.small else SIZES[name]
    settings = EngineSettings(slots=16, max_completion_tokens=shape.longest)
    model = context.folder / f"of {name}" / "ending"
    half = SearcherHalf(recipe_of(model, context.device, shape, generation=settings), shape)
    half.warm()
    note(flow_tokens_per_second=half.work(shape.window, context.device).a_second)


def draw_model(folder: Path, shape: Size) -> None:
    """Write a model, unless an earlier part has; in a process of its own, whose memory is not this one's."""
    if not folder.exists():
        temporary_folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        process = multiprocessing.get_context("fork").Process(target=write_models, args=(temporary_folder, shape))
        process.start()
        process.join()
        temporary_folder.rename(folder)


def time_steps(
    half: TrainerHalf, device: str, shape: Size, checkpointed: bool, rank: int, peak: PeakMemory
) -> dict[str, float]:
    first_seconds = time_call(half.act, device)
    half.act()
    steps = [time_call(half.act, device) for _ in range(TIMED_STEPS)]
    recipe_model, model_shape = model_of(half.recipe), Shape.of(shape.config)
    tokens, step = tokens_in(half.fetched.batch), statistics.median(steps)
    rate = product_rate(recipe_model.compute, torch.device(device))
    operations = 2 * forwards_per_update(rank) * model_shape.parameters * tokens
    step_pass = TrainerWorkload(tokens, recipe_model.precision, device, rank, checkpointed=checkpointed)
    return {
        "first_step_seconds": first_seconds,
        "seconds_a_step": step,
        "longest_step_seconds": max(steps),
        "tokens_per_second": tokens / step,
        "share_of_product_rate": operations / step / rate,
        "share_of_989_teraflops": operations / step / NANOCHAT_RATE,
        "peak_bytes": peak.bytes(),
        "reserved_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else peak.bytes(),
        "computed_bytes": total(trainer_bytes(model_shape, step_pass)),
    }


def time_publications(half: TrainerHalf, device: str) -> dict[str, float]:
    """Returns the seconds of a step, of a step that begins when weights are published, and of publishing alone."""
    rows = []

    def publish() -> None:
        half.publish()
        half.weights.settle()

    for _ in range(3):
        step_seconds = time_call(half.act, device)
        half.publish()
        beside_seconds = time_call(half.act, device)
        half.weights.settle()
        rows.append((step_seconds, beside_seconds, time_call(publish, device)))
    step_seconds, beside_seconds, publish_seconds = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "step_seconds": step_seconds,
        "step_beside_a_publication_seconds": beside_seconds,
        "beside_over_alone": statistics.median(row[1] / row[0] for row in rows),
        "publication_seconds": publish_seconds,
        "version_bytes": half.directory.file(half.trainer.version).stat().st_size,
    }


def time_steps_with_publications(half: TrainerHalf, device: str, k: int, steps: int = 20) -> dict[str, float]:
    """Returns the seconds of a step where weights are due every k of them, as in a run, over those of one alone, the
    share of the versions due that were written, and how many updates the newest version lacks, on average over steps.
    """
    half.weights.settle()
    alone_seconds = statistics.median(time_call(half.act, device) for _ in range(3))
    half.finish()
    half.trainer.sync_every, half.trainer.published = k, half.trainer.version
    lags, written = [], 0

    def run_steps() -> None:
        nonlocal written
        for _ in range(steps):
            half.act()
            published = half.trainer.published
            assert published is not None
            lags.append(half.trainer.expected_version.step - published.step)
            if half.trainer.is_sync_due(half.trainer.expected_version) and not half.weights.busy:
                half.publish()
                written += 1

    seconds = time_call(run_steps, device) / steps
    half.weights.settle()
    name = f"every_{k}_steps"
    return {
        f"step_{name}_over_alone": seconds / alone_seconds,
        f"versions_written_{name}": written / (steps / k),
        f"mean_lag_{name}": statistics.fmean(lags),
    }


def arrival_seconds(half: TrainerHalf, engine: Any, device: str) -> float:
    """Returns the seconds from the end of an update until an engine has its weights."""
    seconds = []
    for _ in range(3):
        half.act()

        def deliver() -> None:
            half.publish()
            newest_version = half.weights.newer_than(engine.version)
            assert newest_version is not None
            engine.load(newest_version.read(), newest_version.version)

        seconds.append(time_call(deliver, device))
    return min(seconds)


def measure_log_ratios(context: Context, note: Note) -> None:
    shape = context.shape
    recipe = recipe_of(context.folder / "ending", context.device, shape)
    half, reference = SearcherHalf(recipe, shape), recipe.model.reference(recipe.policy_temperature, Version())
    prompts = prompts_of(shape, shape.groups, half.rng)
    completion_rows = sample_round(half, prompts)
    score_rows = reference.log_probabilities_of(list(zip(prompts, completion_rows, strict=True)))
    groups = []
    for prompt, row, scores in zip(prompts, completion_rows, score_rows, strict=True):
        pairs = enumerate(zip(row, scores, strict=True))
        groups.append(Group.of([Trajectory(f"{prompt.text}-{i}", prompt, c, 1.0, s, Version()) for i, (c, s) in pairs]))
    batch = collate(groups)
    policy, _ = start_policy(recipe, start_ranks(recipe, 0), None)
    with torch.no_grad():
        log_policy_BT = policy.evaluate(batch).log_policy_BT.float().cpu()
    assert batch.log_behavior_BT is not None
    for name, log_other_BT in (("engine", batch.log_behavior_BT), ("reference", batch.log_reference_BT)):
        ratio_BT = (log_policy_BT - log_other_BT) * batch.mask_BT
        note(**{f"trainer_against_{name}": log_ratio_figures(ratio_BT.numpy(), batch.mask_BT.numpy())})
    note(answers=batch.rows, tokens=int(batch.mask_BT.sum()))


def log_ratio_figures(ratio_BT: np.ndarray[Any, Any], mask_BT: np.ndarray[Any, Any]) -> dict[str, float]:
    """Returns mean squares, quantiles and effective sample size of log-ratios that are 0 in exact arithmetic."""
    token_N, answer_B = ratio_BT[mask_BT.astype(bool)], ratio_BT.sum(1)
    weight_B = np.exp(answer_B)
    figures = {"effective_sample_size": float(weight_B.sum() ** 2 / (weight_B**2).sum() / len(weight_B))}
    for name, values in (("a_token", token_N), ("an_answer", answer_B)):
        low, high = np.quantile(values, (0.05, 0.95))
        figures |= {f"mean_square_of_{name}": float((values**2).mean()), f"p05_of_{name}": low, f"p95_of_{name}": high}
    return figures


def run_both_halves(context: Context, note: Note) -> None:
    steps = ["--steps", "4" if context.small else "24"]
    arguments = [*arguments_of(context.folder / "endless", context.device, context.shape), *steps]
    note(**train_and_summarise("quickstart", arguments, context.folder / "both"))


def time_sharing(context: Context, note: Note, arrangements: tuple[str, ...]) -> None:
    shape = context.shape
    recipe = recipe_of(context.folder / "ending", context.device, shape)
    folder = context.folder / "sharing"
    folder.mkdir(exist_ok=True)
    halves = {
        "trainer": lambda: TrainerHalf(recipe, shape, folder / "weights"),
        "searcher": lambda: SearcherHalf(recipe, shape),
    }
    tokens = shape.groups * shape.answers * shape.length
    time_arrangements(halves, arrangements, shape, context.device, folder, note, tokens)


def run_tests(context: Context, note: Note) -> None:
    """Runs the tests marked `gpu`, and reads their figures from pytest's report."""
    report = context.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "junit_family=xunit1"]
    variables = os.environ | {"TBA_TEST_DEVICE": context.device}
    process = subprocess.run(
        [*command, "--junitxml", str(report), str(ROOT / "tests" / "test_gpu.py")],
        capture_output=True,
        text=True,
        env=variables,
        cwd=ROOT,
    )
    print(process.stdout, process.stderr)
    note(passed=process.returncode == 0, said=process.stdout.strip().splitlines()[-1:])
    for case in ElementTree.parse(report).iter("testcase"):
        values = {p.get("name", ""): float(p.get("value", "nan")) for p in case.iter("property")}
        if values:
            note(**{case.get("name", ""): values})


def run_quickstart(context: Context, note: Note) -> None:
    arguments = ["--model.device", context.device]
    if context.small:
        arguments += ["--steps", "4", "--replay.pacing.warm-up", "0", "--evaluation.every", "0"]
        arguments += ["--evaluation.problems", "20"]
    note(**train_and_summarise("quickstart", arguments, context.folder / "quickstart"))


def run_smollm2(context: Context, note: Note) -> None:
    arguments = adapter_arguments(context.smollm2, context.device)
    note(**train_and_summarise("instruct", arguments, context.folder / "smollm2"))


def adapter_arguments(folder: str, device: str) -> list[str]:
    """Returns the settings of `tba train instruct` under LoRA."""
    return [
        *("--model.path", folder, "--model.device", device, "--model.lora.rank", str(RANK)),
        *("--optimizer.lr", "1e-4", "--steps", "40", "--evaluation.every", "0"),
    ]


def train_and_summarise(recipe: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    """Makes a run by `tba train`; returns its recorded seconds of steps, idle shares and accuracy."""
    code = tba(["train", recipe, "--runs", str(folder), "--run-name", "run", *arguments])
    if code:
        raise RuntimeError(f"tba train {recipe} ended with exit code {code}")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] - row["wait_seconds"] for row in rows[1:]]  # the first makes what is made once
    names = ("trainer_idle", "trainer_paced", "searcher_idle", "searcher_paced", "wall_seconds", "peak_memory_bytes")
    return {
        "seconds_a_step": statistics.median(seconds),
        "longest_step_seconds": max(seconds),
        "updates_per_second": len(rows) / summary["wall_seconds"]["train"],
        **generation_rate(rows),
        **{name: summary[name] for name in names},
        "evaluations": {e["metric"]: e["value"] for e in summary["evaluations"]},  # the last of each
    }


def generation_rate(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the tokens a second of a run's searchers, between the first and the last count that its steps have;
    nothing without two counts.
    """
    counts = {row["generated_tokens"]: row["wall_seconds"] for row in reversed(rows) if "generated_tokens" in row}
    if len(counts) < 2:
        return {}
    (first_count, start_seconds), (last_count, end_seconds) = (pick(counts.items()) for pick in (min, max))
    return {"generated_tokens_per_second": (last_count - first_count) / (end_seconds - start_seconds)}


@dataclass(frozen=True)
class Part:
    """A process, and how long it may take."""

    limit: float  # seconds, of 240 for everything
    act: Callable[[Context, Note], None]
    model: bool = True  # whether it needs the model of random weights


PARTS = {
    "tests": Part(45.0, run_tests, model=False),
    "engine": Part(60.0, partial(measure_engine, slots=72)),
    "engine-256": Part(45.0, partial(measure_engine, slots=256)),
    "trainer": Part(45.0, measure_trainer),
    "sharing": Part(45.0, partial(time_sharing, arrangements=BY_DEFAULT)),
    "arrangements": Part(90.0, partial(time_sharing, arrangements=OTHERS)),
    "1.5 B": Part(60.0, partial(measure_trainer, checkpointed=True, size="1.5 B"), model=False),
    "8k": Part(60.0, measure_contexts, model=False),
    "quickstart": Part(75.0, run_quickstart, model=False),
    "smollm2": Part(120.0, run_smollm2, model=False),
    "trainer compiled": Part(60.0, partial(measure_trainer, compiled=True)),
    "engine compiled": Part(75.0, partial(measure_engine, slots=72, compiled=True)),
    "engine-144": Part(45.0, partial(measure_engine, slots=144)),
    "fixed segments": Part(30.0, partial(measure_trainer, size="0.5 B", has_fixed=True), model=False),
    "log-ratio": Part(25.0, measure_log_ratios),
    "both": Part(75.0, run_both_halves),
    "environment": Part(25.0, measure_environment, model=False),
    "trainer-checkpointed": Part(40.0, partial(measure_trainer, checkpointed=True)),
    "LoRA": Part(30.0, partial(measure_trainer, rank=RANK)),
    "1.5 B, LoRA": Part(60.0, partial(measure_trainer, checkpointed=True, rank=RANK, size="1.5 B"), model=False),
}


# Their processes, and what is written


def prepare(context: Context, note: Note, model: bool) -> None:
    """Name the machine, and draw the weights. In a process of its own: CUDA must not be asked for in the one that forks
    all others.
    """
    if context.device == "cuda" and not torch.cuda.is_available():
        print("this machine shows no GPU: --dry-run proves the script without one")
        raise SystemExit(2)
    note(machine=machine(visible_gpus().names), versions=versions())
    if model:
        write_models(context.folder, context.shape)


def run_part(measure: Callable[[Context, Note], None], context: Context, file: Path, log: Path) -> None:
    """Measures a part in its own process; its figures are in `file` at once."""
    os.setpgid(0, 0)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the processes of a run have it
    with log.open("ab", buffering=0) as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1)
    torch.set_num_threads(1)
    keep_few_kernels()
    figures: dict[str, Any] = {}

    def note(**new_figures: Any) -> None:
        figures.update(new_figures)
        write_json(file, figures)

    measure(context, note)


def run_in_process(
    name: str, measure: Callable[[Context, Note], None], context: Context, limit: float, log: Path
) -> dict[str, Any]:
    """Returns the figures that a part has when it has ended, or when its time is over."""
    file, part_log, start_time = context.folder / f"{name}.json", context.folder / f"{name}.log", time.monotonic()
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = multiprocessing.get_context("fork").Process(target=run_part, args=(measure, context, file, part_log))
    process.start()
    try:
        process.join(limit)
        in_time = process.exitcode is not None
    finally:
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)  # whatever it has started
        except ProcessLookupError:
            process.kill()  # it has no group yet, or has ended
        process.join()
    log_text = part_log.read_text(errors="replace") if part_log.exists() else ""
    with log.open("a") as logs:
        logs.write(f"==== {name}\n{log_text}\n")
    figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not in_time:
        figures["failed"] = f"it was not done after {limit:.0f} s"
    elif process.exitcode:
        figures["failed"] = (log_text.strip().splitlines() or [f"exit code {process.exitcode}"])[-1]
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    return figures | {"seconds": round(time.monotonic() - start_time, 1), "cpu_seconds": round(cpu, 1)}


def figure_table(name: str, figures: Mapping[str, Any]) -> str:
    """Returns the figures of a part as lines of a table; figures of one kind share a line."""
    rows = []
    for figure, value in figures.items():
        if figure == "top_kernels":
            rows += [f"| {name} | {share:.1%}, {count:g} of | {kernel} |" for kernel, _, share, count in value]
        else:
            rows.append(f"| {name} | {figure.replace('_', ' ')} | {format_value(value)} |")
    return "\n".join(rows)


def format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name.replace('_', ' ')} {format_value(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def kept_parts(out: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts that a file has already, if it is of this machine, model and software."""
    try:
        recorded = json.loads(out.read_text())
        return dict(recorded["parts"]) if recorded["about"] == about else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and short runs")
    parser.add_argument("--size", choices=SIZES, default="0.5 B", help="the model's, without --small")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, help=f"for all parts; {TOTAL_SECONDS:g}; none begins without time")
    parser.add_argument("--dry-run", action="store_true", help="all of it small on a CPU, with more time")
    parser.add_argument("--smollm2", default="", metavar="FOLDER", help="weights for the part of that name")
    parser.add_argument("--out", type=Path, default=Path("one_gpu.json"))
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.device, options.small = "cpu", True
    options.seconds = options.seconds or (DRY_RUN_SECONDS if options.dry_run else TOTAL_SECONDS)
    if options.device == "cuda":  # one card, here and in the runs
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    start_time = time.monotonic()
    part_names = options.only or [name for name in PARTS if name != "smollm2" or options.smollm2]

    with tempfile.TemporaryDirectory(prefix="tba-one-gpu-", ignore_cleanup_errors=True) as folder:
        size = "tiny" if options.small else options.size
        context = Context(options.device, size, Path(folder), options.small, options.smollm2)
        log = options.out.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)

        def seconds_left() -> float:
            return options.seconds - (time.monotonic() - start_time)

        needs_model = any(PARTS[name].model for name in part_names)
        about = run_in_process("prepare", partial(prepare, model=needs_model), context, seconds_left(), log)
        if "failed" in about:
            print(about["failed"], file=sys.stderr)
            return 2
        about = {name: about[name] for name in ("machine", "versions")}
        about |= {"device": context.device, "size": context.size}
        parts = kept_parts(options.out, about) if options.only else {}
        print(f"{format_value(about['machine'])}; {format_value(about['versions'])}; {context.size}\n")
        print("| part | | |\n|---|---|---|", flush=True)
        for name in part_names:
            part = PARTS[name]
            limit = min(part.limit * options.seconds / TOTAL_SECONDS, seconds_left())
            parts[name] = (
                {"skipped": f"no time: {seconds_left():.0f} s are left"}
                if seconds_left() < LEAST_SECONDS
                else run_in_process(name, part.act, context, limit, log)
            )
            write_json(options.out, {"about": about, "parts": parts})
            print(figure_table(name, parts[name]), flush=True)
    failed_parts = [name for name in part_names if "failed" in parts[name] or parts[name].get("passed") is False]
    if failed_parts:
        print(f"failed: {', '.join(failed_parts)}; {log} has what they said", file=sys.stderr)
    return int(bool(failed_parts))


if __name__ == "__main__":
    sys.exit(main())
