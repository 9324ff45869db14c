"""Parts that fail are switched off with one log line; others are tried again, and log rarely."""

import logging

import pytest

from leadout.engine import fail_safe as fail_safe_module
from leadout.engine.fail_safe import Backoff, FailSafe, LimitedLog


def test_first_error_switches_the_part_off_and_is_logged_once(
    leadout_log: list[str],
) -> None:
    cleared: list[bool] = []
    fail_safe = FailSafe("live control", on_failure=lambda: cleared.append(True))
    with fail_safe:
        pass
    assert fail_safe.is_on
    for _ in range(3):
        with fail_safe:
            raise ValueError("no such step")
    assert not fail_safe.is_on
    assert cleared == [True]
    [message] = leadout_log
    assert "Leadout's live control is off after an error: ValueError: no such step. " in message


def test_error_in_the_cleanup_is_swallowed_too() -> None:
    def fail() -> None:
        raise OSError("disk full")

    with FailSafe("capture", on_failure=fail):
        raise ValueError("no such step")


def test_interrupts_are_not_swallowed() -> None:
    fail_safe = FailSafe("capture")
    with pytest.raises(KeyboardInterrupt), fail_safe:
        raise KeyboardInterrupt
    assert fail_safe.is_on


def test_a_repeated_problem_is_logged_once_a_minute(
    leadout_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(fail_safe_module.time, "monotonic", lambda: now)
    log = LimitedLog(logging.WARNING)
    for now in (0.0, 30.0, 59.0, 60.0, 61.0):
        log("problem %d", int(now))
    assert leadout_log == ["problem 0", "problem 60"]


@pytest.mark.parametrize("lost_seconds", [5, 70, 700, 7000])
def test_what_failed_for_long_is_tried_again_soon_after_the_cause_is_gone(
    monkeypatch: pytest.MonkeyPatch, lost_seconds: int
) -> None:
    """A server has half a minute to follow the pointer; the swap itself takes some of it."""
    now = 0.0
    monkeypatch.setattr(fail_safe_module.time, "monotonic", lambda: now)
    retry, attempts = Backoff(), 0
    while now < lost_seconds or not retry.is_due:
        if retry.is_due:
            attempts += 1
            retry.failed()
        now += 1.0
    assert now - lost_seconds <= 20
    assert attempts < 5 + lost_seconds / 10  # and storage that is lost is left in peace
