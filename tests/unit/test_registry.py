"""Drafter versions appear complete or not at all, never change, and one pointer leads all servers.

The ledger takes entries from several processes and survives killed writers.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.registry import LEDGER, MANIFEST, POINTER, ExpectedAcceptance, Registry, RegistryError
from support.drafters import TINY_DRAFTER, write_random_drafter

EXPECTED = ExpectedAcceptance(acceptance_length=2.5, low=2.4, high=2.6, requests=80)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY_DRAFTER, target_num_layers=4)
    return write_random_drafter(tmp_path_factory.mktemp("drafter") / "made", config)


@pytest.fixture
def registry(drafter: Path, tmp_path: Path) -> Registry:
    """Three versions, each the parent of the next; the pointer names the last."""
    registry = Registry(tmp_path / "registry")
    for parent in (None, 1, 2):
        registry.publish(
            drafter, target_fingerprint="t", parent=parent, expected={"traffic": EXPECTED}
        )
    registry.point_to(3, "a test")
    return registry


def pointed_version(registry: Registry) -> int:
    return registry.require_pointer().version


def test_a_version_is_a_copy_with_a_manifest(registry: Registry, drafter: Path) -> None:
    assert registry.versions() == [1, 2, 3]
    manifest = registry.verify(2)
    assert (manifest.version, manifest.parent, manifest.target_fingerprint) == (2, 1, "t")
    assert manifest.promises == {"traffic": EXPECTED}
    assert set(manifest.files) == {path.name for path in drafter.iterdir()}
    for name in manifest.files:
        assert (registry.path(2) / name).read_bytes() == (drafter / name).read_bytes()


def test_the_pointer_only_accepts_published_versions_that_are_not_marked(
    registry: Registry,
) -> None:
    with pytest.raises(RegistryError, match=r"0004.*does not exist; the versions.*\[1, 2, 3\]"):
        registry.point_to(4, "")
    registry.mark_bad(2, "slow")
    with pytest.raises(RegistryError, match="marked as bad: slow"):
        registry.point_to(2, "")
    assert pointed_version(registry) == 3


def test_a_missing_pointer_is_reported_with_the_command_that_creates_it(tmp_path: Path) -> None:
    assert Registry(tmp_path).pointer() is None
    with pytest.raises(RegistryError, match="--start DRAFTER"):
        Registry(tmp_path).require_pointer()


@pytest.mark.parametrize("fault", ["changed", "missing", "added", "link"])
def test_a_version_that_changed_after_publishing_is_refused(
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
    with pytest.raises(RegistryError, match="Publish the drafter again"):
        registry.verify(2)
    assert registry.verify(1).version == 1


def test_the_first_version_must_be_kept_unchanged(registry: Registry) -> None:
    assert registry.first() == registry.path(1)
    (registry.path(1) / "config.json").write_text("{}")
    with pytest.raises(RegistryError, match="changed since publishing"):
        registry.first()
    shutil.rmtree(registry.path(1))
    # The oldest version that is left is not taken instead: earlier losses would be forgotten.
    with pytest.raises(RegistryError, match=r"0001 does not exist.*small losses do not add up"):
        registry.first()


def test_a_folder_without_a_manifest_is_not_a_version(registry: Registry) -> None:
    (registry.path(3) / MANIFEST).unlink()
    with pytest.raises(RegistryError, match="does not exist"):
        registry.verify(3)


def test_a_torn_pointer_is_named(registry: Registry) -> None:
    (registry.folder / POINTER).write_text('{"version": 3')
    with pytest.raises(RegistryError, match=r"serving\.json: content is .*Restore the file"):
        registry.pointer()


PUBLISH_AND_DIE = """
import os, shutil, signal, sys
from pathlib import Path
from leadout import registry

copy = shutil.copyfile

def copy_and_die(source, destination):
    copy(source, destination)
    os.kill(os.getpid(), signal.SIGKILL)

shutil.copyfile = copy_and_die
registry.Registry(Path(sys.argv[1])).publish(Path(sys.argv[2]), target_fingerprint="t")
"""


def test_a_publisher_killed_while_copying_leaves_no_version(
    registry: Registry, drafter: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", PUBLISH_AND_DIE, registry.folder, drafter])
    assert killed.returncode == -signal.SIGKILL
    assert list((registry.folder / "versions").glob(".partial-*"))
    assert registry.versions() == [1, 2, 3]
    assert registry.publish(drafter, target_fingerprint="t").version == 4


POINT_AND_DIE = """
import os, signal, sys
from pathlib import Path
from leadout import registry

def die(path, content):
    os.kill(os.getpid(), signal.SIGKILL)

registry._write = die  # while the lock is held
registry.Registry(Path(sys.argv[1])).point_to(2, "")
"""


def test_a_killed_process_releases_the_lock(registry: Registry) -> None:
    killed = subprocess.run([sys.executable, "-c", POINT_AND_DIE, registry.folder])
    assert killed.returncode == -signal.SIGKILL
    assert pointed_version(registry) == 3
    registry.point_to(2, "")
    assert pointed_version(registry) == 2


def test_a_roll_back_goes_to_the_nearest_ancestor_that_is_not_marked(registry: Registry) -> None:
    registry.mark_bad(2, "slow")
    pointer = registry.roll_back(3, "low acceptance")
    assert pointer is not None
    assert pointer.version == 1
    assert registry.pointer() == pointer
    mark = registry.bad_mark(3)
    assert mark is not None
    assert mark.reason == "low acceptance"
    assert registry.roll_back(3, "again") is None  # a second server comes later
    assert registry.pointer() == pointer
    assert registry.bad_mark(3) == mark


def test_a_roll_back_leaves_a_newer_pointer_alone(registry: Registry) -> None:
    assert registry.roll_back(2, "low acceptance") is None
    assert pointed_version(registry) == 3
    assert registry.bad_mark(2) is not None


def test_without_a_good_ancestor_the_version_stays(registry: Registry) -> None:
    registry.point_to(1, "")
    with pytest.raises(RegistryError, match="no good ancestor to roll back to"):
        registry.roll_back(1, "low acceptance")
    assert registry.bad_mark(1) is None
    assert pointed_version(registry) == 1


def recorded_versions(registry: Registry) -> list[int | None]:
    return [entry.version for entry in registry.ledger()]


def test_ledger_entries_come_back_in_order(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    assert registry.ledger() == []
    registry.record("swapped", 1, "a test", {"ms": 1.5, "ok": True})
    registry.record("refused", 2, "another")
    first, second = registry.ledger()
    assert (first.event, first.version, first.why) == ("swapped", 1, "a test")
    assert first.evidence == {"ms": 1.5, "ok": True}
    assert first.when.endswith("+00:00")
    assert (second.event, second.version, second.evidence) == ("refused", 2, {})


def record_many(folder: Path, version: int) -> None:
    for _ in range(50):
        Registry(folder).record("swapped", version, "a test")


def test_concurrent_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=record_many, args=(tmp_path, number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(recorded_versions(Registry(tmp_path)), key=str) == [1] * 50 + [2] * 50


@pytest.mark.parametrize("torn", ['{"when": "x", "eve', '{"when": "x", "evidence": {"a": 1}'])
def test_a_torn_line_is_skipped_and_the_next_entry_is_complete(tmp_path: Path, torn: str) -> None:
    registry = Registry(tmp_path)
    registry.record("swapped", 1, "a test")
    with (tmp_path / LEDGER).open("a") as file:
        file.write(torn)
    assert recorded_versions(registry) == [1]
    registry.record("swapped", 2, "a test")
    assert recorded_versions(registry) == [1, 2]


def test_an_unknown_event_is_named(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text('{"event": "sold", "version": 1, "why": ""}\n')
    with pytest.raises(RegistryError, match="line 1: event is 'sold'"):
        Registry(tmp_path).ledger()
