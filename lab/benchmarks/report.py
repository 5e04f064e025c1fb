"""How long a report takes, and how soon a browser shows it: of a long run, made up by the journal's own writer.

    python lab/benchmarks/report.py [--steps 20000] [--trajectories 500000] [--tokens 24] [--folder DIR]

Writes a run folder: a journal (four searchers, rounds of 20 answers to a prompt, each prompt asked about ten times),
a line of metrics.jsonl for each step, an evaluation each fiftieth of the run, a checkpoint's manifest with the uses,
and a summary whose account is that of the journal. Then `tba report`, and headless Chromium (Debian's `chromium`),
if there is one, opens it: until the first view is drawn, until all trajectories are listed, until a search is answered.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tba.command.options import ReportOptions
from tba.command.report import report_runs
from tba.record.evaluations import EvaluationWriter
from tba.record.ledger import Ledger
from tba.record.metrics import MetricsWriter
from tba.record.summary import Lag, Summary, WallSeconds
from tba.replay.codec import pack_uses
from tba.replay.journal import JournalWriter
from tba.types import Completion, Evaluation, Prompt, Sampling, StopReason, Trajectory, Version

SECONDS = 1.5  # of a step
ROUND = 20  # answers
AT_ONCE = 2000  # trajectories put in one transaction
SEARCHERS = 4
WORDS = ["add", "carry", "so", "the", "sum", "is", "then", "left", "digit", "seven", "of", "both", "we", "get"]
BEGAN = 1.7e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--trajectories", type=int, default=500_000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = (options.folder or Path(temporary)) / "long"
        if not run.exists():
            began = time.perf_counter()
            make(run, options.steps, options.trajectories, options.tokens)
            told("the run was written in", time.perf_counter() - began)
        journal = (run / "journal.sqlite").stat().st_size
        metrics = (run / "metrics.jsonl").stat().st_size
        print(f"journal: {journal / 2**20:,.0f} MiB, metrics.jsonl: {metrics / 2**20:.0f} MiB")
        page = Path(temporary) / "report.html"
        began, cpu = time.perf_counter(), time.process_time()
        report_runs([run], ReportOptions(page))
        told("report", time.perf_counter() - began, f"({time.process_time() - cpu:.1f} s of CPU)")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"page: {page.stat().st_size / 1e6:.1f} MB; peak memory of this process: {peak:,.0f} MiB")
        browse(page, Path(temporary))


def browse(page: Path, folder: Path) -> None:
    """Open it, list the trajectories, search."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "browser"))
    from chromium import Browser, program

    if program() is None:
        print("there is no Chromium here: how soon the page opens is not measured")
        return
    with Browser(folder) as browser:
        address = page.resolve().as_uri()
        told("opens in Chromium", browser.open(address))
        told("opens at the trajectories", browser.open(address + "#view=read"))
        began = time.perf_counter()
        browser.run(
            "(() => { const q = document.querySelector('input[name=q]'); q.value = 'seven carry';"
            " q.dispatchEvent(new Event('input')); })()"
        )
        told("a search", time.perf_counter() - began, browser.run("document.querySelector('.counted').textContent"))
        assert not browser.complaints, browser.complaints


def told(label: str, seconds: float, note: str = "") -> None:
    print(f"{label}: {seconds:.2f} s {note}".rstrip())


def make(run: Path, steps: int, trajectories: int, tokens: int) -> None:
    """Write the run's folder."""
    rng = np.random.default_rng(0)
    (run / "logs").mkdir(parents=True)
    settings = {
        "class": "tba.recipe.Recipe", "name": "long", "seed": 0, "policy_temperature": 1.0,
        "record": {"hide_text": False}, "run": {"journal_dir": None},
    }  # fmt: skip
    facts = {
        "recipe": "long", "digest": None, "overrides": [], "started": BEGAN, "clock": {"began": 0.0, "before": 0.0},
        "sft_seconds": 0.0, "incarnations": [{"why": "begun", "program": "", "marks": []}], "resolved": settings,
    }  # fmt: skip
    (run / "recipe.json").write_text(json.dumps(facts))
    lengths = put(run, steps, trajectories, tokens, rng)
    used = np.zeros(trajectories + 1, np.int32)
    used[1:] = np.maximum(-2, rng.poisson(1.2, trajectories) - (rng.random(trajectories) < 0.1))
    trained = used[1:] > 0
    checkpoint = run / "checkpoints" / f"step-{steps}"
    checkpoint.mkdir(parents=True)
    vocabulary = json.dumps({"model": {"vocab": {f" {word}": i for i, word in enumerate(WORDS)}}}).encode()
    (checkpoint / "tokenizer.json").write_bytes(vocabulary)
    files = {"tokenizer.json": (len(vocabulary), zlib.crc32(vocabulary))}
    state = {"replay": {"uses": pack_uses(used)}}
    (checkpoint / "run.json").write_text(json.dumps({"version": f"0.{steps}", "state": state, "files": files}))
    evaluations = [
        Evaluation(Version(0, step), step * SECONDS, metric, value, 2000)
        for step in range(0, steps + 1, max(1, steps // 50))
        for metric, value in (("pass@1/greedy", 0.3 + 0.6 * step / steps), ("pass@1/sampled", 0.2 + 0.6 * step / steps))
    ]
    writer = EvaluationWriter(run)
    writer.write(evaluations)
    writer.close()
    record(run, steps, rng)
    counts = {
        name: (int(rows.sum()), int(lengths[rows].sum()))
        for name, rows in (("trained_once", trained), ("waiting", used[1:] == 0), ("duplicate", used[1:] == -1))
    }
    Summary(
        recipe="long", seed=0, steps=steps, wall_seconds=WallSeconds(total=steps * SECONDS, train=steps * SECONDS),
        evaluations=evaluations, lag=Lag(6.0, 12.0, 40.0),
        trajectories=Ledger(generated=trajectories, trained_total=int(used.clip(min=0).sum()),
                            **{name: count for name, (count, _) in counts.items()}),
        tokens=Ledger(generated=int(lengths.sum()), trained_total=int((used[1:].clip(min=0) * lengths).sum()),
                      **{name: count for name, (_, count) in counts.items()}),
    ).write(run)  # fmt: skip


def put(run: Path, steps: int, trajectories: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Write the journal; returns the length of each answer."""
    prompts = [
        Prompt("long", np.arange(8, dtype=np.int32) + i, f"What is {i} + {i % 97}? Answer step by step.", {"answer": i})
        for i in range(max(1, trajectories // ROUND // 10))
    ]
    sampling, lengths = Sampling(1.0, 1.0), np.empty(trajectories, np.int64)
    writers = [JournalWriter(run / "journal.sqlite", f"searcher-{i}") for i in range(SEARCHERS)]
    for first_row in range(0, trajectories, AT_ONCE):
        rows = []
        for round_ in range(first_row // ROUND, min(trajectories, first_row + AT_ONCE) // ROUND):
            step = round_ * ROUND * steps // trajectories
            version, prompt = Version(0, step), prompts[round_ * 7919 % len(prompts)]
            for i in range(ROUND):
                number = round_ * ROUND + i
                length = lengths[number] = int(rng.integers(tokens // 2, 3 * tokens // 2 + 1))
                ids = rng.integers(0, len(WORDS), length).astype(np.int32)
                logs = -rng.exponential(0.5, length).astype(np.float32)
                text = " ".join(WORDS[token] for token in ids.tolist())
                rows.append(
                    Trajectory(
                        f"{number:032x}", prompt,
                        Completion(ids, text, StopReason.EOS, (version, version), sampling, logs),
                        float(rng.random() < 0.3 + 0.5 * step / steps), logs - np.float32(0.1), Version(),
                        {"correct": 1.0}, {}, {"searcher": "s", "round": round_, "seconds": 0.5},
                        BEGAN + step * SECONDS + round_ % 100 / 1000,
                    )
                )  # fmt: skip
        writers[first_row // AT_ONCE % SEARCHERS].put(rows)
    for writer in writers:
        writer.close()
    return lengths


def record(run: Path, steps: int, rng: np.random.Generator) -> None:
    """Write metrics.jsonl."""
    writer = MetricsWriter(run)
    names = (
        *("log_ratio", "lag", "lag_max", "waiting_seconds", "in_flight_seconds", "off_policy", "off_policy_p05"),
        *("off_policy_p95", "ess", "residual_relative", "trainer_idle", "trainer_paced", "searcher_idle", "loss"),
        *("grad_norm", "lr", "residual", "residual_spread", "log_z", "seconds", "wait_seconds", "cpu_seconds"),
    )
    noise = rng.random((steps, len(names)))
    for step in range(1, steps + 1):
        figures: dict[str, Any] = dict(zip(names, noise[step - 1].tolist(), strict=True))
        figures |= {"reward": 0.3 + 0.5 * step / steps + 0.1 * figures["loss"], "beta": 0.05, "tokens": 3000.0}
        figures |= {"generated_tokens": 2500.0 * step}
        writer.write(Version(0, step), step * SECONDS, figures)
    writer.close()


if __name__ == "__main__":
    main()
