"""SIGTERM under load, many times: is a request cut that the server had accepted?

Each case starts the server that `leadout serve` with all parts becomes, with the drain time of the
Kubernetes example. Some clients send streams and plain requests one after the other; the server
gets SIGTERM at a random moment, and the clients go on until it refuses them. A request that was
sent before the signal must be answered to its last token. One that is sent afterwards may be
refused, or get no answer at all (vLLM takes requests until its engine has ended): Kubernetes sends
none any more by then (`preStop`).

    python experiments/sigterm.py --out results/reliability/sigterm.json --work FOLDER

Cases that are done are kept in FOLDER: the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.progress import track

from common import write_result  # first: it sets the environment and the path of the tests' support
from leadout.engine.server import Server
from support.full_server import ENVIRONMENT, FullServer
from support.odd_requests import ids
from support.ops_files import shutdown_timeout

CASES, CLIENTS = 100, 6
# The worker in the engine's process: one process less to start. It is the engine that drains.
IN_ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
TOKENS = (20, 240)  # of an answer, at random
SECONDS_OF_LOAD = 1.5  # at most, from the first token of each client to the signal
# Without a byte, after which a client gives up; sooner if it was sent after the signal.
SILENT_SECONDS, SILENT_SECONDS_AFTER = 60.0, 3.0
# A connection that the system has accepted, but the server has not seen yet, may be closed unseen.
UNSEEN_SECONDS = 0.1


@dataclass
class Request:
    """One request as its client saw it."""

    sent: float
    tokens: int  # asked for
    is_stream: bool
    received: int = 0
    reason: str | None = None
    error: str | None = None
    is_silent: bool = False
    ended: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.reason == "length" and self.received == self.tokens


@dataclass
class Case:
    """What one SIGTERM did."""

    seed: int
    running: int = 0  # requests without an end at the signal
    finished: int = 0  # of these
    lost: int = 0
    unseen: int = 0  # sent in the moment of the signal, and refused
    finished_before: int = 0
    refused_after: int = 0
    silent_after: int = 0  # sent after the signal, taken, and never answered
    finished_after: int = 0  # sent after the signal, and answered nevertheless
    seconds_to_drain: float = 0.0
    seconds_to_end: float = 0.0
    exit_code: int = 0
    problems: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    done = arguments.work / "cases.jsonl"
    cases = [Case(**json.loads(line)) for line in done.open()] if done.exists() else []
    world = FullServer(Path(tempfile.mkdtemp(dir=arguments.work)))
    plan = world.plan(shutdown_timeout())
    for seed in track(range(len(cases), arguments.cases), description="cases"):
        settings = ENVIRONMENT | IN_ENGINE | plan.environment
        server = Server(
            plan.command,
            log=world.work / "log",
            environment=settings,
            startup_seconds=1200,
        )
        cases.append(run_case(server, seed))
        with done.open("a") as file:
            file.write(json.dumps(asdict(cases[-1])) + "\n")
        write_result(arguments.out, summary(cases))


def summary(cases: list[Case]) -> dict[str, Any]:
    return {
        "name": "SIGTERM under load",
        "cases": len(cases),
        "lost": sum(case.lost for case in cases),
        "command": "python experiments/sigterm.py --out results/reliability/sigterm.json",
        "clients": CLIENTS,
        "drain_flag": shutdown_timeout(),
        "running_at_the_signal": sum(case.running for case in cases),
        "finished_after_the_signal": sum(case.finished for case in cases),
        "refused_unseen": sum(case.unseen for case in cases),
        "sent_after_the_signal": {
            "refused": sum(case.refused_after for case in cases),
            "answered": sum(case.finished_after for case in cases),
            "never_answered": sum(case.silent_after for case in cases),
        },
        "longest_drain_seconds": max(case.seconds_to_drain for case in cases),
        "longest_end_seconds": max(case.seconds_to_end for case in cases),
        "exit_codes": dict(Counter(str(case.exit_code) for case in cases)),
        "problems": [problem for case in cases for problem in case.problems][:10],
    }


def run_case(server: Server, seed: int) -> Case:
    draw, requests = random.Random(seed), []
    with server:
        clients = [Client(server, seed * CLIENTS + number) for number in range(CLIENTS)]
        for client in clients:
            client.thread.start()
        for client in clients:
            client.has_token.wait(120)
        time.sleep(draw.uniform(0, SECONDS_OF_LOAD))
        os.kill(server.processes[0], signal.SIGTERM)
        signalled = time.monotonic()
        for client in clients:
            client.silent_seconds = SILENT_SECONDS_AFTER
        for client in clients:
            client.thread.join()
            requests += client.requests
        code = server.wait_until_ended(300)
        ended = time.monotonic()
    return judged(Case(seed, exit_code=code, seconds_to_end=ended - signalled), requests, signalled)


def judged(case: Case, requests: list[Request], signalled: float) -> Case:
    for each in requests:
        if each.ended < signalled and each.is_whole:
            case.finished_before += 1
        elif each.sent > signalled:
            case.finished_after += each.is_whole
            case.silent_after += each.is_silent
            case.refused_after += not (each.is_whole or each.is_silent)
        elif each.is_whole:
            case.running += 1
            case.finished += 1
            case.seconds_to_drain = max(case.seconds_to_drain, each.ended - signalled)
        elif each.received == 0 and signalled - each.sent < UNSEEN_SECONDS:
            case.unseen += 1
        else:
            case.running += 1
            case.lost += 1
            case.problems.append(
                f"case {case.seed}: sent {signalled - each.sent:.3f} s before the signal, "
                f"{each.received} of {each.tokens} tokens, {each.reason}, {each.error}"
            )
    return case


class Client:
    """Sends one request after the other until the server refuses one."""

    def __init__(self, server: Server, seed: int) -> None:
        self.requests: list[Request] = []
        self.has_token = threading.Event()
        self.silent_seconds = SILENT_SECONDS
        self._url, self._draw = urlsplit(server.url), random.Random(seed)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.requests or self.requests[-1].is_whole:
            asked = Request(
                time.monotonic(), self._draw.randint(*TOKENS), self._draw.random() < 0.7
            )
            self.requests.append(asked)
            try:
                self._send(asked)
            except TimeoutError:
                asked.is_silent, asked.error = True, "no answer"
            except (OSError, http.client.HTTPException, ValueError, KeyError) as problem:
                asked.error = repr(problem)
            asked.ended = time.monotonic()
            self.has_token.set()

    def _send(self, asked: Request) -> None:
        body: dict[str, Any] = {"model": "tiny", "prompt": ids(self._draw.randint(1, 10))}
        body |= {"max_tokens": asked.tokens, "ignore_eos": True, "return_token_ids": True}
        body |= {"temperature": self._draw.choice((0, 0.8)), "stream": asked.is_stream}
        assert self._url.hostname is not None
        connection = http.client.HTTPConnection(
            self._url.hostname, self._url.port, timeout=self.silent_seconds
        )
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                asked.error = f"{response.status}: {response.read()[:200]!r}"
            elif asked.is_stream:
                self._read_stream(response, asked)
            else:
                self._receive(json.load(response), asked)
        finally:
            connection.close()

    def _read_stream(self, response: http.client.HTTPResponse, asked: Request) -> None:
        asked.error = "the stream has no end"
        for line in response:
            text = line.decode().removeprefix("data: ").strip()
            if text == "[DONE]":
                asked.error = None
            elif text:
                self._receive(json.loads(text), asked)

    def _receive(self, answer: dict[str, Any], asked: Request) -> None:
        (choice,) = answer["choices"]
        asked.received += len(choice["token_ids"] or [])
        asked.reason = choice["finish_reason"]
        self.has_token.set()


if __name__ == "__main__":
    main()
