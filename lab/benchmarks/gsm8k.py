"""GSM8K on a laptop: makes the mixture for the warm start, and compares before and after, paired by problem.

    python lab/benchmarks/gsm8k.py data --gsm8k DIR --out mixture.jsonl
    python lab/benchmarks/gsm8k.py compare before.json after.json

`DIR` holds the real train.jsonl and test.jsonl. The commands between the two are in lab/gsm8k.md.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import numpy as np

from tba.evaluation.estimators import paired_difference
from tba.rewards.exact_answer import MARK
from tba.tasks.gsm8k import Gsm8k
from tba.tasks.reasoning_gym import ReasoningGym


def data(gsm8k: Path, symbolic: int, skip: int, slips: float, out: Path) -> None:
    """Demonstrations of GSM8K train and of `symbolic` gsm_symbolic problems (numbers apart from the held-out ones).

    The first `skip` of gsm_symbolic are left out: the problems of an earlier mixture, when a model goes on from it. In
    the share `slips` the last line gives a number from the middle of the solution, as careless people do.
    """
    rng = random.Random(0)
    templates = ReasoningGym(dataset="gsm_symbolic", train_problems=skip + symbolic, style="tba")
    problems = [*Gsm8k(path=str(gsm8k)).problems("train"), *templates.problems("train")[skip:]]
    demonstrations = [p.demonstration for p in problems if isinstance(p.demonstration, str)]  # all have one
    sampled_texts = [slip(text, rng) if rng.random() < slips else text for text in demonstrations]
    lines = [
        json.dumps({"prompt": p.prompt, "response": response, **p.fields})
        for p, response in zip(problems, sampled_texts, strict=True)
    ]
    out.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} demonstrations in {out}")


def slip(response: str, rng: random.Random) -> str:
    """The same worked solution, but its last line has another of its numbers, where it has one."""
    worked, _, answer = response.rpartition(MARK)
    wrong_numbers = [n for n in re.findall(r"\d+", worked) if n != answer.strip()]
    return f"{worked}{MARK} {rng.choice(wrong_numbers)}" if wrong_numbers else response


def compare(before: Path, after: Path) -> None:
    """Each metric before and after, with the difference over problems and Student's interval of it."""
    old, new = (json.loads(path.read_text())["scores"] for path in (before, after))
    for metric in old:
        d = paired_difference(np.array(old[metric]), np.array(new[metric]))
        verdict = "rise" if d.low > 0 else "fall" if d.high < 0 else "no rise"
        print(
            f"{metric:16} {np.mean(old[metric]):7.2%} -> {np.mean(new[metric]):7.2%}   difference {d.estimate:+.2%} "
            f"[{d.low:+.2%}, {d.high:+.2%}] over {len(old[metric])} problems: {verdict}"
        )


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data_parser = commands.add_parser("data")
    data_parser.add_argument("--gsm8k", type=Path, required=True)
    data_parser.add_argument("--symbolic", type=int, default=6000)
    data_parser.add_argument("--skip", type=int, default=0)
    data_parser.add_argument("--slips", type=float, default=0.0)
    data_parser.add_argument("--out", type=Path, required=True)
    second = commands.add_parser("compare")
    second.add_argument("before", type=Path)
    second.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "data":
        data(arguments.gsm8k, arguments.symbolic, arguments.skip, arguments.slips, arguments.out)
    else:
        compare(arguments.before, arguments.after)


if __name__ == "__main__":
    main()
