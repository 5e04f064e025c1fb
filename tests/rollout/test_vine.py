"""The vine: steps of answers, and their values by rollouts, held against exact expectations on the toy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from tba.errors import UserError
from tba.rollout.vine import Vine
from tba.training.tiny_models import character_tokenizer
from tba.types import Completion, Judgement, Prompt, Sampling, StopReason, Trajectory, Version
from toy.engine import TabularEngine, TabularFlow, sample_groups, tabular_prompts
from toy.policy import TabularPolicy, TabularTask, TabularTokenizer, distribution

TASK = TabularTask(symbols=3, length=4, prompts=2)
TOKENIZER = TabularTokenizer(3)
SPLIT_AT_B = Vine(rollouts=400, separator="B", joined="", max_steps=None)


@dataclass
class Counted:
    """A real engine that remembers what it was asked."""

    engine: TabularEngine
    asked: list[tuple[Prompt, int]] = field(default_factory=list)

    def flow(self, count: int, *rest: object) -> TabularFlow:
        flow = self.engine.flow(count, *rest)
        submit = flow.submit

        def remembering(prompts: Sequence[Prompt]) -> None:
            self.asked += [(prompt, count) for prompt in prompts]
            submit(prompts)

        flow.submit = remembering
        return flow


@dataclass
class Same:
    """An engine, and its flow, that gives the same answer to everything at once."""

    completion: Completion
    count: int = 0
    asked: int = 0  # prompts of the last flow

    def flow(self, count: int, *rest: object) -> Same:
        self.count, self.asked = count, 0
        return self

    def submit(self, prompts: Sequence[Prompt]) -> None:
        self.asked += len(prompts)

    def next(self, *rest: object, **named: object) -> list[tuple[int, list[Completion]]]:
        return [(i, [self.completion] * self.count) for i in range(self.asked)]


def judged(count: int = 12, seed: int = 0) -> list[Trajectory]:
    groups = sample_groups(TASK, tabular_prompts(TASK), count, Sampling(), np.random.default_rng(seed))
    return [t for g in groups for t in g.trajectories]


def expected_value(prompt: Prompt, prefix: list[int]) -> float:
    """E[r] of the reference's answers that begin with `prefix`, by enumeration."""
    question = TASK.question(prompt)
    p_O = distribution(TabularPolicy(TASK, 1.0, torch.float64))[question]
    under = [o for o in range(TASK.outcomes) if TASK.tokens(o)[: len(prefix)] == prefix]
    mass = sum(float(p_O[o]) for o in under)
    return sum(float(p_O[o]) * float(TASK.rewards_QO[question, o]) for o in under) / mass


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("one\ntwo\nthree", ["one\n", "two\n", "three"]),
        ("one\ntwo\n#### 5", ["one\n", "two\n#### 5"]),
        ("one\n\n\ntwo\n", ["one\n\n\n", "two\n"]),
        ("\n\none\ntwo", ["\n\none\n", "two"]),
        ("#### 5", ["#### 5"]),
        ("one\n#### 5", ["one\n#### 5"]),
        ("one\n#### 5\ntwo", ["one\n", "#### 5\n", "two"]),
        ("\n", ["\n"]),
    ],
)
def test_a_step_is_a_line_and_the_answer_line_belongs_to_the_one_before(text: str, steps: list[str]) -> None:
    tokenizer = character_tokenizer("\n #5abcdefghijklmnopqrstuvwxyz")
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    starts = Vine().split(tokens, tokenizer)
    cut = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert cut == steps


def test_a_separator_may_end_inside_a_token_or_span_several() -> None:
    class Pieces:
        """Tokens that are given pieces of text."""

        eos_token_id = None
        pieces = ("ab", "c.\n", "\nde", "f\n", "\n", "g")

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return "".join(self.pieces[i] for i in token_ids)

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise NotImplementedError

    tokens = np.arange(6, dtype=np.int32)
    assert Vine(separator="\n\n").split(tokens, Pieces()) == [0, 3, 5]
    assert Vine(separator="\n").split(tokens, Pieces()) == [0, 2, 3, 5]


def test_without_a_separator_every_token_is_a_step() -> None:
    assert Vine(separator="").split(np.array([4, 4, 7]), character_tokenizer("abcdefgh")) == [0, 1, 2]


def test_an_episode_of_several_segments_is_refused() -> None:
    rollouts = SPLIT_AT_B.start(TabularEngine(TASK), TASK.reward(), TOKENIZER)
    (t,) = judged(1)[:1]
    completion = replace(
        t.completion,
        tokens=np.array([1, 2], np.int32),
        mask=np.array([True, False]),
        log_behavior=None,
        begins=np.array([1], np.int32),
    )
    with pytest.raises(UserError, match=r"2 segments, .* but VinePPO's values continue one text"):
        rollouts.add_values([replace(t, completion=completion)], Sampling(), np.random.default_rng(0), Counter())


def test_a_value_is_the_expected_reward_of_answers_that_go_on_from_there() -> None:
    rollouts = SPLIT_AT_B.start(TabularEngine(TASK), TASK.reward(), TOKENIZER)
    counts: Counter[str] = Counter()
    checked = 0
    for t in rollouts.add_values(judged(), Sampling(), np.random.default_rng(1), counts):
        starts, values = t.arrays["step_start"], t.arrays["step_value"]
        assert (starts.dtype, values.dtype) == (np.int64, np.float32)
        tokens = t.completion.tokens.tolist()
        b = TOKENIZER.characters.index("B")
        assert starts.tolist() == [0] + [i + 1 for i, token in enumerate(tokens[:-1]) if token == b and tokens[i + 1]]
        for start, value in zip(starts.tolist(), values.tolist(), strict=True):
            assert value == pytest.approx(expected_value(t.prompt, tokens[:start]), abs=4 * 0.5 / 400**0.5)
            checked += start > 0
    assert checked >= 5
    assert (
        len(
            {
                round(float(t.arrays["step_value"][0]), 6)
                for t in rollouts.add_values(judged(4), Sampling(), np.random.default_rng(1), counts)
            }
        )
        == 2
    )  # a prompt's value is one for all its answers


def test_each_distinct_prefix_is_continued_once_and_all_of_it_is_counted_as_auxiliary() -> None:
    engine, counts = Counted(TabularEngine(TASK)), Counter[str]()
    vine = replace(SPLIT_AT_B, rollouts=3)
    trajectories = judged(30)
    grown = vine.start(engine, TASK.reward(), TOKENIZER).add_values(
        trajectories, Sampling(), np.random.default_rng(1), counts
    )
    prefixes = {
        (t.prompt.key, t.completion.tokens[:start].tobytes()) for t in grown for start in t.arrays["step_start"]
    }
    assert len(grown) == len(trajectories)
    assert [count for _, count in engine.asked] == [3] * len(prefixes)
    assert (
        len({prompt.key for prompt, _ in engine.asked})
        == len(prefixes)
        < sum(len(t.arrays["step_start"]) for t in grown)
    )
    assert counts["auxiliary_trajectories"] == 3 * len(prefixes)
    assert counts["auxiliary_tokens"] >= counts["auxiliary_trajectories"]
    assert counts["asked_tokens"] == sum(len(prompt.tokens) for prompt, _ in engine.asked)
    assert counts.keys() == {"auxiliary_trajectories", "auxiliary_tokens", "asked_tokens"}


def test_beyond_the_last_step_that_is_estimated_the_value_is_the_reward_and_nothing_is_gained() -> None:
    tokenizer = character_tokenizer("\nabcde")
    text = "a\nb\nc\nd\ne"
    completion = Completion(
        np.array(tokenizer.encode(text, add_special_tokens=False), np.int32), text, StopReason.EOS, (Version(),) * 2
    )

    one = np.array(tokenizer.encode("a", add_special_tokens=False), np.int32)
    engine = Same(Completion(one, "a", StopReason.EOS, (Version(),) * 2))

    class Length:
        """As many tenths as the answer has letters."""

        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
            return [Judgement(len(c.text.replace("\n", "")) / 10) for _, c in answered]

    prompt = Prompt("letters", np.array([1], np.int32))
    t = Trajectory("t", prompt, completion, 0.9, np.zeros(len(completion.tokens), np.float32), Version())
    for limit, values in ((2, [0.1, 0.2, 0.3, 0.9, 0.9]), (None, [0.1, 0.2, 0.3, 0.4, 0.5])):
        rollouts = Vine(2, max_steps=limit).start(engine, Length(), tokenizer)
        (grown,) = rollouts.add_values([t], Sampling(), np.random.default_rng(0), Counter())
        assert grown.arrays["step_start"].tolist() == [0, 2, 4, 6, 8]
        assert grown.arrays["step_value"].tolist() == pytest.approx(values)
        assert engine.asked == (3 if limit else 5)
    cut = Vine(2, max_steps=None, max_tokens=3).start(engine, Length(), tokenizer)
    (grown,) = cut.add_values([t], Sampling(), np.random.default_rng(0), Counter())
    assert grown.arrays["step_value"].tolist() == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.2])  # "a\nb" of each


def test_what_a_stop_string_removed_is_not_in_the_text_that_is_marked() -> None:
    tokenizer = character_tokenizer("\nabcX")
    seen: list[Completion] = []

    two = np.array(tokenizer.encode("cX", add_special_tokens=False), np.int32)
    stopped = Same(Completion(two, "c", StopReason.STOP_STRING, (Version(),) * 2))

    class Seen:
        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
            seen.extend(c for _, c in answered)
            return [Judgement(0.0)] * len(answered)

    tokens = np.array(tokenizer.encode("a\nb", add_special_tokens=False), np.int32)
    completion = Completion(tokens, "a\nb", StopReason.EOS, (Version(),) * 2)
    prompt = Prompt("letters", np.array([1], np.int32))
    t = Trajectory("t", prompt, completion, 0.0, np.zeros(3, np.float32), Version())
    rollouts = Vine(1).start(stopped, Seen(), tokenizer)
    rollouts.add_values([t], Sampling(), np.random.default_rng(0), Counter())
    assert [c.text for c in seen] == ["c", "a\nc"]
    assert [c.stop_reason for c in seen] == [StopReason.STOP_STRING] * 2


def test_answers_whose_rollouts_were_interrupted_are_in_flight_and_those_without_a_finite_value_rejected() -> None:
    trajectories, asked = judged(6), iter([False] * 2 + [True] * 9)
    rollouts = replace(SPLIT_AT_B, rollouts=2).start(TabularEngine(TASK), TASK.reward(), TOKENIZER)
    counts: Counter[str] = Counter()
    grown = rollouts.add_values(trajectories, Sampling(), np.random.default_rng(0), counts, lambda: next(asked))
    assert 0 <= len(grown) < len(trajectories)
    assert counts["in_flight_trajectories"] == len(trajectories) - len(grown)
    gone = {t.uid for t in trajectories} - {t.uid for t in grown}
    assert counts["in_flight_tokens"] == sum(t.length for t in trajectories if t.uid in gone)
    assert counts["auxiliary_tokens"] > 0

    @dataclass
    class Broken:
        value: float

        def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
            return [Judgement(self.value)] * len(answered)

    for value, kept in ((float("nan"), 0), (1e20, 0), (-1e9, len(trajectories))):
        counts = Counter()
        broken = replace(SPLIT_AT_B, rollouts=2).start(TabularEngine(TASK), Broken(value), TOKENIZER, 1e9)
        assert len(broken.add_values(trajectories, Sampling(), np.random.default_rng(0), counts)) == kept
        assert counts["rejected_trajectories"] == len(trajectories) - kept


def test_settings_that_cannot_work_are_refused() -> None:
    for changes, said in (
        ({"rollouts": 0}, "0 rollouts"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ):
        with pytest.raises(UserError, match=said):
            Vine(**changes)
