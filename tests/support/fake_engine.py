"""An engine that answers immediately, by a fixed rule, and can be killed or interrupted."""

from __future__ import annotations

from typing import Any

from leadout.engine.offline import Completion, TextRequest
from support.tiny_chat import END_OF_TURN


class KilledError(Exception):
    """Simulates that the process is killed."""


class FakeEngine:
    """Answers the newest request first, with letters that depend only on prompt and seed."""

    def __init__(
        self,
        dies_after: int | None = None,
        silent: bool = False,
        death: type[BaseException] = KilledError,
    ) -> None:
        self.asked: list[TextRequest] = []
        self.max_running = 0
        self._queue: list[TextRequest] = []
        self._dies_after = dies_after  # steps
        self._silent = silent  # answers with the end of the turn only
        self._death = death

    @property
    def running(self) -> int:
        return len(self._queue)

    def submit(self, ask: TextRequest) -> None:
        assert ask.id not in [waiting.id for waiting in self._queue]
        self.asked.append(ask)
        self._queue.append(ask)
        self.max_running = max(self.max_running, self.running)

    def step(self) -> list[Completion]:
        if self._dies_after is not None:
            if self._dies_after == 0:
                raise self._death
            self._dies_after -= 1
        ask = self._queue.pop()
        draw = ask.seed if ask.temperature > 0 else 0
        letter = ord("a") + (sum(ask.prompt) + (draw or 0)) % 26
        tokens = [] if self._silent else [_token(letter)] * min(3, ask.max_tokens)
        return [Completion(ask.id, [*tokens, END_OF_TURN], "stop")]


def _token(byte: int) -> int:
    return byte - ord("!")  # the tiny tokenizer's number of a printable byte


def starting(engine: FakeEngine) -> Any:
    """A replacement for the class of the engine."""
    return lambda *_, **__: engine
