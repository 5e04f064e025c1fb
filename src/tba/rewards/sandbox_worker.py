"""The program that starts sandboxed programs: a warm interpreter, forked once for each program.

Invariant: a worker holds nothing that a program may not see. A program's code and questions come over a channel that
its process alone has (the worker hands it on unread), and expected values never come here. The worker runs one program
at a time, in a process that is confined before it reads its channel, and that is killed with all that it has started
before the next one begins. A worker ends when its parent does, however that ends, and its program with it.

What a program is told is one line of JSON, its *job*; what it is then asked, and answers, are lines `[number, ...]`.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from tba.rewards.sandbox_kernel import Bounds, Isolation
from tba.rewards.sandbox_values import decode_value, encode_value

_CHANNEL = 3  # the descriptor of a program's channel
_TICK = 0.05  # seconds between two looks at a program's threads
_BLOCK = 1 << 16
_SET_DEATH_SIGNAL = 1  # of prctl
_NOT_COMPILED = 65  # the exit code of a program that does not compile
_UNUSABLE_ERRORS = (StopIteration, ExceptionGroup)  # would end a loop of a test, as in `all(map(...))`; holds errors
_WARM = """
    abc array bisect calendar collections collections.abc copy csv dataclasses datetime decimal enum fractions functools
    hashlib heapq itertools json math numbers operator queue random re statistics string struct textwrap time typing
    unicodedata
"""


def main(paths: list[str]) -> None:
    """Run as a worker: `socket descriptor, settings as JSON` are its arguments. paths: where programs find modules."""
    parent = os.pidfd_open(os.getppid())
    host = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    try:
        isolation = Isolation(settings["level"], settings["packages"], settings["runs_commands"])
        for name in [*_WARM.split(), *settings["imports"]]:
            importlib.import_module(name)
        for add_builtins in (site.setquit, site.setcopyright, site.sethelper):
            add_builtins()  # as a usual start does
        sys.path[:] = paths
        isolation.enter()
        if isolation.level == "namespaces":
            if namespace_worker := os.fork():
                host.close()
                os.waitpid(namespace_worker, 0)
                os._exit(0)
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # of this process, which has one thread; the
            # host's may end before the host does
            isolation.build_root()
    except (OSError, ImportError) as error:
        host.send(json.dumps({"error": str(error)}).encode())
        os._exit(1)
    os.environ.clear()
    sys.argv[:] = ["program.py"]
    gc.freeze()  # what every program shares is not copied for being looked at
    host.send(b"{}")
    _serve(host, parent, isolation)


def _serve(host: socket.socket, parent: int, isolation: Isolation) -> NoReturn:
    poll = select.poll()
    for descriptor in (host.fileno(), parent):
        poll.register(descriptor, select.POLLIN)
    while True:
        if parent in [descriptor for descriptor, _ in poll.poll()]:
            os._exit(0)
        message, descriptors, _, _ = socket.recv_fds(host, 1 << 12, 2)
        if not message:
            os._exit(0)
        if message == b"end":  # the program has ended meanwhile
            continue
        bounds = json.loads(message)
        report = _run(host, parent, isolation, Bounds(**bounds), descriptors)
        host.send(json.dumps(report).encode())


def _run(
    host: socket.socket, parent: int, isolation: Isolation, bounds: Bounds, descriptors: list[int]
) -> dict[str, Any]:
    """Runs one program until it ends, or is to be ended. Returns what the host wants to know about it."""
    own_side, its_side = socket.socketpair()
    program = isolation.fork()
    if not program:
        own_side.close()
        _become_program(isolation, bounds, descriptors, its_side)
    its_side.close()
    for descriptor in descriptors:
        os.close(descriptor)
    poll = select.poll()
    handle = os.pidfd_open(program)
    for descriptor in (host.fileno(), parent, handle):
        poll.register(descriptor, select.POLLIN)
    counts_threads = isolation.level == "landlock"
    has_too_many = False
    while not (events := poll.poll(_TICK * 1000 if counts_threads else None)) and not has_too_many:
        has_too_many = _thread_count(program) > bounds.processes
    os.kill(program, signal.SIGKILL)
    _, status, usage = os.wait4(program, 0)
    os.close(handle)
    if parent in [descriptor for descriptor, _ in events]:
        os._exit(0)
    with own_side:
        confinement = own_side.recv(1 << 12, socket.MSG_DONTWAIT) if select.select([own_side], [], [], 0)[0] else b""
    return {
        "confinement": confinement.decode(errors="replace"),
        "status": os.waitstatus_to_exitcode(status),
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_bytes": usage.ru_maxrss << 10,
        "too_many_threads": has_too_many,
    }


def _thread_count(process: int) -> int:
    with suppress(OSError), open(f"/proc/{process}/status", "rb") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(b"Threads:"))
    return 0


def _become_program(isolation: Isolation, bounds: Bounds, descriptors: list[int], worker: socket.socket) -> NoReturn:
    """Turns this process, just forked, into a program."""
    worker_end = worker.detach()
    try:
        gc.enable()
        channel, output = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in descriptors)
        worker_end = fcntl.fcntl(worker_end, fcntl.F_DUPFD, 10)
        nothing = os.open("/dev/null", os.O_RDWR)
        for source, target in ((nothing, 0), (output, 1), (nothing, 2), (channel, _CHANNEL)):
            os.dup2(source, target)
        last = _CHANNEL
        for needed_descriptor in sorted({worker_end, *isolation.descriptors}):
            os.closerange(last + 1, needed_descriptor)
            last = needed_descriptor
        os.closerange(last + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        stdin = os.memfd_create("stdin")
        isolation.confine(bounds)
        os.write(worker_end, b"confined")
        if select.select([worker_end], [], [], 0)[0]:
            os._exit(1)  # the worker died before its death could end this process
        os.close(worker_end)
    except BaseException as error:  # noqa: BLE001 - whatever it is, no program may run
        os.write(worker_end, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    status = 1
    with suppress(BaseException):
        sys.set_int_max_str_digits(0)
        channel_lines = _Channel()
        job = channel_lines.read()
        status = _KINDS[job["kind"]](job, channel_lines, stdin)
    os._exit(status)


class _Channel:
    """The lines that a program reads and writes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def read(self) -> Any:
        """Returns the next line. Ends the process where there is none."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            data = os.read(_CHANNEL, _BLOCK)
            if not data:
                os._exit(0)
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return json.loads(line)

    def write(self, value: Any) -> None:
        data = memoryview(json.dumps(value).encode() + b"\n")
        while data:
            data = data[os.write(_CHANNEL, data) :]


def _run_script(job: Any, channel: _Channel, stdin: int) -> int:
    """Runs a program from its standard input to its standard output, as `python file` does."""
    _give_stdin(job["stdin"], stdin)
    os.close(_CHANNEL)
    try:
        program = compile(job["code"], "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return _NOT_COMPILED
    status = 0
    try:
        exec(program, _module("__main__"))  # noqa: S102 - in a sandbox
    except SystemExit as error:
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        status = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    with suppress(BaseException):
        sys.stdout.flush()
    return status & 0xFF


def _run_commands(job: Any, channel: _Channel, stdin: int) -> int:
    """Writes a program of another language to a file and runs commands, the last with the program's input."""
    with open(job["file"], "w", encoding="utf-8") as file:
        file.write(job["code"])
    _give_stdin(job["stdin"], stdin)
    os.close(_CHANNEL)
    *preparations, last = job["commands"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}  # noqa: S108 - its own
    for command in preparations:
        if status := subprocess.run(command, stdin=2, stdout=2, env=environment).returncode:  # noqa: S603 - in a sandbox
            return status & 0xFF
    return subprocess.run(last, env=environment).returncode & 0xFF  # noqa: S603 - in a sandbox


def _serve_functions(job: Any, channel: _Channel, stdin: int) -> int:
    """Runs a program and then calls its functions as it is asked."""
    names = _module("solution")
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def run() -> None:
        exec(compile(job["code"], "program.py", "exec", dont_inherit=True), names)  # noqa: S102 - in a sandbox

    def answer(operation: str, target: Any, *encoded_values: Any) -> Any:
        if operation == "run":
            return run()
        values = [decode_value(value, objects.__getitem__) for value in encoded_values]
        if operation == "call":
            function = _find(names, target) if isinstance(target, str) else objects[target]
            return function(*values[0], **values[1])
        if operation == "truth":
            return bool(objects[target])
        return getattr(objects[target], *values) if operation == "get" else setattr(objects[target], *values)

    while True:
        number, *question = channel.read()
        try:
            reply = ["value", encode_value(answer(*question), keep)]
        except BaseException as error:  # noqa: BLE001 - of the program
            reply = ["error", _builtin_name(error), _text_of(error)]
        channel.write([number, *reply])


def _builtin_name(error: BaseException) -> str:
    """Returns the name of the first class that an error derives from and that is Python's own, not one called so."""
    bases = type(error).__mro__
    return next(base.__name__ for base in bases if getattr(builtins, base.__name__, None) is base)


def _built_in_error(name: str, text: str) -> Exception:
    """Returns an error of a class of Python by name, as far as a test can catch it; else a `RuntimeError`."""
    error_type = getattr(builtins, name, None)
    if not (isinstance(error_type, type) and issubclass(error_type, Exception)) or error_type in _UNUSABLE_ERRORS:
        error_type = RuntimeError
    try:
        return error_type(text)
    except TypeError:  # it takes more than a text, as a UnicodeDecodeError does
        error: Exception = error_type.__new__(error_type)
        error.args = (text,)
        return error


def _find(names: dict[str, Any], name: str) -> Any:
    """Returns a function of a program, or a method of its class `Solution`."""
    if name not in names and hasattr(names.get("Solution"), name):
        return getattr(names["Solution"](), name)
    return names[name]


class _Remote:
    """Stands for an object of the program, or for a function of the name `_target`, in the tests' process."""

    def __init__(self, ask: Callable[..., Any], target: int | str) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_target", target)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", self._target, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if isinstance(self._target, str) or name.startswith("_"):
            raise AttributeError(name)  # a module that only the program has imported would be the program's
        return self._ask("get", self._target, name)

    def __bool__(self) -> bool:
        return isinstance(self._target, str) or self._ask("truth", self._target) is True

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self._target, str) or name.startswith("_"):
            raise AttributeError(name)
        self._ask("set", self._target, name, value)


def _serve_tests(job: Any, channel: _Channel, stdin: int) -> int:
    """Runs tests, and asks for what the program's functions return: the program is in another process."""

    def keep(value: Any) -> int:
        if isinstance(value, _Remote) and isinstance(value._target, int):
            return value._target
        raise TypeError(
            f"a test hands a {type(value).__name__} to the program, which only data and its own objects can be"
        )

    def ask(operation: str, target: int | str, *values: Any) -> Any:
        channel.write([number, "ask", operation, target, *(encode_value(value, keep) for value in values)])
        kind, *content = channel.read()
        if kind == "value":
            return decode_value(content[0], lambda number: _Remote(ask, number))
        raise _built_in_error(*content)

    names = _module("tests")
    names.update({name: _Remote(ask, name) for name in job["names"]})
    names.update({name: importlib.import_module(name) for name in job["modules"]})
    while True:
        number, source = channel.read()
        try:
            exec(compile(source, "tests.py", "exec", dont_inherit=True), names)  # noqa: S102 - in a sandbox
            verdict = ["passed"]
        except BaseException as error:  # noqa: BLE001 - of the tests
            verdict = ["failed", type(error).__name__, _text_of(error)]
        channel.write([number, *verdict])


def _serve_session(job: Any, channel: _Channel, stdin: int) -> int:
    """Runs one piece of code after another, and replies what each has printed and the value of its last expression."""
    names = _module("__main__")
    while True:
        number, source = channel.read()
        sys.stdout = sys.stderr = printed = _BoundedText(job["characters"])
        try:
            tree = ast.parse(source, "program.py")
            last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "program.py", "exec", dont_inherit=True), names)  # noqa: S102 - in a sandbox
            value = None if last is None else eval(compile(ast.Expression(last), "program.py", "eval"), names)  # noqa: S307 - in a sandbox
            if value is not None:
                printed.write(f"{value!r}\n")
        except BaseException as error:  # noqa: BLE001 - of the program
            printed.write(f"{type(error).__name__}: {_text_of(error)}\n")
        channel.write([number, printed.getvalue()])


class _BoundedText(io.StringIO):
    """Keeps what is printed up to a length."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self._left = characters

    def write(self, text: str) -> int:
        super().write(text[: self._left])
        self._left = max(0, self._left - len(text))
        return len(text)


_KINDS = {
    "script": _run_script,
    "commands": _run_commands,
    "functions": _serve_functions,
    "tests": _serve_tests,
    "session": _serve_session,
}


def _module(name: str) -> dict[str, Any]:
    """Returns the names of a new module, which is where its classes say that they are."""
    module = sys.modules[name] = types.ModuleType(name)
    return module.__dict__


def _give_stdin(text: str, descriptor: int) -> None:
    """Puts a text where a program's standard input comes from."""
    data = memoryview(text.encode(errors="surrogatepass"))
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - the program's


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:  # noqa: BLE001 - of the program
        return ""
