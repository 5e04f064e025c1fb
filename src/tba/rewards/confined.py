"""Takes from a process everything that grading an answer does not need, in case a scorer runs an answer as code.

Invariant: after `confine` the process can compute, use what it has open, and exit. When it asks the kernel for anything
else (a file, a socket, a process, a signal to another process, a higher limit) the kernel kills it: Linux's seccomp
with an irrevocable list of allowed calls. Other systems have nothing comparable that Python can reach; there only
resource limits hold, and `can_confine` returns False. `CallFilter` takes other lists, too
(`rewards/sandbox_kernel.py`).
"""

from __future__ import annotations

import ctypes
import functools
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_MEMORY_BYTES = 4 << 30  # of address space

_SET_NO_NEW_PRIVILEGES = 38  # of prctl; a filter can be set without being root only after it
_SET_FILTER, _ALL_THREADS = 1, 1  # of seccomp
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # a filter's instructions: load a word, skip unless equal, answer
_HAS_BITS = 0x45  # skip unless the word has one of the bits
_CALL_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16  # where in what a filter is given they stand
_ALLOW, KILL = 0x7FFF0000, 0x80000000


def refusal_of(error_number: int) -> int:
    """Returns what a filter answers to have a call fail with an error of `errno`."""
    return 0x00050000 | error_number


class _SystemCalls(NamedTuple):
    """The kernel's system call interface on one kind of processor."""

    code: int  # AUDIT_ARCH_*: a call in the numbering of another kind has another code
    seccomp: int
    column: int  # of the processor in tables of calls


class Condition(NamedTuple):
    """Allows a call where an argument's lower 32 bits equal one of some values, have one of some bits, or have none of
    some others; give one of the three.
    """

    argument: int  # counted from 0
    values: Sequence[int] = ()
    bits: int = 0
    forbidden_bits: int = 0
    refusal: int | None = None  # what else the call leads to; None: what unlisted calls do


_ALLOWED_CALLS = {  # calls, by their numbers on x86_64 and on aarch64
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "setitimer": (38, 103),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "sigaltstack": (131, 132),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
_MACHINES = {"x86_64": _SystemCalls(0xC000003E, 317, 0), "aarch64": _SystemCalls(0xC00000B7, 277, 1)}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("skip_if", ctypes.c_uint8),
        ("skip_unless", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def confine() -> bool:
    """Confine this process and all its threads for good. Returns False where the system can only limit resources.

    Import, open and start everything that is needed before calling it.
    """
    limit_memory()
    for resource_id in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        _lower_limit(resource_id, 0)  # no dump, nothing written to a file, no more files, no more processes
    return CallFilter(_ALLOWED_CALLS, {}, KILL).install()


class CallFilter:
    """A list of the system calls that a process may make."""

    def __init__(
        self,
        allowed: Mapping[str, tuple[int | None, int | None]],
        conditions: Mapping[str, Condition],
        otherwise: int,
    ) -> None:
        """allowed: the numbers of calls on x86_64 and on aarch64, None where there is no such call. conditions: of some
        of these calls. otherwise: what any other call leads to, `KILL` or `refusal_of(...)`; a call in another
        processor's numbering kills.
        """
        self._machine = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
        if self._machine is not None:
            instructions = _program(self._machine, allowed, conditions, otherwise)
            self._program = _FilterProgram(len(instructions), (_Instruction * len(instructions))(*instructions))

    def install(self) -> bool:
        """Allow this process and all its threads nothing else, for good. Returns False where this cannot be."""
        libc = ctypes.CDLL(None)
        return (
            self._machine is not None
            and libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
            and libc.syscall(self._machine.seccomp, _SET_FILTER, _ALL_THREADS, ctypes.byref(self._program)) == 0
        )


@functools.cache
def can_confine() -> bool:
    """Returns whether this system can confine a process; tried out in a child."""
    trial = subprocess.run([sys.executable, "-m", "tba.rewards.confined"], capture_output=True, timeout=120)
    return trial.returncode == 0


def limit_memory() -> None:
    """Limit this process's memory for good, and nothing else."""
    _lower_limit(resource.RLIMIT_AS, _MEMORY_BYTES)


def _lower_limit(resource_id: int, maximum: int) -> None:
    hard_limit = resource.getrlimit(resource_id)[1]
    value = maximum if hard_limit == resource.RLIM_INFINITY else min(maximum, hard_limit)
    resource.setrlimit(resource_id, (value, value))


def _program(
    machine: _SystemCalls,
    allowed: Mapping[str, tuple[int | None, int | None]],
    conditions: Mapping[str, Condition],
    otherwise: int,
) -> list[_Instruction]:
    """Returns the filter: each call's block answers, or goes on to the next."""
    program = [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        _Instruction(_EQUAL, 1, 0, machine.code),
        _Instruction(_RETURN, 0, 0, KILL),
        _Instruction(_LOAD, 0, 0, _CALL_OFFSET),
    ]
    for name, numbers in allowed.items():
        number = numbers[machine.column]
        if number is None:
            continue
        block = [_Instruction(_RETURN, 0, 0, _ALLOW)]
        if name in conditions:
            condition = conditions[name]
            checks = [(_EQUAL, value) for value in condition.values]
            checks += [(_HAS_BITS, condition.bits)] if condition.bits else []
            refusal = otherwise if condition.refusal is None else condition.refusal
            block = [
                _Instruction(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * condition.argument),
                *(_Instruction(code, len(checks) - i, 0, value) for i, (code, value) in enumerate(checks)),
                *([_Instruction(_HAS_BITS, 0, 1, condition.forbidden_bits)] if condition.forbidden_bits else []),
                _Instruction(_RETURN, 0, 0, refusal),
                *block,
            ]
        program += [_Instruction(_EQUAL, 0, len(block), number), *block]
    return [*program, _Instruction(_RETURN, 0, 0, otherwise)]


if __name__ == "__main__":
    sys.exit(0 if confine() else 1)
