"""Small checkpoints in both formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafter_files import TINY, TINY_REDUCED, random_weights

from leadout.checkpoints import write_checkpoint


@pytest.fixture
def zlab_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "zlab"
    write_checkpoint(folder, random_weights(TINY), TINY, "zlab")
    return folder


@pytest.fixture
def speculators_folder(tmp_path: Path) -> Path:
    """With a reduced vocabulary, so with every tensor the format can have."""
    folder = tmp_path / "speculators"
    weights = random_weights(TINY_REDUCED)
    write_checkpoint(folder, weights, TINY_REDUCED, "speculators", target_name="some/target")
    return folder
