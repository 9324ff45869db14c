"""Finished segments move to a store, none is lost or doubled, and a learner reads them there."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from leadout.engine.capture import Capture, FinishedRequest
from leadout.engine.capture_store import INFO, CaptureInfo, SegmentWriter, segment_paths
from leadout.engine.capture_upload import SegmentUploader
from leadout.learn.data import copy_newest, download_newest
from leadout.sealed import Keys
from leadout.shards import Sample, Samples, ShardError
from leadout.storage import Storage, StorageError, open_storage

TARGET = CaptureInfo(target="a-target", target_fingerprint="ab")


@pytest.fixture
def store(s3_url: str) -> Storage:
    return open_storage(s3_url)


def sample(number: int) -> Sample:
    return Sample(
        id=f"{number:06d}", source="traffic", prompt=[1], response=[7] * 20, temperature=0.0
    )


def open_writer(folder: Path, info: CaptureInfo = TARGET) -> SegmentWriter:
    return SegmentWriter(folder, lambda: info, max_bytes=1 << 20, max_seconds=1e6)


def uploader_of(
    folder: Path, store: Storage, max_bytes: int = 1 << 20, max_seconds: float = 1e10
) -> SegmentUploader:
    return SegmentUploader(folder, store, max_bytes=max_bytes, max_seconds=max_seconds)


def ids_in(store: Storage, tmp_path: Path) -> list[str]:
    """What `leadout learn --traffic` reads."""
    folder = tmp_path / f"downloaded-{time.monotonic_ns()}"
    download_newest(store.address, folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    copied = copy_newest(folder, "ab", 10, folder / "copy", Keys.read(None))
    return [each.id for each in Samples(copied.paths)]


def test_a_segment_is_moved_once_it_is_closed(store: Storage, tmp_path: Path) -> None:
    writer, uploader = open_writer(tmp_path / "capture"), uploader_of(tmp_path / "capture", store)
    assert uploader.upload() == 0  # there is no folder yet
    writer.add(sample(1))
    assert uploader.upload() == 0
    writer.close()
    writer.add(sample(2))
    assert uploader.upload() == 1
    assert len(segment_paths(tmp_path / "capture")) == 1
    writer.add(sample(3))  # into the open segment, which is still there
    writer.close()
    assert uploader.upload() == 1
    assert segment_paths(tmp_path / "capture") == []
    assert ids_in(store, tmp_path) == ["000001", "000002", "000003"]


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from leadout.engine.capture_store import CaptureInfo, SegmentWriter
from leadout.shards import Sample

info = CaptureInfo(target="a-target", target_fingerprint="ab")
writer = SegmentWriter(Path(sys.argv[1]), lambda: info, max_bytes=1 << 20, max_seconds=1e6)
writer.add(Sample(id="1", source="traffic", prompt=[1], response=[7, 7], temperature=0.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_server_uploads_what_a_killed_one_left(store: Storage, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, tmp_path / "capture"])
    assert killed.returncode == -signal.SIGKILL
    assert uploader_of(tmp_path / "capture", store).upload() == 1
    assert ids_in(store, tmp_path) == ["1"]


def test_nothing_is_deleted_before_the_store_has_it(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, uploader = open_writer(tmp_path / "capture"), uploader_of(tmp_path / "capture", store)
    writer.add(sample(1))
    writer.close()

    def fake_replace(self: Storage, name: str, content: bytes, tag: str | None) -> bool:
        raise StorageError("503")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "replace", fake_replace)
        with pytest.raises(StorageError):
            uploader.upload()
    assert len(segment_paths(tmp_path / "capture")) == 1
    assert uploader.upload() == 1
    assert ids_in(store, tmp_path) == ["000001"]


def test_two_segments_of_one_name_are_both_kept(store: Storage, tmp_path: Path) -> None:
    for number, folder in enumerate((tmp_path / "one", tmp_path / "other")):
        writer = open_writer(folder)
        writer.add(sample(number))
        writer.close()
        (path,) = segment_paths(folder)
        path.rename(folder / "traffic-20260102T030405.000006-7.jsonl")
        uploader_of(folder, store).upload()
    assert ids_in(store, tmp_path) == ["000000", "000001"]


def test_traffic_of_another_target_stays(store: Storage, tmp_path: Path) -> None:
    for name in ("ab", "cd"):
        info = CaptureInfo(target="a-target", target_fingerprint=name)
        writer = open_writer(tmp_path / name, info)
        writer.add(sample(1))
        writer.close()
    uploader_of(tmp_path / "ab", store).upload()
    with pytest.raises(ShardError, match=r"--capture-upload s3://.* holds traffic of a-target"):
        uploader_of(tmp_path / "cd", store).upload()
    assert len(segment_paths(tmp_path / "cd")) == 1


def test_the_oldest_are_deleted_from_a_full_store(store: Storage, tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "capture")
    for number in range(4):
        writer.add(sample(number))
        writer.close()
    size = segment_paths(tmp_path / "capture")[0].stat().st_size
    uploader_of(tmp_path / "capture", store, max_bytes=2 * size).upload()
    assert ids_in(store, tmp_path) == ["000002", "000003"]


def test_old_traffic_leaves_the_store_although_nothing_is_moved(
    store: Storage, tmp_path: Path
) -> None:
    folder = tmp_path / "capture"
    writer = open_writer(folder)
    for name in ("traffic-20260102T030405.000006-7.jsonl", None):
        writer.add(sample(1))
        writer.close()
        if name is not None:
            segment_paths(folder)[0].rename(folder / name)
    assert uploader_of(folder, store).upload() == 2
    assert uploader_of(folder, store, max_seconds=86400.0).upload() == 0
    names = {entry.name for entry in store.entries() if entry.name.startswith("traffic-")}
    assert len(names) == 1
    assert "traffic-20260102T030405.000006-7.jsonl" not in names


def test_old_traffic_of_another_target_is_not_deleted(store: Storage, tmp_path: Path) -> None:
    for name in ("ab", "cd"):
        writer = open_writer(tmp_path / name, CaptureInfo(target="t", target_fingerprint=name))
        writer.add(sample(1))
        writer.close()
    uploader_of(tmp_path / "ab", store).upload()
    with pytest.raises(ShardError, match="holds traffic of t"):
        uploader_of(tmp_path / "cd", store, max_seconds=0.0).upload()
    assert ids_in(store, tmp_path) == ["000001"]


def test_a_segment_that_cannot_be_read_does_not_stop_the_others(
    store: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(tmp_path / "capture")
    for number in range(2):
        writer.add(sample(number))
        writer.close()
    first = segment_paths(tmp_path / "capture")[0]
    real_open = Path.open

    def fake_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == first:
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fake_open)
    with pytest.raises(PermissionError):
        uploader_of(tmp_path / "capture", store).upload()
    assert segment_paths(tmp_path / "capture") == [first]
    assert ids_in(store, tmp_path) == ["000001"]


def test_an_uploader_that_looks_at_a_new_segment_does_not_take_its_lock_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open
    looking: list[int] = []

    def fake_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        handle = real_open(path, flags, *args, **kwargs)
        if flags & os.O_EXCL and str(path).endswith(".jsonl"):
            looking.append(real_open(path, os.O_RDWR))
            fcntl.flock(looking[0], fcntl.LOCK_EX)  # as an uploader at this very moment
            threading.Timer(0.2, os.close, looking).start()
        return handle

    monkeypatch.setattr(os, "open", fake_open)
    writer = open_writer(tmp_path)
    writer.add(sample(1))
    assert looking
    with segment_paths(tmp_path)[0].open("r+b") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    writer.close()


def test_the_end_of_a_server_uploads_the_rest(store: Storage, tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    capture = Capture(
        open_writer(folder),
        rate=1.0,
        redact=lambda prompt, response: (prompt, response),
        counters_path=tmp_path / "counters.json",
        uploader=uploader_of(folder, store),
    )
    capture.offer(FinishedRequest("a", [1], [2, 3, 4], 0.0))
    capture.close(seconds=600.0)
    assert [path.name for path in folder.iterdir()] == [INFO]
    assert len(ids_in(store, tmp_path)) == 1


def test_a_place_without_captured_traffic_is_named(store: Storage, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"s3://.*capture\.json does not exist.*--capture-upload"):
        download_newest(store.address, tmp_path / "download")
    assert list(tmp_path.iterdir()) == []


def test_only_the_segments_of_an_interrupted_cycle_are_fetched(
    store: Storage, tmp_path: Path
) -> None:
    writer, uploader = open_writer(tmp_path / "capture"), uploader_of(tmp_path / "capture", store)
    for number in range(3):
        writer.add(sample(number))
        writer.close()
    names = [path.name for path in segment_paths(tmp_path / "capture")]
    uploader.upload()
    folder = download_newest(store.address, tmp_path / "download", {names[1]})
    assert [path.name for path in segment_paths(folder)] == [names[1]]
    assert (folder / INFO).exists()
