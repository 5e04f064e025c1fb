"""Which GPU each part of a run gets: a table of machines and runs, and what holds for all of them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config

from tba.errors import UserError
from tba.gpus import GPU_SHARE, Gpus
from tba.runtime import devices
from tba.runtime.devices import TRAINER, USABLE, Place, assign_gpus, environment_of, extend_segments, searcher_share
from tba.runtime.needs import needs
from tba.settings import find, override


def parts(ranks: int, searchers: int) -> tuple[list[str], list[str]]:
    return [f"trainer-{i}" for i in range(ranks)], [f"searcher-{i}" for i in range(searchers)]


@pytest.mark.parametrize(
    ("ranks", "searchers", "gpus", "each", "expected"),
    [
        (1, 3, 0, 1, [(), (), (), ()]),
        (1, 1, 1, 1, [(0,), (0,)]),
        (1, 3, 1, 1, [(0,), (0,), (0,), (0,)]),
        (1, 1, 2, 1, [(0,), (1,)]),
        (1, 3, 2, 1, [(0,), (1,), (1,), (1,)]),
        (1, 3, 4, 1, [(0,), (1,), (2,), (3,)]),  # the paper's own: one trains, three search
        (1, 8, 4, 1, [(0,), (1,), (2,), (3,), (1,), (2,), (3,), (1,), (2,)]),
        (2, 2, 4, 1, [(0,), (1,), (2,), (3,)]),
        (2, 1, 8, 1, [(0,), (1,), (2,)]),
        (4, 4, 8, 1, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        (4, 2, 8, 2, [(0,), (1,), (2,), (3,), (4, 5), (6, 7)]),
        (1, 1, 4, 2, [(0,), (1, 2)]),
        (1, 0, 1, 1, [(0,)]),  # offline
        (2, 0, 2, 1, [(0,), (1,)]),
    ],
)
def test_parts_get_their_own_gpus_and_searchers_share_where_there_are_few(
    ranks: int, searchers: int, gpus: int, each: int, expected: list[tuple[int, ...]]
) -> None:
    names = parts(ranks, searchers)
    places = assign_gpus(*names, gpus, each)
    assert [places[name].gpus for name in (*names[0], *names[1])] == expected


@pytest.mark.parametrize(
    ("ranks", "searchers", "gpus", "each"), [(2, 1, 1, 1), (2, 1, 2, 1), (4, 3, 4, 1), (1, 2, 4, 2), (1, 1, 2, 2)]
)
def test_what_does_not_fit_is_refused_with_what_there_is(ranks: int, searchers: int, gpus: int, each: int) -> None:
    with pytest.raises(UserError, match=f"this machine shows {gpus}"):
        assign_gpus(*parts(ranks, searchers), gpus, each)


@given(st.integers(1, 4), st.integers(0, 8), st.integers(0, 8), st.integers(1, 4))
def test_shares_of_one_gpu_add_up_and_ranks_never_share(ranks: int, searchers: int, gpus: int, each: int) -> None:
    names = parts(ranks, searchers)
    try:
        places = assign_gpus(*names, gpus, each)
    except UserError:
        assert ranks + each * searchers > gpus  # nothing that fits is refused
        return
    total = Counter[int]()
    for place in places.values():
        assert (not place.gpus) == (gpus == 0)
        total.update(dict.fromkeys(place.gpus, place.share))
    assert all(0 <= gpu < gpus and share <= USABLE + 1e-9 for gpu, share in total.items())
    if ranks > 1 and gpus:
        assert len({places[rank].gpus for rank in names[0]}) == ranks
        assert all(places[rank].share == USABLE for rank in names[0])


def test_a_part_sees_its_own_gpus_by_the_names_that_the_driver_has_for_them() -> None:
    alone = {"CUDA_VISIBLE_DEVICES": "1,2", "TBA_GPU_SHARE": f"{USABLE:.4f}"}
    assert environment_of(Place((1, 2), USABLE)) == alone
    named = {"CUDA_VISIBLE_DEVICES": "GPU-5f", "TBA_GPU_SHARE": "0.5000"}
    assert environment_of(Place((1,), TRAINER), "3, GPU-5f") == named
    assert environment_of(Place()) == {"CUDA_VISIBLE_DEVICES": ""}


def test_with_four_gpus_a_trainer_has_one_and_three_searchers_have_one_each() -> None:
    recipe = find("gsm8k")
    on_gpus = replace(recipe, model=replace(recipe.model, device="cuda"))
    four = assign_gpus(["trainer"], [f"searcher-{i}" for i in range(3)], 4, on_gpus.model.gpus_per_searcher)
    assert [str(place) for place in four.values()] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert replace(recipe, model=replace(recipe.model, device="cpu")).model.gpus_per_searcher == 0


@pytest.mark.parametrize(
    ("worker", "engine", "variables", "is_set"),
    [
        ("trainer", "vllm", {GPU_SHARE: "0.5"}, True),
        ("trainer-1", "auto", {GPU_SHARE: "0.95"}, True),
        ("searcher-0", "transformers", {GPU_SHARE: "0.5"}, True),
        ("searcher-0", "vllm", {GPU_SHARE: "0.5"}, False),
        ("searcher-0", "auto", {GPU_SHARE: "0.5"}, False),  # which may be vLLM
        ("trainer", "transformers", {}, False),  # without a GPU
        ("trainer", "transformers", {GPU_SHARE: "0.5", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False),
        ("trainer", "transformers", {GPU_SHARE: "0.5", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_segments_of_an_allocator_grow_on_a_gpu_unless_vllm_or_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, worker: str, engine: str, variables: dict[str, str], is_set: bool
) -> None:
    for name in (GPU_SHARE, *devices._ALLOCATOR_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is put back
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    extend_segments(override(find("gsm8k"), ["--model.generation.engine", engine], ""), worker)
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if is_set else {}
    settings = {name: os.environ[name] for name in devices._ALLOCATOR_SETTINGS if name in os.environ}
    assert settings == expected | {name: value for name, value in variables.items() if name != GPU_SHARE}


def test_a_searcher_in_the_trainers_process_takes_what_the_trainer_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(GPU_SHARE, raising=False)
    Qwen2Config(hidden_size=896, num_hidden_layers=24, intermediate_size=4864, num_attention_heads=14).save_pretrained(
        tmp_path
    )
    words = ["--model.path", str(tmp_path), "--model.device", "cuda", "--runtime", "inline"]
    recipe = override(find("gsm8k"), words, "")
    memory = 80 * 10**9
    monkeypatch.setattr(devices, "visible_gpus", lambda: Gpus(("a card",), (memory,)))
    need_of = {need.part: need.total for need in needs(recipe)}
    with searcher_share(recipe):
        share_bytes = float(os.environ[GPU_SHARE]) * memory
        assert need_of["searcher"] + need_of["reference"] < share_bytes < USABLE * memory - need_of["trainer"]
    assert GPU_SHARE not in os.environ
    monkeypatch.setattr(devices, "visible_gpus", Gpus)
    with searcher_share(replace(recipe, model=replace(recipe.model, device="cpu"))):
        assert GPU_SHARE not in os.environ
