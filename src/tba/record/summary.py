"""`summary.json`: the results of a run.

Invariant: its keys are always the same and all there; it is written under a temporary name and renamed; it is built
from counts that were taken where they arose, so that it can show an account that does not close.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from tba.errors import UserError
from tba.json_input import read_json
from tba.record import memory
from tba.record.evaluations import parse_evaluation
from tba.record.jsonl import as_json, write_json
from tba.record.ledger import Ledger
from tba.typed_values import convert
from tba.types import Evaluation, Json

FILE = "summary.json"
NOTABLE_WAIT = 0.02  # of wall-clock: a side that waited for less did not wait
EVEN_USES = 0.1  # mean uses this close to one count as one


@dataclass(frozen=True, slots=True)
class WallSeconds:
    """Holds what the run's wall-clock went to, in seconds."""

    total: float  # from start to this summary
    sft: float = 0.0  # supervised warm start; 0 when it was cached
    warm_up: float = 0.0  # until the trainer had enough to begin
    train: float = 0.0  # from the first optimizer step to the last
    eval: float = 0.0  # spent evaluating, by whatever part; it overlaps train


@dataclass(frozen=True, slots=True)
class Lag:
    """Holds the trainer updates between the weights that sampled a trajectory and its use, over all uses."""

    mean: float = 0.0
    p95: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, histogram: Mapping[int, int]) -> Lag:
        """Returns the lag of {lag: how many trajectories were used at it}; zeros when there were none."""
        total = sum(histogram.values())
        if total <= 0:
            return cls()
        covered, p95, ordered = 0, 0, sorted((lag, count) for lag, count in histogram.items() if count > 0)
        for lag, count in ordered:
            covered, p95 = covered + count, lag
            if covered >= 0.95 * total:
                break
        return cls(sum(lag * count for lag, count in ordered) / total, float(p95), float(ordered[-1][0]))


@dataclass(frozen=True)
class Summary:
    """Holds all of `summary.json`. Idle shares are of wall-clock after warm-up, 0..1."""

    recipe: str
    seed: int
    steps: int  # optimizer steps
    wall_seconds: WallSeconds
    evaluations: Sequence[Evaluation] = ()
    trainer_idle: float = 0.0  # waiting for data
    trainer_paced: float = 0.0  # held back by the limit on reuse
    searcher_idle: float = 0.0
    searcher_paced: float = 0.0  # held back because they were ahead
    searcher_evaluating: float = 0.0
    searcher_time: Mapping[str, float] = field(default_factory=dict)  # shares of all of it, by what it went to
    tokens: Ledger = field(default_factory=Ledger)
    trajectories: Ledger = field(default_factory=Ledger)
    lag: Lag = field(default_factory=Lag)
    recent_share: float = 0.0  # of all groups, those all of whose trajectories were among the newest arrivals
    # by split the problems, the prompts that are asked, and the others by why they are not
    prompts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reference_resets: Sequence[Mapping[str, Json]] = ()  # each the step, the version that became it, and when
    control: Sequence[Mapping[str, Json]] = ()  # each change by the controller: its step, why, the values from then on
    served: Mapping[str, int] = field(default_factory=dict)  # to agents (`tba serve`), by what it counts
    joined: Sequence[Mapping[str, Json]] = ()  # searchers that joined: `name`, `joined` and `left` in seconds, `how`
    faults: Mapping[str, Json] = field(default_factory=dict)  # what went wrong and was survived: {"restarts": 1}
    peak_memory_bytes: Mapping[str, int] = field(default_factory=dict)  # by part
    utilisation: Mapping[str, float] = field(default_factory=dict)  # of the rate of a product of matrices, by half
    versions: Mapping[str, str] = field(default_factory=memory.versions)
    machine: Mapping[str, Json] = field(default_factory=memory.machine)

    @property
    def slow_side(self) -> str:
        """Returns the side that the other had to wait for: `searchers`, `trainer` or `neither`.

        Where neither waited, it is the side that could not have kept up a pace of one use for each trajectory.
        """
        trainer, searchers = self.trainer_idle + self.trainer_paced, self.searcher_idle + self.searcher_paced
        uses = self.trajectories.samples_per_insert
        if max(trainer, searchers) >= NOTABLE_WAIT:
            return "searchers" if trainer >= searchers else "trainer"
        if not self.trajectories.trained_total or 1 - EVEN_USES <= uses <= 1 + EVEN_USES:
            return "neither"
        return "searchers" if uses > 1 else "trainer"

    def to_json(self) -> dict[str, Json]:
        """Returns the contents of `summary.json`."""
        trajectories = self.trajectories
        evaluations = [
            {"version": e.version, "wall_seconds": round(e.wall_seconds, 3)}
            | {"metric": e.metric, "value": e.value, "n": e.n}
            for e in self.evaluations
        ]
        contents = {f.name: getattr(self, f.name) for f in fields(self)} | {
            "wall_seconds": {name: round(v, 3) for name, v in asdict(self.wall_seconds).items()},
            "evaluations": evaluations,
            "searcher_time": {name: round(share, 4) for name, share in self.searcher_time.items()},
            "tokens": asdict(self.tokens),
            "trajectories": asdict(trajectories),
            "lag": asdict(self.lag),
            "utilisation": {half: round(share, 4) for half, share in self.utilisation.items()},
            "slow_side": self.slow_side,
            "samples_per_insert": trajectories.samples_per_insert,
            "trained_share": trajectories.trained_share,
        }
        return dict(as_json(contents))

    def write(self, directory: Path) -> Path:
        """Write `summary.json` of the run in `directory`; returns its path."""
        write_json(directory / FILE, self.to_json())
        return directory / FILE

    @classmethod
    def read(cls, directory: Path) -> Summary | None:
        """Reads the summary of the run in `directory`; None when the run has none yet.

        Raises `UserError` when the file is not a summary.
        """
        path = directory / FILE
        if not path.exists():
            return None
        remedy = "it is a run's summary, and is written again when the run is resumed (tba resume)"
        contents = read_json(path, remedy)
        for derived_name in ("samples_per_insert", "slow_side", "trained_share"):
            contents.pop(derived_name, None)
        try:
            summary: Summary = convert(contents, cls, "json")
            return replace(summary, evaluations=tuple(map(parse_evaluation, contents["evaluations"])))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} has unexpected contents ({error}): {remedy}") from error
