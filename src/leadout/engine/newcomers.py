"""The scheduler's part of a swap: requests that come after it have nothing of the old drafter.

A drafter's keys and values of a text lie in the same cache blocks as the target's. After a swap the
cached ones are the old drafter's: right text, but drafts that suit it less. vLLM empties its prefix
cache only when no request runs. So at the reset that follows a swap, requests that come later get
another salt in their block hashes: they find none of the old blocks, which are evicted in time.
Requests under way keep what they have.

Whole answers of those newcomers are tallied, for the watch over what was promised of the drafter.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict

from leadout.control.promise import Tally
from leadout.engine.small_files import small_file, write_small

logger = logging.getLogger("vllm.leadout")  # governed by VLLM_LOGGING_LEVEL

NUMBERS = "served"
SECONDS_BETWEEN_NUMBERS = 1.0


class ServedNumbers(BaseModel):
    """Requests that came after `since`, seconds of the epoch, and have ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    since: float
    tally: Tally


class Newcomers:
    """Goes before a scheduler class of vLLM's; an error costs one log line and the tally."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        config = settings["vllm_config"]
        engine = config.parallel_config.data_parallel_rank
        self._numbers_path = small_file(NUMBERS, config.instance_id, engine)
        self._resets = 0
        self._salt: str | None = None
        self._open: dict[str, list[int]] = {}  # by request: steps with a whole block, tokens
        self._tally = Tally()
        self._is_tallying = True
        self._begin_tally()

    def add_request(self, request: Any) -> None:
        if self._salt is not None:
            _salt(request, self._salt)
        self._open[request.request_id] = [0, 0]
        super().add_request(request)  # type: ignore[misc]

    def reset_prefix_cache(self, *arguments: Any, **settings: Any) -> bool:
        is_empty: bool = super().reset_prefix_cache(*arguments, **settings)  # type: ignore[misc]
        self._resets += 1
        self._salt = None if is_empty else f"#leadout-{self._resets}"
        self._begin_tally()
        return is_empty

    def make_spec_decoding_stats(self, *arguments: Any, **settings: Any) -> Any:
        try:
            self._count_step(**settings)
        except Exception as error:
            self._stop_tally(error)
        return super().make_spec_decoding_stats(*arguments, **settings)  # type: ignore[misc]

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        steps, tokens = self._open.pop(request.request_id, (0, 0))
        if steps:
            self._tally = self._tally.with_request(steps, tokens)
            is_last = len(self.requests) == 1  # type: ignore[attr-defined]
            if is_last or time.monotonic() - self._told >= SECONDS_BETWEEN_NUMBERS:
                self._tell()
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        with suppress(OSError):
            self._numbers_path.unlink(missing_ok=True)
        super().shutdown()  # type: ignore[misc]

    def _begin_tally(self) -> None:
        self._since = time.time()
        self._tally = Tally()
        self._open.clear()  # those under way are no newcomers
        self._tell()

    def _count_step(
        self,
        *,
        request_id: str,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
    ) -> None:
        """Only steps with as many drafts as the server can make are held against a promise."""
        counts = self._open.get(request_id)
        verified = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if counts is not None and verified == self.num_spec_tokens:  # type: ignore[attr-defined]
            counts[0] += 1
            counts[1] += num_accepted_tokens + 1

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._is_tallying:
            try:
                write_small(ServedNumbers(since=self._since, tally=self._tally), self._numbers_path)
            except OSError as error:
                self._stop_tally(error)

    def _stop_tally(self, error: Exception) -> None:
        self._open.clear()
        if self._is_tallying:
            self._is_tallying = False
            logger.error(
                "Leadout no longer watches whether the drafter keeps its promise: %s: %s. Serving "
                "goes on.",
                type(error).__name__,
                error,
            )


def _salt(request: Any, salt: str) -> None:
    """Let a request, whose blocks vLLM has hashed already, find none from before."""
    request.cache_salt = f"{request.cache_salt or ''}{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()
