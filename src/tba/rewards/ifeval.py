"""IFEval's checks (Zhou et al. 2023, arXiv 2311.07911), by the package if-verifiable (the extra `instruct`).

Invariant: an answer is data. It is searched and parsed, never evaluated, and one on which a check breaks (JSON nested
beyond reason) does not fulfil it. A check takes time linear in the answer's length. Nothing is downloaded: the
package's checks of IFBench fetch files of nltk as they are imported, and are not used.

Six checks are ours. Two want files of nltk in the package: `length_constraints:number_sentences`, where sentences are
told apart by nltk's Punkt rules without its list of English abbreviations, and `change_case:capital_word_frequency`,
whose words are those of the same tokenizer without a division into sentences before it. Four search from every bracket
or line feed to the end of the answer there, and here find the same in one pass: placeholders, bullets, postscript and
title. langdetect, which draws at random, is seeded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from tba.errors import UserError
from tba.types import Completion, Json, Judgement, Prompt

Check = Callable[[str], bool]
EXTRA = "IFEval's checks need the package if-verifiable: pip install 'tba-rl[instruct]'"
_BRACKETED = re.compile(r"\[[^\]\n]*+(\]?)")  # or the rest of a line without a closing bracket
_BULLETS = (re.compile(r"^[^\S\n]*+\*[^*].*$", re.MULTILINE), re.compile(r"^[^\S\n]*+-", re.MULTILINE))
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_CHECK_ERRORS = (ValueError, IndexError, RecursionError)  # what a check raises for an answer that it did not expect


def fulfils(kind: str, arguments: Mapping[str, Json], question: str, answer: str) -> bool:
    """Returns whether `answer` fulfils the instruction of that kind; an empty one fulfils none, as in IFEval.

    Raises `UserError` for a kind or arguments that IFEval does not have, and without the package.
    """
    if not answer.strip():
        return False
    try:
        return bool(_make_check(kind, json.dumps(arguments, sort_keys=True), question)(answer))
    except _CHECK_ERRORS:
        return False


def instruction_kinds() -> frozenset[str]:
    """Returns the kinds of instructions that there are. Raises `UserError` without the package."""
    return frozenset(_kinds())


class IfEvalReward:
    """1 if all instructions of the prompt's fields `instruction_id_list` and `kwargs` are fulfilled, else 0.

    Parts: `strict`, the share of them that is fulfilled; `loose` and `prompt_loose`, the same where the answer may
    leave out its first line, its last or both, and its asterisks.
    """

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [_judgement(prompt, prompt.answer_in(completion.text)) for prompt, completion in answered]


def _judgement(prompt: Prompt, answer: str) -> Judgement:
    kinds, arguments = prompt.fields["instruction_id_list"], prompt.fields["kwargs"]
    question = str(prompt.fields["question"])
    forms = {*loose_forms(answer)} - {answer}
    strict, loose = list[bool](), list[bool]()  # by instruction
    for kind, kind_arguments in zip(kinds, arguments, strict=True):
        strict.append(fulfils(kind, kind_arguments, question, answer))
        loose.append(strict[-1] or any(fulfils(kind, kind_arguments, question, form) for form in forms))
    count = len(kinds)
    parts = {"strict": sum(strict) / count, "loose": sum(loose) / count, "prompt_loose": float(all(loose))}
    return Judgement(float(all(strict)), parts)


def loose_forms(answer: str) -> list[str]:
    """Returns the forms of an answer of which one has to fulfil an instruction in IFEval's loose reading."""
    lines = answer.split("\n")
    shortened_answers = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [form for text in shortened_answers for form in (text, text.replace("*", ""))]


@cache
def _make_check(kind: str, arguments: str, question: str) -> Check:
    """Returns the check of an instruction; cached, because a prompt is answered many times."""
    local_check = _LOCAL_CHECKS.get(kind)
    settings = {name: value for name, value in json.loads(arguments).items() if value is not None}
    if local_check is None and kind not in _kinds():
        raise UserError(f"IFEval has no kind of instruction {kind!r}: give one of {', '.join(sorted(_kinds()))}")
    try:
        if local_check is not None:
            return local_check(**settings)
        checker = _kinds()[kind](kind)
        checker.build_description(**settings)
        with suppress(*_CHECK_ERRORS):
            checker.check_following("a word")  # what the package does not look at before
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise UserError(f"IFEval's instruction {kind} does not take {arguments} ({error})") from error
    if "prompt" in (checker.get_instruction_args() or {}):
        checker.build_description(prompt=question)
    check: Check = checker.check_following
    return check


@cache
def _kinds() -> Mapping[str, Any]:
    try:
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
        from langdetect import DetectorFactory
    except ModuleNotFoundError as error:
        raise UserError(EXTRA) from error
    DetectorFactory.seed = 0
    kinds: Mapping[str, Any] = INSTRUCTION_DICT
    return kinds


def _count_test(relation: str, threshold: int) -> Callable[[int], bool]:
    if relation not in ("less than", "at least"):
        raise UserError(f"IFEval compares by 'less than' or 'at least', and {relation!r} is neither")
    return (lambda count: count < threshold) if relation == "less than" else (lambda count: count >= threshold)


def _number_of_sentences(num_sentences: int, relation: str) -> Check:
    fits = _count_test(relation, num_sentences)

    def check(answer: str) -> bool:
        from nltk.tokenize.punkt import PunktSentenceTokenizer

        return fits(len(PunktSentenceTokenizer().tokenize(answer)))

    return check


def _capital_words(capital_frequency: int, capital_relation: str) -> Check:
    fits = _count_test(capital_relation, capital_frequency)

    def check(answer: str) -> bool:
        from nltk.tokenize import word_tokenize

        return fits(sum(word.isupper() for word in word_tokenize(answer, preserve_line=True)))

    return check


def _placeholders(num_placeholders: int) -> Check:
    return lambda answer: sum(map(bool, _BRACKETED.findall(answer))) >= num_placeholders


def _bullets(num_bullets: int) -> Check:
    return lambda answer: sum(len(bullet.findall(answer)) for bullet in _BULLETS) == num_bullets


def _postscript(postscript_marker: str) -> Check:
    marker = postscript_marker.strip()
    beginning = re.compile(_POSTSCRIPTS.get(marker, marker.lower()))
    return lambda answer: beginning.search(answer.lower()) is not None


def _title() -> Check:
    def check(answer: str) -> bool:
        titles = (line.partition("<<")[2].rpartition(">>")[0] for line in answer.split("\n"))
        return any(title.lstrip("<").rstrip(">").strip() for title in titles)

    return check


_LOCAL_CHECKS: Mapping[str, Callable[..., Check]] = {
    "length_constraints:number_sentences": _number_of_sentences,
    "change_case:capital_word_frequency": _capital_words,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:title": _title,
}
