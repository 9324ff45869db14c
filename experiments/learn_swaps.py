"""Swaps of the drafter under load: do answers change, do requests fail, how long is the pause?

A bare server answers first. Then the same requests are sent repeatedly, 8 at a time, to a server
that follows a registry of two versions: the drafter, and the same drafter with noise on its
weights. The server is asked to swap between them. Every answer is compared with the bare server's,
in float32, and the time between consecutive pieces of a stream is recorded:

    python experiments/learn_swaps.py TARGET DRAFTER PROMPTS --out results/learn/swaps.json

`--tensor-parallel 2` runs two workers, for a target with an even number of heads.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from leadout.checkpoints import load_weights, read_checkpoint, write_checkpoint
from leadout.engine.admin import KEY
from leadout.engine.serve_plan import make_plan
from leadout.engine.server import Server
from leadout.engine.settings import ServeSettings
from leadout.models import fingerprint
from leadout.provenance import Provenance, RunStart
from leadout.registry import Registry
from leadout.stats import percentile

SECRET = "only-on-this-machine"
CLIENTS = 8
TOKENS = 96
PROMPTS = 32
NOISE = 0.1  # relative to the standard deviation of each tensor
AROUND = 1.0  # seconds; a gap this close to a swap may be caused by it


@dataclass
class Streams:
    """Answers, failures and gaps between tokens, as the clients saw them."""

    answers: list[tuple[int, list[int]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)  # when it ended, seconds


def main() -> None:
    started = RunStart.now()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--seconds-between", type=float, default=8.0)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    lines = itertools.islice(arguments.prompts.open(), PROMPTS)
    prompts = [json.loads(line)["turns"][0] for line in lines]
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    flags += ["--max-num-seqs", str(CLIENTS), "--served-model-name", "target"]
    flags += ["--tensor-parallel-size", str(arguments.tensor_parallel)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        registry = make_registry(arguments.target, arguments.drafter, work)
        bare = serve_bare(arguments.target, flags, prompts, work)
        streams, swaps = serve_and_swap(arguments.target, registry, flags, prompts, work, arguments)
        ledger = [entry for entry in registry.ledger() if entry.event == "swapped"]
    near = [gap for when, gap in streams.gaps if is_near(when, gap, swaps)]
    far = [gap for when, gap in streams.gaps if not is_near(when, gap, swaps)]
    models = {"target": arguments.target, "drafter": arguments.drafter}
    made = Provenance.of_this_run({r: fingerprint(Path(f)) for r, f in models.items()}, started)
    result = {
        "provenance": made.model_dump(),
        "clients": CLIENTS,
        "tokens_each": TOKENS,
        "tensor_parallel": arguments.tensor_parallel,
        "dtype": "float32",
        "swaps": len(ledger),
        "answers": len(streams.answers),
        "failed_requests": len(streams.failures),
        "changed_answers": sum(said != bare[place] for place, said in streams.answers),
        "pause_seconds_in_the_worker": [entry.evidence["pause_seconds"] for entry in ledger],
        "longest_gap_at_a_swap": max(near),
        "longest_gap_elsewhere": max(far),
        "p99_gap_elsewhere": percentile(far, 99),
        "median_gap_elsewhere": percentile(far, 50),
        "failures": streams.failures[:5],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def make_registry(target: str, drafter: Path, work: Path) -> Registry:
    """Version 1 is the drafter; version 2 has noise on every weight."""
    registry, about = Registry(work / "registry"), fingerprint(Path(target))
    registry.publish(drafter, target_fingerprint=about)
    checkpoint = read_checkpoint(drafter)
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: tensor + NOISE * tensor.std() * torch.randn(tensor.shape, generator=draw).to(tensor)
        if tensor.is_floating_point() and tensor.dim() == 2
        else tensor
        for name, tensor in load_weights(checkpoint).items()
    }
    write_checkpoint(work / "noisy", weights, checkpoint.config, "zlab")
    registry.publish(work / "noisy", target_fingerprint=about, parent=1)
    registry.point_to(1, "the start")
    return registry


def serve_bare(
    target: str, flags: list[str], prompts: list[str], work: Path
) -> dict[int, list[int]]:
    plan = make_plan(ServeSettings(target=target, vllm_flags=tuple(flags)))
    with Server(plan.command, log=work / "bare.log") as server:
        streams = Streams()
        places = iter(range(len(prompts)))
        in_parallel(server, prompts, streams, places, threading.Event())
    if streams.failures:
        raise RuntimeError(streams.failures[0])
    return dict(streams.answers)


def serve_and_swap(
    target: str,
    registry: Registry,
    flags: list[str],
    prompts: list[str],
    work: Path,
    arguments: argparse.Namespace,
) -> tuple[Streams, list[tuple[float, float]]]:
    plan = make_plan(
        ServeSettings(target=target, vllm_flags=tuple(flags), registry=registry.folder)
    )
    streams, swaps, is_over = Streams(), [], threading.Event()
    with Server(
        plan.command, log=work / "server.log", environment={**plan.environment, KEY: SECRET}
    ) as server:
        load = threading.Thread(
            target=in_parallel,
            args=(server, prompts, streams, iter(_endless(len(prompts))), is_over),
        )
        load.start()
        time.sleep(arguments.seconds_between)
        for number in range(arguments.swaps):
            begun = time.monotonic()
            swap(server, 1 + (number + 1) % 2)
            swaps.append((begun, time.monotonic()))
            time.sleep(arguments.seconds_between)
        is_over.set()
        load.join()
    return streams, swaps


def _endless(count: int) -> Any:
    return (place % count for place in itertools.count())


def in_parallel(
    server: Server, prompts: list[str], streams: Streams, places: Any, is_over: threading.Event
) -> None:
    lock = threading.Lock()

    def ask_on() -> None:
        while not is_over.is_set():
            with lock:
                place = next(places, None)
            if place is None:
                return
            try:
                streams.answers.append((place, stream(server, prompts[place], streams)))
            except Exception as error:  # every kind counts as a failed request
                streams.failures.append(repr(error))

    clients = [threading.Thread(target=ask_on) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def stream(server: Server, prompt: str, streams: Streams) -> list[int]:
    """One answer, as token ids, piece by piece."""
    body = {
        "model": "target",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    last: float | None = None
    for line in post(server, "/v1/chat/completions", body):
        if not line.startswith(b"data: {"):
            continue
        choices = json.loads(line.removeprefix(b"data: "))["choices"]
        new = choices[0].get("token_ids") if choices else None
        if not new:
            continue
        now = time.monotonic()
        if last is not None:
            streams.gaps.append((now, now - last))
        last = now
        ids += new
    if len(ids) != TOKENS:
        raise RuntimeError(f"expected {TOKENS} tokens, got {len(ids)}")
    return ids


def swap(server: Server, version: int) -> None:
    answer = b"".join(post(server, "/leadout/swap", {"version": version}))
    if json.loads(answer).get("version") != version:
        raise RuntimeError(answer.decode())


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    where = urlsplit(server.url)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=300)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRET}"}
    try:
        connection.request("POST", path, json.dumps(body), headers)
        yield from connection.getresponse()
    finally:
        connection.close()


def is_near(ended: float, gap: float, swaps: list[tuple[float, float]]) -> bool:
    """Whether a gap overlaps a swap or the moment after it."""
    return any(ended - gap < done + AROUND and ended > begun for begun, done in swaps)


if __name__ == "__main__":
    main()
