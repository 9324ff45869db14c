"""Sessions of an engine in a child process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leadout.engine.child_process import EngineError
from leadout.engine.offline import SessionRequest, SessionResult, SetRun, run_session

REQUEST = SessionRequest(
    target="t", drafter="d", draft_tokens=3, prompts={"s": [[1, 2]]}, max_tokens=4, max_length=64
)
RUN = SetRun(
    prompt_set="s", temperature=0.0, answers=[[5]], steps=4, accepted_by_position=[3, 2, 1]
)
RESULT = SessionResult(runs=[RUN])


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of Python: stores its arguments and its input, prints the file `output`.

    It exits with the code in the file `code`.
    """
    program = tmp_path / "engine"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho $* > arguments\nhead -n 1 > request\n"
        "cat output\necho 'last line of vLLM' >&2\nexit $(cat code)\n"
    )
    program.chmod(0o755)
    (tmp_path / "output").write_text(f"result {RESULT.model_dump_json()}\n")
    (tmp_path / "code").write_text("0")
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


def test_a_session_runs_as_a_module(engine: Path) -> None:
    assert run_session(REQUEST) == RESULT
    assert RUN.acceptance_length == 2.5
    assert (engine / "arguments").read_text() == "-m leadout.engine.offline\n"
    assert SessionRequest.model_validate_json((engine / "request").read_text()) == REQUEST


@pytest.mark.parametrize("code", ["1", "0"])
def test_a_failed_session_names_the_exit_code_and_the_log(engine: Path, code: str) -> None:
    (engine / "code").write_text(code)
    (engine / "output").write_text("")
    with pytest.raises(EngineError, match=rf"exit code {code}(.|\n)*last line of vLLM"):
        run_session(REQUEST)


NOISY = """
import logging, os, sys
from pathlib import Path
from leadout.engine.offline import output_to_log

logger = logging.getLogger("vllm")
logger.handlers = [logging.StreamHandler()]
log = Path(sys.argv[1])
with output_to_log(log):
    print("Python", flush=True)
    os.system("echo a library >&2")
    logger.warning("vLLM")
logger.warning("vLLM, later")
print("the command")
try:
    with output_to_log(log):
        raise KeyError
except KeyError:
    print("its error", file=sys.stderr)
"""


def test_output_of_vllm_goes_into_the_log(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    ended = subprocess.run(
        [sys.executable, "-c", NOISY, str(log)], capture_output=True, text=True, check=True
    )
    assert log.read_text().splitlines() == ["Python", "a library", "vLLM", "vLLM, later"]
    assert (ended.stdout, ended.stderr) == ("the command\n", "its error\n")
