"""The cluster runtime on two Ray nodes of this machine: where it leads, what it survives, what it leaves."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.cluster.ray_nodes import SECONDS, in_other_process, ray_nodes
from tests.runtime.runs import TOY, alive, distance, made, quiet, steps_of, until

from tba.errors import UserError
from tba.record.evaluations import read_evaluations
from tba.record.faults import count_faults
from tba.record.jsonl import read_lines
from tba.record.run_warnings import COPIES, LARGE_STEPS, NO_SIGNAL, TRUNCATED
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runtime.cluster.gateway import PLACES
from tba.runtime.elastic import FIRST_NUMBER
from tba.runtime.reporting import summarise
from tba.training.checkpoint import newest_checkpoint
from tba.types import Version
from tba.weights.directory import WeightDirectory

pytest.importorskip("ray", reason="the cluster runtime needs Ray: pip install -e '.[cluster]'")

takes_minutes = pytest.mark.skipif(
    "TBA_TEST_CLUSTER" not in os.environ, reason="takes minutes on two cores: `make test-cluster`"
)
SUMS = Path(__file__).parents[2] / "tiny_sums.py"
RUN_SECONDS = 500.0  # of a whole run on a busy machine; below the deadline of a test, which tells less


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes."""
    with ray_nodes(2) as nodes:
        nodes.add_node(num_cpus=2)
        yield nodes.address


def command(*arguments: str) -> subprocess.Popen[str]:
    """`tba` in an interpreter of its own: Ray is not made for processes that are copied."""
    whole = [sys.executable, "-m", "tba", *arguments]
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return command("train", str(TOY), "--runs", str(path.parent), "--run-name", path.name, *arguments)


LISTENING = """
import psutil, ray
from tba.runtime.cluster.client import connect_to_ray

with connect_to_ray(None, 0.2):
    @ray.remote(num_cpus=0)
    class Part:
        def name(self):
            return ray.util.get_node_ip_address()

    part = Part.remote()
    print(ray.get(part.name.remote(), timeout=100))
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                print(connection.laddr.ip)
"""


def test_a_cluster_that_is_started_for_a_run_listens_on_the_loopback_interface_only() -> None:
    pytest.importorskip("psutil", reason="looking at who listens needs psutil, which peft brings")
    with tempfile.TemporaryDirectory(prefix="tba") as home:  # short, as below
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        process = subprocess.run(
            [sys.executable, "-c", LISTENING],
            env=environment | {"HOME": home, "RAY_TMPDIR": home},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    node_address, *listening = process.stdout.split()
    assert node_address == "127.0.0.1", process.stderr
    assert len(listening) >= 4, process.stderr  # of the driver, Ray's two servers and the part
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


WORKING = """
import sys, ray
from pathlib import Path
from tba.runtime.cluster.client import connect_to_ray

with connect_to_ray(sys.argv[1], working_dir=Path(sys.argv[2])):
    @ray.remote(num_cpus=0)
    def value():
        import module_of_a_recipe
        return module_of_a_recipe.VALUE, str(Path(module_of_a_recipe.__file__).parent)

    print(*ray.get(value.remote(), timeout=100))
"""


def test_workers_import_what_is_in_a_copy_of_the_working_dir(address: str, tmp_path: Path) -> None:
    (tmp_path / "module_of_a_recipe.py").write_text("VALUE = 7\n")
    words = [sys.executable, "-c", WORKING, address]
    process = subprocess.run([*words, str(tmp_path)], capture_output=True, text=True, timeout=SECONDS)
    value, folder = process.stdout.split() or (process.stderr, "")
    assert value == "7"
    assert folder != str(tmp_path)
    process = subprocess.run([*words, str(tmp_path / "none")], capture_output=True, text=True, timeout=SECONDS)
    assert "none, which is no folder: give one that the workers need" in process.stderr


def refusals(addresses: list[str]) -> list[str]:
    from tba.runtime.cluster.client import connect_to_ray

    sentences = []
    for address in addresses:
        with pytest.raises(UserError) as refused, connect_to_ray(address):
            raise AssertionError
        sentences.append(str(refused.value))
    return sentences


def test_a_cluster_that_is_not_there_is_one_sentence_at_once() -> None:
    reasons = {"127.0.0.1:1": r"nothing answers at [\d.]+:1", "127.0.0.1:99999999": ".*", "nowhere": ".*"}
    sentences = in_other_process(SECONDS, refusals, list(reasons))
    for (address, reason), sentence in zip(reasons.items(), sentences, strict=True):
        assert re.match(rf"cannot join the Ray cluster at {address} \({reason}\): ", sentence), sentence


def count_cpus(address: str) -> None:
    import ray

    from tba.runtime.cluster.client import connect_to_ray, nodes

    def free() -> list[float]:
        return sorted(node.cpus for node in nodes())

    with connect_to_ray(address):
        until(lambda: free() == [2, 2], SECONDS, "all to be free")
        counter = ray.remote(num_cpus=1.5)(Counter).remote()
        until(lambda: free() == [0.5, 2], SECONDS, "what an actor of somebody else holds to be counted")
        ray.kill(counter)
        until(lambda: free() == [2, 2], SECONDS, "it to be given back")


def test_a_run_counts_what_is_free_on_each_node_and_not_what_there_is(address: str) -> None:
    in_other_process(RUN_SECONDS, count_cpus, address)


def drive(path: Path, *overrides: str, source: Path) -> Summary:
    from tba.runtime.cluster.driver import Cluster

    recipe, run = made(path, *overrides, source=source)
    driver = Cluster(recipe, run, quiet)
    return summarise(recipe, run, driver.searchers, driver.go(), 0.0)


def in_cluster(path: Path, address: str, *overrides: str, source: Path = TOY) -> Summary:
    """A whole run in the cluster."""
    options = ("--runtime", "cluster", "--address", address, *overrides)
    return in_other_process(RUN_SECONDS, drive, path, *options, source=source)


def places(path: Path) -> list[dict[str, Any]]:
    return read_lines(path / "logs" / PLACES)


def makers(path: Path) -> Counter[Any]:
    """Who has brought how many."""
    with JournalFollower(path / "journal.sqlite") as journal:
        return Counter(t.provenance["searcher"] for t in journal.drain())


def kill(path: Path, part: str, after: int = 20) -> None:
    """The first life of a part, once the run has made more steps than that; a searcher's, once it has brought some."""
    until(lambda: steps_of(path) > after, SECONDS, "the first steps")
    if part.startswith("searcher"):
        until(lambda: makers(path)[part] > 0, SECONDS, f"what {part} brings")
    pids = until(lambda: [place["process"] for place in places(path) if place["part"] == part], SECONDS, part)
    os.kill(pids[0], signal.SIGKILL)


def test_the_toy_comes_to_its_ideal_policy_though_a_searcher_and_the_exchange_are_killed(
    tmp_path: Path, address: str
) -> None:
    path = tmp_path / "run"
    killers = [threading.Thread(target=kill, args=(path, part), daemon=True) for part in ("searcher-1", "exchange")]
    for killer in killers:
        killer.start()
    summary = in_cluster(
        path,
        address,
        *("--objective.beta.value", "0.25", "--optimizer.lr", "0.1", "--optimizer.schedule.steps", "800"),
        *("--steps", "800", "--sync-every", "20", "--groups-per-step", "4", "--group-size", "8"),
        *("--samples-per-prompt", "16", "--exploration.temperature", "1e6", "--searchers", "2"),
        *("--evaluation.every", "300", "--evaluation.problems", "1", "--publish.full-version-every", "5"),
    )
    for killer in killers:
        killer.join(SECONDS)
    assert distance(path, 0.25) <= 0.02
    weights = WeightDirectory(path / "weights")  # of 41 versions every fifth is whole; the others went as changes
    assert [weights.base(Version(0, step)) for step in (780, 800)] == [Version(0, 700), None]
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    assert summary.trajectories.trained_total == 800 * 4 * 8
    assert summary.faults["exchange_restarts"] == 1
    assert summary.faults["searcher_restarts"] >= 1  # on a busy machine one can die of a call that Ray gave up
    rounds_by_maker = makers(path)
    assert rounds_by_maker.total() == summary.trajectories.generated - summary.trajectories.in_flight_at_stop
    assert set(rounds_by_maker) == {"searcher-0", "searcher-1"}
    versions = [e.version for e in read_evaluations(path) if e.metric == "pass@1/greedy"]
    assert sorted(versions) == [Version(0, step) for step in (0, 300, 600, 800)]
    where = places(path)
    lives = Counter(place["part"] for place in where)
    assert (lives["exchange"], lives["trainer"]) == (2, 1)
    assert lives["searcher-1"] >= 2
    assert 3 <= lives["searcher-0"] + lives["searcher-1"] <= 2 + summary.faults["searcher_restarts"]
    assert len({place["node_id"] for place in where}) == 2
    assert {place["gpus"] for place in where if place["part"] != "exchange"} == {""}  # none was asked for
    for place in where:
        assert f"{place['part']} starts as process {place['process']}" in Path(place["log"]).read_text()
        assert list(Path(place["ray_logs"]).parent.glob(Path(place["ray_logs"]).name))


def test_two_ranks_on_two_nodes_train_one_policy_and_outlive_the_death_of_one(tmp_path: Path, address: str) -> None:
    path = tmp_path / "run"
    killer = threading.Thread(target=kill, args=(path, "trainer-1", 3), daemon=True)
    killer.start()
    summary = in_cluster(
        path,
        address,
        *("--trainer.ranks", "2", "--cluster.trainer-cpus", "1.5", "--cluster.searcher-cpus", "0.1"),
        *("--steps", "40", "--run.checkpoint-every", "2"),
        source=SUMS,
    )
    killer.join(SECONDS)
    assert summary.steps == 40
    fault_counts = {kind: count for kind, count in summary.faults.items() if count}
    learnt = {LARGE_STEPS, NO_SIGNAL, TRUNCATED, COPIES}  # is its data's, not the ranks'
    assert fault_counts.keys() - learnt == {"trainer_restarts"}
    assert fault_counts["trainer_restarts"] == 1
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
    where = [place for place in places(path) if place["part"].startswith("trainer")]
    assert Counter(place["part"] for place in where) == {"trainer": 2, "trainer-1": 2}
    assert len({place["node_id"] for place in where}) == 2


@takes_minutes
@pytest.mark.parametrize("moment", ["while Ray starts", "in the middle, with a searcher that hangs"])
def test_nothing_of_its_own_cluster_outlives_a_driver_that_is_killed(tmp_path: Path, moment: str) -> None:
    path, mark = tmp_path / "run", f"TBA_TEST_MARK={secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="tba") as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv(*mark.split("="))
        patch.setenv("RAY_TMPDIR", home)
        driver = train(path, "--runtime", "cluster", "--steps", "999999", "--evaluation.problems", "1")
        try:
            if moment == "while Ray starts":
                until(lambda: any("gcs_server" in line for line in of(mark, driver.pid).values()), SECONDS, "Ray")
            else:
                until(lambda: steps_of(path) > 3, SECONDS, "the first steps")
                (stopped,) = [place["process"] for place in places(path) if place["part"] == "searcher-0"]
                os.kill(stopped, signal.SIGSTOP)  # Ray's own way out of a worker is closed
            pids = of(mark, driver.pid)
        finally:
            driver.kill()
            driver.communicate(timeout=SECONDS)
        kinds = ("gcs_server",) if moment == "while Ray starts" else ("gcs_server", "raylet", "Agent", "PartActor")
        assert all(any(kind in line for line in pids.values()) for kind in kinds), pids
        until(lambda: not any(map(alive, pids)) and not of(mark, driver.pid), 30.0, "all of it to end")
        assert list(Path(home).iterdir()) == []


def of(mark: str, driver: int) -> dict[int, str]:
    """The driver's descendants and whoever has this in the environment it began with, with their command lines."""
    parents, pids, lines = {}, {driver}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            lines[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if mark.encode() in (entry / "environ").read_bytes():
                pids.add(pid)
    while descendants := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= descendants
    return {pid: lines.get(pid, "") for pid in pids - {driver} if alive(pid)}


def test_the_folder_that_recipes_are_run_from_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tba.runtime.cluster.actors import scratch

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = scratch()
    folder.chmod(0o777)
    assert scratch() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="belongs to another user"):
        scratch()


@takes_minutes
def test_a_run_goes_on_without_a_searcher_whose_node_is_gone_until_there_is_another_node(tmp_path: Path) -> None:
    """Beside the trainer there is room for one searcher; the other one's node dies, and another one comes."""
    path = tmp_path / "run"
    with ray_nodes(2) as nodes:
        nodes.add_node(num_cpus=1)
        options = ("--runtime", "cluster", "--address", nodes.address, "--searchers", "2", "--steps", "999999")
        driver = train(path, *options, "--evaluation.problems", "1")
        try:
            until(lambda: {"searcher-0", "searcher-1"} <= set(makers(path)), SECONDS, "something of both")
            nodes.remove_node()
            until(lambda: count_faults(path)["searchers_waiting"], SECONDS, "one to be missed")
            done, rows = steps_of(path), makers(path)["searcher-1"]
            until(lambda: steps_of(path) > done + 20, SECONDS, "more steps")
            nodes.add_node(num_cpus=1)
            until(lambda: makers(path)["searcher-1"] > rows, SECONDS, "something of the one that is back")
            driver.send_signal(signal.SIGTERM)
            output, errors = driver.communicate(timeout=SECONDS)
            assert (driver.returncode, errors) == (143, ""), output
        finally:
            driver.kill()
            driver.communicate(timeout=SECONDS)
    summary = Summary.read(path)
    assert summary is not None
    assert (summary.faults["searcher_restarts"], summary.faults["searchers_waiting"]) == (1, 1)
    assert summary.trajectories.closes()
    checkpoint = newest_checkpoint(path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.version.step == summary.steps


@takes_minutes
def test_a_command_on_a_head_that_cannot_hold_the_trainer_runs_on_the_node_that_can(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with ray_nodes(0) as nodes:
        nodes.add_node(num_cpus=3, num_gpus=1, node_ip_address="127.0.0.2")
        gpus = ("--cluster.trainer-gpus", "1", "--cluster.searcher-gpus", "0")
        driver = train(path, "--runtime", "cluster", "--address", nodes.address, *gpus, "--steps", "40")
        output, errors = driver.communicate(timeout=2 * SECONDS)
    assert (driver.returncode, errors) == (0, ""), output
    assert output.startswith("this node cannot hold the trainer (1 CPU and 1 GPU)")
    assert "What to try next" in output
    assert {place["node"] for place in places(path)} == {"127.0.0.2"}
    assert steps_of(path) == 40


def test_of_failed_ranks_the_one_that_died_is_the_reason_then_one_that_raised_then_one_that_lost_touch() -> None:
    from tba.runtime.cluster.driver import DIED, _rank_to_blame

    died, raised, lost = (
        SimpleNamespace(code=code, lost_contact=touch) for code, touch in ((DIED, False), (1, False), (DIED, True))
    )
    parts: Any = [lost, raised, died]
    assert _rank_to_blame(parts, False) is _rank_to_blame(parts, True) is died
    assert _rank_to_blame(parts[:2], True) is None
    assert _rank_to_blame(parts[:2], False) is raised
    assert _rank_to_blame(parts[:1], False) is lost


@takes_minutes
def test_the_quickstart_learns_in_the_cluster_what_it_learns_elsewhere(tmp_path: Path, address: str) -> None:
    summary = in_cluster(tmp_path / "run", address, "--evaluation.problems", "300", source=Path("quickstart"))
    assert summary.tokens.closes(), summary.tokens
    sampled = {e.version.step: e.value for e in summary.evaluations if e.metric == "pass@1/sampled"}
    assert sampled[0] < 0.45
    assert sampled[400] > 0.88


@takes_minutes
def test_somebody_joins_by_address_and_a_run_goes_on_after_ctrl_c_and_after_its_driver_was_killed(
    tmp_path: Path, address: str
) -> None:
    path, name = tmp_path / "run", f"searcher-{FIRST_NUMBER}"
    driver = train(
        path, "--runtime", "cluster", "--address", address, "--evaluation.problems", "1", "--steps", "999999"
    )
    commands = [driver]
    try:
        until(lambda: steps_of(path) > 5, SECONDS, "the first steps")
        commands.append(command("search", "--run", path.name, "--address", address))
        until(lambda: name in makers(path), SECONDS, "something of who joined")
        driver.send_signal(signal.SIGINT)
        assert [driver.wait(SECONDS), commands[1].wait(SECONDS)] == [130, 0]
        done = steps_of(path)
        commands.append(command("resume", str(path)))
        until(lambda: steps_of(path) > done + 20, SECONDS, "more steps")
        commands[2].kill()
        parts = [place["process"] for place in places(path) if place["part"] != name]
        until(lambda: not any(map(alive, parts)), SECONDS, "Ray to end what the driver had started")
        last = steps_of(path) + 20
        commands.append(command("resume", str(path), "--steps", str(last)))
        output, errors = commands[3].communicate(timeout=SECONDS)
        assert (commands[3].returncode, errors) == (0, ""), output
    finally:
        for process in commands:
            process.kill()
            process.communicate(timeout=SECONDS)
    summary = Summary.read(path)
    assert summary is not None
    assert (summary.steps, summary.faults["resumes"]) == (last, 2)
    for ledger in (summary.tokens, summary.trajectories):
        assert ledger.closes(), ledger
