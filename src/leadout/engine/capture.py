"""Capture of served traffic: keeps the token ids of finished requests, without delaying any.

The scheduler hands a finished request over and goes on; a thread writes it. When that thread or the
disk cannot keep up, requests are dropped and counted.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any
from zlib import crc32

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.engine.capture_store import SOURCE, SegmentWriter, info_of_target, sample_id
from leadout.engine.capture_upload import SegmentUploader
from leadout.engine.counters import remove_small, small_file, write_small
from leadout.engine.fail_safe import FailSafe, LimitedLog
from leadout.engine.settings import (
    CAPTURE,
    CaptureSettings,
    EngineSettingsError,
    Redactor,
    load_redactor,
    read_section,
)
from leadout.engine.vllm_adapter import RequestStatus, engine_index, target_folder
from leadout.errors import LeadoutError
from leadout.sealed import Keys
from leadout.shards import Sample
from leadout.storage import open_storage

REQUEST_ARGUMENT = "leadout_capture"  # in a request's `vllm_xargs`
ON = "on"  # any other value opts the request out
# For requests that cannot carry `vllm_xargs`, such as those of Cohere's API: opts a request out if
# its id, which clients set with the header `X-Request-Id`, contains it.
OPT_OUT_ID = "leadout-capture-off"
# Shorter answers are labels, not text: those of requests for scores and decisions, which cannot opt
# out (`/generative_scoring`, `/v1/systemone`), and the single tokens of a beam search.
MIN_RESPONSE = 3

MAX_QUEUED = 256  # requests
SECONDS_BEFORE_RETRY = 1.0  # after an error of the disk
SECONDS_BETWEEN_EXPIRIES = 60.0
SECONDS_BETWEEN_COUNTERS = 1.0

# An aborted or failed request has no complete response. One that ended at a stop string looks
# aborted too, since vLLM finds stop strings in its API process.
COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class CaptureCounters(BaseModel):
    """Requests since the server started."""

    model_config = ConfigDict(extra="forbid")

    captured: int = 0
    too_slow: int = 0  # dropped: the queue was full
    disk: int = 0  # dropped: writing failed, usually by an error of the disk
    redacted: int = 0  # dropped by the redactor, or because it failed


@dataclass(frozen=True)
class FinishedRequest:
    """A request with its complete response."""

    id: str
    prompt: list[int]
    response: list[int]
    temperature: float
    ended: datetime = field(default_factory=lambda: datetime.now(UTC))


class Capture:
    """A bounded queue of finished requests and the thread that writes them."""

    def __init__(
        self,
        writer: SegmentWriter,
        *,
        rate: float,
        redact: Redactor,
        counters_path: Path,
        uploader: SegmentUploader | None = None,
    ) -> None:
        self.counters = CaptureCounters()
        self._writer, self._rate, self._redact = writer, rate, redact
        self._counters_path, self._uploader = counters_path, uploader
        self._queue: Queue[FinishedRequest | None] = Queue(MAX_QUEUED)  # None ends the thread
        self._retry_at = 0.0
        self._log = LimitedLog(logging.WARNING)
        self._thread = threading.Thread(target=self._run, name="leadout-capture", daemon=True)
        self._thread.start()
        if uploader is not None:
            uploader.start()

    def is_sampled(self, request_id: str) -> bool:
        """Whether this request belongs to the captured fraction; the same for the same id."""
        return crc32(request_id.encode()) < self._rate * 2**32

    def offer(self, finished: FinishedRequest) -> None:
        """Hand a request over; returns at once."""
        try:
            self._queue.put_nowait(finished)
        except Full:
            self.counters.too_slow += 1

    def close(self, seconds: float = 5.0) -> None:
        """Write what is queued, as far as that is possible within `seconds`."""
        with suppress(Full):
            self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)
        if self._uploader is not None:
            self._uploader.close(seconds)
        with suppress(OSError):
            remove_small(self._counters_path)

    def _run(self) -> None:
        published, expired = 0.0, time.monotonic()
        while True:
            try:
                finished = self._queue.get(timeout=SECONDS_BETWEEN_COUNTERS)
                if finished is None:
                    break
                self._write(finished)
            except Empty:
                pass
            now = time.monotonic()
            if now - published >= SECONDS_BETWEEN_COUNTERS:
                published = now
                with suppress(OSError):
                    write_small(self.counters, self._counters_path)
            if now - expired >= SECONDS_BETWEEN_EXPIRIES:
                expired = now
                self._expire()
        with suppress(OSError):
            self._writer.close()

    def _expire(self) -> None:
        try:
            self._writer.expire()
        except Exception as error:  # the thread must live, whatever the error is
            self._log(
                "Leadout cannot keep the captured traffic within its limits: %s. Delete the oldest "
                "files by hand.",
                _described(error),
            )

    def _write(self, finished: FinishedRequest) -> None:
        sample = self._redacted(finished)
        if sample is None:
            self.counters.redacted += 1
            return
        if time.monotonic() < self._retry_at:
            self.counters.disk += 1
            return
        try:
            self._writer.add(sample)
        except Exception as error:  # the thread must live, whatever the error is
            self._retry_at = time.monotonic() + SECONDS_BEFORE_RETRY
            self.counters.disk += 1
            self._warn(_described(error))
        else:
            self.counters.captured += 1

    def _redacted(self, finished: FinishedRequest) -> Sample | None:
        try:
            kept = self._redact(finished.prompt, finished.response)
            if kept is None:
                return None
            prompt, response = kept
            return Sample(
                # Not the request's id, which a client can choose (`X-Request-Id`).
                id=sample_id(finished.ended, secrets.token_hex(8)),
                source=SOURCE,
                prompt=prompt,
                response=response,
                temperature=finished.temperature,
            )
        except ValidationError as error:  # its text would quote what the user wrote
            what = "expected two lists of token ids"
            self._warn(f"the redactor returned {error.error_count()} wrong values, {what}")
            return None
        except Exception as error:  # its text, too, may quote what the user wrote
            self._warn(f"the redactor failed with {type(error).__name__}")
            return None

    def _warn(self, problem: str) -> None:
        self._log("Leadout drops requests from the captured traffic: %s. Serving goes on.", problem)


def _described(error: Exception) -> str:
    expected = isinstance(error, OSError | LeadoutError)
    return str(error) if expected else f"{type(error).__name__}: {error}"


def make_capture(vllm_config: Any) -> Capture:
    """The capture that `additional_config` describes."""
    settings = read_section(vllm_config, CAPTURE, CaptureSettings)
    model = vllm_config.model_config.model
    if settings.folder is None:
        raise EngineSettingsError("additional_config: leadout.capture.folder is required.")
    uploader = None
    if settings.upload is not None:
        uploader = SegmentUploader(
            settings.folder,
            open_storage(settings.upload),
            max_bytes=settings.max_bytes,
            max_seconds=settings.max_days * 86400,
        )
    writer = SegmentWriter(
        settings.folder,
        lambda: info_of_target(model, target_folder(vllm_config)),
        max_bytes=settings.max_bytes,
        max_seconds=settings.max_days * 86400,
        seal=Keys.read(settings.key).seal,
    )
    return Capture(
        writer,
        rate=settings.rate,
        redact=load_redactor(settings.redactor),
        counters_path=small_file(CAPTURE, vllm_config.instance_id, engine_index(vllm_config)),
        uploader=uploader,
    )


class CaptureMixin:
    """Put before a scheduler class of vLLM: offers every finished request to a `Capture`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._capture: Capture | None = None
        self._capture_fail_safe = FailSafe("capture", on_failure=self._stop_capture)
        with self._capture_fail_safe:
            self._capture = make_capture(settings["vllm_config"])

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        if self._capture is not None:
            with self._capture_fail_safe:
                finished = finished_request(request)
                if finished is not None and self._capture.is_sampled(finished.id):
                    self._capture.offer(finished)
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        if self._capture is not None:
            self._capture.close()
        super().shutdown()  # type: ignore[misc]

    def _stop_capture(self) -> None:
        self._capture = None


def finished_request(request: Any) -> FinishedRequest | None:
    """A vLLM request as it may be captured; None for one that must not be.

    Kept are complete responses of the target alone (no LoRA) to prompts of token ids alone (no
    embeddings, no images), unless the request opts out.
    """
    params = request.sampling_params
    if request.status not in COMPLETE or params is None or request.prompt_token_ids is None:
        return None
    if request.prompt_embeds is not None or request.mm_features or request.lora_request is not None:
        return None
    if (params.extra_args or {}).get(REQUEST_ARGUMENT, ON) != ON:
        return None
    if OPT_OUT_ID in request.request_id:
        return None
    prompt, response = request.prompt_token_ids, list(request.output_token_ids)
    if len(response) < MIN_RESPONSE:
        return None
    return FinishedRequest(request.request_id, prompt, response, params.temperature)
