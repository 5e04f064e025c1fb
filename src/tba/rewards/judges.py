"""Judges behind an endpoint: one gives an answer a score by a rubric, another ranks the answers to a prompt.

Invariant: a reply that cannot be read is asked for once more and is then an error, never a reward. The answer is data:
it stands between fences whose mark it cannot know. That reduces prompt injection and does not remove it, so read what
gets high scores. Neither what is asked nor what is replied appears in an error or a log.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from tba.errors import TbaError, UserError
from tba.fields import as_declared
from tba.grading import Grader
from tba.protocols import GradingCalls
from tba.rewards.endpoint import Endpoint, EndpointClient, Usage
from tba.rewards.judge_text import Fences, Scale, problem_text, read_ranking, win_shares
from tba.types import Completion, Judgement, Prompt

AnsweredPrompt = tuple[Prompt, Completion]
T = TypeVar("T")

_DEADLINE = 600.0  # seconds for all calls of one `judge`, where nobody else keeps time


class UnreadableReply(TbaError):
    """Raised when a judge replies twice without a score or a ranking."""


@dataclass(frozen=True)
class JudgeMark:
    """A judge's verdict on one answer, and what it cost."""

    value: float  # its score, or its standing in the group
    tokens: float | None  # what it cost, this answer's share; None: the server does not say


@dataclass(frozen=True)
@as_declared
class _Judge:
    """A model that reads a rubric, a task and answers."""

    endpoint: Endpoint  # where the judge is; its `concurrency` is the most calls at once
    rubric: str  # what a good answer is, in words
    reference: str = ""  # the problem's field with a reference answer, which is shown to the judge; empty: none
    name: str = "judge"  # what its parts begin with, such as judge_tokens

    def __post_init__(self) -> None:
        if not self.rubric.strip():
            raise UserError(f"the judge {self.name!r} has no rubric: say in words what a good answer is")
        if not self.name.isidentifier():
            raise UserError(f"a judge is named {self.name!r:.80}: give a name of letters, digits and underscores")

    @cached_property
    def client(self) -> EndpointClient:
        """Returns what asks the judge. Raises `UserError` without a url or a model."""
        return self.endpoint.start()

    @property
    def usage(self) -> Usage:
        """Returns what all calls cost so far, also those whose reply could not be read."""
        return self.client.usage

    def _shared_parts(self, prompt: Prompt, fences: Fences) -> list[str]:
        """Returns the parts of a question that all answers to a prompt have in common, which come first."""
        data = [fences.explanation, fences.enclose("TASK", problem_text(prompt))]
        if self.reference:
            if self.reference not in prompt.fields:
                raise UserError(
                    f"the judge {self.name!r} compares with the field {self.reference!r}, which prompt {prompt.key} of "
                    f"task {prompt.task} does not have: it has {', '.join(sorted(prompt.fields)) or 'no fields'}"
                )
            data.append(fences.enclose("REFERENCE", str(prompt.fields[self.reference])))
        return [self.rubric.strip(), *data]

    def _ask(self, question: str, reply_kind: str, read_verdict: Callable[[str, bool], T | None]) -> tuple[T, Usage]:
        """Returns what a reply says, and what it cost. Raises `UnreadableReply` when two replies say nothing."""
        cost, cut_count = Usage(), 0
        for message in (question, f"{question}\nWrite nothing else: a reply without that line cannot be read."):
            reply = self.client.reply(message)
            cost += reply.usage
            if (verdict := read_verdict(reply.text, reply.is_cut)) is not None:
                return verdict, cost
            cut_count += reply.is_cut
            self.client.forget(message)
        note = f", of which {cut_count} ended at max_tokens={self.endpoint.max_tokens}: raise it" if cut_count else ""
        raise UnreadableReply(f"{self.client} gave no {reply_kind} that can be read in 2 replies{note}")

    def _cost_parts(self, mark: JudgeMark) -> dict[str, float]:
        return {} if mark.tokens is None else {f"{self.name}_tokens": mark.tokens}

    def judge(self, answered: Sequence[AnsweredPrompt]) -> list[Judgement]:
        """Returns one judgement for each, in order, several calls at once. Raises what `grade` raises."""
        return Grader(self, _DEADLINE, retries=0).judge(answered)


@dataclass(frozen=True)
@as_declared
class RubricJudge(_Judge):
    """A reward from a judge that scores each answer by a rubric: the lowest score of the scale is 0, the highest 1,
    linear between.

    Parts are `judge_score`, as the judge gave it, and `judge_tokens`, what the answer cost. At temperature 0 equal
    answers to a prompt are graded once. An answer may try to talk to the judge: fences around it reduce that, and do
    not remove it.
    """

    scale: tuple[float, float] | Mapping[str, float] = (1, 10)  # lowest and highest score, or the value of each label

    def __post_init__(self) -> None:
        super().__post_init__()
        Scale.of(self.scale)

    def calls(self) -> list[GradingCalls]:
        """Returns one call for each answer, as many at once as the endpoint's `concurrency`."""
        _ = self.client  # made here, before threads share it
        return [GradingCalls(self.name, self.grade, "answer", self.endpoint.concurrency, copies=False)]

    def grade(self, answered: Sequence[AnsweredPrompt]) -> list[JudgeMark]:
        """Returns the score of each answer, one after another.

        Raises `UserError` for a refusal, `Refused` when no call succeeds, `UnreadableReply` when no reply has a score.
        """
        return [self._grade_answer(prompt, completion) for prompt, completion in answered]

    def judgement(self, values: Sequence[Any]) -> Judgement:
        """Returns the judgement of one answer, whose mark is the only value."""
        (mark,) = values
        return Judgement(
            Scale.of(self.scale).reward(mark.value), {f"{self.name}_score": mark.value, **self._cost_parts(mark)}
        )

    def question(self, prompt: Prompt, completion: Completion) -> str:
        """Returns what the judge is asked about an answer."""
        fences = Fences.of(prompt)
        answer = fences.enclose("ANSWER", prompt.answer_in(completion.text))
        closing = f"Grade the answer by the rubric at the top. End with one line {Scale.of(self.scale).explanation}."
        return "\n\n".join([*self._shared_parts(prompt, fences), answer, closing])

    def _grade_answer(self, prompt: Prompt, completion: Completion) -> JudgeMark:
        score, cost = self._ask(self.question(prompt, completion), "score", Scale.of(self.scale).read)
        return JudgeMark(score, None if cost.uncounted_calls else float(cost.tokens))


@dataclass(frozen=True)
@as_declared
class RankingJudge(_Judge):
    """A reward from a judge that ranks all answers to a prompt in one call: the share of the other answers of the group
    that an answer beats, from 0 to 1; a tie counts half, a group of one gets 0.5.

    Such a reward is relative: it depends on the answers that an answer is compared with, and its mean is 0.5 in every
    group. So training does not approach pi* of any fixed reward, and a stored reward is that of the group it came from.
    It is fine where only the order within fresh groups is learned from; where answers of different ages or origins are
    compared, take `RubricJudge`.

    Answers are shown in an order drawn from the prompt's key and the answers, against position bias; equal texts are
    shown once and get equal rewards. The part `judge_tokens` is an answer's share of the call's.
    """

    def calls(self) -> list[GradingCalls]:
        """Returns one call for each group, as many at once as the endpoint's `concurrency`."""
        _ = self.client  # made here, before threads share it
        return [GradingCalls(self.name, self.grade, "group", self.endpoint.concurrency, copies=False)]

    def grade(self, answered: Sequence[AnsweredPrompt]) -> list[JudgeMark]:
        """Returns the standing of each answer among all of the same prompt, one prompt after another.

        Raises `UserError` for a refusal, `Refused` when no call succeeds, `UnreadableReply` when no reply ranks them.
        """
        return self._flatten(answered, [self._rank_group(group) for group in _group_by_prompt(answered).values()])

    def judgement(self, values: Sequence[Any]) -> Judgement:
        """Returns the judgement of one answer, whose mark is the only value."""
        (mark,) = values
        return Judgement(mark.value, self._cost_parts(mark))

    def question(self, prompt: Prompt, texts: Sequence[str]) -> str:
        """Returns what the judge is asked about answers, which are numbered from 1 as they come."""
        fences = Fences.of(prompt)
        answers = [fences.enclose(f"ANSWER {number}", text) for number, text in enumerate(texts, 1)]
        closing = (
            f"Rank the answers 1 to {len(texts)} by the rubric at the top, the best first; their order here means "
            "nothing. End with one line such as `2 > 1 = 3`, with every number once and = between equally good ones."
        )
        return "\n\n".join([*self._shared_parts(prompt, fences), *answers, closing])

    def _rank_group(self, group: Sequence[AnsweredPrompt]) -> list[JudgeMark]:
        """Returns the standing of each answer to one prompt."""
        prompt, answers = group[0][0], [prompt.answer_in(completion.text) for prompt, completion in group]
        counts = Counter(answers)
        texts = _shuffle(counts, prompt.key)
        places, cost = [[1]], Usage()
        if len(texts) > 1:
            read_places = partial(_read_places, count=len(texts))
            places, cost = self._ask(self.question(prompt, texts), "ranking", read_places)
        copies = {number: counts[text] for number, text in enumerate(texts, 1)}
        shares = win_shares(places, copies)
        numbers = {text: number for number, text in enumerate(texts, 1)}
        tokens = None if cost.uncounted_calls else cost.tokens / len(group)
        return [JudgeMark(shares[numbers[answer]], tokens) for answer in answers]

    def _flatten(self, answered: Sequence[AnsweredPrompt], marks: Sequence[Sequence[JudgeMark]]) -> list[JudgeMark]:
        """Returns the marks of groups in the order of their answers."""
        by_prompt = {key: iter(group) for key, group in zip(_group_by_prompt(answered), marks, strict=True)}
        return [next(by_prompt[prompt.key]) for prompt, _ in answered]


def tokens_per_thousand(judgements: Iterable[Judgement], name: str = "judge") -> float | None:
    """Returns the judge's tokens for a thousand such answers, by what these cost; None: the server did not say."""
    part = f"{name}_tokens"
    tokens = [judgement.parts[part] for judgement in judgements if part in judgement.parts]
    return 1000 * sum(tokens) / len(tokens) if tokens else None


def _read_places(text: str, is_cut: bool, count: int) -> list[list[int]] | None:
    """Returns the ranking of a reply; each number once is the sign that it was not cut off."""
    return read_ranking(text, count)


def _group_by_prompt(answered: Sequence[AnsweredPrompt]) -> dict[str, list[AnsweredPrompt]]:
    groups: dict[str, list[AnsweredPrompt]] = {}
    for prompt, completion in answered:
        groups.setdefault(prompt.key, []).append((prompt, completion))
    return groups


def _shuffle(texts: Iterable[str], key: str) -> list[str]:
    """Returns texts in an order that depends on the key and on all of them, but not on the one in which they come."""
    order = sorted(texts)
    digest = hashlib.blake2b("\0".join([key, *order]).encode(errors="surrogatepass"), digest_size=8)
    random.Random(digest.hexdigest()).shuffle(order)  # noqa: S311 - no secret
    return order
