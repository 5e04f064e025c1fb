r"""Graders on pairs of right answer and response whose verdict is known: what is accepted wrongly, and refused wrongly.

    python lab/benchmarks/graders.py FILE [--math-verify] [--list] [--rounds 5]

Each line of FILE is `{"grader": "math" or "exact", "gold": ..., "response": ..., "right": true or false}`;
tests/fixtures/graders.jsonl is one. With `--math-verify` the package math-verify judges the same pairs by itself (its
`parse` of gold and response, and `verify`). The time per pair is processor time of this process, the median of so many
rounds, algebra included: the same on two commits, interleaved, is a comparison.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tba.rewards import math_text
from tba.rewards.exact_answer import grade
from tba.rewards.math_answer import equal_answers, equal_without_algebra
from tba.rewards.math_text import last_boxed


def by_math(gold: str, response: str) -> bool:
    """As `MathAnswer`, in this process and without a time limit."""
    boxed = last_boxed(response)
    mark = equal_without_algebra(boxed, gold)
    return equal_answers(boxed or "", gold) if mark is None else mark


def by_exact(gold: str, response: str) -> bool:
    """As `ExactAnswer`."""
    return grade(response, gold)


def by_math_verify(gold: str, response: str) -> bool:
    """math-verify alone, as its page says: the gold in a formula, the response as it is."""
    from math_verify import parse, verify

    parsed_gold, parsed_answer = (parse(text, parsing_timeout=None) for text in (f"${gold}$", response))
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--math-verify", action="store_true", help="judge the same pairs by math-verify alone")
    parser.add_argument("--list", action="store_true", help="list every pair that is judged wrongly")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timing")
    arguments = parser.parse_args()
    logging.disable()  # math-verify tells of every expression that it cannot read
    pairs = [json.loads(line) for line in arguments.file.read_text(encoding="utf-8").splitlines()]
    graders: dict[str, Callable[[str, str], bool]] = {"math": by_math, "exact": by_exact}
    for name, grader in graders.items():
        grader_pairs = [pair for pair in pairs if pair["grader"] == name]
        tell(name, grader, grader_pairs, arguments.list)
        print(
            f"  {1000 * seconds_each(grader, grader_pairs, arguments.rounds):.3f} ms of processor time for each",
            flush=True,
        )
        if arguments.math_verify:
            tell(f"math-verify on the pairs of {name}", by_math_verify, grader_pairs, listed=False)


def tell(name: str, grader: Callable[[str, str], bool], pairs: list[dict[str, object]], listed: bool) -> None:
    """Print the confusion of one grader."""
    wrong = []
    counts: Counter[tuple[bool, bool]] = Counter()
    for pair in pairs:
        accepted = grader(str(pair["gold"]), str(pair["response"]))
        counts[bool(pair["right"]), accepted] += 1
        if accepted != pair["right"]:
            wrong.append((accepted, pair))
    wrongly = f"{counts[False, True]} of {counts[False, True] + counts[False, False]}"
    refused = f"{counts[True, False]} of {counts[True, False] + counts[True, True]}"
    print(f"{name}: {len(pairs)} pairs; accepted wrongly {wrongly}, refused wrongly {refused}")
    for accepted, pair in wrong if listed else ():
        print(f"    {'accepted' if accepted else 'refused'}: {pair['response']!r} for {pair['gold']!r}")


def seconds_each(grader: Callable[[str, str], bool], pairs: list[dict[str, object]], rounds: int) -> float:
    """Processor time per pair, the median over rounds."""
    each = []
    for _ in range(rounds):
        getattr(math_text.canonicalize, "cache_clear", lambda: None)()  # a training run's answers are new
        began = time.process_time()
        for pair in pairs:
            grader(str(pair["gold"]), str(pair["response"]))
        each.append((time.process_time() - began) / max(1, len(pairs)))
    return statistics.median(each)


if __name__ == "__main__":
    main()
