"""The examples, run as their first lines say: in a few steps, with a small model in place of a downloaded one."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.runs import command, until

import tba
from tba.__main__ import main
from tba.environments.episode import Episode
from tba.settings import find
from tba.tasks.arithmetic import Arithmetic
from tba.training.tiny_models import ScratchModel, train_bpe_tokenizer
from tba.types import Completion, Prompt, StopReason, Version

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ("my_task", "two_rewards", "my_file", "my_judge", "my_data", "my_environment", "my_chat_task", "my_tool")
FEW = ["--runtime", "inline", "--steps", "2", "--replay.pacing.warm-up", "32", "--evaluation.problems", "8"]
SCRATCH = ["--model.warm-start.sft.steps", "3"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def path(name: str) -> str:
    return str(EXAMPLES / f"{name}.py")


def trained_run(name: str, runs: Path, *fields: str) -> tba.Run:
    assert main(["train", path(name), *FEW, *fields, "--runs", str(runs), "--run-name", name]) == 0
    run = tba.open_run(runs / name)
    assert run.summary is not None
    assert run.summary.steps == 2
    assert run.summary.trajectories.closes()
    assert {e.metric for e in run.evaluations} == {"pass@1/greedy", "pass@1/sampled"}
    return run


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", path(name))
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def cells() -> list[str]:
    notebook = json.loads((EXAMPLES / "first_run.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", [*RECIPES, "first_run.ipynb"])
def test_an_example_has_three_imports_at_most_and_says_first_how_it_is_run(name: str) -> None:
    source = "\n".join(cells()) if name.endswith("ipynb") else Path(path(name)).read_text()
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert 1 <= len(imports) <= 3
    if not name.endswith("ipynb"):
        docstring = ast.get_docstring(tree) or ""
        assert f"tba train examples/{name}.py" in docstring
        assert len(source.splitlines()) <= 110


def test_the_algorithm_is_one_page_of_public_names() -> None:
    source = Path(path("loop")).read_text()
    nodes = list(ast.walk(ast.parse(source)))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert len(source.splitlines()) <= 150
    assert {str(module).partition(".")[0] for module in modules} - sys.stdlib_module_names == {"numpy", "torch", "tba"}
    assert "tba" in modules
    assert not any(str(module).startswith("tba.") for module in modules)
    assert {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "tba"} <= set(tba.__all__)


def test_the_algorithm_on_one_page_runs_and_says_what_it_has_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    before, after = module("loop").main(steps=8, problems=50)
    torch.set_num_threads(threads)
    assert 0.1 < before < 0.5
    assert after > before
    assert f"held-out accuracy: {before:.1%} before, {after:.1%} after 8 steps" in capsys.readouterr().out


@pytest.mark.parametrize("name", RECIPES)
def test_an_examples_objective_is_the_default_trajectory_balance(name: str) -> None:
    beta = tba.Constant(0.5 if name == "my_data" else 0.05)
    assert find(path(name)).objective == tba.TrajectoryBalance(beta=beta)


@pytest.mark.parametrize("name", ["my_task", "two_rewards", "my_file", "my_judge"])
def test_an_examples_splits_share_nothing(name: str) -> None:
    task = find(path(name)).task
    train, held_out = ({str(p.prompt) for p in task.problems(split)} for split in ("train", "eval"))
    assert len(train) > len(held_out) >= 40
    assert not train & held_out


def rewards_and_parts(reward: Any, fields: dict[str, Any], *texts: str) -> list[tuple[float, dict[str, float]]]:
    tokens = np.array([1], dtype=np.int32)
    prompt = Prompt("example", tokens, "?", fields)
    answers = [(prompt, Completion(tokens, text, StopReason.EOS, (Version(), Version()))) for text in texts]
    return [(j.reward, dict(j.parts)) for j in reward.judge(answers)]


def test_a_task_with_letters_makes_its_base_and_learns_from_its_reward(tmp_path: Path) -> None:
    task = find(path("my_task")).task
    problems = task.problems("train")
    right = sum(p.demonstration == p.fields["answer"] for p in problems) / len(problems)
    assert right == pytest.approx(0.3 + 0.7 / 26, abs=0.05)  # two equal neighbours may be swapped
    assert all(sorted(p.demonstration or "") == list(p.fields["answer"]) for p in problems)
    assert rewards_and_parts(task.reward(), {"answer": "elmno"}, "elmno", "lemno") == [
        (1.0, {"right": 1}),
        (0.0, {"right": 0}),
    ]
    with pytest.raises(tba.UserError, match=r"--task\.length is 1: give 2 letters or more"):
        replace(task, length=1)
    run = trained_run("my_task", tmp_path, *SCRATCH)
    assert {c for t in run.trajectories() for c in t.prompt.text} <= set("abcdefghijklmnopqrstuvwxyz>")


def test_an_environments_episodes_are_trained_turn_by_turn(tmp_path: Path) -> None:
    episode = find(path("my_environment")).task.environment()
    assert episode.reset(seed=3) == "a-p?"
    assert episode.letter not in {"a", "p"}
    assert [episode.step(text) for text in ("a", "no letter", "p", episode.letter)] == ["b-p?", "b-p?", "b-o?", None]
    assert episode.get_reward() == pytest.approx(0.7)
    few = ["--task.worlds", "300", "--model.warm-start.sft.steps", "60", "--model.warm-start.sft.batch-size", "32"]
    run = trained_run("my_environment", tmp_path, *few)
    assert run.summary is not None
    assert 0 < run.summary.tokens.observed < run.summary.tokens.generated
    assert {len(t.completion.mask) == t.length for t in run.trajectories() if t.completion.mask is not None} == {True}


def test_an_agent_trains_the_model_that_it_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent, path_of_run = module("my_agent"), tmp_path / "agents"
    few = ["--steps", "2", "--replay.pacing.warm-up", "32", "--evaluation.problems", "4"]
    few += ["--model.warm-start.sft.steps", "40", "--searchers", "0", "--runs", str(tmp_path), "--run-name", "agents"]
    train = command("train", path("my_tool"), *few)
    until(lambda: (path_of_run / "logs" / "trainer.log").exists(), 240, "the run to begin")
    serve = command("serve", "--run", str(path_of_run), "--port", "0")
    try:
        until((path_of_run / "serve.json").exists, 240, "the server")
        agent.main(str(path_of_run))
        for process in (train, serve):
            output, errors = process.communicate(timeout=240)
            assert (process.returncode, errors) == (0, ""), output
    finally:
        for process in (train, serve):
            process.kill()
            process.communicate(timeout=240)
    run = tba.open_run(path_of_run)
    assert run.summary is not None
    assert run.summary.steps == 2
    assert run.summary.trajectories.closes()
    assert all(row.provenance["agent"] == "agent" for row in run.trajectories())


def test_the_agents_tool_says_what_the_environment_says() -> None:
    agent = module("my_agent")
    for seed, item in enumerate((*agent.PRICES, "gold")):
        arguments = json.dumps({"item": item})
        call = {"id": "call_1", "function": {"name": "price", "arguments": arguments}}
        episode = Episode(module("my_tool").Price, {}, seed, turns=3)
        reply = episode.say(f'<tool_call>{{"name": "price", "arguments": {arguments}}}</tool_call>')
        assert reply is not None
        assert agent.run_tool(call)["content"] == reply.text


def test_two_rewards_are_summed_by_weight_and_seen_apart(tmp_path: Path) -> None:
    task = find(path("two_rewards")).task
    assert {c for p in task.problems("train") for c in p.prompt + p.fields["answer"]} <= set(Arithmetic().alphabet)
    rewards = [
        reward for reward, _ in rewards_and_parts(task.reward(), {"answer": "096"}, "096", "095", "0961", "", "690")
    ]
    assert rewards == pytest.approx([1.0, 1 / 3, 3 / 8, 0.0, 1 / 6])
    run = trained_run("two_rewards", tmp_path)
    for row in run.metrics():
        parts = row["reward/right"], row["reward/right_digits"]
        assert row["reward"] == pytest.approx(0.5 * parts[0] + 0.5 * parts[1])


def test_answers_that_are_there_already_are_learnt_from_without_a_searcher(tmp_path: Path) -> None:
    few = ["--prompts", "4", "--samples", "20", "--out", str(tmp_path / "answers.jsonl")]
    assert main(["sample", path("two_rewards"), *few]) == 0
    data = ["--offline", "--data", str(tmp_path / "answers.jsonl"), "--group-size", "10", "--groups-per-step", "4"]
    run = trained_run("my_data", tmp_path, *data)
    assert run.summary is not None
    assert run.summary.trajectories.generated == 0
    assert all(t.imported for t in run.trajectories())


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained model that has a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_bpe_tokenizer(["Name an animal that begins with the letter b."], 270)
    tokenizer.chat_template = TEMPLATE
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=16, max_positions=128).start(tokenizer).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_a_file_of_chats_is_trained_on_as_the_example_says(tmp_path: Path, chat_model: Path) -> None:
    task = find(path("my_file")).task
    marks = [reward for reward, _ in rewards_and_parts(task.reward(), {"letter": "b"}, " Bear", "bee", "a bear", "")]
    assert marks == [1.0, 1.0, 0.0, 0.0]
    lines = [json.loads(line) for line in (EXAMPLES / "my_file.jsonl").read_text().splitlines()]
    assert {len(line["messages"]) for line in lines} == {1}
    run = trained_run("my_file", tmp_path, "--model.path", str(chat_model), "--model.device", "cpu")
    assert next(run.trajectories()).prompt.text.startswith("user: Name a")


def test_a_chat_model_is_asked_by_its_template_and_marked_for_the_city_and_for_few_words(
    tmp_path: Path, chat_model: Path
) -> None:
    task = find(path("my_chat_task")).task
    train, held_out = ([str(p.prompt) for p in task.problems(split)] for split in ("train", "eval"))
    assert (len(train), len(held_out), len({*train, *held_out})) == (20, 10, 30)
    answers = ("Vienna", "Vienna.", "The capital of Austria is Vienna.", "Graz", "")
    assert [reward for reward, _ in rewards_and_parts(task.reward(), {"answer": "Vienna"}, *answers)] == [
        1.0,
        1.0,
        1 / 6,
        0.0,
        0.0,
    ]
    run = trained_run("my_chat_task", tmp_path, "--model.path", str(chat_model), "--model.device", "cpu")
    pattern = r"user: What is the capital of [A-Z][a-z]+\? Answer with the name of the city.\n"
    assert {re.fullmatch(pattern, t.prompt.text) is not None for t in run.trajectories()} == {True}


def test_the_readmes_own_task_runs_from_a_file_of_chats(
    tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE) if "recipe = " in c)
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(code)
    lines = [
        {"messages": [{"role": "user", "content": f"What is the capital of {country}?"}], "answer": city}
        for country, city in re.findall(r"(\w+): (\w+)", module("my_chat_task").CAPITALS)
    ]
    Path("capitals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = ("--model.path", str(chat_model), "--model.device", "cpu", "--model.generation.max-completion-tokens", "8")
    assert main(["train", "task.py", *FEW, *model, "--run-name", "own"]) == 0
    run = tba.open_run("runs/own")
    assert next(run.trajectories()).prompt.text.startswith("user: What is the capital of ")
    answers = ("Vienna", "It is Vienna.", "Graz")
    marks = rewards_and_parts(find("task.py").task.reward(), {"answer": "Vienna"}, *answers)
    assert [reward for reward, _ in marks] == [1.0, 1 / 3, 0.0]


@pytest.fixture
def judge() -> Iterator[tuple[ModuleType, str]]:
    """The stand-in of the examples, at a free port, and its url."""
    stand_in = module("judge_server")
    http: ThreadingHTTPServer = stand_in.server(0)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield stand_in, f"http://127.0.0.1:{http.server_address[1]}/v1"
    http.shutdown()
    http.server_close()
    thread.join(5)


def test_a_judge_behind_an_endpoint_grades_what_a_run_samples(tmp_path: Path, judge: tuple[ModuleType, str]) -> None:
    stand_in, url = judge
    assert stand_in.grade("... the name 'mola' ...") == 10
    run = trained_run("my_judge", tmp_path, *SCRATCH, "--task.judge.url", url)
    trajectories = list(run.trajectories())
    assert trajectories
    for t in trajectories:
        grade = stand_in.grade(f"the name {t.completion.text!r}") / 10
        begins_right = float(t.completion.text.startswith(t.prompt.fields["beginning"]))
        assert t.reward_parts == {"grade": grade, "begins": begins_right}
        assert t.reward == pytest.approx(0.8 * grade + 0.2 * begins_right)
    assert "reward/grade" in run.metrics()[-1]


def test_the_notebook_runs_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells():
        source = cell.replace("steps=100", "steps=2").replace("problems=0", "problems=8")
        exec(compile(source, os.fspath(EXAMPLES / "first_run.ipynb"), "exec"), namespace)
    assert namespace["right_digits"]("", "086", "096") == pytest.approx(2 / 3)
    assert namespace["run"].summary.steps == 2
    assert len(namespace["plt"].gca().lines) == 3
