"""Capture beside a scheduler: it takes what it can, and counts what it cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from leadout.engine import capture as capture_module
from leadout.engine import settings as capture_settings
from leadout.engine.capture import MOST_WAITING, Capture, CaptureNumbers, Finished
from leadout.engine.capture_store import CaptureInfo, Segments, segments
from leadout.engine.settings import CaptureSettings, Redactor, SectionError, load_redactor
from leadout.engine.small_files import read_small
from leadout.shards import read_shard

KEEP_ALL = load_redactor(None)


def start(
    folder: Path,
    *,
    rate: float = 1.0,
    redact: Redactor = KEEP_ALL,
    say: Callable[[str], None] = lambda line: None,
) -> Capture:
    about = CaptureInfo(target="a-target", target_fingerprint="ab")
    to = Segments(folder / "capture", lambda: about, most_bytes=1 << 20, most_seconds=1e6)
    return Capture(to, rate=rate, redact=redact, numbers_path=folder / "numbers.json", say=say)


def finished(number: int = 1) -> Finished:
    return Finished(f"request-{number}", [1, 2], [3, 4, 5], 0.5)


def test_a_request_becomes_a_sample(tmp_path: Path) -> None:
    capture = start(tmp_path)
    for number in (1, 2):
        capture.offer(finished(number))
    capture.close()
    (path,) = segments(tmp_path / "capture")
    first, second = (sample for _, sample in read_shard(path))
    assert (first.prompt, first.response) == ([1, 2], [3, 4, 5])
    assert (first.source, first.temperature) == ("traffic", 0.5)
    assert first.id.endswith("/request-1")
    assert first.id < second.id
    assert capture.numbers == CaptureNumbers(captured=2)


def test_the_rate_is_that_of_the_requests(tmp_path: Path) -> None:
    capture = start(tmp_path, rate=0.25)
    wanted = [capture.wants(f"cmpl-{number}") for number in range(4000)]
    assert 850 < sum(wanted) < 1150
    assert wanted == [capture.wants(f"cmpl-{number}") for number in range(4000)]
    capture.close()


def test_a_stuck_disk_never_holds_an_offer_up(tmp_path: Path) -> None:
    stuck = threading.Event()

    def wait(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        stuck.wait(20)
        return prompt, response

    capture = start(tmp_path, redact=wait)
    begun = time.perf_counter()
    offered = MOST_WAITING + 500
    for number in range(offered):
        capture.offer(finished(number))
    assert time.perf_counter() - begun < 1
    assert capture.numbers.too_slow >= 499
    stuck.set()
    capture.close()
    assert capture.numbers.captured + capture.numbers.too_slow == offered


def test_a_full_disk_is_counted_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    (tmp_path / "capture").touch()  # where a folder must be: every write ends in an OSError
    monkeypatch.setattr(capture_module, "REST_AFTER_ERROR", 0.0)
    capture = start(tmp_path, say=lines.append)
    for number in range(50):
        capture.offer(finished(number))
    time.sleep(1.5)
    assert read_small(tmp_path / "numbers.json", CaptureNumbers) == CaptureNumbers(disk=50)
    capture.close()
    assert len(lines) == 1
    assert "Serving goes on" in lines[0]


def test_a_redactor_changes_drops_and_fails_safe(tmp_path: Path) -> None:
    def redact(prompt: list[int], response: list[int]) -> tuple[list[int], list[int]] | None:
        if prompt == [13]:
            return None
        if prompt == [14]:
            raise RuntimeError("what is this")
        return [0] * len(prompt), response

    capture = start(tmp_path, redact=redact)
    for number, prompt in enumerate(([1, 2], [13], [14])):
        capture.offer(Finished(str(number), prompt, [3], 0.0))
    capture.close()
    (path,) = segments(tmp_path / "capture")
    assert [sample.prompt for _, sample in read_shard(path)] == [[0, 0]]
    assert capture.numbers == CaptureNumbers(captured=1, redacted=2)


def test_only_an_installed_redactor_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SectionError, match=r"found 'os:system', wanted one of \[\]"):
        load_redactor("os:system")
    point = EntryPoint("hide", "support.prompts:PROMPTS", capture_settings.REDACTORS)
    monkeypatch.setattr(capture_settings, "entry_points", lambda group: [point])
    with pytest.raises(SectionError, match=r"wanted one of \['hide'\]"):
        load_redactor("support.prompts:PROMPTS")


@pytest.mark.parametrize("bad", [{"rate": 0.0}, {"rate": 1.5}, {"most_bytes": 10}, {"rat": 1}])
def test_settings_out_of_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        CaptureSettings.model_validate(bad)
