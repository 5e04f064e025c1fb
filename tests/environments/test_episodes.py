"""Environments as people write them, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from tests.environments.turning_toy import Turning, task

from tba.environments.engine import EpisodeEngine
from tba.environments.episode import Episode, EpisodeFailed, Observation
from tba.environments.guess_number import BEST, GUESSES, GuessNumber, timid
from tba.environments.scripted import play_demonstration
from tba.environments.task import EnvironmentReward, EnvironmentTask, Player
from tba.environments.turn_encoding import TurnEncoder
from tba.errors import UserError
from tba.generation import generate
from tba.protocols import Environment, Turn
from tba.rollout.prompts import PromptSettings, encode
from tba.types import Completion, Judgement, Sampling, StopReason, Version
from toy.engine import TabularEngine
from toy.policy import TabularTokenizer


class Counting:
    """Asynchronous, in OpenEnv's form: each step has a result with a reward, and its third is the last."""

    async def reset(self, seed: int, letter: str = "x") -> str:
        await asyncio.sleep(0)
        self.count, self.letter = 0, letter
        return f"{letter}{seed}"

    async def step(self, text: str) -> SimpleNamespace:
        self.count += 1
        return SimpleNamespace(observation=self.letter * self.count, reward=len(text), done=self.count == 3)


def test_an_asynchronous_environment_with_openenvs_results_is_one_too() -> None:
    episode = Episode(Counting, {"letter": "y", "other": 3}, seed=7, turns=9)
    assert episode.opening == "y7"
    assert [episode.say("a"), episode.say("bb"), episode.say("ccc")] == [Observation("y"), Observation("yy"), None]
    assert episode.judgement().reward == 6
    assert episode.judgement().parts == {"turns": 3.0}
    episode.close()


def test_an_episode_is_over_after_as_many_turns_as_the_task_allows() -> None:
    episode = Episode(Counting, {}, seed=0, turns=2)
    assert [episode.say("a"), episode.say("a")] == [Observation("x"), None]
    assert episode.judgement().reward == 2
    episode.close()


class Broken(Turning):
    """Raises where its second turn is an A, and gives no number where the first one ends it."""

    def step(self, text: str) -> str | None:
        if self.turns == 1 and text == "A":
            raise ZeroDivisionError("nothing is divided")
        return super().step(text)

    def get_reward(self) -> float:
        return math.nan if self.said == "$" else super().get_reward()


@dataclass(frozen=True)
class Within:
    environment: Callable[[], Environment]
    turns: int = 3


def test_an_environment_that_fails_costs_its_own_episode_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    prompts = encode(task.problems("train"), task.name, TabularTokenizer(4), PromptSettings()).prompts
    found = {}
    for make in (Turning, Broken):
        engine = EpisodeEngine(TabularEngine(task), Within(make), TurnEncoder(TabularTokenizer(4), chat=False))
        found[make] = generate(engine, prompts, 200, Sampling(1e6), np.random.default_rng(0))
    failed = 0
    for completion in chain.from_iterable(found[Broken]):
        tokens = completion.tokens.tolist()
        fails = tokens == [0] or tokens[2:3] == [1]
        assert math.isnan(completion.judgement.reward) == fails, tokens
        failed += fails
    assert sum(map(len, found[Broken])) == 400
    assert not any(math.isnan(c.judgement.reward) for c in chain.from_iterable(found[Turning]))
    assert 80 <= failed <= 210  # 1 in 5 ends at once; of the others 1 in 5 says A
    assert f"{failed} of 400 episodes failed and are rejected" in caplog.text


class Told(Turning):
    """Its reward is how many symbols a cut turn had, and none where it was told none."""

    heard = ""

    def cut(self, text: str) -> None:
        self.heard += text

    def get_reward(self) -> float:
        return len(self.heard)


@pytest.mark.parametrize(
    ("mask", "turns", "cut"),
    [([1, 1, 1, 1], 0, 4), ([1, 0, 1, 1], 1, 2), ([1, 0, 1, 1], 2, 0), ([1, 0, 1, 0], 2, 0), ([1, 1, 0, 1], 1, 1)],
)
def test_a_last_turn_that_was_cut_off_is_told_by_itself_and_one_that_had_ended_only_once(
    mask: list[int], turns: int, cut: int
) -> None:
    (prompt, *_) = encode(task.problems("train"), task.name, TabularTokenizer(4), PromptSettings()).prompts
    engine = EpisodeEngine(TabularEngine(task), Within(Told), TurnEncoder(TabularTokenizer(4), chat=False))
    partner = engine.flow(1, Sampling(), np.random.default_rng(0))
    partner.submit([prompt])
    partner.hear([Turn(0, "A", StopReason.EOS, 9)] * turns)
    tokens, sampled = np.array([1, 2, 3, 4], np.int32), None if all(mask) else np.array(mask, np.bool_)
    ended = partner.ended(0, Completion(tokens, "", StopReason.LENGTH, (Version(), Version()), mask=sampled))
    assert ended.judgement == Judgement(cut, {"turns": turns})


def test_a_cancelled_episode_is_not_judged_and_the_others_are() -> None:
    prompts = encode(task.problems("train"), task.name, TabularTokenizer(4), PromptSettings()).prompts
    flow = EpisodeEngine(TabularEngine(task), task, TurnEncoder(TabularTokenizer(4), chat=False)).flow(
        3, Sampling(), np.random.default_rng(0)
    )
    flow.submit(prompts)
    for request in (1, 3):
        flow.cancel(request)
    found = dict(flow.next(until_needed=False))
    while len(found) < 2:
        found |= dict(flow.next(until_needed=False))
    assert [len(found[i]) for i in range(2)] == [2, 2]
    assert all(completion.judgement is not None for completions in found.values() for completion in completions)


def test_an_environment_that_draws_without_its_seed_is_refused() -> None:
    class Random(Turning):
        drawn = 0

        def reset(self, seed: int) -> str:
            Random.drawn += 1
            super().reset(seed)
            return f"{Random.drawn}"

    made = EnvironmentTask(Random, "random", worlds=1, held_out=1)
    (problem,) = made.problems("train")
    with pytest.raises(UserError, match="drawn from its argument `seed`"):
        play_demonstration(made, problem, str(problem.prompt))


def test_what_was_never_acted_is_not_graded() -> None:
    prompts = encode(task.problems("train"), task.name, TabularTokenizer(4), PromptSettings()).prompts
    ((completion,), _) = generate(TabularEngine(task), prompts, 1, Sampling(), np.random.default_rng(0))
    with pytest.raises(UserError, match="graded by acting"):
        EnvironmentReward().judge([(prompts[0], completion)])


def halving(told: list[str], rng: random.Random) -> str:
    """Guess as the best player does: the middle."""
    low, high = map(int, told[-1].removesuffix("?").split("-"))
    return f"{(low + high) // 2:03}"


@pytest.mark.parametrize(("player", "mean"), [(halving, BEST), (timid, 12.9)])
def test_halving_finds_a_number_in_5_8_guesses_and_the_timid_player_needs_twice_as_many(
    player: Player, mean: float
) -> None:
    made = EnvironmentTask(GuessNumber, "numbers", turns=GUESSES, worlds=1500, held_out=1, player=player)
    guesses = [len(problem.demonstration or ()) for problem in made.problems("train")]
    assert np.mean(guesses) == pytest.approx(mean, abs=4 * np.std(guesses) / len(guesses) ** 0.5)
    assert max(guesses) <= (7 if player is halving else GUESSES)


def test_a_seed_decides_the_number_and_training_shares_none_with_evaluation() -> None:
    made = EnvironmentTask(GuessNumber, "numbers", turns=GUESSES, worlds=50, held_out=50)
    seeds = [{problem.seed for problem in made.problems(split)} for split in ("train", "eval")]
    assert len(seeds[0]) == len(seeds[1]) == 50
    assert not seeds[0] & seeds[1]
    with pytest.raises(EpisodeFailed, match="gave the reward"):
        Episode._require_number(Episode(GuessNumber, {}, 1, 3), "get_reward()", "much")


def test_an_environment_whose_reward_is_no_number_is_refused_while_the_player_shows_it() -> None:
    class Silent(GuessNumber):
        def get_reward(self) -> float:
            return None

    made = EnvironmentTask(Silent, "silent", turns=GUESSES, worlds=1, held_out=1, player=halving)
    with pytest.raises(UserError, match=r"of task silent fails: get_reward\(\) of Silent gave the reward None"):
        made.problems("train")
