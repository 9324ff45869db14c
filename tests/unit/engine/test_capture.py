"""Capture beside a scheduler: it never waits, writes what it can and counts what it drops."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from leadout.engine import capture as capture_module
from leadout.engine.capture import MAX_QUEUED, Capture, CaptureCounters, FinishedRequest
from leadout.engine.capture_store import CaptureInfo, SegmentWriter, segment_paths
from leadout.engine.counters import read_small
from leadout.engine.settings import Redactor, load_redactor
from leadout.shards import read_shard

KEEP_ALL = load_redactor(None)


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
    capture.close()
    (path,) = segment_paths(tmp_path / "capture")
    first, second = (sample for _, sample in read_shard(path))
    assert (first.prompt, first.response) == ([1, 2], [3, 4, 5])
    assert (first.source, first.temperature) == ("traffic", 0.5)
    assert first.id.endswith("/request-1")
    assert first.id < second.id
    assert capture.counters == CaptureCounters(captured=2)


def test_the_rate_is_the_fraction_of_requests_and_stable_for_an_id(tmp_path: Path) -> None:
    capture = start(tmp_path, rate=0.25)
    sampled = [capture.is_sampled(f"cmpl-{number}") for number in range(4000)]
    assert 850 < sum(sampled) < 1150
    assert sampled == [capture.is_sampled(f"cmpl-{number}") for number in range(4000)]
    capture.close()


def test_an_offer_never_waits_for_a_stuck_writer(tmp_path: Path) -> None:
    stuck = threading.Event()

    def wait(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        stuck.wait(20)
        return prompt, response

    capture = start(tmp_path, redact=wait)
    started = time.perf_counter()
    offered = MAX_QUEUED + 500
    for number in range(offered):
        capture.offer(finished(number))
    assert time.perf_counter() - started < 1
    assert capture.counters.too_slow >= 499
    stuck.set()
    capture.close()
    assert capture.counters.captured + capture.counters.too_slow == offered


def test_disk_errors_are_counted_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leadout_log: list[str]
) -> None:
    (tmp_path / "capture").touch()  # a file in place of the folder: every write fails
    monkeypatch.setattr(capture_module, "SECONDS_BEFORE_RETRY", 0.0)
    capture = start(tmp_path)
    for number in range(50):
        capture.offer(finished(number))
    time.sleep(1.5)
    assert read_small(tmp_path / "counters.json", CaptureCounters) == CaptureCounters(disk=50)
    capture.close()
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
    capture.close()
    (path,) = segment_paths(tmp_path / "capture")
    assert [sample.prompt for _, sample in read_shard(path)] == [[0, 0]]
    assert capture.counters == CaptureCounters(captured=1, redacted=2)
