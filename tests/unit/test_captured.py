"""The folder of captured traffic: order by time, and what is no such folder."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from leadout.engine.capture_store import (
    INFO,
    CaptureInfo,
    read_info,
    sample_id,
    segment_name,
    segments,
)
from leadout.shards import ShardError

EARLY = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
LATE = datetime(2026, 1, 2, 3, 4, 5, 70000, tzinfo=UTC)


def test_segments_come_oldest_first_and_nothing_else_does(tmp_path: Path) -> None:
    names = [segment_name(LATE, 1), segment_name(EARLY, 99999)]
    for name in (*names, INFO, ".capture.json.7", "traffic-old.jsonl", "traffic.jsonl"):
        (tmp_path / name).touch()
    assert [path.name for path in segments(tmp_path)] == names[::-1]


def test_ids_sort_by_time_whatever_the_request() -> None:
    assert sample_id(EARLY, "z") < sample_id(LATE, "a")
    assert sample_id(EARLY, "a") == "2026-01-02T03:04:05.000006/a"


def test_the_folders_word_is_read_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"capture\.json: found nothing, wanted the traffic"):
        read_info(tmp_path)
    info = CaptureInfo(target="a-target", target_fingerprint="ab")
    (tmp_path / INFO).write_text(info.model_dump_json())
    assert read_info(tmp_path) == info
    (tmp_path / INFO).write_text('{"target": "a"}')
    with pytest.raises(ShardError, match="target_fingerprint: Field required"):
        read_info(tmp_path)
