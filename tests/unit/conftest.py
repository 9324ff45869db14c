"""Small checkpoints in both formats."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def zlab_folder(tmp_path: Path) -> Path:
    from leadout.checkpoints import write_checkpoint
    from support.drafters import MINI, random_weights

    folder = tmp_path / "zlab"
    write_checkpoint(folder, random_weights(MINI), MINI, "zlab")
    return folder


@pytest.fixture
def speculators_folder(tmp_path: Path) -> Path:
    """With a reduced vocabulary, so with every tensor that the format can have."""
    from leadout.checkpoints import write_checkpoint
    from support.drafters import MINI_REDUCED, random_weights

    folder = tmp_path / "speculators"
    weights = random_weights(MINI_REDUCED)
    write_checkpoint(folder, weights, MINI_REDUCED, "speculators", target_name="some/target")
    return folder
