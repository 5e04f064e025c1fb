"""A reward for programs: the code of an answer runs in a sandbox, and its tests are judged outside of it.

Invariant: a program gets inputs and never what is expected. It earns a test only by a value or an output that equals
what is expected; whatever else it does earns nothing. A test that ran out of time is run again, while no other program
of this process runs, before it counts. What has run out of time is never remembered.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Any, Literal

from tba.errors import DeadlineExceeded, PartFailed, UserError
from tba.fields import as_declared
from tba.grading import Grader, pausing_deadline
from tba.protocols import GradingCalls
from tba.rewards.code_running import Language, LocalRunner, ProgramLimits, ProgramOutcome, Reason, Runner
from tba.rewards.code_tests import CodeTests, FunctionCall, InputOutput, extract_code, read_tests
from tba.rewards.sandbox import Sandbox, require_level, strongest_level
from tba.rewards.sandbox_fusion import SandboxFusion
from tba.rewards.sandbox_kernel import Level
from tba.rewards.sandbox_values import Unreadable, canonical, decode_value
from tba.types import Completion, Json, Judgement, Problem, Prompt

Checker = Callable[[Any, Any, Any], bool]
AnsweredPrompt = tuple[Prompt, Completion]
_CACHED_VERDICTS = 1 << 16
_CACHED_TESTS = 256  # problems whose tests are kept as they were read
_PATIENCE = 600.0  # seconds that a program waits for its turn
_PROGRAMS_PER_CORE = 2  # at once: one runs while another's process is made or ended
_BLANKS = re.compile(r"(\s+)")
_NUMBER = re.compile(
    r"[-+]?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII
)  # 007 and 1_000 are other texts than 7, 1000
_TRIED_SETUPS = 8  # different ones of the first problems, before a run
_TRIALS = 3  # of an answer whose sandbox fails


@dataclass(frozen=True)
class CodeVerdict:
    """How the tests of an answer ended."""

    earned: float  # 1 where all tests passed; else their share, by weight
    share: float  # of the tests that passed
    has_no_code: bool = False
    has_failed: bool = False  # raised, was ended or sent what cannot be read, in some test
    has_timed_out: bool = False  # in some test


@dataclass(frozen=True)
@as_declared
class CodeReward:
    """A reward from running an answer's code on tests, isolated from the machine, the judge and all other answers.

    The code is the last block between fences, else the whole answer. Parts of a judgement: `tests_passed`, the share of
    tests; `no_code`, `code_failed` and `code_timed_out`, 1 for an answer without code, one that raised or was ended in
    a test, and one that ran out of time. Raises `UserError` when a field makes no sense.
    """

    tests: str = ""  # the problem's field with the tests, nested as `a.b`; empty: it is known by its name
    score: Literal["all", "share", "weights"] = "all"  # 1 where all tests pass, else 0; the share that passes; or
    # that share by the weights that tests have
    checker: Checker | None = None  # a function (output, expected, input) -> bool in place of equality; it runs in this
    # process on what a program sent, so it must only compare
    level: Literal["namespaces", "landlock"] = "landlock"  # the least isolation to run at; a machine that allows a
    # stronger one uses it
    seconds: float = 6.0  # that one test may take, by the clock and of CPU time
    answer_seconds: float = 30.0  # that all tests of an answer may take; twice as much fits in --run.reward-deadline
    memory_mb: int = 512  # address space of a program, in MiB
    processes: int = 0  # programs at once, of all searchers of a run; 0: two for each processor core
    imports: tuple[str, ...] = ()  # installed packages that programs may import beside the standard library
    language: Language = Language()  # what programs are written in
    sandbox_fusion: str = ""  # URL of a SandboxFusion server that runs them, such as http://127.0.0.1:8080; empty: here

    def __post_init__(self) -> None:
        for name in ("seconds", "answer_seconds", "memory_mb"):
            if not getattr(self, name) > 0:
                raise UserError(f"a code reward has {name} {getattr(self, name)}: it must be above 0")
        if self.processes < 0:
            raise UserError(f"a code reward has processes {self.processes}: give a number of programs, or 0")

    def calls(self) -> list[GradingCalls]:
        """Returns one call for each answer. Raises `UserError` where this machine isolates less than `level` says."""
        _ = self._runner, self._turns, self._cache, self._read_tests  # made here, before threads share them
        return [GradingCalls("the programs' tests", self.grade, "answer", self._concurrency, copies=False)]

    def judge(self, answered: Sequence[AnsweredPrompt]) -> list[Judgement]:
        """Returns one judgement for each, in order, several programs at once. Raises what `grade` raises."""
        return Grader(self, _PATIENCE, retries=0).judge(answered)

    def grade(self, answered: Sequence[AnsweredPrompt]) -> list[CodeVerdict]:
        """Returns the verdict on each answer, one after another.

        Raises `UserError` for tests that cannot be read or whose own code fails, and `PartFailed` where no program can
        be run.
        """
        verdicts = []
        for prompt, completion in answered:
            code, is_fenced = extract_code(prompt.answer_in(completion.text))
            tests = self._tests(prompt)
            if code.strip() and (beginning := _beginning(prompt, tests)):
                code, is_fenced = beginning + ("\n" if _defines(code, tests.entry_point) else "") + code, True
            verdicts.append(self._verdict(code, is_fenced, tests))
        return verdicts

    def judgement(self, values: Sequence[CodeVerdict]) -> Judgement:
        """Returns the judgement of one answer, whose verdict is the only value."""
        (verdict,) = values
        reward = {"all": float(verdict.share == 1), "share": verdict.share, "weights": verdict.earned}[self.score]
        parts = {
            "tests_passed": verdict.share,
            "no_code": float(verdict.has_no_code),
            "code_failed": float(verdict.has_failed),
            "code_timed_out": float(verdict.has_timed_out),
        }
        return Judgement(reward, parts)

    def isolation(self, problems: Sequence[Problem]) -> str:
        """Returns how programs are isolated here, in words. Raises `UserError` where that is less than `level` says, a
        problem has no tests that can be read, or the setup of one of the first problems fails.
        """
        setups: dict[str, CodeTests] = {}
        for problem in problems:
            tests = read_tests(problem.fields, self.tests, _code_of(problem.fields, problem.prompt))
            if tests.setup and len(setups) < _TRIED_SETUPS:
                setups[tests.setup] = tests
        if self.sandbox_fusion:
            return f"programs run on the SandboxFusion server {self.sandbox_fusion}, isolated as it is set up"
        level = self._level()
        self._try_setups(list(setups.values()))
        reasons = strongest_level(self.imports, bool(self.language.file))[1]
        return f"programs run at the level {level} of isolation" + (f" ({reasons})" if reasons else "")

    def _try_setups(self, problems: Sequence[CodeTests]) -> None:
        """Runs what stands before the tests of problems, with an empty program. Raises `UserError` where that fails."""
        sandbox = Sandbox(self._level(), self.imports)
        try:
            for tests in problems:
                with suppress(PartFailed):  # of the machine: the run meets it again, and tries again
                    next(LocalRunner(sandbox, self._limits).outcomes("", tests))
        finally:
            sandbox.close()

    @property
    def _concurrency(self) -> int:
        return self.processes or _PROGRAMS_PER_CORE * (os.cpu_count() or 1)

    def _level(self) -> Level:
        return require_level(self.level, self.imports, bool(self.language.file))

    @cached_property
    def _runner(self) -> Runner:
        if self.sandbox_fusion:
            return SandboxFusion(self.sandbox_fusion, self._limits, self._concurrency)
        return LocalRunner(Sandbox(self._level(), self.imports, bool(self.language.file)), self._limits)

    @property
    def _limits(self) -> ProgramLimits:
        return ProgramLimits(self.seconds, self.answer_seconds, self.memory_mb << 20, self.language)

    @cached_property
    def _turns(self) -> _Turns:
        return _Turns()

    @cached_property
    def _cache(self) -> _VerdictCache:
        return _VerdictCache()

    @cached_property
    def _read_tests(self) -> Callable[[str, str], CodeTests]:
        return functools.lru_cache(_CACHED_TESTS)(lambda fields, code: read_tests(json.loads(fields), self.tests, code))

    def _tests(self, prompt: Prompt) -> CodeTests:
        """Returns the tests of a prompt, read once for all answers to it."""
        code = _code_of(prompt.fields, prompt.text if prompt.messages is None else "")
        try:
            return self._read_tests(json.dumps(prompt.fields), code)
        except TypeError:  # a field that is no JSON
            return read_tests(prompt.fields, self.tests, code)

    def _verdict(self, code: str, is_fenced: bool, tests: CodeTests) -> CodeVerdict:
        if not code.strip():
            return CodeVerdict(0.0, 0.0, has_no_code=True)
        key = hashlib.blake2b(
            f"{is_fenced}{tests.digest}{code}".encode(errors="surrogatepass"), digest_size=16
        ).digest()
        if (verdict := self._cache.get(key)) is not None:
            return verdict
        with self._turns.shared():
            verdict = self._run(code, is_fenced, tests)
        if verdict.has_timed_out:
            with self._turns.alone():
                verdict = self._run(code, is_fenced, tests)
        if not verdict.has_timed_out:
            self._cache.put(key, verdict)
        return verdict

    def _run(self, code: str, is_fenced: bool, tests: CodeTests) -> CodeVerdict:
        """Runs the tests, up to the first failure where all are needed."""
        for trial in range(_TRIALS):
            passed: list[bool] = []
            reasons: set[Reason] = set()
            try:
                for test, outcome in zip(tests.tests, self._runner.outcomes(code, tests), strict=False):
                    passed.append(self._is_right(test, outcome))
                    reasons.add(outcome.failure)
                    if self.score == "all" and not passed[-1]:
                        break
                break
            except PartFailed:
                if trial == _TRIALS - 1:
                    raise
        weights = [test.weight for test in tests.tests]
        total = sum(weights)
        earned = sum(w for w, is_passed in zip(weights, passed, strict=False) if is_passed)
        return CodeVerdict(
            1.0 if sum(passed) == len(weights) else earned / total if total else 0.0,
            sum(passed) / len(weights),
            has_no_code="no code" in reasons and not is_fenced,
            has_failed=bool(reasons & {"error", "output", "unreadable"}) or ("no code" in reasons and is_fenced),
            has_timed_out="timeout" in reasons,
        )

    def _is_right(self, test: Any, outcome: ProgramOutcome) -> bool:
        """Returns whether a test is passed. What a program has sent is data: it is compared, and no more."""
        if outcome.failure:
            return False
        if isinstance(test, InputOutput):
            output = outcome.value if isinstance(outcome.value, str) else ""
            if self.checker is not None:
                return bool(self.checker(output, test.expected, test.stdin))
            return same_output(output, test.expected)
        if not isinstance(test, FunctionCall):
            return True  # a statement has said so itself
        try:
            if self.checker is not None:
                return bool(self.checker(decode_value(outcome.value), test.expected, test.arguments))
            return canonical(outcome.value, test.as_json) in test.expected_texts
        except Unreadable:
            return False


class _VerdictCache:
    """Remembers verdicts by the digest of code and tests; the last used are kept."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, CodeVerdict] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> CodeVerdict | None:
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def put(self, key: bytes, verdict: CodeVerdict) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            if len(self._verdicts) > _CACHED_VERDICTS:
                self._verdicts.popitem(last=False)


class _Turns:
    """Lets programs run together, or one alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = 0
        self._is_one_alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Waits until no program runs alone."""
        with self._condition:
            self._wait(lambda: not self._is_one_alone)
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other program runs; none begins meanwhile."""
        with self._condition:
            self._wait(lambda: not self._is_one_alone)
            self._is_one_alone = True
        try:
            with self._condition:
                self._wait(lambda: not self._running)
            yield
        finally:
            with self._condition:
                self._is_one_alone = False
                self._condition.notify_all()

    def _wait(self, is_due: Callable[[], bool]) -> None:
        with pausing_deadline():
            if not self._condition.wait_for(is_due, _PATIENCE):
                raise DeadlineExceeded(f"waited {_PATIENCE:g} s for other programs to end: see what holds them up")


def _defines(code: str, name: str) -> bool:
    return f"def {name}(" in code


def _beginning(prompt: Prompt, tests: CodeTests) -> str:
    """Returns the code that a prompt is, and that an answer goes on from; empty where there is none."""
    text = _code_of(prompt.fields, prompt.text if prompt.messages is None else "")
    return text if tests.entry_point and _defines(text, tests.entry_point) else ""


def _code_of(fields: Mapping[str, Json], prompt: object) -> str:
    """Returns the text of a problem that may be code: of its field, else the prompt where that is no chat."""
    text = fields.get("prompt") or prompt
    return text if isinstance(text, str) else ""


def same_output(output: str, expected: str) -> bool:
    """Returns whether two outputs are the same, up to blanks at the ends of lines, empty lines at the end and how a
    number is written (`1` and `1.0`).
    """
    lines, expected_lines = _lines(output), _lines(expected)
    if lines == expected_lines:
        return True
    if len(lines) != len(expected_lines):
        return False
    return all(map(_same_line, lines, expected_lines))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_line(line: str, expected: str) -> bool:
    words, expected_words = _BLANKS.split(line), _BLANKS.split(expected)  # with the blanks between them
    return len(words) == len(expected_words) and all(
        word == expected_word or (_number(word) is not None and _number(word) == _number(expected_word))
        for word, expected_word in zip(words, expected_words, strict=True)
    )


def _number(word: str) -> Decimal | None:
    """Returns the number that a word spells in plain digits; None for any other word."""
    if _NUMBER.fullmatch(word) is None:
        return None
    try:
        return Decimal(word)
    except InvalidOperation:  # its exponent is too large
        return None
