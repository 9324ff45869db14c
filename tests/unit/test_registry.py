"""Drafter versions appear complete or not at all, never change, and one pointer leads all servers.

The ledger takes entries from several processes and survives killed writers.
"""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.files import lock
from leadout.registry import (
    LAST,
    LEDGER,
    MANIFEST,
    POINTER,
    BadMark,
    ExpectedAcceptance,
    MissingVersionError,
    PointerMovedError,
    Registry,
    RegistryError,
)
from leadout.registry import registry as registry_module
from leadout.storage import Storage, StorageError, folder
from support.drafters import TINY_DRAFTER, write_random_drafter

EXPECTED = ExpectedAcceptance(acceptance_length=2.5, low=2.4, high=2.6, requests=80)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY_DRAFTER, target_num_layers=4)
    return write_random_drafter(tmp_path_factory.mktemp("drafter") / "made", config)


# Every test runs on a folder, and on an S3 server in the nightly target unless it says otherwise.
ON_A_FOLDER = pytest.mark.parametrize("place", ["folder"], indirect=True)
ON_BOTH = pytest.mark.parametrize("place", ["folder", "s3"], indirect=True)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.nightly)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder or URL for a registry."""
    on_s3 = request.param == "s3"
    return str(request.getfixturevalue("s3_url") if on_s3 else tmp_path / "registry")


@pytest.fixture
def registry(drafter: Path, place: str) -> Registry:
    """Three versions, each the parent of the next; the pointer names the last."""
    registry = Registry(place)
    for parent in (None, 1, 2):
        registry.publish(
            drafter, target_fingerprint="t", parent=parent, expected={"traffic": EXPECTED}
        )
    registry.point_to(3, "a test")
    return registry


def content_of(registry: Registry, name: str) -> bytes:
    stored = registry.storage.read(name)
    assert stored is not None
    return stored.content


def manifest_of(version: int) -> str:
    return f"versions/{version:04d}/{MANIFEST}"


def delete_version(registry: Registry, version: int) -> None:
    folder = f"versions/{version:04d}"
    for entry in registry.storage.entries(folder):
        registry.storage.delete(f"{folder}/{entry.name}")


def pointed_version(registry: Registry) -> int:
    return registry.require_pointer().version


@ON_BOTH
def test_a_version_is_a_copy_with_a_manifest(registry: Registry, drafter: Path) -> None:
    assert registry.versions() == [1, 2, 3]
    manifest = registry.verify(2)
    assert (manifest.version, manifest.parent, manifest.target_fingerprint) == (2, 1, "t")
    assert manifest.promises == {"traffic": EXPECTED}
    assert set(manifest.files) == {path.name for path in drafter.iterdir()}
    for name in manifest.files:
        assert (registry.path(2) / name).read_bytes() == (drafter / name).read_bytes()


@ON_BOTH
def test_the_pointer_only_accepts_published_versions_that_are_not_marked(
    registry: Registry,
) -> None:
    with pytest.raises(RegistryError, match=r"0004.*does not exist; the versions.*\[1, 2, 3\]"):
        registry.point_to(4, "")
    registry.mark_bad(2, "slow")
    with pytest.raises(RegistryError, match="marked as bad: slow"):
        registry.point_to(2, "")
    assert pointed_version(registry) == 3


def test_a_missing_pointer_is_reported_with_the_command_that_creates_it(place: str) -> None:
    assert Registry(place).pointer() is None
    with pytest.raises(RegistryError, match="--start DRAFTER"):
        Registry(place).require_pointer()


@ON_BOTH
@pytest.mark.parametrize("fault", ["changed", "missing", "added"])
def test_a_version_that_changed_after_publishing_is_refused(registry: Registry, fault: str) -> None:
    # Not above: processes that tests start would import vLLM.
    from leadout.engine.hot_swap import is_final

    weights = "versions/0002/model.safetensors"
    if fault == "changed":
        content = bytearray(content_of(registry, weights))
        content[-1] ^= 1
        registry.storage.write(weights, bytes(content))
    elif fault == "missing":
        registry.storage.delete(weights)
    else:
        registry.storage.write("versions/0002/more.safetensors", b"")
    with pytest.raises(RegistryError, match="Publish the drafter again") as caught:
        registry.verify(2)
    assert is_final(caught.value)
    assert registry.verify(1).version == 1


@ON_A_FOLDER
def test_a_link_is_not_a_published_file(registry: Registry, drafter: Path) -> None:
    weights = registry.path(2) / "model.safetensors"
    weights.unlink()
    weights.symlink_to(drafter / "model.safetensors")
    with pytest.raises(RegistryError, match=r"symbolic link.*Publish the drafter again"):
        registry.verify(2)


def test_the_first_version_must_be_kept_unchanged(registry: Registry) -> None:
    assert registry.first() == registry.path(1)
    registry.storage.write("versions/0001/config.json", b"{}")
    with pytest.raises(RegistryError, match="changed since publishing"):
        registry.first()
    delete_version(registry, 1)
    # The oldest version that is left is not taken instead: earlier losses would be forgotten.
    with pytest.raises(RegistryError, match=r"0001 does not exist.*small losses do not add up"):
        registry.first()


def test_a_folder_without_a_manifest_is_not_a_version(registry: Registry) -> None:
    registry.storage.delete(manifest_of(3))
    with pytest.raises(RegistryError, match="does not exist"):
        registry.verify(3)


def test_a_torn_pointer_is_named(registry: Registry) -> None:
    registry.storage.write(POINTER, b'{"version": 3')
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


@ON_A_FOLDER
def test_a_publisher_killed_while_copying_leaves_no_version(
    registry: Registry, drafter: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", PUBLISH_AND_DIE, registry.folder, drafter])
    assert killed.returncode == -signal.SIGKILL
    assert list((registry.folder / "versions").glob(".*.partial"))
    assert registry.versions() == [1, 2, 3]
    assert registry.publish(drafter, target_fingerprint="t").version == 4
    assert not list((registry.folder / "versions").glob(".*.partial"))


POINT_AND_DIE = """
import os, signal, sys
from pathlib import Path
from leadout.registry import Registry
from leadout.storage import FolderStorage

def die(self, name, content):
    os.kill(os.getpid(), signal.SIGKILL)

FolderStorage.write = die  # while the lock is held
Registry(Path(sys.argv[1])).point_to(2, "")
"""


@ON_A_FOLDER
def test_a_killed_process_releases_the_lock(registry: Registry) -> None:
    killed = subprocess.run([sys.executable, "-c", POINT_AND_DIE, registry.folder])
    assert killed.returncode == -signal.SIGKILL
    assert pointed_version(registry) == 3
    registry.point_to(2, "")
    assert pointed_version(registry) == 2


def test_a_stopped_process_does_not_hold_others_up_for_ever(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.1)
    with lock(registry.folder / folder.LOCK):
        with pytest.raises(TimeoutError, match="held by another process"):
            registry.record("swapped", 2, "")
        with pytest.raises(TimeoutError, match="held by another process"):
            registry.point_to(2, "")
        assert pointed_version(registry) == 3
    registry.point_to(2, "")
    assert pointed_version(registry) == 2


@ON_BOTH
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


@ON_BOTH
def test_ledger_entries_come_back_in_order(place: str) -> None:
    registry = Registry(place)
    assert registry.ledger() == []
    registry.record("swapped", 1, "a test", {"ms": 1.5, "ok": True})
    registry.record("refused", 2, "another")
    first, second = registry.ledger()
    assert (first.event, first.version, first.why) == ("swapped", 1, "a test")
    assert first.evidence == {"ms": 1.5, "ok": True}
    assert first.when.endswith("+00:00")
    assert (second.event, second.version, second.evidence) == ("refused", 2, {})


def record_many(place: str, version: int) -> None:
    for _ in range(50):
        Registry(place).record("swapped", version, "a test")


def test_concurrent_writers_do_not_mix_their_lines(place: str) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=record_many, args=(place, number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(recorded_versions(Registry(place)), key=str) == [1] * 50 + [2] * 50


@pytest.mark.parametrize("torn", ['{"when": "x", "eve', '{"when": "x", "evidence": {"a": 1}'])
def test_a_torn_line_is_skipped_and_the_next_entry_is_complete(tmp_path: Path, torn: str) -> None:
    registry = Registry(tmp_path)
    registry.record("swapped", 1, "a test")
    with (tmp_path / LEDGER).open("a") as file:
        file.write(torn)
    assert recorded_versions(registry) == [1]
    registry.record("swapped", 2, "a test")
    assert recorded_versions(registry) == [1, 2]


def test_a_wrong_entry_is_named(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text('{"event": "swapped", "version": "one", "why": ""}\n')
    with pytest.raises(RegistryError, match="line 1: version is 'one'"):
        Registry(tmp_path).ledger()


def test_numbers_that_json_does_not_have_stay_readable(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    registry.record("rejected", None, "a test", {"a": math.nan, "b": math.inf, "c": 1.5})
    with (tmp_path / LEDGER).open("a") as file:  # as an earlier release wrote it
        file.write('{"event": "rejected", "version": null, "why": "", "evidence": {"a": null}}\n')
    first, second = registry.ledger()
    assert first.evidence == {"a": "nan", "b": "inf", "c": 1.5}
    assert second.evidence == {"a": None}


def test_files_of_a_later_release_are_read(registry: Registry) -> None:
    """Servers of a fleet are not updated at the same moment."""
    registry.mark_bad(3, "slow")
    for name in (POINTER, manifest_of(2), "marks/0003.json"):
        content = json.loads(content_of(registry, name))
        changed = {**content, "added_later": {"a": [1]}}
        registry.storage.write(name, json.dumps(changed).encode())
    registry.storage.append(LEDGER, b'{"event": "sold", "version": 1, "why": "", "to": 1}\n')
    assert registry.require_pointer().version == 3
    assert registry.verify(2).version == 2
    assert registry.bad_mark(3) is not None
    assert registry.ledger()[0].event == "sold"


def test_a_number_is_never_given_twice(registry: Registry, drafter: Path) -> None:
    registry.roll_back(3, "low acceptance")
    delete_version(registry, 3)
    assert registry.publish(drafter, target_fingerprint="t").version == 4
    delete_version(registry, 4)
    assert registry.publish(drafter, target_fingerprint="t").version == 5
    assert registry.bad_mark(5) is None


def test_a_registry_of_an_earlier_release_gives_no_number_twice(
    registry: Registry, drafter: Path
) -> None:
    registry.storage.delete(LAST)
    registry.record("published", 3, "a test")
    delete_version(registry, 3)
    assert registry.publish(drafter, target_fingerprint="t").version == 4


def publish_some(place: str, drafter: Path) -> None:
    for _ in range(5):
        Registry(place).publish(drafter, target_fingerprint="t")


def test_concurrent_publishers_get_different_numbers(registry: Registry, drafter: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (registry.address, drafter)
    publishers = [context.Process(target=publish_some, args=arguments) for _ in range(2)]
    for publisher in publishers:
        publisher.start()
    for publisher in publishers:
        publisher.join()
    assert registry.versions() == list(range(1, 14))
    assert [registry.verify(version).version for version in (12, 13)] == [12, 13]


@ON_BOTH
def test_the_pointer_moves_only_from_the_version_that_was_compared(registry: Registry) -> None:
    registry.roll_back(3, "low acceptance")
    with pytest.raises(PointerMovedError, match="version 2 is served now, expected version 3"):
        registry.point_to(1, "a test", only_from=3)
    assert pointed_version(registry) == 2
    registry.point_to(1, "a test", only_from=2)
    assert pointed_version(registry) == 1


def test_a_manifest_of_another_version_is_refused(registry: Registry) -> None:
    content = content_of(registry, manifest_of(2)).replace(b'"version": 2', b'"version": 3')
    registry.storage.write(manifest_of(2), content)
    with pytest.raises(RegistryError, match="describes version 3, expected version 2"):
        registry.manifest(2)
    assert [each.version for each in registry.readable_manifests()] == [1, 3]


def test_a_promise_that_no_drafter_can_keep_is_refused(registry: Registry) -> None:
    content = content_of(registry, manifest_of(2)).replace(b'"low": 2.4', b'"low": 9e18')
    registry.storage.write(manifest_of(2), content)
    with pytest.raises(RegistryError, match=r"promises\.traffic\.low is 9e\+18"):
        registry.manifest(2)


def test_a_roll_back_passes_over_deleted_ancestors(registry: Registry) -> None:
    delete_version(registry, 2)
    pointer = registry.roll_back(3, "low acceptance")
    assert pointer is not None
    assert pointer.version == 1


@ON_A_FOLDER
def test_what_publishers_on_other_machines_left_is_removed_after_a_day(
    registry: Registry, drafter: Path
) -> None:
    versions = registry.folder / "versions"
    old = [versions / ".version.00000000-1-1.partial", versions / ".partial-abcd"]
    new = [versions / ".version.00000000-1-2.partial", versions / ".partial-efgh"]
    for path in (*old, *new):
        path.mkdir()
        (path / "model.safetensors").touch()
    for path in old:
        os.utime(path, (0, 0))
    registry.publish(drafter, target_fingerprint="t")
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in new)


@ON_A_FOLDER
def test_a_store_that_never_replaces_anything_is_reported(
    registry: Registry, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_replace(*_: object) -> bool:
        return False

    monkeypatch.setattr(type(registry.storage), "replace", fake_replace)
    monkeypatch.setattr(registry_module, "MAX_TRIES", 3)
    calls: list[Callable[[], object]] = [
        lambda: registry.point_to(1, "a test"),
        lambda: registry.roll_back(3, "a test"),
        lambda: registry.publish(drafter, target_fingerprint="t"),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"in 3 tries.*If-Match"):
            call()


UPLOAD_AND_DIE = """
import os, signal, sys
from pathlib import Path
from leadout.registry import Registry
from leadout.storage.s3 import S3Storage

def die(self, name, content, tag):
    if name.endswith("version.json"):  # all other files have been uploaded
        os.kill(os.getpid(), signal.SIGKILL)
    return put(self, name, content, tag)

put, S3Storage._put = S3Storage._put, die
Registry(sys.argv[1]).publish(Path(sys.argv[2]), target_fingerprint="t")
"""


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_publisher_killed_while_uploading_leaves_nothing_that_is_served(
    registry: Registry, drafter: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", UPLOAD_AND_DIE, registry.address, drafter])
    assert killed.returncode == -signal.SIGKILL
    assert registry.storage.entries("versions/0004")
    assert registry.versions() == [1, 2, 3]
    with pytest.raises(MissingVersionError):
        registry.point_to(4, "")
    with pytest.raises(MissingVersionError):
        registry.verify(4)
    assert registry.publish(drafter, target_fingerprint="t").version == 5


@ON_BOTH
def test_a_version_that_is_rolled_back_meanwhile_is_not_pointed_to(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its mark and the move of the pointer."""
    registry.point_to(1, "a test")
    look = Registry.bad_mark

    def roll_back_after_the_look(self: Registry, version: int) -> BadMark | None:
        monkeypatch.setattr(Registry, "bad_mark", look)
        found = look(self, version)
        Registry(self.address).roll_back(version, "low acceptance")
        return found

    monkeypatch.setattr(Registry, "bad_mark", roll_back_after_the_look)
    with pytest.raises(RegistryError, match="marked as bad: low acceptance"):
        registry.point_to(2, "a test")
    assert pointed_version(registry) == 1


@ON_BOTH
def test_a_move_whose_answer_was_lost_is_one(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(registry.storage)
    replace_file = kind.replace

    def replace_twice(self: Storage, name: str, content: bytes, tag: str | None) -> bool:
        replace_file(self, name, content, tag)
        return replace_file(self, name, content, tag)  # as a client does without an answer

    monkeypatch.setattr(kind, "replace", replace_twice)
    assert registry.point_to(2, "a test", only_from=3).version == 2
    assert pointed_version(registry) == 2


@ON_A_FOLDER
def test_a_version_that_was_rolled_back_counts_as_marked_before_its_mark_is_written(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_mark_bad(self: Registry, version: int, reason: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Registry, "mark_bad", fake_mark_bad)
        with pytest.raises(OSError, match="Input/output"):
            registry.roll_back(3, "low acceptance")
    assert pointed_version(registry) == 2
    assert registry.bad_mark(3) is not None
    with pytest.raises(RegistryError, match="marked as bad"):
        registry.point_to(3, "")
    registry.recover()  # as a server does when it starts
    registry.recover()
    assert (registry.folder / "marks" / "0003.json").exists()
    assert [(entry.event, entry.version) for entry in registry.ledger()] == [("rolled_back", 3)]


def test_an_entry_that_may_be_there_once_is_written_and_read_once(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for _ in range(2):
        registry.record("promoted", 2, "better", once=True)
        registry.record("promoted", 3, "better", once=True)
    assert (tmp_path / LEDGER).read_text().count("\n") == 2
    # Two processes at the same moment: neither has seen the entry of the other.
    content = (tmp_path / LEDGER).read_text()
    (tmp_path / LEDGER).write_text(content + content)
    registry.record("swapped", 3, "a test")
    assert recorded_versions(registry) == [2, 3, 3]
