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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.engines.rows import Heard, Rows
from tba.engines.rules import Room, matched, rules_of
from tba.engines.slots import Continuations, PackedPrompts, SlotCache, flash_fault, slot_attention
from tba.engines.step import CudaGraphs, Step, unlike
from tba.engines.stopping import StopStrings, eos_ids
from tba.errors import TbaError, UserError
from tba.policy.lora import has_adapters, is_adapter
from tba.protocols import Partner, Tokenizer, Turn
from tba.streaming import shapes_of
from tba.types import BoolArray, Completion, FloatArray, IntArray, Prompt, Sampling, StopReason, Version

log = logging.getLogger(__name__)

PREFILL_TOKENS = 2048  # prompts are read together up to this many tokens (one longer prompt goes alone)
_STEPS_BETWEEN_LOOKS = 4  # where reading the tokens costs more than a step: on an accelerator, and for stop strings
_STEPS_BETWEEN_ASKING = 8  # how often `interrupted` is asked
_PROBE = 7  # tokens of the longest prompt of the self-test


@dataclass(frozen=True)
class EngineSettings:
    """How a searcher samples: how many completions grow at the same time, and where one ends. Raises `UserError` when a
    field makes no sense.
    """

    engine: Literal["transformers", "vllm", "auto"] = "transformers"  # the sampling engine; vllm has settings of its
    # own, too; auto: vllm on CUDA if it is installed and passes a self-test at the start, else transformers
    slots: int = 64  # completions that are generated simultaneously
    max_completion_tokens: int = 128  # tokens of the longest completion; a longer one is truncated
    stop_strings: tuple[str, ...] = ()  # a completion ends before the first of these in its text
    min_completion_tokens: int = 0  # tokens before the end-of-text token may be sampled
    first: tuple[str, ...] = ()  # allowed beginnings of an answer, each one token; empty: any
    never_first: tuple[str, ...] = ()  # forbidden beginnings of an answer, each one token

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
        self, model: PreTrainedModel, tokenizer: Tokenizer, settings: EngineSettings, version: Version | None = None
    ) -> None:
        """Raises `UserError` when the model's attention cannot be served (found out by a small self-test)."""
        self.model = model.eval()
        self.settings = settings
        self._version = Version() if version is None else version
        self._stop = StopStrings(settings.stop_strings, tokenizer)
        self._eos = eos_ids(model.generation_config, model.config, tokenizer)
        positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.room = Room(settings.max_completion_tokens, None, positions)
        self._cache: SlotCache | None = None
        self._adapted = has_adapters(model)
        if model.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape, and prompts have many
        with torch.inference_mode():
            vocabulary, self._flash = _self_test(model)
            eos_V = torch.zeros(vocabulary, dtype=torch.bool, device=model.device)
            eos_V[[i for i in self._eos if i < vocabulary]] = True
            least, first, never = settings.min_completion_tokens, settings.first, settings.never_first
            rules = rules_of(tokenizer, eos_V, least, first, never)
            self._rows = Rows(settings.slots, settings.max_completion_tokens, rules)
        one_gpu = {p.device for p in model.parameters()} == {eos_V.device} and eos_V.device.type == "cuda"
        self.step = Step(model, self._rows, CudaGraphs(eos_V.device) if one_gpu else None)

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
        packed = PackedPrompts([torch.from_numpy(p.tokens.astype(np.int64)).to(self.model.device) for p in prompts])
        packed.run(self.model)
        return packed

    def cache(self, like: PackedPrompts, length: int, rows: int) -> SlotCache:
        """The slots, with room for `length` positions in each; allocated again only to grow, when what the first
        `rows` hold is kept.
        """
        if self._cache is None or self._cache.length < length:
            before = self._cache if rows else None
            self.step.forget()
            self._cache = None  # before its successor is allocated
            self._cache = SlotCache(like, self.settings.slots, length, self._flash)
            if before is not None:
                self._cache.keys[:, :rows, :, : before.length] = before.keys[:, :rows]
                self._cache.values[:, :rows, :, : before.length] = before.values[:, :rows]
        return self._cache

    def completion(
        self, ids: list[int], log_behavior: FloatArray, sampling: Sampling, interrupted: bool, began: Version
    ) -> Completion:
        """The completion in a row that the weights `began` have begun: its tokens and their log-probabilities [T], cut
        where it ended.
        """
        n, text, reason = self._stop.ended(ids, self._eos, interrupted)
        versions = (began, self._version)
        return Completion(np.array(ids[:n], dtype=np.int32), text, reason, versions, sampling, log_behavior[:n].copy())

    def conversation(
        self,
        ids: list[int],
        log_behavior: FloatArray,
        mask: BoolArray | None,
        sampling: Sampling,
        reason: StopReason,
        began: Version,
    ) -> Completion:
        """The completion in a row that had several turns, which were cut where they ended."""
        text, versions = self._stop.text(ids), (began, self._version)
        return Completion(np.array(ids, dtype=np.int32), text, reason, versions, sampling, log_behavior.copy(), mask)


class Flow:
    """A queue of requests, and which of them each row of the engine holds.

    Rows 0 .. extent - 1 are in use, but for those in `free`. Request i is sample i % count of prompt i // count, in the
    order in which prompts were submitted. The engine has one flow at a time. Rows that are growing when it loads newer
    weights keep the keys and values of the older ones.
    """

    packed: PackedPrompts  # the prompts packed_from .. packed_to - 1, once some were read

    def __init__(
        self,
        engine: TransformersEngine,
        count: int,
        sampling: Sampling,
        rng: np.random.Generator,
        partner: Partner | None = None,
    ) -> None:
        self.engine, self.settings, self.rows = engine, engine.settings, engine._rows
        self.partner = partner
        self.count, self.sampling, self.rng = count, sampling, rng
        self.submitted = 0  # prompts
        self.prompts: dict[int, Prompt] = {}  # those that have not been handed out
        self.results: dict[int, Completion] = {}  # by request
        self.lacking: dict[int, int] = {}  # of each prompt's completions
        self.done: list[int] = []  # prompts that lack none, until they are handed out
        self.next_request = 0
        self.steps = _STEPS_BETWEEN_ASKING  # since `interrupted` was asked
        self.positions = 0  # of the longest prompt with the longest completion
        self.packed_from = self.packed_to = 0  # the prompts that `packed` holds
        self.extent = 0
        self.free: list[int] = []
        slots = self.settings.slots
        self.request_R = np.zeros(slots, dtype=np.int64)
        self.prompt_R = np.zeros(slots, dtype=np.int64)  # prompt tokens
        # completion tokens so far, as in `rows` but known without waiting for the device
        self.count_R = np.zeros(slots, dtype=np.int64)
        self.limit_R = np.zeros(slots, dtype=np.int64)
        self.begun_R = np.zeros(slots, dtype=np.int64)  # where the present turn began in the completion
        self.began: dict[int, Version] = {}  # the weights that read the prompt of each request
        self.observed: dict[int, list[tuple[int, int]]] = {}  # what each request has read, as (begin, end)
        self.aside: dict[int, _Aside] = {}  # the requests whose partner has not answered yet, or that wait for a row
        self.device = self.rows.eos_V.device
        looks_are_cheap = self.device.type == "cpu" and not self.settings.stop_strings
        self.stride = 1 if looks_are_cheap else _STEPS_BETWEEN_LOOKS

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Adds prompts to the queue. Raises `UserError` for one that is too long or empty, and then adds none."""
        for prompt in prompts:
            self.engine.room.check(prompt)
        for prompt in prompts:
            self.prompts[self.submitted] = prompt
            self.lacking[self.submitted] = self.count
            if self.count <= 0:
                self.done.append(self.submitted)
            self.positions = max(self.positions, len(prompt.tokens) + self.engine.room.of(prompt))
            self.submitted += 1

    @property
    def wanted(self) -> int:
        """How many more prompts are to be submitted now: none while the queue can fill the rows that are free, then so
        many that half of the slots' worth is left in it. They are read together, and rows are filled from them at once.
        """
        slots = self.settings.slots
        free = slots - (self.extent - len(self.free)) - (self.total - self.next_request) - self._crowd
        return -(-(free + slots // 2) // self.count) if free > 0 else 0

    @property
    def _crowd(self) -> int:
        """How many rows those that are set aside will want: all that have been answered, and of the others as many as
        are more than the slots, since what is aside has its keys and values.
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
            going_on = not self.prompts or self.run(interrupted, until_wanted)
        done, self.done = self.done, []
        if not going_on:
            done += [i for i, lacking in self.lacking.items() if lacking]
        return [(i, self.of(i)) for i in done]

    @property
    def total(self) -> int:
        return self.submitted * self.count

    def run(self, interrupted: Callable[[], bool] | None, until_wanted: bool) -> bool:
        """Consumes the queue until further prompts are finished; returns whether there is more to do.

        There is none when no row is left, or when `interrupted` says so.
        """
        if self.done:
            return True
        while self.next_request < self.total or len(self.free) < self.extent or self.aside:
            done = len(self.done)
            if self.aside:
                self._listen()
            self._fill()
            retired = self._retire(self._finished())
            if len(self.done) > done or (until_wanted and self.wanted):
                return True
            if retired:
                continue  # a first token can be the last: fill again before computing
            if self.steps >= _STEPS_BETWEEN_ASKING and interrupted is not None:
                self.steps = 0
                if interrupted():
                    self._retire(np.arange(self.extent), interrupted=True)
                    self._give_up()
                    return False
            self.steps += self._grow() if self.extent else _STEPS_BETWEEN_ASKING
        return False

    def of(self, prompt: int) -> list[Completion]:
        """Returns the completions that a prompt has so far, and forgets it."""
        del self.prompts[prompt], self.lacking[prompt]
        requests = range(prompt * self.count, (prompt + 1) * self.count)
        return [c for request in requests if (c := self.results.pop(request, None)) is not None]

    def _fill(self) -> None:
        """Give free rows to the next requests; when there are none, close the gaps."""
        if self.aside:
            self._take_back()
        if (more := self.total - self.next_request - len(self.free)) > 0 and self.extent < self.settings.slots:
            more = min(more, self.settings.slots - self.extent)
            self.free, self.extent = [*self.free, *range(self.extent, self.extent + more)], self.extent + more
        while self.free and self.next_request < self.total:
            if self.next_request >= self.packed_to * self.count:
                self._read()
            n = min(len(self.free), self.packed_to * self.count - self.next_request)
            admitted, self.free = self.free[:n], self.free[n:]
            self._admit(admitted)
        if self.free:
            self._close_gaps()

    def _read(self) -> None:
        """Run the next prompts through the model."""
        start, tokens = self.packed_to, 0
        while self.packed_to < self.submitted:
            tokens += len(self.prompts[self.packed_to].tokens)
            if tokens > PREFILL_TOKENS and self.packed_to > start:
                break
            self.packed_to += 1
        self.packed_from = start
        if start:
            del self.packed  # whose prompts have all been taken: before its successor is made
        self.packed = self.engine.read([self.prompts[i] for i in range(start, self.packed_to)])
        self.packed_by = self.engine.version
        in_use = self.extent if len(self.free) < self.extent else 0
        self.cache = self.engine.cache(self.packed, self.positions, in_use)

    def _admit(self, rows: list[int]) -> None:
        """Start the next requests in `rows` (ascending), all of prompts that are packed."""
        requests = np.arange(self.next_request, self.next_request + len(rows))
        self.next_request += len(rows)
        prompts = requests // self.count
        for p in range(prompts[0], prompts[-1] + 1):
            mine = [row for row, prompt in zip(rows, prompts, strict=True) if prompt == p]
            self.cache.fill(mine, self.packed, p - self.packed_from)
            self.prompt_R[mine] = len(self.prompts[p].tokens)
            self.limit_R[mine] = self.engine.room.of(self.prompts[p])
        self.request_R[rows] = requests
        self.began.update(dict.fromkeys(requests.tolist(), self.packed_by))
        self.count_R[rows] = 1
        self.begun_R[rows] = 0
        shape = (len(rows), self.settings.max_completion_tokens)
        uniform = np.zeros(shape, np.float32) if self.sampling.temperature == 0 else self.rng.random(shape, np.float32)
        self.rows.admit(
            torch.tensor(rows, device=self.device),
            torch.from_numpy(self.prompt_R[rows]).to(self.device),
            torch.from_numpy(uniform).to(self.device),
            self.packed.logits_PV[torch.from_numpy(prompts - self.packed_from).to(self.device)],
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
        for state in self._states:
            state[target] = state[source]
        source_R, target_R = torch.tensor([source, target], device=self.device)
        self.rows.move(source_R, target_R)
        self.cache.move(source_R, target_R, int((self.prompt_R + self.count_R)[:extent].max()))

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
        if self.settings.stop_strings:
            tokens = self.rows.token_RT[:n].cpu().numpy()
            for row in np.flatnonzero(~done):
                said = tokens[row, self.begun_R[row] : self.count_R[row]].tolist()
                done[row] = self.engine._stop.may_be_near(said, self.stride)
        return np.flatnonzero(done)

    def _retire(self, finished: np.ndarray[tuple[int], np.dtype[np.int64]], interrupted: bool = False) -> bool:
        """Take the completions out of rows and free them; returns whether there were any."""
        if not len(finished):
            return False
        if self.partner is not None:
            return self._end_turns(finished, self.partner, interrupted)
        rows = torch.from_numpy(finished).to(self.device)
        ids, log_behavior = self.rows.token_RT[rows].tolist(), self.rows.log_behavior_RT[rows].cpu().numpy()
        count = self.count_R[finished]
        self._require_finite(log_behavior, count)
        for i, (row, n) in enumerate(zip(finished.tolist(), count.tolist(), strict=True)):
            request = int(self.request_R[row])
            began = self.began.pop(request)
            self._keep(
                request, self.engine.completion(ids[i][:n], log_behavior[i, :n], self.sampling, interrupted, began)
            )
        self.free = finished.tolist()
        return True

    def _require_finite(self, log_behavior: FloatArray, count: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        if not np.isfinite(log_behavior[np.arange(log_behavior.shape[1]) < count[:, None]]).all():
            self.engine._cache = None  # a NaN in a slot would outlive its row
            raise TbaError(f"the weights of version {self.engine.version} give probabilities that are not finite")

    def _keep(self, request: int, completion: Completion) -> None:
        """Take the completion of a request as its result."""
        self.results[request] = completion
        prompt = request // self.count
        self.lacking[prompt] -= 1
        if not self.lacking[prompt]:
            self.done.append(prompt)

    @property
    def _states(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
        """What is known of each row without waiting for the device."""
        return (self.request_R, self.prompt_R, self.count_R, self.limit_R, self.begun_R)

    def _end_turns(
        self, finished: np.ndarray[tuple[int], np.dtype[np.int64]], partner: Partner, interrupted: bool
    ) -> bool:
        """Hand the turns that have ended to the partner. Rows that are answered at once go on where they are, those at
        their end are freed, and the others are set aside. Returns True.
        """
        rows = torch.from_numpy(finished).to(self.device)
        ids, log_behavior = self.rows.token_RT[rows].tolist(), self.rows.log_behavior_RT[rows].cpu().numpy()
        self._require_finite(log_behavior, self.count_R[finished])
        asked: dict[int, _Aside] = {}
        turns: list[Turn] = []
        for i, row in enumerate(finished.tolist()):
            request, begun = int(self.request_R[row]), int(self.begun_R[row])
            said, text, reason = self.engine._stop.ended(
                ids[i][begun : self.count_R[row]], self.engine._eos, interrupted
            )
            n = self.count_R[row] = begun + said
            mine = _Aside(ids[i][:n], log_behavior[i, :n], reason, row)
            if interrupted:
                self._finish(request, replace(mine, reason=StopReason.INTERRUPTED), partner)
            elif reason is StopReason.LENGTH:
                self._finish(request, mine, partner)
            else:
                asked[request] = mine
                turns.append(Turn(request, text, reason, int(self.limit_R[row]) - n))
        if turns:
            partner.hear(turns)
        self.aside |= asked
        going_on = self._listen()
        for request in going_on:
            del self.aside[request]
        for request, mine in asked.items():
            if request in self.aside:
                self.aside[request] = replace(mine, state=self._taken(mine.row))
        kept = [mine.row for mine in going_on.values()]
        self.free = sorted(set(finished.tolist()).difference(kept))
        self._go_on(going_on)
        return True

    def _listen(self) -> dict[int, _Aside]:
        """Take in what the partner has answered: what is at its end is finished. Returns the requests that go on and
        still have a row, to be removed from those that are aside.
        """
        assert self.partner is not None
        idle = self.extent == len(self.free) and self.next_request == self.total
        waits = idle and not any(mine.heard is not None for mine in self.aside.values())
        for request, tokens in self.partner.replies(wait=waits).items():
            mine = self.aside[request]
            limit = self.engine.room.of(self.prompts[request // self.count])
            if tokens is not None and len(mine.ids) + len(tokens) < limit:
                self.aside[request] = replace(mine, heard=tokens)
            else:
                cut = mine if tokens is None else replace(mine, reason=StopReason.LENGTH)
                self._finish(request, cut, self.partner)
                del self.aside[request]
        return {r: mine for r, mine in self.aside.items() if mine.heard is not None and mine.state is None}

    def _finish(self, request: int, mine: _Aside, partner: Partner) -> None:
        """Take the completion of a request that is at its end."""
        mask = None
        if request in self.observed:
            mask = np.ones(len(mine.ids), dtype=np.bool_)
            for begin, end in self.observed.pop(request):
                mask[begin:end] = False
        began = self.began.pop(request)
        completion = self.engine.conversation(mine.ids, mine.log_behavior, mask, self.sampling, mine.reason, began)
        self._keep(request, partner.ended(request, completion))

    def _taken(self, row: int) -> _State:
        """Copy out what a row holds, so that the row can be given to another."""
        length = int(self.prompt_R[row] + self.count_R[row])
        numbers = [int(state[row]) for state in self._states]
        return numbers, self.rows.take(row), self.cache.take(row, length)

    def _take_back(self) -> None:
        """Give rows to the requests that were set aside and have been answered."""
        back: dict[int, _Aside] = {}
        for request, mine in list(self.aside.items()):
            if mine.heard is None or mine.state is None:
                continue
            if not self.free and self.extent < len(self.request_R):
                self.free, self.extent = [self.extent], self.extent + 1
            if not self.free:
                break
            row, *self.free = self.free
            numbers, of_row, cached = mine.state
            for state, number in zip(self._states, numbers, strict=True):
                state[row] = number
            self.rows.put(row, of_row)
            self.cache.put(row, cached)
            back[request] = replace(mine, row=row, state=None)
            del self.aside[request]
        self._go_on(back)

    def _go_on(self, answered: Mapping[int, _Aside]) -> None:
        """Append what was answered to the rows, in as few passes as `PREFILL_TOKENS` allows, and draw a token."""
        part: dict[int, _Aside] = {}
        tokens = 0
        for request, mine in answered.items():
            assert mine.heard is not None
            if part and tokens + len(mine.heard) > PREFILL_TOKENS:
                self._append(part)
                part, tokens = {}, 0
            part[request] = mine
            tokens += 1 + len(mine.heard)
        if part:
            self._append(part)

    def _append(self, answered: Mapping[int, _Aside]) -> None:
        rows = [mine.row for mine in answered.values()]
        begin = self.count_R[rows]
        heard = [np.asarray(mine.heard, dtype=np.int64) for mine in answered.values()]
        end = begin + np.array([len(tokens) for tokens in heard], dtype=np.int64)
        # The last token of the turn has been drawn and not read yet.
        read = [
            torch.from_numpy(np.append(mine.ids[-1:], new)) for mine, new in zip(answered.values(), heard, strict=True)
        ]
        starts = (self.prompt_R[rows] + begin - 1).tolist()
        logits = Continuations(self.cache, rows, starts, [ids.to(self.device) for ids in read]).run(self.engine.model)
        row_N = np.repeat(np.array(rows, dtype=np.int64), end - begin)
        at_N = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)])
        of_rows = torch.from_numpy(np.stack([rows, end, self.prompt_R[rows]])).to(self.device)
        of_tokens = torch.from_numpy(np.stack([row_N, at_N, np.concatenate(heard)])).to(self.device)
        self.rows.hear(of_rows[0], of_rows[1], Heard(*of_tokens), of_rows[2], logits, self.sampling)
        for request, b, e in zip(answered, begin.tolist(), end.tolist(), strict=True):
            self.observed.setdefault(request, []).append((b, e))
        self.count_R[rows] = end + 1
        self.begun_R[rows] = end

    def _give_up(self) -> None:
        """End what is aside where it is: generation was told to stop."""
        for request, mine in self.aside.items():
            assert self.partner is not None
            self._finish(request, replace(mine, reason=StopReason.INTERRUPTED), self.partner)
        self.aside.clear()


_State: TypeAlias = tuple[list[int], tuple[Tensor, ...], tuple[Tensor, Tensor]]  # of a row: counts, draws, cache


@dataclass(frozen=True)
class _Aside:
    """A request whose turn has ended: what it has said and read so far, and why it stopped."""

    ids: list[int]
    log_behavior: FloatArray
    reason: StopReason
    row: int
    heard: IntArray | None = None  # what it is to read next; None: nobody has answered yet
    state: _State | None = None  # its row's, which it does not have any more; None: it has it


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
    first = torch.arange(_PROBE, device=model.device) * 31 % config.vocab_size
    prompts = [first, first[2:-1]]
    packed = PackedPrompts([p[:-1] for p in prompts])
    with slot_attention(model):
        packed.run(model)
    expected = kinds or ["sliding_attention"] * bool(getattr(config, "sliding_window", None))
    if any(e == "sliding_attention" and packed.kinds[layer].window is None for layer, e in enumerate(expected)):
        raise UserError(f"{name} keeps its sliding window from the attention function: use the vllm engine for it")
    if own_attention == "sdpa" and any(kind.softcap for kind in packed.kinds.values()):
        raise UserError(f"{name} caps its attention scores, which sdpa ignores: load it with attn_implementation=eager")
    plain = [model(input_ids=p[None], attention_mask=torch.ones_like(p[None]), use_cache=False).logits for p in prompts]
    plain_RV = torch.cat([logits[0, -2:] for logits in plain])
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
