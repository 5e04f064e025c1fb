"""Distillation of the quickstart's base by ways of learning and sources of data, with equal numbers of tokens.

    python lab/benchmarks/distillation.py --out rows.jsonl [--seeds 5] [--updates 200] [--problems 500] [--table]

The teacher is that of the recipe `distil`. Ways: Trajectory Balance of whole answers (the default form) and token by
token, reverse KL and the Jensen-Shannon divergence by the whole vocabulary as TRL's GKD computes them
(`tba_lab/gkd.py`), reverse KL by the teacher's top 3 or 2 tokens and all others together (`Distil`), and the negative
log-likelihood of the teacher's texts (SFT). Sources: the student as it is; k = 64, which is the student of up to 64
updates ago, and half of each batch older; a log of the base's answers, offline; SFT has a log of the teacher's. No
reward is learnt from.

Each cell (way, source) has its learning rate of --rates, by the KL divergence to the teacher on a seed of its own (a
best rate at the edge is followed by the next beyond it), then the seeds. All are trained on as many tokens, 17
prompts x 8 answers an update. Measured on held-out prompts, by answers sampled at temperature 1: accuracy, and the KL
divergence per answer from the student to the teacher, on the student's answers, and back, on the teacher's, each
exact in the next token. A cell's row is written as it ends; after a stop the same command goes on. `cpu` is the
seconds of processor time of one run; one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tba.batch import Batch, collate
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.objectives.distil import Distil
from tba.objectives.subtrajectory_balance import SubtrajectoryBalance
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.causal import CausalPolicy
from tba.policy.head import split_buckets, top_of
from tba.protocols import Engine, Objective, PolicyOutput
from tba.recipe import Recipe
from tba.runtime.prompt_sets import prompts_of
from tba.schedules import Constant
from tba.settings import find
from tba.types import Group, Prompt, Sampling, Trajectory, Version
from tba_lab.gkd import generalised_jsd, kl

PROMPTS, ANSWERS = 17, 8  # of an update
STALE = 64  # updates between two copies of the student
LOGGED = 103  # batches in a log: 14,008 answers
TUNED_ON = 100
OWN, LOG = ("on-policy", "k = 64, half old", "log of the base"), "log of the teacher"
WAYS = ("tb", "tb by token", "reverse KL", "jsd")
TOP = {"top 3": 3, "top 2": 2}  # tokens of the teacher that `Distil` compares, beside the rest
CELLS = [*((way, source) for way in WAYS for source in OWN), ("sft", LOG)]
CELLS += [(way, source) for way in TOP for source in OWN]


@dataclass(frozen=True)
class Row:
    """What one run came to."""

    way: str
    source: str
    rate: float
    seed: int
    updates: int
    tokens: int
    accuracy: float
    kl: float  # of the student to the teacher, nats an answer
    kl_back: float  # of the teacher to the student
    cpu: float  # seconds


@dataclass(frozen=True)
class Study:
    """The models and prompts, and how long a run is."""

    recipe: Recipe
    updates: int
    problems: int

    @cached_property
    def base(self) -> HuggingFace:
        model: Any = self.recipe.model.prepared(self.recipe.task)
        return replace(model, generation=replace(model.generation, slots=PROMPTS * ANSWERS))

    @cached_property
    def taught(self) -> HuggingFace:
        model: Any = self.recipe.teachers.models[0].prepared(
            self.recipe.task, lambda line: print(line, file=sys.stderr)
        )
        return replace(model, generation=self.base.generation)

    @cached_property
    def teacher(self) -> Any:
        return plainly(self.taught).model.requires_grad_(False)

    @cached_property
    def train(self) -> list[Prompt]:
        return prompts_of(self.recipe, self.base, "train")

    @cached_property
    def held_out(self) -> list[Prompt]:
        return prompts_of(self.recipe, self.base, "eval")[: self.problems]

    def sampled(self, engine: Engine, prompts: list[Prompt], count: int, rng: np.random.Generator) -> list[Group]:
        """Returns answers to each prompt, with the log-probabilities of the teacher as the reference's."""
        answered = generate(engine, prompts, count, Sampling(), rng)
        bare = [
            Group(tuple(Trajectory("", p, c, 0.0, np.zeros(len(c.tokens), np.float32), Version()) for c in row))
            for p, row in zip(prompts, answered, strict=True)
        ]
        batch = collate(bare)
        with torch.inference_mode():
            log_BT = of_tokens(log_next(self.teacher, batch), batch).numpy()
        logs = iter(log_BT)
        return [
            replace(g, trajectories=tuple(replace(t, log_reference=next(logs)[: t.length]) for t in g.trajectories))
            for g in bare
        ]

    def batches(self, source: str, student: Any, rng: np.random.Generator) -> Iterator[list[Group]]:
        """Yields what each update is trained on, for ever."""
        source_model = self.taught if source == LOG else self.base
        engine = source_model.engine(Version(), 32)

        def drawn(count: int) -> list[Group]:
            chosen = rng.choice(len(self.train), count, replace=False)
            return self.sampled(engine, [self.train[i] for i in chosen], ANSWERS, rng)

        if source not in OWN[:2]:
            logged = drawn(min(LOGGED * PROMPTS, len(self.train)))
            while True:
                yield [logged[i] for i in rng.choice(len(logged), min(PROMPTS, len(logged)), replace=False)]
        every, older = (1, 0) if source == OWN[0] else (STALE, PROMPTS // 2)
        old_groups: list[Group] = []
        for update in range(sys.maxsize):
            if update % every == 0:
                engine.load(student.weights(), Version(0, update))
            old = (
                [old_groups[i] for i in rng.choice(len(old_groups), older, replace=False)]
                if older and old_groups
                else []
            )
            new = drawn(PROMPTS - len(old))
            old_groups += new if older else []
            yield [*new, *old]

    def run(self, way: str, source: str, rate: float, seed: int) -> Row:
        """Trains and measures one student."""
        began, rng = time.process_time(), np.random.default_rng([seed, CELLS.index((way, source))])
        torch.manual_seed(seed)
        student = plainly(self.base)
        optimizer = torch.optim.AdamW(student.parameters(), weight_decay=0.0)
        loss, tokens, update = self.loss(way), 0, 0
        budget = self.updates * PROMPTS * ANSWERS * 5  # tokens: an answer has four digits, and its end
        for groups in self.batches(source, student, rng):
            batch = collate(groups)
            update += 1
            optimizer.param_groups[0]["lr"] = rate * shape(tokens / budget)
            optimizer.zero_grad()
            loss(log_next(student.model, batch), batch, update).backward()
            clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            tokens += int(batch.mask_BT.sum())
            if tokens >= budget:
                break
        cpu = time.process_time() - began
        accuracy, away, back = self.measured(student, np.random.default_rng(seed))
        return Row(way, source, rate, seed, update, tokens, accuracy, away, back, cpu)

    def loss(self, way: str) -> Callable[[Tensor, Batch, int], Tensor]:
        """Returns the loss of a batch by the student's log-probabilities of every next token."""
        forms: dict[str, Objective] = {
            "tb": TrajectoryBalance(Constant(1.0)).start(),
            "tb by token": SubtrajectoryBalance(Constant(1.0), flow="one"),
        }

        def of_batch(log_BTV: Tensor, batch: Batch, step: int) -> Tensor:
            if way in forms:
                return forms[way](PolicyOutput(of_tokens(log_BTV, batch)), batch, step)[0]
            if way in TOP:
                return self.distil(log_BTV, batch, TOP[way], step)
            if way == "sft":
                return -of_tokens(log_BTV, batch).sum() / batch.mask_BT.sum()
            with torch.inference_mode():
                theirs_BTV = log_next(self.teacher, batch)
            beta = 1.0 if way == "reverse KL" else 0.5
            return generalised_jsd(log_BTV[batch.mask_BT], theirs_BTV.clone()[batch.mask_BT], beta)

        return of_batch

    def distil(self, log_BTV: Tensor, batch: Batch, count: int, step: int) -> Tensor:
        """Returns the loss of `Distil` with so many of the teacher's tokens, stored in half precision."""
        with torch.inference_mode():
            flat_MV, target_M = log_next(self.teacher, batch)[batch.mask_BT], batch.completion_BT[batch.mask_BT]
            top_MK, log_MJ = top_of(flat_MV, target_M, count)
        rows = batch.mask_BT.nonzero(as_tuple=True)
        buckets = log_MJ.new_zeros(*batch.mask_BT.shape, count + 1)
        teacher_BTC = buckets.clone().index_put(rows, log_MJ[:, 1:].half().float())
        student_MJ = split_buckets(log_BTV[batch.mask_BT], torch.cat([target_M[:, None], top_MK], 1))
        student_BTC = buckets.clone().index_put(rows, student_MJ[:, 1:])
        output = PolicyOutput(of_tokens(log_BTV, batch), log_top_BTC=student_BTC)
        return Distil()(output, replace(batch, log_top_BTC=teacher_BTC), step)[0]

    @torch.inference_mode()
    def measured(self, student: Any, rng: np.random.Generator) -> tuple[float, float, float]:
        """Returns accuracy and the KL divergences to and from the teacher, on held-out prompts."""
        engine, taught = self.base.engine(Version(), 32), self.taught.engine(Version(), 32)
        engine.load(student.weights(), Version(0, 1))
        divergences = []
        for sampler in (engine, taught):
            groups = self.sampled(sampler, self.held_out, 2, rng)
            batch = collate(groups)
            student_log, teacher_log = log_next(student.model, batch), log_next(self.teacher, batch)
            pair = (student_log, teacher_log) if sampler is engine else (teacher_log, student_log)
            divergences.append(float((kl(*pair) * batch.mask_BT).sum() / batch.rows))
            if sampler is engine:
                answers = [(t.prompt, t.completion) for g in groups for t in g.trajectories]
        marks = self.recipe.task.reward().judge(answers)
        return statistics.mean(mark.reward for mark in marks), divergences[0], divergences[1]


def plainly(model: HuggingFace) -> CausalPolicy:
    """Returns a policy whose model is called as transformers has it."""
    policy = model.policy(1.0)
    policy.model.set_attn_implementation("sdpa")
    return policy


def log_next(model: Any, batch: Batch) -> Tensor:
    """Returns the log-probabilities of every next token [B, T, V] of the answers, whose prompts are equally long."""
    prompt_BP = batch.prompt_GP[batch.group_B]
    logits = model(input_ids=torch.cat([prompt_BP, batch.completion_BT], 1), use_cache=False).logits
    return logits[:, prompt_BP.shape[1] - 1 : -1].log_softmax(-1)


def of_tokens(log_BTV: Tensor, batch: Batch) -> Tensor:
    """Returns the log-probabilities of an answer's own tokens [B, T], 0 behind its end."""
    log_BT = log_BTV.gather(2, batch.completion_BT[:, :, None])[:, :, 0]
    return torch.where(batch.mask_BT, log_BT, 0.0)


def shape(progress: float) -> float:
    """Returns the share of the learning rate after a share of the tokens: up, level, and down to nothing."""
    return max(0.01, min(1.0, progress / 0.05, (1 - progress) / 0.325))


def wanted(done: list[Row], seeds: int, rates: list[float]) -> Iterator[tuple[str, str, float, int]]:
    """Yields the runs that are missing: of each cell its rates, then of all cells the seeds at the best rate."""
    have = {(row.way, row.source, row.rate, row.seed) for row in done}
    missing = [(*cell, rate, TUNED_ON) for cell in CELLS for rate in untried(done, cell, rates)]
    if not missing:
        best = {cell: best_rate(done, cell) for cell in CELLS}
        missing = [(*c, best[c], seed) for seed in range(seeds) for c in CELLS if (*c, best[c], seed) not in have]
    yield from missing


def untried(done: list[Row], cell: tuple[str, str], rates: list[float]) -> list[float]:
    """Returns the rates that a cell has yet to be tried at: those given, and the next beyond a best one at the edge."""
    tried = {row.rate for row in done if (row.way, row.source) == cell and row.seed == TUNED_ON}
    if missing := [rate for rate in rates if rate not in tried]:
        return missing
    best = best_rate(done, cell)
    beyond = best * 0.3 if best == min(tried) else best * 3 if best == max(tried) else None
    return [] if beyond is None or len(rates) == 1 or len(tried) > len(rates) + 1 else [float(f"{beyond:.6g}")]


def best_rate(done: list[Row], cell: tuple[str, str]) -> float:
    """Returns the rate whose student was nearest to the teacher on the seed that rates are chosen on."""
    tried = [row for row in done if (row.way, row.source) == cell and row.seed == TUNED_ON]
    return min(tried, key=lambda row: row.kl + row.kl_back).rate


def table(done: list[Row]) -> str:
    """Returns means over seeds with the worst one, a line for each cell."""
    lines = [
        "| way | data | rate | seeds | accuracy, % (worst) | KL to the teacher (worst) | KL back (worst) | cpu s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        counted = [row for row in done if (row.way, row.source) == cell and row.seed != TUNED_ON]
        if counted:
            rows = [row for row in counted if row.rate == best_rate(done, cell)] or counted
            right, away, back, cpu = ([getattr(r, n) for r in rows] for n in ("accuracy", "kl", "kl_back", "cpu"))
            lines.append(
                f"| {cell[0]} | {cell[1]} | {rows[0].rate:g} | {len(rows)} "
                f"| {100 * statistics.mean(right):.1f} ({100 * min(right):.1f}) "
                f"| {statistics.mean(away):.3f} ({max(away):.3f}) | {statistics.mean(back):.3f} ({max(back):.3f}) "
                f"| {statistics.mean(cpu):.0f} |"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--most", type=int, default=sys.maxsize, help="runs to make now")
    parser.add_argument("--table", action="store_true", help="only print the table of what there is")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    study = Study(find("distil"), options.updates, options.problems)

    def done() -> list[Row]:
        lines = options.out.read_text().splitlines() if options.out.exists() else []
        return [Row(**json.loads(line)) for line in lines]

    for _ in range(0 if options.table else options.most):
        run = next(wanted(done(), options.seeds, options.rates), None)
        if run is None:
            break
        row = study.run(*run)
        with options.out.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(f"{row.way}, {row.source}, {row.rate:g}, seed {row.seed}: {row.accuracy:.3f}, KL {row.kl:.3f} and "
              f"{row.kl_back:.3f}, {row.cpu:.0f} s", file=sys.stderr)  # fmt: skip
    print(table(done()))


if __name__ == "__main__":
    main()
