"""Scores answers under the reference on the trainer's side, where that does not fit beside a searcher's engine.

Searchers send such answers without scores (their reference is `ELSEWHERE`). Replay requests them, as it does after a
reset of the reference, and the trainer answers the requests: over its ranks, each of which holds some rows of the
reference, or with the base of a policy with adapters.

Invariant: an answer is scored once, before it can be drawn. The score is in the journal before replay has it, so that a
resume scores nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from tba.batch import AnsweredPrompt, Batch, score_in_passes
from tba.protocols import Policy, Reference, ReferenceScorer
from tba.recipe import Recipe
from tba.replay.journal import JournalWriter
from tba.rollout.rescoring import Rescorer
from tba.runtime.prompt_order import LEASE_SECONDS
from tba.runtime.ranks.start import reference_part
from tba.runtime.run_directory import RunDirectory
from tba.runtime.teaching import reference_model_of
from tba.training.ranks.policy import Rank0Policy
from tba.types import FloatArray, Version

OWNER = "trainer"  # of its counts and leases in the journal


@dataclass
class PolicyScorer:
    """Scores answers by a policy that is evaluated elsewhere, such as over several ranks.

    log_policy_of: returns log-probabilities, float32 [B, T], of a batch; tokens_per_pass: of such a batch, at most.
    """

    log_policy_of: Callable[[Batch], Tensor]
    tokens_per_pass: int
    share_prompt: bool
    version: Version = field(default_factory=Version)

    def log_probabilities_of(self, answered_prompts: Sequence[AnsweredPrompt]) -> list[list[FloatArray]]:
        """Score completions as `FrozenReference.log_probabilities_of` does."""

        def scores_of(part: Batch) -> Iterator[FloatArray]:
            with torch.no_grad():
                log_RT = self.log_policy_of(part).cpu().numpy()
            yield from (log_T[:length].copy() for log_T, length in zip(log_RT, part.length_B.tolist(), strict=True))

        return score_in_passes(answered_prompts, scores_of, self.tokens_per_pass, self.share_prompt)


class TrainerScores(AbstractContextManager["TrainerScores"]):
    """Answers the requests for scores of a run's journal."""

    def __init__(self, scorer: ReferenceScorer, writer: JournalWriter, per_round: int, policy: Policy) -> None:
        self._writer, self._scorer, self._policy = writer, scorer, policy
        writer.resume()  # what an earlier trainer had been given is scored by this one
        self._rescorer = Rescorer(scorer, writer, per_round, LEASE_SECONDS)

    def round(self) -> int:
        """Score some of the answers that are requested; returns how many."""
        return self._rescorer.round()

    def reset(self, version: Version) -> None:
        """Make the policy as it is the reference from here on, as `version`."""
        if isinstance(self._policy, Rank0Policy) and isinstance(self._scorer, PolicyScorer):
            self._policy.reset_reference()
            self._scorer.version = version
        else:
            self.load(self._policy.weights(), version)

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Load the reference that a checkpoint was made under."""
        if isinstance(self._policy, Rank0Policy) and isinstance(self._scorer, PolicyScorer):
            self._policy.load_reference(weights)
            self._scorer.version = version
        else:
            cast(Reference, self._scorer).load(weights, version)  # under adapters, which alone have none, no reset is

    def close(self) -> None:
        """Close the journal."""
        self._writer.close()

    def __exit__(self, *failure: object) -> None:
        self.close()


def start_trainer_scores(
    recipe: Recipe, run: RunDirectory, policy: Policy, on_wait: Callable[[], object]
) -> TrainerScores | None:
    """Returns what scores answers in the trainer; None where searchers do. `policy` is the trained one, led by this
    process.
    """
    if not recipe.has_trainer_scores:
        return None
    scorer: ReferenceScorer
    if isinstance(policy, Rank0Policy):
        tokens = recipe.max_tokens_per_pass * recipe.trainer.count
        scorer = PolicyScorer(policy.score, tokens, policy.share_prompt)
    elif (base := reference_part(recipe, policy, None)) is not None:
        scorer = PolicyScorer(
            lambda batch: base.evaluate(batch).log_policy_BT, recipe.max_tokens_per_pass, base.share_prompt
        )
    else:
        scorer = reference_model_of(recipe, recipe.model).reference(recipe.policy_temperature, Version())
    writer = JournalWriter(
        run.journal(recipe), OWNER, deadline_s=recipe.run.journal_deadline, on_wait=on_wait, create=False
    )
    return TrainerScores(scorer, writer, recipe.rescored_per_round, policy)
