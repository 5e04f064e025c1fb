"""Runs with teachers or another reference: who scores, what is kept of it, what a kill leaves of it."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy_distilled
import toy_taught
from counting_teacher import FILE, SCORED
from runs import TASK, children, command, final_weights, inline, inline_again, steps_of, until
from test_resume import SECONDS, SHORT, Cut, PowerCut, assert_whole, uids_of
from toy_taught import teachers, weights

from tba.__main__ import main
from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.objectives.distil import Distil
from tba.objectives.raft import Raft
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.recipe import Recipe
from tba.recipes.quickstart import BASE
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runs.importing import import_answers
from tba.runs.resuming import resume_point
from tba.runtime.needs import needs
from tba.runtime.prompt_sets import prompts_of
from tba.runtime.run_directory import RunDirectory
from tba.runtime.teaching import NoReference, reference_of, require_scorers, teachers_of
from tba.schedules import Constant, Linear
from tba.settings import find
from tba.tasks.arithmetic import Arithmetic
from tba.training.teacher import Teacher
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import TEACHER, Completion, Sampling, StopReason, Trajectory, Version, teacher_arrays
from toy.policy import WEIGHT, TabularPolicy, TabularReference, distribution, total_variation

TAUGHT = Path(toy_taught.__file__)
RUN = ("--replay.pacing.warm-up", "32", "--run.checkpoint-every", "20")
FAST = (*("--steps", "250", "--optimizer.schedule.steps", "250", "--optimizer.lr", "0.1", "--groups-per-step", "4"),)


def trajectories(path: Path) -> list[Trajectory]:
    with JournalFollower(path / "journal.sqlite") as journal:
        return journal.drain()


class Anything(Cut):
    """Answers that are as likely as any others."""

    def draw(self, rng: np.random.Generator) -> Sampling:
        super().draw(rng)
        return Sampling(temperature=1e6)


def assert_scored(rows: list[Trajectory]) -> None:
    """Every answer has the log-probabilities of both teachers, bit by bit."""
    references = [TabularReference(teacher) for teacher in teachers]
    for t in rows:
        expected = [reference.log_probabilities(t.prompt, [t.completion])[0] for reference in references]
        assert np.array_equal(t.arrays[TEACHER], np.stack(expected))


def test_a_run_with_teachers_that_is_cut_off_scores_nothing_twice_loses_nothing_and_reaches_their_target(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    exploration = Anything(path, 50, [])
    SCORED.clear()
    with pytest.raises(PowerCut):
        inline(path, *RUN, *FAST, source=TAUGHT, exploration=exploration)
    uids_before = uids_of(path)
    summary = inline_again(path, exploration=exploration)
    assert_whole(path, summary, uids_before)
    rows = trajectories(path)
    assert_scored(rows)
    assert len(SCORED) == len(teachers) * scored_once_a_round(rows).total()
    logs = [distribution(TabularPolicy(task, 1.0, torch.float64)).log() for task in (TASK, *teachers)]
    reward = torch.from_numpy(TASK.rewards_QO) / 0.5
    target = ((1 - sum(weights)) * logs[0] + weights[0] * logs[1] + weights[1] * logs[2] + reward).softmax(1)
    policy = TabularPolicy(TASK)
    policy.load({WEIGHT: final_weights(path)[WEIGHT]})
    assert float(total_variation(distribution(policy), target)[: TASK.prompts].max()) <= 0.02


def test_a_distilled_run_that_is_cut_off_scores_nothing_twice_and_no_reference_and_reaches_its_teacher(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    exploration = Anything(path, 50, [])
    SCORED.clear()
    with pytest.raises(PowerCut):
        inline(path, *RUN, *FAST, source=Path(toy_distilled.__file__), exploration=exploration)
    uids_before = uids_of(path)
    summary = inline_again(path, exploration=exploration)
    assert_whole(path, summary, uids_before)
    rows, reference = trajectories(path), TabularReference(teachers[0])
    for t in rows:
        expected = teacher_arrays([reference.top_scores(t.prompt, t.completion, TASK.symbols + 1)])
        assert expected.keys() == t.arrays.keys()
        assert all(np.array_equal(t.arrays[name], array) for name, array in expected.items())
        assert not t.log_reference.any()
    assert len(SCORED) == scored_once_a_round(rows).total()
    policy = TabularPolicy(TASK)
    policy.load({WEIGHT: final_weights(path)[WEIGHT]})
    target = distribution(TabularPolicy(teachers[0], 1.0, torch.float64))
    assert float(total_variation(distribution(policy), target)[: TASK.prompts].max()) <= 0.02
    with pytest.raises(UserError, match="answers were not scored under it"):
        resume_point(RunDirectory(path), ["--objective.pull", "0.1"])


def scored_once_a_round(rows: list[Trajectory]) -> Counter[tuple[str, str]]:
    """How often each answer to a prompt has been scored by a teacher, if that was once in each round."""
    rounds = {(t.uid[:24], t.prompt.key, t.completion.digest) for t in rows}
    return Counter((key, digest) for _, key, digest in rounds)


def test_a_run_in_processes_with_teachers_that_is_killed_scores_nothing_twice_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, scored = tmp_path / "run", tmp_path / "scored"
    monkeypatch.setenv(FILE, str(scored))
    run = (*SHORT, *RUN, "--run.synchronous-rounds", "--steps", "1000000")  # in a round no prompt is asked twice
    driver = command("train", str(TAUGHT), "--runs", str(path.parent), "--run-name", path.name, *run)
    try:
        until(lambda: steps_of(path) > 45, SECONDS, "steps")
        assert children(driver.pid)
    finally:
        driver.kill()
        driver.communicate(timeout=SECONDS)
    uids_before = uids_of(path)
    again = command("resume", str(path))
    try:
        done = steps_of(path)
        until(lambda: steps_of(path) > done + 20, SECONDS, "more steps")
    finally:
        again.send_signal(2)
        _, errors = again.communicate(timeout=SECONDS)
        again.kill()
    assert (again.returncode, errors) == (130, "")
    summary = Summary.read(path)
    assert summary is not None
    assert_whole(path, summary, uids_before)
    rows = trajectories(path)
    assert_scored(rows)
    counted = Counter((key, digest) for key, digest in map(str.split, scored.read_text().splitlines()))
    expected_counts = Counter({key: len(teachers) * times for key, times in scored_once_a_round(rows).items()})
    assert expected_counts <= counted
    lost = 2 * len(teachers) * 2 * 32  # of each end a round, of two prompts with 32 answers: scored and not sent
    again_at_least = len(teachers) * scored_once_a_round([t for t in rows if t.uid in set(uids_before)]).total()
    assert (counted - expected_counts).total() <= lost < again_at_least


def test_imported_answers_are_scored_by_the_teachers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"prompt": "a", "response": "{answer}"}}\n' for answer in ("A", "BC", "D", "A")))
    inline(tmp_path / "run", *RUN, "--steps", "1", source=TAUGHT)
    run = RunDirectory.open(tmp_path / "run")
    import_answers(run.recipe(), run, [lines], print)
    assert "the teacher teaches on all of them" in " ".join(capsys.readouterr().out.split())
    rows = [t for t in trajectories(tmp_path / "run") if t.imported]
    assert len(rows) == 4
    assert_scored(trajectories(tmp_path / "run"))


def model_at(folder: Path, seed: int, characters: str | None = None) -> str:
    """A random Llama on one-digit sums."""
    tokenizer = character_tokenizer(characters or Arithmetic(digits=1).alphabet)
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=16, seed=seed).start(
        tokenizer
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def of_models(path: str, **changes: Any) -> Recipe:
    task = Arithmetic(digits=1, train_problems=40, eval_problems=1)
    model = HuggingFace(path, device="cpu", generation=EngineSettings(slots=5, max_completion_tokens=4))
    return replace(find(str(TAUGHT)), task=task, model=model, teacher=Teacher(), **changes)


def test_another_reference_and_a_teacher_score_as_the_models_at_their_paths_do_and_their_memory_counts(
    tmp_path: Path,
) -> None:
    policy_path, other_path = model_at(tmp_path / "own", 0), model_at(tmp_path / "other", 1)
    recipe = of_models(policy_path, reference=other_path)
    recipe = replace(recipe, teacher=Teacher((other_path, policy_path), weights=(0.3, 0.4)))
    assert isinstance(recipe.model, HuggingFace)
    prompt = prompts_of(recipe, recipe.model, "train")[0]
    completion = Completion(prompt.tokens[:3], "", StopReason.LENGTH, (Version(), Version()))
    expected = [
        replace(recipe.model, path=path).reference(1.0, Version()).log_probabilities_of([(prompt, [completion])])[0][0]
        for path in (other_path, policy_path)
    ]
    scorers = [
        reference_of(recipe, recipe.model),
        *teachers_of(recipe, recipe.model, reference_of(recipe, recipe.model)),
    ]
    scores = [scorer.log_probabilities_of([(prompt, [completion])])[0][0] for scorer in scorers]
    assert all(np.array_equal(a, b) for a, b in zip(scores, [expected[0], *expected], strict=True))
    assert not np.array_equal(*expected)
    plain = {need.part: need.total for need in needs(of_models(policy_path))}
    bytes_by_part = {need.part: need.total for need in needs(recipe)}
    assert bytes_by_part == plain | {"teacher 1": plain["reference"], "teacher 2": plain["reference"]}


def test_a_reference_without_a_part_in_the_target_is_neither_loaded_nor_scored(tmp_path: Path) -> None:
    path = model_at(tmp_path / "own", 0)
    recipe = of_models(path)
    alone, shared = (replace(recipe, teacher=Teacher((path,) * count)) for count in (1, 2))
    for of in (alone, shared):
        assert isinstance(reference_of(of, of.model), NoReference)
        assert "reference" not in {need.part for need in needs(of)}
    pulled = replace(recipe, objective=Distil(pull=0.1), teacher=Teacher((path,), top=2, reward=False))
    part = replace(recipe, teacher=Teacher((path,), weights=(0.9,)))
    fading = replace(recipe, teacher=Teacher((path,), schedule=Linear(1.0, 0.0, 10)))
    for of in (recipe, pulled, part, fading, replace(alone, reference_reset=10)):
        assert not isinstance(reference_of(of, of.model), NoReference)
        assert "reference" in {need.part for need in needs(of)}


def test_a_reference_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    policy_path = model_at(tmp_path / "own", 0)
    other_path = model_at(tmp_path / "other", 0, "".join(sorted(Arithmetic(digits=1).alphabet, reverse=True)))
    recipe = of_models(policy_path, reference=other_path)
    for start in (lambda: require_scorers(recipe, recipe.model, print), lambda: reference_of(recipe, recipe.model)):
        with pytest.raises(UserError, match=r"has another tokenizer than the policy \(the vocabularies differ\)"):
            start()


def test_what_cannot_go_together_is_refused() -> None:
    taught = find(str(TAUGHT))
    with pytest.raises(UserError, match="a reset would put the policy in its place"):
        replace(taught, reference="other", reference_reset=10)
    with pytest.raises(UserError, match="Raft has no reference, so that a teacher is none"):
        replace(taught, objective=Raft())
    by_token = SubtrajectoryBalance(Constant(1.0), flow="one")
    alone = Teacher(models=taught.teacher.models[:1], reward=False)
    for wrong in (taught.teacher, replace(alone, reward=True), replace(alone, weights=(0.5,)), Teacher()):
        with pytest.raises(UserError, match="right for one teacher of weight 1 without a reward"):
            replace(taught, objective=by_token, teacher=wrong)
    assert replace(taught, objective=by_token, teacher=alone).teacher.is_target
    top = replace(alone, top=2)
    for wrong in (alone, replace(top, reward=True), replace(top, weights=(0.5,)), replace(taught.teacher, top=2)):
        with pytest.raises(UserError, match="one teacher of weight 1 with the policy's tokenizer, without a reward"):
            replace(taught, objective=Distil(), teacher=wrong)
    with pytest.raises(UserError, match="choose the objective Distil"):
        replace(taught, teacher=top)
    with pytest.raises(UserError, match="give a number of tokens, 0 or more"):
        replace(alone, top=-1)
    with pytest.raises(UserError, match="loads no model from a path"):
        teachers_of(replace(taught, teacher=Teacher(("a",))), taught.model, reference_of(taught, taught.model))


def test_a_reference_that_another_model_has_taken_the_place_of_is_refused_by_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, weights = tmp_path / "reference", tmp_path / "reference" / "model.safetensors"
    shutil.copytree(BASE, reference)
    brief = ("--evaluation.every", "0", "--evaluation.problems", "4", "--replay.pacing.warm-up", "0")
    place = ("--runs", str(tmp_path), "--run-name", "run", "--runtime", "inline", "--reference", str(reference))
    assert main(["train", "quickstart", *place, *brief, "--steps", "1"]) == 0
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run"), "--steps", "2"]) == 2
    assert capsys.readouterr().err == (
        "tba: the reference has other weights than when the run began: put them back where they were, or start a new "
        "run\n"
    )
    weights.write_bytes(content)
    assert main(["resume", str(tmp_path / "run"), "--steps", "2"]) == 0
