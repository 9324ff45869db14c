"""A server follows the pointer, swaps on all workers or none, and rolls a bad version back.

The workers are fakes that can be made to fail; the engine tests have real ones.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.control.rollback import Tally
from leadout.engine import fail_safe, follower, hot_swap, rollout, watch_record
from leadout.engine.counters import write_small
from leadout.engine.hot_swap import (
    EngineAsleepError,
    NotNowError,
    SwapFailedError,
    SwapRefusedError,
    is_final,
)
from leadout.engine.served_requests import RolloutMixin, ServedRequests, mask_block_hashes
from leadout.engine.watch_record import WatchRecord, read_records, write_record
from leadout.files import lock
from leadout.registry import (
    POINTER,
    MissingVersionError,
    Registry,
    RegistryError,
    WrongSignatureError,
)
from leadout.storage import folder
from support import two_workers
from support.replica import Replica, equal_requests
from support.version_registry import publish, with_nan

EXPECTED = 3.0


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again at the next poll."""
    monkeypatch.setattr(fail_safe, "FIRST_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(fail_safe, "MAX_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(rollout, "SECONDS_BETWEEN_READS", 0.0)


def fails(times: int, error: Exception, function: Any) -> Any:
    """A fake of a function that raises so many times, and then does what it should."""
    left = [times]

    def fake_function(*arguments: Any, **settings: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise error
        return function(*arguments, **settings)

    return fake_function


STALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.fixture
def registry(target: Path, tmp_path: Path) -> Registry:
    """Version 2 was trained from 1 and expects more acceptance; the pointer names 1."""
    registry = Registry(tmp_path / "registry")
    publish(registry, target, tmp_path, seed=0)
    publish(registry, target, tmp_path, seed=1, parent=1, expected_length=EXPECTED)
    registry.point_to(1, "the start")
    return registry


@pytest.fixture
def replica(registry: Registry, target: Path, tmp_path: Path) -> Replica:
    return Replica(registry, target, tmp_path / "served.json")


def events(registry: Registry) -> list[tuple[str, int | None]]:
    return [(entry.event, entry.version) for entry in registry.ledger()]


def test_the_server_swaps_when_the_pointer_changes(registry: Registry, replica: Replica) -> None:
    replica.poll()
    assert replica.engine.calls == []
    registry.point_to(2, "better")
    replica.poll()
    assert replica.engine.loaded == [2, 2]
    assert replica.engine.calls[-2:] == ["leadout_end", "reset_prefix_cache"]
    assert events(registry) == [("swapped", 2)]
    (entry,) = registry.ledger()
    assert entry.why == "better"
    assert entry.evidence["from"] == 1
    assert entry.evidence["workers"] == 2


def test_a_registry_that_another_process_keeps_locked_is_followed(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.1)
    registry.point_to(2, "better")
    with lock(registry.folder / folder.LOCK):
        replica.poll()
    assert replica.engine.loaded == [2, 2]
    assert events(registry) == []  # the only loss


def test_requests_of_all_engines_count(replica: Replica) -> None:
    replica.serve(3, 2)
    alone = asyncio.run(replica.drafter.report())
    tally = Tally().with_request(10, 40)
    second = replica.served_path.with_suffix(".second")
    write_small(ServedRequests(since=time.time(), tally=tally), second)
    both = asyncio.run(replica.drafter.report())
    assert (alone.requests, alone.acceptance_length) == (3, 2.0)
    assert (both.requests, both.acceptance_length) == (4, 2.5)


def test_a_version_set_by_hand_stays_until_the_pointer_changes(
    registry: Registry, replica: Replica
) -> None:
    replica.poll()
    asyncio.run(replica.drafter.change_to(2, "set by hand"))
    replica.poll()
    assert replica.engine.loaded == [2, 2]
    registry.point_to(1, "back")
    replica.poll()
    assert replica.engine.loaded == [1, 1]


def test_one_failing_worker_makes_all_load_the_previous_weights(
    registry: Registry, replica: Replica
) -> None:
    replica.engine.workers[1].fails_at = {"commit"}
    with pytest.raises(NotNowError, match="version 2 could not be loaded: commit failed"):
        asyncio.run(replica.drafter.change_to(2, ""))
    assert replica.engine.loaded == [1, 1]
    assert replica.drafter.version == 1
    assert events(registry) == []


def test_workers_that_read_different_files_do_not_swap(replica: Replica) -> None:
    replica.engine.workers[1].fails_at = {"digest"}
    with pytest.raises(NotNowError, match="different files"):
        asyncio.run(replica.drafter.change_to(2, ""))
    assert "leadout_commit" not in replica.engine.calls


@pytest.mark.parametrize("since", ["", "leadout_state"])
def test_a_sleeping_engine_swaps_once_it_is_awake(
    registry: Registry, replica: Replica, since: str
) -> None:
    """`since`: it sleeps from the start, or falls asleep while the version is read."""
    replica.engine.sleeps_after = since
    registry.point_to(2, "better")
    for _ in range(3):
        replica.poll()
    assert "leadout_commit" not in replica.engine.calls
    assert "leadout_undo" not in replica.engine.calls
    assert ("leadout_begin" in replica.engine.calls) == (since != "")
    assert replica.engine.loaded == [1, 1]
    assert events(registry) == []  # neither refused nor swapped
    with pytest.raises(EngineAsleepError, match=r"version 2 cannot be loaded\. Wake it up"):
        asyncio.run(replica.drafter.change_to(2, "by hand"))
    replica.engine.sleeps_after = None
    replica.poll()
    assert replica.engine.loaded == [2, 2]
    assert events(registry) == [("swapped", 2)]


def test_workers_that_fell_asleep_before_the_commit_are_not_undone(
    registry: Registry, replica: Replica
) -> None:
    for worker in replica.engine.workers:
        worker.fails_at = {"sleep"}
    with pytest.raises(EngineAsleepError):
        asyncio.run(replica.drafter.change_to(2, ""))
    assert "leadout_undo" not in replica.engine.calls
    assert replica.engine.loaded == [1, 1]
    assert events(registry) == []


def test_a_failing_undo_is_reported(registry: Registry, replica: Replica) -> None:
    replica.engine.workers[1].fails_at = {"commit", "undo"}
    with pytest.raises(SwapFailedError, match="could not be loaded again"):
        asyncio.run(replica.drafter.change_to(2, ""))
    assert events(registry) == [("refused", 2)]
    # What the workers have now is unknown: even the version before is loaded again.
    replica.engine.workers[1].fails_at = set()
    replica.poll()
    assert replica.engine.loaded == [1, 1]
    assert events(registry)[-1] == ("swapped", 1)


def test_a_refused_version_is_not_tried_twice(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    publish(registry, target, tmp_path, seed=2, parent=1, spoil=with_nan)
    registry.point_to(3, "broken")
    for reason in ("broken", "broken", "broken, again"):
        registry.point_to(3, reason)
        replica.poll()
    assert events(registry) == [("refused", 3)]
    assert replica.engine.calls.count("leadout_begin") == 1
    assert replica.engine.loaded == [1, 1]
    registry.point_to(2, "better")
    replica.poll()
    assert replica.engine.loaded == [2, 2]


def test_a_marked_version_is_refused(registry: Registry, replica: Replica) -> None:
    registry.mark_bad(2, "slow")
    with pytest.raises(SwapRefusedError, match="version 2 is marked as bad: slow"):
        asyncio.run(replica.drafter.change_to(2, ""))


def test_low_acceptance_rolls_all_replicas_back(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    other = Replica(registry, target, tmp_path / "other.json", server="there:8000")
    registry.point_to(2, "better")
    for one in (replica, other):
        one.poll()
        assert one.engine.loaded == [2, 2]
    replica.serve(requests=70, acceptance_length=2)
    replica.poll()  # leaves the version, which the other server still compares
    assert replica.engine.loaded == [1, 1]
    assert registry.require_pointer().version == 2
    assert registry.bad_mark(2) is None
    replica.poll()
    assert replica.drafter.state == "rolling_back"
    other.serve(requests=70, acceptance_length=2)
    other.poll()  # agrees, and moves the pointer back
    for one in (replica, other):
        one.poll()
        assert one.drafter.state == "serving"
        assert one.engine.loaded == [1, 1]
        one.serve(requests=70, acceptance_length=1)
        one.poll()  # the older version is not watched
        assert one.engine.loaded == [1, 1]
    mark = registry.bad_mark(2)
    assert mark is not None
    assert "over 70 requests, expected at least" in mark.reason
    assert events(registry).count(("rolled_back", 2)) == 1


def test_a_version_set_by_hand_with_low_acceptance_is_rolled_back(
    registry: Registry, replica: Replica
) -> None:
    replica.poll()
    asyncio.run(replica.drafter.change_to(2, "set by hand"))
    replica.serve(requests=70, acceptance_length=2)
    for _ in range(2):
        replica.poll()
    assert replica.engine.loaded == [1, 1]
    assert registry.bad_mark(2) is not None


def test_a_version_with_expected_acceptance_stays(registry: Registry, replica: Replica) -> None:
    registry.point_to(2, "better")
    replica.poll()
    replica.serve(requests=8000, acceptance_length=3)
    replica.poll()
    report = asyncio.run(replica.drafter.report())
    assert (report.version, report.watch, report.expected_low) == (2, "passed", EXPECTED)
    assert (report.requests, report.acceptance_length) == (8000, 3.0)
    assert registry.bad_mark(2) is None


def test_requests_before_a_swap_do_not_count(registry: Registry, replica: Replica) -> None:
    replica.serve(requests=70, acceptance_length=1)
    registry.point_to(2, "better")
    replica.poll()
    replica.poll()
    assert replica.engine.loaded == [2, 2]
    assert asyncio.run(replica.drafter.report()).requests == 0


def test_an_unreadable_pointer_is_logged_and_changes_nothing(
    registry: Registry, replica: Replica, leadout_log: list[str]
) -> None:
    (registry.folder / POINTER).write_text("{")

    async def follow_until_logged() -> None:
        task: asyncio.Task[Any] = asyncio.create_task(replica.follower.follow())
        end = time.monotonic() + 600
        while not leadout_log and time.monotonic() < end:
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(follow_until_logged())
    assert replica.engine.loaded == [1, 1]
    assert "could not follow the registry" in " ".join(leadout_log)
    assert events(registry) == [("started", 1)]


# Never and not now


def test_a_passing_storage_error_does_not_refuse_a_version(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica.poll()
    registry.point_to(2, "better")
    monkeypatch.setattr(two_workers, "load_version", fails(2, STALE, two_workers.load_version))
    replica.poll_failing()  # both workers fail
    assert replica.engine.loaded == [1, 1]
    assert events(registry) == []
    replica.poll()
    assert replica.engine.loaded == [2, 2]


def test_attempts_become_rare_but_do_not_end(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fail_safe, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(fail_safe, "MAX_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(two_workers, "load_version", fails(6, STALE, two_workers.load_version))
    registry.point_to(2, "better")
    failed = 0
    end = time.monotonic() + 600
    while replica.engine.loaded != [2, 2] and time.monotonic() < end:
        try:
            replica.poll()
        except NotNowError:
            failed += 1
        time.sleep(0.01)
    assert replica.engine.loaded == [2, 2]
    assert failed == 3
    assert replica.engine.calls.count("leadout_begin") == 4


def test_a_checkpoint_that_storage_could_not_deliver_is_not_a_bad_one() -> None:
    def unreadable() -> None:
        try:
            raise STALE
        except OSError:
            raise RegistryError("config.json cannot be read") from None

    with pytest.raises(RegistryError) as caught:
        unreadable()
    assert not is_final(caught.value)
    assert is_final(RegistryError("config.json has no layers"))
    assert is_final(WrongSignatureError("version.json is not signed"))
    assert not is_final(MissingVersionError("not seen yet"))
    assert not is_final(RuntimeError("out of memory"))


def test_files_that_change_between_check_and_use_are_refused(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = hot_swap.load_weights

    def change_and_read(checkpoint: Any) -> Any:
        weights = registry.path(2) / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        return read(checkpoint)

    monkeypatch.setattr(hot_swap, "load_weights", change_and_read)
    with pytest.raises(SwapRefusedError, match="changed since publishing"):
        asyncio.run(replica.drafter.change_to(2, ""))
    assert replica.engine.loaded == [1, 1]


def test_a_version_whose_folder_is_deleted_is_left(registry: Registry, replica: Replica) -> None:
    registry.point_to(2, "better")
    replica.poll()
    registry.point_to(1, "forget 2")
    shutil.rmtree(registry.path(2))
    replica.poll()
    assert replica.engine.loaded == [1, 1]


def test_a_swap_is_one_although_the_cache_could_not_be_reset(
    registry: Registry, replica: Replica, leadout_log: list[str]
) -> None:
    replica.engine.fails_at = {"reset_prefix_cache", "leadout_end"}
    registry.point_to(2, "better")
    replica.poll()
    assert replica.engine.loaded == [2, 2]
    assert replica.drafter.version == 2
    assert replica.drafter.state == "watching"
    assert "could not reset the prefix cache" in " ".join(leadout_log)
    replica.engine.fails_at = set()
    before = replica.engine.calls.count("reset_prefix_cache")
    for _ in range(3):
        replica.poll()
    assert replica.engine.calls.count("reset_prefix_cache") == before + 1  # until it succeeds


def test_a_commit_that_is_not_answered_is_undone(registry: Registry, replica: Replica) -> None:
    replica.engine.fails_at = {"leadout_commit"}
    with pytest.raises(NotNowError, match="leadout_commit failed"):
        asyncio.run(replica.drafter.change_to(2, ""))
    assert "leadout_undo" in replica.engine.calls
    assert replica.drafter.version == 1


# Roll-backs that fail, restarts, and votes


def watched(registry: Registry, replica: Replica) -> None:
    registry.point_to(2, "better")
    replica.poll()
    assert replica.drafter.state == "watching"


def test_a_roll_back_that_fails_is_tried_again(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(registry, replica)
    broken = fails(2, OSError(errno.EIO, "Input/output error"), Registry.roll_back)
    monkeypatch.setattr(Registry, "roll_back", broken)
    replica.serve(requests=70, acceptance_length=2)
    for _ in range(2):
        replica.poll()
        # This server has left the version, whatever the registry says, and does not return to it.
        assert replica.engine.loaded == [1, 1]
        assert registry.require_pointer().version == 2
        assert replica.drafter.state == "rolling_back"
    replica.poll()
    assert registry.require_pointer().version == 1
    assert registry.bad_mark(2) is not None
    assert replica.drafter.state == "serving"
    assert events(registry).count(("rolled_back", 2)) == 1


def test_a_newer_version_is_compared_while_an_older_one_is_rolled_back(
    registry: Registry,
    replica: Replica,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched(registry, replica)
    denied = fails(10**6, OSError(errno.EIO, "Input/output error"), None)
    monkeypatch.setattr(Registry, "roll_back", denied)
    replica.serve(requests=70, acceptance_length=2)
    replica.poll()
    publish(registry, target, tmp_path, seed=2, parent=1, expected_length=EXPECTED)
    registry.point_to(3, "newer")
    replica.poll()
    assert (replica.engine.loaded, replica.drafter.state) == ([3, 3], "watching")
    assert asyncio.run(replica.drafter.report()).watch == "watching"
    replica.serve(requests=70, acceptance_length=2)
    replica.poll()
    assert replica.engine.loaded == [1, 1]


def test_a_server_leaves_a_version_although_it_cannot_run_the_pointers(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    watched(registry, replica)
    publish(registry, target, tmp_path, seed=2, parent=1, spoil=with_nan)
    replica.serve(requests=70, acceptance_length=2)
    registry.point_to(3, "newer")
    replica.poll()
    assert replica.engine.loaded == [1, 1]


def test_a_new_pointer_does_not_wait_for_the_retry_of_another(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fail_safe, "FIRST_RETRY_SECONDS", 300.0)
    monkeypatch.setattr(fail_safe, "MAX_RETRY_SECONDS", 300.0)
    monkeypatch.setattr(two_workers, "load_version", fails(2, STALE, two_workers.load_version))
    registry.point_to(2, "better")
    replica.poll_failing()
    replica.poll()  # it waits
    assert replica.engine.loaded == [1, 1]
    publish(registry, target, tmp_path, seed=2, parent=1)
    registry.point_to(3, "newer")
    replica.poll()
    assert replica.engine.loaded == [3, 3]


def test_storage_errors_on_the_way_back_do_not_keep_a_server_on_a_bad_version(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(registry, replica)
    monkeypatch.setattr(two_workers, "load_version", fails(2, STALE, two_workers.load_version))
    replica.serve(requests=70, acceptance_length=2)
    replica.poll()
    assert registry.require_pointer().version == 1
    for _ in range(2):
        replica.poll()
    assert replica.engine.loaded == [1, 1]
    assert replica.drafter.state == "serving"


def test_a_restart_does_not_end_the_comparison(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    watched(registry, replica)
    replica.serve(requests=50, acceptance_length=2)
    replica.drafter._recorded_at = -1e9
    replica.poll()
    again = Replica(registry, target, tmp_path / "again.json", version=2)
    again.start()
    assert again.drafter.state == "watching"
    again.serve(requests=10, acceptance_length=2)  # with the 50 before, enough for the first check
    again.poll()
    assert again.engine.loaded == [1, 1]
    assert registry.bad_mark(2) is not None


def test_a_stop_keeps_what_was_counted(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    watched(registry, replica)
    replica.serve(requests=50, acceptance_length=2)
    replica.drafter._recorded_at = -1e9
    replica.poll()
    replica.drafter.stop()
    (record,) = read_records(registry, 2)
    assert (record.tally.requests, record.runs) == (50, 0)


def test_a_start_that_fails_is_tried_again(
    registry: Registry, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.point_to(2, "better")
    replica = Replica(registry, target, tmp_path / "served.json", version=2)
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(rollout, "read_records", fails(2, STALE, read_records))

    async def follow_until_watching() -> None:
        task: asyncio.Task[Any] = asyncio.create_task(replica.follower.follow())
        end = time.monotonic() + 600
        while replica.drafter.state != "watching" and time.monotonic() < end:
            await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(follow_until_watching())
    assert replica.drafter.state == "watching"


def test_a_server_that_starts_on_a_new_version_compares_it(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    registry.point_to(2, "better")
    replica = Replica(registry, target, tmp_path / "served.json", version=2)
    replica.start()
    replica.serve(requests=70, acceptance_length=2)
    replica.poll()
    assert registry.require_pointer().version == 1
    assert replica.engine.loaded == [1, 1]


def test_what_one_server_has_found_good_is_not_compared_again(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    watched(registry, replica)
    replica.serve(requests=8000, acceptance_length=3)
    replica.poll()
    later = Replica(registry, target, tmp_path / "later.json", version=2, server="there:8000")
    later.start()
    assert later.drafter.state == "serving"


def test_a_server_that_has_found_a_version_good_still_votes_after_a_restart(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    watched(registry, replica)
    replica.serve(requests=8000, acceptance_length=3)
    replica.poll()
    replica.poll()
    (before,) = read_records(registry, 2)
    again = Replica(registry, target, tmp_path / "again.json", version=2)
    again.start()
    (after,) = read_records(registry, 2)
    assert (before.found, after.found, again.drafter.state) == ("passed", "passed", "serving")
    assert after.updated > before.updated
    assert after.tally == before.tally


def test_a_swap_during_the_start_is_kept(
    registry: Registry, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.point_to(2, "better")
    replica = Replica(registry, target, tmp_path / "served.json", version=2)

    async def swap_meanwhile() -> None:
        started = asyncio.create_task(replica.drafter.start())
        await asyncio.sleep(0)
        await replica.drafter.change_to(1, "set by hand")
        may_start.set()
        await started

    may_start = threading.Event()

    def fake_slow_read(*arguments: Any) -> list[WatchRecord]:
        assert may_start.wait(600)
        return read_records(*arguments)

    monkeypatch.setattr(rollout, "read_records", fake_slow_read)
    asyncio.run(swap_meanwhile())
    assert replica.drafter.state == "serving"
    assert read_records(registry, 1) == read_records(registry, 2) == []


def test_no_version_is_given_up_without_a_control_that_may_exist(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    publish(registry, target, tmp_path, seed=2, parent=1, expected_length=EXPECTED, before=EXPECTED)
    registry.point_to(3, "better")
    replica.poll()
    replica.serve(requests=70, acceptance_length=2)
    monkeypatch.setattr(rollout, "read_records", fails(1, STALE, read_records))
    replica.poll()
    assert replica.engine.loaded == [3, 3]
    replica.poll()
    assert replica.engine.loaded == [1, 1]


def test_an_older_version_after_a_roll_back_is_not_compared_at_a_start(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    publish(registry, target, tmp_path, seed=2, parent=2, expected_length=EXPECTED)
    registry.point_to(3, "better")
    registry.roll_back(3, "low acceptance")
    replica = Replica(registry, target, tmp_path / "served.json", version=2)
    replica.start()
    assert replica.drafter.state == "serving"


def test_a_server_that_is_outvoted_returns_after_the_cool_down(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(registry, replica)
    write_record(registry, WatchRecord(server="there:8000", version=2, found="passed"))
    replica.serve(requests=70, acceptance_length=2)
    for _ in range(3):
        replica.poll()
        assert replica.engine.loaded == [1, 1]
        assert registry.require_pointer().version == 2
        assert registry.bad_mark(2) is None
    monkeypatch.setattr(rollout, "COOL_DOWN_SECONDS", 0.0)
    replica.poll()
    assert replica.engine.loaded == [2, 2]
    assert replica.drafter.state == "watching"


def test_a_client_with_most_requests_does_not_remove_a_version(
    registry: Registry, replica: Replica
) -> None:
    watched(registry, replica)
    replica.serve(70, acceptance_length=2, by_client=equal_requests(40, 3))
    replica.poll()
    assert replica.engine.loaded == [2, 2]
    replica.drafter._recorded_at = -1e9
    replica.poll()
    (record,) = read_records(registry, 2)
    assert (record.tally.requests, record.by_client.requests) == (70, 40)


@pytest.mark.parametrize("of_version_1", [2, 3])
def test_a_server_that_has_left_a_version_is_the_control_of_the_others(
    registry: Registry, target: Path, tmp_path: Path, of_version_1: int
) -> None:
    """If the version before accepts less than it did, too, traffic has become harder."""
    publish(registry, target, tmp_path, seed=2, parent=1, expected_length=EXPECTED, before=EXPECTED)
    one = Replica(registry, target, tmp_path / "one.json", server="here:8000")
    other = Replica(registry, target, tmp_path / "other.json", server="there:8000")
    registry.point_to(3, "better")
    for each in (one, other):
        each.poll()
    one.serve(requests=70, acceptance_length=2)
    one.poll()
    assert (one.engine.loaded, other.engine.loaded) == ([1, 1], [3, 3])
    other.serve(requests=70, acceptance_length=2)
    other.poll()  # waits for the control
    assert other.engine.loaded == [3, 3]
    one.serve(requests=70, acceptance_length=of_version_1)
    one.poll()
    other.poll()
    assert other.engine.loaded == ([3, 3] if of_version_1 == 2 else [1, 1])
    assert (registry.bad_mark(3) is None) == (of_version_1 == 2)


@pytest.mark.parametrize(
    "limit", ["MAX_SILENT_SECONDS", "COOL_DOWN_SECONDS"], ids=["gone", "idle after the cool-down"]
)
def test_a_server_without_an_opinion_is_not_waited_for(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    watched(registry, replica)
    write_record(registry, WatchRecord(server="there:8000", version=2, found="watching"))
    replica.serve(requests=70, acceptance_length=2)
    replica.poll()
    assert registry.require_pointer().version == 2
    monkeypatch.setattr(watch_record, limit, 0.0)
    replica.poll()
    assert registry.require_pointer().version == 1


def test_a_version_that_crashes_its_server_is_given_up(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    watched(registry, replica)  # the first run; none of them ends cleanly
    for _ in range(2):
        again = Replica(registry, target, tmp_path / "again.json", version=2)
        again.start()
        assert again.drafter.state == "watching"
    again = Replica(registry, target, tmp_path / "again.json", version=2)
    again.start()
    again.poll()
    assert again.engine.loaded == [1, 1]
    mark = registry.bad_mark(2)
    assert mark is not None
    assert "ended 3 times in a row soon after its start" in mark.reason


def test_restarts_on_purpose_do_not_count_as_crashes(
    registry: Registry, replica: Replica, target: Path, tmp_path: Path
) -> None:
    watched(registry, replica)
    replica.drafter.stop()
    for _ in range(5):
        again = Replica(registry, target, tmp_path / "again.json", version=2)
        again.start()
        assert again.drafter.state == "watching"
        again.drafter.stop()


def test_a_registry_that_cannot_be_written_does_not_hold_a_server_back(
    registry: Registry, replica: Replica, monkeypatch: pytest.MonkeyPatch, leadout_log: list[str]
) -> None:
    """Servers may have permission to read a registry only."""
    denied = fails(10**6, PermissionError(errno.EACCES, "Permission denied"), None)
    for name in ("roll_back", "record"):
        monkeypatch.setattr(Registry, name, denied)
    monkeypatch.setattr(rollout, "write_record", denied)
    watched(registry, replica)
    replica.serve(requests=70, acceptance_length=2)
    for _ in range(3):
        replica.poll()
        assert replica.engine.loaded == [1, 1]
    assert read_records(registry, 2) == []
    assert "could not roll version 2 of the drafter back everywhere" in " ".join(leadout_log)


BLOCK = 16


class HashedRequest:
    """The part of vLLM's request that block hashes are about, with vLLM's own hasher."""

    def __init__(self, tokens: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils

        kv_cache_utils.init_none_hash(sha256)
        self.all_token_ids = list(range(tokens))
        self.mm_features: list[Any] = []
        self.lora_request = self.cache_salt = self.prompt_embeds = None
        self.block_hashes: list[bytes] = []
        self.hashed_blocks = 0

        def hash_block(content: Any) -> bytes:
            self.hashed_blocks += 1
            digest: bytes = sha256(content)
            return digest

        self._block_hasher: Any = kv_cache_utils.get_request_block_hasher(BLOCK, hash_block)
        self.update_block_hashes()  # as vLLM's input thread does

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))

    def generate(self, tokens: int) -> None:
        start = self.num_tokens
        self.all_token_ids += range(start, start + tokens)
        self.update_block_hashes()


def masked(tokens: int, mask: bytes) -> HashedRequest:
    request = HashedRequest(tokens)
    mask_block_hashes(request, mask)
    return request


MASK, LATER_MASK = bytes(range(1, 65)), bytes(range(2, 66))


def test_requests_after_a_swap_share_blocks_with_each_other_only() -> None:
    before, after, later = HashedRequest(100), masked(100, MASK), masked(100, LATER_MASK)
    assert after.block_hashes == masked(100, MASK).block_hashes
    hashes = [*before.block_hashes, *after.block_hashes, *later.block_hashes]
    assert len(set(hashes)) == 3 * (100 // BLOCK)
    assert {len(each) for each in hashes} == {32}


def test_generated_blocks_are_found_by_a_follow_up_prompt() -> None:
    request = masked(100, MASK)
    for _ in range(10):
        request.generate(7)
    assert request.block_hashes == masked(170, MASK).block_hashes
    assert len(request.block_hashes) == 170 // BLOCK
    del request.block_hashes[4:]  # as vLLM does when a streamed prompt is continued
    request.update_block_hashes()
    assert request.block_hashes == masked(170, MASK).block_hashes


def test_the_scheduler_hashes_no_prompt_after_a_swap() -> None:
    masking, hashing = [], []
    for _ in range(10):  # the shortest: the machine may be busy at any moment
        request = HashedRequest(100_000)
        assert request.hashed_blocks == 100_000 // BLOCK
        started = time.process_time()
        mask_block_hashes(request, MASK)
        masking.append(time.process_time() - started)
        assert request.hashed_blocks == 100_000 // BLOCK
        again = HashedRequest(0)
        again.all_token_ids = request.all_token_ids
        started = time.process_time()
        again.update_block_hashes()
        hashing.append(time.process_time() - started)
    assert min(masking) < 0.25 * min(hashing)


def test_without_a_prefix_cache_there_is_nothing_to_mask() -> None:
    request = HashedRequest(100)
    request._block_hasher, request.block_hashes = None, []
    mask_block_hashes(request, MASK)
    assert request._block_hasher is None
    assert request.block_hashes == []


def test_the_padded_end_of_a_prompt_is_no_step_with_drafts() -> None:
    request = SimpleNamespace(num_output_tokens=0)
    scheduler: Any = SimpleNamespace(
        requests={"a": request}, _open_requests={"a": [0, 0]}, num_spec_tokens=7
    )

    def count(accepted: int) -> list[int]:
        RolloutMixin._count_step(
            scheduler,
            request_id="a",
            num_draft_tokens=7,
            num_accepted_tokens=accepted,
            num_invalid_spec_tokens=None,
        )
        found: list[int] = scheduler._open_requests["a"]
        return found

    assert count(0) == [0, 0]  # vLLM's placeholders, which nothing accepts
    request.num_output_tokens = 1
    assert count(2) == [1, 3]
    assert count(0) == [2, 4]
