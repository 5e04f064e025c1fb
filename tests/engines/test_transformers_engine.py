"""The engine on transformers models against their plain forward, their `generate`, and itself at other slot counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from engine_families import (
    EOS,
    FAMILIES,
    VOCABULARY,
    WINDOW,
    Letters,
    build,
    plain_log_probabilities,
    ragged_prompts,
)
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from tba.engines import slots, transformers
from tba.engines.decoding import DecodingRows
from tba.engines.rules import LengthLimits
from tba.engines.transformers import EngineSettings, TransformersEngine, TransformersFlow
from tba.errors import TbaError, UserError
from tba.generation import generate, stream
from tba.policy.varlen import Attention
from tba.protocols import Engine
from tba.types import Completion, Prompt, Sampling, StopReason, Version


@pytest.fixture(autouse=True)
def _few_prompts_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "PREFILL_TOKENS", 16)


def engine_of(model: PreTrainedModel, **settings: object) -> TransformersEngine:
    defaults: dict[str, object] = {"slots": 5, "max_completion_tokens": 20}
    return TransformersEngine(model, Letters(), EngineSettings(**(defaults | settings)), Version(0, 3))


def tokens_of(completions: list[list[Completion]]) -> list[list[int]]:
    return [c.tokens.tolist() for c in chain.from_iterable(completions)]


def never_ending(model: PreTrainedModel) -> PreTrainedModel:
    """The model with an EOS that is none of its tokens."""
    model.config.eos_token_id = model.generation_config.eos_token_id = VOCABULARY + 5
    return model


class NoEnd(Letters):
    eos_token_id = None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_behavior_is_the_plain_forwards_log_softmax_to_1e_4(family: str, temperature: float) -> None:
    model = build(family)
    prompts = ragged_prompts(3, 9, 1, 9, 12, 3)  # 24 requests on 5 slots: rows are refilled many times
    completions = generate(engine_of(model), prompts, 4, Sampling(temperature), np.random.default_rng(0))
    longest = 0
    for prompt, group in zip(prompts, completions, strict=True):
        assert len(group) == 4
        for completion in group:
            rows = plain_log_probabilities(model, prompt, completion.tokens, temperature)
            expected = rows[torch.arange(len(rows)), torch.from_numpy(completion.tokens.astype(np.int64))]
            np.testing.assert_allclose(completion.log_behavior, expected, atol=1e-4)
            longest = max(longest, len(prompt.tokens) + len(completion.tokens))
    assert longest > 4 * WINDOW


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_completions_are_those_of_generate(family: str, penalty: float) -> None:
    model = build(family)
    prompts = ragged_prompts(3, 9, 1, 9, 12, 3)
    sampling = Sampling(0.0, repetition_penalty=penalty)
    completions = generate(engine_of(model, slots=4), prompts, 1, sampling, np.random.default_rng(0))
    for prompt, (completion,) in zip(prompts, completions, strict=True):
        ids = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
            repetition_penalty=penalty,
        )
        assert completion.tokens.tolist() == whole[0, len(prompt.tokens) :].tolist()
        assert completion.log_behavior is not None
        assert completion.log_behavior.tolist() == [0.0] * len(completion.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_attend_in_one_call_give_the_same_answers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, by the attention that the trainer has; on a CPU its stand-in."""
    prompts = ragged_prompts(3, 9, 1, 9, 12, 3)
    completions = generate(engine_of(build(family)), prompts, 4, Sampling(), np.random.default_rng(0))
    monkeypatch.setattr(slots, "takes_flash", lambda *_: True)
    calls = []
    forward = Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda *arguments: calls.append(1) or forward(*arguments))
    together = generate(engine_of(build(family)), prompts, 4, Sampling(), np.random.default_rng(0))
    assert tokens_of(together) == tokens_of(completions)
    for one, other in zip(chain(*together), chain(*completions), strict=True):
        np.testing.assert_allclose(one.log_behavior, other.log_behavior, atol=1e-5)
    assert bool(calls) == (family != "gemma2")  # whose scores have a softcap


def test_log_behavior_is_of_logits_less_a_penalty_for_what_was_read_and_said_in_refilled_rows_too() -> None:
    model, prompts, sampling = build("llama"), ragged_prompts(3, 9, 1, 9, 12, 3), Sampling(0.8, 0.9, 6, 0.02, 1.4)
    plain = generate(engine_of(model), prompts, 4, Sampling(0.8), np.random.default_rng(0))
    engine = engine_of(model)  # 24 requests on 5 slots
    answered = generate(engine, prompts, 4, sampling, np.random.default_rng(0))
    for prompt, group in zip(prompts, answered, strict=True):
        for completion in group:
            ids = [*prompt.tokens.tolist(), *completion.tokens.tolist()]
            logits_TV = model(input_ids=torch.tensor(ids)[None]).logits[0].detach()
            for t, token in enumerate(completion.tokens.tolist()):
                read = ids[: len(prompt.tokens) + t]
                logits_V = logits_TV[len(read) - 1].clone()
                known = torch.tensor(sorted(set(read)))
                logits_V[known] = torch.where(logits_V[known] > 0, logits_V[known] / 1.4, logits_V[known] * 1.4)
                weight, order = (logits_V / 0.8).softmax(-1).sort(descending=True)
                kept = weight[weight >= 0.02 * weight[0]][:6]
                kept = kept[(kept.cumsum(0) - kept) / kept.sum() < 0.9]
                assert token in order[: len(kept)].tolist()
                expected = (logits_V / 0.8).softmax(-1)[token] / kept.sum()
                assert completion.log_behavior is not None
                assert completion.log_behavior[t] == pytest.approx(float(expected.log()), abs=1e-4)
    # who asks for no penalty afterwards has none
    assert tokens_of(generate(engine, prompts, 4, Sampling(0.8), np.random.default_rng(0))) == tokens_of(plain)


@pytest.mark.parametrize("slots", [1, 3, 24, 100])
def test_a_request_gives_the_same_completion_at_any_number_of_slots(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = build("llama"), ragged_prompts(3, 9, 1, 9, 12, 3)
    reference = generate(engine_of(model, slots=7), prompts, 4, Sampling(top_p=0.95), np.random.default_rng(1))
    monkeypatch.setattr(transformers, "PREFILL_TOKENS", 1)
    engine = engine_of(model, slots=slots)
    assert tokens_of(generate(engine, prompts, 4, Sampling(top_p=0.95), np.random.default_rng(1))) == tokens_of(
        reference
    )


def test_what_an_earlier_call_left_in_the_slots_changes_nothing() -> None:
    model, prompts = build("qwen3"), ragged_prompts(2, 5, 3)
    used = engine_of(model)
    generate(used, ragged_prompts(30, 25, 31, seed=9), 4, Sampling(1.5), np.random.default_rng(5))
    fresh = engine_of(model)
    again = [generate(e, prompts, 3, Sampling(), np.random.default_rng(2)) for e in (used, fresh, used)]
    assert tokens_of(again[0]) == tokens_of(again[1]) == tokens_of(again[2])


def test_samples_of_one_prompt_are_not_copies_and_the_seed_decides_them() -> None:
    engine, prompts = engine_of(build("llama")), ragged_prompts(4)
    first = tokens_of(generate(engine, prompts, 12, Sampling(), np.random.default_rng(0)))
    other = tokens_of(generate(engine, prompts, 12, Sampling(), np.random.default_rng(1)))
    assert len({tuple(t) for t in first}) == 12
    assert first != other


def test_first_token_frequencies_match_the_models_probabilities() -> None:
    model, (prompt,) = build("llama"), ragged_prompts(6)
    engine = engine_of(model, slots=256, max_completion_tokens=1)
    n = 20_000
    (group,) = generate(engine, [prompt], n, Sampling(), np.random.default_rng(0))
    probability = plain_log_probabilities(model, prompt, np.array([0])).exp()[0].double().numpy()
    observed = np.bincount([c.tokens[0] for c in group], minlength=VOCABULARY)
    chi_square = ((observed - n * probability) ** 2 / (n * probability)).sum()
    assert chi_square < 56.9  # the 0.999 quantile at 28 degrees of freedom


def test_every_prompt_is_read_once_and_no_finished_row_is_computed() -> None:
    model, prompts = build("llama"), ragged_prompts(3, 9, 1, 9, 12, 3)
    engine = engine_of(model)
    computed = 0

    def count(_module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        nonlocal computed
        computed += kwargs["input_ids"].numel()

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    completions = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    hook.remove()
    # The last token of a completion is never fed to the model.
    assert computed == 3 + 9 + 1 + 9 + 12 + 3 + sum(len(t) - 1 for t in tokens_of(completions))
    assert len({len(t) for t in tokens_of(completions)}) > 3


def test_eos_is_the_last_token_and_every_configured_eos_ends_a_completion() -> None:
    model, prompts = build("llama"), ragged_prompts(4, 7)
    model.generation_config.eos_token_id = [7, 8]
    model.config.eos_token_id = 9
    completions = generate(engine_of(model), prompts, 40, Sampling(), np.random.default_rng(0))
    ends = {EOS, 7, 8, 9}
    last = set()
    for completion in chain.from_iterable(completions):
        assert not ends.intersection(completion.tokens[:-1].tolist())
        assert (completion.tokens[-1] in ends) == (completion.stop_reason is StopReason.EOS)
        assert completion.stop_reason is StopReason.EOS or len(completion.tokens) == 20
        last.add(int(completion.tokens[-1]))
    assert ends <= last


def test_completions_carry_text_version_and_sampling() -> None:
    engine = engine_of(build("gpt2"))
    assert isinstance(engine, TransformersEngine)
    as_protocol: Engine = engine
    assert as_protocol.version == Version(0, 3)
    ((completion,),) = generate(engine, ragged_prompts(4), 1, Sampling(0.9, 0.95), np.random.default_rng(0))
    assert completion.text == Letters().decode(completion.tokens.tolist())
    assert completion.versions == (Version(0, 3), Version(0, 3))
    assert completion.sampling == Sampling(0.9, 0.95)
    assert completion.tokens.dtype == np.int32
    assert completion.log_behavior is not None
    assert completion.log_behavior.dtype == np.float32


def test_a_stop_string_ends_a_completion_at_the_token_that_completes_it() -> None:
    model, prompts = never_ending(build("llama")), ragged_prompts(4, 7)
    plain = TransformersEngine(model, NoEnd(), EngineSettings(slots=6, max_completion_tokens=20))
    free = list(chain.from_iterable(generate(plain, prompts, 20, Sampling(), np.random.default_rng(0))))
    strings = (free[3].text[4:6], free[8].text[10:13])  # pieces that do occur, the second across several looks
    stopping = TransformersEngine(
        model, NoEnd(), EngineSettings(slots=6, max_completion_tokens=20, stop_strings=strings)
    )
    stopped = list(chain.from_iterable(generate(stopping, prompts, 20, Sampling(), np.random.default_rng(0))))
    seen = 0
    for whole, cut in zip(free, stopped, strict=True):
        found = [(at + len(s), at) for s in strings if (at := whole.text.find(s)) >= 0]
        if not found:
            assert cut.stop_reason is StopReason.LENGTH
            assert cut.tokens.tolist() == whole.tokens.tolist()
            continue
        letters, begin = min(found)
        end = next(n for n in range(21) if len(Letters().decode(whole.tokens[:n].tolist())) == letters)
        assert cut.stop_reason is StopReason.STOP_STRING
        assert cut.text == whole.text[:begin]
        assert cut.tokens.tolist() == whole.tokens[:end].tolist()
        assert cut.log_behavior is not None
        assert len(cut.log_behavior) == end
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("stop_strings", [(), ("c", "de")])
def test_a_look_waits_for_the_device_once_and_once_more_where_rows_have_ended(
    stop_strings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(build("llama"), slots=6, max_completion_tokens=40, stop_strings=stop_strings)
    calls = Counter[str]()
    parts = [(TransformersFlow, "_find_finished_rows"), (TransformersFlow, "_grow"), (DecodingRows, "completions")]
    reads = [(torch.Tensor, name) for name in ("cpu", "item", "tolist", "__bool__", "__int__", "__float__")]

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    for owner, name in [*parts, *reads]:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), name))
    generate(engine, ragged_prompts(4, 7, 5), 20, Sampling(), np.random.default_rng(0))
    looks, ends = calls["_find_finished_rows"], calls["completions"]
    assert calls == {"_find_finished_rows": looks, "_grow": calls["_grow"], "completions": ends, "cpu": looks + ends}
    assert 0 < looks <= calls["_grow"] + ends  # steps, of which there are up to eight between looks, read nothing


def test_an_interruption_returns_what_was_begun_and_leaves_out_the_rest() -> None:
    model, prompts = never_ending(build("llama")), ragged_prompts(4, 7, 5)
    engine = TransformersEngine(model, NoEnd(), EngineSettings(slots=5, max_completion_tokens=30))
    whole = generate(engine, prompts, 3, Sampling(), np.random.default_rng(0))
    asked = 0

    def third_time() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    part = generate(engine, prompts, 3, Sampling(), np.random.default_rng(0), third_time)
    assert [len(group) for group in part] == [3, 2, 0]  # five slots, none of which had finished
    for complete, begun in zip(chain(whole[0], whole[1][:2]), chain.from_iterable(part), strict=True):
        assert begun.stop_reason is StopReason.INTERRUPTED
        assert begun.tokens.tolist() == complete.tokens[: len(begun.tokens)].tolist()
        assert 1 <= len(begun.tokens) < 30
    assert tokens_of(generate(engine, prompts, 3, Sampling(), np.random.default_rng(0))) == tokens_of(whole)


def test_a_prompt_is_handed_out_as_soon_as_its_answers_are_there_and_the_others_go_on_as_they_would() -> None:
    model, prompts = build("llama"), ragged_prompts(3, 9, 1, 9, 12, 3)
    engine = engine_of(model)
    whole = generate(engine, prompts, 4, Sampling(), np.random.default_rng(1))
    handed_out = []
    for i, completions in stream(engine, prompts, 4, Sampling(), np.random.default_rng(1)):
        handed_out.append(i)
        assert tokens_of([completions]) == tokens_of([whole[i]])
        rows = plain_log_probabilities(model, prompts[i], completions[0].tokens, 1.0)  # the model is its own meanwhile
        expected = rows[torch.arange(len(rows)), torch.from_numpy(completions[0].tokens.astype(np.int64))]
        np.testing.assert_allclose(completions[0].log_behavior, expected, atol=1e-4)
    assert sorted(handed_out) == list(range(6))
    assert list(stream(engine, [], 3, Sampling(), np.random.default_rng(0))) == []
    assert list(stream(engine, prompts[:2], 0, Sampling(), np.random.default_rng(0))) == [(0, []), (1, [])]


def test_the_first_prompt_is_handed_out_before_the_last_one_is_read() -> None:
    model, prompts = build("llama"), ragged_prompts(3, 9, 1, 9, 12, 3)
    engine = engine_of(model, slots=4)
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    model.register_forward_hook(count)
    at = [forwards for _ in stream(engine, prompts, 4, Sampling(), np.random.default_rng(1))]
    assert at == sorted(at)
    assert at[0] < at[-1] / 3


def test_what_is_interrupted_is_handed_out_at_the_end() -> None:
    model, prompts = never_ending(build("llama")), ragged_prompts(4, 7, 5)
    engine = TransformersEngine(model, NoEnd(), EngineSettings(slots=5, max_completion_tokens=30))
    answers = iter([False, False, True])
    part = dict(stream(engine, prompts, 3, Sampling(), np.random.default_rng(0), lambda: next(answers)))
    assert {i: len(group) for i, group in part.items()} == {0: 3, 1: 2, 2: 0}
    assert {c.stop_reason for group in part.values() for c in group} == {StopReason.INTERRUPTED}


def test_a_flow_that_was_interrupted_answers_what_is_submitted_afterwards() -> None:
    model, (prompt, *others) = never_ending(build("llama")), ragged_prompts(7, *[4] * 600)
    engine = TransformersEngine(model, NoEnd(), EngineSettings(slots=5, max_completion_tokens=30))
    flow = engine.flow(3, Sampling(temperature=0.0), np.random.default_rng(0))
    flow.submit(others)  # more than are read together
    assert len(flow.next(lambda: True, until_needed=False)) == 600
    assert flow.prompts_needed > 0
    flow.submit([prompt])
    ((number, found),) = flow.next(until_needed=False)
    assert number == 600
    assert tokens_of([found]) == tokens_of(generate(engine, [prompt], 3, flow.sampling, flow.rng))


def test_length_ends_at_the_limit_or_at_the_models_last_position() -> None:
    model = never_ending(build("gpt2"))  # 64 positions
    engine = TransformersEngine(model, NoEnd(), EngineSettings(slots=3, max_completion_tokens=20))
    completions = generate(engine, ragged_prompts(63, 10, 50), 2, Sampling(), np.random.default_rng(0))
    assert [len(t) for t in tokens_of(completions)] == [1, 1, 20, 20, 14, 14]
    assert {c.stop_reason for c in chain.from_iterable(completions)} == {StopReason.LENGTH}


def test_no_prompts_or_no_samples_give_no_completions() -> None:
    engine = engine_of(build("llama"))
    assert generate(engine, [], 3, Sampling(), np.random.default_rng(0)) == []
    assert generate(engine, ragged_prompts(3, 4), 0, Sampling(), np.random.default_rng(0)) == [[], []]


def test_loading_weights_in_place_gives_the_new_models_completions() -> None:
    old, new, prompts = build("llama", seed=0), build("llama", seed=1), ragged_prompts(4, 7)
    engine = engine_of(old)
    before = tokens_of(generate(engine, prompts, 5, Sampling(), np.random.default_rng(0)))
    address = old.model.embed_tokens.weight.data_ptr()
    engine.load({name: p.detach() for name, p in new.named_parameters()}, Version(1, 8))
    after = generate(engine, prompts, 5, Sampling(), np.random.default_rng(0))
    assert old.model.embed_tokens.weight.data_ptr() == address
    assert tokens_of(after) != before
    assert tokens_of(after) == tokens_of(generate(engine_of(new), prompts, 5, Sampling(), np.random.default_rng(0)))
    assert engine.version == after[0][0].versions[0] == Version(1, 8)


@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight"])
def test_a_tied_weight_may_be_given_under_either_of_its_names(name: str) -> None:
    old, new = build("gpt2", seed=0), build("gpt2", seed=1)
    weights = {n: p.detach() for n, p in new.named_parameters()}
    weights[name] = weights.pop("transformer.wte.weight")
    engine = engine_of(old)
    engine.load(weights, Version(0, 4))
    assert torch.equal(old.transformer.wte.weight, new.transformer.wte.weight)
    assert torch.equal(old.lm_head.weight, new.transformer.wte.weight)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), KeyError, "model.norm.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), KeyError, "extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), ValueError, r"\(3,\), the model's \(32,\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_that_do_not_fit_raise_and_copy_nothing(
    change: Callable[[dict[str, torch.Tensor]], None], error: type[Exception], message: str
) -> None:
    model = build("llama")
    engine = engine_of(model)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = {name: p.detach() + 1 for name, p in model.named_parameters()}
    change(weights)
    with pytest.raises(error, match=message):
        engine.load(weights, Version(0, 4))
    assert engine.version == Version(0, 3)
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())


def test_outside_of_generate_the_model_keeps_its_own_attention() -> None:
    model = build("gemma3")
    engine = engine_of(model)
    assert model.config._attn_implementation == "sdpa"
    generate(engine, ragged_prompts(4), 1, Sampling(), np.random.default_rng(0))
    assert model.config._attn_implementation == "sdpa"

    def fails() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(engine, ragged_prompts(4), 1, Sampling(), np.random.default_rng(0), fails)
    assert model.config._attn_implementation == "sdpa"


def test_weights_that_are_not_finite_raise_and_leave_no_trace() -> None:
    model, prompts = build("llama"), ragged_prompts(4, 7)
    engine = engine_of(model)
    good = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = tokens_of(generate(engine, prompts, 5, Sampling(), np.random.default_rng(0)))
    engine.load(good | {"model.norm.weight": torch.full((32,), torch.nan)}, Version(0, 4))
    with pytest.raises(TbaError, match=r"version 0\.4 give probabilities that are not finite"):
        generate(engine, prompts, 5, Sampling(), np.random.default_rng(0))
    engine.load(good, Version(0, 5))
    assert tokens_of(generate(engine, prompts, 5, Sampling(), np.random.default_rng(0))) == expected


def test_a_prompt_that_is_too_long_or_empty_is_refused_with_its_length() -> None:
    model = build("llama")
    with pytest.raises(UserError, match="9 tokens, and this engine was made for 8"):
        LengthLimits(20, 8, 64).check(ragged_prompts(9)[0])
    with pytest.raises(UserError, match="64 tokens, which leaves no room for an answer in the model's 64 positions"):
        generate(engine_of(model), ragged_prompts(64), 1, Sampling(), np.random.default_rng(0))
    with pytest.raises(UserError, match="no tokens"):
        generate(engine_of(model), [Prompt("t", np.zeros(0, np.int32))], 1, Sampling(), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"stop_strings": ("",)}, "empty"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineSettings(**settings)


def recurrent() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4))


def with_sinks() -> PreTrainedModel:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_local_experts": 2}
    return GptOssForCausalLM(GptOssConfig(**heads, **sizes, vocab_size=VOCABULARY, pad_token_id=None))


def capped_through_sdpa() -> PreTrainedModel:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    return Gemma2ForCausalLM(Gemma2Config(**heads, **sizes, vocab_size=VOCABULARY, attn_implementation="sdpa"))


def looking_ahead() -> PreTrainedModel:
    """A Llama whose layers mix in the mean over all tokens of the pass, which no cache of keys can know."""
    model = build("llama")
    model.model.layers[1].register_forward_hook(lambda _m, _i, out: out + 0.1 * out.mean(1, keepdim=True))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (recurrent, "no plain attention"),
        (with_sinks, "attention sinks"),
        (capped_through_sdpa, "attn_implementation=eager"),
        (looking_ahead, "other probabilities through the slots"),
    ],
)
def test_a_model_that_the_slots_cannot_serve_is_refused(make: Callable[[], PreTrainedModel], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine_of(make())
