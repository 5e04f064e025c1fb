"""Selection of training data as generation is scaled: uniform, by reward or recent only, x 1, 2 and 4 searchers.

`uniform` and `reward` draw prompts from all data and differ in how they draw a group of 20 from the 70 answers to one;
`recency` takes recent groups only. Reuse is limited to two mean uses, so that more searchers mean more updates in the
same time only as far as the machine has cores for them.
"""

from __future__ import annotations

from dataclasses import replace

from tba.replay.pacing import Pacing
from tba_lab.studies._base import TARGET, base, more_answers, with_replay
from tba_lab.study import Plot, Study, Variant

SELECTIONS = {"uniform": (0.0, 0.0), "reward": (0.0, 3.0), "recency": (1.0, 0.0)}  # m, inverse temperature

_paced = replace(more_answers(base), replay=replace(base.replay, pacing=Pacing(warm_up=280, max_mean_uses=2.0)))
study = Study(
    name="selection",
    description="Uniform, reward-prioritised and recent data with 1, 2 and 4 searchers, at most two mean uses.",
    recipe=_paced,
    variants={
        f"{name}-{searchers}": Variant(replace(with_replay(_paced, m, tau), searchers=searchers), name)
        for name, (m, tau) in SELECTIONS.items()
        for searchers in (1, 2, 4)
    },
    target=TARGET,
    baseline="{family}-1",
    plots=(
        Plot("searchers", label="searchers"),
        Plot("searchers", y="seconds_to_target", label="searchers"),
    ),
)
