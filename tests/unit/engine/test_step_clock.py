"""Seconds of steps that overlap, and of steps in which the process was stopped."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from leadout.engine.step_clock import Continuations, StepClock


def test_idle_time_belongs_to_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 1.5, 9.0, 9.25])  # scheduled, ended, scheduled, ended
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    clock = StepClock()
    assert clock.end(clock.start()) == pytest.approx(0.5)
    assert clock.end(clock.start()) == pytest.approx(0.25)


def test_steps_scheduled_ahead_start_when_the_one_before_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter([1.0, 1.1, 2.0, 2.1, 3.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    clock = StepClock()
    first, second = clock.start(), clock.start()
    assert clock.end(first) == pytest.approx(1.0)
    clock.start()
    assert clock.end(second) == pytest.approx(1.5)


def test_a_step_that_spans_a_stop_is_not_timed() -> None:
    clock = StepClock()
    step = clock.start()
    os.kill(os.getpid(), signal.SIGCONT)
    assert clock.end(step) is None
    assert clock.end(clock.start()) is not None


@pytest.fixture
def default_action() -> Iterator[None]:
    """SIGCONT without a handler, as at the start of a process."""
    before = signal.signal(signal.SIGCONT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCONT, before)


def test_stops_are_counted_next_to_another_handler(default_action: None) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGCONT, lambda number, frame: seen.append(number))
    continuations = Continuations()
    for _ in range(2):  # the second engine of a process
        continuations.listen()
    os.kill(os.getpid(), signal.SIGCONT)
    assert continuations.count == 1
    assert seen == [signal.SIGCONT]


def test_only_the_main_thread_listens(default_action: None) -> None:
    continuations = Continuations()
    thread = threading.Thread(target=continuations.listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGCONT) is signal.SIG_DFL
    continuations.listen()
    os.kill(os.getpid(), signal.SIGCONT)
    assert continuations.count == 1
