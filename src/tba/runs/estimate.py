"""Estimates the time and memory of a run from a few rounds and steps of the recipe's own searcher and trainer.

Where a model is slow on a processor, rounds and steps are smaller ones, and the figures are extrapolated by answers and
tokens: `Estimate.smaller` says from what.

Each is timed in a process of its own, both at the same time, as in a run (`tba.runs.probe`). Nothing is written or
learnt.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Group, RenderableType

from tba.errors import DeadlineExceeded, UserError
from tba.models.arithmetic import forwards_per_update
from tba.models.huggingface import HuggingFace
from tba.models.memory import Shape
from tba.protocols import Acted, Examined
from tba.recipe import Recipe
from tba.record.show import facts_table, section
from tba.record.terminal import Displayable
from tba.record.text import duration, size
from tba.runs.probe import FIGURES, PROGRESS, RoundTimes, SampledRounds, SlotTimes, StepTimes
from tba.runs.reward_time import PartTime, RoundTime
from tba.runs.signal import Signal
from tba.runtime.devices import USABLE, environment_of, visible_devices
from tba.runtime.hardware import Machine
from tba.runtime.local.forkserver import Program, start
from tba.runtime.needs import disk_use, needs
from tba.runtime.sizing import places_on
from tba.training.ranks.messages import RankSettings

_DEADLINE = 1800.0  # seconds for one probe
_LEAST_SECONDS = 3.0  # for which searcher and trainer are timed at least, at the same time
_POLL = 0.02  # seconds between two checks whether a probe has ended


@dataclass(frozen=True, repr=False)
class Estimate(Displayable):
    """Holds seconds and bytes of a run, extrapolated from a few rounds and steps."""

    start_seconds: float  # until both halves are up
    round_seconds: float
    step_seconds: float  # measured, or at least: its products alone, over all ranks
    tokens_per_round: float
    tokens_per_trajectory: float
    trajectories_per_second: float  # of all searchers together
    evaluation_seconds: float  # before and after; those in between overlap training
    total_seconds: float
    product_rates: dict[str, float]  # operations a second of a product of matrices, by precision
    generation_seconds: float  # of a round, without its judgement and the reference
    round_time: RoundTime  # by stage
    generation_operations: float | None  # of a round; None offline, or where the model's shape is unknown
    step_operations: float | None  # of a step, forward and backward
    uses: float | None  # None offline: what was imported decides
    trainer_bytes: int
    searcher_bytes: int
    weights_bytes: int  # of one published version
    log_ratio: float | None  # the largest of any token, between the trainer's weights and the reference at version 0
    effective: float | None  # share of answers from before the first `probe.DRIFT_UPDATES` that still count after them
    signal: Signal  # whether there is anything to learn from
    trainer_gpu_bytes: int | None  # of each rank; None: it uses no GPU
    searcher_gpu_bytes: int | None
    trainer_measured: bool = True  # otherwise what the trainer takes is computed
    smaller: str = ""  # what figures are extrapolated from, in words; empty: whole rounds and steps were timed

    def _content(self) -> RenderableType:
        facts = {
            "time": f"{duration(self.total_seconds)}, of which start-up {duration(self.start_seconds)} and evaluations "
            f"{duration(self.evaluation_seconds)}",
            "searcher": f"a round takes {self.round_seconds:.3f} s, {self.tokens_per_round:,.0f} tokens of answers",
            "round": self.round_time.facts(),
            "trainer": f"a step takes {self.step_seconds:.3f} s",
            "memory": f"trainer {size(self.trainer_bytes)}, each searcher {size(self.searcher_bytes)}",
            "measured": self.smaller,
        }
        facts = {name: value for name, value in facts.items() if value}
        signal_section = section("What there is to learn from", facts_table(self.signal.facts()))
        return Group(signal_section, section("What a run takes", facts_table(facts)))


def estimate(
    recipe: Recipe,
    name: str,
    overrides: list[str],
    shape: Shape | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Estimate:
    """Probes searcher and trainer at the same time, after a first probe of how long answers are.

    Each sees the GPUs of its place and keeps to its share of them. A trainer that does not fit as one rank is computed.
    say: gets lines about the progress.
    """
    machine = Machine.here()
    environments = _environments(recipe, machine)
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"

        def probe(half: str, place: str, at_least: float = 0.0, seed: int = 0) -> _Probe:
            return _Probe(half, name, overrides, answers, at_least=at_least, environment=environments[place], seed=seed)

        say("sampling answers")
        with probe("sampling", "searcher-0") as sampling:
            sample: SampledRounds = sampling.result(say)
        signal_of_answers = Signal.of([sample], recipe.evaluation.threshold)  # says where no answer has a reward
        times_full_slots = sample.small and recipe.runtime != "inline" and not isinstance(recipe.task, Acted)
        say("timing rounds of the searcher and steps of the trainer, at the same time")
        with ExitStack() as probes:
            searcher_probe = trainer_probe = None
            if times_full_slots or not sample.small:
                half = "flow" if times_full_slots else "searcher"
                searcher_probe = probes.enter_context(probe(half, "searcher-0", at_least=_LEAST_SECONDS, seed=1))
            if one_rank_fits(recipe, machine):
                trainer_probe = probes.enter_context(probe("trainer", "trainer", at_least=_LEAST_SECONDS))
            timing: RoundTimes | SlotTimes = sample if searcher_probe is None else searcher_probe.result(say)
            tokens = (sample if isinstance(timing, SlotTimes) else timing).tokens  # of a round
            trainer: StepTimes = (
                _computed_trainer(recipe, shape, tokens, timing.product_rates)
                if trainer_probe is None
                else trainer_probe.result(say)
            )
    gpu_peaks = [part.peak_gpu_bytes for part in (sample, timing) if part.peak_gpu_bytes is not None]
    per_round = recipe.prompts_per_round * recipe.samples_per_prompt
    per_step = recipe.groups_per_step * recipe.group_size
    parts = [PartTime.of(part) for part in sample.reward]
    round_time = RoundTime(per_round, _stage_seconds(recipe, sample, timing), parts, recipe.searcher_count)
    round_seconds, step_seconds = round_time.seconds, trainer.step_seconds
    generation_seconds = round_time.stages["generation"] + round_time.stages["environment"]
    start_seconds = (searcher_probe or sampling).seconds - timing.timed_seconds
    settings = recipe.evaluation
    evaluated_answers = sample.held_out * (int(settings.greedy) + settings.draws)
    grading = 0.0 if isinstance(recipe.task, Examined) else round_time.grading_seconds  # else by another reward
    evaluation_seconds = evaluated_answers * max(generation_seconds, grading) / per_round
    max_uses = recipe.replay.pacing.max_mean_uses
    if recipe.offline:
        rate, working_seconds = 0.0, recipe.steps * step_seconds
    elif recipe.runtime == "inline":
        rounds = recipe.steps / recipe.sync_every * recipe.run.inline_rounds_per_sync
        round_seconds = round_time.sequential_seconds
        working_seconds = recipe.steps * step_seconds + rounds * round_seconds
        rate = rounds * per_round / working_seconds
    else:
        rate = round_time.rate
        working_seconds = recipe.steps * max(step_seconds, per_step / max_uses / rate)
    warm_up_seconds = recipe.replay.pacing.warm_up / rate if rate else 0.0
    buffer, length = recipe.replay.buffer, tokens[1] / per_round
    buffer_rows = min(buffer.total, rate * working_seconds) if rate else buffer.total
    buffer_bytes = sum(replace(buffer, total=max(2, int(buffer_rows))).memory(round(length)).values())
    generation_operations = step_operations = None
    if shape is not None:
        if not recipe.offline:
            generation_operations = shape.operations(sum(tokens), tokens[1])
        assert isinstance(recipe.model, HuggingFace)  # other models have no shape
        step_operations = forwards_per_update(recipe.model.lora.rank) * shape.operations(
            sum(trainer.tokens), trainer.tokens[1]
        )
    return Estimate(
        start_seconds=start_seconds,
        round_seconds=round_seconds,
        step_seconds=step_seconds,
        product_rates=dict(trainer.product_rates),
        generation_seconds=generation_seconds,
        round_time=round_time,
        generation_operations=generation_operations,
        step_operations=step_operations,
        tokens_per_round=per_round * length,
        tokens_per_trajectory=length,
        trajectories_per_second=rate,
        evaluation_seconds=2 * evaluation_seconds,
        total_seconds=start_seconds + 2 * evaluation_seconds + warm_up_seconds + working_seconds,
        uses=min(recipe.steps * per_step / (rate * working_seconds), max_uses) if rate else None,
        trainer_bytes=_trainer_bytes(recipe, trainer) + (0 if trainer_probe is None else buffer_bytes),
        trainer_measured=trainer_probe is not None,
        searcher_bytes=max(sample.peak_memory_bytes, timing.peak_memory_bytes),
        weights_bytes=trainer.weights_bytes,
        log_ratio=trainer.log_ratio,
        effective=trainer.effective,
        signal=signal_of_answers,
        trainer_gpu_bytes=trainer.peak_gpu_bytes,
        searcher_gpu_bytes=max(gpu_peaks, default=None),
        smaller=_extrapolation_note(sample, timing, trainer, per_round, per_step),
    )


def _stage_seconds(recipe: Recipe, sample: SampledRounds, timing: RoundTimes | SlotTimes) -> dict[str, float]:
    """Returns the seconds of each stage of a whole round: as they were timed again, or from what a token takes in full
    slots.
    """
    if isinstance(timing, SlotTimes):
        prompt_seconds = recipe.prompts_per_round * timing.prompt_seconds
        return {**sample.stages, "generation": prompt_seconds + sample.tokens[1] * timing.token_seconds}
    return {**sample.stages, **timing.stages}


def _trainer_bytes(recipe: Recipe, trainer: StepTimes) -> int:
    """Returns the trainer's peak; after small steps what it needs at most, since a whole pass was never made."""
    if not trainer.small:
        return trainer.peak_memory_bytes
    return max([trainer.peak_memory_bytes, *(need.total for need in needs(recipe) if need.part == "trainer")])


def _extrapolation_note(
    sample: SampledRounds, timing: RoundTimes | SlotTimes, trainer: StepTimes, per_round: int, per_step: int
) -> str:
    """Returns what the figures are extrapolated from, in words; empty where whole rounds and steps were timed."""
    sources = []
    if sample.small:
        full_slots = " and a few token steps of full slots" if isinstance(timing, SlotTimes) else ""
        sources.append(f"a round of {per_round} answers from one of {sample.small}{full_slots}")
    if trainer.small:
        sources.append(f"a step of {per_step} answers from steps of {trainer.small}; its memory is computed")
    return "extrapolated, since the model is slow here: " + "; ".join(sources) if sources else ""


def one_rank_fits(recipe: Recipe, machine: Machine) -> bool:
    """Returns whether the trainer can be measured as one process: it is one, or would fit into one place's memory."""
    if recipe.trainer.count == 1:
        return True
    needs_by_part = {need.part: need for need in needs(replace(recipe, trainer=RankSettings(1)))}
    if not needs_by_part:
        return True
    trainer_need = needs_by_part["trainer"]
    memory = USABLE * min(machine.gpus) if trainer_need.device == "cuda" and machine.gpus else machine.memory
    return memory is None or trainer_need.total <= memory


def _environments(recipe: Recipe, machine: Machine) -> dict[str, dict[str, str]]:
    """Returns the variables about GPUs in the environments of a searcher and of the trainer, as in a run."""
    if recipe.runtime != "processes":
        return {"trainer": {}, "searcher-0": {}}
    return {worker: environment_of(place, visible_devices()) for worker, place in places_on(recipe, machine).items()}


def _computed_trainer(
    recipe: Recipe, shape: Shape | None, tokens: tuple[float, float], product_rates: Mapping[str, float]
) -> StepTimes:
    """Returns the figures of a trainer over several ranks that was not measured, from its needs and the products of
    matrices in a step. tokens: of a round's prompts and answers.
    """
    assert shape is not None  # else it is measured
    assert isinstance(recipe.model, HuggingFace)
    trainer = next(need for need in needs(recipe) if need.part == "trainer")
    disk_need, (round_prompt_tokens, round_answer_tokens) = disk_use(recipe), tokens
    assert disk_need is not None
    length = round_answer_tokens / recipe.prompts_per_round / recipe.samples_per_prompt
    prompts = recipe.groups_per_step * round_prompt_tokens / recipe.prompts_per_round
    answers = recipe.groups_per_step * recipe.group_size * length
    operations = forwards_per_update(recipe.model.lora.rank) * shape.operations(prompts + answers, answers)
    rate = product_rates[str(recipe.model.compute).removeprefix("torch.")]
    on_gpu = trainer.device == "cuda"
    return StepTimes(
        step_seconds=operations / rate / recipe.trainer.count,
        tokens=(prompts, answers),
        product_rates=product_rates,
        peak_memory_bytes=0 if on_gpu else trainer.total,
        peak_gpu_bytes=trainer.total if on_gpu else None,
        weights_bytes=disk_need.version,
    )


class _Probe:
    """Measures a searcher or a trainer in a process of its own (`tba.runs.probe`), which ends with the `with` block.

    at_least: seconds for which it is timed, so that probes that are started together overlap. environment: variables
    that it has besides this process's.
    """

    def __init__(
        self,
        half: str,
        name: str,
        overrides: list[str],
        answers: Path,
        at_least: float,
        environment: Mapping[str, str],
        seed: int = 0,
    ) -> None:
        self.half, self.name = half, name
        self.start_time = time.perf_counter()
        self.seconds = 0.0  # that its process took
        self.log = answers.with_name(f"{half}.log")
        arguments = (half, name, json.dumps(overrides), str(at_least), str(seed), str(answers))
        with self.log.open("wb") as log:
            program = Program(half, "tba.runs.probe", arguments, ("tba.runs.probe",))
            self.process = start(program, {**os.environ, **environment}, log.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def result(self, say: Callable[[str], object]) -> Any:
        """Returns the figures of the probe's half (`FIGURES`). say: gets its lines of progress."""
        position = 0
        while (code := self.process.poll()) is None:
            if time.perf_counter() - self.start_time > _DEADLINE:
                raise DeadlineExceeded(f"the {self.half}'s probe had not ended after {_DEADLINE:g} s")
            time.sleep(_POLL)
            position = self._report_progress(position, say)
        self.seconds = time.perf_counter() - self.start_time
        lines = self.log.read_text(errors="replace").strip().splitlines()
        last_line = lines[-1] if lines else f"exit code {code}"
        if not code:
            return FIGURES[self.half](**json.loads(last_line))
        if "OutOfMemoryError" in last_line or code == -signal.SIGKILL:
            raise UserError(
                f"the {self.half} of {self.name} does not fit into this machine's memory by itself ({last_line}): it "
                "is measured here, by one process of each half. Measure it with a smaller --model.path or "
                "--max-tokens-per-pass; docs/scaling.md says what several ranks hold"
            )
        reason = last_line.partition(": ")[2] or last_line
        raise UserError(f"the {self.half} of {self.name} cannot be started: {reason}")

    def _report_progress(self, position: int, say: Callable[[str], object]) -> int:
        """Passes on the progress in whole lines of the log from a position on; returns the next position."""
        with self.log.open("rb") as log:
            log.seek(position)
            block = log.read()
        end = block.rfind(b"\n") + 1
        for line in block[:end].splitlines():
            with suppress(ValueError):
                state = json.loads(line)
                if isinstance(state, dict) and state.keys() == {PROGRESS}:
                    say(str(state[PROGRESS]))
        return position + end
