"""Folders in shared memory, where rings must be."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    yield from _folder()


@pytest.fixture(scope="session")
def shared_memory_of_session() -> Iterator[Path]:
    yield from _folder()


def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="leadout-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
