"""Odd but valid requests to a real server with all parts: does any of them end it?

Bare vLLM answers plain greedy requests first. Then `leadout serve` with a registry, capture and
live control answers the same ones, is sent every odd value and combinations of several from some
clients at once, with hang-ups, and answers the plain ones again:

    python experiments/odd_requests.py --out results/reliability/requests.json

A request is lost if it gets neither an answer nor a refusal (4xx), or if a plain answer differs
from bare vLLM's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import urllib.request
from pathlib import Path

from rich.progress import track

from common import write_result  # first: it sets the environment and the path of the tests' support
from leadout.engine.capture_store import segment_paths
from leadout.shards import read_shard
from support.full_server import FullServer, plain_answers
from support.odd_requests import Answer, by_kind, lost, odd_requests, send_all

REQUESTS, SEED, CLIENTS = 2000, 2026, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--work", type=Path, help="new folder to keep logs and captured traffic in")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    alone = len(odd_requests(0, SEED))
    requests = odd_requests(arguments.requests - alone, SEED)
    with tempfile.TemporaryDirectory() as folder:
        world = FullServer(arguments.work or Path(folder))
        with world.bare_server() as server:
            bare = plain_answers(server.url)
        answers: list[Answer] = []
        with world.server("server") as server:
            before = plain_answers(server.url)
            started = time.monotonic()
            for answer in track(send_all(server.url, requests, CLIENTS), total=len(requests)):
                answers.append(answer)
            seconds = time.monotonic() - started
            is_healthy = is_well(server.url)
            after = plain_answers(server.url) if is_healthy else [[]] * len(bare)
        log = server.log.read_text()
        captured = sum(1 for path in segment_paths(world.capture) for _ in read_shard(path))
    changed = sum(one != other for one, other in zip(before + after, bare + bare, strict=True))
    result = {
        "name": "odd requests to a running server",
        "cases": len(requests),
        "lost": len(lost(answers)) + changed,
        "command": "python experiments/odd_requests.py --out results/reliability/requests.json",
        "each_value_alone": alone,
        "combinations": len(requests) - alone,
        "clients": CLIENTS,
        "seconds": seconds,
        "healthy_after": is_healthy,
        "plain_answers": len(before + after),
        "plain_answers_unlike_bare_vllm": changed,
        "parts_off_after_an_error": log.count("is off after an error"),
        "captured": captured,
        "by_kind": by_kind(answers),
        "lost_requests": lost(answers)[:10],
    }
    write_result(arguments.out, result)


def is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
