"""An engine in a process of its own, which reads a request and writes its result.

A module that is run so reads the request as JSON from its standard input, may write progress, and
writes the result as its last line. One engine a process: vLLM's counters are the process's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

RESULT = "LEADOUT-RESULT "
PROGRESS = "LEADOUT-PROGRESS "
# What torchrun sets; vLLM would take the trainer's ranks and its meeting place for its own.
_OF_TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
LOG_TAIL_LINES = 30

Report = Callable[[str], None]
Result = TypeVar("Result", bound=BaseModel)


class DecodeError(RuntimeError):
    """The engine did not get through; the message ends with its last lines."""


def run_apart(
    module: str, request: BaseModel, result: type[Result], report: Report = lambda _: None
) -> Result:
    """Run a module of this package with a request; `report` hears of its progress."""
    found: str | None = None
    said: deque[str] = deque(maxlen=LOG_TAIL_LINES)
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as asked:
        asked.write(request.model_dump_json())
        asked.seek(0)
        with subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={n: value for n, value in os.environ.items() if not n.startswith(_OF_TORCHRUN)},
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith(RESULT):
                        found = line.removeprefix(RESULT)
                    elif line.startswith(PROGRESS):
                        report(line.removeprefix(PROGRESS).strip())
                    else:
                        said.append(line.rstrip("\n"))
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 or found is None:
            errors.seek(0)
            said.extend(line.rstrip("\n") for line in errors)
            tail = "\n".join(said)
            raise DecodeError(f"vLLM ended with code {process.returncode}; its last lines:\n{tail}")
    return result.model_validate_json(found)


def say_progress(text: str) -> None:
    sys.stdout.write(f"\n{PROGRESS}{text}\n")
    sys.stdout.flush()


def say_result(result: BaseModel) -> None:
    sys.stdout.write(f"\n{RESULT}{result.model_dump_json()}\n")
