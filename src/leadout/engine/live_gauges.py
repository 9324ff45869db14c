"""Live control's numbers as gauges, each over the last minute; absent without live control."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily

from leadout.engine.live_numbers import LiveNumbers, read_numbers

LABELS = ("model_name", "engine")  # vLLM's own
GAUGES: dict[str, tuple[str, Callable[[LiveNumbers], float | None]]] = {
    "leadout:draft_length": (
        "Tokens drafted for each request in a step, averaged over steps.",
        lambda numbers: numbers.draft_length,
    ),
    "leadout:skipped_drafts": (
        "Share of the drafter's drafts that were not verified.",
        lambda numbers: numbers.skipped_share,
    ),
    "leadout:copied_drafts": (
        "Share of the verified drafts that were copied from the request's own text.",
        lambda numbers: numbers.copied_share,
    ),
    "leadout:probes": (
        "Times that drafts were tried although they did not pay.",
        lambda numbers: float(numbers.probes),
    ),
    "leadout:estimated_gain": (
        "Tokens per second over those without drafts, by the last estimate.",
        lambda numbers: numbers.gain,
    ),
}


def families() -> list[GaugeMetricFamily]:
    return [GaugeMetricFamily(name, text, labels=LABELS) for name, (text, _) in GAUGES.items()]


def fill(gauges: Sequence[GaugeMetricFamily], labels: list[str], path: Path) -> None:
    """Add one engine's numbers, if it wrote any within the last minute."""
    numbers = read_numbers(path)
    if numbers is None:
        return
    for gauge, (_, value_of) in zip(gauges, GAUGES.values(), strict=True):
        value = value_of(numbers)
        if value is not None:
            gauge.add_metric(labels, value)
