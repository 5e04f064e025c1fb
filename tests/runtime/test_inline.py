"""The inline runtime: the algorithm, step by step; and what a run leaves, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import TASK, distance, final_weights, inline, inline_again, made, quiet, steps_of

from tba.batch import collate
from tba.engines.transformers import EngineSettings
from tba.errors import UserError
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.recipe import Recipe, RuntimeSettings
from tba.record.run_record import RunRecord
from tba.replay.buffer import BufferSettings
from tba.replay.pacing import Pacing
from tba.replay.replay import ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rollout.exploration import Fixed
from tba.rollout.prompts import encode
from tba.runtime.inline import Inline
from tba.runtime.reporting import summarise
from tba.runtime.stop_requests import stop_requests
from tba.schedules import Constant, WarmupConstant
from tba.tasks.arithmetic import Arithmetic
from tba.training.optimizer import OptimizerSettings
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import Completion, Group, Judgement, Prompt, Sampling, Trajectory, Version
from toy.policy import WEIGHT, TabularPolicy, TabularTask, distribution, ideal, total_variation

B, K, LR, BETA, TEMPERATURE = 2, 6, 0.02, 0.3, 0.8
ON_POLICY: dict[str, Any] = {  # k = 1, m = 1, nothing but the newest weights' own samples, S = K, B prompts a round
    "objective": TrajectoryBalance(Constant(BETA), off_policy="none"),
    "exploration": Fixed(1.1, 0.95),
    "optimizer": OptimizerSettings(lr=LR, schedule=WarmupConstant(0)),
    "replay": ReplaySettings(RecencyReward(m=1.0), Pacing(warm_up=0), BufferSettings(deduplicate=False)),
    "groups_per_step": B,
    "group_size": K,
    "samples_per_prompt": K,
    "prompts_per_round": B,
    "sync_every": 1,
    "policy_temperature": TEMPERATURE,
}


def toy(folder: Path) -> dict[str, Any]:
    """The enumerable toy: both its prompts in every round."""
    return {}


def llama(folder: Path) -> dict[str, Any]:
    """A random Llama on one-digit sums."""
    task = Arithmetic(digits=1, train_problems=40, eval_problems=1)
    tokenizer = character_tokenizer(task.alphabet)
    ScratchModel(hidden_size=16, layers=1, heads=2, ff_size=24, max_positions=16).start(tokenizer).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    model = HuggingFace(str(folder), device="cpu", generation=EngineSettings(slots=5, max_completion_tokens=4))
    return {"task": task, "model": model}


def plain_loop(recipe: Recipe) -> dict[str, torch.Tensor]:
    """On-policy Trajectory Balance, written out: sample, judge, score, one AdamW update, copy the weights up."""
    task, model, seed = recipe.task, recipe.model, recipe.seed
    policy, engine = model.policy(TEMPERATURE), model.engine(Version())
    reference, reward = model.reference(TEMPERATURE, Version()), task.reward()
    prompts = encode(task.problems("train"), task.name, model.tokenizer(), recipe.prompts).prompts
    adamw = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0, fused=True)
    sampling = np.random.default_rng([seed, 1, 0])
    for step in range(1, recipe.steps + 1):
        step_prompts = []
        for position in range((step - 1) * B, step * B):
            epoch, index = divmod(position, len(prompts))
            step_prompts.append(prompts[np.random.default_rng([seed, epoch]).permutation(len(prompts))[index]])
        answered = generate(engine, step_prompts, K, Sampling(1.1, 0.95), sampling)
        groups = []
        for prompt, completions in zip(step_prompts, answered, strict=True):
            marks = reward.judge([(prompt, c) for c in completions])
            (scores,) = reference.log_probabilities_of([(prompt, completions)])
            groups.append(
                Group.of(
                    [
                        Trajectory(sampling.bytes(16).hex(), prompt, c, mark.reward, score, Version())
                        for c, mark, score in zip(completions, marks, scores, strict=True)
                    ]
                )
            )
        batch = collate(groups[::-1])  # the newest first
        distinct_rows, place = [], []  # the same answer to the same prompt is evaluated once
        seen: dict[tuple[int, ...], int] = {}
        for row, tokens in enumerate(batch.completion_BT.tolist()):
            key = (int(batch.group_B[row]), int(batch.length_B[row]), *tokens)
            if key not in seen:
                seen[key] = len(distinct_rows)
                distinct_rows.append(row)
            place.append(seen[key])
        log_policy_BT = policy.evaluate(batch.select(torch.tensor(distinct_rows))).log_policy_BT[place]
        log_ratio_B = (log_policy_BT - batch.log_reference_BT).sum(1)
        gap_B = batch.reward_B / BETA - log_ratio_B
        log_z_B = (torch.zeros(B).index_add(0, batch.group_B, gap_B.detach()) / K)[batch.group_B]
        loss = (BETA / 2 * (gap_B - log_z_B).square()).mean()
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adamw.step()
        engine.load(policy.weights(), Version(0, step))
    return {name: tensor.clone() for name, tensor in policy.weights().items()}


@pytest.mark.parametrize("setting", [toy, llama])
def test_on_policy_it_equals_a_plain_loop_bit_for_bit(
    tmp_path: Path, setting: Callable[[Path], dict[str, Any]]
) -> None:
    changes = {**ON_POLICY, **setting(tmp_path / "model"), "steps": 12, "seed": 5}
    summary = inline(tmp_path / "run", **changes)
    recipe, _ = made(tmp_path / "again", **changes)
    plain, weights = plain_loop(recipe), final_weights(tmp_path / "run")
    assert summary.lag.max == 0
    assert summary.trajectories.trained_once == summary.trajectories.generated == 12 * B * K
    for name, tensor in weights.items():
        assert torch.equal(tensor, plain[name]), name
    start = recipe.model.policy(TEMPERATURE).weights()
    assert max((plain[name] - start[name]).abs().max() for name in weights) > LR


SMALL = ("--steps", "20", "--samples-per-prompt", "8", "--replay.pacing.warm-up", "16", "--evaluation.problems", "1")


def test_equal_seeds_give_equal_weights_and_another_seed_other_weights(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        inline(tmp_path / name, *SMALL, "--seed", str(seed))
        weights.append(final_weights(tmp_path / name)[WEIGHT])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    rows = [RunRecord.read(tmp_path / name).metrics for name in ("a", "b")]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]


ORACLE = (
    *("--objective.beta.value", "0.25", "--optimizer.lr", "0.1", "--evaluation.problems", "1"),
    *("--groups-per-step", "4", "--group-size", "16", "--samples-per-prompt", "32"),
)


@pytest.mark.parametrize(
    ("steps", "data"),
    [
        ("250", ("--exploration.temperature", "1e6", "--sync-every", "20")),  # uniformly random, and old
        ("350", ("--replay.selection.inverse-temperature", "4", "--sync-every", "5")),  # its own, chosen by reward
    ],
)
def test_it_reaches_the_ideal_policy_of_the_toy_from_old_random_and_selected_data(
    tmp_path: Path, steps: str, data: tuple[str, ...]
) -> None:
    start = total_variation(distribution(TabularPolicy(TASK)), ideal(TASK, 0.25))
    assert start[: TASK.prompts].min() > 0.4
    summary = inline(tmp_path / "run", *ORACLE, "--steps", steps, "--optimizer.schedule.steps", steps, *data)
    assert distance(tmp_path / "run", 0.25) <= 0.02
    assert summary.lag.mean >= 10
    assert summary.tokens.closes()
    assert summary.trajectories.closes()


@dataclass(frozen=True)
class SometimesNot:
    """The toy's reward, but not a number for answers of two tokens."""

    task: TabularTask = TASK

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        marks = self.task.reward().judge(answered)
        nan = Judgement(float("nan"))
        return [nan if len(c.tokens) == 2 else mark for (_, c), mark in zip(answered, marks, strict=True)]


@dataclass(frozen=True)
class Marked:
    """The toy with another reward."""

    marking: Any
    name: str = "tabular"

    def problems(self, split: Any) -> Any:
        return TASK.problems(split)

    def reward(self) -> Any:
        return self.marking


def test_the_ledger_closes_with_every_term_in_it(tmp_path: Path) -> None:
    few = ("--replay.buffer.per-prompt", "20", "--group-size", "4", "--steps", "7", "--samples-per-prompt", "40")
    summary = inline(tmp_path / "run", *SMALL, *few, task=Marked(SometimesNot()))
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
        for term in ("generated", "trained_once", "waiting", "evicted", "rejected", "duplicate", "evaluation"):
            assert getattr(ledger, term) > 0, (term, ledger)
    assert summary.trajectories.trained_total == 7 * 2 * 4
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (written["tokens"], written["trajectories"]) == (asdict(summary.tokens), asdict(summary.trajectories))


@dataclass(frozen=True)
class CtrlC:
    """Draws plain settings; in its n-th round somebody presses Ctrl-C."""

    rounds: list[int]
    n: int

    def draw(self, rng: np.random.Generator) -> Sampling:
        self.rounds.append(1)
        if len(self.rounds) == self.n:
            os.kill(os.getpid(), signal.SIGINT)
        return Sampling()

    full_support = True
    greedy = False


@pytest.mark.parametrize("n", [1, 9])  # in the warm-up, and later
def test_ctrl_c_ends_a_run_with_a_checkpoint_a_summary_and_a_ledger_that_closes(tmp_path: Path, n: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    summary = inline(tmp_path / "run", "--evaluation.problems", "1", exploration=CtrlC([], n))
    assert signal.getsignal(signal.SIGINT) is before
    assert summary.faults["stopped"] is True
    assert summary.steps == steps_of(tmp_path / "run") < 600
    assert (summary.steps > 0) == (n > 1)
    assert final_weights(tmp_path / "run")
    assert summary.tokens.closes()
    assert summary.trajectories.closes()


@dataclass
class StoppedAfter:
    """The toy's own marks; at the first of them after step `last` somebody asks us to end."""

    path: Path
    last: int
    signal_count: int = 0

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        if not self.signal_count and steps_of(self.path) >= self.last:
            self.signal_count += 1
            os.kill(os.getpid(), signal.SIGTERM)
        return TASK.reward().judge(answered)


@pytest.mark.parametrize(("last", "code"), [(3, 143), (10, 0)])  # in a round, and in the last evaluation
def test_a_signal_decides_the_exit_code_only_before_the_last_step(tmp_path: Path, last: int, code: int) -> None:
    path = tmp_path / "run"
    reward = StoppedAfter(path, last)
    recipe, run = made(path, *SMALL, "--steps", "10", task=Marked(reward))
    runtime = Inline(recipe, run, quiet)
    summary = summarise(recipe, run, ["searcher-0"], runtime.go(), 0.0)
    assert (reward.signal_count, runtime.exit_code, summary.faults["stopped"]) == (1, code, True)
    assert (summary.steps == 10) == (code == 0)
    assert {e.version.step for e in summary.evaluations} == {0}
    again = inline_again(path)
    assert (again.steps, again.faults["stopped"]) == (10, False)
    assert {e.version.step for e in again.evaluations} == {0, 10}


def test_the_first_ctrl_c_is_a_request_and_the_second_an_interrupt() -> None:
    with stop_requests() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        assert stop.exit_code == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


class Broken:
    """A reward with a mistake in it."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        raise ZeroDivisionError("no marks today")


def test_a_reward_that_raises_ends_the_run_with_its_own_error_and_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="no marks today"):
        inline(tmp_path / "run", task=Marked(Broken()))
    assert "no marks today" in (tmp_path / "run" / "logs" / "inline.log").read_text()
    assert not list((tmp_path / "run").glob("journal.sqlite-wal"))  # closed by the last connection


def test_time_is_accounted_to_who_spends_it(tmp_path: Path) -> None:
    """Taking turns, the trainer idles while the searcher works and the other way round."""
    inline(tmp_path / "run", *SMALL)
    trainer = json.loads((tmp_path / "run" / "logs" / "trainer.result.json").read_text())["clock"]
    searcher = json.loads((tmp_path / "run" / "logs" / "searcher-0.result.json").read_text())["clock"]
    assert trainer["idle"] > 0
    assert trainer["busy"] > 0
    assert searcher["idle"] > 0
    assert searcher["generating"] > 0
    assert searcher["eval"] > 0
    assert searcher["idle"] >= trainer["busy"] * 0.5


def test_threads_are_those_of_the_setting(tmp_path: Path) -> None:
    threads = torch.get_num_threads() + 1
    inline(tmp_path / "run", *SMALL, run=RuntimeSettings(threads=threads))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("field", "value"), [("threads", 0), ("checkpoints", 0), ("idle_deadline", 0.0), ("restarts", -1)]
)
def test_a_runtime_that_could_not_end_well_is_refused_before_it_begins(field: str, value: float) -> None:
    with pytest.raises(UserError, match=field.replace("_", "-")):
        RuntimeSettings(**{field: value})
