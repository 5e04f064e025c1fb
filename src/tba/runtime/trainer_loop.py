"""The trainer's loop: batch -> update -> weights out -> reference reset -> record -> checkpoint, until the last step.

It consumes batches of trajectories (`batch_queue`), which come through the journal. It waits for its next batch, which
a searcher's round unblocks, and before it changes the weights until those published last are written. It publishes the
weights every k steps, in a folder that searchers poll, and waits for nobody to load them. It is the same in every
runtime: `inline` alternates `step` with a searcher's round.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from tba.batch import Batch, Fetched, distinct_rows
from tba.clock import SEARCHERS_TIME, ShareClock
from tba.errors import UserError
from tba.protocols import Arithmetic, HasRecentShare, Policy, Remembering, started
from tba.recipe import Recipe
from tba.record.falls import STALE, CollapseWatch, SignalWatch, StalenessWatch
from tba.record.faults import record_fault
from tba.record.jsonl import write_json
from tba.record.memory import FreedMemory, keep_few_kernels, peak_memory_bytes
from tba.record.metrics import EVALUATING, GENERATED_TOKENS, JOURNAL_ROWS, PART, REPEATED
from tba.record.recorder import Recorder
from tba.replay.follower import JournalFollower
from tba.replay.missing_rows import Held
from tba.replay.replay import Replay
from tba.replay.selection import SMALLEST_GROUP
from tba.runtime.batch_queue import BatchQueue, Stopped, nothing_more, pause
from tba.runtime.checkpointing import TurnTaker, beginning, generators, set_generators
from tba.runtime.evaluation import Requests
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.runtime.reference import References
from tba.runtime.run_directory import RunDirectory
from tba.runtime.watching import Arrivals, Watch, arrivals_watched
from tba.training.checkpoint import Checkpoint, save_checkpoint
from tba.training.control import Controller
from tba.training.ranks.messages import Meeting, Ranks
from tba.training.ranks.policy import Rank0Policy
from tba.training.trainer import Metrics, Trainer
from tba.types import Json, Sampling, Trajectory, Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import WeightDirectory

log = logging.getLogger("tba.trainer")
_COUNTERS = 1.0  # seconds between two reads of the searchers' counts
_OTHERS = 30.0  # seconds that another trainer of this run has to end


def train(recipe: Recipe, run: RunDirectory, stop: Callable[[], bool], meeting: Meeting | None = None) -> None:
    """Run a trainer's whole life, in a process or an actor of its own. `meeting`: where its ranks find each other."""
    torch.set_num_threads(recipe.run.threads)
    loop = start_training(recipe, run, stop, ahead=True, background=True, meeting=meeting)
    try:
        while not loop.finished and not stop():
            loop.step()
        loop.finish()
    finally:
        loop.close()


@dataclass
class TrainerLoop:
    """A trainer with what it consumes, what it publishes and what is recorded of it."""

    recipe: Recipe
    run: RunDirectory
    trainer: Trainer
    replay: Replay
    batches: BatchQueue
    journal: JournalFollower
    weights: WeightDirectory | BackgroundPublisher
    references: References
    requests: Requests
    controller: Controller
    recorder: Recorder
    watch: Watch
    clock: ShareClock
    staleness: StalenessWatch
    elapsed: Callable[[], float]  # seconds since the run began, without evaluation
    resumed: Mapping[str, Json] | None = None  # the state of the checkpoint that it resumes from
    turn_taker: TurnTaker | None = None  # the searcher that takes turns with it, saved at the same step
    ranks: Ranks | None = None  # where its policy is spread over several
    trained: int = 0  # batches, by this process
    checkpointed: Version | None = None  # the newest checkpoint's version
    lags: Counter[int] = field(default_factory=Counter)
    arithmetic: Arithmetic | None = None  # what a token costs
    computed: Counter[str] = field(default_factory=Counter)  # in all steps: tokens `read` and `scored`, milliseconds
    signal: SignalWatch = field(default_factory=SignalWatch)
    collapse: CollapseWatch = field(default_factory=CollapseWatch)
    arrivals: Arrivals | None = None
    memory: FreedMemory = field(default_factory=FreedMemory)
    began_training: float | None = None
    ended_training: float = 0.0
    _searched: dict[str, float] = field(default_factory=dict)
    _looked: float = -_COUNTERS

    @property
    def finished(self) -> bool:
        return self.trainer.version.step >= self.recipe.steps

    def step(self) -> None:
        """Make one optimizer step: take a batch, update, publish the weights if they are due, and record it."""
        trainer, began = self.trainer, time.perf_counter()
        try:
            fetched = self.batches.next(trainer.version, trainer.published)
        except Stopped:
            return
        waited, before, working = time.perf_counter() - began, trainer.version, time.thread_time()
        metrics = trainer.step(fetched)
        reset = self.references.due(trainer.version)
        if reset or trainer.due:
            self.publish(reset)
        if reset:
            self._reset_reference()
        cpu, seconds = time.thread_time() - working, time.perf_counter() - began
        metrics |= {"wait_seconds": waited, "seconds": seconds, "cpu_seconds": cpu}
        self.trained += 1
        if isinstance(trainer.policy, Rank0Policy):
            trainer.policy.saving.look()
        self._record(before, fetched, metrics)
        if self._checkpoint_due():
            self.checkpoint()
        self.memory.give_back()

    def publish(self, reset: bool = False) -> None:
        """Publish the weights as they are; with `reset` they are the reference from here on."""
        version = self.trainer.version
        evaluate = self.requests.manifest_entries(version, self.elapsed())
        if self.requests.averaged and version in self.requests.pending:
            self._publish_average()
        notes: dict[str, Json] = {
            "evaluate": evaluate,
            "stop": self.finished,
            "reference": str(version if reset else self.references.now),
            "journal": Held.of(self.journal).state(),
        }
        batch = self.recipe.groups_per_step * self.recipe.group_size
        if (wanted := self.replay.wanted(batch, self.trainer.sync_every)) is not None:
            notes["wanted"] = wanted  # trajectories in all, before searchers are held back
        self.trainer.publish(notes)
        self.requests.pin()

    def _publish_average(self) -> None:
        """Publish the average of the weights, to be evaluated in their place. It is waited for: it stands where they do
        meanwhile.
        """
        self.weights.settle()
        with self.trainer.optimizer.averages():
            self.weights.publish(self.trainer.policy.weights(), self.trainer.version.average, {})
            self.weights.settle()

    def checkpoint(self) -> None:
        """Write model and optimizer in the Hugging Face layout, and all other state at this step (`checkpointing`)."""
        self.weights.settle()  # the reference that it was made under is on disk
        self.references.checkpointed()
        at, keep, state = self.trainer, self.recipe.run.checkpoints, self.state()
        kept = self.watch.worth_keeping(self.requests.pending)
        folder, version, model, heads = self.run.checkpoints, at.version, self.recipe.model, at.policy.heads
        if isinstance(at.policy, Rank0Policy) and (laid_out := at.policy.lay_out(at.optimizer, folder)) is not None:
            save, rows = partial(model.save, cast(Policy, laid_out[0])), laid_out[1]
            state, heads = json.loads(json.dumps(state)), deepcopy(heads)  # as they are now
            at.policy.saving.begin(lambda: save_checkpoint(folder, version, save, rows, state, keep, heads, kept))
        else:
            save_checkpoint(folder, version, self._save_model, at.optimizer, state, keep, heads, kept)
        self.checkpointed = self.trainer.version

    def _save_model(self, path: Path) -> None:
        """Save the model, with the average of its weights where there is one: the optimizer's state has the weights."""
        with self.trainer.optimizer.averages():
            self.recipe.model.save(self.trainer.policy, path)

    def finish(self) -> None:
        """Publish the last version, write a checkpoint of it, and report what a run as short as this has shown."""
        self._look_back()
        if self.trainer.published != self.trainer.version:
            self.publish()
        if self.checkpointed != self.trainer.version:
            self.checkpoint()
        self._checkpoint_written()
        if self.ranks is not None:
            self.ranks.say("end")

    def close(self) -> None:
        """Leave what the summary needs, and end the threads.

        Everything is closed, even if something fails on the way.
        """
        with ExitStack() as ends:
            ranks = [] if self.ranks is None else [self.ranks]
            for part in (*ranks, self.weights, self.journal, self.recorder):
                ends.callback(part.close)
            self.batches.close()
            self.replay.drain()
            self._look_at_evaluations()
            write_json(self.run.result("trainer"), self.result())

    def state(self) -> dict[str, Json]:
        """Returns everything but the weights and the optimizer's moments, as JSON: what `restore` takes."""
        return {
            "replay": self.replay.state(self.trained),
            "reference": str(self.references.now),
            "references": self.references.state(),
            "evaluations": self.requests.state(),
            "steering": self.controller.state() if self.controller.on else None,
            "generators": generators(),
            "journal": {**Held.of(self.journal).state(), "prompts_in_flight": self.journal.leases()},
            "lags": [[lag, count] for lag, count in sorted(self.lags.items())],
            "computed": dict(self.computed),
            "skipped": self.trainer.skipped,
            "objective": o.state() if isinstance(o := self.trainer.objective, Remembering) else None,
            "clock": self.clock.seconds(),
            "began_training": self.began_training,
            "ended_training": self.ended_training,
            "searcher": None if self.turn_taker is None else self.turn_taker.state(),
        }

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Continue from a checkpoint (None: step 0), with the policy and the replay that were restored from it."""
        self.journal.evaluations()  # those so far have been recorded
        if checkpoint is None:
            self.requests.restore({"pending": {}, "seen": None})
            self.references.restore({"resets": [], "of_checkpoints": []})
            return
        state = checkpoint.state
        checkpoint.load_heads(self.trainer.policy.heads)
        self.trainer.optimizer.load(checkpoint.path)
        self.trainer.skipped = state["skipped"]
        if isinstance(self.trainer.objective, Remembering) and state["objective"] is not None:
            self.trainer.objective.restore(state["objective"])
        self.references.restore(state["references"])
        self.requests.restore(state["evaluations"])
        if self.controller.on and state["steering"] is not None:
            self.controller.restore(state["steering"])
            self._apply_control()
        self.lags = Counter(dict(state["lags"]))
        self.computed = Counter(state["computed"])
        self.clock.carry(state["clock"])
        self.began_training, self.ended_training = state["began_training"], state["ended_training"]
        self.checkpointed = self.trainer.version
        set_generators(state["generators"])

    def result(self) -> dict[str, Json]:
        """Returns what the summary needs of a loop that has ended."""
        began, drawn = self.began_training, self.replay.selector.counts
        groups = drawn.get("recent", 0) + drawn.get("reward", 0)
        return {
            "clock": self.clock.seconds(),
            "peak_memory_bytes": peak_memory_bytes(),
            "steps": self.trainer.version.step,
            "version": str(self.trainer.version),
            "skipped": self.trainer.skipped,
            "ledger": self.replay.ledger(),
            "position": self.journal.position,
            "lags": dict(self.lags),
            "computed": dict(self.computed),
            "arithmetic": None if self.arithmetic is None else asdict(self.arithmetic),
            "recent_share": drawn.get("newest", 0) / max(1, groups),
            "reference_resets": self.references.resets,
            "control": [change.to_json() for change in self.controller.changes],
            "warm_up_seconds": self.elapsed() if began is None else began,
            "train_seconds": 0.0 if began is None else self.ended_training - began,
        }

    def _reset_reference(self) -> None:
        """Make the policy as it was just published the reference of the steps to come."""
        self._checkpoint_written()  # until then the one before is what a resume takes, and its reference stays
        self.references.reset(self.trainer.version, self.elapsed())
        if self.recipe.reset_optimizer:
            self.trainer.optimizer.forget()

    def _checkpoint_written(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        if isinstance(self.trainer.policy, Rank0Policy):
            self.trainer.policy.saving.settle()

    def _record(self, before: Version, fetched: Fetched, metrics: Metrics) -> None:
        """Write a line of metrics. before: the version that the batch was drawn for."""
        trajectories: list[Trajectory] = [t for group in fetched.groups for t in group.trajectories]
        self.ended_training = self.elapsed()
        if self.began_training is None:
            self.began_training = self.ended_training - metrics["seconds"] + metrics["wait_seconds"]
        self.lags.update(t.version.lag(before) for t in trajectories if not t.imported)
        self._count(fetched.batch, metrics["seconds"] - metrics["wait_seconds"])
        step = self.trainer.version.step
        replay = self.replay.metrics()
        told = [(STALE, what) for what in self.staleness.see(step, metrics | replay)]
        copies = replay.get(REPEATED, 0.0)
        signal = self.signal.see(step, 1 - metrics["without_signal"], metrics["truncated"], copies)
        self._report([*told, *signal.items(), *self.collapse.see(step, metrics).items()])
        self._look()
        own = {
            "trainer_idle": self.clock.share("idle"),
            "trainer_paced": self.clock.share("paced"),
            **_parts(trajectories),
            **replay,
            **self.references.metrics(),
            **self._steer(metrics),
            **self._searched,
            JOURNAL_ROWS: float(self.journal.position),
        }
        version, log_policy = self.trainer.version, self.trainer.log_policy
        self.recorder.step(version, self.ended_training, metrics | own, trajectories, log_policy)

    def _look_back(self) -> None:
        """Let every watcher look again: a run may be shorter than its window."""
        step = self.trainer.version.step
        stale = [(STALE, what) for what in self.staleness.finish(step)]
        self._report([*stale, *self.signal.finish(step).items(), *self.collapse.finish(step).items()])
        if self.arrivals is not None:
            self.arrivals.finish()

    def _report(self, faults: Sequence[tuple[str, str]]) -> None:
        for kind, what in faults:
            log.warning("%s", what)
            record_fault(self.run.path, kind, what)

    def _count(self, batch: Batch, seconds: float) -> None:
        """Count what the policy has computed: a prompt once for its group, and so each of equal answers."""
        rows_D, _ = distinct_rows(batch)
        answered = int(batch.length_B[rows_D].sum())
        self.computed["read"] += int(batch.prompt_length_G.sum()) + answered
        self.computed["scored"] += int(batch.mask_BT[rows_D].sum())
        self.computed["milliseconds"] += round(1000 * seconds)

    def _steer(self, metrics: Metrics) -> dict[str, float]:
        """Give a step's metrics to the staleness controller and apply what it decides; returns the values that held
        during the step.
        """
        controller = self.controller
        if not controller.on:
            return {}
        held = {"sync_every": float(controller.sync_every), "m": controller.m}
        if (change := controller.observe(self.trainer.version.step, metrics)) is not None:
            self._apply_control()
            log.info(
                "%s was %.3g: k = %d and m = %g from step %d on",
                change.signal, change.value, change.sync_every, change.m, change.step,
            )  # fmt: skip
        return held

    def _apply_control(self) -> None:
        """Takes effect from the next batch that is drawn, and for the sync interval from the next update."""
        self.trainer.sync_every = self.controller.sync_every
        self.replay.steer(self.controller.m, self.controller.sync_every)

    def _checkpoint_due(self) -> bool:
        """Returns whether this is the first weight sync after every so many steps; a run that resumes begins with one
        too.
        """
        version, every = self.trainer.version, self.recipe.run.checkpoint_every
        before = 0 if self.checkpointed is None else self.checkpointed.step
        return every > 0 and version == self.trainer.published and version.step // every > before // every

    def _look(self) -> None:
        """Read the searchers' own counts, now and then."""
        now = time.monotonic()
        if now - self._looked < _COUNTERS:
            return
        self._looked = now
        self._look_at_evaluations()
        owners = [own for own in self.journal.counters().values() if own.get("generated_tokens")]
        spent = {what: sum(own.get(f"{what}_milliseconds", 0) for own in owners) for what in SEARCHERS_TIME}
        spent["evaluating"] = sum(own.get("evaluation_milliseconds", 0) for own in owners)
        self._searched = {
            GENERATED_TOKENS: float(sum(own["generated_tokens"] for own in owners)),
            **{f"searcher_{what}": ms / max(1, sum(spent.values())) for what, ms in spent.items()},
            EVALUATING: float(len(self.requests.pending)),
        }

    def _look_at_evaluations(self) -> None:
        """Pass on the searchers' evaluations (their own files have them already), and check whether the figure has
        fallen.
        """
        for evaluation in self.journal.evaluations():
            self.recorder.evaluation(evaluation)
        self.watch.look()


def start_training(
    recipe: Recipe,
    run: RunDirectory,
    stop: Callable[[], bool],
    ahead: bool,
    turn_taker: TurnTaker | None = None,
    elapsed: Callable[[], float] | None = None,
    background: bool = False,
    meeting: Meeting | None = None,
) -> TrainerLoop:
    """Build the loop of the run at `run`, and publish its first version. A later incarnation resumes where it can.

    ahead: draw a batch while the one before is trained on. turn_taker: the searcher of the same process, which makes a
    round while there is no batch; None: others bring one. background: write weights while the next step is made.
    """
    keep_few_kernels()
    recipe = replace(recipe, model=recipe.model.prepared(recipe.task))
    version, checkpoint = beginning(run)
    ranks = start_ranks(recipe, 0, meeting)
    policy, optimizer = start_policy(recipe, ranks, None if checkpoint is None else checkpoint.path)
    keep, deadline = recipe.replay.keep_bytes, recipe.run.journal_deadline
    tell = partial(record_fault, run.path, "damaged_trajectories")
    journal = JournalFollower(
        run.journal(recipe), keep_bytes=keep, deadline_s=deadline, waiting=stop, create=False, damaged=tell
    )
    try:
        journal.lead(_OTHERS)
        arrivals = arrivals_watched(recipe, run)
        resets = recipe.reference_reset > 0
        settings = replace(recipe.replay, pacing=replace(recipe.replay.pacing, warm_up=recipe.warm_up))
        replay = Replay(journal, settings, recipe.sync_every, seed=recipe.seed, resets=resets, arrived=arrivals.see)
        replay.now = version
        if checkpoint is not None:
            replay.restore(checkpoint.state["replay"], version)
        if recipe.offline:
            require_enough(recipe, replay)
    except BaseException:
        journal.close()
        raise
    directory = WeightDirectory(run.weights, settings=recipe.publish, dtype=recipe.model.compute)
    if version.incarnation:
        directory.clean()  # before anything is asked of what was published: a crash, or a disk, may have damaged it
    weights = BackgroundPublisher(directory, recipe.run.first_sign_deadline) if background else directory
    clock = ShareClock(warming_up=True)
    waiting = pause if turn_taker is None else partial(turn_taker.turn, clock)
    selection = recipe.replay.selection
    m = selection.m if isinstance(selection, HasRecentShare) else math.nan  # with control on, the recipe checked it
    loop = TrainerLoop(
        recipe=recipe,
        run=run,
        trainer=Trainer(
            policy=policy,
            objective=started(recipe.objective),
            weights=weights,
            optimizer=optimizer,
            sync_every=recipe.sync_every,
            max_tokens_per_pass=recipe.max_tokens_per_pass,
            directory=run.path,
            version=version,
            ranks=recipe.trainer.count,
            settle=weights.hold,
            teacher=recipe.teachers,
            sampling=None if recipe.model.never_sampled else Sampling(recipe.policy_temperature),
        ),
        replay=replay,
        batches=BatchQueue(
            replay,
            recipe.groups_per_step,
            recipe.group_size,
            clock=clock,
            stop=stop,
            deadline=recipe.run.idle_deadline,
            fill=nothing_more if recipe.offline else waiting,
            ahead=ahead,
        ),
        journal=journal,
        weights=weights,
        references=References(recipe.reference_reset, recipe.steps, recipe.run.checkpoints, replay, weights),
        requests=Requests(
            recipe.evaluation.every, recipe.steps, weights, journal.job_done, averaged=recipe.optimizer.averaged
        ),
        controller=recipe.control.start(recipe.sync_every, m),
        staleness=StalenessWatch(recipe.sync_every),
        recorder=recipe.record.start(run.path, run.facts["resolved"]),
        watch=Watch(run),
        arrivals=arrivals,
        clock=clock,
        elapsed=elapsed or run.clock(),
        resumed=None if checkpoint is None else checkpoint.state,
        turn_taker=turn_taker,
        ranks=ranks,
        arithmetic=recipe.model.arithmetic(),  # before anybody else is at work
    )
    if version.incarnation:
        loop.restore(checkpoint)
    loop.publish()
    return loop


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean of each part of the reward over the trajectories that have it, where there are several."""
    values: dict[str, list[float]] = {}
    for t in trajectories:
        for name, value in t.reward_parts.items() if len(t.reward_parts) > 1 else ():
            values.setdefault(name, []).append(value)
    return {f"{PART}{name}": sum(own) / len(own) for name, own in values.items()}


def require_enough(recipe: Recipe, replay: Replay) -> None:
    """Take in what there is. Raises `UserError` when that is too little for all steps."""
    replay.drain()
    received = replay.buffer.received
    if not replay.buffer.prompts(SMALLEST_GROUP):
        raise UserError(
            f"--offline learns from groups of answers to one prompt, but of the {received} trajectories that are there "
            f"no {SMALLEST_GROUP} answer the same prompt: import several answers to each"
        )
    pacing = replace(recipe.replay.pacing, warm_up=recipe.warm_up)
    if received < recipe.warm_up:
        raise UserError(
            f"--offline there are {received} trajectories and no more will come, but --replay.pacing.warm-up is "
            f"{recipe.warm_up}: set it to 0, or import more"
        )
    batch = recipe.groups_per_step * recipe.group_size
    uses = recipe.steps * batch / received
    if uses > pacing.max_mean_uses:
        most = math.floor(pacing.max_mean_uses * received / batch)
        raise UserError(
            f"--offline {recipe.steps} steps would use each of {received} trajectories {uses:.1f} times on average, "
            f"but --replay.pacing.max-mean-uses is {pacing.max_mean_uses:g}: set it to {math.ceil(uses)}, or "
            f"--steps to at most {most}"
        )
    if pacing.held(received, (recipe.steps - 1) * batch, batch):
        raise UserError(
            f"--offline nothing more is received, but --replay.pacing.samples-per-insert is "
            f"{pacing.samples_per_insert}, which {recipe.steps} steps go beyond: set it to None"
        )
