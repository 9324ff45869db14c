"""Recording of drafts where a runner calls its drafter, through stand-ins of both runners."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from leadout.engine.inspection import (
    DraftStep,
    DraftStepRecorder,
    InspectionAndSwapExtension,
    InspectionExtension,
    read_steps,
    write_steps,
)

DRAFTS = torch.tensor([[31, 32, 33, 34]])


class FakeProposer:
    """Stands for the V1 runner's proposer: everything is passed by name."""

    def propose(self, **_: Any) -> Tensor:
        return DRAFTS


class FakeSpeculator:
    """Stands for the V2 runner's speculator: the first nine arguments are passed by position."""

    def propose(self, *_: Any, **__: Any) -> Tensor:
        return DRAFTS


STATES = torch.arange(24.0).reshape(6, 4)  # [tokens, taps * size]


def v1_call(rejected: int | None, drafts: int = 4) -> dict[str, Any]:
    return {
        "num_speculative_tokens": drafts,
        "target_token_ids": torch.arange(6),
        "target_positions": torch.arange(10, 16),
        "target_hidden_states": STATES,
        "next_token_ids": torch.tensor([7]),
        "token_indices_to_sample": None,
        "common_attn_metadata": None,
        "sampling_metadata": None,
        "num_rejected_tokens_gpu": None if rejected is None else torch.tensor([rejected]),
    }


def v2_arguments(rejected: int, sampled: int) -> tuple[Any, ...]:
    batch = SimpleNamespace(
        num_reqs=1,
        num_tokens=6,
        idx_mapping=torch.tensor([2]),
        positions=torch.arange(10, 18),  # padded
    )
    taps = [torch.cat([part, torch.zeros(2, 2)]) for part in STATES.split(2, dim=1)]
    last_sampled, next_prefill = torch.tensor([0, 0, 7]), torch.tensor([0, 0, 8])
    counts = torch.tensor([sampled]), torch.tensor([rejected])
    return (batch, {}, {}, taps[0], taps, *counts, last_sampled, next_prefill)


def check(step: DraftStep, tokens: int, anchor: int, drafts: int = 4) -> None:
    assert step.positions.tolist() == list(range(10, 10 + tokens))
    assert torch.equal(step.states, STATES[:tokens])
    assert (int(step.anchor), step.drafts.tolist()) == (anchor, DRAFTS[0, :drafts].tolist())


def test_steps_of_the_v1_runner() -> None:
    runner = SimpleNamespace(drafter=FakeProposer())
    recorder = DraftStepRecorder(runner, "V1")
    assert runner.drafter.propose(**v1_call(rejected=None)) is DRAFTS
    runner.drafter.propose(**v1_call(rejected=2))
    runner.drafter.propose(**v1_call(rejected=0, drafts=0))
    two = {**v1_call(rejected=0), "next_token_ids": torch.tensor([7, 8])}
    runner.drafter.propose(**two)
    assert len(recorder.steps) == 3
    for step, (tokens, drafts) in zip(recorder.steps, ((6, 4), (4, 4), (6, 0)), strict=True):
        check(step, tokens, 7, drafts)
    recorder.detach()
    runner.drafter.propose(**v1_call(rejected=2))
    assert len(recorder.steps) == 3


def test_steps_of_the_v2_runner() -> None:
    runner = SimpleNamespace(speculator=FakeSpeculator())
    recorder = DraftStepRecorder(runner, "V2")
    runner.speculator.propose(*v2_arguments(rejected=2, sampled=1), num_speculative_tokens=4)
    runner.speculator.propose(*v2_arguments(rejected=0, sampled=0), num_speculative_tokens=3)
    runner.speculator.propose(*v2_arguments(rejected=0, sampled=1), dummy_run=True)
    assert len(recorder.steps) == 2
    check(recorder.steps[0], 4, 7)
    check(recorder.steps[1], 6, 8, drafts=3)  # between two chunks of a prompt


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    steps = [
        DraftStep(torch.arange(n), torch.randn(n, 4), torch.tensor(n), DRAFTS[0].clone())
        for n in (3, 1)
    ]
    write_steps(steps, tmp_path / "steps")
    read = read_steps(tmp_path / "steps")
    assert len(read) == 2
    for one, other in zip(steps, read, strict=True):
        assert torch.equal(one.states, other.states)
        assert int(one.anchor) == int(other.anchor)


def worker_of(extension: type[Any], rank: int) -> Any:
    """Stands for a worker with a V1 runner."""

    class Worker(extension):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rank = rank
            self.vllm_config = SimpleNamespace(use_v2_model_runner=False)
            self.model_runner = SimpleNamespace(drafter=FakeProposer())

    return Worker()


def test_the_first_rank_writes_what_was_recorded(tmp_path: Path) -> None:
    for extension, rank in ((InspectionExtension, 0), (InspectionAndSwapExtension, 1)):
        worker, path = worker_of(extension, rank), tmp_path / f"steps-{rank}"
        assert worker.leadout_write_record(str(path)) == {"steps": 0}
        worker.leadout_record()
        worker.model_runner.drafter.propose(**v1_call(rejected=2))
        assert worker.leadout_write_record(str(path)) == {"steps": 1}
        assert path.exists() == (rank == 0)
