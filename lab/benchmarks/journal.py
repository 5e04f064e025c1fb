"""What the journal and the trainer's memory cost: appending, sharing, sampling, opening again.

    python lab/benchmarks/journal.py [--rows 1000000] [--seconds 20] [--folder DIR] [--only append,shared,sample,open]
    python lab/benchmarks/journal.py --run runs/NAME

Trajectories have 128 tokens, with log-probabilities of the reference and the behaviour (2.1 kB each in the journal),
synchronous = FULL. Each part runs in processes of its own. DIR decides the disk; next to each figure is the time that
the disk alone takes to flush as many bytes (`flush`), measured alternately.

append    one writer, batches of 24, alone and with a follower that drains and checkpoints in another process
shared    8 writers that bring 500 trajectories/s together, in batches of 24: milliseconds until each is acknowledged
sample    a replay that holds --rows of them (100 to a prompt) samples 7 x 20: recent, or by reward. Recent first when
          all of them came in together, as after a resume: then all are the newest; and after one more round of 24
open      opening that run again: checked (quick_check), read, and restored from its checkpoint

With --run: the journal's share of that run's wall-clock time: how long its searchers waited for it, as they measured;
and its puts and drains, which happen during rounds and steps, repeated as they were.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from tba.record.memory import peak_memory_bytes
from tba.record.summary import Summary
from tba.replay.buffer import BufferSettings
from tba.replay.checks import find_damage
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.replay.pacing import Pacing
from tba.replay.replay import Replay, ReplaySettings
from tba.replay.selection import RecencyReward
from tba.types import Completion, Prompt, Sampling, StopReason, Trajectory, Version
from tba_lab.trial import remove_journal

TOKENS, BATCH, PER_PROMPT = 128, 24, 100
STEPS = 1000  # trainer steps over which the rows of a large journal were sampled
WRITERS, RATE = 8, 500  # and trajectories per second of all together
PARTS = ("append", "shared", "sample", "open")


def trajectories(count: int, prompts: int, seed: int = 0, steps: int = 1) -> Iterator[Trajectory]:
    """Answers of TOKENS tokens to `prompts` prompts in turn, uids side by side within 24 as searchers give them."""
    rng = np.random.default_rng(seed)
    asked = [Prompt("sums", rng.integers(0, 30_000, 60).astype(np.int32), f"problem {i}") for i in range(prompts)]
    series, provenance = b"", {}
    for i in range(count):
        if i % BATCH == 0:  # a round, whose trajectories share their provenance
            series, provenance = rng.bytes(12), {"searcher": "searcher-0", "round": i // BATCH}
        version = Version(0, i * steps // count)
        completion = Completion(
            rng.integers(0, 30_000, TOKENS).astype(np.int32),
            "an answer of some three hundred characters " * 7,
            StopReason.EOS,
            (version, version),
            Sampling(),
            -rng.random(TOKENS).astype(np.float32),
        )
        yield Trajectory(
            uid=(series + (i % BATCH).to_bytes(4, "big")).hex(),
            prompt=asked[i // BATCH % prompts],
            completion=completion,
            reward=float(rng.integers(2)),
            log_reference=-rng.random(TOKENS).astype(np.float32),
            reference=Version(),
            provenance=provenance,
        )


def flush_seconds(folder: Path, size: int, times: int = 20) -> list[float]:
    """What this disk takes to have `size` bytes more of a file on it."""
    seconds = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(times):
            began = time.perf_counter()
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return seconds


def milliseconds(seconds: Sequence[float]) -> str:
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return f"median {1e3 * p50:.2f} ms, p99 {1e3 * p99:.2f} ms, most {1e3 * max(seconds):.2f} ms"


def append(folder: Path, rows: int, seconds: float) -> None:
    """One writer; in rounds, with the bare disk in between."""
    for follower in (False, True):
        path = folder / f"append-{follower}.sqlite"
        other = _start("drain", path) if follower else None
        with JournalWriter(path, "searcher-0") as writer:
            done, taken, flushes, puts = 0, 0.0, [], []
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                given = list(trajectories(40 * BATCH, 64, seed=done))
                batches = [given[i : i + BATCH] for i in range(0, len(given), BATCH)]
                flushes += flush_seconds(folder, 100_000)
                for batch in batches:
                    began = time.perf_counter()
                    writer.put(batch, counters={"generated_tokens": BATCH * TOKENS})
                    puts.append(time.perf_counter() - began)
                done, taken = done + len(given), taken + sum(puts[-len(batches) :])
        print(f"append, {'with a follower' if follower else 'alone'}: {done / taken:,.0f} trajectories/s ({done:,})")
        print(f"  a batch of {BATCH}: {milliseconds(puts)}; a flush of 100 kB: {milliseconds(flushes)}")
        if other is not None:
            other.terminate()
            other.wait()
        remove_journal(path)


def shared(folder: Path, rows: int, seconds: float) -> None:
    """Eight writers at a pace, and a follower."""
    path = folder / "shared.sqlite"
    with JournalFollower(path) as follower:
        writers = [_start("write", path, str(n), str(seconds), pipe=True) for n in range(WRITERS)]
        drained = 0
        while any(w.poll() is None for w in writers):
            drained += len(follower.drain())
            time.sleep(0.004)
        drained += len(follower.drain())
    puts = [float(x) for w in writers for x in (w.stdout.read() if w.stdout else "").split()]
    print(f"shared by {WRITERS}: {len(puts) * BATCH / seconds:,.0f} trajectories/s, {drained:,} drained")
    print(
        f"  a put of {BATCH}: {milliseconds(puts)}; a flush of 100 kB: {milliseconds(flush_seconds(folder, 100_000))}"
    )
    remove_journal(path)


def write(path: Path, number: int, seconds: float) -> None:
    """One of the writers: a batch every so often, and how long each took."""
    batches = [
        list(trajectories(BATCH, 8, seed=1000 * number + n)) for n in range(int(seconds * RATE / WRITERS / BATCH))
    ]
    every = BATCH * WRITERS / RATE
    with JournalWriter(path, f"searcher-{number}") as writer:
        due = time.monotonic() + every * number / WRITERS
        for batch in batches:
            time.sleep(max(0.0, due - time.monotonic()))
            began = time.perf_counter()
            writer.put(batch, counters={"generated_tokens": BATCH * TOKENS})
            print(time.perf_counter() - began)
            due += every


def drain(path: Path) -> None:
    """A follower until it is ended."""
    with JournalFollower(path) as follower:
        while True:
            follower.drain_stored()
            time.sleep(0.004)


def fill(path: Path, rows: int) -> None:
    """A large journal, in large batches."""
    with JournalFollower(path, position=2**62) as follower, JournalWriter(path, "searcher-0") as writer:
        batch: list[Trajectory] = []
        for t in trajectories(rows, -(-rows // PER_PROMPT), steps=STEPS):
            batch.append(t)
            if len(batch) == 2400:
                writer.put(batch)
                batch = []
                follower.checkpoint()
        writer.put(batch)


def settings(rows: int, reward: bool) -> ReplaySettings:
    return ReplaySettings(
        selection=RecencyReward(m=0.0, inverse_temperature=2.0) if reward else RecencyReward(m=0.95),
        pacing=Pacing(warm_up=0, max_mean_uses=float("inf")),
        buffer=BufferSettings(per_prompt=PER_PROMPT, total=rows),
    )


def sample(folder: Path, rows: int, seconds: float) -> None:
    """A replay that holds all of them."""
    path = folder / "large.sqlite"
    took = _timed(lambda: subprocess.run(_command("fill", path, rows), check=True))
    print(f"a journal of {rows:,}: made in {took:.0f} s, {path.stat().st_size / 1e9:.2f} GB")
    for reward in (False, True):
        with JournalFollower(path) as follower:
            replay = Replay(follower, settings(rows, reward))
            _sample_of(replay, reward, folder)
            if not reward:
                _sample_after_a_round(replay, path)


def _sample_after_a_round(replay: Replay, path: Path) -> None:
    """As a run that goes on does: the window of the newest arrivals is two sync intervals long."""
    with JournalWriter(path, "searcher-0") as writer:
        writer.put(list(trajectories(BATCH, 1, seed=1)))
    replay.drain()
    samples = [_timed(lambda: replay.sample(7, 20)) for _ in range(300)]
    print(f"  after a round of {BATCH}: {milliseconds(samples)}")


def _sample_of(replay: Replay, reward: bool, folder: Path) -> None:
    gc.collect()
    objects, before = len(gc.get_objects()), _resident()
    replay.now = Version(0, STEPS)
    took = _timed(replay.drain)
    held = len(replay.buffer)
    samples = [_timed(lambda: replay.sample(7, 20)) for _ in range(300)]
    gc.collect()
    objects = len(gc.get_objects()) - objects
    more, most = (_resident() - before) / 1e9, peak_memory_bytes() / 1e9
    print(f"sample 7 x 20 of {held:,}, {'by reward' if reward else 'recent'}: {milliseconds(samples)}")
    print(f"  taken in within {took:.1f} s; {more:.2f} GB, the process at most {most:.2f} GB; "
          f"{objects / held:.3f} objects a row")  # fmt: skip
    if not reward:
        (folder / "state.json").write_text(json.dumps(replay.state()))


def open_again(folder: Path, rows: int, seconds: float) -> None:
    """After `sample`: the journal, and the replay as it was at its state."""
    path = folder / "large.sqlite"
    print(f"open again: looked over in {_timed(lambda: find_damage(path)):.1f} s")
    began = time.perf_counter()
    with JournalFollower(path) as follower:
        opened = time.perf_counter() - began
        replay = Replay(follower, settings(rows, False))
        restored = _timed(lambda: replay.restore(json.loads((folder / "state.json").read_text())))
        first = _timed(lambda: replay.sample(7, 20))
        most = peak_memory_bytes() / 1e9
        print(f"  opened, and looked over again, in {opened:.1f} s; {len(replay.buffer):,} as they were in "
              f"{restored:.1f} s; first batch {1e3 * first:.1f} ms; at most {most:.2f} GB")  # fmt: skip


def of_run(run: Path, folder: Path) -> None:
    """The share of a run's wall-clock that its journal took."""
    summary = Summary.read(run)
    with JournalFollower(run / "journal.sqlite") as journal:
        found = journal.drain()
    if summary is None or not found:
        sys.exit(f"{run} has no summary or no trajectories: give a run that has ended")
    made = [(t.provenance.get("searcher"), t.provenance.get("round")) for t in found]
    rounds = [[t for _, t in group] for _, group in groupby(zip(made, found, strict=True), key=lambda pair: pair[0])]
    rounds = [[_stamped(t, same[0]) for t in same] for same in rounds]
    path = folder / "again.sqlite"
    with JournalFollower(path) as follower, JournalWriter(path, "searcher-0") as writer:
        puts, drains = [], []
        for trajectories in rounds:
            puts.append(_timed(partial(writer.put, trajectories, counters={"generated_tokens": 1})))
            drains.append(_timed(follower.drain_stored))
    wall = summary.wall_seconds.total
    print(f"{run}: {len(rounds):,} rounds, {len(found):,} trajectories, {wall:.0f} s")
    for result in sorted((run / "logs").glob("searcher-*.result.json")):
        waited = json.loads(result.read_text())["clock"].get("journal", 0.0)
        name = result.name.partition(".")[0]
        print(f"  {name} waited {waited:.2f} s for it ({100 * waited / wall:.2f} % of the wall-clock)")
    print(f"  puts {sum(puts):.2f} s ({100 * sum(puts) / wall:.2f} % of the wall-clock), drains {sum(drains):.2f} s "
          f"({100 * sum(drains) / wall:.2f} %); a put: {milliseconds(puts)}")  # fmt: skip


def _stamped(t: Trajectory, first: Trajectory) -> Trajectory:
    """As a searcher has it: all of a round share these."""
    return replace(t, provenance=first.provenance, created=first.created)


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _command(part: str, *arguments: object) -> list[str]:
    return [sys.executable, __file__, "--part", part, *map(str, arguments)]


def _start(part: str, *arguments: object, pipe: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(_command(part, *arguments), stdout=subprocess.PIPE if pipe else None, text=True)


def _part(name: str, arguments: Sequence[str]) -> None:
    """In a process of its own."""
    path = Path(arguments[0])
    if name == "write":
        write(path, int(arguments[1]), float(arguments[2]))
    elif name == "drain":
        with suppress(KeyboardInterrupt):
            drain(path)
    elif name == "fill":
        fill(path, int(arguments[1]))
    else:
        parts = {"append": append, "shared": shared, "sample": sample, "open": open_again}
        parts[name](path, int(arguments[1]), float(arguments[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of append (each) and shared")
    parser.add_argument(
        "--folder", type=Path, default=None, help="a folder on the disk to measure; default: the system's"
    )
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--run", type=Path, default=None)
    parser.add_argument("--part", nargs="+", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        _part(given.part[0], given.part[1:])
        return
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(f"{os.cpu_count()} cores, load {load:.1f} per core before it began")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.run is not None:
            of_run(given.run, Path(folder))
            return
        for name in given.only.split(","):
            subprocess.run(_command(name, folder, given.rows, given.seconds), check=True)


if __name__ == "__main__":
    main()
