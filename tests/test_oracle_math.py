"""The oracle, at the level of mathematics: where do objectives lead from data of different origins?

A plain loop (no searcher, replay, trainer or runtime) on the enumerable toy: 85 outcomes of up to 3 tokens for each of
two prompts, groups of 8. What is exact: the ideal policy pi* = pi_ref exp(r / beta) / Z, and the distance to it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, cached_property

import numpy as np
import pytest
import torch
from torch import Tensor

from tba.batch import collate
from tba.objectives.policy_gradient import Reinforce
from tba.objectives.trajectory_balance import TrajectoryBalance
from tba.protocols import Objective, Partner
from tba.schedules import Constant, WarmupCosine
from tba.types import Completion, Group, Sampling, Trajectory, Version
from tba_lab.tb_forms import lowered
from toy.engine import TabularEngine, TabularFlow, log_behavior, sample_groups, tabular_prompts
from toy.policy import WEIGHT, TabularPolicy, TabularTask, distribution, ideal, total_variation

TASK = TabularTask()
PROMPTS = tabular_prompts(TASK)
TRAINED = slice(0, len(PROMPTS))  # the rows of the training prompts
BETA = 0.25
K = 8
UNIFORM = Sampling(temperature=1e6)  # every next token equally likely, whatever the weights
EXACT, LOWERED = TrajectoryBalance(Constant(BETA), off_policy="exact"), lowered(Constant(BETA))
TAPERED, PAPER = replace(EXACT, off_policy="tapered"), replace(EXACT, off_policy="none")
RLOO = Reinforce(Constant(BETA), "leave_one_out", penalised="behavior")

Source = Callable[[TabularPolicy, int, np.random.Generator], list[Group]]  # (policy, step, rng) -> a batch's groups


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on many threads, by ten times on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_policy() -> Source:
    """Fresh samples of the policy as it is."""
    engine = TabularEngine(TASK)

    def draw(policy: TabularPolicy, step: int, rng: np.random.Generator) -> list[Group]:
        engine.load(policy.weights(), Version(0, step - 1))
        return sample_groups(TASK, PROMPTS * 2, K, Sampling(), rng, engine)

    return draw


def stale() -> Source:
    """Samples of weights that are 10 to 19 updates old: every 10 updates, those from 10 updates ago arrive."""
    engine, past = TabularEngine(TASK), list[Tensor]()

    def draw(policy: TabularPolicy, step: int, rng: np.random.Generator) -> list[Group]:
        now = Version(0, step - 1)
        past.append(policy.weights()[WEIGHT].clone())
        if now.step >= 10 and now.step % 10 == 0:
            engine.load({WEIGHT: past[now.step - 10]}, Version(0, now.step - 10))
        groups = sample_groups(TASK, PROMPTS * 2, K, Sampling(), rng, engine)
        assert now.step < 10 or {t.version.lag(now) for g in groups for t in g.trajectories} == {10 + now.step % 10}
        return groups

    return draw


class Continued(TabularEngine):
    """An engine whose answers are begun by weights that are 20 updates old; others that are 10 old, and the newest,
    continue what is there, as in a searcher that loads weights while it generates.
    """

    def __init__(self) -> None:
        super().__init__(TASK)
        self.past = list[Tensor]()

    def flow(
        self, count: int, sampling: Sampling, rng: np.random.Generator, partner: Partner | None = None
    ) -> TabularFlow:
        return ContinuedFlow(self, count, sampling, rng, partner)


class ContinuedFlow(TabularFlow):
    _engine: Continued

    def next(
        self, interrupted: Callable[[], bool] | None = None, until_wanted: bool = True
    ) -> list[tuple[int, list[Completion]]]:
        return super().next(self.between, until_wanted)

    @cached_property
    def between(self) -> Callable[[], bool]:
        engine, now, ages = self._engine, len(self._engine.past) - 1, iter((20, 10, 0))

        def load() -> bool:
            step = max(0, now - next(ages))
            engine.load({WEIGHT: engine.past[step]}, Version(0, step))
            return False

        return load


def continued() -> Source:
    """Answers each of which several policies have sampled, one symbol each, which are 10 updates apart."""
    engine = Continued()

    def draw(policy: TabularPolicy, step: int, rng: np.random.Generator) -> list[Group]:
        engine.past.append(policy.weights()[WEIGHT].clone())
        groups = sample_groups(TASK, PROMPTS * 2, K, Sampling(), rng, engine)
        now, made = Version(0, step - 1), [t.completion.versions for g in groups for t in g.trajectories]
        spans = {(first.lag(now), last.lag(now)) for first, last in made}
        assert step <= 20 or spans <= {(20, 20), (20, 10), (20, 0)}
        return groups

    return draw


def reward_prioritised() -> Source:
    """All that was ever sampled, each answer once, drawn by softmax(r / beta) without replacement; any age."""
    engine, kept = TabularEngine(TASK), {p.key: dict[str, Trajectory]() for p in PROMPTS}

    def draw(policy: TabularPolicy, step: int, rng: np.random.Generator) -> list[Group]:
        if step % 10 == 1:
            engine.load(policy.weights(), Version(0, step - 1))
        for group in sample_groups(TASK, PROMPTS, K, Sampling(), rng, engine):
            kept[group.prompt.key].update({t.completion.digest: t for t in group.trajectories})
        return [_prioritised(list(kept[p.key].values()), rng) for p in PROMPTS * 2]

    return draw


def _prioritised(trajectories: list[Trajectory], rng: np.random.Generator) -> Group:
    weight = np.exp(np.array([t.reward for t in trajectories]) / BETA)
    size = min(K, len(trajectories))
    chosen = rng.choice(len(trajectories), size, replace=False, p=weight / weight.sum())
    return Group.of([trajectories[i] for i in chosen])


def never_on_policy(sampling: Sampling = UNIFORM) -> Source:
    """Samples of the reference policy under these settings, for ever: no weights ever arrive."""
    return lambda policy, step, rng: sample_groups(TASK, PROMPTS * 2, K, sampling, rng)


def train(
    objective: Objective, source: Source, seed: int = 0, steps: int = 600, start: TabularPolicy | None = None
) -> tuple[TabularPolicy, float]:
    """The policy after `steps` of Adam under a cosine, and the least distance to pi* that any prompt ever had."""
    policy, rng, rate = start or TabularPolicy(TASK), np.random.default_rng(seed), WarmupCosine(steps)
    optimizer = torch.optim.Adam(policy.parameters())
    least = 1.0
    for step in range(1, steps + 1):
        batch = collate(source(policy, step, rng))
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


@pytest.mark.parametrize("objective", [EXACT, TAPERED, PAPER], ids=["exact", "tapered", "none"])
@pytest.mark.parametrize(
    ("source", "steps"), [(stale, 600), (continued, 600), (reward_prioritised, 1200), (never_on_policy, 400)]
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
    policy, _ = train(run, source(), steps=800)
    assert distances(policy).max() <= 0.02


@pytest.mark.parametrize("source", [on_policy, stale, continued, never_on_policy])
def test_with_log_z_low_it_does_so_from_whatever_policies_have_sampled(source: Callable[[], Source]) -> None:
    policy, _ = train(LOWERED, source(), steps=800)
    assert distances(policy).max() <= 0.02


def test_with_log_z_low_it_stays_some_way_towards_data_that_are_selected() -> None:
    """Each answer kept once, drawn by exp(r / beta): no policy has sampled that."""
    policy, _ = train(LOWERED, reward_prioritised(), steps=800)
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
