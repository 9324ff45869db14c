"""Stands for a learner: publishes versions and moves the pointer to them until it is killed.

python -m support.chaos_publisher REGISTRY TARGET WORK SEED
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from leadout.registry import PointerMovedError, Registry
from support.version_registry import publish


def main() -> None:
    registry, target, work = Registry(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    work.mkdir(parents=True, exist_ok=True)
    for seed in itertools.count(int(sys.argv[4])):
        parent = registry.require_pointer().version
        manifest = publish(registry, target, work, seed=seed, parent=parent, expected_length=1.0)
        registry.record("published", manifest.version, "by a learner that will be killed")
        try:
            registry.point_to(manifest.version, "better", only_from=parent)
        except PointerMovedError:
            continue
        registry.record("promoted", manifest.version, "by a learner that will be killed")


if __name__ == "__main__":
    main()
