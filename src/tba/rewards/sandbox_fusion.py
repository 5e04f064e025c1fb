"""Programs on a SandboxFusion server, by its HTTP API: for machines that isolate nothing themselves.

Invariant: the server gets a program and inputs, and never what is expected. A program's values come back as lines with
the random number of their question, behind whatever else it prints. Written from the published schema of `/run_code`
(`RunCodeRequest`, `RunCodeResponse` of the package sandbox-fusion 0.3).
"""

from __future__ import annotations

import inspect
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from tba.errors import PartFailed, UserError
from tba.rewards import sandbox_values
from tba.rewards.code_running import NOT_COMPILED, ProgramLimits, ProgramOutcome, Reason
from tba.rewards.code_tests import CodeTests, FunctionCall, InputOutput
from tba.rewards.endpoint import Endpoint, EndpointClient, Refused
from tba.rewards.sandbox_values import encode_value
from tba.types import Json

_MARGIN_SECONDS = 60.0  # that the server may take beside running a program
_COMPILE_SECONDS = 10.0
_CALLS = f"""
import os as _os, sys as _sys
_questions = json.loads(_sys.stdin.read())
_answers = _os.dup(1)
_os.dup2(2, 1)
_names = {{"__name__": "solution"}}
try:
    _program = compile(_CODE, "program.py", "exec", dont_inherit=True)
except (SyntaxError, ValueError):
    _os._exit({NOT_COMPILED})
exec(_program, _names)
for _number, _function, _arguments, _keywords in _questions:
    try:
        if _function not in _names and hasattr(_names.get("Solution"), _function):
            _callable = getattr(_names["Solution"](), _function)
        else:
            _callable = _names[_function]
        _reply = ["value", encode_value(_callable(*decode_value(_arguments), **decode_value(_keywords)))]
    except BaseException as _error:
        _reply = ["error"]
    _os.write(_answers, ("\\n" + json.dumps([_number, *_reply]) + "\\n").encode())
_os._exit(0)
"""


class _Server(Endpoint):
    """The server's address and how it is called."""

    label: ClassVar[str] = "SandboxFusion server"
    option: ClassVar[str] = "sandbox_fusion ({})"


class SandboxFusion:
    """Runs programs on a SandboxFusion server. Any thread may ask it."""

    def __init__(self, url: str, limits: ProgramLimits, concurrency: int) -> None:
        self._limits = limits
        timeout = max(limits.answer_seconds, limits.seconds) + _MARGIN_SECONDS
        self._settings = _Server(
            url=url,
            model="run_code",
            token_variable="SANDBOX_FUSION_TOKEN",  # noqa: S106 - where the token is
            timeout=timeout,
            concurrency=concurrency,
        )

    @cached_property
    def _client(self) -> EndpointClient:
        return EndpointClient(self._settings, "run_code")

    def outcomes(self, code: str, tests: CodeTests) -> Iterator[ProgramOutcome]:
        """Returns the outcome of each test, in order. Raises `PartFailed` where the server fails, and `UserError` for
        tests that are no exchanges or calls.
        """
        calls = [test for test in tests.tests if isinstance(test, FunctionCall)]
        if calls:
            yield from self._calls(code, calls)
            return
        for test in tests.tests:
            if not isinstance(test, InputOutput):
                raise UserError(
                    "SandboxFusion runs a program once, so asserts other than `f(literals) == literal` cannot be "
                    "judged with it: use a machine with Landlock, or tests of another form"
                )
            yield self._run(code, test.stdin, self._limits.seconds)

    def _calls(self, code: str, calls: Sequence[FunctionCall]) -> Iterator[ProgramOutcome]:
        """Calls functions in one run; after a call that has no answer the others have none either."""
        numbers = [secrets.token_hex(8) for _ in calls]
        questions = [
            [number, call.function, encode_value(list(call.arguments)), encode_value(dict(call.keywords))]
            for number, call in zip(numbers, calls, strict=True)
        ]
        source = "\n".join([inspect.getsource(sandbox_values), f"_CODE = {json.dumps(code)}", _CALLS])
        outcome = self._run(source, json.dumps(questions), self._limits.answer_seconds)
        replies = _replies(outcome.value if isinstance(outcome.value, str) else "")
        for number in numbers:
            kind, *content = replies.get(number, [None])
            if kind == "value" and content:
                yield ProgramOutcome(content[0])
            else:
                yield ProgramOutcome(failure=(outcome.failure or "error") if kind is None else "error")

    def _run(self, code: str, stdin: str, seconds: float) -> ProgramOutcome:
        """Runs a program and returns its output, also where it failed after some."""
        reply = self._ask(
            {
                "code": code,
                "stdin": stdin,
                "language": self._limits.language.name,
                "compile_timeout": _COMPILE_SECONDS,
                "run_timeout": seconds,
                "memory_limit_MB": self._limits.memory_bytes >> 20,
            }
        )
        if reply.get("status") == "SandboxError":
            raise PartFailed("the SandboxFusion server could not run a program (SandboxError): see its log")
        result = reply.get("run_result")
        if not isinstance(result, Mapping):
            return ProgramOutcome(failure="no code")  # it was not compiled
        output = result.get("stdout")
        return ProgramOutcome(output if isinstance(output, str) else "", _failure(result))

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Json]:
        try:
            reply = self._client.ask(question)
        except Refused as error:
            raise PartFailed(str(error)) from error
        return reply if isinstance(reply, dict) else {}


def _failure(result: Mapping[str, Json]) -> Reason:
    if result.get("status") == "TimeLimitExceeded":
        return "timeout"
    if result.get("status") == "Finished" and result.get("return_code") == 0:
        return ""
    return "no code" if result.get("return_code") == NOT_COMPILED else "error"


def _replies(output: str) -> dict[str, list[Json]]:
    """Returns the replies in an output by the numbers of their questions; the first to each counts."""
    replies: dict[str, list[Json]] = {}
    for line in output.split("\n"):
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(reply, list) and len(reply) > 1 and isinstance(reply[0], str):
            replies.setdefault(reply[0], reply[1:])
    return replies
