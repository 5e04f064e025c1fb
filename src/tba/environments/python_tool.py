"""A tool for environments: Python code that a policy writes runs in a sandbox, in a session that lasts for an episode.

Invariant: code runs isolated as a reward's programs are (`tba.rewards.sandbox`), and each call ends in time. What is
wrong with the code is said to the policy and ends nothing; a session that is ended takes its variables along, and the
next call begins another. No session outlives its episode or the process that plays it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import ClassVar

from tba.rewards.sandbox import ProgramFailed, Sandbox, SandboxedProgram, require_level
from tba.rewards.sandbox_kernel import Bounds, Level
from tba.types import Problem, quote

_LIFETIME = 3600.0  # seconds of CPU time of a session


class PythonTool:
    """An environment with the tool `python`, to derive your own from: its `reset` and `get_reward` are yours.

    The tool runs code and returns what it prints, with the value of a last expression; names stay for later calls of
    the episode. The attributes of the class may be set in yours.
    """

    python_level: ClassVar[Level] = "landlock"  # the least isolation to run at
    python_seconds: ClassVar[float] = 10.0  # that a call may take
    python_memory_mb: ClassVar[int] = 512  # address space of a session, in MiB
    python_characters: ClassVar[int] = 2000  # of what a call returns
    python_imports: ClassVar[tuple[str, ...]] = ()  # installed packages beside the standard library

    _session: SandboxedProgram | None = None

    def python(self, code: str) -> str:
        """Run Python code and return what it prints. Names stay for later calls.

        Args:
            code: the code to run
        """
        deadline = time.monotonic() + self.python_seconds
        try:
            if self._session is None:
                self._session = self._start(deadline)
            (text,) = self._session.ask(code, deadline=deadline)
        except (ProgramFailed, ValueError) as error:
            self._end_session()
            reason = error.reason if isinstance(error, ProgramFailed) else "unreadable"
            text = {
                "timeout": f"it took more than {self.python_seconds:g} seconds and was ended",
                "ended": "it ended the interpreter",
                "output": "it wrote too much and was ended",
                "unreadable": "its output cannot be read",
            }[reason]
            return f"Error: {text}; all names are gone"
        if not isinstance(text, str):
            return quote(str(text), self.python_characters)
        text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates could not be written anywhere
        cut = text[: self.python_characters]
        return cut if cut == text else f"{cut}... (cut)"

    def close(self) -> None:
        """End the session."""
        self._end_session()

    @classmethod
    def isolation(cls, problems: Sequence[Problem]) -> str:
        """Returns how code is isolated here, in words. Raises `UserError` where that is less than `python_level`."""
        return (
            f"the tool python runs code at the level {require_level(cls.python_level, cls.python_imports)} of isolation"
        )

    def _start(self, deadline: float) -> SandboxedProgram:
        level = require_level(self.python_level, self.python_imports)
        job = {"kind": "session", "characters": self.python_characters + 1}
        bounds = Bounds(_LIFETIME, self.python_memory_mb << 20)
        return _sandbox(level, self.python_imports).start(job, bounds, deadline + self.python_seconds)

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end()


@functools.cache
def _sandbox(level: Level, imports: tuple[str, ...]) -> Sandbox:
    """Returns the sandbox of all episodes that a process plays."""
    return Sandbox(level, imports)
