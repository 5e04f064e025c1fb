"""Children that answer, hang, crash and are orphaned."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tba.errors import PartFailed
from tba.rewards.children import Children

CHILD = """
import json, os, signal, sys
print("ready", flush=True)
for line in sys.stdin:
    number, question = json.loads(line)
    if question == "hang":
        signal.pause()
    if question == "crash":
        os._exit(7)
    print(json.dumps([number, None if question == "give up" else [question, os.getpid()]]), flush=True)
"""
COMMAND = (sys.executable, "-c", CHILD)
PARENT = f"""
import signal, sys
from tba.rewards.children import Children
pool = Children((sys.executable, "-c", {CHILD!r}), 3, 60.0)
print(*{{pid for _, pid in pool.ask([[i] * 1000 for i in range(200)])}}, flush=True)
if sys.argv[1] == "killed":
    signal.pause()
"""


def alive(pid: int) -> bool:
    """Whether a process is there, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], what: str) -> None:
    pause, limit = threading.Event(), time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, f"waited 60 s for {what}"
        pause.wait(0.02)


def test_answers_come_in_the_order_of_the_questions_from_as_many_children_as_were_asked_for() -> None:
    pool = Children(COMMAND, 3, 60.0)
    answers = pool.ask(list(range(300)))
    assert [a[0] for a in answers if a] == list(range(300))
    pids = {a[1] for a in answers if a}
    assert 1 <= len(pids) <= 3
    assert {a[1] for a in pool.ask(["again"] * 9) if a} <= {child.process.pid for child in pool.members}
    assert pool.ask([]) == []
    assert dict(pool.counts) == {"timed_out": 0, "crashed": 0}
    pool.close()
    assert not [pid for pid in pids if alive(pid)]


def test_a_child_that_hangs_or_crashes_costs_its_own_answer_only() -> None:
    pool = Children(COMMAND, 2, 0.5)
    questions = ["a", "hang", "b", "crash", "give up", "hang", "c", "crash", "d"]
    found = pool.ask(questions)
    assert [a[0] if a else None for a in found] == ["a", None, "b", None, None, None, "c", None, "d"]
    assert dict(pool.counts) == {"timed_out": 3, "crashed": 2}
    assert [a[0] for a in pool.ask(["e", "f"]) if a] == ["e", "f"]
    pool.close()


def test_a_child_that_died_between_two_calls_is_replaced_without_losing_an_answer() -> None:
    pool = Children(COMMAND, 1, 60.0)
    ((_, pid),) = pool.ask([1])
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "the child's end")
    ((answer, other),) = pool.ask([2])
    assert (answer, other != pid) == (2, True)
    assert pool.counts["crashed"] == 0
    pool.close()


def test_a_command_that_cannot_start_is_an_error_and_not_an_endless_loop() -> None:
    pool = Children((sys.executable, "-c", "raise SystemExit(3)"), 2, 1.0)
    with pytest.raises(PartFailed, match=r"3 processes of `.*` ended with exit code 3 before they were ready"):
        pool.ask([1, 2, 3, 4])


def test_a_pool_that_is_dropped_ends_its_children() -> None:
    pool = Children(COMMAND, 2, 60.0)
    pids = {pid for _, pid in pool.ask([1, 2, 3])}
    del pool
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("how", ["end", "killed"])
def test_no_child_outlives_its_parent(how: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        if how == "end":
            assert parent.wait(60) == 0
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until(lambda: not [pid for pid in pids if alive(pid)], f"{pids} to end")


def test_several_threads_may_ask_at_once() -> None:
    pool = Children(COMMAND, 2, 60.0)
    found: dict[int, list[object]] = {}

    def ask(n: int) -> None:
        found[n] = [a[0] for a in pool.ask([f"{n}.{i}" for i in range(20)]) if a]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [f"{n}.{i}" for i in range(20)] for n in range(4)}
    pool.close()


@pytest.mark.parametrize(
    "says",
    [
        "print('no JSON', flush=True)",
        "print('[' * 300_000, flush=True)",
        "print('9' * 5_000, flush=True)",
        "os.write(1, b'7' * (3 << 20)); signal.pause()",
        "print(1, 2, 3, sep=chr(10), flush=True); signal.pause()",
        "print(json.dumps([number, None]), json.dumps([number, 'b']), sep=chr(10), flush=True)",
    ],
)
def test_a_child_that_says_what_is_no_answer_is_replaced(says: str) -> None:
    code = CHILD.replace("os._exit(7)", says + "; continue")
    pool = Children((sys.executable, "-c", code), 1, 60.0)
    ((first, pid),) = pool.ask(["a"])
    assert pool.ask(["crash"]) == [None]
    (answer,) = pool.ask(["b"])  # None where what it said twice is read with this question: that costs it, no more
    assert first == "a"
    assert answer is None or (answer[0] == "b" and answer[1] != pid)
    ((last, other),) = pool.ask(["c"])
    assert (last, other != pid) == ("c", True)
    pool.close()


def test_after_a_call_that_raised_nobody_is_given_an_answer_to_its_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Children(COMMAND, 2, 60.0)
    pool.ask(["warm"])

    def full(*_: object, **__: object) -> None:
        raise BlockingIOError("no process can be started")

    with monkeypatch.context() as once:
        once.setattr(subprocess, "Popen", full)
        with pytest.raises(BlockingIOError):
            pool.ask(["hang", "b"])  # the one child is at work on the first
    answers = pool.ask(["x"])
    assert isinstance(answers[0], list)
    assert answers[0][0] == "x"
    pool.close()
