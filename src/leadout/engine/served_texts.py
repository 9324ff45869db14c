"""Which requests are learnt from as they are served, and the scheduler's part of it: their texts.

The worker writes the states of a chosen request into a ring (`states_tap.py`), the scheduler its
tokens when it has ended. Both choose by the request alone, so that they choose the same ones.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict

from leadout.engine.capture import (
    SECONDS_BETWEEN_COUNTERS,
    finished_request,
    is_sampled,
    may_be_kept,
)
from leadout.engine.counters import remove_small, small_file, write_small
from leadout.engine.fail_safe import FailSafe
from leadout.engine.settings import LEARN, LearnSettings, read_section
from leadout.engine.vllm_adapter import engine_index
from leadout.ring.folder import TEXTS, open_writer, prepare
from leadout.ring.records import RingInfo, TextRecord, request_key

PART = "learning from served states"
MIN_TEXT_BYTES = 1 << 20


class TextCounters(BaseModel):
    """Requests since the server started."""

    model_config = ConfigDict(extra="forbid")

    written: int = 0
    too_large: int = 0  # for the ring


class StatesCounters(BaseModel):
    """Steps of requests since the server started."""

    model_config = ConfigDict(extra="forbid")

    written: int = 0
    too_slow: int = 0  # dropped: too many copies from the GPU were under way
    too_large: int = 0  # dropped: larger than the ring


def ring_info(settings: LearnSettings) -> RingInfo:
    return RingInfo(
        target=settings.target,
        target_fingerprint=settings.target_fingerprint,
        layer_ids=settings.layer_ids,
        hidden_size=settings.hidden_size,
        dtype=settings.dtype,
        window=settings.window,
        server_id=settings.server_id,
    )


def key_of(settings: LearnSettings, request_id: str, request: Any) -> bytes | None:
    """The key in the ring of a request that is learnt from; None for all others.

    `request` is vLLM's in the scheduler, or what vLLM sends of a new one to its workers.
    """
    if not is_sampled(request_id, settings.rate) or not may_be_kept(request_id, request):
        return None
    return request_key(request_id, settings.server_id)


class ServedTexts:
    """Writes the tokens of chosen requests into a ring."""

    def __init__(self, vllm_config: Any) -> None:
        self._settings = settings = read_section(vllm_config, LEARN, LearnSettings)
        info = ring_info(settings)
        prepare(settings.folder, info)
        capacity = max(settings.max_bytes // 16, MIN_TEXT_BYTES)
        self._writer = open_writer(settings.folder, TEXTS, capacity, info)
        self.counters = TextCounters()
        self._counters_path = small_file(LEARN, vllm_config.instance_id, engine_index(vllm_config))
        self._counted_at = 0.0

    def add(self, request: Any) -> None:
        """Write a request that has ended, if it is a chosen one."""
        key = key_of(self._settings, request.request_id, request)
        if key is None:
            return
        finished = finished_request(request)
        if finished is None:  # the reader can forget its states
            self._writer.write(TextRecord(key, [], [], 0.0).packed())
            return
        record = TextRecord(key, finished.prompt, finished.response, finished.temperature)
        if self._writer.write(record.packed()):
            self.counters.written += 1
        else:
            self.counters.too_large += 1
        now = time.monotonic()
        if now - self._counted_at >= SECONDS_BETWEEN_COUNTERS:
            self._counted_at = now
            with suppress(OSError):
                write_small(self.counters, self._counters_path)

    def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            remove_small(self._counters_path)


class LearnMixin:
    """Put before a scheduler class of vLLM: writes the texts of chosen requests into a ring."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._texts: ServedTexts | None = None
        self._texts_fail_safe = FailSafe(PART, on_failure=self._stop_texts)
        with self._texts_fail_safe:
            self._texts = ServedTexts(settings["vllm_config"])

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        if self._texts is not None:
            with self._texts_fail_safe:
                self._texts.add(request)
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        self._stop_texts()
        super().shutdown()  # type: ignore[misc]

    def _stop_texts(self) -> None:
        texts, self._texts = self._texts, None
        if texts is not None:
            texts.close()
