"""What each step of a server did, recorded by its scheduler while `leadout tune` loads it.

A server whose `additional_config` has the section `calibration` gets `StepRecordingMixin` in its
scheduler. Requests name the round that they belong to and the K of that round (`round_option`), so
that K is set without a second channel. Each step becomes a line in a file, which `RecordedSteps`
reads. Nothing else of the server is changed: scheduling ahead, graphs and prefix caching are those
of its flags. Importing this needs no vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from leadout.control.tuned_file import ServerConfig
from leadout.engine.child_process import EngineError, Message
from leadout.engine.counters import read_small, write_small
from leadout.engine.settings import CALIBRATION, CalibrationSettings, read_section
from leadout.engine.step_clock import Moment, StepClock, StepsInFlight
from leadout.files import first_problem, opened

ROUND_OPTION = "leadout_round"  # in a request's `vllm_xargs`
DRAFTING_IN_A_ROW = 4
NO_ROUND = -1
_STEPS, _SERVER = "steps.jsonl", "server.json"
_MAX_BYTES = 64 << 20  # of steps that are read at once; a round has far fewer


class RoundTag(NamedTuple):
    """The round of a request, its place in the batch, and how many tokens that round drafts."""

    round: int
    place: int
    k: int


def round_option(tag: RoundTag) -> dict[str, list[int]]:
    """The `vllm_xargs` of a request of a round."""
    return {ROUND_OPTION: list(tag)}


def tag_of(request: Any) -> RoundTag | None:
    """The tag of a vLLM request; None for one that belongs to no round."""
    parameters = request.sampling_params
    found = ((parameters and parameters.extra_args) or {}).get(ROUND_OPTION)
    return None if found is None else RoundTag(*found)


def draft_lengths(k: int) -> Iterator[int]:
    """Drafts of each step: four steps with `k`, then one with none.

    The step without drafts separates the cost of verifying from that of drafting.
    """
    return cycle([*repeat(k, DRAFTING_IN_A_ROW), 0])


class StepRecord(Message):
    """What one step did."""

    round: int  # of all its requests; NO_ROUND if they belong to several or to none
    seconds: float | None  # None: the process was stopped meanwhile
    prompt_tokens: int
    drafted: int  # for the next step, for each request
    decoded: list[tuple[int, int, int]]  # of each request: place, drafts verified, new tokens


class ServerFacts(Message):
    """What the server's engine was started with, as vLLM resolved it."""

    runner: Literal["V1", "V2"]
    dtype: str
    config: ServerConfig


def server_facts(vllm_config: Any) -> ServerFacts:
    from leadout.engine.vllm_adapter import model_runner

    return ServerFacts(
        runner=model_runner(vllm_config),
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        config=server_config(vllm_config),
    )


def server_config(vllm_config: Any) -> ServerConfig:
    """What changes the cost of a step, besides the models, their precision and the runner."""
    from leadout.engine.vllm_adapter import device_name

    parallel = vllm_config.parallel_config
    quantization = vllm_config.model_config.quantization
    return ServerConfig(
        async_scheduling=bool(vllm_config.scheduler_config.async_scheduling),
        cuda_graphs=vllm_config.compilation_config.cudagraph_mode.name,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        quantization=None if quantization is None else str(quantization),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        device=device_name(),
    )


class StepRecordingMixin:
    """Put before a scheduler class of vLLM: drafts the K of the round and records each step.

    An error in it ends the server: a measurement with gaps would be worth nothing.
    """

    num_spec_tokens: int
    requests: Mapping[str, Any]
    running: list[Any]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        config = settings["vllm_config"]
        folder = read_section(config, CALIBRATION, CalibrationSettings).folder
        self._clock = StepClock()
        self._recorded_in_flight: StepsInFlight[Moment] = StepsInFlight()
        self._round = NO_ROUND
        self._lengths: Iterator[int] = repeat(self.num_spec_tokens)
        # The reader shortens the file, so every line goes to wherever it ends now.
        self._file = os.open(folder / _STEPS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        write_small(server_facts(config), folder / _SERVER)

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        scheduled = self._clock.start()
        output = super().schedule(*arguments, **settings)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            self._recorded_in_flight.add(output, scheduled)
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Called by vLLM within `schedule`; with async scheduling it adds as many placeholders.
        if self.num_spec_tokens and scheduler_output.total_num_scheduled_tokens:
            scheduler_output.num_spec_tokens_to_schedule = self._next_length()
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        scheduled = self._recorded_in_flight.take(scheduler_output)
        if scheduled is not None:
            seconds = self._clock.end(scheduled)
            record = self._record(scheduler_output, model_runner_output, seconds)
            os.write(self._file, record.model_dump_json().encode() + b"\n")
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )

    def _next_length(self) -> int:
        # The newest request: those of the round before may not be aborted yet.
        tag = tag_of(self.running[-1]) if self.running else None
        if tag is not None and tag.round != self._round:
            self._round, self._lengths = tag.round, draft_lengths(tag.k)
        return next(self._lengths)

    def _record(self, scheduled: Any, output: Any, seconds: float | None) -> StepRecord:
        prompt_tokens, decoded, rounds = 0, [], set()
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)  # None: aborted in the meantime
            tag = None if request is None else tag_of(request)
            rounds.add(NO_ROUND if tag is None else tag.round)
            if request is None or tag is None:
                continue
            verified = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            if request.num_output_tokens == 0 or count != 1 + verified:
                prompt_tokens += count
                continue
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            decoded.append((tag.place, verified, len(sampled)))
        return StepRecord(
            round=rounds.pop() if len(rounds) == 1 else NO_ROUND,
            seconds=seconds,
            prompt_tokens=prompt_tokens,
            drafted=scheduled.num_spec_tokens_to_schedule if self.num_spec_tokens else 0,
            decoded=decoded,
        )


class RecordedSteps:
    """The reader's side of the folder into which a server records."""

    def __init__(self, folder: Path) -> None:
        self._path, self._folder = folder / _STEPS, folder
        self._read = 0  # bytes

    def facts(self) -> ServerFacts:
        """Of a healthy server."""
        found = read_small(self._folder / _SERVER, ServerFacts)
        if found is None:
            raise EngineError(
                "The server does not record its steps. Unset LEADOUT_PLUGIN if it is 0; otherwise "
                "see the server's log for the reason."
            )
        return found

    def new(self) -> list[StepRecord]:
        """The steps since the last call."""
        with opened(self._path) as file:
            file.seek(self._read)
            content = file.read(_MAX_BYTES)
        complete = content[: content.rfind(b"\n") + 1]
        self._read += len(complete)
        try:
            return [StepRecord.model_validate_json(line) for line in complete.splitlines()]
        except ValidationError as problem:
            raise EngineError(
                f"{self._path} has a line that no server wrote ({first_problem(problem, 'line')}). "
                "Is another program writing there? Run the command again."
            ) from None

    def clear(self) -> None:
        """Forget all steps up to now, so that the file stays as small as one round's."""
        os.truncate(self._path, 0)
        self._read = 0
