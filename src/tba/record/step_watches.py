"""Watches over the trainer's steps: stale data, batches that teach nothing, and what collapses begin with.

Each watch has a window of steps. At the end of a run (`finish`) it judges a shorter window of a few steps, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

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
from tba.record.run_warnings import (
    COPIES,
    ENTROPY_FALLS,
    LARGE_STEPS,
    LOST_SAMPLES,
    MISMATCHES,
    NO_SIGNAL,
    TRUNCATED,
    report_once,
)
from tba.record.text import percent

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
MOST_DRIFT = 0.05  # nats a token and update


@dataclass
class StalenessWatch:
    """Watches how far batches are from the policy, and reports when the mean over 50 steps of their effective sample
    size is below a half, or that of log(mu / pi) of whole answers above 1.5 nats.

    Beyond these no form of the objectives was found to train steadily. Each is reported once, and again after it
    recovered.
    """

    sync_every: int  # updates between two published weights
    any_data: bool = False  # the objective learns as well from stale data, so that nothing is reported
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
        if self.any_data:
            return []
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
            remedies += " (--replay.buffer.no-deduplicate keeps them)"
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
        return report_once(sentences, self._reported)

    def finish(self, step: int) -> dict[str, str]:
        """Returns sentences about all steps of a run that ended before it had 50."""
        if len(self._varied_shares) < FEWEST_STEPS:
            return {}
        return report_once(self._copies_sentence() | self._span_sentences(step), self._reported)

    def _copies_sentence(self) -> dict[str, str]:
        """Returns a sentence, by its kind, where too many answers left as copies."""
        if self._copied_share <= MOST_COPIES:
            return {}
        return {
            COPIES: f"{percent(self._copied_share)} of the answers so far were dropped as copies of others to the same "
            "prompt, and never used: sample more varied answers (--exploration.temperature), or keep them all "
            "(--replay.buffer.no-deduplicate)"
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
        return report_once(mismatch | self._span_sentences(step, FEW_STEPS), self._reported)

    def finish(self, step: int) -> dict[str, str]:
        """Returns sentences about all steps of a run that ended before it had five or ten."""
        return report_once(self._span_sentences(step, FEWEST_STEPS), self._reported)

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
