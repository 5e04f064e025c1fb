"""Batches in order, one of them ahead, with errors and deadlines passed on, and a clean end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.replay.trajectory_cases import Pile

from tba.clock import ShareClock
from tba.errors import DeadlineExceeded, UserError
from tba.replay.buffer import BufferSettings
from tba.replay.codec import StoredTrajectory
from tba.replay.pacing import Pacing
from tba.replay.replay import Replay, ReplaySettings
from tba.replay.selection import RecencyReward
from tba.runtime.batch_queue import BatchQueue, StopRequested, raise_out_of_data
from tba.types import Trajectory, Version

sys.path.append(str(Path(__file__).parents[1] / "training"))
from toys import groups_of

LONG = 60.0
NOW = Version(0, 0)


class Given(Pile):
    """A source of trajectories in memory, which may fail."""

    def __init__(self, waiting: Sequence[Trajectory] = (), failure: Exception | None = None) -> None:
        super().__init__(waiting)
        self.failure = failure

    def drain_stored(self, limit: int | None = None, until: int | None = None) -> list[StoredTrajectory]:
        if self.failure is not None:
            raise self.failure
        return super().drain_stored(limit, until)


def replay_of(source: Given, max_mean_uses: float = 8.0) -> Replay:
    settings = ReplaySettings(
        selection=RecencyReward(m=1.0),
        pacing=Pacing(warm_up=0, max_mean_uses=max_mean_uses),
        buffer=BufferSettings(deduplicate=False),
    )
    return Replay(source, settings)


def trajectories() -> list[Trajectory]:
    return [t for group in groups_of([4] * 6) for t in group.trajectories]


@pytest.fixture
def queues() -> Iterator[Any]:
    queues_made: list[BatchQueue] = []

    def make(replay: Replay, **changes: Any) -> BatchQueue:
        settings: dict[str, Any] = {"clock": ShareClock(), "stop": lambda: False, "deadline": LONG}
        queues_made.append(BatchQueue(replay, 1, 4, **{**settings, **changes}))
        return queues_made[-1]

    yield make
    for queue in queues_made:
        queue.close()


def used(replay: Replay) -> int:
    return replay.ledger()["trained_total_trajectories"]


def test_the_same_batches_come_in_the_same_order_with_exactly_one_ahead_which_is_given_back(queues: Any) -> None:
    at_hand, ahead = replay_of(Given(trajectories())), replay_of(Given(trajectories()))
    plain, early = queues(at_hand), queues(ahead, prefetch=True)
    for n in range(1, 7):
        batch, prefetched_batch = plain.next(NOW, None), early.next(NOW, None)
        early.wait_for_prefetch()
        assert [t.uid for t in batch.groups[0].trajectories] == [t.uid for t in prefetched_batch.groups[0].trajectories]
        assert (used(at_hand), used(ahead)) == (4 * n, 4 * (n + 1))
    early.close()
    assert used(ahead) == used(at_hand) == 24


def test_what_was_sampled_ahead_of_another_reference_is_given_back_and_sampled_anew(queues: Any) -> None:
    source = Given(trajectories())
    replay = replay_of(source)
    queue = queues(replay, prefetch=True)
    queue.next(NOW, None)
    queue.wait_for_prefetch()
    later = Version(0, 5)
    replay.reference = later  # nothing of it is there: the next batch waits for what is scored under it
    source.waiting = [Trajectory(**{**_fields(t), "uid": f"{i:032x}", "reference": later}) for i, t in _numbered()]
    fetched = queue.next(later, None)
    assert {t.reference for t in fetched.groups[0].trajectories} == {later}
    queue.wait_for_prefetch()
    assert used(replay) == 4 + 4 + 4  # the first, this one and the one ahead; what was given back does not count


def _fields(t: Trajectory) -> dict[str, Any]:
    return {name: getattr(t, name) for name in t.__dataclass_fields__}


def _numbered() -> Iterator[tuple[int, Trajectory]]:
    return ((1000 + i, t) for i, t in enumerate(trajectories()))


@pytest.mark.parametrize("ahead", [False, True])
def test_what_replay_raises_is_raised_to_the_caller(queues: Any, ahead: bool) -> None:
    queue = queues(replay_of(Given(failure=TimeoutError("the journal's own"))), prefetch=ahead)
    with pytest.raises(TimeoutError, match="the journal's own"):
        queue.next(NOW, None)


@pytest.mark.parametrize("ahead", [False, True])
def test_where_nobody_brings_more_a_sentence_says_so(queues: Any, ahead: bool) -> None:
    with pytest.raises(UserError, match="no further batch to learn from"):
        queues(replay_of(Given()), prefetch=ahead, fill=raise_out_of_data).next(NOW, None)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_wait_ends_when_it_is_told_to_stop_or_at_its_deadline_with_the_reason(queues: Any, ahead: bool) -> None:
    with pytest.raises(StopRequested):
        queues(replay_of(Given()), prefetch=ahead, stop=lambda: True).next(NOW, None)
    with pytest.raises(DeadlineExceeded, match=r"waited 0.01 s for a batch \(empty\): look at logs/searcher"):
        queues(replay_of(Given()), prefetch=ahead, deadline=0.01).next(NOW, None)


def test_a_wait_is_on_the_clock_as_paced_where_reuse_is_what_holds_it(queues: Any) -> None:
    clock = ShareClock()
    queue = queues(replay_of(Given(trajectories()), max_mean_uses=0.1), prefetch=True, clock=clock, deadline=0.2)
    with pytest.raises(DeadlineExceeded, match=r"\(paced\).*max-mean-uses"):
        queue.next(NOW, None)
    assert clock.seconds()["paced"] > 0


def test_closing_ends_a_wait(queues: Any) -> None:
    replay = replay_of(Given(trajectories()), max_mean_uses=0.25)
    queue = queues(replay, prefetch=True)
    queue.next(NOW, None)  # the one ahead is held by the limit on reuse
    queue.close()
    assert queue.prefetched_batch is None
    assert used(replay) == 4
