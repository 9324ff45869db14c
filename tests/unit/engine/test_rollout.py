"""A server follows the pointer, swaps on all workers or none, and rolls a bad version back.

The workers are fakes that can be made to fail; the engine tests have real ones.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from leadout.control.rollback import Tally
from leadout.engine.counters import write_small
from leadout.engine.hot_swap import (
    EngineAsleepError,
    SwapFailedError,
    Swapper,
    SwapRefusedError,
)
from leadout.engine.rollout import Follower, ServedRequests, ServingDrafter, mask_block_hashes
from leadout.registry import POINTER, Registry
from support.models import tiny_llama
from support.two_workers import TwoWorkers
from support.version_registry import publish, with_nan

EXPECTED = 3.0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


class Replica:
    """One server of a registry, without its engine."""

    def __init__(
        self, registry: Registry, target: Path, served_path: Path, version: int = 1
    ) -> None:
        self.engine = TwoWorkers(registry, target, version)
        self.served_path = served_path
        self.drafter = ServingDrafter(
            registry,
            registry.manifest(version),
            Swapper(self.engine),
            [served_path, served_path.with_suffix(".second")],
            drafts_whole_blocks=True,
        )
        self.follower = Follower(registry, self.drafter)

    def serve(self, requests: int, acceptance_length: int) -> None:
        """Pretend that so many equal requests have arrived since the last swap and finished."""
        tally = Tally()
        for _ in range(requests):
            tally = tally.with_request(10, 10 * acceptance_length)
        write_small(ServedRequests(since=time.time(), tally=tally), self.served_path)

    def poll(self) -> None:
        asyncio.run(self.follower.poll())


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
    with pytest.raises(SwapRefusedError, match="version 2 could not be loaded: commit failed"):
        asyncio.run(replica.drafter.change_to(2, ""))
    assert replica.engine.loaded == [1, 1]
    assert replica.drafter.version == 1
    assert events(registry) == [("refused", 2)]


def test_workers_that_read_different_files_do_not_swap(replica: Replica) -> None:
    replica.engine.workers[1].fails_at = {"digest"}
    with pytest.raises(SwapRefusedError, match="different files"):
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
    other = Replica(registry, target, tmp_path / "other.json")
    registry.point_to(2, "better")
    for one in (replica, other):
        one.poll()
        assert one.engine.loaded == [2, 2]
    replica.serve(requests=40, acceptance_length=2)
    replica.poll()  # detects it and moves the pointer back
    for one in (replica, other):
        one.poll()
        assert one.engine.loaded == [1, 1]
        one.serve(requests=40, acceptance_length=1)
        one.poll()  # the older version is not watched
        assert one.engine.loaded == [1, 1]
    mark = registry.bad_mark(2)
    assert mark is not None
    assert "over 40 requests, expected at least 2.70" in mark.reason
    assert events(registry).count(("rolled_back", 2)) == 1


def test_a_version_set_by_hand_with_low_acceptance_is_rolled_back(
    registry: Registry, replica: Replica
) -> None:
    replica.poll()
    asyncio.run(replica.drafter.change_to(2, "set by hand"))
    replica.serve(requests=40, acceptance_length=2)
    for _ in range(2):
        replica.poll()
    assert replica.engine.loaded == [1, 1]
    assert registry.bad_mark(2) is not None


def test_a_version_with_expected_acceptance_stays(registry: Registry, replica: Replica) -> None:
    registry.point_to(2, "better")
    replica.poll()
    replica.serve(requests=5000, acceptance_length=3)
    replica.poll()
    report = asyncio.run(replica.drafter.report())
    assert (report.version, report.watch, report.expected_low) == (2, "passed", EXPECTED)
    assert (report.requests, report.acceptance_length) == (5000, 3.0)
    assert registry.bad_mark(2) is None


def test_requests_before_a_swap_do_not_count(registry: Registry, replica: Replica) -> None:
    replica.serve(requests=40, acceptance_length=1)
    registry.point_to(2, "better")
    replica.poll()
    replica.poll()
    assert replica.engine.loaded == [2, 2]
    assert asyncio.run(replica.drafter.report()).requests == 0


def test_an_unreadable_pointer_is_logged_and_changes_nothing(
    registry: Registry, replica: Replica, leadout_log: list[str]
) -> None:
    (registry.folder / POINTER).write_text("{")

    async def follow_for(seconds: float) -> None:
        task: asyncio.Task[Any] = asyncio.create_task(replica.follower.follow())
        await asyncio.sleep(seconds)
        task.cancel()

    asyncio.run(follow_for(0.3))
    assert replica.engine.loaded == [1, 1]
    assert "could not follow the registry" in " ".join(leadout_log)
    assert events(registry) == [("started", 1)]


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
    request = HashedRequest(100_000)
    assert request.hashed_blocks == 100_000 // BLOCK
    started = time.perf_counter()
    mask_block_hashes(request, MASK)
    seconds = time.perf_counter() - started
    assert request.hashed_blocks == 100_000 // BLOCK
    again = HashedRequest(0)
    again.all_token_ids = request.all_token_ids
    started = time.perf_counter()
    again.update_block_hashes()
    assert seconds < 0.25 * (time.perf_counter() - started)


def test_without_a_prefix_cache_there_is_nothing_to_mask() -> None:
    request = HashedRequest(100)
    request._block_hasher, request.block_hashes = None, []
    mask_block_hashes(request, MASK)
    assert request._block_hasher is None
    assert request.block_hashes == []
