"""`leadout bench` on a tiny pair: real servers in turns, and the page in a browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest

from leadout.bench.results import ROUNDS, BenchResult, Measured, RoundsFile
from leadout.errors import NEGATIVE, SUCCESS, UNDECIDED
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.processes import Process, family_of, wait_until_gone
from support.tiny_chat import MASK_TOKEN, write_tiny_chat_target

K = TINY_DRAFTER.max_draft_tokens
TOKENS, CONCURRENCIES, ROUND_COUNT = 12, (1, 4), 3
SECONDS = 1.5  # a busy machine needs a part of them for a single step
ARMS = ("bare", "bare-again", "fixed")
KILLED_AFTER = 3  # measurements: one round
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Servers run as users run them, and log which plugins they load.
pytestmark = pytest.mark.timeout(7200)  # three servers
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # there are three of them
}


@dataclass(frozen=True)
class Story:
    """A bench; with --nightly it was killed on its way and then resumed."""

    out: Path
    killed: list[Process]
    left_by_kill: list[Process]
    before_resume: list[Measured]
    printed: str

    @property
    def result(self) -> BenchResult:
        return BenchResult.model_validate_json((self.out / "results.json").read_text())


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, nightly: bool) -> Story:
    folder = tmp_path_factory.mktemp("bench")
    config = replace(TINY_DRAFTER, target_num_layers=6, mask_token_id=MASK_TOKEN)
    target = write_tiny_chat_target(folder / "target")
    drafter = write_random_drafter(folder / "drafter", config)
    prompts = [{"prompt": f"Tell me {n} words about {n}."} for n in range(20)]
    (folder / "words.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    words = [sys.executable, "-m", "leadout", "bench", str(target), "--draft", str(drafter)]
    words += ["--prompts", str(folder / "words.jsonl"), "--out", str(folder / "out")]
    words += [word for c in CONCURRENCIES for word in ("--concurrency", str(c))]
    words += [
        "--rounds",
        str(ROUND_COUNT),
        "--seconds",
        str(SECONDS),
        "--output-tokens",
        str(TOKENS),
    ]
    words += ["--turns", "slices"]
    words += ["--json", "--resume", "--", "--dtype", "float32", "--max-model-len", "256"]
    if not nightly:  # three servers compile for minutes
        words += ["--enforce-eager"]
    killed, left = _kill_on_its_way(words, folder / "out" / ROUNDS) if nightly else ([], [])
    before = RoundsFile(folder / "out").read()
    ended = subprocess.run(
        words, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=6600
    )
    # A few tokens of a tiny model on a busy machine: the measured speed-up may be anything.
    assert ended.returncode in (SUCCESS, NEGATIVE, UNDECIDED), ended.stderr
    return Story(folder / "out", killed, left, before, ended.stdout)


def _kill_on_its_way(words: list[str], rounds: Path) -> tuple[list[Process], list[Process]]:
    """The processes that ran when the bench was killed, and those that remained."""
    run = subprocess.Popen(
        words, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while not rounds.exists() or rounds.read_bytes().count(b"\n") < KILLED_AFTER:
        assert run.poll() is None, run.communicate()[1].decode()
        time.sleep(0.1)
    family = family_of(run.pid)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    return family, wait_until_gone(family, seconds=600)


@pytest.mark.nightly  # of a bench; those of one server: test_server_end.py
def test_a_kill_leaves_no_process_behind(story: Story) -> None:
    """Also none of those that were stopped at that moment."""
    assert sum("EngineCore" in process.command for process in story.killed) == len(ARMS)
    assert story.left_by_kill == []


@pytest.mark.nightly  # starts all servers twice; without servers: unit/bench/test_run.py
def test_a_resumed_bench_measures_nothing_twice(story: Story) -> None:
    after = RoundsFile(story.out).read()
    assert len(story.before_resume) >= KILLED_AFTER
    assert after[: len(story.before_resume)] == story.before_resume


def test_every_cell_has_its_rounds_and_its_speedup(story: Story) -> None:
    cells = [each.cell for each in RoundsFile(story.out).read()]
    assert len(cells) == len(set(cells)) == len(CONCURRENCIES) * ROUND_COUNT * len(ARMS)
    result = story.result
    assert BenchResult.model_validate_json(story.printed) == result
    assert [(c.concurrency, c.arm) for c in result.cells] == [
        (concurrency, arm) for concurrency in CONCURRENCIES for arm in ARMS
    ]
    for cell in result.cells:
        assert cell.prompt_set == "words"
        assert len(cell.rounds) == ROUND_COUNT
        assert (cell.speedup is None) == (cell.arm == "bare")
        assert (cell.low, cell.high) == (None, None)  # too few rounds
        assert cell.tokens_per_second.low > 0
        assert cell.processor_seconds_per_token.low > 0
        assert cell.tpot.median > 0
    assert len(result.geometric_means) == len(result.bare_against_bare) == len(CONCURRENCIES)


def test_all_servers_run_for_the_same_time_in_slices(story: Story) -> None:
    """A busy machine ends slices late, but those of all servers."""
    measured = RoundsFile(story.out).read()
    assert min(each.load.seconds for each in measured) >= 0.99 * SECONDS
    usual = [median(each.load.seconds for each in measured if each.cell.arm == arm) for arm in ARMS]
    assert max(usual) < 2 * min(usual)


def test_only_the_arm_with_a_drafter_counts_drafts(story: Story) -> None:
    for cell in story.result.cells:
        if cell.arm.startswith("bare"):
            assert cell.acceptance_length is None
            continue
        assert cell.acceptance_length is not None
        assert 1 <= cell.acceptance_length <= K + 1
        assert len(cell.acceptance_by_position) == K
        assert all(each.drafts > 0 for each in cell.rounds)


def test_servers_are_plain_vllm_without_prefix_caching(story: Story) -> None:
    for arm in ARMS:
        log = (story.out / "logs" / f"{arm}.log").read_text()
        assert "is installed but disabled by LEADOUT_PLUGIN=0" in log
        assert "'enable_prefix_caching': False" in log


def test_the_report_opens_in_a_browser_with_all_charts(story: Story) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    page = f"file://{story.out / 'report.html'}"
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--dump-dom", page],
        capture_output=True,
        text=True,
        timeout=900,
    )
    # Means, the one set, acceptance, latency at each concurrency.
    assert shown.stdout.count('<svg class="chart"') == 3 + len(CONCURRENCIES)
    for title in ("speed-up on words", "acceptance by position", "latency at concurrency 4"):
        assert f'aria-label="{title}"' in shown.stdout
    assert shown.stdout.count("<use ") > 0
