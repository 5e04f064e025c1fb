"""Sampling from a transformers model through its own modules, with a slot cache and continuous batching.

Each distinct prompt is run once and its keys and values are copied to the rows of its completions; a row that finishes
is given to the next (prompt, sample) at once; when none is left, the rows move together so that the tail is not
computed at full width.

In a conversation a row that ends its turn is answered by a partner. What it says is appended to the row's keys and
values in one pass (`Continuations`), so that nothing is read twice. Where the answer takes its time the row is set
aside, keys and values with it, and its place is given to another until the answer is there.

Invariant: a request, (prompt, sample), draws its uniform numbers from `rng` in the order of requests. Its completion
therefore does not depend on the number of slots or on its neighbours (but for rounding in the model's matrix products).

Shape legend: R rows, V vocabulary, P tokens of a prompt, T tokens of a completion.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.engines.decoding import Heard, Rows
from tba.engines.rules import Room, matched, rules_of
from tba.engines.slots import Continuations, PackedPrompts, SlotCache, flash_fault, slot_attention
from tba.engines.step import CudaGraphs, Step, unlike
from tba.engines.stopping import ends_of
from tba.errors import TbaError, UserError
from tba.fields import BY_CODE, as_declared
from tba.policy.lora import has_adapters, is_adapter
from tba.policy.norms import fuse_norms
from tba.pretrained import most_positions
from tba.protocols import Partner, Tokenizer, Turn
from tba.streaming import shapes_of
from tba.types import Completion, FloatArray, IntArray, Prompt, Sampling, StopReason, Version

log = logging.getLogger(__name__)

PREFILL_TOKENS = 2048  # prompts are read together up to this many tokens (one longer prompt goes alone)
_STEPS_BETWEEN_LOOKS = 4  # where reading the tokens costs more than a step: on an accelerator, and for stop strings
_STEPS_BETWEEN_ASKING = 8  # how often `interrupted` is asked
_PROBE = 7  # tokens of the longest prompt of the self-test


@dataclass(frozen=True)
@as_declared
class EngineSettings:
    """Sets how a searcher samples: how many completions grow at the same time, and where one ends. Raises `UserError`
    when a field makes no sense.
    """

    engine: Literal["transformers", "vllm", "auto"] = "transformers"  # the sampling engine; vllm has settings of its
    # own, too; auto: vllm on CUDA if it is installed and passes a self-test at the start, else transformers
    slots: int = 64  # completions that are generated simultaneously
    max_completion_tokens: int = 128  # tokens of the longest completion; a longer one is truncated
    stop_strings: tuple[int | str, ...] = ()  # a completion ends before the first of these in its text (it ends at
    # what ends a turn in the chat template anyway); a whole number is a token's id, a special token's text the token
    min_completion_tokens: int = 0  # tokens before the end-of-text token may be sampled
    first: tuple[str, ...] = field(default=(), metadata=BY_CODE)  # allowed beginnings of an answer, each one token;
    # empty: any
    never_first: tuple[str, ...] = field(default=(), metadata=BY_CODE)  # forbidden beginnings of an answer, each one
    # token

    @property
    def never_sampled(self) -> tuple[str, ...]:
        """The answers that the rules forbid, in words."""
        named = [
            (self.min_completion_tokens, f"answers that end before {self.min_completion_tokens} tokens"),
            (self.first, f"answers that do not begin with {' or '.join(map(repr, self.first))}"),
            (self.never_first, f"answers that begin with {' or '.join(map(repr, self.never_first))}"),
        ]
        return tuple(words for rule, words in named if rule)

    def __post_init__(self) -> None:
        for name in ("slots", "max_completion_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"the engine's {name} is {value}, but it must be at least 1")
        if not 0 <= self.min_completion_tokens < self.max_completion_tokens:
            raise UserError(
                f"the engine's min_completion_tokens is {self.min_completion_tokens}, give 0 or more, and fewer than "
                f"max_completion_tokens, {self.max_completion_tokens}"
            )
        if self.engine == "vllm" and (self.first or self.never_first):
            raise UserError(
                "the engine is vllm, which has no rule for the first token of an answer: leave first and never_first "
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
    ) -> None:
        """longest_prompt: for which the slots have room from the first on where memory is scarce, on an accelerator: to
        grow, keys and values of both lengths would have to be held. compiled: what is captured of a decode step on a
        GPU are the kernels that `torch.compile` makes.

        Raises `UserError` when the model's attention cannot be served (found out by a small self-test).
        """
        self.model = model.eval()
        self.settings = settings
        self._version = Version() if version is None else version
        self._eos, self._stop = ends_of(settings.stop_strings, tokenizer, model.config, model.generation_config)
        positions = most_positions(model.config)
        embeddings = len(model.get_input_embeddings().weight)
        self.room = Room(settings.max_completion_tokens, None, positions, embeddings)
        self._cache: SlotCache | None = None
        longest = min(longest_prompt + settings.max_completion_tokens, positions or sys.maxsize)
        self._least = 0 if model.device.type == "cpu" else longest
        self._adapted = has_adapters(model)
        if model.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape, and prompts have many
            fuse_norms(model)
        with torch.inference_mode():
            vocabulary, self._flash = _self_test(model)
            eos_V = torch.zeros(vocabulary, dtype=torch.bool, device=model.device)
            eos_V[sorted(self._eos)] = True
            least, first, never = settings.min_completion_tokens, settings.first, settings.never_first
            rules = rules_of(tokenizer, eos_V, least, first, never)
            self._rows = Rows(settings.slots, settings.max_completion_tokens, rules)
        one_gpu = {p.device for p in model.parameters()} == {eos_V.device} and eos_V.device.type == "cuda"
        self.step = Step(model, self._rows, CudaGraphs(eos_V.device) if one_gpu else None, compiled)

    @property
    def version(self) -> Version:
        return self._version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` (by Hugging Face name) into the model in place.

        A tied weight may be given under any of its names; a model with adapters is given these alone. Raises
        `KeyError` for an unknown or a missing name and `ValueError` for a wrong shape, in which cases nothing was
        copied.
        """
        own = matched(self.model, shapes_of(weights), is_adapter if self._adapted else lambda name: True)
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
                del value  # before the next one is made
        self._version = version
        self.step.loaded()

    def flow(self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None) -> Flow:
        """Returns what answers prompts for as long as some are submitted. See `protocols.Engine`."""
        return Flow(self, count, sampling, rng, partner)

    def read(self, prompts: Sequence[Prompt]) -> PackedPrompts:
        """Run prompts through the model once, together."""
        packed = PackedPrompts([torch.from_numpy(p.tokens.astype(np.int64)) for p in prompts], self.model.device)
        packed.run(self.model)
        return packed

    def cache(self, like: PackedPrompts, length: int, rows: int) -> SlotCache:
        """The slots, with room for `length` positions in each; allocated again only to grow, when what the first
        `rows` hold is kept.
        """
        length = max(length, self._least)
        if self._cache is None or self._cache.length < length:
            before = self._cache if rows else None
            self.step.forget()
            self._cache = None  # before its successor is allocated
            self._cache = SlotCache(like, self.settings.slots, length, self._flash)
            if before is not None:
                self._cache.keys[:, :rows, :, : before.length] = before.keys[:, :rows]
                self._cache.values[:, :rows, :, : before.length] = before.values[:, :rows]
        return self._cache


@dataclass
class _Asked:
    """A prompt that has not been handed out."""

    prompt: Prompt
    completions: dict[int, Completion]  # those that are finished, by sample


class _Queue:
    """Prompts with `count` completions each, in the order in which they were submitted.

    Request i is sample i % count of prompt i // count.
    """

    def __init__(self, count: int, room: Room) -> None:
        self.count, self.room = count, room
        self.submitted = 0  # prompts
        self.prompts: dict[int, _Asked] = {}
        self.done: list[int] = []  # those whose completions are all finished
        self.next_request = 0
        self.positions = 0  # of the longest prompt with the longest completion

    @property
    def left(self) -> int:
        """Returns how many requests have not begun."""
        return self.submitted * self.count - self.next_request

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Add prompts. Raises `UserError` for one that is too long or empty, and then adds none."""
        for prompt in prompts:
            self.room.check(prompt)
        for number, prompt in enumerate(prompts, self.submitted):
            self.prompts[number] = _Asked(prompt, {})
            self.done += [number] if self.count <= 0 else []
            self.positions = max(self.positions, len(prompt.tokens) + self.room.of(prompt))
        self.submitted += len(prompts)

    def asked(self, request: int) -> Prompt:
        """Returns the prompt of a request."""
        return self.prompts[request // self.count].prompt

    def finish(self, request: int, completion: Completion) -> None:
        """Take the completion of a request."""
        number, sample = divmod(request, self.count)
        completions = self.prompts[number].completions
        completions[sample] = completion
        if len(completions) == self.count:
            self.done.append(number)

    def handed_out(self, everything: bool) -> list[tuple[int, list[Completion]]]:
        """Returns the prompts that are finished, or all of them with what they have; they are here no longer."""
        numbers = dict.fromkeys([*self.done, *self.prompts]) if everything else self.done
        found = [(i, self.prompts.pop(i).completions) for i in numbers]
        self.done = []
        return [(i, [completions[j] for j in sorted(completions)]) for i, completions in found]


@dataclass(frozen=True)
class _Read:
    """The prompts first .. end - 1, which were run through the model together."""

    first: int
    end: int
    packed: PackedPrompts
    version: Version  # of the weights


_State: TypeAlias = tuple[list[int], tuple[Tensor, ...], tuple[Tensor, Tensor]]  # of a row: counts, draws, cache


@dataclass(eq=False)
class _Request:
    """A completion that has been begun. What it holds of its row is as of the end of its last turn."""

    number: int
    began: Version  # the weights that read its prompt
    row: int
    turn: int = 0  # where its present turn begins in the completion
    observed: list[tuple[int, int]] = field(default_factory=list)  # what it has read, as (begin, end)
    ids: list[int] = field(default_factory=list)
    log_behavior: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    reason: StopReason = StopReason.INTERRUPTED
    heard: IntArray | None = None  # what it is to read next; None: nobody has answered yet
    state: _State | None = None  # its row's, which it does not have any more; None: it has it


class Flow:
    """A queue of prompts, the rows of the engine in which their completions grow, and those that are aside: whose
    partner has not answered yet, or that wait for a row. See `protocols.Flow`.

    Rows 0 .. extent - 1 are in use, but for those in `free`. Rows that are growing when the engine loads newer weights
    keep the keys and values of the older ones.
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
        self.queue = _Queue(count, engine.room)
        self.read: _Read | None = None  # where the next request's prompt is, or was the last one's
        # the rows, as they are known without waiting for the device
        slots = self.settings.slots
        self.extent = 0
        self.free: list[int] = []
        self.request_R = np.full(slots, None, dtype=object)
        self.prompt_R = np.zeros(slots, dtype=np.int64)  # prompt tokens
        self.count_R = np.zeros(slots, dtype=np.int64)  # completion tokens so far
        self.limit_R = np.zeros(slots, dtype=np.int64)  # and at most
        self.aside: dict[int, _Request] = {}
        self.device = self.rows.eos_V.device
        looks_are_cheap = self.device.type == "cpu" and not engine._stop.strings
        self.stride = 1 if looks_are_cheap else _STEPS_BETWEEN_LOOKS
        self.steps = _STEPS_BETWEEN_ASKING  # since `interrupted` was asked

    @property
    def submitted(self) -> int:
        """Returns how many prompts there have been."""
        return self.queue.submitted

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Add prompts to the queue. Raises `UserError` for one that is too long or empty, and then adds none."""
        self.queue.submit(prompts)

    @property
    def wanted(self) -> int:
        """Returns how many more prompts are to be submitted now: none while the queue can fill the rows that are free,
        then so many that half of the slots' worth is left in it. They are read together, and rows are filled from them
        at once.
        """
        slots = self.settings.slots
        free = slots - (self.extent - len(self.free)) - self.queue.left - self._crowd
        return -(-(free + slots // 2) // self.queue.count) if free > 0 else 0

    @property
    def _crowd(self) -> int:
        """Returns how many rows those that are set aside will want: all that have been answered, and of the others as
        many as are more than the slots, since what is aside has its keys and values.
        """
        answered = sum(mine.heard is not None for mine in self.aside.values())
        return max(answered, len(self.aside) - self.settings.slots)

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_wanted: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Computes until prompts are finished, or (`until_wanted`) more are wanted; returns the finished ones, by
        number in the order of submission. Once `interrupted()` they are all of them, with what they had.
        """
        with torch.inference_mode(), slot_attention(self.engine.model):
            going_on = not self.queue.prompts or self._run(interrupted, until_wanted)
        return self.queue.handed_out(everything=not going_on)

    def _run(self, interrupted: Callable[[], bool] | None, until_wanted: bool) -> bool:
        """Consumes the queue until further prompts are finished; returns whether there is more to do.

        There is none when no row is left, or when `interrupted` says so.
        """
        queue = self.queue
        if queue.done:
            return True
        while queue.left or len(self.free) < self.extent or self.aside:
            if self.aside:
                self._listen()
            self._fill()
            retired = self._retire(self._finished())
            if queue.done or (until_wanted and self.wanted):
                return True
            if retired:
                continue  # a first token can be the last: fill again before computing
            if self.steps >= _STEPS_BETWEEN_ASKING and interrupted is not None:
                self.steps = 0
                if interrupted():
                    self._retire(np.arange(self.extent), interrupted=True)
                    for mine in self.aside.values():
                        mine.reason = StopReason.INTERRUPTED
                        self._finish(mine)
                    self.aside.clear()
                    queue.next_request += queue.left  # the others are not begun
                    return False
            self.steps += self._grow() if self.extent else _STEPS_BETWEEN_ASKING
        return False

    def _fill(self) -> None:
        """Give free rows to the next requests; when there are none, close the gaps."""
        if self.aside:
            self._take_back()
        queue = self.queue
        if (more := queue.left - len(self.free)) > 0 and self.extent < self.settings.slots:
            more = min(more, self.settings.slots - self.extent)
            self.free, self.extent = [*self.free, *range(self.extent, self.extent + more)], self.extent + more
        while self.free and queue.left:
            read = self.read
            if read is None or queue.next_request >= read.end * queue.count:
                read = self._read_more()
            n = min(len(self.free), read.end * queue.count - queue.next_request)
            admitted, self.free = self.free[:n], self.free[n:]
            self._admit(admitted, read)
        if self.free:
            self._close_gaps()

    def _read_more(self) -> _Read:
        """Run the next prompts through the model."""
        queue = self.queue
        first = end = queue.next_request // queue.count
        self.read = None  # its prompts have all been taken: before its successor is made
        tokens = 0
        while end < queue.submitted:
            tokens += len(queue.prompts[end].prompt.tokens)
            if tokens > PREFILL_TOKENS and end > first:
                break
            end += 1
        packed = self.engine.read([queue.prompts[i].prompt for i in range(first, end)])
        self.read = _Read(first, end, packed, self.engine.version)
        self.cache = self.engine.cache(packed, queue.positions, self.extent if len(self.free) < self.extent else 0)
        return self.read

    def _admit(self, rows: list[int], read: _Read) -> None:
        """Start the next requests in `rows` (ascending), all of prompts that were read."""
        queue = self.queue
        requests = np.arange(queue.next_request, queue.next_request + len(rows))
        queue.next_request += len(rows)
        prompts = requests // queue.count
        for p in range(prompts[0], prompts[-1] + 1):
            mine = [row for row, prompt in zip(rows, prompts, strict=True) if prompt == p]
            self.cache.fill(mine, read.packed, p - read.first)
            self.prompt_R[mine] = len(queue.prompts[p].prompt.tokens)
            self.limit_R[mine] = queue.room.of(queue.prompts[p].prompt)
        for row, request in zip(rows, requests.tolist(), strict=True):
            self.request_R[row] = _Request(request, read.version, row)
        self.count_R[rows] = 1
        shape = (len(rows), self.settings.max_completion_tokens)
        uniform = np.zeros(shape, np.float32) if self.sampling.temperature == 0 else self.rng.random(shape, np.float32)
        if self.sampling.repetition_penalty != 1:
            self.rows.read(rows, [torch.from_numpy(queue.prompts[p].prompt.tokens).long() for p in prompts.tolist()])
        self.rows.admit(
            torch.tensor(rows, device=self.device),
            torch.from_numpy(self.prompt_R[rows]).to(self.device),
            torch.from_numpy(uniform).to(self.device),
            read.packed.logits_PV[torch.from_numpy(prompts - read.first).to(self.device)],
            self.sampling,
        )

    def _close_gaps(self) -> None:
        """Move the last rows into the free ones, and forget the rest."""
        extent = self.extent - len(self.free)
        target = [row for row in self.free if row < extent]
        source = sorted(set(range(extent, self.extent)).difference(self.free))
        self.extent, self.free = extent, []
        if not source:
            return
        self.request_R[target] = self.request_R[source]
        for count_R in self._counts:
            count_R[target] = count_R[source]
        source_R, target_R = torch.tensor([source, target], device=self.device)
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

    def _finished(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Returns the rows whose completion has ended. The one place that waits for the device."""
        n = self.extent
        done = self.rows.ended_R[:n].cpu().numpy() | (self.count_R >= self.limit_R)[:n]
        if self.engine._stop.strings:
            tokens = self.rows.token_RT[:n].cpu().numpy()
            for row in np.flatnonzero(~done):
                said = tokens[row, self.request_R[row].turn : self.count_R[row]].tolist()
                done[row] = self.engine._stop.may_be_near(said, self.stride)
        return np.flatnonzero(done)

    def _retire(self, finished: np.ndarray[tuple[int], np.dtype[np.int64]], interrupted: bool = False) -> bool:
        """Take the turns that have ended out of rows; returns whether there were any.

        Without a partner a turn is the whole completion. Else the partner is asked: rows that are answered at once go
        on where they are, those at their end are freed, and the others are set aside.
        """
        if not len(finished):
            return False
        rows = torch.from_numpy(finished).to(self.device)
        ids, log_behavior = self.rows.token_RT[rows].tolist(), self.rows.log_behavior_RT[rows].cpu().numpy()
        self._require_finite(log_behavior, self.count_R[finished])
        turns: list[Turn] = []
        for i, row in enumerate(finished.tolist()):
            mine: _Request = self.request_R[row]
            said = ids[i][mine.turn : self.count_R[row]]
            length, text, mine.reason = self.engine._stop.ended(said, self.engine._eos, interrupted)
            n = self.count_R[row] = mine.turn + length
            mine.ids, mine.log_behavior, mine.row = ids[i][:n], log_behavior[i, :n].copy(), row
            if self.partner is None:
                self._finish(mine, text)
            elif interrupted or mine.reason is StopReason.LENGTH:
                mine.reason = StopReason.INTERRUPTED if interrupted else mine.reason
                self._finish(mine)
            else:
                self.aside[mine.number] = mine
                turns.append(Turn(mine.number, text, mine.reason, int(self.limit_R[row]) - n, said[:length]))
        going_on: list[_Request] = []
        if turns and self.partner is not None:
            self.partner.hear(turns)
            going_on = self._listen()
            for mine in self.aside.values():
                mine.state = mine.state or self._taken(mine.row)
        self.free = sorted(set(finished.tolist()).difference(mine.row for mine in going_on))
        self._go_on(going_on)
        return True

    def _require_finite(self, log_behavior: FloatArray, count: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        if not np.isfinite(log_behavior[np.arange(log_behavior.shape[1]) < count[:, None]]).all():
            self.engine._cache = None  # a NaN in a slot would outlive its row
            raise TbaError(f"the weights of version {self.engine.version} give probabilities that are not finite")

    def _finish(self, mine: _Request, text: str | None = None) -> None:
        """Take the completion of a request that is at its end; text: None is that of all its tokens."""
        mask = None
        if mine.observed:
            mask = np.ones(len(mine.ids), dtype=np.bool_)
            for begin, end in mine.observed:
                mask[begin:end] = False
        completion = Completion(
            np.array(mine.ids, dtype=np.int32),
            self.engine._stop.text(mine.ids) if text is None else text,
            mine.reason,
            (mine.began, self.engine.version),
            self.sampling,
            mine.log_behavior,
            mask,
        )
        if self.partner is not None:
            completion = self.partner.ended(mine.number, completion)
        self.queue.finish(mine.number, completion)

    def _listen(self) -> list[_Request]:
        """Take in what the partner has answered: what is at its end is finished. Returns the requests that go on and
        still have a row, which are aside no longer.
        """
        assert self.partner is not None
        idle = self.extent == len(self.free) and not self.queue.left
        waits = idle and not any(mine.heard is not None for mine in self.aside.values())
        going_on = []
        for request, tokens in self.partner.replies(wait=waits).items():
            mine = self.aside[request]
            limit = self.queue.room.of(self.queue.asked(request))
            if tokens is not None and len(mine.ids) + len(tokens) < limit:
                mine.heard = tokens
                if mine.state is not None:
                    continue
                going_on.append(mine)
            else:
                mine.reason = mine.reason if tokens is None else StopReason.LENGTH
                self._finish(mine)
            del self.aside[request]
        return going_on

    def _taken(self, row: int) -> _State:
        """Copy out what a row holds, so that the row can be given to another."""
        length = int(self.prompt_R[row] + self.count_R[row])
        return [int(count_R[row]) for count_R in self._counts], self.rows.take(row), self.cache.take(row, length)

    def _take_back(self) -> None:
        """Give rows to the requests that were set aside and have been answered."""
        back: list[_Request] = []
        for mine in list(self.aside.values()):
            if mine.heard is None or mine.state is None:
                continue
            if not self.free and self.extent < self.settings.slots:
                self.free, self.extent = [self.extent], self.extent + 1
            if not self.free:
                break
            mine.row, *self.free = self.free
            counts, of_row, cached = mine.state
            self.request_R[mine.row], mine.state = mine, None
            for count_R, count in zip(self._counts, counts, strict=True):
                count_R[mine.row] = count
            self.rows.put(mine.row, of_row)
            self.cache.put(mine.row, cached)
            back.append(self.aside.pop(mine.number))
        self._go_on(back)

    def _go_on(self, answered: Sequence[_Request]) -> None:
        """Append what was answered to the rows, in as few passes as `PREFILL_TOKENS` allows, and draw a token."""
        part: list[_Request] = []
        tokens = 0
        for mine in answered:
            assert mine.heard is not None
            if part and tokens + len(mine.heard) > PREFILL_TOKENS:
                self._append(part)
                part, tokens = [], 0
            part.append(mine)
            tokens += 1 + len(mine.heard)
        if part:
            self._append(part)

    def _append(self, answered: Sequence[_Request]) -> None:
        rows = [mine.row for mine in answered]
        begin = self.count_R[rows]
        heard = [np.asarray(mine.heard, dtype=np.int64) for mine in answered]
        end = begin + np.array([len(tokens) for tokens in heard], dtype=np.int64)
        # The last token of the turn has been drawn and not read yet.
        read = [torch.from_numpy(np.append(mine.ids[-1:], new)) for mine, new in zip(answered, heard, strict=True)]
        starts = (self.prompt_R[rows] + begin - 1).tolist()
        logits = Continuations(self.cache, rows, starts, read).run(self.engine.model)
        row_N = np.repeat(np.array(rows, dtype=np.int64), end - begin)
        at_N = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)])
        of_rows = torch.from_numpy(np.stack([rows, end, self.prompt_R[rows]])).to(self.device)
        of_tokens = torch.from_numpy(np.stack([row_N, at_N, np.concatenate(heard)])).to(self.device)
        if self.sampling.repetition_penalty != 1:  # anew: a row may have drawn more behind the end of its turn
            asked = [self.queue.asked(mine.number).tokens for mine in answered]
            known = [np.concatenate([p, mine.ids, new]) for p, mine, new in zip(asked, answered, heard, strict=True)]
            self.rows.read(rows, [torch.from_numpy(tokens).long() for tokens in known])
        self.rows.hear(of_rows[0], of_rows[1], Heard(*of_tokens), of_rows[2], logits, self.sampling)
        for mine, b, e in zip(answered, begin.tolist(), end.tolist(), strict=True):
            mine.observed.append((b, e))
            mine.turn, mine.heard = e, None
        self.count_R[rows] = end + 1


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
    own_attention = config._attn_implementation
    first = torch.arange(_PROBE) * 31 % config.vocab_size
    packed = PackedPrompts([first[:-1], first[2:-2]], model.device)
    prompts = [p.to(model.device) for p in (first, first[2:-1])]
    with slot_attention(model):
        packed.run(model)
    expected = kinds or ["sliding_attention"] * bool(getattr(config, "sliding_window", None))
    if any(e == "sliding_attention" and packed.kinds[layer].window is None for layer, e in enumerate(expected)):
        raise UserError(f"{name} keeps its sliding window from the attention function: use the vllm engine for it")
    if own_attention == "sdpa" and any(kind.softcap for kind in packed.kinds.values()):
        raise UserError(f"{name} caps its attention scores, which sdpa ignores: load it with attn_implementation=eager")
    plain = [model(input_ids=p[None], attention_mask=torch.ones_like(p[None]), use_cache=False).logits for p in prompts]
    plain_RV = torch.cat([logits[0, -2:] for logits in plain])
    if plain_RV.isnan().any():
        raise UserError(
            f"{name} computes NaN in {str(model.dtype).removeprefix('torch.')}, no probabilities: set --model.dtype "
            "float32, or give another model"
        )
    if packed.takes_flash:
        try:
            fault = flash_fault(packed) or unlike(plain_RV, _through_slots(model, packed, prompts, flash=True))
        except (RuntimeError, TypeError) as error:  # the kernel of this torch or this GPU takes no such call
            fault = str(error)
        if fault is None:
            return plain_RV.shape[1], True
        log.warning("the slots of %s are read without the flash kernel: %s", name, fault)
    fault = unlike(plain_RV, _through_slots(model, packed, prompts, flash=False))
    if fault is not None:
        raise UserError(
            f"{name} gives other probabilities through the slots than by its own forward ({fault}): use the vllm "
            "engine for this model"
        )
    return plain_RV.shape[1], False


def _through_slots(model: PreTrainedModel, packed: PackedPrompts, prompts: Sequence[Tensor], flash: bool) -> Tensor:
    """Returns the logits after the last two tokens of each prompt, [2 * prompts, V]: of `packed`, which lacks the last,
    and of a step.
    """
    cache = SlotCache(packed, len(prompts), _PROBE, flash)
    for row in range(len(prompts)):
        cache.fill([row], packed, row)
    position_R = torch.tensor([len(p) - 1 for p in prompts], device=model.device)
    newest_R1 = torch.stack([p[-1:] for p in prompts])
    with slot_attention(model):
        output = model(
            input_ids=newest_R1,
            position_ids=position_R[:, None],
            attention_mask=torch.ones_like(newest_R1),
            use_cache=False,
            tba_slots=cache.at(position_R, _PROBE),
        )
    return torch.stack([packed.logits_PV, output.logits[:, -1]], 1).flatten(0, 1)
