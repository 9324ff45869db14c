"""vLLM's load generator in a process that is started once and used for many loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from leadout.engine.load import Answer, LoadError, LoadRequest, LoadResult

LOG_TAIL_LINES = 20


class LoadGenerator:
    """`with LoadGenerator(log) as generator:` then `generator.run(request)`, any number of times.

    It reads requests from a pipe that we hold, so it ends with us, however we end.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # One thread: it must not take cores from the servers that it measures.
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "leadout.engine.load"],
                env={**os.environ, **quiet},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C is ours to handle
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def run(self, request: LoadRequest) -> LoadResult:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request.model_dump_json() + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise LoadError(f"vLLM's load generator ended\n{self._log_tail()}")
        answer = Answer.model_validate_json(line)
        if answer.result is None:
            raise LoadError(answer.error)
        return answer.result

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([f"last lines of {self._log}:", *lines[-LOG_TAIL_LINES:]])
