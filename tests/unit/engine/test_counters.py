"""Counts of the last minute."""

import tracemalloc

import pytest

from leadout.engine.counters import SlidingWindow


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (29.0, 3),
        (59.9, 3),
        (60.0, 2),  # second 0 has expired
        (88.9, 2),
        (89.0, 0),
        (10_000.0, 0),
    ],
)
def test_counts_expire_after_a_minute(now: float, expected: int) -> None:
    window: SlidingWindow[str] = SlidingWindow()
    window.add(0.5, {"drafts": 1})
    window.add(29.0, {"drafts": 1, "accepted": 4})
    window.add(29.9, {"drafts": 1})
    assert window.total(now)["drafts"] == expected
    assert window.total(now)["other"] == 0


def test_memory_does_not_grow_with_traffic() -> None:
    def run(window: SlidingWindow[str], start: int, seconds: int) -> None:
        for step in range(start * 20, (start + seconds) * 20):
            window.add(step / 20, {"drafts": 1, "accepted": 3})

    window: SlidingWindow[str] = SlidingWindow()
    run(window, 0, 120)
    tracemalloc.start()
    run(window, 120, 600)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 30_000
    assert window.total(720.0)["drafts"] == 59 * 20
