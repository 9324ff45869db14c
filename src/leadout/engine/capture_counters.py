"""Capture's numbers as counters in `/metrics`; absent without capture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prometheus_client.core import CounterMetricFamily

from leadout.engine.capture import CaptureNumbers
from leadout.engine.small_files import read_small

LABELS = ("model_name", "engine")  # vLLM's own


def families() -> list[CounterMetricFamily]:
    return [
        CounterMetricFamily(
            "leadout:captured_requests", "Requests written to the captured traffic.", labels=LABELS
        ),
        CounterMetricFamily(
            "leadout:capture_dropped_requests",
            "Requests left out of it: the writer was behind, the disk refused, or redaction.",
            labels=(*LABELS, "reason"),
        ),
    ]


def fill(counters: Sequence[CounterMetricFamily], labels: list[str], path: Path) -> None:
    """Add one engine's numbers, if it captures."""
    numbers = read_small(path, CaptureNumbers)
    if numbers is None:
        return
    captured, dropped = counters
    captured.add_metric(labels, numbers.captured)
    for reason in ("too_slow", "disk", "redacted"):
        dropped.add_metric([*labels, reason], getattr(numbers, reason))
