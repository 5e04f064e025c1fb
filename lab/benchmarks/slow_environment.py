"""An environment that takes 300 ms a turn, and fails as people's do: who else is held up, and what else is lost?

One episode in ten hangs, one in a hundred raises, one in a hundred ends its process, each at one of its turns.

    python lab/benchmarks/slow_environment.py [--seconds 60] [--kill 20]

First a searcher's engine alone: the share of the time in which it computes (else it is at an environment, or waits for
one because all episodes are), against the same environment in the searcher's own process. Then a run of the recipe
below, whose account has to close: as many trajectories rejected as episodes failed, none lost. With `--kill N` there
are N kills in the middle of episodes: by turns of the process of an environment, the searcher and the trainer.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from faults import Rows, rows_of
from parts import forked, parts_of

import tba
from tba.clock import ShareClock
from tba.engines.transformers import TransformersFlow
from tba.environments.engine import EpisodeEngine
from tba.environments.hosts import Beginning, Hosts, InProcessHost, Question
from tba.record.summary import Summary
from tba.runtime.engines import engine_of
from tba.runtime.prompt_sets import prompts_of
from tba.training.tiny_models import character_tokenizer
from tba.types import Completion, Sampling, Version

TURN = 0.3  # seconds
HANGS, RAISES, DIES = 0.10, 0.01, 0.01  # shares of the episodes
LIMIT = 3.0  # seconds that a turn may take: what hangs costs so long
LETTERS = "abcdefghijklmnopqrstuvwxyz ?!\n"


class Slow:
    """Says as many letters as it is told; an episode has 2 to 6 turns."""

    hangs, raises, dies = HANGS, RAISES, DIES

    def reset(self, seed: int) -> str:
        self.left = random.Random(seed).randint(2, 6)
        self.said = 0
        self.fate = self.drawn()
        self.at = random.randrange(self.left)
        return "abc?"

    def drawn(self) -> str:
        u = random.random()
        for fate, share in (("hangs", self.hangs), ("raises", self.raises), ("dies", self.dies)):
            if u < share:
                return fate
            u -= share
        return "plays"

    def step(self, text: str) -> str | None:
        self.left -= 1
        self.said += len(text)
        if self.left == self.at:
            if self.fate == "hangs":
                time.sleep(3600)
            elif self.fate == "dies":
                os._exit(1)
            elif self.fate == "raises":
                raise RuntimeError("as one in a hundred does")
        time.sleep(TURN)
        return "go on?" if self.left else None

    def get_reward(self) -> float:
        return 1 / (1 + self.said)


class Sound(Slow):
    """The same without failures."""

    hangs = raises = dies = 0.0


def task_of(environment: type[Slow], processes: int = 128) -> tba.EnvironmentTask:
    limits = tba.EpisodeLimits(processes=processes, seconds=LIMIT, memory_gb=0.5)
    return tba.EnvironmentTask(environment, name="slow", turns=8, worlds=512, held_out=8, limits=limits)


hugging_face = tba.HuggingFace(generation=tba.EngineSettings(slots=64, max_completion_tokens=300), device="cpu")
recipe = tba.Recipe(
    name="slow_environment",
    description="an environment of 300 ms a turn that hangs, raises and dies",
    task=task_of(Slow),
    model=hugging_face,
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.1)),
    evaluation=tba.EvaluationSettings(every=0, problems=0),
    run=tba.RuntimeSettings(checkpoint_every=20),
    steps=60,
    groups_per_step=4,
    group_size=8,
    samples_per_prompt=8,
    prompts_per_round=16,
)


class Quick:
    """Answers at once."""

    def reset(self, seed: int) -> None: ...

    def step(self, text: str) -> str | None:
        return text


def costs(rounds: int = 20, episodes: int = 64) -> str:
    """What a turn of an environment that answers at once takes, and how much memory each process has of its own."""
    task, took = tba.EnvironmentTask(Quick, turns=rounds + 2), []
    for worlds in (InProcessHost(task), hosts := Hosts(task, tba.EpisodeLimits(episodes))):
        for number in range(episodes):
            worlds.ask(number, Question(Beginning({}, number, ""), "a"))
        wait_for(worlds, episodes)
        began = time.perf_counter()
        for _ in range(rounds):
            for number in range(episodes):
                worlds.ask(number, Question(None, "a"))
            wait_for(worlds, episodes)
        took.append(1e6 * (time.perf_counter() - began) / rounds / episodes)
    nursery = next(process for process, name in forked(os.getpid()).items() if name == "tba-nursery")
    texts = [Path(f"/proc/{process}/smaps_rollup").read_text() for process in forked(nursery)]
    private_mb = (
        sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Private")) / 1e3
    )
    hosts.end()
    return f"{took[0]:.0f} us here, {took[1]:.0f} us in {episodes} processes, each of {private_mb / len(texts):.1f} MB"


def wait_for(worlds: InProcessHost | Hosts, answers: int) -> None:
    while answers > 0:
        answers -= len(worlds.replies(wait=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which each engine is timed")
    parser.add_argument("--kill", type=int, default=0, help="how often a process of the run is killed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tokenizer = character_tokenizer(LETTERS)
        tba.ScratchModel(hidden_size=64, layers=3, heads=4, max_positions=512).start(tokenizer).save_pretrained(model)
        tokenizer.save_pretrained(model)
        print(f"a turn of an environment that answers at once: {costs()}", flush=True)
        for name, environment, processes, seconds in (
            ("in its own process, nothing fails", Sound, 0, options.seconds / 2),
            ("in processes, nothing fails", Sound, 128, options.seconds),
            ("in processes, 12 % fail", Slow, 128, options.seconds),
        ):
            print(f"{name}: {timed(environment, processes, model, seconds)}", flush=True)
        return run(model, Path(folder), options.kill)


def timed(environment: type[Slow], processes: int, model: Path, seconds: float) -> str:
    """One engine for so long, always with prompts to answer, after its first episodes, for which processes start."""
    timed_recipe = replace(recipe, task=task_of(environment, processes), model=replace(hugging_face, path=str(model)))
    clock = ShareClock(state="generating")
    engine = engine_of(timed_recipe, timed_recipe.model, Version(), clock=clock)
    assert isinstance(engine, EpisodeEngine)
    prompts = prompts_of(timed_recipe, timed_recipe.model, "train")
    flow = engine.flow(8, Sampling(), np.random.default_rng(0))
    rows = flow.flow
    assert isinstance(rows, TransformersFlow)
    finished: list[Completion] = []
    growing: list[int] = []
    submitted = 0

    def play(until: Callable[[], bool]) -> None:
        nonlocal submitted, finished
        finished = []
        while not until():
            needed = flow.prompts_needed
            flow.submit([prompts[(submitted + i) % len(prompts)] for i in range(needed)])
            submitted += needed
            for _, completions in flow.next(over if until is over else None):
                finished += completions

    def over() -> bool:
        growing.append(rows.extent - len(rows.free_rows))
        return time.perf_counter() - began > seconds

    play(lambda: len(finished) >= (64 if processes else 1))
    began, waited = time.perf_counter(), clock.seconds().get("environment", 0.0)
    play(over)
    took, waited = time.perf_counter() - began, clock.seconds().get("environment", 0.0) - waited
    judged = [c for c in finished if c.judgement is not None]
    failed = sum(np.isnan(c.judgement.reward) for c in judged if c.judgement is not None)
    tokens = sum(len(c.tokens) - c.observed for c in finished)
    lost = dict(engine.hosts.losses) if isinstance(engine.hosts, Hosts) else {}
    if isinstance(engine.hosts, Hosts):
        engine.hosts.end()
    return (
        f"the engine computes {100 * (1 - waited / took):.1f} % of the time, "
        f"{np.mean(growing):.0f} of 64 rows growing, {tokens / took:,.0f} own tokens/s, {len(judged) / took:.1f} "
        f"episodes/s, {failed} of {len(judged)} failed ({lost})"
    )


def run(model: Path, folder: Path, kill: int) -> int:
    """A run of the recipe, in which a process is killed so often: an environment's, the searcher's, the trainer's."""
    journal = folder / "run" / "journal.sqlite"
    words = ["train", __file__, "--model.path", str(model), "--runs", str(folder), "--run-name", "run"]
    words += ["--run.restarts", str(kill + 3)]
    driver = subprocess.Popen([sys.executable, "-m", "tba", *words], stdout=subprocess.DEVNULL)
    rng, before = random.Random(0), Rows()
    for number in range(kill):
        if not (worlds := in_the_middle(driver, journal, len(before))):
            break
        before |= rows_of(journal)
        victim = ("an environment's", "searcher-0", "trainer")[number % 3]
        if (process := parts_of(driver.pid).get(victim)) is None:  # or it is about to be started again
            victim, process = "an environment's", rng.choice(worlds)
        os.kill(process, signal.SIGKILL)
        print(f"{number + 1}: {victim} process killed, {len(before):,} acknowledged", flush=True)
    code = driver.wait()
    after, summary = rows_of(journal), Summary.read(folder / "run")
    lost = sum(after.get(number) != row for number, row in before.items())
    assert summary is not None
    t, n = summary.tokens, summary.trajectories
    closes = t.closes() and n.closes()
    print(
        f"exit code {code}, {summary.steps} steps; {n.generated:,} episodes, {n.rejected} rejected, {n.failed} of them "
        f"failed, {lost} lost; the account closes: {closes}, {t.observed:,} of {t.generated:,} tokens observed; "
        f"trainer idle {100 * summary.trainer_idle:.1f} %, paced {100 * summary.trainer_paced:.1f} %"
    )
    return int(code != 0 or lost > 0 or not closes or n.failed != n.rejected)


def in_the_middle(driver: subprocess.Popen[bytes], journal: Path, acknowledged: int) -> list[int]:
    """Waits until more are acknowledged and many episodes are going on; returns their processes, none at the end."""
    while driver.poll() is None:
        searcher = parts_of(driver.pid).get("searcher-0", 0)
        nurseries = [process for process, name in forked(searcher).items() if name == "tba-nursery"]
        worlds = [process for nursery in nurseries for process in forked(nursery)]
        if len(worlds) > 20 and len(rows_of(journal)) > acknowledged:
            return worlds
        time.sleep(0.2)
    return []


if __name__ == "__main__":
    sys.exit(main())
