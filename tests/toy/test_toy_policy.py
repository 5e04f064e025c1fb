"""The enumerable toy: its outcomes, its tables and its policy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tba.batch import collate
from tba.errors import UserError
from tba.types import Prompt, Sampling, Version
from toy.engine import TabularEngine, sample_groups, tabular_prompts
from toy.policy import (
    TabularPolicy,
    TabularReference,
    TabularTask,
    TabularTokenizer,
    distribution,
    ideal,
    total_variation,
)

TASK = TabularTask()


def perturbed(task: TabularTask = TASK, temperature: float = 1.0) -> TabularPolicy:
    policy = TabularPolicy(task, temperature, torch.float64)
    noise = torch.randn(policy.logits_QNV.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    policy.load({name: tensor + 0.5 * noise for name, tensor in policy.weights().items()})
    return policy


def test_the_default_toy_has_21_prefixes_and_85_outcomes_of_up_to_3_tokens() -> None:
    assert (TASK.nodes, TASK.outcomes) == (1 + 4 + 16, 1 + 4 + 16 + 64)
    assert (TASK.tokens(0), TASK.tokens(1), TASK.tokens(20), TASK.tokens(84)) == ([0], [1, 0], [4, 4, 0], [4, 4, 4])


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4))
def test_outcomes_and_completions_are_numbered_one_to_one(symbols: int, length: int) -> None:
    task = TabularTask(symbols=symbols, length=length)
    completions = [tuple(task.tokens(o)) for o in range(task.outcomes)]
    assert [task.outcome(tokens) for tokens in completions] == list(range(task.outcomes))
    assert len(set(completions)) == task.outcomes
    assert all(len(c) <= length and (c[-1] == 0) != (len(c) == length and 0 not in c) for c in completions)


def test_equal_settings_give_equal_tables_and_another_seed_gives_others() -> None:
    again, other = TabularTask(), TabularTask(seed=1)
    np.testing.assert_array_equal(TASK.rewards_QO, again.rewards_QO)
    np.testing.assert_array_equal(TASK.reference_logits_QNV, again.reference_logits_QNV)
    assert np.abs(TASK.rewards_QO - other.rewards_QO).max() > 0.1
    assert again == TASK
    assert TASK.rewards_QO.min() > 0
    np.testing.assert_array_equal(TASK.rewards_QO.max(1), 1.0)  # of each prompt's best answer


def test_training_and_evaluation_share_no_prompt() -> None:
    train, held_out = ([p.prompt for p in TASK.problems(split)] for split in ("train", "eval"))
    assert (train, held_out) == (["a", "b"], ["c", "d"])
    assert [TASK.question(p) for split in ("train", "eval") for p in tabular_prompts(TASK, split)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="not one of the 4"):
        TASK.question(Prompt("tabular", np.array([9], dtype=np.int32), "e"))


def test_the_tokenizer_has_one_token_per_character() -> None:
    tokenizer = TabularTokenizer(4)
    assert tokenizer.encode("ADa$") == [1, 4, 5, 0]
    assert tokenizer.decode([1, 4, 0]) == "AD$"
    assert tokenizer.decode([1, 4, 0], skip_special_tokens=True) == "AD"
    with pytest.raises(ValueError, match="substring not found"):
        tokenizer.encode("E")


def test_a_tabular_task_that_cannot_be_written_in_letters_is_refused() -> None:
    with pytest.raises(UserError, match="14 prompts"):
        TabularTask(prompts=14)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_the_distribution_is_what_evaluate_says_of_every_outcome(temperature: float) -> None:
    """Each outcome in turn, by the policy's own forward; padding and EOS included."""
    policy, task = perturbed(temperature=temperature), TASK
    exact = distribution(policy)
    torch.testing.assert_close(exact.sum(1), torch.ones(4, dtype=torch.float64))
    groups = sample_groups(task, tabular_prompts(task), 400, Sampling(3.0), np.random.default_rng(0))
    batch = collate(groups)
    log_policy_B = policy.evaluate(batch).log_policy_BT.sum(1)
    outcome_B = torch.tensor([task.outcome(t.completion.tokens) for g in groups for t in g.trajectories])
    assert len(set(outcome_B.tolist())) > 80
    torch.testing.assert_close(log_policy_B.exp(), exact[batch.group_B, outcome_B])


def test_at_version_0_every_log_ratio_to_the_reference_is_zero() -> None:
    for temperature in (0.7, 1.0, 1.5):
        policy, reference = TabularPolicy(TASK, temperature), TabularReference(TASK, temperature)
        groups = sample_groups(
            TASK, tabular_prompts(TASK), 50, Sampling(1.3), np.random.default_rng(0), None, reference
        )
        batch = collate(groups)
        torch.testing.assert_close(policy.evaluate(batch).log_policy_BT, batch.log_reference_BT)


def test_a_later_reference_is_the_policy_of_its_weights() -> None:
    policy = perturbed()
    later = TabularReference(TASK)
    later.load(policy.weights(), Version(0, 50))
    groups = sample_groups(TASK, tabular_prompts(TASK), 20, Sampling(), np.random.default_rng(0), None, later)
    batch = collate(groups)
    assert {g.reference for g in groups} == {Version(0, 50)}
    torch.testing.assert_close(batch.log_reference_BT, policy.evaluate(batch).log_policy_BT.float())


def test_a_policy_can_become_any_distribution() -> None:
    for temperature in (0.7, 1.0, 2.0):
        policy, wanted = TabularPolicy(TASK, temperature, torch.float64), distribution(perturbed())
        policy.become(wanted)
        torch.testing.assert_close(distribution(policy), wanted)


def test_the_ideal_policy_is_the_reference_times_exp_of_reward_over_beta() -> None:
    reference, wanted = distribution(TabularPolicy(TASK, 1.0, torch.float64)), ideal(TASK, 0.25)
    log_tilt = (wanted / reference).log() - torch.from_numpy(TASK.rewards_QO) / 0.25
    torch.testing.assert_close(log_tilt, log_tilt[:, :1].expand_as(log_tilt))  # constant: -log Z
    torch.testing.assert_close(wanted.sum(1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(ideal(TASK, 1e9), reference)


def test_total_variation_is_0_of_equals_and_1_of_disjoint_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.3, 0.7]])
    assert (total_variation(p, p).item(), total_variation(p, q).item()) == (0.0, 1.0)
    assert total_variation(p, torch.tensor([[0.25, 0.25, 0.5, 0.0]])).item() == 0.5


def test_weights_survive_a_safetensors_file_and_load_in_place(tmp_path: Path) -> None:
    policy, other = perturbed(), TabularPolicy(TASK, 1.0, torch.float64)
    save_file(dict(policy.weights()), tmp_path / "w.safetensors")
    before = other.logits_QNV.data_ptr()
    other.load(load_file(tmp_path / "w.safetensors"))
    torch.testing.assert_close(distribution(other), distribution(policy))
    assert other.logits_QNV.data_ptr() == before
    assert other.weights()["prefix.logits"].data_ptr() == before  # a view, to be copied at once


def test_foreign_weights_are_refused_by_name_and_by_shape() -> None:
    for part in (TabularPolicy(TASK).load, lambda w: TabularEngine(TASK).load(w, TabularEngine(TASK).version)):
        with pytest.raises(KeyError, match=r"prefix\.logits"):
            part({"lm_head.weight": torch.zeros(4, 21, 5)})
        with pytest.raises(ValueError, match="has to be"):
            part({"prefix.logits": torch.zeros(4, 21, 6)})
