"""Sums made on the spot, and the tokenizer of their few characters."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.protocols import Task, Tokenizer
from tba.tasks.arithmetic import Arithmetic
from tba.tasks.held_out import is_held_out
from tba.training.tiny_models import character_tokenizer
from tba.types import Completion, Problem, Prompt, StopReason, Version


def operands(problem: Problem) -> tuple[int, ...]:
    assert isinstance(problem.prompt, str)
    separators = str.maketrans(dict.fromkeys("+-*=", " "))
    return tuple(sorted(int(n) for n in problem.prompt.translate(separators).split()))


def test_a_sum_is_answered_by_its_digits_least_significant_first() -> None:
    for problem in Arithmetic(train_problems=500).problems("train"):
        assert isinstance(problem.prompt, str)
        a, b = problem.prompt.removesuffix("=").split("+")
        assert 100 <= int(a) <= 999
        assert problem.fields["answer"] == problem.demonstration == str(int(a) + int(b))[::-1]


def test_results_are_written_as_the_fields_say() -> None:
    assert Arithmetic().format_result(1023) == "3201"
    assert Arithmetic().format_result(-120) == "-021"
    assert Arithmetic(least_significant_first=False).format_result(-1023) == "-1023"
    assert Arithmetic().format_result(0) == "0"


@settings(max_examples=15, deadline=None)
@given(
    digits=st.integers(1, 9),
    operations=st.sampled_from(["+", "-", "+*", "+-*"]),
    seed=st.integers(0, 2**32),
    held_out=st.floats(0.05, 0.5),
)
def test_no_pair_of_operands_is_in_both_splits_in_either_order(
    digits: int, operations: str, seed: int, held_out: float
) -> None:
    few = 10 if digits == 1 else 300
    held_out_count = 1 if digits == 1 else 100  # at one digit there are only 100 pairs
    task = Arithmetic(digits, operations, True, few, held_out_count, held_out, seed=seed)
    train, held = task.problems("train"), task.problems("eval")
    assert not {operands(p) for p in train} & {operands(p) for p in held}
    assert len({p.prompt for p in train}) == len(train) == few


def test_the_two_splits_of_one_digit_together_are_every_sum() -> None:
    every = {f"{a}+{b}=" for a in range(10) for b in range(10)}
    held = {f"{a}+{b}=" for a in range(10) for b in range(10) if is_held_out(f"{min(a, b)},{max(a, b)}", 0.3)}
    task = Arithmetic(digits=1, train_problems=100 - len(held), eval_problems=len(held), held_out=0.3)
    assert {p.prompt for p in task.problems("eval")} == held
    assert {p.prompt for p in task.problems("train")} == every - held


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert Arithmetic(seed=3).problems("eval") == Arithmetic(seed=3).problems("eval")
    assert Arithmetic(seed=3).problems("eval") != Arithmetic(seed=4).problems("eval")


def test_held_out_stays_held_out_whatever_the_seed() -> None:
    held = {operands(p) for p in Arithmetic(digits=2, eval_problems=300, seed=1).problems("eval")}
    trained = {operands(p) for p in Arithmetic(digits=2, train_problems=3000, seed=2).problems("train")}
    assert not held & trained


def test_the_share_held_out_is_the_share_asked_for() -> None:
    held = sum(is_held_out(f"{n}", 0.1) for n in range(20_000))
    assert abs(held - 2000) < 4 * (20_000 * 0.1 * 0.9) ** 0.5  # four standard deviations of a fair draw


def test_every_operation_that_is_asked_for_is_drawn() -> None:
    prompts = "".join(str(p.prompt) for p in Arithmetic(operations="+-*").problems("train"))
    counts = [prompts.count(operation) for operation in "+-*"]
    assert sum(counts) == 20_000
    assert min(counts) > 6_000


def test_careless_demonstrations_forget_carries_and_the_answers_stay_right() -> None:
    for share in (0.5, 1.0):
        for problem in Arithmetic(train_problems=500, forgotten_carries=share).problems("train"):
            assert isinstance(problem.prompt, str)
            a, b = problem.prompt.removesuffix("=").split("+")
            assert problem.fields["answer"] == str(int(a) + int(b))[::-1]
            if share == 1.0:  # every column by itself: 345+678 is 913
                columns = [(int(x) + int(y)) % 10 for x, y in zip(a, b, strict=True)]
                assert problem.demonstration == str(int("".join(map(str, columns))))[::-1]


def test_carries_are_forgotten_at_the_rate_asked_for() -> None:
    single = [p for p in Arithmetic(forgotten_carries=0.3).problems("train") if carries(p) == 1]
    wrong = sum(p.demonstration != p.fields["answer"] for p in single)
    assert abs(wrong - 0.3 * len(single)) < 4 * (len(single) * 0.3 * 0.7) ** 0.5  # four standard deviations


def carries(problem: Problem) -> int:
    """How often the columns of a sum carry: each takes 9 from the sum of digits."""
    assert isinstance(problem.prompt, str)
    return (sum(int(c) for c in problem.prompt if c.isdigit()) - sum(map(int, problem.fields["answer"]))) // 9


def test_only_the_exact_answer_is_rewarded() -> None:
    task = Arithmetic()
    prompt = Prompt(task.name, np.array([1], dtype=np.int32), "345+678=", {"answer": "3201"})
    texts = ["3201", "1023", "320", "32010", ""]
    answered = [
        (prompt, Completion(np.array([1], dtype=np.int32), t, StopReason.EOS, (Version(), Version()))) for t in texts
    ]
    assert [j.reward for j in task.reward().judge(answered)] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert isinstance(task, Task)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Arithmetic(digits=0), "digits 0: give a number from 1 to 9"),
        (lambda: Arithmetic(digits=10), "digits 10: give a number from 1 to 9"),
        (lambda: Arithmetic(operations=""), "operations '': give each of"),
        (lambda: Arithmetic(operations="+/"), "operations '\\+/': give each of"),
        (lambda: Arithmetic(operations="++"), "operations '\\+\\+': give each of"),
        (lambda: Arithmetic(train_problems=0), "0 train_problems and 2000 eval_problems: give at least 1"),
        (
            lambda: Arithmetic(forgotten_carries=2),
            "forgotten_carries 2 with operations '\\+': give a share from 0 to 1",
        ),
        (lambda: Arithmetic(operations="*", forgotten_carries=0.5), "forgotten_carries 0.5 .* for sums only"),
        (lambda: Arithmetic(held_out=1.0), "held_out is 1.0: give the share"),
        (lambda: Arithmetic(digits=1).problems("train"), "only \\d+ train problems of 1 digits, 20000 are asked for"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


def test_every_prompt_and_answer_is_one_token_per_character_and_decodes_to_itself() -> None:
    task = Arithmetic(operations="+-*", train_problems=200)
    tokenizer = character_tokenizer(task.alphabet)
    for problem in task.problems("train"):
        text = f"{problem.prompt}{problem.demonstration}"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert len(tokens) == len(text)
        assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_sums_need_fourteen_tokens_with_eos_and_padding_apart() -> None:
    tokenizer = character_tokenizer(Arithmetic().alphabet)
    assert len(tokenizer) == 14
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (12, 13)
    assert tokenizer.encode("1+2=", add_special_tokens=True) == [1, 10, 2, 11]  # nothing is put around a text


@given(st.text(alphabet="0123456789 \n+=é", max_size=40))
def test_any_text_of_the_alphabet_round_trips_spaces_and_line_breaks_too(text: str) -> None:
    tokenizer = SPACED
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True) == text


SPACED: Tokenizer = character_tokenizer("0123456789 \n+=é")


def test_a_tokenizer_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    before = character_tokenizer(Arithmetic().alphabet)
    before.save_pretrained(tmp_path)
    after = AutoTokenizer.from_pretrained(tmp_path)
    tokens = after.encode("345+678=3201", add_special_tokens=False)
    assert tokens == before.encode("345+678=3201", add_special_tokens=False)
    assert after.decode([*tokens, after.eos_token_id], skip_special_tokens=True) == "345+678=3201"
    assert (after.eos_token_id, after.pad_token_id) == (before.eos_token_id, before.pad_token_id)


def test_a_character_outside_the_alphabet_is_an_error_not_an_unknown_token() -> None:
    with pytest.raises(Exception, match="UNK"):
        character_tokenizer("01").encode("2")


@pytest.mark.parametrize("alphabet", ["", "011"])
def test_an_alphabet_names_each_character_once(alphabet: str) -> None:
    with pytest.raises(UserError, match="give each character exactly once"):
        character_tokenizer(alphabet)
