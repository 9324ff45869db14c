"""A scheduler that drafts as it is told and notes what every step did.

vLLM takes it by name (`scheduler_cls`). It is made for scheduling in step with the model
(`async_scheduling=False`): each step is over before the next is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

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
