"""Packed log-probabilities and gradients against a plain forward of each prompt and completion alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tba.batch import Batch, collate
from tba.policy.causal import CausalPolicy
from tba.policy.packed import PackedLayout, packed_attention, use_packed_attention
from tba.policy.varlen import Attention
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from uniform: attention that is wrong must show
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SLIDING = ["sliding_attention", "full_attention"]


def llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**GROUPED, **changes}))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=128,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "mistral-window-7": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=7)),
    "gemma2-window-5-softcap-2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **GROUPED,
            sliding_window=5,
            layer_types=SLIDING,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=12.0,
            attn_implementation="eager",  # transformers' sdpa drops the softcap
        )
    ),
    "gemma3-window-5": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**GROUPED, sliding_window=5, layer_types=SLIDING, query_pre_attn_scalar=8)
    ),
}


def built(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def groups_of(prompts: Sequence[int], completions: Sequence[Sequence[int]], seed: int = 0) -> list[Group]:
    """Groups with these prompt lengths and these completion lengths, of random tokens."""
    rng = np.random.default_rng(seed)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, length).astype(np.int32)

    made = []
    for prompt_length, lengths in zip(prompts, completions, strict=True):
        prompt = Prompt("random", tokens(prompt_length))
        made.append(
            Group.of(
                [
                    Trajectory(
                        uid=f"{prompt.key}-{i}",
                        prompt=prompt,
                        completion=Completion(tokens(length), "", StopReason.EOS, (Version(), Version())),
                        reward=float(rng.random()),
                        log_reference=np.zeros(length, np.float32),
                        reference=Version(),
                    )
                    for i, length in enumerate(lengths)
                ]
            )
        )
    return made


def ragged() -> Batch:
    """Groups of 1 to 5 completions of 1 to 40 tokens after prompts of 1 to 11: lone and shared kernel calls."""
    return collate(groups_of([9, 1, 11], [[1, 40, 12, 3, 11], [6], [17, 2, 38]]))


def plain_log_policy(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Each row alone through the untouched model: its own attention, its own logits, torch's log-softmax."""
    rows = []
    for b in range(batch.rows):
        g = batch.group_B[b]
        prompt, length = batch.prompt_GP[g, : batch.prompt_length_G[g]], batch.length_B[b]
        tokens = torch.cat([prompt, batch.completion_BT[b, :length]])
        logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1].float()
        chosen = torch.log_softmax(logits / temperature, -1).gather(1, tokens[len(prompt) :, None])[:, 0]
        rows.append(torch.nn.functional.pad(chosen, (0, batch.completion_BT.shape[1] - int(length))))
    return torch.stack(rows) * batch.mask_BT


def gradients(model: PreTrainedModel, log_policy_BT: Tensor) -> dict[str, Tensor]:
    """Gradients of a fixed, uneven weighting of the log-probabilities."""
    model.zero_grad()
    (log_policy_BT * torch.linspace(-1, 1.5, log_policy_BT.numel()).view(log_policy_BT.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_agree(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 5e-5) -> None:
    """Relative to the largest gradient of each parameter, floored for those that are 0 by symmetry (key biases).

    Sums over 200 tokens through a dozen matrices in float32: eps * sqrt(200 * 12) is 6e-6 of a gradient's usual size.
    """
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, theirs_g in theirs.items():
        scale = max(float(theirs_g.abs().max()), 1e-2 * largest)
        assert float((ours[name] - theirs_g).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_gives_the_log_probabilities_and_gradients_of_each_row_alone(family: str) -> None:
    model, batch = built(family), ragged()
    plain = plain_log_policy(model, batch, temperature=0.7)
    theirs = gradients(model, plain)
    policy = CausalPolicy(model, temperature=0.7)
    assert policy.share_prompt
    packed = policy.evaluate(batch).log_policy_BT
    assert packed.dtype == torch.float32
    assert float(plain.detach().min()) < -8  # the comparison is of probabilities that differ
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=5e-5)  # as in `test_causal`
    assert_gradients_agree(gradients(model, packed), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_observations_are_attended_to_and_neither_scored_nor_trained(family: str) -> None:
    """A row with masked positions has the log-probabilities and the gradients of the others, each row alone."""
    model, batch = built(family), ragged()
    mask_BT = batch.mask_BT & (torch.arange(batch.mask_BT.shape[1]) % 5 != 2) & (torch.arange(batch.rows) != 1)[:, None]
    mask_BT[:, 0] = True
    mask_BT[1, :4], mask_BT[1, 20:30] = True, True
    masked = replace(batch, mask_BT=mask_BT & batch.mask_BT)
    plain = plain_log_policy(model, masked, temperature=0.7)
    theirs = gradients(model, plain)
    whole = CausalPolicy(model, temperature=0.7)
    packed = whole.evaluate(masked).log_policy_BT
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(packed, whole.evaluate(batch).log_policy_BT * masked.mask_BT, rtol=1e-6, atol=4e-7)
    assert_gradients_agree(gradients(model, packed), theirs)


def test_a_group_split_over_micro_batches_in_any_row_order_adds_up_to_the_whole() -> None:
    model, batch = built("llama"), ragged()
    policy = CausalPolicy(model)
    whole = policy.evaluate(batch).log_policy_BT
    theirs = gradients(model, whole)
    weight_BT = torch.linspace(-1, 1.5, whole.numel()).view(whole.shape)
    model.zero_grad()
    for rows in (torch.tensor([8, 0, 5]), torch.tensor([2, 7, 1]), torch.tensor([6, 4, 3])):
        part = policy.evaluate(batch.select(rows)).log_policy_BT
        width = part.shape[1]
        torch.testing.assert_close(part, whole[rows, :width], rtol=1e-5, atol=1e-5)
        (part * weight_BT[rows, :width]).sum().backward()
    assert_gradients_agree({n: p.grad for n, p in model.named_parameters()}, theirs)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "gemma3-window-5"])
def test_gradient_checkpointing_recomputes_the_same_attention(family: str) -> None:
    model, batch = built(family), ragged()
    theirs = gradients(model, CausalPolicy(model).evaluate(batch).log_policy_BT)
    policy = CausalPolicy(model, gradient_checkpointing=True)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    attention.register_forward_hook(count)
    log_policy = policy.evaluate(batch).log_policy_BT
    assert_gradients_agree(gradients(model, log_policy), theirs)
    assert calls == 2  # once forward, once recomputed backward
    assert not any(m.training for m in model.modules())


@pytest.mark.parametrize("wanted", [False, True])
def test_activations_are_recomputed_in_the_passes_of_which_it_is_said_by_their_tokens(wanted: bool) -> None:
    model, batch, asked, calls = built("llama"), ragged(), [], []

    def recomputes(tokens: int) -> bool:
        asked.append(tokens)
        return wanted

    policy = CausalPolicy(model, gradient_checkpointing=recomputes)
    with torch.no_grad():
        policy.evaluate(batch)
    assert asked == []  # nothing is kept then
    attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    attention.register_forward_hook(lambda *_: calls.append(1))
    policy.evaluate(batch).log_policy_BT.sum().backward()
    assert asked == [int(batch.prompt_length_G.sum() + batch.length_B.sum())]
    assert len(calls) == 1 + wanted


def test_dropout_is_never_applied_not_even_under_gradient_checkpointing() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    assert model.config.resid_pdrop == 0.1
    batch = ragged()
    plain = plain_log_policy(model.eval(), batch)
    policy = CausalPolicy(model.train(), gradient_checkpointing=True)
    log_policy = policy.evaluate(batch).log_policy_BT
    torch.testing.assert_close(log_policy, plain, rtol=1e-5, atol=1e-5)
    first = gradients(model, log_policy)
    assert_gradients_agree(gradients(model, policy.evaluate(batch).log_policy_BT), first, tolerance=0)


def test_the_plain_forward_gives_the_same_and_is_what_share_prompt_false_takes() -> None:
    model, batch = built("llama"), ragged()
    plain = CausalPolicy(model, temperature=0.7, share_prompt=False)
    assert not plain.share_prompt
    assert model.config._attn_implementation == "sdpa"
    ours = plain.evaluate(batch).log_policy_BT
    theirs = plain_log_policy(model, batch, temperature=0.7)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_gradients_agree(gradients(model, ours), gradients(model, theirs))


def test_positions_the_policy_did_not_sample_have_log_probability_0_and_no_gradient() -> None:
    model = built("llama")
    batch = collate(groups_of([4], [[6, 6]]))
    mask_BT = batch.mask_BT.clone()
    mask_BT[0, 2:5] = False  # a tool's turn
    policy = CausalPolicy(model)
    whole = policy.evaluate(batch).log_policy_BT
    masked = policy.evaluate(replace(batch, mask_BT=mask_BT)).log_policy_BT
    assert masked[0, 2:5].tolist() == [0, 0, 0]
    torch.testing.assert_close(masked, whole * mask_BT, rtol=1e-6, atol=1e-6)
    assert_gradients_agree(gradients(model, masked), gradients(model, whole * mask_BT))


@pytest.mark.parametrize("share_prompt", [True, False])
def test_a_micro_batch_in_which_nothing_was_sampled_has_a_gradient_of_0(share_prompt: bool) -> None:
    model = built("llama")
    batch = collate(groups_of([4], [[3]]))
    policy = CausalPolicy(model, share_prompt=share_prompt)
    log_policy = policy.evaluate(replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))).log_policy_BT
    assert log_policy.tolist() == [[0, 0, 0]]
    assert all(float(g.abs().max()) == 0 for g in gradients(model, log_policy).values())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)), ""),
        (
            lambda: GptOssForCausalLM(
                GptOssConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1, layer_types=SLIDING)
            ),
            "attention sinks",
        ),
    ],
    ids=["recurrent", "attention-sinks"],
)
def test_a_model_that_cannot_share_prompts_takes_the_plain_forward(
    model: Callable[[], PreTrainedModel], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    made, batch = model().eval(), ragged()
    policy = CausalPolicy(made)
    assert not policy.share_prompt
    assert reason in caplog.text
    assert "prompts are not shared within groups" in caplog.text
    ours = policy.evaluate(batch).log_policy_BT
    torch.testing.assert_close(ours, plain_log_policy(made, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "made",
    [
        lambda: GraniteForCausalLM(GraniteConfig(**GROUPED, logits_scaling=4.0)),
        lambda: Llama4ForCausalLM(Llama4TextConfig(**GROUPED, intermediate_size_mlp=24, num_local_experts=1)),
    ],
    ids=["of other logits", "not apart from the body"],
)
def test_a_head_that_is_more_than_linear_takes_the_models_own_logits(
    made: Callable[[], PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, batch = made().eval(), ragged()
    policy = CausalPolicy(model, temperature=0.7)
    assert not policy.share_prompt
    assert "its head is more than a linear layer" in caplog.text
    ours, theirs = policy.evaluate(batch).log_policy_BT, plain_log_policy(model, batch, temperature=0.7)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_gradients_agree(gradients(model, ours), gradients(model, theirs))


def test_a_model_that_ignores_the_layout_is_found_out_by_comparing() -> None:
    model = built("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)  # recurrent, over everything
    fault = use_packed_attention(model)
    assert fault is not None
    assert "differs from the plain forward" in fault
    assert model.config._attn_implementation == "sdpa"


def test_a_forward_without_the_layout_says_whose_model_it_is() -> None:
    model = built("llama")
    CausalPolicy(model)
    with pytest.raises(ValueError, match=r"without packed_layout: this model belongs to a policy"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_transformers_builds_no_mask_for_packed_attention() -> None:
    model, seen = built("gemma3-window-5"), []
    policy = CausalPolicy(model)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    policy.evaluate(ragged())
    assert seen == [None, None]


@pytest.mark.parametrize("heads", [2, 4])
def test_the_written_out_attention_equals_the_fused_one_forward_and_backward(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices other than the CPU, windows and softcaps take the written-out one."""
    generator = torch.Generator().manual_seed(0)
    layout = PackedLayout.of([5, 3], [[4, 30, 31], [7]], torch.device("cpu"))
    tokens = len(layout.position_N)
    leaves = [torch.randn(1, h, tokens, 8, generator=generator, requires_grad=True) for h in (4, heads, heads)]
    outcome = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(Attention, "_uses_fused", lambda *_: False)
        out, _ = packed_attention(torch.nn.Module(), *leaves, None, packed_layout=layout)
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        outcome.append((out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)))
    for one, other in zip(*outcome, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_packed_attention_has_the_gradient_of_finite_differences_with_window_and_softcap() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = PackedLayout.of([3, 2], [[2, 4], [1]], torch.device("cpu"))
    leaves = [
        torch.randn(1, h, len(layout.position_N), 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (4, 2, 2)
    ]

    def attention(*qkv: Tensor) -> Tensor:
        return packed_attention(
            torch.nn.Module(), *qkv, None, packed_layout=layout, sliding_window=3, softcap=1.5, scaling=0.9
        )[0]

    # scores are float32 inside, whatever comes in: hence the coarse step and tolerance
    assert torch.autograd.gradcheck(attention, leaves, eps=1e-2, atol=2e-3, rtol=2e-3, nondet_tol=1e-6)
