"""How much of a searcher's slots is busy: rounds (`--run.synchronous-rounds`) against those that flow into one another.

    python lab/benchmarks/flow.py [--seconds 120]

The searcher, the engine with its slots and the journal are those of a run; what is made up is what takes
time, and time itself, which is virtual: it passes where something below takes it, so that the figures do not depend on
the machine.

- a token of all slots, and a pass over prompts: 10 ms
- the reward: 1 s a call, however many answers are in it
- the reference: 20 microseconds a token, on an accelerator of its own
- reading weights: 2 s; there are newer ones every 5 s

Slots, answers to each prompt, prompts in a round, exploration and the longest answer are those of the recipes gsm8k,
math, tldr and red_team_gpt2, and of one that reasons. Lengths are log-normal: a model whose first token, drawn
uniformly, names a quantile, is repeated until the answer has that length. A slot is busy while a token of its answer is
computed; the share is over all time after the first 10 s. Exits with 1 if it is below 95 % in a recipe whose
exploration is the same in every round, or lower than in rounds where it is not.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tba.rollout.searcher
from tba.clock import ShareClock
from tba.engines.slots import SlotCache
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.grading import Grader
from tba.models.huggingface import HuggingFace
from tba.protocols import Exploration, Manifest, PublishedWeights
from tba.recipe import Recipe
from tba.recipes.gsm8k import recipe as gsm8k
from tba.recipes.math import recipe as math_recipe
from tba.recipes.red_team_gpt2 import recipe as red_team_gpt2
from tba.recipes.tldr import recipe as tldr
from tba.replay.journal import JournalWriter
from tba.rollout.exploration import Fixed
from tba.rollout.prompts import PromptStream
from tba.rollout.searcher import Searcher
from tba.types import Completion, FloatArray, Judgement, Prompt, Version

TOKEN, REWARD, REFERENCE, READING, PUBLISHED = 0.010, 1.0, 20e-6, 2.0, 5.0  # seconds
WARM_UP = 10.0  # seconds
PROMPT = 16  # tokens
EOS, FIRST, QUANTILES = 1, 2, 400
WANTED = 0.95


@dataclass(frozen=True)
class Lengths:
    """A recipe's sizes, and the tokens of an answer: log-normal, cut at `longest`."""

    name: str
    median: int
    sigma: float
    longest: int
    slots: int = 64
    samples: int = 8
    prompts: int = 8  # in a round
    exploration: Exploration = Fixed()

    @classmethod
    def of(cls, recipe: Recipe, median: int, sigma: float) -> Lengths:
        assert isinstance(recipe.model, HuggingFace)
        engine = recipe.model.generation
        sizes = (engine.max_completion_tokens, engine.slot_count, recipe.samples_per_prompt, recipe.prompts_per_round)
        return cls(recipe.name, median, sigma, *sizes, recipe.exploration)

    def quantiles(self) -> torch.Tensor:
        """Returns the tokens of an answer by its first token."""
        normal = NormalDist(math.log(self.median), self.sigma)
        tokens = [math.exp(normal.inv_cdf((i + 0.5) / QUANTILES)) for i in range(QUANTILES)]
        return torch.tensor([0] * FIRST + [min(self.longest, max(2, round(n))) for n in tokens])


LENGTHS = (
    Lengths.of(gsm8k, 120, 0.4),
    Lengths.of(math_recipe, 300, 0.6),
    Lengths.of(tldr, 35, 0.4),
    Lengths.of(red_team_gpt2, 12, 0.4),
    Lengths("reasoning", 600, 0.8, 4096),
)


@dataclass
class VirtualTime:
    """Seconds that pass where they are spent. The main thread makes them pass, for all threads."""

    now: float = 0.0
    asleep: dict[threading.Thread, tuple[float, threading.Event]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def spend(self, seconds: float) -> None:
        """Sleep. A thread that is woken has a millisecond to hand in what it waited for."""
        me = threading.current_thread()
        if me is not threading.main_thread():
            woken = threading.Event()
            with self.lock:
                self.asleep[me] = (self.now + seconds, woken)
            woken.wait(3600)
            return
        end = self.now + seconds
        while True:
            with self.lock:
                due = min(self.asleep, key=lambda thread: self.asleep[thread][0], default=None)
                if due is None or self.asleep[due][0] > end:
                    break
                self.now, woken = self.asleep.pop(due)
            woken.set()
            due.join(0.001)
        self.now = end


@dataclass
class Table:
    """A model that repeats a token until the answer has the length it names, and what was computed with it."""

    time: VirtualTime
    lengths: Lengths
    rows: list[tuple[float, int]] = field(default_factory=list)  # (when, rows), of each token

    def model(self) -> LlamaForCausalLM:
        """A Llama as small as one can be, whose logits are replaced."""
        longest = PROMPT + self.lengths.longest
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=4, num_hidden_layers=1, intermediate_size=4, num_attention_heads=1, num_key_value_heads=1,
                vocab_size=FIRST + QUANTILES, max_position_embeddings=longest, bos_token_id=0, eos_token_id=EOS,
            )
        )  # fmt: skip

    def watch(self, model: LlamaForCausalLM) -> None:
        length_V = self.lengths.quantiles()

        def after(module: Any, args: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            self.time.spend(TOKEN)
            logits = torch.full_like(output.logits, -1e9)
            if isinstance(keywords["tba_slots"], SlotCache):
                token_R, count_R = keywords["input_ids"][:, 0], keywords["position_ids"][:, 0] - PROMPT + 1
                self.rows.append((self.time.now, len(token_R)))
                next_R = torch.where(count_R + 1 >= length_V[token_R], EOS, token_R)
                logits[torch.arange(len(token_R)), -1, next_R] = 0.0
            else:
                logits[..., FIRST:] = 0.0
            output.logits = logits
            return output

        model.register_forward_hook(after, with_kwargs=True)

    def busy(self, end: float) -> float:
        """Returns the share of slots in which a token was computed, until then."""
        rows = [n for when, n in self.rows if WARM_UP < when <= end]
        return sum(rows) * TOKEN / (self.lengths.slots * (end - WARM_UP))


class Numbers:
    """A tokenizer that costs nothing."""

    eos_token_id = EOS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return ""


@dataclass(frozen=True)
class Judge:
    """Takes its time over a call."""

    time: VirtualTime

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> Sequence[Judgement]:
        self.time.spend(REWARD)
        return [Judgement(1.0)] * len(answered)


@dataclass
class Scores:
    """A reference on an accelerator, in whose opinion all is certain."""

    time: VirtualTime
    concurrent: bool
    version: Version = Version()

    def log_probabilities_of(self, answered: Sequence[tuple[Prompt, Sequence[Completion]]]) -> list[list[FloatArray]]:
        self.time.spend(REFERENCE * sum(len(c.tokens) for _, completions in answered for c in completions))
        return [[np.zeros(len(c.tokens), np.float32) for c in completions] for _, completions in answered]

    def load(self, weights: Mapping[str, Any], version: Version) -> None:
        raise AssertionError("it is never reset")

    def load_first(self) -> None:
        raise AssertionError("it is never reset")


@dataclass
class Published:
    """Newer weights now and then, which are read slowly."""

    time: VirtualTime
    weights: Mapping[str, torch.Tensor]

    def newer_than(self, version: Version | None) -> PublishedWeights | None:
        newest = Version(0, int(self.time.now / PUBLISHED))
        return None if version is not None and newest <= version else self.at(newest)

    def at(self, version: Version) -> PublishedWeights:
        read: list[Mapping[str, torch.Tensor]] = []

        def once() -> Mapping[str, torch.Tensor]:
            if not read:
                self.time.spend(READING)
                read.append(self.weights)
            return read[0]

        return PublishedWeights(version, Manifest(), once)


def measure(lengths: Lengths, flows: bool, seconds: float, folder: Path) -> tuple[float, dict[str, float]]:
    """Returns the share of slots that were busy, and the shares of the searcher's clock."""
    time = VirtualTime()
    table = Table(time, lengths)
    model = table.model()
    settings = EngineSettings(slots=lengths.slots, max_completion_tokens=lengths.longest)
    engine = TransformersEngine(model, Numbers(), settings)
    table.watch(model)
    prompts = [Prompt("flow", np.full(PROMPT, FIRST + i, np.int32), str(i)) for i in range(64)]
    clock = ShareClock(now=lambda: time.now, state="generating")

    def interrupted() -> bool:
        if clock.current_state in ("reward", "reference"):  # nothing else makes time pass
            time.spend(TOKEN)
        return time.now > seconds

    virtual = SimpleNamespace(
        perf_counter=lambda: time.now, monotonic=lambda: time.now, time=lambda: time.now, sleep=time.spend
    )
    journals = JournalWriter(folder / f"{lengths.name}-{flows}.sqlite", "searcher-0")
    with journals as journal, patch.object(tba.rollout.searcher, "time", virtual):
        searcher = Searcher(
            name="searcher-0",
            engine=engine,
            reference=Scores(time, flows),
            grader=Waiting(Judge(time), time),
            exploration=lengths.exploration,
            prompts=PromptStream(prompts, 0, lambda count: journal.lease(count, 1e9)),
            journal=journal,
            weights=Published(time, dict(model.state_dict())),
            samples_per_prompt=lengths.samples,
            prompts_per_round=lengths.prompts,
            rng=np.random.default_rng(0),
            interrupted=interrupted,
            hand_down_seconds=0.25,
            flows=flows,
            warm_up=10**9,  # nobody trains, so that answers do not age
            clock=clock,
        )
        while time.now < seconds:
            searcher.round()
    spent = clock.seconds()
    return table.busy(seconds), {state: s / sum(spent.values()) for state, s in spent.items()}


class Waiting(Grader):
    """A grader whose waits take virtual time: nothing else makes it pass."""

    def __init__(self, judge: Judge, virtual: VirtualTime) -> None:
        super().__init__(judge, 3600.0)
        self._virtual = virtual

    def wait(self, seconds: float) -> None:
        """Let the time of a token pass, then poll."""
        self._virtual.spend(TOKEN)
        self.poll()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of virtual time, each")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| recipe | median, sigma, longest | slots busy, rounds | slots busy, flow | its clock |")
    print("|---|---|---|---|---|", flush=True)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for lengths in LENGTHS:
            before, _ = measure(lengths, False, seconds, Path(folder))
            after, clock = measure(lengths, True, seconds, Path(folder))
            if after < (WANTED if isinstance(lengths.exploration, Fixed) else before):
                missed.append(lengths.name)
            states = ", ".join(f"{state} {share:.0%}" for state, share in clock.items() if share >= 0.005)
            of = f"{lengths.median}, {lengths.sigma:g}, {lengths.longest}"
            print(f"| {lengths.name} | {of} | {before:.0%} | {after:.0%} | {states} |", flush=True)
    print(f"wanted: at least {WANTED:.0%}: {'MISSED by ' + ', '.join(missed) if missed else 'reached'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
