"""The vllm engine against the trainer's own log-probabilities and the transformers engine, on a small random model.

`make test-vllm` runs these, in an environment that has vLLM.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from talker import Talker
from test_turn_limits import Limiter

from tba.batch import collate
from tba.engines import vllm_surface
from tba.engines.decoding import DecodingRows, draw
from tba.engines.rules import Rules
from tba.engines.transformers import EngineSettings
from tba.engines.vllm import VllmEngine, VllmSettings
from tba.errors import TbaError, UserError
from tba.generation import generate, stream
from tba.models.huggingface import HuggingFace
from tba.models.serving import find_mismatch
from tba.policy.loading import load_model
from tba.policy.lora import LoraSettings, is_adapter
from tba.protocols import Engine, TurnLimits
from tba.training.tiny_models import ScratchModel, character_tokenizer
from tba.types import Completion, Group, Prompt, Sampling, StopReason, Trajectory, Version

pytestmark = pytest.mark.vllm
ALPHABET = "abcdefghijklmnopqrst"
ROUNDED_CACHE = "fp8"
TOLERANCE = 2e-5  # of a log-probability: float32 on both sides, sums in another order


def saved(path: Path, tied: bool) -> HuggingFace:
    """Two layers of 64, probabilities that depend on the context, prompts of more than a block of the cache."""
    tokenizer = character_tokenizer(ALPHABET)
    sizes = ScratchModel(64, layers=2, heads=2, kv_heads=2, ff_size=96, max_positions=320, tie_embeddings=tied)
    made = sizes.start(tokenizer)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5, generator=generator)
        made.get_output_embeddings().weight[tokenizer.eos_token_id] *= 0.4  # answers of several lengths
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    generation = EngineSettings(engine="vllm", slots=16, max_completion_tokens=24)
    return HuggingFace(path=str(path), device="cpu", dtype="float32", generation=generation)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return saved(tmp_path_factory.mktemp("tied"), True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return saved(tmp_path_factory.mktemp("untied"), False)


Serving = Callable[[HuggingFace], Engine]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """The engine of a model with its own weights: the last one again if it was the same, since a process has one."""
    last: list[tuple[HuggingFace, Engine]] = []

    def of(model: HuggingFace) -> Engine:
        if not last or last[0][0] != model:
            last.clear()
            gc.collect()
            last.append((model, model.engine(Version(0, 3))))
        engine = last[0][1]
        if engine.version != Version(0, 3):
            engine.load(model.policy(1.0).weights(), Version(0, 3))
        return engine

    yield of
    last.clear()
    gc.collect()


@pytest.fixture
def engine(serving: Serving, model: HuggingFace) -> VllmEngine:
    engine = serving(model)
    assert isinstance(engine, VllmEngine)
    return engine


def prompts_of(*lengths: int, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [Prompt("letters", rng.integers(0, len(ALPHABET), n).astype(np.int32)) for n in lengths]


def trained_on(
    model: HuggingFace,
    prompts: list[Prompt],
    answered: list[list[Completion]],
    temperature: float,
    weights: dict[str, torch.Tensor] | None = None,
) -> list[list[np.ndarray]]:
    """What the trainer's policy says of each completion."""
    policy = model.policy(temperature)
    if weights is not None:
        policy.load(weights)
    found = []
    for prompt, row in zip(prompts, answered, strict=True):
        zeros = [np.zeros(len(c.tokens), np.float32) for c in row]
        group = Group.of(
            [Trajectory(str(i), prompt, c, 0.0, z, Version()) for i, (c, z) in enumerate(zip(row, zeros, strict=True))]
        )
        batch = collate([group])
        log_policy_BT = policy.evaluate(batch).log_policy_BT.detach()
        found.append([log_policy_BT[i][batch.mask_BT[i]].numpy() for i in range(len(row))])
    return found


def changed(model: HuggingFace) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: t + 0.1 * t.std() * torch.randn(t.shape, generator=generator)
        for name, t in model.policy(1.0).weights().items()
    }


def farthest(answered: list[list[Completion]], expected: list[list[np.ndarray]]) -> float:
    return max(
        float(np.abs(c.log_behavior - e).max())
        for row, wanted in zip(answered, expected, strict=True)
        for c, e in zip(row, wanted, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_behavior_is_the_trainers_log_policy_at_the_same_temperature(
    engine: Engine, model: HuggingFace, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prompts_of(5, 150, 1, 270, 150)
    answered = generate(engine, prompts, 6, Sampling(temperature), np.random.default_rng(0))
    assert [len(row) for row in answered] == [6] * 5
    far = farthest(answered, trained_on(model, prompts, answered, temperature))
    with capsys.disabled():
        print(f"\na token's log-probability at temperature {temperature}: at most {far:.1g} from the trainer's")
    assert far < TOLERANCE
    assert {c.versions for row in answered for c in row} == {(Version(0, 3), Version(0, 3))}


def test_log_behavior_is_renormalised_over_what_top_p_keeps(engine: Engine, model: HuggingFace) -> None:
    prompts = prompts_of(12, 40)
    answered = generate(engine, prompts, 8, Sampling(1.0, 0.6), np.random.default_rng(0))
    plain, _ = load_model(model.path, "cpu", torch.float32)
    for prompt, row in zip(prompts, answered, strict=True):
        for c in row:
            ids = torch.tensor([*prompt.tokens.tolist(), *c.tokens.tolist()])
            logits_TV = plain(input_ids=ids[None]).logits[0, len(prompt.tokens) - 1 : -1]
            probability_TV = logits_TV.detach().softmax(-1)
            for t, token in enumerate(c.tokens.tolist()):
                best, order = probability_TV[t].sort(descending=True)
                kept = best[(best.cumsum(0) - best) < 0.6]
                assert token in order[: len(kept)].tolist()
                expected = (probability_TV[t, token] / kept.sum()).log().item()
                assert c.log_behavior is not None
                assert abs(c.log_behavior[t] - expected) < 1e-4


def test_log_behavior_is_that_of_the_transformers_engine_with_top_k_min_p_and_a_penalty(
    engine: Engine, model: HuggingFace
) -> None:
    prompts, sampling = prompts_of(12, 40), Sampling(0.8, 0.9, 6, 0.02, 1.4)
    plain, _ = load_model(model.path, "cpu", torch.float32)
    for prompt, row in zip(prompts, generate(engine, prompts, 8, sampling, np.random.default_rng(0)), strict=True):
        for c in row:
            ids = [*prompt.tokens.tolist(), *c.tokens.tolist()]
            logits_TV = plain(input_ids=torch.tensor(ids)[None]).logits[0].detach()
            for t, token in enumerate(c.tokens.tolist()):
                read = ids[: len(prompt.tokens) + t]
                rows = DecodingRows(1, 1, Rules(torch.zeros(logits_TV.shape[1], dtype=torch.bool)))
                rows.remember_tokens([0], [torch.tensor(read)])
                logits_1V = rows._penalise(logits_TV[len(read) - 1 : len(read)], slice(1), sampling)
                drawn, chosen = draw(logits_1V.expand(2000, -1), torch.linspace(0, 1 - 2**-24, 2000), sampling)
                expected = chosen[drawn == token]
                assert len(expected), "a token that is not drawn here"
                assert c.log_behavior is not None
                assert abs(c.log_behavior[t] - expected[0].item()) < 1e-4


def test_weights_replaced_in_place_are_what_it_samples_from_also_behind_a_cached_prompt(
    engine: Engine, model: HuggingFace
) -> None:
    prompts = prompts_of(200, 300)  # whole blocks of each are in the prefix cache after the first call
    before = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    weights = changed(model)
    engine.load(weights, Version(1, 8))
    assert engine.version == Version(1, 8)
    after = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    assert {c.versions for row in after for c in row} == {(Version(1, 8), Version(1, 8))}
    assert farthest(after, trained_on(model, prompts, after, 1.0, weights)) < TOLERANCE
    assert farthest(after, trained_on(model, prompts, after, 1.0)) > 0.05  # the old weights say something else
    assert [c.tokens.tolist() for c in before[0]] != [c.tokens.tolist() for c in after[0]]


def test_weights_of_another_model_are_refused_and_nothing_is_changed(engine: Engine, model: HuggingFace) -> None:
    prompts, weights = prompts_of(9), dict(model.policy(1.0).weights())
    name = next(iter(weights))
    with pytest.raises(KeyError, match="no weight named"):
        engine.load(weights | {"nothing": torch.zeros(1)}, Version(0, 4))
    with pytest.raises(KeyError, match="missing"):
        engine.load({n: t for n, t in weights.items() if n != name}, Version(0, 4))
    with pytest.raises(ValueError, match="shape"):
        engine.load(weights | {name: torch.zeros(2, 2)}, Version(0, 4))
    assert engine.version == Version(0, 3)
    answered = generate(engine, prompts, 3, Sampling(), np.random.default_rng(0))
    assert farthest(answered, trained_on(model, prompts, answered, 1.0)) < TOLERANCE


def test_more_requests_than_slots_give_whole_groups_which_the_seed_decides(engine: Engine) -> None:
    prompts = prompts_of(4, 7, 11)
    first, again, other = (generate(engine, prompts, 20, Sampling(), np.random.default_rng(seed)) for seed in (0, 0, 1))
    tokens = [[[c.tokens.tolist() for c in row] for row in made] for made in (first, again, other)]
    assert [len(row) for row in first] == [20] * 3
    assert tokens[0] == tokens[1] != tokens[2]
    assert all(len({tuple(t) for t in row}) > 10 for row in tokens[0])  # no copies of one answer


def test_each_prompt_is_handed_out_once_with_what_generate_gives(engine: Engine) -> None:
    prompts = prompts_of(4, 7, 11)
    whole = generate(engine, prompts, 20, Sampling(), np.random.default_rng(0))
    parts = list(stream(engine, prompts, 20, Sampling(), np.random.default_rng(0)))
    assert sorted(i for i, _ in parts) == [0, 1, 2]
    assert all([told([c]) for c in row] == [told([c]) for c in whole[i]] for i, row in parts)


def test_first_token_frequencies_are_the_models_probabilities(engine: Engine, model: HuggingFace) -> None:
    (prompt,), n = prompts_of(6), 4000
    (row,) = generate(engine, [prompt], n, Sampling(), np.random.default_rng(0))
    plain, _ = load_model(model.path, "cpu", torch.float32)
    logits_V = plain(input_ids=torch.tensor([prompt.tokens.tolist()])).logits[0, -1]
    probability_V = logits_V.detach().softmax(-1).numpy()
    seen_V = np.bincount([int(c.tokens[0]) for c in row], minlength=len(probability_V)) / n
    spread_V = np.sqrt(probability_V * (1 - probability_V) / n)
    assert (np.abs(seen_V - probability_V) < 5 * spread_V + 1e-9).all()


def test_greedy_completions_and_their_ends_are_the_transformers_engines(engine: Engine, model: HuggingFace) -> None:
    prompts = prompts_of(3, 9, 30, 31, 32, 64, 200)
    ours = generate(engine, prompts, 1, Sampling(0.0), np.random.default_rng(0))
    theirs = generate(of_transformers(model), prompts, 1, Sampling(0.0), np.random.default_rng(0))
    assert [told(row) for row in ours] == [told(row) for row in theirs]
    assert all(c.log_behavior is not None and not c.log_behavior.any() for (c,) in ours)


def test_what_it_samples_ends_with_an_eos_token_or_at_the_longest(engine: Engine, model: HuggingFace) -> None:
    tokenizer = model.tokenizer()
    eos = tokenizer.eos_token_id
    (row,) = generate(engine, prompts_of(8), 200, Sampling(), np.random.default_rng(3))
    assert {c.stop_reason for c in row} == {StopReason.EOS, StopReason.LENGTH}
    for c in row:
        assert eos not in c.tokens[:-1].tolist()
        assert (c.tokens[-1] == eos) == (c.stop_reason is StopReason.EOS)
        assert c.stop_reason is StopReason.EOS or len(c.tokens) == 24
        assert c.text == tokenizer.decode(c.tokens.tolist(), skip_special_tokens=True)


def test_stop_strings_end_a_completion_where_the_transformers_engine_ends_it(
    serving: Serving, model: HuggingFace
) -> None:
    stops = ("a", "f", "kb", "no")
    stopping = replace(model, generation=replace(model.generation, stop_strings=stops))
    prompts = prompts_of(*range(3, 43))
    ours = generate(serving(stopping), prompts, 1, Sampling(0.0), np.random.default_rng(0))
    theirs = generate(of_transformers(stopping), prompts, 1, Sampling(0.0), np.random.default_rng(0))
    assert [told(row) for row in ours] == [told(row) for row in theirs]
    assert sum(c.stop_reason is StopReason.STOP_STRING for (c,) in ours) > 5
    assert not any(stop in c.text for (c,) in ours for stop in stops)


def test_stop_ids_end_a_completion_where_the_transformers_engine_ends_it(serving: Serving, model: HuggingFace) -> None:
    stops = tuple(model.tokenizer().encode("afk", add_special_tokens=False))
    stopping = replace(model, generation=replace(model.generation, stop_strings=stops))
    prompts = prompts_of(*range(3, 43))
    ours = generate(serving(stopping), prompts, 1, Sampling(0.0), np.random.default_rng(0))
    theirs = generate(of_transformers(stopping), prompts, 1, Sampling(0.0), np.random.default_rng(0))
    assert [told(row) for row in ours] == [told(row) for row in theirs]
    assert sum(c.tokens[-1] in stops for (c,) in ours) > 5
    assert not any(stop in c.tokens[:-1] for (c,) in ours for stop in stops)


def test_what_ends_a_turn_in_the_chat_template_ends_an_answer(
    serving: Serving, model: HuggingFace, tmp_path: Path
) -> None:
    shutil.copytree(model.path, tmp_path / "chatting")
    tokenizer = model.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chatting")
    chatting = replace(model, path=str(tmp_path / "chatting"))
    (row,) = generate(serving(chatting), prompts_of(8), 200, Sampling(), np.random.default_rng(3))
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert {int(c.tokens[-1]) for c in row if c.stop_reason is StopReason.EOS} == ends
    assert all(ends.isdisjoint(c.tokens[:-1].tolist()) for c in row)


def test_an_interrupted_call_gives_what_there_was_and_leaves_nothing_behind(engine: Engine, model: HuggingFace) -> None:
    prompts = prompts_of(20, 21, 22, 23)
    answered = generate(engine, prompts, 8, Sampling(), np.random.default_rng(0), asked(times=1))
    begun = [c for row in answered for c in row]
    assert 0 < len(begun) < 32  # 16 slots: some were not started, and are left out
    assert all(c.stop_reason is not StopReason.LENGTH for c in begun)
    cut = [c for c in begun if c.stop_reason is StopReason.INTERRUPTED]
    assert cut
    assert all(1 <= len(c.tokens) < 24 for c in cut)
    kept = [(p, row) for p, row in zip(prompts, answered, strict=True) if row]
    expected = trained_on(model, [p for p, _ in kept], [row for _, row in kept], 1.0)
    assert farthest([row for _, row in kept], expected) < TOLERANCE
    assert generate(engine, prompts, 8, Sampling(), np.random.default_rng(0), lambda: True) == [[], [], [], []]
    whole = generate(engine, prompts, 8, Sampling(), np.random.default_rng(0))
    assert [len(row) for row in whole] == [8] * 4
    assert not any(c.stop_reason is StopReason.INTERRUPTED for row in whole for c in row)


def test_weights_that_are_not_finite_are_told(engine: Engine, model: HuggingFace) -> None:
    weights = {name: torch.full_like(t, torch.nan) for name, t in model.policy(1.0).weights().items()}
    engine.load(weights, Version(0, 4))
    with pytest.raises(TbaError, match=r"version 0\.4"):
        generate(engine, prompts_of(5), 2, Sampling(), np.random.default_rng(0))


def test_a_prompt_that_leaves_no_room_is_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="no room for an answer"):
        generate(engine, prompts_of(320), 1, Sampling(), np.random.default_rng(0))
    (row,) = generate(engine, prompts_of(318), 3, Sampling(), np.random.default_rng(0))
    assert max(len(c.tokens) for c in row) <= 2


def over_a_change(
    model: HuggingFace, prompt: Prompt, c: Completion, weights: dict[str, torch.Tensor], by_old: int
) -> np.ndarray:
    """Log-probabilities of an answer of which the model sampled the first `by_old` tokens, and then the same with
    `weights`, which keeps the keys and values of what it had read before.
    """
    plain, _ = load_model(model.path, "cpu", torch.float32)
    ids = [*prompt.tokens.tolist(), *c.tokens.tolist()][:-1]
    read = min(len(prompt.tokens) + by_old - 1, len(ids))
    with torch.no_grad():
        old = plain(input_ids=torch.tensor([ids[:read]]), use_cache=True)
        logits_TV = old.logits[0, len(prompt.tokens) - 1 :]
        if ids[read:]:
            plain.load_state_dict(weights, strict=False)
            new = plain(input_ids=torch.tensor([ids[read:]]), past_key_values=old.past_key_values)
            logits_TV = torch.cat([logits_TV, new.logits[0]])
    return logits_TV.log_softmax(-1).gather(1, torch.from_numpy(c.tokens).long()[:, None])[:, 0].numpy()


def test_weights_that_come_in_the_middle_sample_the_rest_and_what_was_read_before_is_kept(
    engine: VllmEngine, model: HuggingFace
) -> None:
    """Before the change a token has the old policy's log-probability, after it that of the new weights behind the keys
    and values of the old ones; what begins afterwards has the new policy's, also where the prompt was in the cache.
    """
    weights, prompts, by_old = changed(model), prompts_of(150, 40), 8  # steps between two questions
    asks = asked(times=1, only=True)
    flow = engine.flow(4, Sampling(), np.random.default_rng(0))
    flow.submit(prompts)

    def newer() -> bool:
        if asks():
            engine.load(weights, Version(0, 4))
            flow.submit(prompts)
        return False

    found = {}
    while len(found) < 4:
        found |= dict(flow.next(newer, until_needed=False))
    over = [(p, c) for p, row in zip(prompts, (found[0], found[1]), strict=True) for c in row]
    assert sum(len(c.tokens) > by_old for _, c in over) >= 4
    for prompt, c in over:
        assert c.log_behavior is not None
        expected = over_a_change(model, prompt, c, weights, by_old)
        assert np.abs(c.log_behavior - expected).max() < TOLERANCE
        assert c.versions == (Version(0, 3), Version(0, 4 if len(c.tokens) > by_old else 3))
    later = [found[2], found[3]]
    assert {c.versions for row in later for c in row} == {(Version(0, 4), Version(0, 4))}
    assert farthest(later, trained_on(model, prompts, later, 1.0, weights)) < TOLERANCE


def test_a_version_that_comes_again_finds_nothing_that_others_have_computed_under_its_name(
    engine: VllmEngine, model: HuggingFace
) -> None:
    """As where an older version is evaluated in between: what was growing then kept its keys and values."""
    prompts, own, other = prompts_of(300), dict(model.policy(1.0).weights()), changed(model)
    loads = iter([(other, Version(0, 4)), (own, Version(0, 3)), (other, Version(0, 4)), (own, Version(0, 3))])

    def newer() -> bool:
        if (load := next(loads, None)) is not None:
            engine.load(*load)
        return False

    flow = engine.flow(4, Sampling(), np.random.default_rng(0))
    flow.submit(prompts)
    while not flow.next(newer, until_needed=False):
        pass
    assert engine.version == Version(0, 3 if next(loads, None) is None else 4)
    engine.load(own, Version(0, 3))
    after = generate(engine, prompts, 4, Sampling(), np.random.default_rng(1))
    assert farthest(after, trained_on(model, prompts, after, 1.0)) < TOLERANCE


def flowed(engine: VllmEngine, prompts: list[Prompt], count: int, sampling: Sampling) -> list[list[Completion]]:
    """What a flow answers to which prompts are given as it wants them."""
    flow, left, found = engine.flow(count, sampling, np.random.default_rng(0)), list(prompts), {}
    while len(found) < len(prompts):
        wanted = flow.prompts_needed
        given, left = left[:wanted], left[wanted:]
        flow.submit(given)
        found |= dict(flow.next(until_needed=len(given) == wanted))
    return [found[i] for i in range(len(prompts))]


def test_prompts_that_join_while_others_are_answered_get_what_they_get_together(
    engine: VllmEngine, model: HuggingFace
) -> None:
    prompts = prompts_of(*range(3, 40))
    together = generate(engine, prompts, 2, Sampling(0.0), np.random.default_rng(0))
    assert [told(row) for row in flowed(engine, prompts, 2, Sampling(0.0))] == [told(row) for row in together]
    sampled = flowed(engine, prompts, 3, Sampling(0.7))
    again = generate(engine, prompts, 3, Sampling(0.7), np.random.default_rng(0))
    assert [told(row) for row in sampled] == [told(row) for row in again]  # the seed decides, not when it was asked
    assert farthest(sampled, trained_on(model, prompts, sampled, 0.7)) < TOLERANCE


def test_slots_are_busy_with_answers_of_many_lengths_where_rounds_leave_them_empty(
    serving: Serving, model: HuggingFace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Log-normal lengths, as long as the rest of the model's positions behind a prompt: there is no EOS before."""
    long = replace(model.generation, max_completion_tokens=256, min_completion_tokens=255)
    engine, rng = serving(replace(model, generation=long)), np.random.default_rng(0)
    assert isinstance(engine, VllmEngine)
    lengths = np.clip(np.exp(rng.normal(np.log(30), 0.6, 120)), 4, 250).astype(int)
    prompts, slots, steps = prompts_of(*(320 - lengths).tolist()), engine.settings.slot_count, []
    step = engine._requests.step
    monkeypatch.setattr(engine._requests, "step", lambda: steps.append(engine.growing_count) or step())

    def busy(answered: list[list[Completion]]) -> float:
        made, computed = sum(len(c.tokens) for row in answered for c in row), len(steps)
        steps.clear()
        return made / (computed * slots)

    flow = flowed(engine, prompts, 4, Sampling())
    assert [[len(c.tokens) for c in row] for row in flow] == [[n] * 4 for n in lengths.tolist()]
    assert min(steps[:-260]) == slots  # all of them, until the last prompts have begun
    in_flow = busy(flow)
    rounds = [generate(engine, prompts[i : i + 4], 4, Sampling(), rng) for i in range(0, len(prompts), 4)]
    in_rounds = busy([row for made in rounds for row in made])
    with capsys.disabled():
        print(f"\nslots busy: {in_flow:.1%} as a flow, its end included; {in_rounds:.1%} in rounds of 4 prompts")
    assert in_flow > 0.9 > 0.7 > in_rounds


def test_turns_find_in_the_prefix_cache_what_was_said_and_read_until_the_weights_are_others(
    serving: Serving, model: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serving(often_stopping(model))
    assert isinstance(engine, VllmEngine)
    prompts, partner, seen = prompts_of(270, 281, 290), Talker(most=3, letters=len(ALPHABET) - 2), []
    llm = engine._requests._llm
    step = llm.step

    def watched() -> list[Any]:
        outputs = step()
        seen.extend((o.num_cached_tokens, engine._growing_answers[o.request_id].turns) for o in outputs)
        return outputs

    monkeypatch.setattr(llm, "step", watched)
    flow = engine.flow(4, Sampling(), np.random.default_rng(0), partner)
    flow.submit(prompts[:1])
    found = {}
    while len(found) < 3:
        found |= dict(flow.next(until_needed=False))
        flow.submit(
            prompts[flow.prompts_submitted : flow.prompts_submitted + 1]
        )  # joins when the one before is at its end
    answered = [found[i] for i in range(3)]
    assert {cached for cached, turns in seen if turns > 1} == {256}  # two blocks of 128: all that is whole
    for row, expected in zip(answered, trained_on(model, prompts, answered, 1.0), strict=True):
        for c, wanted in zip(row, expected, strict=True):
            sampled = np.ones(len(c.tokens), bool) if c.mask is None else c.mask
            assert np.abs(c.log_behavior[sampled] - wanted[: sampled.sum()]).max() < TOLERANCE
    seen.clear()
    engine.load(changed(model), Version(0, 4))
    generate(engine, prompts[:1], 1, Sampling(), np.random.default_rng(0))
    assert {cached for cached, _ in seen} == {0}


def often_stopping(model: HuggingFace) -> HuggingFace:
    return replace(model, generation=replace(model.generation, stop_strings=("a", "dc", "f", "k", "n", "q")))


@pytest.mark.parametrize("late", [False, True])
def test_what_is_said_after_an_observation_has_the_trainers_log_probability(
    serving: Serving, model: HuggingFace, late: bool
) -> None:
    engine = serving(often_stopping(model))
    prompts, partner = prompts_of(5, 150, 1, 270, 150), Talker(late=late, letters=len(ALPHABET) - 2)
    found = dict(stream(engine, prompts, 6, Sampling(0.7), np.random.default_rng(0), partner=partner))
    answered = [found[i] for i in range(len(prompts))]
    assert [len(row) for row in answered] == [6] * 5
    for row, expected in zip(answered, trained_on(model, prompts, answered, 0.7), strict=True):
        for c, wanted in zip(row, expected, strict=True):
            assert c.log_behavior is not None
            sampled = np.ones(len(c.tokens), bool) if c.mask is None else c.mask
            assert np.abs(c.log_behavior[sampled] - wanted[: sampled.sum()]).max() < TOLERANCE
            assert not c.log_behavior[~sampled].any()
    for request, said in partner.turns.items():
        c = partner.ends[request]
        heard = [token for text in said for token in partner.answer(text)]
        assert c is answered[request // 6][request % 6]
        assert len(said) <= 1 or c.tokens[~c.mask].tolist() == heard[: c.observed]
    assert sum(len(said) > 1 for said in partner.turns.values()) >= 15
    assert {c.stop_reason for row in answered for c in row} > {StopReason.STOP_STRING, StopReason.LENGTH}
    assert max(len(c.tokens) for row in answered for c in row) == 24


def test_its_conversations_are_the_transformers_engines(serving: Serving, model: HuggingFace) -> None:
    stopping, prompts, told_by = often_stopping(model), prompts_of(*range(3, 23)), []
    for engine in (serving(stopping), of_transformers(stopping)):
        partner = Talker(letters=len(ALPHABET) - 2)
        found = dict(stream(engine, prompts, 2, Sampling(0.0), np.random.default_rng(0), partner=partner))
        masks = {i: [None if c.mask is None else c.mask.tolist() for c in row] for i, row in found.items()}
        told_by.append(({i: told(row) for i, row in found.items()}, masks, partner.turns))
    assert told_by[0] == told_by[1]
    assert sum(len(said) > 1 for said in told_by[0][2].values()) > 5


def test_an_interrupted_conversation_gives_what_there_was_and_leaves_nothing_behind(
    serving: Serving, model: HuggingFace
) -> None:
    engine = serving(often_stopping(model))
    prompts, partner = prompts_of(20, 21, 22, 23), Talker(most=99, late=True, letters=len(ALPHABET) - 2)
    given = dict(stream(engine, prompts, 8, Sampling(), np.random.default_rng(0), asked(times=2), partner=partner))
    begun = [c for row in given.values() for c in row]
    assert sorted(given) == [0, 1, 2, 3]
    assert 0 < len(begun) <= 32
    assert any(c.observed for c in begun)
    assert {c.stop_reason for c in begun} >= {StopReason.INTERRUPTED}
    whole = generate(engine, prompts, 8, Sampling(), np.random.default_rng(0))
    assert [len(row) for row in whole] == [8] * 4


@pytest.mark.parametrize("processes", [1, 2])
def test_one_process_or_two_serve_a_model_without_tied_embeddings(
    serving: Serving, untied: HuggingFace, processes: int
) -> None:
    """Tensor parallel over two CPU processes; their weights go by file."""
    engine = serving(replace(untied, vllm=VllmSettings(tensor_parallel=processes)))
    weights, prompts = changed(untied), prompts_of(30, 150)
    first = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    engine.load(weights, Version(0, 4))
    second = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    assert farthest(first, trained_on(untied, prompts, first, 1.0)) < TOLERANCE
    assert farthest(second, trained_on(untied, prompts, second, 1.0, weights)) < TOLERANCE
    assert farthest(second, trained_on(untied, prompts, second, 1.0)) > 0.05


def test_a_cpu_build_cannot_share_a_model_with_tied_embeddings(model: HuggingFace) -> None:
    with pytest.raises(UserError, match="tied embeddings"):
        replace(model, vllm=VllmSettings(tensor_parallel=2)).engine(Version())


def test_it_passes_the_self_test_by_which_auto_takes_it_and_an_engine_without_updates_does_not(
    engine: VllmEngine, model: HuggingFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe() -> Any:
        return load_model(model.path, "cpu", torch.float32)[0]

    assert find_mismatch(engine, probe(), 250) is None
    assert engine.version == Version(0, 3)
    prompts = prompts_of(40, 200)
    answered = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    assert farthest(answered, trained_on(model, prompts, answered, 1.0)) < TOLERANCE  # its weights are there again
    monkeypatch.setattr(engine, "load", lambda weights, version: None)
    assert "from the policy's after an update" in str(find_mismatch(engine, probe(), 250))


@pytest.mark.parametrize("rank", [0, 4])
def test_auto_tries_it_against_the_policy_and_hands_it_out_with_the_weights_it_began_with(
    model: HuggingFace, untied: HuggingFace, rank: int
) -> None:
    of = replace(untied, lora=LoraSettings(rank)) if rank else model
    engine = of._try_vllm(Version(1, 2), 200)
    assert isinstance(engine, VllmEngine)
    assert engine.version == Version(1, 2)
    prompts = prompts_of(40, 150)
    answered = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    assert farthest(answered, trained_on(of, prompts, answered, 1.0)) < TOLERANCE
    small = replace(of, vllm=VllmSettings(cache_gb=2e-5))
    del engine
    assert "cannot serve the model" in str(small._try_vllm(Version(), 200))


def test_it_has_positions_for_the_longest_prompt_and_answer_and_no_more(model: HuggingFace) -> None:
    engine = model.engine(Version(), longest_prompt=100)
    assert isinstance(engine, VllmEngine)
    assert engine._requests._llm.model_config.max_model_len == 100 + 24
    (row,) = generate(engine, prompts_of(100), 2, Sampling(), np.random.default_rng(0))
    assert len(row) == 2
    with pytest.raises(UserError, match=r"101 tokens, and this engine was made for 100: .* raise --prompts.max-tokens"):
        generate(engine, prompts_of(101), 2, Sampling(), np.random.default_rng(0))


def test_what_vllm_refuses_at_its_start_is_one_sentence(model: HuggingFace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"with a cache of 2e-05 GB \(.*\): set --model.vllm.cache-gb"):
        replace(model, vllm=VllmSettings(cache_gb=2e-5)).engine(Version())

    def lost(arguments: object) -> None:  # as where another process gives memory back while it is measured
        raise AssertionError("Error in memory profiling.\nInitial free memory 70 GiB, current free memory 71 GiB.")

    monkeypatch.setattr("vllm.LLMEngine.from_engine_args", lost)
    with pytest.raises(UserError, match=r"\(Error in memory profiling. Initial free memory 70 GiB, .*\): set"):
        model.engine(Version())


def test_an_older_release_is_refused_and_a_newer_one_is_taken_if_it_passes_the_self_test(
    model: HuggingFace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_surface, "TESTED_RELEASES", ("9.1",))
    with pytest.raises(UserError, match=r"vllm 0\.\d+\.\d is installed, but this engine needs 9\.1 or newer"):
        model.engine(Version())
    monkeypatch.setattr(vllm_surface, "TESTED_RELEASES", ("0.1",))
    assert f"vllm {vllm_surface.installed_version()} is installed, and tests run 0.1" in vllm_surface.untested_warning()
    caplog.set_level("INFO")
    assert isinstance(model.engine(Version()), VllmEngine)
    assert f"vllm {vllm_surface.installed_version()} has passed its self-test" in caplog.text
    monkeypatch.setattr("tba.models.huggingface.find_mismatch", lambda *_: "it says other things")
    with pytest.raises(UserError, match=r"not taken \(it says other things\): pip install 'vllm==0\.\d+"):
        model.engine(Version())


def test_arguments_of_vllm_are_of_its_own_types_and_reach_it(model: HuggingFace) -> None:
    words = ("max_num_batched_tokens=2048", "block-size=64", 'compilation_config={"cudagraph_mode": "NONE"}')
    settings = VllmSettings(arguments=words, max_model_len=200, prefix_caching=False)
    engine = replace(model, vllm=settings).engine(Version(), longest_prompt=190)
    assert isinstance(engine, VllmEngine)
    config = engine._requests._llm.vllm_config
    assert config.scheduler_config.max_num_batched_tokens == 2048
    assert config.cache_config.block_size == 64
    assert not config.cache_config.enable_prefix_caching
    assert config.model_config.max_model_len == 200
    prompts = prompts_of(190)
    (row,) = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    assert max(len(c.tokens) for c in row) <= 10  # the settings allow 24
    assert farthest([row], trained_on(model, prompts, [row], 1.0)) < TOLERANCE
    for word, reason in [
        ("block_size=many", "whole number"),
        ("enable_nothing=1", "has no argument enable_nothing"),
        ("async_scheduling=true", "async_scheduling is not for users"),
        ("trust_remote_code=true", "trust_remote_code is not for users"),
        ("worker_cls=mine.Worker", "worker_cls is not for users"),
        ("compilation_config=3", "an object or a list in JSON"),
        ("block_size", "give name=value"),
    ]:
        with pytest.raises(UserError, match=reason):
            replace(model, vllm=VllmSettings(arguments=(word,))).engine(Version())


def test_rounded_keys_and_values_sample_near_the_policy_also_after_an_update(model: HuggingFace) -> None:
    engine = replace(model, vllm=VllmSettings(kv_cache_dtype=ROUNDED_CACHE)).engine(Version(), longest_prompt=200)
    prompts, weights = prompts_of(40, 150), changed(model)
    engine.load(weights, Version(0, 4))
    answers = generate(engine, prompts, 4, Sampling(), np.random.default_rng(0))
    distance = farthest(answers, trained_on(model, prompts, answers, 1.0, weights))
    assert TOLERANCE < distance < 1.0  # something is rounded, and it is not another model


def test_a_build_for_another_device_is_refused(model: HuggingFace) -> None:
    with pytest.raises(UserError, match="built for cpu"):
        replace(model, device="cuda").engine(Version())


def of_transformers(model: HuggingFace) -> Engine:
    return replace(model, generation=replace(model.generation, engine="transformers")).engine(Version())


def told(row: list[Completion]) -> list[tuple[list[int], str, StopReason]]:
    return [(c.tokens.tolist(), c.text, c.stop_reason) for c in row]


def asked(times: int, only: bool = False) -> Callable[[], bool]:
    """No, `times` times, then yes: from there on, or `only` then."""
    seen = 0

    def ask() -> bool:
        nonlocal seen
        seen += 1
        return seen == times + 1 if only else seen > times

    return ask


def test_adapters_are_merged_on_their_way_into_the_engine(serving: Serving, untied: HuggingFace) -> None:
    """What is loaded is adapters alone; what answers is the model that the trainer has."""
    adapted = replace(untied, lora=LoraSettings(rank=4))
    engine, prompts = serving(adapted), prompts_of(150, 40, 3)
    generator = torch.Generator().manual_seed(3)
    policy = adapted.policy(0.7)
    weights = {name: 0.3 * torch.randn(t.shape, generator=generator) for name, t in policy.weights().items()}
    before = generate(engine, prompts, 3, Sampling(temperature=0), np.random.default_rng(1))
    engine.load(weights, Version(0, 4))
    sampled = generate(engine, prompts, 4, Sampling(temperature=0.7), np.random.default_rng(2))
    # The adapters change each element by about 8 x 0.3 x 0.3 x sqrt(4) = 1.4, ten times what it was: logits, and with
    # them what float32 rounds off, are ten times as large as in the other tests.
    assert farthest(sampled, trained_on(adapted, prompts, sampled, 0.7, weights)) < 10 * TOLERANCE
    assert {c.versions for row in sampled for c in row} == {(Version(0, 4), Version(0, 4))}
    after = generate(engine, prompts, 3, Sampling(temperature=0), np.random.default_rng(1))
    assert [c.tokens.tolist() for c in after[0]] != [c.tokens.tolist() for c in before[0]]
    reference = adapted.reference(0.7, Version())  # the base, whatever the engine was given
    assert isinstance(engine, VllmEngine)
    assert engine._adapter_model is not None
    base, shared = (dict(m.named_parameters()) for m in (engine._adapter_model, reference._policy.model))
    assert {name for name in base if base[name] is shared[name]} == {name for name in base if not is_adapter(name)}
    found = reference.log_probabilities_of(list(zip(prompts, sampled, strict=True)))
    expected = trained_on(untied, prompts, sampled, 0.7)
    for row, other in zip(found, expected, strict=True):
        for one, two in zip(row, other, strict=True):
            np.testing.assert_allclose(one, two, atol=TOLERANCE)
    with pytest.raises(KeyError, match="missing"):
        engine.load(dict(list(weights.items())[1:]), Version(0, 5))
    with pytest.raises(KeyError, match="no weight named"):
        engine.load({**weights, "another": torch.zeros(1)}, Version(0, 5))


def test_a_turn_ends_at_limits_of_its_own_where_cutting_the_whole_one_ends_it(engine: VllmEngine) -> None:
    limits = [TurnLimits(), TurnLimits(4), TurnLimits(None, ("a", "dc", "kb")), TurnLimits(9, ("n", "q"))]
    prompts, letters = prompts_of(*range(3, 23)), len(ALPHABET) - 2
    whole = dict(stream(engine, prompts, 2, Sampling(), np.random.default_rng(0), partner=Talker(1, letters=letters)))
    partner = Limiter(1, letters=letters, limits=limits)
    found = dict(stream(engine, prompts, 2, Sampling(), np.random.default_rng(0), partner=partner))
    reasons = set()
    for request in range(2 * len(prompts)):
        completion, uncut = (row[request // 2][request % 2] for row in (found, whole))
        limit, tokens = limits[request % 4], uncut.tokens.tolist()
        length, _, has_stop = replace(engine.stops, strings=limit.stop_strings).cut(tokens)
        reason = StopReason.STOP_STRING if has_stop else uncut.stop_reason
        if limit.max_tokens is not None and limit.max_tokens < length:
            length, reason = limit.max_tokens, StopReason.LENGTH
        assert (completion.tokens.tolist(), completion.stop_reason) == (tokens[:length], reason)
        for turn in partner.heard.get(request, []):
            assert list(turn.tokens) == tokens[:length]
            np.testing.assert_array_equal(turn.log_behavior, completion.log_behavior)
            assert turn.versions == (Version(0, 3), Version(0, 3))
        reasons.add((limit, reason))
    assert {(limits[1], StopReason.LENGTH), (limits[2], StopReason.STOP_STRING)} < reasons


def test_requests_are_cancelled_in_every_state_and_the_others_go_on(engine: VllmEngine) -> None:
    prompts, letters = prompts_of(*range(3, 23)), len(ALPHABET) - 2
    whole = dict(stream(engine, prompts, 2, Sampling(), np.random.default_rng(0), partner=Talker(letters=letters)))
    partner, cancelled = Talker(late=True, letters=letters), {37, 38, 39}  # these have not begun
    flow = engine.flow(2, Sampling(), np.random.default_rng(0), partner)
    flow.submit(prompts)

    def interrupted() -> bool:
        growing = [answer.request for answer in engine._growing_answers.values()]
        unanswered = [request for _, request, _ in partner.waiting]
        for request in () if len(cancelled) > 8 else (*growing[:1], *unanswered[:1]):
            cancelled.add(request)
            partner.waiting = [item for item in partner.waiting if item[1] != request]
            flow.cancel(request)
        return False

    for request in sorted(cancelled):
        flow.cancel(request)
    found: dict[int, list[Completion]] = {}
    while len(found) < len(prompts):
        found |= dict(flow.next(interrupted, until_needed=False))
    assert found[19] == []
    for request in range(40):
        completion, expected = partner.ends[request], whole[request // 2][request % 2]
        n = len(completion.tokens)
        assert completion.tokens.tolist() == expected.tokens[:n].tolist()
        assert request in cancelled or completion.digest == expected.digest
        assert (completion.stop_reason is StopReason.INTERRUPTED) == (request in cancelled)
