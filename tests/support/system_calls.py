"""Kills a process, or makes a system call of it fail, at any chosen system call on files.

`run` forks this process, so that all that is imported and loaded is there already, and traces the
child with ptrace. Seccomp stops it only at system calls that concern files, and only those on files
under one folder are counted. What libraries do in C or Rust is seen like what Python does.

Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import fcntl
from pathlib import Path
from typing import Literal

import pytest

needs_tracing = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="registers are read and changed as on Linux, x86-64",
)

Ending = Literal["done", "raised", "crashed", "killed", "stuck"]

MAX_SECONDS = 900  # of a child, after which it counts as stuck
_RAISED, _CRASHED = 3, 4  # exit codes
_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031

# Number by name, and which argument is a path or a file descriptor. A path may be relative to the
# descriptor of a folder, which is the argument before it.
_BY_DESCRIPTOR = {
    "read": 0,
    "write": 1,
    "close": 3,
    "fstat": 5,
    "lseek": 8,
    "pread64": 17,
    "pwrite64": 18,
    "writev": 20,
    "flock": 73,
    "fsync": 74,
    "fdatasync": 75,
    "ftruncate": 77,
    "fchmod": 91,
    "getdents64": 217,
    "fallocate": 285,
}
_BY_PATH = {
    "open": 2,
    "stat": 4,
    "lstat": 6,
    "access": 21,
    "rename": 82,
    "mkdir": 83,
    "rmdir": 84,
    "link": 86,
    "unlink": 87,
    "symlink": 88,
    "chmod": 90,
}
_BY_FOLDER_AND_PATH = {
    "openat": 257,
    "mkdirat": 258,
    "newfstatat": 262,
    "unlinkat": 263,
    "renameat": 264,
    "linkat": 265,
    "fchmodat": 268,
    "faccessat": 269,
    "utimensat": 280,
    "renameat2": 316,
    "statx": 332,
    "faccessat2": 439,
}
# The file that is written is the second of two descriptors, or the third argument.
_COPIES = {"sendfile": (40, 0), "copy_file_range": (326, 2)}
_NAMES = {
    number: name
    for table in (_BY_DESCRIPTOR, _BY_PATH, _BY_FOLDER_AND_PATH)
    for name, number in table.items()
} | {number: name for name, (number, _) in _COPIES.items()}
_READS = {
    *("read", "pread64", "lseek", "fstat", "getdents64", "stat", "lstat", "access", "newfstatat"),
    *("faccessat", "faccessat2", "statx"),
}
WRITES = {"write", "pwrite64"}

_AT_FDCWD = -100


@dataclass(frozen=True, slots=True)
class Call:
    """A system call on a file of the folder, before it is carried out."""

    number: int  # among all of the run, from 1
    name: str
    path: str
    is_change: bool  # of a file or of the folder; else it only reads

    def __str__(self) -> str:
        return f"{self.number} {self.name} {self.path}"


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL before the call; of a write, this share of the bytes arrives."""

    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Fail:
    """The call reports an error and does nothing; only `close` closes nevertheless, as in Linux."""

    error: int


@dataclass(frozen=True, slots=True)
class Short:
    """A write takes this share of the bytes only, and says so, as on a disk that is nearly full."""

    share: float


Fault = Kill | Fail | Short
Decide = Callable[[Call], Fault | None]
Say = Callable[[str], None]


@dataclass
class Run:
    """What a traced child did."""

    ending: Ending = "done"
    said: list[str] = field(default_factory=list)  # lines, also those before a kill
    error: str = ""  # what it raised: type and text; a whole traceback if it is no expected error
    calls: list[Call] = field(default_factory=list)
    fault_at: Call | None = None  # the last one

    @property
    def changes(self) -> int:
        return sum(call.is_change for call in self.calls)


def no_fault(call: Call) -> Fault | None:
    return None


def run(
    work: Callable[[Say], None],
    folder: Path,
    decide: Decide = no_fault,
    expected: tuple[type[Exception], ...] = (OSError,),
    *,
    changes_only: bool = False,
    share: float = 1.0,
) -> Run:
    """Do `work` in a traced child; it can say lines that are kept whatever happens to it.

    Exceptions of the `expected` types end in "raised", others in "crashed". For speed, calls that
    only read are not counted with `changes_only`, and only a random `share` of all calls is.
    """
    reading, writing = os.pipe()
    fcntl(writing, _SET_PIPE_SIZE, _PIPE_BYTES)  # what is said is read at the end
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_traced(work, writing, expected, changes_only)
    os.close(writing)
    found = _Tracer(child, folder, decide, share).trace()
    with os.fdopen(reading, encoding="utf-8") as pipe:
        lines = pipe.read().split("\n")
    found.said, last = lines[:-1], lines[-1]
    if found.ending in ("raised", "crashed"):
        found.error = last.replace("\0", "\n")
    return found


def _be_traced(
    work: Callable[[Say], None],
    pipe: int,
    expected: tuple[type[Exception], ...],
    changes_only: bool,
) -> None:
    """The child's part; never returns."""
    code = _CRASHED
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(MAX_SECONDS)
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        _stop_at_calls_on_files(changes_only)
        try:
            work(lambda line: _say(pipe, line + "\n"))
            code = 0
        except expected as error:
            code = _RAISED
            _say(pipe, f"{type(error).__name__}: {error}".replace("\n", "\0"))
    except BaseException:
        _say(pipe, traceback.format_exc().replace("\n", "\0"))
    finally:
        os._exit(code)


def _say(pipe: int, text: str) -> None:
    os.write(pipe, text.encode("utf-8", "replace"))


class _Tracer:
    """The parent's part: decides at every counted call.

    It goes on until all that the child has started has ended too.
    """

    def __init__(self, child: int, folder: Path, decide: Decide, share: float) -> None:
        self._child, self._decide, self._share = child, decide, share
        self._folder = str(folder.resolve())
        self._known = {child}
        self._run = Run()

    def trace(self) -> Run:
        _wait(self._child)  # it has stopped itself
        _ptrace(_SETOPTIONS, self._child, 0, _OPTIONS)
        _ptrace(_CONT, self._child)
        while self._known:
            # Of any process group: what the child has started may have left its group.
            task, status = os.waitpid(-1, _WALL)
            if os.WIFSTOPPED(status):
                self._go_on(task, status)
                continue
            self._known.discard(task)
            if task == self._child:
                self._run.ending = _ending(status)
                with suppress(ProcessLookupError):
                    os.killpg(task, signal.SIGKILL)  # others of its group; those outside may go on
        return self._run

    def _go_on(self, task: int, status: int) -> None:
        number, event = os.WSTOPSIG(status), status >> 16
        is_new = task not in self._known
        self._known.add(task)
        with suppress(ProcessLookupError):  # killed meanwhile
            is_counted = self._child in self._known and (
                self._share == 1 or random.random() < self._share
            )
            if event == _EVENT_SECCOMP and is_counted:
                self._at_call(task)
            deliver = event == 0 and not is_new and number not in (signal.SIGSTOP, signal.SIGTRAP)
            _ptrace(_CONT, task, 0, number if deliver else 0)

    def _at_call(self, task: int) -> None:
        registers = _Registers()
        _ptrace(_GETREGS, task, 0, ctypes.addressof(registers))
        name = _NAMES[registers.orig_rax]
        path = self._path(task, name, registers)
        if path != self._folder and not path.startswith(self._folder + "/"):
            return
        call = Call(
            len(self._run.calls) + 1,
            name,
            path[len(self._folder) + 1 :],
            _is_change(name, registers),
        )
        self._run.calls.append(call)
        fault = self._decide(call)
        if fault is None:
            return
        self._run.fault_at = call
        if isinstance(fault, Fail):
            self._fail(task, name, registers, fault.error)
            return
        if name in WRITES and (written := int(fault.share * registers.rdx)):
            registers.rdx = written
            _ptrace(_SETREGS, task, 0, ctypes.addressof(registers))
            self._finish_call(task)
        if isinstance(fault, Kill):
            os.kill(self._child, signal.SIGKILL)

    def _fail(self, task: int, name: str, registers: _Registers, error: int) -> None:
        if name == "close":
            self._finish_call(task)
            _ptrace(_GETREGS, task, 0, ctypes.addressof(registers))
        else:
            registers.orig_rax = 2**64 - 1  # no call
        registers.rax = 2**64 - error
        _ptrace(_SETREGS, task, 0, ctypes.addressof(registers))

    def _finish_call(self, task: int) -> None:
        _ptrace(_SYSCALL, task)
        _wait(task)

    def _path(self, task: int, name: str, registers: _Registers) -> str:
        first, second, third = registers.rdi, registers.rsi, registers.rdx
        if name in _COPIES:
            return _path_of(task, third if _COPIES[name][1] == 2 else first)
        if name in _BY_DESCRIPTOR:
            return _path_of(task, first)
        path = _text_at(task, second if name in _BY_FOLDER_AND_PATH else first)
        if path.startswith("/"):
            return path
        at = ctypes.c_int(first & 0xFFFFFFFF).value if name in _BY_FOLDER_AND_PATH else _AT_FDCWD
        base = _linked(task, "cwd" if at == _AT_FDCWD else f"fd/{at}")
        return f"{base}/{path}" if path else base


def _is_change(name: str, registers: _Registers) -> bool:
    if name in ("open", "openat"):
        flags = registers.rdx if name == "openat" else registers.rsi
        return bool(flags & (os.O_CREAT | os.O_TRUNC))
    # Closing a file releases a lock, and changes nothing else.
    return name not in _READS and name != "close"


def _path_of(task: int, descriptor: int) -> str:
    return _linked(task, f"fd/{descriptor & 0xFFFFFFFF}")


def _linked(task: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{task}/{name}")  # noqa: PTH115 - much faster
    except OSError:
        return ""


def _text_at(task: int, address: int) -> str:
    """The text that ends with a zero byte."""
    page = 4096
    found = b""
    try:
        memory = os.open(f"/proc/{task}/mem", os.O_RDONLY)
    except OSError:
        return ""
    try:
        while b"\0" not in found:
            part = os.pread(memory, page - address % page, address)
            found, address = found + part, address + len(part)
    except OSError:
        return ""
    finally:
        os.close(memory)
    return os.fsdecode(found.partition(b"\0")[0])


def _ending(status: int) -> Ending:
    if os.WIFSIGNALED(status):
        return "stuck" if os.WTERMSIG(status) == signal.SIGALRM else "killed"
    endings: dict[int, Ending] = {0: "done", _RAISED: "raised"}
    return endings.get(os.WEXITSTATUS(status), "crashed")


def _wait(task: int) -> None:
    os.waitpid(task, _WALL)


# ptrace(2) and seccomp(2)

_WALL = 0x40000000
_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
_EVENT_SECCOMP = 7
# New processes and threads are traced too: the filter would make their calls fail otherwise.
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 1 << _EVENT_SECCOMP | 0x100000
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong]


class _Registers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_ulonglong)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx"),
            *("rdx", "rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base"),
            *("gs_base", "ds", "es", "fs", "gs"),
        )
    ]
    rax: int
    rdx: int
    rsi: int
    rdi: int
    orig_rax: int


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]


def _ptrace(request: int, task: int, address: int = 0, data: int = 0) -> None:
    ctypes.set_errno(0)
    if _libc.ptrace(request, task, address, data) == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), f"ptrace: {os.strerror(ctypes.get_errno())}")


def _stop_at_calls_on_files(changes_only: bool) -> None:
    left_out = {*_READS, "close"} if changes_only else set()
    numbers = sorted(number for number, name in _NAMES.items() if name not in left_out)
    steps = [struct.pack("HBBI", _LOAD, 0, 0, 0)]  # the number of the call
    for place, number in enumerate(numbers):
        steps.append(struct.pack("HBBI", _JUMP_IF_EQUAL, len(numbers) - place, 0, number))
    steps += [struct.pack("HBBI", _RETURN, 0, 0, what) for what in (_ALLOW, _TRACE)]
    content = ctypes.create_string_buffer(b"".join(steps))
    program = _FilterProgram(len(steps), ctypes.addressof(content))
    if _libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or _libc.prctl(
        _SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "this system allows no seccomp filter")
