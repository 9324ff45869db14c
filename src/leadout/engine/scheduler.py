"""No drafts in a step with a sampled request, on CPUs.

Where drafts are verified beside a sampled request, vLLM 0.32 spreads the requests' temperatures
over the tokens of the step. Its CPU kernel for that writes whole numbers into a copy, so that the
temperatures it then divides by are whatever lay in memory: sampled text comes from a wrong
distribution, and greedy text in the same step may change too. Steps without drafts are not touched
by this. A test tells when vLLM has mended it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from leadout.control.policy import Policy
from leadout.control.tuned_file import read_tuned
from leadout.engine.capture import CaptureMixin
from leadout.engine.live import LiveControl, Step, numbers_file
from leadout.engine.plugin import SWITCH
from leadout.engine.rollout import Newcomers
from leadout.engine.settings import (
    CAPTURE,
    LIVE,
    REGISTRY,
    LiveSettings,
    read_section,
    sections_of,
)
from leadout.engine.vllm_adapter import is_dflash, is_supported


class SoundDrafts(Scheduler):  # type: ignore[misc]
    """Stands right before vLLM's class, so that it has the last word on drafts."""

    _has_sampled = False

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        # Waiting requests too: one of them may join this step.
        self._has_sampled = any(_is_sampled(request) for request in self.requests.values())
        if self._has_sampled:
            for request in self.running:
                request.spec_token_ids = []
        return super().schedule(*arguments, **settings)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Called by vLLM within `schedule`: what is not verified need not be drafted.
        if self._has_sampled:
            scheduler_output.num_spec_tokens_to_schedule = 0
        super()._update_after_schedule(scheduler_output)


def _is_sampled(request: Any) -> bool:
    parameters = request.sampling_params
    return parameters is not None and parameters.temperature > 0


# A scheduler that drafts as it is told and notes what every step did.
#
# vLLM takes it by name (`scheduler_cls`). It is made for scheduling in step with the model
# (`async_scheduling=False`): each step is over before the next is planned.

NAME = f"{__name__}.CalibrationScheduler"


@dataclass(slots=True)
class StepNote:
    """One step: prompt tokens read, drafts made for each request, and those that stood."""

    prompt_tokens: int = 0
    drafted: int = 0  # for the next step, for each request
    verified: dict[str, int] = field(default_factory=dict)  # of each request that decodes
    tokens: dict[str, int] = field(default_factory=dict)  # that it gained


class CalibrationScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's own scheduler; how much is drafted comes from `drafts`, one number a step."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.drafts: Iterator[int] = repeat(self.num_spec_tokens)
        self.note: StepNote | None = None

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        output = super().schedule(*arguments, **settings)
        if self.num_spec_tokens and output.total_num_scheduled_tokens:
            output.num_spec_tokens_to_schedule = next(self.drafts)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.note = self._note_of(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _note_of(self, planned: Any, done: Any) -> StepNote:
        note = StepNote(drafted=planned.num_spec_tokens_to_schedule if self.num_spec_tokens else 0)
        for request_id, scheduled in planned.num_scheduled_tokens.items():
            if self.requests[request_id].num_output_tokens == 0:
                note.prompt_tokens += scheduled
                continue
            sampled = done.sampled_token_ids[done.req_id_to_index[request_id]]
            note.verified[request_id] = len(
                planned.scheduled_spec_decode_tokens.get(request_id, ())
            )
            note.tokens[request_id] = len(sampled)
        return note


# vLLM's scheduler with live control: it verifies and drafts what the policy finds worth it.
#
# vLLM calls `make_scheduler` (`scheduler_cls`) where it would make its own scheduler. What comes
# before vLLM's own class, or Leadout's with live control, follows from the sections of the
# settings,
# what comes between them from the machine (`sound_drafts`); without any, it is vLLM's own. An error
# in live control costs one log line; from then on the scheduler does what vLLM's does.
#
# When scheduling runs ahead of the model (`async_scheduling`), and always under the V2 runner, the
# scheduler sees placeholders in the place of drafts: their number can be chosen, but not what they
# are. Copied drafts are therefore for synchronous scheduling on the V1 runner only.

logger = init_logger("vllm.leadout")

MOST_UNDER_WAY = 64  # outputs that never come back must not pile up


def make_scheduler(vllm_config: Any, **settings: Any) -> Any:
    """The scheduler for this engine; vLLM passes everything by name."""
    return _scheduler_class(vllm_config)(vllm_config=vllm_config, **settings)


def _scheduler_class(vllm_config: Any) -> type[Any]:
    sections = sections_of(vllm_config)
    is_async = vllm_config.scheduler_config.async_scheduling
    base: type[Any] = AsyncScheduler if is_async else Scheduler
    if os.environ.get(SWITCH) == "0" or not is_supported(vllm.__version__):
        return base
    if LIVE in sections and _can_be_live(vllm_config):
        base = LiveAsyncScheduler if is_async else LiveScheduler
    before: list[type[Any]] = []
    if CAPTURE in sections:
        before.append(CaptureMixin)
    if REGISTRY in sections:
        before.append(Newcomers)
    if current_platform.is_cpu() and is_dflash(vllm_config):
        base = SoundDrafts if base is Scheduler else type(base.__name__, (base, SoundDrafts), {})
    # Each calls the next; a class of its own only for what was asked for.
    return type(f"Leadout{base.__name__}", (*before, base), {}) if before else base


def make_control(vllm_config: Any) -> LiveControl:
    """The policy of this engine, with what was measured before if there is such a file."""
    settings = read_section(vllm_config, LIVE, LiveSettings)
    most = vllm_config.num_speculative_tokens
    tuned = None if settings.tuned is None else read_tuned(settings.tuned)
    measured = () if tuned is None else (tuned.costs(), tuned.curve())
    policy = Policy(most, *measured)
    sees_drafts = not (
        vllm_config.scheduler_config.async_scheduling or vllm_config.use_v2_model_runner
    )
    engine = vllm_config.parallel_config.data_parallel_rank
    return LiveControl(
        policy,
        most,
        numbers_file(vllm_config.instance_id, engine),
        lambda line: logger.info("%s", line),
        copy_match=settings.prompt_lookup_min_match if sees_drafts else 0,
    )


class LiveScheduler(Scheduler):  # type: ignore[misc]
    """In step with the model: asks live control before each step, tells it what came of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._control: LiveControl | None = None
        self._planned: Step | None = None
        self._under_way: deque[tuple[Any, Step]] = deque(maxlen=MOST_UNDER_WAY)
        try:
            self._control = make_control(settings["vllm_config"])
        except Exception as error:
            self._give_up(error)

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        self._planned = self._plan()
        output = super().schedule(*arguments, **settings)
        if self._planned is not None and output.total_num_scheduled_tokens:
            self._under_way.append((output, self._planned))
        self._planned = None
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Called by vLLM within `schedule`; ahead of the model it plants as many placeholders.
        if self._planned is not None:
            scheduler_output.num_spec_tokens_to_schedule = self._planned.decision.draft
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._hear(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: Any, *arguments: Any, **settings: Any) -> Any:
        if self._control is not None:
            try:
                self._control.forget(request.request_id)
            except Exception as error:
                self._give_up(error)
        return super()._free_request(request, *arguments, **settings)

    def shutdown(self) -> None:
        if self._control is not None:
            with suppress(OSError):
                self._control.close()
        super().shutdown()

    def _plan(self) -> Step | None:
        if self._control is None:
            return None
        try:
            requests = [request for request in self.running if not request.is_prefill_chunk]
            step, chosen = self._control.plan(requests)
            for request, drafts in zip(requests, chosen, strict=True):
                if drafts.are_copied:
                    # As vLLM does with drafts that arrive: none that a grammar forbids.
                    request.spec_token_ids = self.structured_output_manager.validate_tokens(
                        request, drafts.tokens
                    )
                elif len(drafts.tokens) < len(request.spec_token_ids):
                    request.spec_token_ids = drafts.tokens
            return step
        except Exception as error:
            self._give_up(error)
            return None

    def _hear(self, planned: Any, done: Any) -> None:
        step = self._step_of(planned)
        if self._control is None or step is None:
            return
        try:
            sampled = done.sampled_token_ids
            gained = {
                request: len(sampled[place]) if sampled else 0
                for request, place in done.req_id_to_index.items()
            }
            drafts = planned.scheduled_spec_decode_tokens
            verified = {request: len(tokens) for request, tokens in drafts.items()}
            for request, invalid in (planned.num_invalid_spec_tokens or {}).items():
                verified[request] -= invalid
            # Else its time tells nothing: it did other work, or was not let draft as decided.
            is_pure = (
                set(planned.num_scheduled_tokens) == set(step.requests)
                and planned.num_spec_tokens_to_schedule == step.decision.draft
            )
            self._control.done(step, verified, gained, is_pure=is_pure)
        except Exception as error:
            self._give_up(error)

    def _step_of(self, planned: Any) -> Step | None:
        """The step behind an output of `schedule`; none for one in which nothing was to do."""
        for place, (output, step) in enumerate(self._under_way):
            if output is planned:
                del self._under_way[place]
                return step
        return None

    def _give_up(self, error: Exception) -> None:
        if self._control is not None:
            with suppress(OSError):
                self._control.close()
        self._control = None
        logger.error(
            "Leadout's live control is off from here on: %s: %s. Serving goes on with vLLM's own "
            "scheduling; %s=0 leaves vLLM without Leadout.",
            type(error).__name__,
            error,
            SWITCH,
        )


class LiveAsyncScheduler(LiveScheduler, AsyncScheduler):  # type: ignore[misc]
    """A step ahead of the model."""


def _can_be_live(vllm_config: Any) -> bool:
    if not is_dflash(vllm_config):
        return False
    replicas = vllm_config.parallel_config.data_parallel_size
    if replicas > 1:
        # Replicas may have to draft in step with each other; vLLM's own table is off there too.
        logger.warning(
            "Leadout's live control does nothing here: found data_parallel_size %d, wanted 1. "
            "Start one server for each replica.",
            replicas,
        )
    return bool(replicas == 1)
