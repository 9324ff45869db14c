"""Metrics over real HTTP: the last minute's acceptance, and errors that never reach the server."""

import json
import logging
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from leadout.engine import metrics
from leadout.engine.capture import CaptureCounters
from leadout.engine.counters import WINDOW_SECONDS, small_file, write_small
from leadout.engine.live import LiveMetrics, live_metrics_file
from leadout.engine.metrics import AcceptanceWatch
from leadout.engine.plugin import SWITCH
from leadout.engine.server import Server, server_command
from leadout.engine.settings import SCHEDULER
from support.shared import QUICK_DRAFTER, first_turns

K = 3
CONCURRENCY = 8
WARNING = "below break-even"

# One metric, by name and labels, as in {("leadout:acceptance_rate", "smollm2", "0", "2"): 0.1}.
Samples = dict[tuple[str, ...], float]


def parse(text: str) -> Samples:
    order = ("model_name", "engine", "position", "reason")
    return {
        (sample.name, *(sample.labels[label] for label in order if label in sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        if family.name.startswith(("leadout:", "vllm:spec_decode"))
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that warns of any acceptance after about a second."""
    speculative = {
        "method": "dflash",
        "model": str(QUICK_DRAFTER),
        "num_speculative_tokens": K,
    }
    arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    arguments += ["--max-num-seqs", str(CONCURRENCY), "--served-model-name", "smollm2"]
    arguments += ["--speculative-config", json.dumps(speculative)]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "LEADOUT_BREAK_EVEN": "5",
        "LEADOUT_BREAK_EVEN_MINUTES": "0.02",
    }
    log = tmp_path_factory.mktemp("server") / "server.log"
    command = server_command(smollm2, arguments)
    with Server(command, log=log, environment=environment) as running:
        yield running


def complete(server: Server, prompts: list[str], tokens: int) -> None:
    def post(prompt: str) -> None:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body | {"temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=900) as response:
            assert json.load(response)["usage"]["completion_tokens"] == tokens

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(post, prompts))


def scrape(server: Server) -> Samples:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=900) as response:
        return parse(response.read().decode())


def test_stock_vllm_is_warned_of_requests_that_end_it_on_cpus(server: Server) -> None:
    log = server.log.read_text()
    assert log.count("ends when it samples for a request with top_k but no top_p, or with a s") == 1
    assert f"--scheduler-cls {SCHEDULER}" in log


def test_gauges_agree_with_vllms_counters(server: Server) -> None:
    before = scrape(server)
    assert not [name for name, *_ in before if name.startswith("leadout:")]
    for _ in range(5):
        start = time.monotonic()
        complete(server, first_turns("gsm8k", 4), tokens=16)
        samples = scrape(server)
        is_in_time = time.monotonic() - start < WINDOW_SECONDS - 1
        if is_in_time:
            break
        # The window has lost a part: again, once it has lost the rest.
        time.sleep(WINDOW_SECONDS + 1)
        before = scrape(server)
    assert is_in_time, "too slow: the window has lost what the counters hold"

    def counter(name: str, *position: str) -> float:
        key = (f"vllm:spec_decode_num_{name}_total", "smollm2", "0", *position)
        return samples[key] - before.get(key, 0.0)

    drafts = counter("drafts")
    assert drafts > 0
    assert counter("accepted_tokens") > 0
    expected = {
        ("leadout:acceptance_length", "smollm2", "0"): 1 + counter("accepted_tokens") / drafts
    }
    for position in map(str, range(K)):
        accepted = counter("accepted_tokens_per_pos", position)
        expected["leadout:acceptance_rate", "smollm2", "0", position] = accepted / drafts
    shown = {key: value for key, value in samples.items() if key[0].startswith("leadout:")}
    assert shown == pytest.approx(expected, abs=1e-6)


def test_low_acceptance_is_logged_once(server: Server) -> None:
    prompts = first_turns("mt_bench", CONCURRENCY)
    for _ in range(20):
        complete(server, prompts, tokens=32)
        if WARNING in server.log.read_text():
            break
    complete(server, prompts, tokens=32)
    lines = [line for line in server.log.read_text().splitlines() if WARNING in line]
    assert len(lines) == 1, server.log.read_text()
    assert "WARNING" in lines[0]
    assert f"{QUICK_DRAFTER}`, or serve without the drafter" in lines[0]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """A registry of the test's own, with the default registry's settings."""
    fresh = CollectorRegistry(auto_describe=True)
    monkeypatch.setattr(metrics, "REGISTRY", fresh)
    monkeypatch.setattr(metrics, "_registered", None)
    return fresh


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Our log lines of any level, however vLLM or an earlier test has configured its loggers."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    logger = logging.getLogger("vllm.leadout")
    monkeypatch.setattr(logger, "handlers", [handler])
    before = logger.level
    logger.setLevel(logging.DEBUG)  # not by its attribute: loggers remember which levels are on
    yield records
    logger.setLevel(before)


def config(method: str | None = "dflash") -> Any:
    speculative = None if method is None else SimpleNamespace(method=method, model="a/drafter")
    model = SimpleNamespace(model="a/target", served_model_name="name")
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=model,
        instance_id="a-test",
        additional_config={},
    )


def step(drafts: int, accepted: int) -> SchedulerStats:
    """Drafts of K tokens that were all accepted or not at all."""
    stats = SpecDecodingStats.new(K)
    for index in range(drafts):
        stats.observe_draft(num_draft_tokens=K, num_accepted_tokens=K if index < accepted else 0)
    return SchedulerStats(spec_decoding_stats=stats)


def test_vllm_loads_the_plugin() -> None:
    assert AcceptanceWatch in load_stat_logger_plugin_factories()


def test_gauges_of_live_control_are_shown(
    registry: CollectorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    AcceptanceWatch(vllm_config=config(), engine_indexes=[0, 1])
    assert "leadout:draft_length" not in generate_latest(registry).decode()
    numbers = LiveMetrics(written=time.time(), steps=2, drafted=5, gain=1.5)
    write_small(numbers, live_metrics_file("a-test", 1))
    shown = parse(generate_latest(registry).decode())
    assert shown["leadout:draft_length", "name", "1"] == 2.5
    assert shown["leadout:estimated_gain", "name", "1"] == 1.5
    assert ("leadout:draft_length", "name", "0") not in shown


def test_capture_counters_are_shown_without_a_drafter(
    registry: CollectorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    captures = config(None)
    captures.additional_config = {"leadout": {"capture": {"folder": "traffic"}}}
    AcceptanceWatch(vllm_config=captures, engine_indexes=[0])
    assert "leadout:captured" not in generate_latest(registry).decode()
    write_small(CaptureCounters(captured=5, disk=2), small_file("capture", "a-test", 0))
    shown = parse(generate_latest(registry).decode())
    assert shown["leadout:captured_requests_total", "name", "0"] == 5
    assert shown["leadout:capture_dropped_requests_total", "name", "0", "disk"] == 2


def test_gauges_are_per_engine_and_disappear_without_drafts(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(metrics, "monotonic", lambda: now)
    watching = AcceptanceWatch(vllm_config=config(), engine_indexes=[0, 1])
    watching.record(step(4, 1), None, mm_cache_stats=None, engine_idx=0)
    watching.record(step(2, 2), None, mm_cache_stats=None, engine_idx=1)
    watching.record(SchedulerStats(), None, engine_idx=1)  # a step without drafts
    watching.record(None, None, engine_idx=1)
    rate = "leadout:acceptance_rate"
    text = generate_latest(registry).decode()
    assert text.count("# TYPE leadout:acceptance_length gauge") == 1
    assert parse(text) == {
        ("leadout:acceptance_length", "name", "0"): 1 + 3 / 4,
        ("leadout:acceptance_length", "name", "1"): 1 + 6 / 2,
        **{(rate, "name", "0", str(position)): 1 / 4 for position in range(K)},
        **{(rate, "name", "1", str(position)): 1.0 for position in range(K)},
    }
    now = 160.0
    assert parse(generate_latest(registry).decode()) == {}


def test_a_second_engine_replaces_the_first(registry: CollectorRegistry) -> None:
    first = AcceptanceWatch(vllm_config=config(), engine_indexes=[0])
    second = AcceptanceWatch(vllm_config=config(), engine_indexes=[0])
    first.record(step(4, 4), None)
    second.record(step(4, 0), None)
    samples = parse(generate_latest(registry).decode())
    assert samples["leadout:acceptance_length", "name", "0"] == 1.0


@pytest.mark.parametrize(
    ("method", "switch", "version", "watches"),
    [
        ("dflash", None, "0.32.1", True),
        ("dflash", "1", "0.32.1", True),
        ("dflash", "0", "0.32.1", False),
        ("dflash", None, "0.33.0", False),
        ("ngram", None, "0.32.1", False),
        (None, None, "0.32.1", False),
    ],
)
def test_metrics_need_a_dflash_drafter_and_leadout_switched_on(
    registry: CollectorRegistry,
    log: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
    method: str | None,
    switch: str | None,
    version: str,
    watches: bool,
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    monkeypatch.setattr("vllm.__version__", version)
    watching = AcceptanceWatch(vllm_config=config(method), engine_indexes=[0])
    watching.record(step(4, 4), None, an_argument_of_a_later_vllm=1)
    text = generate_latest(registry).decode()
    assert ("leadout:acceptance_length" in text) is watches
    assert text or not watches
    assert log == []


def test_an_error_while_recording_is_logged_once(
    registry: CollectorRegistry, log: list[logging.LogRecord]
) -> None:
    watching = AcceptanceWatch(vllm_config=config(), engine_indexes=[0])
    watching.record(step(4, 4), None)
    broken = SimpleNamespace(spec_decoding_stats=SimpleNamespace(num_drafts="four"))
    for _ in range(3):
        watching.record(broken, None)
    assert [record.levelname for record in log] == ["ERROR"]
    assert "metrics is off after an error: AttributeError: " in log[0].getMessage()
    assert parse(generate_latest(registry).decode()) == {}


def test_an_error_while_scraping_is_logged_once(
    registry: CollectorRegistry, log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = AcceptanceWatch(vllm_config=config(), engine_indexes=[0])
    watching.record(step(4, 4), None)
    monkeypatch.delattr(metrics.AcceptanceWindow, "acceptance_length")
    for _ in range(3):
        assert parse(generate_latest(registry).decode()) == {}
    assert len(log) == 1


def test_an_invalid_setting_is_logged_once(
    registry: CollectorRegistry, log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEADOUT_BREAK_EVEN", "much")
    watching = AcceptanceWatch(vllm_config=config(), engine_indexes=[0])
    watching.record(step(4, 4), None)
    assert generate_latest(registry) == b""
    assert len(log) == 1
    assert "LEADOUT_BREAK_EVEN is 'much', expected a number of at least 1" in log[0].getMessage()


def test_the_warning_sums_over_engines(
    registry: CollectorRegistry, log: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(metrics, "monotonic", lambda: now)
    watching = AcceptanceWatch(vllm_config=config(), engine_indexes=[0, 1])
    for second in range(300):
        now = 100.0 + second
        for engine in (0, 1):
            watching.record(step(2, 0), None, engine_idx=engine)  # alone too few drafts a minute
    assert [record.levelname for record in log] == ["WARNING"]
    assert "run `leadout check a/target a/drafter`" in log[0].getMessage()
