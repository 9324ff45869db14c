"""What tests of the engine package share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def leadout_log() -> Iterator[list[str]]:
    """What is logged, however vLLM or an earlier test has configured its loggers."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger = logging.getLogger("vllm.leadout")
    before = logger.handlers, logger.propagate, logger.level, logger.disabled
    logger.handlers, logger.propagate, logger.disabled = [Collect()], False, False
    logger.setLevel(logging.DEBUG)
    yield found
    logger.handlers, logger.propagate, _, logger.disabled = before
    logger.setLevel(before[2])
