"""What drafts gained over the last minute, and whether that is too little. Needs no vLLM.

The time is an argument everywhere: seconds of any clock that does not go back.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, Self

import vllm
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from leadout.engine.capture import CaptureCounters
from leadout.engine.live import LiveMetrics, live_metrics_file, read_live_metrics
from leadout.engine.plugin import SWITCH
from leadout.engine.settings import CAPTURE, sections_of
from leadout.engine.small_files import read_small, small_file
from leadout.engine.vllm_adapter import is_dflash, is_supported

WINDOW_SECONDS = 60

BREAK_EVEN = "LEADOUT_BREAK_EVEN"
BREAK_EVEN_MINUTES = "LEADOUT_BREAK_EVEN_MINUTES"
# A step with drafts is never cheaper than one without: it drafts, and it verifies more tokens. One
# token per step is therefore a loss on any machine, and 1.1 leaves drafting a tenth of a plain
# step, less than it takes in practice. Below it the loss needs no measurement.
DEFAULT_BREAK_EVEN = 1.1
DEFAULT_MINUTES = 3.0
# The acceptance length of fewer steps is mostly chance.
LEAST_DRAFTS = 200


@dataclass
class Counts:
    """Sums over verification steps; every step verifies the draft of one request."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, other: Counts, sign: int = 1) -> None:
        self.drafts += sign * other.drafts
        self.draft_tokens += sign * other.draft_tokens
        self.accepted += sign * other.accepted
        missing = len(other.accepted_per_position) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position, accepted in enumerate(other.accepted_per_position):
            self.accepted_per_position[position] += sign * accepted


class AcceptanceWindow:
    """Counts of the last minute, forgotten second by second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counts]] = deque()
        self._total = Counts()

    def add(
        self,
        now: float,
        drafts: int,
        draft_tokens: int,
        accepted: int,
        accepted_per_position: Sequence[int],
    ) -> None:
        self._forget(now)
        if not self._seconds or self._seconds[-1][0] < int(now):
            self._seconds.append((int(now), Counts()))
        step = Counts(drafts, draft_tokens, accepted, list(accepted_per_position))
        self._seconds[-1][1].add(step)
        self._total.add(step)

    def total(self, now: float) -> Counts:
        self._forget(now)
        return self._total

    def acceptance_length(self, now: float) -> float | None:
        """Tokens per target step, bonus included; None without drafts."""
        total = self.total(now)
        return 1 + total.accepted / total.drafts if total.drafts else None

    def acceptance_per_position(self, now: float) -> list[float]:
        """Share of the drafts accepted up to and including each position; none without drafts."""
        total = self.total(now)
        if not total.drafts:
            return []
        return [accepted / total.drafts for accepted in total.accepted_per_position]

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= int(now) - WINDOW_SECONDS:
            self._total.add(self._seconds.popleft()[1], sign=-1)


class BelowBreakEven:
    """Says once that acceptance stays below break-even; again only after as long at or above it.

    A minute with too few drafts proves neither, and starts the time anew.
    """

    def __init__(self, break_even: float, minutes: float, remedy: str) -> None:
        self._break_even = break_even
        self._minutes = minutes
        self._remedy = remedy
        self._is_below: bool | None = None
        self._since = self._last_seen = -math.inf
        self._has_warned = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], remedy: str) -> Self:
        """Settings from LEADOUT_BREAK_EVEN (1 never warns) and LEADOUT_BREAK_EVEN_MINUTES."""
        return cls(
            _number(environment, BREAK_EVEN, DEFAULT_BREAK_EVEN, least=1.0),
            _number(environment, BREAK_EVEN_MINUTES, DEFAULT_MINUTES, least=0.0),
            remedy,
        )

    def observe(self, now: float, window: AcceptanceWindow) -> str | None:
        """Call after every step; returns the warning when it is due."""
        acceptance_length = window.acceptance_length(now)
        total = window.total(now)
        if acceptance_length is None or total.drafts < LEAST_DRAFTS:
            is_below = None
        else:
            is_below = acceptance_length < self._break_even
        # After a pause the window may be full again at the first step, without a word about before.
        has_paused = now - self._last_seen >= WINDOW_SECONDS
        if is_below is not self._is_below or has_paused:
            self._is_below, self._since = is_below, now
        self._last_seen = now
        if is_below is None or now - self._since < 60 * self._minutes:
            return None
        if not is_below:
            self._has_warned = False
            return None
        if self._has_warned:
            return None
        self._has_warned = True
        return (
            f"Acceptance has been below break-even for {self._minutes:g} minutes: found "
            f"{acceptance_length:.2f} tokens per target step over the last minute "
            f"({total.accepted} of {total.draft_tokens} draft tokens accepted), wanted at least "
            f"{self._break_even:g} ({BREAK_EVEN}). Drafts cost more than they gain; {self._remedy}."
        )


def _number(environment: Mapping[str, str], name: str, default: float, least: float) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise ValueError(
            f"{name} is {text!r}, wanted a number of at least {least:g}. Set one, or unset it for "
            f"{default:g}"
        )
    return number


# Live control's numbers as gauges, each over the last minute; absent without live control.

LIVE_LABELS = ("model_name", "engine")  # vLLM's own
GAUGES: dict[str, tuple[str, Callable[[LiveMetrics], float | None]]] = {
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
        lambda numbers: numbers.lookup_share,
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


def live_families() -> list[GaugeMetricFamily]:
    return [GaugeMetricFamily(name, text, labels=LIVE_LABELS) for name, (text, _) in GAUGES.items()]


def fill_live(gauges: Sequence[GaugeMetricFamily], labels: list[str], path: Path) -> None:
    """Add one engine's numbers, if it wrote any within the last minute."""
    numbers = read_live_metrics(path)
    if numbers is None:
        return
    for gauge, (_, value_of) in zip(gauges, GAUGES.values(), strict=True):
        value = value_of(numbers)
        if value is not None:
            gauge.add_metric(labels, value)


# Capture's numbers as counters in `/metrics`; absent without capture.

CAPTURE_LABELS = ("model_name", "engine")  # vLLM's own


def capture_families() -> list[CounterMetricFamily]:
    return [
        CounterMetricFamily(
            "leadout:captured_requests",
            "Requests written to the captured traffic.",
            labels=CAPTURE_LABELS,
        ),
        CounterMetricFamily(
            "leadout:capture_dropped_requests",
            "Requests left out of it: the writer was behind, the disk refused, or redaction.",
            labels=(*CAPTURE_LABELS, "reason"),
        ),
    ]


def fill_capture(counters: Sequence[CounterMetricFamily], labels: list[str], path: Path) -> None:
    """Add one engine's numbers, if it captures."""
    numbers = read_small(path, CaptureCounters)
    if numbers is None:
        return
    captured, dropped = counters
    captured.add_metric(labels, numbers.captured)
    for reason in ("too_slow", "disk", "redacted"):
        dropped.add_metric([*labels, reason], getattr(numbers, reason))


# Acceptance of the last minute in `/metrics`, and one plain warning when drafts do not pay.
#
# vLLM's API server makes one `AcceptanceWatch` (entry point group `vllm.stat_logger_plugins`)
# beside
# its own loggers. It watches DFlash servers and those that capture, and none with LEADOUT_PLUGIN=0.
#
# `leadout:acceptance_length` and `leadout:acceptance_rate{position}` are computed when they are
# scraped, and absent when the last minute had no drafts. With live control its gauges stand beside
# them (`live_gauges`), and with capture its counters, with or without a drafter.
#
# With several API servers (Prometheus' multiprocess mode) `/metrics` shows no gauges, only vLLM's
# counters: each API server sees a share of the steps, and warns by its share.
#
# Having any such plugin installed makes vLLM keep statistics even under --disable-log-stats;
# VLLM_PLUGINS without `leadout` avoids that.

logger = init_logger("vllm.leadout")

# The watch in the registry: a second engine in one process takes the place of the first, as in
# vLLM's own metrics.
_shown: AcceptanceWatch | None = None


class AcceptanceWatch(AggregateStatLoggerBase):  # type: ignore[misc]
    """Stat logger of all engines of one API server, and the collector of its gauges.

    An error in here costs one log line and the gauges, never a request.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._is_watching = False
        # vLLM records on the event loop and answers scrapes on other threads.
        self._lock = Lock()
        self._engines = engine_indexes
        self._windows: dict[int, AcceptanceWindow] = defaultdict(AcceptanceWindow)
        # All engines run the same drafter, so one verdict is for all.
        self._all_engines = AcceptanceWindow()
        try:
            if _is_wanted(vllm_config):
                self._start(vllm_config)
        except Exception as error:
            self._give_up(error)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,  # what another vLLM may pass
    ) -> None:
        if not self._is_watching or not self._is_dflash:
            return
        try:
            if scheduler_stats is not None and scheduler_stats.spec_decoding_stats is not None:
                self._add(scheduler_stats.spec_decoding_stats, engine_idx)
        except Exception as error:
            self._give_up(error)

    def log_engine_initialized(self) -> None:
        """vLLM asks for it; there is nothing to say."""

    def describe(self) -> Iterable[Metric]:
        """The names, which the registry cannot learn from a collection without drafts."""
        return [*_new_gauges(), *live_families(), *capture_families()]

    def collect(self) -> Iterable[Metric]:
        if not self._is_watching:
            return []
        try:
            return self._gauges()
        except Exception as error:
            self._give_up(error)
            return []

    def _start(self, vllm_config: Any) -> None:
        global _shown
        target, speculation = vllm_config.model_config.model, vllm_config.speculative_config
        drafter = None if speculation is None else speculation.model
        self._is_dflash = is_dflash(vllm_config)
        self._model_name = str(vllm_config.model_config.served_model_name)
        self._instance = vllm_config.instance_id
        self._below_break_even = BelowBreakEven.from_environment(
            os.environ,
            remedy=f"run `leadout check {target} {drafter}`, or serve without the drafter",
        )
        if _shown is not None:
            REGISTRY.unregister(_shown)
            _shown = None
        REGISTRY.register(self)
        _shown = self
        self._is_watching = True

    def _add(self, step: Any, engine_idx: int) -> None:
        now = monotonic()
        with self._lock:
            for window in (self._windows[engine_idx], self._all_engines):
                window.add(
                    now,
                    step.num_drafts,
                    step.num_draft_tokens,
                    step.num_accepted_tokens,
                    step.num_accepted_tokens_per_pos,
                )
            warning = self._below_break_even.observe(now, self._all_engines)
        if warning is not None:
            logger.warning("%s", warning)

    def _gauges(self) -> Iterable[Metric]:
        now = monotonic()
        length, rate = _new_gauges()
        live, captured = live_families(), capture_families()
        with self._lock:
            for engine, window in self._windows.items():
                labels = [self._model_name, str(engine)]
                acceptance_length = window.acceptance_length(now)
                if acceptance_length is not None:
                    length.add_metric(labels, acceptance_length)
                for position, share in enumerate(window.acceptance_per_position(now)):
                    rate.add_metric([*labels, str(position)], share)
            for engine in self._engines:
                labels = [self._model_name, str(engine)]
                fill_live(live, labels, live_metrics_file(self._instance, engine))
                fill_capture(captured, labels, small_file(CAPTURE, self._instance, engine))
        return [length, rate, *(family for family in (*live, *captured) if family.samples)]

    def _give_up(self, error: Exception) -> None:
        self._is_watching = False
        logger.error(
            "Leadout no longer watches the acceptance: %s: %s. Serving goes on; %s=0 leaves vLLM "
            "without Leadout.",
            type(error).__name__,
            error,
            SWITCH,
        )


def _is_wanted(vllm_config: Any) -> bool:
    if os.environ.get(SWITCH) == "0" or not is_supported(vllm.__version__):
        return False
    return is_dflash(vllm_config) or CAPTURE in sections_of(vllm_config)


def _new_gauges() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    """Acceptance length and rate, with vLLM's own labels."""
    labels = ["model_name", "engine"]
    return (
        GaugeMetricFamily(
            "leadout:acceptance_length",
            "Tokens per target step over the last minute, bonus token included.",
            labels=labels,
        ),
        GaugeMetricFamily(
            "leadout:acceptance_rate",
            "Share of the drafts of the last minute accepted up to and including a position.",
            labels=[*labels, "position"],
        ),
    )
