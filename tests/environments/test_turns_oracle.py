"""Where Trajectory Balance leads in several turns: to pi_ref exp(r / beta) / Z over the policy's own tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.environments.turning_toy import (
    Play,
    Turning,
    distance_to_ideal,
    log_probability,
    plays,
    task,
)
from tests.runtime.runs import final_weights, inline, processes

from tba.__main__ import main
from tba.environments.engine import EpisodeEngine
from tba.environments.task import EnvironmentReward
from tba.environments.turn_encoding import TurnEncoder
from tba.errors import UserError
from tba.generation import generate
from tba.record.summary import Summary
from tba.replay.codec import decode_prompt, encode_prompt
from tba.replay.follower import JournalFollower
from tba.rollout.prompts import PromptSettings, encode
from tba.rollout.vine import Vine
from tba.runtime.run_directory import RunDirectory
from tba.types import Completion, Sampling, StopReason, Trajectory, Version
from toy.engine import TabularEngine, tabular_prompts
from toy.policy import WEIGHT, TabularPolicy, TabularTokenizer

TOY = Path(__file__).with_name("turning_toy.py")
SEEDS = {0: 0, 1: 1}  # of the world of each training prompt


def distance(path: Path) -> float:
    policy = TabularPolicy(task)
    policy.load({WEIGHT: final_weights(path)[WEIGHT]})
    return distance_to_ideal(policy, Turning, SEEDS, beta=0.25)


def sane(summary: Summary) -> None:
    assert summary.tokens.closes()
    assert summary.trajectories.closes()
    assert 0 < summary.tokens.observed < summary.tokens.generated


def test_there_are_85_plays_and_the_reference_is_far_from_the_ideal() -> None:
    assert [len(list(plays(Turning, seed))) for seed in (0, 1)] == [85, 85]
    assert distance_to_ideal(TabularPolicy(task), Turning, SEEDS, beta=0.25) > 0.2


def test_inline_it_reaches_the_ideal_from_uniformly_random_play(tmp_path: Path) -> None:
    summary = inline(tmp_path / "run", source=TOY)
    sane(summary)
    assert distance(tmp_path / "run") <= 0.02


def test_processes_do_so_too_with_two_searchers(tmp_path: Path) -> None:
    summary = processes(tmp_path / "run", "--searchers", "2", source=TOY)
    sane(summary)
    assert distance(tmp_path / "run") <= 0.02


def test_the_value_of_a_turn_is_the_mean_reward_of_all_that_can_follow_it_in_the_same_world() -> None:
    """VinePPO's steps are turns: each prefix is played again in a world of its seed, and continued 2,000 times."""
    engine = EpisodeEngine(TabularEngine(task), task, TurnEncoder(TabularTokenizer(4), chat=False))
    prompts = [replace(p, seed=seed) for seed, p in enumerate(tabular_prompts(task))]
    rng, counts = np.random.default_rng(0), Counter[str]()
    answered = generate(engine, prompts, 6, Sampling(), rng)
    played = [
        Trajectory("", prompt, c, 0.0, np.zeros(len(c.tokens), np.float32), Version())
        for prompt, row in zip(prompts, answered, strict=True)
        for c in row
    ]
    vine = Vine(rollouts=2000).start(engine, EnvironmentReward(), TabularTokenizer(4), by_turns=True)
    reference, several, prefixes = TabularPolicy(task, dtype=torch.float64), 0, set()
    for t in vine.add_values(played, Sampling(), rng, counts):
        starts, values = t.arrays["step_start"].tolist(), t.arrays["step_value"].tolist()
        assert starts == list(range(0, len(t.completion.tokens), 2))  # between two turns the world says one symbol
        several += len(starts) == 3
        assert t.prompt.seed is not None
        for start, value in zip(starts, values, strict=True):
            prefixes.add((t.prompt.key, t.completion.tokens[:start].tobytes()))
            found = list(plays(Turning, t.prompt.seed, tuple(t.completion.tokens[:start:2].tolist())))
            question = task.question(t.prompt)
            weight = torch.stack([log_probability(reference, question, play) for play in found]).softmax(0)
            rewards = torch.tensor([play.reward for play in found], dtype=torch.float64)
            mean = float(weight @ rewards)
            spread = float((weight @ (rewards - mean) ** 2).sqrt())
            assert abs(value - mean) <= 4 * spread / 2000**0.5 + 1e-6
    assert several >= 3
    assert counts["auxiliary_trajectories"] == 2000 * len(prefixes)


def test_two_turns_between_which_the_world_says_nothing_have_no_values_of_their_own() -> None:
    engine = EpisodeEngine(TabularEngine(task), task, TurnEncoder(TabularTokenizer(4), chat=False))
    (prompt, _), tokens = tabular_prompts(task), np.array([1, 2], np.int32)
    merged = Completion(tokens, "AB", StopReason.EOS, (Version(), Version()))
    played = Trajectory("", prompt, merged, 0.0, np.zeros(2, np.float32), Version(), {"turns": 2.0})
    vine = Vine(rollouts=2).start(engine, EnvironmentReward(), TabularTokenizer(4), by_turns=True)
    with pytest.raises(UserError, match="cannot be told apart"):
        vine.add_values([played], Sampling(), np.random.default_rng(0), Counter())


def test_it_does_so_from_a_scripted_agents_plays_alone(tmp_path: Path) -> None:
    """1000 random plays of each prompt, acted again when they are imported; no searcher ever samples."""
    given = (
        *("train", str(TOY), "--runtime", "inline", "--runs", str(tmp_path), "--run-name", "run", "--offline"),
        *("--task.shown", "1000", "--model.task.shown", "1000", "--fill.demonstrations", "2000"),
        *("--replay.pacing.max-mean-uses", "inf", "--replay.buffer.deduplicate", "--evaluation.problems", "1"),
        *("--steps", "150", "--optimizer.schedule.steps", "150"),
    )
    assert main(given) == 0
    summary = Summary.read(tmp_path / "run")
    assert summary is not None
    assert summary.trajectories.generated == 0
    assert summary.trajectories.imported == 2000
    assert summary.trajectories.trained_once == 2 * 85
    assert summary.tokens.closes()
    assert distance(tmp_path / "run") <= 0.02


def test_what_is_stored_of_a_play_is_what_was_sampled_and_heard(tmp_path: Path) -> None:
    inline(tmp_path / "run", "--steps", "2", source=TOY)
    worlds = {"a": list(plays(Turning, 0)), "b": list(plays(Turning, 1))}
    reference = TabularPolicy(task, dtype=torch.float64)
    with JournalFollower(RunDirectory.open(tmp_path / "run").journal_to_read()) as journal:
        stored = journal.drain(1000)
    assert len(stored) >= 100
    for t in stored:
        mask = np.ones(t.length, bool) if t.completion.mask is None else t.completion.mask
        found = Play(tuple(t.completion.tokens.tolist()), tuple(mask.tolist()), t.reward)
        assert found in worlds[t.prompt.text]
        assert t.log_reference[~mask].tolist() == [0.0] * t.completion.observed
        expected = float(log_probability(reference, "ab".index(t.prompt.text), found))
        assert t.log_reference.sum() == pytest.approx(expected, abs=1e-5)
        assert t.completion.log_behavior is not None
        own = int(mask.sum())
        assert t.completion.log_behavior.sum() == pytest.approx(-own * np.log(5), abs=1e-4)


def test_a_seed_is_part_of_a_prompts_key_and_is_stored_where_there_is_one() -> None:
    plain = tabular_prompts(task)
    seeded = encode(task.problems("train"), task.name, TabularTokenizer(4), PromptSettings()).prompts
    assert len({p.key for p in (*plain, *seeded)}) == 4
    assert [decode_prompt(encode_prompt(p)).key for p in seeded] == [p.key for p in seeded]
    assert [b'"seed"' in encode_prompt(p) for p in (*plain, *seeded)] == [False, False, True, True]
