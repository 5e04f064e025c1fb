"""The small red-teaming run against a victim behind a slow endpoint. A recipe.

Each searcher makes one call at a time and two attacks in a round, so that the rate of trajectories is proportional to
the number of searchers. The trainer waits only for the first batch, a whole group, so that all its steps are of one
size and it makes one whenever it can.
"""

from __future__ import annotations

from dataclasses import replace

from tba.apps.red_team.endpoint import EndpointVictim
from tba.apps.red_team.task import RedTeam
from tba.evaluation.accuracy import EvaluationSettings
from tba.recipes.red_team_small import recipe as small
from tba.replay.pacing import Pacing

assert isinstance(small.task, RedTeam)
recipe = replace(
    small,
    name="red_team_endpoint",
    description="red-teaming a victim behind an endpoint whose latency is all that it costs",
    task=replace(
        small.task,
        victim=EndpointVictim(model="slow", token_variable="ENDPOINT_TOKEN", concurrency=1),
        evaluated=8,
    ),
    replay=replace(small.replay, pacing=Pacing(warm_up=64, max_mean_uses=1e9)),
    evaluation=EvaluationSettings(every=0, problems=8, greedy=False, batch_size=8),
    samples_per_prompt=2,
    group_size=64,
)
