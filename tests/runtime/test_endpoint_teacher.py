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
from tba.objectives.distil import Distil
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.reference import FrozenReference
from tba.recipe import Recipe
from tba.runtime.needs import needs
from tba.runtime.prompt_sets import prompts_of
from tba.runtime.teaching import ScoredByText, reference_of, require_scorers, teachers_of
from tba.schedules import Constant
from tba.training.teacher import Teacher
from tba.types import TEACHER, Completion, Prompt, StopReason, TopScores, Version


@dataclass
class Scoring:
    """Scores the tokens it is sent, all but the first, in the form that is asked for."""

    model: FrozenReference

    def __call__(self, n: int, request: dict[str, Any]) -> Reply:
        first_token, *tokens = request["prompt"]
        prompt = Prompt("t", np.array([first_token], np.int32))
        whole = Completion(np.array(tokens, np.int32), "", StopReason.LENGTH, (Version(), Version()))
        log_T = self.model.log_probabilities_of([(prompt, [whole])])[0][0].tolist()
        choice: dict[str, Any] = {"text": "", "index": 0}
        if request.get("echo"):
            choice["logprobs"] = {"token_logprobs": [None, *log_T, -1.0], "tokens": ["?"] * (len(tokens) + 2)}
        else:
            rivals = {"0": {"logprob": -30.0, "rank": 9}}
            scored = zip(tokens, log_T, strict=True)
            choice["prompt_logprobs"] = [None, *({**rivals, str(t): {"logprob": log, "rank": 1}} for t, log in scored)]
        if (count := request.get("prompt_logprobs", 0)) > 1:
            top = self.model.with_top(count).log_probabilities_of([(prompt, [whole])])[0][0]
            columns = zip(choice["prompt_logprobs"][1:], tokens, top.ids_MK.tolist(), top.logs_MC.tolist(), strict=True)
            for entry, token, ids, logs in columns:
                named = {str(i): {"logprob": log, "rank": 1} for i, log in zip(ids, logs[:-1], strict=True)}
                entry.pop("0")  # the rival above
                entry.update({name: score for name, score in named.items() if name != str(token)})
        return 200, {}, json.dumps({"choices": [choice]}).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def taught(server: Server, policy_path: str, teacher_path: str, **changes: Any) -> Recipe:
    server.script = Scoring(HuggingFace(teacher_path, device="cpu").reference(1.0, Version()))
    endpoint = tba.Endpoint(url=server.url, model="m", pause=0.0, retries=2, token_variable="MY_TOKEN")
    teacher = tba.EndpointTeacher(endpoint, teacher_path, **changes)
    by_token = SubtrajectoryBalance(Constant(1.0), flow="one")
    return replace(of_models(policy_path), objective=by_token, teacher=Teacher(models=(teacher,), reward=False))


def answers(recipe: Recipe) -> list[tuple[Prompt, list[Completion]]]:
    tokenizer, at = recipe.model.tokenizer(), (Version(), Version())
    end = [tokenizer.eos_token_id or 0]
    answer_tokens = [(tokenizer.encode(text) + end, StopReason.EOS) for text in ("14", "7", "123")]
    completions = [Completion(np.array(tokens, np.int32), "", reason, at) for tokens, reason in answer_tokens]
    return [(prompt, completions) for prompt in prompts_of(recipe, recipe.model, "train")[:3]]


@pytest.mark.parametrize("scores", ["prompt_logprobs", "echo"])
def test_a_server_s_teacher_scores_token_by_token_as_the_model_itself_does(
    server: Server, scores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    recipe = taught(server, model_at(tmp_path / "own", 0), model_at(tmp_path / "theirs", 1), scores=scores)
    require_scorers(recipe, recipe.model, lambda line: None)
    scoring = server.script
    server.script = lambda n, request: scoring(n, request) if n else (503, {}, b"{}")  # the first is asked again
    (teacher,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    pairs = answers(recipe)
    scores = [row for rows in teacher.log_probabilities_of(pairs) for row in rows]
    model = HuggingFace(str(tmp_path / "theirs"), device="cpu").reference(1.0, Version())
    expected = [row for rows in model.log_probabilities_of(pairs) for row in rows]
    for score, expected_score in zip(scores, expected, strict=True):
        np.testing.assert_allclose(score, expected_score, rtol=1e-5, atol=1e-5)  # of about 3, summed in another order
    assert len(server.asked) == len(expected) + 1
    assert set(server.tokens) == {"Bearer s3cret"}
    assert "s3cret" not in repr(recipe)
    plain_parts = {need.part for need in needs(of_models(str(tmp_path / "own")))}
    assert {need.part for need in needs(recipe)} == plain_parts - {"reference"}  # which has no part in the target


def test_a_server_s_top_tokens_are_those_of_the_model_itself(server: Server, tmp_path: Path) -> None:
    recipe = taught(server, model_at(tmp_path / "own", 0), model_at(tmp_path / "theirs", 1))
    recipe = replace(recipe, objective=Distil(), teacher=replace(recipe.teachers, top=4))
    (teacher,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    model = HuggingFace(str(tmp_path / "theirs"), device="cpu").reference(1.0, Version())
    assert isinstance(model, FrozenReference)
    expected_rows = model.with_top(4).log_probabilities_of(answers(recipe))
    for row, expected_row in zip(teacher.log_probabilities_of(answers(recipe)), expected_rows, strict=True):
        for scores, expected in zip(row, expected_row, strict=True):
            assert isinstance(scores, TopScores)
            np.testing.assert_allclose(scores.log_T, expected.log_T, rtol=1e-5, atol=1e-5)
            order, expected_order = (np.argsort(s.ids_MK, 1, kind="stable") for s in (scores, expected))
            ids = [np.take_along_axis(s.ids_MK, o, 1) for s, o in ((scores, order), (expected, expected_order))]
            assert np.array_equal(*ids)
            probabilities = [np.exp(s.logs_MC.astype(float)) for s in (scores, expected)]
            np.testing.assert_allclose(probabilities[0][:, -1], probabilities[1][:, -1], atol=2e-3)  # half precision
    taught_by_echo = tba.EndpointTeacher(tba.Endpoint(url=server.url, model="m"), "x", scores="echo")
    with pytest.raises(UserError, match="names no top tokens"):
        taught_by_echo.reference(1.0, Version()).with_top(4)


def test_of_a_server_that_names_fewer_tokens_these_are_used(server: Server, tmp_path: Path) -> None:
    settings = tba.Endpoint(url=server.url, model="m", pause=0.0)
    teacher = tba.EndpointTeacher(settings).reference(1.0, Version()).with_top(4)
    at = (Version(), Version())
    pair = Prompt("t", np.array([1], np.int32)), Completion(np.array([2], np.int32), "", StopReason.EOS, at)
    entry = {"2": {"logprob": math.log(0.25)}, "9": {"logprob": math.log(0.5)}}
    server.script = lambda n, request: (200, {}, json.dumps({"choices": [{"prompt_logprobs": [None, entry]}]}).encode())
    scores = teacher.log_probabilities_of([(pair[0], [pair[1]])])[0][0]
    assert isinstance(scores, TopScores)
    assert scores.ids_MK.tolist() == [[9, 2, 9, 9]]
    assert np.exp(scores.logs_MC.astype(float))[0].tolist() == pytest.approx([0.5, 0.25, 0, 0, 0.25], abs=1e-3)


def test_a_server_s_teacher_with_another_tokenizer_scores_texts(server: Server, tmp_path: Path) -> None:
    path = model_at(tmp_path / "own", 0)
    recipe = replace(
        taught(server, path, renamed(path, tmp_path / "other")), objective=TrajectoryBalance(Constant(1.0))
    )
    (teacher,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    assert isinstance(teacher, ScoredByText)
    pairs = answers(recipe)
    expected = recipe.model.reference(1.0, Version()).log_probabilities_of(pairs)
    for scores, rows in zip(teacher.log_probabilities_of(pairs), expected, strict=True):
        assert [float(row.sum()) for row in scores] == pytest.approx([float(row.sum()) for row in rows], abs=1e-4)


def test_a_run_that_is_cut_off_asks_the_server_for_no_answer_twice(server: Server, tmp_path: Path) -> None:
    recipe = taught(server, model_at(tmp_path / "own", 0), model_at(tmp_path / "theirs", 1))
    path, run = tmp_path / "run", ("--steps", "12", "--sync-every", "2", "--run.checkpoint-every", "4")
    changes: dict[str, Any] = {name: getattr(recipe, name) for name in ("task", "model", "objective", "teacher")}
    changes |= {"exploration": Cut(path, 6, [])}
    with pytest.raises(PowerCut):
        inline(path, *run, "--replay.pacing.warm-up", "32", **changes)
    uids_before = uids_of(path)
    inline_again(path, **changes)
    rows = trajectories(path)
    assert set(uids_before) < {t.uid for t in rows}
    assert all(t.arrays[TEACHER].shape == (1, t.length) for t in rows)
    rounds = {(t.uid[:24], t.prompt.key, t.completion.digest) for t in rows}  # an answer is scored once in a round
    assert len(server.asked) == len(rounds)


def test_what_a_server_cannot_give_ends_in_a_sentence(server: Server, tmp_path: Path) -> None:
    policy_path = model_at(tmp_path / "own", 0)
    recipe = taught(server, policy_path, policy_path)
    (teacher,) = teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model))
    replies: list[tuple[Reply, str]] = [
        ((200, {}, b'{"choices": [{"text": "?"}]}'), "does not give the log-probabilities of the tokens it was sent"),
        ((200, {}, b'{"choices": [{"prompt_logprobs": [null]}]}'), "does not give the log-probabilities"),
        ((401, {}, b"{}"), "put the token into the environment variable MY_TOKEN"),
        ((503, {}, b"{}"), "did not answer in 3 calls"),
    ]
    for reply, sentence in replies:
        server.script = lambda n, request, reply=reply: reply
        with pytest.raises(TbaError, match=sentence):
            teacher.log_probabilities_of(answers(recipe))
    (prompt, (whole, *_)), *_ = answers(recipe)
    mask, begins = np.arange(len(whole.tokens)) != 1, np.array([1], np.int32)
    with pytest.raises(UserError, match=r"2 segments, .* but a teacher behind an endpoint scores one text"):
        teacher.log_probabilities_of([(prompt, [replace(whole, mask=mask, begins=begins)])])
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

    server.script = lambda n, request: reply(score)
    with pytest.raises(UserError, match=r"the log-probabilities .* each a number from -100,000 to 0\)"):
        teacher.log_probabilities_of([(pair[0], [pair[1]])])
    for stated, right in ((-1.5, -1.5), (0, 0.0), (-9999.0, -9999.0), (1e-6, 0.0), (-math.inf, -math.inf)):
        server.script = lambda n, request, stated=stated: reply(stated)
        assert teacher.log_probabilities_of([(pair[0], [pair[1]])])[0][0].tolist() == [right]
