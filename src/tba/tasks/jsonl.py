r"""Your own file: in each row a prompt (text or chat messages) and what is needed to grade an answer.

    {"prompt": "What is 6 * 7?", "answer": "42"}
    {"messages": [{"role": "user", "content": "What is 6 * 7?"}], "answer": "42"}

Files as other trainers publish them are read as they are, in the formats of `tba.tables`. Where a row does not have the
fields that are named:

| what | is then in |
|---|---|
| the prompt | `question` or `problem`: one message of the user |
| the right answer | `ground_truth`, `reward_model.ground_truth` (verl), `verification_info.ground_truth`, `solution` |
| a worked answer | `completion` (TRL) |

A field `tools` holds the schemas of what may be called. A right answer that ends in `#### 42` or has one `\boxed{42}`
is what is marked there.

Invariant: a prompt is either in training or in evaluation, never in both; every field of a row reaches the reward.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tba.errors import UserError
from tba.fields import as_declared
from tba.protocols import Reward
from tba.rewards.exact_answer import ExactAnswer, marked_answer
from tba.rewards.functions import FunctionReward
from tba.tables import Refusal, conversation, file_in, parse_chat_text, splits_of, tool_schemas
from tba.tasks.held_out import IN_BOTH, check_share, exclude, is_held_out
from tba.tasks.problem_rows import ProblemRow, read_rows
from tba.types import Json, Message, Problem, Split

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of a message, apart from its text
_QUESTIONS = ("question", "problem")
_ANSWERS = ("ground_truth", "reward_model.ground_truth", "verification_info.ground_truth", "solution")
_HELD_OUT = ("test", "validation", "eval")  # of a folder of splits or files: the first that is there
_LONGEST_ANSWER = 100  # characters of a `solution` that is taken as an answer where nothing is marked in it
_MESSAGE = '{"role": "user", "content": "..."}'


@dataclass(frozen=True)
@as_declared
class Jsonl:
    """Problems from one or two files: JSON Lines, JSON, CSV, Parquet, or a folder of `save_to_disk`.

    A chat's last assistant message, if any, is the demonstration.
    """

    train: Path  # the training file, or a folder with `train` and `test`
    eval: Path | None = None  # the evaluation file; without one, a share of the training file is held out
    eval_fraction: float = 0.1  # that share; a digest of the prompt decides
    prompt_field: str = "prompt"  # field with the text as the model sees it, or chat messages; a nested one as `a.b`
    messages_field: str = "messages"  # field with chat messages, for rows without a prompt
    answer_field: str = "answer"  # field with the right answer; rewards see it as `answer`
    response_field: str = "response"  # field with a worked answer for the supervised warm start, if there is one
    strict: bool = False  # read the number after #### only, not the last one of the text
    marked_by: Reward | None = None  # a reward of your own, or a function; None: exact answer

    def __post_init__(self) -> None:
        check_share(self.eval_fraction, "jsonl's eval_fraction")
        marked_by: object = self.marked_by
        if inspect.isfunction(marked_by):
            object.__setattr__(self, "marked_by", FunctionReward(marked_by))

    @property
    def name(self) -> str:
        return self.train.stem

    def problems(self, split: Split) -> list[Problem]:
        """Returns problems in the file's order; training leaves out what is also in the evaluation file.

        Raises `UserError` for a missing or malformed file, naming its row, and for a split with nothing in it.
        """
        problems, held_out = self._read()
        if held_out is not None:
            split_problems = held_out if split == "eval" else exclude(problems, held_out, _identity)
        else:
            split_problems = [p for p in problems if is_held_out(_identity(p), self.eval_fraction) == (split == "eval")]
        if not split_problems:
            raise UserError(
                f"{self.train} leaves nothing for {split} ({len(problems)} lines, eval_fraction "
                f"{self.eval_fraction}): give an evaluation file of other prompts, another eval_fraction or more lines"
            )
        return split_problems

    def left_out(self) -> Mapping[str, int]:
        problems, held_out = self._read()
        return {IN_BOTH: len(problems) - len(exclude(problems, held_out or (), _identity))}

    def reward(self) -> Reward:
        return ExactAnswer(self.strict) if self.marked_by is None else self.marked_by

    def demonstration(self, row: ProblemRow) -> str | None:
        """Returns the worked answer that a row has, in a field or as its chat's last message; None where it has none.

        Raises `UserError` for a row that is malformed.
        """
        return self._response(row) or self._prompt(row)[1]

    def _read(self) -> tuple[list[Problem], list[Problem] | None]:
        """Returns the problems of the training file, and of the evaluation file if there is one."""
        train_path, eval_path = self._files()
        return [self._problem(row) for row in read_rows(train_path)], (
            None if eval_path is None else [self._problem(row) for row in read_rows(eval_path)]
        )

    def _files(self) -> tuple[Path, Path | None]:
        """Returns the training file and the evaluation file, if there is one."""
        parts = splits_of(self.train)
        if not parts and self.train.is_dir():
            paths = {name: file_in(self.train, name) for name in ("train", *_HELD_OUT)}
            parts = {name: path for name, path in paths.items() if path is not None}
        if "train" not in parts:
            return self.train, self.eval
        return parts["train"], self.eval or next((parts[name] for name in _HELD_OUT if name in parts), None)

    def _problem(self, row: ProblemRow) -> Problem:
        prompt, demonstration = self._prompt(row)
        demonstration = self._response(row) or demonstration
        fields = {k: v for k, v in row.values.items() if k not in (self.prompt_field, self.messages_field)}
        name = _first_field(row, self.answer_field, _ANSWERS if self.answer_field == "answer" else ())
        if name is not None and (self.marked_by is None or name == self.answer_field):
            fields["answer"] = row.value(name) if self.marked_by is not None else _right_answer(row, name)
            if isinstance(fields["answer"], float) and not math.isfinite(fields["answer"]):
                raise UserError(f"{row.place} has {fields['answer']!r} as its {name!r}: give the right answer")
        elif self.marked_by is None and demonstration is None:
            raise UserError(
                f"{row.place} has no field {self.answer_field!r} to mark an answer against: add it, "
                "or name another with answer_field, or give a reward of your own in a recipe"
            )
        tools = tool_schemas(row.values.get("tools"))
        if isinstance(tools, Refusal):
            raise UserError(f"{row.place} has {tools} as its 'tools': give a list of JSON schemas")
        return Problem(prompt, fields, demonstration, tools=tools)

    def _prompt(self, row: ProblemRow) -> tuple[str | tuple[Message, ...], str | None]:
        """Returns the prompt, and the demonstration if the chat contains one."""
        questions = _QUESTIONS if self.prompt_field == "prompt" else ()
        field = _first_field(row, self.prompt_field, (self.messages_field, *questions))
        if field is None:
            raise UserError(
                f"{row.place} has neither a field {self.prompt_field!r} nor {self.messages_field!r}: it has "
                f"{', '.join(sorted(row.values)) or 'none'}, so name the right one with prompt_field or messages_field"
            )
        chat = parse_chat_text(row.value(field))
        if isinstance(chat, list):
            return _read_conversation(chat, row.place, field)
        question = row.text(field)
        return (({"role": "user", "content": question},) if field in questions else question), None

    def _response(self, row: ProblemRow) -> str | None:
        """Returns the worked answer in a field of its own."""
        field = _first_field(row, self.response_field, ("completion",) if self.response_field == "response" else ())
        if field is None:
            return None
        response = row.value(field)
        if response is None:
            return None
        if field != self.response_field and isinstance(response, list):
            response = conversation(response)
            if isinstance(response, Refusal) or len(response) != 1:
                raise UserError(f"{row.place} has no single message as its {field!r}: give a text, or {_MESSAGE}")
            return _spoken_text(response[0])
        return row.text(field)


def _first_field(row: ProblemRow, field: str, fallbacks: tuple[str, ...]) -> str | None:
    """Returns the first of the fields that has a value, else the first that the row has; None where it has none."""
    names = [name for name in (field, *fallbacks) if row.has(name)]
    return next((name for name in names if row.value(name) is not None), names[0] if names else None)


def _right_answer(row: ProblemRow, field: str) -> str | int | float:
    """Returns the right answer that exact answers are graded against. Raises `UserError` for what cannot be one."""
    value = row.value(field)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool):
        return str(value).lower()  # as a text: an answer says `true` or `True`
    if isinstance(value, list | dict):
        raise UserError(
            f"{row.place} has {value!r:.80} as its {field!r}, which may mean any or all of it: give one text or "
            "number, or a reward of your own (marked_by)"
        )
    if value is None or not str(value).strip():
        raise UserError(f"{row.place} has {value!r} as its {field!r}: give the right answer")
    if not isinstance(value, str):
        return value
    final_answer = marked_answer(value)
    if final_answer is None and field == "solution" and len(value) > _LONGEST_ANSWER:
        raise UserError(
            f"{row.place} has a {field!r} in which no answer is marked by '####' or \\boxed{{}}: mark it, or give a "
            "field 'answer'"
        )
    return value if final_answer is None else final_answer


def _read_conversation(messages: list[Json], place: str, field: str) -> tuple[tuple[Message, ...], str | None]:
    turns = conversation(messages)
    if isinstance(turns, Refusal):
        raise UserError(f"{place} has {turns.detail} among its {field!r}: write each message as {_MESSAGE}")
    demonstration = None
    if turns and turns[-1]["role"] == "assistant":
        demonstration = None if "tool_calls" in turns[-1] else _spoken_text(turns[-1])  # calls are more than a text
        turns = turns[:-1]
    if not any(m["role"] == "user" for m in turns):
        raise UserError(f"{place} has no user message to answer among its {field!r}: give it one")
    return turns, demonstration


def _spoken_text(message: Message) -> str:
    """Returns the text that a model is to write for a message, with the thought before it where there is one."""
    content = str(message["content"])
    thought = next((message[name] for name in _THOUGHTS if message.get(name)), None)
    return content if thought is None else f"<think>\n{str(thought).strip()}\n</think>\n\n{content}"


def _identity(problem: Problem) -> str:
    """Returns the text that identifies a prompt: its own, or its messages and tools as JSON."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    messages_json = json.dumps(problem.prompt, ensure_ascii=False)
    return messages_json + json.dumps(problem.tools) if problem.tools else messages_json
