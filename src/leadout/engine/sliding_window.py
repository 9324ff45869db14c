"""Counts over the last minute, at a cost that does not grow with traffic."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

WINDOW_SECONDS = 60

Key = TypeVar("Key", bound=Hashable)


class SlidingWindow(Generic[Key]):
    """Sums of named counts over the last `WINDOW_SECONDS`, which expire second by second.

    The time is an argument everywhere: seconds of any clock that does not go back.
    """

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, Counter[Key]]] = deque()  # one for each second with counts
        self._total: Counter[Key] = Counter()

    def add(self, now: float, counts: Mapping[Key, int]) -> None:
        self._drop_expired(now)
        if not self._buckets or self._buckets[-1][0] < int(now):
            self._buckets.append((int(now), Counter()))
        self._buckets[-1][1].update(counts)
        self._total.update(counts)

    def total(self, now: float) -> Counter[Key]:
        """The counts of the window; a key that was never counted is 0."""
        self._drop_expired(now)
        return self._total

    def _drop_expired(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= int(now) - WINDOW_SECONDS:
            self._total.subtract(self._buckets.popleft()[1])
