"""What a confined process can still do, by processes that try."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tba.rewards.confined import can_confine

pytestmark = pytest.mark.skipif(not can_confine(), reason="this system has no seccomp")

BEFORE = """
import os, random, resource, socket, sys, threading
from tba.rewards.confined import confine
assert confine()
"""


def confined(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEFORE + code, *arguments], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "code",
    [
        "open(sys.argv[1], 'w')",
        "open(sys.executable)",
        "os.listdir('.')",
        "os.environ and open('/proc/self/environ')",
        "os.unlink(sys.argv[1])",
        "os.system('touch ' + sys.argv[1])",
        "os.posix_spawn('/bin/touch', ['touch', sys.argv[1]], {})",
        "os.execv('/bin/touch', ['touch', sys.argv[1]])",
        "os.fork()",
        "threading.Thread(target=print).start()",
        "socket.socket()",
        "socket.socketpair()",
        "os.pipe()",
        "os.memfd_create('a')",
        "os.kill(os.getppid(), 0)",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))",
        "import wave",
        "import ctypes; ctypes.CDLL(None).syscall(0x40000002, sys.argv[1].encode(), 65)",  # open, in x32's numbering
    ],
)
def test_what_reaches_beyond_the_process_ends_it(code: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    tried = confined("try:\n    " + code + "\nexcept Exception:\n    pass\nprint('still here')", str(file))
    assert (tried.returncode, tried.stdout) == (-signal.SIGSYS, "")
    assert not file.exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(sum(range(10**6)))", "499999500000\n"),
        ("print(len([0] * 10**7), 0 <= random.random() < 1)", "10000000 True\n"),
        ("print(repr(sys.stdin.readline()))", "'a line\\n'\n"),
        ("try:\n    bytearray(5 << 30)\nexcept MemoryError:\n    print('no')", "no\n"),
    ],
)
def test_what_stays_within_it_goes_on(code: str, said: str) -> None:
    went = subprocess.run(
        [sys.executable, "-c", BEFORE + code], input="a line\n", capture_output=True, text=True, timeout=120, check=True
    )
    assert went.stdout == said


FILTERED = """
import errno, os, sys
from tba.rewards.confined import CallFilter, Condition, refusal_of
from tba.rewards.sandbox_kernel import _CALLS
nothing = os.open("/dev/null", os.O_RDWR)
opens = {name: Condition(i, forbidden_bits=os.O_TRUNC) for i, name in ((1, "open"), (2, "openat"))}
duplicates = dict.fromkeys(("dup2", "dup3"), Condition(0, (nothing,)))
conditions = {**opens, **duplicates, "lseek": Condition(2, bits=1)}
assert CallFilter(_CALLS, conditions, refusal_of(errno.EPERM)).install()
def tried(call, *arguments):
    try:
        call(*arguments)
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
"""


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        ("os.open, sys.argv[1], os.O_RDONLY", "done"),
        ("os.open, sys.argv[1], os.O_RDONLY | os.O_TRUNC", "EPERM"),
        ("os.dup2, nothing, 9", "done"),
        ("os.dup2, 1, 9", "EPERM"),
        ("os.lseek, nothing, 0, os.SEEK_CUR", "done"),
        ("os.lseek, nothing, 0, os.SEEK_SET", "EPERM"),
        ("os.getsid, 0", "EPERM"),
    ],
)
def test_a_filter_refuses_calls_by_their_number_and_by_their_arguments(call: str, outcome: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("full")
    code = f"{FILTERED}print(tried({call}))"
    ended = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == (f"{outcome}\n", 0)
    assert file.read_text() == "full"
