"""Keeps the token ids of finished requests, and never makes a request wait.

The scheduler offers a request and goes on; a thread of its own writes. Where the disk is full or
slow, or the thread is behind, requests are left out and counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any
from zlib import crc32

from pydantic import BaseModel, ConfigDict
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from leadout.engine.capture_store import SOURCE, Segments, about_target, sample_id
from leadout.engine.settings import CAPTURE, Redactor, SectionError, capture_settings, load_redactor
from leadout.engine.small_files import small_file, write_small
from leadout.shards import Sample, ShardError

MOST_WAITING = 256  # requests
REST_AFTER_ERROR = 1.0  # seconds in which a full disk is not tried again
SECONDS_BETWEEN_LOG_LINES = 60.0
SECONDS_BETWEEN_TIDYING = 60.0
SECONDS_BETWEEN_NUMBERS = 1.0


class CaptureNumbers(BaseModel):
    """Requests since the start of the server."""

    model_config = ConfigDict(extra="forbid")

    captured: int = 0
    too_slow: int = 0  # left out: the writer was behind
    disk: int = 0  # left out: the disk refused them
    redacted: int = 0  # left out: the redactor wanted it, or failed


@dataclass(frozen=True)
class Finished:
    """A request with its whole answer."""

    request: str
    prompt: list[int]
    response: list[int]
    temperature: float
    ended: datetime = field(default_factory=lambda: datetime.now(UTC))


class Capture:
    """A bounded queue and the thread that empties it into segments."""

    def __init__(
        self,
        segments: Segments,
        *,
        rate: float,
        redact: Redactor,
        numbers_path: Path,
        say: Callable[[str], None],
    ) -> None:
        self.numbers = CaptureNumbers()
        self._segments = segments
        self._rate = rate
        self._redact = redact
        self._numbers_path = numbers_path
        self._say = say
        self._waiting: Queue[Finished | None] = Queue(MOST_WAITING)
        self._rests_until = 0.0
        self._last_log_line = -SECONDS_BETWEEN_LOG_LINES
        self._thread = threading.Thread(target=self._write_all, name="leadout-capture", daemon=True)
        self._thread.start()

    def wants(self, request: str) -> bool:
        """Whether a request is in the sample; the same answer for the same request."""
        return crc32(request.encode()) < self._rate * 2**32

    def offer(self, finished: Finished) -> None:
        """Hand over a request; returns at once."""
        try:
            self._waiting.put_nowait(finished)
        except Full:
            self.numbers.too_slow += 1

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits, as far as that is possible within some seconds."""
        with suppress(Full):
            self._waiting.put(None, timeout=seconds)
            self._thread.join(seconds)
        with suppress(OSError):
            self._numbers_path.unlink(missing_ok=True)

    def _write_all(self) -> None:
        shown, tidied = 0.0, time.monotonic()
        while True:
            try:
                finished = self._waiting.get(timeout=SECONDS_BETWEEN_NUMBERS)
                if finished is None:
                    break
                self._write(finished)
            except Empty:
                pass
            now = time.monotonic()
            if now - shown >= SECONDS_BETWEEN_NUMBERS:
                shown = now
                with suppress(OSError):
                    write_small(self.numbers, self._numbers_path)
            if now - tidied >= SECONDS_BETWEEN_TIDYING:
                tidied = now
                with suppress(OSError):
                    self._segments.tidy()
        self._segments.close()

    def _write(self, finished: Finished) -> None:
        sample = self._redacted(finished)
        if sample is None:
            self.numbers.redacted += 1
            return
        if time.monotonic() < self._rests_until:
            self.numbers.disk += 1
            return
        try:
            self._segments.add(sample)
        except (OSError, ShardError) as error:
            self._rests_until = time.monotonic() + REST_AFTER_ERROR
            self.numbers.disk += 1
            self._complain(str(error))
        else:
            self.numbers.captured += 1

    def _redacted(self, finished: Finished) -> Sample | None:
        try:
            kept = self._redact(finished.prompt, finished.response)
            if kept is None:
                return None
            prompt, response = kept
            return Sample(
                id=sample_id(finished.ended, finished.request),
                source=SOURCE,
                prompt=prompt,
                response=response,
                temperature=finished.temperature,
            )
        except Exception as error:  # whatever an installed redactor may do
            self._complain(f"the redactor failed: {type(error).__name__}: {error}")
            return None

    def _complain(self, problem: str) -> None:
        now = time.monotonic()
        if now - self._last_log_line >= SECONDS_BETWEEN_LOG_LINES:
            self._last_log_line = now
            self._say(
                f"Leadout leaves requests out of the captured traffic: {problem}. Serving goes on."
            )


# The scheduler's part of capture: which finished requests are offered, and which are not.

logger = init_logger("vllm.leadout")

NAME = "leadout_capture"  # in a request's `vllm_xargs`
ON = "on"  # any other value means: leave this request out
# A request that was aborted or failed has no whole answer. One that ended at a stop string looks
# like an aborted one here: vLLM finds stop strings in its API process.
WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def make_capture(vllm_config: Any) -> Capture:
    settings = capture_settings(vllm_config)
    model = vllm_config.model_config.model
    if settings.folder is None:
        raise SectionError("additional_config: leadout.capture.folder: found nothing, wanted one")
    segments = Segments(
        settings.folder,
        lambda: about_target(model),
        most_bytes=settings.most_bytes,
        most_seconds=settings.most_days * 86400,
    )
    engine = vllm_config.parallel_config.data_parallel_rank
    return Capture(
        segments,
        rate=settings.rate,
        redact=load_redactor(settings.redactor),
        numbers_path=small_file(CAPTURE, vllm_config.instance_id, engine),
        say=lambda line: logger.warning("%s", line),
    )


class Capturing:
    """Goes before a scheduler class of vLLM's; an error costs one log line and the capture."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._capture: Capture | None = None
        try:
            self._capture = make_capture(settings["vllm_config"])
        except Exception as error:
            self._stop_capture(error)

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        if self._capture is not None:
            try:
                finished = finished_of(request)
                if finished is not None and self._capture.wants(finished.request):
                    self._capture.offer(finished)
            except Exception as error:
                self._stop_capture(error)
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        if self._capture is not None:
            self._capture.close()
        super().shutdown()  # type: ignore[misc]

    def _stop_capture(self, error: Exception) -> None:
        self._capture = None
        logger.error(
            "Leadout captures nothing from here on: %s: %s. Serving goes on.",
            type(error).__name__,
            error,
        )


def finished_of(request: Any) -> Finished | None:
    """A request that the target alone answered, from token ids alone, and whose owner agrees."""
    params = request.sampling_params
    if request.status not in WHOLE or params is None or request.prompt_token_ids is None:
        return None
    if request.prompt_embeds is not None or request.mm_features or request.lora_request is not None:
        return None
    if (params.extra_args or {}).get(NAME, ON) != ON:
        return None
    response = list(request.output_token_ids)
    if not response:
        return None
    return Finished(request.request_id, request.prompt_token_ids, response, params.temperature)
