"""Times a recipe's searcher or trainer, in a process of its own that an estimate starts as a run starts its parts.

It makes a few rounds or steps with the recipe's own parts and keeps nothing. Its last line of JSON has seconds and peak
memory. Where a model is slow on a processor, it makes fewer answers and smaller steps, and says so (`small`): whoever
reads the figures is to know that they are extrapolated.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tba.batch import Fetched, collate
from tba.clock import ShareClock
from tba.generation import stream
from tba.grading import Grader, Isolated
from tba.markup import decoded
from tba.models.arithmetic import product_rate
from tba.models.huggingface import HuggingFace
from tba.protocols import Model, Policy, Tokenizer, started
from tba.recipe import Recipe
from tba.record.memory import keep_few_kernels, peak_gpu_memory_bytes, peak_memory_bytes
from tba.runs.reward_time import TimedReward
from tba.runtime.devices import keep_to_share
from tba.runtime.isolation import Rebuilt, isolated_reward
from tba.runtime.prompting import engine_of, prompts_of, reward_of, vine_of
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.runtime.teaching import reference_of, teachers_of
from tba.settings import find, override
from tba.training.ranks.messages import RankSettings
from tba.training.staleness import effective_share
from tba.training.trainer import Trainer
from tba.types import (
    TEACHER,
    Completion,
    FloatArray,
    Group,
    Json,
    Judgement,
    Prompt,
    Sampling,
    StopReason,
    Trajectory,
    Version,
)
from tba.weights.directory import WeightDirectory

ROUNDS = 5  # timed rounds or steps at least, after one to warm up
UPDATES = 6  # after which the effective sample size is measured
LONG = 15.0  # seconds after which fewer are enough: whoever checks a large model waits for them
FEW_PROMPTS, FEW_ANSWERS = 5, 8  # of the first round on a processor: enough to see whether rewards differ
SCORED = 2  # answers to each prompt that are scored, and trained, where a model is slow
SLOW = 2.0  # seconds of generating a first round on a processor from which on no whole one is made
SLOW_REWARD = 5.0  # seconds of grading a whole round from which on only the first answers are graded
MOST_GRADING = 20.0  # seconds of grading after which further prompts' answers are left out, if two were graded
_STEADY = 3.0  # seconds for which full slots are timed
_SLOW_STEP = 5.0  # seconds of a whole step, as far as passes without a gradient tell, from which on none is made
_PATIENCE = 60.0  # seconds in which those updates are made at most; else it is not measured
_BETWEEN = 2.0  # seconds between two lines of progress
_T = TypeVar("_T")
# its tokens, mask, log-probabilities under the model, reward, and those under another reference and each teacher
_Answer: TypeAlias = tuple[list[int], list[bool] | None, list[float], float, list[list[float]]]
_Answers: TypeAlias = tuple[int, list[_Answer]]  # the place of a prompt, and the answers to it
PROGRESS = "progress"  # the only name in a line of progress
_Say: TypeAlias = Callable[[str], object]
_PROMPTS_SHOWN, _ANSWERS_SHOWN = 3, 2


@dataclass(frozen=True)
class Round:
    """Holds one round: what was asked and answered, and the seconds of each stage."""

    positions: Sequence[int]
    prompts: Sequence[Prompt]
    answers: Sequence[Sequence[Completion]]
    sampling: Sampling
    seconds: dict[str, float]

    @property
    def count(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tokens(self) -> tuple[int, int]:
        """Returns how many tokens the prompts and the answers have."""
        return sum(len(p.tokens) for p in self.prompts), sum(len(c.tokens) for row in self.answers for c in row)


class Searching:
    """A recipe's searcher, stage by stage. `say` is told of its progress."""

    def __init__(self, recipe: Recipe, seed: int, say: _Say = lambda line: None) -> None:
        self.recipe, self.say = recipe, say
        self.model = recipe.model.prepared(recipe.task)
        self.prompts = prompts_of(recipe, self.model, "train")
        self.clock = ShareClock()
        self.engine = engine_of(recipe, self.model, Version(), self.clock)
        self.reward = reward_of(recipe.task)
        self.vine = vine_of(recipe, self.model, self.engine, Grader(self.reward, recipe.run.reward_deadline))
        initial = self.model.reference(recipe.policy_temperature, Version())
        references = [initial] if recipe.reference is None else [initial, reference_of(recipe, self.model)]
        teachers = teachers_of(recipe, self.model, references[-1])
        self.scorers = [("reference", scorer) for scorer in references] + [("teachers", t) for t in teachers]
        self.rng = np.random.default_rng(seed)

    def generate(self, prompts: int, samples: int) -> Round:
        """Answers so many prompts so many times each."""
        positions = self.rng.integers(len(self.prompts), size=prompts).tolist()
        chosen, sampling = [self.prompts[j] for j in positions], self.recipe.exploration.draw(self.rng)
        began, still = time.perf_counter(), self._environment()
        completions: dict[int, list[Completion]] = {}
        for number, row in stream(self.engine, chosen, samples, sampling, self.rng):
            completions[number] = row
            self.say(f"sampled {samples * len(completions)} of {samples * prompts} answers")
        spent, environment = time.perf_counter() - began, self._environment() - still
        answers = [completions[i] for i in range(prompts)]
        stages = {"generation": spent - environment, "environment": environment}
        return Round(positions, chosen, answers, sampling, stages)

    def score(self, lot: Round, most: int | None = None) -> list[list[list[FloatArray]]]:
        """Returns the log-probabilities of each prompt's answers, at most so many of them, under each scorer. Where
        they are not all, the seconds are in proportion to the tokens.
        """
        rows = [(p, row[:most]) for p, row in zip(lot.prompts, lot.answers, strict=True)]
        scored = sum(len(p.tokens) + sum(len(c.tokens) for c in row) for p, row in rows)
        share, scores = scored / sum(lot.tokens), []
        for number, (name, scorer) in enumerate(self.scorers, start=1):
            began = time.perf_counter()
            scores.append(scorer.log_probabilities_of(rows))
            spent = (time.perf_counter() - began) / share
            lot.seconds[name] = lot.seconds.get(name, 0.0) + spent
            self.say(f"scored by {number} of {len(self.scorers)} models")
        return scores

    def roll_out(self, lot: Round) -> None:
        """Makes VinePPO's rollouts, if the recipe has them."""
        if self.vine is None:
            return
        pairs = [(p, c) for p, row in zip(lot.prompts, lot.answers, strict=True) for c in row]
        unscored = [Trajectory("", p, c, 0.0, np.zeros(len(c.tokens), np.float32), Version()) for p, c in pairs]
        began = time.perf_counter()
        self.vine.grow(unscored, lot.sampling, self.rng, Counter())
        lot.seconds["rollouts"] = time.perf_counter() - began

    def _environment(self) -> float:
        return self.clock.seconds().get("environment", 0.0)


def look(
    recipe: Recipe,
    seed: int,
    say: _Say = lambda line: None,
    isolate: Callable[[], Isolated] | None = None,
) -> dict[str, Json]:
    """Sample and grade answers: what there is to learn from, how long answers are and what grading them takes.

    On a processor the first round is a small one; where that is slow it is the only one, and stands for a whole.
    """
    searching = Searching(recipe, seed, say)
    held_out = prompts_of(recipe, searching.model, "eval")
    both = {prompt.key for prompt in searching.prompts} & {prompt.key for prompt in held_out}
    reward, tokenizer = TimedReward(searching.reward, isolate=isolate), searching.model.tokenizer()
    rounds: list[Round] = []
    answers: list[_Answers] = []
    groups: list[list[float]] = []  # rewards of each prompt's answers
    reasons: Counter[str] = Counter()
    examples: list[Json] = []
    sizes, slow, grading = _first_round(recipe), False, True
    whole = (recipe.prompts_per_round, recipe.samples_per_prompt)
    while not rounds or not (slow or _enough([sum(r.seconds.values()) for r in rounds], 0.0, recipe)):
        lot = searching.generate(*sizes)
        slow = sizes != whole and lot.seconds["generation"] + lot.seconds["environment"] > SLOW
        marks = _graded(reward, lot, say) if grading else []
        searching.roll_out(lot)
        scores = searching.score(lot, SCORED if slow else None)
        rounds.append(lot)
        for j, row, judgements, *scores_of in zip(lot.positions, lot.answers, marks, *scores, strict=False):
            rewards = [mark.reward for c, mark in zip(row, judgements, strict=True) if not _failed(c)]
            groups += [rewards] if rewards else []
            reasons.update(c.stop_reason.value for c in row)
            reasons["failed"] += len(row) - len(rewards)
            reasons["copies"] += len(row) - len({c.digest for c in row})
            reasons["empty"] += sum(not c.text.strip() for c in row)
            if len(examples) < _PROMPTS_SHOWN:
                examples.append(_shown(searching.prompts[j], row, judgements, tokenizer))
            if len(answers) < ROUNDS * recipe.prompts_per_round:
                usable = _usable(row, judgements, scores_of)
                answers += [(j, usable)] if usable else []
        grading = grading and reward.seconds / lot.count * math.prod(whole) < SLOW_REWARD
        sizes = whole
    reward.close()
    return {
        **_of_rounds(rounds, recipe),
        "timed_seconds": sum(sum(r.seconds.values()) for r in rounds) + reward.seconds,
        "small": rounds[0].count if slow else 0,
        "reward": [part.to_json() for part in reward.times()],
        "answers": answers,
        "problems": {
            "train": len(searching.prompts),
            "eval": len(held_out),
            "both": sum(prompt.key in both for prompt in held_out),
        },
        "held_out": len(held_out),
        "product_rates": _product_rates(searching.model),
        "groups": groups,
        "stopped": reasons,
        "shown": examples,
    }


def search(recipe: Recipe, at_least: float, seed: int) -> dict[str, Json]:
    """Time whole rounds, but for the reward: generate, score under the reference, and VinePPO's rollouts."""
    searching, rounds = Searching(recipe, seed), list[Round]()
    while not _enough([sum(r.seconds.values()) for r in rounds], at_least, recipe):
        lot = searching.generate(recipe.prompts_per_round, recipe.samples_per_prompt)
        searching.roll_out(lot)
        searching.score(lot)
        rounds.append(lot)
    return {**_of_rounds(rounds, recipe), "product_rates": _product_rates(searching.model)}


def flow(recipe: Recipe, seed: int) -> dict[str, Json]:
    """Time a few token steps of full slots, as they are while a run goes on: what a slow model takes a token."""
    model = recipe.model.prepared(recipe.task)
    prompts, engine = prompts_of(recipe, model, "train"), engine_of(recipe, model, Version())
    rng = np.random.default_rng(seed)
    flowing = engine.flow(recipe.samples_per_prompt, recipe.exploration.draw(rng), rng)
    times = [time.perf_counter()]  # of the beginning, of the first token, and of every look from there on

    def interrupted() -> bool:
        times.append(time.perf_counter())
        return times[-1] - times[1] >= _STEADY

    tokens, rows = 0, 0
    while len(times) < 3 or times[-1] - times[1] < _STEADY:
        room = flowing.wanted
        flowing.submit([prompts[j] for j in rng.integers(len(prompts), size=room)] if room else [])
        completions = [c for _, row in flowing.next(interrupted, until_wanted=False) for c in row]
        tokens, rows = tokens + sum(len(c.tokens) for c in completions), rows + len(completions)
        if not completions:
            break
    steady = times[-1] - times[1]
    return {
        "token_seconds": steady / max(1, tokens - rows),  # the first token of each comes with its prompt
        "timed_seconds": times[-1] - times[0],
        "prompt_seconds": (times[1] - times[0]) / flowing.submitted,
        "product_rates": _product_rates(model),
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_gpu_bytes": peak_gpu_memory_bytes(),
    }


def _first_round(recipe: Recipe) -> tuple[int, int]:
    """Returns the prompts of the first round, and the answers to each: few on a processor, where each token costs. On
    an accelerator, whose slots are to be full, it is a whole one.
    """
    whole = recipe.prompts_per_round, recipe.samples_per_prompt
    few = FEW_PROMPTS, min(recipe.samples_per_prompt, FEW_ANSWERS)
    on_accelerator = recipe.model.trainer_device.type != "cpu" or recipe.model.gpus_per_searcher
    return whole if on_accelerator or math.prod(few) >= math.prod(whole) else few


def _graded(reward: TimedReward, lot: Round, say: _Say) -> list[list[Judgement]]:
    """Returns the judgements of the answers to each prompt; of the first ones, where the reward is slow."""
    began, marks = reward.seconds, list[list[Judgement]]()
    for prompt, row in zip(lot.prompts, lot.answers, strict=True):
        if len(marks) >= 2 and reward.seconds - began > MOST_GRADING:
            break
        marks.append(reward.judge(prompt, row))
        say(f"graded {sum(map(len, marks))} of {lot.count} answers")
    return marks


def _usable(
    row: Sequence[Completion], marks: Sequence[Judgement], scores: Sequence[Sequence[FloatArray]]
) -> list[_Answer]:
    """Returns what the trainer's probe learns from: answers that were graded and scored."""
    return [
        (
            c.tokens.tolist(),
            None if c.mask is None else c.mask.tolist(),
            of_model.tolist(),
            mark.reward,
            [log_T.tolist() for log_T in of_others],
        )
        for c, mark, of_model, *of_others in zip(row, marks, *scores, strict=False)
        if math.isfinite(mark.reward) and all(np.isfinite(log_T).all() for log_T in of_others)
    ]


def _of_rounds(rounds: Sequence[Round], recipe: Recipe) -> dict[str, Json]:
    """Returns the mean seconds of each stage of a whole round, and its tokens; of fewer answers in proportion."""
    timed = _timed([r for r in rounds if r.count == rounds[-1].count])
    scale = recipe.prompts_per_round * recipe.samples_per_prompt / timed[0].count
    names = dict.fromkeys(name for r in timed for name in r.seconds)
    prompts, answers = (statistics.mean(column) for column in zip(*(r.tokens for r in timed), strict=True))
    return {
        "stages": {name: scale * statistics.mean(r.seconds.get(name, 0.0) for r in timed) for name in names},
        "tokens": [prompts / len(timed[0].prompts) * recipe.prompts_per_round, scale * answers],
        "prompts": recipe.prompts_per_round,
        "timed_seconds": sum(sum(r.seconds.values()) for r in timed),
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
    texts = [decoded(tokenizer, part.tolist()) for part in parts]
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


def train(
    recipe: Recipe,
    at_least: float,
    answers: list[_Answers],
    say: _Say = lambda line: None,
    length: float | None = None,
) -> dict[str, Json]:
    """Time steps on a searcher's answers, and measure how far the first of them take the policy from these.

    Where a whole step is slow, three small ones are made, of two sizes, from which it is extrapolated. length: tokens
    of an answer on average; None: that of these answers.
    """
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model, "train")
    alone = replace(recipe, model=model, trainer=RankSettings())
    policy, optimizer = start_policy(alone, start_ranks(alone, 0), None)
    source = _Answered(recipe, prompts, answers, np.random.default_rng(0), length)
    log_ratio, token_seconds = 0.0, math.inf
    for group in source.groups():
        began = time.perf_counter()
        log_ratio = max(log_ratio, float(_log_ratios(policy, group).abs().max()))
        count = len(group.prompt.tokens) + sum(len(t.completion.tokens) for t in group.trajectories)
        token_seconds = min(token_seconds, (time.perf_counter() - began) / count)
    on_processor = model.trainer_device.type == "cpu"
    small = on_processor and 3 * token_seconds * source.tokens_per_step > _SLOW_STEP  # a backward costs two forwards
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
        step_seconds = _extrapolated(trainer, source, say) if small else None
        while step_seconds is None and (
            not _enough(seconds, at_least, recipe)
            or (len(seconds) < UPDATES and UPDATES * statistics.mean(seconds) < _PATIENCE)
        ):
            fetched = source.next()  # a run samples its batches ahead
            began = time.perf_counter()
            trainer.step(fetched)
            if trainer.should_publish:  # to publish is part of every k-th step
                trainer.publish()
            seconds.append(time.perf_counter() - began)
            if len(seconds) == UPDATES:
                drifted = torch.cat([_log_ratios(policy, group).sum(1) for group in source.groups()])
                effective = float(effective_share(drifted))
            tokens.append((int(fetched.batch.prompt_length_G.sum()), int(fetched.batch.length_B.sum())))
    peak = peak_memory_bytes()
    return {
        "step_seconds": statistics.mean(_timed(seconds)) if step_seconds is None else step_seconds,
        "small": " and ".join(str(groups * SCORED) for groups in (1, ROUNDS)) if small else "",
        "tokens": [statistics.mean(each) for each in zip(*_timed(tokens), strict=True)]
        if step_seconds is None
        else list(source.tokens_of_step),
        "product_rates": _product_rates(model),
        "peak_memory_bytes": peak,
        "peak_gpu_bytes": peak_gpu_memory_bytes(),
        "weights_bytes": weights_bytes,
        "log_ratio": log_ratio,
        "effective": effective,
    }


def _extrapolated(trainer: Trainer, source: _Answered, say: _Say) -> float:
    """Returns the seconds of a whole step: what a step takes whatever its size, and what each token takes, from two
    sizes, after one step to warm up; publishing is part of every k-th.
    """
    sizes, points = (1, 1, ROUNDS), list[tuple[int, float]]()
    for number, groups in enumerate(sizes, start=1):
        fetched = source.of(groups)
        began = time.perf_counter()
        trainer.step(fetched)
        points.append((_tokens_of(fetched), time.perf_counter() - began))
        say(f"made {number} of {len(sizes)} small steps")
    began = time.perf_counter()
    trainer.publish()
    publishing = time.perf_counter() - began
    (few, short), (many, long) = points[1:]
    token = max(0.0, long - short) / (many - few) if many > few else long / many
    return max(0.0, short - token * few) + token * source.tokens_per_step + publishing / trainer.sync_every


def _tokens_of(fetched: Fetched) -> int:
    return int(fetched.batch.prompt_length_G.sum()) + int(fetched.batch.length_B.sum())


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
    length: float | None = None  # of an answer on average, in tokens

    @property
    def tokens_of_step(self) -> tuple[float, float]:
        """Returns the tokens of a whole step's prompts and answers, on average."""
        prompts = statistics.mean(len(self.prompts[at].tokens) for at, _ in self.answers)
        length = self.length
        if length is None:
            length = statistics.mean(len(tokens) for _, rows in self.answers for tokens, *_ in rows)
        return self.recipe.groups_per_step * prompts, self.recipe.groups_per_step * self.recipe.group_size * length

    @property
    def tokens_per_step(self) -> float:
        return sum(self.tokens_of_step)

    def of(self, groups: int) -> Fetched:
        """Returns a batch of the first so many prompts, each with its first answers."""
        parts = [
            Group.of([self.trajectory(self.prompts[at], answer) for answer in rows[:SCORED]])
            for at, rows in self.answers[:groups]
        ]
        return Fetched(parts, collate(parts))

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


class Progress:
    """Prints what is being done, as a line of JSON now and then, for the process that waits."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def __call__(self, line: str) -> None:
        if time.perf_counter() - self._at >= _BETWEEN:
            self._at = time.perf_counter()
            sys.stdout.write(json.dumps({PROGRESS: line}) + "\n")
            sys.stdout.flush()


def run(arguments: Sequence[str]) -> int:
    """Print the figures of one half of the run, searcher or trainer, as a line of JSON, after lines of its progress.

    arguments: look, searcher, flow or trainer, the recipe's name, its overrides as JSON, how many seconds are timed
    at least (no fewer than `ROUNDS`, unless they are long), the searcher's seed, and a file with answers for the
    trainer, with their mean length.
    """
    half, name, overrides, at_least, seed, answers = arguments
    recipe = override(find(name), json.loads(overrides), f"tba check {name}", recorded=True)
    torch.set_num_threads(recipe.run.threads)
    keep_few_kernels()
    keep_to_share()
    say = Progress()
    if half == "look":
        isolate = isolated_reward(Rebuilt(name, json.loads(overrides)), recipe.run.reward_deadline)
        figures = look(recipe, int(seed), say, isolate)
    elif half == "flow":
        figures = flow(recipe, int(seed))
    elif half == "searcher":
        figures = search(recipe, float(at_least), int(seed))
    else:
        of_searcher = json.loads(Path(answers).read_text())
        figures = train(recipe, float(at_least), of_searcher["answers"], say, of_searcher["length"])
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
