"""Takes rights from the processes of a sandbox: namespaces, Landlock, seccomp, capabilities and limits of Linux.

Invariant: a program that has been through `Isolation.confine` cannot reach a file but those that `Isolation` names, nor
the network, nor any process but itself, and cannot undo it. Whatever the kernel refuses on the way raises `OSError`, so
that no program runs with less. `rewards/sandbox_worker.py` calls it, in processes that hold nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Literal

from tba.rewards.confined import CallFilter, Condition, refusal_of

Level = Literal["namespaces", "landlock"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOBODY = 65534
_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000  # namespaces, of unshare
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_NO_SUID, _NO_DEVICES, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 4096, 16384, 1 << 18  # of mount
_DETACH = 2  # of umount2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SET_MOUNT_ATTRIBUTES, _ATTRIBUTE_READ_ONLY, _AT_RECURSIVE = 442, 1, 0x8000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PATH_RULE = 444, 445, 446, 1  # of Landlock
_CAPSET = {"x86_64": 126, "aarch64": 91}
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38  # of prctl

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE = 1, 2, 4, 8, 1 << 14  # rights of Landlock
_CHANGE_FOLDER = 0x11B0  # remove and make files, folders and symbolic links
_ALL_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}  # by version, the last one also of later ones
_TRUNCATION_VERSION = 3  # from which on it rules who may shorten a file
_ALL_NETWORK, _ALL_SCOPES = 3, 3  # TCP; signals and abstract sockets
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_PROGRAMS = ("/usr/bin", "/bin", "/usr/include", "/usr/libexec", "/etc/alternatives")
_HIDDEN = ("site-packages", "dist-packages")


def _read_calls(table: str) -> dict[str, tuple[int | None, int | None]]:
    """Returns system calls by name, with their numbers on x86_64 and on aarch64."""
    rows = [row.split() for row in table.split(",")]
    return {name: (_number(x86_64), _number(aarch64)) for name, x86_64, aarch64 in rows}


def _number(word: str) -> int | None:
    return None if word == "-" else int(word)


_CALLS = _read_calls("""
    read 0 63, write 1 64, mmap 9 222, munmap 11 215, brk 12 214, futex 202 98, close 3 57, lseek 8 62, openat 257
    56, open 2 -, newfstatat 262 79, stat 4 -, fstat 5 80, lstat 6 -, statx 332 291, readlink 89 -, readlinkat 267
    78, access 21 -, faccessat 269 48, faccessat2 439 439, getdents64 217 61, getcwd 79 17, chdir 80 49, mkdir 83 -,
    mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276,
    symlink 88 -, symlinkat 266 36, ftruncate 77 46, fsync 74 82, fdatasync 75 83, umask 95 166, pread64 17 67,
    pwrite64 18 68, readv 19 65, writev 20 66, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -,
    ppoll 271 73, select 23 -, pselect6 270 72, close_range 436 436, mprotect 10 226, mremap 25 216, madvise 28 233,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
    sigaltstack 131 132, alarm 37 -, getitimer 36 102, setitimer 38 103, nanosleep 35 101, clock_nanosleep 230 115,
    clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, sched_yield 24 124,
    sched_getaffinity 204 123, sysinfo 99 179, uname 63 160, getpid 39 172, gettid 186 178, getppid 110 173, getuid
    102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getpgrp 111 -,
    getpgid 121 155, getrlimit 97 163, getrusage 98 165, getrandom 318 278, set_tid_address 218 96, set_robust_list
    273 99, rseq 334 293, arch_prctl 158 -, restart_syscall 219 128, exit 60 93, exit_group 231 94, ioctl 16 29,
    fcntl 72 25, prlimit64 302 261, prctl 157 167, clone 56 220, clone3 435 435
""")
_COMMAND_CALLS = _read_calls("""
    fork 57 -, vfork 58 -, execve 59 221, wait4 61 260, waitid 247 95, setpgid 109 154, setsid 112 157, chmod 90 -,
    fchmod 91 52, fchmodat 268 53, utimensat 280 88, statfs 137 43, fadvise64 221 223, copy_file_range 326 285,
    setrlimit 160 164, kill 62 129, tgkill 234 131, sendfile 40 71
""")  # what compilers and their outputs need beside
_CLONE_THREAD = 0x10000
_TERMINAL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5451, 0x5450)  # is it one, its size, bytes to read, close on exec
_DESCRIPTOR_REQUESTS = (0, 1, 2, 3, 4, 1030, 1032)  # copy, flags, size of a pipe; not whom it signals
_SET_NAME = 15  # of prctl


@dataclass(frozen=True)
class Bounds:
    """What one program may take."""

    cpu_seconds: float
    memory_bytes: int  # of address space
    file_bytes: int = 16 << 20  # of one file, and at the level of namespaces of all
    files: int = 64  # open at once
    processes: int = 64  # threads, of all processes of the program


class Isolation:
    """How programs are confined, once for all programs of a process that starts them."""

    def __init__(self, level: Level, packages: Sequence[str], runs_commands: bool) -> None:
        """packages: folders and files with Python packages that programs may read. runs_commands: programs of other
        languages are compiled and run.
        """
        self.level, self.runs_commands = level, runs_commands
        self.is_root = os.geteuid() == 0
        self._landlock = _LIBC.syscall(_CREATE_RULESET, None, 0, 1)  # its version
        library = sysconfig.get_path("stdlib")
        siblings = [str(path) for path in Path(library).parent.glob("libpython*")]
        self.readable = [*_LIBRARIES, library, *siblings, *packages, *(_PROGRAMS if runs_commands else ())]
        self._library = library
        if level == "landlock" and self._landlock < 1:
            raise OSError(errno.ENOSYS, "this kernel has no Landlock")
        self._ruleset = self._open_ruleset(self._library_rules()) if level == "landlock" else -1
        self._process_namespace = -1
        calls, conditions = _calls(runs_commands)
        if level == "landlock" and self._landlock < _TRUNCATION_VERSION:  # opening a file that may be read can empty it
            conditions |= {name: Condition(i, forbidden_bits=os.O_TRUNC) for i, name in ((1, "open"), (2, "openat"))}
        self._filter = CallFilter(calls, conditions, refusal_of(errno.EPERM))

    @property
    def descriptors(self) -> list[int]:
        """Returns the descriptors that `confine` needs."""
        return [self._ruleset] if self._ruleset >= 0 else []

    def enter(self) -> None:
        """Moves this process into namespaces with a system of its own, read-only; the next fork is their first process.

        At the level of Landlock nothing happens.
        """
        if self.level != "namespaces":
            return
        new_user = 0 if self.is_root else _NEW_USER
        user, group = os.geteuid(), os.getegid()
        _check(
            _LIBC.unshare(new_user | _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_HOST_NAME | _NEW_PROCESSES), "unshare"
        )
        if new_user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")

    def build_root(self) -> None:
        """Replaces the file system of the namespaces by what programs may read; called by their first process."""
        if self.level != "namespaces":
            return
        self._process_namespace = os.open("/proc/self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC)
        sources = {path: os.path.realpath(path) for path in (*self.readable, *_DEVICES)}
        links = {path: os.readlink(path) for path in self.readable if os.path.islink(path) and path.count("/") == 1}
        _mount(None, "/", None, _RECURSIVE | _PRIVATE)
        _mount("tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,mode=755")  # noqa: S108 - the new root
        os.mkdir("/tmp/.host", 0o700)  # noqa: S108 - in it
        _check(_LIBC.syscall(_PIVOT_ROOT[platform.machine()], b"/tmp", b"/tmp/.host"), "pivot_root")
        os.chdir("/")
        for path, source in sources.items():
            if path in links:
                os.symlink(links[path], path)
            elif os.path.exists(f"/.host{source}") and not os.path.exists(path):
                _bind(f"/.host{source}", path, 0 if path in _DEVICES else _NO_DEVICES)
        libraries = (*_LIBRARIES, self._library)
        for hidden in {os.path.realpath(folder) for path in libraries for folder in _hidden_folders(path)}:
            _mount("tmpfs", hidden, "tmpfs", _NO_SUID | _NO_DEVICES, "size=4k,mode=755")
        for path in self.readable[len(_LIBRARIES) + 1 :]:  # packages, which may stand in what was hidden
            if os.path.exists(f"/.host{sources[path]}") and not os.path.exists(path):
                _bind(f"/.host{sources[path]}", path, _NO_DEVICES)
        for path in self._hidden_packages:
            _bind(path, f"/.packages{path}", _NO_DEVICES)
        os.makedirs("/tmp", 0o755, exist_ok=True)  # noqa: S108 - where each program has its own
        _check(_LIBC.umount2(b"/.host", _DETACH), "umount")
        os.rmdir("/.host")
        attributes = struct.pack("QQQQ", _ATTRIBUTE_READ_ONLY, 0, 0, 0)
        _check(_LIBC.syscall(_SET_MOUNT_ATTRIBUTES, -1, b"/", _AT_RECURSIVE, attributes, len(attributes)), "read-only")

    @property
    def _hidden_packages(self) -> list[str]:
        """Packages below /tmp, where programs have a folder of their own in their place."""
        return [path for path in self.readable[len(_LIBRARIES) + 1 :] if path.startswith("/tmp/")]  # noqa: S108 - hidden by it

    def fork(self) -> int:
        """Forks; at the level of namespaces the child is the first process of process namespaces of its own."""
        if self.level != "namespaces":
            return os.fork()
        _check(_LIBC.unshare(_NEW_PROCESSES), "unshare")
        if child := os.fork():
            _check(_LIBC.setns(self._process_namespace, _NEW_PROCESSES), "setns")
        return child

    def confine(self, bounds: Bounds) -> None:
        """Confines this process for good, before it runs a program. Raises `OSError` where anything fails."""
        writable: tuple[str, ...] = ()
        if self.level == "namespaces":
            writable = ("/tmp",)  # noqa: S108 - its own
            _check(_LIBC.unshare(_NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_HOST_NAME), "unshare")
            options = f"size={bounds.file_bytes},nr_inodes=1024,mode=1777"
            _mount("tmpfs", writable[0], "tmpfs", _NO_SUID | _NO_DEVICES, options)
            for path in self._hidden_packages:
                _bind(f"/.packages{path}", path, _NO_DEVICES)
            os.chdir(writable[0])
            if self.is_root:
                os.setgroups([])
                os.setresgid(_NOBODY, _NOBODY, _NOBODY)
                os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            _check(_LIBC.unshare(_NEW_USER), "unshare")
        self._limit(bounds)
        _check(_LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0), "prctl")
        _check(_LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
        _check(_LIBC.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
        if self._landlock > 0:
            ruleset = self._ruleset if self.level == "landlock" else self._open_ruleset(self._root_rules(writable))
            _check(_LIBC.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")
            os.close(ruleset)
        _check(_LIBC.syscall(_CAPSET[platform.machine()], struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
        if not self._filter.install():
            raise OSError(errno.ENOSYS, "this kernel has no seccomp")

    def _limit(self, bounds: Bounds) -> None:
        cpu_seconds = max(1, -int(-bounds.cpu_seconds // 1))
        limits = {
            resource.RLIMIT_CPU: cpu_seconds,
            resource.RLIMIT_AS: bounds.memory_bytes,
            resource.RLIMIT_FSIZE: bounds.file_bytes,
            resource.RLIMIT_NOFILE: bounds.files,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if self.level == "namespaces":  # elsewhere all processes of the user would count
            limits[resource.RLIMIT_NPROC] = bounds.processes
        for limit, value in limits.items():
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))

    def _library_rules(self) -> dict[str, int]:
        """Returns the rights at the level of Landlock by path: libraries without the packages installed in them."""
        paths = [path for path in self.readable if path not in (self._library, *_LIBRARIES)]
        paths += [entry.path for entry in os.scandir(self._library) if entry.name not in _HIDDEN]
        paths += [part for path in _LIBRARIES for part in _parts_without_packages(path)]
        return dict.fromkeys(paths, _READ_FILE | _READ_FOLDER) | dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE)

    def _root_rules(self, writable: Sequence[str]) -> dict[str, int]:
        """Returns the rights at the level of namespaces, whose root holds only what may be read."""
        execute = _EXECUTE if self.runs_commands else 0
        read = _READ_FILE | _READ_FOLDER | execute
        devices = dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE)
        return {"/": read, **dict.fromkeys(writable, read | _WRITE_FILE | _TRUNCATE | _CHANGE_FOLDER), **devices}

    def _open_ruleset(self, rights_by_path: Mapping[str, int]) -> int:
        handled = _ALL_RIGHTS[min(self._landlock, max(_ALL_RIGHTS))]
        words = [handled, _ALL_NETWORK, _ALL_SCOPES][: 1 + (self._landlock >= 4) + (self._landlock >= 6)]
        attributes = struct.pack(f"{len(words)}Q", *words)
        ruleset = _check(_LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock")
        for path, rights in rights_by_path.items():
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            allowed = rights & handled & (-1 if os.path.isdir(path) else _FILE_RIGHTS)
            rule = struct.pack("=Qi", allowed, descriptor)
            _check(_LIBC.syscall(_ADD_RULE, ruleset, _PATH_RULE, rule, 0), f"landlock {path}")
            os.close(descriptor)
        return ruleset


def _hidden_folders(path: str) -> list[str]:
    """Returns the folders of installed packages in a folder of libraries, or in the folders of Pythons in it."""
    patterns = [f"{escape(path)}/{place}{name}" for place in ("", "python*/") for name in _HIDDEN]
    return [folder for pattern in patterns for folder in glob(pattern)]


def _parts_without_packages(path: str) -> list[str]:
    """Returns a path; where packages are installed in it, what else it holds. Rights to a folder reach all in it."""
    if not _hidden_folders(path):
        return [path]
    entries = [entry for entry in os.scandir(path) if entry.name not in _HIDDEN and not entry.is_symlink()]
    return [part for entry in entries for part in _parts_without_packages(entry.path)]


def _calls(runs_commands: bool) -> tuple[dict[str, tuple[int | None, int | None]], dict[str, Condition]]:
    """Returns the calls that a program may make, and conditions of some of these."""
    conditions = {
        "ioctl": Condition(1, _TERMINAL_REQUESTS),
        "fcntl": Condition(1, _DESCRIPTOR_REQUESTS),
        "prctl": Condition(0, (_SET_NAME,)),
        "clone3": Condition(0, refusal=refusal_of(errno.ENOSYS)),  # its flags cannot be read; libraries go on to clone
    }
    if runs_commands:  # in process namespaces of their own
        return _CALLS | _COMMAND_CALLS, conditions
    return _CALLS, conditions | {"clone": Condition(0, bits=_CLONE_THREAD), "prlimit64": Condition(0, (0,))}


def _bind(source: str, target: str, flags: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _BIND | _RECURSIVE)
    attributes = struct.pack("QQQQ", _NO_SUID | flags, 0, 0, 0)
    _check(
        _LIBC.syscall(_SET_MOUNT_ATTRIBUTES, -1, target.encode(), _AT_RECURSIVE, attributes, len(attributes)), target
    )


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _check(result: int, action: str) -> int:
    """Returns the result of a system call. Raises `OSError` where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")
    return result
