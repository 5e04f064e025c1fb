"""Whether a run fits, and how many workers it has, is told before anything is loaded.

Models are configurations alone here, and machines figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, PretrainedConfig

from scripts import script
from tba.apps.preference.tldr import Tldr
from tba.apps.red_team.task import RedTeam
from tba.apps.red_team.toxicity import CausalJudge
from tba.apps.red_team.victim import ModelVictim
from tba.command import check
from tba.command.check import decide_open_settings, disk_use_text
from tba.errors import UserError
from tba.models.arithmetic import shape_of
from tba.models.huggingface import HuggingFace
from tba.recipe import Recipe
from tba.replay.buffer import BufferSettings
from tba.runs.estimate import one_rank_fits
from tba.runs.recipe_resolution import with_sizes
from tba.runs.resuming import resume_point
from tba.runtime import devices
from tba.runtime.devices import LOST, USABLE
from tba.runtime.hardware import Machine
from tba.runtime.needs import Need, disk_use, needs, seconds_to_move
from tba.runtime.run_directory import RunDirectory
from tba.runtime.sizing import memory_shortage, places_on, refuse_what_cannot_fit, sizing_flags, unused_gpus
from tba.settings import find, override
from tba.training.ranks.messages import RankSettings
from tba.weights.directory import PublishSettings

GB = 10**9
SMOL = LlamaConfig(  # SmolLM2-135M
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
PAGE = script("tools/hardware_page.py")
THREE = PAGE.config_of("3 B")
RHO, SEVEN, PYTHIA = (PAGE.RECIPES[name] for name in ("gsm8k", "math", "tldr"))


class Models:
    """Folders that hold a configuration and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, config: PretrainedConfig) -> str:
        path = self.folder / f"{config.model_type}-{config.hidden_size}"
        if not path.exists():
            config.save_pretrained(path)
        return str(path)


@pytest.fixture(scope="session")
def at(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def recipe_of(name: str, path: str, device: str = "cuda", **changes: Any) -> Recipe:
    """A recipe with a model of this configuration, and without other models."""
    recipe = find(name)
    assert isinstance(recipe.model, HuggingFace)
    if isinstance(recipe.task, Tldr):
        recipe = replace(recipe, task=replace(recipe.task, reward_model="", gold=""))
    settings = {
        "gradient_checkpointing": bool(recipe.model.gradient_checkpointing)
    } | changes  # most recipes leave it open
    return replace(recipe, model=replace(recipe.model, path=path, device=device, **settings))


def by_part(recipe: Recipe) -> dict[str, Need]:
    return {need.part: need for need in needs(recipe)}


def machine(*gpus: int, memory: int = 512) -> Machine:
    """A machine with GPUs of so many GB."""
    return Machine(memory * GB, tuple(gpu * GB for gpu in gpus))


def refusal(recipe: Recipe, host: Machine) -> str:
    with pytest.raises(UserError) as refused:
        refuse_what_cannot_fit(recipe, host)
    return str(refused.value)


def decided(recipe: Recipe, host: Machine) -> Recipe:
    return override(recipe, sizing_flags(recipe, host), "", recorded=True)


def test_each_part_is_on_its_device_and_the_rule_of_thumb_is_in_it(at: Models) -> None:
    on_gpu, on_cpu = by_part(recipe_of("gsm8k", at(RHO))), by_part(recipe_of("gsm8k", at(RHO), "cpu"))
    shape = shape_of(recipe_of("gsm8k", at(RHO)).model)
    assert shape is not None
    assert [need.device for need in on_gpu.values()] == ["cuda", "cuda", "cuda", "cpu"]
    assert {need.device for need in on_cpu.values()} == {"cpu"}
    state = sum(on_gpu["trainer"].parts[name] for name in ("weights", "gradients", "moments"))
    assert state == 16 * shape.parameters
    assert on_gpu["searcher"].parts["weights"] == 2 * shape.parameters  # bfloat16 on CUDA
    assert on_cpu["reference"].parts["weights"] == 4 * shape.parameters
    assert "moments 8.2 GiB" in str(on_gpu["trainer"])


def test_a_searcher_whose_environments_take_their_time_has_room_for_what_is_parked(at: Models) -> None:
    def parked(*flags: str, recipe: str = "guess_number") -> int:
        sized_recipe = override(recipe_of(recipe, at(SMOL), "cpu"), list(flags), "", recorded=True)
        return by_part(sized_recipe)["searcher"].parts.get("parked keys and values", 0)

    slots = by_part(recipe_of("guess_number", at(SMOL), "cpu"))["searcher"].parts["keys and values"]
    assert parked() == slots
    assert parked("--model.generation.parked-gb", "0.5") == 500_000_000
    assert parked("--model.generation.engine", "vllm") == 0
    assert parked("--runtime", "inline", "--searchers", "1") == 0
    assert parked(recipe="gsm8k") == 0


def test_a_vllm_searcher_is_refused_where_it_has_no_room_for_weights_reference_and_one_answer(at: Models) -> None:
    plain = recipe_of("gsm8k", at(RHO))
    assert isinstance(plain.model, HuggingFace)
    served = override(plain, ["--model.generation.engine", "vllm"], "")
    need = by_part(served)["searcher"]
    of_position = 22 * 2 * 4 * 64 * 2  # layers, keys and values, heads, their width, bytes of a number
    assert need.parts["weights"] == by_part(plain)["reference"].parts["weights"]
    assert need.parts["keys and values"] == (8 + 2) * 128 * of_position  # 512 tokens of a prompt, as many of an answer
    bytes_needed = need.total + by_part(served)["reference"].total
    two = override(served, ["--searchers", "1", "--trainer.ranks", "1"], "")
    assert memory_shortage(two, Machine(512 * GB, (80 * GB, int(bytes_needed / USABLE) + 1))) is None
    assert "the searcher needs" in refusal(two, Machine(512 * GB, (80 * GB, bytes_needed)))
    auto = override(plain, ["--model.generation.engine", "auto"], "")  # it may come to be transformers
    assert by_part(auto)["searcher"].parts == by_part(plain)["searcher"].parts


def test_under_lora_a_reference_has_adapters_alone_whichever_engine_samples(at: Models) -> None:
    """Besides vLLM's own copy the searcher holds a base to merge adapters into, and the reference shares it."""
    adapted = override(recipe_of("gsm8k", at(RHO)), ["--model.lora.rank", "16"], "")
    served = override(adapted, ["--model.generation.engine", "vllm"], "")
    shape = shape_of(adapted.model)
    assert shape is not None
    for recipe in (adapted, served):
        assert by_part(recipe)["reference"].parts["weights"] == 2 * shape.adapters(16)
    adapter_bytes = 2 * (shape.parameters + shape.adapters(16))
    assert by_part(adapted)["searcher"].parts["weights"] == adapter_bytes
    assert by_part(served)["searcher"].parts["weights"] == adapter_bytes + 2 * shape.parameters


def test_a_full_buffer_takes_no_more_than_its_budget_for_tokens() -> None:
    long, short = BufferSettings().memory(8000), BufferSettings().memory(100)
    assert long["tokens"] == 4 * GB
    assert short["tokens"] < 0.3 * GB
    assert sum(BufferSettings(memory_gb=20.0).memory(8000).values()) == pytest.approx(13.6 * GB, rel=0.01)


@pytest.mark.parametrize(
    ("name", "config", "gpus", "ranks", "searchers"),
    [
        ("gsm8k", RHO, [80], 1, 1),
        ("gsm8k", RHO, [80] * 2, 1, 1),
        ("gsm8k", RHO, [80] * 4, 1, 3),  # the paper's own
        ("gsm8k", RHO, [80] * 8, 1, 7),
        ("gsm8k", RHO, [48] * 4, 2, 2),
        ("math", SEVEN, [80] * 4, 2, 2),
        ("math", SEVEN, [80] * 8, 2, 6),
        ("math", SEVEN, [141] * 4, 2, 2),
        ("math", SEVEN, [80] * 3, 2, 1),
        ("tldr", PYTHIA, [48] * 8, 1, 7),
        ("tldr", PYTHIA, [24] * 4, 1, 3),
    ],
)
def test_ranks_are_as_many_as_fit_and_every_other_gpu_has_a_searcher(
    at: Models, name: str, config: PretrainedConfig, gpus: list[int], ranks: int, searchers: int
) -> None:
    recipe, host = recipe_of(name, at(config)), machine(*gpus)
    assert sizing_flags(recipe, host) == ["--trainer.ranks", str(ranks), "--searchers", str(searchers)]
    sized_recipe = decided(recipe, host)
    refuse_what_cannot_fit(sized_recipe, host)
    assert unused_gpus(sized_recipe, host) is None
    if ranks > 1:  # with one rank less it would not
        assert memory_shortage(replace(sized_recipe, trainer=RankSettings(ranks - 1)), host) is not None


def test_where_the_reference_does_not_fit_beside_an_engine_the_trainer_scores(at: Models) -> None:
    seven, tight, roomy = (
        recipe_of("math", at(SEVEN)),
        machine(*[48] * 16, memory=2000),
        machine(*[80] * 16, memory=2000),
    )
    assert decided(seven, roomy).reference_scorer == "searchers"
    sized_recipe = decided(seven, tight)
    assert sized_recipe.reference_scorer == "trainer"
    refuse_what_cannot_fit(sized_recipe, tight)
    assert memory_shortage(replace(sized_recipe, reference_scorer="searchers"), tight) is not None


def test_where_checkpointing_is_open_several_ranks_do_it_as_soon_as_they_do_not_fit_without(at: Models) -> None:
    host = machine(*[80] * 8)
    seven = recipe_of("gsm8k", at(SEVEN), gradient_checkpointing=None)
    sized_recipe = decided(seven, host)
    refuse_what_cannot_fit(sized_recipe, host)
    assert getattr(sized_recipe.model, "gradient_checkpointing") is True  # noqa: B009 - of this model
    without = recipe_of("gsm8k", at(SEVEN), gradient_checkpointing=False)
    assert sized_recipe.trainer.count < decided(without, host).trainer.count
    assert (
        memory_shortage(replace(sized_recipe, trainer=RankSettings(sized_recipe.trainer.count - 1)), host) is not None
    )
    roomy = decided(replace(seven, max_tokens_per_pass=1024), machine(*[400] * 8))
    assert getattr(roomy.model, "gradient_checkpointing") is None  # noqa: B009 - one rank decides by itself


def test_what_is_given_stays_and_gpus_that_are_left_are_named(at: Models) -> None:
    recipe, host = replace(recipe_of("gsm8k", at(RHO)), searchers=3), machine(*[80] * 8)
    assert sizing_flags(recipe, host) == ["--trainer.ranks", "1"]
    assert str(unused_gpus(decided(recipe, host), host)).startswith("4 GPUs are unused: give more --searchers")
    both = replace(recipe, trainer=RankSettings(4))
    assert sizing_flags(both, host) == []
    assert str(unused_gpus(both, host)).startswith("1 GPU is unused")
    alone = replace(recipe, runtime="inline", searchers=None)
    assert sizing_flags(alone, host) == []
    assert str(unused_gpus(alone, host)).startswith("7 GPUs are unused: the inline runtime")
    on_cpu = recipe_of("gsm8k", at(RHO), "cpu")
    assert (sizing_flags(on_cpu, host), unused_gpus(on_cpu, host)) == ([], None)


def test_open_slots_are_those_of_a_batch_and_fewer_where_a_card_has_no_room(
    at: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slots(recipe: Recipe, *gpus: int) -> int:
        sized_recipe = decided(recipe, machine(*gpus))
        refuse_what_cannot_fit(sized_recipe, machine(*gpus))
        assert isinstance(sized_recipe.model, HuggingFace)
        return sized_recipe.model.generation.slot_count

    def with_open_slots(config: PretrainedConfig, **changes: Any) -> Recipe:
        recipe = recipe_of("gsm8k", at(config), **changes)
        assert isinstance(recipe.model, HuggingFace)
        generation = replace(recipe.model.generation, slots=None)
        return replace(recipe, model=replace(recipe.model, generation=generation))

    rho, seven = with_open_slots(RHO), with_open_slots(SEVEN)
    assert slots(rho, 141) == slots(rho, 80, 80) == 144  # a batch has 7 x 20 answers
    assert slots(replace(rho, group_size=4), 141) == 64
    assert slots(replace(rho, group_size=100), 141, 141) == 256
    assert slots(replace(rho, runtime="inline", searchers=None), 141) == 144
    # the reference leaves a searcher's card before the slots fall below the default
    assert all(slots(seven, 400, gigabytes) >= 64 for gigabytes in range(34, 48, 2))
    need = by_part(seven)["searcher"].total  # with 64 slots
    small_card = int(need / USABLE / GB)
    assert 32 <= slots(replace(seven, reference_scorer="trainer"), 400, small_card) < 64
    full_card = with_open_slots(RHO, gradient_checkpointing=None)
    assert slots(full_card, 36) == 64  # where trained activations are recomputed, no more than the default
    on_cpu = with_open_slots(RHO, device="cpu")
    assert decided(on_cpu, machine()) == on_cpu
    recipe_with_slots = recipe_of("gsm8k", at(RHO))
    assert slots(recipe_with_slots, 141) == 72
    monkeypatch.setattr(devices, "find_spec", lambda name: name)  # vLLM is installed
    by_vllm = override(rho, ["--model.generation.engine", "vllm"], "")
    assert slots(by_vllm, 141) == 64


def test_where_slots_are_more_than_the_default_each_half_has_what_an_allocator_loses(at: Models) -> None:
    recipe = recipe_of("gsm8k", at(RHO), gradient_checkpointing=True)
    assert isinstance(recipe.model, HuggingFace)
    recipe = replace(recipe, model=replace(recipe.model, generation=replace(recipe.model.generation, slots=None)))
    slots_by_memory = {}
    for gigabytes in range(30, 80, 2):
        sized_recipe = decided(recipe, machine(gigabytes))
        assert isinstance(sized_recipe.model, HuggingFace)
        slots_by_memory[gigabytes] = sized_recipe.model.generation.slot_count
        if slots_by_memory[gigabytes] > 64:
            need = {part: n.total for part, n in by_part(sized_recipe).items() if n.device == "cuda"}
            halves = need.pop("trainer"), sum(need.values())
            where = places_on(sized_recipe, machine(gigabytes))
            for worker, half in zip(("trainer", "searcher-0"), halves, strict=True):
                assert where[worker].share * gigabytes * GB >= half + max(0.15 * half, LOST) - 1
    assert any(64 < slots < 144 for slots in slots_by_memory.values())  # a card that has room for part of a batch


@pytest.mark.parametrize(("gpus", "fits"), [([80], True), ([48], False), ([24, 24], False), ([80, 80], True)])
def test_shares_of_one_gpu_are_what_each_half_needs_and_a_sum_that_does_not_fit_is_refused(
    at: Models, gpus: list[int], fits: bool
) -> None:
    recipe, host = recipe_of("gsm8k", at(RHO)), machine(*gpus)
    sized_recipe = decided(recipe, host)
    needs_by_part, where = by_part(sized_recipe), places_on(sized_recipe, host)
    searcher = needs_by_part["searcher"].total + needs_by_part["reference"].total
    assert (memory_shortage(sized_recipe, host) is None) == fits
    if fits:
        assert where["trainer"].share * gpus[0] * GB >= needs_by_part["trainer"].total
        assert where["searcher-0"].share * gpus[-1] * GB >= searcher
    if len(gpus) == 1:
        assert where["trainer"].share + where["searcher-0"].share == pytest.approx(USABLE)


def test_the_trainer_has_slack_where_there_is_room_and_the_half_that_can_use_it_all_of_the_rest(
    at: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = decided(recipe_of("gsm8k", at(RHO), gradient_checkpointing=True), machine(141))
    assert isinstance(recipe.model, HuggingFace)
    need = {part: part_need.total for part, part_need in by_part(recipe).items() if part_need.device == "cuda"}
    share = places_on(recipe, machine(141))["trainer"].share
    assert share * 141 * GB == pytest.approx(USABLE * 141 * GB - need["searcher"] - need["reference"] - LOST)

    def trainer_bytes(engine: str, config: PretrainedConfig) -> float:
        other = override(
            recipe_of("gsm8k", at(config), gradient_checkpointing=True), ["--model.generation.engine", engine], ""
        )
        return places_on(other, machine(141))["trainer"].share * 141 * GB / by_part(other)["trainer"].total

    monkeypatch.setattr(devices, "find_spec", lambda name: None)  # vLLM is not installed
    assert trainer_bytes("auto", THREE) > 1.15
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    assert trainer_bytes("vllm", RHO) == pytest.approx(1.15)
    assert trainer_bytes("auto", RHO) == pytest.approx(share * 141 * GB / need["trainer"])  # which takes ours
    assert trainer_bytes("auto", THREE) == pytest.approx(1.15)  # and may take vLLM for more than 2 B parameters


def test_a_small_models_trainer_has_what_an_allocator_loses_where_there_is_room(at: Models) -> None:
    """SmolLM2's, of 1.4 GiB, ran out of 15 % more while 132 GiB of the card were free."""
    recipe = recipe_of("instruct", at(SMOL))
    need = {part: part_need.total for part, part_need in by_part(recipe).items() if part_need.device == "cuda"}
    for surplus in (LOST, LOST // 2):
        memory = int((sum(need.values()) + surplus) / USABLE)
        share = places_on(recipe, Machine(gpus=(memory,)))["trainer"].share
        assert share * memory == pytest.approx(need["trainer"] + surplus)


def test_where_checkpointing_is_open_one_gpu_is_shared_as_its_passes_then_need_it(at: Models) -> None:
    rho, host = recipe_of("gsm8k", at(RHO), gradient_checkpointing=None), machine(36)
    refuse_what_cannot_fit(rho, host)
    never, always = (recipe_of("gsm8k", at(RHO), gradient_checkpointing=is_on) for is_on in (False, True))
    assert memory_shortage(never, host) is not None
    assert places_on(rho, host) == places_on(always, host)
    assert places_on(rho, machine(80)) == places_on(never, machine(80))  # where they fit without


def test_a_refusal_names_a_field_with_which_the_recipe_fits(at: Models) -> None:
    rho, seven = recipe_of("gsm8k", at(RHO)), recipe_of("math", at(SEVEN))
    sentence = refusal(rho, machine(48))  # 52 GB of the trainer, and the searcher beside it
    assert sentence.startswith("the workers on GPU 0 need ")
    assert sentence.endswith("of which 42.5 GiB are usable: set --max-tokens-per-pass 8192, with which it fits")
    assert refusal(rho, machine(36)).endswith("set --model.gradient-checkpointing, with which it fits")
    assert refusal(rho, machine(48, 48)).endswith("set --max-tokens-per-pass 8192, with which it fits")
    sentence = refusal(decided(seven, machine(80, 80)), machine(80, 80))
    assert sentence.startswith("the trainer needs 136.")
    assert "--model.lora.rank 16" in sentence
    assert refusal(seven, machine(4, 4)).endswith("or a machine with more memory")
    sentence = refusal(replace(seven, trainer=RankSettings(6), searchers=2), machine(*[48] * 8))
    assert sentence.startswith("the searcher needs")
    assert "--model.generation.slots" in sentence
    sentence = refusal(replace(seven, trainer=RankSettings(14), searchers=2), machine(*[32] * 16))
    assert "set --reference-scorer trainer --model.generation.slots" in sentence  # fewer slots alone are not enough
    assert "--trainer.ranks 2" in refusal(
        replace(seven, trainer=RankSettings(1), searchers=1, max_tokens_per_pass=4096), machine(*[80] * 4)
    )


def test_every_proposal_of_a_refusal_fits(at: Models) -> None:
    proposed = 0
    for name, config in (("gsm8k", RHO), ("math", SEVEN), ("tldr", PYTHIA)):
        for host in (machine(*[gb] * count) for gb in (24, 48, 80) for count in (1, 2, 4)):
            sized_recipe = decided(recipe_of(name, at(config)), host)
            if memory_shortage(sized_recipe, host) is None or "with which it fits" not in (
                sentence := refusal(sized_recipe, host)
            ):
                continue
            flags = sentence.partition(": set ")[2].removesuffix(", with which it fits").split()
            assert memory_shortage(override(sized_recipe, flags, "", recorded=True), host) is None
            proposed += 1
    assert proposed > 10


def test_on_a_cpu_all_parts_share_the_machines_memory(at: Models) -> None:
    recipe = replace(recipe_of("gsm8k", at(RHO), "cpu", gradient_checkpointing=True), searchers=3)
    whole = sum(n.total * (3 if n.part in ("searcher", "reference") else 1) for n in needs(recipe))
    refuse_what_cannot_fit(recipe, Machine(whole))
    sentence = refusal(recipe, Machine(whole - 1))
    assert "the run needs" in sentence
    assert "and this machine has" in sentence
    refuse_what_cannot_fit(recipe, Machine())  # nothing is known of this machine


def test_weights_that_are_recipe_in_memory_in_the_machines_memory_take_four_versions_of_it(at: Models) -> None:
    recipe = replace(recipe_of("gsm8k", at(RHO)), searchers=3)
    recipe_in_memory = replace(recipe, publish=PublishSettings(in_memory=True))
    version_bytes = disk_use(recipe).version
    assert by_part(recipe_in_memory).keys() - by_part(recipe).keys() == {"weights in memory"}
    assert by_part(recipe_in_memory)["weights in memory"].total == 4 * version_bytes
    memory = 4 * version_bytes + by_part(recipe)["replay"].total
    refuse_what_cannot_fit(recipe_in_memory, Machine(memory, (80 * GB,) * 4))
    assert "weights in memory" in refusal(recipe_in_memory, Machine(memory - 1, (80 * GB,) * 4))


def test_7_b_over_4_ranks_fits_80_gb_cards_and_one_rank_is_not_measured(at: Models) -> None:
    recipe, host = replace(recipe_of("math", at(SEVEN)), trainer=RankSettings(4)), machine(*[80] * 8)
    sized_recipe, flags, sentence = decide_open_settings(recipe, host)
    assert flags == ["--searchers", "4"]
    refuse_what_cannot_fit(sized_recipe, host)
    assert by_part(sized_recipe)["trainer"].total < 0.6 * 80 * GB
    assert not one_rank_fits(sized_recipe, host)
    assert one_rank_fits(replace(recipe_of("gsm8k", at(RHO)), trainer=RankSettings(4)), host)
    assert [place for worker, place in sentence["Where it runs"].items() if "trainer" in worker] == [
        f"GPU {i}" for i in range(4)
    ]


def test_a_run_of_7_b_keeps_checkpoints_of_91_gb_and_versions_of_15(at: Models) -> None:
    disk = disk_use(recipe_of("math", at(SEVEN)))
    assert disk is not None
    assert (round(disk.checkpoint / GB), round(disk.version / GB)) == (91, 15)
    assert disk_use_text(disk).startswith("320 GB for 3 checkpoints of 91 GB")
    adapted = disk_use(override(recipe_of("math", at(SEVEN)), ["--model.lora.rank", "16"], ""))
    assert adapted is not None
    assert adapted.version < 0.1 * GB  # adapters alone
    assert round(adapted.checkpoint / GB) == 16  # merged, in bfloat16, with the adapters' moments


def test_training_asks_whether_it_fits_before_anything_is_loaded(at: Models) -> None:
    """The folder has no weights: whatever would load them fails otherwise."""

    def on(gpus: Sequence[int]) -> tuple[Recipe, list[str]]:
        return with_sizes(recipe_of("math", at(SEVEN)), ["--steps", "3"], machine(*gpus), print)

    recipe, flags = on([80] * 4)
    assert flags == ["--steps", "3", "--trainer.ranks", "2", "--searchers", "2"]
    assert (recipe.trainer.count, recipe.searcher_count) == (2, 2)
    with pytest.raises(UserError, match="the trainer needs 136"):
        on([80, 80])


def test_a_model_without_a_configuration_has_no_shape_and_is_not_refused() -> None:
    quickstart = find("quickstart")
    assert shape_of(quickstart.model) is None  # not prepared: it has no path yet
    assert shape_of(object()) is None
    assert needs(quickstart) == []
    refuse_what_cannot_fit(quickstart, Machine(1, (1,)))


def test_moments_on_the_host_are_counted_there_with_the_seconds_that_they_travel(at: Models) -> None:
    plain = recipe_of("math", at(SEVEN))
    host = override(plain, ["--optimizer.moments-on-host"], "")
    shape = shape_of(plain.model)
    assert shape is not None
    moments = 8 * shape.parameters
    assert by_part(host)["host"].total == moments
    assert by_part(plain)["trainer"].total - by_part(host)["trainer"].total == moments
    assert seconds_to_move(host) == pytest.approx(moments / GB / 42.9 + moments / GB / 55.1)  # 2.5 s
    assert seconds_to_move(plain) == 0
    assert "host" not in by_part(override(recipe_of("math", at(SEVEN), "cpu"), ["--optimizer.moments-on-host"], ""))
    assert "--optimizer.moments-on-host" in refusal(decided(plain, machine(90, 90)), machine(90, 90))
    assert "--model.lora.rank 16" in refusal(decided(plain, machine(90, 90)), machine(90, 90, memory=60))


def test_check_says_what_moments_on_the_host_cost(at: Models) -> None:
    sentence = check._moments_figure(override(recipe_of("math", at(SEVEN)), ["--optimizer.moments-on-host"], ""))
    assert sentence.startswith("56.7 GiB of each rank's are in the host's memory")
    assert "about 2.5 s of an update" in sentence
    assert check._moments_figure(recipe_of("math", at(SEVEN))) == ""


def test_the_reward_models_that_each_searcher_loads_are_in_its_sum(at: Models) -> None:
    plain = recipe_of("tldr", at(PYTHIA))
    assert isinstance(plain.task, Tldr)
    judged = replace(plain, task=replace(plain.task, reward_model=at(PYTHIA), gold=at(PAGE.GOLD)))
    with torch.device("meta"):
        small, gold = (AutoModelForSequenceClassification.from_config(config) for config in (PYTHIA, PAGE.GOLD))
    need = by_part(judged)["rewards on cpu"]
    assert (need.device, set(need.parts)) == ("cpu", {"reward model", "gold model"})
    for model, config, part_bytes in zip((small, gold), (PYTHIA, PAGE.GOLD), need.parts.values(), strict=True):
        weights = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size * (
            model.get_output_embeddings() is not None
        )
        assert 0 < part_bytes - 4 * weights < 0.2 * part_bytes + 5 * GB  # and a pass
    assert "rewards on cpu" not in by_part(plain)
    host = machine(80, 80, 80, memory=40)
    sized_recipe = decided(judged, host)  # two searchers, each with 33 GB of reward models
    assert "rewards on cpu 6" in refusal(sized_recipe, host)
    assert refusal(sized_recipe, host).endswith("set --searchers 1, with which it fits")
    assert memory_shortage(decided(plain, host), host) is None
    on_gpu = replace(judged, task=replace(judged.task, device="cuda"))
    with_judges = by_part(on_gpu)
    searcher = sum(with_judges[part].total for part in ("searcher", "reference", "rewards on cuda"))
    assert memory_shortage(decided(on_gpu, machine(80, 80)), machine(80, 80)) is None
    small_card = machine(80, int(searcher / USABLE / GB))
    assert "the searcher needs" in refusal(replace(on_gpu, searchers=1), small_card)
    shared = places_on(replace(on_gpu, searchers=1), machine(141))
    assert shared["searcher-0"].share * 141 * GB >= searcher


def test_what_a_resumed_run_is_told_to_change_can_be_changed(at: Models) -> None:
    seven, host = decided(recipe_of("math", at(SEVEN)), machine(80, 80)), machine(80, 80)
    assert "--model.lora.rank 16" in refusal(seven, host)
    with pytest.raises(UserError) as refused:
        refuse_what_cannot_fit(seven, host, is_resumed=True)
    assert "the trainer needs 136" in str(refused.value)
    assert str(refused.value).endswith("are usable: use more GPUs, or a machine with more memory")


def test_a_resume_asks_whether_it_fits_before_anything_is_changed(
    at: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model.path", at(SEVEN), "--model.device", "cuda", "--trainer.ranks", "1", "--searchers", "1"]
    run = RunDirectory.create(tmp_path / "run", "math", flags, override(find("math"), flags, ""))
    content = (run.path / "recipe.json").read_bytes()
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine(80, 80, 80, 80)))
    with pytest.raises(UserError, match=r"the trainer needs 13.* --trainer\.ranks 2, with which it fits"):
        resume_point(run, [])
    assert (run.path / "recipe.json").read_bytes() == content
    recipe, _ = resume_point(run, ["--trainer.ranks", "2"])
    assert recipe.trainer.count == 2


def test_a_victim_and_its_judge_are_in_a_searchers_sum_twice_since_evaluations_load_their_own(at: Models) -> None:
    attacked, judged = at(PYTHIA), at(PAGE.GOLD)
    task = RedTeam(victim=ModelVictim(path=attacked, device="cuda"), classifier=CausalJudge(path=judged, device="cpu"))
    need = by_part(replace(recipe_of("gsm8k", at(RHO)), task=task))
    shape = shape_of(replace(HuggingFace(), path=attacked))
    assert shape is not None
    on_gpu, on_cpu = need["rewards on cuda"], need["rewards on cpu"]
    assert (on_gpu.device, on_cpu.device) == ("cuda", "cpu")
    assert on_gpu.total == 2 * on_gpu.parts["victim"]
    assert 0 < on_gpu.parts["victim"] - 2 * shape.parameters < 0.1 * GB  # bfloat16
    assert 4 * 6.8 * GB < on_cpu.parts["classifier"] < 4 * 7 * GB
