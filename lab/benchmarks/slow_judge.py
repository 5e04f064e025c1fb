"""The quickstart behind a judge that takes its time: 200 ms for each answer, 16 at once. A recipe.

Fields such as `--task.judge.seconds 4 --task.judge.concurrency 256` make it another judge (`tba_lab/judge.py`).
"""

from __future__ import annotations

from dataclasses import replace

from tba.evaluation.accuracy import EvaluationSettings
from tba.recipes.quickstart import recipe as quickstart
from tba_lab.judge import Judge, JudgedSums

recipe = replace(
    quickstart,
    name="slow_judge",
    description="the quickstart with a judge that takes 200 ms per answer",
    task=JudgedSums(digits=3, forgotten_carries=0.55, judge=Judge(seconds=0.2, concurrency=16)),
    evaluation=EvaluationSettings(every=20, problems=192, greedy=False, batch_size=192),
)
