"""The judge that waits and fails as it is set to, and the account of its verdicts."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tba.errors import UserError
from tba.types import Completion, Prompt, StopReason, Version
from tba_lab.judge import Call, Judge, JudgedSums, account, exact, read_calls


def answered(text: str) -> tuple[Prompt, Completion]:
    prompt = Prompt("sums", np.array([1], np.int32), "1+2=", {"answer": "3"})
    version = Version(0, 0)
    return prompt, Completion(np.array([1], np.int32), text, StopReason.EOS, (version, version))


def test_each_call_is_logged_with_its_verdict(tmp_path: Path) -> None:
    reward = Judge(log=tmp_path / "calls").reward(exact)
    assert [j.reward for j in reward.judge([answered("3"), answered("4")])] == [1.0, 0.0]
    assert [(c.prompt, c.answer, c.value) for c in read_calls(tmp_path / "calls")] == [
        ("1+2=", "3", 1.0),
        ("1+2=", "4", 0.0),
    ]


def test_a_coroutine_judges_alike(tmp_path: Path) -> None:
    reward = Judge(coroutine=True, log=tmp_path).reward(exact)
    assert inspect.iscoroutinefunction(reward.function)
    assert asyncio.run(reward.function(prompt="1+2=", completion="3", answer="3")) == 1.0
    assert [c.value for c in read_calls(tmp_path)] == [1.0]


def test_a_call_that_raises_has_no_verdict(tmp_path: Path) -> None:
    reward = Judge(raises=1.0, log=tmp_path).reward(exact)
    with pytest.raises(UserError, match="the judge fails, as it is set to"):
        reward.judge([answered("3")])
    assert account(Counter(), read_calls(tmp_path)).failed == 1


def test_shares_and_the_mean_of_seconds_are_what_was_set() -> None:
    judge = Judge(seconds=2.0, spread=0.5, raises=0.2, hangs=0.1)
    draws = [judge.draw() for _ in range(20_000)]
    share = {end: sum(e == end for _, e in draws) / len(draws) for end in ("value", "error", "hangs")}
    assert share["error"] == pytest.approx(0.2, abs=6 * (0.16 / 20_000) ** 0.5)  # six standard errors
    assert share["hangs"] == pytest.approx(0.1, abs=6 * (0.09 / 20_000) ** 0.5)
    seconds = [s for s, end in draws if end != "hangs"]
    deviation = 2.0 * (np.exp(0.25) - 1) ** 0.5  # of the log-normal
    assert np.mean(seconds) == pytest.approx(2.0, abs=6 * deviation / len(seconds) ** 0.5)


def test_held_out_answers_never_wait() -> None:
    task = JudgedSums(judge=Judge(seconds=1e9))
    assert task.examination().judge([answered("3")])[0].reward == 1.0


def test_verdicts_without_a_row_are_lost_unless_the_run_ended_just_then() -> None:
    call = Call("1+2=", "3", "value", began=0.0, ended=1.0, value=1.0)
    calls = [
        call,
        replace(call, ended=2.0),
        replace(call, ended=50.0),
        replace(call, end="hangs", ended=None, value=None),
    ]
    sums = account(Counter({("1+2=", "3"): 1}), calls, deadline=30.0)
    assert (sums.verdicts, sums.lost, sums.interrupted, sums.late, sums.hung) == (2, 1, 0, 1, 1)
    sums = account(Counter({("1+2=", "3"): 1}), calls, deadline=30.0, spans=[(1.9, 2.0)])
    assert (sums.lost, sums.interrupted) == (0, 1)
    assert account(Counter({("1+2=", "4"): 1}), calls).invented == 1
