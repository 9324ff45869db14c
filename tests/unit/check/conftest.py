"""A tiny pair that is in order: a target with tokenizer and weights, and a random drafter."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from support.drafters import TINY_DRAFTER, write_random_drafter
from support.tiny_chat import MASK_TOKEN, write_tiny_chat_target

DRAFTER = replace(TINY_DRAFTER, target_num_layers=6, mask_token_id=MASK_TOKEN)


@pytest.fixture(scope="session")
def _kept_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("check") / "tiny-target")


@pytest.fixture(scope="session")
def _kept_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_drafter(tmp_path_factory.mktemp("check") / "tiny-drafter", DRAFTER)


@pytest.fixture
def target(_kept_target: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(_kept_target, tmp_path / "tiny-target"))


@pytest.fixture
def drafter(_kept_drafter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_kept_drafter, tmp_path / "tiny-drafter"))
