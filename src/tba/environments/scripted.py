"""Episodes that somebody else has played: a demonstration's turns, acted again and written as tokens.

Invariant: the environment answers here and now; only the turns come from the demonstration. Its tokens are laid out as
an engine would have laid them out, with the same mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tba.environments.episode import Episode, Observation, begun
from tba.environments.speech import Speech
from tba.protocols import Acted
from tba.types import ELSEWHERE, Completion, Judgement, Problem, StopReason


@dataclass(frozen=True)
class Acting:
    """One part of an episode: who speaks, and what."""

    said: str | Observation  # a turn, or what was heard

    @property
    def sampled(self) -> bool:
        """Returns whether it is a turn."""
        return isinstance(self.said, str)

    @property
    def text(self) -> str:
        return self.said if isinstance(self.said, str) else self.said.text


def acted(task: Acted, problem: Problem, prompt: str) -> tuple[list[Acting], Judgement]:
    """Returns the parts of a problem's demonstration and the environment's judgement; `prompt` is the problem's text.

    Raises `EpisodeFailed` as the environment does.
    """
    turns = problem.demonstration if isinstance(problem.demonstration, tuple) else (problem.demonstration or "",)
    episode = begun(task.environment, problem.fields, problem.seed or 0, task.turns, prompt)
    try:
        return list(_parts(episode, turns)), episode.judgement()
    finally:
        episode.close()


def _parts(episode: Episode, turns: Sequence[str]) -> Iterator[Acting]:
    for number, turn in enumerate(turns, start=1):
        yield Acting(turn)
        answer = episode.say(turn)
        if answer is None or number == len(turns):
            return
        yield Acting(answer)


def written(parts: Sequence[Acting], judgement: Judgement, speech: Speech) -> Completion:
    """Returns the parts as a completion from elsewhere."""
    heard = [part.said if isinstance(part.said, Observation) else None for part in (*parts[1:], Acting(""))]
    tokens = [
        speech.turn(part.said, then) if isinstance(part.said, str) else speech.observation(part.said)
        for part, then in zip(parts, heard, strict=True)
    ]
    mask = [np.full(len(of_part), part.sampled) for of_part, part in zip(tokens, parts, strict=True)]
    tokens_T = np.concatenate(tokens)
    return Completion(
        tokens=tokens_T,
        text=speech.text(tokens_T),
        stop_reason=StopReason.EXTERNAL,
        versions=(ELSEWHERE, ELSEWHERE),
        mask=np.concatenate(mask),
        judgement=judgement,
    )
