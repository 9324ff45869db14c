"""An engine that answers immediately, by a fixed rule, and can be killed or interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leadout.engine.offline import Completion, TextRequest
from support.tiny_chat import END_OF_TURN


class KilledError(BaseException):
    """Simulates that the process is killed: nothing handles it."""


class FakeEngine:
    """Answers the newest request first, with letters that depend only on prompt and seed."""

    def __init__(
        self,
        dies_after: int | None = None,
        silent: bool = False,
        death: type[BaseException] = KilledError,
        refuses: str | None = None,  # the id of a request
    ) -> None:
        self.requests: list[TextRequest] = []
        self.max_running = 0
        self._queue: list[TextRequest] = []
        self._dies_after = dies_after  # steps
        self._silent = silent  # answers with the end of the turn only
        self._death = death
        self._refuses = refuses

    @property
    def running(self) -> int:
        return len(self._queue)

    def submit(self, request: TextRequest) -> None:
        assert request.id not in [waiting.id for waiting in self._queue]
        if request.id == self._refuses:
            raise ValueError("refused on demand")
        self.requests.append(request)
        self._queue.append(request)
        self.max_running = max(self.max_running, self.running)

    def step(self) -> list[Completion]:
        if self._dies_after is not None:
            if self._dies_after == 0:
                raise self._death
            self._dies_after -= 1
        request = self._queue.pop()
        seed = request.seed if request.temperature > 0 else None
        tokens = answer_to(request.prompt, seed, 0 if self._silent else request.max_tokens)
        return [Completion(request.id, tokens, "stop")]


def answer_to(prompt: Sequence[int], seed: int | None, max_tokens: int) -> list[int]:
    letter = ord("a") + (sum(prompt) + (seed or 0)) % 26
    return [*[_token(letter)] * min(3, max_tokens), END_OF_TURN]


def _token(byte: int) -> int:
    return byte - ord("!")  # the tiny tokenizer's number of a printable byte


def starting(engine: FakeEngine) -> Any:
    """A replacement for the class of the engine."""
    return lambda *_, **__: engine
