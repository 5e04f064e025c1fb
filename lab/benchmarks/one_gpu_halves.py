"""The two halves of a run on one device, built as a run builds them, and what their work asks of the device.

Invariant: nothing here reaches into an engine, a policy or a trainer: what is measured is what a run calls, so that a
change of these shows by itself.

Weights are random and made on the spot. Such a model draws nearly uniformly, so that the tokens that end an answer
decide how long answers are: `ending` has one in so many, `endless` none. All is in bfloat16, on a CPU too: a card's
code path.
"""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_counts import _NOTHING
from step_parts import NAMES, REST, part_of
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_memory import qwen2
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from tba.batch import Batch, FetchedBatch, collate
from tba.grading import call_in_thread
from tba.models.huggingface import HuggingFace
from tba.protocols import StagesWeights, start_objective
from tba.recipe import Recipe
from tba.record.memory import peak_gpu_memory_bytes, peak_memory_bytes, resident_memory_bytes
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.settings import find, override
from tba.training.tiny_models import character_tokenizer
from tba.training.trainer import PendingStep, Trainer
from tba.types import Completion, Group, Prompt, Sampling, StopReason, Trajectory, Version
from tba.weights.background import BackgroundPublisher
from tba.weights.directory import WeightDirectory

SAMPLES = 24  # answers to each prompt of an engine
DEADLINE = 300.0  # seconds in which weights are written


@dataclass(frozen=True)
class Size:
    """A model's shape, and with which batches and answers it is measured."""

    shape: tuple[int, int, int, int, int, int]  # width, layers, feed-forward width, heads, key-value heads, vocabulary
    groups: int = 3
    answers: int = 20  # of a group
    length: int = 200  # tokens of each, and the most of a run's
    prompt: int = 100  # tokens of a trainer's prompt; an engine's have 0.6 to 2 times as many
    longest: int = 256  # tokens of an engine's answer
    tokens_per_end: int = 100  # one token in so many ends an answer
    window: float = 4.0  # seconds over which two halves are watched
    positions: int = 4096  # of the longest prompt and answer

    @property
    def config(self) -> Qwen2Config:
        return qwen2(*self.shape, max_position_embeddings=self.positions, eos_token_id=None)

    @property
    def vocabulary(self) -> int:
        return self.shape[-1]


SIZES = {  # with Qwen2.5's shapes
    "0.5 B": Size((896, 24, 4864, 14, 2, 151_936)),
    "1.5 B": Size((1536, 28, 8960, 12, 2, 151_936)),
    "0.5 B, 8k": Size((896, 24, 4864, 14, 2, 151_936), 1, 4, 2048, 4000, 2048, positions=16_384),
    "9 M": Size((256, 6, 704, 4, 4, 8192), 2, 8, 50, 50, 64, 25, 20.0),
    "tiny": Size((64, 2, 128, 2, 1, 1000), 2, 4, 12, 10, 64, 10, 0.3),
}


def write_models(folder: Path, size: Size) -> None:
    """Write the model twice, `endless` and `ending`: the weights lie there once."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(size.config).to(torch.bfloat16)
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.eos_token = None  # one of the model's tokens, which would end an answer now and then
    model.save_pretrained(folder / "endless")
    tokenizer.save_pretrained(folder / "endless")
    (folder / "ending").mkdir()
    for file in (folder / "endless").iterdir():
        (folder / "ending" / file.name).hardlink_to(file)
    for name, eos in (("endless", [size.vocabulary]), ("ending", list(range(0, size.vocabulary, size.tokens_per_end)))):
        (folder / name / "generation_config.json").unlink()
        GenerationConfig(eos_token_id=eos, do_sample=True).save_pretrained(folder / name)


def arguments_of(model: Path, device: str, size: Size, slots: int = 72) -> list[str]:
    """The settings of `tba train quickstart` with which both halves of this model run."""
    groups, answers = str(size.groups), str(size.answers)
    return [
        *("--model.path", str(model), "--model.device", device, "--model.dtype", "bfloat16"),
        *("--model.generation.max-completion-tokens", str(size.length), "--model.generation.slots", str(slots)),
        *("--groups-per-step", groups, "--group-size", answers, "--samples-per-prompt", answers),
        *("--prompts-per-round", groups, "--replay.pacing.warm-up", "0", "--steps", "10"),
        *("--evaluation.every", "0", "--evaluation.problems", "1", "--task.forgotten-carries", "0"),
    ]


def recipe_of(model: Path, device: str, size: Size, slots: int = 72, **model_fields: Any) -> Recipe:
    """The recipe of these settings, its model prepared and with other fields if wanted."""
    recipe = override(find("quickstart"), arguments_of(model, device, size, slots), "one_gpu", recorded=True)
    return replace(recipe, model=replace(model_of(recipe).prepared(recipe.task), **model_fields))


def model_of(recipe: Recipe) -> HuggingFace:
    """Returns the recipe's model, of the kind that all of these have."""
    assert isinstance(recipe.model, HuggingFace)
    return recipe.model


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_call(act: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    act()
    synchronize(device)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Rate:
    """How much was done in how many seconds."""

    done_count: int
    seconds: float

    @property
    def a_second(self) -> float:
        return self.done_count / self.seconds


class PeakMemory:
    """The most memory of the device that this process holds, above what it held when this was made."""

    def __init__(self) -> None:
        self._bytes_before = 0 if torch.cuda.is_initialized() else resident_memory_bytes() or 0

    def bytes(self) -> int:
        return peak_gpu_memory_bytes() or peak_memory_bytes() - self._bytes_before


class Half(ABC):
    """One half at work. `act` does a little of it, and returns how much: updates, or tokens of finished answers."""

    @abstractmethod
    def act(self) -> int: ...

    def warm(self) -> None:
        """Do so until something has been finished, twice."""
        for _ in range(2):
            while not self.act():
                pass

    def work(self, seconds: float, device: str) -> Rate:
        """Do so for that long. Only this thread's stream is waited for, and only in the beginning and at the end."""
        wait = torch.cuda.current_stream().synchronize if device == "cuda" else lambda: None
        wait()
        start, done_count, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < seconds:
            done_count += self.act()
            elapsed = time.perf_counter() - start
        wait()
        return Rate(done_count, time.perf_counter() - start)


class TrainerHalf(Half):
    """A trainer as a run's process has one, on answers of random tokens."""

    def __init__(self, recipe: Recipe, size: Size, folder: Path) -> None:
        policy, optimizer = start_policy(recipe, start_ranks(recipe, 0), None)
        self.directory = WeightDirectory(folder, settings=recipe.publish, dtype=recipe.model.compute)
        self.weights = BackgroundPublisher(self.directory, DEADLINE)
        self.recipe, self.fetched = recipe, batch_of(size)
        self._unfinished_step: PendingStep | None = None
        self.trainer = Trainer(
            policy=policy,
            objective=start_objective(recipe.objective),
            weights=self.weights,
            optimizer=optimizer,
            sync_every=recipe.sync_every,
            max_tokens_per_pass=recipe.max_tokens_per_pass,
            directory=folder,
            wait_for_readers=self.weights.hold,
        )

    def act(self) -> int:
        """Make an update, which on a GPU is read once the next one has begun, as in a run."""
        step = self.trainer.begin(self.fetched)
        self.finish()
        self._unfinished_step = step
        if self.trainer.optimizer.device_decides:
            self.trainer.launch(step)
        else:
            self.finish()
        return 1

    def finish(self) -> None:
        """Read what came of the last update."""
        if self._unfinished_step is not None:
            self.trainer.finish(self._unfinished_step)
            self._unfinished_step = None

    def publish(self) -> None:
        """Publish the weights that the last update made."""
        self.finish()
        self.trainer.publish()


class SearcherHalf(Half):
    """A searcher's engine that answers one prompt after the other."""

    def __init__(self, recipe: Recipe, size: Size, engine: Any = None) -> None:
        self.engine, self.size = recipe.model.engine(Version()) if engine is None else engine, size
        self.rng = np.random.default_rng(0)
        self.flow = self.engine.flow(SAMPLES, Sampling(1.0, 1.0), self.rng)

    def act(self) -> int:
        if free_slots := self.flow.prompts_needed:
            self.flow.submit(prompts_of(self.size, free_slots, self.rng))
        return tokens_of(answers for _, answers in self.flow.next())


class LoadingHalf(SearcherHalf):
    """A searcher's engine that gets newer weights every so many seconds, read in a thread as a searcher reads them."""

    def __init__(self, recipe: Recipe, size: Size, seconds: float, engine: Any) -> None:
        super().__init__(recipe, size, engine)
        assert isinstance(self.engine, StagesWeights)
        self.stage = self.engine.stage
        self.seconds, self.loads = seconds, 0
        self.weights = {name: p.detach().cpu().clone() for name, p in engine.model.named_parameters()}
        if next(engine.model.parameters()).is_cuda:  # as the memory is in which a run's versions are
            self.weights = {name: tensor.pin_memory() for name, tensor in self.weights.items()}
        self.future: Future[Any] | None = None
        self.loaded_at = time.monotonic()

    def act(self) -> int:
        if free_slots := self.flow.prompts_needed:
            self.flow.submit(prompts_of(self.size, free_slots, self.rng))
        return tokens_of(answers for _, answers in self.flow.next(self.load_if_due))

    def load_if_due(self) -> bool:
        """Do what `Searcher` does between decode steps; returns False, because the flow goes on."""
        if self.future is not None and self.future.done():
            self.engine.load(self.future.result(), Version(0, self.loads + 1))
            self.future, self.loads = None, self.loads + 1
        elif self.future is None and time.monotonic() - self.loaded_at >= self.seconds:
            self.loaded_at = time.monotonic()
            self.future = call_in_thread("weights", self.stage, self.weights)
        return False


def batch_of(size: Size) -> FetchedBatch:
    """Answers of random tokens."""
    rng = np.random.default_rng(0)

    def answer(prompt: Prompt, name: str) -> Trajectory:
        tokens = rng.integers(1, size.vocabulary, size.length).astype(np.int32)
        completion = Completion(tokens, "", StopReason.LENGTH, (Version(), Version()))
        reference = np.full(size.length, -np.log(size.vocabulary), np.float32)
        return Trajectory(name, prompt, completion, float(rng.integers(2)), reference, Version())

    groups = []
    for g in range(size.groups):
        prompt = Prompt("random", rng.integers(1, size.vocabulary, size.prompt).astype(np.int32), str(g))
        groups.append(Group.of([answer(prompt, f"{g}-{i}") for i in range(size.answers)]))
    return FetchedBatch(groups, collate(groups))


def prompts_of(size: Size, count: int, rng: np.random.Generator) -> list[Prompt]:
    """Prompts of random tokens, of random lengths."""
    lengths = rng.integers(6 * size.prompt // 10, 2 * size.prompt, count)
    tokens = [rng.integers(1, size.vocabulary, length).astype(np.int32) for length in lengths]
    return [Prompt("random", prompt_tokens, str(i)) for i, prompt_tokens in enumerate(tokens)]


def tokens_of(answer_rows: Any) -> int:
    """Tokens of the answers to several prompts."""
    return sum(len(completion.tokens) for answers in answer_rows for completion in answers)


def tokens_in(batch: Batch) -> int:
    """Tokens that a policy reads: of prompts once, and of answers."""
    return int(batch.length_B.sum() + batch.prompt_length_G.sum())


@dataclass(frozen=True)
class Work:
    """What a device was asked to do. On a CPU an operation that would launch something counts as a launch and as a
    kernel, and its own time is the processor's.
    """

    launches: int  # calls that start something: kernels, captured graphs, copies
    kernels: int  # that ran, copies with them
    seconds: float  # that these took
    by_name: dict[str, tuple[int, float]]  # of each kernel: how often, seconds
    by_part: dict[str, float]  # of each part of a step (`step_parts`): seconds

    def __sub__(self, subtrahend: Work) -> Work:
        names = {
            name: (
                count - subtrahend.by_name.get(name, (0, 0.0))[0],
                seconds - subtrahend.by_name.get(name, (0, 0.0))[1],
            )
            for name, (count, seconds) in self.by_name.items()
        }
        parts = {name: seconds - subtrahend.by_part.get(name, 0.0) for name, seconds in self.by_part.items()}
        kernels, launches = self.kernels - subtrahend.kernels, self.launches - subtrahend.launches
        return Work(launches, kernels, self.seconds - subtrahend.seconds, names, parts)

    def top(self, times: int = 1) -> list[list[Any]]:
        """The ten names that take most time: milliseconds, share and kernels of one of so many `times`."""
        largest_items = sorted(self.by_name.items(), key=lambda item: -item[1][1])[:10]
        return [
            [name, round(1e3 * seconds / times, 4), round(seconds / self.seconds, 4), round(count / times, 2)]
            for name, (count, seconds) in largest_items
        ]

    def shares(self) -> dict[str, float]:
        """The parts of a step, as shares of the time on the device."""
        total_seconds = sum(self.by_part.values())
        return {part: round(seconds / total_seconds, 4) for part, seconds in self.by_part.items()}


_LAUNCHES = re.compile(r"cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")  # calls of the CUDA runtime and of its driver


class Operations(TorchDispatchMode):
    """While it is entered, how many operations would launch something: all but views and allocations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes, name = func._schema.is_mutable, func._schema.name.split("::")[1]
        self.count += name not in _NOTHING and (writes or not func.is_view)
        return func(*args, **(kwargs or {}))


def ready_to_count(device: str) -> None:
    """Start the profiler once: of graphs that were captured before, it does not see the kernels."""
    if device == "cuda":
        work_of(lambda: torch.zeros(1, device=device), device)


def work_of(act: Callable[[], object], device: str, vocabulary: int | None = None) -> Work:
    """What the device does meanwhile, by torch's profiler; the parts of a step only with the size of the vocabulary, by
    which the head's products are known. On a CPU it is done twice: counted, then timed.
    """
    on_gpu, operations = device == "cuda", Operations()
    if not on_gpu:
        with operations:
            act()
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    synchronize(device)
    with torch.profiler.profile(activities=activities, record_shapes=vocabulary is not None) as profile:
        act()
        synchronize(device)
    work = work_of_events(profile.events() or (), on_gpu, vocabulary)
    return work if on_gpu else replace(work, launches=operations.count, kernels=operations.count)


def work_of_events(events: Sequence[Any], on_gpu: bool, vocabulary: int | None) -> Work:
    """The work in a profile's events."""
    launches, kernels = 0, 0
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    parts = dict.fromkeys((*NAMES, REST) if vocabulary else (), 0.0)
    for event in events:
        on_device = event.device_type == DeviceType.CUDA
        if on_device and getattr(event, "is_user_annotation", False):
            continue  # a range that somebody named, as long as all kernels in it
        if not on_device:
            launches += _LAUNCHES.match(event.name) is not None
            if vocabulary:
                self_seconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
                parts[part_of(event, vocabulary)] += self_seconds / 1e6
        if on_device == on_gpu:
            name = short_kernel_name(event.name)
            counts[name] += 1
            seconds[name] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
            kernels += 1
    names = {name: (counts[name], seconds[name]) for name in counts}
    return Work(launches, kernels, math.fsum(seconds.values()), names, parts)


def short_kernel_name(name: str) -> str:
    """A kernel's name without what all of torch's have in common."""
    short_name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|c10::", "", name)
    return re.sub(r"\s+", " ", short_name)[:100]
