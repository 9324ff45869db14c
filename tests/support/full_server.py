"""`leadout serve` with all of its parts for a tiny target: registry, capture and live control."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leadout.engine.server import Server, server_command
from leadout.engine.settings import ServeSettings
from leadout.registry import Registry
from support.http_load import answer
from support.models import tiny_llama
from support.odd_requests import MAX_LENGTH, STEP_TOKENS, ids
from support.tiny_chat import tiny_tokenizer
from support.version_registry import publish

if TYPE_CHECKING:
    from leadout.engine.serve_plan import Plan

FLAGS = ("--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny")
FLAGS += ("--max-model-len", str(MAX_LENGTH), "--max-num-batched-tokens", str(STEP_TOKENS))
FLAGS += ("--max-num-seqs", "8")
# Of a tiny target: not in this process, and with little memory.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
PLAIN = [ids(length, first) for first, length in enumerate((3, 40, 63, 64, 65, 130, 200, 40))]
PLAIN_TOKENS = 40


class FullServer:
    """The folders of a server: a target, a registry with its drafter, and captured traffic."""

    def __init__(self, work: Path) -> None:
        self.work, self.target, self.capture = work, work / "target", work / "capture"
        tiny_llama().save_pretrained(self.target)
        tiny_tokenizer().save_pretrained(self.target)
        self.registry = Registry(work / "registry")
        publish(self.registry, self.target, work, seed=0)
        self.registry.point_to(1, "the start")

    def command(self, *flags: str) -> list[str]:
        """The command as a user types it."""
        leadout = [sys.executable, "-m", "leadout", "serve", str(self.target), "--live"]
        leadout += ["--registry", str(self.registry.folder), "--capture", str(self.capture)]
        return [*leadout, *FLAGS, *flags]

    def server(self, name: str, *flags: str, **environment: str) -> Server:
        settings = ENVIRONMENT | environment
        log = self.work / f"{name}.log"
        return Server(self.command(*flags), log=log, environment=settings, startup_seconds=1200)

    def plan(self, *flags: str) -> Plan:
        """What `leadout serve` becomes; for servers that are started many times."""
        from leadout.engine.serve_plan import make_plan

        settings = ServeSettings(
            target=str(self.target),
            registry=self.registry.folder,
            capture=self.capture,
            live=True,
            vllm_flags=(*FLAGS, *flags),
        )
        return make_plan(settings)

    def bare_server(self) -> Server:
        """Stock vLLM without a drafter and without Leadout."""
        command = server_command(self.target, FLAGS)
        settings = ENVIRONMENT | {"LEADOUT_PLUGIN": "0"}
        log = self.work / "bare.log"
        return Server(command, log=log, environment=settings, startup_seconds=1200)


def plain_answers(url: str, prompts: Sequence[list[int]] = PLAIN) -> list[list[int]]:
    """Token ids of greedy answers to plain requests."""
    return [answer(url, prompt, PLAIN_TOKENS) for prompt in prompts]
