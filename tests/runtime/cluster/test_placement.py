"""Where the parts of a run on a cluster are to be, before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.runs import TOY

from tba.engines.transformers import EngineSettings
from tba.engines.vllm import VllmSettings
from tba.errors import UserError
from tba.models.huggingface import HuggingFace
from tba.recipe import ClusterSettings, Recipe
from tba.runtime.cluster.placement import Node, Placement, address_of, memory_lines, placement_lines, plan, share_of_gpu
from tba.settings import find
from tba.training.ranks.messages import RankSettings

GB = 2**30


def recipe(**settings: float) -> Recipe:
    return replace(find(str(TOY)), runtime="cluster", cluster=ClusterSettings(**settings))


def searchers(count: int) -> list[str]:
    return [f"searcher-{i}" for i in range(count)]


def here(cpus: float = 4, gpus: float = 0, memory: float = 64 * GB) -> Node:
    return Node("a", "10.0.0.1", cpus, gpus, memory, here=True)


def keys(placements: Sequence[Placement]) -> list[str | None]:
    """The node of each; None for one that waits."""
    return [p.node and p.node.key for p in placements]


def there(cpus: float = 8, gpus: float = 0) -> Node:
    return Node("b", "10.0.0.2", cpus, gpus, 64 * GB, here=False)


def test_the_trainer_is_where_the_run_is_and_searchers_where_most_is_left() -> None:
    placed = plan(recipe(trainer_cpus=2), [here(), there()], searchers(7))
    assert (placed[0].worker, keys(placed)[0]) == ("trainer", "a")
    assert Counter(keys(placed[1:])) == {"b": 6, "a": 1}


def ranks(count: int, **settings: float) -> Recipe:
    return replace(recipe(**settings), trainer=RankSettings(ranks=count))


def test_ranks_fill_the_trainers_node_first_and_then_nodes_that_have_ranks() -> None:
    three = [here(gpus=2), there(gpus=8), Node("c", "10.0.0.3", 8, 8, 64 * GB, here=False)]
    placed = plan(ranks(5, trainer_gpus=1, searcher_gpus=1), three, searchers(2))
    assert [p.worker for p in placed[:5]] == ["trainer", "trainer-1", "trainer-2", "trainer-3", "trainer-4"]
    assert keys(placed) == ["a", "a", "b", "b", "b", "c", "c"]
    first_line, second_line, third_line = memory_lines(placed, 10 * GB, 2 * GB, GB)
    assert first_line.startswith(
        "on 10.0.0.1 (here): trainer (2 of 5 ranks) and journal; 2 of 4 CPU, 2 of 2 GPU, about 7.0 GiB"
    )
    assert second_line.startswith("on 10.0.0.2: 3 ranks of the trainer; 3 of 8 CPU, 3 of 8 GPU, about 8.0 GiB")
    assert third_line.startswith("on 10.0.0.3: 2 searchers;")


def test_ranks_that_do_not_fit_or_share_a_gpu_are_refused() -> None:
    with pytest.raises(UserError, match=r"trainer-2 asks for 1 CPU .* use fewer --trainer\.ranks"):
        plan(ranks(3), [here(cpus=2)], [])
    with pytest.raises(UserError, match=r"trainer-gpus is 0\.5, but each of 2 ranks needs a whole GPU"):
        ranks(2, trainer_gpus=0.5)


def test_two_halves_share_one_gpu_by_fractions_and_three_thirds_fill_it() -> None:
    placed = plan(recipe(trainer_gpus=0.5, searcher_gpus=0.5), [here(gpus=1)], searchers(1))
    assert placed[0].node is not None
    assert placed[0].node.free["GPU"] == pytest.approx(0)
    thirds = recipe(trainer_gpus=1 / 3, searcher_gpus=1 / 3)
    assert len(plan(thirds, [here(gpus=1)], searchers(2))) == 3


def test_a_part_of_a_gpu_is_of_one_gpu_and_leaves_others_whole() -> None:
    large = recipe(searcher_gpus=0.6)
    assert len(plan(large, [here(gpus=2)], searchers(2))) == 3
    with pytest.raises(UserError, match=r"searcher-2 asks for 1 CPU and 0\.6 GPU, .* 0\.8 GPU left"):
        plan(large, [here(gpus=2)], searchers(3))
    node = here(gpus=2)
    for amount in (0.5, 0.5):
        node.reserve({"CPU": 0, "GPU": amount})
    assert node.fits({"CPU": 0, "GPU": 1})
    assert not node.fits({"CPU": 0, "GPU": 2})
    with pytest.raises(UserError, match=r"--cluster\.trainer-gpus is 1\.5: give part of one GPU, or whole ones"):
        ClusterSettings(trainer_gpus=1.5)


def test_what_does_not_fit_is_refused_with_what_is_left() -> None:
    with pytest.raises(UserError, match=r"searcher-1 asks for 1 CPU and 1 GPU, .* any of 1 nodes \(10.0.0.1 has 2 CPU"):
        plan(recipe(searcher_gpus=1), [here(gpus=1)], searchers(2))
    with pytest.raises(UserError, match=r"trainer asks for 8 CPU .* on 10\.0\.0\.1, where the run is"):
        plan(recipe(trainer_cpus=8), [here(), there(cpus=16)], searchers(1))


def test_the_table_says_what_each_node_needs_and_refuses_more_than_it_has() -> None:
    nodes = [here(cpus=2), there(cpus=3)]
    first_line, second_line = memory_lines(plan(recipe(), nodes, searchers(4)), 5 * GB, 2 * GB, GB)
    assert (
        first_line
        == "on 10.0.0.1 (here): trainer and journal and 1 searcher; 2 of 2 CPU, 0 of 0 GPU, about 10.0 GiB of 64.0 GiB"
    )
    assert second_line.startswith("on 10.0.0.2: 3 searchers; 3 of 3 CPU, 0 of 0 GPU, about 8.0 GiB of")
    with pytest.raises(UserError, match=r"about 10\.0 GiB of 8\.0 GiB: more than there is"):
        memory_lines(plan(recipe(), [here(cpus=2, memory=8 * GB), there(cpus=3)], searchers(4)), 5 * GB, 2 * GB, GB)


def test_an_address_wants_the_cluster_runtime(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--address is .*, but the runtime is processes: add --runtime cluster"):
        replace(find(str(TOY)), address="10.0.0.1:6379")
    with pytest.raises(UserError, match=r"--cluster\.searcher-gpus is -1: give a number that is not negative"):
        ClusterSettings(searcher_gpus=-1)


def on_gpus(ranks: int = 1, each: int = 1, **settings: float) -> Recipe:
    """A recipe whose model runs on GPUs."""
    model = HuggingFace(
        device="cuda", vllm=VllmSettings(tensor_parallel=each), generation=EngineSettings(engine="vllm")
    )
    return replace(
        find("quickstart"),
        runtime="cluster",
        model=model,
        trainer=RankSettings(ranks),
        cluster=ClusterSettings(**settings),
    )


@pytest.mark.parametrize(
    ("own_gpus", "other_gpus", "ranks", "searchers", "each", "expected"),
    [
        (4, 0, 1, 3, 1, [1, 1, 1, 1]),  # the paper's own
        (1, 4, 1, 2, 1, [1, 1, 1]),
        (1, 2, 1, 4, 1, [1, 0.5, 0.5, 0.5, 0.5]),
        (1, 2, 1, 5, 1, [1, *[0.3333] * 5]),  # three on one, two on the other
        (2, 2, 2, 2, 1, [1, 1, 1, 1]),
        (2, 4, 2, 2, 2, [1, 1, 2, 2]),
        (1, 0, 1, 1, 1, [0.5263, 0.4736]),  # all on one GPU
        (1, 0, 1, 0, 1, [1]),
    ],
)
def test_by_default_parts_ask_for_the_gpus_that_they_would_have_on_one_machine(
    own_gpus: float, other_gpus: float, ranks: int, searchers: int, each: int, expected: list[float]
) -> None:
    names = [f"searcher-{i}" for i in range(searchers)]
    placements = plan(on_gpus(ranks, each), [here(16, own_gpus), there(16, other_gpus)], names)
    assert [p.resources["GPU"] for p in placements] == expected
    assert keys(placements)[0] == "a"
    for share in (p.resources["GPU"] for p in placements):
        assert share_of_gpu(share) == {"TBA_GPU_SHARE": f"{min(share, 1) * 0.95:.4f}"}


def test_in_a_cluster_that_may_grow_searchers_ask_for_whole_gpus_and_wait_for_nodes_that_have_them() -> None:
    joining = replace(on_gpus(), address="10.0.0.1:6379")
    placements = plan(joining, [here(16, 1), there(16, 2)], searchers(4))
    assert [p.resources["GPU"] for p in placements] == [1, 1, 1, 1, 1]
    assert keys(placements) == ["a", "b", "b", None, None]
    *_, waiting_line = placement_lines(placements)
    assert waiting_line.startswith("2 searchers will wait for nodes with 1 CPU and 1 GPU free; a smaller --cluster.")
    assert memory_lines(placements, GB, GB, GB)[-1] == waiting_line
    shared_gpus = replace(joining, cluster=ClusterSettings(searcher_gpus=0.5))
    assert keys(plan(shared_gpus, [here(16, 1), there(16, 2)], searchers(4))) == ["a", "b", "b", "b", "b"]


def test_a_trainer_that_the_drivers_node_cannot_hold_goes_to_another_node_of_a_cluster_that_was_there() -> None:
    head, worker = here(cpus=0), there(cpus=4)
    joining = replace(recipe(), address="10.0.0.1:6379")
    assert keys(plan(joining, [head, worker], searchers(2))) == ["b", "b", "b"]
    with pytest.raises(UserError, match=r"trainer asks for 1 CPU .* on 10\.0\.0\.1, where the run is"):
        plan(recipe(), [here(cpus=0), there(cpus=4)], searchers(2))


def test_the_cluster_of_the_environment_is_joined_unless_the_recipe_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, expected in {"": None, "local": None, "10.0.0.9:6379": "10.0.0.9:6379"}.items():
        monkeypatch.setenv("RAY_ADDRESS", value)
        assert address_of(recipe()) == expected
        assert address_of(replace(recipe(), address="10.0.0.1:6379")) == "10.0.0.1:6379"
    monkeypatch.delenv("RAY_ADDRESS")
    assert address_of(recipe()) is None


def test_a_command_that_was_moved_joins_by_the_address_that_its_new_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    monkeypatch.setenv("TBA_NODE_ADDRESS", "10.0.0.2")
    assert address_of(replace(recipe(), address="127.0.0.1:6379")) == "10.0.0.9:6379"


def test_without_gpus_for_the_model_nothing_is_asked_for_and_what_is_set_goes_before() -> None:
    assert [p.resources["GPU"] for p in plan(recipe(), [here(gpus=4)], searchers(2))] == [0, 0, 0]
    placements = plan(on_gpus(searcher_gpus=0.25), [here(16, 4)], searchers(3))
    assert [p.resources["GPU"] for p in placements] == [1, 0.25, 0.25, 0.25]
    with pytest.raises(UserError, match="the Ray cluster has free 2; use fewer --searchers"):
        plan(on_gpus(each=2), [here(16, 2)], searchers(1))


def test_gpus_that_others_use_are_not_counted() -> None:
    with pytest.raises(UserError, match="the Ray cluster has free 1"):
        plan(on_gpus(ranks=2), [here(16, 1.5), there(16, 0.5)], searchers(1))
    node = here(gpus=1.5)  # a whole one, and half of one that somebody uses
    assert node.fits({"CPU": 0, "GPU": 0.5})
    assert not node.fits({"CPU": 0, "GPU": 2})
    node.reserve({"CPU": 0, "GPU": 0.5})
    assert node.fits({"CPU": 0, "GPU": 1})


def test_parts_with_and_without_a_gpu_have_no_automatic_precision() -> None:
    apart = on_gpus(trainer_gpus=0.0, searcher_gpus=1.0)
    with pytest.raises(UserError, match=r"different precisions: .* set --model\.dtype"):
        plan(apart, [here(16, 4)], searchers(2))
    recipe_of_float32 = replace(apart, model=replace(apart.model, dtype="float32"))
    assert [p.resources["GPU"] for p in plan(recipe_of_float32, [here(16, 4)], searchers(2))] == [0, 1, 1]
