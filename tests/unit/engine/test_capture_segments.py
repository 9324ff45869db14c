"""Captured traffic on the disk: private, bounded in bytes and age, whole lines only."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leadout.engine.capture_store import INFO, CaptureInfo, Segments, read_info, segments
from leadout.shards import Sample, ShardError, read_shard

ABOUT = CaptureInfo(target="a-target", target_fingerprint="ab")


def sample(number: int, tokens: int = 100) -> Sample:
    return Sample(
        id=f"{number:06d}", source="traffic", prompt=[1], response=[7] * tokens, temperature=0.0
    )


def opened(folder: Path, most_bytes: int = 1 << 20, most_seconds: float = 1e6) -> Segments:
    return Segments(folder, lambda: ABOUT, most_bytes=most_bytes, most_seconds=most_seconds)


def ids(folder: Path) -> list[str]:
    return [one.id for path in segments(folder) for _, one in read_shard(path)]


def test_nothing_is_written_before_a_sample_and_then_for_the_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "capture"
    writer = opened(folder)
    assert not folder.exists()
    before = os.umask(0)  # the modes are ours, not the umask's
    try:
        writer.add(sample(1))
    finally:
        os.umask(before)
    writer.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert read_info(folder) == ABOUT
    assert ids(folder) == ["000001"]


def test_bytes_are_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    most = 1 << 16
    writer = opened(tmp_path, most_bytes=most)
    for number in range(600):  # about three times the bound
        writer.add(sample(number))
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= most
    writer.close()
    kept = ids(tmp_path)
    assert len(kept) > 100
    assert kept == [f"{number:06d}" for number in range(600 - len(kept), 600)]


def test_age_is_bounded_also_without_traffic(tmp_path: Path) -> None:
    writer = opened(tmp_path, most_seconds=100)
    writer.add(sample(1))
    writer.close()
    (old,) = segments(tmp_path)
    writer.add(sample(2))
    os.utime(old, (0, time.time() - 101))
    writer.tidy()
    assert ids(tmp_path) == ["000002"]


def test_a_folder_of_another_target_is_refused(tmp_path: Path) -> None:
    other = ABOUT.model_copy(update={"target": "other", "target_fingerprint": "cd"})
    (tmp_path / INFO).write_text(other.model_dump_json())
    with pytest.raises(ShardError, match="found traffic of other"):
        opened(tmp_path).add(sample(1))
    assert segments(tmp_path) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_capture_segments import opened, sample

writer = opened(Path(sys.argv[1]))
writer.add(sample(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))  # as if the disk had no more
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
    kept = ids(tmp_path)  # a torn line would not parse
    assert int(done.stdout) >= 2
    assert kept[0] == "000001"
    assert kept[-1] == "000009"
    assert all(path.stat().st_size > 0 for path in segments(tmp_path))
