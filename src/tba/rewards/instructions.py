"""Checks whether an answer does what it was told: instructions whose fulfilment a function can check.

Invariant: a check is a function of the answer's text and the instruction's arguments alone, in time linear in the text.

A prompt's field `instructions` is a list of objects with a `kind` and its `arguments`. A kind with a colon in its name
is one of IFEval's and is checked by `rewards.ifeval`; the others, made for short answers, are below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from tba.errors import UserError
from tba.rewards.ifeval import fulfils
from tba.types import Completion, Json, Judgement, Prompt

_ITEM = re.compile(r"^[^\S\n]*+(\d{1,3})[.)]\s++\S", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*+(?=\s|$)")
_MINOR_WORDS = frozenset(
    ["a", "an", "and", "as", "at", "but", "by", "for", "from", "in", "into", "nor", "of", "on", "or", "so", "the", "to"]
) | {"up", "with", "yet"}


def split_words(text: str) -> list[str]:
    """Returns the words of a text, as IFEval counts them: runs of letters, digits and underscores."""
    return re.findall(r"\w+", text)


def count_sentences(text: str) -> int:
    """Returns the number of sentences in a text: ends of sentences, and one more for words after the last end."""
    sentence_ends = list(_SENTENCE_END.finditer(text))
    return len(sentence_ends) + bool(split_words(text[sentence_ends[-1].end() :] if sentence_ends else text))


def _is_numbered_list(text: str, items: int) -> bool:
    return [int(number) for number in _ITEM.findall(text)] == list(range(1, items + 1))


def _is_title_case(text: str) -> bool:
    title_words = [word for word in re.findall(r"[A-Za-z][\w'\u2019-]*", text) if word.lower() not in _MINOR_WORDS]
    return bool(title_words) and all(word[0].isupper() for word in title_words)


CHECKS: Mapping[str, Callable[..., bool]] = {
    "least_words": lambda text, count: len(split_words(text)) >= count,
    "words_between": lambda text, low, high: low <= len(split_words(text)) <= high,
    "sentences": lambda text, count: count_sentences(text) == count,
    "first_word": lambda text, word: split_words(text)[:1] == [word],
    "parentheses": lambda text: re.search(r"\(\s*\w[^()\n]*\)", text) is not None,
    "numbered_list": _is_numbered_list,
    "hashtags": lambda text, count: len(re.findall(r"(?<!\w)#[A-Za-z]\w*", text)) >= count,
    "figures": lambda text, count: len(re.findall(r"\d+", text)) >= count,
    "title_case": _is_title_case,
    "capital_words": lambda text, count: sum(w.isupper() and len(w) > 1 for w in split_words(text)) >= count,
    "asks": lambda text: "?" in text,
    "no_letter": lambda text, letter: letter not in text.lower(),
    "one_line": lambda text: "\n" not in text.strip(),
    "colon": lambda text: re.search(r"\w:\s", text) is not None,
    "name_twice": lambda text, word: len(re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)) >= 2,
}


def is_fulfilled(instruction: Mapping[str, Json], question: str, answer: str) -> bool:
    """Returns whether `answer` fulfils one instruction; an empty one fulfils none. Raises `UserError` for an unknown
    kind.
    """
    kind, arguments = instruction["kind"], instruction["arguments"]
    if ":" in kind:
        return fulfils(kind, arguments, question, answer)
    if kind not in CHECKS:
        raise UserError(f"there is no instruction {kind!r}: give one of {', '.join(sorted(CHECKS))}, or IFEval's")
    return bool(split_words(answer)) and CHECKS[kind](answer, **arguments)


class ShareFulfilled:
    """The share of a prompt's instructions that the answer fulfils: 1 for all of them.

    The judgement's parts are 1 or 0 for each instruction, by its kind.
    """

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [_judgement(prompt, prompt.answer_in(completion.text)) for prompt, completion in answered]


def _judgement(prompt: Prompt, answer: str) -> Judgement:
    question = str(prompt.fields["question"])
    parts = {item["kind"]: float(is_fulfilled(item, question, answer)) for item in prompt.fields["instructions"]}
    return Judgement(sum(parts.values()) / len(parts), parts)
