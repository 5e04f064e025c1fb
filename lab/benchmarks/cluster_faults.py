"""Faults of a cluster run, on two Ray nodes of this machine: rows that were lost, what was printed, what it cost.

    python lab/benchmarks/cluster_faults.py [--stories searchers,nodes,...] [--out lab/results/cluster_faults.csv]

Each story is one run that goes through its faults one after the other; a row is written after each of them. The trainer
and one searcher have room on the first node, the other searcher on the second.

    searchers   the enumerable toy with two searchers:
        late            the second node is added once the run goes on without it
        searcher        the second searcher killed (SIGKILL), three times
    windows     the same, with 2 restarts in a window of 60 s:
        ten-deaths      the second searcher killed each time it is back, ten times
    nodes       the same, with restarts enough:
        node            the second raylet killed, and a node added once the run has gone on without it, three times
        head            all of Ray on the first node killed, and the run resumed in a new cluster
    drivers     the same:
        driver          the driver killed, and the run resumed, three times
        sigterm         SIGTERM to the driver, then a resume
    hangs       the same, with --cluster.silence-deadline 20:
        frozen          the second searcher stopped for good (SIGSTOP)
        frozen-exchange the gateway stopped for good
    ranks       one-digit sums with a trainer of two ranks (gloo), one on each node:
        rank            the second killed
    no-gpu      the toy, from a first node without cores and GPUs: the command moves to the second, which shows one GPU
        head-no-gpu     (no fault)
        sigterm-moved   SIGTERM to the command on the first node

`recovery`: seconds from the fault until the run is whole again: the part is back and brings rows, or the trainer makes
steps; after SIGTERM until the command has ended. `lost`: rows that the journal had just before the fault and that it
does not have, unchanged, once the run is whole again. `printed`: what the run says of it. A row `end` says whether the
account closes.
"""

from __future__ import annotations

import argparse
import csv
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ["RAY_AUTH_MODE"] = "token"  # before Ray reads it

from faults import rows_of
from ray.cluster_utils import Cluster as Nodes

from tba.record.faults import count_faults, read_faults
from tba.record.jsonl import read_lines
from tba.record.metrics import read_metrics
from tba.record.summary import Summary
from tba.replay.follower import JournalFollower
from tba.runtime.cluster.gateway import PLACES
from tba.training.checkpoint import newest_checkpoint
from tba.types import Trajectory

TESTS = Path(__file__).resolve().parents[2] / "tests"
TOY, SUMS = TESTS / "toy" / "recipe.py", TESTS / "tiny_sums.py"
SECOND_ADDRESS = "127.0.0.2"  # of a node that is to differ from the first by its address
DEADLINE = 600.0  # seconds for anything, on a busy machine
POLL = 0.2
STORE_BYTES = 150_000_000
TOLD = ("searcher_restarts", "trainer_restarts", "exchange_restarts", "searchers_waiting", "silences", "resumes")


@dataclass(frozen=True)
class Row:
    """One fault."""

    fault: str
    number: int
    step: int  # steps recorded when it happened
    acknowledged: int  # rows just before
    lost: int
    recovery: float
    exit_code: str  # of a command that it ended
    printed: str


@dataclass
class Story:
    """A run in a cluster, and what is known of it."""

    home: Path
    write: Callable[[Row], None]
    nodes: Any = None
    second_node: Any = None
    commands: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def path(self) -> Path:
        return self.home / "runs" / "run"

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        return self.commands[-1][0]

    def begin_cluster(self, first_cpus: int = 2) -> None:
        head_arguments = {"num_cpus": first_cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.nodes = Nodes(initialize_head=True, head_node_args=head_arguments)

    def add_node(self, cpus: int = 2, **options: Any) -> None:
        self.second_node = self.nodes.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, **options)

    def start(self, *words: str) -> None:
        text_file = self.home / f"printed-{len(self.commands)}.txt"
        with text_file.open("wb") as file:
            command = [sys.executable, "-m", "tba", *words]
            environment = {**os.environ, "RAY_ADDRESS": self.nodes.address, "COLUMNS": "400"}
            self.commands.append((subprocess.Popen(command, stdout=file, stderr=file, env=environment), text_file))

    def train(self, *settings: str, source: Path = TOY) -> None:
        """Begin the run, and wait for some steps."""
        words = ("--runs", str(self.path.parent), "--run-name", self.path.name, "--runtime", "cluster")
        self.start("train", str(source), *words, "--steps", "999999", "--run.checkpoint-every", "50", *settings)
        self.wait_for_steps(10)

    def resume(self, *settings: str) -> None:
        self.start("resume", str(self.path), *settings)
        self.wait_for_steps(10)

    def until(self, condition: Callable[[], Any], purpose: str, while_running: bool = True) -> Any:
        limit = time.monotonic() + DEADLINE
        while not (value := condition()):
            if while_running and self.driver.poll() is not None:
                raise RuntimeError(f"the command ended before {purpose}: {self.text()[-600:]}")
            if time.monotonic() > limit:
                raise RuntimeError(f"waited {DEADLINE:g} s for {purpose}: {self.text()[-600:]}")
            time.sleep(POLL)
        return value

    def text(self) -> str:
        return "".join(file.read_text(errors="replace") for _, file in self.commands)

    def steps(self) -> int:
        return len(read_metrics(self.path)) if (self.path / "metrics.jsonl").exists() else 0

    def wait_for_steps(self, step_count: int) -> None:
        step_target = self.steps() + step_count
        self.until(lambda: self.steps() >= step_target, f"{step_count} more steps")

    def processes(self, part: str) -> list[int]:
        """Returns the process of each life of a part, the oldest first."""
        places = self.path / "logs" / PLACES
        return [p["process"] for p in read_lines(places) if p["part"] == part] if places.exists() else []

    def wait_for_rows(self, searcher: str) -> None:
        """Wait until a searcher brings more rows than it has brought."""
        with JournalFollower(self.path / "journal.sqlite", create=False) as journal:
            journal.drain()
            makers = (t.provenance["searcher"] for t in self._arrivals(journal, searcher))
            next(maker for maker in makers if maker == searcher)

    def _arrivals(self, journal: JournalFollower, searcher: str) -> Iterator[Trajectory]:
        while True:
            yield from self.until(journal.drain, f"rows by {searcher}")

    @contextmanager
    def fault(self, name: str) -> Iterator[Callable[[str], None]]:
        """Write a row for the fault that happens inside. Yields a function that takes what the run says of it."""
        number, step, fault_count = self.counts[name], self.steps(), len(read_faults(self.path))
        rows, sentences, began = rows_of(self.path / "journal.sqlite"), list[str](), time.monotonic()
        yield sentences.append
        seconds, now = time.monotonic() - began, rows_of(self.path / "journal.sqlite")
        sentences += [str(f["what"]) for f in read_faults(self.path)[fault_count:] if f["kind"] in TOLD][:2]
        lost = sum(now.get(seq) != row for seq, row in rows.items())
        code = "" if (exit_code := self.commands[-1][0].poll()) is None else str(exit_code)
        text = " ".join("; ".join(sentences).split())[:500]
        self.counts[name] += 1
        self.write(Row(name, number, step, len(rows), lost, round(seconds, 1), code, text))

    def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
        """Send a signal to a part; returns a function that waits for its next life."""
        lives = self.processes(part)
        os.kill(lives[-1], number)
        return lambda: self.until(lambda: len(self.processes(part)) > len(lives), f"the next life of {part}")

    def end(self) -> None:
        """End the run by Ctrl-C, and write whether its account closes."""
        with self.fault("end") as say:
            if self.driver.poll() is None:
                self.driver.send_signal(signal.SIGINT)
            self.driver.wait(DEADLINE)
            summary = Summary.read(self.path)
            ledgers = [] if summary is None else [summary.tokens, summary.trajectories]
            say("the account closes" if ledgers and all(x.closes() for x in ledgers) else "IT DOES NOT CLOSE")


def begin(story: Story, *settings: str) -> None:
    """Begin the toy on two nodes, and wait until both searchers bring rows."""
    story.begin_cluster()
    story.add_node(1)
    story.train("--searchers", "2", *settings)
    story.wait_for_rows("searcher-1")


def tell_searchers(story: Story) -> None:
    story.begin_cluster()
    story.train("--searchers", "2")
    with story.fault("late") as say:
        say(next(line for line in story.text().splitlines() if "wait for nodes with" in line))
        story.add_node(1)
        story.wait_for_rows("searcher-1")
    for _ in range(3):
        with story.fault("searcher"):
            story.kill("searcher-1")()
            story.wait_for_rows("searcher-1")
    story.end()


def tell_windows(story: Story) -> None:
    begin(story, "--run.restarts", "2", "--cluster.restart-window", "60")
    with story.fault("ten-deaths"):
        for _ in range(10):
            story.kill("searcher-1")()
        story.wait_for_rows("searcher-1")
    story.end()


def tell_nodes(story: Story) -> None:
    begin(story, "--run.restarts", "100")
    for _ in range(3):
        lose_node(story)
    lose_head(story)
    story.end()


def tell_drivers(story: Story) -> None:
    begin(story)
    for _ in range(3):
        kill_driver(story)
    with story.fault("sigterm") as say:
        end_by_sigterm(story, say)
    story.resume()
    story.end()


def tell_hangs(story: Story) -> None:
    begin(story, "--cluster.silence-deadline", "20")
    for name, part in (("frozen", "searcher-1"), ("frozen-exchange", "exchange")):
        with story.fault(name):
            story.kill(part, signal.SIGSTOP)()
            story.wait_for_rows("searcher-1")
    story.end()


def lose_node(story: Story) -> None:
    with story.fault("node"):
        waiting_count = count_faults(story.path)["searchers_waiting"]
        story.nodes.remove_node(story.second_node, allow_graceful=False)
        story.until(lambda: count_faults(story.path)["searchers_waiting"] > waiting_count, "the searcher to be missed")
        story.wait_for_steps(20)
        story.add_node(1)
        story.wait_for_rows("searcher-1")


def kill_driver(story: Story) -> None:
    with story.fault("driver"):
        parts = [story.processes(part)[-1] for part in ("trainer", "searcher-0", "searcher-1")]
        story.driver.kill()
        story.driver.wait(DEADLINE)
        story.until(lambda: not any(is_alive(pid) for pid in parts), "Ray to end the parts", while_running=False)
        story.resume()
        story.wait_for_rows("searcher-1")


def lose_head(story: Story) -> None:
    with story.fault("head") as say:
        story.nodes.remove_node(story.nodes.head_node, allow_graceful=False)
        code = story.driver.wait(DEADLINE)
        say(f"exit code {code}: {story.text().strip().splitlines()[-1]}")
        story.nodes.shutdown()
        story.begin_cluster()
        story.add_node(1)
        story.resume()


def end_by_sigterm(story: Story, say: Callable[[str], None]) -> None:
    step, signalled_at = read_metrics(story.path)[-1]["step"], time.time()  # a resume takes steps again
    story.driver.send_signal(signal.SIGTERM)
    story.driver.wait(DEADLINE)
    checkpoint = newest_checkpoint(story.path / "checkpoints")
    is_new = checkpoint is not None and checkpoint.version.step >= step
    if checkpoint is None or not is_new:
        say("NO NEW CHECKPOINT")
    else:
        seconds = checkpoint.path.stat().st_mtime - signalled_at
        say(f"a checkpoint of step {checkpoint.version.step}, {seconds:.1f} s after the signal")


def tell_ranks(story: Story) -> None:
    story.begin_cluster()
    story.add_node(2)
    shares = ("--cluster.trainer-cpus", "1.5", "--cluster.searcher-cpus", "0.1")
    story.train("--trainer.ranks", "2", *shares, "--run.checkpoint-every", "5", source=SUMS)
    with story.fault("rank"):
        story.kill("trainer-1")()
        story.wait_for_steps(10)
    story.end()


def tell_without_gpu(story: Story) -> None:
    story.begin_cluster(0)
    story.add_node(3, num_gpus=1, node_ip_address=SECOND_ADDRESS)
    story.train("--searchers", "2", "--cluster.trainer-gpus", "1", "--cluster.searcher-gpus", "0")
    with story.fault("head-no-gpu") as say:
        say(" ".join(story.text().splitlines()[:2]))
        say(f"parts ran on {sorted({p['node'] for p in read_lines(story.path / 'logs' / PLACES)})}")
        story.wait_for_steps(20)
    with story.fault("sigterm-moved") as say:
        end_by_sigterm(story, say)


STORIES = {
    "searchers": tell_searchers,
    "windows": tell_windows,
    "nodes": tell_nodes,
    "drivers": tell_drivers,
    "hangs": tell_hangs,
    "ranks": tell_ranks,
    "no-gpu": tell_without_gpu,
}


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def tell(name: str, write: Callable[[Row], None]) -> bool:
    """Tell a story; all that was started for it ends afterwards. Returns whether it came to its end."""
    home = Path(tempfile.mkdtemp(prefix="tba"))  # short: the names of Ray's sockets begin with it
    os.environ.update({"HOME": str(home), "RAY_TMPDIR": str(home)})
    story = Story(home, write)
    try:
        STORIES[name](story)
    except (RuntimeError, OSError, subprocess.TimeoutExpired, LookupError, StopIteration) as error:
        print(f"{name}: FAILED: {error!r}\n{story.text()[-2000:]}", flush=True)
        return False
    finally:
        for command, _ in story.commands:
            command.kill()
            command.wait(DEADLINE)
        if story.nodes is not None:
            story.nodes.shutdown()
        shutil.rmtree(home, ignore_errors=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stories", default=",".join(STORIES))
    parser.add_argument("--out", type=Path, default=Path("lab/results/cluster_faults.csv"))
    options = parser.parse_args()
    os.environ.update({"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"})
    os.environ.update({"RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"})
    python_path = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    is_new = not options.out.exists()
    with options.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        if is_new:
            writer.writeheader()

        def write(row: Row) -> None:
            writer.writerow(asdict(row))
            file.flush()
            print(row, flush=True)

        results = [tell(name, write) for name in options.stories.split(",")]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
