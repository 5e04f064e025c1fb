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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tba.batch import FetchedBatch, collate
from tba.clock import ShareClock
from tba.generation import stream
from tba.grading import Grader, GradingProcess
from tba.markup import decode_tokens
from tba.models.arithmetic import product_rate
from tba.models.huggingface import HuggingFace
from tba.protocols import AnswerScorer, Model, Policy, Tokenizer, start_objective
from tba.recipe import Recipe
from tba.record.memory import keep_few_kernels, peak_gpu_memory_bytes, peak_memory_bytes
from tba.rollout.stages import has_failed_environment
from tba.runs.reward_time import TimedReward
from tba.runtime.devices import extend_segments, limit_gpu_memory
from tba.runtime.engines import engine_of, vine_of
from tba.runtime.graders import reward_of
from tba.runtime.isolation import RecipeSource, isolated_reward
from tba.runtime.prompt_sets import prompts_of
from tba.runtime.ranks.start import start_policy, start_ranks
from tba.runtime.teaching import reference_of, teachers_of
from tba.settings import find, override
from tba.training.ranks.messages import RankSettings
from tba.training.staleness import effective_share
from tba.training.trainer import Trainer
from tba.types import (
    Completion,
    Group,
    Json,
    Judgement,
    Prompt,
    Sampling,
    StopReason,
    TokenScores,
    TopScores,
    Trajectory,
    Version,
    are_finite,
    teacher_arrays,
)
from tba.weights.directory import WeightDirectory

LEAST_ROUNDS = 5  # timed rounds or steps at least, after one to warm up
DRIFT_UPDATES = 6  # updates after which the effective sample size is measured
LONG_SECONDS = 15.0  # seconds after which fewer are enough: whoever checks a large model waits for them
FEW_PROMPTS, FEW_ANSWERS = 5, 8  # of the first round on a processor: enough to see whether rewards differ
SCORED_ANSWERS = 2  # answers to each prompt that are scored, and trained, where a model is slow
SLOW_SECONDS = 2.0  # seconds of generating a first round on a processor from which on no whole one is made
SLOW_REWARD_SECONDS = 5.0  # seconds of grading a whole round from which on only the first answers are graded
MOST_GRADING_SECONDS = 20.0  # seconds of grading after which further prompts' answers are left out, if two were graded
_STEADY_SECONDS = 3.0  # seconds for which full slots are timed
_SLOW_STEP_SECONDS = 5.0  # of a whole step, as far as passes without a gradient tell, from which on none is made
_DRIFT_SECONDS = 60.0  # in which those updates are made at most; else the drift is not measured
_SECONDS_BETWEEN_LINES = 2.0  # seconds between two lines of progress
_T = TypeVar("_T")
# its tokens, mask, log-probabilities under the model, reward, and the scores under another reference and each teacher:
# log-probabilities, and where top tokens are scored these and theirs
_Answer: TypeAlias = tuple[list[int], list[bool] | None, list[float], float, list[list[Any]]]
_Answers: TypeAlias = tuple[int, list[_Answer]]  # the place of a prompt, and the answers to it
PROGRESS = "progress"  # the only name in a line of progress
_Say: TypeAlias = Callable[[str], object]
_EXAMPLE_PROMPTS, _EXAMPLE_ANSWERS = 3, 2


@dataclass(frozen=True)
class Round:
    """Holds the prompts and answers of one round, and the seconds of each of its stages."""

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


@dataclass(frozen=True)
class ProbeFigures:
    """Holds what the probe of either half measures of its process."""

    product_rates: Mapping[str, float]  # operations a second of a product of matrices, by precision
    peak_memory_bytes: int
    peak_gpu_bytes: int | None


@dataclass(frozen=True)
class SlotTimes(ProbeFigures):
    """Holds the times of a few token steps of full slots."""

    timed_seconds: float
    token_seconds: float
    prompt_seconds: float


@dataclass(frozen=True)
class RoundTimes(ProbeFigures):
    """Holds the times and tokens of a whole round, on average."""

    timed_seconds: float  # of all rounds
    stages: Mapping[str, float]  # seconds of each stage
    tokens: tuple[float, float]  # of the prompts and of the answers


@dataclass(frozen=True)
class SampledRounds(RoundTimes):
    """Holds the answers of a few rounds besides, and their rewards."""

    small: int  # answers of a small round that stands for a whole one; 0: whole rounds were made
    reward: Sequence[Mapping[str, Any]]  # the fields of a `PartTime` for each part
    train_problems: int
    held_out: int  # problems
    shared_problems: int  # held-out problems whose prompt is one of training too
    groups: list[list[float]]  # rewards of each prompt's answers
    stop_counts: Mapping[str, int]  # answers by why they ended; `failed`, `copies` and `empty` ones
    examples: Sequence[Json]  # prompts with their first answers, for people to read
    answers: list[_Answers]  # for the trainer's probe


@dataclass(frozen=True)
class StepTimes(ProbeFigures):
    """Holds the time and tokens of a step, on average."""

    step_seconds: float
    tokens: tuple[float, float]  # of the prompts and of the answers
    weights_bytes: int  # of one published version
    log_ratio: float | None = None  # the largest of any token, between the trainer's weights and the answers'
    effective: float | None = None  # share of the answers that still count after `DRIFT_UPDATES`
    small: str = ""  # answers of the small steps that it is extrapolated from, in words


FIGURES = {"sampling": SampledRounds, "flow": SlotTimes, "searcher": RoundTimes, "trainer": StepTimes}


class SearcherProbe:
    """Runs and times a recipe's searcher stage by stage. `say` gets lines about its progress."""

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
        self.scorers: list[tuple[str, AnswerScorer]] = [("reference", scorer) for scorer in references]
        self.scorers += [("teachers", teacher) for teacher in teachers_of(recipe, self.model, references[-1])]
        self.rng = np.random.default_rng(seed)

    def generate(self, prompts: int, samples: int) -> Round:
        """Returns a round of so many drawn prompts, with so many sampled answers to each."""
        positions = self.rng.integers(len(self.prompts), size=prompts).tolist()
        chosen_prompts, sampling = [self.prompts[j] for j in positions], self.recipe.exploration.draw(self.rng)
        start, environment_start = time.perf_counter(), self._environment_seconds()
        completions: dict[int, list[Completion]] = {}
        for index, row in stream(self.engine, chosen_prompts, samples, sampling, self.rng):
            completions[index] = row
            self.say(f"sampled {samples * len(completions)} of {samples * prompts} answers")
        seconds, environment_seconds = time.perf_counter() - start, self._environment_seconds() - environment_start
        answers = [completions[i] for i in range(prompts)]
        stages = {"generation": seconds - environment_seconds, "environment": environment_seconds}
        return Round(positions, chosen_prompts, answers, sampling, stages)

    def score(self, round_: Round, most_answers: int | None = None) -> list[Sequence[Sequence[TokenScores]]]:
        """Returns the log-probabilities of each prompt's answers, at most so many of them, under each scorer. Where
        they are not all, the seconds are in proportion to the tokens.
        """
        rows = [(p, row[:most_answers]) for p, row in zip(round_.prompts, round_.answers, strict=True)]
        scored_tokens = sum(len(p.tokens) + sum(len(c.tokens) for c in row) for p, row in rows)
        share, scores = scored_tokens / sum(round_.tokens), list[Sequence[Sequence[TokenScores]]]()
        for number, (name, scorer) in enumerate(self.scorers, start=1):
            start = time.perf_counter()
            scores.append(scorer.log_probabilities_of(rows))
            seconds = (time.perf_counter() - start) / share
            if name == "reference" and not self.recipe.scores_reference:
                seconds = 0.0  # it is scored here for what is shown only
            round_.seconds[name] = round_.seconds.get(name, 0.0) + seconds
            self.say(f"scored by {number} of {len(self.scorers)} models")
        return scores

    def time_rollouts(self, round_: Round) -> None:
        """Makes VinePPO's rollouts and notes their seconds, if the recipe has them."""
        if self.vine is None:
            return
        completions = [(p, c) for p, row in zip(round_.prompts, round_.answers, strict=True) for c in row]
        rows = [Trajectory("", p, c, 0.0, np.zeros(len(c.tokens), np.float32), Version()) for p, c in completions]
        start = time.perf_counter()
        self.vine.add_values(rows, round_.sampling, self.rng, Counter())
        round_.seconds["rollouts"] = time.perf_counter() - start

    def _environment_seconds(self) -> float:
        return self.clock.seconds().get("environment", 0.0)


def sample_answers(
    recipe: Recipe, seed: int, say: _Say = lambda line: None, isolate: Callable[[], GradingProcess] | None = None
) -> SampledRounds:
    """Sample and grade answers; returns figures on rewards and lengths, and the seconds of each stage and of grading.

    On a processor the first round is a small one; where that is slow it is the only one, and stands for a whole.
    """
    searcher = SearcherProbe(recipe, seed, say)
    held_out = prompts_of(recipe, searcher.model, "eval")
    shared_keys = {prompt.key for prompt in searcher.prompts} & {prompt.key for prompt in held_out}
    reward, tokenizer = TimedReward(searcher.reward, isolate=isolate), searcher.model.tokenizer()
    rounds: list[Round] = []
    answers: list[_Answers] = []
    groups: list[list[float]] = []  # rewards of each prompt's answers
    reasons: Counter[str] = Counter()
    examples: list[Json] = []
    round_size, is_slow, is_grading = _first_round_size(recipe), False, True
    whole_size = (recipe.prompts_per_round, recipe.samples_per_prompt)
    while not rounds or not (is_slow or _is_timed_enough([sum(r.seconds.values()) for r in rounds], 0.0, recipe)):
        round_ = searcher.generate(*round_size)
        sampling_seconds = round_.seconds["generation"] + round_.seconds["environment"]
        is_slow = round_size != whole_size and sampling_seconds > SLOW_SECONDS
        judgement_rows = _judge_answers(reward, round_, say) if is_grading else []
        searcher.time_rollouts(round_)
        scores = searcher.score(round_, SCORED_ANSWERS if is_slow else None)
        rounds.append(round_)
        columns = zip(round_.positions, round_.answers, judgement_rows, *scores, strict=False)
        for position, completions, judgements, *prompt_scores in columns:
            rewards = [m.reward for c, m in zip(completions, judgements, strict=True) if not has_failed_environment(c)]
            groups += [rewards] if rewards else []
            reasons.update(c.stop_reason.value for c in completions)
            reasons["failed"] += len(completions) - len(rewards)
            reasons["copies"] += len(completions) - len({c.digest for c in completions})
            reasons["empty"] += sum(not c.text.strip() for c in completions)
            if len(examples) < _EXAMPLE_PROMPTS:
                examples.append(_example(searcher.prompts[position], completions, judgements, tokenizer))
            if len(answers) < LEAST_ROUNDS * recipe.prompts_per_round:
                training_answers = _training_answers(completions, judgements, prompt_scores)
                answers += [(position, training_answers)] if training_answers else []
        is_grading = is_grading and reward.seconds / round_.count * math.prod(whole_size) < SLOW_REWARD_SECONDS
        round_size = whole_size
    reward.close()
    seconds = sum(sum(r.seconds.values()) for r in rounds) + reward.seconds
    return SampledRounds(
        **vars(_round_times(rounds, recipe, searcher.model)) | {"timed_seconds": seconds},
        small=rounds[0].count if is_slow else 0,
        reward=[part.to_json() for part in reward.times()],
        train_problems=len(searcher.prompts),
        held_out=len(held_out),
        shared_problems=sum(prompt.key in shared_keys for prompt in held_out),
        groups=groups,
        stop_counts=reasons,
        examples=examples,
        answers=answers,
    )


def time_rounds(recipe: Recipe, at_least: float, seed: int) -> RoundTimes:
    """Time whole rounds without the reward: generation, the reference's scores and VinePPO's rollouts."""
    searcher, rounds = SearcherProbe(recipe, seed), list[Round]()
    while not _is_timed_enough([sum(r.seconds.values()) for r in rounds], at_least, recipe):
        round_ = searcher.generate(recipe.prompts_per_round, recipe.samples_per_prompt)
        searcher.time_rollouts(round_)
        searcher.score(round_)
        rounds.append(round_)
    return _round_times(rounds, recipe, searcher.model)


def time_full_slots(recipe: Recipe, seed: int) -> SlotTimes:
    """Time a few token steps of full slots, as a run has them: returns the seconds of a token of a slow model."""
    model = recipe.model.prepared(recipe.task)
    prompts, engine = prompts_of(recipe, model, "train"), engine_of(recipe, model, Version())
    rng = np.random.default_rng(seed)
    slots = engine.flow(recipe.samples_per_prompt, recipe.exploration.draw(rng), rng)
    look_times = [time.perf_counter()]  # of the beginning, of the first token, and of every look from there on

    def is_timed_enough() -> bool:
        look_times.append(time.perf_counter())
        return look_times[-1] - look_times[1] >= _STEADY_SECONDS

    tokens, answer_count = 0, 0
    while len(look_times) < 3 or look_times[-1] - look_times[1] < _STEADY_SECONDS:
        free_slots = slots.prompts_needed
        slots.submit([prompts[j] for j in rng.integers(len(prompts), size=free_slots)] if free_slots else [])
        completions = [c for _, row in slots.next(is_timed_enough, until_needed=False) for c in row]
        tokens, answer_count = tokens + sum(len(c.tokens) for c in completions), answer_count + len(completions)
        if not completions:
            break
    steady_seconds = look_times[-1] - look_times[1]
    return SlotTimes(
        token_seconds=steady_seconds / max(1, tokens - answer_count),  # an answer's first token is its prompt's
        timed_seconds=look_times[-1] - look_times[0],
        prompt_seconds=(look_times[1] - look_times[0]) / slots.prompts_submitted,
        product_rates=_product_rates(model),
        peak_memory_bytes=peak_memory_bytes(),
        peak_gpu_bytes=peak_gpu_memory_bytes(),
    )


def _first_round_size(recipe: Recipe) -> tuple[int, int]:
    """Returns the prompts of the first round, and the answers to each: few on a processor, where each token costs. On
    an accelerator, whose slots are to be full, it is a whole one.
    """
    whole_size = recipe.prompts_per_round, recipe.samples_per_prompt
    small_size = FEW_PROMPTS, min(recipe.samples_per_prompt, FEW_ANSWERS)
    on_accelerator = recipe.model.trainer_device.type != "cpu" or recipe.model.gpus_per_searcher
    return whole_size if on_accelerator or math.prod(small_size) >= math.prod(whole_size) else small_size


def _judge_answers(reward: TimedReward, round_: Round, say: _Say) -> list[list[Judgement]]:
    """Returns the judgements of the answers to each prompt; of the first ones, where the reward is slow."""
    seconds_before, judgement_rows = reward.seconds, list[list[Judgement]]()
    for prompt, completions in zip(round_.prompts, round_.answers, strict=True):
        if len(judgement_rows) >= 2 and reward.seconds - seconds_before > MOST_GRADING_SECONDS:
            break
        judgement_rows.append(reward.judge(prompt, completions))
        say(f"graded {sum(map(len, judgement_rows))} of {round_.count} answers")
    return judgement_rows


def _as_lists(scores: TokenScores) -> list[Any]:
    """Returns scores as plain lists of numbers: log-probabilities, then top tokens and theirs, if there are some."""
    return [array.tolist() for array in (astuple(scores) if isinstance(scores, TopScores) else (scores,))]


def _from_lists(lists: Sequence[Any]) -> TokenScores:
    """Returns the scores that `_as_lists` was given."""
    log_T = np.array(lists[0], np.float32)
    if len(lists) == 1:
        return log_T
    return TopScores(log_T, np.array(lists[1], np.int32), np.array(lists[2], np.float16))


def _training_answers(
    completions: Sequence[Completion], judgements: Sequence[Judgement], prompt_scores: Sequence[Sequence[TokenScores]]
) -> list[_Answer]:
    """Returns what the trainer's probe learns from: answers that were graded and scored."""
    return [
        (
            c.tokens.tolist(),
            None if c.mask is None else c.mask.tolist(),
            _as_lists(log_behavior)[0],
            judgement.reward,
            list(map(_as_lists, other_scores)),
        )
        for c, judgement, log_behavior, *other_scores in zip(completions, judgements, *prompt_scores, strict=False)
        if math.isfinite(judgement.reward) and all(map(are_finite, other_scores))
    ]


def _round_times(rounds: Sequence[Round], recipe: Recipe, model: Model) -> RoundTimes:
    """Returns the mean seconds of each stage of a whole round, and its tokens; of fewer answers in proportion."""
    timed_rounds = _without_warm_up([r for r in rounds if r.count == rounds[-1].count])
    scale = recipe.prompts_per_round * recipe.samples_per_prompt / timed_rounds[0].count
    names = dict.fromkeys(name for r in timed_rounds for name in r.seconds)
    prompt_tokens, answer_tokens = map(statistics.mean, zip(*(r.tokens for r in timed_rounds), strict=True))
    return RoundTimes(
        stages={name: scale * statistics.mean(r.seconds.get(name, 0.0) for r in timed_rounds) for name in names},
        tokens=(prompt_tokens / len(timed_rounds[0].prompts) * recipe.prompts_per_round, scale * answer_tokens),
        timed_seconds=sum(sum(r.seconds.values()) for r in timed_rounds),
        peak_memory_bytes=peak_memory_bytes(),
        peak_gpu_bytes=peak_gpu_memory_bytes(),
        product_rates=_product_rates(model),
    )


def _example(prompt: Prompt, row: Sequence[Completion], judgements: Sequence[Judgement], tokenizer: Tokenizer) -> Json:
    """Returns a prompt with its first answers and their judgements, for people to read."""
    pairs = list(zip(row, judgements, strict=True))[:_EXAMPLE_ANSWERS]
    answers = [{"text": c.text, "mark": str(judgement), "turns": _turns(c, tokenizer)} for c, judgement in pairs]
    return {"prompt": prompt.text, "answers": answers}


def _turns(completion: Completion, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """Returns (whether the policy said it, text) by turns and observations; empty where there is but one turn."""
    if completion.mask is None:
        return []
    parts = np.split(completion.tokens, np.flatnonzero(np.diff(completion.mask)) + 1)
    texts = [decode_tokens(tokenizer, part.tolist()) for part in parts]
    return [(i % 2 == 0, text) for i, text in enumerate(texts)]


def _without_warm_up(rounds: list[_T]) -> list[_T]:
    """Returns all rounds but the first, which warms up, or the only one."""
    return rounds[1:] or rounds


def _is_timed_enough(seconds: list[float], at_least: float, recipe: Recipe) -> bool:
    """Returns whether enough rounds or steps were timed. A single long one is, unless a first one does much besides."""
    model = recipe.model
    slow_start = model.trainer_device.type != "cpu" or (isinstance(model, HuggingFace) and model.torch_compile)
    is_long = len(seconds) > slow_start and sum(seconds) > LONG_SECONDS
    return is_long or (len(seconds) > LEAST_ROUNDS and sum(_without_warm_up(seconds)) > at_least)


def time_steps(
    recipe: Recipe, at_least: float, answers: list[_Answers], say: _Say = lambda line: None, length: float | None = None
) -> StepTimes:
    """Time steps on a searcher's answers, and measure how far the first of them take the policy from these.

    Where a whole step is slow, three small ones are made, of two sizes, from which it is extrapolated. length: tokens
    of an answer on average; None: that of these answers.
    """
    model = recipe.model.prepared(recipe.task)
    prompts = prompts_of(recipe, model, "train")
    one_rank_recipe = replace(recipe, model=model, trainer=RankSettings())
    policy, optimizer = start_policy(one_rank_recipe, start_ranks(one_rank_recipe, 0), None)
    source = _AnswerBatches(recipe, prompts, answers, np.random.default_rng(0), length)
    log_ratio, token_seconds = 0.0, math.inf
    for group in source.groups():
        start = time.perf_counter()
        log_ratio = max(log_ratio, float(_log_ratios(policy, group).abs().max()))
        group_tokens = len(group.prompt.tokens) + sum(len(t.completion.tokens) for t in group.trajectories)
        token_seconds = min(token_seconds, (time.perf_counter() - start) / group_tokens)
    step_estimate = 3 * token_seconds * source.tokens_per_step  # a backward costs two forwards
    is_small = model.trainer_device.type == "cpu" and step_estimate > _SLOW_STEP_SECONDS
    seconds: list[float] = []
    tokens: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = WeightDirectory(Path(folder) / "weights", dtype=model.compute)
        trainer = Trainer(
            policy=policy,
            objective=start_objective(recipe.objective),
            weights=weights,
            optimizer=optimizer,
            sync_every=recipe.sync_every,
            max_tokens_per_pass=recipe.max_tokens_per_pass,
            directory=Path(folder),
            teacher=recipe.teachers,
        )
        trainer.publish()
        effective = None
        weights_bytes = weights.file(trainer.version).stat().st_size
        step_seconds = _extrapolated_step_seconds(trainer, source, say) if is_small else None
        while step_seconds is None and (
            not _is_timed_enough(seconds, at_least, recipe)
            or (len(seconds) < DRIFT_UPDATES and DRIFT_UPDATES * statistics.mean(seconds) < _DRIFT_SECONDS)
        ):
            fetched = source.draw_batch()  # a run samples its batches ahead
            start = time.perf_counter()
            trainer.step(fetched)
            if trainer.should_publish:  # to publish is part of every k-th step
                trainer.publish()
            seconds.append(time.perf_counter() - start)
            if len(seconds) == DRIFT_UPDATES:
                log_ratio_B = torch.cat([_log_ratios(policy, group).sum(1) for group in source.groups()])
                effective = float(effective_share(log_ratio_B))
            tokens.append((int(fetched.batch.prompt_length_G.sum()), int(fetched.batch.length_B.sum())))
    prompt_tokens, answer_tokens = (
        map(statistics.mean, zip(*_without_warm_up(tokens), strict=True)) if tokens else source.tokens_of_step
    )
    return StepTimes(
        step_seconds=statistics.mean(_without_warm_up(seconds)) if step_seconds is None else step_seconds,
        small=" and ".join(str(groups * SCORED_ANSWERS) for groups in (1, LEAST_ROUNDS)) if is_small else "",
        tokens=(prompt_tokens, answer_tokens),
        peak_memory_bytes=peak_memory_bytes(),
        product_rates=_product_rates(model),
        peak_gpu_bytes=peak_gpu_memory_bytes(),
        weights_bytes=weights_bytes,
        log_ratio=log_ratio,
        effective=effective,
    )


def _extrapolated_step_seconds(trainer: Trainer, source: _AnswerBatches, say: _Say) -> float:
    """Returns the seconds of a whole step: what a step takes whatever its size, and what each token takes, from two
    sizes, after one step to warm up; publishing is part of every k-th.
    """
    sizes, points = (1, 1, LEAST_ROUNDS), list[tuple[int, float]]()
    for number, groups in enumerate(sizes, start=1):
        fetched = source.first_batch(groups)
        start = time.perf_counter()
        trainer.step(fetched)
        points.append((_batch_tokens(fetched), time.perf_counter() - start))
        say(f"made {number} of {len(sizes)} small steps")
    start = time.perf_counter()
    trainer.publish()
    publish_seconds = time.perf_counter() - start
    (n_1, seconds_1), (n_2, seconds_2) = points[1:]  # tokens and seconds of a step of few groups, and of one of many
    token_seconds = max(0.0, seconds_2 - seconds_1) / (n_2 - n_1) if n_2 > n_1 else seconds_2 / n_2
    fixed_seconds = max(0.0, seconds_1 - token_seconds * n_1)
    return fixed_seconds + token_seconds * source.tokens_per_step + publish_seconds / trainer.sync_every


def _batch_tokens(fetched: FetchedBatch) -> int:
    return int(fetched.batch.prompt_length_G.sum()) + int(fetched.batch.length_B.sum())


def _product_rates(model: Model) -> dict[str, float]:
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
class _AnswerBatches:
    """Draws batches of B prompts with K answers each, repeated as often as the searcher sampled them."""

    recipe: Recipe
    prompts: list[Prompt]
    answers: list[_Answers]
    rng: np.random.Generator
    length: float | None = None  # of an answer on average, in tokens

    @property
    def tokens_of_step(self) -> tuple[float, float]:
        """Returns the tokens of a whole step's prompts and answers, on average."""
        prompts = statistics.mean(len(self.prompts[position].tokens) for position, _ in self.answers)
        length = self.length
        if length is None:
            length = statistics.mean(len(tokens) for _, rows in self.answers for tokens, *_ in rows)
        return self.recipe.groups_per_step * prompts, self.recipe.groups_per_step * self.recipe.group_size * length

    @property
    def tokens_per_step(self) -> float:
        return sum(self.tokens_of_step)

    def first_batch(self, groups: int) -> FetchedBatch:
        """Returns a batch of the first so many prompts, each with its first answers."""
        parts = [
            Group.of([self.trajectory(self.prompts[position], answer) for answer in rows[:SCORED_ANSWERS]])
            for position, rows in self.answers[:groups]
        ]
        return FetchedBatch(parts, collate(parts))

    def draw_batch(self) -> FetchedBatch:
        groups = []
        for i in self.rng.choice(len(self.answers), size=self.recipe.groups_per_step):
            position, rows = self.answers[int(i)]
            group_size = self.recipe.group_size
            chosen_rows = self.rng.choice(len(rows), size=group_size, replace=group_size > len(rows))
            groups.append(Group.of([self.trajectory(self.prompts[position], rows[int(j)]) for j in chosen_rows]))
        return FetchedBatch(groups, collate(groups))

    def groups(self) -> Iterator[Group]:
        """Yields a few answers to each prompt, which fit into a pass."""
        for position, rows in self.answers[:LEAST_ROUNDS]:
            longest = max(len(tokens) for tokens, *_ in rows) + len(self.prompts[position].tokens)
            fitting_answers = min(self.recipe.group_size, max(1, self.recipe.max_tokens_per_pass // longest))
            yield Group.of([self.trajectory(self.prompts[position], answer) for answer in rows[:fitting_answers]])

    def trajectory(self, prompt: Prompt, answer: _Answer) -> Trajectory:
        tokens, log_behavior_T, reward = np.array(answer[0], np.int32), np.array(answer[2], np.float32), answer[3]
        mask = None if answer[1] is None else np.array(answer[1])
        teachers = list(map(_from_lists, answer[4]))
        log_reference = log_behavior_T if self.recipe.reference is None else teachers.pop(0)
        assert not isinstance(log_reference, TopScores)
        versions, uid, value = (Version(), Version()), self.rng.bytes(16).hex(), np.ones(1, np.float32)
        completion = Completion(tokens, "", StopReason.EXTERNAL, versions, log_behavior=log_behavior_T, mask=mask)
        steps: dict[str, npt.NDArray[Any]] = {"step_start": np.zeros(1, np.int64), "step_value": value}
        arrays = steps if "step_value" in self.recipe.objective.needs else {}
        arrays |= teacher_arrays(teachers)
        return Trajectory(uid, prompt, completion, reward, log_reference, Version(), arrays=arrays)


class ProgressLines:
    """Prints a line of JSON about the probe's progress now and then, for the process that waits."""

    def __init__(self) -> None:
        self._last_seconds = time.perf_counter()

    def __call__(self, line: str) -> None:
        if time.perf_counter() - self._last_seconds >= _SECONDS_BETWEEN_LINES:
            self._last_seconds = time.perf_counter()
            sys.stdout.write(json.dumps({PROGRESS: line}) + "\n")
            sys.stdout.flush()


def run(arguments: Sequence[str]) -> int:
    """Measure one half of a run, searcher or trainer; prints lines of progress, then the figures as a line of JSON.

    arguments: sampling, searcher, flow or trainer, the recipe's name, its overrides as JSON, how many seconds are timed
    at least (no fewer than `ROUNDS`, unless they are long), the searcher's seed, and a file of answers with their mean
    length, which sampling writes and the trainer reads.
    """
    half, name, overrides, at_least, seed, answers = arguments
    recipe = override(find(name), json.loads(overrides), f"tba check {name}", recorded=True)
    torch.set_num_threads(recipe.run.threads)
    keep_few_kernels()
    extend_segments(recipe, half)
    limit_gpu_memory()
    say = ProgressLines()
    figures: ProbeFigures
    if half == "sampling":
        isolate = isolated_reward(RecipeSource(name, json.loads(overrides)), recipe.run.reward_deadline)
        sample = sample_answers(recipe, int(seed), say, isolate)
        length = sample.tokens[1] / recipe.prompts_per_round / recipe.samples_per_prompt
        Path(answers).write_text(json.dumps([sample.answers, length]))
        figures = replace(sample, answers=[])
    elif half == "flow":
        figures = time_full_slots(recipe, int(seed))
    elif half == "searcher":
        figures = time_rounds(recipe, float(at_least), int(seed))
    else:
        sampled_answers, length = json.loads(Path(answers).read_text())
        figures = time_steps(recipe, float(at_least), sampled_answers, say, length)
    sys.stdout.write(json.dumps(figures, default=vars) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
