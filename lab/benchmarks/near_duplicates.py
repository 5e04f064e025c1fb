"""What near duplicates, eviction by reward and draws cost a replay buffer with a single prompt.

    python lab/benchmarks/near_duplicates.py [--rows 10000,100000] [--tokens 20] [--inserts 300]

Answers have about --tokens tokens, drawn by Zipf's law from 5,000; one in five of those inserted is an earlier one with
two tokens changed. CPU time of this thread per insert into a full buffer (each insert evicts one), by setting, in
blocks of 50 inserts; the median over blocks and the slowest block. Then that of drawing a batch of 8 groups of 16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tba.apps.red_team.near import HashedNgrams, NearDuplicates
from tba.replay.buffer import Buffer, BufferSettings
from tba.replay.codec import StoredTrajectory
from tba.replay.selection import BatchRequest, RecencyReward
from tba.types import Completion, Prompt, StopReason, Trajectory, Version

VOCABULARY, DIMENSIONS, TURN = 5000, 384, 50
PROMPT = Prompt("red_team", np.arange(8, dtype=np.int32), "the one prompt there is")
VARIANTS = {
    "none, oldest out": BufferSettings(),
    "none, lowest reward out": BufferSettings(evict="lowest_reward"),
    "edit 0.25": BufferSettings(evict="lowest_reward", near_duplicates=NearDuplicates("edit", 0.25)),
    "edit 0.1": BufferSettings(evict="lowest_reward", near_duplicates=NearDuplicates("edit", 0.1)),
    f"cosine, {DIMENSIONS} numbers": BufferSettings(
        evict="lowest_reward", near_duplicates=NearDuplicates("cosine", 0.4, embedding=HashedNgrams(DIMENSIONS))
    ),
}


def answers(count: int, tokens: int, changed: float, rng: np.random.Generator, name: str) -> list[StoredTrajectory]:
    """As they come from the journal; a share of them is an earlier one of them, changed."""
    weight = 1 / np.arange(1, VOCABULARY + 1)
    drawn = rng.choice(VOCABULARY, (count, 2 * tokens), p=weight / weight.sum()).astype(np.int32)
    length = rng.integers(tokens // 2, 3 * tokens // 2 + 1, count)
    rows: list[StoredTrajectory] = []
    for i in range(count):
        answer_tokens = drawn[i, : length[i]]
        if i and rng.random() < changed:
            answer_tokens = rows[int(rng.integers(i))].tokens.copy()
            at = rng.integers(0, len(answer_tokens), 2)
            answer_tokens[at] = drawn[i, :2]
        completion = Completion(
            answer_tokens, " ".join(map(str, answer_tokens)), StopReason.EOS, (Version(), Version())
        )
        logs = np.zeros(len(answer_tokens), dtype=np.float32)
        reward = float(-rng.random())
        rows.append(StoredTrajectory.of(Trajectory(f"{name} {i}", PROMPT, completion, reward, logs, Version())))
    return rows


def inserting(buffer: Buffer, stored: Sequence[StoredTrajectory]) -> float:
    """CPU times_ms of this thread for each."""
    began = time.thread_time()
    for row in stored:
        buffer.add(row)
    return 1000 * (time.thread_time() - began) / len(stored)


def drawing(buffer: Buffer, selection: RecencyReward) -> list[float]:
    """CPU times_ms of this thread for each of ten batches."""
    selector, rng, times_ms = selection.start(), np.random.default_rng(0), []
    for _ in range(10):
        began = time.thread_time()
        selector.select(buffer, BatchRequest(8, 16), rng)
        times_ms.append(1000 * (time.thread_time() - began))
    return times_ms


def measure(rows: int, tokens: int, inserts: int) -> None:
    """A line for each variant."""
    kept_rows = answers(rows, tokens, 0.0, np.random.default_rng(0), "first")
    new_rows = answers(inserts, tokens, 0.2, np.random.default_rng(1), "more")
    buffers = {name: filled(replace(s, per_prompt=rows, total=rows), kept_rows) for name, s in VARIANTS.items()}
    turns: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for start in range(0, inserts, TURN):
        for name, buffer in buffers.items():
            turns[name].append(inserting(buffer, new_rows[start : start + TURN]))
    for name, times_ms in turns.items():
        print(f"{rows:>7,} rows  {name:26} {np.median(times_ms):7.3f} ms per insert, slowest turn {max(times_ms):.3f}")
    for name, selection in (
        ("by reward", RecencyReward(m=0.0, inverse_temperature=1.0)),
        ("half of each group recent", RecencyReward(m=0.5, inverse_temperature=1.0, mix="group", disjoint=True)),
        ("uniform", RecencyReward(m=0.0)),
    ):
        times_ms = drawing(buffers["none, lowest reward out"], selection)
        print(f"{rows:>7,} rows  batch, {name:26} {np.median(times_ms):7.3f} ms, slowest {max(times_ms):.3f}")


def filled(settings: BufferSettings, stored: Sequence[StoredTrajectory]) -> Buffer:
    """A memory with all of these, taken in without a look at what they are near."""
    buffer = Buffer(settings)
    neighbours, buffer._neighbours = buffer._neighbours, None
    for row, stored_row in enumerate(stored):  # no row is free before it
        buffer.add(stored_row)
        if neighbours is not None:
            neighbours.add(row, stored_row)
    buffer._neighbours = neighbours
    return buffer


def main() -> None:
    """The figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,100000")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--inserts", type=int, default=300)
    options = parser.parse_args()
    for rows in map(int, options.rows.split(",")):
        measure(rows, options.tokens, options.inserts)


if __name__ == "__main__":
    main()
