"""Rewards that the loss cannot square: their answers are rejected and counted, and the run goes on."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from runs import TASK, inline, inline_again, made, quiet

from tba.errors import UserError
from tba.objectives.grpo import Grpo
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Reward, Task
from tba.replay.follower import JournalFollower
from tba.rewards.functions import FunctionReward
from tba.runtime.inline import Inline
from tba.schedules import Constant, Linear, LinearThenCut
from tba.settings import find
from tba.types import LEFT_OUT, Problem, Split, StopReason, Version

TOY = find(str(Path(__file__).parents[1] / "toy" / "recipe.py"))


def huge_for_a(prompt: str, completion: str) -> float:
    """1e20 for answers that begin with A, and 1 or 0 for the others."""
    return 1e20 if completion.startswith("A") else float(completion.startswith("B"))


def huge(prompt: str, completion: str) -> float:
    return -1e308


@dataclass(frozen=True)
class Marked:
    """The toy's prompts with another reward."""

    function: Reward
    name: str = "tabular"

    def problems(self, split: Split) -> list[Problem]:
        return list(TASK.problems(split))

    def reward(self) -> Reward:
        return self.function


def marked_by(function: Reward) -> Task:
    return Marked(function)


SMALL = ("--steps", "6", "--replay.pacing.warm-up", "16", "--run.checkpoint-every", "2")


def test_a_run_goes_on_without_the_answers_whose_reward_is_too_large_and_is_taken_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = marked_by(FunctionReward(huge_for_a))
    with caplog.at_level(logging.WARNING, "tba.searcher"):
        summary_before = inline(tmp_path / "run", *SMALL, task=task)
    again = inline_again(tmp_path / "run", "--steps", "10", task=task)
    for summary, steps in ((summary_before, 6), (again, 10)):
        assert summary.tokens.closes()
        assert summary.trajectories.closes()
        assert summary.trajectories.rejected > 0
        assert summary.steps == steps
    assert again.trajectories.rejected > summary_before.trajectories.rejected
    with JournalFollower(tmp_path / "run" / "journal.sqlite") as journal:
        rows = journal.drain()
    assert {t.reward for t in rows} == {0.0, 1.0}
    assert (
        len(rows) == again.trajectories.generated - again.trajectories.rejected - again.trajectories.in_flight_at_stop
    )
    assert "FunctionReward gave 1e+20 (huge_for_a 1e+20) for the answer 'A" in caplog.text
    assert "to the prompt 'b'" in caplog.text


def test_where_every_answer_is_rejected_the_run_ends_in_a_sentence_after_its_first_rounds(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run", *SMALL, task=marked_by(FunctionReward(huge)))
    with pytest.raises(UserError, match=r"all answers of the first 10 rounds are rejected") as caught:
        Inline(recipe, run, quiet).go()
    assert "FunctionReward gave -1e+308 (huge -1e+308) for the answer" in str(caught.value)
    assert "a reward from -5e+08 to 5e+08" in str(caught.value)
    with JournalFollower(tmp_path / "run" / "journal.sqlite") as journal:
        counts = journal.counters()["searcher-0"]
        assert journal.drain() == []
    assert counts["rejected_trajectories"] == counts["generated_trajectories"] == 10 * 2 * 32
    mended = inline_again(tmp_path / "run", task=marked_by(FunctionReward(huge_for_a)))
    assert mended.steps == 6
    assert mended.trajectories.closes()


def test_with_hidden_text_a_rejected_answer_is_named_by_key_digest_and_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers may be attacks that work: neither the log nor the error that ends the run has one."""
    task = marked_by(FunctionReward(huge))
    recipe, run = made(tmp_path / "run", *SMALL, "--record.hide-text", task=task)
    with caplog.at_level(logging.WARNING, "tba.searcher"), pytest.raises(UserError) as caught:
        Inline(recipe, run, quiet).go()
    named = re.compile(
        r"FunctionReward gave .* for the answer [0-9a-f]{16} of \d+ tokens to the prompt [0-9a-f]{16}(;|$)"
    )
    messages = [record.getMessage() for record in caplog.records if record.name == "tba.searcher"]
    assert len(messages) == 10
    assert all(named.search(message) for message in (*messages, str(caught.value)))


def test_the_largest_reward_is_a_thousand_million_times_the_smallest_beta() -> None:
    def largest(objective: object) -> float:
        return replace(TOY, objective=objective).largest_reward

    assert largest(TrajectoryBalance(Constant(0.5))) == 5e8
    assert largest(TrajectoryBalance(Linear(0.012, 0.004, 500))) == 4e6
    assert largest(TrajectoryBalance(LinearThenCut(1.0, 0.05, 128, 32))) == 5e7
    assert largest(TrajectoryBalance(Constant(0.5), reward_temperature=Linear(2.0, 4.0, 9))) == 1e9
    assert largest(Grpo(Constant(0.0))) == 1e9  # nothing is divided by it


def test_a_reward_at_the_bound_is_learnt_from(tmp_path: Path) -> None:
    """Its square, and its gradient's norm, are numbers: no step is skipped."""

    def at_the_bound(prompt: str, completion: str) -> float:
        return 5e8 if completion.startswith("A") else -5e8

    summary = inline(tmp_path / "run", *SMALL, task=marked_by(FunctionReward(at_the_bound)))
    assert summary.steps == 6
    assert summary.trajectories.rejected == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in metrics] == [0.0] * 6
    assert max(line["residual"] for line in metrics) > 1e8


def test_long_answers_are_trained_with_a_penalty_and_evaluated_without(tmp_path: Path) -> None:
    measured = ("--evaluation.threshold", "0.3", "--evaluation.samples", "50")
    penalised = inline(tmp_path / "run", *SMALL, *measured, "--overlong-penalty", "0.5")
    with JournalFollower(tmp_path / "run" / "journal.sqlite") as journal:
        rows = journal.drain()
    reward, most = TASK.reward(), TASK.length
    for t in rows:
        (judgement,) = reward.judge([(t.prompt, t.completion)])
        share = 1.0 if t.completion.stop_reason is StopReason.LENGTH else max(0.0, t.length / most - 0.8) / 0.2
        assert t.reward == pytest.approx(judgement.reward - 0.5 * share)
    assert len({t.reward_parts["overlong"] for t in rows}) == 2  # there are long answers and short ones
    assert np.mean([t.reward for t in rows]) == pytest.approx(
        sum(np.mean([t.reward_parts[part] for t in rows]) for part in ("task", "overlong"))
    )  # so do the run's metrics of the parts: means over all
    plain = inline(tmp_path / "plain", *SMALL, *measured)
    before, same = ({e.metric: e.value for e in s.evaluations if e.version == Version()} for s in (penalised, plain))
    assert before == same
    assert before["pass@1/sampled"] > 0.3


def test_answers_that_are_cut_off_are_left_out_and_counted_where_that_is_asked_for(tmp_path: Path) -> None:
    measured = ("--evaluation.samples", "50")
    dropped = inline(tmp_path / "run", *SMALL, *measured, "--overlong-penalty", "drop")
    plain = inline(tmp_path / "plain", *SMALL, *measured)
    counts = {}
    for name in ("run", "plain"):
        with JournalFollower(tmp_path / name / "journal.sqlite") as journal:
            answers = journal.drain()
        counts[name] = [t.completion.stop_reason is StopReason.LENGTH for t in answers]
        assert any(t.provenance.get(LEFT_OUT) for t in answers) == (name == "run")
    assert not any(counts["run"])
    assert any(counts["plain"])
    account = dropped.trajectories
    assert account.closes()
    assert account.rejected == account.generated - len(counts["run"]) - account.in_flight_at_stop > 0
    assert dropped.tokens.closes()
    assert plain.trajectories.rejected == 0
    before, same = ({e.metric: e.value for e in s.evaluations if e.version == Version()} for s in (dropped, plain))
    assert before == same  # an evaluation leaves nothing out
