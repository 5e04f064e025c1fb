"""Grading in a process: signals work there, it can be killed, and it says the same as a call here."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grading_rewards import Acting, Echo
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.errors import DeadlineExceeded, PartFailed, UserError
from tba.runtime.answers_json import read_answers, write_answers
from tba.runtime.isolated import Graders, Raised
from tba.signals import watching_signals
from tba.types import Completion, Judgement, Prompt, Sampling, StopReason, Version

PROGRAM = str(Path(__file__).parent / "grading_rewards.py")
LONG = 60.0  # seconds: a call that is to end by itself


def command(name: str) -> list[str]:
    return [sys.executable, PROGRAM, name]


@pytest.fixture(scope="module")
def acting() -> Iterator[Graders]:
    graders = Graders(command("acting"), "the reward Acting")
    yield graders
    graders.close()


@pytest.fixture(params=[True, False], ids=["forked", "alone"])
def either(request: pytest.FixtureRequest, acting: Graders) -> Graders:
    return acting if request.param else Graders(command("acting"), "the reward Acting", forks=False)


def answer(text: str, **fields: Any) -> tuple[Prompt, Completion]:
    prompt = Prompt("sums", np.array([1], np.int32), "70 + 2", fields)
    return prompt, Completion(np.array([1], np.int32), text, StopReason.EOS, (Version(), Version()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], purpose: str) -> None:
    pause, limit = threading.Event(), time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, f"waited 60 s for {purpose}"
        pause.wait(0.02)


def process_of(judgement: Judgement) -> int:
    return int(judgement.parts["process"])


def test_a_reward_that_uses_signals_is_right_in_a_process_and_wrong_and_noticed_in_a_thread(acting: Graders) -> None:
    rows = [answer("limited"), answer("slow"), answer("limited")]
    assert [j.reward for j in Acting().judge(rows)] == [1.0, 0.25, 1.0]  # in this, the main thread

    def in_a_thread() -> None:
        with watching_signals() as watch:
            here.extend(j.reward for j in Acting().judge(rows[:1]))
        here.append(watch.was_tried)
        away.extend(acting.grader(LONG).grade(rows))

    here: list[float | bool] = []
    away: list[Judgement] = []
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(LONG)
    assert here == [0.0, True]
    assert [j.reward for j in away] == [1.0, 0.25, 1.0]


def test_a_call_that_never_ends_is_killed_at_its_limit_and_the_next_one_works(either: Graders) -> None:
    grader = either.grader(0.3)
    (before,) = grader.grade([answer("", mark=0.5)])
    with pytest.raises(
        DeadlineExceeded, match=r"0\.3 s for the reward Acting to grade the answer 'hang' to prompt '70"
    ):
        grader.grade([answer("hang")])
    until(lambda: not alive(process_of(before)), "a process that was killed to end")
    grader.seconds = LONG
    (after,) = grader.grade([answer("", mark=0.5)])
    assert (before.reward, after.reward) == (0.5, 0.5)
    assert process_of(after) != process_of(before)
    grader.close()
    until(lambda: not alive(process_of(after)), "its process to end")


def test_what_a_call_has_started_is_killed_with_it(acting: Graders, tmp_path: Path) -> None:
    path, grader = tmp_path / "pid", acting.grader(LONG)
    grader.grade([answer("")])
    grader.seconds = 2.0
    with pytest.raises(DeadlineExceeded):
        grader.grade([answer("hang with a child", path=str(path))])
    until(lambda: not alive(int(path.read_text())), "the child of a reward to end")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit", r"the reward Acting ended its process \(exit code 7\) while it graded the answer 'exit' to"),
        (
            "crash",
            r"ended its process \(by SIGSEGV\) while it graded the answer 'crash' to prompt '70 \+ 2' of",
        ),
        (
            "raise",
            r"the reward Acting failed: ZeroDivisionError: of my own \(.*grading_rewards.py, line \d+: raise",
        ),
        ("sys.exit", r"the reward Acting failed: SystemExit: no more"),
        ("object", r"must be a real number|float\(\) argument"),
    ],
)
def test_whatever_ends_a_call_is_said_in_a_sentence_and_the_next_one_works(
    either: Graders, text: str, says: str
) -> None:
    grader = either.grader(LONG)
    with pytest.raises(UserError, match=says) as raised:
        grader.grade([answer(text)])
    assert isinstance(raised.value.__cause__, Raised)  # so that it is tried again, as a call here is
    assert "\n" not in str(raised.value)
    assert [j.reward for j in grader.grade([answer("", mark=2.0), answer("print", mark=3.0)])] == [2.0, 3.0]
    grader.close()


def test_errors_of_our_own_keep_their_kind(acting: Graders) -> None:
    grader = acting.grader(LONG)
    with pytest.raises(UserError, match=r"^give another file$") as raised:
        grader.grade([answer("bad input")])
    assert raised.value.__cause__ is None  # bad input is not asked for again
    with pytest.raises(DeadlineExceeded, match=r"^waited for a server$"):
        grader.grade([answer("late")])
    with pytest.raises(UserError, match="is of the type set, which cannot be given to another process"):
        grader.grade([answer("", tests={1, 2})])
    with pytest.raises(UserError, match="a value is of the type object, which"):
        grader.grade([answer("object")], part=0)
    assert grader.grade([]) == []


def test_a_process_keeps_what_the_reward_learns_and_forgets_an_alarm_that_a_call_left(acting: Graders) -> None:
    grader = acting.grader(LONG)
    judgement = grader.grade([answer("leave an alarm")])[0]
    threading.Event().wait(0.1)  # longer than that alarm
    calls = [grader.grade([answer("")])[0] for _ in range(3)]
    assert {process_of(j) for j in calls} == {process_of(judgement)}
    assert [j.parts["calls"] for j in calls] == [2.0, 3.0, 4.0]


def test_parts_are_called_by_their_place_also_those_that_wait(acting: Graders) -> None:
    grader, rows = acting.grader(LONG), [answer("abcd", mark=0.1), answer("nothing", mark=1)]
    assert grader.grade(rows, part=0) == [0.1, 1]
    assert grader.grade(rows, part=1) == [4 / 3, None]


def test_graders_in_several_threads_have_a_process_each_and_all_end_with_their_nursery(acting: Graders) -> None:
    graders = Graders(acting.command)
    pids: list[int] = []

    def grade() -> None:
        grader = graders.grader(LONG)
        pids.extend(process_of(grader.grade([answer("")])[0]) for _ in range(20))
        barrier.wait()

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=grade) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert len(pids) == 80
    assert len(set(pids)) == 4
    grader = graders.grader(LONG)
    last = process_of(grader.grade([answer("")])[0])
    os.kill(graders._nurseries[0].process.pid, signal.SIGKILL)
    until(lambda: not alive(last), "a process to end with its nursery")
    (again,) = grader.grade([answer("")])
    graders.close()
    until(lambda: not alive(process_of(again)), "processes to end when they are closed")


ORPHANS = """
import sys
sys.path.append({folder!r})
from test_isolated import LONG, Graders, answer, command, process_of
graders = [Graders(command("acting"), forks=True), Graders(command("acting"), forks=False)]
busy = [g.grader(LONG) for g in graders]
print(*(process_of(g.grade([answer("")])[0]) for g in busy), flush=True)
import threading
for g in busy:
    threading.Thread(target=g.grade, args=([answer("hang")],), daemon=True).start()
threading.Event().wait(0.2)
print("hanging", flush=True)
threading.Event().wait()
"""


def test_no_process_outlives_one_that_is_killed_while_they_hang() -> None:
    program = ORPHANS.format(folder=str(Path(__file__).parent))
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert parent.stdout.readline() == "hanging\n"
    assert all(map(alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(map(alive, pids)), "orphans to end")


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unloadable", "ValueError: the file of problems is gone"),
        ("unmakable", "cannot run in a process of its own, where it has to: making it failed: ZeroDivisionError"),
        ("gone", r"no process can be started in which the reward runs, as it has to \(exit code 5\)"),
    ],
)
def test_what_keeps_processes_from_starting_is_said_in_a_sentence(name: str, says: str, forks: bool) -> None:
    grader = Graders(command(name), forks=forks).grader(LONG)
    for _ in range(2):
        with pytest.raises(PartFailed, match=says) as raised:
            grader.grade([answer("")])
        assert "\n" not in str(raised.value)
    missing = Graders(["/nowhere/python"], forks=forks).grader(LONG)
    with pytest.raises(PartFailed, match=r"no process can be started .* No such file or directory"):
        missing.grade([answer("")])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dict", "tuple"]), inner)
    ),
    max_leaves=8,
)
FLOAT32 = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4)
VERSIONS = st.builds(Version, st.integers(-9, 9), st.integers(0, 99))


@st.composite
def answers(draw: st.DrawFn) -> tuple[Prompt, Completion]:
    logs = draw(FLOAT32)
    tokens = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(logs), max_size=len(logs))), np.int32)
    prompt = Prompt(
        draw(st.text()),
        np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3)), np.int32),
        draw(st.text()),
        draw(st.dictionaries(st.text(), JSON, max_size=3)),
        draw(st.none() | st.integers()),
        tuple(draw(st.lists(st.text(), max_size=2))),
        draw(st.none() | st.lists(st.dictionaries(st.text(), JSON, max_size=2), max_size=2).map(tuple)),
    )
    mask = draw(st.sampled_from([None, tokens % 2 == 0]))
    context_places = [] if mask is None else [place for place in range(1, len(tokens)) if not mask[place]]
    completion = Completion(
        tokens,
        draw(st.text()),
        draw(st.sampled_from(StopReason)),
        (draw(VERSIONS), draw(VERSIONS)),
        draw(
            st.none() | st.builds(Sampling, temperature=st.floats(0, 2), top_p=st.floats(0.1, 1), top_k=st.integers())
        ),
        draw(st.sampled_from([None, np.array(logs, np.float32)])),
        mask,
        draw(st.none() | st.builds(Judgement, st.floats(allow_nan=False), st.dictionaries(st.text(), st.floats()))),
        np.array(context_places, np.int32) if context_places else None,
    )
    return prompt, completion


def same(a: Any, b: Any) -> bool:
    """Compare with types, and arrays by their bytes; a float is its representation."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in a.__dataclass_fields__)
    return type(a) is type(b) and repr(a) == repr(b)


@given(st.lists(answers(), max_size=3))
@settings(max_examples=60, deadline=None)
def test_answers_arrive_complete_and_exact(rows: list[tuple[Prompt, Completion]]) -> None:
    rows = [*rows, *((p, replace(c, text="another")) for p, c in rows)]  # two to each prompt
    arrived = read_answers(json.loads(json.dumps(write_answers(rows))))
    assert same(arrived, rows)
    assert [(p.key, c.digest) for p, c in arrived] == [(p.key, c.digest) for p, c in rows]
    assert len({id(p) for p, _ in arrived}) == len(rows) // 2


def test_judgements_of_a_process_are_those_of_a_call_here_to_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    numbers = [*rng.normal(size=40).tolist(), 0.1, 1e-310, 5e-324, 1.7976931348623157e308, -0.0, 3, float("inf")]
    rows = [
        answer("\ud800 ü\n\x00", reward=x, parts={f"part {i}": float(np.float32(i / 7)), "third": x / 3})
        for i, x in enumerate(numbers)
    ]
    grader = Graders(command("echo")).grader(LONG)
    assert same(grader.grade(rows), Echo().judge(rows))
    (texts,) = Echo().calls()
    assert grader.grade(rows[:-1], part=0) == texts.grade(rows[:-1])
    (nan,) = grader.grade([answer("", reward=float("nan"), parts={})])
    assert np.isnan(nan.reward)
