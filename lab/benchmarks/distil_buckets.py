"""How near `Distil` comes to a teacher by its top K tokens, from texts of five origins, on an enumerable toy.

    python lab/benchmarks/distil_buckets.py [--teachers 3] [--divergences reverse forward js]

A text is three tokens of a vocabulary of eight. Teacher and student are tables of odds for each prefix, drawn at random
(logits of standard deviation 1.5). Each of 500 steps of Adam (falling from 0.3) minimises the loss of 128 texts: of
the student as it is; as it was up to 50 steps ago; of the teacher; half of either; all equally likely. Printed: the
total variation between the student's texts and the teacher's, mean and worst of the teachers, and its bound, the
expected number of tokens that the teacher draws from the last bucket. float64 on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tba.batch import Batch
from tba.objectives.distil import Distil
from tba.policy.head import split_buckets, top_of
from tba.protocols import PolicyOutput

VOCABULARY, LENGTH, TEXTS, STEPS, STALE = 8, 3, 128, 500, 50
SOURCES = ("on-policy", "stale", "teacher", "mixed", "uniform")
TOPS = (1, 2, 3, 5, VOCABULARY)


@dataclass(frozen=True)
class Table:
    """The logits of the next token after each prefix, [prefixes, V]; prefixes are numbered level by level."""

    logits_NV: Tensor

    @classmethod
    def draw(cls, generator: torch.Generator) -> Table:
        prefixes = sum(VOCABULARY**n for n in range(LENGTH))
        return cls(1.5 * torch.randn(prefixes, VOCABULARY, dtype=torch.float64, generator=generator))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns texts, int64 [count, T]."""
        texts = torch.zeros(count, 0, dtype=torch.int64)
        for _ in range(LENGTH):
            odds = self.logits_NV.detach()[prefixes_of(texts)[:, -1]].softmax(-1)
            texts = torch.cat([texts, torch.multinomial(odds, 1, generator=generator)], 1)
        return texts

    def log_probabilities(self) -> Tensor:
        """Returns the log-probability of every text, [V ** T]."""
        log_NV, log_M, first = self.logits_NV.log_softmax(-1), torch.zeros(1, dtype=torch.float64), 0
        for n in range(LENGTH):
            log_M = (log_M[:, None] + log_NV[first : first + VOCABULARY**n]).flatten()
            first += VOCABULARY**n
        return log_M


def prefixes_of(texts: Tensor) -> Tensor:
    """Returns the numbers of the prefixes of each text, the whole text's last: int64 [B, T + 1]."""
    numbers = [torch.zeros(len(texts), dtype=torch.int64)]
    for token in texts.unbind(1):
        numbers.append(VOCABULARY * numbers[-1] + token + 1)
    return torch.stack(numbers, 1)


def train(teacher: Table, source: str, top: int, objective: Distil, generator: torch.Generator) -> Table:
    """Returns a student after training."""
    student = Table(Table.draw(generator).logits_NV.requires_grad_())
    optimizer, old = torch.optim.Adam([student.logits_NV]), student
    empty = torch.zeros(TEXTS, dtype=torch.int64)
    for step in range(STEPS):
        if step % STALE == 0:
            old = Table(student.logits_NV.detach().clone())
        if source == "uniform":
            texts = torch.randint(VOCABULARY, (TEXTS, LENGTH), generator=generator)
        else:
            authors = {"on-policy": [student], "stale": [old], "teacher": [teacher], "mixed": [old, teacher]}[source]
            texts = torch.cat([author.sample(TEXTS // len(authors), generator) for author in authors])
        places, target_M = prefixes_of(texts)[:, :-1].flatten(), texts.flatten()
        top_MK, teacher_MJ = top_of(teacher.logits_NV[places], target_M, top)
        student_MJ = split_buckets(student.logits_NV[places], torch.cat([target_M[:, None], top_MK], 1))
        batch = Batch(empty[:, None], empty + 1, texts, empty + LENGTH, torch.ones_like(texts, dtype=torch.bool),
                      torch.zeros(texts.shape), empty.double(), empty)  # fmt: skip
        batch = replace(batch, log_top_BTC=teacher_MJ[:, 1:].unflatten(0, texts.shape))
        output = PolicyOutput(student_MJ[:, 0].view_as(texts), log_top_BTC=student_MJ[:, 1:].unflatten(0, texts.shape))
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - step / STEPS)
        optimizer.zero_grad()
        objective(output, batch, 1)[0].backward()
        optimizer.step()
    return student


def rest_bound(teacher: Table, top: int) -> float:
    """Returns the expected number of tokens of a text of the teacher's that are none of its top ones."""
    odds_NV = teacher.logits_NV.softmax(-1)
    rest_N = 1 - odds_NV.topk(top, -1).values.sum(-1)
    reach_M, first, expected = torch.ones(1, dtype=torch.float64), 0, 0.0
    for n in range(LENGTH):
        level = slice(first, first + VOCABULARY**n)
        expected += float(reach_M @ rest_N[level])
        reach_M, first = (reach_M[:, None] * odds_NV[level]).flatten(), level.stop
    return expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", type=int, default=3)
    parser.add_argument("--divergences", nargs="+", default=["reverse"], choices=["reverse", "forward", "js"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| divergence | K | " + " | ".join(SOURCES) + " | bound |\n|---|---|" + "---|" * (len(SOURCES) + 1))
    for divergence in options.divergences:
        for top in TOPS:
            cells = []
            for source in SOURCES:
                distances = []
                for seed in range(options.teachers):
                    generator = torch.Generator().manual_seed(seed)
                    teacher = Table.draw(generator)
                    student = train(teacher, source, top, Distil(divergence), generator)
                    gap = student.log_probabilities().detach().exp() - teacher.log_probabilities().exp()
                    distances.append(float(gap.abs().sum()) / 2)
                cells.append(f"{statistics.fmean(distances):.3f} ({max(distances):.3f})")
            teachers = [Table.draw(torch.Generator().manual_seed(seed)) for seed in range(options.teachers)]
            bounds = [rest_bound(teacher, top) for teacher in teachers]
            print(
                f"| {divergence} | {top} | {' | '.join(cells)} | {statistics.fmean(bounds):.3f} ({max(bounds):.3f}) |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
