"""Credit at the boundaries that two tokenizers share, and a whole answer's: where each leads, on an enumerable toy.

    python lab/benchmarks/shared_boundaries.py [--teachers 5]

The student writes the characters a and b one by one, at most four, and an end. The teacher's tokens are

- `pairs`: two characters each, so that each of its tokens says as much as two of the student's;
- `merged`: a, b and ab, each text in the canonical way, as models are trained: behind the token a never comes b.

Both losses are squares of log pi - log p_T: of the whole answer (Trajectory Balance, no reward, the teacher for
reference, Z = 1), or of each stretch from one shared boundary to the next (dense credit: every shared prefix has flow
1). Each is minimised in the student's table of odds, in float64, on all texts alike, on the teacher's, and on the
student's own. Printed: total variation between the student's texts and the teacher's, mean and worst of the teachers.

With `merged`, the teacher's token a also says that no b follows, which the student's a does not: at that boundary no
table makes the two equal. That is so wherever one tokenizer merges what the other keeps apart.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys

import torch
from torch import Tensor

END = "."
DATA = ("all alike", "the teacher's", "its own")


class Toy:
    """A random teacher, and what it says of every stretch of its texts between two shared boundaries."""

    def __init__(self, merged: bool, generator: torch.Generator) -> None:
        lengths = range(5) if merged else (0, 2, 4)
        texts = ["".join(text) for n in lengths for text in itertools.product("ab", repeat=n)]
        tokens = [[*re.findall("ab|a|b" if merged else "..", text), END] for text in texts]
        odds: dict[tuple[str, ...], dict[str, float]] = {}
        for row in tokens:
            for n, token in enumerate(row):
                odds.setdefault(tuple(row[:n]), {})[token] = 0.0
        for table in odds.values():
            drawn = torch.randn(len(table), generator=generator, dtype=torch.float64).softmax(0)
            table.update(zip(table, drawn.tolist(), strict=True))
        prefixes = {text[:n] for text in texts for n in range(len(text) + 1)}
        follows = {p: [c for c in "ab" + END if p + c in prefixes or (c == END and p in texts)] for p in prefixes}
        self.places = {(p, c): n for n, (p, c) in enumerate((p, c) for p in follows for c in follows[p])}
        self.rows = [[self.places[p, c] for c in follows[p]] for p in follows]
        stretches, owners, teacher_odds = [], [], []  # the places of each stretch, its answer, the teacher's odds
        for answer, row in enumerate(tokens):
            before = ""
            for n, token in enumerate(row):
                stretches.append([self.places[before + token[:i], c] for i, c in enumerate(token)])
                owners.append(answer)
                teacher_odds.append(odds[tuple(row[:n])][token])
                before += token
        self.stretches = torch.zeros(len(stretches), len(self.places), dtype=torch.float64)
        for n, places in enumerate(stretches):
            self.stretches[n, places] = 1.0
        self.owners = torch.nn.functional.one_hot(torch.tensor(owners)).T.double()  # answers by stretches
        self.log_teacher_odds = torch.tensor(teacher_odds, dtype=torch.float64).log()
        self.teacher = (self.owners @ self.log_teacher_odds).exp()

    def led_to(self, dense: bool, data: str) -> float:
        """Minimise a loss, and return the total variation to the teacher that is left."""
        table = torch.zeros(len(self.places), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([table], lr=0.03)
        for _ in range(3000):
            log_student = self._log_odds(table)
            residuals = self.stretches @ log_student - self.log_teacher_odds
            loss = self.owners @ residuals.square() if dense else (self.owners @ residuals).square()
            student = self._texts(log_student)
            share = {"all alike": torch.ones_like(student), "the teacher's": self.teacher, "its own": student}[data]
            optimizer.zero_grad()
            (share.detach() / share.detach().sum() * loss).sum().backward()
            optimizer.step()
        return float((self._texts(self._log_odds(table)) - self.teacher).abs().sum().detach() / 2)

    def _log_odds(self, table: Tensor) -> Tensor:
        """The student's log-probability of each character after each prefix."""
        log_odds = torch.empty_like(table)
        for row in self.rows:
            log_odds[row] = table[row].log_softmax(0)
        return log_odds

    def _texts(self, log_student: Tensor) -> Tensor:
        """The student's probability of each text."""
        return (self.owners @ (self.stretches @ log_student)).exp()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, default=5)
    options = parser.parse_args()
    print(f"total variation to the teacher, mean (worst) of {options.teachers} teachers\n")
    print("| teacher's tokens | credit | " + " | ".join(DATA) + " |\n" + "|---" * (2 + len(DATA)) + "|")
    for merged, name in ((False, "pairs"), (True, "merged")):
        for dense, credit in ((False, "whole answer"), (True, "at shared boundaries")):
            cells = []
            for data in DATA:
                generator = torch.Generator().manual_seed(0)
                distances = [Toy(merged, generator).led_to(dense, data) for _ in range(options.teachers)]
                cells.append(f"{sum(distances) / len(distances):.3f} ({max(distances):.3f})")
            print(f"| {name} | {credit} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
