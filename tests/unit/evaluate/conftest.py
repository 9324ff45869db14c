"""The tiny target, its data and runs on them, as fixtures."""

from support.small_runs import (
    corpus,
    data,
    drafter_config,
    make_run,
    target,
    target_folder,
    trained,
)

__all__ = [
    "corpus",
    "data",
    "drafter_config",
    "make_run",
    "target",
    "target_folder",
    "trained",
]
