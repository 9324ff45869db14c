"""A folder, an object store with conditional writes and one without keep the same promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leadout.files import FileError, lock
from leadout.leftovers import scratch_folder
from leadout.storage import Storage, StorageError, WrongFilesError, open_storage, resolved
from leadout.storage import objects as object_storage
from leadout.storage.base import sha256_of
from leadout.storage.objects import ObjectStorage
from leadout.storage.s3 import S3Storage
from support.s3_server import FakeNetwork, S3Server, fake_network

LAST = "version.json"


@pytest.fixture(params=["folder", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return open_storage(str(tmp_path / "root"))
    if request.param == "memory":  # without conditional writes
        return ObjectStorage(f"memory://{tmp_path.name}", tmp_path / "cache")
    return open_storage(request.getfixturevalue("s3_url"))


def added(storage: Storage, tmp_path: Path, content: bytes = b"weights") -> dict[str, str]:
    """Add the folder versions/0001; returns its hashes."""
    with storage.staging("versions") as staged:
        (staged / "weights.bin").write_bytes(content)
        (staged / LAST).write_bytes(b"{}")
        hashes = {"weights.bin": sha256_of(staged / "weights.bin")}
        assert storage.add_folder(staged, "versions/0001", LAST)
    return hashes


def test_a_file_is_replaced_only_as_it_was_read(storage: Storage) -> None:
    assert storage.read("a/pointer") is None
    assert storage.replace("a/pointer", b"1", None)
    assert not storage.replace("a/pointer", b"2", None)
    first = storage.read("a/pointer")
    assert first is not None
    assert first.content == b"1"
    assert storage.replace("a/pointer", b"2", first.tag)
    assert not storage.replace("a/pointer", b"3", first.tag)
    second = storage.read("a/pointer")
    assert second is not None
    assert second.content == b"2"
    assert not storage.replace("a/other", b"3", second.tag)  # it does not exist
    storage.write("a/pointer", b"4")
    storage.delete("a/pointer")
    storage.delete("a/pointer")
    assert storage.read("a/pointer") is None


def test_four_writers_lose_no_update(storage: Storage, nightly: bool) -> None:
    each = 25 if nightly else 3
    problems: list[BaseException] = []

    def count(writer: int) -> None:
        try:
            for _ in range(each):
                while True:
                    stored = storage.read("counts")
                    counts = {} if stored is None else json.loads(stored.content)
                    counts[str(writer)] = counts.get(str(writer), 0) + 1
                    tag = None if stored is None else stored.tag
                    if storage.replace("counts", json.dumps(counts).encode(), tag):
                        break
        except BaseException as problem:
            problems.append(problem)

    writers = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert problems == []
    stored = storage.read("counts")
    assert stored is not None
    assert json.loads(stored.content) == {str(number): each for number in range(4)}


def test_a_log_keeps_the_order_of_its_lines(storage: Storage) -> None:
    assert storage.lines("log.jsonl") == []
    for number in range(5):
        storage.append("log.jsonl", b"%d\n" % number)
    assert [line for line in storage.lines("log.jsonl") if line] == [b"0", b"1", b"2", b"3", b"4"]


def test_entries_are_all_files_below(storage: Storage) -> None:
    assert storage.entries("a") == []
    for name in ("a/b/two", "a/one", "aa/other"):
        storage.write(name, b"123")
    assert [(entry.name, entry.size) for entry in storage.entries("a")] == [
        ("b/two", 3),
        ("one", 3),
    ]
    assert abs(storage.entries("a")[0].modified - os.stat("/proc/self").st_mtime) < 86400  # noqa: PTH116


def test_a_folder_is_added_once_and_fetched_as_it_was(storage: Storage, tmp_path: Path) -> None:
    hashes = added(storage, tmp_path)
    with storage.staging("versions") as staged:
        (staged / LAST).write_bytes(b"another")
        assert not storage.add_folder(staged, "versions/0001", LAST)
    for _ in range(2):
        folder = storage.fetch("versions/0001", hashes, LAST)
        assert (folder / "weights.bin").read_bytes() == b"weights"
    assert folder == storage.local_path("versions/0001")


@pytest.mark.parametrize("fault", ["changed", "missing", "added"])
def test_wrong_files_are_refused(storage: Storage, tmp_path: Path, fault: str) -> None:
    hashes = added(storage, tmp_path)
    if fault == "changed":
        storage.write("versions/0001/weights.bin", b"Weights")
    elif fault == "missing":
        storage.delete("versions/0001/weights.bin")
    else:
        storage.write("versions/0001/more.bin", b"")
    with pytest.raises(WrongFilesError, match="publishing"):
        storage.fetch("versions/0001", hashes, LAST)


def test_a_file_that_is_too_large_is_not_read(storage: Storage) -> None:
    storage.write("large", bytes((1 << 20) + 1))
    with pytest.raises(FileError, match="at most 1 MiB"):
        storage.read("large", max_mib=1)


def test_a_damaged_cache_is_fetched_again(s3_url: str, tmp_path: Path) -> None:
    storage = open_storage(s3_url)
    hashes = added(storage, tmp_path)
    folder = storage.fetch("versions/0001", hashes, LAST)
    (folder / "weights.bin").write_bytes(b"damaged")
    (folder / "config.json").write_text("{}")
    storage.fetch("versions/0001", hashes, LAST)
    assert [path.name for path in folder.iterdir()] == ["weights.bin"]
    assert (folder / "weights.bin").read_bytes() == b"weights"


def test_deleted_versions_leave_the_cache(s3_url: str, tmp_path: Path) -> None:
    storage = open_storage(s3_url)
    hashes = added(storage, tmp_path)
    gone = storage.local_path("versions/0002")
    gone.mkdir(parents=True)
    storage.fetch("versions/0001", hashes, LAST)
    assert not gone.exists()


def test_a_name_that_leaves_the_cache_is_refused(tmp_path: Path) -> None:
    storage = ObjectStorage("memory://hostile", tmp_path / "cache")
    names = {"../../outside": "0" * 64}
    storage.entries = lambda folder="": [object_storage.Entry(name, 1, 0.0) for name in names]  # type: ignore[method-assign]
    with pytest.raises(WrongFilesError, match="not the name of a file"):
        storage.fetch("versions/0001", names, LAST)


def test_what_killed_publishers_left_is_removed_after_a_day(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(s3_url)
    storage.write("versions/0007/weights.bin", b"half")
    added(storage, tmp_path)
    assert any(entry.name.startswith("0007/") for entry in storage.entries("versions"))
    monkeypatch.setattr(object_storage, "MAX_UPLOAD_SECONDS", -86400.0)
    with storage.staging("versions") as staged:
        (staged / LAST).write_bytes(b"{}")
        storage.add_folder(staged, "versions/0008", LAST)
    assert [entry.name for entry in storage.entries("versions")] == [
        "0001/version.json",
        "0001/weights.bin",
        "0008/version.json",
    ]


def test_a_store_that_ignores_conditions_is_locked_instead(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_put = S3Storage._put

    def fake_put(self: S3Storage, name: str, content: bytes, tag: str | None) -> bool:
        self.write(name, content)  # whatever the condition says
        return True

    monkeypatch.setattr(S3Storage, "_put", fake_put)
    storage = open_storage(s3_url)
    assert storage.replace("pointer", b"1", None)
    assert not storage.replace("pointer", b"2", None)
    monkeypatch.setattr(S3Storage, "_put", real_put)
    other = open_storage(s3_url)
    assert isinstance(other, S3Storage)
    assert other._has_conditional_writes()


def test_the_lock_of_a_killed_writer_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(f"memory://{tmp_path.name}", tmp_path / "cache")
    storage.write(".locks/killed", b"")
    monkeypatch.setattr(object_storage, "MAX_WAIT_SECONDS", 0.1)
    with pytest.raises(StorageError, match="has held the lock too long"):
        storage.replace("pointer", b"1", None)
    monkeypatch.setattr(object_storage, "MAX_LOCK_SECONDS", -1.0)
    assert storage.replace("pointer", b"1", None)
    assert storage.entries(".locks") == []


def test_a_cache_that_another_process_holds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(f"memory://{tmp_path.name}", tmp_path / "cache")
    hashes = added(storage, tmp_path)
    monkeypatch.setattr(object_storage, "MAX_FETCH_SECONDS", 0.1)
    (tmp_path / "cache").mkdir()
    with (
        lock(tmp_path / "cache" / ".lock"),
        pytest.raises(StorageError, match=r"cache/\.lock has been held"),
    ):
        storage.fetch("versions/0001", hashes, LAST)
    storage.fetch("versions/0001", hashes, LAST)


def test_a_folder_that_disappears_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    for name in ("a/one", "b/two"):
        storage.write(name, b"123")
    real_scandir = os.scandir
    errors: dict[str, OSError] = {}

    def fake_scandir(path: Any = ".") -> Any:
        if (error := errors.get(Path(path).name)) is not None:
            error.filename = str(path)
            raise error
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", fake_scandir)
    for error in (FileNotFoundError(), PermissionError()):
        errors["a"] = error
        assert [entry.name for entry in storage.entries()] == ["b/two"]
        storage.remove_leftovers()
    errors["a"] = OSError()
    with pytest.raises(OSError):  # noqa: PT011 - it has no text
        storage.entries()
    errors = {tmp_path.name: PermissionError()}  # which must not look like an empty storage
    with pytest.raises(PermissionError):
        storage.entries()


USE_AND_DIE = """
import os
from leadout.leftovers import scratch_folder

with scratch_folder() as folder:
    (folder / "model.safetensors").touch()
    os._exit(0)
"""


def test_what_killed_processes_left_in_the_temporary_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", USE_AND_DIE], env=environment, check=True)
    (left,) = tmp_path.iterdir()
    assert left.stat().st_mode & 0o777 == 0o700
    for number in range(8):  # which cannot be examined, and must not hide the others
        (tmp_path / f".a.00000000-1-{number}.partial").symlink_to("nothing")
    with scratch_folder() as folder:
        assert folder.parent == tmp_path
        assert not left.exists()
    assert not folder.exists()


@pytest.fixture
def network(
    s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeNetwork]:
    """The way to the server, which can fail."""
    with fake_network(s3_server) as connection:
        monkeypatch.setattr(S3Storage, "options", connection.options())
        yield connection


def test_a_store_that_fails_for_a_while_is_not_a_wrong_one(
    network: FakeNetwork, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(s3_url)
    hashes = added(storage, tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: storage.read("versions/0001/version.json"),
        lambda: storage.replace("pointer", b"1", None),
        lambda: storage.fetch("versions/0001", hashes, LAST),
        lambda: storage.lines("ledger.jsonl"),
        lambda: storage.append("ledger.jsonl", b"{}\n"),
    ]
    network.set_mode("503")
    for call in calls:
        with pytest.raises(StorageError) as caught:
            call()
        assert isinstance(caught.value, OSError)
    network.set_mode("hang")
    with monkeypatch.context() as impatient:
        impatient.setattr(S3Storage, "options", network.options(read_timeout=2.0))
        with pytest.raises(StorageError):
            calls[0]()
    assert network.requests >= len(calls)
    network.set_mode("pass")
    for call in calls:
        call()


def test_a_url_is_not_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved("registry") == str(tmp_path / "registry")
    assert resolved("s3://bucket/a") == "s3://bucket/a"


@pytest.mark.parametrize("url", ["s3://", "nonsense://bucket/a"])
def test_wrong_urls_are_explained(url: str) -> None:
    with pytest.raises(StorageError, match=r"[eE]xpected"):
        open_storage(url).read("a")
