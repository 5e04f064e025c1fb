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
_NOTED = (
    HELD_OUT,
    REWARD,
    STALE,
    NO_SIGNAL,
    TRUNCATED,
    COPIES,
    ENTROPY_FALLS,
    MISMATCHES,
    LOST_SAMPLES,
    LARGE_STEPS,
    SHORT,
    LONG,
    SLOW_REWARD,
)
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
    best: dict[str, Evaluation] = {}
    fallen: dict[str, bool] = {}
    found = []
    for e in sorted(evaluations, key=lambda e: e.version):
        top = best.setdefault(e.metric, e)
        far = top.value - e.value > max(POINTS, ERRORS * math.hypot(_error(top), _error(e)))
        if far and not fallen.get(e.metric):
            found.append(
                f"{e.metric} is {percent(e.value)} at {e.version.in_words}: it was {percent(top.value)} at "
                f"{top.version.in_words}"
            )
        fallen[e.metric] = far
        if e.value > top.value:
            best[e.metric] = e
    return found


def note_falls(directory: Path, evaluations: Iterable[Evaluation]) -> list[str]:
    """Record the falls that are not recorded yet for the run in `directory`, as faults; returns them."""
    known = {line["what"] for line in read_faults(directory) if line["kind"] == HELD_OUT}
    new = [what for what in find_falls(evaluations) if what not in known]
    for what in new:
        record_fault(directory, HELD_OUT, what)
    return new


def noted_falls(directory: Path) -> list[str]:
    """Returns all that were recorded, oldest first."""
    return [str(line["what"]) for line in read_faults(directory) if line["kind"] in _NOTED]


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
class _Means:
    """Gathers a figure of each new answer, by prompt, until they are of 100 prompts."""

    _values: dict[str, list[float]] = field(default_factory=dict)
    _whole: bool = False  # whether there were 100 prompts once

    def add(self, prompt: str, value: float) -> list[float]:
        """Takes the figure of one answer; returns the means of the 100 prompts before it, where it is of one more."""
        means = []
        if len(self._values) == PROMPTS and prompt not in self._values:
            self._whole, means = True, self._take()
        self._values.setdefault(prompt, []).append(value)
        return means

    def finish(self) -> list[list[float]]:
        """Returns the means of those that are not complete at the end of a run; where none ever were, of their earlier
        half and of the later one. Too few are left out.
        """
        means = self._take()
        half = len(means) // 2
        parts = [means] if self._whole else [means[:half], means[half:]]
        return [part for part in parts if len(part) >= FEWEST_PROMPTS]

    def _take(self) -> list[float]:
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

    _rewards: _Means = field(default_factory=_Means)
    _first: tuple[float, float] | None = None  # mean, standard error
    _best: tuple[float, float] | None = None
    _fallen: bool = False

    def see(self, rewards: Iterable[tuple[str, float]]) -> list[str]:
        """Takes (prompt, reward) of each new answer; returns a sentence for each fall that they show."""
        return [
            what
            for prompt, reward in rewards
            if (means := self._rewards.add(prompt, reward))
            for what in self._compare(means)
        ]

    def finish(self) -> list[str]:
        """Compares what is not complete at the end of a run."""
        return [what for means in self._rewards.finish() for what in self._compare(means)]

    def _compare(self, means: Sequence[float]) -> list[str]:
        """Compare one more mean over prompts with the best; returns a sentence if it is a fall."""
        mean, error = _mean_and_error(means)
        if self._first is None or self._best is None:
            self._first = self._best = (mean, error)
            return []
        down = self._best[0] - mean
        far = down > max(REWARD_ERRORS * math.hypot(error, self._best[1]), LOST * (self._best[0] - self._first[0]))
        new, self._fallen = far and not self._fallen, far
        if mean > self._best[0]:
            self._best = (mean, error)
        return [f"the mean reward of new answers is {mean:.3g}: it was {self._best[0]:.3g}"] if new else []


@dataclass
class LengthWatch:
    """Watches how long the answers that arrive are, and reports once when their mean is below half of what it was over
    the first 100 prompts, and once when it is above twice that.
    """

    _lengths: _Means = field(default_factory=_Means)
    _first: tuple[float, float] | None = None  # mean, standard error
    _reported: set[str] = field(default_factory=set)

    def see(self, lengths: Iterable[tuple[str, float]]) -> dict[str, str]:
        """Takes (prompt, tokens) of each new answer; returns a sentence by its kind."""
        sentences: dict[str, str] = {}
        for prompt, length in lengths:
            if means := self._lengths.add(prompt, length):
                sentences |= self._compare(means)
        return sentences

    def finish(self) -> dict[str, str]:
        """Compares what is not complete at the end of a run."""
        sentences: dict[str, str] = {}
        for means in self._lengths.finish():
            sentences |= self._compare(means)
        return sentences

    def _compare(self, means: Sequence[float]) -> dict[str, str]:
        """Compare one more mean over prompts with the first one."""
        mean, error = _mean_and_error(means)
        if self._first is None:
            self._first = (mean, error)
            return {}
        start = self._first[0]
        sure = abs(mean - start) > REWARD_ERRORS * math.hypot(error, self._first[1])
        figures = f"new answers have {mean:.3g} tokens on average, {start:.3g} when the run began"
        short = (
            f"answers became short: {figures}. If they lose what the reward does not look at, give it a part for that, "
            "such as a least length, or a judge (docs/reward_does_not_rise.md)"
        )
        long = (
            f"answers became long: {figures}. If that is not what you want, take something off long ones "
            "(--overlong-penalty 1, or a part of the reward)"
        )
        sentences = {
            SHORT: short if sure and mean * LENGTH_FACTOR < start else None,
            LONG: long if sure and mean > LENGTH_FACTOR * start else None,
        }
        return _first_time(sentences, self._reported)


@dataclass
class StalenessWatch:
    """Watches how far batches are from the policy, and reports when the mean over 50 steps of their effective sample
    size is below a half, or that of log(mu / pi) of whole answers above 1.5 nats.

    Beyond these no form of the objectives was found to train steadily. Each is reported once, and again after it
    recovered.
    """

    sync_every: int  # updates between two published weights
    _newest: dict[str, deque[float]] = field(default_factory=dict)
    _repeated: float = 0.0
    _stale: set[str] = field(default_factory=set)

    def see(self, step: int, figures: Mapping[str, float | None]) -> list[str]:
        """Takes a step's metrics; returns a sentence for each figure with which the data have become stale."""
        for name in (ESS, OFF_POLICY):
            value = figures.get(name)
            if value is not None and math.isfinite(value):
                self._newest.setdefault(name, deque(maxlen=STEPS)).append(value)
        self._repeated = figures.get(REPEATED) or 0.0
        return self._sentences(step, {name for name in (ESS, OFF_POLICY) if figures.get(name) is not None}, STEPS)

    def finish(self, step: int) -> list[str]:
        """Looks at the steps there were, at the end of a run that had fewer than 50."""
        return self._sentences(
            step, {name for name, values in self._newest.items() if len(values) < STEPS}, FEWEST_STEPS
        )

    def _sentences(self, step: int, names: Set[str], fewest: int) -> list[str]:
        """Returns a sentence for each of these figures that has crossed its limit."""
        share = nats = None
        if ESS in names:
            share = self._crossed(ESS, lambda mean, room: mean < LEAST_ESS * room, fewest)
        if OFF_POLICY in names:
            nats = self._crossed(OFF_POLICY, lambda mean, room: mean > MOST_OFF_POLICY / room, fewest)
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
        if self._repeated > MOST_REPEATED:
            remedies += f"; {percent(self._repeated)} of the answers left as copies of others"
            remedies += " (--replay.buffer.no-distinct keeps them)"
        return [
            f"data are stale: {what} over steps {step - len(self._newest[name]) + 1} to {step}. {remedies}"
            for name, what in sentences
        ]

    def _crossed(self, name: str, beyond: Callable[[float, float], bool], fewest: int) -> float | None:
        """Returns the mean of the newest steps, at least `fewest`, if it has just gone beyond its limit; it comes back
        with a tenth to spare.
        """
        newest = self._newest.get(name, ())
        if len(newest) < fewest:
            return None
        mean, was = sum(newest) / len(newest), name in self._stale
        if not beyond(mean, 1.1 if was else 1.0):
            self._stale.discard(name)
            return None
        self._stale.add(name)
        return None if was else mean


@dataclass
class SignalWatch:
    """Watches whether batches can teach anything, and reports once when over 50 steps no group's rewards differed, once
    when most answers were cut off, and once, from step 10 on, when most have left as copies of others.
    """

    _varied: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _truncated: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _copies: float = 0.0
    _reported: set[str] = field(default_factory=set)

    def see(self, step: int, varied: float, truncated: float, copies: float = 0.0) -> dict[str, str]:
        """Takes a step's share of groups whose rewards differ, and of answers that were cut off, and of all answers so
        far the share that left as copies; returns a sentence by its kind.
        """
        self._varied.append(varied)
        self._truncated.append(truncated)
        self._copies = copies
        dropped = self._dropped() if step >= EARLY else {}
        return _first_time(dropped | (self._of_span(step) if len(self._varied) == STEPS else {}), self._reported)

    def finish(self, step: int) -> dict[str, str]:
        """Looks at the steps there were, at the end of a run that had fewer than 50."""
        if len(self._varied) < FEWEST_STEPS:
            return {}
        return _first_time(self._dropped() | self._of_span(step), self._reported)

    def _dropped(self) -> dict[str, str]:
        """Returns what is to be said of answers that left as copies."""
        if self._copies <= MOST_COPIES:
            return {}
        return {
            COPIES: f"{percent(self._copies)} of the answers so far were dropped as copies of others to the same "
            "prompt, and never used: sample more varied answers (--exploration.temperature), or keep them all "
            "(--replay.buffer.no-distinct)"
        }

    def _of_span(self, step: int) -> dict[str, str]:
        """Returns what is to be said of the newest steps, 50 but at the end of a shorter run."""
        count = len(self._varied)
        span, sentences = f"steps {step - count + 1} to {step}", {}
        if not any(self._varied):
            sentences[NO_SIGNAL] = (
                f"nothing can be learnt: in {span} all answers to a prompt got the same reward. `tba check` shows "
                "answers with their rewards, and what to change"
            )
        if (share := sum(self._truncated) / count) > MOST_TRUNCATED:
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

    _entropy: deque[float] = field(default_factory=lambda: deque(maxlen=2 * FEW_STEPS))
    _ess: deque[float] = field(default_factory=lambda: deque(maxlen=2 * FEW_STEPS))
    _drift: deque[float] = field(default_factory=lambda: deque(maxlen=FEW_STEPS))
    _reported: set[str] = field(default_factory=set)

    def see(self, step: int, figures: Mapping[str, float | None]) -> dict[str, str]:
        """Takes a step's metrics; returns a sentence by its kind."""
        for name, newest in ((ENTROPY, self._entropy), (ESS, self._ess), (DRIFT, self._drift)):
            value = figures.get(name)
            if value is not None and math.isfinite(value):
                newest.append(value)
        mismatch = {MISMATCHES: self._mismatch(step, figures)}
        return _first_time(mismatch | self._of_spans(step, FEW_STEPS), self._reported)

    def finish(self, step: int) -> dict[str, str]:
        """Looks at the steps there were, at the end of a run that had fewer than five or ten."""
        return _first_time(self._of_spans(step, FEWEST_STEPS), self._reported)

    def _of_spans(self, step: int, fewest: int) -> dict[str, str | None]:
        """Returns what is to be said of the newest steps; fewest: those that make a mean."""
        return {
            ENTROPY_FALLS: self._entropy_fall(step, fewest),
            LOST_SAMPLES: self._lost_samples(step, fewest),
            LARGE_STEPS: self._large_step(step, fewest),
        }

    def _entropy_fall(self, step: int, fewest: int) -> str | None:
        values, half = list(self._entropy), len(self._entropy) // 2
        if half < fewest:
            return None
        before, now = (sum(part) / half for part in (values[:half], values[-half:]))
        if before < LEAST_ENTROPY or now > before / 2:
            return None
        return (
            f"the policy's entropy fell from {before:.2g} to {now:.2g} nats a token in the {len(values)} steps to "
            f"{step}: its answers become one. Lower the rate (--optimizer.lr), or hold it nearer to the reference "
            "(--objective.beta)"
        )

    def _mismatch(self, step: int, figures: Mapping[str, float | None]) -> str | None:
        apart, answer = figures.get(MISMATCH), figures.get(MISMATCH_ANSWER)
        tokens = (figures.get(FRESH) or 0.0) * (figures.get(TRAINED_TOKENS) or 0.0)
        if apart is None or answer is None or not apart > MOST_APART or tokens < FEWEST_TOKENS:
            return None
        return (
            f"engine and trainer differ: at step {step} equal weights gave a token {apart:.2g} nats more or less, an "
            f"answer {answer:.2g}, and by that much ratios to what was sampled are wrong. Compute in float32 "
            "(--model.dtype float32), sample with the other engine (--model.generation.engine), or leave ratios out or "
            "mask them, as the objective can (docs/objectives.md)"
        )

    def _lost_samples(self, step: int, fewest: int) -> str | None:
        least = 2 * FEW_STEPS if fewest == FEW_STEPS else fewest
        if len(self._ess) < least or max(self._ess) >= FEWEST_SAMPLES:
            return None
        most = percent(max(self._ess))
        return (
            f"in the {len(self._ess)} batches to step {step} the effective sample size was at most {most}: a few "
            "answers decide each update. Publish weights more often (--sync-every), draw newer data "
            "(--replay.selection.m), or lower the rate (--optimizer.lr)"
        )

    def _large_step(self, step: int, fewest: int) -> str | None:
        if len(self._drift) < fewest or (drift := sum(self._drift) / len(self._drift)) <= MOST_DRIFT:
            return None
        return (
            f"updates are large: by step {step} each moved the distribution of a token by {drift:.2g} nats (above "
            f"{MOST_DRIFT:g} runs have collapsed). Lower the rate (--optimizer.lr), or warm it up for longer "
            "(--optimizer.schedule.warmup)"
        )


def _first_time(found: Mapping[str, str | None], told: set[str]) -> dict[str, str]:
    """Returns the sentences of kinds that were not told yet, and adds these to `told`."""
    new = {kind: what for kind, what in found.items() if what is not None and kind not in told}
    told.update(new)
    return new


def _error(e: Evaluation) -> float:
    """Returns the standard error of a proportion, kept above 0 (Agresti and Coull 1998)."""
    share = (e.value * e.n + 2) / (e.n + 4)
    return math.sqrt(max(0.0, share * (1 - share)) / (e.n + 4))
