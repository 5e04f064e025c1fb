"""A part in a process of its own, seen from its driver."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

from tba.errors import PartFailed
from tba.foreign import read_json
from tba.record.log import tail
from tba.runtime.directory import RunDirectory
from tba.runtime.disk import no_space
from tba.runtime.driving import failed
from tba.runtime.part import NO_SPACE
from tba.runtime.pulse import Watch, pulse_of
from tba.runtime.starting import Child, Program, start


@dataclass
class Process:
    """A child process. It lives as long as it wants to and at most as long as its driver."""

    name: str
    run: RunDirectory
    threads: int
    attempt: int = 0
    environment: dict[str, str] = field(default_factory=dict)  # beside the driver's own
    loads: tuple[str, ...] = ()  # modules of its recipe
    process: Child = field(init=False)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        own = {"TBA_ATTEMPT": str(self.attempt), "OMP_NUM_THREADS": str(self.threads)}
        environment = {**os.environ, **own, **self.environment}
        held = () if self.run.lock is None else (self.run.lock,)  # as long as anybody writes
        self.watch = Watch(pulse_of(self.run.path, self.name))
        with self.run.log(self.name).open("ab") as log:
            program = Program(self.name, "tba.runtime.part", (self.name, str(self.run.path)), self.loads)
            self.process = start(program, environment, log.fileno(), held)

    def start_again(self) -> None:
        """After its death."""
        self.kill()
        self.attempt += 1
        self.start()

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs; negative: killed by that signal."""
        return self.process.poll()

    @property
    def who(self) -> str:
        return f"{self.name} (process {self.process.pid})"

    @property
    def log(self) -> str:
        return str(self.run.log(self.name))

    @property
    def how(self) -> str:
        return f"was killed by signal {-(self.code or 0)}"

    @property
    def heard(self) -> bool:
        return self.watch.heard

    def silence(self) -> float:
        """Seconds."""
        return self.watch.silence()

    def ask_to_stop(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended meanwhile
            self.process.stdin.write(b"stop")
            self.process.stdin.flush()

    def end(self) -> None:
        """As something that hangs."""
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """End it, unless it has ended, and let go of it."""
        self.end()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def failure(self) -> Exception:
        """Why it ended, as the driver's own error."""
        file = self.run.error(self.name)
        if file.exists():
            mend = f"its log is {self.log}"
            return failed(self.who, self.log, read_json(file, mend, kind=str, message=str, traceback=str))
        code = self.code or 0
        if code == NO_SPACE:
            return no_space(self.run.path)
        how = self.how if code < 0 else f"ended with exit code {code}"
        return PartFailed(f"{self.who} {how}; its log is {self.log}\n{tail(self.run.log(self.name), 15)}")
