"""The calls of one episode as a tree of conversations, and the one completion that they make.

Each answered call is a node: the conversation up to and with its answer. A request goes on from the longest node whose
messages begin its own; only the messages behind it are encoded, after the tokens that were sampled. So what an agent
sends back is never made into tokens again. A request that goes on from no node begins a new segment of the episode.

Invariant: the completion has the tokens of every answer that was delivered exactly as they were sampled, each once, and
before each of them the tokens that it was sampled after.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tba.chat_prompts import chat_markup, prompt_tokens
from tba.environments.episode import EpisodeFailed
from tba.environments.recorded import EpisodeWriter, chat_writer
from tba.errors import UserError
from tba.serving.chat import (
    AnswerMessage,
    ChatRequest,
    MessageKey,
    RequestRefused,
    message_key,
)
from tba.types import BoolArray, Completion, FloatArray, IntArray, Json, Message, Prompt, Sampling, StopReason, Version


@dataclass(frozen=True)
class SampledAnswer:
    """Holds the T tokens of an answer as the engine has sampled them."""

    tokens: IntArray  # [T]
    text: str
    stop_reason: StopReason
    log_behavior: FloatArray  # [T]
    versions: tuple[Version, Version]  # the first and the last weights that sampled it
    tokens_read: int  # before it, which no row had read
    request: int | None = None  # of the engine, whose row can go on behind it; None: there is none


class ConversationEncoder:
    """Writes conversations as tokens: whole ones, and messages that follow an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._writers = chat_writer(tokenizer)

    def whole(self, messages: Sequence[Message], tools: Sequence[Json]) -> IntArray:
        """Returns the tokens [P] of a chat up to where the answer begins. Raises `RequestRefused`."""
        try:
            text = chat_markup(self._tokenizer, messages, tools)
            (tokens,) = prompt_tokens(self._tokenizer, [text], True)
        except UserError as error:
            raise RequestRefused(400, f"the model's chat template cannot write these messages: {error}") from error
        return np.array(tokens, dtype=np.int32)

    def following(self, answer: SampledAnswer, messages: Sequence[Message], tools: Sequence[Json]) -> IntArray:
        """Returns the tokens between an answer and the next one, for the messages between them. Raises
        `RequestRefused`.
        """
        try:
            return self.writer(tools).reply(answer.tokens.tolist(), messages)
        except (UserError, EpisodeFailed) as error:
            raise RequestRefused(400, f"the model's chat template cannot write these messages: {error}") from error

    def text(self, tokens: IntArray) -> str:
        """Returns tokens as text, without special ones."""
        return self.writer(()).text(tokens)

    def writer(self, tools: Sequence[Json]) -> EpisodeWriter:
        """Returns what writes the messages of conversations in which these tools may be called."""
        return self._writers(True, tuple(tools))


@dataclass(eq=False)
class AgentCall:
    """One call: a node of the tree once it is answered."""

    parent: AgentCall | None  # whose answer it goes on from; None: it begins a conversation
    read: IntArray  # [P] tokens between the parent's answer and its own; without a parent its whole prompt
    messages: tuple[MessageKey, ...]  # of the request, without empty answers
    tools: str
    chat: tuple[Message, ...] = ()  # the messages of the request
    message: Message | None = None  # of its answer
    stop_strings: tuple[str, ...] = ()
    reserved: int = 0  # tokens that its answer may have
    answer: SampledAnswer | None = None  # None: it is being sampled
    is_delivered: bool = False  # its answer reached the agent
    children: list[AgentCall] = field(default_factory=list)

    def tokens(self) -> IntArray:
        """Returns all tokens that its answer is sampled after."""
        parts: list[IntArray] = []
        call: AgentCall | None = self
        while call is not None:
            if call is not self:
                assert call.answer is not None
                parts.append(call.answer.tokens)
            parts.append(call.read)
            call = call.parent
        return np.concatenate(parts[::-1])

    @property
    def is_counted(self) -> bool:
        """Returns whether its answer has a part in the completion, as far as is known."""
        return self.answer is None or self.is_delivered

    def has_empty_answer(self, count: int) -> bool:
        """Returns whether `count` messages are those of its conversation with its answer, because that has none."""
        return count == len(self.messages)

    @property
    def answer_length(self) -> int:
        """Returns the tokens of its answer, and until it has one those that it may have."""
        return self.reserved if self.answer is None else len(self.answer.tokens)


@dataclass
class ConversationTree:
    """The calls of an episode that answers `prompt`, with at most `max_tokens` tokens in its completion."""

    prompt: Prompt
    encoder: ConversationEncoder
    max_tokens: int
    sampling: Sampling = Sampling()  # of all answers
    calls: list[AgentCall] = field(default_factory=list)  # in the order in which they came
    new_segments: Counter[str] = field(default_factory=Counter)  # conversations that go on from no answer, by reason
    _by_messages: dict[tuple[Any, ...], list[AgentCall]] = field(default_factory=dict)  # answered calls

    def begin_call(self, request: ChatRequest) -> AgentCall:
        """Returns the call that a request makes. Raises `RequestRefused` where the episode has no room for it."""
        tools = json.dumps(request.tools, sort_keys=True)
        parent, length = self._find_parent(request.messages, tools)
        if parent is None:
            read = self.encoder.whole(request.messages, request.tools)
        else:
            assert parent.answer is not None
            read = self.encoder.following(parent.answer, request.messages[length:], request.tools)
        keys = tuple(filter(None, map(message_key, request.messages)))
        call = AgentCall(parent, read, keys, tools, request.messages, stop_strings=request.stop_strings)
        room = self.max_tokens - self.length_with(call)
        if room < 1:
            raise RequestRefused(
                400,
                f"the episode has no room for another answer: its calls have up to {self.max_tokens} tokens in all, "
                "those that they read in new conversations included; end it, or begin the server with a larger "
                "--max-tokens",
                "context_length_exceeded",
            )
        call.reserved = room if request.max_tokens is None else min(room, request.max_tokens)
        self.calls.append(call)
        if parent is not None:
            parent.children.append(call)
        return call

    def answer_call(self, call: AgentCall, answer: SampledAnswer, message: AnswerMessage) -> None:
        """Record the answer of a call, and the message that the agent gets for it."""
        call.answer, call.message = answer, message.message
        for key in message.message_keys(self._stop_string(call, answer)):
            keys = (*call.messages, key) if key else call.messages
            self._by_messages.setdefault((call.tools, *keys), []).append(call)

    def _stop_string(self, call: AgentCall, answer: SampledAnswer) -> str:
        """Returns the stop string of its call that ended an answer; empty where none did."""
        if answer.stop_reason is not StopReason.STOP_STRING:
            return ""
        text = self.encoder.text(answer.tokens)
        return next((stop for stop in call.stop_strings if text.startswith(answer.text + stop)), "")

    def drop_call(self, call: AgentCall) -> None:
        """Forget a call that is not answered."""
        self.calls.remove(call)
        if call.parent is not None:
            call.parent.children.remove(call)

    def _find_parent(self, messages: Sequence[Message], tools: str) -> tuple[AgentCall | None, int]:
        """Returns the newest call whose conversation and answer begin the messages, the longest; and its length. An
        answer without a text and calls may be missing in the messages, as thoughts may.
        """
        keys = [(key, place) for place, key in enumerate(map(message_key, messages)) if key]
        for count in range(len(keys), 0, -1):
            calls = self._by_messages.get((tools, *(key for key, _ in keys[:count])))
            length = keys[count - 1][1] + 1
            if calls is not None and calls[-1].has_empty_answer(count) and messages[length:]:
                length += messages[length]["role"] == "assistant"  # the empty answer, which was sent back
            if calls is None or length == len(messages):
                continue
            if any(message["role"] == "assistant" for message in messages[length:]):
                self.new_segments["an answer that the model did not give"] += 1
                return None, 0
            for call in _with_ancestors(calls[-1]):
                call.is_delivered = True  # the agent has it, for it sends it back
            if any(call.is_counted for call in calls[-1].children):
                self.new_segments["a second call behind one answer"] += 1
            return calls[-1], length
        if any(call.is_counted for call in self.calls):
            is_known = any(message["role"] == "assistant" for message in messages)
            self.new_segments["a history that was changed" if is_known else "another conversation"] += 1
        return None, 0

    def length_with(self, call: AgentCall | None = None) -> int:
        """Returns the tokens of a completion of all calls, and of one more."""
        chains = self._chains(self.calls if call is None else [*self.calls, call])
        heads = sum(len(chain[0].tokens()) for chain in chains) - (
            len(self.prompt.tokens) if chains and self._reads_prompt(chains[0]) else 0
        )
        return heads + sum(
            call.answer_length + (len(call.read) if place else 0)
            for chain in chains
            for place, call in enumerate(chain)
        )

    def completion(self) -> Completion | None:
        """Returns the completion of all delivered answers; None where there is none."""
        tokens: list[IntArray] = []
        mask: list[BoolArray] = []
        log_behavior: list[FloatArray] = []
        begins: list[int] = []
        delivered_calls = self.delivered_calls
        if not delivered_calls:
            return None

        def append(part: IntArray, log_part: FloatArray | None = None) -> None:
            tokens.append(part)
            mask.append(np.full(len(part), log_part is not None))
            log_behavior.append(np.zeros(len(part), np.float32) if log_part is None else log_part)

        for number, chain in enumerate(self._chains(delivered_calls)):
            if number or not self._reads_prompt(chain):
                begins.append(sum(map(len, tokens)))
                append(chain[0].tokens())
            for place, call in enumerate(chain):
                assert call.answer is not None
                if place:
                    append(call.read)
                append(call.answer.tokens, call.answer.log_behavior)
        answers = [call.answer for call in delivered_calls if call.answer is not None]
        last_answer, whole_mask = answers[-1], np.concatenate(mask)
        return Completion(
            np.concatenate(tokens).astype(np.int32),
            last_answer.text,
            last_answer.stop_reason,
            (min(answer.versions[0] for answer in answers), max(answer.versions[1] for answer in answers)),
            sampling=self.sampling,
            log_behavior=np.concatenate(log_behavior).astype(np.float32),
            mask=None if whole_mask.all() else whole_mask,
            begins=np.array(begins, dtype=np.int32) if begins else None,
        )

    def transcript(self) -> tuple[Message, ...]:
        """Returns the longest conversation of delivered answers in which the assistant says nothing else than these."""
        conversations: list[tuple[Message, ...]] = [()]
        for call in self.delivered_calls:
            answer_count = sum(ancestor.message is not None for ancestor in _with_ancestors(call.parent))
            if sum(message["role"] == "assistant" for message in call.chat) <= answer_count:
                conversations.append((*call.chat, *([] if call.message is None else [call.message])))
        return max(conversations, key=len)

    @property
    def delivered_calls(self) -> list[AgentCall]:
        """Returns the calls whose answers reached the agent."""
        return [call for call in self.calls if call.is_delivered and call.answer is not None]

    @property
    def undelivered_count(self) -> int:
        """Returns how many answers nobody received."""
        return sum(call.answer is not None and not call.is_delivered for call in self.calls)

    def _chains(self, calls: Sequence[AgentCall]) -> list[list[AgentCall]]:
        """Returns the calls as chains in which each goes on from the one before: the segments of a completion. The
        first is one that goes on from the prompt, if any does.
        """
        chains: list[list[AgentCall]] = []
        by_tip: dict[AgentCall, list[AgentCall]] = {}
        for call in calls:  # a parent comes before its children, of which the first goes on in its chain
            chain = None if call.parent is None else by_tip.pop(call.parent, None)
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(call)
            by_tip[call] = chain
        prompt_chain = next(filter(self._reads_prompt, chains), None)
        return sorted(chains, key=lambda chain: chain is not prompt_chain)

    def _reads_prompt(self, chain: Sequence[AgentCall]) -> bool:
        """Returns whether a chain begins right behind the prompt."""
        return chain[0].parent is None and np.array_equal(chain[0].read, self.prompt.tokens)


def _with_ancestors(call: AgentCall | None) -> Iterator[AgentCall]:
    while call is not None:
        yield call
        call = call.parent
