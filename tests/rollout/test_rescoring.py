"""What a searcher scores again after a reset of the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from small_llama import small_llama

from tba.generation import generate
from tba.models.huggingface import HuggingFace
from tba.replay.follower import JournalFollower
from tba.replay.journal import JournalWriter
from tba.rollout.rescoring import Rescorer
from tba.types import Prompt, Sampling, Trajectory, Version

LATER = Version(0, 50)


def answers(model: HuggingFace, each: int) -> list[Trajectory]:
    """Of three prompts in turn, scored under the first reference."""
    tokenizer, reference = model.tokenizer(), model.reference(0.7, Version())
    prompts = [Prompt("t", np.array(tokenizer.encode(t), np.int32), t) for t in ("1+2=", "7.", "12+34+56=")]
    engine, rng = model.engine(Version()), np.random.default_rng(0)
    groups = generate(engine, prompts, each, Sampling(), rng)
    pairs = [(p, group[i]) for i in range(each) for p, group in zip(prompts, groups, strict=True)]
    return [
        Trajectory(f"t{i}", p, c, 0.5, reference.log_probabilities_of([(p, [c])])[0][0], Version())
        for i, (p, c) in enumerate(pairs)
    ]


def test_scores_are_those_of_scoring_afresh_a_bounded_amount_at_a_time(tmp_path: Path) -> None:
    model = small_llama(tmp_path / "model")
    trajectories = {t.uid: t for t in answers(model, 6)}
    weights = {name: tensor * 1.3 for name, tensor in model.policy(0.7).weights().items()}
    reference, afresh = model.reference(0.7, Version()), model.reference(0.7, Version())
    path = tmp_path / "journal.sqlite"
    with JournalWriter(path, "searcher-0") as journal, JournalFollower(path) as follower:
        journal.put(list(trajectories.values()))
        follower.ask(LATER, list(trajectories))
        rescorer = Rescorer(reference, journal, per_round=7, lease_seconds=60.0)
        assert rescorer.round() == 0  # it has another reference
        for one in (reference, afresh):
            one.load(weights, LATER)
        assert [rescorer.round() for _ in range(4)] == [7, 7, 4, 0]
        scores, counts = follower.drain_scores(), follower.counters()["searcher-0"]
    assert {s.uid for s in scores[:7]} == set(list(trajectories)[-7:])  # the newest first
    assert {s.reference for s in scores} == {LATER}
    for score in scores:
        t = trajectories.pop(score.uid)
        np.testing.assert_allclose(
            score.log_reference, afresh.log_probabilities_of([(t.prompt, [t.completion])])[0][0], atol=2e-5
        )
        assert abs(score.log_reference - t.log_reference).max() > 0.01  # it is another reference
    assert not trajectories
    assert counts == {"rescored_trajectories": 18, "rescored_tokens": sum(t.length for t in answers(model, 6))}
