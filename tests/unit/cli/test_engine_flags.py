"""Flags after two dashes reach every engine that check, train and learn start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from leadout.check import run as check_run
from leadout.cli.app import app
from leadout.engine.offline import SessionRequest, SessionResult, SetRun, can_record
from leadout.evaluate import reference
from leadout.learn import gate
from leadout.shards import Sample
from leadout.train import export

FLAGS = ["--tensor-parallel-size", "2", "--quantization", "fp8"]
PROMPTS = {"some": [[1, 2, 3], [4, 5]]}


class StopError(Exception):
    """Ends a command once its engines have been asked for."""


class FakeSessions:
    """Takes the requests of sessions; the last one ends the command."""

    def __init__(self, count: int) -> None:
        self.requests: list[SessionRequest] = []
        self._count = count

    def __call__(self, request: SessionRequest, _report: Any = None) -> SessionResult:
        self.requests.append(request)
        if len(self.requests) == self._count:
            raise StopError
        answered = SetRun(
            prompt_set="some", temperature=0.0, answers=[[7]], steps=1, accepted_by_position=[0]
        )
        return SessionResult(runs=[answered])


def requests_of_check(sessions: FakeSessions, *, control: bool = False) -> list[SessionRequest]:
    """What `check` asks of the engines with and without a drafter."""
    with pytest.raises(StopError):
        check_run.run_engines(
            Path("target"),
            Path("drafter"),
            PROMPTS,
            max_tokens=4,
            draft_tokens=3,
            max_length=64,
            dtype=torch.float32,
            control=control,
            vllm_flags=FLAGS,
        )
    return sessions.requests


def test_check_passes_them_to_both_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = FakeSessions(2)
    monkeypatch.setattr(check_run, "run_session", sessions)
    speculative, bare = requests_of_check(sessions)
    assert speculative.vllm_flags == bare.vllm_flags == FLAGS
    assert (speculative.drafter, bare.drafter) == ("drafter", None)
    assert speculative.recording is None  # the drafter runs in other processes


@pytest.mark.parametrize("control", [False, True])
def test_the_control_is_another_batch_size_without_the_drafter(
    monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    sessions = FakeSessions(2)
    monkeypatch.setattr(check_run, "run_session", sessions)
    speculative, bare = requests_of_check(sessions, control=control)
    batches = [each.batch for each in bare.passes]
    assert batches == ([None, check_run.CONTROL_BATCH] if control else [None])
    assert all(each.batch is None for each in speculative.passes)


def test_drafts_are_recorded_in_an_engine_of_one_worker() -> None:
    assert can_record("target", [])
    assert can_record("target", ["--quantization", "fp8", "-tp", "1"])
    assert not can_record("target", FLAGS)
    assert not can_record("target", ["--pipeline-parallel-size=2"])


def test_the_proof_of_train_passes_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeDrafter:
        class config:
            block_size = 4

    sessions = FakeSessions(1)
    monkeypatch.setattr(export, "run_session", sessions)
    monkeypatch.setattr(export, "load_drafter", lambda *_: FakeDrafter)
    with pytest.raises(StopError):
        export.compare_with_served(
            Path("target"),
            Path("drafter"),
            [[1, 2]],
            max_tokens=4,
            max_length=64,
            precision=torch.float32,
            vllm_flags=FLAGS,
        )
    assert sessions.requests[0].vllm_flags == FLAGS


def test_the_gate_of_learn_passes_them_to_both_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeCheckpoint:
        class config:
            max_positions = 512

    sessions = FakeSessions(2)
    monkeypatch.setattr(gate, "run_session", sessions)
    monkeypatch.setattr(gate, "served_draft_tokens", lambda _: 3)
    monkeypatch.setattr(gate, "read_checkpoint", lambda _: FakeCheckpoint)
    monkeypatch.setattr(gate, "is_quantized", lambda *_: False)
    sample = Sample(id="a", source="b", prompt=[1, 2], response=[3], temperature=0.0)
    with pytest.raises(StopError):
        gate.check_lossless(Path("target"), Path("drafter"), [sample], vllm_flags=FLAGS)
    assert [request.vllm_flags for request in sessions.requests] == [FLAGS, FLAGS]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "T", "D", "--", "--tensor-paralel-size", "2"), "not a flag of `leadout check`"),
        (("check", "T", "D", "--", "--dtype", "half"), "use --dtype of the command"),
        (("check", "T", "D", "--", "--spec-model", "m"), "name the drafter instead"),
        (
            ("train", "T", "--data", "d", "--out", "o", "--", "--wrong"),
            "not a flag of `leadout train`",
        ),
    ],
)
def test_unknown_flags_are_errors_of_the_command(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, list(words))
    assert ended.exit_code == 2
    assert message in ended.stderr


@pytest.mark.parametrize(("free", "expected"), [(10**9, "cuda"), (10, "cpu")])
def test_the_reference_runs_on_the_gpu_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, expected: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(reference, "loaded_bytes", lambda *_: 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reference.reference_device(tmp_path, torch.float32).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 10**9))
    assert reference.reference_device(tmp_path, torch.float32).type == expected
    # One that cannot be loaded is served, and its server takes the GPU.
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert reference.reference_device(tmp_path, torch.float32).type == "cpu"
