"""A tiny target whose traffic changes; made once, in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.learn_world import World, make_world
from support.served_world import compute_base


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def computed_base(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The states of replayed data that every learner of the world would compute; to be copied."""
    return compute_base(world, tmp_path_factory.mktemp("base"))
