"""SIGTERM ends every command as Ctrl-C does, and SIGINT also where a shell has it ignored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from leadout.cli.options import stopped_by_signals


@pytest.fixture
def ignored() -> Iterator[None]:
    """SIGINT as in a program that a script starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_the_block(sent: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        os.kill(os.getpid(), sent)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_the_usual_handler_of_ctrl_c_stays() -> None:
    """With another one, asyncio would not cancel its tasks in order."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stopped_by_signals():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_run_without_handlers() -> None:
    found: list[object] = []

    def enter() -> None:
        with stopped_by_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [before]
