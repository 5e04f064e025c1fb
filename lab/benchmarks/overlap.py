"""How much of the two halves' work overlaps: asynchronous steps against synchronous ones, for any recipe.

    python lab/benchmarks/overlap.py instruct --steps 10 -- --model.path smollm2 --model.dtype bfloat16
    python lab/benchmarks/overlap.py lab/benchmarks/slow_instruct.py --steps 10 -- --model.path smollm2

Each answer is trained once (asynchronous up to `--uses` times). Synchronous is `inline`, on-policy, on one
and on two threads; asynchronous is `processes`, one searcher and one trainer of one thread each. g and t are the
seconds of generating (with judging) and of training per step of the synchronous run on one thread: (g + t) / max(g, t)
is what overlap can give, and the share reached is that of the ideal throughput 1 / max(g, t). Warm-up and evaluations
count on neither side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from async_speedup import SYNCHRONOUS, run

BARE = ["--evaluation.every", "0", "--evaluation.problems", "1"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=10, help="of the asynchronous run")
    parser.add_argument("--synchronous-steps", type=int, default=4)
    parser.add_argument("--uses", type=float, default=1.0, help="of an answer on average, at most, asynchronously")
    parser.add_argument("--seed", type=int, default=0)
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # behind it: what follows `tba train RECIPE`
    options, arguments = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    common = [*arguments, *BARE, "--seed", str(options.seed)]
    outcomes = {}
    with tempfile.TemporaryDirectory() as name:
        for side, side_flags in (
            ("synchronous, 1 thread", [*SYNCHRONOUS, "--run.threads", "1"]),
            ("synchronous, 2 threads", [*SYNCHRONOUS, "--run.threads", "2"]),
            ("asynchronous", ["--replay.pacing.max-mean-uses", str(options.uses)]),
        ):
            steps = options.steps if side == "asynchronous" else options.synchronous_steps
            folder = side.replace(", ", "-").replace(" ", "-")
            outcomes[side] = run(options.recipe, folder, [*common, *side_flags, "--steps", str(steps)], Path(name))
            outcome = outcomes[side]
            print(
                f"{side}: {outcome.seconds_per_step:.2f} s per step, each answer used {outcome.uses:.2f} times",
                flush=True,
            )
    g, t = outcomes["synchronous, 1 thread"].generating, outcomes["synchronous, 1 thread"].training
    step_seconds = outcomes["asynchronous"].seconds_per_step
    print(f"g = {g:.2f} s, t = {t:.2f} s per step on one thread: overlap can give {(g + t) / max(g, t):.2f}x")
    print(f"asynchronous: {max(g, t) / step_seconds:.0%} of the ideal throughput 1 / max(g, t)")
    for side in ("synchronous, 1 thread", "synchronous, 2 threads"):
        print(f"asynchronous is {outcomes[side].seconds_per_step / step_seconds:.2f} times as fast as {side}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
