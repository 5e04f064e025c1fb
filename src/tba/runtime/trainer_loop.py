"""The trainer's loop: batch -> update -> weights out -> reference reset -> record -> checkpoint, until the last step.

It consumes batches of trajectories (`batch_queue`), which come through the journal. It waits for its next batch, which
a searcher's round unblocks, and before it changes the weights until those published last are written. It publishes the
weights every k steps, in a folder that searchers poll, and waits for nobody to load them. It is the same in every
runtime: `inline` alternates `step` with a searcher's round.

On a GPU an update after which nothing is published is read and recorded while the GPU computes the next step, if the
next batch is there.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from tba.batch import Batch, FetchedBatch, distinct_rows
from tba.clock import SEARCHER_STATES, ShareClock
from tba.errors import UserError
from tba.protocols import (
    TOP_TOKENS,
    ComputeCost,
    HasRecentShare,
    Manifest,
    Policy,
    Remembering,
    SharesPrompts,
    start_objective,
)
from tba.recipe import Recipe
from tba.record.faults import record_fault
from tba.record.jsonl import write_json
from tba.record.memory import FreedMemory, keep_few_kernels, peak_memory_bytes
from tba.record.metrics import BACKUP_AGE, EVALUATING, GENERATED_TOKENS, JOURNAL_ROWS, PART, REPEATED
from tba.record.recorder import Recorder
from tba.record.run_warnings import PADDED, STALE
from tba.record.step_watches import CollapseWatch, SignalWatch, StalenessWatch
from tba.replay.follower import JournalFollower
from tba.replay.missing_rows import JournalCounts
from tba.replay.replay import Replay
from tba.replay.selection import SMALLEST_GROUP
from tba.runtime.backup import END_SECONDS, BackupThread, start_backup
from tba.runtime.batch_queue import BatchQueue, StopRequested, pause, raise_out_of_data
from tba.runtime.checkpointing import LoopState, TurnTaker, generators, set_generators, starting_point
from tba.runtime.evaluation import Requests
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.runtime.reference import References
from tba.runtime.results import TrainerResult
from tba.runtime.run_directory import RunDirectory
from tba.runtime.trainer_scores import TrainerScores, start_trainer_scores
from tba.runtime.watching import AnswerWatch, EvaluationWatch, answer_watch_of
from tba.training.checkpoint import Checkpoint, save_checkpoint
from tba.training.ranks.messages import Ranks, Rendezvous
from tba.training.ranks.policy import Rank0Policy
from tba.training.staleness_controller import Controller
from tba.training.trainer import Metrics, PendingStep, Trainer
from tba.types import Sampling, Trajectory, Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import WeightDirectory

log = logging.getLogger("tba.trainer")
_LEFT_OUT = 8  # intervals of `sync_every` in which no version is published while one is being written
_BACKUP_PATIENCE = 5.0  # seconds that a backup in progress has to end with the trainer
_COUNTER_SECONDS = 1.0  # between two reads of the searchers' counts
_LEAD_SECONDS = 30.0  # that another trainer of this run has to end


def run_trainer(recipe: Recipe, run: RunDirectory, stop: Callable[[], bool], meeting: Rendezvous | None = None) -> None:
    """Run a trainer's whole life, in a process or an actor of its own. `meeting`: where its ranks find each other."""
    torch.set_num_threads(recipe.run.threads)
    loop = start_training(recipe, run, stop, prefetch=True, background=True, meeting=meeting)
    try:
        while not loop.finished and not stop():
            loop.step()
        loop.finish()
    finally:
        loop.close()


@dataclass
class _UnfinishedStep:
    """A step of the loop whose update has not been read and recorded."""

    fetched: FetchedBatch
    work: PendingStep
    wait_seconds: float
    start: float  # by `time.perf_counter`
    cpu_start: float  # by `time.thread_time`, once the batch was there
    seconds: float | None = None  # of the whole step, if another has begun
    cpu_seconds: float = 0.0


@dataclass
class TrainerLoop:
    """A trainer with its source of batches, its published weights and its records."""

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
    evaluation_watch: EvaluationWatch
    clock: ShareClock
    staleness: StalenessWatch
    elapsed: Callable[[], float]  # seconds since the run began, without evaluation
    resumed_state: LoopState | None = None  # the state of the checkpoint that it resumes from
    turn_taker: TurnTaker | None = None  # the searcher that takes turns with it, saved at the same step
    ranks: Ranks | None = None  # where its policy is spread over several
    trained_batches: int = 0  # by this process
    checkpointed_version: Version | None = None  # the newest checkpoint's version
    lags: Counter[int] = field(default_factory=Counter)
    arithmetic: ComputeCost | None = None  # what a token costs
    compute_counts: Counter[str] = field(default_factory=Counter)  # tokens `read` and `scored`, `milliseconds`
    signal: SignalWatch = field(default_factory=SignalWatch)
    collapse: CollapseWatch = field(default_factory=CollapseWatch)
    answer_watch: AnswerWatch | None = None
    memory: FreedMemory = field(default_factory=FreedMemory)
    backup: BackupThread | None = None
    scores: TrainerScores | None = None  # where answers are scored under the reference here
    versions_left_out: int = 0  # which were to be published while another was written
    began_training: float | None = None
    ended_training: float = 0.0
    _unfinished_step: _UnfinishedStep | None = None
    _last_interval: int = 0  # updates between the two versions that were published last
    _searchers_are_held: bool = False  # once they have sent what the newest manifest allows
    _searcher_metrics: dict[str, float] = field(default_factory=dict)
    _counters_read_at: float = -_COUNTER_SECONDS

    @property
    def finished(self) -> bool:
        return self.trainer.version.step >= self.recipe.steps

    def step(self) -> None:
        """Make one optimizer step: take a batch, update, publish the weights if they are due, and record it."""
        trainer, start = self.trainer, time.perf_counter()
        self.score()
        if (earlier_step := self._unfinished_step) is not None:
            if self.batches.prefetched_batch is None:  # before the trainer waits
                self._finish_step(earlier_step)
            else:
                earlier_step.seconds = start - earlier_step.start
                earlier_step.cpu_seconds = time.thread_time() - earlier_step.cpu_start
        try:
            fetched = self.batches.next(trainer.expected_version, trainer.published)
        except StopRequested:
            return
        wait_seconds, cpu_start = time.perf_counter() - start, time.thread_time()
        step = _UnfinishedStep(fetched, trainer.begin(fetched), wait_seconds, start, cpu_start)
        if self._unfinished_step is not None:
            self._finish_step(self._unfinished_step, is_late=True)
        if not self._may_finish_later():
            self._finish_step(step)
            return
        self._unfinished_step = step
        trainer.launch(step.work)
        if self._is_due_at(trainer.expected_version):
            self._finish_step(step)

    def _may_finish_later(self) -> bool:
        """Returns whether an update can be read after the next step has begun, because the device decides on it. An
        objective that remembers batches then has the next one already, of which no checkpoint is made: a step after
        which one is due is read before the next begins.
        """
        return self.trainer.optimizer.device_decides and self.ranks is None

    def _is_due_at(self, version: Version) -> bool:
        """Returns whether there is more to do at a version than to record the step that made it."""
        is_published = self.trainer.is_sync_due(version) and not self._may_leave_out()
        return is_published or version.step >= self.recipe.steps or self.references.is_due(version)

    def _finish_step(self, step: _UnfinishedStep, is_late: bool = False) -> None:
        """Read what came of an update, publish the weights if they are due, and record the step. is_late: the next step
        has begun, so that a version that is due is left to it.
        """
        trainer, version_before, self._unfinished_step = self.trainer, self.trainer.version, None
        metrics = trainer.finish(step.work)
        is_reset = self.references.is_due(trainer.version)
        if is_reset or (trainer.should_publish and not (is_late or self._may_leave_out())):
            self.publish(is_reset)
        elif trainer.should_publish:  # the version before is, or was, still being written: a newer one follows it
            self.versions_left_out += 1
        if is_reset:
            self._reset_reference()
        if step.seconds is None:
            step.seconds = time.perf_counter() - step.start
            step.cpu_seconds = time.thread_time() - step.cpu_start
        metrics |= {"wait_seconds": step.wait_seconds, "seconds": step.seconds, "cpu_seconds": step.cpu_seconds}
        self.trained_batches += 1
        if isinstance(trainer.policy, Rank0Policy):
            trainer.policy.checkpoint_thread.raise_error()
        self._record(version_before, step.fetched, metrics)
        if self._is_checkpoint_due():
            self.checkpoint()
        self.memory.give_back()

    def score(self) -> None:
        """Score some of the answers that are requested, where this trainer does."""
        if self.scores is not None:
            self.scores.round()

    def _may_leave_out(self) -> bool:
        """Returns whether the version that is due need not be published, because another is still being written.

        It is, where searchers are held back until they get another one, and after twice as many updates as between the
        two versions before (or `_LEFT_OUT` intervals): otherwise a disk that hangs would never be noticed.
        """
        published = self.trainer.published
        if published is None or not self.weights.busy or self._searchers_are_held:
            return False
        most_updates = max(_LEFT_OUT * self.trainer.sync_every, 2 * self._last_interval)
        return self.trainer.version.step - published.step < most_updates

    def publish(self, as_reference: bool = False) -> None:
        """Publish the weights as they are; with `as_reference` they are the reference from here on."""
        version = self.trainer.version
        evaluate = self.requests.manifest_entries(version, self.elapsed())
        if self.requests.averaged and version in self.requests.pending:
            self._publish_average()
        batch = self.recipe.groups_per_step * self.recipe.group_size
        self._last_interval = 0 if self.trainer.published is None else version.step - self.trainer.published.step
        searcher_limit = self.replay.searcher_limit(batch, self.trainer.sync_every)
        self._searchers_are_held = searcher_limit is not None
        reference = version if as_reference else self.references.current
        manifest = Manifest(
            evaluate=tuple(evaluate),
            stop=self.finished,
            reference=None if self.recipe.has_trainer_scores else reference,  # searchers have none
            journal=JournalCounts.of(self.journal).state(),
            wanted=searcher_limit,
        )
        self.trainer.publish(manifest)
        self.requests.pin()

    def _publish_average(self) -> None:
        """Publish the average of the weights, to be evaluated in their place, and wait for that: meanwhile the average
        stands in the policy's tensors.
        """
        self.weights.settle()
        with self.trainer.optimizer.averages():
            self.weights.publish(self.trainer.policy.weights(), self.trainer.version.average, Manifest())
            self.weights.settle()

    def checkpoint(self) -> None:
        """Write model and optimizer in the Hugging Face layout, and all other state at this step (`checkpointing`)."""
        self.weights.settle()  # the reference that it was made under is on disk
        trainer, count, state = self.trainer, self.recipe.run.checkpoints, vars(self.state())
        kept_versions = self.evaluation_watch.versions_to_keep(self.requests.pending)
        folder, version, model, heads = self.run.checkpoints, trainer.version, self.recipe.model, trainer.policy.heads
        policy, optimizer = trainer.policy, trainer.optimizer
        if isinstance(policy, Rank0Policy) and (copies := policy.copy_rows(optimizer, folder)) is not None:
            save, rows = partial(model.save, cast(Policy, copies[0])), copies[1]
            state, heads = json.loads(json.dumps(state)), deepcopy(heads)  # as they are now
            policy.checkpoint_thread.start(
                partial(save_checkpoint, folder, version, save, rows, state, count, heads, kept_versions)
            )
        else:
            save_checkpoint(folder, version, self._save_model, optimizer, state, count, heads, kept_versions)
        self.checkpointed_version = self.trainer.version

    def _save_model(self, path: Path) -> None:
        """Save the model, with the average of its weights where there is one: the optimizer's state has the weights."""
        with self.trainer.optimizer.averages():
            self.recipe.model.save(self.trainer.policy, path)

    def finish(self) -> None:
        """Publish the last version, write a checkpoint of it, and report the faults that only the whole run shows."""
        if self._unfinished_step is not None:
            self._finish_step(self._unfinished_step)
        self._finish_watches()
        if self.trainer.published != self.trainer.version:
            self.publish()
        if self.checkpointed_version != self.trainer.version:
            self.checkpoint()
        self._wait_for_checkpoint()
        if self.ranks is not None:
            self.ranks.broadcast("end")

    def close(self) -> None:
        """Leave what the summary needs, and end the threads.

        Everything is closed, even if something fails on the way.
        """
        with ExitStack() as closers:
            ranks = [] if self.ranks is None else [self.ranks]
            scores = [] if self.scores is None else [self.scores]
            for part in (*ranks, *scores, self.weights, self.journal, self.recorder):
                closers.callback(part.close)
            self.batches.close()
            self.replay.drain()
            self._record_evaluations()
            if self.backup is not None:  # the driver makes the last one, which must not keep a trainer that ends
                self.backup.stop(END_SECONDS if self.recipe.runtime == "inline" else _BACKUP_PATIENCE)
            write_json(self.run.result("trainer"), self.result())

    def state(self) -> LoopState:
        """Returns everything but the weights and the optimizer's moments: what `restore` takes."""
        return LoopState(
            replay=self.replay.state(self.trained_batches),
            reference=str(self.references.current),
            references=self.references.state(),
            evaluations=self.requests.state(),
            steering=self.controller.state() if self.controller.on else None,
            generators=generators(),
            journal={**JournalCounts.of(self.journal).state(), "prompts_in_flight": self.journal.leases()},
            lags=sorted(self.lags.items()),
            computed=dict(self.compute_counts),
            skipped=self.trainer.skipped,
            objective=o.state() if isinstance(o := self.trainer.objective, Remembering) else None,
            clock=self.clock.seconds(),
            began_training=self.began_training,
            ended_training=self.ended_training,
            searcher=None if self.turn_taker is None else self.turn_taker.state(),
        )

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Continue from a checkpoint (None: step 0), with the policy and the replay that were restored from it."""
        self.journal.evaluations()  # those so far have been recorded
        if checkpoint is None or (state := self.resumed_state) is None:
            self.requests.restore({"pending": {}, "seen": None})
            self.references.restore({"resets": []})
            return
        checkpoint.load_heads(self.trainer.policy.heads)
        self.trainer.optimizer.load(checkpoint.path)
        self.trainer.skipped = state.skipped
        if isinstance(self.trainer.objective, Remembering) and state.objective is not None:
            self.trainer.objective.restore(state.objective)
        self.references.restore(state.references)
        self.requests.restore(state.evaluations)
        if self.controller.on and state.steering is not None:
            self.controller.restore(state.steering)
            self._apply_control()
        self.lags = Counter(dict(state.lags))
        self.compute_counts = Counter(state.computed)
        self.clock.carry(state.clock)
        self.began_training, self.ended_training = state.began_training, state.ended_training
        self.checkpointed_version = self.trainer.version
        set_generators(state.generators)

    def result(self) -> TrainerResult:
        """Returns what the summary needs of a loop that has ended."""
        training_began, draw_counts = self.began_training, self.replay.selector.counts
        groups = draw_counts.get("recent", 0) + draw_counts.get("reward", 0)
        return TrainerResult(
            clock=self.clock.seconds(),
            peak_memory_bytes=peak_memory_bytes(),
            steps=self.trainer.version.step,
            version=self.trainer.version,
            skipped=self.trainer.skipped,
            ledger=self.replay.ledger(),
            position=self.journal.position,
            lags=self.lags,
            computed=self.compute_counts,
            arithmetic=self.arithmetic,
            recent_share=draw_counts.get("newest", 0) / max(1, groups),
            reference_resets=self.references.resets,
            control=[change.to_json() for change in self.controller.changes],
            awaited_evaluations=self.requests.pending,
            warm_up_seconds=self.elapsed() if training_began is None else training_began,
            train_seconds=0.0 if training_began is None else self.ended_training - training_began,
        )

    def _reset_reference(self) -> None:
        """Make the policy as it was just published the reference of the steps to come."""
        self._wait_for_checkpoint()  # until then the one before is what a resume takes, and its reference stays
        self.references.reset(self.trainer.version, self.elapsed())
        if self.scores is not None:
            self.scores.reset(self.trainer.version)
        if self.recipe.reset_optimizer:
            self.trainer.optimizer.reset_moments()

    def _wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        if isinstance(self.trainer.policy, Rank0Policy):
            self.trainer.policy.checkpoint_thread.wait()

    def _record(self, version_before: Version, fetched: FetchedBatch, metrics: Metrics) -> None:
        """Write a line of metrics. version_before: the version that the batch was drawn for."""
        trajectories: list[Trajectory] = [t for group in fetched.groups for t in group.trajectories]
        self.ended_training = self.elapsed()
        if self.began_training is None:
            self.began_training = self.ended_training - metrics["seconds"] + metrics["wait_seconds"]
        self.lags.update(t.version.lag(version_before) for t in trajectories if not t.imported)
        self._count_work(fetched.batch, metrics["seconds"] - metrics["wait_seconds"])
        step = self.trainer.version.step
        replay = self.replay.metrics()
        staleness_faults = [(STALE, sentence) for sentence in self.staleness.see(step, metrics | replay)]
        copies = replay.get(REPEATED, 0.0)
        signal = self.signal.see(step, 1 - metrics["without_signal"], metrics["truncated"], copies)
        self._report([*staleness_faults, *signal.items(), *self.collapse.see(step, metrics).items()])
        self._read_counters()
        loop_metrics = {
            "trainer_idle": self.clock.share("idle"),
            "trainer_paced": self.clock.share("paced"),
            **_parts(trajectories),
            **replay,
            **self.references.metrics(),
            **self._steer(metrics),
            **self._searcher_metrics,
            **({} if self.backup is None else {BACKUP_AGE: self.backup.age}),
            JOURNAL_ROWS: float(self.journal.position),
            "versions_left_out": float(self.versions_left_out),
        }
        version, log_policy = self.trainer.version, self.trainer.log_policy
        self.recorder.step(version, self.ended_training, metrics | loop_metrics, trajectories, log_policy)

    def _finish_watches(self) -> None:
        """Let every watch decide at the end of the run, which may be shorter than the watch's window."""
        step = self.trainer.version.step
        staleness_faults = [(STALE, sentence) for sentence in self.staleness.finish(step)]
        self._report([*staleness_faults, *self.signal.finish(step).items(), *self.collapse.finish(step).items()])
        if self.answer_watch is not None:
            self.answer_watch.finish()

    def _report(self, faults: Sequence[tuple[str, str]]) -> None:
        for kind, sentence in faults:
            log.warning("%s", sentence)
            record_fault(self.run.path, kind, sentence)

    def _count_work(self, batch: Batch, seconds: float) -> None:
        """Count the tokens that the policy has computed: a prompt once for its group, equal answers once too."""
        rows_D, _ = distinct_rows(batch)
        self.compute_counts["read"] += int(batch.prompt_length_G.sum()) + int(batch.length_B[rows_D].sum())
        self.compute_counts["scored"] += int(batch.mask_BT[rows_D].sum())
        self.compute_counts["milliseconds"] += round(1000 * seconds)

    def _steer(self, metrics: Metrics) -> dict[str, float]:
        """Give a step's metrics to the staleness controller and apply its decision; returns the step's own values."""
        controller = self.controller
        if not controller.on:
            return {}
        applied_values = {"sync_every": float(controller.sync_every), "m": controller.m}
        if (change := controller.observe(self.trainer.version.step, metrics)) is not None:
            self._apply_control()
            log.info(
                "%s was %.3g: k = %d and m = %g from step %d on",
                change.signal, change.value, change.sync_every, change.m, change.step,
            )  # fmt: skip
        return applied_values

    def _apply_control(self) -> None:
        """Apply the controller's values: m from the next drawn batch on, the sync interval from the next update on."""
        self.trainer.sync_every = self.controller.sync_every
        self.replay.steer(self.controller.m, self.controller.sync_every)

    def _is_checkpoint_due(self) -> bool:
        """Returns whether so many steps have passed at this weight sync; a resumed run begins with a checkpoint too."""
        version, every = self.trainer.version, self.recipe.run.checkpoint_every
        last_step = 0 if self.checkpointed_version is None else self.checkpointed_version.step
        return every > 0 and version == self.trainer.published and version.step // every > last_step // every

    def _read_counters(self) -> None:
        """Read the searchers' counters from the journal, once a second at most."""
        now = time.monotonic()
        if now - self._counters_read_at < _COUNTER_SECONDS:
            return
        self._counters_read_at = now
        self._record_evaluations()
        searchers = [counts for counts in self.journal.counters().values() if counts.get("generated_tokens")]
        spent_ms = {kind: sum(c.get(f"{kind}_milliseconds", 0) for c in searchers) for kind in SEARCHER_STATES}
        spent_ms["evaluating"] = sum(counts.get("evaluation_milliseconds", 0) for counts in searchers)
        self._searcher_metrics = {
            GENERATED_TOKENS: float(sum(counts["generated_tokens"] for counts in searchers)),
            **{f"searcher_{kind}": ms / max(1, sum(spent_ms.values())) for kind, ms in spent_ms.items()},
            EVALUATING: float(len(self.requests.pending)),
        }

    def _record_evaluations(self) -> None:
        """Give the searchers' evaluations to the recorder (their own files have them already), and check for falls."""
        for evaluation in self.journal.evaluations():
            self.recorder.evaluation(evaluation)
        self.evaluation_watch.check()


def start_training(
    recipe: Recipe,
    run: RunDirectory,
    stop: Callable[[], bool],
    prefetch: bool,
    turn_taker: TurnTaker | None = None,
    elapsed: Callable[[], float] | None = None,
    background: bool = False,
    meeting: Rendezvous | None = None,
) -> TrainerLoop:
    """Build the loop of the run at `run`, and publish its first version. A later incarnation resumes where it can.

    prefetch: draw a batch while the one before is trained on. turn_taker: the searcher of the same process, which makes
    a round while there is no batch; None: others bring one. background: write weights while the next step is made.
    """
    keep_few_kernels()
    recipe = replace(recipe, model=recipe.model.prepared(recipe.task))
    version, checkpoint = starting_point(run)
    state = LoopState.of(checkpoint)
    ranks = start_ranks(recipe, 0, meeting)
    policy, optimizer = start_policy(recipe, ranks, None if checkpoint is None else checkpoint.path)
    local_policy = policy.local_policy if isinstance(policy, Rank0Policy) else policy
    if isinstance(local_policy, SharesPrompts) and local_policy.padding_reason and not version.incarnation:
        record_fault(run.path, PADDED, f"{local_policy.padding_reason}; each answer is padded, which takes longer")
    keep_bytes, deadline = recipe.replay.keep_bytes, recipe.run.journal_deadline
    journal = JournalFollower(
        run.journal(recipe),
        keep_bytes=keep_bytes,
        deadline_s=deadline,
        on_wait=stop,
        create=False,
        on_damaged=partial(record_fault, run.path, "damaged_trajectories"),
    )
    try:
        journal.lead(_LEAD_SECONDS)
        watch = answer_watch_of(recipe, run)
        has_resets = recipe.reference_reset > 0 or recipe.has_trainer_scores
        settings = replace(recipe.replay, pacing=replace(recipe.replay.pacing, warm_up=recipe.warm_up))
        replay = Replay(journal, settings, recipe.sync_every, seed=recipe.seed, resets=has_resets, on_arrival=watch.see)
        replay.now = version
        if state is not None:
            replay.restore(state.replay, version)
        if recipe.offline:
            require_enough(recipe, replay)
    except BaseException:
        journal.close()
        raise
    weight_directory = WeightDirectory(run.weights, settings=recipe.publish, dtype=recipe.model.compute)
    if version.incarnation:
        weight_directory.clean()  # before any of it is read: a crash, or a disk, may have damaged it
    weights = BackgroundPublisher(weight_directory, recipe.run.first_sign_deadline) if background else weight_directory
    clock = ShareClock(is_warming_up=True)
    wait_for_rows = pause if turn_taker is None else partial(turn_taker.turn, clock)
    selection = recipe.replay.selection
    m = selection.m if isinstance(selection, HasRecentShare) else math.nan  # with control on, the recipe checked it
    learns_from_any_data = TOP_TOKENS in recipe.objective.needs and not recipe.scores_reference  # no pull
    loop = TrainerLoop(
        recipe=recipe,
        run=run,
        trainer=Trainer(
            policy=policy,
            objective=start_objective(recipe.objective),
            weights=weights,
            optimizer=optimizer,
            sync_every=recipe.sync_every,
            max_tokens_per_pass=recipe.max_tokens_per_pass,
            directory=run.path,
            version=version,
            ranks=recipe.trainer.count,
            wait_for_readers=weights.hold,
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
            fill=raise_out_of_data if recipe.offline else wait_for_rows,
            prefetch=prefetch,
        ),
        journal=journal,
        weights=weights,
        references=References(recipe.reference_reset, recipe.steps, run.checkpoints, replay, weights),
        requests=Requests(
            recipe.evaluation.every, recipe.steps, weights, journal.job_done, averaged=recipe.optimizer.weight_average
        ),
        controller=recipe.control.start(recipe.sync_every, m),
        staleness=StalenessWatch(recipe.sync_every, any_data=learns_from_any_data),
        recorder=recipe.record.start(run.path, run.facts["resolved"]),
        evaluation_watch=EvaluationWatch(run),
        answer_watch=watch,
        clock=clock,
        elapsed=elapsed or run.clock(),
        resumed_state=state,
        turn_taker=turn_taker,
        ranks=ranks,
        arithmetic=recipe.model.arithmetic(),  # before anybody else is at work
        backup=start_backup(recipe, run, is_restarted=version.incarnation > 0),
    )
    if version.incarnation:
        loop.restore(checkpoint)
    loop.scores = start_trainer_scores(recipe, run, policy, stop)
    if loop.scores is not None and (reference := replay.reference) != Version():
        loop.scores.load(weight_directory.at(reference).read(), reference)
    loop.batches.on_wait = loop.score
    loop.publish()
    return loop


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean of each part of the reward over the trajectories that have it, where there are several."""
    values: dict[str, list[float]] = {}
    for t in trajectories:
        for name, value in t.reward_parts.items() if len(t.reward_parts) > 1 else ():
            values.setdefault(name, []).append(value)
    return {f"{PART}{name}": sum(part_values) / len(part_values) for name, part_values in values.items()}


def require_enough(recipe: Recipe, replay: Replay) -> None:
    """Drain the journal into replay. Raises `UserError` when its trajectories are too few for all steps."""
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
        raise UserError(
            f"--offline {recipe.steps} steps would use each of {received} trajectories {uses:.1f} times on average, "
            f"but --replay.pacing.max-mean-uses is {pacing.max_mean_uses:g}: set it to {math.ceil(uses)}, or "
            f"--steps to at most {math.floor(pacing.max_mean_uses * received / batch)}"
        )
    if pacing.hold_reason(received, (recipe.steps - 1) * batch, batch):
        raise UserError(
            f"--offline nothing more is received, but --replay.pacing.samples-per-insert is "
            f"{pacing.samples_per_insert}, which {recipe.steps} steps go beyond: set it to None"
        )
