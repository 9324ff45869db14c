"""Captured traffic on the disk: private, bounded in size and age, whole lines only."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from leadout.engine.capture_store import (
    INFO,
    CaptureInfo,
    SegmentWriter,
    read_info,
    sample_id,
    segment_name,
    segment_paths,
)
from leadout.shards import Sample, ShardError, read_shard

TARGET = CaptureInfo(target="a-target", target_fingerprint="ab")
EARLY = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
LATE = datetime(2026, 1, 2, 3, 4, 5, 70000, tzinfo=UTC)


def sample(number: int, tokens: int = 100) -> Sample:
    return Sample(
        id=f"{number:06d}", source="traffic", prompt=[1], response=[7] * tokens, temperature=0.0
    )


def open_writer(folder: Path, max_bytes: int = 1 << 20, max_seconds: float = 1e6) -> SegmentWriter:
    return SegmentWriter(folder, lambda: TARGET, max_bytes=max_bytes, max_seconds=max_seconds)


def stored_ids(folder: Path) -> list[str]:
    return [one.id for path in segment_paths(folder) for _, one in read_shard(path)]


def test_segments_are_listed_oldest_first_without_other_files(tmp_path: Path) -> None:
    names = [segment_name(LATE, 1), segment_name(EARLY, 99999)]
    for name in (*names, INFO, ".capture.json.7", "traffic-old.jsonl", "traffic.jsonl"):
        (tmp_path / name).touch()
    assert [path.name for path in segment_paths(tmp_path)] == names[::-1]


def test_ids_sort_by_time_before_the_request_id() -> None:
    assert sample_id(EARLY, "z") < sample_id(LATE, "a")
    assert sample_id(EARLY, "a") == "2026-01-02T03:04:05.000006/a"


def test_the_target_of_a_folder_is_read_and_errors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"capture\.json does not exist"):
        read_info(tmp_path)
    (tmp_path / INFO).write_text(TARGET.model_dump_json())
    assert read_info(tmp_path) == TARGET
    (tmp_path / INFO).write_text('{"target": "a"}')
    with pytest.raises(ShardError, match="target_fingerprint: Field required"):
        read_info(tmp_path)


def test_files_appear_with_the_first_sample_and_only_their_owner_can_read_them(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "deep" / "capture"
    writer = open_writer(folder)
    assert not folder.exists()
    before = os.umask(0)  # the modes must not depend on it
    try:
        writer.add(sample(1))
    finally:
        os.umask(before)
    writer.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert read_info(folder) == TARGET
    assert stored_ids(folder) == ["000001"]


def test_the_oldest_segments_are_deleted_to_stay_within_the_size_limit(tmp_path: Path) -> None:
    max_bytes = 1 << 16
    writer = open_writer(tmp_path, max_bytes=max_bytes)
    for number in range(600):  # about three times the limit
        writer.add(sample(number))
        assert sum(path.stat().st_size for path in segment_paths(tmp_path)) <= max_bytes
    writer.close()
    stored = stored_ids(tmp_path)
    assert len(stored) > 100
    assert stored == [f"{number:06d}" for number in range(600 - len(stored), 600)]


def test_old_segments_are_deleted_without_new_traffic(tmp_path: Path) -> None:
    writer = open_writer(tmp_path, max_seconds=100)
    writer.add(sample(1))
    writer.close()
    (old,) = segment_paths(tmp_path)
    writer.add(sample(2))
    os.utime(old, (0, time.time() - 101))
    writer.expire()
    assert stored_ids(tmp_path) == ["000002"]


def test_a_folder_of_another_target_is_refused(tmp_path: Path) -> None:
    other = TARGET.model_copy(update={"target": "other", "target_fingerprint": "cd"})
    (tmp_path / INFO).write_text(other.model_dump_json())
    with pytest.raises(ShardError, match="holds traffic of other"):
        open_writer(tmp_path).add(sample(1))
    assert segment_paths(tmp_path) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_capture_store import open_writer, sample

writer = open_writer(Path(sys.argv[1]))
writer.add(sample(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))  # as if the disk were full
refused = 0
for number in range(2, 6):
    try:
        writer.add(sample(number))
    except OSError:
        refused += 1
writer.add(sample(9, tokens=10))
writer.close()
print(refused)
"""


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path, here],
        capture_output=True,
        text=True,
        check=True,
        cwd=here.parents[1],
    )
    stored = stored_ids(tmp_path)  # a torn line would not parse
    assert int(done.stdout) >= 2
    assert stored[0] == "000001"
    assert stored[-1] == "000009"
    assert all(path.stat().st_size > 0 for path in segment_paths(tmp_path))


def test_after_a_failing_close_no_sample_goes_into_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems report errors of earlier writes when a file is closed."""
    writer, close = open_writer(tmp_path / "capture", max_seconds=100), os.close
    writer.add(sample(1))
    assert writer._segment is not None
    handle = writer._segment._handle

    def fake_close(number: int) -> None:
        close(number)  # the system frees the number although it reports an error
        if number == handle:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", fake_close)
    writer._segment.started -= 1000  # old enough to be closed
    with pytest.raises(OSError, match="quota"):
        writer.expire()
    monkeypatch.setattr(os, "close", close)
    other = os.open(tmp_path / "of-somebody-else", os.O_RDWR | os.O_CREAT)
    if other != handle:  # a smaller one was free, too
        assert fcntl.fcntl(other, fcntl.F_DUPFD, handle) == handle
        close(other)
    # The number has been given away.
    writer.add(sample(2))
    writer.close()
    close(handle)
    assert (tmp_path / "of-somebody-else").read_bytes() == b""
    assert stored_ids(tmp_path / "capture") == ["000001", "000002"]


def test_one_file_that_cannot_be_deleted_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(tmp_path, max_seconds=100)
    for number in (1, 2):
        writer.add(sample(number))
        writer.close()
    first, second = segment_paths(tmp_path)
    for path in (first, second):
        os.utime(path, (0, time.time() - 101))
    unlink = Path.unlink

    def fake_unlink(path: Path, missing_ok: bool = False) -> None:
        if path == first:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fake_unlink)
    with pytest.raises(OSError, match="cannot be deleted: Operation not permitted"):
        writer.expire()
    assert segment_paths(tmp_path) == [first]
