"""A rank of the trainer reads its own rows of a model's files: the whole model's bits, in the memory of its share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rank_processes import ranks_of, risen
from torch import Tensor
from toys import VOCABULARY, groups_of
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from tba.batch import collate
from tba.errors import DeadlineExceeded
from tba.models.huggingface import HuggingFace
from tba.policy.causal import CausalPolicy
from tba.policy.fsdp import ShardedModel
from tba.policy.loading import load_unfilled
from tba.policy.lora import LoraSettings, add_adapters, is_adapter
from tba.sharding import is_sharded, local_part
from tba.training.ranks.messages import Ranks
from tba.training.ranks.weights import OutgoingWeights

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
LAYERS = ["sliding_attention", "full_attention"]
# name -> (model, whether its files hold its weights as they are)
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], bool]] = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)), True),
    "tied": (lambda: LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True)), True),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4)), True),
    "gpt_neox": (lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)), True),
    "gemma3": (
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED, sliding_window=5, layer_types=LAYERS)),
        True,
    ),
    "granite, its own logits": (lambda: GraniteForCausalLM(GraniteConfig(**GROUPED, logits_scaling=4.0)), True),
    "mamba, no attention": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)),
        True,
    ),
    "mixtral, converted": (
        lambda: MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1)),
        False,
    ),
}


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="20KB")  # several files
    return folder


def whole(policy: CausalPolicy, ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a sharded policy, on rank 0; the others send their rows."""
    shards = policy.everything()
    return OutgoingWeights(
        shards, {name: local_part(tensor) for name, tensor in shards.items()}, ranks, None
    ).whole_tensors()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_policy_has_the_weights_and_the_forward_of_the_whole_model(family: str, tmp_path: Path) -> None:
    make, as_it_is = FAMILIES[family]
    torch.manual_seed(0)
    path = saved(make(), tmp_path / "model")
    batch = collate(groups_of([3, 2]))
    plain = CausalPolicy(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    expected = plain.evaluate(batch).log_policy_BT
    with ranks_of(1, tmp_path / "store", lambda ranks: None) as ranks:
        model, files = load_unfilled(path, torch.float32)
        assert (files is not None) == as_it_is
        assert all(p.is_meta == as_it_is for p in model.parameters())
        policy = CausalPolicy(model)
        policy.shard(ranks.sharding(torch.float32), files)
        local_rows = {name: local_part(tensor) for name, tensor in policy.everything().items()}
        assert local_rows.keys() == plain.everything().keys()
        assert all(torch.equal(local_rows[name], tensor) for name, tensor in plain.everything().items())
        assert policy.share_prompt == plain.share_prompt
        assert all(is_sharded(p) for p in policy.parameters())  # nothing is left gathered
        log_policy_BT = policy.evaluate(batch).log_policy_BT
        torch.testing.assert_close(log_policy_BT, expected, rtol=0, atol=1e-6)
        log_policy_BT.sum().backward()
        assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)


def test_files_of_half_precision_fill_shards_of_float32_whose_rows_do_not_divide_evenly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = GROUPED | {"vocab_size": 37, "intermediate_size": 50}  # over three ranks: 13, 13 and 11 rows
    path = saved(LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16(), tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()

    def gathered_of(ranks: Ranks) -> dict[str, Tensor]:
        model, files = load_unfilled(path, torch.float32)
        policy = CausalPolicy(model)
        policy.shard(ranks.sharding(torch.float32), files)
        return {name: tensor.clone() for name, tensor in whole(policy, ranks)}

    def life(ranks: Ranks) -> None:
        gathered_of(ranks)

    with ranks_of(3, tmp_path / "store", life) as ranks:
        tensors = gathered_of(ranks)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def loaded_after(seconds: float, path: Path, ranks: Ranks) -> None:
    """Load the rows of a rank whose disk is slow, and evaluate with the others."""
    model, files = load_unfilled(path, torch.float32)
    threading.Event().wait(seconds)
    policy = CausalPolicy(model)
    policy.shard(ranks.sharding(torch.float32), files)
    policy.evaluate(collate(groups_of([3, 2])))


@pytest.mark.parametrize(("late", "seconds"), [(1, 10.0), (0, 4.0)])
def test_a_rank_that_loads_for_longer_than_a_collective_may_take_is_waited_for(
    tmp_path: Path, late: int, seconds: float
) -> None:
    path = saved(LlamaForCausalLM(LlamaConfig(**GROUPED)), tmp_path / "model")

    def life(ranks: Ranks) -> None:
        loaded_after(seconds if late else 0.0, path, ranks)

    with ranks_of(2, tmp_path / "store", life, patience=3.0) as ranks:
        loaded_after(0.0 if late else seconds, path, ranks)


def test_a_rank_that_has_not_loaded_by_the_deadline_is_named(tmp_path: Path) -> None:
    path = saved(LlamaForCausalLM(LlamaConfig(**GROUPED)), tmp_path / "model")

    def life(ranks: Ranks) -> None:
        loaded_after(0.0 if ranks.rank == 2 else 4.0, path, ranks)

    with (
        pytest.raises(DeadlineExceeded, match=r"trainer rank 0 waited 2 s for rank 1 to load the model"),
        ranks_of(3, tmp_path / "store", life, loading=2.0) as ranks,
    ):
        loaded_after(0.0, path, ranks)


def test_adapters_are_new_and_equal_on_every_rank_though_no_file_has_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**GROUPED))
    recipe = HuggingFace(path=str(saved(model, tmp_path / "model")), device="cpu", lora=LoraSettings(rank=2))
    batch = collate(groups_of([3, 2]))
    expected = CausalPolicy(model.eval()).evaluate(batch).log_policy_BT

    def life(ranks: Ranks) -> None:
        policy = recipe.policy(1.0, sharding=ranks.sharding(torch.float32))
        for _ in whole(policy, ranks):
            pass
        policy.evaluate(batch)

    with ranks_of(2, tmp_path / "store", life) as ranks:
        policy = recipe.policy(1.0, sharding=ranks.sharding(torch.float32))
        tensors = {name: tensor.clone() for name, tensor in whole(policy, ranks)}
        torch.testing.assert_close(policy.evaluate(batch).log_policy_BT, expected, rtol=0, atol=1e-6)
    assert sum(map(is_adapter, tensors)) == 2 * 2 * 7  # A and B of seven layers in two blocks
    for name, tensor in tensors.items():
        assert bool((tensor != 0).any()) == (".lora_B." not in name), name
    alone = CausalPolicy(add_adapters(model, LoraSettings(rank=2))).everything()
    assert tensors.keys() == alone.keys()
    assert all(torch.equal(tensors[n], alone[n]) for n in tensors if not is_adapter(n))


LARGE = {  # 25 M parameters: 101 MB in float32, 13 MB in a layer, 8.4 MB in the embeddings and as much in the head
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_never_holds_more_than_its_share_and_one_layer(count: int, tmp_path: Path) -> None:
    """The rise of the largest resident memory of each forked rank, pages of mapped files included."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LARGE))
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    whole, layer = sum(sizes.values()), sum(s for name, s in sizes.items() if ".layers.0." in name)
    model.bfloat16().save_pretrained(tmp_path / "large")
    del model
    small = saved(LlamaForCausalLM(LlamaConfig(**GROUPED)), tmp_path / "small")

    def load(path: Path, ranks: Ranks) -> object:
        model, files = load_unfilled(path, torch.float32)
        assert files is not None
        sharded = ShardedModel(model, ranks.sharding(torch.float32))
        sharded.fill(files, "cpu")
        return sharded

    def life(ranks: Ranks) -> None:
        load(small, ranks)  # what is imported by the first use of all this is not the model's
        rise = risen(lambda: load(tmp_path / "large", ranks))
        all_of_it = risen(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float32))
        (tmp_path / f"risen-{ranks.rank}").write_text(f"{rise} {all_of_it}")

    with ranks_of(count, tmp_path / "store", life) as ranks:
        load(small, ranks)
        load(tmp_path / "large", ranks)
    for rank in range(1, count):
        rise, all_of_it = map(int, (tmp_path / f"risen-{rank}").read_text().split())
        assert whole / count < rise < whole / count + layer
        assert all_of_it > 0.9 * whole  # which this measure sees
