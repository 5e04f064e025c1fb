"""The oracle, at the level of mathematics: where do objectives lead from data of different origins?

A plain loop (no searcher, replay, trainer or runtime) on the enumerable toy: 85 outcomes of up to 3 tokens for each of
two prompts, 16 groups of 8 in a batch, which is made of arrays and equals what the engine's answers collate to. What is
exact: the ideal policy pi* = pi_ref exp(r / beta) / Z, and the distance to it.

Shape legend: Q prompts (questions), N nodes, V next tokens, O outcomes, B rows, T positions, G groups, R growing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tba.batch import Batch, collate
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective
from tba.schedules import Constant, WarmupCosine
from tba.types import Sampling, Version
from tba_lab.tb_forms import lowered
from toy.engine import Table, TabularEngine, drawn, log_behavior, sample_groups, tabular_prompts
from toy.policy import WEIGHT, TabularPolicy, TabularTask, distribution, ideal, total_variation

TASK = TabularTask()
PROMPTS = tabular_prompts(TASK)
TRAINED = slice(0, len(PROMPTS))  # the rows of the training prompts
BETA = 0.25
K, GROUPS = 8, 16  # answers of a group, groups of a batch
UNIFORM = Sampling(temperature=1e6)  # every next token equally likely, whatever the weights
EXACT, LOWERED = TrajectoryBalance(Constant(BETA), off_policy="exact"), lowered(Constant(BETA))
TAPERED, PAPER = replace(EXACT, off_policy="tapered"), replace(EXACT, off_policy="none")
RLOO = Reinforce(Constant(BETA), "leave_one_out", penalised="behavior")

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Source = Callable[[TabularPolicy, int, np.random.Generator], Batch]  # (policy, step, rng) -> a batch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on many threads, by ten times on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Outcomes:
    """Every answer there is, as arrays."""

    token_OT: Integers
    node_OT: Integers  # after which each token comes
    length_O: Integers
    log_reference_QOT: Floats

    @classmethod
    def of(cls, task: TabularTask) -> Outcomes:
        answers = [task.tokens(o) for o in range(task.outcomes)]
        token_OT, node_OT = (np.zeros((task.outcomes, task.length), np.int64) for _ in range(2))
        for o, tokens in enumerate(answers):
            token_OT[o, : len(tokens)] = tokens
            node_OT[o, : len(tokens)] = [task.outcome(tokens[:t]) for t in range(len(tokens))]
        length_O = np.array([len(tokens) for tokens in answers])
        log_QNV = TabularPolicy(task, 1.0, torch.float64).logits_QNV.detach().log_softmax(-1).numpy()
        log_QOT = np.where(np.arange(task.length) < length_O[:, None], log_QNV[:, node_OT, token_OT], 0.0)
        return cls(token_OT, node_OT, length_O, log_QOT.astype(np.float32))


ALL = Outcomes.of(TASK)
ASKED = np.tile(np.arange(len(PROMPTS)), GROUPS // len(PROMPTS))  # the question of each group


def batch_of(question_G: Integers, size_G: Integers, outcome_B: Integers, log_behavior_BT: Floats) -> Batch:
    """What `collate` makes of groups of these answers."""
    group_B = np.repeat(np.arange(len(question_G)), size_G)
    length_B, question_B = ALL.length_O[outcome_B], question_G[group_B]
    width = length_B.max()
    return Batch(
        prompt_GP=torch.from_numpy(question_G[:, None] + TASK.symbols + 1),
        prompt_length_G=torch.ones(len(question_G), dtype=torch.int64),
        completion_BT=torch.from_numpy(ALL.token_OT[outcome_B, :width]),
        length_B=torch.from_numpy(length_B),
        mask_BT=torch.from_numpy(np.arange(width) < length_B[:, None]),
        log_reference_BT=torch.from_numpy(ALL.log_reference_QOT[question_B, outcome_B, :width]),
        reward_B=torch.from_numpy(TASK.rewards_QO[question_B, outcome_B].astype(np.float32)),
        group_B=torch.from_numpy(group_B),
        log_behavior_BT=torch.from_numpy(log_behavior_BT[:, :width]),
        as_sampled_G=torch.ones(len(question_G), dtype=torch.bool),
    )


def answers(
    question_B: Integers, logits: Sequence[Table], sampling: Sampling, rng: np.random.Generator
) -> tuple[Integers, Floats]:
    """One answer to each question: (outcome_B, log_behavior_BT). The logits are of the first token, the second, ..."""
    outcome_B, growing = np.zeros_like(question_B), np.arange(len(question_B))
    log_BT = np.zeros((len(question_B), TASK.length), np.float32)
    for t, logits_QNV in enumerate(logits):
        log_RV = log_behavior(logits_QNV[question_B[growing], outcome_B[growing]], sampling)
        token_R = drawn(np.exp(log_RV), rng)
        log_BT[growing, t] = log_RV[np.arange(len(growing)), token_R]
        growing = growing[token_R > 0]
        outcome_B[growing] = outcome_B[growing] * TASK.symbols + token_R[token_R > 0]
    return outcome_B, log_BT


def sampled(logits: Sequence[Table], sampling: Sampling, rng: np.random.Generator, groups: Integers = ASKED) -> Batch:
    """Whole groups of K."""
    return batch_of(groups, np.full_like(groups, K), *answers(np.repeat(groups, K), logits, sampling, rng))


def on_policy() -> Source:
    """Fresh samples of the policy as it is."""
    return lambda policy, step, rng: sampled([table(policy)] * TASK.length, Sampling(), rng)


def stale() -> Source:
    """Samples of weights that are 10 to 19 updates old: every 10 updates, those from 10 updates ago arrive."""
    past = list[Table]()

    def draw(policy: TabularPolicy, step: int, rng: np.random.Generator) -> Batch:
        past.append(table(policy))
        return sampled([past[max(0, (step - 1) // 10 * 10 - 10)]] * TASK.length, Sampling(), rng)

    return draw


def continued() -> Source:
    """Answers each of which several policies have sampled, one symbol each, which are 10 updates apart: as in a
    searcher that loads weights while it generates.
    """
    past = list[Table]()

    def draw(policy: TabularPolicy, step: int, rng: np.random.Generator) -> Batch:
        past.append(table(policy))
        return sampled([past[max(0, step - 1 - age)] for age in (20, 10, 0)], Sampling(), rng)

    return draw


def reward_prioritised() -> Source:
    """All that was ever sampled, each answer once, drawn by softmax(r / beta) without replacement; any age."""
    log_weight_QO = TASK.rewards_QO[TRAINED] / BETA
    kept_QO = np.zeros(log_weight_QO.shape, np.bool_)
    log_behavior_QOT = np.zeros((*kept_QO.shape, TASK.length), np.float32)
    newest = TASK.reference_logits_QNV

    def draw(policy: TabularPolicy, step: int, rng: np.random.Generator) -> Batch:
        nonlocal newest
        if step % 10 == 1:
            newest = table(policy)
        question_B = np.repeat(ASKED, K // 2)
        outcome_B, log_behavior_BT = answers(question_B, [newest] * TASK.length, Sampling(), rng)
        kept_QO[question_B, outcome_B] = True
        log_behavior_QOT[question_B, outcome_B] = log_behavior_BT
        noisy_GO = np.where(kept_QO, log_weight_QO, -np.inf)[ASKED] + rng.gumbel(size=(len(ASKED), TASK.outcomes))
        best_GK = np.argsort(-noisy_GO)[:, :K]  # as drawn one after the other in proportion to the weights
        group_B, place_B = np.nonzero(np.take_along_axis(noisy_GO, best_GK, 1) > -np.inf)
        question_B, outcome_B = ASKED[group_B], best_GK[group_B, place_B]
        return batch_of(ASKED, np.bincount(group_B), outcome_B, log_behavior_QOT[question_B, outcome_B])

    return draw


def never_on_policy(sampling: Sampling = UNIFORM) -> Source:
    """Samples of the reference policy under these settings, for ever: no weights ever arrive."""
    return lambda policy, step, rng: sampled([TASK.reference_logits_QNV] * TASK.length, sampling, rng)


def cut_short() -> Source:
    """Stale groups, a quarter of which a kill cut short while they were graded: they lack their 3 best answers, since
    good answers took longest, and are marked as a resume marks them (`Journal.resume`).
    """
    past = list[Table]()

    def draw(policy: TabularPolicy, step: int, rng: np.random.Generator) -> Batch:
        past.append(table(policy))
        question_B = np.repeat(ASKED, K)
        outcome_B, log_BT = answers(question_B, [past[max(0, step - 11)]] * TASK.length, Sampling(), rng)
        reward_GK = TASK.rewards_QO[question_B, outcome_B].reshape(-1, K) + 1e-9 * rng.random((len(ASKED), K))
        cut_G = rng.random(len(ASKED)) < 0.25
        there_GK = np.where(cut_G[:, None], reward_GK.argsort(1).argsort(1) < K - 3, True)
        there_B = there_GK.reshape(-1)
        batch = batch_of(ASKED, there_GK.sum(1), outcome_B[there_B], log_BT[there_B])
        return replace(batch, as_sampled_G=torch.from_numpy(~cut_G))

    return draw


def table(policy: TabularPolicy) -> Table:
    """A copy of its logits."""
    return policy.logits_QNV.detach().numpy().astype(np.float64)


def train(
    objective: Objective, source: Source, seed: int = 0, steps: int = 250, start: TabularPolicy | None = None
) -> tuple[TabularPolicy, float]:
    """The policy after `steps` of Adam under a cosine, and the least distance to pi* that any prompt ever had."""
    policy, rng, rate = start or TabularPolicy(TASK), np.random.default_rng(seed), WarmupCosine(steps)
    optimizer = torch.optim.Adam(policy.parameters(), fused=True)
    least = 1.0
    for step in range(1, steps + 1):
        batch = source(policy, step, rng)
        loss, _ = objective(policy.evaluate(batch), batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 * rate(step)
        optimizer.step()
        if step % 20 == 0:
            least = min(least, distances(policy).min().item())
    return policy, least


def distances(policy: TabularPolicy) -> Tensor:
    """Total variation to pi*, by training prompt."""
    return total_variation(distribution(policy), ideal(TASK, BETA))[TRAINED]


def test_the_ideal_policy_is_far_from_the_reference_and_larger_than_a_group() -> None:
    assert distances(TabularPolicy(TASK)).min() > 0.4
    assert TASK.outcomes > 10 * K


@pytest.mark.parametrize("sampling", [Sampling(), UNIFORM, Sampling(0.7, top_p=0.7)])
def test_a_batch_is_that_of_judged_answers_of_an_engine_which_loads_weights_while_it_generates(
    sampling: Sampling,
) -> None:
    logits = np.random.default_rng(1).normal(size=(TASK.length, *TASK.reference_logits_QNV.shape))
    engine, newer = TabularEngine(TASK), iter(logits)

    def load() -> bool:
        engine.load({WEIGHT: torch.from_numpy(next(newer))}, Version())
        return False

    asked = ASKED[:8]  # as many as the engine answers at a time
    prompts, rng = [PROMPTS[q] for q in asked], np.random.default_rng(0)
    expected = collate(sample_groups(TASK, prompts, K, sampling, rng, engine, interrupted=load))
    found = sampled(list(logits), sampling, np.random.default_rng(0), asked)
    for f in fields(Batch):
        one, other = getattr(found, f.name), getattr(expected, f.name)
        assert one is other is None or torch.equal(one, other), f.name


@pytest.mark.parametrize("objective", [EXACT, TAPERED, PAPER], ids=["exact", "tapered", "none"])
@pytest.mark.parametrize(
    ("source", "steps"), [(stale, 250), (continued, 250), (reward_prioritised, 400), (never_on_policy, 200)]
)
def test_trajectory_balance_reaches_the_ideal_policy_wherever_the_data_come_from(
    objective: TrajectoryBalance, source: Callable[[], Source], steps: int
) -> None:
    policy, _ = train(objective, source(), steps=steps)
    assert distances(policy).max() <= 0.02


@pytest.mark.parametrize("source", [on_policy, stale, continued, never_on_policy])
def test_pushed_up_by_earlier_batches_it_does_so_from_whatever_policies_have_sampled(
    source: Callable[[], Source],
) -> None:
    run = TrajectoryBalance(Constant(BETA)).start()
    policy, _ = train(run, source(), steps=300)
    assert distances(policy).max() <= 0.02


def test_it_does_so_from_groups_that_a_kill_cut_short_while_they_were_graded() -> None:
    policy, _ = train(TrajectoryBalance(Constant(BETA)).start(), cut_short(), steps=300)
    assert distances(policy).max() <= 0.02


@pytest.mark.parametrize("source", [on_policy, stale, continued, never_on_policy])
def test_with_log_z_low_it_does_so_from_whatever_policies_have_sampled(source: Callable[[], Source]) -> None:
    policy, _ = train(LOWERED, source(), steps=400)
    assert distances(policy).max() <= 0.02


def test_with_log_z_low_it_stays_some_way_towards_data_that_are_selected() -> None:
    """Each answer kept once, drawn by exp(r / beta): no policy has sampled that."""
    policy, _ = train(LOWERED, reward_prioritised(), steps=400)
    assert 0.05 < distances(policy).max() < 0.25


def test_a_policy_gradient_reaches_the_ideal_policy_on_policy() -> None:
    assert distances(train(RLOO, on_policy())[0]).max() <= 0.02


def test_a_policy_gradient_without_correction_does_not_reach_it_from_data_10_updates_old() -> None:
    policy, _ = train(RLOO, stale())
    assert distances(policy).min() > 0.1


@pytest.mark.parametrize("objective", [RLOO, Reinforce(Constant(BETA), "none")])
def test_a_policy_gradient_without_correction_never_comes_near_it_from_uniformly_random_data(
    objective: Reinforce,
) -> None:
    policy, least = train(objective, never_on_policy())
    assert least > 0.2
    assert distances(policy).min() > 0.2


TOP_P = Sampling(1.0, top_p=0.7)


@cache
def reachable_QO() -> Tensor:
    """Bool: the outcomes that sampling the reference with this top-p can ever give."""
    behavior = TabularPolicy(TASK, 1.0, torch.float64)
    with torch.no_grad():
        behavior.logits_QNV.copy_(torch.from_numpy(log_behavior(TASK.reference_logits_QNV, TOP_P)))
    return distribution(behavior)[TRAINED] > 0


def elsewhere() -> TabularPolicy:
    """A policy that does not start at the reference."""
    policy = TabularPolicy(TASK)
    with torch.no_grad():
        policy.logits_QNV.add_(torch.randn(policy.logits_QNV.shape, generator=torch.Generator().manual_seed(5)))
    return policy


def test_with_top_p_it_is_right_among_the_reachable_outcomes_and_their_total_mass_depends_on_the_start() -> None:
    """On the support S zero loss says pi = c pi* with any c: pi(. | S) = pi*(. | S), while pi(S) is not determined."""
    star_QO, inside_QO = ideal(TASK, BETA)[TRAINED], reachable_QO()
    assert all(K < n < TASK.outcomes for n in inside_QO.sum(1).tolist())
    mass_of_support = []
    for start in (TabularPolicy(TASK), elsewhere()):
        policy, _ = train(EXACT, never_on_policy(TOP_P), start=start)
        reached_QO = distribution(policy)[TRAINED]
        conditionals = [p_QO * inside_QO / (p_QO * inside_QO).sum(1, keepdim=True) for p_QO in (reached_QO, star_QO)]
        assert total_variation(*conditionals).max() <= 0.02
        assert distances(policy).min() > 0.1
        mass_of_support.append((reached_QO * inside_QO).sum(1))
    assert (mass_of_support[0] - mass_of_support[1]).abs().max() > 0.1


def test_what_top_p_leaves_open_data_of_full_support_decide_from_any_start() -> None:
    assert distances(elsewhere()).min() > 0.4
    policy, _ = train(EXACT, never_on_policy(), start=elsewhere())
    assert distances(policy).max() <= 0.02
