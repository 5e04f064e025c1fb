"""Your own file of prompts or chats: what is read from a line, what is held out, what is refused."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import UserError
from tba.protocols import Task
from tba.rewards.exact_answer import ExactAnswer
from tba.rewards.functions import FunctionReward
from tba.rollout.prompts import PromptSettings, encode
from tba.tasks.jsonl import Jsonl
from tba.training.tiny_models import character_tokenizer
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


def test_a_thought_in_a_field_of_its_own_is_part_of_the_demonstration(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    rows = [
        {"messages": [asked, said | {"reasoning_content": " one more "}]},
        {"prompt": [asked | {"content": "2"}], "completion": [said | {"thinking": "I add."}]},
    ]
    task = Jsonl(
        write(tmp_path / "chats.jsonl", rows), write(tmp_path / "eval.jsonl", sums(1)), marked_by=ExactAnswer()
    )
    found = [p.demonstration for p in task.problems("train")]
    assert found == ["<think>\none more\n</think>\n\n2", "<think>\nI add.\n</think>\n\n2"]


@pytest.mark.parametrize("field", ["response", "completion"])
def test_a_row_without_a_worked_answer_has_no_demonstration(field: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": "1", field: None if i else "1"} for i in range(4)]
    task = Jsonl(write(tmp_path / "some.jsonl", rows), write(tmp_path / "eval.jsonl", sums(1, start=9)))
    assert [p.demonstration for p in task.problems("train")] == ["1", None, None, None]


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


def one(tmp_path: Path, row: Mapping[str, object], **settings: Any) -> Problem:
    """The problem of a row."""
    path = write(tmp_path / "row.jsonl", [row])
    (problem,) = Jsonl(path, path, **settings).problems("eval")
    return problem


USER = {"role": "user", "content": "Natalia sold 48/2 clips. How many?"}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

# a row as each trainer's documents describe its columns, with contents of our own
TRL = {"prompt": [USER], "tools": [ADD], "ground_truth": "24"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "24"},
    "extra_info": {"split": "train", "index": 7, "answer": "48/2 is 24\n#### 24", "question": USER["content"]},
}
VERIFIERS = {"question": USER["content"], "answer": "24", "info": '{"level": 3}', "task": "sums"}  # of prime-rl
INTELLECT = {"prompt": USER["content"], "verification_info": '{"ground_truth": "24"}', "task_type": "math"}  # the same


@pytest.mark.parametrize("row", [TRL, VERL, VERIFIERS])
def test_a_row_of_another_trainer_is_a_chat_with_its_right_answer_and_all_its_fields(
    tmp_path: Path, row: Mapping[str, object]
) -> None:
    problem = one(tmp_path, row)
    assert problem.prompt == (USER,)
    asked = ("prompt", "messages")
    assert problem.fields == {**{k: v for k, v in row.items() if k not in asked}, "answer": "24"}
    assert problem.tools == tuple(row.get("tools", ()))


def test_nested_columns_have_dotted_names_also_in_a_text_of_json(tmp_path: Path) -> None:
    assert one(tmp_path, INTELLECT).fields["answer"] == "24"
    of_index = one(tmp_path, VERL, answer_field="extra_info.index", prompt_field="extra_info.question")
    assert (of_index.prompt, of_index.fields["answer"]) == (USER["content"], 7)
    assert one(tmp_path, {"prompt": "?", "a.b": "1", "a": {"b": "2"}}, answer_field="a.b").fields["answer"] == "1"
    with pytest.raises(UserError, match=r"has no field 'reward_model\.gold' to mark an answer against"):
        one(tmp_path, VERL, answer_field="reward_model.gold")


def test_what_a_row_names_is_taken_before_what_others_call_it(tmp_path: Path) -> None:
    row = {"prompt": "p", "question": "q", "answer": "1", "ground_truth": "2", "response": "a", "completion": "b"}
    problem = one(tmp_path, row)
    assert (problem.prompt, problem.fields["answer"], problem.demonstration) == ("p", "1", "a")
    assert one(tmp_path, {"prompt": "p", "completion": [{"role": "assistant", "content": "b"}]}).demonstration == "b"
    assert one(tmp_path, {"prompt": None, "messages": [USER], "answer": "1"}).prompt == (USER,)


def test_calls_names_and_tools_are_part_of_the_prompt(tmp_path: Path) -> None:
    said = [
        {**USER, "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "24"},
    ]
    problem = one(tmp_path, {"messages": said, "tools": json.dumps([ADD]), "answer": "24"})
    assert problem.prompt == tuple(said)
    assert problem.tools == (ADD,)
    called = one(tmp_path, {"messages": said[:2], "answer": "24"})
    assert called.prompt == (said[0],)
    assert called.demonstration is None  # a call is more than its text
    with pytest.raises(UserError, match="'tools': give a list of JSON schemas"):
        one(tmp_path, {"messages": [USER], "tools": "add", "answer": "24"})


def test_a_template_writes_the_calls_and_the_tools_of_a_row(tmp_path: Path) -> None:
    """What the model reads is what the template makes of all of it: nothing is lost on the way."""
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}|{% endif %}"
        "{% for m in messages %}{{ m.role }}({{ m.name }}):{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};"
        "{% endfor %}"
    )
    said = [
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}], "name": "ann"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "3", "name": "add"},
    ]
    problem = one(tmp_path, {"prompt": said, "tools": [{"name": "add"}], "answer": "3"})
    (prompt,) = encode([problem], "t", tokenizer, PromptSettings()).prompts
    assert prompt.text == '[{"name": "add"}]|user(ann):1+2?;assistant():<add {"a": 1}>;tool(add):3;'


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("24", "24"),
        (24, 24),
        (True, "true"),
        (False, "false"),
        (["24"], "24"),
        ([True], "true"),
        ("48/2 is 24.\n#### 24", "24"),
        ("So it is $\\boxed{24}$.", "24"),
        ("\\boxed{3} or \\boxed{4}", "\\boxed{3} or \\boxed{4}"),  # which of them is right, nobody says
    ],
)
def test_a_right_answer_is_a_text_or_a_number_whatever_json_has_it_as(
    tmp_path: Path, answer: object, right: object
) -> None:
    assert one(tmp_path, {"prompt": "?", "answer": answer}).fields["answer"] == right


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("NaN", r"line 1 of .* has nan as its 'answer': give the right answer"),
        ("-Infinity", r"line 1 of .* has -inf as its 'answer'"),
        ("[NaN]", r"line 1 of .* has nan as its 'answer'"),
        ("null", r"line 1 of .* has None as its 'answer'"),
        ('" "', r"line 1 of .* has ' ' as its 'answer'"),
        ('["1", "2"]', r"has \['1', '2'\] as its 'answer', which may mean any or all of it: give one text or number"),
        ("[]", r"has \[\] as its 'answer', which may mean"),
        ('{"value": 3}', r"has {'value': 3} as its 'answer', which may mean"),
    ],
)
def test_what_no_answer_can_be_compared_with_is_refused_when_it_is_read(
    tmp_path: Path, answer: str, sentence: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"prompt": "?", "answer": {answer}}}\n')
    with pytest.raises(UserError, match=sentence):
        Jsonl(path).problems("train")


def test_a_function_of_your_own_sees_an_answer_as_the_file_has_it_but_for_one_that_is_missing(tmp_path: Path) -> None:
    reward = FunctionReward(lambda completion, answer: float(completion in answer))
    for answer in (["1", "2"], {"a": 1}, True, "work\n#### 3"):
        assert one(tmp_path, {"prompt": "?", "answer": answer}, marked_by=reward).fields["answer"] == answer
    assert "answer" not in one(tmp_path, VERL, marked_by=reward).fields
    with pytest.raises(UserError, match="has nan as its 'answer'"):
        one(tmp_path, {"prompt": "?", "answer": math.nan}, marked_by=reward)


def test_a_solution_in_which_nothing_is_marked_is_no_answer(tmp_path: Path) -> None:
    assert one(tmp_path, {"problem": "?", "solution": "24"}).fields["answer"] == "24"
    with pytest.raises(UserError, match="a 'solution' in which no answer is marked"):
        one(tmp_path, {"problem": "?", "solution": "First we add. " * 20})


def test_a_chat_in_a_cell_of_csv_is_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer"], [json.dumps([USER]), "24"], ["[1, 2, 3] sorted is", "1"]])
    held = write(tmp_path / "held.jsonl", sums(1))
    assert [p.prompt for p in Jsonl(path, held).problems("train")] == [(USER,), "[1, 2, 3] sorted is"]


def test_a_folder_of_two_files_or_two_splits_holds_out_the_second(tmp_path: Path) -> None:
    for name, rows in (("train", sums(5)), ("test", sums(2, start=9))):
        write(tmp_path / f"{name}.jsonl", rows)
    task = Jsonl(tmp_path)
    assert [len(task.problems(split)) for split in ("train", "eval")] == [5, 2]
    other = write(tmp_path / "other.jsonl", sums(1, start=20))
    assert [p.prompt for p in Jsonl(tmp_path, other).problems("eval")] == ["20+1="]
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_list(rows) for name, rows in (("train", sums(5)), ("validation", sums(1, 9)))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    task = Jsonl(tmp_path / "saved")
    assert [[p.prompt for p in task.problems(split)] for split in ("train", "eval")] == [
        [f"{n}+1=" for n in range(5)],
        ["9+1="],
    ]


@pytest.mark.parametrize("row", [TRL, VERL])
def test_a_parquet_file_of_another_trainer_says_what_its_rows_do(tmp_path: Path, row: Mapping[str, object]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    other = {**row, "prompt": [{**USER, "content": "1+1?", "name": "bob"}]}  # gives all messages a column `name`
    parquet.write_table(pyarrow.Table.from_pylist([row, other]), tmp_path / "rows.parquet")
    held = write(tmp_path / "held.jsonl", sums(1))
    problem, _ = Jsonl(tmp_path / "rows.parquet", held).problems("train")
    assert (problem.prompt, problem.fields["answer"]) == ((USER,), "24")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{]", r"line 2 of .*t.jsonl is not JSON \("),
        ('"text"', r"line 2 of .*t.jsonl is JSON, but no object \(str\)"),
        ("[" * 100_000, r"line 2 of .*t.jsonl is not JSON \("),
        ('{"query": "?"}', r"line 2 of .* has neither a field 'prompt' nor 'messages': it has query, so name"),
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


def test_an_answer_in_a_column_of_few_bits_is_graded_as_it_was_written(tmp_path: Path) -> None:
    """verl's own layout."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    graded = pyarrow.struct([("style", pyarrow.string()), ("ground_truth", pyarrow.float32())])
    columns = {
        "prompt": pyarrow.array([f"{n}/10=" for n in range(20)]),
        "reward_model": pyarrow.array([{"style": "rule", "ground_truth": n / 10} for n in range(20)], graded),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    problems = both(Jsonl(tmp_path / "rows.parquet"))
    assert len(problems) == 20
    for problem in problems:
        right = str(int(str(problem.prompt).partition("/")[0]) / 10)
        prompt = Prompt("t", np.array([1], np.int32), str(problem.prompt), problem.fields)
        answer = Completion(np.array([1], np.int32), right, StopReason.EOS, (Version(), Version()))
        assert [judged.reward for judged in ExactAnswer().judge([(prompt, answer)])] == [1]
