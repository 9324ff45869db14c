"""The experiment that shows a server's speed while its drafter is replaced: counting and charts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.etree import ElementTree

import pytest

import learn_picture
import result_charts

BEFORE, LEARNING, AFTER = 40.0, 20.0, 60.0  # tokens per second


def run_of(seconds: float = 125.0) -> dict[str, Any]:
    """Counters of a server whose speed depends on the phase only."""
    edges = (seconds, 3 * seconds, 4 * seconds)
    tokens, samples = 0.0, []
    for second in range(int(edges[-1]) + 1):
        speed = BEFORE if second < edges[0] else LEARNING if second < edges[1] else AFTER
        steps = tokens / 2
        sample = {"second": float(second), "tokens": tokens, "steps": steps, "accepted": steps}
        samples.append(sample)
        tokens += speed
    return {
        "samples": samples,
        "learner_started": edges[0],
        "swapped": edges[1] - 5,
        "learner_ended": edges[1],
        "seconds": edges[2],
        "requests": 7,
        "failed_requests": 0,
        "learnt_from_requests": 96,
        "training_seconds": 100.0,
    }


def test_speeds_are_those_of_their_phases() -> None:
    found = learn_picture.summary(run_of(), kind="tickets", clients=4)
    speeds = found["tokens_per_second"]
    assert speeds["before"]["value"] == pytest.approx(BEFORE)
    assert speeds["learning"]["value"] == pytest.approx(LEARNING)
    assert speeds["after"]["value"] == pytest.approx(AFTER)
    assert found["slices_in_phase"]["before"] == found["slices_in_phase"]["after"] == 12
    assert found["ratio"]["value"] == pytest.approx(AFTER / BEFORE)
    assert found["acceptance_length"] == {"before": 2.0, "after": 2.0}
    assert len(found["slices"]) == 50


def test_a_phase_without_a_whole_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="raise --seconds"):
        learn_picture.summary(run_of(12.0), kind="tickets", clients=4)


def test_the_chart_has_the_numbers() -> None:
    found = learn_picture.summary(run_of(), kind="tickets", clients=4)
    chart = ElementTree.fromstring(result_charts.learn_picture(found))
    numbers = str(chart.findtext("{http://www.w3.org/2000/svg}desc")).splitlines()
    assert numbers[0] == "before: mean: 40.000 (40.000 to 40.000)"
    assert numbers[2].startswith("after over before: 1.500")
    assert len(numbers) == 3 + len(found["slices"])
    assert "40 (40 to 40)" in "".join(chart.itertext())


class FakeServer(BaseHTTPRequestHandler):
    """Answers completions, and counts a fixed number of tokens for each."""

    prompts: list[str]
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with self.lock:
            self.prompts.append(body)
        time.sleep(0.02)
        self._send(b'{"choices": [{"text": "an answer"}]}')

    def do_GET(self) -> None:
        with self.lock:
            count = len(self.prompts)
        names = (learn_picture.TOKENS, *learn_picture.COUNTERS)
        rows = [f'{name}{{engine="0"}} {10.0 * count}' for name in names]
        self._send("\n".join(rows).encode())

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    prompts: list[str] = []
    handler = type("Handler", (FakeServer,), {"prompts": prompts})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", prompts
        running.shutdown()
        thread.join()


def test_the_load_exchanges_its_prompts_and_the_samples_count_its_tokens(
    server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn_picture, "SAMPLE_SECONDS", 0.05)
    url, prompts = server
    load = learn_picture.Load(url, clients=3, tokens=8)
    load.send([[1]], captured=False)
    with load.running(), learn_picture.sampled(url) as samples:
        _wait_until(lambda: len(prompts) > 6)
        load.send([[2], [3]], captured=True)
        exchanged = len(prompts)
        _wait_until(lambda: len(prompts) > exchanged + 10)
    assert load.requests == len(prompts)
    assert load.failed == 0
    assert '"prompt": [1]' in prompts[0]
    assert '"off"' in prompts[0]
    last = prompts[exchanged + 3 :]  # those that were on their way have arrived
    assert {'"prompt": [2]' in each for each in last} == {True, False}
    assert all('"on"' in each and '"prompt": [1]' not in each for each in last)
    assert samples[-1]["tokens"] > samples[0]["tokens"]
    assert samples[-1]["tokens"] <= 10 * len(prompts)


def _wait_until(is_done: Any) -> None:
    deadline = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
