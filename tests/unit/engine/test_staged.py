"""What each worker checks before it holds a version's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadout.checkpoints import CheckpointError
from leadout.engine.hot_swap import read_version
from leadout.registry import MANIFEST, Registry, RegistryError
from support.models import tiny_llama
from support.version_registry import CONFIG, WEIGHTS, publish, with_nan


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def test_a_good_version_comes_back_bit_for_bit(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    first = publish(registry, target, tmp_path, seed=0)
    second = publish(registry, target, tmp_path, seed=1)
    staged = [read_version(registry, made.version, CONFIG, target) for made in (first, second)]
    written = load_file(registry.path(2) / WEIGHTS)
    assert staged[1].weights.keys() == written.keys()
    assert all(torch.equal(staged[1].weights[name], written[name]) for name in written)
    assert staged[0].digest != staged[1].digest
    assert staged[1].digest == read_version(registry, 2, CONFIG, target).digest


def spoil_bytes(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)


AFTER_PUBLISHING: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "does not exist"),
    "missing file": (lambda folder: (folder / WEIGHTS).unlink(), "is missing since publishing"),
    "changed bytes": (spoil_bytes, "changed since publishing"),
}


@pytest.mark.parametrize("fault", AFTER_PUBLISHING)
def test_a_half_written_version_is_refused(
    registry: Registry, target: Path, tmp_path: Path, fault: str
) -> None:
    publish(registry, target, tmp_path, seed=0)
    spoil, words = AFTER_PUBLISHING[fault]
    spoil(registry.path(1))
    with pytest.raises(RegistryError, match=words):
        read_version(registry, 1, CONFIG, target)


def test_a_version_with_nan_is_refused(registry: Registry, target: Path, tmp_path: Path) -> None:
    publish(registry, target, tmp_path, seed=0, spoil=with_nan)
    with pytest.raises(CheckpointError, match=r"fc\.weight.*NaN or infinite"):
        read_version(registry, 1, CONFIG, target)


def test_a_version_of_another_shape_is_refused(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    publish(registry, target, tmp_path, seed=0, config=replace(CONFIG, block_size=4))
    with pytest.raises(CheckpointError, match="block_size is 4; expected 5, that of the drafter"):
        read_version(registry, 1, CONFIG, target)


def test_a_version_for_another_target_is_refused(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    publish(registry, target, tmp_path, seed=0, other_target=True)
    with pytest.raises(CheckpointError, match="target_fingerprint is 000000000000; expected"):
        read_version(registry, 1, CONFIG, target)
