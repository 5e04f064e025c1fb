"""Sampling by vLLM, in this process, through its public interface alone.

Invariants: a completion's log-probabilities are of the weights that sampled each of its tokens, after temperature and
top-p, renormalised. Weights are replaced between two steps: what grows then keeps keys and values of the older ones, as
in the transformers engine, and its version is a span. Nothing that begins later finds these in the prefix cache: each
request is salted with how often weights had been replaced.

vLLM is imported when an engine is made: it takes seconds, and only this engine needs it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from tba.engines.rules import Room, matched
from tba.engines.stopping import ends_of
from tba.engines.transformers import PREFILL_TOKENS, EngineSettings
from tba.errors import TbaError, UserError
from tba.fields import as_declared
from tba.policy.loading import load_model, read_config, refuse_other_files
from tba.policy.lora import is_adapter, merged_with
from tba.pretrained import most_positions
from tba.protocols import Partner, Tokenizer, Turn
from tba.streaming import Streamed, bytes_of, shapes_of, write_tensors
from tba.types import Completion, IntArray, Prompt, Sampling, StopReason, Version

SUPPORTED = ("0.32",)
_STEPS_BETWEEN_ASKING = 8  # how often `interrupted` is asked
_SPARE = 1 << 24  # bytes that are left free in a folder: vLLM's processes talk through it
# what vLLM raises where it cannot serve a model
REFUSALS = (ValueError, NotImplementedError, AssertionError, RuntimeError, KeyError, OSError, ImportError)
_ENVIRONMENT = {  # read by vLLM when it is imported or an engine is made
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its scheduler in this process: weights are passed directly, not pickled
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several searchers would bind to the same cores
}


@dataclass(frozen=True)
@as_declared
class VllmSettings:
    """The settings of vLLM alone (`--model.generation.engine vllm`)."""

    tensor_parallel: int = 1  # processes, one for each GPU, that share one engine; the reference stays on the first
    cache_gb: float | None = None  # key-value cache of each GPU, 10^9 bytes; None: what the slots need, or is left
    graphs: bool = True  # compile the model and record CUDA graphs when the engine starts; never on a CPU

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise UserError(f"vllm's tensor_parallel is {self.tensor_parallel}, but it must be at least 1")
        if self.cache_gb is not None and not self.cache_gb > 0:
            raise UserError(f"vllm's cache_gb is {self.cache_gb}, give a number above 0")


class VllmEngine:
    """Samples completions from the model at `path`; weights are replaced in place by `load`.

    One at a time in a process: vLLM keeps its process groups there.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        own: VllmSettings,
        device: torch.device,
        dtype: torch.dtype,
        longest_prompt: int,
        cache_bytes: Callable[[PretrainedConfig], int],
        version: Version | None = None,
        adapted: PreTrainedModel | None = None,
    ) -> None:
        """longest_prompt: in tokens, a longer one is refused; cache_bytes: of keys and values on each GPU, from the
        model's configuration; adapted: the same model with adapters; then only adapters are loaded, which vLLM is given
        merged.

        Raises `UserError` when vLLM is missing, of another version, for another device or cannot serve the model.
        """
        vllm = _imported(device)
        self.settings, self.own, self._adapted = settings, own, adapted
        config = read_config(path)
        with torch.device("meta"):
            self._shapes = AutoModelForCausalLM.from_config(config)
        refuse_other_files(path, self._shapes)
        untied = device.type == "cpu" and bool(config.get_text_config().tie_word_embeddings)
        if untied and own.tensor_parallel > 1:
            raise UserError(
                "on a CPU vllm cannot share a model with tied embeddings: set --model.vllm.tensor-parallel 1"
            )
        self._names = _names(self._shapes, untied)
        positions = most_positions(config)
        embeddings = len(self._shapes.get_input_embeddings().weight)
        self.room = Room(settings.max_completion_tokens, longest_prompt, positions, embeddings)
        self._eos, self._stop = ends_of(settings.stop_strings, tokenizer, config, _generation_config(path))
        longest = min(longest_prompt + settings.max_completion_tokens, positions or sys.maxsize)
        whole = device.type == "cpu"  # prompts in parts and seeds of requests do not work together there
        cache = cache_bytes(config)
        arguments = vllm.EngineArgs(
            model=path,
            tokenizer=path,
            skip_tokenizer_init=not self._stop.strings,  # only stop strings need one
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=own.tensor_parallel,
            max_model_len=longest,
            max_num_seqs=settings.slots,
            max_num_batched_tokens=max(PREFILL_TOKENS, settings.slots, longest if whole else 0),
            enable_chunked_prefill=not whole,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # the sampling settings are ours
            kv_cache_memory_bytes=cache,
            gpu_memory_utilization=0.01,  # has no effect beside these bytes, but so much has to be free at the start
            enforce_eager=device.type == "cpu" or not own.graphs,
            async_scheduling=False,  # otherwise a token would be attributed to the next weights
            disable_log_stats=True,
            use_tqdm_on_load=False,
            load_format="dummy" if untied else "safetensors",
            hf_overrides={"tie_word_embeddings": False} if untied else {},
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # meant for vLLM's authors
                self._llm: Any = vllm.LLMEngine.from_engine_args(arguments)
        except REFUSALS as error:
            raise refusal(path, cache, error) from error
        self._numbers, self._loads = count(), 0
        self._growing: dict[str, Answer] = {}  # by the name of the request
        self._version = Version() if version is None else version
        if untied:
            self._replace(load_model(path, device, dtype)[0].state_dict())

    @property
    def version(self) -> Version:
        return self._version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` (by Hugging Face name) into the model in place, also while answers grow.

        A tied weight may be given under any of its names; a model with adapters is given these alone. Raises
        `KeyError` for an unknown or a missing name and `ValueError` for a wrong shape, in which cases nothing was
        copied.
        """
        if self._adapted is not None:
            matched(self._adapted, shapes_of(weights), is_adapter)
            weights = merged_with(self._adapted, weights)
        self._replace(weights)
        self._version = version

    def _replace(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights by all of the model's own names, one after the other."""
        shapes = shapes_of(weights)
        chosen = {id(place): name for name, place in matched(self._shapes, shapes).items()}  # one of several tied names
        names = {name: self._names[place] for place, name in chosen.items() if place in self._names}
        like = {one: shapes[name] for name, its in names.items() for one in its}
        named = Streamed(like, lambda: ((one, t) for name, t in weights.items() for one in names.get(name, ())))
        self._loads += 1
        if self.own.tensor_parallel == 1:
            self._reload({"weights_iterator": iter(named.items())})
        else:  # its workers are other processes, and nothing is to be pickled: through a file
            size = bytes_of(like)
            with tempfile.TemporaryDirectory(prefix="tba-weights-", dir=roomy(size)) as folder:
                write_tensors(Path(folder) / "model.safetensors", named)
                self._reload({"weights_path": folder})

    def _reload(self, what: dict[str, object]) -> None:
        with torch.no_grad():
            self._llm.collective_rpc("reload_weights", kwargs=what)

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> VllmFlow:
        """Returns an empty flow of `count` completions of each prompt; the one before is given up."""
        self._llm.abort_request(list(self._growing))
        self._growing.clear()
        return VllmFlow(self, count, sampling, rng, partner)

    def ask(self, answer: Answer, sampling: Sampling) -> None:
        """Begin the next turn of an answer, behind all that it has said and read."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        begun = answer.begun = len(answer.tokens)
        longest = self.room.of(answer.prompt) - begun
        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            seed=None if sampling.temperature == 0 else answer.seed + answer.turns,
            stop=list(self._stop.strings),
            detokenize=bool(self._stop.strings),
            ignore_eos=True,  # all tokens that end a completion are listed:
            stop_token_ids=sorted(self._eos),
            max_tokens=longest,
            min_tokens=min(longest, max(0, self.settings.min_completion_tokens - begun)),
            logprobs=0,  # of the token that was sampled
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
        )
        if answer.turns == 0:
            answer.first = self._version
        answer.turns += 1
        name = str(next(self._numbers))
        prompt = {"prompt_token_ids": [*answer.prompt.tokens.tolist(), *answer.tokens], "cache_salt": str(self._loads)}
        self._llm.add_request(name, prompt, parameters)
        self._growing[name] = answer

    def grow(self) -> list[Answer]:
        """Compute a step, which gives most of what grows a token; returns the answers whose turn has ended by it."""
        ended: list[Answer] = []
        for output in self._llm.step():
            answer, (part,) = self._growing[output.request_id], output.outputs
            answer.tokens.extend(part.token_ids)
            answer.log_behavior.extend(part.logprobs.logprobs)
            answer.last = self._version
            if part.finish_reason is not None:
                if part.finish_reason not in ("stop", "length"):
                    raise TbaError(f"vllm ended an answer for a reason of its own: {part.finish_reason}")
                del self._growing[output.request_id]
                self._end(answer, isinstance(part.stop_reason, str))
                ended.append(answer)
        return ended

    def give_up(self) -> list[Answer]:
        """Stop what grows; returns the answers, cut where they are."""
        answers = list(self._growing.values())
        self._llm.abort_request(list(self._growing))
        self._growing.clear()
        for answer in answers:
            self._end(answer, stopped=False)
        return answers

    @property
    def growing(self) -> int:
        """Returns how many answers grow."""
        return len(self._growing)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens without special ones."""
        return self._stop.text(tokens)

    def _end(self, answer: Answer, stopped: bool) -> None:
        """Cut the present turn of an answer where it ended; stopped: vLLM has seen a stop string. Raises `TbaError`
        where its log-probabilities are none.
        """
        if not np.isfinite(answer.log_behavior).all():
            raise TbaError(f"the weights of version {self.version} give probabilities that are not finite")
        n, answer.text, answer.reason = self._stop.ended(answer.tokens[answer.begun :], self._eos, False)
        # its text as it was generated; not that of all tokens together
        if stopped and answer.reason is StopReason.LENGTH:
            answer.reason = StopReason.STOP_STRING
        del answer.tokens[answer.begun + n :], answer.log_behavior[answer.begun + n :]


@dataclass
class Answer:
    """One completion that is being generated. Each of its turns is a request of vLLM's, behind all that was said."""

    request: int
    prompt: Prompt
    seed: int
    tokens: list[int] = field(default_factory=list)
    log_behavior: list[float] = field(default_factory=list)
    heard: list[tuple[int, int]] = field(default_factory=list)  # where it was spoken to, as (begin, end)
    begun: int = 0  # where its present turn begins
    turns: int = 0
    text: str = ""  # of its present turn, once that is at its end
    reason: StopReason = StopReason.INTERRUPTED
    first: Version = field(default_factory=Version)  # the weights that were there when it was begun
    last: Version = field(default_factory=Version)  # and at its newest token
    completion: Completion | None = None  # once it is at its end

    def hear(self, tokens: IntArray) -> None:
        """Add what the policy has not said."""
        self.heard.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens.extend(tokens.tolist())
        self.log_behavior.extend([0.0] * len(tokens))


class VllmFlow:
    """Prompts that are being answered. See `protocols.Flow`.

    vLLM has as many requests as there are slots, the others wait here: so each is read by the weights that are there
    when it begins, and no more prompts are leased than are answered soon.
    """

    def __init__(
        self,
        engine: VllmEngine,
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        partner: Partner | None = None,
    ) -> None:
        self.engine, self.sampling, self.rng, self.partner = engine, sampling, rng, partner
        once = sampling.temperature == 0 and partner is None  # it gives no second sample of the greedy answer
        self.each, self.copies = (min(count, 1), count) if once else (max(count, 0), 1)
        self.submitted = 0
        self._left: dict[int, list[Answer]] = {}  # those of prompts that have not been handed out
        self._queue: deque[Answer] = deque()  # those that are to begin a turn
        self._asked: dict[int, Answer] = {}  # those whose partner has not answered yet, by request
        self._done: list[int] = []  # prompts that are to be handed out
        self._steps = 0  # since `interrupted` was asked, and before it is asked at all 0

    @property
    def wanted(self) -> int:
        """Returns how many more prompts are to be submitted now: none while the queue can fill the slots that are free,
        then so many that half of the slots' worth is left in it.
        """
        slots = self.engine.settings.slots
        crowd = max(0, len(self._asked) - slots)
        free = slots - self.engine.growing - len(self._queue) - crowd
        return -(-(free + slots // 2) // max(1, self.each)) if free > 0 else 0

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts to the queue. Raises `UserError` for one that is too long or empty, and then adds none."""
        for prompt in prompts:
            self.engine.room.check(prompt)
        for prompt in prompts:
            first = self.submitted * self.each
            answers = [Answer(first + i, prompt, int(self.rng.integers(2**62))) for i in range(self.each)]
            self._left[self.submitted] = answers
            self._queue.extend(answers)
            self._done += [] if answers else [self.submitted]
            self.submitted += 1

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_wanted: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Computes until prompts are finished, or (`until_wanted`) more are wanted; returns the finished ones, by
        number in the order of submission. Once `interrupted()` they are all of them, with what they had.
        """
        while self._left and not self._done:
            if self._steps % _STEPS_BETWEEN_ASKING == 0 and interrupted is not None and interrupted():
                self._give_up()
                break
            self._listen()
            while self._queue and self.engine.growing < self.engine.settings.slots:
                self.engine.ask(self._queue.popleft(), self.sampling)
            self._steps = self._steps + 1 if self.engine.growing else 0
            self._end_turns(self.engine.grow() if self.engine.growing else [])
            if until_wanted and self.wanted:
                break
        done, self._done = self._done, []
        found = [(i, [a.completion for a in self._left.pop(i) if a.completion is not None]) for i in done]
        return [(i, completions * self.copies) for i, completions in found]

    def _listen(self) -> None:
        """Take in what the partner has said: its answers are before others in the queue, or at their end."""
        if self.partner is None or not self._asked:
            return
        going_on: list[Answer] = []
        for request, heard in self.partner.replies(wait=not (self.engine.growing or self._queue)).items():
            answer = self._asked.pop(request)
            if heard is not None and len(answer.tokens) + len(heard) < self.engine.room.of(answer.prompt):
                answer.hear(heard)
                going_on.append(answer)
            else:
                answer.reason = answer.reason if heard is None else StopReason.LENGTH
                self._finish(answer)
        self._queue.extendleft(reversed(going_on))

    def _end_turns(self, ended: Sequence[Answer]) -> None:
        turns: list[Turn] = []
        for answer in ended:
            if self.partner is None or answer.reason is StopReason.LENGTH:
                self._finish(answer)
            else:
                self._asked[answer.request] = answer
                room = self.engine.room.of(answer.prompt) - len(answer.tokens)
                turns.append(Turn(answer.request, answer.text, answer.reason, room, answer.tokens[answer.begun :]))
        if turns and self.partner is not None:
            self.partner.hear(turns)

    def _give_up(self) -> None:
        """End all answers where they are; one that has no token yet is left out."""
        for answer in (*self.engine.give_up(), *self._asked.values(), *self._queue):
            answer.reason = StopReason.INTERRUPTED
            if answer.tokens:
                self._finish(answer)
        self._asked.clear()
        self._queue.clear()
        self._done = list(self._left)

    def _finish(self, answer: Answer) -> None:
        """Make the completion of an answer that is at its end."""
        greedy = self.sampling.temperature == 0  # the log-probability of a draw that could not have been another is 0
        log_behavior = np.zeros(len(answer.tokens)) if greedy else np.array(answer.log_behavior)
        mask = np.ones(len(answer.tokens), dtype=np.bool_)
        for begin, end in answer.heard:
            mask[begin:end] = False
        completion = Completion(
            np.array(answer.tokens, dtype=np.int32),
            answer.text if self.partner is None else self.engine.text(answer.tokens),
            answer.reason,
            (answer.first, answer.last),
            self.sampling,
            log_behavior.astype(np.float32),
            mask if answer.heard else None,
        )
        answer.completion = completion if self.partner is None else self.partner.ended(answer.request, completion)
        number = answer.request // self.each
        if all(a.completion is not None for a in self._left[number]):
            self._done.append(number)


def refusal(path: str, cache: int, error: Exception) -> UserError:
    """Returns the error that says why vLLM cannot serve a model with a cache of so many bytes, and what helps against
    that.
    """
    reason, size = " ".join(str(error).split()) or type(error).__name__, ""
    if isinstance(error, torch.OutOfMemoryError) or re.search("memory|cache", reason, re.IGNORECASE):
        size, remedy = (
            f" with a cache of {cache / 1e9:.2g} GB",
            "set --model.vllm.cache-gb, fewer --model.generation.slots",
        )
    elif isinstance(error, ImportError):
        remedy = "install what is missing beside vllm"
    elif isinstance(error, OSError) and error.errno is not None:
        remedy = f"see that the file can be used, and TMPDIR ({tempfile.gettempdir()}), where vllm has files of its own"
    else:
        remedy = "give a model that it serves"
    return UserError(
        f"vllm cannot serve the model at {path}{size} ({reason}): {remedy}, or --model.generation.engine transformers"
    )


def require_vllm() -> None:
    """Raises `UserError` when vLLM is not installed, or in another version than this engine was written for."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "the engine is vllm, which is not installed: pip install -e '.[vllm]' -c constraints-vllm.txt in an "
            "environment of its own (Linux with an NVIDIA GPU), or choose --model.generation.engine transformers"
        )
    found = _installed()
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise UserError(
            f"vllm {found} is installed, but this engine was written for {' and '.join(SUPPORTED)}: "
            "pip install -e '.[vllm]' -c constraints-vllm.txt, or choose --model.generation.engine transformers"
        )


def _imported(device: torch.device) -> Any:
    """Returns the package. Raises `UserError` when it is missing, of another version, or built for another device."""
    require_vllm()
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # what it logs while it is imported
    import vllm
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise UserError(
            f"this vllm is built for {current_platform.device_type or 'no device'}, but the model is to be on "
            f"{device.type}: set --model.device, or install another build of vllm"
        )
    return vllm


def _installed() -> str:
    """Returns its version, under either of its names: the CPU build is a distribution of its own."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "of unknown version"


def _names(model: PreTrainedModel, untied: bool) -> dict[int, list[str]]:
    """Returns the name under which vLLM is given each parameter; all of its names where tied ones are kept apart.

    On a CPU vLLM keeps the output embedding repacked, and reloading a tied one leaves that as it was.
    """
    if not untied:
        return {id(p): [name] for name, p in model.named_parameters()}
    named: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(p), []).append(name)
    return named


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # a model need not have one
        return None


def roomy(size: int, places: Sequence[str] = ("/dev/shm", tempfile.gettempdir())) -> str:  # noqa: S108
    """Returns the first folder that has room for `size` bytes. Raises `UserError` where none has.

    Linux keeps files in memory at /dev/shm; there is little of it in a container unless it is asked for.
    """
    free = {place: shutil.disk_usage(place).free for place in places if Path(place).is_dir()}
    found = next((place for place, there in free.items() if there > size + _SPARE), None)
    if found is None:
        named = " and ".join(f"{there / 1e9:.2f} GB in {place}" for place, there in free.items())
        raise UserError(
            f"vllm's processes are given weights through a file of {size / 1e9:.2f} GB, and there are {named}: start "
            f"the container with a larger --shm-size, or set TMPDIR to a folder that has room"
        )
    return found
