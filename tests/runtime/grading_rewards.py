"""Rewards that do what a thread does not survive; as a program, what grades by them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tba.errors import DeadlineExceeded, UserError
from tba.protocols import GradingCalls
from tba.runtime.isolated import serve_grading
from tba.types import Completion, Judgement, Prompt


class TooLate(Exception):
    pass


def limited(answer: str) -> float:
    """Grade as math_verify does: with a time limit by a signal, whose errors are taken for a wrong answer."""

    def late(*_: Any) -> None:
        raise TooLate

    try:
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05 if answer == "slow" else 5.0)
        try:
            while answer == "slow":
                time.sleep(1.0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
    except TooLate:
        return 0.25
    except Exception:  # noqa: BLE001 - as they do
        return 0.0
    return 1.0


@dataclass
class Acting:
    """Does what the answer says."""

    calls_made: int = 0

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [self.judgement([self.mark(prompt, completion)]) for prompt, completion in answered]

    def calls(self) -> list[GradingCalls]:
        async def later(answered: Sequence[tuple[Prompt, Completion]]) -> list[float | None]:
            return [None if c.text == "nothing" else len(c.text) / 3 for _, c in answered]

        return [
            GradingCalls("mark", lambda answered: [self.mark(p, c) for p, c in answered], "answer"),
            GradingCalls("later", later, "answer", asynchronous=True),
        ]

    def judgement(self, values: Sequence[Any]) -> Judgement:
        return Judgement(float(values[0]), {"process": float(os.getpid()), "calls": float(self.calls_made)})

    def mark(self, prompt: Prompt, completion: Completion) -> Any:
        self.calls_made += 1
        text = completion.text
        if text in ("limited", "slow"):
            return limited(text)
        if text == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            while True:
                time.sleep(60.0)
        if text == "hang with a child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(prompt.fields["path"], "w") as file:
                file.write(str(child.pid))
            child.wait()
        if text == "exit":
            os._exit(7)
        if text == "sys.exit":
            sys.exit("no more")
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "leave an alarm":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        if text == "print":
            os.write(1, b'["0", {"values": [[9.0]]}]\n\xff\xfe garbage')
            sys.stdout.write("garbage " * 1000)
            sys.stdout.flush()
            assert sys.stdin.read() == ""
        if text == "raise":
            raise ZeroDivisionError("of my own")
        if text == "bad input":
            raise UserError("give another file")
        if text == "late":
            raise DeadlineExceeded("waited for a server")
        if text == "object":
            return object()
        return prompt.fields.get("mark", 0.0)


@dataclass
class Echo:
    """Says in parts what it got, and gives the numbers that it was given."""

    def judge(self, answered: Sequence[tuple[Prompt, Completion]]) -> list[Judgement]:
        return [Judgement(p.fields["reward"], dict(p.fields["parts"])) for p, _ in answered]

    def calls(self) -> list[GradingCalls]:
        return [GradingCalls("texts", lambda answered: [repr(row) + row[0].key for row in answered], "answer")]

    def judgement(self, values: Sequence[Any]) -> Judgement:
        return Judgement(float(values[0]))


REWARDS = {"acting": Acting, "echo": Echo}


def load(name: str) -> Any:
    if name == "unloadable":
        raise ValueError("the file of problems is gone")
    if name == "gone":
        os._exit(5)
    if name == "unmakable":
        return lambda: Acting(1 // 0)
    return REWARDS[name]


if __name__ == "__main__":
    serve_grading(lambda: load(sys.argv[1]), sys.argv[2])
