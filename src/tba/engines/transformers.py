"""Sampling from a transformers model through its own modules, with a slot cache and continuous batching.

Each distinct prompt is run once and its keys and values are copied to the rows of its completions; a row that finishes
is given to the next (prompt, sample) at once; when none is left, the rows move together so that the tail is not
computed at full width.

In a conversation a row that ends its turn is answered by a partner. What it says is appended to the row's keys and
values in one pass (`Continuations`), so that nothing is read twice. Where the answer takes its time the request is
parked with a copy of its keys and values, and its row is given to another until the answer is there.

Invariant: a request, (prompt, sample), draws its uniform numbers from `rng` in the order of requests. Its completion
therefore does not depend on the number of slots or on its neighbours (but for rounding in the model's matrix products).

Shape legend: R rows, V vocabulary, P tokens of a prompt, T tokens of a completion.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.batch import to_device
from tba.engines.decoding import DecodingRows, ReplyTokens
from tba.engines.rules import LengthLimits, match_weights, rules_of
from tba.engines.slots import Continuations, PackedPrompts, SlotCache, flash_fault, slot_attention
from tba.engines.staging import Staging
from tba.engines.step import CudaGraphs, Step, describe_difference
from tba.engines.stopping import StopStrings, find_stops
from tba.errors import TbaError, UserError
from tba.fields import BY_CODE, as_declared
from tba.policy.lora import has_adapters, is_adapter
from tba.policy.norms import fuse_norms
from tba.pretrained import most_positions
from tba.protocols import CountsReads, EndsWaits, LimitsTurns, Partner, Tokenizer, Turn
from tba.streaming import shapes_of
from tba.types import Completion, FloatArray, IntArray, Prompt, Sampling, StopReason, Version

log = logging.getLogger(__name__)

PREFILL_TOKENS = 2048  # prompts are read together up to this many tokens (one longer prompt goes alone), or more where
# the memory of a GPU has room
# where reading the tokens costs more than a step: for stop strings, and on an accelerator
_STEPS_BETWEEN_LOOKS, _STEPS_BETWEEN_LOOKS_ELSEWHERE = 4, 8
_STEPS_BETWEEN_ASKING = 8  # how often `interrupted` is asked
_PROBE = 7  # tokens of the longest prompt of the self-test


@dataclass(frozen=True)
@as_declared
class EngineSettings:
    """Sets how a searcher samples: how many completions grow at the same time, and where one ends. Raises `UserError`
    when a field makes no sense.
    """

    engine: Literal["transformers", "vllm", "auto"] = "transformers"  # the sampling engine; vllm has settings of its
    # own, too; auto: transformers on a CPU, for adapters, and for models of up to 2 billion parameters without experts
    # and contexts of fewer than 8,192 tokens; else vllm, if it is installed and passes a self-test at the start
    slots: int | None = None  # completions that are generated simultaneously; None: 64, on a GPU without vllm as many
    # as a batch has, at least 64 and at most 256, or fewer where it has no room for them
    max_completion_tokens: int = 128  # tokens of the longest completion; a longer one is truncated
    stop_strings: tuple[int | str, ...] = ()  # a completion ends before the first of these in its text (it ends at
    # what ends a turn in the chat template anyway); a whole number is a token's id, a special token's text the token
    parked_gb: float | None = field(
        default=None, metadata=BY_CODE
    )  # keys and values of completions that wait for an environment or an agent, 10^9 bytes; those beyond, the oldest
    # first, are computed again; None: as much as of the slots; vllm: its cache holds them
    min_completion_tokens: int = 0  # tokens before the end-of-text token may be sampled
    allowed_first_tokens: tuple[str, ...] = field(
        default=(), metadata=BY_CODE
    )  # tokens that may begin an answer; empty: any
    forbidden_first_tokens: tuple[str, ...] = field(default=(), metadata=BY_CODE)  # tokens that begin no answer

    @property
    def slot_count(self) -> int:
        """Returns the completions that are generated simultaneously."""
        return 64 if self.slots is None else self.slots

    @property
    def never_sampled(self) -> tuple[str, ...]:
        """Describes the answers that the rules forbid."""
        descriptions = [
            (self.min_completion_tokens, f"answers that end before {self.min_completion_tokens} tokens"),
            (
                self.allowed_first_tokens,
                f"answers that do not begin with {' or '.join(map(repr, self.allowed_first_tokens))}",
            ),
            (
                self.forbidden_first_tokens,
                f"answers that begin with {' or '.join(map(repr, self.forbidden_first_tokens))}",
            ),
        ]
        return tuple(words for rule, words in descriptions if rule)

    def __post_init__(self) -> None:
        for name in ("slots", "max_completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"the engine's {name} is {value}, but it must be at least 1")
        if not 0 <= self.min_completion_tokens < self.max_completion_tokens:
            raise UserError(
                f"the engine's min_completion_tokens is {self.min_completion_tokens}, give 0 or more, and fewer than "
                f"max_completion_tokens, {self.max_completion_tokens}"
            )
        if self.parked_gb is not None and not self.parked_gb >= 0:
            raise UserError(f"the engine's parked_gb is {self.parked_gb}, give 0 or more, or leave it out")
        if self.engine == "vllm" and (self.allowed_first_tokens or self.forbidden_first_tokens):
            raise UserError(
                "the engine is vllm, which has no rule for the first token of an answer: leave "
                "allowed_first_tokens and forbidden_first_tokens "
                "out, or choose transformers"
            )
        if "" in self.stop_strings:
            raise UserError("a stop string of the engine is empty, which would end every completion: leave it out")


class TransformersEngine:
    """Samples completions from `model`, which it owns (evaluation mode, weights replaced in place by `load`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        version: Version | None = None,
        longest_prompt: int = 0,
        compiled: bool = False,
        prefill_tokens: int | None = None,
    ) -> None:
        """longest_prompt: for which the slots have room from the first on where memory is scarce, on an accelerator: to
        grow, keys and values of both lengths would have to be held. compiled: what is captured of a decode step on a
        GPU are the kernels that `torch.compile` makes. prefill_tokens: of prompts that are read together; None:
        `PREFILL_TOKENS`.

        Raises `UserError` when the model's attention cannot be served (found out by a small self-test).
        """
        self.model = model.eval()
        self.settings = settings
        self._version = Version() if version is None else version
        self._staging = Staging(model.device)
        self.prefill_tokens = PREFILL_TOKENS if prefill_tokens is None else prefill_tokens
        self._eos_ids, self._stops = find_stops(settings.stop_strings, tokenizer, model.config, model.generation_config)
        positions = most_positions(model.config)
        embeddings = len(model.get_input_embeddings().weight)
        self.limits = LengthLimits(settings.max_completion_tokens, None, positions, embeddings)
        self._cache: SlotCache | None = None
        longest_sequence = min(longest_prompt + settings.max_completion_tokens, positions or sys.maxsize)
        self._min_slot_length = 0 if model.device.type == "cpu" else longest_sequence
        self._is_required = is_adapter if has_adapters(model) else lambda name: True  # a weight that is loaded
        if model.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape, and prompts have many
            fuse_norms(model)
        with torch.inference_mode():
            vocabulary, self._uses_flash = _self_test(model)
            eos_V = torch.zeros(vocabulary, dtype=torch.bool, device=model.device)
            eos_V[sorted(self._eos_ids)] = True
            texts = settings.allowed_first_tokens, settings.forbidden_first_tokens
            rules = rules_of(tokenizer, eos_V, settings.min_completion_tokens, *texts)
            self._rows = DecodingRows(settings.slot_count, settings.max_completion_tokens, rules)
        is_on_one_gpu = {p.device for p in model.parameters()} == {eos_V.device} and eos_V.device.type == "cuda"
        self.step = Step(model, self._rows, CudaGraphs(eos_V.device) if is_on_one_gpu else None, compiled)

    @property
    def version(self) -> Version:
        return self._version

    @property
    def fault(self) -> str:
        """Returns why decode steps are no longer captured; empty: they are, or were not to be."""
        return self.step.fault

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` (by Hugging Face name) into the model in place.

        A tied weight may be given under any of its names; a model with adapters is given these alone. Raises
        `KeyError` for an unknown or a missing name and `ValueError` for a wrong shape, in which cases nothing was
        copied.
        """
        parameters = match_weights(self.model, shapes_of(weights), self._is_required)
        with torch.no_grad():
            for name, value in weights.items():
                parameters[name].copy_(value)
                del value  # before the next one is made
        self._version = version
        self.step.require_comparison()

    def stage(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Begin to copy `weights` to the device, beside what it computes; returns what is to be given to `load`."""
        return self._staging.begin_copy(weights)

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> TransformersFlow:
        """Returns an empty flow, which answers prompts for as long as some are submitted. See `protocols.Engine`."""
        return TransformersFlow(self, count, sampling, rng, partner)

    def prefill(self, prompts: Sequence[Prompt]) -> PackedPrompts:
        """Run prompts through the model once, together."""
        packed = PackedPrompts([torch.from_numpy(p.tokens.astype(np.int64)) for p in prompts], self.model.device)
        packed.run(self.model)
        return packed

    def cache(self, prompts: PackedPrompts, length: int, rows: int) -> SlotCache:
        """Returns the slots, with room for `length` positions in each; they are allocated again only to grow, and then
        what the first `rows` hold is copied.
        """
        length = max(length, self._min_slot_length)
        if self._cache is None or self._cache.length < length:
            old_cache = self._cache if rows else None
            self.step.drop_graphs()
            self._cache = None  # before its successor is allocated
            self._cache = SlotCache(prompts, self.settings.slot_count, length, self._uses_flash)
            if old_cache is not None:
                self._cache.keys[:, :rows, :, : old_cache.length] = old_cache.keys[:, :rows]
                self._cache.values[:, :rows, :, : old_cache.length] = old_cache.values[:, :rows]
        return self._cache


@dataclass
class _OpenPrompt:
    """A prompt whose completions have not been handed out."""

    prompt: Prompt
    completions: dict[int, Completion]  # the finished ones, by sample; without tokens: cancelled before it began


class _Queue:
    """Prompts with `count` completions each, in the order in which they were submitted.

    Request i is sample i % count of prompt i // count.
    """

    def __init__(self, count: int, limits: LengthLimits) -> None:
        self.count, self.limits = count, limits
        self.prompt_count = 0  # of all that were submitted
        self.prompts: dict[int, _OpenPrompt] = {}
        self.finished_prompts: list[int] = []  # those whose completions are all finished
        self.next_request = 0
        self.cancelled_requests: set[int] = set()  # from `next_request` on, which are passed over
        self.longest_sequence = 0  # of the longest prompt with the longest completion

    @property
    def requests_left(self) -> int:
        """Returns how many requests have not begun."""
        return self.prompt_count * self.count - self.next_request - len(self.cancelled_requests)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Add prompts. Raises `UserError` for one that is too long or empty, and then adds none."""
        for prompt in prompts:
            self.limits.check(prompt)
        for number, prompt in enumerate(prompts, self.prompt_count):
            self.prompts[number] = _OpenPrompt(prompt, {})
            self.finished_prompts += [number] if self.count <= 0 else []
            length = len(prompt.tokens) + self.limits.longest_completion(prompt)
            self.longest_sequence = max(self.longest_sequence, length)
        self.prompt_count += len(prompts)

    def is_to_begin(self, request: int) -> bool:
        """Returns whether a request was submitted and has neither begun nor been cancelled."""
        is_submitted = self.next_request <= request < self.prompt_count * self.count
        return is_submitted and request not in self.cancelled_requests

    def prompt_of(self, request: int) -> Prompt:
        """Returns the prompt of a request."""
        return self.prompts[request // self.count].prompt

    def next_run(self, end: int) -> int:
        """Returns how many requests are to begin one behind another, from the next one on and before request `end`."""
        return min((number for number in self.cancelled_requests if number < end), default=end) - self.next_request

    def begin(self, count: int) -> None:
        """Pass over the next requests, which begin or are cancelled."""
        passed_requests = range(self.next_request, self.next_request + count)
        self.cancelled_requests.difference_update(passed_requests)
        self.next_request = passed_requests.stop

    def finish(self, request: int, completion: Completion) -> None:
        """Store the completion of a request."""
        number, sample = divmod(request, self.count)
        completions = self.prompts[number].completions
        completions[sample] = completion
        if len(completions) == self.count:
            self.finished_prompts.append(number)

    def pop_finished(self, include_unfinished: bool) -> list[tuple[int, list[Completion]]]:
        """Removes the finished prompts, or all of them, and returns them with the completions that they have."""
        numbers, self.finished_prompts = self.finished_prompts, []
        if include_unfinished:
            numbers = list(dict.fromkeys([*numbers, *self.prompts]))
        completions_by_prompt = [(i, self.prompts.pop(i).completions) for i in numbers]
        samples = [(i, [completions[j] for j in sorted(completions)]) for i, completions in completions_by_prompt]
        return [(i, [completion for completion in row if len(completion.tokens)]) for i, row in samples]


@dataclass(frozen=True)
class _PrefillBatch:
    """The prompts begin .. end - 1, which were run through the model together."""

    begin: int
    end: int
    prompts: PackedPrompts
    places: dict[bytes, int]  # in `prompts`, by the tokens of a prompt
    version: Version  # of the weights


@dataclass
class _RowCopy:
    """What a row held at the end of a turn."""

    counts: list[int]
    decoding_state: tuple[Tensor, ...]
    cache: tuple[Tensor, Tensor] | None  # keys and values; None: they were dropped, and have to be computed again

    @property
    def cache_bytes(self) -> int:
        return 0 if self.cache is None else sum(tensor.nbytes for tensor in self.cache)


@dataclass(eq=False)
class _Request:
    """A completion that has begun to grow. What it holds of its row is as of the end of its last turn."""

    number: int
    first_version: Version  # the weights that read its prompt
    row: int
    stops: StopStrings  # of its present turn
    turn_version: Version  # the weights that began its present turn
    turn_start: int = 0  # the token at which its present turn begins
    observed_spans: list[tuple[int, int]] = field(default_factory=list)  # tokens that it has read, as (begin, end)
    token_ids: list[int] = field(default_factory=list)
    log_behavior: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    stop_reason: StopReason = StopReason.INTERRUPTED
    reply_tokens: IntArray | None = None  # what it is to read next; None: nobody has answered yet
    row_copy: _RowCopy | None = None  # of its row, which another request may have got; None: it has its row


class TransformersFlow:
    """A queue of prompts, the rows of the engine in which their completions grow, and the parked requests: those whose
    partner has not answered yet, or that wait for a row. See `protocols.Flow`.

    Rows 0 .. extent - 1 are in use, except `free_rows`. Rows that are growing when the engine loads newer weights keep
    the keys and values of the older ones.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        partner: Partner | None = None,
    ) -> None:
        self.engine, self.settings, self.rows = engine, engine.settings, engine._rows
        self.sampling, self.rng, self.partner = sampling, rng, partner
        self.queue = _Queue(count, engine.limits)
        self.prefill_batch: _PrefillBatch | None = None  # with the prompt of the next request, or of the last one
        # the rows, as they are known without waiting for the device
        slots = self.settings.slot_count
        self.extent = 0
        self.free_rows: list[int] = []
        self.request_R = np.full(slots, None, dtype=object)
        self.prompt_R = np.zeros(slots, dtype=np.int64)  # prompt tokens
        self.count_R = np.zeros(slots, dtype=np.int64)  # completion tokens so far
        self.limit_R = np.zeros(slots, dtype=np.int64)  # completion tokens at the end of the turn, at most
        self.parked_requests: dict[int, _Request] = {}
        self.requests_to_cancel: set[int] = set()
        self.dropped_copies = 0  # keys and values of parked requests for which `parked_gb` had no room
        self._turn_limits = partner.turn_limits if isinstance(partner, LimitsTurns) else None
        self._must_return = partner.must_return if isinstance(partner, EndsWaits) else lambda: False
        self.device = self.rows.eos_V.device
        self.stride = _STEPS_BETWEEN_LOOKS if engine._stops.strings else 1
        if self.device.type != "cpu":
            self.stride = _STEPS_BETWEEN_LOOKS_ELSEWHERE
        self.steps_since_asking = _STEPS_BETWEEN_ASKING  # whether it is `interrupted`

    @property
    def prompts_submitted(self) -> int:
        """Returns how many prompts there have been."""
        return self.queue.prompt_count

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Add prompts to the queue. Raises `UserError` for one that is too long or empty, and then adds none."""
        self.queue.submit(prompts)

    @property
    def prompts_needed(self) -> int:
        """Returns how many more prompts are to be submitted now: none while the queue can fill the rows that are free,
        then so many that half of the slots' worth is left in it. They are read together, and rows are filled from them
        at once.
        """
        slots = self.settings.slot_count
        spare_rows = slots - self.extent + len(self.free_rows) - self.queue.requests_left - self._rows_for_parked
        return -(-(spare_rows + slots // 2) // self.queue.count) if spare_rows > 0 else 0

    @property
    def parked_bytes(self) -> int:
        """Returns the bytes of the keys and values that parked requests hold."""
        copies = [request.row_copy for request in self.parked_requests.values()]
        return sum(row_copy.cache_bytes for row_copy in copies if row_copy is not None)

    @property
    def _rows_for_parked(self) -> int:
        """Returns how many rows the parked requests will need: one for each that has been answered, and at least as
        many as there are more of them than slots, since each has a copy of its keys and values.
        """
        answered_count = sum(request.reply_tokens is not None for request in self.parked_requests.values())
        return max(answered_count, len(self.parked_requests) - self.settings.slot_count)

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Computes until prompts are finished, or (`until_needed`) more are needed; returns the finished ones, by
        number in the order of submission. Once `interrupted()` it returns all, with the completions that they have.
        """
        with torch.inference_mode(), slot_attention(self.engine.model):
            goes_on = not self.queue.prompts or self._run_until_finished(interrupted, until_needed)
        return self.queue.pop_finished(include_unfinished=not goes_on)

    def cancel(self, request: int) -> None:
        """Ends a request at the next look. See `protocols.Flow`."""
        self.requests_to_cancel.add(request)

    def _run_until_finished(self, interrupted: Callable[[], bool] | None, until_needed: bool) -> bool:
        """Works until prompts are finished; returns False when nothing is left to do, or when `interrupted()`."""
        queue = self.queue
        if queue.finished_prompts:
            return True
        while queue.requests_left or len(self.free_rows) < self.extent or self.parked_requests:
            if self.parked_requests:
                self._collect_replies()
            if self.requests_to_cancel:
                self._cancel_requests()
            self._fill_free_rows()
            has_ended = self._end_turns(self._find_finished_rows())
            if queue.finished_prompts or (until_needed and self.prompts_needed) or self._must_return():
                return True
            if has_ended:
                continue  # a first token can be the last: fill again before computing
            if self.steps_since_asking >= _STEPS_BETWEEN_ASKING and interrupted is not None:
                self.steps_since_asking = 0
                if interrupted():
                    self._end_turns(np.arange(self.extent), interrupted=True)
                    for request in self.parked_requests.values():
                        request.stop_reason = StopReason.INTERRUPTED
                        self._finish(request)
                    self.parked_requests.clear()
                    queue.begin(queue.prompt_count * queue.count - queue.next_request)  # they never do
                    return False
            self.steps_since_asking += self._grow() if self.extent else _STEPS_BETWEEN_ASKING
        return False

    def _cancel_requests(self) -> None:
        """End the requests that are to be cancelled, whatever their state."""
        numbers, self.requests_to_cancel = self.requests_to_cancel, set()
        used_rows = [row for row in range(self.extent) if row not in self.free_rows]
        rows = [row for row in used_rows if self.request_R[row].number in numbers]
        self._end_turns(np.array(rows, dtype=np.int64), interrupted=True)
        for number in sorted(numbers):
            if (request := self.parked_requests.pop(number, None)) is not None:
                request.stop_reason = StopReason.INTERRUPTED
                self._finish(request)
            elif self.queue.is_to_begin(number):
                self.queue.cancelled_requests.add(number)
                self._finish(self._request(number, self.engine.version))

    def _fill_free_rows(self) -> None:
        """Give free rows to the next requests; when no request is left, close the gaps."""
        if self.parked_requests:
            self._restore_parked()
        queue = self.queue
        if (row_count := queue.requests_left - len(self.free_rows)) > 0 and self.extent < self.settings.slot_count:
            extent = self.extent + min(row_count, self.settings.slot_count - self.extent)
            self.free_rows, self.extent = [*self.free_rows, *range(self.extent, extent)], extent
        while self.free_rows and queue.requests_left:
            if queue.next_request in queue.cancelled_requests:
                self._draw_uniform(1)  # so that the next request has its own
                queue.begin(1)
                continue
            batch = self.prefill_batch
            if batch is None or queue.next_request >= batch.end * queue.count:
                batch = self._prefill_next()
            n = min(len(self.free_rows), queue.next_run(batch.end * queue.count))
            rows, self.free_rows = self.free_rows[:n], self.free_rows[n:]
            self._admit(rows, batch)
        if self.free_rows:
            self._close_gaps()

    def _prefill_next(self) -> _PrefillBatch:
        """Run the next prompts through the model."""
        queue = self.queue
        begin = end = queue.next_request // queue.count
        batch, self.prefill_batch = self.prefill_batch, None  # its requests have begun: its memory is freed for others
        if batch is not None and self._turn_limits is not None and batch.version == self.engine.version:
            while end in queue.prompts and _tokens_key(queue.prompts[end].prompt) in batch.places:
                end += 1
        if batch is None or end == begin:
            batch = None  # before its memory is needed
            end, distinct_prompts = self._distinct_prompts(begin)
            places = {tokens: place for place, tokens in enumerate(distinct_prompts)}
            prompts = self.engine.prefill(list(distinct_prompts.values()))
            self.prefill_batch = _PrefillBatch(begin, end, prompts, places, self.engine.version)
        else:  # calls of agents that begin alike
            self.prefill_batch = replace(batch, begin=begin, end=end)
        rows = self.extent if len(self.free_rows) < self.extent else 0
        self.cache = self.engine.cache(self.prefill_batch.prompts, queue.longest_sequence, rows)
        return self.prefill_batch

    def _distinct_prompts(self, begin: int) -> tuple[int, dict[bytes, Prompt]]:
        """Returns the prompts from number `begin` on that are read together, by their tokens, and the number behind
        them: up to the last one, or one whose requests are all cancelled.
        """
        distinct_prompts: dict[bytes, Prompt] = {}
        end, tokens = begin, 0
        while end in self.queue.prompts:
            prompt = self.queue.prompts[end].prompt
            key = _tokens_key(prompt)
            if key not in distinct_prompts:
                tokens += len(prompt.tokens)
                if tokens > self.engine.prefill_tokens and end > begin:
                    break
                distinct_prompts[key] = prompt
            end += 1
        return end, distinct_prompts

    def _admit(self, rows: list[int], batch: _PrefillBatch) -> None:
        """Start the next requests in `rows` (ascending), all of the batch's prompts."""
        queue = self.queue
        requests = np.arange(queue.next_request, queue.next_request + len(rows))
        queue.begin(len(rows))
        prompts = requests // queue.count
        place_of: dict[int, int] = {}
        for p in range(prompts[0], prompts[-1] + 1):
            place_of[p] = batch.places[_tokens_key(queue.prompts[p].prompt)]
            prompt_rows = [row for row, prompt in zip(rows, prompts, strict=True) if prompt == p]
            self.cache.fill(prompt_rows, batch.prompts, place_of[p])
            self.prompt_R[prompt_rows] = len(queue.prompts[p].prompt.tokens)
        for row, number in zip(rows, requests.tolist(), strict=True):
            self.request_R[row] = request = self._request(number, batch.version, row)
            self._set_limits(request)
        self.count_R[rows] = 1
        uniform = self._draw_uniform(len(rows))
        if self.sampling.repetition_penalty != 1:
            tokens = [torch.from_numpy(queue.prompts[p].prompt.tokens).long() for p in prompts.tolist()]
            self.rows.remember_tokens(rows, tokens)
        places = [place_of[p] for p in prompts.tolist()]
        row_input = to_device(torch.from_numpy(np.stack([rows, self.prompt_R[rows], places])), self.device)
        uniform_RT = to_device(torch.from_numpy(uniform), self.device)
        logits_RV = batch.prompts.logits_PV[row_input[2]]
        self.rows.admit(row_input[0], row_input[1], uniform_RT, logits_RV, self.sampling)

    def _request(self, number: int, version: Version, row: int = -1) -> _Request:
        return _Request(number, version, row, self.engine._stops, version)

    def _set_limits(self, request: _Request) -> None:
        """Set the limits of the turn that a request begins in its row."""
        limit = self._longest_completion(request)
        if self._turn_limits is not None:
            turn_limits = self._turn_limits(request.number)
            request.stops = self.engine._stops.with_strings(turn_limits.stop_strings)
            if turn_limits.max_tokens is not None:
                limit = min(limit, request.turn_start + turn_limits.max_tokens)
        self.limit_R[request.row] = limit

    def _longest_completion(self, request: _Request) -> int:
        return self.queue.limits.longest_completion(self.queue.prompt_of(request.number))

    def _draw_uniform(self, count: int) -> FloatArray:
        """Returns the uniform numbers of the next requests, float32 [count, longest completion]."""
        shape = (count, self.settings.max_completion_tokens)
        return np.zeros(shape, np.float32) if self.sampling.temperature == 0 else self.rng.random(shape, np.float32)

    def _close_gaps(self) -> None:
        """Move the last rows into the free ones, so that rows 0 .. extent - 1 are in use."""
        extent = self.extent - len(self.free_rows)
        target = [row for row in self.free_rows if row < extent]
        source = sorted(set(range(extent, self.extent)).difference(self.free_rows))
        self.extent, self.free_rows = extent, []
        if not source:
            return
        self.request_R[target] = self.request_R[source]
        for count_R in self._counts:
            count_R[target] = count_R[source]
        source_R, target_R = to_device(torch.tensor([source, target]), self.device)
        self.rows.move(source_R, target_R)
        self.cache.move(source_R, target_R, int((self.prompt_R + self.count_R)[:extent].max()))

    @property
    def _counts(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
        return (self.prompt_R, self.count_R, self.limit_R)

    def _grow(self) -> int:
        """Append one token to every row, `stride` times if no row reaches its limit before; returns how often."""
        n = self.extent
        steps = min(self.stride, int((self.limit_R - self.count_R)[:n].min()))
        width = int((self.prompt_R + self.count_R)[:n].max())
        for i in range(steps):
            self.engine.step(self.cache, n, width + i, self.sampling)
        self.count_R[:n] += steps
        return steps

    def _find_finished_rows(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns the rows whose turn has ended. The device is waited for once, and again where rows are taken out."""
        n = self.extent
        requests: list[_Request] = self.request_R[:n].tolist()
        reach = max((request.stops.reach(self.stride) for request in requests), default=0)
        progress_RN = self.rows.progress(n, min(reach, self.settings.max_completion_tokens)).cpu().numpy()
        is_done_R = (progress_RN[:, 0] > 0) | (self.count_R >= self.limit_R)[:n]
        for row in np.flatnonzero(~is_done_R).tolist():
            if requests[row].stops.strings:
                turn_ids = progress_RN[row, 1:].tolist()[-(self.count_R[row] - requests[row].turn_start) :]
                is_done_R[row] = requests[row].stops.may_be_near(turn_ids, self.stride)
        return np.flatnonzero(is_done_R)

    def _end_turns(self, finished_rows: np.ndarray[tuple[int], np.dtype[np.int64]], interrupted: bool = False) -> bool:
        """End the turns of rows; returns whether there were any.

        Without a partner a turn is the whole completion. Else the partner hears it: rows that are answered at once go
        on where they are, those at their end are freed, and the other requests are parked.
        """
        if not len(finished_rows):
            return False
        rows = to_device(torch.from_numpy(finished_rows), self.device)
        tokens, log_behavior = self.rows.completions(rows, int(self.count_R[finished_rows].max()))
        token_ids = tokens.tolist()
        self._require_finite(log_behavior, self.count_R[finished_rows])
        turns: list[Turn] = []
        for i, row in enumerate(finished_rows.tolist()):
            request: _Request = self.request_R[row]
            turn_ids = token_ids[i][request.turn_start : self.count_R[row]]
            end = request.stops.cut_at_end(turn_ids, self.engine._eos_ids, interrupted)
            length, text, request.stop_reason = end
            n = self.count_R[row] = request.turn_start + length
            request.token_ids, request.log_behavior, request.row = token_ids[i][:n], log_behavior[i, :n].copy(), row
            if self.partner is None:
                self._finish(request, text)
                continue
            room = self._longest_completion(request) - n
            is_truncated = request.stop_reason is StopReason.LENGTH and not (self._turn_limits and room)
            if interrupted or is_truncated:
                request.stop_reason = StopReason.INTERRUPTED if interrupted else request.stop_reason
                self._finish(request)
            else:
                self.parked_requests[request.number] = request
                turn_behavior = request.log_behavior[request.turn_start :]
                versions = (request.turn_version, self.engine.version)
                turn = (request.number, text, request.stop_reason, room, turn_ids[:length], turn_behavior, versions)
                turns.append(Turn(*turn))
        continuing_requests: list[_Request] = []
        if turns and self.partner is not None:
            self.partner.hear(turns)
            continuing_requests = self._collect_replies()
            for request in self.parked_requests.values():
                request.row_copy = request.row_copy or self._copy_row(request.row)
        ended_rows = set(finished_rows.tolist()).difference(request.row for request in continuing_requests)
        self.free_rows = sorted(ended_rows.union(self.free_rows))
        self._append_replies(continuing_requests)
        return True

    def _require_finite(self, log_behavior: FloatArray, count: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        if not np.isfinite(log_behavior[np.arange(log_behavior.shape[1]) < count[:, None]]).all():
            self.engine._cache = None  # a NaN in a slot would outlive its row
            raise TbaError(f"the weights of version {self.engine.version} give probabilities that are not finite")

    def _finish(self, request: _Request, text: str | None = None) -> None:
        """Store the completion of a request that is at its end; text: None is that of all its tokens."""
        mask = None
        if request.observed_spans:
            mask = np.ones(len(request.token_ids), dtype=np.bool_)
            for begin, end in request.observed_spans:
                mask[begin:end] = False
        completion = Completion(
            np.array(request.token_ids, dtype=np.int32),
            self.engine._stops.text(request.token_ids) if text is None else text,
            request.stop_reason,
            (request.first_version, self.engine.version),
            self.sampling,
            request.log_behavior,
            mask,
        )
        if self.partner is not None:
            completion = self.partner.ended(request.number, completion)
        self.queue.finish(request.number, completion)

    def _collect_replies(self) -> list[_Request]:
        """Collect what the partner has answered, and finish the requests that it ended. Returns the requests that go on
        and still have a row, which are parked no longer.
        """
        assert self.partner is not None
        is_idle = self.extent == len(self.free_rows) and not self.queue.requests_left
        must_wait = is_idle and not any(request.reply_tokens is not None for request in self.parked_requests.values())
        continuing_requests = []
        for number, tokens in self.partner.replies(wait=must_wait).items():
            request = self.parked_requests[number]
            if tokens is not None and len(request.token_ids) + len(tokens) < self._longest_completion(request):
                request.reply_tokens = tokens
                if request.row_copy is not None:
                    continue
                continuing_requests.append(request)
            else:
                request.stop_reason = request.stop_reason if tokens is None else StopReason.LENGTH
                self._finish(request)
            del self.parked_requests[number]
        return continuing_requests

    def _copy_row(self, row: int) -> _RowCopy:
        """Returns a copy of what a row holds, so that the row can be given to another request. The oldest copies of
        keys and values are dropped where there would be too many, if need be this one, too.
        """
        length, counts = int(self.prompt_R[row] + self.count_R[row]), [int(count_R[row]) for count_R in self._counts]
        budget_gb = self.settings.parked_gb
        budget = self.cache.keys.nbytes + self.cache.values.nbytes if budget_gb is None else int(budget_gb * 1e9)
        excess = self.parked_bytes + self.cache.bytes_of(length) - budget
        for request in self.parked_requests.values():  # the oldest first
            if excess > 0 and request.row_copy is not None and request.row_copy.cache is not None:
                excess -= request.row_copy.cache_bytes
                request.row_copy.cache = None
                self.dropped_copies += 1
        self.dropped_copies += excess > 0
        return _RowCopy(counts, self.rows.copy_row(row), self.cache.copy_row(row, length) if excess <= 0 else None)

    def _restore_parked(self) -> None:
        """Give rows to the parked requests that have been answered."""
        restored_requests: list[_Request] = []
        for request in list(self.parked_requests.values()):
            if request.reply_tokens is None or request.row_copy is None:
                continue
            if not self.free_rows and self.extent < self.settings.slot_count:
                self.free_rows, self.extent = [self.extent], self.extent + 1
            if not self.free_rows:
                break
            request.row, *self.free_rows = self.free_rows
            row_copy, request.row_copy = request.row_copy, None
            self.request_R[request.row] = request
            for count_R, count in zip(self._counts, row_copy.counts, strict=True):
                count_R[request.row] = count
            self.rows.restore_row(request.row, row_copy.decoding_state)
            if row_copy.cache is None:
                self._read_again(request)
            else:
                self.cache.restore_row(request.row, row_copy.cache)
            restored_requests.append(self.parked_requests.pop(request.number))
        self._append_replies(restored_requests)

    def _read_again(self, request: _Request) -> None:
        """Compute the keys and values of a request's row: of its prompt and its tokens but the last, which is read with
        the reply.
        """
        if isinstance(self.partner, CountsReads):
            self.partner.read_again(request.number)
        tokens = np.concatenate([self.queue.prompt_of(request.number).tokens, request.token_ids[:-1]])
        sequence = PackedPrompts([torch.from_numpy(tokens.astype(np.int64))], self.device)
        sequence.run(self.engine.model)
        self.cache.fill([request.row], sequence, 0)

    def _append_replies(self, requests: Sequence[_Request]) -> None:
        """Append the replies to the rows, in as few passes as `prefill_tokens` allows, and draw a token."""
        pass_requests: list[_Request] = []
        tokens = 0
        for request in requests:
            assert request.reply_tokens is not None
            if pass_requests and tokens + len(request.reply_tokens) > self.engine.prefill_tokens:
                self._append_in_one_pass(pass_requests)
                pass_requests, tokens = [], 0
            pass_requests.append(request)
            tokens += 1 + len(request.reply_tokens)
        if pass_requests:
            self._append_in_one_pass(pass_requests)

    def _append_in_one_pass(self, requests: Sequence[_Request]) -> None:
        rows = [request.row for request in requests]
        begin = self.count_R[rows]
        replies = [np.asarray(request.reply_tokens, dtype=np.int64) for request in requests]
        end = begin + np.array([len(tokens) for tokens in replies], dtype=np.int64)
        # The last token of the turn has been drawn and not read yet.
        pairs = [(request.token_ids, reply) for request, reply in zip(requests, replies, strict=True)]
        unread_tokens = [torch.from_numpy(np.append(token_ids[-1:], reply)) for token_ids, reply in pairs]
        starts = (self.prompt_R[rows] + begin - 1).tolist()
        logits = Continuations(self.cache, rows, starts, unread_tokens).run(self.engine.model)
        row_N = np.repeat(np.array(rows, dtype=np.int64), end - begin)
        place_N = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)])
        row_input = to_device(torch.from_numpy(np.stack([rows, end, self.prompt_R[rows]])), self.device)
        token_input = to_device(torch.from_numpy(np.stack([row_N, place_N, np.concatenate(replies)])), self.device)
        if self.sampling.repetition_penalty != 1:  # anew: a row may have drawn more behind the end of its turn
            prompts = [self.queue.prompt_of(request.number).tokens for request in requests]
            sequences = [np.concatenate([prompt, *pair]) for prompt, pair in zip(prompts, pairs, strict=True)]
            self.rows.remember_tokens(rows, [torch.from_numpy(tokens).long() for tokens in sequences])
        self.rows.resume(row_input[0], row_input[1], ReplyTokens(*token_input), row_input[2], logits, self.sampling)
        for request, b, e in zip(requests, begin.tolist(), end.tolist(), strict=True):
            request.observed_spans.append((b, e))
            request.turn_start, request.turn_version, request.reply_tokens = e, self.engine.version, None
            self._set_limits(request)
        self.count_R[rows] = end + 1


def _tokens_key(prompt: Prompt) -> bytes:
    return prompt.tokens.tobytes()


def _self_test(model: PreTrainedModel) -> tuple[int, bool]:
    """Compare slots with the model's plain forward on two short prompts; returns the size of the logits, and whether
    the flash kernel is to read the slots.

    Raises `UserError` for a model whose attention cannot go through the slots: refusing is better than sampling
    wrongly.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if not model._supports_attention_backend or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        raise UserError(
            f"{name} has layers that are no plain attention over keys and values: use the vllm engine for this model"
        )
    attention_name = config._attn_implementation
    probe_tokens = torch.arange(_PROBE) * 31 % config.vocab_size
    pack = PackedPrompts([probe_tokens[:-1], probe_tokens[2:-2]], model.device)
    prompts = [p.to(model.device) for p in (probe_tokens, probe_tokens[2:-1])]
    with slot_attention(model):
        pack.run(model)
    expected_kinds = kinds or ["sliding_attention"] * bool(getattr(config, "sliding_window", None))
    if any(e == "sliding_attention" and pack.kinds[layer].window is None for layer, e in enumerate(expected_kinds)):
        raise UserError(f"{name} keeps its sliding window from the attention function: use the vllm engine for it")
    if attention_name == "sdpa" and any(kind.softcap for kind in pack.kinds.values()):
        raise UserError(f"{name} caps its attention scores, which sdpa ignores: load it with attn_implementation=eager")
    outputs = [model(input_ids=p[None], attention_mask=torch.ones_like(p[None]), use_cache=False) for p in prompts]
    plain_RV = torch.cat([output.logits[0, -2:] for output in outputs])
    if plain_RV.isnan().any():
        raise UserError(
            f"{name} computes NaN in {str(model.dtype).removeprefix('torch.')}, no probabilities: set --model.dtype "
            "float32, or give another model"
        )
    if pack.takes_flash:
        try:
            fault = flash_fault(pack) or describe_difference(plain_RV, _slot_logits(model, pack, prompts, flash=True))
        except (RuntimeError, TypeError) as error:  # the kernel of this torch or this GPU takes no such call
            fault = str(error)
        if fault is None:
            return plain_RV.shape[1], True
        log.warning("the slots of %s are read without the flash kernel: %s", name, fault)
    fault = describe_difference(plain_RV, _slot_logits(model, pack, prompts, flash=False))
    if fault is not None:
        raise UserError(
            f"{name} gives other probabilities through the slots than by its own forward ({fault}): use the vllm "
            "engine for this model"
        )
    return plain_RV.shape[1], False


def _slot_logits(model: PreTrainedModel, pack: PackedPrompts, prompts: Sequence[Tensor], flash: bool) -> Tensor:
    """Returns the logits after the last two tokens of each prompt, [2 * prompts, V]: of `packed`, which lacks the last,
    and of a step.
    """
    cache = SlotCache(pack, len(prompts), _PROBE, flash)
    for row in range(len(prompts)):
        cache.fill([row], pack, row)
    position_R = torch.tensor([len(p) - 1 for p in prompts], device=model.device)
    newest_R1 = torch.stack([p[-1:] for p in prompts])
    with slot_attention(model):
        output = model(
            input_ids=newest_R1,
            position_ids=position_R[:, None],
            attention_mask=torch.ones_like(newest_R1),
            use_cache=False,
            tba_slots=cache.at_positions(position_R, _PROBE),
        )
    return torch.stack([pack.logits_PV, output.logits[:, -1]], 1).flatten(0, 1)
