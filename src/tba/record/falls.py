"""Detects figures that fall far below their best (held-out, or the mean reward that searchers bring), answers that
become short or long, stale data, batches that teach nothing, and what collapses begin with.

Invariant: noise is no fall. A held-out figure has fallen when it is more than 5 points and more than 5 standard errors
(of the difference of two proportions) below the best one before it; the mean reward of the newest answers when it is
more than 6 standard errors (of the difference of two means over prompts) below the best before, and more than half of
all that had been gained since the beginning is lost. The thresholds are that high because the best of many figures is
partly luck: with a hundred figures that differ by chance alone, fewer than one run in a hundred reports a fall. A fall
is reported once, and the next one only when the figure had recovered in between.

Each watcher has a window of steps or prompts, and looks again at the end of a run (`finish`) over those there were, if
they are a few: a run that is shorter than the window is told of, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from tba.evaluation.estimators import GREEDY, SAMPLED
from tba.record.faults import read_faults, record_fault
from tba.record.metrics import (
    DRIFT,
    ENTROPY,
    ESS,
    FRESH,
    MISMATCH,
    MISMATCH_ANSWER,
    OFF_POLICY,
    REPEATED,
    TRAINED_TOKENS,
)
from tba.record.text import percent
from tba.types import Evaluation, Version

POINTS, ERRORS = 0.05, 5.0  # of a held-out figure
REWARD_ERRORS, LOST = 6.0, 0.5  # of the mean reward, of which there are many more
LENGTH_FACTOR = 2.0  # by which the mean length of answers may shrink or grow
PROMPTS = 100  # whose answers make one mean of the reward, or of the length
FEWEST_PROMPTS = 20  # that make one at the end of a run
HELD_OUT, REWARD, STALE = "held_out_falls", "reward_falls", "stale_data"  # kinds of faults.jsonl
NO_SIGNAL, TRUNCATED, COPIES = "no_signal", "truncated_answers", "copied_answers"
ENTROPY_FALLS, MISMATCHES, LOST_SAMPLES = "entropy_falls", "mismatches", "lost_samples"
LARGE_STEPS = "large_steps"
SHORT, LONG = "short_answers", "long_answers"
SLOW_REWARD = "slow_reward"
_WARNING_KINDS = {HELD_OUT, REWARD, STALE, NO_SIGNAL, TRUNCATED, COPIES, SHORT, LONG, SLOW_REWARD}
_WARNING_KINDS |= {ENTROPY_FALLS, MISMATCHES, LOST_SAMPLES, LARGE_STEPS}
MOST_COPIES, EARLY = 0.5, 10  # of all answers so far, from that step on
MOST_TRUNCATED = 0.5  # of the answers of 50 steps
STEPS = 50  # make one mean
FEWEST_STEPS = 3  # that make one at the end of a run
MOST_REPEATED = 1 / 3  # of all that arrived: beyond, what is new is not enough to keep batches fresh
LEAST_ESS, MOST_OFF_POLICY = 0.5, 1.5  # a share, nats: beyond which mean data count as stale (docs/objectives.md)
FEW_STEPS = 5
LEAST_ENTROPY = 0.05  # nats a token: halves of less are noise
MOST_APART, FEWEST_TOKENS = 0.1, 100  # nats a token of one set of weights, over at least so many
FEWEST_SAMPLES = 0.1  # effective sample size, as a share
MOST_WAITING = 0.25  # share of the searchers' time that they stood still for the reward
MOST_DRIFT = 0.05  # nats a token and update
_FIGURES = (SAMPLED, GREEDY)  # by which of them checkpoints are compared


def find_falls(evaluations: Iterable[Evaluation]) -> list[str]:
    """Returns a sentence for each time that a held-out figure fell, in the order of versions."""
    best_figures: dict[str, Evaluation] = {}
    has_fallen: dict[str, bool] = {}
    sentences = []
    for e in sorted(evaluations, key=lambda e: e.version):
        best = best_figures.setdefault(e.metric, e)
        is_low = best.value - e.value > max(POINTS, ERRORS * math.hypot(_standard_error(best), _standard_error(e)))
        if is_low and not has_fallen.get(e.metric):
            sentences.append(
                f"{e.metric} is {percent(e.value)} at {e.version.in_words}: it was {percent(best.value)} at "
                f"{best.version.in_words}"
            )
        has_fallen[e.metric] = is_low
        if e.value > best.value:
            best_figures[e.metric] = e
    return sentences


def note_falls(directory: Path, evaluations: Iterable[Evaluation]) -> list[str]:
    """Record as faults those falls of held-out figures that the run in `directory` has not recorded; returns them."""
    recorded = {line["what"] for line in read_faults(directory) if line["kind"] == HELD_OUT}
    new_falls = [sentence for sentence in find_falls(evaluations) if sentence not in recorded]
    for sentence in new_falls:
        record_fault(directory, HELD_OUT, sentence)
    return new_falls


def noted_falls(directory: Path) -> list[str]:
    """Returns the warnings about falls and the like that a run has recorded, oldest first."""
    return [str(line["what"]) for line in read_faults(directory) if line["kind"] in _WARNING_KINDS]


def note_slow_reward(directory: Path, share: float, expired: int, judged: int) -> None:
    """Record that the reward held up a run, where it did. share: of the searchers' time that they waited for it."""
    messages = []
    if share > MOST_WAITING:
        messages.append(
            f"the reward held up the run: searchers waited for it {percent(share)} of their time. `tba check` says how "
            "long its calls take, and what `concurrency` would gain"
        )
    if expired:
        messages.append(
            f"{expired:,} of {judged:,} answers were not graded within --run.reward-deadline and are rejected: slow "
            "answers are one kind of answer, so give the reward more time, or make it faster"
        )
    for message in messages:
        record_fault(directory, SLOW_REWARD, message)


def by_version(evaluations: Sequence[Evaluation]) -> Mapping[Version, Evaluation]:
    """Returns the figure of each version by which versions are compared: sampled accuracy where that was measured."""
    names = {e.metric for e in evaluations}
    name = next((metric for metric in _FIGURES if metric in names), min(names, default=""))
    return {e.version: e for e in evaluations if e.metric == name}


@dataclass
class _PromptMeans:
    """Gathers a figure of each new answer, by prompt, until there are 100 prompts."""

    _values: dict[str, list[float]] = field(default_factory=dict)
    _was_full: bool = False  # whether there were 100 prompts once

    def add(self, prompt: str, value: float) -> list[float]:
        """Add the figure of one answer; returns the means of the last 100 prompts where this answer begins new ones."""
        means = []
        if len(self._values) == PROMPTS and prompt not in self._values:
            self._was_full, means = True, self._pop_means()
        self._values.setdefault(prompt, []).append(value)
        return means

    def finish(self) -> list[list[float]]:
        """Returns the means of the prompts that are left at the end of a run; in two halves if there never were 100
        prompts. A part of too few prompts is left out.
        """
        means = self._pop_means()
        half = len(means) // 2
        parts = [means] if self._was_full else [means[:half], means[half:]]
        return [part for part in parts if len(part) >= FEWEST_PROMPTS]

    def _pop_means(self) -> list[float]:
        means = [sum(values) / len(values) for values in self._values.values()]
        self._values = {}
        return means


def _mean_and_error(means: Sequence[float]) -> tuple[float, float]:
    """Returns the mean over prompts and its standard error."""
    mean = sum(means) / len(means)
    return mean, math.sqrt(sum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means))


@dataclass
class RewardWatch:
    """Watches the rewards that arrive, by prompt, and reports when their mean has fallen."""

    _rewards: _PromptMeans = field(default_factory=_PromptMeans)
    _first_mean: tuple[float, float] | None = None  # mean, standard error
    _best_mean: tuple[float, float] | None = None
    _has_fallen: bool = False

    def see(self, rewards: Iterable[tuple[str, float]]) -> list[str]:
        """Add the (prompt, reward) pairs of new answers; returns a sentence for each fall that they show."""
        return [
            sentence
            for prompt, reward in rewards
            if (means := self._rewards.add(prompt, reward))
            for sentence in self._compare(means)
        ]

    def finish(self) -> list[str]:
        """Returns the sentences about the last answers of a run, which are too few for a mean of their own."""
        return [sentence for means in self._rewards.finish() for sentence in self._compare(means)]

    def _compare(self, means: Sequence[float]) -> list[str]:
        """Compare a new mean over prompts with the best one; returns a sentence if it is a fall."""
        mean, error = _mean_and_error(means)
        if self._first_mean is None or self._best_mean is None:
            self._first_mean = self._best_mean = (mean, error)
            return []
        drop = self._best_mean[0] - mean
        gain = self._best_mean[0] - self._first_mean[0]
        is_low = drop > max(REWARD_ERRORS * math.hypot(error, self._best_mean[1]), LOST * gain)
        is_new_fall, self._has_fallen = is_low and not self._has_fallen, is_low
        if mean > self._best_mean[0]:
            self._best_mean = (mean, error)
        sentence = f"the mean reward of new answers is {mean:.3g}: it was {self._best_mean[0]:.3g}"
        return [sentence] if is_new_fall else []


@dataclass
class LengthWatch:
    """Watches how long the answers that arrive are, and reports once when their mean is below half of what it was over
    the first 100 prompts, and once when it is above twice that.
    """

    _lengths: _PromptMeans = field(default_factory=_PromptMeans)
    _first_mean: tuple[float, float] | None = None  # mean, standard error
    _reported: set[str] = field(default_factory=set)

    def see(self, lengths: Iterable[tuple[str, float]]) -> dict[str, str]:
        """Add the (prompt, tokens) pairs of new answers; returns sentences about their length by kind."""
        sentences: dict[str, str] = {}
        for prompt, length in lengths:
            if means := self._lengths.add(prompt, length):
                sentences |= self._compare(means)
        return sentences

    def finish(self) -> dict[str, str]:
        """Returns the sentences about the last answers of a run, which are too few for a mean of their own."""
        sentences: dict[str, str] = {}
        for means in self._lengths.finish():
            sentences |= self._compare(means)
        return sentences

    def _compare(self, means: Sequence[float]) -> dict[str, str]:
        """Compare a new mean over prompts with the first one; returns sentences by kind."""
        mean, error = _mean_and_error(means)
        if self._first_mean is None:
            self._first_mean = (mean, error)
            return {}
        first_mean = self._first_mean[0]
        is_significant = abs(mean - first_mean) > REWARD_ERRORS * math.hypot(error, self._first_mean[1])
        figures = f"new answers have {mean:.3g} tokens on average, {first_mean:.3g} when the run began"
        short_message = (
            f"answers became short: {figures}. If they lose what the reward does not look at, give it a part for that, "
            "such as a least length, or a judge (docs/reward_does_not_rise.md)"
        )
        long_message = (
            f"answers became long: {figures}. If that is not what you want, take something off long ones "
            "(--overlong-penalty 1, or a part of the reward)"
        )
        sentences = {
            SHORT: short_message if is_significant and mean * LENGTH_FACTOR < first_mean else None,
            LONG: long_message if is_significant and mean > LENGTH_FACTOR * first_mean else None,
        }
        return _report_once(sentences, self._reported)


@dataclass
class StalenessWatch:
    """Watches how far batches are from the policy, and reports when the mean over 50 steps of their effective sample
    size is below a half, or that of log(mu / pi) of whole answers above 1.5 nats.

    Beyond these no form of the objectives was found to train steadily. Each is reported once, and again after it
    recovered.
    """

    sync_every: int  # updates between two published weights
    _newest_values: dict[str, deque[float]] = field(default_factory=dict)
    _repeated_share: float = 0.0
    _stale_figures: set[str] = field(default_factory=set)

    def see(self, step: int, figures: Mapping[str, float | None]) -> list[str]:
        """Add a step's metrics; returns a sentence for each figure by which the data have become stale."""
        for name in (ESS, OFF_POLICY):
            value = figures.get(name)
            if value is not None and math.isfinite(value):
                self._newest_values.setdefault(name, deque(maxlen=STEPS)).append(value)
        self._repeated_share = figures.get(REPEATED) or 0.0
        return self._sentences(step, {name for name in (ESS, OFF_POLICY) if figures.get(name) is not None}, STEPS)

    def finish(self, step: int) -> list[str]:
        """Returns sentences about all steps of a run that ended before it had 50."""
        return self._sentences(
            step, {name for name, values in self._newest_values.items() if len(values) < STEPS}, FEWEST_STEPS
        )

    def _sentences(self, step: int, names: Set[str], fewest: int) -> list[str]:
        """Returns a sentence for each of these figures that has crossed its limit."""
        share = nats = None
        if ESS in names:
            share = self._newly_crossed_mean(ESS, lambda mean, room: mean < LEAST_ESS * room, fewest)
        if OFF_POLICY in names:
            nats = self._newly_crossed_mean(OFF_POLICY, lambda mean, room: mean > MOST_OFF_POLICY / room, fewest)
        sentences = []
        if share is not None:
            sentences.append((ESS, f"the effective sample size was {percent(share)} of a batch"))
        if nats is not None:
            sentences.append(
                (OFF_POLICY, f"answers are {nats:.2g} nats likelier under the weights that sampled them than now")
            )
        remedies = "Lower the rate (--optimizer.lr), draw newer data (--replay.selection.m) or make the answers shorter"
        if self.sync_every > 1:
            remedies += f"; weights are published every {self.sync_every} updates (--sync-every)"
        if self._repeated_share > MOST_REPEATED:
            remedies += f"; {percent(self._repeated_share)} of the answers left as copies of others"
            remedies += " (--replay.buffer.no-distinct keeps them)"
        return [
            f"data are stale: {finding} over steps {step - len(self._newest_values[name]) + 1} to {step}. {remedies}"
            for name, finding in sentences
        ]

    def _newly_crossed_mean(self, name: str, is_beyond: Callable[[float, float], bool], fewest: int) -> float | None:
        """Returns the mean of the newest steps, at least `fewest`, if it has just gone beyond its limit; it comes back
        with a tenth to spare.
        """
        values = self._newest_values.get(name, ())
        if len(values) < fewest:
            return None
        mean, was_stale = sum(values) / len(values), name in self._stale_figures
        if not is_beyond(mean, 1.1 if was_stale else 1.0):
            self._stale_figures.discard(name)
            return None
        self._stale_figures.add(name)
        return None if was_stale else mean


@dataclass
class SignalWatch:
    """Watches whether batches can teach anything, and reports once when over 50 steps no group's rewards differed, once
    when most answers were cut off, and once, from step 10 on, when most have left as copies of others.
    """

    _varied_shares: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _truncated_shares: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _copied_share: float = 0.0
    _reported: set[str] = field(default_factory=set)

    def see(self, step: int, varied: float, truncated: float, copies: float = 0.0) -> dict[str, str]:
        """Add a step's shares of groups whose rewards differ and of answers that were cut off, and the share of all
        answers so far that left as copies; returns sentences by kind.
        """
        self._varied_shares.append(varied)
        self._truncated_shares.append(truncated)
        self._copied_share = copies
        sentences = self._copies_sentence() if step >= EARLY else {}
        sentences |= self._span_sentences(step) if len(self._varied_shares) == STEPS else {}
        return _report_once(sentences, self._reported)

    def finish(self, step: int) -> dict[str, str]:
        """Returns sentences about all steps of a run that ended before it had 50."""
        if len(self._varied_shares) < FEWEST_STEPS:
            return {}
        return _report_once(self._copies_sentence() | self._span_sentences(step), self._reported)

    def _copies_sentence(self) -> dict[str, str]:
        """Returns a sentence, by its kind, where too many answers left as copies."""
        if self._copied_share <= MOST_COPIES:
            return {}
        return {
            COPIES: f"{percent(self._copied_share)} of the answers so far were dropped as copies of others to the same "
            "prompt, and never used: sample more varied answers (--exploration.temperature), or keep them all "
            "(--replay.buffer.no-distinct)"
        }

    def _span_sentences(self, step: int) -> dict[str, str]:
        """Returns sentences, by kind, about the newest 50 steps, or about all steps of a shorter run."""
        count = len(self._varied_shares)
        span, sentences = f"steps {step - count + 1} to {step}", {}
        if not any(self._varied_shares):
            sentences[NO_SIGNAL] = (
                f"nothing can be learnt: in {span} all answers to a prompt got the same reward. `tba check` shows "
                "answers with their rewards, and what to change"
            )
        if (share := sum(self._truncated_shares) / count) > MOST_TRUNCATED:
            sentences[TRUNCATED] = (
                f"{percent(share)} of the answers of {span} were cut off: set --model.generation.max-completion-tokens "
                "higher, or ask for short answers"
            )
        return sentences


@dataclass
class CollapseWatch:
    """Watches for what collapses began with elsewhere, each of which is reported once:

    - the mean entropy of five steps is below half of that of the five before them;
    - engine and trainer differ by more than 0.1 nats a token, at equal weights;
    - the effective sample size of ten batches in a row is below a tenth;
    - over the newest five batches that earlier weights sampled, an update moved the distribution of a token by more
      than 0.05 nats: implementations of PPO stop at a fifth of that to all of it.
    """

    _entropies: deque[float] = field(default_factory=lambda: deque(maxlen=2 * FEW_STEPS))
    _ess_values: deque[float] = field(default_factory=lambda: deque(maxlen=2 * FEW_STEPS))
    _drifts: deque[float] = field(default_factory=lambda: deque(maxlen=FEW_STEPS))
    _reported: set[str] = field(default_factory=set)

    def see(self, step: int, figures: Mapping[str, float | None]) -> dict[str, str]:
        """Add a step's metrics; returns sentences by kind."""
        for name, values in ((ENTROPY, self._entropies), (ESS, self._ess_values), (DRIFT, self._drifts)):
            value = figures.get(name)
            if value is not None and math.isfinite(value):
                values.append(value)
        mismatch = {MISMATCHES: self._mismatch_sentence(step, figures)}
        return _report_once(mismatch | self._span_sentences(step, FEW_STEPS), self._reported)

    def finish(self, step: int) -> dict[str, str]:
        """Returns sentences about all steps of a run that ended before it had five or ten."""
        return _report_once(self._span_sentences(step, FEWEST_STEPS), self._reported)

    def _span_sentences(self, step: int, fewest: int) -> dict[str, str | None]:
        """Returns sentences, by kind, about the newest steps. fewest: the number of steps that make a mean."""
        return {
            ENTROPY_FALLS: self._entropy_sentence(step, fewest),
            LOST_SAMPLES: self._lost_samples_sentence(step, fewest),
            LARGE_STEPS: self._large_step_sentence(step, fewest),
        }

    def _entropy_sentence(self, step: int, fewest: int) -> str | None:
        values, half = list(self._entropies), len(self._entropies) // 2
        if half < fewest:
            return None
        before, after = (sum(part) / half for part in (values[:half], values[-half:]))
        if before < LEAST_ENTROPY or after > before / 2:
            return None
        return (
            f"the policy's entropy fell from {before:.2g} to {after:.2g} nats a token in the {len(values)} steps to "
            f"{step}: its answers become one. Lower the rate (--optimizer.lr), or hold it nearer to the reference "
            "(--objective.beta)"
        )

    def _mismatch_sentence(self, step: int, figures: Mapping[str, float | None]) -> str | None:
        gap, answer_gap = figures.get(MISMATCH), figures.get(MISMATCH_ANSWER)
        tokens = (figures.get(FRESH) or 0.0) * (figures.get(TRAINED_TOKENS) or 0.0)
        if gap is None or answer_gap is None or not gap > MOST_APART or tokens < FEWEST_TOKENS:
            return None
        return (
            f"engine and trainer differ: at step {step} equal weights gave a token {gap:.2g} nats more or less, an "
            f"answer {answer_gap:.2g}, and by that much ratios to what was sampled are wrong. Compute in float32 "
            "(--model.dtype float32), sample with the other engine (--model.generation.engine), or leave ratios out or "
            "mask them, as the objective can (docs/objectives.md)"
        )

    def _lost_samples_sentence(self, step: int, fewest: int) -> str | None:
        fewest_batches = 2 * FEW_STEPS if fewest == FEW_STEPS else fewest
        if len(self._ess_values) < fewest_batches or max(self._ess_values) >= FEWEST_SAMPLES:
            return None
        share = percent(max(self._ess_values))
        return (
            f"in the {len(self._ess_values)} batches to step {step} the effective sample size was at most {share}: a "
            "few answers decide each update. Publish weights more often (--sync-every), draw newer data "
            "(--replay.selection.m), or lower the rate (--optimizer.lr)"
        )

    def _large_step_sentence(self, step: int, fewest: int) -> str | None:
        if len(self._drifts) < fewest or (drift := sum(self._drifts) / len(self._drifts)) <= MOST_DRIFT:
            return None
        return (
            f"updates are large: by step {step} each moved the distribution of a token by {drift:.2g} nats (above "
            f"{MOST_DRIFT:g} runs have collapsed). Lower the rate (--optimizer.lr), or warm it up for longer "
            "(--optimizer.schedule.warmup)"
        )


def _report_once(sentences: Mapping[str, str | None], reported: set[str]) -> dict[str, str]:
    """Returns the sentences whose kinds were not reported yet, and adds these kinds to `reported`."""
    new_sentences = {kind: text for kind, text in sentences.items() if text is not None and kind not in reported}
    reported.update(new_sentences)
    return new_sentences


def _standard_error(e: Evaluation) -> float:
    """Returns the standard error of a proportion, kept above 0 (Agresti and Coull 1998)."""
    share = (e.value * e.n + 2) / (e.n + 4)
    return math.sqrt(max(0.0, share * (1 - share)) / (e.n + 4))
