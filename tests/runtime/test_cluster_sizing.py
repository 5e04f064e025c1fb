"""A run on a cluster is sized over its nodes by the rules of one machine. Models are configurations alone here."""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import script
from tba.__main__ import main
from tba.apps.preference.tldr import Tldr
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.recipe import ClusterSettings, Recipe
from tba.runs.recipe_resolution import hardware_of
from tba.runtime.devices import USABLE
from tba.runtime.hardware import ClusterNodes, Machine
from tba.runtime.needs import needs
from tba.runtime.sizing import (
    device_flags,
    memory_shortage,
    place_descriptions,
    places_on,
    refuse_what_cannot_fit,
    sizing_flags,
    unknown_gpus,
    unused_gpus,
)
from tba.settings import override
from tba.training.ranks.messages import RankSettings

GB = 10**9
SIZES, PAGE = script("lab/benchmarks/cluster_sizes.py"), script("tools/hardware_page.py")


def recipe_of(model: str = "7 B", engine: str = "transformers", trained: str = "all weights") -> Recipe:
    """`math` with a model of this size, on the cluster runtime."""
    recipe: Recipe = SIZES.recipe_of(model, trained, engine)
    return recipe


def cluster(*nodes: int, gb: float = 80, memory: int | None = None) -> ClusterNodes:
    """A cluster whose nodes have so many GPUs each."""
    return ClusterNodes(tuple(Machine(memory, (int(gb * GB),) * gpus) for gpus in nodes))


def sized(recipe: Recipe, hardware: Machine | ClusterNodes) -> Recipe:
    return override(recipe, sizing_flags(recipe, hardware), "", recorded=True)


def refusal(recipe: Recipe, hardware: Machine | ClusterNodes) -> str:
    with pytest.raises(UserError) as error_info:
        refuse_what_cannot_fit(recipe, hardware)
    return str(error_info.value)


def gpu_bytes(recipe: Recipe) -> dict[str, int]:
    """What a rank and a searcher need of their first GPU, with checkpointing where it is open."""
    model: Any = recipe.model
    if model.gradient_checkpointing is None:
        recipe = replace(recipe, model=replace(model, gradient_checkpointing=True))
    bytes_of = {need.part: need.total for need in needs(recipe) if need.device == "cuda"}
    return {"trainer": bytes_of.pop("trainer"), "searcher": sum(bytes_of.values())}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=6).filter(any),
    st.sampled_from([24, 80, 141]),
    st.sampled_from(["0.5 B", "7 B", "32 B"]),
    st.sampled_from(["transformers", "vllm"]),
    st.sampled_from(["all weights", "LoRA"]),
)
def test_no_worker_of_a_plan_needs_more_than_its_gpu_and_idle_gpus_are_named(
    nodes: list[int], gb: int, model: str, engine: str, trained: str
) -> None:
    hardware, recipe = cluster(*nodes, gb=gb), recipe_of(model, engine, trained)
    plan = sized(recipe, hardware)
    if memory_shortage(plan, hardware) is not None:
        return
    worker_places, need, each = places_on(plan, hardware), gpu_bytes(plan), plan.model.gpus_per_searcher
    load = Counter[int]()
    for worker, place in worker_places.items():
        load[place.gpus[0]] += need["trainer" if worker.startswith("trainer") else "searcher"]
        assert len(place.gpus) == (1 if worker.startswith("trainer") else each)
    assert all(load[gpu] <= USABLE * gb * GB for gpu in load)
    gpu_counts = Counter(gpu for place in worker_places.values() for gpu in place.gpus)
    assert sum(nodes) == 1 or set(gpu_counts.values()) == {1}
    node_ends = [sum(nodes[: i + 1]) for i in range(len(nodes))]
    for place in worker_places.values():  # of one node
        assert any(start <= min(place.gpus) and max(place.gpus) < end for start, end in pairwise([0, *node_ends]))
    idle_count, idle_note = sum(nodes) - len(gpu_counts), unused_gpus(plan, hardware)
    assert (idle_note is None) == (idle_count == 0)
    assert idle_note is None or idle_note.startswith(f"{idle_count} GPU")
    assert len(worker_places) == plan.trainer.count + plan.searcher_count  # nobody waits


@pytest.mark.parametrize("model", ["0.5 B", "7 B", "14 B"])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_one_node_of_a_cluster_is_sized_like_the_same_machine_without_ray(model: str, gpus: int, engine: str) -> None:
    on_ray = recipe_of(model, engine)
    alone, node = replace(on_ray, runtime="processes"), cluster(gpus)
    machine = node.nodes[0]
    by_ray, by_itself = sized(on_ray, node), sized(alone, machine)
    assert (by_ray.model, by_ray.trainer, by_ray.searchers) == (by_itself.model, by_itself.trainer, by_itself.searchers)
    assert places_on(by_ray, node) == places_on(by_itself, machine)
    shortages = memory_shortage(by_ray, node), memory_shortage(by_itself, machine)
    assert (shortages[0] is None) == (shortages[1] is None)
    assert gpus == 1 or shortages[0] == shortages[1]


def test_64_gpus_are_all_used_and_8_hold_7_b_with_all_weights() -> None:
    plan = sized(recipe_of("7 B"), hardware_of(override(recipe_of(), ["--cluster.nodes", "8x8x80"], "")))
    assert (plan.trainer.count, plan.searchers) == (2, 62)
    assert unused_gpus(plan, cluster(*[8] * 8)) is None
    assert place_descriptions(plan, cluster(*[8] * 8)) == {
        "node 1": "2 ranks of the trainer, 6 searchers",
        "nodes 2 to 8, each": "8 searchers",
    }
    plan = sized(recipe_of("7 B"), cluster(8))
    refuse_what_cannot_fit(plan, cluster(8))
    assert (plan.trainer.count, plan.searchers) == (2, 6)


def test_72_b_is_refused_by_what_one_gpu_would_hold_of_it() -> None:
    hardware = cluster(*[8] * 8)
    plan = sized(recipe_of("72 B"), hardware)
    assert plan.trainer.count % 8 == 0
    assert gpu_bytes(plan)["trainer"] <= USABLE * 80 * GB  # its 1.3 TB are shared by the ranks
    assert refusal(plan, hardware).startswith("the searcher needs 395.4 GiB of its GPU, of which 70.8 GiB are usable")
    small_plan = sized(
        override(recipe_of("72 B", trained="LoRA 4-bit"), ["--model.generation.slots", "64"], ""), hardware
    )
    assert small_plan.trainer.count == 1  # a base in 4 bits is not sharded
    refuse_what_cannot_fit(small_plan, cluster(*[8] * 8, gb=141))


def test_ranks_beyond_one_node_are_whole_nodes_where_there_are_enough() -> None:
    recipe = recipe_of("32 B", "vllm")
    for nodes, ranks in (([8] * 8, 16), ([8, 8], 12), ([4, 8, 8, 8], 16), ([8], 7)):
        plan = sized(recipe, cluster(*nodes))
        assert plan.trainer.count == ranks
        fits = gpu_bytes(plan)["trainer"] <= USABLE * 80 * GB
        assert fits == (nodes != [8])
    plan = sized(recipe, cluster(8, 8))  # the trainer scores answers under the reference, so that searchers fit
    fewest_ranks = next(
        n for n in range(9, 16) if gpu_bytes(replace(plan, trainer=RankSettings(n)))["trainer"] <= 76 * GB
    )
    assert fewest_ranks == 12  # of which whole nodes make 16


def test_an_engine_of_vllm_is_spread_over_as_few_gpus_as_hold_it_and_ranks_take_what_no_engine_can_use() -> None:
    hardware, recipe = cluster(*[8] * 8, gb=141), recipe_of("32 B", "vllm")
    plan = sized(recipe, hardware)
    assert sizing_flags(recipe, hardware)[:2] == ["--model.vllm.tensor-parallel", "2"]
    assert (plan.trainer.count, plan.searchers, unused_gpus(plan, hardware)) == (6, 29, None)
    refuse_what_cannot_fit(plan, hardware)
    assert gpu_bytes(replace(plan, trainer=RankSettings(5)))["trainer"] <= USABLE * 141 * GB  # but 3 GPUs are odd
    odd_plan = sized(replace(recipe, trainer=RankSettings(5)), hardware)
    assert str(unused_gpus(odd_plan, hardware)).startswith("1 GPU is unused: an engine takes 2 GPUs of one node")
    assert place_descriptions(odd_plan, hardware)["node 1"] == "5 ranks of the trainer, 1 searcher, 1 GPU unused"
    assert "--model.vllm.tensor-parallel" not in sizing_flags(recipe_of("7 B", "vllm"), hardware)


def test_gpus_that_a_users_numbers_leave_are_named() -> None:
    hardware = cluster(*[8] * 8)
    small_plan = sized(replace(recipe_of(), searchers=1, trainer=RankSettings(2)), hardware)
    assert str(unused_gpus(small_plan, hardware)).startswith("61 GPUs are unused: give more --searchers")
    halves = replace(recipe_of("0.5 B"), cluster=ClusterSettings(searcher_gpus=0.5))
    assert sizing_flags(halves, hardware) == []
    assert str(unused_gpus(replace(halves, searchers=100), hardware)).startswith("13 GPUs are unused: give more")
    refuse_what_cannot_fit(halves, hardware)
    reserved_recipe = override(recipe_of(), ["--cluster.searcher-gpus", "0.5", "--trainer.ranks", "2"], "")
    assert refusal(reserved_recipe, hardware).startswith(
        "the searcher needs 52.4 GiB of 0.5 of a GPU, of which 35.4 GiB are usable: set --model.generation.slots"
    )


def test_searchers_without_a_gpu_wait_for_nodes_and_ranks_do_not() -> None:
    plan = sized(replace(recipe_of("0.5 B"), searchers=10), cluster(4))
    refuse_what_cannot_fit(plan, cluster(4))
    assert place_descriptions(plan, cluster(4))["waiting for more nodes"] == "7 searchers"
    whole_gpu_plan = sized(replace(recipe_of("0.5 B"), cluster=ClusterSettings(trainer_gpus=1)), cluster(1))
    assert place_descriptions(whole_gpu_plan, cluster(1)) == {
        "node 1": "1 rank of the trainer",
        "waiting for more nodes": "1 searcher",
    }
    with pytest.raises(UserError, match=r"6 ranks of the trainer want one GPU each.* the cluster has 4"):
        refuse_what_cannot_fit(replace(plan, trainer=RankSettings(6)), cluster(4))
    with pytest.raises(UserError, match="the cluster has none that are free"):
        refuse_what_cannot_fit(plan, cluster(0, 0))


def test_a_clusters_only_gpu_is_reserved_in_the_parts_that_the_halves_need() -> None:
    recipe, hardware = recipe_of("1.5 B"), cluster(0, 1)
    plan, alone = sized(recipe, hardware), places_on(recipe, hardware)
    refuse_what_cannot_fit(plan, hardware)
    assert plan.cluster.trainer_gpus == pytest.approx(alone["trainer"].share / USABLE, abs=1e-4)
    assert plan.cluster.searcher_gpus == pytest.approx(alone["searcher-0"].share / USABLE, abs=1e-4)
    assert sized(recipe_of("7 B"), hardware).cluster.trainer_gpus is None  # refused
    assert "--cluster.trainer-gpus" not in sizing_flags(replace(recipe, runtime="processes"), hardware.nodes[1])


def test_each_nodes_own_memory_holds_what_its_workers_have_there() -> None:
    recipe = PAGE.paper("tldr")
    assert isinstance(recipe.task, Tldr)
    recipe = replace(recipe, runtime="cluster")  # 33 GB of reward models beside each searcher
    plan = sized(recipe, cluster(4, 8))
    refuse_what_cannot_fit(plan, cluster(4, 8, memory=300 * GB))
    assert refusal(plan, cluster(4, 8, memory=200 * GB)).startswith("the run needs on node 2 ")  # has 7 searchers
    cpu_recipe = replace(recipe, model=replace(recipe.model, device="cpu"))
    assert ", and the cluster has 18.6 GiB" in refusal(cpu_recipe, cluster(4, 8, memory=10 * GB))


def test_gpus_of_unknown_memory_are_used_and_the_run_says_that_nobody_knows() -> None:
    hardware, recipe = cluster(2, 2, gb=0), recipe_of("72 B")
    plan = sized(recipe, hardware)
    refuse_what_cannot_fit(plan, hardware)
    assert (plan.trainer.count, plan.searchers) == (1, 3)
    assert "--cluster.nodes" in str(unknown_gpus(plan, hardware))
    assert unknown_gpus(plan, cluster(2, 2)) is None


def test_where_gpus_differ_the_smallest_counts_since_a_worker_may_get_any() -> None:
    settings_of_nodes = override(recipe_of(), ["--cluster.nodes", "1x2x141, 2x8x79.5"], "")
    hardware = hardware_of(settings_of_nodes)
    assert isinstance(hardware, ClusterNodes)
    assert [len(node.gpus) for node in hardware.nodes] == [2, 8, 8]
    assert hardware.gpus == (79_500_000_000,) * 18


@pytest.mark.parametrize("text", ["8x80", "0x8x80", "8x0x80", "8x8x0", "8x8x80GB", "8x8x80;1x8x80", "-1x8x80"])
def test_a_text_that_describes_no_nodes_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--cluster\.nodes has .*such as 8x8x80"):
        ClusterSettings(nodes=text)


def test_a_head_without_gpus_computes_on_those_of_its_nodes() -> None:
    recipe, hardware = recipe_of(), cluster(0, 8)
    assert isinstance(recipe.model, HuggingFace)
    left_open = replace(recipe, model=replace(recipe.model, device="auto"))
    assert device_flags(left_open, hardware) == ["--model.device", "cuda"]
    assert device_flags(left_open, cluster(0, 0)) == []
    assert device_flags(left_open, cluster(0, 8, gb=0)) == []  # nobody has seen them
    assert device_flags(replace(recipe, model=replace(recipe.model, device="cpu")), hardware) == []
    assert device_flags(replace(left_open, cluster=ClusterSettings(trainer_gpus=0)), hardware) == []
    assert device_flags(left_open, hardware.nodes[1]) == []


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install -e '.[cluster]'")
def test_check_plans_for_nodes_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "quickstart", "--model.device", "auto", "--runtime", "cluster", "--cluster.nodes"]
    assert main([*words, "2x4x80"]) == 0
    text = capsys.readouterr().out
    assert "1 rank of the trainer, 3 searchers" in text
    assert "As computed, the run fits. Nothing was measured" in text
    assert "warning" not in text
    assert main([*words, "1x2x0.01"]) == 2
    assert "the trainer needs" in capsys.readouterr().err
