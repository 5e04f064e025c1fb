"""A forge: a process with one thread, which has loaded the libraries and forks the parts of runs from itself.

Invariants: it runs nothing of a run itself. It reaps its parts and tells its driver how they ended. It ends when its
driver is gone, which its parts then find out by themselves. Orders come and answers go as JSON, one to a message:

    {"import": [names]}
    {"number", "name", "module", "arguments", "env", "cwd"}, with descriptors: input, log, what is held for life
    {"kill": number}
    {"number", "pid", "code"}: an answer; the code is null while that process lives
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MESSAGE = 1 << 20  # bytes at most
_DESCRIPTORS = 16  # that may come with a message


def be_a_forge(channel: socket.socket) -> None:
    """Serve, in a forked process. Does not return, and runs nothing of what the driver has still to do."""
    os.setsid()
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # whatever the driver has put in their place
    _end_with(channel)


def _end_with(channel: socket.socket) -> None:
    code = 1
    try:
        code = _serve(channel)
    except BaseException:  # noqa: BLE001 - the process ends here
        with suppress(OSError):
            traceback.print_exc()
    finally:
        with suppress(OSError):  # a full disk: what a log has no room for must not keep us
            sys.stdout.flush()
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _serve(channel: socket.socket) -> int:
    """Fork what is asked for, until the driver is gone. In a forked process: the exit code of its part."""
    Path("/proc/self/comm").write_text("tba-forge")
    for one in (signal.SIGINT, signal.SIGTERM):  # the driver ends in order, and needs us for that
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the selector
    wake, wakes = os.pipe()
    for end in (wake, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    children: dict[int, int] = {}  # number -> process
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake:
                    os.read(wake, 4096)
                    _reap(channel, children)
                    continue
                block, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, _DESCRIPTORS)
                if not block:
                    return 0
                order = json.loads(block)
                if "module" not in order:
                    _obey(order, children)
                    continue
                process = os.fork()
                if process == 0:
                    signal.set_wakeup_fd(-1)
                    for end in (wake, wakes, channel.detach()):
                        os.close(end)
                    return _be_one(order, descriptors)
                children[order["number"]] = process
                _tell(channel, order["number"], process, None)
                for descriptor in descriptors:
                    os.close(descriptor)


def _obey(order: dict[str, Any], children: dict[int, int]) -> None:
    if (number := order.get("kill")) in children:
        os.kill(children[number], signal.SIGKILL)
    for name in order.get("import", ()):
        with suppress(ImportError):  # a part that needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared stays shared


def _reap(channel: socket.socket, children: dict[int, int]) -> None:
    for number, process in list(children.items()):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            del children[number]
            _tell(channel, number, process, os.waitstatus_to_exitcode(status))


def _tell(channel: socket.socket, number: int, process: int, code: int | None) -> None:
    with suppress(BrokenPipeError):
        channel.send(json.dumps({"number": number, "pid": process, "code": code}).encode())


def _be_one(order: dict[str, Any], descriptors: Sequence[int]) -> int:
    """In the forked process: as `python -m MODULE ARGUMENTS`, with the environment and descriptors of the order."""
    os.setsid()  # Ctrl-C reaches the driver only, which ends the parts in order
    for one in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(one, signal.SIG_DFL)
    stdin, log, *_ = descriptors
    for descriptor, place in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    Path("/proc/self/comm").write_text(f"tba-{order['name']}"[:15])  # what `top` and `ps` show
    code: int = importlib.import_module(order["module"]).run(order["arguments"])
    return code


if __name__ == "__main__":
    _end_with(socket.socket(fileno=os.dup(0)))
