"""No drafts in a step with a sampled request, on CPUs.

Where drafts are verified beside a sampled request, vLLM 0.32 spreads the requests' temperatures
over the tokens of the step. Its CPU kernel for that writes whole numbers into a copy, so that the
temperatures it then divides by are whatever lay in memory: sampled text comes from a wrong
distribution, and greedy text in the same step may change too. Steps without drafts are not touched
by this. A test tells when vLLM has mended it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


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
