"""A daemon of MPS that a run starts for its own workers; a script of the same name stands in for NVIDIA's."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.runs import SECONDS, alive, forked, made, quiet, until

from tba.gpus import Gpus
from tba.record.faults import read_faults
from tba.runtime.local import mps, processes
from tba.runtime.local.mps import CONTROL, MpsUnavailable, end_left_daemons, mps_daemon
from tba.runtime.local.processes import Processes
from tba.runtime.reporting import summarise

RECIPE = Path(__file__).parents[1] / "mps_clients.py"
DAEMON = f"""#!{sys.executable}
import json, os, signal, sys
folder, mode = os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ.get("STAND_IN", "")
arguments = sys.argv[1:]
words = arguments or sys.stdin.read().split()
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([*words, folder, os.environ.get("CUDA_VISIBLE_DEVICES")]) + chr(10))
if arguments == ["-d"]:
    if mode == "fails":
        sys.exit("Cannot start: the compute mode of the GPU is prohibited")
    if mode == "hangs":
        signal.pause()
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if mode != "is gone":
            os.mkfifo(folder + "/control")
            with open(folder + "/pid", "w") as file:
                file.write(str(os.getpid()))
        os.write(writer, b"1")
        while mode != "is gone":
            signal.pause()
        os._exit(1)
    os.read(reader, 1)
    sys.exit(0)
try:
    process = int(open(folder + "/pid").read())
    os.kill(process, 0)
except OSError:
    sys.exit("Cannot find MPS control daemon process")
if words == ["quit"]:
    if mode == "stays":
        signal.pause()
    os.kill(process, signal.SIGTERM)
"""


class StandIn:
    """The script on the PATH, and what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.calls_file = folder / "calls"
        self.folders = folder / "tmp"

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    @property
    def words(self) -> list[str]:
        return [call[0] for call in self.calls]

    @property
    def daemons(self) -> list[int]:
        """Live processes of the script."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if alive(pid) and self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        with suppress(OSError):
            return (
                f"CALLS={self.calls_file}\0" in Path(f"/proc/{pid}/environ").read_text()
                and CONTROL in Path(f"/proc/{pid}/cmdline").read_text()
            )
        return False


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    result = StandIn(tmp_path)
    result.folders.mkdir()
    program = tmp_path / CONTROL
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(result.calls_file))
    monkeypatch.setattr(mps, "_short_folder", lambda: result.folders)
    yield result
    for pid in result.daemons:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_daemon_of_its_own_serves_a_card_and_is_gone_afterwards(stand_in: StandIn, tmp_path: Path) -> None:
    with mps_daemon("GPU-5f", tmp_path / "logs", "cpu") as daemon:
        (folder,) = stand_in.folders.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        assert len(stand_in.daemons) == 1
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "logs")}
        assert daemon.environment("trainer") == variables | {"CUDA_VISIBLE_DEVICES": "0"}
        searcher = variables | {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_CLIENT_PRIORITY": "1"}
        assert daemon.environment("searcher-0") == searcher
    assert stand_in.calls == [[words, str(folder), "GPU-5f"] for words in ("-d", "get_server_list", "quit")]
    until(lambda: not stand_in.daemons, SECONDS, "the daemon to end")
    assert not list(stand_in.folders.iterdir())


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("fails", "ended with exit code 1: Cannot start: the compute mode of the GPU is prohibited"),
        ("hangs", "had not started after 3 s"),
        ("is gone", "has started and is gone"),
    ],
)
def test_a_daemon_that_does_not_start_is_a_sentence_and_leaves_nothing(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, sentence: str
) -> None:
    monkeypatch.setenv("STAND_IN", mode)
    if mode == "hangs":
        monkeypatch.setattr(mps, "START_SECONDS", 3.0)
    with pytest.raises(MpsUnavailable, match=sentence), mps_daemon("0", tmp_path / "logs", "cpu"):
        raise AssertionError("it was entered")
    assert not list(stand_in.folders.iterdir())
    until(lambda: not stand_in.daemons, SECONDS, "the daemon to end")


def test_a_card_on_which_no_client_computes_is_a_sentence_and_leaves_nothing(stand_in: StandIn, tmp_path: Path) -> None:
    refusal = "no process computes under MPS on this GPU: RuntimeError: "
    with pytest.raises(MpsUnavailable, match=refusal), mps_daemon("0", tmp_path / "logs", "quantum"):
        raise AssertionError("it was entered")
    assert stand_in.words == ["-d", "get_server_list", "quit"]
    assert not list(stand_in.folders.iterdir())


def test_a_stop_is_not_kept_waiting_by_a_daemon_that_hangs(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "hangs")
    monkeypatch.setattr(mps, "START_SECONDS", math.inf)
    stop = iter([False, False])
    daemon = mps_daemon("0", tmp_path / "logs", "cpu", lambda: next(stop, True))
    with pytest.raises(MpsUnavailable, match="a stop was requested"), daemon:
        raise AssertionError("it was entered")
    assert not list(stand_in.folders.iterdir())


def test_a_stop_is_not_kept_waiting_by_the_first_client(stand_in: StandIn, tmp_path: Path) -> None:
    daemon = mps_daemon("0", tmp_path / "logs", "cpu", lambda: any(stand_in.folders.glob("*/probe.log")))
    with pytest.raises(MpsUnavailable, match="a stop was requested"), daemon:
        raise AssertionError("it was entered")
    assert not list(stand_in.folders.iterdir())
    until(lambda: not stand_in.daemons, SECONDS, "the daemon to end")


def test_a_daemon_whose_end_is_interrupted_is_killed(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), mps_daemon("0", tmp_path / "logs", "cpu") as daemon:
        monkeypatch.setattr(type(daemon), "_call", interrupt)
    until(lambda: not stand_in.daemons, SECONDS, "the daemon to end")
    assert not list(stand_in.folders.iterdir())


def test_a_folder_that_cannot_be_written_is_a_sentence_and_leaves_nothing(stand_in: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    daemon = mps_daemon("0", tmp_path / "file" / "logs", "cpu")
    with pytest.raises(MpsUnavailable, match="its files cannot be written: Not a directory"), daemon:
        raise AssertionError("it was entered")
    assert not list(stand_in.folders.iterdir())


def test_a_daemon_that_does_not_end_is_killed(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "stays")
    monkeypatch.setattr(mps, "QUIT_SECONDS", 1.0)
    with mps_daemon("0", tmp_path / "logs", "cpu"):
        pass
    until(lambda: not stand_in.daemons, SECONDS, "the daemon to end")
    assert not list(stand_in.folders.iterdir())


def test_the_daemon_of_a_driver_that_was_killed_is_ended_by_the_next_one_and_no_other(
    stand_in: StandIn, tmp_path: Path
) -> None:
    entered = tmp_path / "entered"

    def serve() -> None:
        with mps_daemon("0", tmp_path / "logs", "cpu"):
            entered.touch()
            signal.pause()

    driver = forked(serve)
    try:
        until(entered.exists, SECONDS, "the daemon to start")
        end_left_daemons()  # its driver lives
        assert len(stand_in.daemons) == len(list(stand_in.folders.iterdir())) == 1
    finally:
        os.kill(driver, signal.SIGKILL)
        os.waitpid(driver, 0)
    with mps_daemon("0", tmp_path / "logs", "cpu"):
        assert len(list(stand_in.folders.iterdir())) == 1
        until(lambda: len(stand_in.daemons) == 1, SECONDS, "the former daemon to end")
    assert not list(stand_in.folders.iterdir())


def run_on_one_card(path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Any, list[dict[str, Any]]]:
    """A short run of which both halves want the only card; its summary, and the environments of its workers."""
    monkeypatch.setattr(processes, "visible_gpus", lambda: Gpus(("a card",), (80 * 10**9,)))
    words = ("--steps", "20", "--evaluation.problems", "1", "--run.mps", *overrides)
    recipe, run = made(path, *words, source=RECIPE)
    environments: list[dict[str, Any]] = []

    class Observed(Processes):
        def _process(self, *arguments: Any) -> processes.Process:
            process = super()._process(*arguments)
            environments.append({**process.environment, **process.mps})
            return process

    driver = Observed(recipe, run, quiet)
    return summarise(recipe, run, driver.searchers, driver.go(), 0.0), environments


def test_both_halves_of_a_run_on_one_card_are_clients_of_its_daemon(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, environments = run_on_one_card(tmp_path / "run", monkeypatch)
    assert summary.steps == 20
    assert [variables.get("CUDA_MPS_CLIENT_PRIORITY") for variables in environments] == [None, "1"]
    assert len({variables["CUDA_MPS_PIPE_DIRECTORY"] for variables in environments}) == 1
    assert stand_in.words == ["-d", "get_server_list", "quit"]
    assert summary.faults["without_mps"] == 0


def test_a_run_without_a_daemon_goes_on_and_says_why(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "fails")
    summary, environments = run_on_one_card(tmp_path / "run", monkeypatch)
    assert summary.steps == 20
    assert not [name for variables in environments for name in variables if "MPS" in name]
    (sentence,) = [fault["what"] for fault in read_faults(tmp_path / "run") if fault["kind"] == "without_mps"]
    assert sentence.startswith(f"the run goes on without MPS (--run.mps): {CONTROL} ended with exit code 1: ")


def test_a_worker_that_loses_its_daemon_is_started_again_without_mps(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, _ = run_on_one_card(tmp_path / "run", monkeypatch, "--model.ends-daemon")
    assert summary.steps == 20
    assert summary.faults["searcher_restarts"] == 1
    fault = read_faults(tmp_path / "run")[0]
    assert fault["what"] == "searcher-0 had a CUDA error under MPS and started again"
    assert not stand_in.daemons
