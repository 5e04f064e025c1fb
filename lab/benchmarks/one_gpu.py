"""What one card does with this program, the most telling first, in 240 s at most.

    make test-gpu                                                    # on a machine with a GPU, in 8 minutes at most
    PYTHONPATH=src:lab/src:lab/benchmarks python lab/benchmarks/one_gpu.py   # in 4 minutes, where nothing is installed
    ... --only engine trainer                                        # these parts; the others of --out are kept
    ... --device cpu --small                                         # all of it, to see that the script works

Needs no network: weights of Qwen2.5-0.5B's shape are drawn on the spot, the quickstart's model is shipped. Every part
is a process of its own with its own limit, in proportion to `--seconds`. What it has found is written at once, so that
one that reaches its limit still leaves what it had. `--out` (one_gpu.json) is rewritten after every part; one_gpu.log
beside it has what they said.

- *environment*: microseconds to launch a kernel, and a kernel's share of a captured graph; GB/s from and to pinned and
  pageable memory; the rate of a large product of matrices.
- *engine*, *engine-256*: the transformers engine with 72 and with 256 slots. A token step of all slots, but the first:
  milliseconds, launches, kernels and their milliseconds (the difference of two runs that end a few tokens apart,
  so that prompts do not count). A round of answers of geometric lengths, cold and the same again; the same as flow.
  Peak memory, and what `tba.models.memory` computes.
- *trainer*, *trainer-checkpointed*: a step of the trainer as `start_policy` builds it, 3 groups of 20 answers of 200
  tokens to prompts of 100: tokens/s, launches, kernels, the ten kernels that take most time, the parts of a step;
  FLOP that a step needs (6 for each parameter and token; recomputing is not needed) as a share of the product's rate;
  peak memory and the formula's. A publication alone, a step beside one, and how long after an update its weights are
  in an engine of the same process.
- *log-ratio*: of engine, reference and trainer at version 0: mean squares for each token and each answer, and the
  effective sample size.
- *both*: a short run of that model by `tba train`.
- *sharing*: what both halves on one card leave of each (`one_gpu_sharing`); *arrangements*: the alternatives.
- *tests*: those marked `gpu` (tests/test_gpu.py), and what they measured. *quickstart*: `tba train quickstart`.
- *1.5 B*, *LoRA*, *1.5 B, LoRA*: a trainer's step and its peak.
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
    PeakMemory,
    SearcherHalf,
    Size,
    TrainerHalf,
    arguments_of,
    model_of,
    models_in,
    prompts_of,
    ready_to_count,
    recipe_of,
    seconds_of,
    synchronize,
    tokens_in,
    tokens_of,
    work_of,
)
from one_gpu_sharing import BY_DEFAULT, OTHERS, arranged

from tba.__main__ import main as tba
from tba.batch import collate
from tba.cards import cards
from tba.engines.transformers import EngineSettings
from tba.generation import generate
from tba.models.arithmetic import forwards_per_update, product_rate
from tba.models.memory import SearcherWorkload, Shape, TrainerWorkload, engine_bytes, total, trainer_bytes
from tba.policy.lora import LoraSettings
from tba.record.jsonl import write_json
from tba.record.memory import keep_few_kernels, machine, versions
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.types import Group, Sampling, Trajectory, Version

ROOT = Path(__file__).parents[2]
SECONDS = 240.0  # for everything, unless told otherwise
STEPS = 5  # timed
RANK = 16  # of adapters
ASKED = (2, 7)  # how often an engine asks whether to go on, in a shorter and a longer run of token steps
LEAST = 8.0  # seconds without which no part is begun

Note = Callable[..., None]  # adds figures to what a part has found


@dataclass(frozen=True)
class Given:
    """What a part works with."""

    device: str
    size: str  # of `SIZES`
    folder: Path  # with the models `endless` and `ending`; a part may write there
    small: bool = False  # short runs
    smollm2: str = ""

    @property
    def shape(self) -> Size:
        return SIZES[self.size]


# The parts


def environment(given: Given, note: Note) -> None:
    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    note(product_flop_per_second=product_rate(torch.bfloat16, device))
    x, times = torch.zeros(1, device=device), 10_000

    def launch(count: int) -> None:
        for _ in range(count):
            x.add_(1)

    launch(100)
    note(microseconds_a_launch=1e6 * seconds_of(lambda: launch(times), given.device) / times)
    if on_gpu:
        graph, length = torch.cuda.CUDAGraph(), 100
        with torch.cuda.graph(graph):
            launch(length)
        graph.replay()

        def replay() -> None:
            for _ in range(times // length):
                graph.replay()

        seconds = seconds_of(replay, given.device)
        note(microseconds_a_kernel_of_a_graph=1e6 * seconds / times)
    size = 1 << (24 if given.small else 29)  # bytes
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    for memory in ("pinned", "pageable") if on_gpu else ("pageable",):
        here = torch.ones(size, dtype=torch.uint8, pin_memory=memory == "pinned")
        there.copy_(here)  # which are there from here on
        for to, way in ((there, "to_device"), (here, "to_host")):
            copy = partial(to.copy_, here if to is there else there)
            note(
                **{f"{memory}_{way}_GB_per_second": size / 1e9 / min(seconds_of(copy, given.device) for _ in range(3))}
            )


def engine_part(given: Given, note: Note, slots: int) -> None:
    peak, device, shape = PeakMemory(), given.device, given.shape
    slots = slots // 32 * 8 if given.small else slots
    settings = EngineSettings(slots=slots, max_completion_tokens=shape.longest)
    recipe = recipe_of(given.folder / "ending", device, shape, generation=settings)
    began = time.perf_counter()
    half = SearcherHalf(recipe, shape)
    note(slots=slots, start_seconds=time.perf_counter() - began)
    asked, state = prompts_of(shape, max(1, slots // SAMPLES), half.rng), half.rng.bit_generator.state
    for name in ("cold", "again"):  # the second time without what is made once for a shape
        half.rng.bit_generator.state = state
        began = time.perf_counter()
        tokens = tokens_of(a_round(half, asked))
        seconds = time.perf_counter() - began
        note(**{f"round_{name}_seconds": seconds, f"round_{name}_tokens_per_second": tokens / seconds})
    half.warm()
    note(flow_tokens_per_second=half.work(shape.window, device).a_second)
    longest = 2 * shape.prompt
    of = SearcherWorkload(model_of(recipe).precision, slots, longest + shape.longest, longest, device=device)
    note(peak_bytes=peak.bytes(), computed_bytes=total(engine_bytes(Shape.of(shape.config), of)))
    del half
    recipe = recipe_of(given.folder / "endless", device, shape, generation=settings)
    half = SearcherHalf(recipe, shape)
    a_token(half, slots, device)  # makes what is made once
    note(milliseconds_a_step=1e3 * min(a_token(half, slots, device) for _ in range(3)))
    del half
    ready_to_count(device)
    half = SearcherHalf(recipe, shape)
    few, many = 2, 3 if given.small else 4
    grown(half, slots, many)
    lengths: list[int] = []

    def grow(often: int) -> None:
        lengths.append(grown(half, slots, often))

    short, long = (work_of(partial(grow, often), device) for often in (few, many))
    work, steps = long - short, lengths[-1] - lengths[0]
    note(
        launches_a_step=work.launches / steps,
        kernels_a_step=work.kernels / steps,
        kernel_milliseconds_a_step=1e3 * work.seconds / steps,
        top_kernels=work.top(steps),
    )


def grown(half: SearcherHalf, slots: int, often: int) -> int:
    """Begin an answer in every slot, and stop when the engine has asked so often; returns the tokens of each."""
    left, flow = iter([False] * (often - 1)), half.engine.flow(8, Sampling(1.0, 1.0), half.rng)
    flow.submit(prompts_of(half.size, slots // 8, np.random.default_rng(0)))
    answers = flow.next(lambda: next(left, True), until_needed=False)
    return max(len(completion.tokens) for _, own in answers for completion in own)


def a_token(half: SearcherHalf, slots: int, device: str) -> float:
    """Seconds of a token step: of two runs that end a few tokens apart the difference, so that prompts do not count."""
    ends = []
    for often in ASKED:
        synchronize(device)
        began = time.perf_counter()
        tokens = grown(half, slots, often)
        synchronize(device)
        ends.append((time.perf_counter() - began, tokens))
    (short, few), (long, many) = ends
    return (long - short) / (many - few)


def a_round(half: SearcherHalf, asked: list[Any]) -> list[Any]:
    """`SAMPLES` answers to each prompt, until the last one is there."""
    return generate(half.engine, asked, SAMPLES, Sampling(1.0, 1.0), half.rng)


def trainer_part(given: Given, note: Note, checkpointed: bool = False, rank: int = 0, size: str = "") -> None:
    """`rank`: of adapters. With them, or with another size than the others', there is no more than a step."""
    shape, folder = given.shape, given.folder
    if size:
        shape, folder = shape if given.small else SIZES[size], folder / "larger"
        draw(folder, shape)
    peak = PeakMemory()
    lora: dict[str, Any] = {"lora": LoraSettings(rank=rank)} if rank else {}
    recipe = recipe_of(folder / "endless", given.device, shape, gradient_checkpointing=checkpointed, **lora)
    with tempfile.TemporaryDirectory(dir=given.folder) as published:
        half = TrainerHalf(recipe, shape, Path(published))
        note(**a_step(half, given.device, shape, checkpointed, rank, peak))
        if rank or size:
            return
        work = work_of(half.act, given.device, shape.vocabulary)
        note(
            launches_a_step=work.launches,
            kernels_a_step=work.kernels,
            kernel_milliseconds_a_step=1e3 * work.seconds,
            top_kernels=work.top(),
            shares_of_kernel_time=work.shares(),
        )
        note(**publications(half, given.device))
        note(version_in_engine_seconds=arrival(half, recipe.model.engine(Version()), given.device))
        half.weights.close()


def draw(folder: Path, shape: Size) -> None:
    """Write a model, unless an earlier part has; in a process of its own, whose memory is not this one's."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        process = multiprocessing.get_context("fork").Process(target=models_in, args=(unfinished, shape))
        process.start()
        process.join()
        unfinished.rename(folder)


def a_step(
    half: TrainerHalf, device: str, shape: Size, checkpointed: bool, rank: int, peak: PeakMemory
) -> dict[str, float]:
    first = seconds_of(half.act, device)
    half.act()
    steps = [seconds_of(half.act, device) for _ in range(STEPS)]
    recipe_model, made = model_of(half.recipe), Shape.of(shape.config)
    tokens, step = tokens_in(half.fetched.batch), statistics.median(steps)
    rate = product_rate(recipe_model.compute, torch.device(device))
    computed = trainer_bytes(
        made, TrainerWorkload(tokens, recipe_model.precision, device, rank, checkpointed=checkpointed)
    )
    return {
        "first_step_seconds": first,
        "seconds_a_step": step,
        "longest_step_seconds": max(steps),
        "tokens_per_second": tokens / step,
        "share_of_product_rate": 2 * forwards_per_update(rank) * made.parameters * tokens / step / rate,
        "peak_bytes": peak.bytes(),
        "computed_bytes": total(computed),
    }


def publications(half: TrainerHalf, device: str) -> dict[str, float]:
    """A step, a step that begins when weights are sent out, and the sending alone, in turn."""
    rows = []

    def publish() -> None:
        half.trainer.publish()
        half.weights.settle()

    for _ in range(3):
        plain = seconds_of(half.act, device)
        half.trainer.publish()
        beside = seconds_of(half.act, device)
        half.weights.settle()
        rows.append((plain, beside, seconds_of(publish, device)))
    plain, beside, alone = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "step_seconds": plain,
        "step_beside_a_publication_seconds": beside,
        "beside_over_alone": statistics.median(row[1] / row[0] for row in rows),
        "publication_seconds": alone,
        "version_bytes": half.directory.file(half.trainer.version).stat().st_size,
    }


def arrival(half: TrainerHalf, into: Any, device: str) -> float:
    """Seconds from the end of an update until an engine has its weights."""
    seconds = []
    for _ in range(3):
        half.act()

        def deliver() -> None:
            half.trainer.publish()
            newest = half.weights.newer_than(into.version)
            assert newest is not None
            into.load(newest.read(), newest.version)

        seconds.append(seconds_of(deliver, device))
    return min(seconds)


def log_ratio(given: Given, note: Note) -> None:
    shape = given.shape
    recipe = recipe_of(given.folder / "ending", given.device, shape)
    half, reference = SearcherHalf(recipe, shape), recipe.model.reference(recipe.policy_temperature, Version())
    asked = prompts_of(shape, shape.groups, half.rng)
    answered = a_round(half, asked)
    scored = reference.log_probabilities_of(list(zip(asked, answered, strict=True)))
    made = []
    for prompt, row, scores in zip(asked, answered, scored, strict=True):
        pairs = enumerate(zip(row, scores, strict=True))
        made.append(Group.of([Trajectory(f"{prompt.text}-{i}", prompt, c, 1.0, s, Version()) for i, (c, s) in pairs]))
    batch = collate(made)
    policy, _ = start_policy(recipe, start_ranks(recipe, 0), None)
    with torch.no_grad():
        log_policy_BT = policy.evaluate(batch).log_policy_BT.float().cpu()
    assert batch.log_behavior_BT is not None
    for name, other_BT in (("engine", batch.log_behavior_BT), ("reference", batch.log_reference_BT)):
        ratio_BT = (log_policy_BT - other_BT) * batch.mask_BT
        note(**{f"trainer_against_{name}": distances(ratio_BT.numpy(), batch.mask_BT.numpy())})
    note(answers=batch.rows, tokens=int(batch.mask_BT.sum()))


def distances(ratio_BT: np.ndarray[Any, Any], mask_BT: np.ndarray[Any, Any]) -> dict[str, float]:
    """Mean squares, quantiles and effective sample size of log-ratios that are 0 in exact arithmetic."""
    token_N, answer_B = ratio_BT[mask_BT.astype(bool)], ratio_BT.sum(1)
    weight_B = np.exp(answer_B)
    found = {"effective_sample_size": float(weight_B.sum() ** 2 / (weight_B**2).sum() / len(weight_B))}
    for name, values in (("a_token", token_N), ("an_answer", answer_B)):
        low, high = np.quantile(values, (0.05, 0.95))
        found |= {f"mean_square_of_{name}": float((values**2).mean()), f"p05_of_{name}": low, f"p95_of_{name}": high}
    return found


def both(given: Given, note: Note) -> None:
    steps = ["--steps", "4" if given.small else "24"]
    arguments = [*arguments_of(given.folder / "endless", given.device, given.shape), *steps]
    note(**a_run("quickstart", arguments, given.folder / "both"))


def sharing(given: Given, note: Note, arrangements: tuple[str, ...]) -> None:
    shape = given.shape
    recipe = recipe_of(given.folder / "ending", given.device, shape)
    folder = given.folder / "sharing"
    folder.mkdir(exist_ok=True)
    halves = {
        "trainer": lambda: TrainerHalf(recipe, shape, folder / "weights"),
        "searcher": lambda: SearcherHalf(recipe, shape),
    }
    tokens = shape.groups * shape.answers * shape.length
    arranged(halves, arrangements, shape, given.device, folder, note, tokens)


def tests(given: Given, note: Note) -> None:
    """Those marked `gpu`; what they recorded is taken from pytest's report."""
    report = given.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "junit_family=xunit1"]
    environment = os.environ | {"TBA_TEST_DEVICE": given.device}
    done = subprocess.run(
        [*command, "--junitxml", str(report), str(ROOT / "tests" / "test_gpu.py")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    print(done.stdout, done.stderr)
    note(passed=done.returncode == 0, said=done.stdout.strip().splitlines()[-1:])
    for case in ElementTree.parse(report).iter("testcase"):
        values = {p.get("name", ""): float(p.get("value", "nan")) for p in case.iter("property")}
        if values:
            note(**{case.get("name", ""): values})


def quickstart(given: Given, note: Note) -> None:
    few = ["--steps", "4", "--replay.pacing.warm-up", "0", "--evaluation.every", "0", "--evaluation.problems", "20"]
    short = few if given.small else []
    note(**a_run("quickstart", ["--model.device", given.device, *short], given.folder / "quickstart"))


def smollm2(given: Given, note: Note) -> None:
    note(**a_run("instruct", adapters_of(given.smollm2, given.device), given.folder / "smollm2"))


def adapters_of(folder: str, device: str) -> list[str]:
    """The settings of `tba train instruct` under LoRA."""
    return [
        *("--model.path", folder, "--model.device", device, "--model.lora.rank", str(RANK), "--optimizer.lr", "1e-4"),
        *("--steps", "40", "--evaluation.every", "0"),
    ]


def a_run(recipe: str, arguments: list[str], folder: Path) -> dict[str, Any]:
    """What a `tba train` has recorded: seconds of its steps, idle shares, accuracy."""
    code = tba(["train", recipe, "--runs", str(folder), "--run-name", "run", *arguments])
    if code:
        raise RuntimeError(f"tba train {recipe} ended with exit code {code}")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] - row["wait_seconds"] for row in rows[1:]]  # the first makes what is made once
    kept = ("trainer_idle", "trainer_paced", "searcher_idle", "searcher_paced", "wall_seconds", "peak_memory_bytes")
    return {
        "seconds_a_step": statistics.median(seconds),
        "longest_step_seconds": max(seconds),
        "updates_per_second": len(rows) / summary["wall_seconds"]["train"],
        **generated(rows),
        **{name: summary[name] for name in kept},
        "evaluations": {e["metric"]: e["value"] for e in summary["evaluations"]},  # the last of each
    }


def generated(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens a second of a run's searchers, between the first and the last count of them that its steps have; without
    two counts nothing.
    """
    counts = {row["generated_tokens"]: row["wall_seconds"] for row in reversed(rows) if "generated_tokens" in row}
    if len(counts) < 2:
        return {}
    (first, began), (last, ended) = (pick(counts.items()) for pick in (min, max))
    return {"generated_tokens_per_second": (last - first) / (ended - began)}


@dataclass(frozen=True)
class Part:
    """A process, and how long it may take."""

    limit: float  # seconds, of 240 for everything
    act: Callable[[Given, Note], None]
    model: bool = True  # whether it needs the model of random weights


PARTS = {
    "environment": Part(25.0, environment, model=False),
    "engine": Part(60.0, partial(engine_part, slots=72)),
    "engine-256": Part(45.0, partial(engine_part, slots=256)),
    "trainer": Part(45.0, trainer_part),
    "trainer-checkpointed": Part(40.0, partial(trainer_part, checkpointed=True)),
    "log-ratio": Part(25.0, log_ratio),
    "both": Part(75.0, both),
    "sharing": Part(45.0, partial(sharing, arrangements=BY_DEFAULT)),
    "tests": Part(45.0, tests, model=False),
    "quickstart": Part(75.0, quickstart, model=False),
    "arrangements": Part(90.0, partial(sharing, arrangements=OTHERS)),
    "1.5 B": Part(60.0, partial(trainer_part, checkpointed=True, size="1.5 B"), model=False),
    "LoRA": Part(30.0, partial(trainer_part, rank=RANK)),
    "1.5 B, LoRA": Part(60.0, partial(trainer_part, checkpointed=True, rank=RANK, size="1.5 B"), model=False),
    "smollm2": Part(120.0, smollm2, model=False),
}


# Their processes, and what is written


def prepare(given: Given, note: Note, model: bool) -> None:
    """Name the machine, and draw the weights. In a process of its own: CUDA must not be asked for in the one that forks
    all others.
    """
    if given.device == "cuda" and not torch.cuda.is_available():
        print("this machine shows no GPU: --device cpu --small proves the script without one")
        raise SystemExit(2)
    note(machine=machine(cards().names), versions=versions())
    if model:
        models_in(given.folder, given.shape)


def lived(act: Callable[[Given, Note], None], given: Given, file: Path, log: Path) -> None:
    """The life of a part's process: what it finds is in `file` at once."""
    os.setpgid(0, 0)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with log.open("ab", buffering=0) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1)
    torch.set_num_threads(1)
    keep_few_kernels()
    found: dict[str, Any] = {}

    def note(**figures: Any) -> None:
        found.update(figures)
        write_json(file, found)

    act(given, note)


def in_a_process(
    name: str, act: Callable[[Given, Note], None], given: Given, limit: float, log: Path
) -> dict[str, Any]:
    """What a part has found when it has ended, or when its time is over."""
    file, own_log, began = given.folder / f"{name}.json", given.folder / f"{name}.log", time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = multiprocessing.get_context("fork").Process(target=lived, args=(act, given, file, own_log))
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
    said = own_log.read_text(errors="replace") if own_log.exists() else ""
    with log.open("a") as logs:
        logs.write(f"==== {name}\n{said}\n")
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not in_time:
        found["failed"] = f"it was not done after {limit:.0f} s"
    elif process.exitcode:
        found["failed"] = (said.strip().splitlines() or [f"exit code {process.exitcode}"])[-1]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return found | {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(cpu, 1)}


def table(name: str, found: Mapping[str, Any]) -> str:
    """The figures of a part, one in a line; those of a kind in one."""
    rows = []
    for figure, value in found.items():
        if figure == "top_kernels":
            rows += [f"| {name} | {share:.1%}, {count:g} of | {kernel} |" for kernel, _, share, count in value]
        else:
            rows.append(f"| {name} | {figure.replace('_', ' ')} | {shown(value)} |")
    return "\n".join(rows)


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name.replace('_', ' ')} {shown(own)}" for name, own in value.items())
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def kept_of(out: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that a file has already, if it is of this machine, model and software."""
    try:
        before = json.loads(out.read_text())
        return dict(before["parts"]) if before["about"] == about else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model and short runs")
    parser.add_argument("--size", choices=SIZES, default="0.5 B", help="the model's, without --small")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything; no part is begun without time")
    parser.add_argument("--smollm2", default="", metavar="FOLDER", help="weights for the part of that name")
    parser.add_argument("--out", type=Path, default=Path("one_gpu.json"))
    asked = parser.parse_args(arguments)
    if asked.device == "cuda":  # one card, here and in the runs
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    began = time.monotonic()
    wanted = asked.only or [name for name in PARTS if name != "smollm2" or asked.smollm2]

    with tempfile.TemporaryDirectory(prefix="tba-one-gpu-", ignore_cleanup_errors=True) as scratch:
        given = Given(asked.device, "tiny" if asked.small else asked.size, Path(scratch), asked.small, asked.smollm2)
        log = asked.out.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)

        def left() -> float:
            return asked.seconds - (time.monotonic() - began)

        needed = any(PARTS[name].model for name in wanted)
        about = in_a_process("prepare", partial(prepare, model=needed), given, left(), log)
        if "failed" in about:
            print(about["failed"], file=sys.stderr)
            return 2
        about = {name: about[name] for name in ("machine", "versions")}
        about |= {"device": given.device, "size": given.size}
        parts = kept_of(asked.out, about) if asked.only else {}
        print(f"{shown(about['machine'])}; {shown(about['versions'])}; {given.size}\n")
        print("| part | | |\n|---|---|---|", flush=True)
        for name in wanted:
            part = PARTS[name]
            parts[name] = (
                {"skipped": f"no time: {left():.0f} s are left"}
                if left() < LEAST
                else in_a_process(name, part.act, given, min(part.limit * asked.seconds / SECONDS, left()), log)
            )
            write_json(asked.out, {"about": about, "parts": parts})
            print(table(name, parts[name]), flush=True)
    failed = [name for name in wanted if "failed" in parts[name] or parts[name].get("passed") is False]
    if failed:
        print(f"failed: {', '.join(failed)}; {log} has what they said", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
