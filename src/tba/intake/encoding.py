"""Answers as the run's own tokens, each to a prompt of its task where the task has it.

Invariant: what comes out says, token by token, what went in: the text of a completion is decoded from its tokens, and a
text that the tokenizer cannot express is refused. No answer to a prompt held out for evaluation is taken.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from tba.chat_prompts import chat_markup, prompt_tokens
from tba.errors import UserError
from tba.intake.answers import Answer
from tba.markup import Markup, decoded, encoded, plain
from tba.protocols import Tokenizer
from tba.tables import Refusal
from tba.turns import AssistantTurn, Frame, assistant_turn
from tba.types import ELSEWHERE, THOUGHTS, Completion, Json, Message, Prompt, StopReason, Trajectory

_QUESTION = "question"  # the field in which a task keeps what its prompt asks, without the words around it
_CHARACTERS = 256  # upper bound per token: a text with more characters than the limit allows is not even tokenised
_HELD_OUT = Refusal("its prompt is held out for evaluation")


@dataclass(frozen=True)
class Encoded:
    """Holds an imported prompt and completion, and whether the prompt is one of the task's own."""

    prompt: Prompt
    completion: Completion
    known: bool


class Known:
    """Finds a split's prompts by their tokens, their text or the question that they ask."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._by_key: dict[str, Prompt] = {}
        self._by_text: dict[str, Prompt] = {}
        self._by_question: dict[str, Prompt | None] = {}  # None: two prompts ask it
        for prompt in prompts:
            if self._by_key.setdefault(prompt.key, prompt) is not prompt:
                continue
            self._by_text.setdefault(prompt.text, prompt)
            question = prompt.fields.get(_QUESTION)
            for asked in {prompt.text.strip()} | ({question.strip()} if isinstance(question, str) else set()):
                self._by_question[asked] = None if asked in self._by_question else prompt

    def find(self, texts: Sequence[str], question: str) -> Prompt | None:
        """Returns the prompt that equals the first possible one of `texts`, else the one that asks `question`."""
        found = next((prompt for text in texts if (prompt := self._by_text.get(text)) is not None), None)
        return found or self._by_question.get(question.strip())

    def at(self, key: str) -> Prompt | None:
        """Returns the prompt with that key."""
        return self._by_key.get(key)


@dataclass(frozen=True)
class Encoder:
    """Answer -> prompt and completion."""

    task: str
    tokenizer: Tokenizer
    train: Known
    held_out: Known
    chat: bool  # the task's prompts are chats: an unknown text becomes a user's message
    max_prompt_tokens: int
    max_tokens: int  # of an answer, including its end-of-text token
    positions: int | None = None  # tokens of prompt and answer together that the model can read; None: any number
    thoughts: tuple[tuple[str, str], ...] = THOUGHTS  # as `Prompt` has them
    # by key, the first form of each prompt that the task lacks: all
    met: dict[str, Prompt] = field(default_factory=dict)
    # answers to one prompt are scored with the same fields

    def encode(self, answer: Answer) -> Encoded | Refusal:
        """Encodes an answer. Raises nothing: what cannot be tokenised is refused."""
        prompt = self._prompt(answer)
        if isinstance(prompt, Refusal):
            return prompt
        known = self.train.at(prompt.key) is not None
        chats = self.chat or prompt.messages is not None
        completion = self._completion(answer, prompt.text, chats)
        if isinstance(completion, Refusal):
            return completion
        return self._unreadable(prompt, completion) or Encoded(prompt, completion, known)

    def adopt(self, trajectory: Trajectory) -> Encoded | Answer | Refusal:
        """Takes a trajectory of another run with its tokens; as an `Answer` where they are another tokenizer's.

        Its behaviour log-probabilities stay; the weights that sampled it are none of this run's.
        """
        prompt, completion = replace(trajectory.prompt, task=self.task, thoughts=self.thoughts), trajectory.completion
        begin, text = getattr(self.tokenizer, "bos_token_id", None), prompt.tokens.tolist()
        same_tokenizer = prompt.text in (self._decoded(t, special=True) for t in (text, text[text[:1] == [begin] :]))
        readback = self._shown(completion.tokens.tolist())
        if not same_tokenizer or readback is None or not readback.startswith(completion.text):
            cut = completion.stop_reason is StopReason.LENGTH
            return Answer(prompt.text, completion.text, cut, trajectory.reward, None, prompt.fields)
        if self.held_out.at(prompt.key) is not None:
            return _HELD_OUT
        if len(completion.tokens) > self.max_tokens:
            return self._too_long(len(completion.tokens))
        found = self.train.at(prompt.key)
        prompt = found or self.met.setdefault(prompt.key, prompt)
        taken = Encoded(prompt, replace(completion, versions=(ELSEWHERE, ELSEWHERE)), found is not None)
        return self._unreadable(prompt, completion) or taken

    def _unreadable(self, prompt: Prompt, completion: Completion) -> Refusal | None:
        """Returns the refusal of what the model has no positions for."""
        tokens = len(prompt.tokens) + len(completion.tokens)
        if self.positions is None or tokens <= self.positions:
            return None
        return Refusal(f"longer with its prompt than the model's {self.positions} positions", f"{tokens} tokens")

    def _prompt(self, answer: Answer) -> Prompt | Refusal:
        texts, question = self._texts(answer.prompt, answer.tools)
        plain_texts = [*map(plain, texts)]
        if self.held_out.find(plain_texts, question) is not None:
            return _HELD_OUT
        known_prompt = self.train.find(plain_texts, question)
        if known_prompt is not None:
            return known_prompt
        if not texts:
            return Refusal("a chat of several turns, and the tokenizer has no chat template")
        if len(texts[0]) > _CHARACTERS * self.max_prompt_tokens:
            return Refusal(f"a prompt longer than {self.max_prompt_tokens} tokens", f"{len(texts[0])} characters")
        chats = self.chat or not isinstance(answer.prompt, str)
        chats = chats and bool(getattr(self.tokenizer, "chat_template", None))
        tokens = self._tokens(lambda: prompt_tokens(self.tokenizer, texts[:1], chats)[0])
        if not tokens:
            return Refusal("a prompt that the tokenizer cannot write")
        if len(tokens) > self.max_prompt_tokens:
            return Refusal(f"a prompt longer than {self.max_prompt_tokens} tokens", f"{len(tokens)} tokens")
        chat = None if isinstance(answer.prompt, str) else answer.prompt
        prompt = Prompt(
            self.task,
            np.array(tokens, dtype=np.int32),
            plain_texts[0],
            answer.fields,
            messages=chat,
            thoughts=self.thoughts,
        )
        if self.held_out.at(prompt.key) is not None:
            return _HELD_OUT
        return self.train.at(prompt.key) or self.met.setdefault(prompt.key, prompt)

    def _texts(self, prompt: str | tuple[Message, ...], tools: tuple[Json, ...]) -> tuple[list[str], str]:
        """Returns the texts that a prompt may stand for, the likeliest first, and the question that it asks."""
        if isinstance(prompt, str):
            rendered = self._rendered(({"role": "user", "content": prompt},), tools)
            texts = [rendered, prompt] if self.chat else [prompt, rendered]
            return [text for text in texts if text is not None], prompt
        rendered = self._rendered(prompt, tools)
        question = prompt[-1]["content"]
        alone = len(prompt) == 1 and not tools
        texts = [rendered, question if alone else None]
        one_question = all(message["role"] == "system" for message in prompt[:-1])
        return [text for text in texts if text is not None], question if one_question else ""

    def _rendered(
        self, messages: tuple[Message, ...], tools: tuple[Json, ...], answered: bool = False
    ) -> Markup | None:
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        try:
            return chat_markup(self.tokenizer, messages, tools, answered)
        except UserError:  # a template raises what it likes about foreign text; the line is refused
            return None

    @cached_property
    def _forms(self) -> tuple[AssistantTurn, AssistantTurn]:
        """Returns how an answer to a text is written, and how one to a chat is."""
        return assistant_turn(self.tokenizer, chat=False), assistant_turn(self.tokenizer)

    def _completion(self, answer: Answer, prompt: str, chat: bool) -> Completion | Refusal:
        if len(answer.response) > _CHARACTERS * self.max_tokens:
            return self._too_long(None)
        form, ends = self._forms[chat], self._forms[0].ends | self._forms[chat].ends
        form = form if chat and form.lead else form.behind(prompt)
        frame = form.called if answer.calling is not None else form.last
        frame = Frame(frame.opening) if answer.truncated else frame
        if answer.calling is not None:
            markup = self._called(answer, form)
            if not markup:
                return Refusal("an answer that calls tools, which the model's chat template does not write")
        elif response := self._without_end(answer.response, ends):
            markup = form.text(response, frame)
        else:
            return Refusal("an answer that the tokenizer cannot write")
        tokens = self._tokens(lambda: form.closed(markup, partial(encoded, self.tokenizer), frame))
        if tokens is None:
            return Refusal("an answer that the tokenizer cannot write")
        body = tokens if frame.end is None else tokens[:-1]
        text, read = self._shown(body), self._read(form, body, chat)
        written = self._comparable(plain(markup), chat)
        if not body or text is None or read is None or not ends.isdisjoint(body) or read != written:
            return Refusal("an answer that the tokenizer cannot write", f"it reads back as {read!r:.200}")
        if len(tokens) > self.max_tokens:
            return self._too_long(len(tokens))
        reason = StopReason.LENGTH if answer.truncated else StopReason.EXTERNAL
        return Completion(np.array(tokens, dtype=np.int32), text, reason, (ELSEWHERE, ELSEWHERE))

    def _read(self, form: AssistantTurn, body: list[int], chat: bool) -> str | None:
        """Returns an answer's text as it reads behind its prompt, to be compared; with what the template writes."""
        lead = self._tokens(lambda: encoded(self.tokenizer, form.lead)) or []
        before, text = (self._decoded(t, True) if chat else self._shown(t) for t in (lead, [*lead, *body]))
        if before is None or text is None:
            return None
        if not text.startswith(before):
            before, text = "", (self._decoded(body, True) if chat else self._shown(body)) or ""
        return self._comparable(text.removeprefix(before), chat)

    def _comparable(self, text: str, chat: bool) -> str:
        """Returns a text by which an answer is known again: some tokenizers normalise letters and runs of blanks, write
        a blank behind a special token, or leave blanks out when they decode.
        """
        loose = chat or getattr(self.tokenizer, "clean_up_tokenization_spaces", False)
        words = unicodedata.normalize("NFKC", text).rstrip()
        begin = " " if not chat and words[:1].isspace() else ""
        return begin + ("" if loose else " ").join(words.split())

    def _called(self, answer: Answer, form: AssistantTurn) -> Markup:
        """Returns an answer that calls tools as the template writes it; empty where that writes no calls."""
        assert not isinstance(answer.prompt, str)
        assert answer.calling is not None
        begun = self._rendered(answer.prompt, answer.tools)
        whole = self._rendered((*answer.prompt, answer.calling), answer.tools, answered=True)
        if begun is None or whole is None or not whole.startswith(begun):
            return Markup("")
        said = whole[len(begun) :]
        called = [call.get("function") or call for call in answer.calling["tool_calls"] if isinstance(call, Mapping)]
        names = [one.get("name") for one in called if isinstance(one, Mapping)]
        if not names or not all(isinstance(name, str) and name in plain(said) for name in names):
            return Markup("")  # it leaves them out
        ends = [frame.end.written for frame in (form.called, form.last) if frame.end is not None]
        return Markup(said[: min((at for end in ends if (at := said.find(end)) >= 0), default=None)])

    def _without_end(self, response: str, ends: Iterable[int]) -> str:
        """Returns an answer without the ends of its turn that the log spells out."""
        marks = tuple(mark for end in ends if (mark := self._decoded([end], special=True)))
        while mark := next((mark for mark in marks if response.rstrip().endswith(mark)), None):
            response = response.rstrip().removesuffix(mark)
        return response

    def _too_long(self, tokens: int | None) -> Refusal:
        """Returns the refusal of an answer that is longer than the run's own can be."""
        return Refusal(f"an answer longer than {self.max_tokens} tokens", "" if tokens is None else f"{tokens} tokens")

    def _tokens(self, encode: Callable[[], list[int]]) -> list[int] | None:
        """Returns the tokens that `encode` finds, None where it raises."""
        try:
            return encode()
        except Exception:  # noqa: BLE001 - tokenizers share no error; whatever it is, the line is refused and counted
            return None

    def _shown(self, tokens: Sequence[int]) -> str | None:
        """Returns tokens as a reward reads them."""
        try:
            return decoded(self.tokenizer, tokens)
        except Exception:  # noqa: BLE001 - ids of another tokenizer, for example
            return None

    def _decoded(self, tokens: Sequence[int], special: bool = False) -> str | None:
        try:
            return self.tokenizer.decode(tokens, skip_special_tokens=not special)
        except Exception:  # noqa: BLE001 - ids of another tokenizer, for example
            return None
