"""Counts of the last minute, and the private files that carry them."""

import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from pydantic import BaseModel

from leadout.engine.counters import (
    SlidingWindow,
    read_small,
    remove_small,
    small_file,
    write_small,
)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (29.0, 3),
        (59.9, 3),
        (60.0, 2),  # second 0 has expired
        (88.9, 2),
        (89.0, 0),
        (10_000.0, 0),
    ],
)
def test_counts_expire_after_a_minute(now: float, expected: int) -> None:
    window: SlidingWindow[str] = SlidingWindow()
    window.add(0.5, {"drafts": 1})
    window.add(29.0, {"drafts": 1, "accepted": 4})
    window.add(29.9, {"drafts": 1})
    assert window.total(now)["drafts"] == expected
    assert window.total(now)["other"] == 0


def test_memory_does_not_grow_with_traffic() -> None:
    def run(window: SlidingWindow[str], start: int, seconds: int) -> None:
        for step in range(start * 20, (start + seconds) * 20):
            window.add(step / 20, {"drafts": 1, "accepted": 3})

    window: SlidingWindow[str] = SlidingWindow()
    run(window, 0, 120)
    tracemalloc.start()
    run(window, 120, 600)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 30_000
    assert window.total(720.0)["drafts"] == 59 * 20


class Counts(BaseModel):
    drafts: int = 1


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o777)  # as /tmp is
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_their_owner_can_use_the_files(temporary: Path) -> None:
    before = os.umask(0)
    try:
        path = small_file("served", "instance", 0)
        write_small(Counts(), path)
    finally:
        os.umask(before)
    assert path.parent.parent.parent == temporary
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_small(path, Counts) == Counts()


def test_a_folder_of_another_user_is_neither_written_nor_read(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, owner = small_file("served", "instance", 0), temporary.stat().st_uid
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(OSError, match="belongs to another user; set TMPDIR"):
        write_small(Counts(), path)
    path.write_text('{"drafts": 9}')
    assert read_small(path, Counts) is None


def test_a_link_in_place_of_the_folder_is_refused(temporary: Path) -> None:
    path = small_file("served", "instance", 0)
    (temporary / "elsewhere" / "instance").mkdir(parents=True)
    path.parent.parent.symlink_to(temporary / "elsewhere")
    with pytest.raises(OSError, match="belongs to another user"):
        write_small(Counts(), path)
    path.write_text('{"drafts": 9}')
    assert read_small(path, Counts) is None


def test_the_folder_goes_with_its_last_file(temporary: Path) -> None:
    served, live = small_file("served", "instance", 0), small_file("live", "instance", 0)
    for path in (served, live):
        write_small(Counts(), path)
    remove_small(served)
    assert live.exists()
    remove_small(live)
    remove_small(live)  # an engine that failed may do so twice
    assert not live.parent.exists()
    write_small(Counts(), live)  # by a thread that ends later
    assert read_small(live, Counts) == Counts()
