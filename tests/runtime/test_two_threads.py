"""What two threads of one process use at once, each in the order that went wrong: an event holds one of them where the
system might.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import made
from tests.runtime.cluster.test_exchange import Direct
from tests.runtime.test_batch_queue import NOW, Given, trajectories
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from engines.engine_families import Letters, build, ragged_prompts
from tba import grading, templates
from tba.apps.red_team.toxicity import Toxicity
from tba.clock import ShareClock
from tba.engines.transformers import EngineSettings, TransformersEngine
from tba.errors import DeadlineExceeded
from tba.generation import generate
from tba.grading import Grade, Grader
from tba.policy.loading import pretrained
from tba.protocols import Manifest
from tba.replay.buffer import BufferSettings
from tba.replay.journal import JournalWriter
from tba.replay.pacing import Pacing
from tba.replay.replay import Replay, ReplaySettings
from tba.replay.selection import RecencyReward
from tba.rewards.functions import FunctionReward
from tba.runtime.batch_queue import BatchQueue
from tba.runtime.cluster.gateway import Exchange
from tba.runtime.cluster.remote import RemoteWeights
from tba.runtime.searcher_loop import start_searching
from tba.runtime.trainer_loop import start_training
from tba.serving.engine import Mailbox, SeatRequest
from tba.types import Completion, Prompt, Sampling, StopReason, Version
from tba.weights.directory import PublishSettings, WeightDirectory

LONG = 60.0  # seconds for what happens at once


def answer(text: str) -> Completion:
    return Completion(np.array([1], np.int32), text, StopReason.EOS, (Version(), Version()))


def prompt(token: int) -> Prompt:
    return Prompt("sums", np.array([token], np.int32), f"text {token}")


def graded(grader: Grader, text: str) -> Grade:
    finished: list[Grade] = []
    grader.submit([(prompt(1), [answer(text)])], finished)
    limit = time.monotonic() + LONG
    while not finished:
        assert time.monotonic() < limit, f"{text!r} is not graded"
        grader.wait(0.05)
    return finished[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_answers_while_another_thread_loads_a_model_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """transformers sets torch's default type while it makes a model, for all threads."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(model, Letters(), EngineSettings(slots=5, max_completion_tokens=20), Version())

    def answers() -> list[Completion]:
        rows = generate(engine, ragged_prompts(3, 5), 2, Sampling(temperature), np.random.default_rng(0))
        return [completion for row in rows for completion in row]

    expected = answers()
    is_loading, may_end, make = threading.Event(), threading.Event(), LlamaForCausalLM.__init__

    def slow(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        is_loading.set()
        may_end.wait(LONG)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", slow)
    thread = threading.Thread(target=pretrained, args=(AutoModelForCausalLM, tmp_path, torch.bfloat16))
    thread.start()
    try:
        assert is_loading.wait(LONG)
        completions = answers()
    finally:
        may_end.set()
        thread.join(LONG)
    for completion, right in zip(completions, expected, strict=True):
        np.testing.assert_array_equal(completion.tokens, right.tokens)
        np.testing.assert_array_equal(completion.log_behavior, right.log_behavior)


class InProcess:
    seconds = 30.0

    def grade(self, answers: Sequence[Any], part: int | None = None) -> list[float]:
        return [1.0] * len(answers)

    def close(self) -> None: ...


def test_a_window_of_calls_that_becomes_smaller_grades_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "MAX_PROCESSES", 1)
    together = threading.Barrier(4, timeout=LONG)

    def reward(completion: str) -> float:
        if completion == "first":
            together.wait()  # four threads, which then have nothing to do
        else:
            with suppress(ValueError):  # which shows that the reward needs a main thread
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0

    grader = Grader(FunctionReward(reward, concurrency=4), isolate=InProcess)
    grader.judge([(prompt(i), answer("first")) for i in range(4)])
    limit = time.monotonic() + LONG
    while grader._windows[0]._idle_count < 4:
        assert time.monotonic() < limit
    for text in ("uses signals", "the next", "and the one after it"):
        assert graded(grader, text).judgement is not None


class Victim:
    """A victim and a classifier in this process, which count the threads in them."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.entered, self.leave = threading.Event(), threading.Event()

    def start(self) -> Victim:
        return self

    def answers(self, attacks: Sequence[str], count: int) -> list[list[str]]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if "slow" in attacks:
            self.entered.set()
            self.leave.wait(LONG)
        self.inside -= 1
        return [["answer"] * count for _ in attacks]

    def log_toxic(self, pairs: Sequence[Any]) -> list[float]:
        return [-1.0 for _ in pairs]


def test_a_victim_of_this_process_is_asked_by_one_thread_also_after_a_call_has_expired() -> None:
    victim = Victim()
    grader = Grader(Toxicity(victim, victim, count=1), deadline=0.2)
    assert graded(grader, "slow").judgement is None  # given up; its thread goes on
    assert victim.entered.is_set()
    finished: list[Grade] = []
    grader.submit([(prompt(1), [answer("quick")])], finished)
    for _ in range(20):
        grader.wait(0.01)
    victim.leave.set()
    limit = time.monotonic() + LONG
    while not finished:
        assert time.monotonic() < limit
        grader.wait(0.05)
    assert victim.most == 1


class HeldWeights(RemoteWeights):
    """Weights from another node, of which a thread is held once it has set the base that changes are put onto."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    @property
    def _base(self) -> Any:
        return self.__dict__.get("base")

    @_base.setter
    def _base(self, value: Any) -> None:
        self.__dict__["base"] = value
        self.hook()


def test_changes_are_put_onto_their_own_base_though_another_thread_reads_another_version(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    directory = WeightDirectory(run.weights, keep=20, settings=PublishSettings(full_version_every=2))
    trained, expected = torch.randn(40_000, generator=torch.Generator().manual_seed(0)), {}
    for step in range(4):  # 0 and 2 are whole, 1 and 3 are changes of them
        directory.publish({"weight": trained}, Version(0, step), Manifest())
        expected[step], trained = trained, trained.clone()
        trained[step * 9000 : step * 9000 + 50] += 1.0
    exchange = Exchange(run, recipe, lambda piece: piece)
    weights, tensors = HeldWeights(Direct(exchange)), {}
    has_base, may_go_on = threading.Event(), threading.Event()
    first, second = weights.at(Version(0, 1)), weights.at(Version(0, 3))
    thread = threading.Thread(target=lambda: tensors.update({1: first.read()["weight"].clone()}))

    def hold() -> None:
        if threading.current_thread() is thread:
            has_base.set()
            may_go_on.wait(LONG)

    weights.hook = hold
    thread.start()
    assert has_base.wait(LONG)
    tensors[3] = second.read()["weight"].clone()
    may_go_on.set()
    thread.join(LONG)
    for step in (1, 3):
        assert torch.equal(tensors[step], expected[step])
    exchange.close()


def test_the_gateway_closes_all_journals_though_a_guest_calls_meanwhile(tmp_path: Path) -> None:
    recipe, run = made(tmp_path / "run")
    JournalWriter(run.journal(recipe), "x").close()
    exchange = Exchange(run, recipe, lambda piece: piece)
    exchange.journal("searcher-0", "rows")
    is_closing, may_close, writer = threading.Event(), threading.Event(), exchange._writers["searcher-0"]
    close = writer.close

    def slow_close() -> None:
        is_closing.set()
        may_close.wait(LONG)
        close()

    writer.close = slow_close
    errors = errors_of(exchange.close)
    assert is_closing.wait(LONG)
    exchange.journal("searcher-7", "rows")
    may_close.set()
    assert errors() == []


def errors_of(action: Callable[[], object]) -> Callable[[], list[Exception]]:
    """Starts it in a thread; returns what waits for its end and gives the errors that it raised."""
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - is returned
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()

    def ended() -> list[Exception]:
        thread.join(LONG)
        return errors

    return ended


def test_a_trainer_ends_well_though_answers_to_another_prompt_come_in_its_last_moment(tmp_path: Path) -> None:
    quick = (
        *("--evaluation.problems", "1", "--replay.pacing.warm-up", "16", "--group-size", "8"),
        *("--groups-per-step", "2", "--replay.pacing.max-mean-uses", "1", "--steps", "4"),
        "--replay.buffer.no-deduplicate",
    )
    recipe, run = made(tmp_path / "run", *quick)
    search = start_searching(recipe, run, 0)
    train = start_training(recipe, run, stop=lambda: False, prefetch=True)
    search.searcher.round()
    while not train.finished:
        train.step()
    arrived, see = threading.Event(), train.answer_watch.see

    def see_and_tell(answers: Any) -> None:
        see(answers)
        arrived.set()

    class Interrupted(list):
        def __len__(self) -> int:  # the other thread gets its turn now
            if not arrived.is_set() and threading.current_thread() is threading.main_thread():
                search.searcher.round()
                arrived.wait(0.5)
            return super().__len__()

    train.replay._on_arrival = see_and_tell
    assert train.answer_watch.rewards is not None
    values = train.answer_watch.rewards._rewards._values
    values.pop(next(iter(values)))  # a prompt that had no answer for a while
    first = next(iter(values))
    values[first] = Interrupted(values[first])
    try:
        train.finish()
    finally:
        train.close()
        search.close()


def test_only_the_trainers_own_thread_gives_its_signs_of_life() -> None:
    """The trainer's thread hangs while the one that fetches batches finds none."""
    beats: list[str] = []
    hangs, leave, looks = threading.Event(), threading.Event(), threading.Semaphore(0)

    class Endless(Given):
        def drain_stored(self, limit: int | None = None, until: int | None = None) -> list[Any]:
            looks.release()
            return []

    def stop() -> bool:
        beats.append(threading.current_thread().name)
        return False

    def hang() -> None:
        hangs.set()
        leave.wait(LONG)

    selection, buffer = RecencyReward(m=1.0), BufferSettings(deduplicate=False)
    replay = Replay(Endless(trajectories()), ReplaySettings(selection, pacing=Pacing(warm_up=10**6), buffer=buffer))
    queue = BatchQueue(replay, 1, 4, clock=ShareClock(), stop=stop, deadline=1.0, prefetch=True)
    queue.on_wait = hang

    def wait_for_a_batch() -> None:
        threading.current_thread().name = "trainer"
        queue.next(NOW, None)

    errors = errors_of(wait_for_a_batch)
    assert hangs.wait(LONG)
    count = len(beats)
    for _ in range(20):
        assert looks.acquire(timeout=LONG)
    assert set(beats[count:]) <= {"trainer"}
    leave.set()
    assert [type(error) for error in errors()] == [DeadlineExceeded]
    queue.close()


def test_a_request_that_comes_while_the_mailbox_closes_is_refused_once() -> None:
    both_look = threading.Barrier(2)

    class Meeting(Future):
        def done(self) -> bool:
            is_done = super().done()
            with suppress(threading.BrokenBarrierError):
                both_look.wait(0.5)
            return is_done

    mailbox, is_posted, is_closed = Mailbox(), threading.Event(), threading.Event()
    tell, close = mailbox._has_items.set, mailbox._closed.set

    def tell_and_wait() -> None:
        tell()
        is_posted.set()
        is_closed.wait(LONG)

    def close_and_tell() -> None:
        close()
        is_closed.set()

    mailbox._has_items.set = tell_and_wait
    mailbox._closed.set = close_and_tell
    errors = errors_of(lambda: mailbox.post(SeatRequest(None, Meeting())))
    assert is_posted.wait(LONG)
    mailbox.close()
    assert errors() == []


def test_a_template_has_its_limit_though_the_watcher_of_calls_is_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, begins = threading.Event(), threading.Event()

    class Deadlines(dict):
        def __bool__(self) -> bool:
            return len(self) > 0

        def __len__(self) -> int:
            count = super().__len__()
            if count == 0 and threading.current_thread().name == "deadlines":
                ends.set()
                begins.wait(LONG)  # it has seen that there are none, and is still alive
            return count

    def endless() -> None:
        begins.set()
        limit = time.monotonic() + LONG
        while time.monotonic() < limit:
            sum(range(100))

    monkeypatch.setattr(templates, "_DEADLINES", Deadlines())
    templates._call_within(5, lambda: 1)
    assert ends.wait(LONG)
    with pytest.raises(TimeoutError):
        templates._call_within(0.2, endless)
