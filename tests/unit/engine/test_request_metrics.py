"""Acceptance by request: what is counted, when it is written, and how it is shown.

The scheduler below it is a stand-in; that vLLM's own calls it so is in the engine tests.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine import request_metrics
from leadout.engine.counters import read_small
from leadout.engine.metrics import DEFAULT_BREAK_EVEN, add_request_acceptance, request_family
from leadout.engine.request_metrics import (
    BUCKETS,
    MIN_STEPS,
    RequestAcceptance,
    RequestMetricsMixin,
    request_acceptance_file,
)

CONFIG = SimpleNamespace(
    instance_id="a-test", parallel_config=SimpleNamespace(data_parallel_index=1)
)


class StandInScheduler:
    """The part of vLLM's scheduler that the mixin extends."""

    def __init__(self, **_: Any) -> None:
        self.requests = defaultdict(lambda: SimpleNamespace(num_output_tokens=1))
        self.counted: list[tuple[str, int]] = []
        self.freed: list[str] = []
        self.has_ended = False

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        self.counted.append((request_id, num_accepted_tokens))
        return spec_decoding_stats

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> str:
        self.freed.append(request.request_id)
        return "transfer parameters"

    def shutdown(self) -> None:
        self.has_ended = True


class Counting(RequestMetricsMixin, StandInScheduler):
    """As `make_scheduler` puts it together."""

    def verify(self, request_id: str, *accepted: int) -> None:
        """Steps of a request, by the number of drafts that each accepted."""
        for each in accepted:
            found = self.make_spec_decoding_stats(
                "statistics",
                num_draft_tokens=7,
                num_accepted_tokens=each,
                num_invalid_spec_tokens=None,
                request_id=request_id,
            )
            assert found == "statistics"

    def end(self, request_id: str) -> None:
        assert self._free_request(SimpleNamespace(request_id=request_id)) == "transfer parameters"


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(request_metrics, "SECONDS_UNTIL_WRITE", 0.05)
    made = Counting(vllm_config=CONFIG)
    yield made
    if not made.has_ended:
        made.shutdown()


def written() -> RequestAcceptance | None:
    return read_small(request_acceptance_file("a-test", 1), RequestAcceptance)


def after_writing(requests: int) -> RequestAcceptance:
    """The file once it has so many requests."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found = written()
        if found is not None and sum(found.requests) == requests:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{written()} after 30 s, expected {requests} requests")


def bucket(bound: float) -> int:
    return BUCKETS.index(bound)


def test_an_engine_without_requests_has_empty_buckets(scheduler: Counting) -> None:
    assert written() == RequestAcceptance()
    assert sum(RequestAcceptance().requests) == 0


def test_a_request_counts_once_when_it_ends(scheduler: Counting) -> None:
    scheduler.verify("a", 0, 0, 0, 0)
    scheduler.verify("b", 3, 1, 2, 2)
    assert sum(after_writing(0).requests) == 0
    scheduler.end("a")
    scheduler.end("b")
    scheduler.end("b")  # nothing is left of it
    found = after_writing(2)
    assert found.requests[bucket(1.1)] == 1
    assert found.requests[bucket(3.0)] == 1  # 1 + 8 / 4 is on its bound
    assert found.total == 1.0 + 3.0
    assert scheduler.freed == ["a", "b", "b"]
    assert len(scheduler.counted) == 8


def test_requests_with_few_steps_or_no_drafts_are_left_out(scheduler: Counting) -> None:
    scheduler.verify("short", *[2] * (MIN_STEPS - 1))
    scheduler.verify("long enough", *[2] * MIN_STEPS)
    for name in ("short", "off", "long enough"):
        scheduler.end(name)
    assert after_writing(1).total == 3.0


def test_an_id_that_is_used_again_starts_anew(scheduler: Counting) -> None:
    scheduler.verify("a", 0, 0, 0)
    scheduler.end("a")
    scheduler.verify("a", 7, 7, 7, 7)
    scheduler.end("a")
    assert after_writing(1).total == 8.0


def test_requests_that_end_while_a_write_is_planned_are_in_it(scheduler: Counting) -> None:
    for number in range(40):
        scheduler.verify(str(number), 1, 1, 1, 1)
        scheduler.end(str(number))
    assert after_writing(40).total == 80.0


def test_nothing_is_left_after_the_end(scheduler: Counting, tmp_path: Path) -> None:
    scheduler.verify("a", 1, 1, 1, 1)
    scheduler.end("a")
    scheduler.shutdown()
    assert scheduler.has_ended
    time.sleep(0.1)  # longer than until the write that was planned
    assert written() is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_error_costs_the_histogram_only(
    scheduler: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("not a problem of the disk")

    monkeypatch.setattr(request_metrics, "write_small", fail)
    for name in ("a", "b"):
        scheduler.verify(name, 1, 1, 1, 1)
        scheduler.end(name)
        time.sleep(0.2)
    scheduler.verify("c", 1)
    assert not scheduler._acceptance_fail_safe.is_on
    assert scheduler._drafts == {}  # does not grow
    assert scheduler.freed == ["a", "b"]


def test_the_histogram_of_an_engine_is_cumulative(tmp_path: Path, scheduler: Counting) -> None:
    lengths = [1.0, 1.1, 1.2, 2.0, 2.4, 99.0]
    for number, length in enumerate(lengths):
        scheduler._acceptance.add(length)
        scheduler.verify(str(number), 0)
    scheduler._write_acceptance()
    family = request_family()
    add_request_acceptance(family, ["model", "0"], request_acceptance_file("a-test", 0))
    assert family.samples == []  # another engine
    add_request_acceptance(family, ["model", "1"], request_acceptance_file("a-test", 1))
    shown = {
        sample.labels["le"]: sample.value for sample in family.samples if "le" in sample.labels
    }
    assert [float(bound) for bound in shown] == [*BUCKETS, float("inf")]
    for bound, count in shown.items():
        assert count == sum(length <= float(bound) for length in lengths)
    others = {each.name: each.value for each in family.samples if "le" not in each.labels}
    assert others == {
        "leadout:request_acceptance_length_count": 6.0,
        "leadout:request_acceptance_length_sum": pytest.approx(sum(lengths)),
    }


def test_a_bucket_ends_at_the_default_break_even() -> None:
    assert DEFAULT_BREAK_EVEN in BUCKETS
    assert list(BUCKETS) == sorted(set(BUCKETS))


def test_a_damaged_file_shows_nothing(scheduler: Counting) -> None:
    path = request_acceptance_file("a-test", 1)
    path.write_text('{"requests": [1, 2], "total": 3.0}')
    family = request_family()
    add_request_acceptance(family, ["model", "1"], path)
    assert family.samples == []


def test_the_padded_end_of_a_prompt_is_no_step_with_drafts(scheduler: Counting) -> None:
    scheduler.requests["a"].num_output_tokens = 0
    scheduler.verify("a", 0)  # vLLM's placeholders, which nothing accepts
    scheduler.requests["a"].num_output_tokens = 1
    scheduler.verify("a", *[2] * MIN_STEPS)
    scheduler.end("a")
    found = after_writing(1)
    assert found.requests[bucket(3)] == 1


def test_a_write_that_fails_is_tried_again_with_the_next_request(
    scheduler: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def full(*_: object) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(request_metrics, "write_small", full)
        scheduler.verify("a", *[1] * MIN_STEPS)
        scheduler.end("a")
        assert failed.wait(30)
    folder = request_acceptance_file("a-test", 1).parent
    shutil.rmtree(folder, ignore_errors=True)  # as a cleaner does
    scheduler.verify("b", *[1] * MIN_STEPS)
    scheduler.end("b")
    assert sum(after_writing(2).requests) == 2
