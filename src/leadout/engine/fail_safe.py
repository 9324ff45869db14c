"""Optional parts that switch themselves off after their first error, so that serving goes on.

What Leadout adds to a vLLM server (live control, capture, metrics) must never cost a request. Such
a part runs its code under a `FailSafe`:

    self._fail_safe = FailSafe("live control", on_failure=self._close)
    with self._fail_safe:
        ...

The first exception is logged, calls `on_failure` and turns `is_on` to False; the part checks
`is_on` (or what `on_failure` has cleared) before it does anything again.
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


class FailSafe:
    """A context manager that swallows exceptions and switches its part off at the first one."""

    def __init__(self, part: str, on_failure: Callable[[], None] = lambda: None) -> None:
        """`part` names what is switched off, as in "live control"; it begins the log line."""
        self._part = part
        self._on_failure = on_failure
        self.is_on = True

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False  # no error, or one that ends the process
        if self.is_on:
            self.is_on = False
            logger.error(
                "Leadout's %s is off after an error: %s: %s. Serving goes on without it; set %s=0 "
                "to run vLLM without Leadout.",
                self._part,
                type(error).__name__,
                error,
                SWITCH,
            )
            with suppress(Exception):
                self._on_failure()
        return True


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
