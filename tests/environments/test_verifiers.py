"""Tasksets of `verifiers` as they are: what a policy is told, what it earns, and what is refused.

Skipped where the package is missing: `pip install -e '.[verifiers]'`, and for the two environments that come with it
`pip install 'verifiers[ta,openenv]==0.4.*'`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tba
from tba.__main__ import main
from tba.environments.verifiers_task import VerifiersEpisode, VerifiersTask
from tba.errors import UserError
from tba.training.tiny_models import ScratchModel, character_tokenizer

if importlib.util.find_spec("verifiers") is None:
    pytest.skip("needs the package verifiers", allow_module_level=True)

ROOT = Path(__file__).parents[2] / "src"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{{ 's:' if add_generation_prompt }}"
WORDS = ["apple", "house", "river", "table", "water", "light", "green", "plant", "bread", "stone"]
OWN = """
import asyncio

import verifiers.v1 as vf


class Own(vf.TasksetConfig):
    kind: str = "length"


class Asking(vf.Task[vf.TaskData]):
    @vf.reward(weight=2.0)
    async def length(self, trace: vf.Trace) -> float:
        assert trace.last_reply != "wrong"
        return float(len(trace.last_reply))


class OwnTaskset(vf.Taskset[Asking, Own]):
    def load(self):
        for index in range(6):
            yield Asking(vf.TaskData(prompt=f"Say {index % 5}.", system_prompt=self.config.kind))


class OwnEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class OwnEnv(vf.Env[OwnEnvConfig]):
    async def run(self, task, agents):
        kind = self.taskset.config.kind
        if kind == "hangs":
            await asyncio.sleep(3600)
        await agents.agent.run(task)
        if kind == "two":
            await agents.other.run(task)


__all__ = ["OwnEnv", "OwnTaskset"]
"""


@pytest.fixture(autouse=True)
def nothing_from_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A taskset of our own to import, a list of words where NLTK looks for one, and no other network than loopback."""
    (tmp_path / "own_taskset.py").write_text(OWN)
    words = tmp_path / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (words / name).write_text("\n".join(WORDS) + "\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens: a download fails at once


def played(task: VerifiersTask, index: int, turns: list[str], cut: str | None = None) -> tuple[list[str | None], float]:
    """Returns what an episode says and its reward."""
    episode = VerifiersEpisode(task)
    try:
        said = [episode.reset(index), *(episode.step(turn) for turn in turns)]
        if cut is not None:
            episode.cut(cut)
        return said, episode.get_reward()
    finally:
        episode.close()


def test_an_episode_of_one_turn_has_the_weighted_reward_of_its_task_and_a_cut_turn_is_graded_as_it_stands() -> None:
    task = VerifiersTask("own_taskset", eval_problems=2)
    assert [p.prompt[-1]["content"] for p in task.problems("eval")] == ["Say 0.", "Say 1."]
    training = task.problems("train")
    assert [p.seed for p in training] == [2, 3, 4]  # the last one asks the same as the first, which is held out
    assert training[0].prompt == ({"role": "system", "content": "length"}, {"role": "user", "content": "Say 2."})
    assert played(task, 2, ["seven"]) == (["Say 2.", None], 10.0)
    assert played(task, 2, [], cut="four") == (["Say 2."], 8.0)
    assert played(task, 2, [""]) == (["Say 2.", None], 0.0)


def test_what_fails_costs_its_own_episode_and_the_others_go_on() -> None:
    task = VerifiersTask("own_taskset", eval_problems=2)
    other = VerifiersEpisode(task)
    other.reset(3)
    with pytest.raises(RuntimeError, match=r"^TaskError: .*AssertionError"):
        played(task, 2, ["wrong"])
    with pytest.raises(RuntimeError, match="there is no task 6"):
        played(task, 6, [])
    assert other.step("seven") is None
    assert other.get_reward() == 10
    other.close()
    with pytest.raises(RuntimeError, match="the process that played it was replaced"):
        other.get_reward()


def test_an_episode_that_takes_too_long_fails_and_its_process_goes_on() -> None:
    task = VerifiersTask("own_taskset", '{"kind": "hangs"}', eval_problems=2, seconds=5)
    with pytest.raises(UserError, match="the environment took more than 5 s"):
        task.problems("train")
    assert len(task.problems("eval")) == 2


def test_a_second_agent_fails_its_episode() -> None:
    task = VerifiersTask("own_taskset", '{"kind": "two"}', eval_problems=2)
    with pytest.raises(RuntimeError, match="a second agent asks for a turn"):
        played(task, 2, ["seven"])


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (VerifiersTask("own_taskset", '{"king": "two"}'), "cannot be used: ValidationError: .*king"),
        (VerifiersTask("no_taskset"), "cannot be used: ModuleNotFoundError: taskset 'no_taskset' not found"),
        (VerifiersTask("own_taskset", eval_problems=6), "none is left for training"),
    ],
    ids=["unknown setting", "unknown taskset", "all held out"],
)
def test_what_cannot_be_played_is_said_in_one_sentence(task: VerifiersTask, says: str) -> None:
    with pytest.raises(UserError, match=says):
        task.problems("train")


@pytest.mark.parametrize("parameters", ["[]", "{", '{"id": "other"}'])
def test_parameters_are_a_json_object_without_an_id(parameters: str) -> None:
    with pytest.raises(UserError, match="parameters"):
        VerifiersTask("own_taskset", parameters)


def test_another_series_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.1")
    with pytest.raises(UserError, match=r"verifiers 0\.5\.1 is installed, .* spoken as in 0\.4: `pip install"):
        VerifiersTask("own_taskset").problems("eval")


def hangman(**fields: Any) -> VerifiersTask:
    pytest.importorskip("textarena")
    return VerifiersTask(
        "textarena", '{"game": "Hangman-v0"}', train_problems=6, eval_problems=2, seconds=600, **fields
    )


@pytest.mark.parametrize("turns", [["[A]", "[E]", "nothing", "[apple]"], ["[R]", "[river]"], ["x", "y", "z"]])
def test_hangman_of_textarena_gives_what_the_game_itself_gives_for_the_same_texts(turns: list[str]) -> None:
    task = hangman(turns=len(turns))
    for problem in task.problems("train"):
        assert problem.seed is not None
        taken, expected = earned_in_hangman(problem.seed, turns)
        said, reward = played(task, problem.seed, turns[:taken])
        assert reward == expected
        assert problem.prompt[-1]["content"] == said[0]
        assert said[-1] is None
        assert None not in said[:-1]


def earned_in_hangman(seed: int, turns: list[str]) -> tuple[int, float]:
    """Returns how many of the turns are taken, and the reward, by the game itself."""
    import textarena

    random.seed(seed)
    game = textarena.make(env_id="Hangman-v0")
    game.reset(num_players=1)
    for number, turn in enumerate(turns, start=1):
        game.step(turn.strip())
        if game.state.done:
            return number, float(game.state.rewards[0])
    return len(turns), 0.0


SERVER = """
import socket

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app

from echo.models import EchoAction, EchoObservation
from echo.server.echo_environment import EchoEnvironment

app = create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=16)
with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # from now on requests wait
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])
"""


@pytest.fixture
def openenv_server(tmp_path: Path) -> Iterator[str]:
    """The environment that OpenEnv's own template makes, behind its server."""
    pytest.importorskip("openenv")
    folder = tmp_path / "openenv_example"
    spec = importlib.util.find_spec("openenv")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent / "cli" / "templates" / "openenv_env", folder / "echo")
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".py":
            text = re.sub("__ENV_(CLASS|TITLE)_NAME__", "Echo", path.read_text()).replace("__ENV_NAME__", "echo")
            path.unlink()
            path.with_name(path.name.replace("__ENV_NAME__", "echo")).write_text(text)
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=folder, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def echo(url: str) -> VerifiersTask:
    resets = [{"seed": seed} for seed in range(4)]
    settings = json.dumps({"base_url": url, "resets": resets})
    return VerifiersTask("openenv", settings, turns=3, eval_problems=1, seconds=600)


def test_an_environment_of_openenv_opens_the_conversation_and_gives_the_sum_of_its_rewards(openenv_server: str) -> None:
    task = echo(openenv_server)
    (problem,) = task.problems("eval")
    assert "Echo environment ready!" in problem.prompt[-1]["content"]
    said, reward = played(task, 1, ["four", "a sentence that is long", "seven"])
    assert json.loads(said[1] or "")["observation"]["echoed_message"] == "four"
    assert said[3] is None
    assert reward == pytest.approx(earned_in_echo(openenv_server, ["four", "a sentence that is long", "seven"]))


def earned_in_echo(url: str, turns: list[str]) -> float:
    """Returns the sum of what the environment gives for each turn, asked one by one; without a text there is none."""
    total = 0.0
    for turn in itertools.takewhile(bool, map(str.strip, turns)):
        body = json.dumps({"action": {"message": turn}}).encode()
        request = urllib.request.Request(f"{url}/step", body, {"Content-Type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            total += json.load(answer)["reward"]
    return total


RECIPE = """
import tba
from tba.environments.verifiers_task import VerifiersTask

recipe = tba.Recipe(
    name="of_verifiers",
    description="a step of training in an environment of verifiers",
    task={task!r},
    model=tba.HuggingFace(
        path={model!r}, device="cpu", generation=tba.EngineSettings(slots=8, max_completion_tokens=3000)
    ),
    prompts=tba.PromptSettings(max_tokens=2000),
    objective=tba.TrajectoryBalance(beta=tba.Constant(0.05)),
    replay=tba.ReplaySettings(pacing=tba.Pacing(warm_up=8), buffer=tba.BufferSettings(deduplicate=False)),
    evaluation=tba.EvaluationSettings(problems=1, every=0, greedy=False),
    steps=1, group_size=4, groups_per_step=2, samples_per_prompt=4, prompts_per_round=2,
)
"""


@pytest.mark.parametrize("name", ["hangman", "echo"])
def test_a_step_of_training_has_the_rewards_that_its_texts_earn_and_its_account_closes(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("openenv_server") if name == "echo" else ""
    task = echo(url) if url else hangman(turns=3)
    characters = "".join(map(chr, [10, *range(32, 127)])) + "\u2014"
    tokenizer = character_tokenizer(characters)
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path / "model"
    untrained = ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=16, max_positions=6000).start(tokenizer)
    untrained.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (tmp_path / "recipe.py").write_text(RECIPE.format(task=task, model=str(folder)))
    where = ["--runs", str(tmp_path), "--run-name", "run", "--runtime", "inline"]
    assert main(["train", str(tmp_path / "recipe.py"), *where]) == 0
    run = tba.open_run(tmp_path / "run")
    assert run.summary is not None
    assert run.summary.steps == 1
    assert run.summary.trajectories.closes()
    assert run.summary.tokens.observed > 0
    turns = []
    for t in run.trajectories():
        sampled_T = np.ones(t.length, np.bool_) if t.completion.mask is None else t.completion.mask
        edges = np.flatnonzero(np.diff(sampled_T, prepend=False, append=False)).reshape(-1, 2)
        parts = [tokenizer.decode(t.completion.tokens[a:b].tolist(), skip_special_tokens=True) for a, b in edges]
        expected = earned_in_echo(url, parts) if url else earned_in_hangman(t.prompt.seed, parts)[1]
        assert t.reward == pytest.approx(expected)
        turns.append(len(parts))
    assert max(turns) >= 2
