"""Sampling by vLLM, in this process, through what `engines/vllm_surface.py` lists of it.

Invariants: a completion's log-probabilities are of the weights that sampled each of its tokens, after temperature and
top-p, renormalised. Weights are replaced between two steps: what grows then keeps keys and values of the older ones, as
in the transformers engine, and its version is a span. Nothing that begins later finds these in the prefix cache: each
request is salted with how often weights had been replaced.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from tba.engines.rules import LengthLimits, match_weights
from tba.engines.stopping import StopStrings, find_stops
from tba.engines.transformers import PREFILL_TOKENS, EngineSettings
from tba.engines.vllm_surface import REFUSALS, VllmRequests, require_vllm
from tba.errors import TbaError, UserError
from tba.fields import as_declared
from tba.policy.loading import load_model, read_config, refuse_other_files
from tba.policy.lora import is_adapter, merge_with_adapters
from tba.pretrained import most_positions
from tba.protocols import EndsWaits, LimitsTurns, Partner, Tokenizer, Turn, TurnLimits
from tba.streaming import TensorStream, bytes_of, shapes_of, write_tensors
from tba.types import Completion, FloatArray, IntArray, Prompt, Sampling, StopReason, Version

_STEPS_BETWEEN_ASKING = 8  # how often `interrupted` is asked
_SPARE_BYTES = 1 << 24  # bytes that are left free in a folder: vLLM's processes talk through it


@dataclass(frozen=True)
@as_declared
class VllmSettings:
    """The settings of vLLM alone (`--model.generation.engine vllm`)."""

    tensor_parallel: int = 1  # processes, one for each GPU, that share one engine, or as few as hold it if 1 does not;
    # the reference stays on the first
    cache_gb: float | None = None  # key-value cache of each GPU, 10^9 bytes; None: what the slots need, or is left
    gpu_memory_utilization: float | None = None  # share of each GPU that vllm fills with weights and cache, in place of
    # cache_gb; the reference needs room beside it; None: cache_gb decides
    max_model_len: int | None = None  # tokens of a prompt and its answer; None: what prompts and answers may have
    quantization: str = ""  # how vllm rounds the engine's weights, such as fp8; empty: not. Answers and their
    # log-probabilities are then of rounded weights
    kv_cache_dtype: str = "auto"  # type of keys and values, as vllm names it, such as fp8; auto: the model's
    prefix_caching: bool = True  # keep keys and values of prompts for the next requests that begin alike
    graphs: bool = True  # compile the model and record CUDA graphs when the engine starts; never on a CPU
    arguments: tuple[str, ...] = ()  # further engine arguments of vllm, each name=value, such as block_size=32

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise UserError(f"vllm's tensor_parallel is {self.tensor_parallel}, but it must be at least 1")
        if self.cache_gb is not None and not self.cache_gb > 0:
            raise UserError(f"vllm's cache_gb is {self.cache_gb}, give a number above 0")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UserError(f"vllm's max_model_len is {self.max_model_len}, but it must be at least 2")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share < 1:
            raise UserError(f"vllm's gpu_memory_utilization is {share}, give a share between 0 and 1")
        if share is not None and self.cache_gb is not None:
            raise UserError("vllm's cache_gb and gpu_memory_utilization both size its cache: give one of them")

    @property
    def has_rounding(self) -> bool:
        """Returns whether the engine rounds weights, keys or values further than the trainer's policy."""
        return bool(self.quantization) or self.kv_cache_dtype not in ("auto", "bfloat16", "float16")

    @property
    def needs_self_test(self) -> bool:
        """Returns whether these settings make an engine of vLLM's that no test has run."""
        return self.has_rounding or bool(self.arguments)


class VllmEngine:
    """Samples completions from the model at `path`; weights are replaced in place by `load`.

    One at a time in a process: vLLM keeps its process groups there.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        vllm_settings: VllmSettings,
        device: torch.device,
        dtype: torch.dtype,
        longest_prompt: int,
        cache_bytes: Callable[[PretrainedConfig], int],
        version: Version | None = None,
        adapter_model: PreTrainedModel | None = None,
    ) -> None:
        """longest_prompt: in tokens, a longer one is refused; cache_bytes: of keys and values on each GPU, from the
        model's configuration; adapter_model: the same model with adapters, of which only adapters are loaded; vLLM
        gets them merged.

        Raises `UserError` when vLLM is missing, too old, for another device or cannot serve the model.
        """
        require_vllm()
        self.settings, self.vllm_settings, self._adapter_model = settings, vllm_settings, adapter_model
        config = read_config(path)
        with torch.device("meta"):
            self._shapes = AutoModelForCausalLM.from_config(config)
        refuse_other_files(path, self._shapes)
        is_untied = device.type == "cpu" and bool(config.get_text_config().tie_word_embeddings)
        if is_untied and vllm_settings.tensor_parallel > 1:
            raise UserError(
                "on a CPU vllm cannot share a model with tied embeddings: set --model.vllm.tensor-parallel 1"
            )
        self._vllm_names = _vllm_names(self._shapes, is_untied)
        positions = min(most_positions(config) or sys.maxsize, vllm_settings.max_model_len or sys.maxsize)
        embeddings = len(self._shapes.get_input_embeddings().weight)
        self.limits = LengthLimits(settings.max_completion_tokens, longest_prompt, positions, embeddings)
        self._eos_ids, self._stops = find_stops(settings.stop_strings, tokenizer, config, _generation_config(path))
        longest_sequence = min(longest_prompt + settings.max_completion_tokens, positions)
        reads_whole_prompts = device.type == "cpu"  # prompts in parts and seeds of requests do not work together there
        cache_size = cache_bytes(config)
        arguments = {
            "model": path,
            "tokenizer": path,
            "skip_tokenizer_init": not self._stops.strings,  # only stop strings need one
            "dtype": str(dtype).removeprefix("torch."),
            "tensor_parallel_size": vllm_settings.tensor_parallel,
            "max_model_len": longest_sequence,
            "max_num_seqs": settings.slot_count,
            "enable_chunked_prefill": not reads_whole_prompts,
            "enable_prefix_caching": vllm_settings.prefix_caching,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # the sampling settings are ours
            "quantization": vllm_settings.quantization or None,
            "kv_cache_dtype": vllm_settings.kv_cache_dtype,
            "enforce_eager": device.type == "cpu" or not vllm_settings.graphs,
            "async_scheduling": False,  # otherwise a token would be attributed to the next weights
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "load_format": "dummy" if is_untied else "safetensors",
            "hf_overrides": {"tie_word_embeddings": False} if is_untied else {},
        }
        batched_tokens = max(PREFILL_TOKENS, settings.slot_count, longest_sequence if reads_whole_prompts else 0)
        defaults = {"max_num_batched_tokens": batched_tokens}
        if vllm_settings.gpu_memory_utilization is None:
            # the share has no effect beside these bytes, but so much has to be free at the start
            arguments |= {"kv_cache_memory_bytes": cache_size, "gpu_memory_utilization": 0.01}
        else:
            arguments |= {"gpu_memory_utilization": vllm_settings.gpu_memory_utilization}
        try:
            self._requests = VllmRequests(device, arguments, defaults, vllm_settings.arguments)
        except REFUSALS as error:
            raise refusal(path, cache_size, error) from error
        self._request_numbers, self._load_count = count(), 0
        self._growing_answers: dict[str, GrowingAnswer] = {}  # by the name of the request
        self._version = Version() if version is None else version
        if is_untied:
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
        if self._adapter_model is not None:
            match_weights(self._adapter_model, shapes_of(weights), is_adapter)
            weights = merge_with_adapters(self._adapter_model, weights)
        self._replace(weights)
        self._version = version

    def _replace(self, weights: Mapping[str, Tensor]) -> None:
        """Replace weights by all of the model's own names, one after the other."""
        shapes = shapes_of(weights)
        parameters = match_weights(self._shapes, shapes)
        name_of = {id(parameter): name for name, parameter in parameters.items()}  # one of several tied names
        targets = {name: self._vllm_names[key] for key, name in name_of.items() if key in self._vllm_names}
        target_shapes = {target: shapes[name] for name, names in targets.items() for target in names}
        stream = TensorStream(
            target_shapes, lambda: ((target, t) for name, t in weights.items() for target in targets.get(name, ()))
        )
        self._load_count += 1
        if self.vllm_settings.tensor_parallel == 1:
            self._requests.reload_weights(weights_iterator=iter(stream.items()))
        else:  # its workers are other processes, and nothing is to be pickled: through a file
            size = bytes_of(target_shapes)
            with tempfile.TemporaryDirectory(prefix="tba-weights-", dir=folder_with_room(size)) as folder:
                write_tensors(Path(folder) / "model.safetensors", stream)
                self._requests.reload_weights(weights_path=folder)

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> VllmFlow:
        """Returns an empty flow of `count` completions of each prompt; the one before is given up."""
        self._requests.abort(list(self._growing_answers))
        self._growing_answers.clear()
        return VllmFlow(self, count, sampling, rng, partner)

    def begin_turn(self, answer: GrowingAnswer, sampling: Sampling, turn_limits: TurnLimits) -> None:
        """Begin the next turn of an answer, behind all its tokens so far."""
        turn_start = answer.turn_start = len(answer.tokens)
        room = self.limits.longest_completion(answer.prompt) - turn_start
        max_tokens = min(room, turn_limits.max_tokens or room)
        answer.stops = self._stops.with_strings(turn_limits.stop_strings)
        answer.turn_version = self._version
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": None if sampling.temperature == 0 else answer.seed + answer.turns,
            "stop": list(self._stops.strings),
            "detokenize": bool(self._stops.strings),
            "ignore_eos": True,  # all tokens that end a completion are listed:
            "stop_token_ids": sorted(self._eos_ids),
            "max_tokens": max_tokens,
            "min_tokens": min(max_tokens, max(0, self.settings.min_completion_tokens - turn_start)),
        }
        if answer.turns == 0:
            answer.first_version = self._version
        answer.turns += 1
        name = str(next(self._request_numbers))
        tokens = [*answer.prompt.tokens.tolist(), *answer.tokens]
        self._requests.begin(name, tokens, str(self._load_count), parameters)
        self._growing_answers[name] = answer

    def grow(self) -> list[GrowingAnswer]:
        """Compute a step, which gives most growing answers a token; returns the answers whose turn ends by it."""
        ended_answers: list[GrowingAnswer] = []
        for output in self._requests.step():
            answer = self._growing_answers[output.name]
            answer.tokens.extend(output.tokens)
            answer.log_behavior.extend(output.log_behavior)
            answer.last_version = self._version
            if output.finish_reason not in (None, "stop", "length"):
                raise TbaError(f"vllm ended an answer for a reason of its own: {output.finish_reason}")
            is_over = output.finish_reason is not None
            if not is_over and self._has_turn_stop(answer, len(output.tokens)):
                self._requests.abort([output.name])
                is_over = True
            if is_over:
                del self._growing_answers[output.name]
                self._end(answer, output.has_stop_string)
                ended_answers.append(answer)
        return ended_answers

    def _has_turn_stop(self, answer: GrowingAnswer, new_count: int) -> bool:
        """Returns whether a stop string that this turn alone has ends in its newest tokens; vLLM is not told of these,
        since it may have no tokenizer.
        """
        turn_tokens = answer.tokens[answer.turn_start :]
        return answer.stops is not self._stops and answer.stops.may_be_near(turn_tokens, new_count)

    def interrupt(self, requests: Container[int]) -> list[GrowingAnswer]:
        """Stop the growing answers of these requests; returns them, cut where they are."""
        answers = {name: answer for name, answer in self._growing_answers.items() if answer.request in requests}
        self._requests.abort(list(answers))
        for name, answer in answers.items():
            del self._growing_answers[name]
            self._end(answer, has_stop_string=False)
        return list(answers.values())

    @property
    def stops(self) -> StopStrings:
        """Returns the stop strings of every turn."""
        return self._stops

    @property
    def growing_count(self) -> int:
        """Returns how many answers grow."""
        return len(self._growing_answers)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens without special ones."""
        return self._stops.text(tokens)

    def _end(self, answer: GrowingAnswer, has_stop_string: bool) -> None:
        """Cut the present turn of an answer where it ended; has_stop_string: vLLM has seen one. Raises `TbaError` for
        log-probabilities that are not finite.
        """
        if not np.isfinite(answer.log_behavior).all():
            raise TbaError(f"the weights of version {self.version} give probabilities that are not finite")
        turn_tokens = answer.tokens[answer.turn_start :]
        n, answer.text, answer.reason = answer.stops.cut_at_end(turn_tokens, self._eos_ids, interrupted=False)
        # its text as it was generated; not that of all tokens together
        if has_stop_string and answer.reason is StopReason.LENGTH:
            answer.reason = StopReason.STOP_STRING
        del answer.tokens[answer.turn_start + n :], answer.log_behavior[answer.turn_start + n :]


@dataclass
class GrowingAnswer:
    """One completion that is being generated. Each of its turns is a request of vLLM's, behind all that was said."""

    request: int
    prompt: Prompt
    seed: int
    stops: StopStrings  # of its present turn
    tokens: list[int] = field(default_factory=list)
    log_behavior: list[float] = field(default_factory=list)
    observed_spans: list[tuple[int, int]] = field(default_factory=list)  # tokens that it has read, as (begin, end)
    turn_start: int = 0  # where its present turn begins
    turns: int = 0
    text: str = ""  # of its present turn, once that is at its end
    reason: StopReason = StopReason.INTERRUPTED
    first_version: Version = field(default_factory=Version)  # of the weights when its first turn began
    turn_version: Version = field(default_factory=Version)  # and when its present turn began
    last_version: Version = field(default_factory=Version)  # of the weights at its newest token
    completion: Completion | None = None  # once it is at its end

    def append_observation(self, tokens: IntArray) -> None:
        """Add tokens that the policy reads and has not sampled."""
        self.observed_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
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
        is_greedy = sampling.temperature == 0 and partner is None  # a second sample would be the same answer
        self.samples_each, self.copies = (min(count, 1), count) if is_greedy else (max(count, 0), 1)
        self.prompts_submitted = 0
        self._open_answers: dict[int, list[GrowingAnswer]] = {}  # by prompt, until the prompt is handed out
        self._queue: deque[GrowingAnswer] = deque()  # answers that are to begin a turn
        self._unanswered: dict[int, GrowingAnswer] = {}  # answers whose partner has not replied yet, by request
        self._finished_prompts: list[int] = []  # prompts that are to be handed out
        self._requests_to_cancel: set[int] = set()
        self._turn_limits = partner.turn_limits if isinstance(partner, LimitsTurns) else lambda request: TurnLimits()
        self._must_return = partner.must_return if isinstance(partner, EndsWaits) else lambda: False
        self._steps = 0  # while answers grow; every few of them `interrupted` is called

    @property
    def prompts_needed(self) -> int:
        """Returns how many more prompts are to be submitted now: none while the queue can fill the slots that are free,
        then so many that half of the slots' worth is left in it.
        """
        slots = self.engine.settings.slot_count
        excess_count = max(0, len(self._unanswered) - slots)
        empty_slots = slots - self.engine.growing_count - len(self._queue) - excess_count
        return -(-(empty_slots + slots // 2) // max(1, self.samples_each)) if empty_slots > 0 else 0

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts to the queue. Raises `UserError` for one that is too long or empty, and then adds none."""
        for prompt in prompts:
            self.engine.limits.check(prompt)
        for prompt in prompts:
            first_request = self.prompts_submitted * self.samples_each
            requests = range(first_request, first_request + self.samples_each)
            seeds = [int(self.rng.integers(2**62)) for _ in requests]
            answers = [
                GrowingAnswer(i, prompt, seed, self.engine.stops) for i, seed in zip(requests, seeds, strict=True)
            ]
            self._open_answers[self.prompts_submitted] = answers
            self._queue.extend(answers)
            self._finished_prompts += [] if answers else [self.prompts_submitted]
            self.prompts_submitted += 1

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Computes until prompts are finished, or (`until_needed`) more are needed; returns the finished ones, by
        number in the order of submission. Once `interrupted()` it returns all, with the completions that they have.
        """
        while self._open_answers and not self._finished_prompts:
            if self._steps % _STEPS_BETWEEN_ASKING == 0 and interrupted is not None and interrupted():
                self._interrupt_all()
                break
            self._collect_replies()
            if self._requests_to_cancel:
                requests, self._requests_to_cancel = self._requests_to_cancel, set()
                for answer in self._stop(requests):
                    self._finish(answer)
            while self._queue and self.engine.growing_count < self.engine.settings.slot_count:
                answer = self._queue.popleft()
                self.engine.begin_turn(answer, self.sampling, self._turn_limits(answer.request))
            self._steps = self._steps + 1 if self.engine.growing_count else 0
            self._end_turns(self.engine.grow() if self.engine.growing_count else [])
            if (until_needed and self.prompts_needed) or self._must_return():
                break
        numbers, self._finished_prompts = self._finished_prompts, []
        answers = [(i, self._open_answers.pop(i)) for i in numbers]
        return [(i, [a.completion for a in row if a.completion and a.tokens] * self.copies) for i, row in answers]

    def cancel(self, request: int) -> None:
        """Ends a request before the next step. See `protocols.Flow`."""
        self._requests_to_cancel.add(request)

    def _collect_replies(self) -> None:
        """Collect what the partner has replied: the answers that go on are put first in the queue."""
        if self.partner is None or not self._unanswered:
            return
        continuing_answers: list[GrowingAnswer] = []
        for request, reply in self.partner.replies(wait=not (self.engine.growing_count or self._queue)).items():
            answer = self._unanswered.pop(request)
            limit = self.engine.limits.longest_completion(answer.prompt)
            if reply is not None and len(answer.tokens) + len(reply) < limit:
                answer.append_observation(reply)
                continuing_answers.append(answer)
            else:
                answer.reason = answer.reason if reply is None else StopReason.LENGTH
                self._finish(answer)
        self._queue.extendleft(reversed(continuing_answers))

    def _end_turns(self, answers: Sequence[GrowingAnswer]) -> None:
        turns: list[Turn] = []
        for answer in answers:
            room = self.engine.limits.longest_completion(answer.prompt) - len(answer.tokens)
            if self.partner is None or (answer.reason is StopReason.LENGTH and room == 0):
                self._finish(answer)
            else:
                self._unanswered[answer.request] = answer
                turn_tokens = answer.tokens[answer.turn_start :]
                turn_behavior = self._log_behavior(answer)[answer.turn_start :]
                versions = (answer.turn_version, answer.last_version)
                turns.append(
                    Turn(answer.request, answer.text, answer.reason, room, turn_tokens, turn_behavior, versions)
                )
        if turns and self.partner is not None:
            self.partner.hear(turns)

    def _interrupt_all(self) -> None:
        """End all open answers where they are; an answer without a token is left out."""
        for answer in self._stop(range(self.prompts_submitted * self.samples_each)):
            if answer.tokens:
                self._finish(answer)
        self._finished_prompts = list(self._open_answers)

    def _stop(self, requests: Container[int]) -> list[GrowingAnswer]:
        """Stop the open answers of these requests, whatever their state, and returns them as interrupted."""
        answers = [*self.engine.interrupt(requests), *self._unanswered.values(), *self._queue]
        answers = [answer for answer in answers if answer.request in requests]
        self._unanswered = {i: answer for i, answer in self._unanswered.items() if i not in requests}
        self._queue = deque(answer for answer in self._queue if answer.request not in requests)
        for answer in answers:
            answer.reason = StopReason.INTERRUPTED
        return answers

    def _log_behavior(self, answer: GrowingAnswer) -> FloatArray:
        """Returns the log-probabilities of an answer's tokens, float32 [T]."""
        is_greedy = self.sampling.temperature == 0  # no other token could have been drawn: its log-probability is 0
        log_behavior = np.zeros(len(answer.tokens)) if is_greedy else np.array(answer.log_behavior)
        return log_behavior.astype(np.float32)

    def _finish(self, answer: GrowingAnswer) -> None:
        """Make the completion of an answer that is at its end."""
        mask = np.ones(len(answer.tokens), dtype=np.bool_)
        for begin, end in answer.observed_spans:
            mask[begin:end] = False
        completion = Completion(
            np.array(answer.tokens, dtype=np.int32),
            answer.text if self.partner is None else self.engine.text(answer.tokens),
            answer.reason,
            (answer.first_version, answer.last_version),
            self.sampling,
            self._log_behavior(answer),
            mask if answer.observed_spans else None,
        )
        answer.completion = completion if self.partner is None else self.partner.ended(answer.request, completion)
        number = answer.request // self.samples_each
        if all(a.completion is not None for a in self._open_answers[number]):
            self._finished_prompts.append(number)


def refusal(path: str, cache_size: int, error: Exception) -> UserError:
    """Returns the error that says why vLLM cannot serve a model with a cache of so many bytes, and the remedy."""
    reason, size = " ".join(str(error).split()) or type(error).__name__, ""
    if isinstance(error, torch.OutOfMemoryError) or re.search("memory|cache", reason, re.IGNORECASE):
        size, remedy = (
            f" with a cache of {cache_size / 1e9:.2g} GB",
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


def _vllm_names(model: PreTrainedModel, is_untied: bool) -> dict[int, list[str]]:
    """Returns the name under which vLLM is given each parameter; all of its names where tied ones are kept apart.

    On a CPU vLLM keeps the output embedding repacked, and reloading a tied one leaves that as it was.
    """
    if not is_untied:
        return {id(p): [name] for name, p in model.named_parameters()}
    names_by_id: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(p), []).append(name)
    return names_by_id


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # a model need not have one
        return None


def folder_with_room(size: int, places: Sequence[str] = ("/dev/shm", tempfile.gettempdir())) -> str:  # noqa: S108 - a new folder in it
    """Returns the first folder that has room for `size` bytes. Raises `UserError` where none has.

    Linux keeps files in memory at /dev/shm; there is little of it in a container unless it is asked for.
    """
    free_bytes = {folder: shutil.disk_usage(folder).free for folder in places if Path(folder).is_dir()}
    folder = next((folder for folder, byte_count in free_bytes.items() if byte_count > size + _SPARE_BYTES), None)
    if folder is None:
        sizes = " and ".join(f"{byte_count / 1e9:.2f} GB in {folder}" for folder, byte_count in free_bytes.items())
        raise UserError(
            f"vllm's processes are given weights through a file of {size / 1e9:.2f} GB, and there are {sizes}: start "
            f"the container with a larger --shm-size, or set TMPDIR to a folder that has room"
        )
    return folder
