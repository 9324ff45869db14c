"""Schedulers: vLLM's own, extended by live control and by a workaround for sampling on CPUs.

vLLM calls `make_scheduler` (`scheduler_cls`) where it would construct its own scheduler. The class
is put together from what the server's settings ask for: capture, registry, live control, the
records of `leadout tune`, and on CPUs the sampling workaround. Without any of them it is vLLM's own
class. An error in live control costs one log line; from then on the scheduler does what vLLM's
does.

When scheduling runs ahead of the model (`async_scheduling`), and always under the V2 runner, the
scheduler sees placeholders instead of drafts: it can choose their number, but not their content.
Prompt lookup therefore needs synchronous scheduling on the V1 runner.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform

from leadout.control.policy import Policy
from leadout.control.tuned_file import read_tuned
from leadout.engine.capture import CaptureMixin
from leadout.engine.fail_safe import FailSafe
from leadout.engine.live import LiveControl, Step, StepReport, live_metrics_file
from leadout.engine.plugin import SWITCH
from leadout.engine.rollout import RolloutMixin
from leadout.engine.settings import (
    CALIBRATION,
    CAPTURE,
    LIVE,
    REGISTRY,
    LiveSettings,
    read_section,
    restore_draft_table,
    sections_of,
)
from leadout.engine.step_records import MAX_IN_FLIGHT, StepRecordingMixin
from leadout.engine.vllm_adapter import (
    CAPTURE_OF_TRAFFIC,
    LIVE_CONTROL,
    ROLLOUT,
    SAMPLING_WORKAROUND,
    STEP_RECORDS,
    AsyncScheduler,
    Scheduler,
    engine_index,
    is_dflash,
    is_supported,
    is_usable,
)

logger = init_logger("vllm.leadout")


def make_scheduler(vllm_config: Any, **settings: Any) -> Any:
    """The scheduler for this engine; vLLM passes everything by name."""
    restore_draft_table(vllm_config)
    return _scheduler_class(vllm_config)(vllm_config=vllm_config, **settings)


def _scheduler_class(vllm_config: Any) -> type[Any]:
    sections = sections_of(vllm_config)
    is_async = vllm_config.scheduler_config.async_scheduling
    base: type[Any] = AsyncScheduler if is_async else Scheduler
    if os.environ.get(SWITCH) == "0" or not is_supported(vllm.__version__):
        return base
    if LIVE in sections and _supports_live_control(vllm_config):
        base = LiveAsyncScheduler if is_async else LiveScheduler
    if current_platform.is_cpu() and is_dflash(vllm_config) and is_usable(SAMPLING_WORKAROUND):
        if base is Scheduler:
            base = CpuSamplingWorkaround
        else:
            base = type(base.__name__, (base, CpuSamplingWorkaround), {})
    features: dict[str, tuple[type[Any], str]] = {
        CAPTURE: (CaptureMixin, CAPTURE_OF_TRAFFIC),
        REGISTRY: (RolloutMixin, ROLLOUT),
        CALIBRATION: (StepRecordingMixin, STEP_RECORDS),
    }
    mixins = [
        mixin for name, (mixin, part) in features.items() if name in sections and is_usable(part)
    ]
    return type(f"Leadout{base.__name__}", (*mixins, base), {}) if mixins else base


def _supports_live_control(vllm_config: Any) -> bool:
    if not is_dflash(vllm_config) or not is_usable(LIVE_CONTROL):
        return False
    replicas = vllm_config.parallel_config.data_parallel_size
    if replicas > 1:
        # Only ranks of a mixture of experts get here: they may have to draft in step with each
        # other, and vLLM's own table is off there too.
        logger.warning(
            "Leadout's live control is off: data_parallel_size is %d, but with a mixture of "
            "experts it supports only 1. Start one server for each replica instead.",
            replicas,
        )
    return bool(replicas == 1)


class CpuSamplingWorkaround(Scheduler):  # type: ignore[misc]
    """Schedules no drafts in a step with a sampled request, on CPUs.

    To verify drafts of sampled requests, vLLM 0.32 expands the requests' temperatures to the tokens
    of the step. Its CPU kernel casts them to integers into a copy, so the logits are divided by
    uninitialised memory: sampled text comes from a wrong distribution, and greedy text in the same
    step may change too. Steps without drafts are not affected. A test fails once vLLM fixes it.

    Directly above vLLM's class in the method resolution order, so that it decides last.
    """

    _has_sampled = False

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        # Waiting requests count too: one of them may join this step.
        self._has_sampled = any(_is_sampled(request) for request in self.requests.values())
        if self._has_sampled:
            for request in self.running:
                request.spec_token_ids = []
        return super().schedule(*arguments, **settings)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Called by vLLM within `schedule`. Drafts that will not be verified need not be made.
        if self._has_sampled:
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)


def _is_sampled(request: Any) -> bool:
    parameters = request.sampling_params
    return parameters is not None and parameters.temperature > 0


def make_control(vllm_config: Any) -> LiveControl:
    """Live control of this engine, starting from a tuned file if the settings name one."""
    settings = read_section(vllm_config, LIVE, LiveSettings)
    max_drafts = vllm_config.num_speculative_tokens
    tuned = None if settings.tuned is None else read_tuned(settings.tuned)
    measured = () if tuned is None else (tuned.costs(), tuned.curve())
    is_async = vllm_config.scheduler_config.async_scheduling
    sees_drafts = not (is_async or vllm_config.use_v2_model_runner)
    return LiveControl(
        Policy(
            max_drafts,
            *measured,
            ladder=ladder_of(vllm_config),
            has_graphs=_has_uniform_graphs(vllm_config),
        ),
        max_drafts,
        live_metrics_file(vllm_config.instance_id, engine_index(vllm_config)),
        lambda line: logger.info("%s", line),
        min_match=settings.prompt_lookup_min_match if sees_drafts else 0,
    )


def ladder_of(vllm_config: Any) -> tuple[int, ...]:
    """The K to choose from: those for which vLLM captures full graphs, or all where any K is equal.

    It captures graphs for each K of its table, and without a table for the largest one only.
    """
    speculative, max_drafts = vllm_config.speculative_config, vllm_config.num_speculative_tokens
    table = speculative.num_speculative_tokens_per_batch_size
    if table:
        return tuple(sorted({0, max_drafts} | {min(k, max_drafts) for _, _, k in table}))
    return (0, max_drafts) if _has_uniform_graphs(vllm_config) else tuple(range(max_drafts + 1))


def _has_uniform_graphs(vllm_config: Any) -> bool:
    """Whether steps in which all requests have the same length are faster than others.

    With adaptive verification vLLM captures graphs for any mixture of lengths instead.
    """
    is_adaptive = vllm_config.speculative_config.enable_adaptive_verification
    return not is_adaptive and bool(
        vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    )


class LiveScheduler(Scheduler):  # type: ignore[misc]
    """Asks live control before each step, and reports to it what the step did."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._control: LiveControl | None = None
        self._fail_safe = FailSafe("live control", on_failure=self._close_control)
        self._planned: Step | None = None
        self._in_flight: deque[tuple[Any, Step]] = deque(maxlen=MAX_IN_FLIGHT)
        with self._fail_safe:
            self._control = make_control(settings["vllm_config"])

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        self._planned = self._plan()
        output = super().schedule(*arguments, **settings)
        if self._planned is not None and output.total_num_scheduled_tokens:
            self._in_flight.append((output, self._planned))
        self._planned = None
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Called by vLLM within `schedule`; with async scheduling it adds as many placeholders.
        if self._planned is not None:
            scheduler_output.num_spec_tokens_to_schedule = self._planned.decision.draft
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._observe(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        if self._control is not None:
            with self._fail_safe:
                self._control.forget(request.request_id)
        return super()._free_request(request, *arguments, **settings)

    def shutdown(self) -> None:
        with suppress(OSError):
            self._close_control()
        super().shutdown()

    def _plan(self) -> Step | None:
        if self._control is None:
            return None
        with self._fail_safe:
            requests = [request for request in self.running if not request.is_prefill_chunk]
            step, changed = self._control.plan(requests)
            validate = self.structured_output_manager.validate_tokens
            for request, tokens, from_lookup in changed:
                # As vLLM does with the drafter's drafts: none that a grammar forbids.
                request.spec_token_ids = validate(request, tokens) if from_lookup else tokens
            return step
        return None

    def _observe(self, scheduled: Any, output: Any) -> None:
        step = self._step_of(scheduled)
        if self._control is None or step is None:
            return
        with self._fail_safe:
            tokens = output.sampled_token_ids
            sampled = {
                request_id: len(tokens[index]) if tokens else 0
                for request_id, index in output.req_id_to_index.items()
            }
            drafts = scheduled.scheduled_spec_decode_tokens
            verified = {request_id: len(each) for request_id, each in drafts.items()}
            for request_id, invalid in (scheduled.num_invalid_spec_tokens or {}).items():
                verified[request_id] -= invalid
            self._control.step_done(
                step,
                StepReport(
                    scheduled=scheduled.num_scheduled_tokens,
                    verified=verified,
                    sampled=sampled,
                    drafted=scheduled.num_spec_tokens_to_schedule,
                ),
            )

    def _step_of(self, scheduled: Any) -> Step | None:
        """The step behind an output of `schedule`; None if it had nothing to do."""
        for index, (output, step) in enumerate(self._in_flight):
            if output is scheduled:
                del self._in_flight[index]
                return step
        return None

    def _close_control(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()


class LiveAsyncScheduler(LiveScheduler, AsyncScheduler):  # type: ignore[misc]
    """Live control with scheduling one step ahead of the model."""
