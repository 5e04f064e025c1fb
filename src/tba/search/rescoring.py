"""Older trajectories under a newer reference: what a searcher does between two rounds after a reset.

Invariant: a bounded amount at a time, newest first; what one searcher scores, no other does meanwhile (a lease). The
same reference model scores them as scores new answers, so a score does not depend on when it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tba.protocols import Reference
from tba.types import Completion, FloatArray, Prompt, Trajectory, Version

Scored = Sequence[tuple[Trajectory, FloatArray]]


@dataclass
class Rescorer:
    """Scores what the trainer asks for under the reference of now."""

    reference: Reference
    per_round: int  # trajectories
    wanted: Callable[[Version, int], Sequence[Trajectory]]  # up to so many, under this reference, newest first
    put: Callable[[Version, Scored, Mapping[str, int]], None]  # their scores, and what that counts for

    def round(self) -> int:
        """Once; how many trajectories were scored. Nothing is done where nothing is asked for."""
        version = self.reference.version
        trajectories = self.wanted(version, self.per_round)
        if not trajectories:
            return 0
        by_prompt: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            by_prompt.setdefault(trajectory.prompt.key, []).append(trajectory)
        answered: list[tuple[Prompt, list[Completion]]] = [
            (group[0].prompt, [t.completion for t in group]) for group in by_prompt.values()
        ]
        scores = self.reference.log_probabilities_of(answered)
        pairs = [
            pair
            for group, rows in zip(by_prompt.values(), scores, strict=True)
            for pair in zip(group, rows, strict=True)
        ]
        tokens = sum(t.length for t in trajectories)
        self.put(version, pairs, {"rescored_trajectories": len(pairs), "rescored_tokens": tokens})
        return len(pairs)
