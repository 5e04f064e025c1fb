"""Measures how noisy the gradient estimate is, against K at a constant batch and against the completions' length.

    python lab/benchmarks/gradient_variance.py [--batches 60] [--after 0] [--vary group-size] [--plot FILE.png]

The policy is the quickstart's, on its own task, on-policy at temperature 1. The gradients of independent batches of 140
answers to random prompts are computed by the repository's engine, policy and objectives. It prints the trace of the
gradient's covariance over the squared norm of its mean: 1 means that noise and signal are equally large in one batch.
Both are estimated without bias; 95 % intervals are the jackknife's over batches. Every objective gets the same batches.

*Group size*: K = 2, 4, 10, 20, 35, 70 answers to 140 / K prompts.

*Length*: K = 20, and sampling continues after the answer's end, up to 5, 8, 12, 18, 24 tokens. The reward reads only
the answer, so that problems, success rates and the gradient's expectation (of a sum over tokens) stay the same: this
measures the noise of additional tokens that the reward does not depend on. Their entropy is printed too, in nats per
token.

`--after N` measures the policy after N updates by Trajectory Balance, still against the base as the reference. At the
base itself the pull to the reference is 0, so that beta has no effect. On its own samples Trajectory Balance's gradient
is (K - 1) / K of RLOO's, so that their relative variances agree: equal rows are no mistake.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tba.batch import Batch, collate
from tba.engines.transformers import TransformersEngine
from tba.evaluation.estimators import Interval
from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.objectives.grpo import Grpo
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.policy.loading import load_model
from tba.protocols import Objective
from tba.recipes.quickstart import recipe
from tba.rewards.exact_answer import ExactText
from tba.rollout.prompts import PromptSettings, encode
from tba.schedules import Constant
from tba.types import Completion, Group, Prompt, Sampling, Trajectory, Version
from tba_lab.intervals import relative_variance
from tba_lab.plot_style import COLOURS, GREY, STYLES, frame, save_figure

ROWS = 140
GROUP_SIZES = (2, 4, 10, 20, 35, 70)
LENGTHS = (5, 8, 12, 18, 24)  # 5: four digits and the end, the whole of the longest answer
LENGTHS_K = 20
BETA = 0.05  # the quickstart's
OBJECTIVES: dict[str, Objective] = {
    "tb": TrajectoryBalance(Constant(BETA)),
    "rloo": Reinforce(Constant(BETA)),
    "grpo": Grpo(Constant(BETA)),
    "reinforce": Reinforce(Constant(BETA), baseline="none"),
}


@dataclass(frozen=True)
class Setting:
    """What a batch is made of."""

    vary: str  # group-size or length
    group_size: int
    tokens_asked: int  # 0: up to the answer's end; else exactly so many


SETTINGS = [Setting("group-size", k, 0) for k in GROUP_SIZES] + [Setting("length", LENGTHS_K, n) for n in LENGTHS]


class Sampler:
    """The quickstart's policy, which samples its own batches."""

    def __init__(self, seed: int) -> None:
        assert isinstance(recipe.model, HuggingFace)
        model = recipe.model.prepared(recipe.task)
        self.model, self.rng = model, np.random.default_rng([seed, 29])
        self.policy = model.policy(1.0)
        self.reference = model.reference(1.0, Version())
        self.tokenizer = model.tokenizer()
        self.ending = model.engine(Version())
        self.endless: dict[int, TransformersEngine] = {}
        self.prompts = encode(recipe.task.problems("train"), recipe.task.name, self.tokenizer, PromptSettings()).prompts

    def train(self, steps: int) -> None:
        """On-policy updates by Trajectory Balance, by the quickstart's optimizer."""
        optimizer = recipe.optimizer.start(self.policy.parameters())
        for step in range(1, steps + 1):
            batch = self.batch(Setting("", LENGTHS_K, 0))
            OBJECTIVES["tb"](self.policy.evaluate(batch), batch, step)[0].backward()
            optimizer.step(step)
            self.ending.load(self.policy.weights(), Version(0, step))

    def batch(self, setting: Setting) -> Batch:
        """A fresh one of `ROWS` answers."""
        chosen = self.rng.choice(len(self.prompts), size=ROWS // setting.group_size, replace=False)
        prompts = [self.prompts[i] for i in chosen]
        engine = self.engine(setting.tokens_asked) if setting.tokens_asked else self.ending
        answered = generate(engine, prompts, setting.group_size, Sampling(1.0), self.rng)
        scores = self.reference.log_probabilities_of(list(zip(prompts, answered, strict=True)))
        return collate([self._group(*row) for row in zip(prompts, answered, scores, strict=True)])

    def engine(self, tokens: int) -> TransformersEngine:
        """One for which nothing ends a completion but that many tokens."""
        if tokens not in self.endless:
            self.endless[tokens] = _without_end(self.model, tokens)
        engine = self.endless[tokens]
        if engine.version != self.ending.version:
            engine.load(self.policy.weights(), self.ending.version)
        return engine

    def _group(self, prompt: Prompt, row: Sequence[Completion], scores: Sequence[np.ndarray]) -> Group:
        marks = ExactText().judge([(prompt, self._as_read(c)) for c in row])
        return Group(
            tuple(
                Trajectory(f"{i}", prompt, c, mark.reward, score, Version())
                for i, (c, mark, score) in enumerate(zip(row, marks, scores, strict=True))
            )
        )

    def _as_read(self, completion: Completion) -> Completion:
        """The answer up to its end, which is all that the reward reads."""
        tokens, end = completion.tokens.tolist(), self.tokenizer.eos_token_id
        text = self.tokenizer.decode(tokens[: tokens.index(end)]) if end in tokens else ""
        return Completion(completion.tokens, text, completion.stop_reason, completion.versions)


def gradients(sampler: Sampler, setting: Setting, batches: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Objective -> [batches, parameters], and means over the batches."""
    parameters = list(sampler.policy.parameters())
    by_objective: dict[str, list[torch.Tensor]] = {name: [] for name in OBJECTIVES}
    facts: list[tuple[float, float, float]] = []
    for _ in range(batches):
        batch = sampler.batch(setting)
        for name, objective in OBJECTIVES.items():
            output = sampler.policy.evaluate(batch)  # anew: it can be differentiated once
            parts = torch.autograd.grad(objective(output, batch, 1)[0], parameters)
            by_objective[name].append(torch.cat([part.flatten() for part in parts]))
        tokens = float(batch.length_B.sum())
        surprise = -float(output.log_policy_BT.detach().sum())
        facts.append((float(batch.reward_B.mean()), tokens / ROWS, surprise / tokens))
    reward, length, nats = np.mean(facts, axis=0)
    return {n: torch.stack(g) for n, g in by_objective.items()}, {"reward": reward, "tokens": length, "nats": nats}


def measure(sampler: Sampler, settings: Sequence[Setting], batches: int) -> Iterator[dict[str, Any]]:
    """A row for each setting and objective."""
    for setting in settings:
        began = time.perf_counter()
        by_objective, facts = gradients(sampler, setting, batches)
        for name, gradient_MP in by_objective.items():
            variance = relative_variance((gradient_MP @ gradient_MP.T).double().numpy())
            yield {**asdict(setting), "objective": name, "variance": asdict(variance), **facts}
        print(f"  ({setting}: {time.perf_counter() - began:.0f} s)", flush=True)


def _without_end(settings: HuggingFace, tokens: int) -> TransformersEngine:
    model, tokenizer = load_model(settings.path, "cpu", torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    return TransformersEngine(model, tokenizer, replace(settings.generation, max_completion_tokens=tokens))


def interval(row: Mapping[str, Any]) -> Interval:
    return Interval(**row["variance"])


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: a row per setting, a column per objective."""
    names = list(dict.fromkeys(row["objective"] for row in rows))
    for vary, unit in (("group-size", "K"), ("length", "tokens")):
        setting_rows = [row for row in rows if row["vary"] == vary]
        if not setting_rows:
            continue
        yield f"| {unit} | reward | tokens | nats per token | {' | '.join(names)} |"
        yield "| ---: " * (4 + len(names)) + "|"
        for at in dict.fromkeys(place(row) for row in setting_rows):
            cells = {row["objective"]: row for row in setting_rows if place(row) == at}
            first_cell = cells[names[0]]
            figures = [f"{i.estimate:.2f} [{i.low:.2f}, {i.high:.2f}]" for i in (interval(cells[n]) for n in names)]
            facts = f"{at} | {first_cell['reward']:.3f} | {first_cell['tokens']:.1f} | {first_cell['nats']:.2f}"
            yield f"| {facts} | {' | '.join(figures)} |"
        yield ""


def place(row: Mapping[str, Any]) -> int:
    """Where a row stands on its axis."""
    return int(row["group_size"] if row["vary"] == "group-size" else row["tokens_asked"])


def draw(rows: Sequence[Mapping[str, Any]], path: Path, note: str) -> None:
    """A panel for each thing that varies, a line for each objective."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in ("group-size", "length") if any(row["vary"] == kind for row in rows)]
    figure = Figure(figsize=(6.0 * len(kinds), 4.4), facecolor="white", layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        frame(axes, "Noise of one batch's gradient", note)
        for i, name in enumerate(dict.fromkeys(row["objective"] for row in rows)):
            objective_rows = [row for row in rows if row["vary"] == kind and row["objective"] == name]
            intervals = [interval(row) for row in objective_rows]
            bars = [[i.estimate - i.low for i in intervals], [min(i.high, 1e6) - i.estimate for i in intervals]]
            at = [place(row) * (1 + 0.01 * i) for row in objective_rows]  # side by side where they agree
            look = {"color": COLOURS[i % len(COLOURS)], "ls": STYLES[i % len(STYLES)]}
            axes.errorbar(at, [i.estimate for i in intervals], bars, marker="o", ms=3, capsize=2, label=name, **look)
        axes.set_xscale("log")
        axes.set_yscale("log")
        marks = sorted({place(row) for row in rows if row["vary"] == kind})
        axes.set_xticks(marks, [str(mark) for mark in marks])
        axes.minorticks_off()
        label = (
            f"K, with K x B = {ROWS}" if kind == "group-size" else f"sampled tokens of a completion (K = {LENGTHS_K})"
        )
        axes.set_xlabel(label, color=GREY, fontsize=9)
        axes.set_ylabel("trace of covariance / squared norm of mean", color=GREY, fontsize=9)
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60, help="independent batches for each setting")
    parser.add_argument("--after", type=int, default=0, help="updates by Trajectory Balance before measuring")
    parser.add_argument("--vary", choices=("group-size", "length", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the rows; existing rows of other settings are kept")
    parser.add_argument("--plot", type=Path, help="a PNG of all rows, with those in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sampler = Sampler(arguments.seed)
    sampler.train(arguments.after)
    settings = [s for s in SETTINGS if arguments.vary in (s.vary, "both")]
    earlier_rows = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else []
    rows = [row for row in earlier_rows if row["vary"] not in {s.vary for s in settings}]
    rows += measure(sampler, settings, arguments.batches)
    print(f"\n{arguments.batches} batches of {ROWS}, seed {arguments.seed}, after {arguments.after} updates:\n")
    print("\n".join(table(rows)))
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.plot:
        draw(
            rows,
            arguments.plot,
            f"quickstart after {arguments.after} updates; {arguments.batches} batches, 95 % intervals",
        )


if __name__ == "__main__":
    main()
