"""`leadout data --endpoint` with a real vLLM server: the samples of an engine in this process.

Then the same server is told to end while it answers.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.data.manifest import DataFolder
from leadout.engine.server import Server, server_command
from leadout.version import __version__
from support.ops_files import shutdown_timeout
from support.prompts import PROMPTS
from support.tiny_chat import write_tiny_chat_target

LENGTH = 300
# On a CPU, vLLM 0.32 cannot sample with seeds while it computes prompts in chunks.
SMALL = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(LENGTH)),
    *("--max-num-seqs", "4", "--no-enable-chunked-prefill"),
)
SAMPLED = '{"top_k": 40, "repetition_penalty": 1.1}'
FLAGS = (
    *("--max-new-tokens", "24", "--max-length", str(LENGTH), "--concurrency", "4"),
    *("--greedy-share", "0.5", "--sampling", SAMPLED, "--prompts", "self:3"),
)
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def run(target: Path, folder: Path) -> Run:
    asked = folder / "asked.jsonl"
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Short answers."},
                {"role": "user", "content": f"{number}. {PROMPTS[number % 8]}"},
                {"role": "user", "content": "And then?"},
            ],
            "chat_template_kwargs": {"enable_thinking": bool(number % 2)},
        }
        for number in range(10)
    ]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(out: str, *flags: str) -> Result:
        words = ["data", str(target), "--prompts", str(asked), "--out", str(folder / out)]
        return CliRunner().invoke(app, [*words, *FLAGS, *flags])

    return run


@pytest.fixture(scope="module")
def server(target: Path, folder: Path) -> Iterator[Server]:
    # As users run it; it logs which plugins it loads.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    command = server_command(target, [*SMALL, shutdown_timeout()])
    with Server(command, log=folder / "server.log", environment=environment) as running:
        yield running


def test_stock_vllm_loads_the_plugin(server: Server) -> None:
    assert f"Leadout {__version__} is active" in server.log.read_text()


def test_a_server_gives_the_samples_of_the_engine(server: Server, run: Run, folder: Path) -> None:
    served = run("served", "--endpoint", server.url)
    assert served.exit_code == 0, served.output
    assert f"{server.url}: " in served.stderr
    here = run("here", "--dtype", "float32", "--", "--max-num-batched-tokens", str(LENGTH))
    assert here.exit_code == 0, here.output
    one, other = (DataFolder(folder / name) for name in ("served", "here"))
    samples = list(one.samples())
    assert len(samples) == 2 * 10 + 3
    assert {sample.temperature for sample in samples} == {0.0, 0.6}
    assert samples == list(other.samples())
    assert one.manifests[0].failed == 0
    assert one.manifests[0].counts == other.manifests[0].counts


def test_a_server_of_another_target_or_length_is_refused(server: Server, run: Run) -> None:
    other = run("other", "--endpoint", server.url, "--served-model", "other")
    assert other.exit_code == 2
    assert "expected other" in other.stderr
    longer = run("longer", "--endpoint", server.url, "--max-length", "400")
    assert longer.exit_code == 2
    assert f"has --max-model-len {LENGTH}" in longer.stderr


def test_a_running_request_is_finished_after_sigterm(server: Server, target: Path) -> None:
    """With the flag of the Kubernetes example; without it vLLM aborts the request.

    The last test of this file: it ends the server.
    """
    length = LENGTH - 20
    asked = {"model": str(target), "prompt": [5, 9, 2], "max_tokens": length, "ignore_eos": True}
    body = json.dumps(asked | {"temperature": 0, "stream": True, "return_token_ids": True}).encode()
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
    assert (tokens, reason, is_done) == (length, "length", True)
    server.wait_until_ended(600)
