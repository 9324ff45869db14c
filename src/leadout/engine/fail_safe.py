"""Optional parts that switch themselves off after their first error, so that serving goes on.

What Leadout adds to a vLLM server (live control, capture, metrics) must never cost a request. Such
a part runs its code under a `FailSafe`:

    self._fail_safe = FailSafe("live control", on_failure=self._close)
    with self._fail_safe:
        ...

The first exception is logged, calls `on_failure` and turns `is_on` to False; the part checks
`is_on` (or what `on_failure` has cleared) before it does anything again.

What may succeed later is tried again with a `Backoff` instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from leadout.engine.plugin import SWITCH

# A child of vLLM's logger, so that VLLM_LOGGING_LEVEL governs it.
logger = logging.getLogger("vllm.leadout")

SECONDS_BETWEEN_LOG_LINES = 60.0
# Half a minute after storage is back, every server should be on the version that it names.
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 2.0, 20.0


class FailSafe:
    """A context manager that swallows exceptions and switches its part off at the first one."""

    def __init__(
        self,
        part: str,
        on_failure: Callable[[], None] = lambda: None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """`part` names what is switched off, as in "live control"; it begins the log line.

        `report` gets that line instead of vLLM's log, for parts of other commands than `serve`.
        """
        self._part = part
        self._on_failure = on_failure
        self._report = report or _log_for_server
        self.is_on = True

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False  # no error, or one that ends the process
        if self.is_on:
            self.is_on = False
            self._report(f"{self._part} is off after an error: {type(error).__name__}: {error}.")
            with suppress(Exception):
                self._on_failure()
        return True


def _log_for_server(problem: str) -> None:
    logger.error(
        "Leadout's %s Serving goes on without it; set %s=0 to run vLLM without Leadout.",
        problem,
        SWITCH,
    )


class LimitedLog:
    """Logs at most one line a minute, for problems that may repeat with every request."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._last_line = -SECONDS_BETWEEN_LOG_LINES

    def __call__(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LOG_LINES:
            self._last_line = now
            logger.log(self._level, message, *values)


class Backoff:
    """When to try again after a failure: soon, then less and less often."""

    def __init__(self) -> None:
        self._seconds = self._due = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def failed(self) -> None:
        self._seconds = min(max(2 * self._seconds, FIRST_RETRY_SECONDS), MAX_RETRY_SECONDS)
        self._due = time.monotonic() + self._seconds

    def reset(self) -> None:
        self._seconds = self._due = 0.0
