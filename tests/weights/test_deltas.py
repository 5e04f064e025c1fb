"""Versions as what has changed since another: bit for bit what was published, and no more of it than that."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.errors import UserError
from tba.policy.causal import CausalPolicy
from tba.policy.reference import FrozenReference
from tba.protocols import Manifest
from tba.streaming import TensorStream, changes_since, shapes_of
from tba.types import Version
from tba.weights.deltas import Restored, _apply_change, write_changes
from tba.weights.directory import PublishSettings, WeightDirectory

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class Letters:
    """A tokenizer of one letter per token."""

    eos_token_id = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") + 2 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i - 2) for i in token_ids)


SHAPES = {"large": (300, 40), "odd": (7, 3), "one": (1,), "scalar": (), "none": (0, 4), "same": (64,)}


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def moved(weights: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Another value for this share of the numbers of all but one tensor."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, t in weights.items():
        hit = torch.rand(t.shape, generator=generator) < (0.0 if name == "same" else share)
        changed[name] = torch.where(hit, t + 1, t)
    return changed


def written(
    path: Path, new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> int:
    return write_changes(path, shapes_of(new), changes_since(old.__getitem__, new, dtype), dtype)


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype
        and one[n].shape == other[n].shape
        and torch.equal(one[n].view(BITS[one[n].dtype]), other[n].view(BITS[other[n].dtype]))
        for n in one
    )


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("share", [0.0, 0.003, 0.1, 0.6, 1.0])
def test_base_and_changes_are_what_was_published_bit_for_bit(tmp_path: Path, dtype: torch.dtype, share: float) -> None:
    old = tensors(0, dtype)
    new = moved(old, share, 1)
    size = written(tmp_path / "changes.safetensors", new, old)
    assert size == (tmp_path / "changes.safetensors").stat().st_size
    changes = load_file(tmp_path / "changes.safetensors")
    assert same_bits(Restored(old, changes), new)
    assert not any(name.startswith("same") for name in changes)
    if share == 0.0:
        assert not changes


def test_whoever_takes_an_update_holds_one_tensor_of_it_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond its model and the files, which are mapped."""
    config = LlamaConfig(**dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 32), num_hidden_layers=3)
    torch.manual_seed(0)
    old = {name: t.clone() for name, t in CausalPolicy(LlamaForCausalLM(config)).weights().items()}
    new = {name: torch.where(torch.rand(t.shape) < 0.05, t + 1, t) for name, t in old.items()}
    directory = WeightDirectory(tmp_path, settings=PublishSettings(full_version_every=2))
    directory.publish(old, Version(0, 0), Manifest())
    directory.publish(new, Version(0, 1), Manifest())
    alive, most, made = 0, 0, 0

    def counted(base: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        nonlocal alive, most, made
        tensor = _apply_change(base, at, values)
        alive, made = alive + tensor.nbytes, made + 1
        most = max(most, alive)
        weakref.finalize(tensor, gone, tensor.nbytes)
        return tensor

    def gone(size: int) -> None:
        nonlocal alive
        alive -= size

    monkeypatch.setattr("tba.weights.deltas._apply_change", counted)
    reference = FrozenReference(LlamaForCausalLM(config), Version())
    engine = TransformersEngine(LlamaForCausalLM(config).eval(), Letters(), EngineSettings(), Version())
    for takes, model in ((reference, reference._policy.model), (engine, engine.model)):
        most = made = 0
        takes.load(directory.at(Version(0, 1)).read(), Version(0, 1))
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in new.items())
        assert made == sum(not torch.equal(old[name], new[name]) for name in new) > 20
        assert alive == 0
        assert most == max(t.nbytes for t in new.values())


def test_numbers_are_the_same_when_their_bits_are(tmp_path: Path) -> None:
    old = {"a": torch.tensor([0.0, torch.nan, torch.inf, 1.0] * 4)}
    new = {"a": torch.tensor([-0.0, torch.nan, -torch.inf, 1.0] * 4)}
    written(tmp_path / "changes.safetensors", new, old)
    assert same_bits(Restored(old, load_file(tmp_path / "changes.safetensors")), new)
    written(tmp_path / "nothing.safetensors", old, old)
    assert not load_file(tmp_path / "nothing.safetensors")


def test_what_is_compared_is_what_would_have_been_written(tmp_path: Path) -> None:
    """A step too small for bfloat16 is no change in it."""
    trained = {"a": torch.full((1 << 16,), 1.0)}
    base = {"a": trained["a"].bfloat16()}
    trained["a"] += 1e-4
    trained["a"][:64] += 0.5
    size = written(tmp_path / "changes.safetensors", trained, base, torch.bfloat16)
    changes = load_file(tmp_path / "changes.safetensors")
    assert len(changes["a@at"]) == 64
    assert changes["a@at"].dtype == torch.int32
    assert size < 64 * (4 + 2) + 1024  # of 131,072 bytes whole
    assert same_bits(Restored(base, changes), {"a": trained["a"].bfloat16()})


def test_tensors_may_come_one_after_the_other(tmp_path: Path) -> None:
    old = tensors(0)
    new = moved(old, 0.05, 2)

    def come() -> Iterator[tuple[str, torch.Tensor]]:
        yield from new.items()

    streamed = TensorStream({name: t.to("meta") for name, t in new.items()}, come)
    written(tmp_path / "changes.safetensors", streamed, old)
    assert same_bits(Restored(old, load_file(tmp_path / "changes.safetensors")), new)
    few = TensorStream({name: t.to("meta") for name, t in new.items()}, lambda: iter(list(new.items())[:2]))
    with pytest.raises(ValueError, match="ended before"):
        written(tmp_path / "few.safetensors", few, old)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("full_version_every", [1, 3])
def test_every_version_reads_as_it_was_published_in_the_type_that_was_asked_for(
    tmp_path: Path, dtype: torch.dtype | None, full_version_every: int
) -> None:
    directory = WeightDirectory(tmp_path, settings=PublishSettings(full_version_every, in_memory=False), dtype=dtype)
    kind = dtype or torch.float32
    weights, held = tensors(0), []
    for step in range(8):
        directory.publish(weights, Version(0, step), Manifest(wanted=step))
        newest = WeightDirectory(tmp_path).newer_than(None)
        assert newest is not None
        assert newest.manifest == Manifest(wanted=step)
        held.append((newest, {name: t.to(kind) for name, t in weights.items()}))
        weights = moved(weights, 0.01, step)
    for published, expected in held:  # most have been pruned meanwhile
        assert same_bits(published.read(), expected)


def test_one_version_in_so_many_is_whole_and_its_changes_keep_it(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path, settings=PublishSettings(full_version_every=4))
    weights = tensors(0)
    since = []
    for step in range(10):
        directory.publish(weights, Version(0, step), Manifest())
        since.append(directory.base(Version(0, step)))
        weights = moved(weights, 0.01, step)
        if step == 2:
            directory.pin(Version(0, 2), "reference")
    assert since == [None, *[Version(0, 0)] * 3, None, *[Version(0, 4)] * 3, None, Version(0, 8)]
    assert directory.versions() == [Version(0, 0), Version(0, 2), Version(0, 8), Version(0, 9)]
    directory.unpin(Version(0, 2), "reference")
    assert directory.versions() == [Version(0, 8), Version(0, 9)]
    again = WeightDirectory(
        tmp_path, settings=PublishSettings(full_version_every=4)
    )  # another publisher, after a crash
    again.publish(weights, Version(1, 0), Manifest())
    assert again.base(Version(1, 0)) is None
    assert same_bits(again.at(Version(1, 0)).read(), weights)
    assert len(list(tmp_path.iterdir())) == 6  # 0.8, 0.9, of which it is the base, and 1.0


def test_changes_without_their_base_are_damaged_and_other_names_no_version(tmp_path: Path) -> None:
    directory = WeightDirectory(tmp_path, settings=PublishSettings(full_version_every=3))
    directory.publish(tensors(0), Version(0, 0), Manifest())
    with pytest.raises(ValueError, match="other names"):
        directory.publish({"a": torch.zeros(3)}, Version(0, 1), Manifest())
    directory.publish(tensors(1), Version(0, 1), Manifest())
    assert json.loads((tmp_path / "0.1.json").read_text())["base"] == "0.0"
    directory.file(Version(0, 0)).unlink()
    with pytest.raises(UserError, match=r"version 0\.1 in .* is damaged"):
        WeightDirectory(tmp_path).at(Version(0, 1))
    with pytest.raises(UserError, match="full-version-every is 0"):
        PublishSettings(full_version_every=0)
