"""Versions of a drafter: whole or not there, never changed, one pointer for all servers."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.checkpoints import CheckpointError
from leadout.registry import MANIFEST, POINTER, Promise, Registry
from support.drafters import TINY_DRAFTER, write_random_drafter

PROMISE = Promise(acceptance_length=2.5, low=2.4, high=2.6, requests=80)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY_DRAFTER, target_num_layers=4)
    return write_random_drafter(tmp_path_factory.mktemp("drafter") / "made", config)


@pytest.fixture
def registry(drafter: Path, tmp_path: Path) -> Registry:
    """Three versions, each made from the one before; the last is to be served."""
    registry = Registry(tmp_path / "registry")
    for parent in (None, 1, 2):
        registry.publish(
            drafter, target_fingerprint="t", parent=parent, promises={"traffic": PROMISE}
        )
    registry.point_to(3, "a test")
    return registry


def test_a_version_is_a_copy_with_a_manifest(registry: Registry, drafter: Path) -> None:
    assert registry.versions() == [1, 2, 3]
    manifest = registry.verified(2)
    assert (manifest.version, manifest.parent, manifest.target_fingerprint) == (2, 1, "t")
    assert manifest.promises == {"traffic": PROMISE}
    assert set(manifest.files) == {path.name for path in drafter.iterdir()}
    for name in manifest.files:
        assert (registry.path(2) / name).read_bytes() == (drafter / name).read_bytes()


def test_only_a_version_can_be_pointed_to(registry: Registry) -> None:
    with pytest.raises(CheckpointError, match=r"found nothing, wanted one of \[1, 2, 3\]"):
        registry.point_to(4, "")
    registry.mark(2, "slow")
    with pytest.raises(CheckpointError, match="marked: slow"):
        registry.point_to(2, "")
    assert registry.serving() is not None
    assert registry.serving().version == 3  # type: ignore[union-attr]


def test_a_registry_without_a_pointer_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--start DRAFTER"):
        Registry.opened(tmp_path)


@pytest.mark.parametrize("fault", ["changed", "missing", "added", "link"])
def test_other_bytes_than_the_published_are_refused(
    registry: Registry, drafter: Path, fault: str
) -> None:
    weights = registry.path(2) / "model.safetensors"
    if fault == "changed":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif fault == "missing":
        weights.unlink()
    elif fault == "added":
        (registry.path(2) / "more.safetensors").touch()
    else:
        weights.unlink()
        weights.symlink_to(drafter / "model.safetensors")
    with pytest.raises(CheckpointError, match="Publish the drafter again"):
        registry.verified(2)
    assert registry.verified(1).version == 1


def test_a_folder_without_a_manifest_is_no_version(registry: Registry) -> None:
    (registry.path(3) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="found nothing"):
        registry.verified(3)


def test_a_torn_pointer_is_named(registry: Registry) -> None:
    (registry.folder / POINTER).write_text('{"version": 3')
    with pytest.raises(CheckpointError, match=r"serving\.json"):
        registry.serving()


PUBLISH_AND_STOP = """
import os, signal, sys
from pathlib import Path
from leadout import registry

copy = registry._copy

def copy_and_stop(source, target):
    copy(source, target)
    os.kill(os.getpid(), signal.SIGKILL)

registry._copy = copy_and_stop
registry.Registry(Path(sys.argv[1])).publish(Path(sys.argv[2]), target_fingerprint="t")
"""


def test_a_publisher_killed_in_the_midst_leaves_nothing_to_see(
    registry: Registry, drafter: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", PUBLISH_AND_STOP, registry.folder, drafter])
    assert killed.returncode == -signal.SIGKILL
    assert list((registry.folder / "versions").glob(".partial-*"))
    assert registry.versions() == [1, 2, 3]
    assert registry.publish(drafter, target_fingerprint="t").version == 4


def test_the_way_back_leads_to_the_nearest_unmarked_version(registry: Registry) -> None:
    registry.mark(2, "slow")
    pointer = registry.roll_back(3, "short")
    assert pointer is not None
    assert pointer.version == 1
    assert registry.serving() == pointer
    mark = registry.mark_of(3)
    assert mark is not None
    assert mark.reason == "short"
    assert registry.roll_back(3, "again") is None  # a second server is late
    assert registry.serving() == pointer
    assert registry.mark_of(3) == mark


def test_a_newer_pointer_is_not_turned_back(registry: Registry) -> None:
    assert registry.roll_back(2, "short") is None
    assert registry.serving().version == 3  # type: ignore[union-attr]
    assert registry.mark_of(2) is not None


def test_without_a_way_back_the_version_stays(registry: Registry) -> None:
    registry.point_to(1, "")
    with pytest.raises(CheckpointError, match="an unmarked version to go back to"):
        registry.roll_back(1, "short")
    assert registry.mark_of(1) is None
    assert registry.serving().version == 1  # type: ignore[union-attr]
