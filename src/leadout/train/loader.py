"""The inputs of training passes, prepared ahead of the loop by a background thread.

A pass needs token ids and, where they are only to be read (from disk or from servers), the
target's hidden states. The thread stays at most a few passes ahead: a single pass can hold a
gigabyte of states. Which samples a step has depends on its number alone, so preparing ahead
changes nothing in what is computed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from leadout.dflash.target import Observation
from leadout.evaluate.hidden_states import Indexed

PASSES_AHEAD = 2


class PassInput(NamedTuple):
    part: Sequence[Indexed]
    observed: Observation | None  # None: the states are computed on the device


class _Prepared(NamedTuple):
    step: int
    passes: int  # of this step and rank; 0 has one item without input
    input: PassInput | None


class Loader:
    """Prepares the passes of the steps from `first` to `end` - 1; use it as a context manager."""

    def __init__(
        self,
        parts_of: Callable[[int], Sequence[Sequence[Indexed]]],
        prepare: Callable[[Sequence[Indexed]], PassInput],
        first: int,
        end: int,
        *,
        pinned: bool,
    ) -> None:
        """`parts_of` returns a step's passes, and `prepare` the input of one.

        `pinned` states are copied to a GPU while it computes.
        """
        self._parts_of = parts_of
        self._prepare = prepare
        self._steps = range(first, end)
        self._pinned = pinned
        self._ready: queue.Queue[_Prepared | BaseException] = queue.Queue(PASSES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)

    def passes_of(self, step: int) -> tuple[int, Iterator[PassInput]]:
        """The number of passes of a step, and their inputs; steps follow each other."""
        first = self._next(step)

        def inputs() -> Iterator[PassInput]:
            if first.input is not None:
                yield first.input
            for _ in range(first.passes - 1):
                following = self._next(step).input
                assert following is not None
                yield following

        return first.passes, inputs()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        while not self._ready.empty():  # frees memory, and a place that the thread may wait for
            self._ready.get_nowait()
        self._thread.join(timeout=5)  # it may wait for a server

    def _next(self, step: int) -> _Prepared:
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        assert found.step == step
        return found

    def _work(self) -> None:
        try:
            for step in self._steps:
                parts = self._parts_of(step)
                if not parts:
                    self._put(_Prepared(step, 0, None))
                for part in parts:
                    if self._closed.is_set():
                        return
                    self._put(_Prepared(step, len(parts), self._pin(self._prepare(part))))
        except BaseException as problem:  # raised again in the loop's own thread
            self._put(problem)

    def _put(self, item: _Prepared | BaseException) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _pin(self, prepared: PassInput) -> PassInput:
        if not self._pinned or prepared.observed is None:
            return prepared
        states, final = prepared.observed
        return prepared._replace(observed=Observation(_pin_memory(states), _pin_memory(final)))


def _pin_memory(tensor: Tensor) -> Tensor:
    """A copy in memory that a GPU reads by itself."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
