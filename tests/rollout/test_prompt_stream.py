"""The prompt stream: which prompt a position is, and who works on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.replay.journal import JournalWriter
from tba.rollout.prompts import PromptSettings, PromptStream, encode
from tba.training.tiny_models import character_tokenizer
from tba.types import Problem, Prompt
from toy.engine import tabular_prompts
from toy.policy import TabularTask, TabularTokenizer

LETTERS = TabularTokenizer(symbols=4)  # one token for each of a..z


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt("t", np.array([n + 1], dtype=np.int32), str(n)) for n in range(count)]


def stream(count: int, seed: int) -> PromptStream:
    return PromptStream(prompts_of(count), seed, lambda n: list(range(n)))


@given(st.integers(1, 30), st.integers(0, 2**31), st.lists(st.integers(0, 200), max_size=20))
def test_the_prompt_of_a_position_depends_on_nothing_but_the_prompts_and_the_seed(
    count: int, seed: int, asked_before: list[int]
) -> None:
    used, fresh = stream(count, seed), stream(count, seed)
    for position in asked_before:
        used.at(position)
    for position in range(3 * count):
        assert used.at(position).key == fresh.at(position).key


@given(st.integers(1, 30), st.integers(0, 2**31), st.integers(0, 50))
def test_every_epoch_is_a_permutation_of_all_prompts(count: int, seed: int, epoch: int) -> None:
    prompts = stream(count, seed)
    seen = [int(prompts.at(epoch * count + i).text) for i in range(count)]
    assert sorted(seen) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, other = stream(40, 1), stream(40, 2)
    orders = [[p.at(e * 40 + i).text for i in range(40)] for p in (first, other) for e in range(2)]
    assert len({tuple(order) for order in orders}) == 4


OPEN: list[JournalWriter] = []


@pytest.fixture(autouse=True)
def close_journals() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


class Clock:
    """Seconds, set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def searchers(path: Path, prompts: Sequence[Prompt], clock: Clock) -> list[tuple[PromptStream, JournalWriter]]:
    """Two searchers' streams over one journal, leases of 10 seconds."""
    journals = [JournalWriter(path, f"searcher-{i}", clock=clock) for i in range(2)]
    OPEN.extend(journals)
    return [(PromptStream(prompts, 5, lambda count, j=j: j.lease(count, 10.0)), j) for j in journals]


# Each event: which searcher, whether it finishes what it took, and how many seconds pass.
EVENTS = st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.sampled_from([0.0, 4.0, 11.0])), max_size=25)


@settings(deadline=None, max_examples=12)
@given(EVENTS)
def test_two_searchers_never_share_a_live_position_and_leave_none_out(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, bool, float]]
) -> None:
    clock, prompts = Clock(), prompts_of(6)
    two = searchers(tmp_path_factory.mktemp("journal") / "j.sqlite", prompts, clock)
    live: dict[int, float] = {}  # position -> when its lease runs out
    answered: set[int] = set()
    for who, finishes, seconds in [*events, *[(0, True, 11.0)] * 20]:  # in the end one searcher finishes all it takes
        stream, journal = two[who]
        positions, taken = stream.take(4)
        assert not [p for p in positions if live.get(p, -1.0) > clock.now]
        assert not answered & set(positions)
        assert [p.key for p in taken] == [two[1 - who][0].at(p).key for p in positions]
        live |= dict.fromkeys(positions, clock.now + 10.0)
        if finishes:
            journal.put([], positions)
            answered |= set(positions)
            live = {p: end for p, end in live.items() if p not in positions}
        clock.now += seconds
    assert answered == set(range(max(answered) + 1))
    assert len(answered) >= 2 * len(prompts)  # and so whole epochs were answered


def test_a_stream_goes_on_where_it_was_left_and_repeats_what_was_not_answered(tmp_path: Path) -> None:
    clock, prompts = Clock(), prompts_of(5)
    (first, journal), _ = searchers(tmp_path / "j.sqlite", prompts, clock)
    assert first.take(3)[0] == [0, 1, 2]
    journal.put([], [0, 2])
    (again, _), _ = searchers(tmp_path / "j.sqlite", prompts, clock)
    assert again.take(2)[0] == [3, 4]
    clock.now = 11.0
    assert again.take(4)[0] == [1, 3, 4, 5]


def test_a_searcher_that_is_started_again_takes_up_what_its_former_self_had_at_once(tmp_path: Path) -> None:
    clock = Clock()
    (_, dead), (_, other) = searchers(tmp_path / "j.sqlite", prompts_of(9), clock)
    assert (dead.lease(2, 10.0), other.lease(2, 10.0)) == ([0, 1], [2, 3])
    assert dead.claim("evaluate 0.0", 10.0)
    (_, again), _ = searchers(tmp_path / "j.sqlite", prompts_of(9), clock)
    assert not again.claim("evaluate 0.0", 10.0)
    again.resume()
    assert again.lease(3, 10.0) == [0, 1, 4]
    assert again.claim("evaluate 0.0", 10.0)
    assert not other.claim("evaluate 0.0", 10.0)


def test_of_many_prompts_that_are_tokenised_at_once_the_one_that_cannot_be_written_is_named() -> None:
    tokenizer = character_tokenizer("0123456789+=")
    good = [Problem(f"{n}+{n}=") for n in range(30)]
    written = encode(good, "t", tokenizer, PromptSettings()).prompts
    assert [p.tokens.tolist() for p in written] == [tokenizer.encode(p.prompt) for p in good]
    with pytest.raises(UserError, match=r"cannot write the prompt .?1\?.? of task t"):
        encode([*good, Problem("1?"), *good], "t", tokenizer, PromptSettings())


def test_problems_become_prompts_in_their_order_with_their_fields() -> None:
    encoded = encode([Problem("ab", {"answer": 3}), Problem("b")], "t", LETTERS, PromptSettings())
    assert [p.tokens.tolist() for p in encoded.prompts] == [LETTERS.encode("ab"), LETTERS.encode("b")]
    assert encoded.prompts[0].fields == {"answer": 3}
    assert (encoded.dropped, encoded.truncated) == (0, 0)


PROBLEMS = [Problem("abc"), Problem("de"), Problem("fghi")]


@pytest.mark.parametrize(
    ("when_too_long", "texts", "dropped", "truncated"),
    [("drop", ["de"], 2, 0), ("truncate_left", ["bc", "de", "hi"], 0, 2)],
)
def test_what_is_over_long_is_dropped_or_keeps_its_end_and_is_counted(
    when_too_long: Any, texts: list[str], dropped: int, truncated: int
) -> None:
    encoded = encode(PROBLEMS, "t", LETTERS, PromptSettings(max_tokens=2, when_too_long=when_too_long))
    assert [LETTERS.decode(p.tokens.tolist()) for p in encoded.prompts] == texts
    assert (encoded.dropped, encoded.truncated) == (dropped, truncated)


def test_what_is_over_long_can_be_an_error() -> None:
    with pytest.raises(UserError, match=r"has 3 tokens, the limit is 2: raise --prompts.max-tokens"):
        encode(PROBLEMS, "t", LETTERS, PromptSettings(max_tokens=2, when_too_long="error"))


def test_a_split_with_nothing_left_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"no prompts left \(3 of 3 were longer than 1 tokens\)"):
        encode(PROBLEMS, "t", LETTERS, PromptSettings(max_tokens=1))
    with pytest.raises(UserError, match="is empty after tokenising"):
        encode([Problem("")], "t", LETTERS, PromptSettings())


def test_a_chat_needs_a_model_with_a_chat_template_and_the_error_says_so() -> None:
    chat = Problem(({"role": "user", "content": "ab"},))
    with pytest.raises(UserError, match=r"has no chat template: use an instruction-tuned model"):
        encode([chat], "t", LETTERS, PromptSettings())


def test_a_chat_is_put_through_the_models_template_up_to_where_it_answers() -> None:
    class Chatty(TabularTokenizer):
        chat_template = "..."

        def apply_chat_template(
            self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
        ) -> str:
            assert not tokenize
            return "".join(m["role"][0] + m["content"] for m in messages) + "a" * add_generation_prompt

    chat = Problem(({"role": "system", "content": "x"}, {"role": "user", "content": "yz"}))
    assert encode([chat], "t", Chatty(4), PromptSettings()).prompts[0].text == "sxuyza"


@pytest.mark.parametrize("field", ["max_tokens", "limit"])
def test_limits_below_1_are_refused(field: str) -> None:
    with pytest.raises(UserError, match="must be at least 1"):
        PromptSettings(**{field: 0})


def test_the_toys_prompts_are_encoded_as_the_stream_encodes_them() -> None:
    task = TabularTask()
    encoded = encode(task.problems("train"), task.name, TabularTokenizer(task.symbols), PromptSettings())
    assert [p.key for p in encoded.prompts] == [p.key for p in tabular_prompts(task)]


def test_numbers_of_numpy_among_the_fields_are_those_that_were_written() -> None:
    fields = {"answer": np.float32(0.1), "n": np.int64(3), "some": [np.float16(0.7)], "row": np.array([1, 2])}
    (prompt,) = encode([Problem("a", fields)], "t", LETTERS, PromptSettings()).prompts
    assert prompt.fields == {"answer": 0.1, "n": 3, "some": [0.7], "row": [1, 2]}
    assert {type(value) for value in prompt.fields.values()} == {float, int, list}
