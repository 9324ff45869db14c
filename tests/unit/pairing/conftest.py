"""A healthy tiny drafter."""

from __future__ import annotations

from pathlib import Path

import pytest

from leadout.checkpoints import read_checkpoint
from leadout.pairing import Pair
from support.drafters import write_random_drafter
from support.pairs import DRAFTER, SETTINGS, TARGET


@pytest.fixture(scope="session")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_drafter(tmp_path_factory.mktemp("pairing") / "drafter", DRAFTER)


@pytest.fixture
def pair(drafter_folder: Path) -> Pair:
    return Pair(TARGET, read_checkpoint(drafter_folder), SETTINGS)
