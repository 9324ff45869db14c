"""Capture beside a scheduler: it never waits, writes what it can and counts what it drops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine import capture as capture_module
from leadout.engine.capture import (
    MAX_QUEUED,
    Capture,
    CaptureCounters,
    FinishedRequest,
    finished_request,
)
from leadout.engine.capture_store import CaptureInfo, SegmentWriter, segment_paths
from leadout.engine.counters import read_small
from leadout.engine.settings import Redactor, load_redactor
from leadout.engine.vllm_adapter import RequestStatus
from leadout.shards import Sample, read_shard

KEEP_ALL = load_redactor(None)
CLOSE_SECONDS = 600.0  # to write all that is queued, also on a busy machine


def start(folder: Path, *, rate: float = 1.0, redact: Redactor = KEEP_ALL) -> Capture:
    target = CaptureInfo(target="a-target", target_fingerprint="ab")
    writer = SegmentWriter(folder / "capture", lambda: target, max_bytes=1 << 20, max_seconds=1e6)
    return Capture(writer, rate=rate, redact=redact, counters_path=folder / "counters.json")


def finished(number: int = 1) -> FinishedRequest:
    return FinishedRequest(f"request-{number}", [1, 2], [3, 4, 5], 0.5)


def test_a_request_becomes_a_sample(tmp_path: Path) -> None:
    capture = start(tmp_path)
    for number in (1, 2):
        capture.offer(finished(number))
    capture.close(CLOSE_SECONDS)
    (path,) = segment_paths(tmp_path / "capture")
    first, second = (sample for _, sample in read_shard(path))
    assert (first.prompt, first.response) == ([1, 2], [3, 4, 5])
    assert (first.source, first.temperature) == ("traffic", 0.5)
    assert "request-1" not in first.id  # clients choose it
    assert first.id < second.id
    assert capture.counters == CaptureCounters(captured=2)


def test_the_rate_is_the_fraction_of_requests_and_stable_for_an_id(tmp_path: Path) -> None:
    capture = start(tmp_path, rate=0.25)
    sampled = [capture.is_sampled(f"cmpl-{number}") for number in range(4000)]
    assert 850 < sum(sampled) < 1150
    assert sampled == [capture.is_sampled(f"cmpl-{number}") for number in range(4000)]
    capture.close(CLOSE_SECONDS)


def test_an_offer_never_waits_for_a_stuck_writer(tmp_path: Path) -> None:
    stuck = threading.Event()

    def wait(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        stuck.wait(600)
        return prompt, response

    capture = start(tmp_path, redact=wait)
    started = time.perf_counter()
    offered = MAX_QUEUED + 500
    for number in range(offered):
        capture.offer(finished(number))
    assert time.perf_counter() - started < 120  # it did not wait, not even for one of them
    assert capture.counters.too_slow >= 499
    stuck.set()
    capture.close(CLOSE_SECONDS)
    assert capture.counters.captured + capture.counters.too_slow == offered


def test_disk_errors_are_counted_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leadout_log: list[str]
) -> None:
    (tmp_path / "capture").touch()  # a file in place of the folder: every write fails
    monkeypatch.setattr(capture_module, "SECONDS_BEFORE_RETRY", 0.0)
    capture = start(tmp_path)
    for number in range(50):
        capture.offer(finished(number))
    counters = tmp_path / "counters.json"
    wait_until(lambda: read_small(counters, CaptureCounters) == CaptureCounters(disk=50))
    capture.close(CLOSE_SECONDS)
    (line,) = leadout_log
    assert "drops requests" in line
    assert "Serving goes on" in line


def test_a_redactor_can_change_or_drop_a_request_and_its_failure_drops_it(tmp_path: Path) -> None:
    def redact(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]] | None:
        if prompt == [13]:
            return None
        if prompt == [14]:
            raise RuntimeError("unexpected")
        return [0] * len(prompt), response

    capture = start(tmp_path, redact=redact)
    for number, prompt in enumerate(([1, 2], [13], [14])):
        capture.offer(FinishedRequest(str(number), prompt, [3], 0.0))
    capture.close(CLOSE_SECONDS)
    (path,) = segment_paths(tmp_path / "capture")
    assert [sample.prompt for _, sample in read_shard(path)] == [[0, 0]]
    assert capture.counters == CaptureCounters(captured=1, redacted=2)


def test_a_redactor_that_returns_text_does_not_bring_it_into_the_log(
    tmp_path: Path, leadout_log: list[str]
) -> None:
    def returns_text(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        return "a private sentence", response  # type: ignore[return-value]

    capture = start(tmp_path, redact=returns_text)
    capture.offer(finished())
    capture.close(CLOSE_SECONDS)
    (line,) = leadout_log
    assert "the redactor returned 1 wrong values" in line
    assert "private" not in line
    assert capture.counters == CaptureCounters(redacted=1)


def test_an_unexpected_error_drops_a_request_and_not_the_thread(
    tmp_path: Path, leadout_log: list[str]
) -> None:
    capture = start(tmp_path)
    good = capture._writer.add

    def fake_add(sample: Sample) -> None:
        raise ValueError("config.json is being replaced")

    capture._writer.add = fake_add  # type: ignore[method-assign]
    capture.offer(finished(1))
    wait_until(lambda: capture.counters.disk == 1)
    capture._writer.add, capture._retry_at = good, 0.0  # type: ignore[method-assign]
    capture.offer(finished(2))
    capture.close(CLOSE_SECONDS)
    assert capture.counters == CaptureCounters(captured=1, disk=1)
    (line,) = leadout_log
    assert "ValueError: config.json is being replaced" in line


def test_files_that_cannot_be_deleted_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leadout_log: list[str]
) -> None:
    monkeypatch.setattr(capture_module, "SECONDS_BETWEEN_EXPIRIES", 0.0)
    capture = start(tmp_path)

    def fake_expire() -> None:
        raise OSError("/traffic/one cannot be deleted: Permission denied")

    capture._writer.expire = fake_expire  # type: ignore[method-assign]
    wait_until(lambda: bool(leadout_log))
    capture.close(CLOSE_SECONDS)
    assert "cannot be deleted: Permission denied" in leadout_log[0]


def wait_until(is_true: Callable[[], bool], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(0.02)
    assert is_true()


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"output_token_ids": [3]}, False),  # a request for scores, which cannot opt out
        ({"output_token_ids": [3, 4]}, False),  # one for decisions
        ({"request_id": "chatcmpl-leadout-capture-off-7-1b2c"}, False),
        ({"output_token_ids": []}, False),
        # Ended at a stop string, or its client went away.
        ({"status": RequestStatus.FINISHED_ABORTED}, True),
        # The same during its prompt, or soon after.
        ({"status": RequestStatus.FINISHED_ABORTED, "output_token_ids": []}, False),
        ({"status": RequestStatus.FINISHED_ABORTED, "output_token_ids": [3, 4]}, False),
        ({"status": RequestStatus.FINISHED_ERROR}, False),
        ({"status": RequestStatus.FINISHED_IGNORED}, False),
        ({"lora_request": object()}, False),
        ({"prompt_token_ids": None}, False),
        ({"sampling_params": SimpleNamespace(extra_args={"leadout_capture": "off"})}, False),
    ],
)
def test_what_may_be_captured(changes: dict[str, Any], is_kept: bool) -> None:
    request = {
        "request_id": "a",
        "status": RequestStatus.FINISHED_STOPPED,
        "prompt_token_ids": [1, 2],
        "output_token_ids": [3, 4, 5],
        "sampling_params": SimpleNamespace(extra_args=None, temperature=0.0),
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
    }
    found = finished_request(SimpleNamespace(**request | changes))
    assert (found is not None) == is_kept
