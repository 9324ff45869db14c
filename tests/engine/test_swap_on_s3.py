"""A real server follows a registry on a real S3 server, and its traffic is uploaded there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from leadout.engine.capture_store import is_segment
from leadout.engine.serve_plan import make_plan
from leadout.engine.server import Server
from leadout.engine.settings import ServeSettings
from leadout.registry import Registry
from leadout.storage import open_storage
from support.http_load import answer
from support.models import tiny_llama
from support.tiny_chat import tiny_tokenizer
from support.version_registry import publish

FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")
FLAGS += ("--max-num-seqs", "8", "--served-model-name", "tiny")


@pytest.mark.nightly
def test_a_server_swaps_to_a_version_on_s3(s3_url: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    tiny_llama().save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    registry = Registry(f"{s3_url}/registry")
    publish(registry, target, tmp_path, seed=0)
    registry.point_to(1, "the start")
    plan = make_plan(
        ServeSettings(
            target=str(target),
            vllm_flags=FLAGS,
            registry=registry.address,
            capture=tmp_path / "capture",
            capture_upload=f"{s3_url}/traffic",
        )
    )
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **plan.environment}
    with Server(plan.command, log=tmp_path / "server.log", environment=environment) as server:
        prompt = [5, 9, 2, 44, 60, 61, 200]
        before = answer(server.url, prompt, 48)
        publish(registry, target, tmp_path, seed=1, parent=1)
        registry.point_to(2, "better")
        deadline = time.monotonic() + 600
        while not any(entry.event == "swapped" for entry in registry.ledger()):
            assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()[-4000:]
            time.sleep(0.5)
        assert answer(server.url, prompt, 48) == before
    # At its end, the server has uploaded what it captured, or has left it for the next one.
    uploaded = [each for each in open_storage(f"{s3_url}/traffic").entries() if is_segment(each[0])]
    left = list((tmp_path / "capture").glob("traffic-*"))
    assert uploaded or left
    assert "is off after an error" not in (tmp_path / "server.log").read_text()
