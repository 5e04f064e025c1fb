"""Prompts that a searcher answers: a task's problems tokenised once, in shuffled epochs or chosen for each round.

Invariant: position -> prompt is a pure function of (prompts, seed), so any searcher on any machine, before or after a
restart, gets the same prompt for the same position; only the leases settle who works on which position. In epochs a
position is an index in an endless sequence; where prompts are chosen it is the prompt's own index in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np

from tba.chat_prompts import chat_markup, prompt_tokens
from tba.errors import UserError
from tba.fields import as_declared
from tba.markup import thoughts_of, visible_text
from tba.protocols import Tokenizer
from tba.rollout.posterior import Posterior, PosteriorSettings
from tba.types import Outcome, Problem, Prompt, python_values, quote

_BLOCK_SIZE = 1000  # prompts that are tokenised together

Lease = Callable[[int], list[int]]
# leases up to so many of these positions, the first that nobody holds
LeaseFirst = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True)
@as_declared
class PromptSettings:
    """How problems become prompts, and which are answered next. Raises `UserError` when a field makes no sense."""

    max_tokens: int = 512  # tokens of the longest prompt
    when_too_long: Literal["drop", "truncate_left", "error"] = "drop"  # for a longer prompt; drops are reported
    limit: int | None = None  # use only so many problems of the training split, from its beginning
    grade_thoughts: bool = False  # let the graders read thoughts too; else what follows them, and nothing of an answer
    # whose thought has no end. Reward functions of your own are given all of an answer
    selection: Literal["epochs", "uniform", "posterior"] = "epochs"  # shuffled epochs; uniformly at random; or those
    # whose success rate is probably near a target, so that rewards still vary
    posterior: PosteriorSettings = field(default_factory=PosteriorSettings)

    @property
    def unused(self) -> Mapping[str, str]:
        """Returns the fields without effect: of a posterior that chooses no prompts, and what is off."""
        posterior = {} if self.selection == "posterior" else {"posterior": "selection posterior"}
        return posterior | ({} if self.grade_thoughts else {"grade_thoughts": "grade_thoughts on"})

    def __post_init__(self) -> None:
        for name in ("max_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--prompts.{name.replace('_', '-')} is {value}, it must be at least 1")


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts of one split, and how many problems were dropped or truncated for being over-long."""

    prompts: list[Prompt]
    dropped: int = 0  # longer than `max_tokens`
    no_room: int = 0  # not longer than that, but beside an answer longer than the model has positions for
    truncated: int = 0
    longest: int = 0  # tokens of the longest of all


def encode(
    problems: Sequence[Problem], task: str, tokenizer: Tokenizer, settings: PromptSettings, room: int | None = None
) -> EncodedPrompts:
    """Encodes problems as prompts: a text as the tokenizer begins texts, a chat by the model's chat template.

    room: tokens of a prompt for which the model has positions beside the longest answer; None: it has no limit.

    Raises `UserError` when nothing is left, when a chat meets a tokenizer without a template, or for an over-long
    prompt under `when_too_long="error"`.
    """
    prompts: list[Prompt] = []
    dropped = no_room = truncated = longest = 0
    limit = settings.max_tokens if room is None else min(settings.max_tokens, room)
    thoughts = () if settings.grade_thoughts else thoughts_of(tokenizer)
    chats = [not isinstance(p.prompt, str) for p in problems]
    texts = [p.prompt if isinstance(p.prompt, str) else _chat(p, tokenizer) for p in problems]
    for problem, text, tokens in zip(problems, texts, _tokens(tokenizer, texts, chats, task), strict=True):
        longest = max(longest, len(tokens))
        if len(tokens) > limit:
            if settings.when_too_long == "error":
                raise UserError(
                    f"a prompt of task {task} has {len(tokens)} tokens, the limit is {limit}: {_remedy(settings, room)}"
                    ", or set --prompts.when-too-long to drop or truncate_left"
                )
            if settings.when_too_long == "drop":
                dropped += len(tokens) > settings.max_tokens
                no_room += len(tokens) <= settings.max_tokens
                continue
            truncated += 1
            begin = tokens[:1] if tokens[0] == getattr(tokenizer, "bos_token_id", None) else []
            tokens = begin + tokens[len(tokens) - limit + len(begin) :]
        if not tokens or not text:
            raise UserError(f"a prompt of task {task} is empty after tokenising ({text!r}): give it some text")
        chat = None if isinstance(problem.prompt, str) else problem.prompt
        prompts.append(
            Prompt(
                task,
                np.array(tokens, dtype=np.int32),
                text if chat is None else visible_text(text),
                python_values(problem.fields),
                problem.seed,
                messages=chat,
                thoughts=thoughts,
            )
        )
    if not prompts:
        raise UserError(
            f"task {task} has no prompts left ({dropped + no_room} of {len(problems)} were longer than "
            f"{limit} tokens): {_remedy(settings, room)}, or give it more problems"
        )
    return EncodedPrompts(prompts, dropped, no_room, truncated, longest)


def _remedy(settings: PromptSettings, room: int | None) -> str:
    """Returns what to do about prompts that are too long."""
    if room is None or room >= settings.max_tokens:
        return "raise --prompts.max-tokens"
    return (
        f"lower --model.generation.max-completion-tokens, since the model has positions for {room} tokens beside an "
        "answer of that length"
    )


def _tokens(tokenizer: Tokenizer, texts: Sequence[str], chats: Sequence[bool], task: str) -> Iterator[list[int]]:
    """Yields the tokens of each prompt. Raises `UserError` for the first that the tokenizer cannot write."""
    for (chat, _), indices in groupby(range(len(texts)), lambda i: (chats[i], i // _BLOCK_SIZE)):
        block = [texts[i] for i in indices]
        try:
            rows = prompt_tokens(tokenizer, block, chat)
        except Exception as error:  # tokenizers of the Rust library raise nothing more precise
            if len(block) == 1:
                raise UserError(
                    f"the model's tokenizer cannot write the prompt {quote(visible_text(block[0]))} of task {task} "
                    f"({error}): give prompts of the characters that it knows, or another model (--model.path)"
                ) from error
            rows = [row for text in block for row in _tokens(tokenizer, [text], [chat], task)]
        yield from rows


def _chat(problem: Problem, tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "this task gives chat messages, but the model's tokenizer has no chat template: "
            "use an instruction-tuned model, or a task that gives plain prompts"
        )
    assert not isinstance(problem.prompt, str)
    return chat_markup(tokenizer, problem.prompt, problem.tools)


@dataclass
class PromptStream:
    """An endless stream: epoch after epoch, each a new permutation. `take` leases the next positions."""

    prompts: Sequence[Prompt]
    seed: int
    lease: Lease
    _epoch: int = field(default=-1, init=False)
    _order: Any = field(default=None, init=False)

    def at(self, position: int) -> Prompt:
        """Returns the prompt of a position (0, 1, 2, ...)."""
        epoch, index = divmod(position, len(self.prompts))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
            self._epoch = epoch
        return self.prompts[int(self._order[index])]

    def take(self, count: int) -> tuple[list[int], list[Prompt]]:
        """Leases the next positions; returns them and their prompts."""
        positions = self.lease(count)
        return positions, [self.at(p) for p in positions]

    def outcomes(self, rewards: Mapping[int, Sequence[float]]) -> Sequence[Outcome]:
        """Returns no outcomes: the order does not depend on them."""
        return ()


@dataclass
class UniformPrompts:
    """Prompts that nobody else is answering, all equally likely, whatever came before."""

    prompts: Sequence[Prompt]
    rng: np.random.Generator
    lease: LeaseFirst

    def take(self, count: int) -> tuple[list[int], list[Prompt]]:
        """Leases `count` different positions at random; returns them and their prompts."""
        positions = self.lease(self.rng.permutation(len(self.prompts)).tolist(), count)
        return positions, [self.prompts[p] for p in positions]

    def outcomes(self, rewards: Mapping[int, Sequence[float]]) -> Sequence[Outcome]:
        """Returns no outcomes: the choice does not depend on them."""
        return ()


@dataclass
class PosteriorPrompts:
    """Prompts whose drawn success rate is nearest to the target, among those that nobody else is answering."""

    prompts: Sequence[Prompt]
    rng: np.random.Generator
    lease: LeaseFirst
    # returns the numbered outcomes of all searchers after a number
    read_outcomes: Callable[[int], Sequence[tuple[int, int, float, float]]]
    settings: PosteriorSettings
    _posterior: Posterior = field(init=False)
    _last_number: int = 0

    def __post_init__(self) -> None:
        self._posterior = Posterior(len(self.prompts), self.settings)

    def take(self, count: int) -> tuple[list[int], list[Prompt]]:
        """Reads the outcomes of all searchers, then leases the best positions; returns them and their prompts."""
        if outcomes := self.read_outcomes(self._last_number):
            self._last_number = outcomes[-1][0]
            self._posterior.update(outcome[1:] for outcome in outcomes)
        positions = self.lease(self._posterior.order(self.rng).tolist(), count)
        return positions, [self.prompts[p] for p in positions]

    def outcomes(self, rewards: Mapping[int, Sequence[float]]) -> Sequence[Outcome]:
        """Returns the successes and failures of each prompt."""
        return [self.settings.outcome(position, answer_rewards) for position, answer_rewards in rewards.items()]
