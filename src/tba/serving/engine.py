"""An engine whose completions are episodes of agents elsewhere: each agent's call is a turn that the policy samples.

Two threads meet here. The server's thread posts requests to the `Mailbox`; the searcher's thread, which owns the
engine, takes them between tokens and answers each through its future. To the searcher it is an engine like others: it
submits prompts, and gets completions to grade.

Invariant: an episode answers one prompt that the searcher has submitted, and ends as one completion, or as none where
it is abandoned or interrupted. A row that waits for its agent's next call is parked; what the engine has dropped is
read again. Calls of the model as it was before training go through an engine of their own (`BaseCalls`), which no
weights are loaded into, and have no part in a completion.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tba.errors import UserError
from tba.markup import decode_tokens
from tba.protocols import Engine, Flow, Model, Partner, PromptSource, StagesWeights, Tokenizer, Turn, TurnLimits
from tba.rollout.searcher import OpenAnswer
from tba.serving.chat import RequestRefused
from tba.serving.episode import SampledAnswer
from tba.types import Completion, IntArray, Outcome, Prompt, Sampling, StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor

POLL_SECONDS = 0.05  # of a wait for the server's requests
_SLICE_SECONDS = 0.25  # that policy and base compute in turn, while agents call both
NO_LEASE = -1  # the position of a prompt that an agent has chosen


@dataclass(frozen=True)
class Seat:
    """An episode's place among the answers to a prompt, which has the given number in the flow."""

    number: int
    prompt: Prompt
    is_chosen: bool = False  # by its agent


@dataclass(frozen=True)
class SeatRequest:
    """Asks for a seat: of this prompt, or of the next one of the run's order."""

    prompt: Prompt | None
    future: Future[Seat]


@dataclass(frozen=True)
class SampleRequest:
    """Asks for an answer in the episode of a seat, behind the tokens of a prompt. parked: the engine's request that has
    read all of them but the last `new_tokens`. is_base: of the model as it was before training.
    """

    seat: Seat
    prompt: Prompt
    new_tokens: IntArray
    limits: TurnLimits
    future: Future[SampledAnswer]
    parked: int | None = None
    is_base: bool = False


@dataclass(frozen=True)
class EndedEpisode:
    """Gives a seat back with its completion; None: there is none, and the seat is for another episode."""

    seat: Seat
    completion: Completion | None
    parked: Sequence[int] = ()  # requests of the engine behind which no call will go on
    unanswered: Sequence[SampleRequest] = ()  # whose answers nobody waits for


@dataclass(frozen=True)
class NoMoreEpisodes:
    """Says that no agent has an episode, so that answers wait for no other answers to their prompts."""


@dataclass(frozen=True)
class SearcherWork:
    """Asks for a call in the searcher's thread, while the engine computes nothing."""

    function: Callable[[], Any]
    future: Future[Any]


MailboxItem: TypeAlias = SeatRequest | SampleRequest | EndedEpisode | NoMoreEpisodes | SearcherWork


class Mailbox:
    """Carries requests from the server's thread to the searcher's."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[MailboxItem] = queue.SimpleQueue()
        self._has_items = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()  # nothing is posted while the mailbox closes

    def post(self, item: MailboxItem) -> None:
        """Post a request. Raises `RequestRefused` once the run has ended."""
        with self._lock:
            if self._closed.is_set():
                raise run_ended()
            self._items.put(item)
        self._has_items.set()

    def take(self) -> list[MailboxItem]:
        """Returns all that was posted since the last call."""
        self._has_items.clear()
        items = []
        while not self._items.empty():
            items.append(self._items.get())
        return items

    def wait(self, seconds: float) -> None:
        """Wait until something is posted, at most so long."""
        self._has_items.wait(seconds)

    def close(self) -> None:
        """Refuse what is posted from now on, and what nobody has taken."""
        with self._lock:
            self._closed.set()
        for item in self.take():
            refuse(item)


def run_ended() -> RequestRefused:
    """Returns the refusal of what comes too late; one of its own each time, since errors keep what they passed."""
    return RequestRefused(503, "the run has ended: begin another one, or another server", "run_ended")


def refuse(item: MailboxItem, error: Exception | None = None) -> None:
    """Fail the future of a request that is not answered, if it has one."""
    if not isinstance(item, SeatRequest | SampleRequest | SearcherWork) or item.future.done():
        return
    if item.future.set_running_or_notify_cancel():  # the server's thread may give up at any moment
        item.future.set_exception(error or run_ended())


@dataclass
class ServedPrompts:
    """The prompts that agents have chosen, before those of the run's own order. A chosen prompt has no lease."""

    source: PromptSource
    chosen: deque[Prompt] = field(default_factory=deque)

    def take(self, count: int) -> tuple[list[int], list[Prompt]]:
        """Returns the positions and prompts of the next `count`."""
        prompts = [self.chosen.popleft() for _ in range(min(count, len(self.chosen)))]
        positions, leased_prompts = self.source.take(count - len(prompts)) if count > len(prompts) else ([], [])
        return [NO_LEASE] * len(prompts) + positions, prompts + leased_prompts

    def outcomes(self, rewards: Mapping[int, Sequence[float]]) -> Sequence[Outcome]:
        """Returns the outcomes of the prompts of the run's own order."""
        return self.source.outcomes({p: values for p, values in rewards.items() if p != NO_LEASE})


@dataclass
class AgentLink:
    """What agents elsewhere ask of a searcher's engine, and who is told of their answers."""

    mailbox: Mailbox
    on_done: Callable[[OpenAnswer], None] | None = None  # is told of each answer that is on the disk, or rejected
    accepts_episodes: Callable[[], bool] = lambda: True  # whether another episode may begin
    make_base_engine: Callable[[], Engine] | None = None  # of the model as it was before training; None: it has none

    def attach(self, model: Model, longest_prompt: int, source: PromptSource) -> tuple[ServedEngine, ServedPrompts]:
        """Returns an engine whose answers are agents' episodes, and the prompts that it asks."""
        prompts, engine = ServedPrompts(source), model.engine(Version(), longest_prompt)
        decode = partial(_decode, model.tokenizer())
        return ServedEngine(engine, self.mailbox, prompts, decode, self._accepts_episodes, self._base_engine), prompts

    def _accepts_episodes(self) -> bool:
        return self.accepts_episodes()  # which is set once the searcher is there

    def _base_engine(self) -> Engine:
        if self.make_base_engine is None:
            raise UserError("this server has no model from before training: call the policy")
        return self.make_base_engine()


def _decode(tokenizer: Tokenizer, tokens: IntArray) -> str:
    return decode_tokens(tokenizer, tokens.tolist())


@dataclass
class ServedEngine:
    """Samples the answers of agents' calls from another engine's weights."""

    engine: Engine
    mailbox: Mailbox
    prompts: ServedPrompts
    decode: Callable[[IntArray], str]  # tokens as a text, without special ones
    accepts_episodes: Callable[[], bool]  # whether another episode may begin
    make_base_engine: Callable[[], Engine]  # of the model as it was before training
    _base_engine: Engine | None = None

    @property
    def version(self) -> Version:
        return self.engine.version

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Copy `weights` into the engine. Raises `KeyError` or `ValueError` on a name or shape mismatch."""
        self.engine.load(weights, version)

    def stage(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Begin to copy `weights` to the engine's device, if it does that; returns what is to be given to `load`."""
        return self.engine.stage(weights) if isinstance(self.engine, StagesWeights) else weights

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> ServedFlow:
        """Returns an empty flow of `count` episodes of each prompt."""
        assert partner is None

        def make_base_flow(base_calls: BaseCalls) -> Flow:
            self._base_engine = self._base_engine or self.make_base_engine()
            return self._base_engine.flow(1, sampling, rng.spawn(1)[0], base_calls)

        flow = ServedFlow(self.mailbox, self.prompts, count, self.accepts_episodes, self.decode)
        flow.flow = self.engine.flow(1, sampling, rng, flow)
        flow.base_calls = BaseCalls(make_base_flow, flow.must_return, self.decode)
        return flow


@dataclass
class BaseCalls:
    """The calls of the model as it was before training: the partner of a flow of that model's engine, both of which are
    made at the first call. Each call reads its whole conversation, of which nothing is kept.
    """

    make_flow: Callable[[BaseCalls], Flow]  # raises `UserError`
    must_return: Callable[[], bool]  # whether `next` of the flow is to return between two tokens
    decode: Callable[[IntArray], str]
    flow: Flow | None = None
    _new: deque[SampleRequest] = field(default_factory=deque)
    _waiting: dict[int, SampleRequest] = field(default_factory=dict)  # by request of the flow
    _heard: list[int] = field(default_factory=list)  # requests that have been answered and are to end

    @property
    def is_busy(self) -> bool:
        """Returns whether calls wait for their answers."""
        return bool(self._new or self._waiting)

    def add(self, item: SampleRequest) -> None:
        """Add a call, which `next` begins: an engine may have to be made for it."""
        self._new.append(item)

    def next(self, interrupted: Callable[[], bool] | None) -> None:
        """Compute until a call is answered, or `must_return`."""
        while self._new:
            self._begin(self._new.popleft())
        if self.flow is not None and self._waiting:
            self.flow.next(interrupted, until_needed=False)

    def _begin(self, item: SampleRequest) -> None:
        if item.future.done():
            return
        try:
            self.flow = self.flow or self.make_flow(self)
        except UserError as error:
            refuse(item, RequestRefused(503, str(error), "no_base"))
            return
        request = self.flow.prompts_submitted
        try:
            self.flow.submit([item.prompt])
        except UserError as error:
            refuse(item, RequestRefused(400, str(error), "context_length_exceeded"))
            return
        self._waiting[request] = item

    def cancel(self, items: Sequence[SampleRequest]) -> None:
        """End calls whose answers nobody waits for."""
        identities = set(map(id, items))
        for item in self._new:
            if id(item) in identities:
                refuse(item)
        for request, item in self._waiting.items():
            if self.flow is not None and id(item) in identities:
                self.flow.cancel(request)

    def refuse_all(self) -> None:
        """Refuse all calls, because the run has ended."""
        new_items, self._new = self._new, deque()
        self.next(lambda: True)
        for item in (*new_items, *self._waiting.values()):  # of the latter those that had not begun
            refuse(item)
        self._waiting.clear()

    def turn_limits(self, request: int) -> TurnLimits:
        """Returns the limits of the call that a request answers."""
        return self._waiting[request].limits

    def hear(self, turns: Sequence[Turn]) -> None:
        """Answer the calls whose turns have ended."""
        for turn in turns:
            item = self._waiting.pop(turn.request)
            _give(item, _answer_of_turn(turn, len(item.prompt.tokens)))
            self._heard.append(turn.request)

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        """Returns that no answered request goes on."""
        heard_requests, self._heard = self._heard, []
        return dict.fromkeys(heard_requests)

    def ended(self, request: int, completion: Completion) -> Completion:
        """Answer the call whose answer is as long as any, or refuse the one that was interrupted."""
        if request in self._waiting:
            item = self._waiting.pop(request)
            _give(item, _answer_of_end(completion, 0, self.decode, len(item.prompt.tokens)))
        return completion


@dataclass
class ServedFlow:
    """Prompts that agents are answering: a flow (`protocols.Flow`), and the partner of the one within, whose requests
    are the conversations that go on in one row.
    """

    mailbox: Mailbox
    prompts: ServedPrompts
    count: int  # episodes of each prompt that nobody has chosen
    accepts_episodes: Callable[[], bool]
    decode: Callable[[IntArray], str]
    flow: Flow = field(init=False)
    base_calls: BaseCalls = field(init=False)
    prompts_submitted: int = 0
    unfinished_prompts: dict[int, int] = field(default_factory=dict)  # completions to come, by number
    _free_seats: deque[Seat] = field(default_factory=deque)
    _chosen_seats: dict[str, deque[Seat]] = field(default_factory=dict)  # by the prompt's key
    _seat_requests: deque[SeatRequest] = field(default_factory=deque)
    _unclaimed_choices: int = 0  # prompts that agents have chosen and that are not submitted yet
    _completions: dict[int, list[Completion]] = field(default_factory=dict)  # not handed out yet, by number
    _waiting: dict[int, SampleRequest] = field(default_factory=dict)  # by request: the call that it answers
    _parked: set[int] = field(default_factory=set)  # requests that wait for a call
    _tokens_read: dict[int, int] = field(default_factory=dict)  # by request, for the call that it answers
    _sampled_counts: Counter[int] = field(default_factory=Counter)  # tokens of earlier answers, by request
    _cancelled: set[int] = field(default_factory=set)  # requests whose answers nobody waits for
    # of episodes that have not ended, by the identity of their seats
    _open_answers: dict[int, tuple[Seat, list[SampledAnswer]]] = field(default_factory=dict)
    _returns_when_needed: bool = False
    _rooms: dict[int, int] = field(default_factory=dict)  # tokens that a parked request has room for
    _replies: dict[int, IntArray | None] = field(default_factory=dict)  # not handed to the engine yet
    _work: deque[SearcherWork] = field(default_factory=deque)
    _is_ending: bool = False  # all that is unfinished is being ended
    _slice_end: float = 0.0  # when policy or base has computed long enough while the other waits, by a monotonic clock

    # As a flow

    @property
    def prompts_needed(self) -> int:
        """Returns how many more prompts agents wait for."""
        if not self._seat_requests or not self.accepts_episodes():
            return 0
        unchosen_count = sum(request.prompt is None for request in self._seat_requests)
        return len(self.prompts.chosen) + -(-max(0, unchosen_count - len(self._free_seats)) // self.count)

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Add prompts, first those that were chosen."""
        for prompt in prompts:
            number, self.prompts_submitted = self.prompts_submitted, self.prompts_submitted + 1
            is_chosen = self._unclaimed_choices > 0
            seats = [Seat(number, prompt, is_chosen) for _ in range(1 if is_chosen else self.count)]
            self.unfinished_prompts[number] = len(seats)
            if is_chosen:
                self._unclaimed_choices -= 1
                self._chosen_seats.setdefault(prompt.key, deque()).extend(seats)
            else:
                self._free_seats.extend(seats)
        self._assign_seats()

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_needed: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        """Computes until completions are there, or (`until_needed`) prompts are needed; returns the former by number.
        A number comes again as long as it is in `unfinished_prompts`.
        """
        self._returns_when_needed = until_needed
        while not self._has_news():
            if self.prompts_needed and not self.unfinished_prompts:  # all prompts were leased when it began
                break
            if interrupted is not None and interrupted():
                return self._interrupt()
            if self._work:
                self._do_work(self._work.popleft())
            elif self._waiting or self._replies or self.base_calls.is_busy:
                self._compute(interrupted)
            else:
                self.mailbox.wait(POLL_SECONDS)
        return self._pop_completions()

    def _compute(self, interrupted: Callable[[], bool] | None) -> None:
        """Compute until calls are answered; policy and base in turn."""
        self._slice_end = time.monotonic() + _SLICE_SECONDS
        if self._waiting or self._replies:
            self.flow.next(interrupted, until_needed=False)
        if self.base_calls.is_busy:
            self._slice_end = time.monotonic() + _SLICE_SECONDS
            self.base_calls.next(interrupted)

    def cancel(self, request: int) -> None:
        """Ends one of the requests of the flow within."""
        self.flow.cancel(request)

    def _interrupt(self) -> list[tuple[int, list[Completion]]]:
        """Ends all episodes where they are; returns the completions that are there, by number. Those of episodes that
        have not ended are interrupted, with all that was sampled.
        """
        self._is_ending = True
        self.flow.next(lambda: True, until_needed=False)
        self.base_calls.refuse_all()
        self._is_ending = False
        unanswered: list[MailboxItem] = [*self._seat_requests, *self._waiting.values(), *self._work]
        for item in unanswered:
            refuse(item)
        self._seat_requests.clear()
        self._work.clear()
        for state in (self._waiting, self._parked, self._replies, self._rooms, self._tokens_read, self._sampled_counts):
            state.clear()
        self._cancelled.clear()
        self._free_seats.clear()
        self._chosen_seats.clear()
        for number in self.unfinished_prompts:
            self._completions.setdefault(number, [])
        for seat, answers in self._open_answers.values():
            if seat.number in self.unfinished_prompts:
                self._completions.setdefault(seat.number, []).append(_interrupted(answers))
        self._open_answers.clear()
        self.unfinished_prompts = {}
        return self._pop_completions()

    def _pop_completions(self) -> list[tuple[int, list[Completion]]]:
        completions, self._completions = self._completions, {}
        return list(completions.items())

    # Requests of the server's thread

    def _take_items(self) -> None:
        for item in self.mailbox.take():
            if isinstance(item, SampleRequest):
                (self.base_calls.add if item.is_base else self._begin_turn)(item)
            elif isinstance(item, SeatRequest):
                self._seat_requests.append(item)
                if item.prompt is not None and self._lacks_seat(item.prompt.key):
                    self.prompts.chosen.append(item.prompt)
                    self._unclaimed_choices += 1
            elif isinstance(item, SearcherWork):
                self._work.append(item)
            elif isinstance(item, NoMoreEpisodes):
                self._close_groups()
            else:
                self._end_episode(item)
        self._assign_seats()

    @staticmethod
    def _do_work(work: SearcherWork) -> None:
        if not work.future.set_running_or_notify_cancel():
            return
        try:
            work.future.set_result(work.function())
        except Exception as error:  # noqa: BLE001 - whoever asked for it gets it
            work.future.set_exception(error)

    def _lacks_seat(self, key: str) -> bool:
        """Returns whether more agents wait for a chosen prompt than there are seats, or will be."""
        waiting_count = sum(r.prompt is not None and r.prompt.key == key for r in self._seat_requests)
        return waiting_count > len(self._chosen_seats.get(key, ())) + sum(p.key == key for p in self.prompts.chosen)

    def _assign_seats(self) -> None:
        """Give the seats that are free to the agents that wait for them, in order."""
        self._seat_requests = deque(request for request in self._seat_requests if not request.future.done())
        for request in list(self._seat_requests):
            key = None if request.prompt is None else request.prompt.key
            seats = self._free_seats if key is None else self._chosen_seats.get(key)
            if seats:
                self._seat_requests.remove(request)
                if request.future.set_running_or_notify_cancel():
                    request.future.set_result(seats.popleft())

    def _end_episode(self, episode: EndedEpisode) -> None:
        for request in self._parked.intersection(episode.parked):
            self._replies[request] = None
        for request, item in list(self._waiting.items()):
            if any(item is unanswered for unanswered in episode.unanswered):
                self.flow.cancel(request)
                self._cancelled.add(request)
        self.base_calls.cancel(episode.unanswered)
        seat = episode.seat
        self._open_answers.pop(id(seat), None)
        if episode.completion is not None:
            self._finish(seat.number, [episode.completion])
        elif seat.is_chosen:
            self._finish(seat.number, [])
        elif seat.number in self.unfinished_prompts:
            self._free_seats.append(seat)

    def _close_groups(self) -> None:
        """Close the prompts that were answered by fewer agents than they have seats."""
        seats, self._free_seats = self._free_seats, deque()
        for seat in seats:
            self._finish(seat.number, [])

    def _finish(self, number: int, completions: list[Completion]) -> None:
        """Hand out the completions of one seat."""
        if number not in self.unfinished_prompts:
            return  # the run has ended it
        self.unfinished_prompts[number] -= 1
        if not self.unfinished_prompts[number]:
            del self.unfinished_prompts[number]
        self._completions.setdefault(number, []).extend(completions)

    def _begin_turn(self, item: SampleRequest) -> None:
        """Have an answer sampled: in the row that has read what is before it, or in a new one."""
        if item.future.done():
            return
        parked = item.parked
        if parked in self._parked:
            self._parked.discard(parked)
            if len(item.new_tokens) + (item.limits.max_tokens or 1) <= self._rooms.pop(parked):
                self._waiting[parked], self._replies[parked] = item, item.new_tokens
                self._tokens_read[parked] = len(item.new_tokens)
                return
            self._replies[parked] = None
        request = self.flow.prompts_submitted
        self._waiting[request], self._tokens_read[request] = item, len(item.prompt.tokens)
        try:
            self.flow.submit([item.prompt])
        except UserError as error:
            del self._waiting[request], self._tokens_read[request]
            refuse(item, RequestRefused(400, str(error), "context_length_exceeded"))

    # As the partner of the flow within

    def must_return(self) -> bool:
        """Returns whether there are completions to hand out, agents wait for prompts, or there is other work."""
        if self._is_ending:
            return False
        is_turn_over = self.base_calls.is_busy and time.monotonic() >= self._slice_end
        return self._has_news() or bool(self._work) or is_turn_over

    def _has_news(self) -> bool:
        self._take_items()
        return bool(self._completions) or (self._returns_when_needed and self.prompts_needed > 0)

    def turn_limits(self, request: int) -> TurnLimits:
        """Returns the limits of the call that a request answers."""
        return self._waiting[request].limits

    def hear(self, turns: Sequence[Turn]) -> None:
        """Answer the calls whose turns have ended; their rows wait for the next calls."""
        for turn in turns:
            if self._answer(turn.request, _answer_of_turn(turn, self._tokens_read.pop(turn.request))):
                self._parked.add(turn.request)
                self._rooms[turn.request] = turn.room
            else:
                self._replies[turn.request] = None

    def replies(self, wait: bool) -> Mapping[int, IntArray | None]:
        """Returns the tokens between an answer and the next one, for the rows in which agents go on."""
        if wait and not self._replies:
            self.mailbox.wait(POLL_SECONDS)
        self._take_items()
        replies, self._replies = self._replies, {}
        return replies

    def ended(self, request: int, completion: Completion) -> Completion:
        """Answer the call in which a row has used up its room, or refuse the one that was interrupted."""
        self._parked.discard(request)
        self._rooms.pop(request, None)
        is_cancelled, earlier_count = request in self._cancelled, self._sampled_counts.pop(request, 0)
        self._cancelled.discard(request)
        tokens_read = self._tokens_read.pop(request, 0)
        if request in self._waiting and is_cancelled:
            refuse(self._waiting.pop(request))
        elif request in self._waiting:
            self._answer(request, _answer_of_end(completion, earlier_count, self.decode, tokens_read))
            del self._sampled_counts[request]
        return completion

    def read_again(self, request: int) -> None:
        """Count that all is read again before the answer to the call that a request goes on with."""
        self._tokens_read[request] = len(self._waiting[request].prompt.tokens)

    def _answer(self, request: int, answer: SampledAnswer) -> bool:
        """Answer the call that a request belongs to. Returns whether somebody waits for it."""
        item = self._waiting.pop(request)
        self._sampled_counts[request] += len(answer.tokens)
        self._open_answers.setdefault(id(item.seat), (item.seat, []))[1].append(answer)
        return _give(item, answer)


def _answer_of_turn(turn: Turn, tokens_read: int) -> SampledAnswer:
    tokens = np.array(turn.tokens, dtype=np.int32)
    facts = (turn.text, turn.stop_reason, turn.log_behavior, turn.versions, tokens_read)
    return SampledAnswer(tokens, *facts, turn.request)


def _answer_of_end(
    completion: Completion, earlier_count: int, decode: Callable[[IntArray], str], tokens_read: int
) -> SampledAnswer:
    """Returns what was sampled of a completion behind its first `earlier_count` sampled tokens."""
    mask = np.ones(len(completion.tokens), np.bool_) if completion.mask is None else completion.mask
    log_behavior = np.zeros(len(mask), np.float32) if completion.log_behavior is None else completion.log_behavior
    tokens, log_answer = completion.tokens[mask][earlier_count:], log_behavior[mask][earlier_count:]
    return SampledAnswer(tokens, decode(tokens), completion.stop_reason, log_answer, completion.versions, tokens_read)


def _give(item: SampleRequest, answer: SampledAnswer) -> bool:
    """Answer a call, or refuse it where the answer was interrupted. Returns whether somebody waits for it."""
    if answer.stop_reason is StopReason.INTERRUPTED:
        refuse(item)
        return False
    is_waiting = item.future.set_running_or_notify_cancel()
    if is_waiting:
        item.future.set_result(answer)
    return is_waiting


def _interrupted(answers: Sequence[SampledAnswer]) -> Completion:
    """Returns the completion of an episode that has not ended, which counts its tokens and is not judged."""
    tokens = np.concatenate([answer.tokens for answer in answers])
    versions = min(answer.versions[0] for answer in answers), max(answer.versions[1] for answer in answers)
    return Completion(tokens, "", StopReason.INTERRUPTED, versions)
