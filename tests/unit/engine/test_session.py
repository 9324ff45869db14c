"""An engine in a process of its own: what goes in, what comes out, and what its failure says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from leadout.engine import child_process as apart
from leadout.engine.child_process import DecodeError
from leadout.engine.offline import SessionRequest, SessionResult, SetRun, run_session_apart

REQUEST = SessionRequest(
    target="t", drafter="d", draft_tokens=3, prompts={"s": [[1, 2]]}, max_tokens=4, max_length=64
)
RUN = SetRun(
    prompt_set="s", temperature=0.0, answers=[[5]], steps=4, accepted_by_position=[3, 2, 1]
)
RESULT = SessionResult(runs=[RUN])


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of Python and its engine: tells its arguments, input and surroundings.

    It ends as the file `end` says.
    """
    program = tmp_path / "engine"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho $* > words\ncat > request\nenv > environment\n"
        "cat output\necho 'last words of vLLM' >&2\nexit $(cat end)\n"
    )
    program.chmod(0o755)
    (tmp_path / "output").write_text(f"noise\n{apart.RESULT}{RESULT.model_dump_json()}\n")
    (tmp_path / "end").write_text("0")
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


def test_request_and_result_pass_through(engine: Path) -> None:
    assert run_session_apart(REQUEST) == RESULT
    assert RUN.acceptance_length == 2.5
    assert (engine / "words").read_text() == "-m leadout.engine.offline\n"
    assert SessionRequest.model_validate_json((engine / "request").read_text()) == REQUEST


def test_the_engine_does_not_take_the_trainers_ranks_for_its_own(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torchrun = (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
    )
    for name in of_torchrun:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    run_session_apart(REQUEST)
    lines = (engine / "environment").read_text().splitlines()
    found = dict(line.partition("=")[::2] for line in lines)
    assert not set(of_torchrun) & set(found)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize(("code", "output"), [("1", ""), ("0", "no result\n"), ("3", None)])
def test_a_failure_ends_with_the_engines_last_words(
    engine: Path, code: str, output: str | None
) -> None:
    (engine / "end").write_text(code)
    if output is not None:
        (engine / "output").write_text(output)
    with pytest.raises(DecodeError, match=rf"ended with code {code}(.|\n)*last words of vLLM"):
        run_session_apart(REQUEST)
