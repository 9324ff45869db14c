"""Acceptance of the last minute in `/metrics`, and one plain warning when drafts do not pay.

vLLM's API server makes one `AcceptanceWatch` (entry point group `vllm.stat_logger_plugins`) beside
its own loggers. It watches DFlash servers and those that capture, and none with LEADOUT_PLUGIN=0.

`leadout:acceptance_length` and `leadout:acceptance_rate{position}` are computed when they are
scraped, and absent when the last minute had no drafts. With live control its gauges stand beside
them (`live_gauges`), and with capture its counters, with or without a drafter.

With several API servers (Prometheus' multiprocess mode) `/metrics` shows no gauges, only vLLM's
counters: each API server sees a share of the steps, and warns by its share.

Having any such plugin installed makes vLLM keep statistics even under --disable-log-stats;
VLLM_PLUGINS without `leadout` avoids that.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from threading import Lock
from time import monotonic
from typing import Any

import vllm
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from leadout.engine import capture_counters, live_gauges
from leadout.engine.acceptance_window import AcceptanceWindow, BelowBreakEven
from leadout.engine.live_numbers import numbers_file
from leadout.engine.plugin import SWITCH
from leadout.engine.sections import CAPTURE, sections_of
from leadout.engine.small_files import small_file
from leadout.engine.support import is_dflash, is_supported

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
        return [*_new_gauges(), *live_gauges.families(), *capture_counters.families()]

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
        live, captured = live_gauges.families(), capture_counters.families()
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
                live_gauges.fill(live, labels, numbers_file(self._instance, engine))
                capture_counters.fill(captured, labels, small_file(CAPTURE, self._instance, engine))
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
