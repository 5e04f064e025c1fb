"""Episodes that others have played: their messages as tokens, and the environment's own judgement of them.

Invariant: an episode is judged by acting its turns again, in a fresh environment of the same world. It has a judgement
only if that environment says what the episode says it said, but for blanks. What the policy is trained to read are the
environment's own words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from tba.assistant_turns import AnswerFrame, AssistantTurn
from tba.environments.episode import EpisodeFailed, Observation
from tba.environments.hosts import Beginning, EpisodeReply, Hosts, InProcessHost, Question
from tba.environments.tools import calls_in
from tba.environments.turn_encoding import TurnEncoder
from tba.errors import UserError
from tba.protocols import Tokenizer
from tba.tables import Refusal
from tba.types import Completion, IntArray, Json, Message, Prompt, StopReason, quote

_JSON_BLANKS = re.compile(r"\\[nrt]")
_CACHED_WRITERS = 64  # for so many sets of tools
# (whether prompts are chats, schemas of their tools) -> what writes an episode
Writers: TypeAlias = Callable[[bool, tuple[Json, ...]], "EpisodeWriter"]


@dataclass(frozen=True)
class EpisodeWriter:
    """Writes the messages of an episode as an engine would have sampled and read them."""

    encoder: TurnEncoder

    @property
    def form(self) -> AssistantTurn:
        """Returns how turns are written."""
        return self.encoder.form

    def frame_before(self, messages: Sequence[Message]) -> AnswerFrame:
        """Returns what stands around a turn that messages follow; none: around the last one."""
        if not messages:
            return self.encoder.frame_before(None)
        return self.encoder.frame_before(_observation((), messages) or Observation(""))

    def reply(self, turn: Sequence[int], messages: Sequence[Message]) -> IntArray:
        """Returns the tokens of messages that follow a turn. Raises `UserError` or `EpisodeFailed` where they cannot be
        written.
        """
        has_end, end_token = self.encoder.end_of(turn)
        observation = _observation([(c.name, c.id) for c in calls_in(self.encoder.turn_text(turn))], messages)
        if observation is None or (observation.results and not self.encoder.has_tools):
            return self.encoder.messages(messages, has_end, end_token)
        return self.encoder.observation(observation, has_end, end_token)

    def text(self, tokens: IntArray) -> str:
        """Returns the text of an episode."""
        return self.encoder.text(tokens)


def episode_writer(encoder: TurnEncoder) -> Writers:
    """Returns what makes the writer of an environment's episodes, whose prompts have one form and the same tools."""
    writer = EpisodeWriter(encoder)
    return lambda is_chat, tools: writer


def chat_writer(tokenizer: Tokenizer) -> Writers:
    """Returns what makes the writer of any chats. It raises `UserError` where prompts are texts, or the chat template
    writes no conversation.
    """

    @lru_cache(_CACHED_WRITERS)
    def writer(tools: str) -> EpisodeWriter:
        return EpisodeWriter(TurnEncoder(tokenizer, True, tuple(json.loads(tools))))

    def writer_of(is_chat: bool, tools: tuple[Json, ...]) -> EpisodeWriter:
        if not is_chat:
            raise UserError("its prompt is a text, which only one answer follows")
        return writer(json.dumps(tools))

    return writer_of


def _observation(calls: Sequence[tuple[str, str]], messages: Sequence[Message]) -> Observation | None:
    """Returns the observation that messages are after a turn with `calls` (their names and ids): of one message of the
    user's, or of messages of tools alone, in the order of the calls; None for other messages.
    """
    if len(messages) == 1 and messages[0]["role"] == "user":
        return Observation(messages[0]["content"])
    if any(message["role"] != "tool" for message in messages):
        return None
    if len(calls) != len(messages):
        calls = [(str(message.get("name", "tool")), "") for message in messages]
    results = tuple((name, message["content"]) for (name, _), message in zip(calls, messages, strict=True))
    ids = tuple(call_id for _, call_id in calls)
    return Observation("\n".join(result for _, result in results), results, ids if any(ids) else ())


@dataclass
class EpisodeReplays:
    """Acts recorded episodes again, several at once."""

    hosts: InProcessHost | Hosts
    encoder: TurnEncoder

    def __call__(self, episodes: Sequence[tuple[Prompt, Completion]]) -> list[Completion | Refusal]:
        """Returns each completion with its environment's judgement, or why it has none. Raises `UserError` for an
        object that is no environment, and `PartFailed` when no process can be started.
        """
        replays = [_ReplayedEpisode(prompt, completion, self.encoder) for prompt, completion in episodes]
        results: dict[int, Completion | Refusal] = {}
        try:
            for number, episode in enumerate(replays):
                self.hosts.ask(number, episode.question())
            while len(results) < len(replays):
                for number, reply in self.hosts.replies(wait=True).items():
                    step = replays[number].next_step(reply)
                    if isinstance(step, Question):
                        self.hosts.ask(number, step)
                    else:
                        results[number] = step
                        self.hosts.release(number)
        finally:
            self.hosts.close()
        return [results[number] for number in range(len(replays))]


class _ReplayedEpisode:
    """One episode that is acted again."""

    def __init__(self, prompt: Prompt, completion: Completion, encoder: TurnEncoder) -> None:
        self._prompt, self._completion, self._encoder = prompt, completion, encoder
        self._spans = completion.turns
        self._turn_count = 0  # turns that the environment was told
        self._observations: list[IntArray] = []

    def question(self) -> Question:
        """Returns the next turn as a question, or without one the end of a completion that was cut off."""
        beginning = None
        if not self._turn_count:
            beginning = Beginning(self._prompt.fields, self._prompt.world, self._prompt.text)
        if self._turn_count == len(self._spans):
            return Question(beginning, None)
        begin, end = self._spans[self._turn_count]
        tokens = self._completion.tokens[begin:end].tolist()
        self._turn_count += 1
        is_cut = self._is_last and end == len(self._completion.tokens) and not self._encoder.end_of(tokens)[0]
        if is_cut and self._completion.stop_reason is StopReason.LENGTH:
            return Question(beginning, None, self._encoder.text(self._completion.tokens[begin:end]))
        return Question(beginning, self._encoder.turn_text(tokens))

    def next_step(self, reply: EpisodeReply) -> Question | Completion | Refusal:
        """Takes a reply; returns the next question, or in the end the completion with its judgement."""
        if reply.failure:
            return Refusal("its environment fails", reply.failure)
        if self._is_last and reply.judgement is not None:
            return replace(self._with_observations(), judgement=reply.judgement)
        if reply.observation is None:
            return _disagreement(f"it is over after turn {self._turn_count}")
        if self._is_last and self._completion.stop_reason is not StopReason.LENGTH:
            return Refusal("an episode that its environment has not ended")
        return self._compare(reply.observation)

    @property
    def _is_last(self) -> bool:
        return self._turn_count == len(self._spans)

    def _compare(self, observation: Observation) -> Question | Refusal:
        """Returns the next question if the environment says what the episode says it said."""
        begin, end = self._spans[self._turn_count - 1]
        try:
            turn_end = self._encoder.end_of(self._completion.tokens[begin:end].tolist())
            tokens = self._encoder.observation(observation, *turn_end)
        except EpisodeFailed as error:
            return Refusal("its environment fails", str(error))
        recorded_tokens = self._completion.tokens[end : None if self._is_last else self._begin]
        if self._is_last and not len(recorded_tokens):  # it had no room to be read
            return self.question()
        recorded, heard = self._encoder.text(recorded_tokens), self._encoder.text(tokens)
        if _split_words(recorded) != _split_words(heard):
            return _disagreement(f"{quote(heard)} after turn {self._turn_count}, and not {quote(recorded)}")
        self._observations.append(tokens)
        return self.question()

    @property
    def _begin(self) -> int:
        """Returns where the next turn begins."""
        return self._spans[self._turn_count][0]

    def _with_observations(self) -> Completion:
        """Returns the completion with the environment's own words; one that was sampled here or elsewhere stays."""
        completion = self._completion
        if completion.log_behavior is not None or completion.mask is None:
            return completion
        parts: list[tuple[IntArray, bool]] = []
        for i, (begin, end) in enumerate(self._spans):
            parts.append((completion.tokens[begin:end], True))
            parts += [(tokens, False) for tokens in self._observations[i : i + 1]]
        tokens = np.concatenate([part for part, _ in parts])
        mask = np.concatenate([np.full(len(part), is_turn) for part, is_turn in parts])
        return replace(completion, tokens=tokens, mask=mask, text=self._encoder.text(tokens))


def _split_words(text: str) -> list[str]:
    """Returns a text without its blanks, also those in JSON, as which some templates write what tools give."""
    return _JSON_BLANKS.sub(" ", text).split()


def _disagreement(detail: str) -> Refusal:
    return Refusal("the environment answers otherwise", detail)
