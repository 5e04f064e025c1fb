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
    prompt_list = [Prompt("sums", rng.integers(0, 30_000, 60).astype(np.int32), f"problem {i}") for i in range(prompts)]
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
            prompt=prompt_list[i // BATCH % prompts],
            completion=completion,
            reward=float(rng.integers(2)),
            log_reference=-rng.random(TOKENS).astype(np.float32),
            reference=Version(),
            provenance=provenance,
        )


def flush_seconds(folder: Path, size: int, times: int = 20) -> list[float]:
    """Returns the seconds that this disk takes to flush `size` more bytes of a file."""
    seconds = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(times):
            start = time.perf_counter()
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return seconds


def milliseconds(seconds: Sequence[float]) -> str:
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return f"median {1e3 * p50:.2f} ms, p99 {1e3 * p99:.2f} ms, most {1e3 * max(seconds):.2f} ms"


def time_appends(folder: Path, rows: int, seconds: float) -> None:
    """Times one writer, in rounds, with flushes of the bare disk in between."""
    for follower in (False, True):
        path = folder / f"append-{follower}.sqlite"
        follower_process = _start("drain", path) if follower else None
        with JournalWriter(path, "searcher-0") as writer:
            written_count, put_seconds, flushes, puts = 0, 0.0, [], []
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                new_trajectories = list(trajectories(40 * BATCH, 64, seed=written_count))
                batches = [new_trajectories[i : i + BATCH] for i in range(0, len(new_trajectories), BATCH)]
                flushes += flush_seconds(folder, 100_000)
                for batch in batches:
                    start = time.perf_counter()
                    writer.put(batch, counters={"generated_tokens": BATCH * TOKENS})
                    puts.append(time.perf_counter() - start)
                written_count += len(new_trajectories)
                put_seconds += sum(puts[-len(batches) :])
        rate = f"{written_count / put_seconds:,.0f} trajectories/s ({written_count:,})"
        print(f"append, {'with a follower' if follower else 'alone'}: {rate}")
        print(f"  a batch of {BATCH}: {milliseconds(puts)}; a flush of 100 kB: {milliseconds(flushes)}")
        if follower_process is not None:
            follower_process.terminate()
            follower_process.wait()
        remove_journal(path)


def time_shared_writers(folder: Path, rows: int, seconds: float) -> None:
    """Times eight writers at a fixed pace, with a follower."""
    path = folder / "shared.sqlite"
    with JournalFollower(path) as follower:
        writers = [_start("write", path, str(n), str(seconds), pipe=True) for n in range(WRITERS)]
        drained_count = 0
        while any(w.poll() is None for w in writers):
            drained_count += len(follower.drain())
            time.sleep(0.004)
        drained_count += len(follower.drain())
    puts = [float(x) for w in writers for x in (w.stdout.read() if w.stdout else "").split()]
    print(f"shared by {WRITERS}: {len(puts) * BATCH / seconds:,.0f} trajectories/s, {drained_count:,} drained")
    print(
        f"  a put of {BATCH}: {milliseconds(puts)}; a flush of 100 kB: {milliseconds(flush_seconds(folder, 100_000))}"
    )
    remove_journal(path)


def write_batches(path: Path, number: int, seconds: float) -> None:
    """Writes batches at a fixed pace, and prints the seconds of each."""
    batches = [
        list(trajectories(BATCH, 8, seed=1000 * number + n)) for n in range(int(seconds * RATE / WRITERS / BATCH))
    ]
    period = BATCH * WRITERS / RATE
    with JournalWriter(path, f"searcher-{number}") as writer:
        next_time = time.monotonic() + period * number / WRITERS
        for batch in batches:
            time.sleep(max(0.0, next_time - time.monotonic()))
            start = time.perf_counter()
            writer.put(batch, counters={"generated_tokens": BATCH * TOKENS})
            print(time.perf_counter() - start)
            next_time += period


def drain_until_ended(path: Path) -> None:
    """Follows a journal until the process is ended."""
    with JournalFollower(path) as follower:
        while True:
            follower.drain_stored()
            time.sleep(0.004)


def fill_journal(path: Path, rows: int) -> None:
    """Fills a large journal, in large batches."""
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


def time_sampling(folder: Path, rows: int, seconds: float) -> None:
    """Times draws from a replay that holds a large journal."""
    path = folder / "large.sqlite"
    fill_seconds = _time_call(lambda: subprocess.run(_command("fill", path, rows), check=True))
    print(f"a journal of {rows:,}: made in {fill_seconds:.0f} s, {path.stat().st_size / 1e9:.2f} GB")
    for reward in (False, True):
        with JournalFollower(path) as follower:
            replay = Replay(follower, settings(rows, reward))
            _time_samples(replay, reward, folder)
            if not reward:
                _sample_after_a_round(replay, path)


def _sample_after_a_round(replay: Replay, path: Path) -> None:
    """Times draws after a round has arrived: the window of the newest arrivals is two sync intervals long."""
    with JournalWriter(path, "searcher-0") as writer:
        writer.put(list(trajectories(BATCH, 1, seed=1)))
    replay.drain()
    samples = [_time_call(lambda: replay.sample(7, 20)) for _ in range(300)]
    print(f"  after a round of {BATCH}: {milliseconds(samples)}")


def _time_samples(replay: Replay, reward: bool, folder: Path) -> None:
    gc.collect()
    objects, bytes_before = len(gc.get_objects()), _resident_bytes()
    replay.now = Version(0, STEPS)
    drain_seconds = _time_call(replay.drain)
    row_count = len(replay.buffer)
    samples = [_time_call(lambda: replay.sample(7, 20)) for _ in range(300)]
    gc.collect()
    objects = len(gc.get_objects()) - objects
    added_gb, peak_gb = (_resident_bytes() - bytes_before) / 1e9, peak_memory_bytes() / 1e9
    print(f"sample 7 x 20 of {row_count:,}, {'by reward' if reward else 'recent'}: {milliseconds(samples)}")
    print(f"  taken in within {drain_seconds:.1f} s; {added_gb:.2f} GB, the process at most {peak_gb:.2f} GB; "
          f"{objects / row_count:.3f} objects a row")  # fmt: skip
    if not reward:
        (folder / "state.json").write_text(json.dumps(replay.state()))


def time_reopening(folder: Path, rows: int, seconds: float) -> None:
    """Times opening the journal of `time_sampling` again, and restoring the replay from its state."""
    path = folder / "large.sqlite"
    print(f"open again: looked over in {_time_call(lambda: find_damage(path)):.1f} s")
    start = time.perf_counter()
    with JournalFollower(path) as follower:
        open_seconds = time.perf_counter() - start
        replay = Replay(follower, settings(rows, False))
        restore_seconds = _time_call(lambda: replay.restore(json.loads((folder / "state.json").read_text())))
        first_seconds = _time_call(lambda: replay.sample(7, 20))
        peak_gb = peak_memory_bytes() / 1e9
        print(f"  opened, and looked over again, in {open_seconds:.1f} s; {len(replay.buffer):,} as they were "
              f"in {restore_seconds:.1f} s; first batch {1e3 * first_seconds:.1f} ms; at most "
              f"{peak_gb:.2f} GB")  # fmt: skip


def print_run_share(run: Path, folder: Path) -> None:
    """Prints the share of a run's wall-clock that its journal took."""
    summary = Summary.read(run)
    with JournalFollower(run / "journal.sqlite") as journal:
        all_trajectories = journal.drain()
    if summary is None or not all_trajectories:
        sys.exit(f"{run} has no summary or no trajectories: give a run that has ended")
    round_keys = [(t.provenance.get("searcher"), t.provenance.get("round")) for t in all_trajectories]
    pairs = zip(round_keys, all_trajectories, strict=True)
    rounds = [[t for _, t in group] for _, group in groupby(pairs, key=lambda pair: pair[0])]
    rounds = [[_with_shared_facts(t, row[0]) for t in row] for row in rounds]
    path = folder / "again.sqlite"
    with JournalFollower(path) as follower, JournalWriter(path, "searcher-0") as writer:
        puts, drains = [], []
        for trajectories in rounds:
            puts.append(_time_call(partial(writer.put, trajectories, counters={"generated_tokens": 1})))
            drains.append(_time_call(follower.drain_stored))
    wall = summary.wall_seconds.total
    print(f"{run}: {len(rounds):,} rounds, {len(all_trajectories):,} trajectories, {wall:.0f} s")
    for result in sorted((run / "logs").glob("searcher-*.result.json")):
        wait_seconds = json.loads(result.read_text())["clock"].get("journal", 0.0)
        name = result.name.partition(".")[0]
        print(f"  {name} waited {wait_seconds:.2f} s for it ({100 * wait_seconds / wall:.2f} % of the wall-clock)")
    print(f"  puts {sum(puts):.2f} s ({100 * sum(puts) / wall:.2f} % of the wall-clock), drains {sum(drains):.2f} s "
          f"({100 * sum(drains) / wall:.2f} %); a put: {milliseconds(puts)}")  # fmt: skip


def _with_shared_facts(t: Trajectory, first_trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory with the facts that all trajectories of a round share."""
    return replace(t, provenance=first_trajectory.provenance, created=first_trajectory.created)


def _time_call(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _command(part: str, *arguments: object) -> list[str]:
    return [sys.executable, __file__, "--part", part, *map(str, arguments)]


def _start(part: str, *arguments: object, pipe: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(_command(part, *arguments), stdout=subprocess.PIPE if pipe else None, text=True)


def _part(name: str, arguments: Sequence[str]) -> None:
    """Carries out one part, in a process of its own."""
    path = Path(arguments[0])
    if name == "write":
        write_batches(path, int(arguments[1]), float(arguments[2]))
    elif name == "drain":
        with suppress(KeyboardInterrupt):
            drain_until_ended(path)
    elif name == "fill":
        fill_journal(path, int(arguments[1]))
    else:
        parts = {"append": time_appends, "shared": time_shared_writers, "sample": time_sampling, "open": time_reopening}
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
    options = parser.parse_args()
    if options.part is not None:
        _part(options.part[0], options.part[1:])
        return
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(f"{os.cpu_count()} cores, load {load:.1f} per core before it began")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.run is not None:
            print_run_share(options.run, Path(folder))
            return
        for name in options.only.split(","):
            subprocess.run(_command(name, folder, options.rows, options.seconds), check=True)


if __name__ == "__main__":
    main()
