"""Your own file: on each line a JSON object with a prompt (text or chat messages) and what is needed to grade an
answer.

    {"prompt": "What is 6 * 7?", "answer": "42"}
    {"messages": [{"role": "user", "content": "What is 6 * 7?"}], "answer": "42"}

Invariant: a prompt is either in training or in evaluation, never in both; every field of a line reaches the reward.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tba.errors import UserError
from tba.protocols import Reward
from tba.rewards.exact_answer import ExactAnswer
from tba.tasks.held_out import check_share, is_held_out, without
from tba.tasks.rows import Row, read_rows
from tba.types import Json, Message, Problem, Split


@dataclass(frozen=True)
class Jsonl:
    """Problems from one or two JSON Lines files. A chat's last assistant message, if any, is the demonstration."""

    train: Path  # the training file
    eval: Path | None = None  # the evaluation file; without one, a share of the training file is held out
    eval_fraction: float = 0.1  # that share; a digest of the prompt decides
    prompt_field: str = "prompt"  # field with the text exactly as the model sees it, or a list of chat messages
    messages_field: str = "messages"  # field with chat messages, for lines without a prompt
    answer_field: str = "answer"  # field with the right answer; rewards see it as `answer`
    response_field: str = "response"  # field with a worked answer for the supervised warm start, if there is one
    strict: bool = False  # read the number after #### only, not the last one of the text
    marked_by: Reward | None = None  # a reward of your own, such as FunctionReward(f); None: exact answer

    def __post_init__(self) -> None:
        check_share(self.eval_fraction, "jsonl's eval_fraction")

    @property
    def name(self) -> str:
        return self.train.stem

    def problems(self, split: Split) -> list[Problem]:
        """Problems in the file's order; training leaves out what is also in the evaluation file.

        Raises `UserError` for a missing or malformed file, naming its line, and for a split with nothing in it.
        """
        problems = [self._problem(row) for row in read_rows(self.train)]
        if self.eval is not None:
            held_out = [self._problem(row) for row in read_rows(self.eval)]
            chosen = held_out if split == "eval" else without(problems, held_out, _identity)
        else:
            chosen = [p for p in problems if is_held_out(_identity(p), self.eval_fraction) == (split == "eval")]
        if not chosen:
            raise UserError(
                f"{self.train} leaves nothing for {split} ({len(problems)} lines, eval_fraction "
                f"{self.eval_fraction}): give an evaluation file of other prompts, another eval_fraction or more lines"
            )
        return chosen

    def reward(self) -> Reward:
        return ExactAnswer(self.strict) if self.marked_by is None else self.marked_by

    def _problem(self, row: Row) -> Problem:
        prompt, demonstration = self._prompt(row)
        if self.response_field in row.values:
            demonstration = row.text(self.response_field)
        fields = {k: v for k, v in row.values.items() if k not in (self.prompt_field, self.messages_field)}
        if self.answer_field in row.values:
            fields["answer"] = row.values[self.answer_field]
            if self.marked_by is None and (fields["answer"] is None or not str(fields["answer"]).strip()):
                raise UserError(
                    f"{row.place} has {fields['answer']!r} as its {self.answer_field!r}: give the right answer"
                )
        elif self.marked_by is None and demonstration is None:
            raise UserError(
                f"{row.place} has no field {self.answer_field!r} to mark an answer against: add it, "
                "or name another with answer_field, or give a reward of your own in a recipe"
            )
        return Problem(prompt, fields, demonstration)

    def _prompt(self, row: Row) -> tuple[str | tuple[Message, ...], str | None]:
        """The prompt, and the demonstration if the chat contains one."""
        field = self.prompt_field if self.prompt_field in row.values else self.messages_field
        if field not in row.values:
            raise UserError(
                f"{row.place} has neither a field {self.prompt_field!r} nor {self.messages_field!r}: it has "
                f"{', '.join(sorted(row.values)) or 'none'}, so name the right one with prompt_field or messages_field"
            )
        if isinstance(row.values[field], list):
            return _conversation(row.values[field], row.place, field)
        return row.text(field), None


def _conversation(messages: list[Json], place: str, field: str) -> tuple[tuple[Message, ...], str | None]:
    for message in messages:
        known = isinstance(message, dict) and {"role", "content"} <= message.keys()
        if not known or not all(isinstance(message[k], str) for k in ("role", "content")):
            raise UserError(
                f"{place} has {message!r} among its {field!r}: write each message as "
                '{"role": "user", "content": "..."}'
            )
    asked: tuple[Message, ...] = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    demonstration = None
    if asked and asked[-1]["role"] == "assistant":
        asked, demonstration = asked[:-1], asked[-1]["content"]
    if not any(m["role"] == "user" for m in asked):
        raise UserError(f"{place} has no user message to answer among its {field!r}: give it one")
    return asked, demonstration


def _identity(problem: Problem) -> str:
    """What identifies a prompt: its text, or its messages."""
    return problem.prompt if isinstance(problem.prompt, str) else json.dumps(problem.prompt, ensure_ascii=False)
