"""A teacher behind an HTTP endpoint: a server on loopback that scores tokens by a real model, as vLLM's does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from runs import inline, inline_again
from test_other_tokenizers import renamed
from test_resume import Cut, PowerCut, uids_of
from test_teaching import model_at, of_models, trajectories
from tests.rewards.endpoint_server import Reply, Server, serving

import tba
from tba.errors import TbaError, UserError
from tba.models.huggingface import HuggingFace
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Reference
from tba.recipe import Recipe
from tba.runtime.needs import needs
from tba.runtime.prompting import prompts_of
from tba.runtime.teaching import ScoredByText, reference_of, require_scorers, teachers_of
from tba.schedules import Constant
from tba.training.teacher import Teacher
from tba.types import TEACHER, Completion, Prompt, StopReason, Version


@dataclass
class Scoring:
    """Scores the tokens it is sent, all but the first, in the form that is asked for."""

    model: Reference

    def __call__(self, n: int, asked: dict[str, Any]) -> Reply:
        first, *rest = asked["prompt"]
        prompt = Prompt("t", np.array([first], np.int32))
        whole = Completion(np.array(rest, np.int32), "", StopReason.LENGTH, (Version(), Version()))
        log_T = self.model.log_probabilities_of([(prompt, [whole])])[0][0].tolist()
        choice: dict[str, Any] = {"text": "", "index": 0}
        if asked.get("echo"):
            choice["logprobs"] = {"token_logprobs": [None, *log_T, -1.0], "tokens": ["?"] * (len(rest) + 2)}
        else:
            others = {"0": {"logprob": -30.0, "rank": 9}}
            scored = zip(rest, log_T, strict=True)
            choice["prompt_logprobs"] = [None, *({**others, str(t): {"logprob": log, "rank": 1}} for t, log in scored)]
        return 200, {}, json.dumps({"choices": [choice]}).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def taught(server: Server, own: str, theirs: str, **changes: Any) -> Recipe:
    server.script = Scoring(HuggingFace(theirs, device="cpu").reference(1.0, Version()))
    endpoint = tba.Endpoint(url=server.url, model="m", pause=0.0, retries=2, token_variable="MY_TOKEN")
    teacher = tba.EndpointTeacher(endpoint, theirs, **changes)
    by_token = SubtrajectoryBalance(Constant(1.0), flow="one")
    return replace(of_models(own), objective=by_token, teacher=Teacher(models=(teacher,), reward=False))


def answers(recipe: Recipe) -> list[tuple[Prompt, list[Completion]]]:
    tokenizer, at = recipe.model.tokenizer(), (Version(), Version())
    end = [tokenizer.eos_token_id or 0]
    said = [(tokenizer.encode(text) + end, StopReason.EOS) for text in ("14", "7", "123")]
    completions = [Completion(np.array(tokens, np.int32), "", reason, at) for tokens, reason in said]
    return [(prompt, completions) for prompt in prompts_of(recipe, recipe.model, "train")[:3]]


@pytest.mark.parametrize("scores", ["prompt_logprobs", "echo"])
def test_a_server_s_teacher_scores_token_by_token_as_the_model_itself_does(
    server: Server, scores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    recipe = taught(server, model_at(tmp_path / "own", 0), model_at(tmp_path / "theirs", 1), scores=scores)
    require_scorers(recipe, recipe.model, lambda line: None)
    scoring = server.script
    server.script = lambda n, asked: scoring(n, asked) if n else (503, {}, b"{}")  # the first is asked again
    (teacher,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    pairs = answers(recipe)
    found = [row for rows in teacher.log_probabilities_of(pairs) for row in rows]
    model = HuggingFace(str(tmp_path / "theirs"), device="cpu").reference(1.0, Version())
    expected = [row for rows in model.log_probabilities_of(pairs) for row in rows]
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)  # of about 3, summed in another order
    assert len(server.asked) == len(expected) + 1
    assert set(server.tokens) == {"Bearer s3cret"}
    assert "s3cret" not in repr(recipe)
    assert {need.part for need in needs(recipe)} == {need.part for need in needs(of_models(str(tmp_path / "own")))}


def test_a_server_s_teacher_with_another_tokenizer_scores_texts(server: Server, tmp_path: Path) -> None:
    own = model_at(tmp_path / "own", 0)
    recipe = replace(taught(server, own, renamed(own, tmp_path / "other")), objective=TrajectoryBalance(Constant(1.0)))
    (teacher,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    assert isinstance(teacher, ScoredByText)
    pairs = answers(recipe)
    expected = recipe.model.reference(1.0, Version()).log_probabilities_of(pairs)
    for theirs, mine in zip(teacher.log_probabilities_of(pairs), expected, strict=True):
        assert [float(row.sum()) for row in theirs] == pytest.approx([float(row.sum()) for row in mine], abs=1e-4)


def test_a_run_that_is_cut_off_asks_the_server_for_no_answer_twice(server: Server, tmp_path: Path) -> None:
    recipe = taught(server, model_at(tmp_path / "own", 0), model_at(tmp_path / "theirs", 1))
    path, run = tmp_path / "run", ("--steps", "12", "--sync-every", "2", "--run.checkpoint-every", "4")
    changes: dict[str, Any] = {name: getattr(recipe, name) for name in ("task", "model", "objective", "teacher")}
    changes |= {"exploration": Cut(path, 6, [])}
    with pytest.raises(PowerCut):
        inline(path, *run, "--replay.pacing.warm-up", "32", **changes)
    there = uids_of(path)
    inline_again(path, **changes)
    found = trajectories(path)
    assert set(there) < {t.uid for t in found}
    assert all(t.arrays[TEACHER].shape == (1, t.length) for t in found)
    rounds = {(t.uid[:24], t.prompt.key, t.completion.digest) for t in found}  # an answer is scored once in a round
    assert len(server.asked) == len(rounds)


def test_what_a_server_cannot_give_ends_in_a_sentence(server: Server, tmp_path: Path) -> None:
    own = model_at(tmp_path / "own", 0)
    recipe = taught(server, own, own)
    (teacher,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    replies: list[tuple[Reply, str]] = [
        ((200, {}, b'{"choices": [{"text": "?"}]}'), "does not give the log-probabilities of the tokens it was sent"),
        ((200, {}, b'{"choices": [{"prompt_logprobs": [null]}]}'), "does not give the log-probabilities"),
        ((401, {}, b"{}"), "put the token into the environment variable MY_TOKEN"),
        ((503, {}, b"{}"), "did not answer in 3 calls"),
    ]
    for reply, said in replies:
        server.script = lambda n, asked, reply=reply: reply
        with pytest.raises(TbaError, match=said):
            teacher.log_probabilities_of(answers(recipe))
    with pytest.raises(UserError, match="scores at temperature 1"):
        teachers_of(replace(recipe, policy_temperature=0.7), recipe.model, teacher)
    with pytest.raises(UserError, match="scores at temperature 1"):  # before there is a run
        require_scorers(replace(recipe, policy_temperature=0.7), recipe.model, lambda line: None)
    short = replace(recipe, teacher=Teacher(models=(replace(recipe.teachers.models[0], positions=1),), reward=False))
    (teacher,) = teachers_of(short, recipe.model, reference_of(recipe, recipe.model))
    assert all(np.isnan(row).all() for rows in teacher.log_probabilities_of(answers(recipe)) for row in rows)
    with pytest.raises(UserError, match="needs path, its tokenizer"):
        tba.EndpointTeacher().prepared(recipe.task)
    with pytest.raises(UserError, match="concurrency is 0"):
        tba.EndpointTeacher(concurrency=0)


@pytest.mark.parametrize("score", [7.0, 0.1, True, "-1.5", None, [-1.5], -1e300, 10**400])
@pytest.mark.parametrize("scores", ["prompt_logprobs", "echo"])
def test_what_cannot_be_the_log_probability_of_a_token_is_refused(server: Server, score: object, scores: str) -> None:
    settings = tba.Endpoint(url=server.url, model="m", pause=0.0)
    teacher = tba.EndpointTeacher(settings, scores=cast("Any", scores)).reference(1.0, Version())
    at = (Version(), Version())
    pair = Prompt("t", np.array([1], np.int32)), Completion(np.array([2], np.int32), "", StopReason.EOS, at)

    def reply(score: object) -> Reply:
        by_token = {"prompt_logprobs": [None, {"2": {"logprob": score}}]}
        choice = by_token if scores == "prompt_logprobs" else {"logprobs": {"token_logprobs": [None, score]}}
        return 200, {}, json.dumps({"choices": [choice]}).encode()

    server.script = lambda n, asked: reply(score)
    with pytest.raises(UserError, match=r"the log-probabilities .* each a number from -100,000 to 0\)"):
        teacher.log_probabilities_of([(pair[0], [pair[1]])])
    for stated, right in ((-1.5, -1.5), (0, 0.0), (-9999.0, -9999.0), (1e-6, 0.0), (-math.inf, -math.inf)):
        server.script = lambda n, asked, stated=stated: reply(stated)
        assert teacher.log_probabilities_of([(pair[0], [pair[1]])])[0][0].tolist() == [right]
