"""GSM8K from local files: the two prompts to the character, the answers, and the sentences of what goes wrong."""

import datetime
import json
import shutil
import sys
from pathlib import Path

import pytest

from tba.errors import UserError
from tba.protocols import Task
from tba.rewards.exact_answer import ExactAnswer, grade
from tba.tasks.gsm8k import Gsm8k
from tba.tasks.problem_rows import rows_from_hub

SLICE = Path(__file__).parents[1] / "fixtures" / "gsm8k"
NATALIA = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)


def test_both_prompt_styles_are_those_of_the_published_models() -> None:
    tba = Gsm8k(str(SLICE)).problems("train")[0]
    vineppo = Gsm8k(str(SLICE), style="vineppo").problems("train")[0]
    assert tba.prompt == f"[MATH TASK] Problem:\n{NATALIA}\n\nSolution:\n"
    assert vineppo.prompt == f"[MATH_TASK] Problem:\n{NATALIA}\n\nSolution:"


def test_the_chat_style_is_one_message_of_the_user_in_the_words_of_verls_data() -> None:
    chat, plain = (Gsm8k(str(SLICE), style=style).problems("train")[0] for style in ("chat", "tba"))
    (message,) = chat.prompt
    assert message["role"] == "user"
    question = chat.fields["question"]
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert message["content"] == f"{question} {instruction}"
    assert (chat.fields, chat.demonstration) == (plain.fields, plain.demonstration)


def test_prompt_and_demonstration_meet_at_one_line_break_in_both_styles() -> None:
    for style in ("tba", "vineppo"):
        for problem in Gsm8k(str(SLICE), style=style).problems("train"):
            assert isinstance(problem.prompt, str)
            assert problem.demonstration is not None
            _, _, tail = (problem.prompt + problem.demonstration).partition("Solution:")
            assert tail[0] == "\n"
            assert tail[1] != "\n"


def test_the_first_problem_is_read_whole() -> None:
    problem = Gsm8k(str(SLICE)).problems("train")[0]
    assert problem.fields == {"question": NATALIA, "answer": "72"}
    assert problem.demonstration == (
        "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n#### 72"
    )


def test_calculator_annotations_stay_on_request() -> None:
    problem = Gsm8k(str(SLICE), calculator=True).problems("train")[0]
    assert problem.demonstration is not None
    assert problem.demonstration.startswith("Natalia sold 48/2 = <<48/2=24>>24 clips")


def test_an_answer_is_what_follows_the_mark_without_commas() -> None:
    answers = [p.fields["answer"] for p in Gsm8k(str(SLICE)).problems("train")]
    assert answers[:5] == ["72", "10", "5", "42", "624"]
    assert answers[-1] == "1080"  # written 1,080


@pytest.mark.parametrize("strict", [False, True])
def test_every_demonstration_earns_the_reward(strict: bool) -> None:
    task = Gsm8k(str(SLICE), strict=strict)
    assert task.reward() == ExactAnswer(strict)
    for problem in task.problems("train") + task.problems("eval"):
        assert grade(problem.demonstration or "", problem.fields["answer"], strict)


def test_the_splits_are_the_two_files_in_order() -> None:
    task = Gsm8k(str(SLICE))
    train = [json.loads(line)["question"] for line in (SLICE / "train.jsonl").read_text().splitlines()]
    assert [p.fields["question"] for p in task.problems("train")] == [q.strip() for q in train]
    assert len(task.problems("eval")) == 6
    assert isinstance(task, Task)


def test_two_files_may_be_named_apart(tmp_path: Path) -> None:
    shutil.copy(SLICE / "train.jsonl", tmp_path / "mine.jsonl")
    task = Gsm8k(str(tmp_path / "mine.jsonl"), eval_path=str(SLICE / "test.jsonl"))
    assert (len(task.problems("train")), len(task.problems("eval"))) == (15, 6)


def test_a_problem_of_the_evaluation_file_is_left_out_of_training(tmp_path: Path) -> None:
    train, test = (SLICE / "train.jsonl").read_text(), (SLICE / "test.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(train + test)
    (tmp_path / "test.jsonl").write_text(test)
    task = Gsm8k(str(tmp_path))
    assert task.problems("train") == Gsm8k(str(SLICE)).problems("train")
    assert task.problems("eval") == Gsm8k(str(SLICE)).problems("eval")


def test_a_training_file_alone_has_nothing_to_evaluate_on() -> None:
    task = Gsm8k(str(SLICE / "train.jsonl"))
    assert len(task.problems("train")) == 15
    with pytest.raises(UserError, match=r"training file .* but nothing to evaluate on: give eval_path"):
        task.problems("eval")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", r"line 2 of .*train.jsonl is not JSON \("),
        ("[1]", r"line 2 of .*train.jsonl is JSON, but no object \(list\)"),
        ('{"question": "?"}', r"line 2 of .*train.jsonl has no field 'answer': give it a text"),
        ('{"question": 3, "answer": "#### 3"}', r"line 2 of .*train.jsonl has 3 as its field 'question'"),
        ('{"question": "?", "answer": "just 3"}', r"line 2 of .* 'answer' without '#### number' at its end"),
        ('{"question": "?", "answer": "3 ####"}', r"line 2 of .* 'answer' without '#### number' at its end"),
        ("\udcff", r"line 2 of .*train.jsonl is not text in UTF-8 \("),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    good = '{"question": "1+1?", "answer": "1+1 is 2\\n#### 2"}\n'
    for name in ("train", "test"):
        text = good + (line if name == "train" else "")
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=sentence):
        Gsm8k(str(tmp_path)).problems("train")


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.jsonl cannot be read \(No such file or directory\)"):
        Gsm8k(str(tmp_path)).problems("train")
    (tmp_path / "train.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"train.jsonl is empty: give a file"):
        Gsm8k(str(tmp_path)).problems("train")


@pytest.mark.parametrize("path", ["nowhere.jsonl", "data/nowhere.jsonl", "/no/such/folder", "./gsm8k", "a/b/c", ""])
def test_a_path_that_is_neither_there_nor_a_hub_name_is_said_to_be_so(path: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"does not exist: give a Hub name or a folder with train\.jsonl and test\.jsonl or a JSON Lines file",
    ):
        Gsm8k(path or str(tmp_path / "gone")).problems("eval")


def test_a_hub_name_without_the_package_for_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # what Python does for a package that is not installed
    with pytest.raises(UserError, match=r"'openai/gsm8k', which is no local .* needs `pip install datasets`"):
        Gsm8k().problems("train")


def test_rows_from_the_hub_are_as_rows_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    label, small, day = datasets.ClassLabel(names=["no", "yes"]), datasets.Value("float32"), datasets.Value("date32")
    columns = {"question": ["1?", "2?"], "answer": [1, 0], "share": [0.1, 0.2], "day": [datetime.date(2024, 5, 1)] * 2}
    kinds = {"question": datasets.Value("string"), "answer": label, "share": small, "day": day}
    data = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    assert [(row.values, row.place) for row in rows_from_hub("mine", "a/b", "train", "a file")] == [
        ({"question": "1?", "answer": "yes", "share": 0.1, "day": "2024-05-01"}, "row 1 of a/b (train)"),
        ({"question": "2?", "answer": "no", "share": 0.2, "day": "2024-05-01"}, "row 2 of a/b (train)"),
    ]
