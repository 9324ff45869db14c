"""`leadout serve --live` over real HTTP: gauges from the engine's process, requests that steer."""

import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from leadout.engine.metrics import capture_families
from leadout.engine.serve_plan import make_plan
from leadout.engine.server import Server
from leadout.engine.settings import ServeSettings
from support.ops_files import scraped_metrics
from support.shared import QUICK_DRAFTER, first_turns

BY_REQUEST = "leadout:request_acceptance_length"
TRIES = 20


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
    flags += ("--max-num-seqs", "8", "--served-model-name", "smollm2")
    plan = make_plan(
        ServeSettings(target=str(smollm2), draft=str(QUICK_DRAFTER), vllm_flags=flags, live=True)
    )
    log = tmp_path_factory.mktemp("server") / "server.log"
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with Server(plan.command, log=log, environment=environment) as running:
        yield running


def complete(server: Server, prompts: list[str], **more: Any) -> list[str]:
    def post(prompt: str) -> str:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 48, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body | {"temperature": 0} | more).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=900) as response:
            text: str = json.load(response)["choices"][0]["text"]
            return text

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(post, prompts))


def metrics(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=900) as response:
        lines = response.read().decode().splitlines()
    rows = [line for line in lines if line.startswith(("leadout:", "vllm:spec_decode_num_draft"))]
    return {row.partition("{")[0]: float(row.rpartition(" ")[2]) for row in rows}


def test_live_control_is_seen_and_steered_from_outside(server: Server) -> None:
    prompts = first_turns("gsm8k", 4)
    assert "leadout:draft_length" not in metrics(server)
    off = complete(server, prompts, vllm_xargs={"leadout_draft": "off"})
    time.sleep(1.1)  # the engine writes its numbers once a second
    before = metrics(server)
    assert before["vllm:spec_decode_num_draft_tokens_total"] == 0
    assert before[f"{BY_REQUEST}_count"] == 0  # without drafts a request has no acceptance
    free = complete(server, prompts)
    assert complete(server, prompts, vllm_xargs={"leadout_draft": "what"}) == free
    assert off == free  # float32: no near-ties that another batch would flip
    sent = 2 * len(prompts)
    for _ in range(TRIES):  # beside other tests drafts can look too slow for a while
        time.sleep(1.1)
        complete(server, prompts[:1])
        sent += 1
        shown = metrics(server)
        if shown[f"{BY_REQUEST}_count"]:
            break
    assert shown["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert 0 < shown[f"{BY_REQUEST}_count"] <= sent
    assert shown[f"{BY_REQUEST}_sum"] >= shown[f"{BY_REQUEST}_count"]
    assert 0 < shown["leadout:draft_length"] <= 3
    assert 0 <= shown["leadout:skipped_drafts"] <= 1
    assert shown["leadout:estimated_gain"] >= 1
    log = server.log.read_text()
    assert log.count("is 'what', expected 'off' or an integer") == 1
    assert "live control is off" not in log


def test_rules_and_dashboard_ask_for_what_a_server_has(server: Server) -> None:
    time.sleep(1.1)  # live control writes its numbers once a second
    complete(server, first_turns("gsm8k", 4))
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=900) as response:
        lines = response.read().decode().splitlines()
    shown = {line.partition("{")[0] for line in lines if not line.startswith("#")}
    with_capture = {f"{family.name}_total" for family in capture_families()}
    assert scraped_metrics() - shown == with_capture
