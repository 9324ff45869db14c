"""Schedulers: vLLM's own, extended by live control and by workarounds for faults in sampling.

vLLM calls `make_scheduler` (`scheduler_cls`) where it would construct its own scheduler. The class
is put together from what the server's settings ask for: capture, registry, live control, the
records of `leadout tune`; with a DFlash drafter, acceptance by request; and workarounds for faults
of vLLM, most of them on CPUs. Without any of them it is vLLM's own class.
An error in live control costs one log line; from then on the scheduler does what vLLM's does.

When scheduling runs ahead of the model (`async_scheduling`), and always under the V2 runner, the
scheduler sees placeholders instead of drafts: it can choose their number, but not their content.
Prompt lookup therefore needs synchronous scheduling on the V1 runner.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np
import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform

from leadout.control.policy import Policy
from leadout.control.tuned_file import read_tuned
from leadout.engine.capture import CaptureMixin
from leadout.engine.fail_safe import FailSafe
from leadout.engine.live import LiveControl, Step, StepReport, live_metrics_file
from leadout.engine.plugin import SWITCH
from leadout.engine.process_folders import note_shared_memory, private_folder
from leadout.engine.request_metrics import RequestMetricsMixin
from leadout.engine.served_requests import RolloutMixin
from leadout.engine.served_texts import LearnMixin
from leadout.engine.settings import (
    CALIBRATION,
    CAPTURE,
    LEARN,
    LIVE,
    REGISTRY,
    LiveSettings,
    read_section,
    restore_draft_table,
    sections_of,
)
from leadout.engine.step_clock import StepsInFlight
from leadout.engine.step_records import StepRecordingMixin
from leadout.engine.vllm_adapter import AsyncScheduler, Scheduler, engine_index, is_dflash
from leadout.engine.vllm_internals import (
    CAPTURE_OF_TRAFFIC,
    LABEL_WORKAROUND,
    LEARNING,
    LIVE_CONTROL,
    REQUEST_METRICS,
    ROLLOUT,
    SAMPLING_WORKAROUND,
    SEED_WORKAROUND,
    STEP_RECORDS,
    is_supported,
    is_usable,
)

logger = init_logger("vllm.leadout")

LARGEST_TOP_P = 1 - 2**-24  # below 1, in float32


def make_scheduler(vllm_config: Any, **settings: Any) -> Any:
    """The scheduler for this engine; vLLM passes everything by name."""
    restore_draft_table(vllm_config)
    with suppress(OSError):  # without the note, the memory stays if this engine is killed
        note_shared_memory(private_folder() / vllm_config.instance_id)
    kind = _scheduler_class(vllm_config)
    added: list[type[Any]] = []
    if _is_on() and current_platform.is_cpu() and is_usable(SEED_WORKAROUND):
        added.append(CpuSeedWorkaround)
    if _is_on() and is_dflash(vllm_config) and is_usable(REQUEST_METRICS):
        added.append(RequestMetricsMixin)
    if added:
        kind = type(kind.__name__, (*added, kind), {"__module__": __name__})
    return kind(vllm_config=vllm_config, **settings)


def _is_on() -> bool:
    return os.environ.get(SWITCH) != "0" and is_supported(vllm.__version__)


def _scheduler_class(vllm_config: Any) -> type[Any]:
    sections = sections_of(vllm_config)
    is_async = vllm_config.scheduler_config.async_scheduling
    base: type[Any] = AsyncScheduler if is_async else Scheduler
    if not _is_on():
        return base
    if LIVE in sections and _supports_live_control(vllm_config):
        base = LiveAsyncScheduler if is_async else LiveScheduler
    if workarounds := _workarounds_of_drafting(vllm_config):
        kinds = workarounds if base is Scheduler else [base, *workarounds]
        base = type(kinds[0].__name__, tuple(kinds), {})
    features: dict[str, tuple[type[Any], str]] = {
        CAPTURE: (CaptureMixin, CAPTURE_OF_TRAFFIC),
        LEARN: (LearnMixin, LEARNING),
        REGISTRY: (RolloutMixin, ROLLOUT),
        CALIBRATION: (StepRecordingMixin, STEP_RECORDS),
    }
    mixins = [
        mixin for name, (mixin, part) in features.items() if name in sections and is_usable(part)
    ]
    return type(f"Leadout{base.__name__}", (*mixins, base), {}) if mixins else base


def _workarounds_of_drafting(vllm_config: Any) -> list[type[StepsWithoutDrafts]]:
    if not is_dflash(vllm_config):
        return []
    found: list[type[StepsWithoutDrafts]] = []
    if current_platform.is_cpu() and is_usable(SAMPLING_WORKAROUND):
        found.append(CpuSamplingWorkaround)
    if not vllm_config.use_v2_model_runner and is_usable(LABEL_WORKAROUND):
        found.append(LabelLogprobsWorkaround)
    return found


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


class StepsWithoutDrafts(Scheduler):  # type: ignore[misc]
    """Schedules no drafts in a step that a request for which there must be none may join.

    Directly above vLLM's class in the method resolution order, so that it decides last.
    """

    num_spec_tokens: int
    _is_without_drafts = False

    def _excludes_drafts(self, request: Any) -> bool:
        return False

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        # Waiting requests count too: one of them may join this step.
        self._is_without_drafts = any(map(self._excludes_drafts, self.requests.values()))
        if not self._is_without_drafts:
            return super().schedule(*arguments, **settings)
        for request in self.running:
            request.spec_token_ids = []
        # vLLM pads new requests of one token with as many drafts, for the sake of CUDA graphs.
        max_drafts, self.num_spec_tokens = self.num_spec_tokens, 0
        try:
            return super().schedule(*arguments, **settings)
        finally:
            self.num_spec_tokens = max_drafts

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Called by vLLM within `schedule`. Drafts that will not be verified need not be made.
        if self._is_without_drafts:
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)


class CpuSamplingWorkaround(StepsWithoutDrafts):
    """Schedules no drafts in a step with a sampled request, on CPUs.

    To verify drafts of sampled requests, vLLM 0.32 expands the requests' temperatures to the tokens
    of the step. Its CPU kernel casts them to integers into a copy, so the logits are divided by
    uninitialised memory: sampled text comes from a wrong distribution, and greedy text in the same
    step may change too. Steps without drafts are not affected. A test fails once vLLM fixes it.

    In a step without drafts it still applies `top_k` to the logits of no tokens, and the worker
    dies of it if no request has a `top_p` (`k.max()` of nothing). Such requests therefore get the
    largest `top_p` below 1, with which vLLM takes another path to the same distribution.
    """

    def add_request(self, request: Any) -> None:
        if _has_top_k_alone(request):
            request.sampling_params = request.sampling_params.clone()
            request.sampling_params.top_p = LARGEST_TOP_P
        super().add_request(request)

    def _excludes_drafts(self, request: Any) -> bool:
        return _is_sampled(request) or super()._excludes_drafts(request)


def _is_sampled(request: Any) -> bool:
    parameters = request.sampling_params
    return parameters is not None and parameters.temperature > 0


def _has_top_k_alone(request: Any) -> bool:
    return _is_sampled(request) and (
        request.sampling_params.top_k > 0 and request.sampling_params.top_p >= 1
    )


class CpuSeedWorkaround:
    """Put before a scheduler class: ignores seeds where they could end the engine, on CPUs.

    After each part of a prompt but the last, vLLM 0.32 sets the random generator of a seeded
    request back (`Generator.set_offset`), as if it had sampled nothing. Generators on CPUs cannot
    be set back, and the engine dies of it. Without its seed, text is sampled from the same
    distribution, but is not the same the next time. Where no step can be too small for all prompts,
    or prompts are computed in one piece (`--no-enable-chunked-prefill`), seeds are kept.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        config = settings["vllm_config"]
        scheduling, speculation = config.scheduler_config, config.speculative_config
        draft_slots = 0 if speculation is None else speculation.max_num_new_slots_for_drafting
        budget = scheduling.max_num_batched_tokens
        budget = min(budget, scheduling.max_num_scheduled_tokens or budget)
        largest = scheduling.max_num_seqs * (config.model_config.max_model_len + draft_slots)
        # The threshold splits prompts even without chunked prefill.
        self._keeps_seeds = not scheduling.long_prefill_token_threshold and (
            not scheduling.enable_chunked_prefill or budget >= largest
        )

    def add_request(self, request: Any) -> None:
        if not self._keeps_seeds and _is_seeded(request):
            logger.warning_once(
                "Leadout ignores the seeds of sampled requests: on CPUs, vLLM 0.32 ends if the "
                "prompt of such a request is computed in parts. Start the server with "
                "--no-enable-chunked-prefill and without --long-prefill-token-threshold to keep "
                "seeds. With a drafter, it also needs --max-num-batched-tokens of at least the "
                "maximum length plus the number of draft tokens."
            )
            request.sampling_params = request.sampling_params.clone()
            request.sampling_params.seed = None
        super().add_request(request)  # type: ignore[misc]


def _is_seeded(request: Any) -> bool:
    return _is_sampled(request) and request.sampling_params.seed is not None


class LabelLogprobsWorkaround(StepsWithoutDrafts):
    """Log-probabilities of chosen tokens, on a server with a drafter.

    With a drafter, vLLM 0.32's V1 runner dies of a step in which a request names the tokens whose
    log-probabilities it wants (`logprob_token_ids`, also set by /generative_scoring) and any
    request wants some: the rejection sampler, which it uses in steps without drafts too, takes the
    few values of the chosen tokens for the logits of the whole vocabulary. If no request wants
    some, the chosen ones are missing from the answer. A test fails once vLLM fixes it.

    Here the worker is asked for those of all tokens, and the chosen ones are handed on. vLLM then
    sorts and copies the whole vocabulary for each row of the step. A step with such a request
    therefore has no drafts: one row for each request, not one more for each draft.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._vocab_size: int = settings["vllm_config"].model_config.get_vocab_size()
        self._chosen: dict[str, list[int]] = {}  # tokens, by request

    def add_request(self, request: Any) -> None:
        parameters = request.sampling_params
        if parameters is not None and parameters.logprob_token_ids is not None:
            self._chosen[request.request_id] = list(parameters.logprob_token_ids)
            request.sampling_params = parameters.clone()
            request.sampling_params.logprob_token_ids = None
            request.sampling_params.logprobs = self._vocab_size
        super().add_request(request)

    def _excludes_drafts(self, request: Any) -> bool:
        return request.request_id in self._chosen or super()._excludes_drafts(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._chosen and model_runner_output.logprobs is not None:
            model_runner_output.logprobs = self._with_chosen(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        self._chosen.pop(request.request_id, None)
        return super()._free_request(request, *arguments, **settings)

    def _with_chosen(self, output: Any) -> Any:
        """The log-probabilities of a step: the sampled token first, then chosen or likely ones."""
        found = output.logprobs
        tokens, values = found.logprob_token_ids.copy(), found.logprobs.copy()  # [rows, 1 + tokens]
        first_rows, width = found.cu_num_generated_tokens, 0
        for request_id, index in output.req_id_to_index.items():
            chosen, request = self._chosen.get(request_id), self.requests.get(request_id)
            if chosen is None:
                wanted = None if request is None else request.sampling_params.logprobs
                width = max(width, self._vocab_size if wanted == -1 else wanted or 0)
                continue
            width = max(width, len(chosen))
            first = index if first_rows is None else first_rows[index]
            for row in range(first, first + len(output.sampled_token_ids[index])):
                columns = 1 + np.argsort(tokens[row, 1:])[chosen]  # each token occurs once
                tokens[row, 1 : 1 + len(chosen)] = tokens[row, columns]
                values[row, 1 : 1 + len(chosen)] = values[row, columns]
        return found._replace(
            logprob_token_ids=tokens[:, : 1 + width], logprobs=values[:, : 1 + width]
        )


def make_control(vllm_config: Any) -> LiveControl:
    """Live control of this engine, starting from a tuned file if the settings name one."""
    settings = read_section(vllm_config, LIVE, LiveSettings)
    max_drafts = vllm_config.num_speculative_tokens
    tuned = None if settings.tuned is None else read_tuned(settings.tuned)
    measured = () if tuned is None else (tuned.costs(), tuned.curve())
    is_async = vllm_config.scheduler_config.async_scheduling
    # With drafts that are sampled, vLLM takes those of a lookup for samples of the drafter.
    is_greedy = vllm_config.speculative_config.draft_sample_method == "greedy"
    sees_drafts = is_greedy and not (is_async or vllm_config.use_v2_model_runner)
    ladder = ladder_of(vllm_config)
    return LiveControl(
        Policy(
            max_drafts,
            *measured,
            ladder=ladder,
            has_graphs=_has_uniform_graphs(vllm_config),
            capacity=[requests_in_step(vllm_config, k) for k in ladder],
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


def requests_in_step(vllm_config: Any, k: int) -> int:
    """How many requests that verify k drafts fit into a step.

    vLLM reserves slots for the drafts that a request gets next, as many as the largest K has.
    """
    scheduling = vllm_config.scheduler_config
    slots: int = vllm_config.speculative_config.max_num_new_slots_for_drafting
    tokens: int = scheduling.max_num_batched_tokens
    scheduled: int = scheduling.max_num_scheduled_tokens or tokens
    return max(1, min(tokens // (1 + k + slots), scheduled // (1 + k)))


def _has_uniform_graphs(vllm_config: Any) -> bool:
    """Whether steps in which all requests have the same length are faster than others."""
    return bool(vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs())


class LiveScheduler(Scheduler):  # type: ignore[misc]
    """Asks live control before each step, and reports to it what the step did."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._control: LiveControl | None = None
        self._fail_safe = FailSafe("live control", on_failure=self._close_control)
        self._planned: Step | None = None
        self._in_flight: StepsInFlight[Step] = StepsInFlight()
        with self._fail_safe:
            self._control = make_control(settings["vllm_config"])

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        self._planned = self._plan()
        output = super().schedule(*arguments, **settings)
        if self._planned is not None and output.total_num_scheduled_tokens:
            self._in_flight.add(output, self._planned)
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
        step = self._in_flight.take(scheduled)
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

    def _close_control(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()


class LiveAsyncScheduler(LiveScheduler, AsyncScheduler):  # type: ignore[misc]
    """Live control with scheduling one step ahead of the model."""
