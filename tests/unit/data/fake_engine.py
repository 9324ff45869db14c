"""An engine that answers at once, by a rule, and can be killed."""

from __future__ import annotations

from typing import Any

from leadout.engine.offline import Answer, Ask
from support.tiny_chat import END_OF_TURN


class KilledError(Exception):
    """Stands for the death of the process."""


class FakeEngine:
    """Answers the youngest request first, with letters that depend on prompt and seed alone."""

    def __init__(self, dies_after: int | None = None, silent: bool = False) -> None:
        self.asked: list[Ask] = []
        self.most_at_once = 0
        self._queue: list[Ask] = []
        self._dies_after = dies_after
        self._silent = silent  # answers with nothing but the end of the turn

    @property
    def running(self) -> int:
        return len(self._queue)

    def submit(self, ask: Ask) -> None:
        assert ask.id not in [waiting.id for waiting in self._queue]
        self.asked.append(ask)
        self._queue.append(ask)
        self.most_at_once = max(self.most_at_once, self.running)

    def step(self) -> list[Answer]:
        if self._dies_after is not None:
            if self._dies_after == 0:
                raise KilledError
            self._dies_after -= 1
        ask = self._queue.pop()
        draw = ask.seed if ask.temperature > 0 else 0
        letter = ord("a") + (sum(ask.prompt) + (draw or 0)) % 26
        tokens = [] if self._silent else [_token(letter)] * min(3, ask.max_tokens)
        return [Answer(ask.id, [*tokens, END_OF_TURN], "stop")]


def _token(byte: int) -> int:
    return byte - ord("!")  # as the tiny tokenizer numbers the printable ones


def starting(engine: FakeEngine) -> Any:
    """Something to call in place of the engine's class."""
    return lambda *_, **__: engine
