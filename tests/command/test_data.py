"""Data as others publish them, from the command line: read without conversion, and what is left out of them is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import tba
from tba.__main__ import main
from tba.errors import UserError
from tba.record.summary import Summary
from tba.rollout.prompts import PromptSettings
from tba.runs import estimate
from tba.runs.validating import notes_on_data
from tba.runtime.prompt_sets import prompt_set_of
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import Json, Problem, Split
from toy.model import TabularModel
from toy.policy import TabularTask
from toy.recipe import recipe as TOY

POSITIONS = 96
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
RECIPE = '''
from pathlib import Path
import tba

def as_trl(prompts, completions, ground_truth, **kwargs):
    """The list form: chats as message lists, a list of each column."""
    assert all(prompt[-1]["role"] == "user" for prompt in prompts), prompts
    assert all(gold == prompt[-1]["content"][-1] for gold, prompt in zip(ground_truth, prompts)), ground_truth
    assert set(kwargs) >= {{"tools", "level"}} and len(kwargs["level"]) == len(prompts), kwargs
    return [float(completion[0]["content"].count(gold)) for completion, gold in zip(completions, ground_truth)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and isinstance(extra_info["index"], int), (data_source, extra_info)
    return {{"score": float(ground_truth in solution_str), "acc": 1.0}}

recipe = tba.Recipe(
    name="data", description="", task=tba.Jsonl(Path("none"), eval_fraction=0.3, marked_by={marked_by}),
    model=tba.HuggingFace({model!r}, "cpu", generation=tba.EngineSettings(slots=8, max_completion_tokens=8)),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)), optimizer=tba.OptimizerSettings(lr=1e-3),
    replay=tba.ReplaySettings(pacing=tba.Pacing(warm_up=8)), evaluation=tba.EvaluationSettings(problems=0, pass_k=2),
    steps=1, groups_per_step=2, group_size=4, samples_per_prompt=4, prompts_per_round=2, runtime="inline",
)
'''


def asked(n: int) -> list[Json]:
    return [{"role": "user", "content": f"{n}+0={n}"[: 10 + n]}]


TOOL = {"type": "function", "function": {"name": "add", "parameters": None}}
ROWS: dict[str, list[Json]] = {  # columns as their documents name them
    "trl": [{"prompt": asked(n), "tools": [TOOL], "ground_truth": str(n), "level": n} for n in range(10)],
    "verl": [
        {
            "data_source": "openai/gsm8k",
            "prompt": asked(n),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(10)
    ],
    "prime-rl": [{"question": f"{n}+0", "answer": str(n), "info": '{"level": 1}', "task": "sums"} for n in range(10)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer("\n" + "".join(map(chr, range(32, 127))))
    tokenizer.chat_template = TEMPLATE
    made = ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=POSITIONS).start(tokenizer)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Ran = Callable[..., str]


@pytest.fixture
def ran(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs a command on a recipe whose answers are marked by `marked_by`; returns what it printed, on one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(estimate, "_LEAST_SECONDS", 0.0)

    def run(command: str, *arguments: object, marked_by: str = "None", code: int = 0) -> str:
        path = tmp_path / "recipe.py"
        path.write_text(RECIPE.format(marked_by=marked_by, model=str(model)))
        capsys.readouterr()
        assert main([command, str(path), *map(str, arguments)]) == code
        found = capsys.readouterr()
        return " ".join((found.out + found.err).split())

    return run


def written(folder: Path, name: str, kind: str, rows: Sequence[Json]) -> Path:
    path = folder / f"{name}.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    pyarrow = pytest.importorskip("pyarrow")
    datasets = pytest.importorskip("datasets")
    from pyarrow import parquet

    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    ("name", "kind", "marked_by"),
    [
        ("trl", "saved", "tba.FunctionReward(as_trl)"),
        ("verl", "parquet", "tba.FunctionReward(compute_score)"),
        ("prime-rl", "jsonl", "None"),
    ],
)
def test_a_file_that_another_trainer_publishes_is_checked_and_trained_on_as_it_is(
    tmp_path: Path, ran: Ran, name: str, kind: str, marked_by: str
) -> None:
    """With that trainer's own form of a reward function, which says of what it is given that it is as it expects."""
    path = written(tmp_path, name, kind, ROWS[name])
    checked = ran("check", "--task.train", path, marked_by=marked_by)
    assert "held out" in checked
    assert "left out" not in checked
    trained = ran("train", "--task.train", path, "--run-name", "one", marked_by=marked_by)
    assert "step 1/1" in trained
    summary = Summary.read(tmp_path / "runs" / "one")
    assert summary is not None
    assert (summary.steps, summary.tokens.closes()) == (1, True)
    assert sum(counts["prompts"] for counts in summary.prompts.values()) == len(ROWS[name])


def test_a_run_from_python_takes_a_function_of_either_form(tmp_path: Path, model: Path) -> None:
    def as_trl(completions: list[list[dict[str, str]]], ground_truth: list[str], **kwargs: object) -> list[float]:
        return [float(gold in said[0]["content"]) for said, gold in zip(completions, ground_truth, strict=True)]

    def as_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Json = None) -> float:
        return float(ground_truth in solution_str)

    for name, function in (("trl", as_trl), ("verl", as_verl)):
        recipe = tba.Recipe(
            name=name,
            task=tba.Jsonl(written(tmp_path, name, "jsonl", ROWS[name]), marked_by=tba.FunctionReward(function)),
            model=tba.HuggingFace(str(model), "cpu", generation=tba.EngineSettings(slots=8, max_completion_tokens=8)),
            objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
            replay=tba.ReplaySettings(pacing=tba.Pacing(warm_up=8)),
            evaluation=tba.EvaluationSettings(problems=2, pass_k=2),
            steps=1,
            groups_per_step=2,
            group_size=4,
            samples_per_prompt=4,
            prompts_per_round=2,
            runtime="inline",
        )
        run = tba.train(recipe, runs=tmp_path, run_name=name, quiet=True)
        assert {part for t in run.trajectories() for part in t.reward_parts} == {function.__name__}


LONG = [{"prompt": "7" * (80 if n % 10 else 4) + f"{n}", "answer": "7"} for n in range(60)]  # 54 of 60 are long


def test_a_run_most_of_whose_prompts_are_too_long_says_so_where_it_begins_in_its_summary_and_in_check(
    tmp_path: Path, ran: Ran
) -> None:
    given = ("--task.train", written(tmp_path, "long", "jsonl", LONG), "--prompts.max-tokens", "20")
    note = "MOST OF THE DATA ARE NOT USED: "
    checked = ran("check", *given)
    assert f"warning: {note}" in checked
    assert "Nothing stands in the way" not in checked
    trained = ran("train", *given, "--run-name", "one")
    summary = Summary.read(tmp_path / "runs" / "one")
    assert summary is not None
    counts = summary.prompts
    for split, what in (("train", "training"), ("eval", "held-out")):
        n, left = counts[split]["problems"], counts[split]["prompts"]
        assert counts[split] == {"problems": n, "prompts": left, "too_long": n - left}
        said = f"{note}{n - left} of {n} {what} problems are left out, {left} are asked: {n - left} have more than "
        said += "--prompts.max-tokens 20 tokens (the longest has 82)"
        assert said in trained
        assert said in checked
        assert f"{left} of {n} {'trained' if split == 'train' else 'held out'} (too_long {n - left})" in trained
    assert counts["train"]["problems"] + counts["eval"]["problems"] >= 54


def test_a_prompt_for_whose_answer_the_model_has_no_positions_is_dropped_before_it_is_drawn(
    tmp_path: Path, ran: Ran
) -> None:
    """82 tokens of a prompt and 20 of an answer are more than 96."""
    given = ("--task.train", written(tmp_path, "long", "jsonl", LONG), "--model.generation.max-completion-tokens", "20")
    trained = ran("train", *given, "--run-name", "one")
    assert "leave less than --model.generation.max-completion-tokens 20 of the model's 96 positions" in trained
    summary = Summary.read(tmp_path / "runs" / "one")
    assert summary is not None
    counts = summary.prompts["train"]
    assert counts == {"problems": counts["problems"], "prompts": counts["prompts"], "no_room": counts["no_room"]}
    assert counts["problems"] == counts["prompts"] + counts["no_room"]
    none = ran("check", *given[:2], "--model.generation.max-completion-tokens", "100", code=2)
    assert "the model has 96 positions for a prompt and its answer, and none are left by" in none


@dataclass(frozen=True)
class Both(TabularTask):
    """The toy, evaluated on what it is trained on."""

    def problems(self, split: Split) -> list[Problem]:
        return super().problems("train")

    def left_out(self) -> dict[str, int]:
        return {"in the evaluation data too": 7, "without an answer": 0}


@dataclass(frozen=True)
class Short(TabularModel):
    """The toy's model, with positions for one token of a prompt beside an answer."""

    @property
    def positions(self) -> int:
        return self.max_completion_tokens + 1


def test_what_is_in_both_splits_and_what_a_task_leaves_out_is_said_before_a_run() -> None:
    task = Both()
    recipe, count = replace(TOY, task=task), len(task.problems("train"))
    model = TabularModel(task)
    left_out, both, _ = notes_on_data(recipe, model)
    assert left_out == f"MOST OF THE DATA ARE NOT USED: beside the {count} training problems 7 are left out: " + (
        "in the evaluation data too"
    )
    assert both.startswith(f"{count} of {count} held-out problems are trained on too")
    alone = replace(TOY, task=TabularTask(), evaluation=replace(TOY.evaluation, problems=2))
    assert notes_on_data(alone, TabularModel()) == []
    assert prompt_set_of(recipe, model, "train").counts["in the evaluation data too"] == 7


@dataclass(frozen=True)
class FewHeldOut(TabularTask):
    """The toy, with some held-out problems."""

    count: int = 3

    def problems(self, split: Split) -> list[Problem]:
        problems = list(super().problems(split))
        return problems if split == "train" else problems[:1] * self.count


@pytest.mark.parametrize(("count", "asked", "notes"), [(3, 0, 1), (3, 3, 0), (3, 200, 1), (25, 200, 0)])
def test_a_held_out_set_that_says_little_is_remarked_unless_it_is_asked_for(count: int, asked: int, notes: int) -> None:
    recipe = replace(TOY, task=FewHeldOut(count=count), evaluation=replace(TOY.evaluation, problems=asked))
    remarks = notes_on_data(recipe, TabularModel())
    assert len(remarks) == notes
    if remarks:
        assert remarks[0].startswith("3 problems are held out, so that one answer moves the accuracy by 33 points: ")


@dataclass(frozen=True)
class Long(TabularTask):
    """The toy with one problem more, of two tokens."""

    def problems(self, split: Split) -> list[Problem]:
        return [*super().problems(split), Problem("aa")]


@dataclass(frozen=True)
class Contradicting(TabularTask):
    """The toy, whose first prompt comes twice with another answer, and twice with the same one."""

    def problems(self, split: Split) -> list[Problem]:
        first, *others = super().problems(split)
        again = [replace(first, fields={"answer": answer}) for answer in "121"]
        return [*again, *others, *others] if split == "train" else [first, *others]


def test_a_prompt_that_has_several_right_answers_is_said() -> None:
    *_, note = notes_on_data(replace(TOY, task=Contradicting()), TabularModel())
    assert note.startswith("1 training prompts come more than once, with different right answers")


def test_the_room_of_a_prompt_is_what_an_answer_leaves_of_the_models_positions() -> None:
    task, model = Long(), Short()
    count = len(task.problems("train"))
    asked = prompt_set_of(replace(TOY, task=task), model, "train")
    assert asked.counts == {"problems": count, "prompts": count - 1, "no_room": 1}
    cut = replace(TOY, task=task, prompts=PromptSettings(when_too_long="truncate_left"))
    assert prompt_set_of(cut, model, "train").counts == {"problems": count, "prompts": count, "truncated": 1}
    assert (
        prompt_set_of(cut, model, "train").note
        == f"1 of {count} training prompts lose their beginnings (the longest has 2 tokens)"
    )
    with pytest.raises(UserError, match=r"2 tokens, the limit is 1: lower --model\.generation\.max-completion-tokens"):
        prompt_set_of(replace(TOY, task=task, prompts=PromptSettings(when_too_long="error")), model, "train")
