"""The scheduler's part of a rollout: separates requests after a swap from those before it.

`RolloutMixin` keeps the old drafter's cache entries from requests that arrive after a swap, and
counts what those requests accept. `leadout.engine.rollout` compares the counts with what was
expected.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from leadout.control.rollback import RequestLimits, Tally
from leadout.engine.clients import ClientReader
from leadout.engine.counters import disk_errors_logged, remove_small, small_file, write_small
from leadout.engine.fail_safe import FailSafe
from leadout.engine.vllm_adapter import engine_index

SECONDS_BETWEEN_WRITES = 1.0
MASK_BYTES = 64  # as long as the longest hash
PROMPT_ENDS = 64  # tokens at either end by which prompts are told apart


class ServedRequests(BaseModel):
    """Finished requests that arrived after `since` (Unix time), in a file of the scheduler's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    since: float
    tally: Tally
    by_client: Tally = Tally()  # with the limit for clients, where they are known


def served_requests_file(vllm_config: Any, engine: int) -> Path:
    return small_file("served", vllm_config.instance_id, engine)


def prompt_key(tokens: list[int] | None) -> int:
    """Equal for equal prompts; cheap for long ones, whose middle is not looked at."""
    if tokens is None:  # given as embeddings
        return 0
    return hash((len(tokens), tuple(tokens[:PROMPT_ENDS]), tuple(tokens[-PROMPT_ENDS:])))


def mask_block_hashes(request: Any, mask: bytes) -> None:
    """Make a request find, and leave, only cache blocks of requests with the same mask.

    vLLM's input thread has hashed the prompt already. Hashing it again with a salt would hold up
    the scheduler for 16 ms per 100,000 tokens; a mask on finished hashes separates them as well.
    Later blocks are hashed from unmasked ones, so that a follow-up prompt finds them.
    """
    hasher = request._block_hasher
    if hasher is None:  # nothing is cached
        return
    plain: list[bytes] = list(request.block_hashes)

    def hash_new_blocks(request: Any) -> list[bytes]:
        masked = request.block_hashes
        del plain[len(masked) :]  # vLLM takes blocks back when a streamed prompt is continued
        request.block_hashes = plain
        try:
            new: list[bytes] = hasher(request)
        finally:
            request.block_hashes = masked
        plain.extend(new)
        return _masked(new, mask)

    request.block_hashes[:] = _masked(plain, mask)
    request._block_hasher = hash_new_blocks


def _masked(hashes: list[bytes], mask: bytes) -> list[bytes]:
    if not hashes:
        return []
    size = len(hashes[0])
    table = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, size)  # [hashes, bytes]
    joined = (table ^ np.frombuffer(mask[:size], np.uint8)).tobytes()
    return [joined[start : start + size] for start in range(0, len(joined), size)]


class RolloutMixin:
    """Put before a scheduler class of vLLM: separates the requests after a swap from those before.

    The drafter's keys and values of a text share cache blocks with those of the target. After a
    swap, cached blocks hold the old drafter's: the text stays correct, but the new drafter drafts
    worse from them. vLLM empties its prefix cache only when no request runs. Therefore, from the
    reset that follows a swap, the block hashes of new requests are masked: they cannot find the old
    blocks, which vLLM evicts in time. Running requests keep their blocks.

    Finished requests that arrived after the reset are tallied for `ServingDrafter`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        vllm_config = settings["vllm_config"]
        engine = engine_index(vllm_config)
        self._served_path = served_requests_file(vllm_config, engine)
        self._hash_mask: bytes | None = None
        self._open_requests: dict[str, list[int]] = {}  # by id: steps with a whole block, tokens
        self._tally_fail_safe = FailSafe("acceptance watch after swaps", self._open_requests.clear)
        self._clients = ClientReader(vllm_config, engine)
        self._start_tally()

    def add_request(self, request: Any) -> None:
        if self._hash_mask is not None:
            mask_block_hashes(request, self._hash_mask)
        if self._tally_fail_safe.is_on:
            self._open_requests[request.request_id] = [0, 0]
        super().add_request(request)  # type: ignore[misc]

    def reset_prefix_cache(self, *arguments: Any, **settings: Any) -> bool:
        is_empty: bool = super().reset_prefix_cache(*arguments, **settings)  # type: ignore[misc]
        self._hash_mask = None if is_empty else os.urandom(MASK_BYTES)
        self._start_tally()
        return is_empty

    def make_spec_decoding_stats(self, *arguments: Any, **settings: Any) -> Any:
        if self._tally_fail_safe.is_on:
            with self._tally_fail_safe:
                self._count_step(**settings)
        return super().make_spec_decoding_stats(*arguments, **settings)  # type: ignore[misc]

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        steps, tokens = self._open_requests.pop(request.request_id, (0, 0))
        if steps and self._tally_fail_safe.is_on:
            with self._tally_fail_safe:
                self._count_request(request, steps, tokens)
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        with suppress(OSError):
            self._clients.close()
            remove_small(self._served_path)
        super().shutdown()  # type: ignore[misc]

    def _start_tally(self) -> None:
        self._since = time.time()
        self._tally, self._by_client, self._limits = Tally(), Tally(), RequestLimits()
        self._open_requests.clear()  # running requests belong to the drafter before
        self._write_tally()

    def _count_step(
        self,
        *,
        request_id: str,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
    ) -> None:
        """Count steps with whole blocks only, as expected acceptance is measured with those.

        A prompt of which only the last token is left to compute, as after a hit in the prefix
        cache or with a KV connector, has no drafts yet: vLLM pads it with placeholders that
        nothing accepts. (It does so for preempted requests too, which are counted.)
        """
        if self.requests[request_id].num_output_tokens == 0:  # type: ignore[attr-defined]
            return
        counts = self._open_requests.get(request_id)
        verified = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if counts is not None and verified == self.num_spec_tokens:  # type: ignore[attr-defined]
            counts[0] += 1
            counts[1] += num_accepted_tokens + 1

    def _count_request(self, request: Any, steps: int, tokens: int) -> None:
        prompt = prompt_key(request.prompt_token_ids)
        counts, counts_by_client = self._limits.admit(prompt, self._clients.client_of(request))
        if counts:
            self._tally = self._tally.with_request(steps, tokens)
        if counts_by_client:
            self._by_client = self._by_client.with_request(steps, tokens)
        is_last = len(self.requests) == 1  # type: ignore[attr-defined]
        if is_last or time.monotonic() - self._last_write >= SECONDS_BETWEEN_WRITES:
            self._write_tally()

    def _write_tally(self) -> None:
        self._last_write = time.monotonic()
        if self._tally_fail_safe.is_on:
            with self._tally_fail_safe:
                served = ServedRequests(
                    since=self._since, tally=self._tally, by_client=self._by_client
                )
                with disk_errors_logged():
                    write_small(served, self._served_path)
