"""Describes a run by one frozen value, written as code.

A recipe file defines `recipe = Recipe(...)` and imports what it uses: no registry, no string that names a class. The
command line sets its fields by dotted name (`--steps 100 --task.digits 4`). `recipe.json` in the run's directory holds
the name or path and the overrides, from which every process of the run rebuilds the same value.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tba.errors import UserError
from tba.evaluation.accuracy import EvaluationSettings
from tba.fields import BY_CODE, as_declared
from tba.protocols import (
    HEADS,
    TOP_TOKENS,
    Acted,
    EndingSchedule,
    Exploration,
    HasAdapters,
    HasBeta,
    HasDevice,
    HasDtype,
    HasFlow,
    HasGeneration,
    HasLogZ,
    HasPull,
    HasRecentShare,
    HasRefill,
    HasRewardTemperature,
    LimitsEpisodes,
    Model,
    Objective,
    Task,
)
from tba.record.recorder import RecordSettings
from tba.replay.replay import ReplaySettings
from tba.rollout.exploration import Fixed
from tba.rollout.prompts import PromptSettings
from tba.rollout.vine import Vine
from tba.training.optimizer import OptimizerSettings
from tba.training.ranks.messages import LOADING_SECONDS, RankSettings
from tba.training.staleness_controller import Control
from tba.training.teacher import Teacher
from tba.types import Json
from tba.weights.directory import PublishSettings


@dataclass(frozen=True)
@as_declared
class RuntimeSettings:
    """Says how the parts are run, and their deadlines. Raises `UserError` when a field makes no sense."""

    idle_deadline: float = 1800.0  # seconds the trainer may wait for one batch
    silence_deadline: float = 1800.0  # seconds a part may be without a heartbeat before it is killed and restarted
    reward_deadline: float = 120.0  # seconds that one call of the reward may take; a longer one's answer is rejected
    # (a call about a batch has as long for each 64 answers)
    grading_lag: float = 2.0  # updates that an answer may wait for its grade, before searchers generate no further ones
    restarts: int = 3  # how often a worker that dies is restarted within an hour (cluster.restart_window); then a
    # searcher rests until the hour is over, as long as another one works
    inline_rounds_per_sync: int = 1  # searcher rounds between two weight syncs in the inline runtime
    journal_dir: Path | None = None  # folder of the journal; needed if the run's folder is on a network filesystem
    threads: int = 1  # torch threads in each process
    mps: bool = False  # kernels of trainer and searchers that share a GPU run side by side, by a daemon of NVIDIA's MPS
    # that the run starts and ends (docs/hardware.md); without it the GPU is one process's at a time
    synchronous_rounds: bool = False  # searchers answer, judge and send a round before they begin the next (as inline)
    checkpoints: int = 2  # number of checkpoints that are kept
    checkpoint_every: int = 100  # steps between checkpoints, each made at the next weight sync; 0: one at the end
    backup: Path | None = None  # folder on a shared disk, in which the run is backed up under its name; None: nowhere
    backup_every: float = 600.0  # seconds between backups

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            if not getattr(self, name) >= minimum:
                flag = f"--run.{name.replace('_', '-')}"
                raise UserError(f"{flag} is {getattr(self, name)}, it must be at least {minimum}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise UserError(f"--run.{name.replace('_', '-')} is {getattr(self, name)}, give a number above 0")

    @property
    def first_sign_deadline(self) -> float:
        """Returns the seconds until a part must give its first heartbeat. Before that it loads libraries and a model,
        and ranks of the trainer wait as long for each other.
        """
        return max(self.silence_deadline, LOADING_SECONDS + 60.0)

    @property
    def journal_deadline(self) -> float:
        """Returns the seconds that a part waits for the journal's lock, which are more than a part that hangs with the
        lock may live.
        """
        return max(self.silence_deadline, 120.0) + 30.0


@dataclass(frozen=True)
@as_declared
class ClusterSettings:
    """Says what each part of a run asks of a Ray cluster (runtime cluster)."""

    searcher_cpus: float = 1.0  # cores reserved for a searcher; 0.02 lets many light searchers share a core
    searcher_gpus: float | None = None  # GPUs reserved for a searcher, or a part of one; None: one, or a share of few
    trainer_cpus: float = 1.0  # cores reserved for each rank of the trainer
    trainer_gpus: float | None = None  # GPUs reserved for each rank of the trainer; None: one, or a share of few
    object_store_gb: float | None = None  # 10^9 bytes, of a cluster of its own; None: Ray decides (30 % of memory)
    nodes: str = ""  # nodes with GPUs to size a run for, as NODESxGPUSxGB: 8x8x80, several kinds after commas; empty:
    # those that the cluster has when the run begins
    working_dir: Path | None = None  # folder that Ray copies to the workers' nodes, such as that of modules that the
    # recipe imports; None: nothing is copied
    start_deadline: float = 300.0  # seconds that Ray may take to find room for the trainer and the first searcher, or
    # to start a worker; other searchers wait for room as long as it takes
    restart_window: float = 3600.0  # seconds within which restarts of a worker are counted (run.restarts)
    silence_deadline: float = 300.0  # seconds that a worker may be without an answer, or without a heartbeat, before
    # it is killed and restarted; a trainer has five times a step and a checkpoint, if that is more

    def __post_init__(self) -> None:
        self.described_nodes()
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float | int) and not 0 <= value < math.inf:
                raise UserError(f"--cluster.{f.name.replace('_', '-')} is {value}: give a number that is not negative")
            if f.name.endswith("_gpus") and value is not None and value > 1 and value != int(value):
                raise UserError(f"--cluster.{f.name.replace('_', '-')} is {value}: give part of one GPU, or whole ones")

    def described_nodes(self) -> list[tuple[int, float]]:
        """Returns the GPUs of each node that `nodes` describes, and the memory of each in GB of 10^9 bytes. Raises
        `UserError` for a text that describes none.
        """
        nodes: list[tuple[int, float]] = []
        for kind in filter(None, self.nodes.split(",")):
            match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d?)x(\d{1,4}(?:\.\d+)?)", kind.strip())
            if match is None or not float(match[3]):
                raise UserError(
                    f"--cluster.nodes has {kind!r}: give nodes, GPUs of each and GB of each GPU, such as 8x8x80"
                )
            nodes += [(int(match[2]), float(match[3]))] * int(match[1])
        return nodes


_POSITIVE = ("idle_deadline", "silence_deadline", "reward_deadline", "grading_lag", "backup_every")
_MINIMA = {
    "restarts": 0,
    "inline_rounds_per_sync": 1,
    "threads": 1,
    "checkpoints": 1,
    "checkpoint_every": 0,
}


@dataclass(frozen=True)
@as_declared
class InitialFill:
    """Says what is imported before a run begins, graded by the task and scored under the reference as `tba import`
    does. Raises `UserError` when a field makes no sense.
    """

    demonstrations: int = 0  # how many of the task's own demonstrations, from the first; 0: none
    files: tuple[Path, ...] = field(default=(), metadata=BY_CODE)  # files to import: JSON Lines, Parquet, or the
    # folders of other runs (on the command line: --data)

    def __post_init__(self) -> None:
        if self.demonstrations < 0:
            raise UserError(f"--fill.demonstrations is {self.demonstrations}: give a number of them, 0 or more")


@dataclass(frozen=True)
@as_declared
class Recipe:
    """Holds the settings of one run. The paper's symbols: B prompts x K responses, S per prompt, k steps per sync.
    Raises `UserError` when a field makes no sense.
    """

    task: Task
    model: Model
    objective: Objective
    exploration: Exploration = field(default_factory=Fixed)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    name: str = field(default="run", metadata=BY_CODE)  # of its runs, and of their folders without --run-name
    description: str = field(default="", metadata=BY_CODE)  # one line for people
    seed: int = 0  # seed of all random draws; equal seeds give equal weights in the inline runtime
    steps: int = 1000  # optimizer updates
    groups_per_step: int = 7  # B, prompts in a batch
    group_size: int = 20  # K, responses to each prompt in a batch
    samples_per_prompt: int = 24  # S, responses that a searcher samples to each prompt
    prompts_per_round: int = 3  # prompts that a searcher answers in one round
    sync_every: int = 2  # k, optimizer updates between weight syncs
    reference: str | None = None  # another model as the reference, by folder, GGUF file, adapter or Hub name, with the
    # policy's tokenizer; None: what the policy begins as
    reference_scorer: Literal["searchers", "trainer"] = "searchers"  # who scores answers under the reference; on GPUs
    # the trainer, where the reference does not fit beside an engine: sharded over its ranks, under LoRA the base itself
    reference_reset: int = 0  # optimizer updates between resets of the reference to the policy; 0: never
    reset_optimizer: bool = False  # reset the optimizer's moments at each reset of the reference
    rescored_per_round: int = 512  # older trajectories that a searcher scores under a new reference between two rounds
    # (and a trainer that scores, between two steps)
    policy_temperature: float = 1.0  # temperature of the policy and the reference in the objective
    overlong_penalty: float | Literal["drop"] = 0.0  # taken off rewards of answers cut off, or drop; in proportion off
    # those beyond four fifths of the longest (DAPO: 1); held-out answers and demonstrations keep theirs; 0: nothing;
    # drop: what is cut off is not trained, and counted as rejected (TRL's mask_truncated_completions)
    max_tokens_per_pass: int = 16384  # tokens of one forward and backward pass; larger batches are split
    searchers: int | None = None  # processes that generate; inline: exactly one; None: one, or one for each GPU of this
    # machine or cluster that the trainer leaves; 0: one that only evaluates, where all searchers join (`tba serve`)
    offline: bool = False  # learn only from existing trajectories (`tba import`, --data); searchers only evaluate
    runtime: Literal["processes", "inline", "cluster"] = "processes"  # processes, one process, or Ray actors
    address: str | None = None  # HOST:PORT of the Ray cluster to join (runtime cluster); None: $RAY_ADDRESS, which a
    # submitted job has, else start one
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    prompts: PromptSettings = field(default_factory=PromptSettings)
    fill: InitialFill = field(default_factory=InitialFill)
    teacher: Teacher | None = None  # other models in the target, beside the reward and the reference
    vine: Vine | None = None  # rollouts from the steps of each answer, for objectives that need step values
    control: Control = field(default_factory=Control)
    trainer: RankSettings = field(default_factory=RankSettings)
    publish: PublishSettings = field(default_factory=PublishSettings)
    run: RuntimeSettings = field(default_factory=RuntimeSettings)
    record: RecordSettings = field(default_factory=RecordSettings)

    def __post_init__(self) -> None:
        if isinstance(self.model, str | Path):
            from tba.models.huggingface import HuggingFace  # which loads transformers

            object.__setattr__(self, "model", HuggingFace(path=str(self.model)))
        for name, (members, example) in _COMPONENTS.items():
            _require_component(name, getattr(self, name), members, example)
        for name in _COUNTS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
        if self.searchers is not None and self.searchers < 0:
            raise UserError(f"--searchers is {self.searchers}, it must be at least 0")
        if self.seed < 0:
            raise UserError(f"--seed is {self.seed}, it must not be negative")
        if self.group_size < 2:
            raise UserError(f"--group-size is {self.group_size}, log Z needs at least 2 responses of a prompt")
        if not 0 < self.policy_temperature < math.inf:
            raise UserError(f"--policy-temperature is {self.policy_temperature}: give a positive number")
        if self.overlong_penalty != "drop" and not 0 <= self.overlong_penalty < math.inf:
            raise UserError(f"--overlong-penalty is {self.overlong_penalty}: give the reduction, 0 or more, or drop")
        if self.overlong_penalty not in (0, "drop") and self.vine is not None:
            raise UserError(
                f"--overlong-penalty is {self.overlong_penalty}, but the vine's values of steps are without it: set "
                "it to 0, or leave the vine out"
            )
        if self.reference_reset < 0:
            raise UserError(f"--reference-reset is {self.reference_reset}: give a number of updates, or 0 for never")
        if self.offline and self.reference_reset:
            raise UserError(
                f"--reference-reset is {self.reference_reset}, but after a reset searchers score trajectories again, "
                "and --offline there are none: set it to 0, or train with searchers"
            )
        if self.reference is not None and self.reference_reset:
            raise UserError(
                f"--reference is {self.reference}, and --reference-reset is {self.reference_reset}: a reset would put "
                "the policy in its place; leave one of them out"
            )
        if self.reference_scorer == "trainer":
            self._require_what_trainer_scores_need()
        if self.runtime == "inline" and self.trainer.count != 1:
            raise UserError(f"--trainer.ranks is {self.trainer.ranks}, but the inline runtime has one process for all")
        if self.runtime == "inline" and self.searchers not in (None, 1):
            raise UserError(f"--searchers is {self.searchers}, but the inline runtime takes turns with exactly 1")
        trainer_gpus = self.cluster.trainer_gpus
        if self.trainer.count > 1 and isinstance(self.model, HasDtype) and self.model.dtype == "4-bit":
            raise UserError(
                f"--trainer.ranks is {self.trainer.ranks}, but a base in 4 bits (--model.dtype 4-bit) is not sharded: "
                "train it with one rank, or with another dtype"
            )
        if self.runtime == "cluster" and self.trainer.count > 1 and trainer_gpus is not None and 0 < trainer_gpus < 1:
            raise UserError(
                f"--cluster.trainer-gpus is {trainer_gpus:g}, but each of {self.trainer.ranks} ranks "
                "needs a whole GPU (NCCL takes no two on one): give 1, or 0 to train on CPUs"
            )
        if self.address is not None and self.runtime != "cluster":
            raise UserError(f"--address is {self.address}, but the runtime is {self.runtime}: add --runtime cluster")
        schedule = self.optimizer.schedule
        if schedule.planned is not None and schedule.planned < self.steps and schedule(self.steps) == 0:
            raise UserError(
                f"--steps is {self.steps}, but the learning rate is 0 after {schedule.planned} of them: make the "
                f"schedule as long ({type(schedule).__name__}'s fields, or `.lasting({self.steps})` in code), give it "
                "a final rate (--optimizer.schedule.final), or take fewer steps"
            )
        self._require_what_the_control_moves()
        self._require_what_the_objective_needs()

    def _require_what_trainer_scores_need(self) -> None:
        if self.reference_reset and isinstance(self.model, HasAdapters) and self.model.lora.rank:
            raise UserError(
                f"--reference-scorer is trainer, and --reference-reset is {self.reference_reset}, but under adapters "
                "the trainer's reference is the base, which no reset changes: set one of them back"
            )
        if self.offline:
            raise UserError(
                "--reference-scorer is trainer, but --offline there are no new answers, and imported ones are scored "
                "already: leave it out"
            )

    def _require_what_the_control_moves(self) -> None:
        if self.control.signal == "none":
            return
        selection = self.replay.selection
        if not isinstance(selection, HasRecentShare) or selection.m is None:
            raise UserError(
                f"--control.signal is {self.control.signal}, but {type(selection).__name__} has no m to adjust: choose "
                "RecencyReward, or none"
            )
        self.control.start(self.sync_every, selection.m)

    def _require_what_the_objective_needs(self) -> None:
        objective, needs = type(self.objective).__name__, self.objective.needs
        missing_heads = (needs & HEADS) - self.model.heads
        if missing_heads:
            raise UserError(
                f"{objective} needs {' and '.join(sorted(missing_heads))} of the policy, but "
                f"{type(self.model).__name__} has no such head: choose another model or another objective"
            )
        if isinstance(self.objective, HasFlow) and self.objective.flow == "one" and not self.teachers.is_target:
            raise UserError(
                f"{objective} with flow one learns from each token alone, which is right for one teacher of weight 1 "
                "without a reward: give one of --teacher.paths and --teacher.no-reward, or choose TrajectoryBalance"
            )
        self._require_what_top_tokens_need()
        selection = self.replay.selection
        if self.teachers.count and isinstance(selection, HasRefill) and selection.refill:
            raise UserError(
                "--replay.selection.refill passes over answers of the same reward, which teach something where there "
                "is a teacher: leave it out"
            )
        if self.teachers.count and not isinstance(self.objective, HasBeta) and TOP_TOKENS not in needs:
            raise UserError(f"{objective} has no reference, so that a teacher is none: choose TrajectoryBalance")
        if self.vine is not None and self.model.never_sampled:
            raise UserError(
                f"searchers sample no {' and no '.join(self.model.never_sampled)}, and the vine continues answers from "
                "their middle, where such rules mean something else: leave the rules or the vine out"
            )
        stop_strings = self.model.generation.stop_strings if isinstance(self.model, HasGeneration) else ()
        if self.vine is not None and stop_strings and isinstance(self.task, Acted):
            raise UserError(
                "the vine plays an episode's turns again from their tokens, with the stop strings that the "
                "environment was not told: leave the stop strings or the vine out"
            )
        if self.fill.demonstrations and needs & {"log_behavior", "step_value"}:
            raise UserError(
                f"--fill.demonstrations is {self.fill.demonstrations}, but {objective} needs what demonstrations lack "
                f"({' and '.join(sorted(needs & {'log_behavior', 'step_value'}))}): set it to 0, or choose another "
                "objective"
            )
        if "step_value" in needs and self.vine is None:
            raise UserError(
                f"{objective} needs the values of an answer's steps, but no searcher estimates them: give the recipe a "
                "vine, `vine=Vine()`, or another objective"
            )
        if "log_behavior" in needs and self.exploration.greedy:
            raise UserError(
                f"{objective} needs the log-probabilities of what was sampled, but searchers sample at temperature 0, "
                "which leaves none: set --exploration.temperature above 0, or choose an objective without a ratio"
            )

    def _require_what_top_tokens_need(self) -> None:
        top, objective = self.teachers.top, type(self.objective).__name__
        needs_top = TOP_TOKENS in self.objective.needs
        if top and not needs_top:
            raise UserError(
                f"--teacher.top is {top}, but {objective} learns from sampled tokens only: leave it out, or choose the "
                "objective Distil"
            )
        if needs_top and not (top and self.teachers.is_target):
            raise UserError(
                f"{objective} compares each token's distribution with that of one teacher of weight 1 with the "
                "policy's tokenizer, without a reward: give one of --teacher.paths, --teacher.top (such as 16) and "
                "--teacher.no-reward; a reward, several teachers, weights and other tokenizers need whole answers "
                "(TrajectoryBalance)"
            )

    @property
    def scores_reference(self) -> bool:
        """Returns whether answers are scored under the reference: it has a part in the target."""
        pull = isinstance(self.objective, HasPull) and self.objective.pull > 0
        return pull or self.reference_reset > 0 or not self.teachers.replaces_reference

    @property
    def has_trainer_scores(self) -> bool:
        """Returns whether the trainer scores answers under the reference, in place of searchers."""
        return self.scores_reference and self.reference_scorer == "trainer"

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect, each with the setting that would give it one (`tba.fields`)."""
        unused_fields: dict[str, str] = {}
        if self.runtime != "cluster":
            unused_fields |= {"cluster": "runtime cluster", "address": "runtime cluster"}
        if self.runtime == "inline" and isinstance(self.task, LimitsEpisodes):
            unused_fields |= {"task.limits": "runtime processes"}
        if self.run.backup is None:
            unused_fields |= {"run.backup": "run.backup FOLDER", "run.backup_every": "run.backup"}
        if self.runtime != "processes":
            unused_fields |= {"run.mps": "runtime processes"}
        elif not (isinstance(self.model, HasDevice) and self.model.device == "cuda"):
            unused_fields |= {"run.mps": "model.device cuda"}
        if self.record.prometheus.port is None:
            unused_fields |= {"record.prometheus": "record.prometheus.port N"}
        if self.reference_scorer == "searchers":
            unused_fields |= {"reference_scorer": "reference_scorer trainer"}
        if self.runtime == "inline":
            unused_fields |= {"run.synchronous_rounds": "runtime processes"}
        else:
            unused_fields |= {"run.inline_rounds_per_sync": "runtime inline"}
        if not self.scores_reference:
            unused_fields |= dict.fromkeys(("reference", "reference_scorer"), "teacher.weights below 1")
        if not self.reference_reset:
            unused_fields |= {"reset_optimizer": "reference_reset"}
        if not self.reference_reset and not self.has_trainer_scores:
            unused_fields |= {"rescored_per_round": "reference_reset"}
        if isinstance(self.objective, HasLogZ) and not self.objective.needs & HEADS:
            unused_fields |= {"optimizer.head_lr": "objective.log_z learned"}
        return unused_fields

    @property
    def teachers(self) -> Teacher:
        """Returns the teacher, or one without models."""
        return self.teacher or Teacher()

    @property
    def searcher_count(self) -> int:
        """Returns how many processes generate or only evaluate: 1 until the number is decided."""
        return self.searchers or 1

    @property
    def only_evaluates(self) -> bool:
        """Returns whether the run's own searcher generates nothing: its trajectories come from elsewhere."""
        return self.offline or self.searchers == 0

    @property
    def warm_up(self) -> int:
        """Returns the trajectories before the first update: no more than the run trains on."""
        return min(self.replay.pacing.warm_up, self.steps * self.groups_per_step * self.group_size)

    @property
    def largest_reward(self) -> float:
        """Returns the largest |reward| that is trained on: divided by the smallest beta of the run, its square is still
        finite.

        An objective without a beta, or whose beta reaches 0, is treated as if beta were 1.
        """
        smallest_divisor, objective = 1.0, self.objective
        schedules = [objective.beta] if isinstance(objective, HasBeta) else []  # Trajectory Balance divides by it
        schedules += [objective.reward_temperature] if isinstance(objective, HasRewardTemperature) else []
        for schedule in schedules:
            if callable(schedule):  # one of a user's may be a number; anneals are monotone
                value = min(schedule(1), schedule.last if isinstance(schedule, EndingSchedule) else math.inf)
                smallest_divisor *= value if value > 0 else 1.0
        return LARGEST_SQUARED * smallest_divisor


def _require_component(name: str, component: Any, members: tuple[str, ...], example: str) -> None:
    """Raises `UserError` for an object that cannot be a recipe's component: a text, a class, one without a member."""
    if isinstance(component, type):
        kind = component.__name__
        raise UserError(f"the recipe's {name} is the class {kind}: give one of it, {kind}(...)")
    if isinstance(component, str | Path | float | None):
        raise UserError(f"the recipe's {name} is {component!r:.80}: give an object, such as {example}")
    kind = type(component).__name__
    for member in members:
        if not hasattr(component, member):
            line = f'the line `name: str = "{kind.lower()}"`' if member == "name" else f"`{member}`"
            raise UserError(f"the recipe's {name}, {kind}, has no {member}: give the class {line}, as {example} has it")


_COMPONENTS: Mapping[str, tuple[tuple[str, ...], str]] = {  # the members that each must have, and an example
    "task": (("name", "problems", "reward"), 'tba.Jsonl(train="problems.jsonl")'),
    "model": (("heads", "engine", "policy"), 'tba.HuggingFace(path="folder")'),
    "objective": (("needs", "by_group"), "tba.TrajectoryBalance(beta=0.05) or tba.Grpo()"),
    "exploration": (("draw", "full_support", "greedy"), "tba.Fixed(temperature=1.0)"),
}
LARGEST_SQUARED = 1e9  # |reward| over beta: its square, summed over a batch, is far from float32's largest number
_PACKAGE = Path(__file__).parent
_COUNTS = (
    *("steps", "groups_per_step", "samples_per_prompt", "prompts_per_round", "sync_every"),
    *("max_tokens_per_pass", "rescored_per_round"),
)


def settings_json(value: Any) -> Json:
    """Returns any setting as JSON: dataclasses by field (with their class), paths as text (those within the package
    relative to it).
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: settings_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", **fields}
    if isinstance(value, Mapping):
        return {str(k): settings_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [settings_json(v) for v in value]
    if isinstance(value, str | Path):
        return str(value).replace(f"{_PACKAGE.parent}{os.sep}", "")  # the same on every machine
    if isinstance(value, int | float | bool) or value is None:
        return value
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"
    return str(value)


def differences(old_value: Any, new_value: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted name, old value, new value) wherever two recipes, as JSON, differ; a missing value is None.

    A class is identified by its name, since its module may have moved. `name` is the place of both values.
    """
    if isinstance(old_value, Mapping) and isinstance(new_value, Mapping):
        for key in [*new_value, *(k for k in old_value if k not in new_value)]:
            yield from differences(old_value.get(key), new_value.get(key), f"{name}.{key}" if name else key)
    elif isinstance(old_value, list) and isinstance(new_value, list) and len(old_value) == len(new_value):
        for i, (old_item, new_item) in enumerate(zip(old_value, new_value, strict=True)):
            yield from differences(old_item, new_item, f"{name}.{i}")
    elif isinstance(old_value, str) and isinstance(new_value, str) and name.rpartition(".")[2] == "class":
        if old_value.rpartition(".")[2] != new_value.rpartition(".")[2]:
            yield name, old_value, new_value
    elif old_value != new_value:
        yield name, old_value, new_value
