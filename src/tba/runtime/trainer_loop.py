"""The training half of a run, built from its directory: the same in every runtime.

Invariant: it waits for one thing only, its next batch; `ready` says why (warm-up, empty, paced), a searcher's round
unblocks it, and the wait has a deadline. Trajectories come up from the journal, weights go out to the directory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from tba.recipe import Recipe
from tba.record.clock import ShareClock
from tba.record.faults import record_fault
from tba.record.jsonl import write_json
from tba.record.recorder import Recorder
from tba.replay.follower import JournalFollower
from tba.replay.loss import Held
from tba.replay.replay import Replay
from tba.runtime.checkpointing import Stateful, beginning, restore, state_of
from tba.runtime.evaluation import Requests
from tba.runtime.leading import start_policy, start_ranks
from tba.runtime.offline import require_enough
from tba.runtime.reference import References
from tba.runtime.run_dir import RunDirectory
from tba.runtime.steering import Steering
from tba.runtime.summary import result_of
from tba.runtime.waiting import ReplayWait, Stopped, Timed
from tba.runtime.watching import Watch, rewards_watched
from tba.train.batches import Sampled
from tba.train.checkpoint import save_checkpoint
from tba.train.prefetch import Prefetch
from tba.train.ranks import Meeting, Ranks
from tba.train.trainer import Trainer
from tba.types import Json, Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import WeightDirectory

_POLL = 0.004  # seconds between two looks at the journal while there is no batch
_COUNTERS = 1.0  # seconds between two looks at the searchers' counts


@dataclass
class TrainHalf:
    """A trainer with its replay, its journal end, its records and its clock."""

    recipe: Recipe
    run: RunDirectory
    trainer: Trainer
    replay: Replay
    journal: JournalFollower
    weights: WeightDirectory | BackgroundPublisher
    references: References
    requests: Requests
    steering: Steering
    recorder: Recorder
    watch: Watch
    clock: ShareClock
    source: Timed
    elapsed: Callable[[], float]  # seconds since the run began, evaluation apart
    resumed: Mapping[str, Json] | None = None  # the state of the checkpoint that it goes on from
    beside: Stateful | None = None  # the searcher that takes turns with it, to be saved at the same step
    ranks: Ranks | None = None  # where its policy is spread over several
    trained: int = 0  # batches, by this process
    checkpointed: Version | None = None  # the newest
    lags: Counter[int] = field(default_factory=Counter)
    began_training: float | None = None
    ended_training: float = 0.0
    _searched: dict[str, float] = field(default_factory=dict)
    _looked: float = -_COUNTERS

    @property
    def finished(self) -> bool:
        return self.trainer.version.step >= self.recipe.steps

    def step(self) -> None:
        """One optimizer step and what is recorded of it."""
        before = self.trainer.version
        try:
            metrics = self.trainer.step()
        except Stopped:
            return
        self.trained += 1
        self.requests.pin()
        if self.references.due(self.trainer.version):
            self._reset_reference()
        self.ended_training = self.elapsed()
        if self.began_training is None:
            self.began_training = self.ended_training - metrics["seconds"] + metrics["wait_seconds"]
        trajectories = [t for group in self.trainer.groups for t in group.trajectories]
        self.lags.update(t.version.lag(before) for t in trajectories if not t.imported)
        self._look()
        own = {
            "trainer_idle": self.clock.share("idle"),
            "trainer_paced": self.clock.share("paced"),
            **self.replay.metrics(),
            **self.references.metrics(),
            **self.steering.after(self.trainer.version.step, metrics),
            **self._searched,
        }
        self.recorder.step(self.trainer.version, self.ended_training, metrics | own, trajectories)
        if self._checkpoint_due():
            self.checkpoint()

    def _checkpoint_due(self) -> bool:
        """At the first weight sync from every so many steps on: a run that goes on begins with one too."""
        version, every = self.trainer.version, self.recipe.run.checkpoint_every
        before = 0 if self.checkpointed is None else self.checkpointed.step
        return every > 0 and version == self.trainer.published and version.step // every > before // every

    def notes(self, version: Version) -> Mapping[str, Json]:
        """What lies beside a published version: the reference, which are to be evaluated, whether to stop, and how much
        the journal held.
        """
        requests = self.requests.beside(version, self.elapsed())
        own = {
            "evaluate": requests,
            "stop": self.finished,
            "reference": str(self.references.at(version)),
            "journal": Held.of(self.journal).state(),
        }
        return own | self.steering.notes()

    def publish(self) -> None:
        """The weights as they are."""
        self.trainer.publish()
        self.requests.pin()

    def _reset_reference(self) -> None:
        """The policy as it is now is the reference of the steps to come."""
        if self.trainer.published != self.trainer.version:
            self.publish()
        self.references.reset(self.trainer.version, self.elapsed())
        if self.recipe.reset_optimizer:
            self.trainer.optimizer.forget()

    def checkpoint(self) -> None:
        """Model and optimizer in the Hugging Face layout, and all else at this step (`checkpointing`)."""
        self.weights.settle()  # what it was made under is there
        self.references.checkpointed()
        at, keep, state = self.trainer, self.recipe.run.checkpoints, state_of(self)
        save, kept = partial(self.recipe.model.save, at.policy), self.watch.worth_keeping(self.requests.pending)
        save_checkpoint(self.run.checkpoints, at.version, save, at.optimizer, state, keep, at.policy.heads, kept)
        self.checkpointed = self.trainer.version

    def finish(self) -> None:
        """The last version out, and a checkpoint of it."""
        if self.trainer.published != self.trainer.version:
            self.publish()
        if self.checkpointed != self.trainer.version:
            self.checkpoint()
        if self.ranks is not None:
            self.ranks.say("end")

    def close(self) -> None:
        """Leave what the summary needs; end the threads. All is closed, whatever fails on the way."""
        with ExitStack() as ends:
            ranks = [] if self.ranks is None else [self.ranks]
            for part in (*ranks, self.weights, self.journal, self.recorder):
                ends.callback(part.close)
            ahead = self.source.close()
            if ahead is not None:
                self.replay.take_back(ahead.groups)
            self.replay.drain()
            self._look_at_evaluations()
            write_json(self.run.result("trainer"), result_of(self))

    def _look(self) -> None:
        """The searchers' own counts, now and then."""
        now = time.monotonic()
        if now - self._looked < _COUNTERS:
            return
        self._looked = now
        self._look_at_evaluations()
        owners = self.journal.counters().values()
        self._searched = {"generated_tokens": float(sum(o.get("generated_tokens", 0) for o in owners))}

    def _look_at_evaluations(self) -> None:
        """What searchers have found, for other eyes (their own files have it already), and whether it has fallen."""
        for evaluation in self.journal.evaluations():
            self.recorder.evaluation(evaluation)
        self.watch.look()


def start_training(
    recipe: Recipe,
    run: RunDirectory,
    stop: Callable[[], bool],
    prefetch: bool,
    fill: Callable[[], object] | None = None,
    elapsed: Callable[[], float] | None = None,
    background: bool = False,
    meeting: Meeting | None = None,
) -> TrainHalf:
    """The trainer of the run at `run`, its first version published. A later incarnation goes on where it can."""
    recipe = replace(recipe, model=recipe.model.prepared(recipe.task))
    version, checkpoint = beginning(run)
    ranks = start_ranks(recipe, 0, meeting)
    policy, optimizer = start_policy(recipe, ranks, None if checkpoint is None else checkpoint.path)
    keep, deadline = recipe.replay.keep_bytes, recipe.run.journal_deadline
    tell = partial(record_fault, run.path, "damaged_trajectories")
    journal = JournalFollower(
        run.journal(recipe), keep_bytes=keep, deadline_s=deadline, waiting=stop, create=False, damaged=tell
    )
    watched = rewards_watched(recipe, run)
    replay = Replay(journal, recipe.replay, recipe.sync_every, seed=recipe.seed, arrived=watched)
    replay.now = version
    if checkpoint is not None:
        replay.restore(checkpoint.state["replay"], version)
    if recipe.offline:
        require_enough(recipe, replay, journal)
    directory = WeightDirectory(run.weights, settings=recipe.publish)
    behind = BackgroundPublisher(directory, recipe.run.first_sign_deadline) if background else None
    weights = behind or directory
    clock = ShareClock(warming_up=True)
    wait = ReplayWait(
        replay=replay,
        source=Sampled(replay, recipe.groups_per_step, recipe.group_size),
        version=lambda: trainer.version,
        stop=stop,
        deadline=recipe.run.idle_deadline,
        fill=fill or (lambda: time.sleep(_POLL)),
        published=lambda: trainer.published,
    )
    trainer = Trainer(
        policy=policy,
        objective=recipe.objective,
        batches=wait,
        weights=weights,
        optimizer=optimizer,
        sync_every=recipe.sync_every,
        max_tokens_per_pass=recipe.max_tokens_per_pass,
        directory=run.path,
        version=version,
        notes=lambda version: half.notes(version),
        ranks=recipe.trainer.ranks,
        settle=weights.settle,
    )
    ahead = Prefetch(wait, recipe.run.idle_deadline, wait.close) if prefetch else wait
    trainer.batches = source = Timed(ahead, wait, clock)
    half = TrainHalf(
        recipe=recipe,
        run=run,
        trainer=trainer,
        replay=replay,
        journal=journal,
        weights=weights,
        references=References(recipe.reference_reset, recipe.steps, recipe.run.checkpoints, replay, weights),
        requests=Requests(recipe.evaluation.every, recipe.steps, weights, journal.job_done),
        steering=Steering.of(recipe, trainer, replay),
        recorder=recipe.record.start(run.path, run.facts["resolved"]),
        watch=Watch(run),
        clock=clock,
        source=source,
        elapsed=elapsed or run.clock(),
        resumed=None if checkpoint is None else checkpoint.state,
        ranks=ranks,
    )
    if version.incarnation:
        restore(half, checkpoint)
    half.publish()
    return half
