"""The account of everything that was generated.

Invariant: generated + imported = trained at least once + waiting + evicted + rejected + duplicate + damaged + in flight
at stop, exactly. Each term is counted where it arises (searcher, journal, replay, trainer) and none by subtraction, so
`closes` is a check and not a definition. `trained_total` counts every use; `evaluation` and `auxiliary` are reported
apart and are in neither side; `observed`, `failed` and `expired` are parts of other terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

Unit: TypeAlias = Literal["tokens", "trajectories"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts one unit (completion tokens, or trajectories) by what became of it."""

    generated: int = 0  # for training, by all searchers
    imported: int = 0  # by `tba import`
    trained_once: int = 0  # went into at least one optimizer step
    trained_total: int = 0  # every use counted
    waiting: int = 0  # in the journal or in memory, never trained on
    evicted: int = 0  # left by the capacity rule before they were ever trained on
    rejected: int = 0  # not usable: a reward or a log-probability not finite, or a reward too large
    duplicate: int = 0  # the same completion of the same prompt was there already
    damaged: int = 0  # was on the disk and could not be read again
    in_flight_at_stop: int = 0  # unfinished, or finished and not yet written, when the run ended
    evaluation: int = 0  # generated to evaluate; reported apart
    observed: int = 0  # of those generated, what environments said: read by the policy, not sampled, never trained
    failed: int = 0  # of those rejected, episodes whose environment failed
    expired: int = 0  # of those rejected, answers that were not graded within the deadline
    auxiliary: int = 0  # continued from prefixes of answers, for the values of steps; reported apart

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Ledger:
        """Returns the counts whose names are terms of the ledger; other names are ignored."""
        return cls(**{name: int(counts[name]) for name in TERMS if name in counts})

    @classmethod
    def of_counters(cls, counters: Mapping[str, int], unit: Unit) -> Ledger:
        """Returns the ledger of counters named `generated_tokens`, `generated_trajectories`, `in_flight_tokens`, ..."""
        ending = f"_{unit}"
        counts = {name.removesuffix(ending): count for name, count in counters.items() if name.endswith(ending)}
        if "in_flight" in counts:
            counts["in_flight_at_stop"] = counts.get("in_flight_at_stop", 0) + counts.pop("in_flight")
        return cls.of(counts)

    @classmethod
    def gather(cls, owners: Mapping[str, Mapping[str, int]], unit: Unit) -> Ledger:
        """Returns the sum over all owners' counters: {"searcher-0": {"generated_tokens": 812, ...}, "replay": ...}."""
        return sum((cls.of_counters(counters, unit) for counters in owners.values()), cls())

    def __add__(self, addend: Ledger) -> Ledger:
        return Ledger(**{name: getattr(self, name) + getattr(addend, name) for name in TERMS})

    @property
    def written(self) -> int:
        """Returns all that was appended to the journal."""
        return self.generated + self.imported - self.rejected - self.in_flight_at_stop

    @property
    def accounted(self) -> int:
        """Returns the sum of everything whose fate is known."""
        dropped = self.evicted + self.rejected + self.duplicate + self.damaged
        return self.trained_once + self.waiting + dropped + self.in_flight_at_stop

    @property
    def difference(self) -> int:
        """Returns what was generated and imported less what is accounted for: positive if lost, negative if twice."""
        return self.generated + self.imported - self.accounted

    def closes(self) -> bool:
        """Returns whether everything generated and imported is accounted for, once."""
        return self.difference == 0

    @property
    def trained_share(self) -> float:
        """Returns the share of what was generated and imported that was trained on at least once, 0..1."""
        total = self.generated + self.imported
        return self.trained_once / total if total else 0.0

    @property
    def mean_uses(self) -> float:
        """Returns the mean number of uses of what was trained on."""
        return self.trained_total / self.trained_once if self.trained_once else 0.0

    @property
    def samples_per_insert(self) -> float:
        """Returns the uses per item that entered the replay (Cassirer et al. 2021, Reverb), trained on or not."""
        inserted = self.trained_once + self.waiting + self.evicted
        return self.trained_total / inserted if inserted else 0.0


TERMS = tuple(f.name for f in fields(Ledger))
