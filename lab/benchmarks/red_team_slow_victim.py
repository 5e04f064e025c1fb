"""Red-teaming a victim that takes 300 ms a call: asynchronous with 1 and 4 searchers, the ancestor and PPO. A study.

    export ENDPOINT_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')
    python lab/benchmarks/slow_endpoint.py --seconds 0.3 --concurrency 32 --port 8099 &
    tba red-team world --out red_team_world
    tba-lab study lab/benchmarks/red_team_slow_victim.py --keep all
    python lab/benchmarks/red_team_course.py studies/red_team_slow_victim/runs/*

The victim is an endpoint on loopback that costs nothing but its latency; every searcher has eight calls in flight. With
so slow a victim seconds are those of waiting, and hardly depend on what else the machine does.
"""

from __future__ import annotations

from dataclasses import replace

from tba.apps.red_team.endpoint import EndpointVictim
from tba.apps.red_team.task import RedTeam
from tba.recipe import Recipe
from tba_lab.studies.red_team import RATES, base, synchronous
from tba_lab.study import Study, Variant

VICTIM = EndpointVictim(url="http://127.0.0.1:8099/v1", model="slow", token_variable="ENDPOINT_TOKEN", concurrency=8)


def slow(recipe: Recipe) -> Recipe:
    """Returns the recipe with the slow victim, and with attacks evaluated before and after only."""
    assert isinstance(recipe.task, RedTeam)
    task, evaluation = replace(recipe.task, victim=VICTIM), replace(recipe.evaluation, every=0)
    return replace(recipe, task=task, evaluation=evaluation)


variants = {
    "async-1": Variant(slow(base), "async"),
    "async-4": Variant(slow(replace(base, searchers=4)), "async"),
    "ancestor-sync": Variant(slow(synchronous("ancestor", RATES["ancestor"])), "sync"),
    "ppo-sync": Variant(slow(synchronous("ppo", RATES["ppo"], steps=100)), "sync"),
}

study = Study(
    name="red_team_slow_victim",
    description="Red-teaming a victim of 300 ms a call: seconds of 1 and 4 searchers, of the ancestor and of PPO.",
    recipe=slow(base),
    variants=variants,
    seeds=(1,),
    target=0.6,
    baseline="ancestor-sync",
    divergence_prompts=0,
)
