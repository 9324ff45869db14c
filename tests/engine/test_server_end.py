"""However a server ends, nothing of it is left."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from leadout.engine.child_process import EngineError
from leadout.engine.server import Server, server_command
from support.models import ROOT, tiny_llama
from support.ops_files import shutdown_timeout
from support.processes import family_of, new_processes, wait_until_gone
from support.tiny_chat import tiny_tokenizer


def test_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    before = family_of(os.getpid())
    failing = Server(server_command(tmp_path / "no-such-model", []), log=tmp_path / "log")
    with pytest.raises(EngineError, match="no-such-model"), failing:
        pass
    assert new_processes(before) == []


def test_killing_the_test_run_leaves_no_server_behind(smollm2: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            f"--basetemp={tmp_path / 'run'}",
            "tests/engine/test_serve.py::test_stock_vllm_loads_the_plugin_and_answers",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    log = tmp_path / "run" / "bare0" / "server.log"
    deadline = time.monotonic() + 1800
    while not (log.exists() and "Application startup complete" in log.read_text()):
        assert run.poll() is None, "the inner test run ended before its server was up"
        assert time.monotonic() < deadline, "the inner server did not come up"
        time.sleep(0.1)
    family = family_of(run.pid)
    assert any("EngineCore" in process.command for process in family), family
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert wait_until_gone(family, seconds=600) == []


def test_a_running_request_is_finished_after_sigterm(tmp_path: Path) -> None:
    """With the flag of the Kubernetes example; without it vLLM aborts the request."""
    tiny_llama().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    flags += [shutdown_timeout()]
    command = server_command(tmp_path / "target", [*flags, "--served-model-name", "tiny"])
    asked = {"model": "tiny", "prompt": [5, 9, 2], "max_tokens": 400, "ignore_eos": True}
    body = json.dumps(asked | {"temperature": 0, "stream": True, "return_token_ids": True}).encode()
    with Server(command, log=tmp_path / "log") as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        tokens, reason, is_done = 0, None, False
        with urllib.request.urlopen(request, timeout=900) as stream:
            for line in stream:
                text = line.decode().removeprefix("data: ").strip()
                if text == "[DONE]":
                    is_done = True
                elif text:
                    (choice,) = json.loads(text)["choices"]
                    if tokens == 0:
                        os.kill(server.processes[0], signal.SIGTERM)
                    tokens += len(choice["token_ids"] or [])
                    reason = choice["finish_reason"]
        assert (tokens, reason, is_done) == (400, "length", True)
        server.wait_until_ended(600)
