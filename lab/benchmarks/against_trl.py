"""The quickstart's sums against TRL's trainers on a CPU: wall-clock time to a target accuracy, and final accuracy.

    python lab/benchmarks/against_trl.py [--seeds 3] [--trainers grpo rloo] [--out FILE]
    python lab/benchmarks/against_trl.py --model smollm2 [--minutes 100] [--every 10] [--problems 100]

The second form is TRL's GRPO alone, on the recipe `instruct` with a real model, for the given time (evaluation apart):
the same prompts, reward, K, batch, LoRA, temperature and length; two threads; ours is `tba train instruct`. It has no
reference (beta 0), which saves it a pass. Of float32 and bfloat16 the faster is taken, by two steps of each.

TRL (pinned below) is installed into an environment of its own, `.venv-trl`, by this script (about 1.5 GB, once).
Same shipped base, problems, reward, K, batch, temperature, length limit, gradient clip and AdamW. Ours runs in two
processes of one thread, TRL in one process of two threads, so that both have two cores; TRL is given the best of three
learning rates, by time to the target on another seed. Ours runs twice: the quickstart as it is, and asynchronous TBA',
also at the best of three rates (study `wall_clock`, 200 updates). Evaluation (500 held-out problems, one sampled answer
to each) stops TRL's clock, but runs on our searcher, whose clock does not stop. TRL's clock starts with its first step,
ours with the first optimizer step; ours leaves out the wait for the first batch, which is less than one TRL step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from async_speedup import EVALUATION, TARGET, reached, run

from tba.evaluation.estimators import mean_interval
from tba.models.huggingface import HuggingFace
from tba.recipes.instruct import recipe as instruct
from tba.recipes.quickstart import recipe

TRL = "trl==1.16.0"
RATES = (3e-5, 1e-4, 3e-4)
ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "lab" / "src" / "tba_lab" / "studies" / "wall_clock.py"
OURS = {"quickstart": "quickstart", "tba-prime": f"{STUDY}::tba-prime-async"}  # name -> what `tba train` runs
_DEADLINE_SECONDS = 3600  # seconds for one run of TRL


def environment() -> Path:
    """The Python that has TRL."""
    folder = ROOT / ".venv-trl"
    if not (folder / "installed").is_file():
        print(f"installing {TRL} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        packages = ["torch", "transformers", "datasets", "accelerate", "peft", "if-verifiable"]
        subprocess.run([*install, TRL, *packages], check=True)
        (folder / "installed").touch()
    return folder / "bin" / "python"


def run_trl(
    python: Path, trainer: str, lr: float, seed: int, steps: int, folder: Path, **more_settings: object
) -> dict[str, Any]:
    """One run of lab/benchmarks/trl_side.py: its curve [(seconds, accuracy)] and seconds per step.

    more_settings: other settings of the script.
    """
    task, model = recipe.task, recipe.model
    assert isinstance(model, HuggingFace)
    assert model.warm_start is not None
    problems = {split: [(p.prompt, p.fields["answer"]) for p in task.problems(split)] for split in ("train", "eval")}
    result_file = folder / f"{trainer}-{lr}-{seed}.json"
    settings = {
        "trainer": trainer,
        "lr": lr,
        "seed": seed,
        "steps": steps,
        "threads": 2,
        "every": 20,
        "batch": recipe.groups_per_step * recipe.group_size,
        "group_size": recipe.group_size,
        "max_completion": model.generation.max_completion_tokens,
        "model": str(model.warm_start.shipped),
        "train": problems["train"],
        "eval": problems["eval"][:500],
        "folder": str(folder / f"{trainer}-{seed}"),
        "out": str(result_file),
        **more_settings,
    }
    path = result_file.with_suffix(".settings")
    path.write_text(json.dumps(settings))
    command = [str(python), str(Path(__file__).parent / "trl_side.py"), str(path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS)
    if process.returncode:
        raise SystemExit(f"{trainer}:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(result_file.read_text())
    return result


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tuning-steps", type=int, default=200)
    parser.add_argument("--trainers", nargs="+", default=["grpo", "rloo"], choices=["grpo", "rloo", "online_dpo"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", help="a real model's folder: the second form")
    parser.add_argument("--minutes", type=float, default=100.0)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--problems", type=int, default=100)
    options = parser.parse_args()
    python = environment()
    if options.model:
        real_model(python, options.model, options.minutes, options.every, options.problems, options.out)
        return
    facts: dict[str, Any] = {"rates": {}, **{name: [] for name in (*OURS, *options.trainers)}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for trainer in options.trainers:
            facts["rates"][trainer] = best_rate(python, trainer, options.tuning_steps, folder)
        for seed in range(options.seeds):
            for side, variant in OURS.items():
                steps = ["--steps", str(options.steps)] if side == "quickstart" else []
                run_ = run(variant, f"{side}-{seed}", ["--seed", str(seed), *steps, *EVALUATION], folder)
                figures = {"seconds": run_.seconds_to_target, "final": run_.final}
                facts[side].append(figures)
                print(f"seed {seed} {side}: {figures}, {1000 * run_.seconds_per_step:.0f} ms per step", flush=True)
            for trainer in options.trainers:
                result = run_trl(python, trainer, facts["rates"][trainer], seed, options.steps, folder)
                figures = {"seconds": reached(result["curve"]), "final": result["curve"][-1][1]}
                facts[trainer].append(figures)
                step = f"{1000 * result['seconds_per_step']:.0f} ms per step"
                print(f"seed {seed} {trainer}: {figures}, {step}", flush=True)
    print_report(facts, options.trainers)
    if options.out is not None:
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


def real_model(python: Path, model: str, minutes: float, every: int, problems: int, out: Path | None) -> None:
    """TRL's GRPO on `instruct`, its settings ours; prints its curve and its cost, and writes them to `out`."""
    task, model_settings = instruct.task, instruct.model
    assert isinstance(model_settings, HuggingFace)
    rows = {split: [(p.prompt, p.fields) for p in task.problems(split)] for split in ("train", "eval")}
    with tempfile.TemporaryDirectory() as name:
        settings = {
            "lr": instruct.optimizer.lr,
            "seed": 0,
            "threads": 2,
            "every": every,
            "part": 16,
            "batch": instruct.groups_per_step * instruct.group_size,
            "group_size": instruct.group_size,
            "max_completion": model_settings.generation.max_completion_tokens,
            "temperature": instruct.policy_temperature,
            "rank": model_settings.lora.rank,
            "model": model,
            "train": rows["train"],
            "folder": f"{name}/trl",
        }

        def side(dtype: str, steps: int, deadline: float, held_out: int) -> dict[str, Any]:
            result_file, path = Path(name) / "out.json", Path(name) / "settings.json"
            run_settings = {"dtype": dtype, "steps": steps, "deadline": deadline, "eval": rows["eval"][:held_out]}
            path.write_text(json.dumps({**settings, **run_settings, "out": str(result_file)}))
            command = [str(python), str(Path(__file__).parent / "trl_real_side.py"), str(path)]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
            result: dict[str, Any] = json.loads(result_file.read_text())
            seconds, peak = result["seconds_per_step"], result["peak_gb"]
            print(f"TRL, {dtype}: {seconds:.1f} s per update, {peak:.1f} GB", flush=True)
            return result

        short_results = {dtype: side(dtype, 2, _DEADLINE_SECONDS, 0) for dtype in ("float32", "bfloat16")}
        fastest_dtype = min(short_results, key=lambda dtype: short_results[dtype]["seconds_per_step"])
        result = side(fastest_dtype, 100_000, 60 * minutes, problems)
    answer_seconds = result["seconds_per_step"] / settings["batch"]
    print(f"{fastest_dtype}: {answer_seconds:.2f} s an answer; held-out success by step and second: {result['curve']}")
    if out is not None:
        out.write_text(json.dumps({"short": short_results, "dtype": fastest_dtype, **result}, indent=1) + "\n")


def best_rate(python: Path, trainer: str, steps: int, folder: Path) -> float:
    """The rate that reaches the target first, or else ends highest."""
    scores = {}
    for lr in RATES:
        curve = run_trl(python, trainer, lr, 100, steps, folder)["curve"]
        scores[lr] = (reached(curve) or float("inf"), -curve[-1][1])
        print(f"{trainer} at {lr}: {TARGET:.0%} after {scores[lr][0]:.0f} s, ends at {-scores[lr][1]:.1%}", flush=True)
    return min(scores, key=lambda lr: scores[lr])


def print_report(facts: dict[str, Any], trainers: list[str]) -> None:
    """The figures that are asked for."""
    for trainer in [*OURS, *trainers]:
        runs = facts[trainer]
        seconds = ", ".join("never" if r["seconds"] is None else f"{r['seconds']:.0f} s" for r in runs)
        final = [r["final"] for r in runs]
        end_text = f"{np.mean(final):.1%} ({min(final):.1%}-{max(final):.1%})"
        print(f"{trainer:11} {TARGET:.0%} after {seconds}; ends at {end_text}")
        for side in OURS if trainer not in OURS else ():
            pairs = [(o["seconds"], r["seconds"]) for o, r in zip(facts[side], runs, strict=True)]
            ratios = np.array([r / o for o, r in pairs if o and r])
            if len(ratios):
                i = mean_interval(ratios)
                times = f"{i.estimate:.2f} times {side} [{i.low:.2f}, {i.high:.2f}]"
                print(f"{'':11} {times}, {len(ratios)} of {len(pairs)} seeds reached it on both sides")


if __name__ == "__main__":
    main()
