"""What the scheduler of a measured server drafts and records."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine.child_process import EngineError
from leadout.engine.settings import (
    CALIBRATION,
    CalibrationSettings,
    EngineSettingsError,
    with_section,
)
from leadout.engine.step_records import (
    NO_ROUND,
    RecordedSteps,
    RoundTag,
    StepRecordingMixin,
    round_option,
    tag_of,
)

MAX_DRAFTS = 3


class StandInScheduler:
    """Stands for vLLM's: schedules all its requests, which then gain what the test says."""

    def __init__(self, vllm_config: Any) -> None:
        self.num_spec_tokens = MAX_DRAFTS if vllm_config.has_drafter else 0
        self.requests: dict[str, Any] = {}
        self.drafts = 0  # of each request, from the step before

    @property
    def running(self) -> list[Any]:
        return list(self.requests.values())

    def add(self, name: str, tag: RoundTag | None, prompt: int = 5) -> None:
        options = None if tag is None else round_option(tag)
        self.requests[name] = SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args=options), num_output_tokens=0, prompt=prompt
        )

    def schedule(self) -> Any:
        tokens, drafts = {}, {}
        for name, request in self.requests.items():
            if request.num_output_tokens == 0:
                tokens[name] = request.prompt
                continue
            tokens[name] = 1 + self.drafts
            if self.drafts:
                drafts[name] = [-1] * self.drafts
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(tokens.values()),
            num_spec_tokens_to_schedule=self.num_spec_tokens,
        )
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if scheduler_output.total_num_scheduled_tokens:
            self.drafts = scheduler_output.num_spec_tokens_to_schedule

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        for name, index in model_runner_output.req_id_to_index.items():
            if name in self.requests:
                new = model_runner_output.sampled_token_ids[index]
                self.requests[name].num_output_tokens += len(new)
        return "outputs"


class Recording(StepRecordingMixin, StandInScheduler):
    """As `make_scheduler` puts it together."""

    requests: dict[str, Any]  # type: ignore[assignment]


def config_of(folder: Path, *, has_drafter: bool = True, batch: int = 2) -> Any:
    settings = CalibrationSettings(folder=folder, max_batch=batch)
    return SimpleNamespace(
        has_drafter=has_drafter,
        additional_config=with_section({}, CALIBRATION, settings),
        use_v2_model_runner=False,
        model_config=SimpleNamespace(dtype="torch.float32", quantization=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def output_of(scheduled: Any, tokens: int) -> Any:
    names = list(scheduled.num_scheduled_tokens)
    return SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[1] * tokens for _ in names],
    )


def run_step(scheduler: Recording, tokens: int = 1) -> None:
    scheduled = scheduler.schedule()
    assert scheduler.update_from_output(scheduled, output_of(scheduled, tokens)) == "outputs"


@pytest.fixture
def scheduler(tmp_path: Path) -> Recording:
    return Recording(vllm_config=config_of(tmp_path))


def test_steps_draft_the_k_of_their_round_and_every_fifth_none(
    scheduler: Recording, tmp_path: Path
) -> None:
    for place in range(2):
        scheduler.add(f"r{place}", RoundTag(4, place, 2))
    for _ in range(7):
        run_step(scheduler, tokens=2)
    first, *steps = RecordedSteps(tmp_path).new()
    assert (first.round, first.prompt_tokens, first.decoded) == (4, 10, [])
    assert [step.drafted for step in (first, *steps)] == [2, 2, 2, 2, 0, 2, 2]
    assert [step.decoded for step in steps] == [
        [(0, verified, 2), (1, verified, 2)] for verified in (2, 2, 2, 2, 0, 2)
    ]
    assert all(step.prompt_tokens == 0 for step in steps)


def test_the_next_round_starts_with_its_own_k(scheduler: Recording, tmp_path: Path) -> None:
    scheduler.add("old", RoundTag(0, 0, 3))
    run_step(scheduler)
    scheduler.add("new", RoundTag(1, 0, 1))  # the other is not aborted yet
    run_step(scheduler)
    del scheduler.requests["old"]
    run_step(scheduler)
    old, both, new = RecordedSteps(tmp_path).new()
    assert (old.round, old.drafted) == (0, 3)
    assert (both.round, both.drafted) == (NO_ROUND, 1)
    assert (new.round, new.drafted) == (1, 1)


def test_without_a_drafter_nothing_is_drafted(tmp_path: Path) -> None:
    scheduler = Recording(vllm_config=config_of(tmp_path, has_drafter=False))
    scheduler.add("a", RoundTag(0, 0, 2))
    run_step(scheduler)
    run_step(scheduler)
    _, step = RecordedSteps(tmp_path).new()
    assert (step.drafted, step.decoded) == (0, [(0, 0, 1)])


def test_a_request_of_no_round_is_not_counted(scheduler: Recording, tmp_path: Path) -> None:
    scheduler.add("other", None)
    assert tag_of(scheduler.requests["other"]) is None
    run_step(scheduler)
    assert RecordedSteps(tmp_path).new()[0].round == NO_ROUND
    assert scheduler.drafts == MAX_DRAFTS  # as the server's settings say


def test_an_aborted_request_spoils_its_step_only(scheduler: Recording, tmp_path: Path) -> None:
    scheduler.add("a", RoundTag(0, 0, 1))
    scheduler.add("b", RoundTag(0, 1, 1))
    scheduled = scheduler.schedule()
    del scheduler.requests["b"]  # between a step and its output
    scheduler.update_from_output(scheduled, output_of(scheduled, 1))
    run_step(scheduler)
    spoilt, whole = RecordedSteps(tmp_path).new()
    assert (spoilt.round, whole.round) == (NO_ROUND, 0)


def test_a_step_that_spans_a_stop_has_no_seconds(scheduler: Recording, tmp_path: Path) -> None:
    scheduler.add("a", RoundTag(0, 0, 1))
    scheduled = scheduler.schedule()
    os.kill(os.getpid(), signal.SIGCONT)
    scheduler.update_from_output(scheduled, output_of(scheduled, 1))
    run_step(scheduler)
    stopped, step = RecordedSteps(tmp_path).new()
    assert stopped.seconds is None
    assert step.seconds is not None


def test_the_reader_gets_each_step_once_and_keeps_the_file_small(
    scheduler: Recording, tmp_path: Path
) -> None:
    scheduler.add("a", RoundTag(0, 0, 1))
    reader = RecordedSteps(tmp_path)
    run_step(scheduler)
    run_step(scheduler)
    assert len(reader.new()) == 2
    run_step(scheduler)
    assert len(reader.new()) == 1
    reader.clear()
    assert reader.new() == []
    assert (tmp_path / "steps.jsonl").stat().st_size == 0
    run_step(scheduler)
    assert len(reader.new()) == 1


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    reader, file = RecordedSteps(tmp_path), tmp_path / "steps.jsonl"
    line = '{"round":0,"seconds":0.5,"prompt_tokens":0,"drafted":1,"decoded":[[0,1,2]]}\n'
    file.write_text(line + line[:20])
    assert len(reader.new()) == 1
    file.write_text(line + line)
    assert len(reader.new()) == 1


def test_the_server_says_what_it_was_started_with(scheduler: Recording, tmp_path: Path) -> None:
    facts = RecordedSteps(tmp_path).facts()
    assert (facts.runner, facts.dtype) == ("V1", "float32")
    assert facts.config.async_scheduling
    assert facts.config.cuda_graphs == "FULL"
    assert facts.config.tensor_parallel_size == 2


def test_a_server_without_records_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="does not record its steps"):
        RecordedSteps(tmp_path).facts()


def test_a_section_without_a_folder_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.additional_config = {"leadout": {CALIBRATION: {"max_batch": 2}}}
    with pytest.raises(EngineSettingsError, match=r"leadout\.calibration\.folder"):
        Recording(vllm_config=config)
