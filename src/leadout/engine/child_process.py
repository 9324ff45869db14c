"""Child processes: call a module with typed requests, or guard a command so that it never leaks.

`Child` starts `python -m MODULE` and sends it requests; the module answers them with
`answer_requests`. Engines run this way: vLLM's counters belong to a process, a crash of the engine
must not end the command that asked, and its log lines go into a file instead of onto the terminal.

`python -m leadout.engine.child_process FD -- COMMAND` runs a command that must not outlive its
owner. The owner holds the write end of a pipe whose read end is FD. However the owner ends -
returns, raises, is killed with SIGKILL - the kernel closes its end, and the guard then stops the
command and all processes that it started. It finds vLLM's engine core and workers even when their
parent is gone, because it adopts orphans. Then it removes the folder that the variable
LEADOUT_GUARD_REMOVES names, if there is one: hidden states of users' text, for example.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict

from leadout.errors import LeadoutError

LOG_TAIL_LINES = 40
GUARD_REMOVES = "LEADOUT_GUARD_REMOVES"
EXIT_SECONDS = 30.0  # for a child to exit after its last request
# Set by torchrun; vLLM would take the trainer's ranks and rendezvous address for its own.
_TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
# Replies of a child, one per line: the kind, a space, then text (progress) or JSON.
_RESULT, _PROGRESS, _ERROR = "result", "progress", "error"
_TRITON_FLOAT32 = "TRITON_F32_DEFAULT"

logger = logging.getLogger("leadout")

Report = Callable[[str], None]
Request = TypeVar("Request", bound=BaseModel)
Result = TypeVar("Result", bound=BaseModel)


class EngineError(LeadoutError):
    """vLLM did not start, refused its input or died; the message names the reason or the log."""


class Message(BaseModel):
    """Base of requests to a child process and of its results."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for a process that runs vLLM."""
    return {name: value for name, value in environment.items() if not name.startswith(_TORCHRUN)}


def exact_environment(dtype: str) -> dict[str, str]:
    """Variables for an engine in this type whose results are compared with others.

    Triton computes products of float32 in TF32 unless told otherwise, whose rounding is far larger
    than the differences that are looked for in float32.
    """
    if dtype != "float32":
        return {}
    return {_TRITON_FLOAT32: os.environ.get(_TRITON_FLOAT32, "ieee")}


def ignore_progress(_: str) -> None:
    """The default for callers that show no progress."""


class Child:
    """`python -m MODULE` in its own process, for as long as the `with` block lasts.

    Everything the process prints goes into `log`. Without one it goes into a temporary file, which
    is kept only if the process dies, so that the error can name it.
    """

    def __init__(
        self,
        module: str,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        name: str = "vLLM's process",
    ) -> None:
        """`name` is what messages call the process."""
        self._module = module
        self._name = name
        self._log = log
        self._environment = without_torchrun({**os.environ, **(environment or {})})
        self._temporary_log: Path | None = None
        self._is_dead = False
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        if self._log is None:
            handle, name = tempfile.mkstemp(prefix="leadout-vllm-", suffix=".log")
            os.close(handle)
            self._log = self._temporary_log = Path(name)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches the parent only, which stops the child
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._is_dead:
                self._close()
        finally:
            self._process.kill()
            with suppress(BrokenPipeError), self._process:
                pass  # closes the pipes and waits
            if self._temporary_log is not None:
                self._temporary_log.unlink(missing_ok=True)

    def call(
        self,
        request: BaseModel,
        result: type[Result],
        report: Report = ignore_progress,
        seconds: float | None = None,
    ) -> Result:
        """Send a request and wait for its result; `report` receives the child's progress."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(seconds or 0, self._process.kill)
        if seconds is not None:
            timer.start()
        try:
            self._process.stdin.write(request.model_dump_json() + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                kind, _, text = line.partition(" ")
                if kind == _RESULT:
                    return result.model_validate_json(text)
                if kind == _ERROR:
                    sent = json.loads(text)
                    error = EngineError(sent["message"])
                    error.exit_code = sent["exit_code"]
                    raise error
                report(text.strip())
        except BrokenPipeError:
            pass
        finally:
            is_late = timer.finished.is_set()
            timer.cancel()
        raise self._death(f"did not answer within {seconds:g} s" if is_late else None)

    def _close(self) -> None:
        """End of input: the child exits, and an engine in it can release what it holds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(EXIT_SECONDS)) != 0:
                # Its results are complete; on GPUs libraries may fail when an engine is torn down.
                self._temporary_log = None  # the message names it
                what = f"{self._name} {ending(code)}"
                logger.warning("%s, after its result. Its log: %s", what, self._log)

    def _death(self, why: str | None = None) -> EngineError:
        assert self._log is not None
        self._is_dead = True
        self._temporary_log = None  # the message names it
        code = self._process.wait()
        return EngineError(f"{self._name} {why or ending(code)}.\n{log_tail(self._log)}")


def run_module(
    module: str,
    request: BaseModel,
    result: type[Result],
    report: Report = ignore_progress,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """One request to a module in its own process."""
    with Child(module, environment=environment) as child:
        return child.call(request, result, report)


def answer_requests(request: type[Request], answer: Callable[[Request, Report], BaseModel]) -> None:
    """The child's side: answer requests from standard input until it ends.

    A `LeadoutError` is sent back as such; any other exception ends the process.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of vLLM and of its libraries go into the log
    # A parent that died before this call has closed the pipe with the requests.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def send(kind: str, text: str) -> None:
        replies.write(f"{kind} {text}\n")

    for line in sys.stdin:
        try:
            found = answer(request.model_validate_json(line), lambda text: send(_PROGRESS, text))
        except LeadoutError as problem:
            error = {"message": str(problem), "exit_code": problem.exit_code}
            send(_ERROR, json.dumps(error))
        else:
            send(_RESULT, found.model_dump_json())


def ending(code: int) -> str:
    """How a process ended, for an error: by its exit code as Python or a shell reports it."""
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return (
            f"was killed (exit code {code}), most likely because the memory was full: run fewer "
            "processes at a time or give each less"
        )
    return f"ended with exit code {code}"


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, with its path as the heading."""
    kept = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"Last lines of {log}:", *(kept or ["(empty)"])])


# The guard

POLL_SECONDS = 0.1
GRACE_SECONDS = 15.0  # for a clean shutdown, before SIGKILL
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    lifeline, separator, command = int(arguments[0]), arguments[1], arguments[2:]
    if separator != "--" or not command:
        raise SystemExit("usage: python -m leadout.engine.child_process FD -- COMMAND...")
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    folder = os.environ.pop(GUARD_REMOVES, None)  # not for guards of the command
    stop_requested = False

    def request_stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stop_requested
        stop_requested = True

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    child = subprocess.Popen(command)
    while child.poll() is None and not stop_requested:
        # Nothing is ever written to the lifeline: readable means closed by the owner.
        readable, _, _ = select.select([lifeline], [], [], POLL_SECONDS)
        stop_requested = stop_requested or bool(readable)
    _stop_with_descendants(child)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _stop_with_descendants(child: subprocess.Popen[bytes]) -> None:
    """Terminate the command, wait a little, then kill whatever it left behind."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # a paused process would not see the other signals
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    while remaining := descendants(os.getpid()):
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Adopted children that have ended would stay as zombies.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_SECONDS)


def prctl(option: int, value: int) -> None:
    """The system call of that name, on this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def forbid_core_dumps() -> None:
    """No memory of this process gets into a core file: for those that have what users wrote.

    The limit alone is not enough: it does not apply where the system pipes core dumps to a program.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl(_PR_SET_DUMPABLE, 0)


def descendants(ancestor: int) -> list[int]:
    """All processes that come from `ancestor`, nearest first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state ppid ...": the name may hold spaces and brackets.
            after_name = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    generation = [ancestor]
    while generation:
        generation = [pid for parent in generation for pid in children.get(parent, [])]
        found += generation
    return found


def processor_seconds(pid: int) -> float:
    """User and system time of a process and its threads; 0 for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
