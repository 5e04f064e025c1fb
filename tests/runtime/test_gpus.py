"""GPUs are counted without starting CUDA, and left alone where it cannot be started.

Counts are faked on a CPU build of torch: it then counts GPUs and cannot start CUDA, like any build where the driver is
too old.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import SECONDS, command

import tba.gpus
from tba.gpus import GPU_SHARE, VISIBLE_DEVICES, Gpus, visible_gpus
from tba.runs.validating import validate
from tba.settings import find


@pytest.fixture
def gpu_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many GPUs as torch counts, none of which can be used."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    count = lambda: 0 if os.environ.get(VISIBLE_DEVICES) == "" else request.param  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(tba.gpus, "_hidden_fault", "")
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    monkeypatch.setenv(VISIBLE_DEVICES, "to be undone")  # the test's end restores what was there
    monkeypatch.delenv(VISIBLE_DEVICES)
    tba.gpus._query.cache_clear()
    return int(request.param)


@pytest.mark.parametrize("gpu_count", [1, 2, 4, 8], indirect=True)
def test_the_quickstart_runs_to_its_end_where_gpus_are_counted_and_cuda_cannot_be_started(
    gpu_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("--steps", "2", "--evaluation.every", "0", "--evaluation.problems", "4", "--replay.pacing.warm-up", "140")
    short = (*short, "--record.no-tensorboard")
    running = command("train", "quickstart", *short, "--run-name", "run")
    out, err = running.communicate(SECONDS)
    assert (running.returncode, err) == (0, "")
    assert "CUDA cannot be started" in " ".join(out.split())
    assert "not compiled with CUDA" in " ".join(out.split())


@pytest.mark.parametrize("gpu_count", [4], indirect=True)
def test_gpus_that_cannot_be_used_are_hidden_and_the_reason_is_kept(gpu_count: int) -> None:
    cards_before, cards_after = visible_gpus(), visible_gpus()
    assert (len(cards_before), len(cards_after)) == (0, 0)
    assert cards_before.fault == cards_after.fault == "Torch not compiled with CUDA enabled"
    assert os.environ[VISIBLE_DEVICES] == ""
    with torch.random.fork_rng():  # torch's own code asks for each GPU that it counts
        pass
    assert any("Torch not compiled with CUDA enabled" in line for line in validate(find("quickstart")))


@pytest.mark.parametrize("gpu_count", [2], indirect=True)
def test_gpus_are_asked_for_in_a_child_but_by_a_worker_that_was_given_some(
    gpu_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = []

    def properties(gpu: int) -> SimpleNamespace:
        asking.append(os.getpid())
        return SimpleNamespace(name=f"card {gpu}", total_memory=80 * 10**9, major=9 - 2 * gpu)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    both = Gpus(("card 0", "card 1"), (80 * 10**9, 80 * 10**9), without_bfloat16=("card 1",))
    assert visible_gpus() == both
    assert asking == []
    monkeypatch.setenv(GPU_SHARE, "0.9500")
    monkeypatch.setenv(VISIBLE_DEVICES, "0,1")
    assert visible_gpus() == both
    assert asking == [os.getpid()] * 2


@pytest.mark.parametrize("gpu_count", [2], indirect=True)
def test_gpus_whose_driver_does_not_answer_are_left_alone_after_the_deadline(
    gpu_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tba.gpus, "_DEADLINE", 0.1)
    monkeypatch.setattr(torch.cuda, "device_count", signal.pause)  # in the child, which is then ended
    assert visible_gpus() == Gpus(fault="it does not answer within 0.1 s")
    assert os.environ[VISIBLE_DEVICES] == ""


@pytest.mark.parametrize("gpu_count", [2], indirect=True)
def test_an_interpreter_that_does_not_answer_is_left_alone_after_the_deadline_too(
    gpu_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tba.gpus, "_DEADLINE", 0.1)
    monkeypatch.setattr(tba.gpus, "_QUERY_SCRIPT", "import signal; signal.pause()")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # so that the child cannot ask
    assert visible_gpus() == Gpus(fault="it does not answer within 0.1 s")


def test_a_build_without_cuda_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this build of torch has CUDA")
    monkeypatch.setattr(tba.gpus, "_hidden_fault", "")
    monkeypatch.setattr(os, "fork", None)  # which nobody needs for that
    assert visible_gpus() == Gpus()
