"""A real vLLM server over real HTTP, and nothing left of it afterwards."""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leadout.engine.server import Server, server_command
from leadout.version import __version__
from support.processes import family_of

SMALL = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"]


# The server runs as users run it: with an engine process of its own.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    arguments = [*SMALL, "--served-model-name", "smollm2"]
    before = family_of(os.getpid())
    command = server_command(smollm2, arguments)
    with Server(command, log=log, environment=ENVIRONMENT) as running:
        yield running
    assert family_of(os.getpid()) == before


def test_completion_and_chat_answer(server: Server) -> None:
    completion = post(
        f"{server.url}/v1/completions",
        {
            "model": "smollm2",
            "prompt": "The capital of France is",
            "max_tokens": 8,
            "temperature": 0,
        },
    )
    assert "Paris" in completion["choices"][0]["text"]
    chat = post(
        f"{server.url}/v1/chat/completions",
        {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 16,
            "temperature": 0,
        },
    )
    assert "Paris" in chat["choices"][0]["message"]["content"]


def test_log_is_captured_and_shows_our_plugin(server: Server) -> None:
    assert f"Leadout {__version__} is active" in server.log.read_text()
