"""Episodes of several segments: a row of them against one row for each segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tba.batch import Batch, collate, deal, distinct_rows, micro_batches, pass_tokens
from tba.policy.causal import CausalPolicy, _plain_passes
from tba.policy.packed import pack
from tba.policy.reference import FrozenReference
from tba.types import Completion, Group, Prompt, StopReason, Trajectory, Version, copies_for_reward

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from uniform: attention that is wrong must show
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "full": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=7)),
    "both": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
        )
    ),
    "recurrent": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3)
    ),
}
Segment = tuple[int, int]  # tokens of context, which are not trained, then tokens of the policy
# Rows of two groups; the first segment of a row reads the group's prompt.
PROMPTS = [17, 5]
EPISODES: list[list[list[Segment]]] = [
    [[(0, 9), (12, 7), (20, 4)], [(0, 6)], [(2, 3), (1, 1)]],
    [[(0, 3), (30, 8)], [(1, 4), (9, 5), (15, 11)]],
]


def built(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(3, VOCABULARY, count).astype(np.int32)


def completion_of(segments: Sequence[Segment], rng: np.random.Generator) -> Completion:
    mask = np.concatenate([np.repeat([False, True], segment) for segment in segments])
    begins = np.cumsum([context + sampled for context, sampled in segments])[:-1].astype(np.int32)
    return Completion(
        tokens(rng, len(mask)),
        "",
        StopReason.EOS,
        (Version(), Version()),
        mask=mask,
        begins=begins if len(begins) else None,
    )


def group_of(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    return Group.of(
        [
            Trajectory(f"{prompt.key}-{i}", prompt, c, float(i), np.zeros(len(c.tokens), np.float32), Version())
            for i, c in enumerate(completions)
        ]
    )


def episodes(prompts: Sequence[int], segments: Sequence[Sequence[Sequence[Segment]]]) -> list[Group]:
    """Returns groups of episodes with these lengths of prompts and segments, of random tokens."""
    rng = np.random.default_rng(0)
    return [
        group_of(Prompt("random", tokens(rng, length)), [completion_of(row, rng) for row in rows])
        for length, rows in zip(prompts, segments, strict=True)
    ]


def one_row_each(groups: Sequence[Group]) -> tuple[list[Group], list[tuple[int, int, int]]]:
    """Returns a group for each segment, and (the episode's row, begin, end) of its tokens. A later segment's first
    token is its prompt.
    """
    rows, places, episode = [], [], 0
    for group in groups:
        for t in group.trajectories:
            c = t.completion
            assert c.mask is not None
            for begin, end in c.segments:
                prompt = Prompt("first", c.tokens[begin : begin + 1]) if begin else group.prompt
                begin += begin > 0
                part = Completion(c.tokens[begin:end], "", StopReason.EOS, c.versions, mask=c.mask[begin:end])
                rows.append(group_of(prompt, [part]))
                places.append((episode, begin, end))
            episode += 1
    return rows, places


@pytest.mark.parametrize(
    ("name", "share_prompt"),
    [("full", True), ("window", True), ("both", True), ("full", False), ("both", False), ("recurrent", False)],
)
def test_an_episode_has_the_log_probabilities_and_gradients_of_one_row_for_each_segment(
    name: str, share_prompt: bool
) -> None:
    groups = episodes(PROMPTS, EPISODES)
    batch, model = collate(groups), built(name)
    policy = CausalPolicy(model, 0.7, share_prompt)
    assert policy.share_prompt == share_prompt
    weight_B = torch.linspace(-1, 1.5, batch.rows)
    log_BT = policy.evaluate(batch).log_policy_BT
    (log_BT.sum(1) * weight_B).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    rows, places = one_row_each(groups)
    plain = CausalPolicy(built(name), 0.7, share_prompt=False)
    log_RT = plain.evaluate(collate(rows)).log_policy_BT
    row_sums = torch.zeros(batch.rows)
    for (row, begin, end), log_T in zip(places, log_RT, strict=True):
        torch.testing.assert_close(log_BT[row, begin:end], log_T[: end - begin], rtol=1e-5, atol=5e-5)  # `test_packed`
        row_sums = row_sums.index_add(0, torch.tensor([row]), log_T.sum()[None])
    assert float(log_RT.detach().min()) < -6  # the comparison is of probabilities that differ
    assert torch.equal(log_BT != 0, batch.mask_BT)
    (row_sums * weight_B).square().sum().backward()
    expected = [p.grad for p in plain.model.parameters() if p.grad is not None]
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for gradient, other in zip(gradients, expected, strict=True):
        assert float((gradient - other).abs().max()) <= 1e-5 * largest


@pytest.mark.parametrize("share_prompt", [True, False])
def test_heads_read_the_prompt_and_the_tokens_that_their_segments_have(share_prompt: bool) -> None:
    """log Z is of the prompt alone; a value is of what stands before its token in its own segment."""
    groups = episodes(PROMPTS, EPISODES)
    rows, places = one_row_each(groups)
    torch.manual_seed(1)
    policy = CausalPolicy(built("full"), share_prompt=share_prompt, heads=("value", "log_z"))
    with torch.no_grad():
        for parameter in policy.heads.parameters():
            parameter.normal_()
        whole, parts = policy.evaluate(collate(groups)), policy.evaluate(collate(rows))
    assert whole.value_BT is not None
    assert parts.value_BT is not None
    for (row, begin, end), value_T in zip(places, parts.value_BT, strict=True):
        torch.testing.assert_close(whole.value_BT[row, begin:end], value_T[: end - begin], rtol=1e-4, atol=1e-4)
    assert whole.log_z_G is not None
    assert parts.log_z_G is not None
    first_rows = [i for i, (row, begin, _) in enumerate(places) if begin == 0 and row in (0, len(EPISODES[0]))]
    torch.testing.assert_close(whole.log_z_G, parts.log_z_G[first_rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share_prompt", [True, False])
def test_rows_that_are_selected_keep_their_segments(share_prompt: bool) -> None:
    batch, policy = collate(episodes(PROMPTS, EPISODES)), CausalPolicy(built("full"), share_prompt=share_prompt)
    with torch.no_grad():
        whole = policy.evaluate(batch).log_policy_BT
        for rows in (torch.tensor([4, 0]), torch.tensor([2, 3, 1]), torch.tensor([1])):
            part = batch.select(rows)
            log_RT = policy.evaluate(part).log_policy_BT
            torch.testing.assert_close(log_RT, whole[rows, : log_RT.shape[1]], rtol=1e-5, atol=1e-5)
    assert batch.select(torch.tensor([1])).segment_start_BL is None
    start_BL = batch.select(torch.tensor([2, 3])).segment_start_BL
    assert start_BL is not None
    assert start_BL.tolist() == [[5], [3]]
    shares = deal(batch, 2, 10**6, share_prompt)
    assert sum(len(batch.select(rows).later_segments()) for rows in shares) == len(batch.later_segments()) == 6


def test_the_reference_scores_what_the_policy_evaluates() -> None:
    groups, model = episodes(PROMPTS, EPISODES), built("full")
    answers = [(g.prompt, [t.completion for t in g.trajectories]) for g in groups]
    with torch.no_grad():
        log_BT = CausalPolicy(model).evaluate(collate(groups)).log_policy_BT
    logs = FrozenReference(model, Version(), tokens_per_pass=60).log_probabilities_of(answers)
    for row, log_T in zip(log_BT, [log_T for of_prompt in logs for log_T in of_prompt], strict=True):
        torch.testing.assert_close(torch.from_numpy(log_T), row[: len(log_T)], rtol=1e-5, atol=1e-5)


def test_answers_of_other_segments_are_distinct() -> None:
    (group,) = episodes([3], [[[(0, 2), (2, 1), (1, 1)]]])
    first = group.trajectories[0].completion
    others = [None, np.array([2], np.int32), np.array([5], np.int32)]
    batch = collate([group_of(group.prompt, [first, *(replace(first, begins=b) for b in others), first])])
    rows, places = distinct_rows(batch)
    assert rows.tolist() == [0, 1, 2, 3]
    assert places.tolist() == [0, 1, 2, 3, 0]


def test_rewards_are_given_copies_of_segments() -> None:
    (group,) = episodes([3], [[[(0, 2), (2, 1)]]])
    completion = group.trajectories[0].completion
    ((_, copy),) = copies_for_reward([(group.prompt, completion)])
    assert copy.begins is not None
    copy.begins[0] = 1
    assert completion.begins is not None
    assert completion.begins.tolist() == [2]


SEGMENTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(SEGMENTS, min_size=1, max_size=4)), min_size=1, max_size=4),
    st.integers(5, 120),
)
def test_passes_run_as_many_tokens_as_are_counted_and_no_more_than_without_segments(
    groups: list[tuple[int, list[list[Segment]]]], limit: int
) -> None:
    batch = collate(episodes([length for length, _ in groups], [rows for _, rows in groups]))
    for share_prompt in (True, False):
        parts = list(micro_batches(batch, limit, share_prompt=share_prompt))
        assert sorted(torch.cat(parts).tolist()) == list(range(batch.rows))
        for rows in parts:
            part = batch.select(rows)
            assert tokens_run(part, share_prompt) == pass_tokens(part, share_prompt)
            assert len(rows) == 1 or pass_tokens(part, share_prompt) <= limit
    for row in range(batch.rows):
        single = batch.select(torch.tensor([row]))
        whole = replace(single, segment_start_BL=None)
        assert {pass_tokens(b, share) for b in (single, whole) for share in (True, False)} == {
            int(single.length_B[0] + single.prompt_length_G[0])
        }


def tokens_run(batch: Batch, share_prompt: bool) -> int:
    """Returns the tokens that go through a model, padding included."""
    if share_prompt:
        return len(pack(batch, torch.device("cpu")).token_N)
    return sum(tokens_RX.numel() for tokens_RX, _ in _plain_passes(batch))
