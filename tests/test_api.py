"""The public namespace, and runs from a script: the recipe that is given is the one that is trained."""

from __future__ import annotations

import ast
import inspect
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.written_run import write as written_run

import tba
from tba.__main__ import main
from tba.api import _resolve
from tba.errors import UserError
from tba.evaluation.accuracy import EvaluationSettings
from tba.recipe import Recipe, differences, settings_json
from tba.recipe_names import recipe_names
from tba.recipe_source import write_recipe
from tba.recipes.quickstart import BASE
from tba.replay.pacing import Pacing
from tba.settings import find, override
from tba.tasks.arithmetic import Arithmetic
from tba.types import Problem, Split, Version
from toy.policy import TabularTask

ROOT = Path(__file__).parents[1]
TOY = Path(__file__).parent / "toy" / "recipe.py"
QUICK = {"steps": 6, "samples_per_prompt": 8, "group_size": 8}


def toy() -> Recipe:
    recipe = find(str(TOY))
    return replace(recipe, replay=replace(recipe.replay, pacing=replace(recipe.replay.pacing, warm_up=32)))


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    assert len(tba.__all__) == len(set(tba.__all__)) > 40
    for name in tba.__all__:
        thing = getattr(tba, name)
        assert inspect.getdoc(thing), name
        assert tba.__getattr__(name) is thing
    assert set(tba.__all__) <= set(dir(tba))
    with pytest.raises(AttributeError, match="module 'tba' has no attribute 'Trainr'"):
        tba.Trainr  # noqa: B018


def test_the_import_parses_no_source_and_knows_the_names_that_type_checkers_see() -> None:
    parsing = (
        "import ast, inspect, tokenize; ast.parse = inspect.getsource = tokenize.generate_tokens = None; import tba"
    )
    subprocess.run([sys.executable, "-c", f"{parsing}; tba.Problem, tba.RecencyReward"], check=True)
    source = ast.parse((ROOT / "src" / "tba" / "__init__.py").read_text())
    imports = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    assert {alias.asname: node.module for node in imports for alias in node.names} == tba._MODULE_OF


LIGHT = "import sys, tba; tba.RecencyReward, tba.Problem; print({'torch', 'transformers', 'ray'} & set(sys.modules))"


def test_the_import_and_what_a_recipe_names_of_replay_load_no_model_library() -> None:
    assert subprocess.check_output([sys.executable, "-c", LIGHT], text=True) == "set()\n"


def test_parts_of_the_package_do_not_hide_public_names() -> None:
    import tba.training.trainer

    assert callable(tba.train)
    assert callable(tba.evaluate)
    assert tba.training.trainer.Trainer


@pytest.mark.parametrize("name", [*recipe_names(), str(TOY), str(ROOT / "examples" / "my_task.py")])
def test_a_recipe_object_is_made_again_from_its_source(name: str, tmp_path: Path) -> None:
    recipe = find(name)
    write_recipe(recipe, tmp_path / "recipe.py")
    again = find(str(tmp_path / "recipe.py"))
    assert settings_json(again).keys() == settings_json(recipe).keys()
    if "my_task" not in name:  # whose classes are of a file, and other objects in each process
        assert again == recipe
    write_recipe(again, tmp_path / "again.py")
    assert (tmp_path / "again.py").read_text() == (tmp_path / "recipe.py").read_text()


@dataclass(frozen=True)
class Mine:
    """A task of this file's, by which the toy's prompts are told apart from the stock ones."""

    toy: TabularTask
    name: str = "mine"

    def problems(self, split: Split) -> list[Problem]:
        return list(self.toy.problems(split))

    def reward(self) -> object:
        return self.toy.reward()


@pytest.mark.parametrize("runtime", ["processes", "inline"])
def test_train_trains_the_recipe_that_it_is_given(tmp_path: Path, runtime: str) -> None:
    recipe = replace(toy(), description="not the one of the file", seed=7)
    run = tba.train(recipe, runs=tmp_path, run_name="mine", quiet=True, runtime=runtime, **QUICK)
    assert run.path == tmp_path / "mine"
    assert run.summary is not None
    assert (run.summary.steps, run.summary.seed) == (6, 7)
    assert [row["step"] for row in run.metrics()] == list(range(1, 7))
    account = run.summary.trajectories
    assert sum(1 for _ in run.trajectories()) == account.generated - account.in_flight_at_stop
    assert run.model is not None
    assert run.model.name == "step-6"
    assert tba.open_run(run.path).summary == run.summary
    assert "tba.train" in (run.path / "recipe.py").read_text()


def test_what_other_processes_cannot_make_is_refused_before_anything_is_made_and_trains_inline(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Cell(TabularTask):
        """As in a notebook."""

    recipe = toy()
    local = replace(recipe, task=Cell(), model=replace(recipe.model, task=Cell()))
    with pytest.raises(UserError, match=r"made within a function or a lambda.*runtime=\"inline\""):
        tba.train(local, runs=tmp_path, run_name="a", quiet=True, **QUICK)
    assert not (tmp_path / "a").exists()
    run = tba.train(local, runs=tmp_path, run_name="b", quiet=True, runtime="inline", **QUICK)
    assert run.summary is not None
    assert run.summary.steps == 6


def test_a_model_of_an_open_precision_trains_inline_in_a_notebook_and_is_refused_by_check(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Cell(Arithmetic):
        """As in a notebook."""

    begun = find("quickstart")
    model = tba.HuggingFace(
        path=str(BASE), device="cpu", generation=tba.EngineSettings(slots=20, max_completion_tokens=6)
    )
    small = EvaluationSettings(problems=10, greedy=False)
    recipe = replace(
        begun, task=Cell(digits=3), model=model, evaluation=small, replay=replace(begun.replay, pacing=Pacing(20))
    )
    fields = {"steps": 2, "samples_per_prompt": 20, "groups_per_step": 1, "runtime": "inline"}
    run = tba.train(recipe, runs=tmp_path, run_name="c", quiet=True, **fields)
    assert run.summary is not None
    assert run.summary.steps == 2
    assert run.summary.utilisation.keys() == {"trainer", "searchers"}
    assert min(run.summary.utilisation.values()) > 0
    with pytest.raises(UserError, match=r"cannot be checked from here.*put that into a .py file"):
        tba.check(recipe, runtime="inline")


def test_a_field_that_a_recipe_does_not_have_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no field --step; did you mean --steps\?"):
        tba.train(toy(), runs=tmp_path, step=3)
    with pytest.raises(UserError, match=r"there is no run at .*nowhere"):
        tba.open_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="--split is 'test': give train or eval"):
        tba.evaluate(toy(), split="test")


def test_a_script_that_trains_while_it_is_loaded_is_told_how_to_guard_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import tba\nrun = tba.train({str(TOY)!r}, steps=3)\nrecipe = None\n")
    with pytest.raises(UserError, match=r"put that below `if __name__ == \"__main__\":`"):
        find(str(script))


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": {"lr": 3e-3}, "model": str(BASE), "evaluation": {"greedy": False}},
        {"optimizer.lr": "3e-3", "model.path": BASE, "evaluation.greedy": False},
        {"optimizer": {"lr": "3e-3"}, "model": BASE, "evaluation": {"greedy": False}},
    ],
    ids=["dictionaries", "dotted", "texts"],
)
def test_nested_fields_of_a_named_recipe_are_set_as_on_the_command_line(fields: dict[str, object]) -> None:
    made, name, flags = _resolve("quickstart", fields)
    begun, words = find("quickstart"), ["--optimizer.lr", "0.003", "--model.path", str(BASE), "--evaluation.no-greedy"]
    assert made == override(begun, words, "tba train")
    assert made.optimizer == replace(begun.optimizer, lr=3e-3)
    assert name == "quickstart"
    assert override(begun, flags, "tba train") == made


def test_components_of_a_named_recipe_are_set_by_objects_beside_plain_fields() -> None:
    made, name, flags = _resolve("quickstart", {"replay": {"selection": tba.RecencyReward(m=0.5)}, "steps": 3})
    begun = find("quickstart")
    assert made.replay == replace(begun.replay, selection=tba.RecencyReward(m=0.5))
    assert (made.steps, name, flags) == (3, "", [])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimzer": {"lr": 1e-5}}, "has no field --optimzer.lr; did you mean --optimizer.lr"),
        ({"learning_rate": 1e-5}, "has no field --learning-rate; did you mean --optimizer.lr"),
        ({"run": {"rounds": True}}, "has no field --run.rounds; it is --run.synchronous-rounds now"),
        ({"replay.pacing.band": 4}, "has no field --replay.pacing.band; it is --replay.pacing.saved-batches now"),
        ({"optimizer": {"lrr": 1e-5}}, "no field --optimizer.lrr; did you mean --optimizer.lr"),
        ({"optimizer": 1e-5}, r"Recipe's optimizer is 1e-05: give OptimizerSettings\(...\)"),
        ({"model.nowhere.deep": tba.Constant(1.0)}, "no field --model.nowhere.deep"),
        ({"objective": "grpo"}, r"the recipe's objective is 'grpo': give an object, such as .* or tba.Grpo\(\)"),
        ({"objective": tba.Grpo}, r"the recipe's objective is the class Grpo: give one of it, Grpo\(...\)"),
        ({"steps": 1e3}, "--steps takes a whole number, not '1000.0'"),
        ({"steps": "many"}, "Recipe's steps is 'many': give a whole number"),
    ],
)
def test_a_field_of_a_named_recipe_that_means_nothing_is_a_sentence(fields: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _resolve("quickstart", fields)


def test_evaluate_gives_the_recipes_figures_the_version_it_measured_and_its_own_seconds(tmp_path: Path) -> None:
    found = tba.evaluate(replace(toy(), evaluation=replace(toy().evaluation, problems=3)))
    assert {e.metric for e in found} >= {"pass@1/sampled"}
    assert all(0 <= e.value <= 1 for e in found)
    model = tba.HuggingFace(path=str(BASE), device="cpu", generation=tba.EngineSettings(max_completion_tokens=6))
    recipe = replace(find("quickstart"), model=model, evaluation=EvaluationSettings(problems=5, pass_k=0))
    begun = time.perf_counter()
    assert {e.version for e in tba.evaluate(recipe)} == {Version(0, 0)}
    saved = shutil.copytree(BASE, tmp_path / "step-7")
    files = {path.name: [0, 0] for path in saved.iterdir()}
    (saved / "run.json").write_text(json.dumps({"version": "2.7", "state": {}, "files": files}))
    measured = tba.evaluate(recipe, saved)
    assert {e.version for e in measured} == {Version(2, 7)}
    assert 0 < sum(e.seconds for e in measured) < time.perf_counter() - begun
    assert max(e.wall_seconds for e in measured) < time.perf_counter() - begun


def test_a_run_and_an_estimate_show_their_figures_in_a_prompt_and_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tba.Run(written_run(tmp_path / "written"))
    first = min(run.evaluations, key=lambda e: e.version)
    for shown in (repr(run), run._repr_html_()):
        assert run.path.name in shown
        assert first.metric in shown
        assert f"{100 * first.value:.1f} %" in shown
        assert all(line == line.rstrip() for line in repr(run).splitlines())
    monkeypatch.setattr("tba.runs.estimate._LEAST_SECONDS", 0.0)
    estimate = repr(tba.check("quickstart", model=BASE, task={"train_problems": 1_000, "eval_problems": 100}))
    for figure in ("1,000 to train on", "What a run takes", "a step takes", "a round takes"):
        assert figure in estimate
    assert f"{tmp_path / 'removed'}: there is no such run" in " ".join(repr(tba.Run(tmp_path / "removed")).split())


def test_a_class_is_the_same_wherever_its_module_has_moved_also_within_lists() -> None:
    made = {"class": "tba.a.One", "inner": [{"class": "tba.b.Two", "x": 1}, 3]}
    moved = {"class": "tba.c.One", "inner": [{"class": "tba.d.Two", "x": 1}, 3]}
    assert list(differences(made, moved)) == []
    other = {"class": "tba.c.One", "inner": [{"class": "tba.d.Three", "x": 2}, 3]}
    assert list(differences(made, other)) == [
        ("inner.0.class", "tba.b.Two", "tba.d.Three"),
        ("inner.0.x", 1, 2),
    ]
    assert list(differences({"inner": [1, 2]}, {"inner": [1]})) == [("inner", [1, 2], [1])]


def test_a_run_that_is_there_keeps_its_recipe(tmp_path: Path) -> None:
    run = tba.train(toy(), runs=tmp_path, run_name="mine", quiet=True, runtime="inline", **QUICK)
    kept = (run.path / "recipe.py").read_text()
    with pytest.raises(UserError, match="mine holds a run already: choose another run_name"):
        tba.train(replace(toy(), seed=9), runs=tmp_path, run_name="mine", quiet=True, runtime="inline", **QUICK)
    assert (run.path / "recipe.py").read_text() == kept
    assert main(["resume", str(run.path), "--steps", "8"]) == 0


def test_a_recipe_by_name_takes_objects_too(tmp_path: Path) -> None:
    settings = replace(toy().replay, selection=tba.RecencyReward(m=1.0))
    run = tba.train(str(TOY), runs=tmp_path, run_name="a", quiet=True, runtime="inline", replay=settings, **QUICK)
    assert "RecencyReward(m=1.0" in (run.path / "recipe.py").read_text()


SCRIPT = """
import tba
from pathlib import Path
from typing import Any
from tba.rewards.functions import FunctionReward

def right(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)

recipe = tba.Recipe(
    name="script", task=tba.Jsonl(train=Path("sums.jsonl"), marked_by=FunctionReward(right)),
    model=tba.HuggingFace(path=BASE, device="cpu", generation=tba.EngineSettings(max_completion_tokens=4)),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)), groups_per_step=2, group_size=2, samples_per_prompt=2,
    replay=tba.ReplaySettings(pacing=tba.Pacing(warm_up=4), buffer=tba.BufferSettings(deduplicate=False)),
    evaluation=tba.EvaluationSettings(problems=2, every=0, pass_k=0), steps=2,
    record=tba.RecordSettings(tensorboard=False),
)

if __name__ == "__main__":
    print(tba.train(recipe, runs="out", run_name="x", quiet=True).summary.steps)
"""


def test_a_script_with_a_function_of_its_own_trains_in_processes(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(100, 140)]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    base = ROOT / "src" / "tba" / "recipes" / "quickstart_base"
    (tmp_path / "script.py").write_text(SCRIPT.replace("BASE", repr(str(base))))
    said = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (said.stdout, said.returncode) == ("2\n", 0), said.stderr


class Nameless:
    """A task that lacks its name."""

    def problems(self, split: Split) -> list[Problem]:
        return []

    def reward(self) -> object:
        return None


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def test_what_a_first_script_writes_is_taken_where_its_meaning_is_plain(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    path = tmp_path / "sums.jsonl"
    task = tba.Jsonl(train=str(path), eval_fraction="0.5", marked_by=right)
    assert task == tba.Jsonl(train=path, eval_fraction=0.5, marked_by=tba.FunctionReward(right))
    assert tba.HuggingFace(path=BASE) == tba.HuggingFace(path=str(BASE))
    objective = tba.TrajectoryBalance(beta=0.05)
    assert objective == tba.TrajectoryBalance(beta=tba.Constant(0.05))
    for model in (BASE, str(BASE)):
        recipe = tba.Recipe(task=task, model=model, objective=objective, steps=1e2)
        assert (recipe.model, recipe.steps) == (tba.HuggingFace(path=str(BASE)), 100)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"task": Nameless()}, "the recipe's task, Nameless, has no name: give the class the line `name: str = \"name"),
        ({"task": Nameless}, r"the recipe's task is the class Nameless: give one of it, Nameless\(...\)"),
        ({"task": "sums.jsonl"}, "the recipe's task is 'sums.jsonl': give an object, such as tba.Jsonl"),
        ({"objective": "grpo"}, r"the recipe's objective is 'grpo': give an object, such as .* or tba.Grpo\(\)"),
        ({"objective": 0.05}, "the recipe's objective is 0.05: give an object, such as tba.TrajectoryBalance"),
        ({"model": None}, "the recipe's model is None: give an object, such as tba.HuggingFace"),
        ({"model": tba.Arithmetic()}, "the recipe's model, Arithmetic, has no heads: "),
        ({"exploration": 0.7}, r"the recipe's exploration is 0.7: give an object, such as tba.Fixed\(temperature"),
        ({"optimizer": 1e-5}, r"Recipe's optimizer is 1e-05: give OptimizerSettings\(...\)"),
        ({"steps": "a hundred"}, "Recipe's steps is 'a hundred': give a whole number"),
        ({"runtime": "ray"}, "Recipe's runtime is 'ray': give one of processes, inline, cluster"),
    ],
)
def test_what_a_recipe_cannot_be_made_of_is_one_sentence(wrong: dict[str, Any], said: str) -> None:
    parts = {"task": tba.Arithmetic(), "model": BASE, "objective": tba.Grpo()}
    with pytest.raises(UserError, match=said):
        tba.Recipe(**{**parts, **wrong})


@pytest.mark.parametrize("runtime", ["processes", "inline"])
def test_plain_functions_are_called_once_with_each_step_and_each_figure(tmp_path: Path, runtime: str) -> None:
    rows: list[Any] = []
    figures: list[Any] = []
    told = {"on_step": rows.append, "on_evaluation": figures.append}
    run = tba.train(toy(), runs=tmp_path, run_name="a", quiet=True, runtime=runtime, **told, **QUICK)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert rows == list(run.metrics())
    assert figures == list(run.evaluations)
    assert {f.version.step for f in figures} == {0, 6}


@pytest.mark.parametrize("runtime", ["processes", "inline"])
def test_what_such_a_function_raises_ends_the_run_with_its_line_and_the_run_is_resumed(
    tmp_path: Path, runtime: str
) -> None:
    def on_step(row: Any) -> None:
        if row["step"] == 3:
            raise ValueError("enough")

    with pytest.raises(UserError, match=r"on_step failed: ValueError: enough \(.*test_api.py, line \d+: raise"):
        tba.train(str(TOY), runs=tmp_path, run_name="a", quiet=True, runtime=runtime, on_step=on_step, steps=400)
    before = len(tba.open_run(tmp_path / "a").metrics())
    assert 3 <= before < 400
    assert main(["resume", str(tmp_path / "a"), "--steps", str(before + 2)]) == 0
    steps = {row["step"] for row in tba.open_run(tmp_path / "a").metrics()}  # inline no checkpoint is left: from 0
    assert steps == set(range(1, before + 3))


def test_epochs_are_as_many_steps_as_have_the_groups_of_so_many_passes_over_the_prompts(tmp_path: Path) -> None:
    prompts = len(toy().task.problems("train"))
    fields: dict[str, Any] = {**QUICK, "groups_per_step": 2, "runtime": "inline"}
    del fields["steps"]
    recipe = replace(toy(), prompts=replace(toy().prompts, limit=None))
    for epochs in (1, 2.5):
        run = tba.train(recipe, runs=tmp_path, run_name=f"{epochs}", quiet=True, epochs=epochs, **fields)
        assert len(run.metrics()) == math.ceil(epochs * prompts / 2)
    with pytest.raises(UserError, match="epochs and steps both say how long the run is"):
        tba.train(recipe, runs=tmp_path, epochs=1, steps=3)
    with pytest.raises(UserError, match="--epochs is -1"):
        tba.train(recipe, runs=tmp_path, epochs=-1)
    words = ["train", str(TOY), "--runs", str(tmp_path), "--run-name", "named", "--runtime", "inline", "--epochs", "2"]
    assert main([*words, "--steps", "3"]) == 2
    assert main(words) == 0
    begun = find(str(TOY))
    assert len(tba.open_run(tmp_path / "named").metrics()) == math.ceil(2 * prompts / begun.groups_per_step)
