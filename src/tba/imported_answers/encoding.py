"""Answers and episodes of several turns as the run's own tokens, each to a prompt of its task where the task has it.

Invariant: the tokens say what the imported text says: the text of a completion is decoded from its tokens, and a
text that the tokenizer cannot express is refused. No answer to a prompt held out for evaluation is taken.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from tba.assistant_turns import USER_SLOT, AnswerFrame, AssistantTurn, assistant_turn
from tba.chat_prompts import chat_markup, prompt_tokens
from tba.errors import TbaError, UserError
from tba.imported_answers.parsing import ImportedAnswer, is_answer
from tba.markup import Markup, decode_tokens, encode_markup, visible_text
from tba.protocols import Tokenizer
from tba.tables import Refusal
from tba.types import ELSEWHERE, THOUGHTS, Completion, IntArray, Json, Message, Prompt, StopReason, Trajectory

_QUESTION = "question"  # the field in which a task keeps what its prompt asks, without the words around it
_CHARACTERS = 256  # upper bound per token: a text with more characters than the limit allows is not even tokenised
_HELD_OUT = Refusal("its prompt is held out for evaluation")


class TurnWriter(Protocol):
    """Writes the turns of an episode, and what stands between them, as the run's own engine would have it."""

    @property
    def form(self) -> AssistantTurn:
        """Returns how turns are written."""
        ...

    def frame_before(self, messages: Sequence[Message]) -> AnswerFrame:
        """Returns what stands around a turn that messages follow; none: around the last one."""
        ...

    def reply(self, turn: Sequence[int], messages: Sequence[Message]) -> IntArray:
        """Returns the tokens of messages that follow a turn (its tokens). Raises `TbaError` where they cannot be
        written.
        """
        ...

    def text(self, tokens: IntArray) -> str:
        """Returns the text of an episode."""
        ...


@dataclass(frozen=True)
class EncodedAnswer:
    """Holds an imported prompt and completion, and whether the prompt is one of the task's own."""

    prompt: Prompt
    completion: Completion
    is_task_prompt: bool


class TaskPrompts:
    """Finds a split's prompts by their tokens, their text or the question that they ask."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._by_key: dict[str, Prompt] = {}
        self._by_text: dict[str, Prompt] = {}
        self._shared_texts: set[str] = set()  # of prompts of several worlds
        self._by_question: dict[str, Prompt | None] = {}  # None: two prompts ask it
        for prompt in prompts:
            if self._by_key.setdefault(prompt.key, prompt) is not prompt:
                continue
            if self._by_text.setdefault(prompt.text, prompt) is not prompt:
                self._shared_texts.add(prompt.text)
            question = prompt.fields.get(_QUESTION)
            for question_text in {prompt.text.strip()} | ({question.strip()} if isinstance(question, str) else set()):
                self._by_question[question_text] = None if question_text in self._by_question else prompt

    def find(self, texts: Sequence[str], question: str) -> Prompt | None:
        """Returns the prompt that equals the first possible one of `texts`, else the one that asks `question`."""
        prompt = next((prompt for text in texts if (prompt := self._by_text.get(text)) is not None), None)
        return prompt or self._by_question.get(question.strip())

    def is_shared(self, texts: Sequence[str]) -> bool:
        """Returns whether one of `texts` is that of several prompts, which only their keys tell apart."""
        return not self._shared_texts.isdisjoint(texts)

    def at(self, key: str) -> Prompt | None:
        """Returns the prompt with that key."""
        return self._by_key.get(key)


@dataclass(frozen=True)
class Encoder:
    """Turns imported answers into prompts and completions."""

    task: str
    tokenizer: Tokenizer
    train: TaskPrompts
    held_out: TaskPrompts
    chat: bool  # the task's prompts are chats: an unknown text becomes a user's message
    max_prompt_tokens: int
    max_tokens: int  # of an answer, including its end-of-text token
    # (whether prompts are chats, tools) -> what writes an episode; raises `UserError` where none can be written
    turn_writer: Callable[[bool, tuple[Json, ...]], TurnWriter]
    positions: int | None = None  # tokens of prompt and answer together that the model can read; None: any number
    thoughts: tuple[tuple[str, str], ...] = THOUGHTS  # as `Prompt` has them
    acted: bool = False  # an environment judges the answers, by acting them again
    task_prompts_only: bool = False  # refuse other prompts, whose fields whoever sends them would decide
    tools: tuple[Json, ...] = ()  # of the environment, which lines need not repeat
    # by key, the first form of each prompt that the task lacks: all answers to a prompt are scored with the same fields
    new_prompts: dict[str, Prompt] = field(default_factory=dict)

    def encode(self, answer: ImportedAnswer) -> EncodedAnswer | Refusal:
        """Encodes an answer. Raises nothing: an answer that cannot be tokenised is refused."""
        answer = answer if answer.tools else replace(answer, tools=self.tools)
        prompt, answer = self._find_prompt(answer)
        if isinstance(prompt, Refusal):
            return prompt
        if self.acted and not all(is_answer(m) for m in answer.turns if m["role"] == "assistant"):
            return Refusal("an episode of an environment with turns of weight 0, of which all are trained on")
        is_chat = self.chat or prompt.messages is not None
        if answer.turns:
            completion = self._encode_episode(answer, is_chat)
        else:
            completion = self._encode_completion(answer, prompt.text, is_chat)
        return completion if isinstance(completion, Refusal) else self._check_answer(prompt, completion)

    def adopt(self, trajectory: Trajectory) -> EncodedAnswer | ImportedAnswer | Refusal:
        """Takes a trajectory of another run with its tokens; as text where they are another tokenizer's.

        Its behaviour log-probabilities stay; the weights that sampled it are none of this run's.
        """
        prompt, completion = replace(trajectory.prompt, task=self.task, thoughts=self.thoughts), trajectory.completion
        bos_token, token_ids = getattr(self.tokenizer, "bos_token_id", None), prompt.tokens.tolist()
        without_bos = token_ids[token_ids[:1] == [bos_token] :]
        same_tokenizer = prompt.text in (self._try_decoding(t, special=True) for t in (token_ids, without_bos))
        decoded_text = self._decode_visible(completion.tokens.tolist())
        if not same_tokenizer or decoded_text is None or not decoded_text.startswith(completion.text):
            if completion.mask is not None:
                return Refusal("an episode of several turns in another tokenizer's tokens")
            is_truncated = completion.stop_reason is StopReason.LENGTH
            return ImportedAnswer(prompt.text, completion.text, is_truncated, trajectory.reward, None, prompt.fields)
        if self.held_out.at(prompt.key) is not None:
            return _HELD_OUT
        prompt = self.train.at(prompt.key) or self.new_prompts.setdefault(prompt.key, prompt)
        return self._check_answer(prompt, replace(completion, versions=(ELSEWHERE, ELSEWHERE)))

    def _check_answer(self, prompt: Prompt, completion: Completion) -> EncodedAnswer | Refusal:
        """Returns a prompt and an answer that the run can take, or the refusal of them."""
        is_task_prompt = self.train.at(prompt.key) is not None
        if self.acted and not is_task_prompt:
            return Refusal("a prompt that is none of the environment's")
        return self.refuse_size(prompt, completion) or EncodedAnswer(prompt, completion, is_task_prompt)

    def refuse_size(self, prompt: Prompt, completion: Completion) -> Refusal | None:
        """Returns the refusal of an answer that is too long for the run, or with its prompt for the model's positions;
        None if it fits.
        """
        if len(completion.tokens) > self.max_tokens:
            return self._refuse_length(len(completion.tokens))
        first_length, *later_lengths = (end - begin for begin, end in completion.segments)
        tokens = max(len(prompt.tokens) + first_length, *later_lengths, 0)
        if self.positions is None or tokens <= self.positions:
            return None
        return Refusal(f"longer with its prompt than the model's {self.positions} positions", f"{tokens} tokens")

    def _find_prompt(self, answer: ImportedAnswer) -> tuple[Prompt | Refusal, ImportedAnswer]:
        """Returns the prompt of an answer, and the answer with the turns that follow this prompt: the longest beginning
        of a chat that the task asks, else what stands before its first answer.
        """
        if self.held_out.at(answer.key) is not None:
            return _HELD_OUT, answer
        named_prompt = self.train.at(answer.key)
        if named_prompt is None and not answer.prompt:
            return Refusal("a key that is none of the task's prompts", answer.key[:80]), answer
        for split in answer.splits():
            prompt = self._find_task_prompt(split, named_prompt)
            if prompt is not None:
                return prompt, split
        if named_prompt is not None:
            return Refusal("a chat that does not begin with the prompt of its key"), answer
        if self.task_prompts_only:
            return Refusal("a prompt that is none of the task's"), answer
        return self._make_prompt(answer), answer

    def _find_task_prompt(self, answer: ImportedAnswer, named_prompt: Prompt | None) -> Prompt | Refusal | None:
        """Returns the task's prompt that an answer is to, or the refusal of it; None where it is none of the task's."""
        if named_prompt is not None and not answer.prompt:
            return named_prompt
        texts, question = self._possible_texts(answer.prompt, answer.tools)
        plain_texts = [*map(visible_text, texts)]
        if named_prompt is not None:
            return named_prompt if named_prompt.text in plain_texts else None
        if self.train.is_shared(plain_texts):
            return Refusal("a prompt that several worlds of the task share: the line must give the key of one")
        return _HELD_OUT if self.held_out.find(plain_texts, question) else self.train.find(plain_texts, question)

    def _make_prompt(self, answer: ImportedAnswer) -> Prompt | Refusal:
        """Returns a prompt that the task lacks."""
        texts, _ = self._possible_texts(answer.prompt, answer.tools)
        if not texts:
            return Refusal("a chat of several turns, and the tokenizer has no chat template")
        if len(texts[0]) > _CHARACTERS * self.max_prompt_tokens:
            return Refusal(f"a prompt longer than {self.max_prompt_tokens} tokens", f"{len(texts[0])} characters")
        is_chat = self.chat or not isinstance(answer.prompt, str)
        is_chat = is_chat and bool(getattr(self.tokenizer, "chat_template", None))
        tokens = self._try_encoding(lambda: prompt_tokens(self.tokenizer, texts[:1], is_chat)[0])
        if not tokens:
            return Refusal("a prompt that the tokenizer cannot write")
        if len(tokens) > self.max_prompt_tokens:
            return Refusal(f"a prompt longer than {self.max_prompt_tokens} tokens", f"{len(tokens)} tokens")
        chat = None if isinstance(answer.prompt, str) else answer.prompt
        prompt = Prompt(
            self.task,
            np.array(tokens, dtype=np.int32),
            visible_text(texts[0]),
            answer.fields,
            messages=chat,
            thoughts=self.thoughts,
        )
        if self.held_out.at(prompt.key) is not None:
            return _HELD_OUT
        return self.train.at(prompt.key) or self.new_prompts.setdefault(prompt.key, prompt)

    def _possible_texts(self, prompt: str | tuple[Message, ...], tools: tuple[Json, ...]) -> tuple[list[str], str]:
        """Returns the texts that a prompt may stand for, the likeliest first, and the question that it asks."""
        if isinstance(prompt, str):
            rendered_text = self._render(({"role": "user", "content": prompt},), tools)
            texts = [rendered_text, prompt] if self.chat else [prompt, rendered_text]
            return [text for text in texts if text is not None], prompt
        rendered_text = self._render(prompt, tools)
        question = prompt[-1]["content"]
        is_single_message = len(prompt) == 1 and not tools
        texts = [rendered_text, question if is_single_message else None]
        one_question = all(message["role"] == "system" for message in prompt[:-1])
        return [text for text in texts if text is not None], question if one_question else ""

    def _render(self, messages: tuple[Message, ...], tools: tuple[Json, ...], answered: bool = False) -> Markup | None:
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        try:
            return chat_markup(self.tokenizer, messages, tools, answered)
        except UserError:  # a template raises what it likes about foreign text; the line is refused
            return None

    @cached_property
    def _forms(self) -> tuple[AssistantTurn, AssistantTurn]:
        """Returns the forms of an assistant's turn: after a text, and in a chat."""
        return assistant_turn(self.tokenizer, chat=False), assistant_turn(self.tokenizer)

    def _encode_completion(self, answer: ImportedAnswer, prompt: str, chat: bool) -> Completion | Refusal:
        if len(answer.response) > _CHARACTERS * self.max_tokens:
            return self._refuse_length(None)
        form = self._forms[chat]
        form = form if chat and form.lead else form.after_prompt(prompt)
        frame = form.tool_frame if answer.call_message is not None else form.final_frame
        frame = AnswerFrame(frame.opening) if answer.is_truncated else frame
        message = answer.call_message or {"content": answer.response}
        tokens = self._encode_turn(message, (), answer, form, frame, chat)
        if isinstance(tokens, Refusal):
            return tokens
        text = self._decode_visible(tokens if frame.end is None else tokens[:-1])
        assert text is not None
        return self._build_completion(answer, np.array(tokens, dtype=np.int32), text)

    def _encode_episode(self, answer: ImportedAnswer, chat: bool) -> Completion | Refusal:
        """Returns the turns of an episode as one completion, in which what stands between them is masked."""
        if sum(len(message["content"]) for message in answer.turns) > _CHARACTERS * self.max_tokens:
            return self._refuse_length(None)
        try:
            writer = self.turn_writer(chat, answer.tools)
        except UserError as error:
            return Refusal("a chat of several turns that the model's chat template cannot write", str(error))
        parts: list[tuple[IntArray, bool]] = []
        begins = [i for i, message in enumerate(answer.turns) if message["role"] == "assistant"]
        for begin, end in zip(begins, [*begins[1:], len(answer.turns)], strict=True):
            message, replies = answer.turns[begin], _in_order_of_calls(*answer.turns[begin:end])
            is_last = end == len(answer.turns)
            if not is_last and not replies:
                return Refusal("two messages of the assistant's with nothing between them")
            frame = writer.frame_before(replies)
            frame = AnswerFrame(frame.opening) if is_last and answer.is_truncated else frame
            turn = self._encode_turn(message, replies, answer, writer.form, frame, chat)
            if isinstance(turn, Refusal):
                return turn
            parts.append((np.array(turn, dtype=np.int32), is_answer(message)))
            try:
                parts += [(writer.reply(turn, replies), False)] if replies else []
            except TbaError as error:
                return Refusal("messages between two turns that the model's chat template cannot write", str(error))
        tokens = np.concatenate([part for part, _ in parts])
        mask = np.concatenate([np.full(len(part), is_trained) for part, is_trained in parts])
        return replace(self._build_completion(answer, tokens, writer.text(tokens)), mask=mask)

    def _build_completion(self, answer: ImportedAnswer, tokens: IntArray, text: str) -> Completion:
        reason = StopReason.LENGTH if answer.is_truncated else StopReason.EXTERNAL
        return Completion(tokens, text, reason, (ELSEWHERE, ELSEWHERE))

    def _encode_turn(
        self,
        message: Message,
        replies: tuple[Message, ...],
        answer: ImportedAnswer,
        form: AssistantTurn,
        frame: AnswerFrame,
        chat: bool,
    ) -> list[int] | Refusal:
        """Returns the tokens of an assistant's message that replies follow, with the one that ends it if its frame has
        an end.
        """
        end_tokens = self._forms[0].end_tokens | form.end_tokens
        if message.get("tool_calls"):
            markup = self._render_calls(message, replies, answer, form)
            if not markup:
                return Refusal("an answer that calls tools, which the model's chat template does not write")
        elif response := self._strip_ends(message["content"], end_tokens):
            markup = form.text(response, frame)
        else:
            return Refusal("an answer that the tokenizer cannot write")
        tokens = self._try_encoding(lambda: form.with_end(markup, partial(encode_markup, self.tokenizer), frame))
        if tokens is None:
            return Refusal("an answer that the tokenizer cannot write")
        body = tokens if frame.end is None else tokens[:-1]
        text, read_text = self._decode_visible(body), self._read_back(form, body, chat)
        is_same = read_text is not None and read_text == self._normalize(visible_text(markup), chat)
        if not body or text is None or not is_same or not end_tokens.isdisjoint(body):
            return Refusal("an answer that the tokenizer cannot write", f"it reads back as {read_text!r:.200}")
        return tokens

    def _read_back(self, form: AssistantTurn, body: list[int], chat: bool) -> str | None:
        """Returns the normalised text of tokens behind a prompt, with the template's; None if they give none."""
        lead = self._try_encoding(lambda: encode_markup(self.tokenizer, form.lead)) or []
        decode = partial(self._try_decoding, special=True) if chat else self._decode_visible
        lead_text, text = decode(lead), decode([*lead, *body])
        if lead_text is None or text is None:
            return None
        if not text.startswith(lead_text):
            lead_text, text = "", decode(body) or ""
        return self._normalize(text.removeprefix(lead_text), chat)

    def _normalize(self, text: str, chat: bool) -> str:
        """Returns a text without differences that tokenizers make, in forms of letters and in blanks."""
        ignores_blanks = chat or getattr(self.tokenizer, "clean_up_tokenization_spaces", False)
        words = unicodedata.normalize("NFKC", text).rstrip()
        leading_blank = " " if not chat and words[:1].isspace() else ""
        return leading_blank + ("" if ignores_blanks else " ").join(words.split())

    def _render_calls(
        self, message: Message, replies: tuple[Message, ...], answer: ImportedAnswer, form: AssistantTurn
    ) -> Markup:
        """Returns a message that calls tools as the template writes it before replies; empty where it writes no calls.

        A template that has no place for calls writes none in an answer, and texts in a turn that others follow.
        """
        prompt: tuple[Message, ...] = ({"role": "user", "content": USER_SLOT},)
        if isinstance(answer.prompt, tuple) and not answer.turns:
            prompt = answer.prompt
        prompt_text = self._render(prompt, answer.tools)
        full_text = self._render((*prompt, message, *replies), answer.tools, answered=not replies)
        if prompt_text is None or full_text is None or not full_text.startswith(prompt_text):
            return Markup("")
        answer_text = full_text[len(prompt_text) :]
        tool_calls = message["tool_calls"]
        calls = [call.get("function") or call for call in tool_calls if isinstance(call, Mapping)]
        names = [call.get("name") for call in calls if isinstance(call, Mapping)]
        if not names or not all(isinstance(name, str) and name in visible_text(answer_text) for name in names):
            return Markup("")  # it leaves them out
        turn_ends = [frame.end for frame in form.frames if frame.end is not None]
        places = [(answer_text.find(end.closing_text), len(end.gap)) for end in turn_ends]
        return Markup(answer_text[: min((place + gap for place, gap in places if place >= 0), default=None)])

    def _strip_ends(self, response: str, end_tokens: Iterable[int]) -> str:
        """Returns an answer without the ends of its turn that the log spells out."""
        marks = tuple(mark for end in end_tokens if (mark := self._try_decoding([end], special=True)))
        while mark := next((mark for mark in marks if response.rstrip().endswith(mark)), None):
            response = response.rstrip().removesuffix(mark)
        return response

    def _refuse_length(self, tokens: int | None) -> Refusal:
        """Returns the refusal of an answer that is longer than the run's own can be."""
        return Refusal(f"an answer longer than {self.max_tokens} tokens", "" if tokens is None else f"{tokens} tokens")

    def _try_encoding(self, encode: Callable[[], list[int]]) -> list[int] | None:
        """Returns the tokens from `encode`, None where it raises."""
        try:
            return encode()
        except Exception:  # noqa: BLE001 - tokenizers share no error; whatever it is, the line is refused and counted
            return None

    def _decode_visible(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of tokens as a reward reads it, None where the tokenizer raises."""
        try:
            return decode_tokens(self.tokenizer, tokens)
        except Exception:  # noqa: BLE001 - ids of another tokenizer, for example
            return None

    def _try_decoding(self, tokens: Sequence[int], special: bool = False) -> str | None:
        try:
            return self.tokenizer.decode(tokens, skip_special_tokens=not special)
        except Exception:  # noqa: BLE001 - ids of another tokenizer, for example
            return None


def _in_order_of_calls(message: Message, *replies: Message) -> tuple[Message, ...]:
    """Returns the messages that follow a turn, those of tools in the order of the calls that they answer."""
    ids = [call.get("id") for call in message.get("tool_calls", ()) if isinstance(call, Mapping)]
    if not all(reply["role"] == "tool" and reply.get("tool_call_id") in ids for reply in replies):
        return replies
    return tuple(sorted(replies, key=lambda reply: ids.index(reply.get("tool_call_id"))))
