"""What a stall of the only searcher costs: it is stopped (SIGSTOP) for as long as the trainer takes for 200 steps.

    python lab/benchmarks/stall.py [--seeds 3] [--first 0] [--steps 400] [--at 100] [--lasting 200] [--out FILE]
                               [--field value ...]
    python lab/benchmarks/stall.py --of FILE FILE ...
    python lab/benchmarks/stall.py --mechanism [--seeds 2]

For each seed there is an undisturbed quickstart of 400 steps, and its twin, whose searcher is stopped when the trainer
has made 100 steps and continues when it has made 200 more; if the trainer is paced before that, the searcher continues
after the time that the undisturbed run took for those 200. Times are given in steps, so that a busy machine has little
effect. For each run: held-out accuracy at equal steps (versions due during the stall are kept and evaluated after it),
mean and largest number of uses of a trajectory, mean and largest number of updates between sampling and training, and
the trainer's idle and paced shares. `--replay.pacing.max-mean-uses inf` removes the bound. `--of` prints the table of
seeds that were run separately, from their `--out` files.

With --mechanism the training data are chosen batch by batch, searcher and trainer alternate in one process, and nothing
depends on time: 100 steps of plain on-policy training, then 200 (196) more in blocks. At the beginning of a block the
searcher loads the current weights and samples all data of the block with them; each trajectory is used a given number
of times. Long blocks make data old, and uses repeat them, so that each is varied without the other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import parts_of

from tba.batch import FetchedBatch, collate
from tba.command.replay import uses_of
from tba.evaluation.accuracy import EvaluationSettings, assess_accuracy
from tba.evaluation.estimators import SAMPLED
from tba.grading import Grader
from tba.protocols import PublishedWeights
from tba.recipe import Recipe
from tba.record.metrics import column, read_last, read_metrics
from tba.record.summary import Summary
from tba.rollout.prompts import PromptStream
from tba.rollout.searcher import Searcher
from tba.runtime.prompt_sets import prompts_of
from tba.runtime.run_directory import RunDirectory
from tba.settings import find, override
from tba.training.checkpoint import Checkpoint, save_checkpoint
from tba.training.trainer import Trainer
from tba.types import Group, Trajectory, Version

SHORT = (
    *(
        "--evaluation.every",
        "50",
        "--evaluation.pass-k",
        "0",
        "--evaluation.no-greedy",
        "--record.samples-per-batch",
        "0",
    ),
    *("--record.no-tensorboard", "--run.checkpoint-every", "0"),
)
DEADLINE = 1800.0  # seconds for any run
HELD = 2.0  # seconds without a step after which the trainer counts as held
FRESH = 2  # updates of a block that is as good as on-policy
BLOCKS = ((FRESH, 1), (14, 1), (14, 14), (50, 1), (200, 1), (200, 4), (200, 14))  # (updates, uses)
BEFORE, AFTER = 100, 200  # steps of plain training, and in blocks
PROBLEMS = 2000


@dataclass(frozen=True)
class Outcome:
    """One run."""

    seed: int
    stalled: bool
    stalled_steps: int  # made by the trainer meanwhile
    accuracy: dict[int, float]  # sampled, by step
    mean_uses: float
    most_uses: int
    mean_lag: float
    most_lag: float
    idle: float
    paced: float
    faults: dict[str, int]


def run(seed: int, arguments: argparse.Namespace, fields: list[str], path: Path, seconds: float | None) -> Outcome:
    """One quickstart; with `seconds` its searcher is stopped, for that long where the trainer is held."""
    command = [sys.executable, "-m", "tba", "train", "quickstart", "--runs", str(path.parent), "--run-name", path.name]
    command += ["--seed", str(seed), "--steps", str(arguments.steps), *SHORT, *fields]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stalled_steps = 0
    if seconds is not None:
        stalled_steps = stall(driver, path, arguments.at, arguments.lasting, seconds)
    if driver.wait(DEADLINE):
        raise SystemExit(f"{' '.join(command)} ended with {driver.returncode}")
    summary = Summary.read(path)
    assert summary is not None
    return Outcome(
        seed=seed,
        stalled=seconds is not None,
        stalled_steps=stalled_steps,
        accuracy={e.version.step: e.value for e in summary.evaluations if e.metric == SAMPLED},
        mean_uses=summary.trajectories.samples_per_insert,
        most_uses=int(uses_of(RunDirectory.open(path)).max()),
        mean_lag=summary.lag.mean,
        most_lag=summary.lag.max,
        idle=summary.trainer_idle,
        paced=summary.trainer_paced,
        faults={name: n for name, n in summary.faults.items() if n},
    )


def stall(driver: subprocess.Popen[bytes], path: Path, at: int, lasting: int, seconds: float) -> int:
    """Stop the searcher at a step and let it go on; how many steps the trainer made meanwhile."""
    while steps_of(path) < at and driver.poll() is None:
        time.sleep(0.01)
    searcher = parts_of(driver.pid)["searcher-0"]
    os.kill(searcher, signal.SIGSTOP)
    try:
        began = moved = time.monotonic()
        first_step = step_count = steps_of(path)
        while step_count < first_step + lasting and driver.poll() is None:
            time.sleep(0.01)
            now, newest = time.monotonic(), steps_of(path)
            if newest > step_count:
                step_count, moved = newest, now
            if now - began > seconds and now - moved > HELD:
                break
    finally:
        os.kill(searcher, signal.SIGCONT)
    return step_count - first_step


def steps_of(path: Path) -> int:
    """Steps that a run has recorded."""
    return int((read_last(path) or {"step": 0})["step"])


def seconds_of(path: Path, first_step: int, last: int) -> float:
    """What a run took from one step to another."""
    step, wall = column(read_metrics(path), "wall_seconds", over="step")
    return float(np.interp(last, step, wall) - np.interp(first_step, step, wall))


def disturbed_and_not(arguments: argparse.Namespace, fields: list[str]) -> None:
    """Both runs of each seed, and what the stall cost."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            for stalled in (False, True):
                path, twin = Path(folder) / f"{seed}-{stalled}", Path(folder) / f"{seed}-False"
                last = arguments.at + arguments.lasting
                seconds = seconds_of(twin, arguments.at, last) if stalled else None
                outcomes.append(run(seed, arguments, fields, path, seconds))
                say(outcomes[-1])
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    report(outcomes)


def say(o: Outcome) -> None:
    """A line for a run."""
    accuracy = ", ".join(f"{step}: {100 * value:.1f}" for step, value in sorted(o.accuracy.items()))
    how = f"stalled ({o.stalled_steps} steps made)" if o.stalled else "undisturbed"
    print(
        f"seed {o.seed} {how}: accuracy {accuracy}; "
        f"uses {o.mean_uses:.2f}, most {o.most_uses}; lag {o.mean_lag:.1f}, most {o.most_lag:.0f}; "
        f"idle {o.idle:.1%}, paced {o.paced:.1%}; {o.faults}",
        flush=True,
    )


def report(outcomes: Sequence[Outcome]) -> None:
    """A row for each kind of run: means over seeds (lowest to highest), and the difference of twins at the end."""
    columns = ("searcher", "steps in the stall", "accuracy at the end", "lowest from the stall on", "most uses of one")
    print(f"| {' | '.join((*columns, 'mean lag', 'idle and paced'))} |\n{'|---' * 7}|")
    for stalled in (False, True):
        side_outcomes = [o for o in outcomes if o.stalled == stalled]
        lowest = [min(v for step, v in o.accuracy.items() if int(step) > 100) for o in side_outcomes]
        row = [
            "stopped" if stalled else "undisturbed",
            spread([o.stalled_steps for o in side_outcomes], 0) if stalled else "",
            spread([100 * last(o) for o in side_outcomes]),
            spread([100 * v for v in lowest]),
            str(max(o.most_uses for o in side_outcomes)),
            spread([o.mean_lag for o in side_outcomes]),
            f"{spread([100 * (o.idle + o.paced) for o in side_outcomes])} %",
        ]
        print(f"| {' | '.join(row)} |")
    twins = {o.seed: last(o) for o in outcomes if not o.stalled}
    lost = [100 * (last(o) - twins[o.seed]) for o in outcomes if o.stalled]
    print(f"the stall changed accuracy at the end by {spread(lost)} points")


def last(o: Outcome) -> float:
    """Accuracy at its last step (which JSON has as text)."""
    return o.accuracy[max(o.accuracy, key=int)]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean (lowest to highest)."""
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


@dataclass
class Synchronous:
    """Searcher and trainer of a recipe in one process, from a checkpoint if there is one: called in turn.

    It is the searcher's prompts, weights and journal, and where the trainer's batches come from.
    """

    recipe: Recipe
    checkpoint: Checkpoint | None = None
    newest: Sequence[Group] = ()  # of the last round
    batch: Sequence[Group] = ()  # the next
    leased: int = field(init=False)

    def __post_init__(self) -> None:
        recipe, saved = self.recipe, None if self.checkpoint is None else self.checkpoint.path
        self.model = recipe.model.prepared(recipe.task)
        version = Version() if self.checkpoint is None else self.checkpoint.version
        self.leased = version.step * recipe.prompts_per_round
        self.policy = self.model.policy(recipe.policy_temperature, saved=saved)
        self.optimizer = recipe.optimizer.start(self.policy.parameters(), [])
        if saved is not None:
            self.optimizer.load(saved)
        self.held_out = prompts_of(recipe, self.model, "eval")
        journal: Any = self  # of a searcher whose rounds do not flow it needs no more than `put`
        self.searcher = Searcher(
            name="searcher-0",
            engine=self.model.engine(Version()),
            reference=self.model.reference(recipe.policy_temperature, Version()),
            grader=Grader(recipe.task.reward()),
            exploration=recipe.exploration,
            prompts=PromptStream(prompts_of(recipe, self.model, "train"), recipe.seed, self.lease),
            journal=journal,
            weights=self,
            samples_per_prompt=recipe.samples_per_prompt,
            prompts_per_round=recipe.prompts_per_round,
            rng=np.random.default_rng([recipe.seed, version.step]),
        )
        self.trainer = Trainer(
            policy=self.policy,
            objective=recipe.objective,
            weights=self,
            optimizer=self.optimizer,
            sync_every=recipe.sync_every,
            max_tokens_per_pass=recipe.max_tokens_per_pass,
            directory=Path(tempfile.gettempdir()),
            version=version,
        )

    def block(self, updates: int, uses: int) -> None:
        """So many updates by what the weights of now sample: each trajectory comes as many times, in turn."""
        self.searcher.engine.load(self.policy.weights(), self.trainer.version)
        rounds = []
        for _ in range(updates // uses):
            self.searcher.round()
            rounds.append(self.newest)
        for i in range(updates):
            self.batch = rounds[i % len(rounds)]
            self.trainer.step(self.next())
            if self.trainer.should_publish:
                self.trainer.publish()

    def accuracy(self) -> float:
        """Sampled, on held-out problems."""
        engine, reward = self.searcher.engine, self.recipe.task.reward()
        engine.load(self.policy.weights(), self.trainer.version)
        settings = EvaluationSettings(problems=PROBLEMS, greedy=False, batch_size=500)
        rng = np.random.default_rng(self.recipe.seed)
        assessment = assess_accuracy(engine, self.held_out, reward, settings, rng, now=time.monotonic)
        return float(assessment.scores[SAMPLED].mean())

    def save(self, folder: Path) -> Checkpoint:
        """A checkpoint of now."""
        return save_checkpoint(folder, self.trainer.version, partial(self.model.save, self.policy), self.optimizer)

    def lease(self, count: int) -> list[int]:
        """The next positions."""
        self.leased += count
        return list(range(self.leased - count, self.leased))

    def newer_than(self, version: Version | None) -> None:
        """The searcher's weights change between blocks only."""

    def at(self, version: Version) -> PublishedWeights:
        """Not needed: the reference is never reset."""
        raise AssertionError("no version is kept")

    def publish(self, weights: object, version: Version, notes: object) -> None:
        """The same."""

    def put(self, trajectories: Sequence[Trajectory], *rest: object) -> None:
        """One round: a group of each prompt."""
        by_prompt: dict[str, list[Trajectory]] = {}
        for t in trajectories:
            by_prompt.setdefault(t.prompt.key, []).append(t)
        self.newest = [Group.of(prompt_rows) for prompt_rows in by_prompt.values()]

    def next(self) -> FetchedBatch:
        """The batch that was chosen."""
        return FetchedBatch(self.batch, collate(self.batch))


def mechanism(seeds: Sequence[int]) -> None:
    """Accuracy after blocks of each kind."""
    torch.set_num_threads(1)
    accuracies: dict[tuple[int, int], list[float]] = {kind: [] for kind in BLOCKS}
    for seed in seeds:
        recipe = override(find("quickstart"), ["--seed", str(seed)], "")
        with tempfile.TemporaryDirectory() as folder:
            plain = Synchronous(recipe)
            for _ in range(BEFORE // FRESH):
                plain.block(FRESH, 1)
            checkpoint = plain.save(Path(folder))
            print(f"seed {seed}, {BEFORE} steps of plain training: {plain.accuracy():.1%}", flush=True)
            for updates, uses in BLOCKS:
                run = Synchronous(recipe, checkpoint)
                for _ in range(AFTER // updates):
                    run.block(updates, uses)
                accuracies[updates, uses].append(100 * run.accuracy())
                print(
                    f"seed {seed}, blocks of {updates}, uses {uses}: {accuracies[updates, uses][-1]:.1f} %", flush=True
                )
    print(f"| updates of a block | uses of each trajectory | after {AFTER} steps |\n|---|---|---|")
    for (updates, uses), values in accuracies.items():
        print(f"| {updates} | {uses} | {spread(values)} % |")


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanism", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--at", type=int, default=100, help="the step at which the searcher is stopped")
    parser.add_argument("--lasting", type=int, default=200, help="steps after which it continues")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path, nargs="+", help="files written by --out")
    arguments, fields = parser.parse_known_args()
    if arguments.mechanism:
        mechanism(range(arguments.first, arguments.first + arguments.seeds))
    elif arguments.of:
        report([Outcome(**row) for file in arguments.of for row in json.loads(file.read_text())])
    else:
        disturbed_and_not(arguments, fields)


if __name__ == "__main__":
    main()
