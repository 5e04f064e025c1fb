"""Distillation of a real model beside TRL's: seconds, CPU seconds, answers and tokens to equal KL to the teacher.

    python lab/benchmarks/distil_against_trl.py --model STUDENT --teacher TEACHER --out rows.jsonl --folder RUNS
        [--ways trl top by-token tb] [--updates 3 6 12 24] [--rates 5e-4 1.5e-3] [--tuning 12] [--seeds 1]
        [--problems 64] [--threads 2] [--table]

The student is SmolLM2-135M-Instruct, the teacher a folder with its tokenizer, such as a checkpoint of the recipe
`instruct`; the prompts are that recipe's. Theirs is TRL's `DistillationTrainer` at beta 1, its one trainer for
distillation on-policy that is not experimental (`GKDTrainer` is): reverse KL by the whole vocabulary on the student's
own answers, one process of two threads. Ours is the recipe `distil_smollm2` in two processes of one thread,
asynchronous: the teacher's top 16 tokens and the rest (`top`, the recipe as it is), the sampled token alone
(`by-token`), and Trajectory Balance of whole answers (`tb`). TRL comes into an environment
of its own (`against_trl.py`).

Alike: 16 answers an update of at most 64 tokens at temperature 1, LoRA on all linear layers, AdamW without decay, a
rise of five updates, the gradient's clip, --dtype (rows and runs of each have a file and a folder of their own). Other:
TRL takes 16 prompts an update, ours four with four answers each, since log Z needs several of a prompt. Each way has
its rate of --rates, by the KL after --tuning updates on a seed of its own; with one rate nothing is tuned.

Adapters are written during a run and measured after it, by the same code (`Judge`): KL(student || teacher) per answer
on the student's answers to held-out prompts, and KL(teacher || student) on the teacher's, each exact in the next token
and summed over an answer. The clocks begin when all is loaded: TRL's at its first update, without its writing of
adapters; ours before the first answer is sampled, with the writing of checkpoints, which are whole models. CPU seconds
are those of all of a run's processes (Linux). Ours counts what was sampled, used or not. A row is written as it is
measured; after a stop the same command goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from against_trl import ROOT, environment
from torch import Tensor

from tba.engines.transformers import EngineSettings
from tba.evaluation.accuracy import EvaluationSettings
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipes.distil_smollm2 import recipe as distil
from tba.replay.pacing import Pacing
from tba.rollout.exploration import Fixed
from tba.runtime.prompt_sets import prompts_of
from tba.schedules import Constant, WarmupConstant
from tba.types import Prompt, Sampling, Version
from tba_lab.gkd import kl
from tba_lab.study import Study

PROMPTS, ANSWERS = 4, 4  # of an update
TOKENS = 64  # of an answer, at most
TUNING_SEED = 100
START_WAY = "start"  # the way of a student that has learnt nothing
_ANSWERS_PER_PASS = 16  # answers whose logits are made together
_POLL_SECONDS = 0.2  # seconds between two looks at how far a run is
_DEADLINE_SECONDS = 7200  # seconds of one run

assert isinstance(distil.model, HuggingFace)
recipe = replace(
    distil,
    model=replace(distil.model, generation=EngineSettings(slots=PROMPTS * ANSWERS, max_completion_tokens=TOKENS)),
    policy_temperature=1.0,
    exploration=Fixed(temperature=1.0),
    optimizer=replace(distil.optimizer, schedule=WarmupConstant(5)),
    replay=replace(distil.replay, pacing=Pacing(warm_up=PROMPTS * ANSWERS, max_mean_uses=2.0)),
    evaluation=EvaluationSettings(problems=1, greedy=False),
    run=replace(distil.run, checkpoints=1000),
    groups_per_step=PROMPTS,
    group_size=ANSWERS,
    samples_per_prompt=ANSWERS,
    prompts_per_round=PROMPTS,
)
by_sampled_tokens = replace(recipe, teacher=replace(recipe.teachers, top=0), objective=TrajectoryBalance(Constant(1.0)))
study = Study(
    name="distil_against_trl",
    description="Ways to learn from a teacher that is the whole target.",
    recipe=recipe,
    variants={
        "tb": by_sampled_tokens,
        "by-token": replace(by_sampled_tokens, objective=SubtrajectoryBalance(beta=Constant(1.0), flow="one")),
        "top": recipe,
    },
)


Costs: TypeAlias = dict[str, float]  # of a run until one update
Curve: TypeAlias = list[Costs]


@dataclass(frozen=True)
class Row:
    """Holds the costs and the divergences of a student after some updates."""

    way: str
    rate: float
    seed: int
    update: int
    wall: float  # seconds
    cpu: float  # seconds, of all processes
    answers: int  # sampled by then
    tokens: int  # of these
    kl: float  # of the student to the teacher, nats an answer
    kl_error: float  # standard error of its mean
    kl_back: float  # of the teacher to the student
    length: float  # mean tokens of the student's answers


@dataclass(frozen=True)
class Judge:
    """Measures how far a student is from the teacher."""

    student: str
    teacher: str
    problems: int

    @cached_property
    def base(self) -> HuggingFace:
        assert isinstance(recipe.model, HuggingFace)
        model = replace(recipe.model, path=self.student, lora=replace(recipe.model.lora, rank=0))
        return replace(model, generation=EngineSettings(slots=self.problems, max_completion_tokens=TOKENS))

    @cached_property
    def prompts(self) -> list[Prompt]:
        return prompts_of(replace(recipe, evaluation=EvaluationSettings(problems=self.problems)), self.base, "eval")

    @cached_property
    def engine(self) -> Any:
        return self.base.engine(Version(), 256)

    @cached_property
    def teacher_outputs(self) -> tuple[Any, list[list[int]], list[Tensor]]:
        """Returns the teacher, its answers, and its last states before each of their tokens."""
        model = load_model(self.teacher)
        answers = self.answers(model)
        return model, answers, self.states(model, answers)

    def answers(self, model: Any) -> list[list[int]]:
        """Returns a model's sampled answer to each prompt, as tokens: the same of the same weights."""
        self.engine.load(dict(model.named_parameters()), Version(0, 1))
        rows = generate(self.engine, self.prompts, 1, Sampling(), np.random.default_rng(0))
        return [[int(token) for token in completion.tokens] for (completion,) in rows]

    @torch.inference_mode()
    def states(self, model: Any, answers: list[list[int]]) -> list[Tensor]:
        """Returns a model's last states [T, H] before each token of every answer."""
        states_by_answer = []
        for start in range(0, len(answers), _ANSWERS_PER_PASS):
            pairs = list(zip(self.prompts[start:], answers[start : start + _ANSWERS_PER_PASS], strict=False))
            rows = [torch.tensor([*prompt.tokens.tolist(), *answer]) for prompt, answer in pairs]
            token_NT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # behind, where nothing before sees it
            states = model.model(input_ids=token_NT, use_cache=False).last_hidden_state
            for (prompt, answer), row in zip(pairs, states, strict=True):
                states_by_answer.append(row[len(prompt.tokens) - 1 :][: len(answer)].clone())
        return states_by_answer

    def measure(self, adapter: Path | None) -> dict[str, Any]:
        """Returns the divergences of the student with an adapter, as a row has them."""
        student = load_model(self.student, adapter)
        teacher, teacher_answers, teacher_states = self.teacher_outputs
        student_answers = self.answers(student)
        heads = student.get_output_embeddings(), teacher.get_output_embeddings()
        states = self.states(student, student_answers), self.states(teacher, student_answers)
        divergences = divergences_of((heads[0], states[0]), (heads[1], states[1]))
        student_states = self.states(student, teacher_answers)
        back_divergences = divergences_of((heads[1], teacher_states), (heads[0], student_states))
        return {
            "kl": statistics.mean(divergences),
            "kl_error": statistics.stdev(divergences) / len(divergences) ** 0.5,
            "kl_back": statistics.mean(back_divergences),
            "length": statistics.mean(map(len, student_answers)),
        }


def load_model(folder: str, adapter: Path | None = None) -> Any:
    """Returns a model in float32, with an adapter of PEFT merged into it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def divergences_of(p: tuple[Any, list[Tensor]], q: tuple[Any, list[Tensor]]) -> list[float]:
    """Returns for each answer the sum over its tokens of KL(p || q), each a head and states [T, H] of answers."""
    divergences = []
    for states_p, states_q in zip(p[1], q[1], strict=True):
        log_p, log_q = p[0](states_p).log_softmax(-1), q[0](states_q).log_softmax(-1)
        divergences.append(float(kl(log_p, log_q).double().sum()))
    return divergences


@dataclass(frozen=True)
class Runs:
    """Trains students, each in a folder that outlasts a stop of this command."""

    model: str
    teacher: str
    folder: Path
    threads: int  # of TRL
    dtype: str  # in which models compute

    def curve(self, way: str, rate: float, seed: int, updates: Sequence[int]) -> tuple[Path, Curve]:
        """Returns the folder of a run's `step-N/adapter` and its costs by then; trains it unless it is there. It is
        measured after these `updates`, of which the last ends it.
        """
        path = self.folder / f"{way}-{rate:g}-{seed}"
        curve_file = path / "curve.json"
        if not curve_file.exists():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            train = self.train_by_trl if way == "trl" else self.train_by_tba
            curve = train(path, way, rate, seed, updates)
            curve_file.write_text(json.dumps(curve) + "\n")
        return path / ("" if way == "trl" else "run/checkpoints"), json.loads(curve_file.read_text())

    def train_by_trl(self, path: Path, way: str, rate: float, seed: int, updates: Sequence[int]) -> Curve:
        """Trains by TRL; returns its curve."""
        python = environment()
        assert isinstance(recipe.model, HuggingFace)
        settings = {
            "model": self.model,
            "teacher": self.teacher,
            "prompts": [problem.prompt for problem in recipe.task.problems("train")],
            "updates": updates[-1],
            "every": math.gcd(*updates),
            "rate": rate,
            "seed": seed,
            "dtype": self.dtype,
            "warm_up": 5,
            "clip": recipe.optimizer.clip_norm,
            "batch": PROMPTS * ANSWERS,
            "max_completion": TOKENS,
            "rank": recipe.model.lora.rank,
            "threads": self.threads,
            "folder": str(path),
            "out": str(path / "out.json"),
        }
        (path / "settings.json").write_text(json.dumps(settings))
        command = [str(python), str(Path(__file__).parent / "trl_distil_side.py"), str(path / "settings.json")]
        with (path / "log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=_DEADLINE_SECONDS)
        result = json.loads((path / "out.json").read_text())
        print(f"TRL took {result['peak_gb']:.1f} GB", file=sys.stderr)
        curve: list[dict[str, float]] = result["curve"]
        return curve

    def train_by_tba(self, path: Path, way: str, rate: float, seed: int, updates: Sequence[int]) -> Curve:
        """Trains by `tba train`; returns the costs that it has at each measured update."""
        command = [sys.executable, "-m", "tba", "train", f"{Path(__file__).resolve()}::{way}"]
        command += ["--model.path", self.model, "--teacher.paths", self.teacher]
        command += ["--runs", str(path), "--run-name", "run"]
        command += ["--steps", str(updates[-1]), "--run.checkpoint-every", str(math.gcd(*updates))]
        command += ["--optimizer.lr", str(rate), "--seed", str(seed), "--model.dtype", self.dtype]
        paths = os.pathsep.join(str(ROOT / part) for part in ("src", "lab/src"))
        with (path / "log").open("w") as log:
            run = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=log, stderr=log)
            try:
                curve = list(self.watch_costs(run, path / "run", updates))
                run.wait(_DEADLINE_SECONDS)
            finally:
                if run.poll() is None:
                    run.terminate()
                    run.wait(60)
        if run.returncode or len(curve) < len(updates):
            raise SystemExit(f"{' '.join(command)}\n{(path / 'log').read_text()[-3000:]}")
        return curve

    def watch_costs(self, run: subprocess.Popen[bytes], path: Path, updates: Sequence[int]) -> Iterator[Costs]:
        """Yields the costs of each update that is measured, as it ends."""
        deadline, pending_updates = time.monotonic() + _DEADLINE_SECONDS, list(updates)
        while not (path / "evaluations.jsonl").exists() and run.poll() is None:  # of the first weights: all is loaded
            time.sleep(_POLL_SECONDS)
        start, cpu_before = time.perf_counter(), cpu_seconds(run.pid)
        while pending_updates and run.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
            for step in (json.loads(line) for line in lines if line.endswith("\n")):
                if step["step"] in pending_updates:
                    pending_updates.remove(step["step"])
                    costs = {"wall": time.perf_counter() - start, "cpu": cpu_seconds(run.pid) - cpu_before}
                    counts = {"answers": int(step["journal_rows"]), "tokens": int(step["generated_tokens"])}
                    yield {"update": step["step"], **costs, **counts}


def cpu_seconds(root: int) -> float:
    """Returns the CPU seconds of a process and of all that came from it, by /proc."""
    parent, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        parent[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))  # its own, and of children that ended

    def is_descendant(pid: int) -> bool:
        while pid != root and pid in parent:
            pid = parent[pid]
        return pid == root

    return sum(cpu_ticks for pid, cpu_ticks in ticks.items() if is_descendant(pid)) / os.sysconf("SC_CLK_TCK")


def pending_runs(
    read_rows: Callable[[], list[Row]], options: argparse.Namespace
) -> Iterator[tuple[str, float, int, list[int]]]:
    """Yields runs with the updates that are to be measured: of each way its rates, then the seeds at the best one."""
    if len(options.rates) > 1:
        yield from ((way, rate, TUNING_SEED, [options.tuning]) for way in options.ways for rate in options.rates)
    for seed in range(options.seeds):
        for way in options.ways:
            yield way, best_rate(read_rows(), way, options.rates), seed, options.updates


def best_rate(rows: Sequence[Row], way: str, rates: Sequence[float]) -> float:
    """Returns the rate whose student was nearest to the teacher, on the seed that rates are chosen on."""
    tuning_rows = [row for row in rows if row.way == way and row.seed == TUNING_SEED]
    return min(tuning_rows, key=lambda row: row.kl).rate if tuning_rows else rates[0]


def cost_to_reach(rows: Sequence[Row], target: float, cost: str) -> float | None:
    """Returns when the KL to the teacher first was at most `target`, in units of `cost`, linear between measurements;
    None: never. The first row is the start.
    """
    for earlier, later in itertools.pairwise(rows):
        if later.kl <= target:
            share = (earlier.kl - target) / (earlier.kl - later.kl)
            return float(getattr(earlier, cost) + share * (getattr(later, cost) - getattr(earlier, cost)))
    return None


def table(all_rows: Sequence[Row], shares: Sequence[float]) -> str:
    """Returns a line for each way, share of the KL that is left, and seed."""
    start = next((row for row in all_rows if row.way == START_WAY), None)
    if start is None:
        return "nothing is measured yet"
    lines = [
        f"at the start: {start.kl:.3f} +- {start.kl_error:.3f} nats an answer to the teacher, {start.kl_back:.3f} back",
        "",
        "| way | rate | seed | KL left | wall s | cpu s | answers | tokens | at the end: KL, back | cpu s an update |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    counted_rows = [row for row in all_rows if row.way != START_WAY and row.seed != TUNING_SEED]
    for way, rate, seed in sorted({(row.way, row.rate, row.seed) for row in counted_rows}):
        rows = sorted((r for r in all_rows if (r.way, r.rate, r.seed) == (way, rate, seed)), key=lambda row: row.update)
        last_row = rows[-1]
        for share in shares:
            names = ("wall", "cpu", "answers", "tokens")
            costs = [cost_to_reach([start, *rows], share * start.kl, name) for name in names]
            cells = " | ".join("never" if cost is None else f"{cost:,.0f}" for cost in costs)
            end = f"{last_row.kl:.3f} +- {last_row.kl_error:.3f}, {last_row.kl_back:.3f}"
            update_cpu = last_row.cpu / last_row.update
            lines.append(f"| {way} | {rate:g} | {seed} | {share:g} | {cells} | {end} | {update_cpu:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the student's folder")
    parser.add_argument("--teacher", required=True, help="the teacher's folder")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to it")
    parser.add_argument("--folder", type=Path, required=True, help="of runs and adapters")
    parser.add_argument("--ways", nargs="+", default=["trl", "top"], choices=["trl", "top", "by-token", "tb"])
    parser.add_argument("--updates", type=int, nargs="+", default=[3, 6, 12, 24], help="measured, the last one trained")
    parser.add_argument("--tuning", type=int, default=12, help="updates by which a rate is chosen, of several")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1.5e-3])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--problems", type=int, default=64, help="held-out prompts")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 0.125], help="of the first KL, to reach")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="measured in float32")
    parser.add_argument("--threads", type=int, default=2, help="of TRL and of the measurements")
    parser.add_argument("--table", action="store_true", help="only print the table of what there is")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    judge = Judge(options.model, options.teacher, options.problems)
    runs = Runs(options.model, options.teacher, options.folder, options.threads, options.dtype)

    def done() -> list[Row]:
        lines = options.out.read_text().splitlines() if options.out.exists() else []
        return [Row(**json.loads(line)) for line in lines]

    def measure(way: str, rate: float, seed: int, costs: dict[str, Any], adapter: Path | None) -> None:
        row = Row(way=way, rate=rate, seed=seed, **costs, **judge.measure(adapter))
        with options.out.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(row, file=sys.stderr, flush=True)

    if not options.table:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        if not done():
            measure(START_WAY, 0.0, 0, dict.fromkeys(("update", "wall", "cpu", "answers", "tokens"), 0), None)
        for way, rate, seed, updates in pending_runs(done, options):
            measured_updates = {row.update for row in done() if (row.way, row.rate, row.seed) == (way, rate, seed)}
            if measured_updates.issuperset(updates):
                continue
            folder, curve = runs.curve(way, rate, seed, updates)
            for costs in curve:
                if costs["update"] in updates and costs["update"] not in measured_updates:
                    measure(way, rate, seed, costs, folder / f"step-{costs['update']}" / "adapter")
    print(table(done(), options.shares))


if __name__ == "__main__":
    main()
