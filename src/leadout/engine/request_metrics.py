"""The acceptance length of each finished request, as a histogram for `/metrics`.

The mean over all traffic hides requests whose drafts are rejected. vLLM's statistics of finished
requests have no counts of drafts, and `--per-request-spec-decode-metrics` puts them into answers
only. `RequestMetricsMixin` therefore counts them in the scheduler, in the engine's process, and
hands them to the API process in a small file.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from threading import Timer
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from leadout.engine.counters import disk_errors_logged, remove_small, small_file, write_small
from leadout.engine.fail_safe import FailSafe
from leadout.engine.vllm_adapter import engine_index

# Upper bounds, the same for every K, so that replicas can be added up. The first one is the
# break-even that `leadout.engine.metrics` warns by.
BUCKETS = (1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)
# The acceptance length of fewer steps is mostly noise.
MIN_STEPS = 4
SECONDS_UNTIL_WRITE = 1.0


class RequestAcceptance(BaseModel):
    """Finished requests by acceptance length, since the engine started."""

    model_config = ConfigDict(extra="forbid")

    # One count for each bucket, and one for what is above all of them.
    requests: list[int] = Field(
        default_factory=lambda: [0] * (len(BUCKETS) + 1),
        min_length=len(BUCKETS) + 1,
        max_length=len(BUCKETS) + 1,
    )
    total: float = 0.0  # of the acceptance lengths

    def add(self, acceptance_length: float) -> None:
        self.requests[bisect_left(BUCKETS, acceptance_length)] += 1
        self.total += acceptance_length

    def cumulative(self) -> list[tuple[str, float]]:
        """Requests up to and including each bound, as Prometheus wants them."""
        bounds = [*map(str, BUCKETS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.requests)), strict=True))


def request_acceptance_file(instance: str, engine: int) -> Path:
    return small_file("requests", instance, engine)


class RequestMetricsMixin:
    """Put before a scheduler class of vLLM: counts the drafts of each request until it ends."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        config = settings["vllm_config"]
        self._acceptance_path = request_acceptance_file(config.instance_id, engine_index(config))
        self._acceptance = RequestAcceptance()
        self._drafts: dict[str, list[int]] = {}  # by request: steps with drafts, accepted drafts
        self._acceptance_fail_safe = FailSafe("acceptance by request", self._drafts.clear)
        self._writer: Timer | None = None
        self._is_write_planned = False
        self._write_acceptance()

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        # Called by vLLM for each request of a step with drafts: nothing here may be slow.
        if self._acceptance_fail_safe.is_on:
            with self._acceptance_fail_safe:
                self._count_drafts(request_id, num_accepted_tokens)
        return super().make_spec_decoding_stats(  # type: ignore[misc]
            spec_decoding_stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_invalid_spec_tokens=num_invalid_spec_tokens,
            request_id=request_id,
        )

    def _count_drafts(self, request_id: str, accepted: int) -> None:
        # vLLM pads the last token of a prompt with placeholders if nothing else of it is left to
        # compute, as after a hit in the prefix cache; these are no drafts.
        if self.requests[request_id].num_output_tokens == 0:  # type: ignore[attr-defined]
            return
        counts = self._drafts.get(request_id)
        if counts is None:
            counts = self._drafts[request_id] = [0, 0]
        counts[0] += 1
        counts[1] += accepted

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        steps, accepted = self._drafts.pop(request.request_id, (0, 0))
        if steps >= MIN_STEPS:
            self._acceptance.add(1 + accepted / steps)
            self._write_soon()
        return super()._free_request(request, *arguments, **settings)  # type: ignore[misc]

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            self._writer.join()
        with suppress(OSError):
            remove_small(self._acceptance_path)
        super().shutdown()  # type: ignore[misc]

    def _write_soon(self) -> None:
        """Write within a second, in another thread: a file may take longer than a step."""
        if self._is_write_planned or not self._acceptance_fail_safe.is_on:
            return
        self._is_write_planned = True
        with self._acceptance_fail_safe:
            self._writer = Timer(SECONDS_UNTIL_WRITE, self._write_acceptance)
            self._writer.daemon = True
            self._writer.start()

    def _write_acceptance(self) -> None:
        self._is_write_planned = False  # requests that end from here on need another write
        with self._acceptance_fail_safe, disk_errors_logged():
            write_small(self._acceptance, self._acceptance_path)
