"""Rescoring older trajectories under a newer reference, which a searcher does between two rounds after a reset.

Invariant: a bounded amount at a time, newest first; what one searcher scores is leased, so that no other does. The same
reference model scores them and new answers, so a score does not depend on when it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tba.protocols import Journal, ReferenceScorer
from tba.types import Completion, Prompt, Score, Trajectory


@dataclass
class Rescorer:
    """Scores what the trainer requests, under the current reference."""

    reference: ReferenceScorer
    journal: Journal
    per_round: int  # trajectories
    lease_seconds: float  # for which no other searcher is given them

    def round(self) -> int:
        """Rescore once; returns how many trajectories were scored. Does nothing where nothing is requested."""
        version = self.reference.version
        trajectories = self.journal.unscored(version, self.per_round, self.lease_seconds)
        if not trajectories:
            return 0
        by_prompt: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            by_prompt.setdefault(trajectory.prompt.key, []).append(trajectory)
        answered: list[tuple[Prompt, list[Completion]]] = [
            (group[0].prompt, [t.completion for t in group]) for group in by_prompt.values()
        ]
        scores = [
            Score(trajectory.uid, version, log_reference)
            for group, logs in zip(by_prompt.values(), self.reference.log_probabilities_of(answered), strict=True)
            for trajectory, log_reference in zip(group, logs, strict=True)
        ]
        tokens = sum(t.length for t in trajectories)
        self.journal.put_scores(scores, {"rescored_trajectories": len(scores), "rescored_tokens": tokens})
        return len(scores)
