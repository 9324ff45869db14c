"""Seconds of an engine's steps, also with scheduling ahead of the model and in stopped processes.

`StepClock.start` marks the moment at which a step is scheduled, `StepClock.end` returns its seconds
when its output has arrived. `StepsInFlight` keeps what a scheduler knows about a step until then.
With several steps in flight, one effectively starts when the one before it ends; the time for which
an engine has nothing to do belongs to no step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

MAX_IN_FLIGHT = 64  # outputs that never come back must not accumulate
Note = TypeVar("Note")


class Continuations:
    """Counts how often this process was continued (SIGCONT) after it had been stopped.

    `leadout bench` and `leadout tune` stop servers while others have their turn, and a step's time
    then says nothing about its work. A handler does not change the signal's effect.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_listening = False
        self._previous: Any = None

    def listen(self) -> None:
        """Count from now on; does nothing outside of the main thread, which alone can."""
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            return
        self._is_listening = True
        self._previous = signal.signal(signal.SIGCONT, self._continued)
        signal.siginterrupt(signal.SIGCONT, False)  # system calls go on, as without a handler

    def _continued(self, number: int, frame: Any) -> None:
        self.count += 1
        if callable(self._previous):
            self._previous(number, frame)


CONTINUATIONS = Continuations()


class Moment(NamedTuple):
    seconds: float
    continuations: int  # of the process, until then


class StepClock:
    """Times the steps of one engine, whose outputs arrive in the order of its steps."""

    def __init__(self) -> None:
        self._last_end = Moment(0.0, 0)
        CONTINUATIONS.listen()

    def start(self) -> Moment:
        continuations = CONTINUATIONS.count  # a stop between these lines belongs to the step
        return Moment(time.perf_counter(), continuations)

    def end(self, scheduled: Moment) -> float | None:
        """Seconds of a step that has just ended; None if the process was stopped meanwhile."""
        started = max(scheduled, self._last_end)
        # A stop between these lines belongs to this step and to the next one.
        continuations = CONTINUATIONS.count
        self._last_end = Moment(time.perf_counter(), continuations)
        if CONTINUATIONS.count != started.continuations:
            return None
        return self._last_end.seconds - started.seconds


class StepsInFlight(Generic[Note]):
    """A note on each step whose output has not arrived: several, if scheduling runs ahead."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Any, Note]] = deque(maxlen=MAX_IN_FLIGHT)

    def add(self, scheduled: Any, note: Note) -> None:
        """`scheduled` is what vLLM's `schedule` has returned."""
        self._steps.append((scheduled, note))

    def take(self, scheduled: Any) -> Note | None:
        """The note on this step, which has ended; None if there is none."""
        for index, (output, note) in enumerate(self._steps):
            if output is scheduled:
                del self._steps[index]
                return note
        return None
