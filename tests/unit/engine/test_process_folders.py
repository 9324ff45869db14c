"""What killed processes leave among the temporary files, and who removes it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from leadout.engine.process_folders import (
    PRIVATE,
    SHARED_MEMORY,
    SOCKETS,
    claim,
    folder_for_sockets,
    is_held,
    private_folder,
    release,
)

CLAIM = """
import sys, time
from leadout.engine.process_folders import claim, note_shared_memory, private_folder
folder = private_folder() / sys.argv[1]
claim(folder)
(folder / "counters.json").write_text("{}")
if "--memory" in sys.argv:
    from multiprocessing import resource_tracker
    from multiprocessing.shared_memory import SharedMemory
    memory = SharedMemory(create=True, size=64)
    resource_tracker.unregister(memory._name, "shared_memory")  # as if it were killed too
    note_shared_memory(folder)
    print(memory.name)
print("claimed", flush=True)
time.sleep(3600)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / PRIVATE


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Starts processes that hold a folder, and ends them with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CLAIM, name, *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def test_what_a_killed_process_left_is_removed_by_the_next_start(place: Path, start: Start) -> None:
    killed, running = start("killed", "--memory"), start("running", "--memory")
    (memory, _), (other, _) = lines(killed, 2), lines(running, 2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (place / "killed" / "counters.json").exists()
    assert (SHARED_MEMORY / memory).exists()
    lines(start("next"), 1)
    assert sorted(path.name for path in place.iterdir()) == ["next", "running"]
    assert (place / "running" / "counters.json").exists()
    assert not (SHARED_MEMORY / memory).exists()
    assert (SHARED_MEMORY / other).exists()
    running.kill()
    running.wait()
    lines(start("last"), 1)
    assert not (SHARED_MEMORY / other).exists()


def test_only_shared_memory_of_python_is_removed(place: Path) -> None:
    kept = SharedMemory(create=True, size=8)
    try:
        abandoned = place / "abandoned"
        abandoned.mkdir(parents=True)
        names = [f"../shm/{kept.name}", "../../etc/nothing", f"{kept.name}/.", ""]
        (abandoned / "shared-memory").write_text("\n".join(names))
        claim(private_folder() / "next")
        assert not abandoned.exists()
        assert (SHARED_MEMORY / kept.name).exists()
    finally:
        release(private_folder() / "next")
        kept.close()
        kept.unlink()


def test_a_file_beside_the_folders_is_kept_for_an_hour(place: Path) -> None:
    place.mkdir()
    new, old, link = place / "new.json", place / "old.json", place / "link"
    new.touch()
    old.touch()
    link.symlink_to(place.parent)
    for path in (old, link):
        os.utime(path, (0, 0), follow_symlinks=False)
    claim(private_folder() / "next")
    assert sorted(path.name for path in place.iterdir()) == ["new.json", "next"]
    assert place.parent.is_dir()
    release(private_folder() / "next")


def test_a_folder_in_use_is_kept_although_a_cleaner_has_deleted_its_files(
    place: Path, start: Start
) -> None:
    """As of temporary files that nobody has changed for days."""
    running = start("running")
    lines(running, 1)
    for path in (place / "running").iterdir():
        path.unlink()
    os.utime(place / "running", (0, 0))
    claim(place / "next")
    assert (place / "running").is_dir()
    assert is_held(place / "running")
    running.kill()
    running.wait()
    release(place / "next")
    claim(place / "next")
    assert [path.name for path in place.iterdir()] == ["next"]
    release(place / "next")


def test_a_folder_that_a_cleaner_has_removed_is_made_anew(place: Path) -> None:
    folder = private_folder() / "an-engine"
    first = claim(folder)
    assert claim(folder) == first
    shutil.rmtree(folder)
    claim(folder)
    assert is_held(folder)
    release(folder)
    assert not folder.exists()


def test_a_folder_of_several_processes_stays_until_the_last_releases_it(
    place: Path, start: Start
) -> None:
    lines(start("shared"), 1)
    claim(place / "shared")
    release(place / "shared")
    assert (place / "shared" / "counters.json").exists()


REPEAT = """
import sys
from leadout.engine.process_folders import claim, private_folder, release
folder = private_folder() / sys.argv[1]
for _ in range(300):
    claim(folder)
    assert folder.is_dir()
    (folder / "counters.json").write_text("{}")
    assert folder.is_dir()
    release(folder)
"""


def test_processes_that_start_and_end_at_once_keep_their_folders(place: Path) -> None:
    names = ["one", "two", "shared", "shared"]
    running = [subprocess.Popen([sys.executable, "-c", REPEAT, name]) for name in names]
    assert [process.wait() for process in running] == [0] * len(names)
    claim(place / "next")
    assert [path.name for path in place.iterdir()] == ["next"]
    release(place / "next")


def test_sockets_of_vllm_get_a_folder_whose_lock_survives_exec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        folder = Path(folder_for_sockets()[SOCKETS])
        assert folder.parent == Path(short) / PRIVATE
        assert os.get_inheritable(claim(folder))
        release(folder)
        monkeypatch.setenv(SOCKETS, "/elsewhere")
        assert folder_for_sockets() == {}


def test_sockets_get_no_folder_whose_path_is_too_long_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKETS, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    assert folder_for_sockets() == {}
