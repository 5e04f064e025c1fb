"""Your own file of prompts or chats: what is read from a line, what is held out, what is refused."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.protocols import Task
from tba.rewards.exact_answer import ExactAnswer
from tba.rewards.functions import FunctionReward
from tba.tasks.jsonl import Jsonl
from tba.types import Completion, Problem, Prompt, StopReason, Version


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int, start: int = 0) -> list[dict[str, object]]:
    return [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(start, start + count)]


def both(task: Jsonl) -> list[Problem]:
    return task.problems("train") + task.problems("eval")


def test_a_file_from_another_editor_reads_the_same(tmp_path: Path) -> None:
    """Line ends of two characters and a mark of the encoding in front, as some editors write."""
    plain = write(tmp_path / "mine.jsonl", sums(3))
    other = tmp_path / "other" / "mine.jsonl"
    other.parent.mkdir()
    other.write_bytes(plain.read_text().replace("\n", "\r\n").encode("utf-8-sig"))
    assert both(Jsonl(other)) == both(Jsonl(plain))


def test_a_line_gives_its_prompt_its_fields_and_its_demonstration(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "answer": 4, "response": "It is 4", "level": 1}]
    task = Jsonl(write(tmp_path / "mine.jsonl", rows), write(tmp_path / "eval.jsonl", sums(1)))
    (problem,) = task.problems("train")
    assert problem == Problem("2+2=", {"answer": 4, "response": "It is 4", "level": 1}, "It is 4")
    assert (task.name, task.reward()) == ("mine", ExactAnswer())
    assert isinstance(task, Task)


def test_the_last_assistant_message_is_the_demonstration_and_no_part_of_the_prompt(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}
    first, more = {"role": "assistant", "content": "4"}, {"role": "user", "content": "and 3+3?"}
    rows = [
        {"messages": [system, user], "answer": "4"},
        {"messages": [user, first], "answer": "4"},
        {"messages": [user, first, more], "answer": "6"},
        {"prompt": [user], "answer": "4"},
    ]
    task = Jsonl(write(tmp_path / "chat.jsonl", rows), write(tmp_path / "eval.jsonl", sums(1)))
    problems = task.problems("train")
    assert [p.prompt for p in problems] == [(system, user), (user,), (user, first, more), (user,)]
    assert [p.demonstration for p in problems] == [None, "4", None, None]
    assert [p.fields for p in problems] == [{"answer": "4"}, {"answer": "4"}, {"answer": "6"}, {"answer": "4"}]


def test_the_fields_of_a_file_may_have_any_names(tmp_path: Path) -> None:
    rows = [{"question": "2+2=", "gold": "4", "worked": "2+2 is 4"}]
    path = write(tmp_path / "t.jsonl", rows)
    held = write(tmp_path / "e.jsonl", [{"question": "1+1=", "gold": "2"}])
    task = Jsonl(path, held, prompt_field="question", answer_field="gold", response_field="worked")
    (problem,) = task.problems("train")
    assert (problem.prompt, problem.fields["answer"], problem.demonstration) == ("2+2=", "4", "2+2 is 4")


def test_a_function_of_the_recipe_marks_lines_that_have_no_answer(tmp_path: Path) -> None:
    def short(prompt: str, completion: str, limit: int) -> float:
        return float(len(completion) <= limit)

    rows = [{"prompt": f"Say it {n} times", "limit": n} for n in range(3)]
    reward = FunctionReward(short)
    task = Jsonl(write(tmp_path / "t.jsonl", rows), write(tmp_path / "e.jsonl", rows[:1]), marked_by=reward)
    assert task.reward() is reward
    prompts = [
        Prompt(task.name, np.array([1], dtype=np.int32), str(p.prompt), p.fields) for p in task.problems("train")
    ]
    answer = Completion(np.array([1], dtype=np.int32), "ab", StopReason.EOS, (Version(), Version()))
    assert [j.reward for j in task.reward().judge([(p, answer) for p in prompts])] == [0.0, 1.0]


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(60)), fraction=st.floats(0.2, 0.8))
def test_the_share_held_out_depends_on_each_prompt_alone(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], fraction: float
) -> None:
    rows = sums(60)
    folder = tmp_path_factory.mktemp("split")
    one = Jsonl(write(folder / "one.jsonl", rows), eval_fraction=fraction)
    other = Jsonl(write(folder / "other.jsonl", [rows[i] for i in order] * 2), eval_fraction=fraction)
    held = {str(p.prompt) for p in one.problems("eval")}
    assert held == {str(p.prompt) for p in other.problems("eval")}
    assert not held & {str(p.prompt) for p in other.problems("train")}
    assert sorted(str(p.prompt) for p in both(one)) == sorted(str(row["prompt"]) for row in rows)


def test_a_prompt_of_the_evaluation_file_is_left_out_of_training(tmp_path: Path) -> None:
    task = Jsonl(write(tmp_path / "t.jsonl", sums(10)), write(tmp_path / "e.jsonl", sums(5, start=7)))
    assert [p.prompt for p in task.problems("train")] == [f"{n}+1=" for n in range(7)]
    assert [p.prompt for p in task.problems("eval")] == [f"{n}+1=" for n in range(7, 12)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{]", r"line 2 of .*t.jsonl is not JSON \("),
        ('"text"', r"line 2 of .*t.jsonl is JSON but no object \(str\)"),
        ("[" * 100_000, r"line 2 of .*t.jsonl is not JSON \("),
        ('{"question": "?"}', r"line 2 of .* has neither a field 'prompt' nor 'messages': it has question, so name"),
        ("{}", r"line 2 of .* has neither a field 'prompt' nor 'messages': it has none"),
        ('{"prompt": "", "answer": "1"}', r"line 2 of .* has '' as its field 'prompt': give it a text"),
        ('{"prompt": 5, "answer": "1"}', r"line 2 of .* has 5 as its field 'prompt': give it a text"),
        ('{"prompt": "?"}', r"line 2 of .* has no field 'answer' to mark an answer against: add it, or name another"),
        ('{"prompt": "?", "response": 3}', r"line 2 of .* has 3 as its field 'response': give it a text"),
        ('{"messages": ["hello"], "answer": "1"}', r"line 2 of .* has 'hello' among its 'messages': write each"),
        ('{"messages": [{"role": "user"}], "answer": "1"}', r"line 2 of .*'role': 'user'.* among its 'messages'"),
        ('{"messages": [{"role": "user", "content": null}], "answer": "1"}', r"line 2 of .* among its 'messages'"),
        ('{"messages": [], "answer": "1"}', r"line 2 of .* has no user message to answer among its 'messages'"),
        ('{"messages": [{"role": "assistant", "content": "1"}]}', r"line 2 of .* has no user message to answer"),
    ],
)
def test_a_malformed_line_ends_in_one_sentence_that_names_it(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n' + line + "\n")
    with pytest.raises(UserError, match=sentence):
        Jsonl(path).problems("train")


def test_files_and_shares_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", sums(1))
    empty = next(split for split in ("train", "eval") if (split == "train") == (held_alone(path)))
    with pytest.raises(UserError, match=rf"leaves nothing for {empty} \(1 lines, eval_fraction 0.5\)"):
        Jsonl(path, eval_fraction=0.5).problems(empty)
    with pytest.raises(UserError, match=r"leaves nothing for train \(1 lines"):
        Jsonl(path, path).problems("train")
    with pytest.raises(UserError, match=r"nowhere.jsonl cannot be read \(No such file"):
        Jsonl(tmp_path / "nowhere.jsonl").problems("train")
    with pytest.raises(UserError, match="eval_fraction is 0: give the share"):
        Jsonl(path, eval_fraction=0)


def held_alone(path: Path) -> bool:
    """Whether the only line of a file is held out at a share of one half."""
    try:
        return len(Jsonl(path, eval_fraction=0.5).problems("eval")) == 1
    except UserError:
        return False
