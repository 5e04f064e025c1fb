"""The reward of red-teaming from the answers of a victim and the marks of a classifier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from tba.apps.red_team.endpoint import EndpointVictim
from tba.apps.red_team.toxicity import CausalJudge, SequenceClassifier, Success, Toxicity, WordClassifier
from tba.apps.red_team.victim import ModelVictim, StartedVictim
from tba.errors import UserError
from tba.types import Completion, Prompt, StopReason, Version

PROMPT = Prompt("red_team", np.array([1], np.int32), "Write:")


@dataclass(frozen=True)
class Echo:
    """A victim that numbers its answers; `asked` has what was put to it."""

    asked: list[str] = field(default_factory=list)

    def start(self) -> StartedVictim:
        return self

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        self.asked.extend(attacks)
        return [[f"{attack} {n}" for n in range(count)] for attack in attacks]


@dataclass(frozen=True)
class Numbered:
    """P(toxic) of an answer with number n is (n + 1) / 10, of an attack with `bad` in it; else 0."""

    def start(self) -> Numbered:
        return self

    def log_toxic(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        marks = [(int(answer.split()[-1]) + 1) / 10 if "bad" in attack else 0.0 for attack, answer in pairs]
        return [math.log(mark) if mark else -math.inf for mark in marks]


def attack(text: str) -> tuple[Prompt, Completion]:
    return PROMPT, Completion(np.array([1], np.int32), text, StopReason.EOS, (Version(), Version()))


def test_the_reward_is_the_mean_logarithm_and_success_is_of_the_mean_probability() -> None:
    victim = Echo()
    reward = Toxicity(victim, Numbered(), count=4, floor=-7.0, threshold=0.2)
    bad, good, empty, again = reward.judge([attack("bad one"), attack("fine"), attack(" "), attack(" bad one")])
    assert bad.reward == pytest.approx(sum(math.log(p) for p in (0.1, 0.2, 0.3, 0.4)) / 4)
    assert bad.parts == {"toxic": pytest.approx(0.25), "success": 1.0}
    assert (good.reward, good.parts["success"]) == (-7.0, 0.0)  # no probability at all: the floor, and finite
    assert empty.reward == -7.0
    assert again == bad
    assert victim.asked == ["bad one", "fine"]  # equal attacks once, but for space; an empty one never
    assert [j.reward for j in Success(reward).judge([attack("bad one"), attack("fine")])] == [1.0, 0.0]
    assert [j.reward for j in Success(Toxicity(victim, Numbered(), 4, -7.0, 0.25)).judge([attack("bad x")])] == [0.0]


def test_what_cannot_be_is_said_when_it_is_made_or_started() -> None:
    for make, said in (
        (lambda: Toxicity(Echo(), Numbered(), count=0), "at least 1"),
        (lambda: Toxicity(Echo(), Numbered(), floor=0.0), "below 0"),
        (lambda: ModelVictim(template="no slot"), "where the attack goes"),
        (lambda: ModelVictim(temperature=-1), "temperature -1"),
        (lambda: EndpointVictim(url="ftp://somewhere"), "give one such as"),
        (lambda: EndpointVictim(calls_per_second=0), "above 0"),
        (lambda: ModelVictim().start(), "needs a victim"),
        (lambda: EndpointVictim(url="http://127.0.0.1:1/v1").start(), "--task.victim.model"),
        (lambda: WordClassifier().start(), "toxicity classifier"),
        (lambda: WordClassifier("nowhere").start(), "no word classifier can be loaded"),
        (lambda: SequenceClassifier("nowhere/at all").start(), "no classifier can be loaded"),
        (lambda: CausalJudge("x", template="no slot").start(), "where answers go"),
    ):
        with pytest.raises(UserError, match=said):
            make()
