"""Answers as the run's own tokens, each to a prompt of its task where the task has it.

Invariant: the tokens say what the imported text says: the text of a completion is decoded from its tokens, and a
text that the tokenizer cannot express is refused. No answer to a prompt held out for evaluation is taken.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from tba.assistant_turns import AnswerFrame, AssistantTurn, assistant_turn
from tba.chat_prompts import chat_markup, prompt_tokens
from tba.errors import UserError
from tba.imported_answers.parsing import ImportedAnswer
from tba.markup import Markup, decode_tokens, encode_markup, visible_text
from tba.protocols import Tokenizer
from tba.tables import Refusal
from tba.types import ELSEWHERE, THOUGHTS, Completion, Json, Message, Prompt, StopReason, Trajectory

_QUESTION = "question"  # the field in which a task keeps what its prompt asks, without the words around it
_CHARACTERS = 256  # upper bound per token: a text with more characters than the limit allows is not even tokenised
_HELD_OUT = Refusal("its prompt is held out for evaluation")


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
        self._by_question: dict[str, Prompt | None] = {}  # None: two prompts ask it
        for prompt in prompts:
            if self._by_key.setdefault(prompt.key, prompt) is not prompt:
                continue
            self._by_text.setdefault(prompt.text, prompt)
            question = prompt.fields.get(_QUESTION)
            for question_text in {prompt.text.strip()} | ({question.strip()} if isinstance(question, str) else set()):
                self._by_question[question_text] = None if question_text in self._by_question else prompt

    def find(self, texts: Sequence[str], question: str) -> Prompt | None:
        """Returns the prompt that equals the first possible one of `texts`, else the one that asks `question`."""
        prompt = next((prompt for text in texts if (prompt := self._by_text.get(text)) is not None), None)
        return prompt or self._by_question.get(question.strip())

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
    positions: int | None = None  # tokens of prompt and answer together that the model can read; None: any number
    thoughts: tuple[tuple[str, str], ...] = THOUGHTS  # as `Prompt` has them
    # by key, the first form of each prompt that the task lacks: all answers to a prompt are scored with the same fields
    new_prompts: dict[str, Prompt] = field(default_factory=dict)

    def encode(self, answer: ImportedAnswer) -> EncodedAnswer | Refusal:
        """Encodes an answer. Raises nothing: an answer that cannot be tokenised is refused."""
        prompt = self._find_prompt(answer)
        if isinstance(prompt, Refusal):
            return prompt
        is_task_prompt = self.train.at(prompt.key) is not None
        is_chat = self.chat or prompt.messages is not None
        completion = self._encode_completion(answer, prompt.text, is_chat)
        if isinstance(completion, Refusal):
            return completion
        return self._refuse_positions(prompt, completion) or EncodedAnswer(prompt, completion, is_task_prompt)

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
            if completion.begins is not None:
                return Refusal("an episode of several segments in another tokenizer's tokens")
            is_truncated = completion.stop_reason is StopReason.LENGTH
            return ImportedAnswer(prompt.text, completion.text, is_truncated, trajectory.reward, None, prompt.fields)
        if self.held_out.at(prompt.key) is not None:
            return _HELD_OUT
        if len(completion.tokens) > self.max_tokens:
            return self._refuse_length(len(completion.tokens))
        task_prompt = self.train.at(prompt.key)
        prompt = task_prompt or self.new_prompts.setdefault(prompt.key, prompt)
        completion = replace(completion, versions=(ELSEWHERE, ELSEWHERE))
        return self._refuse_positions(prompt, completion) or EncodedAnswer(prompt, completion, task_prompt is not None)

    def _refuse_positions(self, prompt: Prompt, completion: Completion) -> Refusal | None:
        """Returns the refusal of a prompt and answer for which the model has too few positions; None if they fit."""
        first_length, *later_lengths = (end - begin for begin, end in completion.segments)
        tokens = max(len(prompt.tokens) + first_length, *later_lengths, 0)
        if self.positions is None or tokens <= self.positions:
            return None
        return Refusal(f"longer with its prompt than the model's {self.positions} positions", f"{tokens} tokens")

    def _find_prompt(self, answer: ImportedAnswer) -> Prompt | Refusal:
        texts, question = self._possible_texts(answer.prompt, answer.tools)
        plain_texts = [*map(visible_text, texts)]
        if self.held_out.find(plain_texts, question) is not None:
            return _HELD_OUT
        task_prompt = self.train.find(plain_texts, question)
        if task_prompt is not None:
            return task_prompt
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
            plain_texts[0],
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
        form, end_tokens = self._forms[chat], self._forms[0].end_tokens | self._forms[chat].end_tokens
        form = form if chat and form.lead else form.after_prompt(prompt)
        frame = form.tool_frame if answer.call_message is not None else form.final_frame
        frame = AnswerFrame(frame.opening) if answer.is_truncated else frame
        if answer.call_message is not None:
            markup = self._render_calls(answer, form)
            if not markup:
                return Refusal("an answer that calls tools, which the model's chat template does not write")
        elif response := self._strip_ends(answer.response, end_tokens):
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
        if len(tokens) > self.max_tokens:
            return self._refuse_length(len(tokens))
        reason = StopReason.LENGTH if answer.is_truncated else StopReason.EXTERNAL
        return Completion(np.array(tokens, dtype=np.int32), text, reason, (ELSEWHERE, ELSEWHERE))

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

    def _render_calls(self, answer: ImportedAnswer, form: AssistantTurn) -> Markup:
        """Returns an answer that calls tools as the template writes it; empty where the template writes no calls."""
        assert not isinstance(answer.prompt, str)
        assert answer.call_message is not None
        prompt_text = self._render(answer.prompt, answer.tools)
        full_text = self._render((*answer.prompt, answer.call_message), answer.tools, answered=True)
        if prompt_text is None or full_text is None or not full_text.startswith(prompt_text):
            return Markup("")
        answer_text = full_text[len(prompt_text) :]
        tool_calls = answer.call_message["tool_calls"]
        calls = [call.get("function") or call for call in tool_calls if isinstance(call, Mapping)]
        names = [call.get("name") for call in calls if isinstance(call, Mapping)]
        if not names or not all(isinstance(name, str) and name in visible_text(answer_text) for name in names):
            return Markup("")  # it leaves them out
        end_texts = [frame.end.closing_text for frame in (form.tool_frame, form.final_frame) if frame.end is not None]
        end_positions = [answer_text.find(text) for text in end_texts]
        return Markup(answer_text[: min((end for end in end_positions if end >= 0), default=None)])

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
