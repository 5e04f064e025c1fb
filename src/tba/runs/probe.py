"""Times a recipe's searcher or trainer, in a process of its own that an estimate starts as a run starts its parts.

It makes a few rounds or steps with the recipe's own parts and keeps nothing. It prints one line of JSON: seconds and
peak memory.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tba.batch import Fetched, collate
from tba.generation import generate
from tba.models.arithmetic import product_rate
from tba.models.huggingface import HuggingFace
from tba.protocols import Model, Policy, Tokenizer, started
from tba.recipe import Recipe
from tba.record.memory import keep_few_kernels, peak_gpu_memory_bytes, peak_memory_bytes
from tba.runtime.devices import keep_to_share
from tba.runtime.prompting import engine_of, prompts_of, reward_of, vine_of
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.runtime.teaching import reference_of, teachers_of
from tba.settings import find, override
from tba.training.ranks.messages import RankSettings
from tba.training.staleness import effective_share
from tba.training.trainer import Trainer
from tba.types import TEACHER, Completion, Group, Json, Judgement, Prompt, StopReason, Trajectory, Version
from tba.weights.directory import WeightDirectory

ROUNDS = 5  # timed rounds or steps at least, after one to warm up
UPDATES = 6  # after which the effective sample size is measured
LONG = 15.0  # seconds after which fewer are enough: whoever checks a large model waits for them
_PATIENCE = 60.0  # seconds in which those updates are made at most; else it is not measured
_T = TypeVar("_T")
# its tokens, mask, log-probabilities under the model, reward, and those under another reference and each teacher
_Answer: TypeAlias = tuple[list[int], list[bool] | None, list[float], float, list[list[float]]]
_Answers: TypeAlias = tuple[int, list[_Answer]]  # the place of a prompt, and the answers to it
_PROMPTS_SHOWN, _ANSWERS_SHOWN = 3, 2


def search(recipe: Recipe, at_least: float, seed: int) -> dict[str, Json]:
    """Time rounds: generate, grade, score under the reference, and VinePPO's rollouts if the recipe has them."""
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model, "train")
    held_out = prompts_of(recipe, model, "eval")
    both = {prompt.key for prompt in prompts} & {prompt.key for prompt in held_out}
    engine, reward = engine_of(recipe, model, Version()), reward_of(recipe.task)
    vine = vine_of(recipe, model, engine, reward)
    begun = model.reference(recipe.policy_temperature, Version())
    others = [] if recipe.reference is None else [reference_of(recipe, model)]
    scorers = [begun, *others, *teachers_of(recipe, model, (others or [begun])[0])]
    rng, tokenizer = np.random.default_rng(seed), model.tokenizer()
    seconds: list[float] = []
    generating: list[float] = []
    tokens: list[tuple[int, int]] = []  # of the prompts and the answers of each round
    answers: list[_Answers] = []
    groups: list[list[float]] = []  # rewards of each prompt's answers
    stopped: Counter[str] = Counter()
    shown: list[Json] = []
    while not _enough(seconds, at_least, recipe):
        chosen = rng.integers(len(prompts), size=recipe.prompts_per_round).tolist()
        asked = [prompts[j] for j in chosen]
        began, sampling = time.perf_counter(), recipe.exploration.draw(rng)
        answered = generate(engine, asked, recipe.samples_per_prompt, sampling, rng)
        generating.append(time.perf_counter() - began)
        pairs = [(p, c) for p, row in zip(asked, answered, strict=True) for c in row]
        marks = iter(reward.judge(pairs))
        marked = [list(islice(marks, len(row))) for row in answered]
        if vine is not None:
            unscored = [Trajectory("", p, c, 0.0, np.zeros(len(c.tokens), np.float32), Version()) for p, c in pairs]
            vine.grow(unscored, sampling, rng, Counter())
        of_prompts = list(zip(asked, answered, strict=True))
        scored = [scorer.log_probabilities_of(of_prompts) for scorer in scorers]
        seconds.append(time.perf_counter() - began)
        tokens.append((sum(len(p.tokens) for p in asked), sum(len(c.tokens) for _, c in pairs)))
        for j, row, own, *scores in zip(chosen, answered, marked, *scored, strict=True):
            rewards = [mark.reward for c, mark in zip(row, own, strict=True) if not _failed(c)]
            groups += [rewards] if rewards else []
            stopped.update(c.stop_reason.value for c in row)
            stopped["failed"] += len(row) - len(rewards)
            stopped["copies"] += len(row) - len({c.digest for c in row})
            stopped["empty"] += sum(not c.text.strip() for c in row)
            if len(shown) < _PROMPTS_SHOWN:
                shown.append(_shown(prompts[j], row, own, tokenizer))
            if len(answers) < ROUNDS * recipe.prompts_per_round:
                kept = [
                    (
                        c.tokens.tolist(),
                        None if c.mask is None else c.mask.tolist(),
                        first.tolist(),
                        mark.reward,
                        [log_T.tolist() for log_T in theirs],
                    )
                    for c, mark, first, *theirs in zip(row, own, *scores, strict=True)
                    if math.isfinite(mark.reward) and all(np.isfinite(log_T).all() for log_T in theirs)
                ]
                answers += [(j, kept)] if kept else []
    return {
        "round_seconds": statistics.mean(_timed(seconds)),
        "generation_seconds": statistics.mean(_timed(generating)),
        "tokens": [statistics.mean(each) for each in zip(*_timed(tokens), strict=True)],
        "timed_seconds": sum(_timed(seconds)),
        "answers": answers,
        "problems": {
            "train": len(prompts),
            "eval": len(held_out),
            "both": sum(prompt.key in both for prompt in held_out),
        },
        "held_out": len(held_out),
        "product_rates": _product_rates(model),
        "groups": groups,
        "stopped": stopped,
        "shown": shown,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_gpu_bytes": peak_gpu_memory_bytes(),
    }


def _shown(prompt: Prompt, row: Sequence[Completion], marks: Sequence[Judgement], tokenizer: Tokenizer) -> Json:
    """Returns a prompt with its first answers, for people to read."""
    judged = list(zip(row, marks, strict=True))[:_ANSWERS_SHOWN]
    answers = [{"text": c.text, "mark": str(mark), "turns": _turns(c, tokenizer)} for c, mark in judged]
    return {"prompt": prompt.text, "answers": answers}


def _failed(completion: Completion) -> bool:
    """Returns whether there is no reward: the environment of the answer failed."""
    return completion.judgement is not None and math.isnan(completion.judgement.reward)


def _turns(completion: Completion, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Returns (whether the policy said it, text) by turns and observations; empty where there is but one turn."""
    if completion.mask is None:
        return []
    parts = np.split(completion.tokens, np.flatnonzero(np.diff(completion.mask)) + 1)
    texts = [tokenizer.decode(part.tolist(), skip_special_tokens=True) for part in parts]
    return [(i % 2 == 0, text) for i, text in enumerate(texts)]


def _timed(rounds: list[_T]) -> list[_T]:
    """Returns all but the first, which warms up, or the only one."""
    return rounds[1:] or rounds


def _enough(seconds: list[float], at_least: float, recipe: Recipe) -> bool:
    """Returns whether enough rounds or steps were timed. A single long one is, unless a first one does much besides."""
    model = recipe.model
    slow_start = model.trainer_device.type != "cpu" or (isinstance(model, HuggingFace) and model.compiled)
    long = len(seconds) > slow_start and sum(seconds) > LONG
    return long or (len(seconds) > ROUNDS and sum(_timed(seconds)) > at_least)


def train(recipe: Recipe, at_least: float, answers: list[_Answers]) -> dict[str, Json]:
    """Time steps on a searcher's answers, and measure how far the first of them take the policy from these."""
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model, "train")
    alone = replace(recipe, model=model, trainer=RankSettings())
    policy, optimizer = start_policy(alone, start_ranks(alone, 0), None)
    source = _Answered(recipe, prompts, answers, np.random.default_rng(0))
    log_ratio = max(float(_log_ratios(policy, group).abs().max()) for group in source.groups())
    seconds: list[float] = []
    tokens: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as scratch:
        weights = WeightDirectory(Path(scratch) / "weights", dtype=model.compute)
        trainer = Trainer(
            policy=policy,
            objective=started(recipe.objective),
            weights=weights,
            optimizer=optimizer,
            sync_every=recipe.sync_every,
            max_tokens_per_pass=recipe.max_tokens_per_pass,
            directory=Path(scratch),
            teacher=recipe.teachers,
        )
        trainer.publish()
        effective = None
        weights_bytes = weights.file(trainer.version).stat().st_size
        while not _enough(seconds, at_least, recipe) or (
            len(seconds) < UPDATES and UPDATES * statistics.mean(seconds) < _PATIENCE
        ):
            fetched = source.next()  # a run samples its batches ahead
            began = time.perf_counter()
            trainer.step(fetched)
            if trainer.due:  # to publish is part of every k-th step
                trainer.publish()
            seconds.append(time.perf_counter() - began)
            if len(seconds) == UPDATES:
                drifted = torch.cat([_log_ratios(policy, group).sum(1) for group in source.groups()])
                effective = float(effective_share(drifted))
            tokens.append((int(fetched.batch.prompt_length_G.sum()), int(fetched.batch.length_B.sum())))
    peak = peak_memory_bytes()
    return {
        "step_seconds": statistics.mean(_timed(seconds)),
        "tokens": [statistics.mean(each) for each in zip(*_timed(tokens), strict=True)],
        "product_rates": _product_rates(model),
        "peak_memory_bytes": peak,
        "peak_gpu_bytes": peak_gpu_memory_bytes(),
        "weights_bytes": weights_bytes,
        "log_ratio": log_ratio,
        "effective": effective,
    }


def _product_rates(model: Model) -> dict[str, Json]:
    """Returns the operations a second of a product of matrices, in float32 and in the model's precision."""
    precisions = dict.fromkeys((torch.float32, model.compute))
    return {str(t).removeprefix("torch."): product_rate(t, model.trainer_device) for t in precisions}


def _log_ratios(policy: Policy, group: Group) -> torch.Tensor:
    """Returns the log-ratios [B, T] between the policy and the model that answered, 0 behind an answer."""
    batch = collate([group]).to(next(iter(policy.parameters())).device)
    assert batch.log_behavior_BT is not None  # all its rows have it
    with torch.no_grad():
        return policy.evaluate(batch).log_policy_BT - batch.log_behavior_BT


@dataclass
class _Answered:
    """Draws batches of B prompts with K answers each, repeated as often as the searcher sampled them."""

    recipe: Recipe
    prompts: list[Prompt]
    answers: list[_Answers]
    rng: np.random.Generator

    def next(self) -> Fetched:
        groups = []
        for i in self.rng.choice(len(self.answers), size=self.recipe.groups_per_step):
            at, rows = self.answers[int(i)]
            size = self.recipe.group_size
            chosen = self.rng.choice(len(rows), size=size, replace=size > len(rows))
            groups.append(Group.of([self.trajectory(self.prompts[at], rows[int(j)]) for j in chosen]))
        return Fetched(groups, collate(groups))

    def groups(self) -> Iterator[Group]:
        """Yields a few answers to each prompt, which fit into a pass."""
        for at, rows in self.answers[:ROUNDS]:
            longest = max(len(tokens) for tokens, *_ in rows) + len(self.prompts[at].tokens)
            fitting = min(self.recipe.group_size, max(1, self.recipe.max_tokens_per_pass // longest))
            yield Group.of([self.trajectory(self.prompts[at], answer) for answer in rows[:fitting]])

    def trajectory(self, prompt: Prompt, answer: _Answer) -> Trajectory:
        tokens, own, reward = np.array(answer[0], np.int32), np.array(answer[2], np.float32), answer[3]
        mask = None if answer[1] is None else np.array(answer[1])
        teachers = [np.array(log_T, np.float32) for log_T in answer[4]]
        log_reference = own if self.recipe.reference is None else teachers.pop(0)
        completion = Completion(tokens, "", StopReason.EXTERNAL, (Version(), Version()), log_behavior=own, mask=mask)
        uid, value = self.rng.bytes(16).hex(), np.ones(1, np.float32)
        steps: dict[str, npt.NDArray[Any]] = {"step_start": np.zeros(1, np.int64), "step_value": value}
        arrays = steps if "step_value" in self.recipe.objective.needs else {}
        arrays |= {TEACHER: np.stack(teachers)} if teachers else {}
        return Trajectory(uid, prompt, completion, reward, log_reference, Version(), arrays=arrays)


def run(arguments: Sequence[str]) -> int:
    """Print the figures of one half of the run, searcher or trainer, as a line of JSON.

    arguments: searcher or trainer, the recipe's name, its overrides as JSON, how many seconds are timed at least (no
    fewer than `ROUNDS`, unless they are long), the searcher's seed, and a file with answers for the trainer.
    """
    half, name, overrides, at_least, seed, answers = arguments
    recipe = override(find(name), json.loads(overrides), f"tba check {name}", recorded=True)
    torch.set_num_threads(recipe.run.threads)
    keep_few_kernels()
    keep_to_share()
    if half == "searcher":
        found = search(recipe, float(at_least), int(seed))
    else:
        found = train(recipe, float(at_least), json.loads(Path(answers).read_text()))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
