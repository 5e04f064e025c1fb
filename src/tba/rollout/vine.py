"""Values of the steps of an answer, by rollouts that continue each prefix (VinePPO, arXiv 2410.01679).

Invariant: a rollout is sampled with the weights and settings that gave the answer, is scored by the same reward as a
whole answer, and is used for nothing but the mean that becomes a value: it is never trained on. Each distinct prefix of
a round is continued once, however many answers share it. An episode's steps are its turns, and the world in which it
is continued is the one that it was played in: begun again from its seed, and told the same turns.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tba.errors import SeveralSegments, UserError
from tba.generation import generate
from tba.markup import decode_tokens
from tba.protocols import Engine, Reward, Tokenizer
from tba.types import Completion, IntArray, Prompt, Sampling, StopReason, Trajectory

Arrays = dict[str, npt.NDArray[Any]]
Prefix = tuple[str, bytes]  # a prompt's key and the answer's tokens so far


@dataclass(frozen=True)
class Vine:
    """Says how an answer is split into steps, and how often each is continued. Raises `UserError` for what cannot work.

    In an environment the steps are the turns, and `separator`, `joined` and `max_tokens` are not used.
    """

    rollouts: int = 9  # continuations of each distinct prefix, whose mean reward is its value
    separator: str = "\n"  # text that ends a step; empty: every token is a step
    joined: str = "####"  # a last step that begins with this belongs to the one before; empty: never
    max_steps: int | None = 25  # steps after which no value is estimated: the rest counts as one; None: no limit
    max_tokens: int | None = None  # most tokens of prefix and continuation; then it is truncated; None: no limit

    def __post_init__(self) -> None:
        if self.rollouts < 1:
            raise UserError(f"the vine has {self.rollouts} rollouts: give at least 1")
        for name in ("max_steps", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"the vine's {name} is {value}: give at least 1, or None for no limit")

    def start(
        self,
        engine: Engine,
        reward: Reward,
        tokenizer: Tokenizer,
        largest_reward: float = sys.float_info.max,
        by_turns: bool = False,
        turn_text: Callable[[Sequence[int]], str] | None = None,
    ) -> VineRollouts:
        return VineRollouts(self, engine, reward, tokenizer, largest_reward, by_turns, turn_text)

    def split(self, tokens: IntArray, tokenizer: Tokenizer) -> list[int]:
        """Returns where the steps begin, in tokens: 0, and after each token in which a separator ends.

        A step of white space alone goes with the one before (the first with the one after).
        """
        if not self.separator:
            return list(range(len(tokens)))
        pieces = [decode_tokens(tokenizer, [int(token)]) for token in tokens]
        text, end, starts = "".join(pieces), 0, [0]
        for i, piece in enumerate(pieces[:-1]):
            begin, end = end, end + len(piece)
            if text.find(self.separator, max(0, begin - len(self.separator) + 1), end) >= 0:
                starts.append(i + 1)
        steps = ["".join(pieces[a:b]) for a, b in zip(starts, [*starts[1:], len(pieces)], strict=True)]
        step_starts = [starts[0]]
        for n in range(1, len(steps)):
            is_blank = not steps[n].strip() or not "".join(steps[:n]).strip()
            joins_last = self.joined and n == len(steps) - 1 and steps[n].lstrip().startswith(self.joined)
            if not is_blank and not joins_last:
                step_starts.append(starts[n])
        return step_starts


@dataclass
class VineRollouts:
    """A `Vine` with its engine and reward. Made by `Vine.start`."""

    settings: Vine
    engine: Engine
    reward: Reward
    tokenizer: Tokenizer
    largest_reward: float = sys.float_info.max  # a value beyond it rejects its answer, as an infinite one does
    by_turns: bool = False  # answers are episodes, and their steps turns: a rollout is the same world played on
    turn_text: Callable[[Sequence[int]], str] | None = None  # a turn as its environment was told it; None: decoded

    def add_values(
        self,
        trajectories: Sequence[Trajectory],
        sampling: Sampling,
        rng: np.random.Generator,
        counts: Counter[str],
        interrupted: Callable[[], bool] | None = None,
    ) -> list[Trajectory]:
        """Returns the trajectories with the arrays `step_start` (int64) and `step_value` (float32): V before each step.

        Beyond `max_steps` the value is the reward, so that those steps gain nothing. Trajectories of which a rollout
        was interrupted are left out and counted as in flight, those whose value is not finite or beyond
        `largest_reward` as rejected; all rollouts are counted as auxiliary.

        Raises `UserError` for an episode of several segments.
        """
        for t in trajectories:
            if t.completion.begins is not None:
                raise SeveralSegments(len(t.completion.segments), "VinePPO's values continue")
        step_starts = [self._step_starts(t) for t in trajectories]
        prompts_by_prefix = {
            prefix: self._prefix_prompt(t, start)
            for t, (_, valued_starts) in zip(trajectories, step_starts, strict=True)
            for prefix, start in zip(_prefixes(t, valued_starts), valued_starts, strict=True)
        }
        prompts = {t.prompt.key: t.prompt for t in trajectories}
        values = self._prefix_values(prompts_by_prefix, prompts, sampling, rng, counts, interrupted)
        valued_trajectories = []
        for trajectory, (starts, valued_starts) in zip(trajectories, step_starts, strict=True):
            step_values = [values.get(prefix) for prefix in _prefixes(trajectory, valued_starts)]
            finished_values = [value for value in step_values if value is not None]
            if len(finished_values) < len(step_values):
                _count(counts, "in_flight", trajectory.length)
            elif not all(abs(value) <= self.largest_reward for value in finished_values):
                _count(counts, "rejected", trajectory.length)
            else:
                all_values = finished_values + [trajectory.reward] * (len(starts) - len(valued_starts))
                start, value = np.array(starts, np.int64), np.array(all_values, np.float32)
                arrays: Arrays = {**trajectory.arrays, "step_start": start, "step_value": value}
                valued_trajectories.append(replace(trajectory, arrays=arrays))
        return valued_trajectories

    def _step_starts(self, trajectory: Trajectory) -> tuple[list[int], list[int]]:
        """Returns (where its steps begin, before which of them the value is estimated): after at most `max_steps`
        steps.
        """
        completion, limit = trajectory.completion, self.settings.max_steps
        if self.by_turns:
            starts = [begin for begin, _ in completion.turns]
        else:
            starts = self.settings.split(completion.tokens, self.tokenizer)
        return starts, starts if limit is None else starts[: limit + 1]

    def _prefix_prompt(self, trajectory: Trajectory, start: int) -> Prompt:
        """Returns the prompt that consists of an answer's prompt and the answer's first `start` tokens."""
        prompt, completion = trajectory.prompt, trajectory.completion
        tokens = np.concatenate([prompt.tokens, completion.tokens[:start]]).astype(np.int32)
        if not self.by_turns:
            return replace(prompt, tokens=tokens)
        if trajectory.reward_parts.get("turns", 0) > len(completion.turns):
            raise UserError(
                f"the environment of task {prompt.task} answered a turn with nothing, so that two turns of an episode "
                "cannot be told apart, which VinePPO's values need: let it say something, or choose another objective"
            )
        turn_text = self._text if self.turn_text is None else self.turn_text
        turn_texts = tuple(turn_text(completion.tokens[a:b].tolist()) for a, b in completion.turns if b <= start)
        return replace(prompt, tokens=tokens, seed=prompt.world, earlier_turns=turn_texts)

    def _prefix_values(
        self,
        prompts_by_prefix: Mapping[Prefix, Prompt],
        prompts: dict[str, Prompt],
        sampling: Sampling,
        rng: np.random.Generator,
        counts: Counter[str],
        interrupted: Callable[[], bool] | None,
    ) -> dict[Prefix, float]:
        """Returns the mean reward of the rollouts of each prefix; a prefix with an interrupted one has none."""
        prefix_prompts = list(prompts_by_prefix.values())
        counts["asked_tokens"] += sum(len(prompt.tokens) for prompt in prefix_prompts)
        n = self.settings.rollouts
        rollouts_by_prefix = generate(self.engine, prefix_prompts, n, sampling, rng, interrupted)
        answered, complete_prefixes = [], []
        for prefix, rollouts in zip(prompts_by_prefix, rollouts_by_prefix, strict=True):
            tokens = np.frombuffer(prefix[1], np.int32)
            for rollout in rollouts:
                _count(counts, "auxiliary", len(rollout.tokens))
            if sum(r.stop_reason is not StopReason.INTERRUPTED for r in rollouts) == n:
                complete_prefixes.append(prefix)
                answered += [(prompts[prefix[0]], self._join(tokens, rollout)) for rollout in rollouts]
        rewards = np.array([j.reward for j in self.reward.judge(answered)] if answered else [])
        return dict(zip(complete_prefixes, rewards.reshape(len(complete_prefixes), n).mean(1).tolist(), strict=True))

    def _join(self, prefix: IntArray, rollout: Completion) -> Completion:
        """Returns the answer that a prefix and its continuation make, as the reward would see it; of an episode only
        the continuation, which its environment has judged.
        """
        if self.by_turns:
            return rollout
        tokens = np.concatenate([prefix, rollout.tokens]).astype(np.int32)
        limit = self.settings.max_tokens
        if limit is not None and len(tokens) > limit:
            cut_tokens = tokens[:limit]
            return Completion(cut_tokens, self._text(cut_tokens), StopReason.LENGTH, rollout.versions, rollout.sampling)
        text = self._text(tokens)
        overhang = len(self._text(rollout.tokens)) - len(rollout.text)  # a stop string, and what follows it
        return Completion(tokens, text[: len(text) - overhang], rollout.stop_reason, rollout.versions, rollout.sampling)

    def _text(self, tokens: IntArray | Sequence[int]) -> str:
        return decode_tokens(self.tokenizer, np.asarray(tokens).tolist())


def _prefixes(trajectory: Trajectory, starts: Sequence[int]) -> Iterator[Prefix]:
    tokens = np.ascontiguousarray(trajectory.completion.tokens, np.int32)
    return ((trajectory.prompt.key, tokens[:start].tobytes()) for start in starts)


def _count(counts: Counter[str], name: str, tokens: int) -> None:
    counts[f"{name}_tokens"] += tokens
    counts[f"{name}_trajectories"] += 1
