"""What a searcher scores again after a reset of the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from tba.engines.transformers import EngineSettings
from tba.models.huggingface import HuggingFace
from tba.search.rescoring import Rescorer, Scored
from tba.tasks.characters import character_tokenizer
from tba.training.tiny_models import ScratchModel
from tba.types import FloatArray, Prompt, Sampling, Trajectory, Version

LATER = Version(0, 50)


def small_llama(folder: Path) -> HuggingFace:
    """A random Llama of 16 characters whose next tokens are far from equally likely."""
    tokenizer = character_tokenizer("0123456789+=. ")
    model = ScratchModel(hidden_size=32, layers=2, heads=2, ff_size=48, max_positions=32).start(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return HuggingFace(str(folder), device="cpu", generation=EngineSettings(slots=7, max_completion_tokens=10))


def answers(model: HuggingFace, each: int) -> list[Trajectory]:
    """Of three prompts in turn, scored under the first reference."""
    tokenizer, reference = model.tokenizer(), model.reference(0.7, Version())
    prompts = [Prompt("t", np.array(tokenizer.encode(t), np.int32), t) for t in ("1+2=", "7.", "12+34+56=")]
    engine, rng = model.engine(Version()), np.random.default_rng(0)
    groups = engine.generate(prompts, each, Sampling(), rng)
    pairs = [(p, group[i]) for i in range(each) for p, group in zip(prompts, groups, strict=True)]
    return [
        Trajectory(f"t{i}", p, c, 0.5, reference.log_probabilities(p, [c])[0], Version())
        for i, (p, c) in enumerate(pairs)
    ]


def test_scores_are_those_of_scoring_afresh_a_bounded_amount_at_a_time(tmp_path: Path) -> None:
    model = small_llama(tmp_path / "model")
    waiting, scores, counted = answers(model, 6), dict[str, FloatArray](), list[Mapping[str, int]]()
    everything = {t.uid: t for t in waiting}
    policy = model.policy(0.7)
    weights = {name: tensor * 1.3 for name, tensor in policy.weights().items()}
    reference, afresh = model.reference(0.7, Version()), model.reference(0.7, Version())

    def wanted(version: Version, count: int) -> Sequence[Trajectory]:
        taken = waiting[: -count - 1 : -1] if version == LATER else []
        del waiting[len(waiting) - len(taken) :]
        return taken

    def put(version: Version, scored: Scored, counts: Mapping[str, int]) -> None:
        assert version == LATER
        scores.update({t.uid: row for t, row in scored})
        counted.append(counts)

    rescorer = Rescorer(reference, 7, wanted, put)
    assert rescorer.round() == 0
    for one in (reference, afresh):
        one.load(weights, LATER)
    assert [rescorer.round() for _ in range(4)] == [7, 7, 4, 0]
    assert set(list(scores)[:7]) == set(list(everything)[-7:])  # the newest first
    for uid, t in everything.items():
        np.testing.assert_allclose(scores[uid], afresh.log_probabilities(t.prompt, [t.completion])[0], atol=2e-5)
        assert abs(scores[uid] - t.log_reference).max() > 0.01  # it is another reference
    assert [c["rescored_trajectories"] for c in counted] == [7, 7, 4]
    assert sum(c["rescored_tokens"] for c in counted) == sum(t.length for t in everything.values())
