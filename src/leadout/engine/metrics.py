"""Leadout's metrics in vLLM's `/metrics`, and one warning when drafts cost more than they gain.

vLLM's API server creates one `AcceptanceWatch` (entry point group `vllm.stat_logger_plugins`) next
to its own loggers. It is active for servers with a DFlash drafter or capture, unless
LEADOUT_PLUGIN=0. It shows

- `leadout:acceptance_length` and `leadout:acceptance_rate{position}` over the last minute, computed
  at each scrape and absent if that minute had no drafts,
- with Leadout's scheduler, the histogram `leadout:request_acceptance_length` of finished requests,
- with live control, its gauges over the last minute (`LIVE_GAUGES`),
- with capture, or with learning from served states, its counters since the start of the server.

With several API servers (Prometheus' multiprocess mode) `/metrics` shows only vLLM's own counters:
each API server sees a part of the steps, and warns by its part.

Any installed plugin of this kind makes vLLM keep statistics even under --disable-log-stats;
VLLM_PLUGINS without `leadout` avoids that.
"""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, Self

import vllm
from prometheus_client import REGISTRY
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from vllm.platforms import current_platform

from leadout.engine.capture import CaptureCounters
from leadout.engine.counters import WINDOW_SECONDS, SlidingWindow, read_small, small_file
from leadout.engine.fail_safe import FailSafe
from leadout.engine.live import LiveMetrics, live_metrics_file, read_live_metrics
from leadout.engine.plugin import SWITCH
from leadout.engine.request_metrics import MIN_STEPS, RequestAcceptance, request_acceptance_file
from leadout.engine.served_texts import StatesCounters, TextCounters
from leadout.engine.settings import CAPTURE, LEARN, LEARN_STATES, SCHEDULER, sections_of
from leadout.engine.vllm_adapter import AggregateStatLoggerBase, is_dflash
from leadout.engine.vllm_internals import METRICS, is_supported, is_usable

logger = logging.getLogger("vllm.leadout")

LABELS = ("model_name", "engine")  # as on vLLM's own metrics

BREAK_EVEN = "LEADOUT_BREAK_EVEN"
BREAK_EVEN_MINUTES = "LEADOUT_BREAK_EVEN_MINUTES"
# A step with drafts never costs less than one without: it drafts, and it verifies more tokens. One
# token per step is therefore a loss on any machine, and 1.1 leaves drafting a tenth of a plain
# step, less than it takes in practice. Below it the loss needs no measurement.
DEFAULT_BREAK_EVEN = 1.1
DEFAULT_MINUTES = 3.0
# The acceptance length of fewer drafts is mostly noise.
MIN_DRAFTS = 200


class AcceptanceWindow(SlidingWindow[str | int]):
    """Acceptance over the last minute; positions are counted under integer keys."""

    def add_drafts(
        self, now: float, drafts: int, draft_tokens: int, accepted: int, by_position: Sequence[int]
    ) -> None:
        """Add verification steps; each verifies the draft of one request."""
        counts: dict[str | int, int] = {
            "drafts": drafts,
            "draft_tokens": draft_tokens,
            "accepted": accepted,
        }
        self.add(now, {**counts, **dict(enumerate(by_position))})

    def acceptance_length(self, now: float) -> float | None:
        """Tokens per target step, including the bonus token; None without drafts."""
        total = self.total(now)
        return 1 + total["accepted"] / total["drafts"] if total["drafts"] else None

    def acceptance_per_position(self, now: float) -> list[float]:
        """Fraction of drafts accepted up to and including each position; empty without drafts."""
        total = self.total(now)
        if not total["drafts"]:
            return []
        positions = sum(isinstance(key, int) for key in total)
        return [total[position] / total["drafts"] for position in range(positions)]


class BreakEvenWarning:
    """Warns once when acceptance stays below break-even; again only after as long at or above it.

    A minute with too few drafts is no evidence for either, and restarts the time.
    """

    def __init__(self, break_even: float, minutes: float, remedy: str) -> None:
        self._break_even, self._minutes, self._remedy = break_even, minutes, remedy
        self._is_below: bool | None = None
        self._since = self._last_observed = -math.inf
        self._has_warned = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], remedy: str) -> Self:
        """Settings from LEADOUT_BREAK_EVEN (1 never warns) and LEADOUT_BREAK_EVEN_MINUTES."""
        return cls(
            _number(environment, BREAK_EVEN, DEFAULT_BREAK_EVEN, minimum=1.0),
            _number(environment, BREAK_EVEN_MINUTES, DEFAULT_MINUTES, minimum=0.0),
            remedy,
        )

    def observe(self, now: float, window: AcceptanceWindow) -> str | None:
        """Call after every step; returns the warning when it is due."""
        acceptance_length = window.acceptance_length(now)
        total = window.total(now)
        if acceptance_length is None or total["drafts"] < MIN_DRAFTS:
            is_below = None
        else:
            is_below = acceptance_length < self._break_even
        # After a pause the first step may fill the window again, which says nothing of the pause.
        has_paused = now - self._last_observed >= WINDOW_SECONDS
        if is_below is not self._is_below or has_paused:
            self._is_below, self._since = is_below, now
        self._last_observed = now
        if is_below is None or now - self._since < 60 * self._minutes:
            return None
        had_warned, self._has_warned = self._has_warned, is_below
        if had_warned or not is_below:
            return None
        return (
            f"Acceptance has been below break-even for {self._minutes:g} minutes: "
            f"{acceptance_length:.2f} tokens per target step over the last minute "
            f"({total['accepted']} of {total['draft_tokens']} draft tokens accepted), expected at "
            f"least {self._break_even:g} ({BREAK_EVEN}). Drafts cost more than they gain; "
            f"{self._remedy}."
        )


def _number(environment: Mapping[str, str], name: str, default: float, minimum: float) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= minimum):
        raise ValueError(
            f"{name} is {text!r}, expected a number of at least {minimum:g}. Unset it for the "
            f"default of {default:g}"
        )
    return number


def acceptance_families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    """Acceptance length and acceptance rate by position."""
    length = "Tokens per target step over the last minute, including the bonus token."
    rate = "Fraction of the last minute's drafts accepted up to and including a position."
    return (
        GaugeMetricFamily("leadout:acceptance_length", length, labels=LABELS),
        GaugeMetricFamily("leadout:acceptance_rate", rate, labels=(*LABELS, "position")),
    )


def request_family() -> HistogramMetricFamily:
    text = (
        "Tokens per target step of finished requests, including the bonus token, over steps that "
        f"verified drafts; requests with at least {MIN_STEPS} such steps."
    )
    return HistogramMetricFamily("leadout:request_acceptance_length", text, labels=LABELS)


def add_request_acceptance(
    family: HistogramMetricFamily, labels: Sequence[str], path: Path
) -> None:
    """Add the histogram of one engine, if Leadout's scheduler counts its requests."""
    found = read_small(path, RequestAcceptance)
    if found is not None:
        family.add_metric(labels, found.cumulative(), sum_value=found.total)


LIVE_GAUGES: dict[str, tuple[str, Callable[[LiveMetrics], float | None]]] = {
    "leadout:draft_length": (
        "Tokens drafted per request and step, averaged over steps.",
        lambda live: live.draft_length,
    ),
    "leadout:skipped_drafts": (
        "Fraction of the drafter's drafts that were not verified.",
        lambda live: live.skipped_share,
    ),
    "leadout:copied_drafts": (
        "Fraction of the verified drafts that came from prompt lookup.",
        lambda live: live.lookup_share,
    ),
    "leadout:probes": (
        "Number of steps with drafts that are not expected to pay, or bare ones, to learn from.",
        lambda live: float(live.probes),
    ),
    "leadout:estimated_gain": (
        "Tokens per second relative to decoding without drafts, by the last estimate.",
        lambda live: live.gain,
    ),
}


def live_families() -> list[GaugeMetricFamily]:
    return [GaugeMetricFamily(name, text, labels=LABELS) for name, (text, _) in LIVE_GAUGES.items()]


def add_live_metrics(
    families: Sequence[GaugeMetricFamily], labels: Sequence[str], path: Path
) -> None:
    """Add the metrics of one engine, if it has written any within the last minute."""
    live = read_live_metrics(path)
    if live is None:
        return
    for family, (_, value_of) in zip(families, LIVE_GAUGES.values(), strict=True):
        value = value_of(live)
        if value is not None:
            family.add_metric(labels, value)


def capture_families() -> tuple[CounterMetricFamily, CounterMetricFamily]:
    """Captured requests and dropped requests."""
    kept = "Requests written to the captured traffic."
    dropped = "Requests missing from the captured traffic: full queue, disk error or redaction."
    by_reason = (*LABELS, "reason")
    return (
        CounterMetricFamily("leadout:captured_requests", kept, labels=LABELS),
        CounterMetricFamily("leadout:capture_dropped_requests", dropped, labels=by_reason),
    )


def add_capture_counters(
    families: Sequence[CounterMetricFamily], labels: Sequence[str], path: Path
) -> None:
    """Add the counters of one engine, if it captures."""
    counters = read_small(path, CaptureCounters)
    if counters is None:
        return
    captured, dropped = families
    captured.add_metric(labels, counters.captured)
    for reason in ("too_slow", "disk", "redacted"):
        dropped.add_metric([*labels, reason], getattr(counters, reason))


def learn_families() -> tuple[CounterMetricFamily, CounterMetricFamily]:
    """Requests in the ring, and steps that are missing from it."""
    written = "Requests written to the ring of `--learn-states`."
    dropped = "Steps of requests, or requests, missing from the ring: copy too slow, or too large."
    return (
        CounterMetricFamily("leadout:learn_requests", written, labels=LABELS),
        CounterMetricFamily("leadout:learn_dropped", dropped, labels=(*LABELS, "reason")),
    )


def add_learn_counters(
    families: Sequence[CounterMetricFamily], labels: Sequence[str], texts: Path, states: Path
) -> None:
    """Add the counters of one engine, if it is learnt from: the scheduler's and the worker's."""
    of_texts, of_states = read_small(texts, TextCounters), read_small(states, StatesCounters)
    if of_texts is None and of_states is None:
        return
    of_texts, of_states = of_texts or TextCounters(), of_states or StatesCounters()
    written, dropped = families
    written.add_metric(labels, of_texts.written)
    dropped.add_metric([*labels, "too_slow"], of_states.too_slow)
    dropped.add_metric([*labels, "too_large"], of_states.too_large + of_texts.too_large)


# The instance in Prometheus' registry. A second engine in one process replaces the first, as in
# vLLM's own metrics.
_registered: AcceptanceWatch | None = None


class AcceptanceWatch(AggregateStatLoggerBase):  # type: ignore[misc]
    """vLLM's stat logger for all engines of one API server, and the collector of their metrics."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._is_active = False
        self._fail_safe = FailSafe("metrics", on_failure=self._stop)
        # vLLM records on the event loop and answers scrapes on other threads.
        self._lock = Lock()
        self._engines = engine_indexes
        self._windows: dict[int, AcceptanceWindow] = defaultdict(AcceptanceWindow)
        # All engines run the same drafter, so the warning is about their sum.
        self._all_engines = AcceptanceWindow()
        with self._fail_safe:
            if _is_wanted(vllm_config):
                self._start(vllm_config)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,  # other versions of vLLM may pass more
    ) -> None:
        if not self._is_active or not self._has_drafter:
            return
        with self._fail_safe:
            if scheduler_stats is not None and scheduler_stats.spec_decoding_stats is not None:
                self._add(scheduler_stats.spec_decoding_stats, engine_idx)

    def log_engine_initialized(self) -> None:
        """Required by vLLM; nothing to log."""

    def describe(self) -> Iterable[Metric]:
        """The names, which the registry cannot learn from a scrape without drafts."""
        return [
            *acceptance_families(),
            request_family(),
            *live_families(),
            *capture_families(),
            *learn_families(),
        ]

    def collect(self) -> Iterable[Metric]:
        if self._is_active:
            with self._fail_safe:
                return self._metrics()
        return []

    def _start(self, vllm_config: Any) -> None:
        global _registered
        target, speculation = vllm_config.model_config.model, vllm_config.speculative_config
        drafter = None if speculation is None else speculation.model
        self._has_drafter = is_dflash(vllm_config)
        self._model_name = str(vllm_config.model_config.served_model_name)
        self._instance = vllm_config.instance_id
        self._warning = BreakEvenWarning.from_environment(
            os.environ,
            remedy=f"run `leadout check {target} {drafter}`, or serve without the drafter",
        )
        _warn_of_sampling(vllm_config)
        if _registered is not None:
            REGISTRY.unregister(_registered)
            _registered = None
        REGISTRY.register(self)
        _registered = self
        self._is_active = True

    def _stop(self) -> None:
        self._is_active = False

    def _add(self, stats: Any, engine_idx: int) -> None:
        now = monotonic()
        with self._lock:
            for window in (self._windows[engine_idx], self._all_engines):
                window.add_drafts(
                    now,
                    stats.num_drafts,
                    stats.num_draft_tokens,
                    stats.num_accepted_tokens,
                    stats.num_accepted_tokens_per_pos,
                )
            warning = self._warning.observe(now, self._all_engines)
        if warning is not None:
            logger.warning("%s", warning)

    def _metrics(self) -> list[Metric]:
        now = monotonic()
        length, rate = acceptance_families()
        requests = request_family()
        live, capture, learn = live_families(), capture_families(), learn_families()
        with self._lock:
            for engine, window in self._windows.items():
                labels = [self._model_name, str(engine)]
                acceptance_length = window.acceptance_length(now)
                if acceptance_length is not None:
                    length.add_metric(labels, acceptance_length)
                for position, fraction in enumerate(window.acceptance_per_position(now)):
                    rate.add_metric([*labels, str(position)], fraction)
            for engine in self._engines:
                labels = [self._model_name, str(engine)]
                add_request_acceptance(
                    requests, labels, request_acceptance_file(self._instance, engine)
                )
                add_live_metrics(live, labels, live_metrics_file(self._instance, engine))
                add_capture_counters(capture, labels, small_file(CAPTURE, self._instance, engine))
                add_learn_counters(
                    learn,
                    labels,
                    small_file(LEARN, self._instance, engine),
                    small_file(LEARN_STATES, self._instance, engine),
                )
        optional = (requests, *live, *capture, *learn)
        return [length, rate, *(family for family in optional if family.samples)]


def _warn_of_sampling(vllm_config: Any) -> None:
    """Under stock `vllm serve`, say how to avoid faults of vLLM that end servers on CPUs."""
    scheduling = getattr(vllm_config, "scheduler_config", None)
    if scheduling is None or not current_platform.is_cpu() or scheduling.scheduler_cls == SCHEDULER:
        return
    faults = ["top_k but no top_p"] if is_dflash(vllm_config) else []
    if scheduling.enable_chunked_prefill:
        faults.append("a seed, if its prompt is computed in parts")
    if faults:
        logger.warning(
            "On CPUs, vLLM 0.32 ends when it samples for a request with %s. Start the server with "
            "--scheduler-cls %s, or with `leadout serve`, which does so.",
            ", or with ".join(faults),
            SCHEDULER,
        )


def _is_wanted(vllm_config: Any) -> bool:
    if os.environ.get(SWITCH) == "0" or not is_supported(vllm.__version__):
        return False
    is_needed = is_dflash(vllm_config) or CAPTURE in sections_of(vllm_config)
    return is_needed and is_usable(METRICS)
