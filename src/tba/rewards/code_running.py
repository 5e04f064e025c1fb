"""Runs a program for its tests, in the sandbox of this machine, and says what came out of each test.

Invariant: a test that a program has not answered has failed, with a reason, and no program is asked after its deadline.
What comes out is what the program claims; `rewards/code_reward.py` compares.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tba.errors import PartFailed, UserError
from tba.fields import as_declared
from tba.rewards.code_tests import CodeTests, FunctionCall, InputOutput, Statement
from tba.rewards.sandbox import Ending, ProgramFailed, Sandbox, SandboxedProgram
from tba.rewards.sandbox_kernel import Bounds
from tba.rewards.sandbox_values import encode_value
from tba.types import Json

Reason = Literal["", "wrong", "error", "no code", "timeout", "output", "unreadable"]
NOT_COMPILED = 65  # the exit code of a program that does not compile


@dataclass(frozen=True)
@as_declared
class Language:
    """How programs of another language than Python are run. Raises `UserError` for only one of file and commands."""

    name: str = "python"  # as SandboxFusion calls it
    file: str = ""  # the file that the code is written to, such as main.cpp; empty: the language is Python
    commands: tuple[tuple[str, ...], ...] = ()  # run beside that file, as words; the last one is the program

    def __post_init__(self) -> None:
        if bool(self.file) != bool(self.commands):
            raise UserError(
                f"the language {self.name!r} has only one of file and commands: give both, or neither for Python"
            )


@dataclass(frozen=True)
class ProgramLimits:
    """What the program of an answer may take."""

    seconds: float  # of one test, by the clock and of CPU time
    answer_seconds: float  # of all tests
    memory_bytes: int
    language: Language = field(default_factory=Language)

    def bounds(self, cpu_seconds: float) -> Bounds:
        return Bounds(cpu_seconds, self.memory_bytes)


@dataclass(frozen=True)
class ProgramOutcome:
    """What came out of one test: an encoded value, or a text; or why there is none. A statement has neither."""

    value: Json = None
    failure: Reason = ""


class Runner(Protocol):
    """Runs programs."""

    def outcomes(self, code: str, tests: CodeTests) -> Iterator[ProgramOutcome]:
        """Returns the outcome of each test, in order. Raises `PartFailed` where no program can be run, and `UserError`
        for tests that cannot be.
        """


@dataclass(frozen=True)
class LocalRunner:
    """Runs programs in a sandbox of this machine."""

    sandbox: Sandbox
    limits: ProgramLimits

    def outcomes(self, code: str, tests: CodeTests) -> Iterator[ProgramOutcome]:
        """Returns the outcome of each test, in order: all of exchanges are programs of their own; calls and statements
        ask one program, and another one after a question that it did not answer.

        Raises `UserError` for a setup, or an import of a test, that fails before a program is asked anything.
        """
        deadline = time.monotonic() + self.limits.answer_seconds
        exchanges = [test for test in tests.tests if isinstance(test, InputOutput)]
        if self.limits.language.file and not exchanges:
            raise UserError("programs of other languages than Python can only be tested by what they read and write")
        if exchanges:
            for test in exchanges:
                yield self._exchange(code, test, deadline)
            return
        done = 0
        while done < len(tests.tests):
            for outcome in self._conversation(code, tests, done, deadline):
                done += 1
                yield outcome

    def _exchange(self, code: str, test: InputOutput, deadline: float) -> ProgramOutcome:
        """Runs a program on an input, and returns its output."""
        deadline = min(deadline, time.monotonic() + self.limits.seconds)
        language = self.limits.language
        job: dict[str, Json] = {"kind": "script", "code": code, "stdin": test.stdin}
        if language.file:
            job |= {"kind": "commands", "file": language.file, "commands": language.commands}
        bounds = self.limits.bounds(self.limits.seconds)
        try:
            program = self.sandbox.start(job, bounds, deadline, has_output=True)
        except ProgramFailed as error:
            return ProgramOutcome(failure="error" if error.reason == "ended" else error.reason)
        try:
            output = program.output(deadline)
        except ProgramFailed as error:
            program.end()
            return ProgramOutcome(failure="output" if error.reason == "output" else "timeout")
        ending = program.end(wait=max(1e-3, deadline - time.monotonic()))
        if ending.cpu_seconds >= bounds.cpu_seconds or time.monotonic() >= deadline:
            return ProgramOutcome(failure="timeout")
        if ending.status:
            return ProgramOutcome(failure="no code" if ending.status == NOT_COMPILED else "error")
        return ProgramOutcome(output.decode(errors="replace"))

    def _conversation(self, code: str, tests: CodeTests, done: int, deadline: float) -> Iterator[ProgramOutcome]:
        """Returns the outcomes of the tests from `done` on, up to the first question that a program does not answer."""
        bounds = self.limits.bounds(self.limits.answer_seconds)
        with _Conversation(self.sandbox, bounds) as conversation:
            try:
                now = time.monotonic()
                program = conversation.start(
                    {"kind": "functions", "code": code}, min(deadline, now + self.limits.seconds)
                )
                loaded = program.ask("run", None, deadline=min(deadline, now + self.limits.seconds))
                if loaded[:1] != ["value"]:
                    failure: Reason = "no code" if loaded[1:2] == ["SyntaxError"] else "error"
                    yield from [ProgramOutcome(failure=failure)] * (len(tests.tests) - done)
                    return
                judge = self._start_judge(conversation, tests, deadline)
                for test in tests.tests[done:]:
                    test_deadline = min(deadline, time.monotonic() + self.limits.seconds)
                    if isinstance(test, FunctionCall):
                        yield _call(program, test, test_deadline)
                    elif isinstance(test, Statement) and judge is not None:
                        yield _state(program, judge, test, test_deadline)
            except ProgramFailed as error:
                yield ProgramOutcome(failure=conversation.failure(error))

    def _start_judge(self, conversation: _Conversation, tests: CodeTests, deadline: float) -> SandboxedProgram | None:
        """Starts the process of statements, and runs what stands before them; None where there are none."""
        if not isinstance(tests.tests[0], Statement):
            return None
        names, modules = tests.names
        judge = conversation.start({"kind": "tests", "names": names, "modules": modules}, deadline)
        if tests.setup and _state(conversation.program, judge, Statement(tests.setup), deadline, is_setup=True).failure:
            raise ProgramFailed("unreadable")
        return judge


class _Conversation:
    """A program that is asked, and perhaps the process of the tests that ask it; both are ended with it."""

    def __init__(self, sandbox: Sandbox, bounds: Bounds) -> None:
        self._sandbox, self._bounds = sandbox, bounds
        self._programs: list[SandboxedProgram] = []
        self._endings: list[Ending] = []

    def __enter__(self) -> _Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def program(self) -> SandboxedProgram:
        return self._programs[0]

    def start(self, job: Json, deadline: float) -> SandboxedProgram:
        self._programs.append(self._sandbox.start(job, self._bounds, deadline))
        return self._programs[-1]

    def failure(self, error: ProgramFailed) -> Reason:
        """Returns why a test failed in which a program did not reply; a program that has ended may have done so because
        its CPU time was over.
        """
        self._end()
        if error.reason != "ended":
            return error.reason
        used = max((ending.cpu_seconds for ending in self._endings), default=0.0)
        return "timeout" if used >= self._bounds.cpu_seconds else "error"

    def _end(self) -> None:
        failed: PartFailed | None = None
        while self._programs:
            try:
                self._endings.append(self._programs.pop().end())
            except PartFailed as error:
                failed = error
        if failed is not None:
            raise failed


def _call(program: SandboxedProgram, test: FunctionCall, deadline: float) -> ProgramOutcome:
    """Returns the value of a call. Raises `ProgramFailed` where the program does not reply."""
    arguments, keywords = encode_value(list(test.arguments)), encode_value(dict(test.keywords))
    kind, *content = program.ask("call", test.function, arguments, keywords, deadline=deadline) or [None]
    return ProgramOutcome(content[0]) if kind == "value" and content else ProgramOutcome(failure="error")


def _state(
    program: SandboxedProgram, judge: SandboxedProgram, test: Statement, deadline: float, is_setup: bool = False
) -> ProgramOutcome:
    """Runs a statement in the process of the tests, and asks the program what that wants to know.

    Raises `ProgramFailed` where either does not reply, and `UserError` for a failure that cannot be the program's: of
    an import, and of anything in a setup, before the program was asked.
    """
    message = judge.ask(test.source, deadline=deadline)
    has_asked = message[:1] == ["ask"]
    while message[:1] == ["ask"]:
        message = judge.go_on(program.ask(*message[1:], deadline=deadline), deadline)
    if message[:1] == ["passed"]:
        return ProgramOutcome()
    is_import = message[1:2] in (["ImportError"], ["ModuleNotFoundError"])
    if not has_asked and (is_setup or is_import):
        reason = ": ".join(map(str, message[1:3]))
        remedy = 'name the package in `imports`, as in imports=("numpy",)' if is_import else "correct it"
        raise UserError(f"the code of a problem's tests fails whatever the program is ({reason}): {remedy}")
    return ProgramOutcome(failure="wrong" if message[1:2] == ["AssertionError"] else "error")
