"""The searcher's loop: newest weights -> requested evaluations -> a round of prompts, answers, rewards -> journal.

It consumes prompts (leased in the journal) and the newest weights. It waits for no update: it takes what is there and
goes on. It pauses only where the recipe bounds how far it may be ahead of the trainer; weights whose manifest wants
more unblock that, or a minute. It is the same in every runtime, with other `Connections`: to this disk, or to a trainer
on another machine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, cast

import numpy as np
import torch

from tba.clock import ShareClock
from tba.protocols import Engine, Examined, Journal, Manifest, Model, PromptSource, Records, ReportsFaults, WeightSource
from tba.recipe import Recipe
from tba.record.jsonl import as_json
from tba.record.memory import FreedMemory, keep_few_kernels, peak_memory_bytes
from tba.record.run_warnings import SLOW_ENGINE
from tba.rollout.exploration import Fixed
from tba.rollout.overlong import Overlong
from tba.rollout.prompts import PosteriorPrompts, UniformPrompts
from tba.rollout.rescoring import Rescorer
from tba.rollout.searcher import OpenAnswer, Searcher
from tba.runtime.background_journal import BackgroundJournal
from tba.runtime.engines import engine_of, vine_of
from tba.runtime.evaluation import EVALUATION_DEADLINE, Examiner
from tba.runtime.graders import grader_of
from tba.runtime.prompt_order import LEASE_SECONDS, prompt_source
from tba.runtime.prompt_sets import PromptSet, prompt_set_of
from tba.runtime.results import SearcherResult
from tba.runtime.run_directory import RunDirectory
from tba.runtime.searcher_connections import Connections, connect_on_disk
from tba.runtime.teaching import reference_of, teachers_of
from tba.types import SPLITS, Json, Split, Version

log = logging.getLogger("tba.searcher")
HAND_DOWN = 0.25  # seconds of a round after which the answers that are there are sent to the trainer
NICENESS = 5  # how far searchers give way to the trainer where they share cores (nice(1)): docs/scaling.md has its gain
DRAWING_SOURCES = (UniformPrompts, PosteriorPrompts)  # sources of prompts that draw them
POLL_SECONDS = 0.1  # between two polls for weights to evaluate, where that is all there is to do
_PAUSE_SECONDS = 0.05  # between two checks whether more is wanted
LONGEST_HELD_BACK = 60.0  # seconds, then a searcher makes a round all the same: it never waits for ever


def run_searcher(recipe: Recipe, start: Callable[[], SearcherLoop], stop: Callable[[], bool]) -> None:
    """Run a searcher's whole life, in a process or an actor: rounds until asked to stop, or only evaluations."""
    torch.set_num_threads(recipe.run.threads)
    loop = start()
    try:
        while not stop() and not loop.evaluate(None if recipe.only_evaluates else loop.round_between):
            if recipe.only_evaluates:
                time.sleep(POLL_SECONDS)
            else:
                loop.round()
        loop.searcher.drain(stop=True)
    except BaseException:
        loop.searcher.save()
        raise
    finally:
        loop.close()


class AnswersFromElsewhere(Protocol):
    """Answers to a searcher's prompts that others than the run's weights give."""

    @property
    def on_done(self) -> Callable[[OpenAnswer], None] | None:
        """Returns who is told of each answer that is on the disk, or rejected; None: nobody."""
        ...

    def attach(self, model: Model, longest_prompt: int, source: PromptSource) -> tuple[Engine, PromptSource]:
        """Returns an engine that gives these answers, and the prompts that it answers."""
        ...


@dataclass
class SearcherLoop:
    """A searcher with its duty to evaluate, its clock and its connections to the run."""

    searcher: Searcher
    examiner: Examiner
    journal: Journal
    weights: WeightSource
    clock: ShareClock
    records: Records
    incarnation: int = 0  # in which it was started
    served: Mapping[str, int] = field(default_factory=dict)  # to agents, by what it counts
    memory: FreedMemory = field(default_factory=FreedMemory)
    has_reported_engine: bool = False
    held_back_since: float | None = None  # since when it has been held back, by a monotonic clock; None: it is not
    # by split, how many problems there are and which of them are not asked (`runtime/prompt_sets.py`)
    prompts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def evaluate(self, between: Callable[[], None] | None = None) -> bool:
        """Run the evaluations that the newest weights' manifest requests; returns whether the trainer has asked to
        stop, when nobody waits for running answers. `between`: what to do between two chunks of an evaluation.
        """
        manifest = self.newest_manifest()
        before = partial(self.searcher.drain, stop=True) if manifest.stop else self.searcher.free_engine
        self.examiner.evaluate_requests(manifest.evaluate, before, between)
        return manifest.stop and self.newest_manifest() == manifest  # else a trainer sent it that has died since

    def newest_manifest(self) -> Manifest:
        """Returns the manifest of the newest weights; empty where they were sent by a trainer that is gone."""
        newest = self.weights.newer_than(None)
        return Manifest() if newest is None or newest.version.incarnation < self.incarnation else newest.manifest

    def is_ahead(self) -> bool:
        """Returns whether the trainer has all trajectories that it wants by now, counting those still being graded."""
        for has_pulled in (False, True):  # the bound only rises: most often the one that is known already is enough
            wanted_rows = self.searcher.manifest.wanted
            if wanted_rows is None or self.journal.rows() + self.searcher.unsent_count < wanted_rows:
                return False
            if not has_pulled:
                self.searcher.pull()
        return True

    def round(self) -> None:
        """Make a round; while the searcher is ahead of what the trainer wants, only rescore old answers and pause."""
        held_back_seconds = 0.0 if self.held_back_since is None else time.monotonic() - self.held_back_since
        if not self.is_ahead() or held_back_seconds > LONGEST_HELD_BACK:
            self.held_back_since = None
            self.searcher.round()
            self._report_engine()
            self.memory.give_back()
            return
        if self.held_back_since is None:
            self.held_back_since = time.monotonic()
        self.searcher.run_stages()
        self.searcher.rescore()
        with self.clock.state("paced"):
            time.sleep(_PAUSE_SECONDS)

    def _report_engine(self) -> None:
        """Record a fault with which the engine goes on, once."""
        engine = self.searcher.engine
        if isinstance(engine, ReportsFaults) and engine.fault and not self.has_reported_engine:
            self.has_reported_engine = True
            self.records.fault(SLOW_ENGINE, f"{self.searcher.name}: {engine.fault}")

    def turn(self, trainer_clock: ShareClock) -> None:
        """Make a round where trainer and searcher take turns. The trainer's clock counts it as idle, the time that
        asynchrony saves.
        """
        with trainer_clock.state("idle"), self.clock.state("generating"):
            self.searcher.round()

    def round_between(self) -> None:
        """Make a round between two chunks of an evaluation, unless the trainer is done or wants no more yet."""
        if not self.newest_manifest().stop and not self.is_ahead():
            self.searcher.round()
            self.searcher.free_engine()

    def state(self) -> Json:
        """Returns what `restore` takes: the generators and the count of rounds."""
        prompts = self.searcher.prompts
        return {
            "rng": self.searcher.rng.bit_generator.state,
            "prompts_rng": prompts.rng.bit_generator.state if isinstance(prompts, DRAWING_SOURCES) else None,
            "rounds": self.searcher.rounds,
        }

    def restore(self, state: Json) -> None:
        """Continue with the generators and the count of rounds that `state` gave."""
        self.searcher.rng.bit_generator.state = state["rng"]
        if isinstance(self.searcher.prompts, DRAWING_SOURCES):
            self.searcher.prompts.rng.bit_generator.state = state["prompts_rng"]
        self.searcher.rounds = state["rounds"]

    def close(self) -> None:
        """Close the journal and the grader, and leave the searcher's result for the summary."""
        try:
            rows = self.journal.rows()
        finally:
            self.searcher.grader.close()
            self.journal.close()
        seconds, rounds = self.clock.seconds(), self.searcher.rounds
        result = SearcherResult(seconds, peak_memory_bytes(), rows, rounds, self.prompts, self.served)
        self.records.result(self.searcher.name, as_json(result))


def start_searching(
    recipe: Recipe,
    run: RunDirectory,
    index: int,
    attempt: int = 0,
    interrupted: Callable[[], bool] | None = None,
    background: bool = False,
    answers: AnswersFromElsewhere | None = None,
) -> SearcherLoop:
    """Build the loop of searcher number `index` of the run at `run`; `attempt` counts its restarts, so that no two
    share a seed.

    background: its rounds flow into one another, and what it sends is written in the background. Otherwise each round
    is finished before the next begins, and nothing depends on how long anything takes.
    """
    connect = partial(connect_on_disk, recipe, run, f"searcher-{index}", interrupted)
    return searcher_loop_at(recipe, connect, index, attempt, interrupted, background, run, answers)


def searcher_loop_at(
    recipe: Recipe,
    connect: Callable[[], Connections],
    index: int,
    attempt: int,
    interrupted: Callable[[], bool] | None,
    background: bool = False,
    run: RunDirectory | None = None,
    answers: AnswersFromElsewhere | None = None,
) -> SearcherLoop:
    """Build a searcher's loop over any connections, which are opened once the model and the prompts are loaded. run:
    rebuilds the recipe in another process, should the reward have to run there. answers: those of others, such as
    agents; None: the run's weights answer.
    """
    keep_few_kernels()
    model = recipe.model.prepared(recipe.task)
    prompts = {split: prompt_set_of(recipe, model, split) for split in SPLITS}
    for note in filter(None, (prompt_set.note for prompt_set in prompts.values())):
        log.warning("%s", note)
    connections, clock = connect(), ShareClock(state="weights")
    if background and (answers is None or answers.on_done is None):  # who is told waits until it is on the disk
        background_journal = BackgroundJournal(connections.journal, 2 * recipe.run.journal_deadline, clock)
        connections = replace(connections, journal=cast(Journal, background_journal))  # it forwards the methods
    try:
        loop = _loop_of(
            connections, clock, recipe, model, prompts, index, attempt, interrupted, background, run, answers
        )
    except BaseException:
        connections.journal.close()
        raise
    clock.reclassify("idle" if recipe.runtime == "inline" else "generating")  # `turn` generates inline
    return loop


def _loop_of(
    connections: Connections,
    clock: ShareClock,
    recipe: Recipe,
    model: Model,
    prompts: Mapping[Split, PromptSet],
    index: int,
    attempt: int,
    interrupted: Callable[[], bool] | None,
    background: bool,
    run: RunDirectory | None,
    answers: AnswersFromElsewhere | None,
) -> SearcherLoop:
    name = f"searcher-{index}"
    journal, weights = connections.journal, connections.weights
    report = partial(connections.records.fault, "reward_retries")
    make_grader = partial(grader_of, recipe, run, share=(index, recipe.searcher_count), report=report)
    seeds = [recipe.seed, 1 + index, attempt, *([connections.incarnation] if connections.incarnation else [])]
    source = prompt_source(recipe, prompts["train"].prompts, journal, np.random.default_rng([*seeds, 0x9E]))
    if answers is None:
        engine, exploration, on_done = engine_of(recipe, model, Version(), clock), recipe.exploration, None
    else:
        engine, source = answers.attach(model, recipe.prompts.max_tokens, source)
        exploration, on_done = Fixed(recipe.policy_temperature), answers.on_done
    reference = reference_of(recipe, model)
    teachers = teachers_of(recipe, model, reference)
    grader = make_grader("train", teachers=teachers)
    grader.on_wait = interrupted or grader.on_wait
    rescorer = Rescorer(reference, journal, recipe.rescored_per_round, LEASE_SECONDS)
    is_in_rounds = recipe.run.synchronous_rounds or not background or recipe.vine is not None
    searcher = Searcher(
        name=name,
        engine=engine,
        reference=reference,
        grader=grader,
        exploration=exploration,
        prompts=source,
        journal=journal,
        weights=weights,
        samples_per_prompt=recipe.samples_per_prompt,
        prompts_per_round=recipe.prompts_per_round,
        rng=np.random.default_rng(seeds),
        interrupted=interrupted,
        teachers=teachers,
        flows=not is_in_rounds,
        vine=vine_of(recipe, model, engine, grader),
        rescorer=rescorer if recipe.reference_reset else None,
        largest_reward=recipe.largest_reward,
        overlong=Overlong(recipe.overlong_penalty, model.max_completion_tokens),
        hide_text=recipe.record.hide_text or answers is not None,
        hand_down_seconds=HAND_DOWN if background and recipe.vine is None else math.inf,
        grading_lag=recipe.run.grading_lag,
        warm_up=recipe.warm_up,
        searchers=recipe.searcher_count,
        clock=clock,
        on_done=on_done,
    )
    examiner = Examiner(
        engine=engine,
        prompts=prompts["eval"].prompts,
        reward=make_grader("eval") if isinstance(recipe.task, Examined) else grader,
        settings=recipe.evaluation,
        policy_temperature=recipe.policy_temperature,
        journal=journal,
        weights=weights,
        records=connections.records,
        seed=recipe.seed,
        claim_seconds=EVALUATION_DEADLINE,
        clock=clock,
        interrupted=interrupted,
    )
    return SearcherLoop(
        searcher,
        examiner,
        journal,
        weights,
        clock,
        connections.records,
        connections.incarnation,
        prompts={split: prompt_set.counts for split, prompt_set in prompts.items()},
    )
