"""A fake of vLLM's engine client with two workers, each of which can be made to fail.

A worker reads versions as the real one does, and only remembers which one it has loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leadout.engine.hot_swap import ASLEEP, LoadedVersion, is_final, load_version
from leadout.registry import Registry
from support.version_registry import CONFIG


class Worker:
    def __init__(self, registry: Registry, target: Path, version: int) -> None:
        self.loaded: int | None = version
        self.fails_at: set[str] = set()
        self._registry, self._target = registry, target
        self._new: LoadedVersion | None = None
        self._old = version
        self._error: str | None = None
        self._is_final = False

    def leadout_begin(self, version: int) -> None:
        self._error, self._is_final = None, False
        try:
            self._new = load_version(self._registry, version, CONFIG, self._target)
        except Exception as error:
            self._error, self._is_final = str(error), is_final(error)

    def leadout_state(self) -> dict[str, Any]:
        digest = None if self._new is None else self._new.digest
        if "digest" in self.fails_at:
            digest = "other"
        return {"done": True, "error": self._error, "digest": digest, "final": self._is_final}

    def leadout_commit(self, version: int) -> dict[str, Any]:
        if "sleep" in self.fails_at:
            return {"error": ASLEEP, "seconds": 0.0}
        assert self._new is not None
        self._old = self.loaded or self._old
        return self._load("commit", self._new.version)

    def leadout_undo(self) -> dict[str, Any]:
        return self._load("undo", self._old)

    def leadout_end(self) -> None:
        self._new = None

    def _load(self, name: str, version: int) -> dict[str, Any]:
        failed = name in self.fails_at
        self.loaded = None if failed else version
        return {"error": f"{name} failed" if failed else None, "seconds": 0.01}


class TwoWorkers:
    def __init__(self, registry: Registry, target: Path, version: int) -> None:
        self.workers = [Worker(registry, target, version) for _ in range(2)]
        self.calls: list[str] = []
        self.sleeps_after: str | None = None  # the call after which the engine sleeps
        self.fails_at: set[str] = set()  # calls that raise

    @property
    def loaded(self) -> list[int | None]:
        return [worker.loaded for worker in self.workers]

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        self._fail_if_asked(method)
        return [getattr(worker, method)(*args) for worker in self.workers]

    async def is_sleeping(self) -> bool:
        return self.sleeps_after is not None and self.sleeps_after in ("", *self.calls)

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        self._fail_if_asked("reset_prefix_cache")
        return False

    def _fail_if_asked(self, method: str) -> None:
        if method in self.fails_at:
            raise RuntimeError(f"{method} failed")
