"""What programs can do in a sandbox, at each level that this machine has, and what is left of them."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tba.errors import PartFailed, UserError
from tba.rewards.sandbox import LEVELS, ProgramFailed, Sandbox, SandboxedProgram, require_level, strongest_level
from tba.rewards.sandbox_kernel import Bounds, Level

BOUNDS = Bounds(cpu_seconds=10.0, memory_bytes=256 << 20)


def has_level(level: Level) -> bool:
    """Whether the machine that runs the tests isolates so."""
    sandbox = Sandbox(level)
    try:
        talk(sandbox, "")
    except PartFailed:
        return False
    finally:
        sandbox.close()
    return True


def talk(sandbox: Sandbox, code: str) -> str:
    """What a program prints."""
    program = sandbox.start({"kind": "script", "code": code, "stdin": "in\n"}, BOUNDS, soon(), has_output=True)
    try:
        return program.output(soon()).decode()
    finally:
        program.end(wait=20.0)


def soon() -> float:
    return time.monotonic() + 60.0


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if not has_level(request.param):
        pytest.skip(f"this machine has no level {request.param}")
    sandbox = Sandbox(request.param)
    yield sandbox
    sandbox.close()


@pytest.fixture
def functions(sandbox: Sandbox) -> Iterator[Callable[[str], SandboxedProgram]]:
    """Starts programs whose functions are called, and ends them."""
    programs: list[SandboxedProgram] = []

    def start(code: str) -> SandboxedProgram:
        programs.append(sandbox.start({"kind": "functions", "code": code}, BOUNDS, soon()))
        programs[-1].ask("run", None, deadline=soon())
        return programs[-1]

    yield start
    for program in programs:
        program.end()


def test_a_program_reads_its_input_and_writes_its_output(sandbox: Sandbox) -> None:
    assert talk(sandbox, "print(input()[::-1])\nexit()\nprint('never')") == "ni\n"
    assert talk(sandbox, "import atexit, threading\natexit.register(print, 'last')\nprint('ä')") == "ä\nlast\n"


def test_a_function_is_called_and_its_error_is_a_reply(functions: Callable[[str], SandboxedProgram]) -> None:
    program = functions("def f(x, k=1): return [x, k]\nclass Solution:\n    def g(self): return 5\n")
    call = ["call", "f", ["list", [3]], ["dict", [["k", 4]]]]
    assert program.ask(*call, deadline=soon()) == ["value", ["list", [3, 4]]]
    assert program.ask("call", "g", ["list", []], ["dict", []], deadline=soon()) == ["value", 5]
    assert program.ask("call", "h", ["list", []], ["dict", []], deadline=soon())[:2] == ["error", "KeyError"]
    assert program.ask(*call, deadline=soon()) == ["value", ["list", [3, 4]]]


def test_an_object_that_is_no_data_stays_in_the_program(functions: Callable[[str], SandboxedProgram]) -> None:
    program = functions("class P:\n    def __init__(self, x): self.x = x\ndef read(p): return p.x\n")
    kind, reference = program.ask("call", "P", ["list", [7]], ["dict", []], deadline=soon())
    assert (kind, reference[0]) == ("value", "object")
    assert program.ask("call", "read", ["list", [reference]], ["dict", []], deadline=soon()) == ["value", 7]
    assert program.ask("get", reference[1], "x", deadline=soon()) == ["value", 7]


PROGRAM = """
import json
class ZeroDivisionError(Exception): pass
class Box:
    _hidden = 1
    def __init__(self, x): self.x = x
    def __bool__(self): return bool(self.x)
def own(): raise ZeroDivisionError("own")
def derived(): json.loads("no")
def decoding(): b"\\xff".decode()
def group(): raise ExceptionGroup("all", [ValueError()])
def over(): next(iter(()))
"""


@pytest.mark.parametrize(
    ("source", "is_passed"),
    [
        ("try: derived()\nexcept ValueError as error: assert 'Expecting value' in str(error)", True),
        ("try: decoding()\nexcept UnicodeDecodeError: pass", True),
        ("try: group()\nexcept RuntimeError: pass", True),
        ("try: over()\nexcept RuntimeError: pass", True),
        ("try: own()\nexcept ZeroDivisionError: pass", False),
        ("try: own()\nexcept Exception as error: assert str(error) == 'own'", True),
        ("assert Box(1)", True),
        ("assert Box(0)", False),
        ("box = Box(0)\nbox.x = 2\nassert box and box.x == 2", True),
        ("Box(1)._hidden", False),
        ("Box(1)._hidden = 2", False),
        ("Box.x = 1", False),
    ],
)
def test_a_test_meets_the_errors_and_objects_of_a_program(
    functions: Callable[[str], SandboxedProgram], sandbox: Sandbox, source: str, is_passed: bool
) -> None:
    names = ["Box", "own", "derived", "decoding", "group", "over"]
    program = functions(PROGRAM)
    tests = sandbox.start({"kind": "tests", "names": names, "modules": []}, BOUNDS, soon())
    try:
        message = tests.ask(source, deadline=soon())
        while message[:1] == ["ask"]:
            message = tests.go_on(program.ask(*message[1:], deadline=soon()), soon())
        assert (message == ["passed"]) == is_passed
    finally:
        tests.end()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os\nos._exit(0)", "ended"),
        ("import os\nos.write(3, b'[1, 2]\\n')", "unreadable"),
        ("import os\nos.write(3, b'nonsense\\n')", "unreadable"),
        ("import os\nwhile True: os.write(3, b'x' * 65536)", "output"),
    ],
)
def test_a_program_that_does_not_reply_has_failed_with_a_reason(sandbox: Sandbox, code: str, reason: str) -> None:
    program = sandbox.start({"kind": "functions", "code": code}, BOUNDS, soon())
    try:
        with pytest.raises(ProgramFailed) as failed:
            program.ask("run", None, deadline=soon())
        assert failed.value.reason == reason
    finally:
        program.end()


def test_a_program_that_never_ends_is_ended(sandbox: Sandbox) -> None:
    program = sandbox.start({"kind": "functions", "code": "while True: pass"}, BOUNDS, soon())
    with pytest.raises(ProgramFailed) as failed:
        program.ask("run", None, deadline=time.monotonic() + 0.2)
    assert failed.value.reason == "timeout"
    assert program.end().status == -signal.SIGKILL


def test_a_reply_after_the_deadline_is_none(sandbox: Sandbox) -> None:
    code = "import os\nos.write(3, b'[1]\\n' * 9)"
    program = sandbox.start({"kind": "functions", "code": code}, BOUNDS, soon())
    try:
        for deadline, reason in ((soon(), "unreadable"), (time.monotonic(), "timeout")):
            with pytest.raises(ProgramFailed) as failed:
                program.ask("run", None, deadline=deadline)
            assert failed.value.reason == reason
        program.send([], soon())
        with pytest.raises(ProgramFailed) as failed:
            program._receive(time.monotonic())  # a line is there
        assert failed.value.reason == "timeout"
    finally:
        program.end()


def test_a_worker_that_has_died_is_replaced(sandbox: Sandbox) -> None:
    mortal = Sandbox(sandbox.level)
    for _ in range(2):
        assert talk(mortal, "print(1)") == "1\n"
        (worker,) = mortal._idle
        worker.process.kill()
        worker.process.wait()
    mortal.close()


def test_without_descriptors_nothing_starts_and_no_worker_is_lost(sandbox: Sandbox) -> None:
    poor = Sandbox(sandbox.level)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for has_worker in (False, True):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(PartFailed, match="could not be started"):
                poor.start({"kind": "functions", "code": ""}, BOUNDS, soon())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(poor._idle) == has_worker
        assert talk(poor, "print(1)") == "1\n"
    poor.close()


def test_a_program_that_could_not_be_isolated_has_not_failed(sandbox: Sandbox) -> None:
    poor = Sandbox(sandbox.level)
    talk(poor, "")
    worker = poor._idle[0].process.pid
    for process in (worker, *descendants(worker)):
        resource.prlimit(process, resource.RLIMIT_NOFILE, (10, 10))
    with pytest.raises(PartFailed, match=r"could not be isolated \(OSError"):
        talk(poor, "print(1)")
    poor.close()


def test_programs_see_no_other_process_no_file_and_no_environment(sandbox: Sandbox) -> None:
    code = (
        "import os\nprint(dict(os.environ))\n"
        "for path in ('/proc/self/status', '/etc/passwd', os.path.expanduser('~/.profile'), '/root', '/home'):\n"
        "    try: print(open(path).read()[:9])\n    except OSError: print('no')\n"
        "try: os.fork()\nexcept OSError: print('no')\ntry: os.getsid(0)\nexcept OSError: print('no')\nimport socket\n"
        "try: socket.socket()\nexcept OSError: print('no')\n"
    )
    assert talk(sandbox, code) == "{}\n" + "no\n" * 8


def test_each_program_is_new(sandbox: Sandbox) -> None:
    code = "import json\nprint(getattr(json, 'mark', None))\njson.mark = 1\nopen('/tmp/attack_mark', 'a').write('x')"
    assert talk(sandbox, code) == "None\n"
    assert talk(sandbox, code) == "None\n"
    assert talk(sandbox, "import os\nprint(os.path.exists('/tmp/attack_mark'))") == "False\n"


def test_packages_that_are_named_can_be_imported_and_no_others(sandbox: Sandbox) -> None:
    code = "import numpy\nprint(numpy.ones(2).sum())\nimport tqdm"
    with pytest.raises(UserError, match=r"the package 'no_such_thing', which is not installed"):
        Sandbox(sandbox.level, ("no_such_thing",))
    with_numpy = Sandbox(sandbox.level, ("numpy",))
    assert talk(with_numpy, code) == "2.0\n"
    with_numpy.close()
    assert talk(sandbox, code) == ""


def test_packages_of_the_system_cannot_be_read(sandbox: Sandbox) -> None:
    files = [path for folder in Path("/usr/lib").glob("python*/*-packages") for path in folder.rglob("*.py")]
    paths = [f"{root}/{file.relative_to('/usr/lib')}" for root in ("/usr/lib", "/lib") for file in files[:3]]
    if not paths:
        pytest.skip("this system has no packages of its own")
    code = f"for path in {paths!r}:\n    try: print(open(path).name)\n    except OSError: print('no')"
    assert talk(sandbox, code) == "no\n" * len(paths)
    assert talk(sandbox, "import ctypes, decimal, ssl, sqlite3\nprint(ctypes.CDLL('libm.so.6'))").startswith("<CDLL")


def test_nothing_is_left_when_the_process_that_judges_is_killed(sandbox: Sandbox) -> None:
    for _ in range(2):
        read_end, write_end = os.pipe()
        judge = os.fork()
        if not judge:
            program = Sandbox(sandbox.level).start(
                {"kind": "script", "code": "while True: pass", "stdin": ""}, BOUNDS, soon()
            )
            worker = program._worker.process.pid
            while len(descendants(worker)) < (1 if sandbox.level == "landlock" else 2):
                pass
            os.write(write_end, " ".join(map(str, [worker, *descendants(worker)])).encode())
            signal.pause()
        processes = [int(word) for word in os.read(read_end, 1 << 10).split()]
        handles = [os.pidfd_open(process) for process in processes]
        os.kill(judge, signal.SIGKILL)
        os.waitpid(judge, 0)
        waiting = set(handles)
        while waiting:
            ended = select.select(list(waiting), [], [], 60.0)[0]
            assert ended, "a process goes on"
            waiting -= set(ended)
        for descriptor in (read_end, write_end, *handles):
            os.close(descriptor)


def descendants(process: int) -> list[int]:
    """The processes below a process."""
    with open(f"/proc/{process}/task/{process}/children") as file:
        children = [int(word) for word in file.read().split()]
    return [found for child in children for found in (child, *descendants(child))]


def test_the_strongest_level_is_used_and_less_than_is_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    strongest, _ = strongest_level()
    if strongest is None:
        with pytest.raises(UserError, match="isolates programs not at all"):
            require_level("landlock")
    else:
        assert require_level("landlock") == strongest
    monkeypatch.setattr("tba.rewards.sandbox.strongest_level", lambda *_: ("landlock", "namespaces: not allowed"))
    assert require_level("landlock") == "landlock"
    with pytest.raises(
        UserError, match=r"at the level landlock only \(namespaces: not allowed\), and the level asked for"
    ):
        require_level("namespaces")
