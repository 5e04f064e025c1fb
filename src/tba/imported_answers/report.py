"""Counts the lines of one import: imported, imported before, or refused, and why.

Invariant: every line is in exactly one of the three: lines = imported + repeated + rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tba.tables import Refusal
from tba.types import Json, Trajectory

EXAMPLES = 3  # of each reason that are kept


@dataclass
class RejectedLines:
    """Counts the lines that were refused for one reason, and keeps examples: (line, detail)."""

    count: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Report:
    """Counts the lines of one source; `source` is the name by which its trajectories are known."""

    source: str
    lines: int = 0
    tokens: int = 0  # of what was imported
    repeated: int = 0  # there from an earlier import of the same source
    unknown_prompts: int = 0  # trajectories whose prompt is none of the task's own
    claimed: int = 0  # trajectories that came with a reward
    disagreed: int = 0  # of these, how many claimed another reward than the task's own
    rejected: dict[str, RejectedLines] = field(default_factory=dict)
    rewards: dict[str, list[float]] = field(default_factory=dict)  # of what was imported, by prompt key

    @property
    def imported(self) -> int:
        """Returns how many trajectories were imported."""
        return sum(map(len, self.rewards.values()))

    @property
    def refused(self) -> int:
        """Returns how many lines were not imported."""
        return sum(rejected.count for rejected in self.rejected.values())

    @property
    def varied_prompts(self) -> int:
        """Returns the number of prompts with different rewards: only these teach anything."""
        return sum(max(rewards) > min(rewards) for rewards in self.rewards.values())

    def refuse(self, number: int, refusal: Refusal) -> None:
        """Count line `number` as refused."""
        rejected = self.rejected.setdefault(refusal.reason, RejectedLines())
        rejected.count += 1
        if len(rejected.examples) < EXAMPLES:
            rejected.examples.append((number, refusal.detail))

    def hide_details(self) -> None:
        """Delete the details of refusals, which quote texts; the reasons and their counts stay."""
        for rejected in self.rejected.values():
            rejected.examples = [(number, "") for number, _ in rejected.examples]

    def add(self, trajectory: Trajectory, is_task_prompt: bool) -> None:
        """Count one more trajectory in the journal."""
        self.tokens += trajectory.length
        self.unknown_prompts += not is_task_prompt
        self.rewards.setdefault(trajectory.prompt.key, []).append(trajectory.reward)

    def to_json(self) -> Mapping[str, Json]:
        """Returns a line of `imports.jsonl`."""
        return {
            "source": self.source,
            "lines": self.lines,
            "imported": self.imported,
            "imported_tokens": self.tokens,
            "repeated": self.repeated,
            "rejected": {
                reason: {"count": r.count, "first": [[number, detail] for number, detail in r.examples]}
                for reason, r in self.rejected.items()
            },
            "prompts": len(self.rewards),
            "prompts_varied": self.varied_prompts,
            "unknown_prompts": self.unknown_prompts,
            "claimed": self.claimed,
            "disagreed": self.disagreed,
        }


def counters(trajectories: list[Trajectory]) -> dict[str, int]:
    """Returns the ledger's counts of imported trajectories."""
    return dict(Counter(imported_trajectories=len(trajectories), imported_tokens=sum(t.length for t in trajectories)))
