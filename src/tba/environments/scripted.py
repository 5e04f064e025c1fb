"""Episodes that somebody else has played: a demonstration's turns, acted again and written as tokens.

Invariant: the environment answers here and now; only the turns come from the demonstration. Its tokens are laid out as
an engine would have laid them out, with the same mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tba.environments.episode import Episode, Observation, begin
from tba.environments.turn_encoding import TurnEncoder
from tba.protocols import Acted
from tba.types import ELSEWHERE, Completion, Judgement, Problem, StopReason


@dataclass(frozen=True)
class EpisodePart:
    """One part of an episode: a turn of the policy, or what it was told then."""

    content: str | Observation  # a turn, or what was heard

    @property
    def is_turn(self) -> bool:
        """Returns whether the policy speaks."""
        return isinstance(self.content, str)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else self.content.text


def play_demonstration(task: Acted, problem: Problem, prompt: str) -> tuple[list[EpisodePart], Judgement]:
    """Returns the parts of a problem's demonstration and the environment's judgement; `prompt` is the problem's text.

    Raises `EpisodeFailed` as the environment does.
    """
    turns = problem.demonstration if isinstance(problem.demonstration, tuple) else (problem.demonstration or "",)
    episode = begin(task.environment, problem.fields, problem.seed or 0, task.turns, prompt)
    try:
        return list(_play_turns(episode, turns)), episode.judgement()
    finally:
        episode.close()


def _play_turns(episode: Episode, turns: Sequence[str]) -> Iterator[EpisodePart]:
    for number, turn in enumerate(turns, start=1):
        yield EpisodePart(turn)
        observation = episode.say(turn)
        if observation is None or number == len(turns):
            return
        yield EpisodePart(observation)


def encode_parts(parts: Sequence[EpisodePart], judgement: Judgement, encoder: TurnEncoder) -> Completion:
    """Returns the parts of an episode as a completion that was not sampled here."""
    contents = [part.content for part in parts]
    replies = [content if isinstance(content, Observation) else None for content in (*contents[1:], "")]
    tokens = [
        encoder.turn(content, reply) if isinstance(content, str) else encoder.observation(content)
        for content, reply in zip(contents, replies, strict=True)
    ]
    mask = [np.full(len(part_tokens), part.is_turn) for part_tokens, part in zip(tokens, parts, strict=True)]
    tokens_T = np.concatenate(tokens)
    return Completion(
        tokens=tokens_T,
        text=encoder.text(tokens_T),
        stop_reason=StopReason.EXTERNAL,
        versions=(ELSEWHERE, ELSEWHERE),
        mask=np.concatenate(mask),
        judgement=judgement,
    )
