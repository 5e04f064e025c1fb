"""Makes pairs that teach a gold model which summary belongs to a post: its author's, or another post's of equal length.

    python lab/benchmarks/post_pairs.py posts.jsonl pairs.jsonl [--recipe tldr_small] [--rejected 4] [--seed 0]

They are for the recipes `tldr_small` and `summaries`, whose answers are a line long: nobody has rated such lines, but
each post has its author's own. Only posts that the recipe trains on are used (those of at most `task.longest`
characters, not held out); with `--split eval` the held-out ones, to measure a reward model that knows none of them.
For each there are --rejected pairs: chosen, its author's summary; rejected, the summary of another post, drawn among
those with the nearest number of words, so that length carries no information.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

from tba.apps.preference.tldr import Tldr
from tba.settings import find

NEAREST = 40  # summaries among which a wrong one is drawn


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("posts", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--recipe", default="tldr_small")
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument("--rejected", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    task = find(options.recipe).task
    assert isinstance(task, Tldr)
    problems = replace(task, path=str(options.posts)).problems(options.split)
    rng = random.Random(options.seed)
    by_words = sorted(problems, key=lambda p: len(str(p.fields["reference"]).split()))
    pairs = 0
    with options.pairs.open("w") as file:
        for place, problem in enumerate(by_words):
            window_start = max(0, min(place - NEAREST // 2, len(by_words) - NEAREST - 1))
            neighbours = [p for p in by_words[window_start : window_start + NEAREST + 1] if p is not problem]
            for neighbour in rng.sample(neighbours, options.rejected):
                chosen, rejected = problem.fields["reference"], neighbour.fields["reference"]
                if chosen != rejected:
                    post = problem.fields.get("document", problem.prompt)
                    file.write(json.dumps({"prompt": post, "chosen": chosen, "rejected": rejected}) + "\n")
                    pairs += 1
    print(f"{len(problems)} posts, {pairs} pairs in {options.pairs}")


if __name__ == "__main__":
    main()
