"""Reports on a run: the summary at its end, the status while it goes.

Invariant: every figure of the summary was counted where it arose (searchers and journal: the journal's counters; replay
and trainer: their result files); nothing here is found by subtraction.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tba.clock import SEARCHER_STATES, State, combined_share
from tba.errors import UserError
from tba.gpus import visible_gpus
from tba.json_input import read_json
from tba.protocols import ComputeCost
from tba.recipe import Recipe
from tba.record import metrics
from tba.record.evaluations import RunningEvaluations, read_evaluations
from tba.record.faults import count_faults, note_unreadable
from tba.record.ledger import Ledger
from tba.record.live import Status
from tba.record.memory import machine
from tba.record.metrics import RunningMetrics
from tba.record.run_warnings import record_slow_reward, recorded_warnings
from tba.record.summary import Lag, Summary, WallSeconds
from tba.record.text import duration
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.queries import count_rows
from tba.rollout.rates import GrowthRate
from tba.runtime.checkpointing import loss_of
from tba.runtime.elastic import JoinedSearchers
from tba.runtime.results import SearcherResult, TrainerResult
from tba.runtime.run_directory import RunDirectory
from tba.runtime.watching import EvaluationWatch

GO_ON = "resume the run (tba resume)"  # the remedy for a result that cannot be read


@dataclass
class RunProgress:
    """Snapshots of a run from its files, for the live view. Each call reads only what was written since the last."""

    recipe: Recipe
    run: RunDirectory
    metrics: RunningMetrics = field(init=False)
    evaluations: RunningEvaluations = field(init=False)
    _arrivals: GrowthRate = field(default_factory=GrowthRate)  # of answers, during the warm-up

    def __post_init__(self) -> None:
        self.metrics = RunningMetrics(self.run.path)
        self.evaluations = RunningEvaluations(self.run.path)

    def status(self, phase: str, note: str = "") -> Status:
        """Returns the status according to the files now."""
        self.metrics.read_new()
        self.evaluations.read_new()
        row: Mapping[str, Any] = self.metrics.newest
        mean, newest = self.metrics.mean, self.evaluations.newest
        bad_lines = self.metrics.bad_line_count + self.evaluations.bad_line_count
        fall = (recorded_warnings(self.run.path) or [""])[-1]
        phase = "warm-up" if phase == "training" and not row else phase
        warm_up = self._describe_warm_up() if phase == "warm-up" else ""
        return Status(
            step=int(row.get("step", 0)),
            steps=self.recipe.steps,
            elapsed_seconds=self.run.clock()(),
            training_seconds=row["wall_seconds"] - self.metrics.first_seconds if row else 0.0,
            phase=phase,
            reward=mean(metrics.REWARD),
            parts=self.metrics.parts(),
            log_ratio=mean(metrics.LOG_RATIO),
            lag=mean(metrics.LAG),
            ess=mean(metrics.ESS),
            accuracy={e.metric: e.value for e in newest},
            evaluated=newest[0].version.step if newest else None,
            evaluating=int(row.get(metrics.EVALUATING, 0)),
            generated_rate=self.metrics.rate("generated"),
            trained_rate=self.metrics.rate("trained"),
            trainer_idle=row.get(metrics.TRAINER_IDLE),
            trainer_paced=row.get(metrics.TRAINER_PACED),
            searcher_evaluating=row.get(metrics.SEARCHER_EVALUATING),
            note=note or (f"{bad_lines} lines of what is recorded cannot be read" if bad_lines else fall or warm_up),
        )

    def _describe_warm_up(self) -> str:
        """Returns how many of the answers that the first step waits for have arrived, and how long the others take at
        the rate so far; nothing when all have.
        """
        total = self.recipe.warm_up
        arrived = count_rows(self.run.journal(self.recipe)) if total else None
        if arrived is None or arrived >= total:
            return ""
        now = time.monotonic()
        self._arrivals.record(now, arrived)
        rate = self._arrivals.per_second(now)
        remaining = f", {duration((total - arrived) / rate)} left" if rate else ""
        return f"{arrived:,} of {total:,} answers{remaining}"


def summarise(
    recipe: Recipe, run: RunDirectory, searchers: list[str], faults: Mapping[str, Any], sft_seconds: float
) -> Summary:
    """Write summary.json of a run whose parts have ended, and return it."""
    trainer: TrainerResult = read_json(run.result("trainer"), GO_ON, TrainerResult)
    if (loss := loss_of(run, run.journal(recipe))) is not None:
        raise UserError(f"{loss}; put it back if there is a copy, or {GO_ON} with --accept-lost-rows")
    joined = JoinedSearchers(run).record()
    names = [*searchers, *(searcher["name"] for searcher in joined)]
    results: dict[str, SearcherResult] = {
        name: read_json(run.result(name), GO_ON, SearcherResult) for name in names if run.result(name).exists()
    }
    for name in names:  # one that was killed may have left graded answers
        with JournalWriter(run.journal(recipe), name, create=False) as journal_writer:
            journal_writer.resume()
    with JournalFollower(run.journal(recipe), position=trainer.position, create=False) as journal:
        owners = journal.counters()
        undrained = journal.undrained()
    ledgers = {}
    for unit in ("tokens", "trajectories"):
        searcher_ledger = Ledger.gather(owners, unit)
        replay_ledger = Ledger.of_counters(trainer.ledger, unit)
        ledgers[unit] = searcher_ledger + replay_ledger + Ledger.of({"waiting": undrained[unit]})
    note_unreadable(run.path)
    clocks = [result.clock for result in results.values()]
    answers = ledgers["trajectories"]
    record_slow_reward(run.path, combined_share(clocks, "reward"), answers.expired, answers.generated)
    evaluations = read_evaluations(run.path)
    EvaluationWatch(run).check()  # the last evaluations came after the trainer had ended
    summary = Summary(
        recipe=recipe.name,
        seed=recipe.seed,
        steps=trainer.steps,
        wall_seconds=WallSeconds(
            total=run.clock()(),
            sft=sft_seconds,
            warm_up=max(0.0, trainer.warm_up_seconds - sft_seconds),
            train=trainer.train_seconds,
            eval=sum(e.seconds for e in evaluations),
        ),
        evaluations=evaluations,
        trainer_idle=combined_share([trainer.clock], "idle"),
        trainer_paced=combined_share([trainer.clock], "paced"),
        searcher_idle=combined_share(clocks, "idle"),
        searcher_paced=combined_share(clocks, "paced"),
        searcher_evaluating=combined_share(clocks, "eval"),
        searcher_time=_searchers_time(clocks),
        tokens=ledgers["tokens"],
        trajectories=ledgers["trajectories"],
        lag=Lag.of(trainer.lags),
        recent_share=trainer.recent_share,
        prompts=next((result.prompts for result in results.values() if result.prompts), {}),
        reference_resets=trainer.reference_resets,
        control=trainer.control,
        joined=joined,
        served=_add_up(result.served for result in results.values()),
        faults={**count_faults(run.path), **faults, "skipped_steps": trainer.skipped},
        peak_memory_bytes={
            "trainer": trainer.peak_memory_bytes,
            **{name: result.peak_memory_bytes for name, result in results.items()},
        },
        utilisation=utilisation(trainer.arithmetic, trainer.computed, recipe.trainer.count, owners),
        machine=machine(visible_gpus().names),
    )
    summary.write(run.path)
    return summary


def _add_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums of counts by name."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def utilisation(
    cost: ComputeCost | None, computed: Mapping[str, int], ranks: int, owners: Mapping[str, Mapping[str, int]]
) -> dict[str, float]:
    """Returns how near the trainer in its steps, and searchers while they generate, come to the rate of a product of
    matrices on the trainer's device; nothing for a model of unknown shape.

    cost: of the trainer's tokens. computed: by the trainer. owners: the counters of all searchers, which add up over
    their restarts.
    """
    if cost is None:
        return {}
    work, counts = Counter(computed), Counter[str]()
    for counters in owners.values():
        counts.update(counters)
    shares = {}
    if work["milliseconds"]:
        shares["trainer"] = cost.passes * cost.share(work["read"], work["scored"], ranks * work["milliseconds"] / 1000)
    sampled_tokens = counts["generated_tokens"] + counts["auxiliary_tokens"] - counts["observed_tokens"]
    read_tokens = sampled_tokens + counts["observed_tokens"] + counts["asked_tokens"]
    if sampled_tokens and counts["generating_milliseconds"]:
        shares["searchers"] = cost.share(read_tokens, sampled_tokens, counts["generating_milliseconds"] / 1000)
    return shares


def _searchers_time(clocks: list[Mapping[State, float]]) -> dict[str, float]:
    """Returns what the searchers' time went to, in shares that add up to 1."""
    states = {**SEARCHER_STATES, "waiting": (*SEARCHER_STATES["waiting"], "idle"), "evaluating": ("eval",)}
    return {name: sum(combined_share(clocks, state) for state in parts) for name, parts in states.items()}
