"""Small programs judged per second, at each level of isolation, alone and with generation beside.

    python lab/benchmarks/code_speed.py --out lab/results/code_speed.csv

A program is a function with three calls, or a function whose check runs in a process of its own, or a program that
reads and writes, once. All are different, so that no verdict is remembered. `cpu_ms` is the processor time of the
judge, its workers and the programs for one answer, which depends less on what else the machine does. With generation
beside, another process samples with the quickstart's base on one thread; its tokens per second are reported beside
those that it had alone, just before. `bubblewrap` starts `python -I -S` by bwrap for each program instead, one after
another, where bwrap is installed.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import numpy as np

import tba
from tba.rewards.code_running import LocalRunner, ProgramLimits
from tba.rewards.sandbox import LEVELS, Sandbox
from tba_lab.code_attacks import answered

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "calls": ({"test_list": [f"assert f({x}) == {2 * x}" for x in range(3)]}, "def f(x): return 2 * x"),
    "statements": (
        {"test": "def check(f):\n    for x in range(3):\n        assert f(x) == 2 * x\n", "entry_point": "f"},
        "def f(x): return 2 * x",
    ),
    "stdin": ({"tests": [{"input": "1 2\n", "output": "3\n"}]}, "print(sum(map(int, input().split())))"),
}
COLUMNS = ["level", "form", "judged_per_s", "cpu_ms", "generated_per_s", "generated_alone_per_s"]
_NUMBERS = count()


def main() -> None:
    parser = argparse.ArgumentParser(description="programs judged per second")
    parser.add_argument("--answers", type=int, default=300, help="of each row")
    parser.add_argument("--processes", type=int, default=2 * (os.cpu_count() or 1), help="programs at once")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for level in LEVELS:
        for form in FORMS:
            rows.append({"level": level, "form": form, **judge(level, form, options.answers, options.processes)})
            print(rows[-1], flush=True)
        with generation() as tokens:
            alone = tokens_per_second(tokens, 8.0)
            start, before = time.monotonic(), tokens.value
            measured = judge(level, "calls", options.answers, options.processes)
            rate = (tokens.value - before) / (time.monotonic() - start)
        measured |= {"generated_per_s": round(rate), "generated_alone_per_s": round(alone)}
        rows.append({"level": level, "form": "calls, generation beside", **measured})
        print(rows[-1], flush=True)
    if shutil.which("bwrap"):
        rows.append({"level": "bubblewrap", "form": "starts alone", **bubblewrap(options.answers // 3)})
        print(rows[-1], flush=True)
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def judge(level: Any, form: str, answers: int, processes: int) -> dict[str, float]:
    """Judges so many right answers; returns how many a second, and the processor time of one."""
    reward = tba.CodeReward(processes=processes)
    limits = ProgramLimits(reward.seconds, reward.answer_seconds, reward.memory_mb << 20)
    sandbox = Sandbox(level)
    reward.__dict__["_runner"] = LocalRunner(sandbox, limits)
    fields, code = FORMS[form]

    def batch(size: int) -> list[Any]:
        return [answered(fields, f"```\n# {next(_NUMBERS)}\n{code}\n```") for _ in range(size)]

    reward.judge(batch(2 * processes))  # starts the workers
    pairs = batch(answers)
    cpu, start = processor_seconds(sandbox), time.monotonic()
    judgements = reward.judge(pairs)
    seconds = time.monotonic() - start
    cpu = processor_seconds(sandbox) - cpu
    assert all(judgement.reward == 1 for judgement in judgements)
    sandbox.close()
    return {"judged_per_s": round(answers / seconds, 1), "cpu_ms": round(1000 * cpu / answers, 2)}


def processor_seconds(sandbox: Sandbox) -> float:
    """The processor time so far of this process and of the workers, with what their programs took."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    ticks, pending = 0, [worker.process.pid for worker in sandbox._idle]
    while pending:
        process = pending.pop()
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, words[11:15]))  # its own time and that of the children that it has waited for
        pending += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return usage.ru_utime + usage.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def bubblewrap(starts: int) -> dict[str, float]:
    """Starts an interpreter in namespaces of bubblewrap; returns how many a second, one after another."""
    binds = [word for path in ("/usr", "/lib", "/lib64", sys.base_prefix) for word in ("--ro-bind", path, path)]
    command = [
        "bwrap",
        *binds,
        "--unshare-all",
        "--die-with-parent",
        "--tmpfs",
        "/tmp",
        os.path.realpath(sys.executable),
    ]
    start = time.monotonic()
    for _ in range(starts):
        subprocess.run([*command, "-I", "-S", "-c", "print(6)"], check=True, capture_output=True)
    return {"judged_per_s": round(starts / (time.monotonic() - start), 1)}


@contextmanager
def generation() -> Iterator[Any]:
    """Samples in another process; returns its count of tokens."""
    context = multiprocessing.get_context("spawn")
    tokens = context.Value("q", 0)
    process = context.Process(target=sample, args=(tokens,), daemon=True)
    process.start()
    while not tokens.value:
        time.sleep(0.1)  # until the other process samples
    try:
        yield tokens
    finally:
        process.kill()
        process.join()


def sample(tokens: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tba.engines.transformers import TransformersEngine
    from tba.generation import generate
    from tba.recipes.quickstart import BASE, recipe

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    settings = tba.EngineSettings(slots=160, max_completion_tokens=6)
    engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(BASE), tokenizer, settings)
    rng = np.random.default_rng(0)
    prompts = [tba.Prompt("sums", np.array(tokenizer.encode(p.prompt), np.int32)) for p in recipe.task.problems("eval")]
    while True:
        for start in range(0, len(prompts), 20):
            groups = generate(engine, prompts[start : start + 20], 8, tba.Sampling(), rng)
            tokens.value += sum(len(c.tokens) for group in groups for c in group)


def tokens_per_second(tokens: Any, seconds: float) -> float:
    before, start = tokens.value, time.monotonic()
    time.sleep(seconds)  # over which tokens are counted
    return float((tokens.value - before) / (time.monotonic() - start))


if __name__ == "__main__":
    main()
