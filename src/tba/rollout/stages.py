"""The stages between an answer that is generated and a trajectory that is sent: sort, judge, score, build, stamp.

Each is a function of what it is given: it keeps nothing, waits for nothing and draws no random number. The loop that
calls them is the searcher's (`searcher.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tba.protocols import AnswerScorer
from tba.rollout.overlong import Overlong
from tba.types import (
    LEFT_OUT,
    Completion,
    Json,
    Judgement,
    Prompt,
    StopReason,
    TokenScores,
    TopScores,
    Trajectory,
    Version,
    are_finite,
    quote,
    teacher_arrays,
)

Scores: TypeAlias = "tuple[TokenScores, ...]"  # under the reference, then under each teacher
Answers: TypeAlias = "Sequence[tuple[Prompt, Sequence[Completion]]]"  # prompts, each with answers to it

UNWRITTEN = "an answer from elsewhere cannot be written as tokens of the run"


@dataclass(frozen=True)
class Limits:
    """Says which answers are rejected, and how a rejected one is described."""

    largest_reward: float  # an answer whose |reward| is beyond it is rejected
    reward_name: str
    scorers: str  # "the reference", or "the reference or a teacher"
    hide_text: bool = False  # describe an answer by its prompt's key, its digest and its length


def sort_answers(
    prompt: Prompt, completions: Sequence[Completion], overlong: Overlong
) -> tuple[list[Completion], Counter[str]]:
    """Returns the answers that are to be judged, and the counts of all that was generated for a prompt."""
    counts = Counter(asked_tokens=len(prompt.tokens))
    gradable_answers = []
    for completion in completions:
        count_answer(counts, "generated", completion)
        if completion.mask is not None:
            counts["observed_tokens"] += completion.observed
        if completion.stop_reason is StopReason.INTERRUPTED:
            count_answer(counts, "in_flight", completion)
        elif overlong.drops(completion) or not len(completion.tokens):
            count_answer(counts, "rejected", completion)
        else:
            gradable_answers.append(completion)
    return gradable_answers, counts


def drop_reason(completions: Sequence[Completion]) -> str:
    """Returns why some of the answers to a prompt are rejected before they are judged."""
    if not all(len(c.tokens) for c in completions):
        return UNWRITTEN
    return f"an answer was cut off at {max(len(c.tokens) for c in completions)} tokens (--overlong-penalty drop)"


def score_answers(scorers: Sequence[AnswerScorer], answers: Answers) -> list[list[Scores]]:
    """Returns the log-probabilities of each answer under each scorer, by prompt and answer; an answer that was sampled
    twice for a prompt is scored once.
    """
    distinct_answers = [(prompt, list({c.digest: c for c in completions}.values())) for prompt, completions in answers]
    by_scorer = [scorer.log_probabilities_of(distinct_answers) for scorer in scorers]
    scores = []
    for i, (_, completions) in enumerate(answers):
        places = {c.digest: place for place, c in enumerate(distinct_answers[i][1])}
        scores.append([tuple(rows[i][places[c.digest]] for rows in by_scorer) for c in completions])
    return scores


def rejection_reason(
    prompt: Prompt, completion: Completion, judgement: Judgement, scores: Scores, limits: Limits
) -> str | None:
    """Returns why an answer cannot be trained on; None: it can."""
    is_finite = all(map(are_finite, scores))
    if is_finite and abs(judgement.reward) <= limits.largest_reward:  # NaN fails this comparison too
        return None
    addition = "" if is_finite else f", and its log-probability under {limits.scorers} is not finite"
    answer, question = quote(completion.text), quote(prompt.text)
    if limits.hide_text:
        answer, question = f"{completion.digest} of {len(completion.tokens)} tokens", prompt.key
    return f"{limits.reward_name} gave {judgement} for the answer {answer} to the prompt {question}{addition}"


def build_trajectory(
    uid: str,
    prompt: Prompt,
    completion: Completion,
    judgement: Judgement,
    scores: Scores,
    reference: Version,
    provenance: Mapping[str, Json],
) -> Trajectory:
    """Returns the trajectory that an answer makes with its judgement and its log-probabilities."""
    reference_scores, *teacher_scores = scores
    assert not isinstance(reference_scores, TopScores)
    episode = completion.episode
    is_stored_as_it_is = completion.judgement is None and episode is None
    return Trajectory(
        uid=uid,
        prompt=prompt,
        completion=completion if is_stored_as_it_is else replace(completion, judgement=None, episode=None),
        reward=float(judgement.reward),
        reward_parts=judgement.parts,
        log_reference=reference_scores,
        reference=reference,
        arrays=teacher_arrays(teacher_scores),
        provenance={**provenance, **({} if episode is None else episode.provenance)},
    )


def stamp(
    trajectories: Sequence[Trajectory], created: float, seconds: float, left_out: float = 0.0
) -> list[Trajectory]:
    """Returns trajectories with the time of sending, since the epoch, and the seconds since the first was begun.

    left_out: answers to the prompt that are rejected or missing for what they say, for each that is sent.
    """
    stamps: dict[str, Json] = {"seconds": round(seconds, 3)}
    if left_out:
        stamps[LEFT_OUT] = left_out
    return [replace(t, created=created, provenance={**t.provenance, **stamps}) for t in trajectories]


def has_failed_environment(completion: Completion) -> bool:
    """Returns whether an answer has no reward because its environment failed."""
    return completion.judgement is not None and math.isnan(completion.judgement.reward)


def count_answer(counts: Counter[str], name: str, completion: Completion, times: int = 1) -> None:
    """Count an answer and its tokens."""
    counts[f"{name}_tokens"] += times * len(completion.tokens)
    counts[f"{name}_trajectories"] += times
