"""A tiny target, its own answers, and training runs on them that take a second or two.

The fixtures are imported by the conftest.py of each folder that uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadout.data.manifest import DataFolder
from leadout.dflash.config import DrafterConfig
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import Target
from leadout.evaluate.ranks import ALONE, Ranks
from leadout.train.config import TrainConfig
from leadout.train.run import Corpus, Run, complete_settings, read_corpus
from support.drafters import TINY_DRAFTER
from support.models import TINY_VOCAB
from support.tiny_data import loaded, write_predictable_target, write_tiny_data

MakeRun = Callable[..., Run]
SMALL: dict[str, Any] = {
    "layers": 2,
    "block_size": 5,
    "anchors": 4,
    "batch_sequences": 5,
    "max_length": 64,
    "epochs": 0.7,
    "validation_sequences": 4,
    "validate_every": 3,
    "save_every": 2,
    "precision": "float32",
    "states": "compute",
    "micro_tokens": 128,
}


def small_config(**changes: Any) -> TrainConfig:
    return TrainConfig(**SMALL | changes)


class KilledError(BaseException):
    """Simulates the death of the process: nothing may catch it."""


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_predictable_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return loaded(target_folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> DataFolder:
    return write_tiny_data(tmp_path_factory.mktemp("data"), target_folder)


@pytest.fixture(scope="session")
def corpus(data: DataFolder, target_folder: Path) -> Corpus:
    return read_corpus(data, target_folder, small_config(), TINY_VOCAB)


@pytest.fixture
def make_run(target_folder: Path, corpus: Corpus, tmp_path: Path) -> MakeRun:
    def make(out: str = "out", ranks: Ranks = ALONE, **changes: Any) -> Run:
        config = complete_settings(small_config(**changes), target_folder, corpus, TINY_VOCAB)
        return Run(target_folder, corpus, config, tmp_path / out, ranks)

    return make


@pytest.fixture(scope="session")
def trained(
    target_folder: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> Drafter:
    """A drafter, some of whose drafts are accepted."""
    config = small_config(
        layers=1,
        anchors=12,
        batch_sequences=8,
        micro_tokens=1024,
        epochs=8,
        learning_rate=5e-3,
        validate_every=99,
        save_every=99,
        states="disk",
    )
    config = complete_settings(config, target_folder, corpus, TINY_VOCAB)
    run = Run(target_folder, corpus, config, tmp_path_factory.mktemp("trained"), ALONE)
    run.train(lambda _: None)
    return run.drafter.eval()


@pytest.fixture
def drafter_config() -> DrafterConfig:
    """Fits the tiny target."""
    return TINY_DRAFTER
