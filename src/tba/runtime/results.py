"""What the trainer and each searcher leave for the summary when they end, in `logs/PART.result.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tba.clock import State
from tba.protocols import ComputeCost
from tba.types import Json, Version


@dataclass(frozen=True)
class SearcherResult:
    """Holds what the summary needs of a searcher that has ended."""

    clock: Mapping[State, float]  # seconds
    peak_memory_bytes: int
    journal_rows: int = 0  # of the whole journal, when it ended
    rounds: int = 0
    prompts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # `record.summary.Summary` says which
    served: Mapping[str, int] = field(default_factory=dict)  # what agents were served, by what it counts


@dataclass(frozen=True)
class TrainerResult:
    """Holds what the summary needs of a trainer that has ended."""

    clock: Mapping[State, float]  # seconds
    peak_memory_bytes: int
    steps: int
    version: Version
    skipped: int  # steps
    ledger: Mapping[str, int]  # counters of the replay
    position: int  # in the journal
    warm_up_seconds: float
    train_seconds: float
    lags: Mapping[int, int] = field(default_factory=dict)  # trajectories by their lag
    computed: Mapping[str, int] = field(default_factory=dict)  # tokens `read` and `scored`, `milliseconds`
    arithmetic: ComputeCost | None = None  # what a token costs; None: of unknown shape
    recent_share: float = 0.0
    reference_resets: Sequence[Mapping[str, Json]] = ()
    control: Sequence[Mapping[str, Json]] = ()
    awaited_evaluations: Sequence[Version] = ()  # that it has requested, and not seen when it ended
