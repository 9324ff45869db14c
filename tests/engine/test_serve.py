"""`leadout serve` over real HTTP; with --nightly also stock `vllm serve` with Leadout installed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from leadout.engine.server import Server, server_command
from leadout.pairing import read_target
from support.faults import FAULTS
from support.processes import family_of
from support.prompts import PROMPTS
from support.shared import QUICK_DRAFTER

SMALL = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
    *("--max-num-seqs", "16", "--served-model-name", "smollm2"),
]
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
SPECULATION = f'{{"method": "dflash", "model": "{QUICK_DRAFTER}", "num_speculative_tokens": 3}}'
TOKENS = 24


def texts_of(url: str) -> dict[str, list[str]]:
    """Greedy answers to eight prompts at once: both endpoints, streamed and not."""

    async def ask() -> dict[str, list[str]]:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=900)
        greedy = {"model": "smollm2", "temperature": 0.0, "max_tokens": TOKENS}

        async def complete(prompt: str) -> str:
            answer = await client.completions.create(prompt=prompt, **greedy)
            return str(answer.choices[0].text)

        async def complete_streamed(prompt: str) -> str:
            stream = await client.completions.create(prompt=prompt, stream=True, **greedy)
            return "".join([part.choices[0].text async for part in stream])

        async def chat(prompt: str) -> str:
            messages = [{"role": "user", "content": prompt}]
            answer = await client.chat.completions.create(messages=messages, **greedy)
            return str(answer.choices[0].message.content)

        async def chat_streamed(prompt: str) -> str:
            messages = [{"role": "user", "content": prompt}]
            stream = await client.chat.completions.create(messages=messages, stream=True, **greedy)
            return "".join([part.choices[0].delta.content or "" async for part in stream])

        return {
            way.__name__: list(await asyncio.gather(*[way(prompt) for prompt in PROMPTS]))
            for way in (complete, complete_streamed, chat, chat_streamed)
        }

    return asyncio.run(ask())


def counter(url: str, name: str) -> float:
    metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    (value,) = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} ([0-9.e+]+)$", metrics, re.MULTILINE)
    return float(value)


@pytest.fixture(scope="module")
def bare_texts(smollm2: Path, run_engine: Any) -> dict[str, list[str]]:
    """What vLLM says without a drafter, which no server changes."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with run_engine(smollm2, max_model_len=512) as llm:
        completed = [one.outputs[0].text for one in llm.generate([*PROMPTS], params)]
        said = [one.outputs[0].text for one in llm.chat(conversations, params)]
    assert "Paris" in completed[0]
    ways = {"complete": completed, "chat": said}
    return ways | {f"{way}_streamed": texts for way, texts in ways.items()}


@pytest.mark.nightly  # test_metrics_server.py has a stock server with this drafter
def test_stock_vllm_with_leadout_installed_writes_the_same_text(
    smollm2: Path, bare_texts: dict[str, list[str]], tmp_path: Path
) -> None:
    command = server_command(smollm2, [*SMALL, "--speculative-config", SPECULATION])
    with Server(command, log=tmp_path / "log", environment=ENVIRONMENT) as server:
        assert texts_of(server.url) == bare_texts
        assert counter(server.url, "vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.fixture(scope="module")
def leadout_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("leadout") / "server.log"
    command = [sys.executable, "-m", "leadout", "serve", str(smollm2)]
    command += ["--draft", str(QUICK_DRAFTER), *SMALL]
    with Server(command, log=log, environment=ENVIRONMENT) as server:
        yield server


def test_leadout_serve_writes_the_same_text_and_shows_acceptance(
    leadout_server: Server, bare_texts: dict[str, list[str]]
) -> None:
    assert texts_of(leadout_server.url) == bare_texts
    drafts = counter(leadout_server.url, "vllm:spec_decode_num_drafts_total")
    accepted = counter(leadout_server.url, "vllm:spec_decode_num_accepted_tokens_total")
    assert 1.2 < 1 + accepted / drafts < 4  # a weak but real drafter
    log = leadout_server.log.read_text()
    assert "leadout: K = 3" in log


def test_leadout_serve_has_become_the_server(leadout_server: Server) -> None:
    family = family_of(os.getpid())
    (guard,) = [process for process in family if "leadout.engine.child_process" in process.command]
    first_born = family_of(guard.pid)[1]
    # The process that the guard started as `leadout serve` is the server now.
    assert "-m leadout serve" in guard.command
    assert "-m vllm.entrypoints.openai.api_server" in first_born.command


def test_cut_requests_do_not_disturb_the_others(
    leadout_server: Server, bare_texts: dict[str, list[str]]
) -> None:
    """Sixteen at once: a third fail, are left by their client in mid-stream, or meet the limit."""

    async def ask() -> list[str | BaseException]:
        client = AsyncOpenAI(base_url=f"{leadout_server.url}/v1", api_key="none", timeout=900)
        greedy = {"model": "smollm2", "temperature": 0.0}

        async def whole(prompt: str) -> str:
            answer = await client.completions.create(prompt=prompt, max_tokens=TOKENS, **greedy)
            return str(answer.choices[0].text)

        async def left_in_mid_stream(prompt: str) -> str:
            stream = await client.completions.create(
                prompt=prompt, max_tokens=400, stream=True, **greedy
            )
            async for _ in stream:
                await stream.close()
                break
            return "left"

        async def failing(prompt: str) -> str:
            await client.completions.create(prompt=prompt, max_tokens=100_000, **greedy)
            return "accepted"

        async def up_to_the_limit(prompt: str) -> str:
            answer = await client.completions.create(
                prompt=prompt * 40, max_tokens=512 - 1, extra_body={"truncate_prompt_tokens": 470},
                **greedy,
            )  # fmt: skip
            return str(answer.choices[0].finish_reason)

        ways = [whole, whole, left_in_mid_stream, whole, whole, failing, whole, whole]
        ways += [up_to_the_limit, whole, whole, left_in_mid_stream, whole, whole, failing, whole]
        prompts = [*PROMPTS, *PROMPTS]
        asked = [way(prompt) for way, prompt in zip(ways, prompts, strict=True)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    outcomes = asyncio.run(ask())
    expected = [*bare_texts["complete"], *bare_texts["complete"]]
    cut = {2, 5, 8, 11, 14}
    for place, (outcome, text) in enumerate(zip(outcomes, expected, strict=True)):
        if place not in cut:
            assert outcome == text
    assert isinstance(outcomes[5], Exception)
    assert isinstance(outcomes[14], Exception)
    assert outcomes[2] == outcomes[11] == "left"
    # The server is as well as before.
    client = OpenAI(base_url=f"{leadout_server.url}/v1", api_key="none", timeout=900)
    again = client.completions.create(
        model="smollm2", prompt=PROMPTS[0], temperature=0.0, max_tokens=TOKENS
    )
    assert again.choices[0].text == bare_texts["complete"][0]


@pytest.mark.nightly  # the command that it becomes: test_refusals.py; signals: test_server_end.py
def test_an_unfit_pair_is_served_bare_on_request_and_a_signal_ends_it(
    smollm2: Path, bare_texts: dict[str, list[str]], tmp_path: Path
) -> None:
    """With the engine's other wheel, `vllm`, which is known by its distribution's name."""
    dist = tmp_path / "site" / "vllm-0.32.0+cpu.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(dist.parent)}
    (fault,) = [fault for fault in FAULTS if fault.name == "nan-weight"]
    faulty = fault.make(QUICK_DRAFTER, tmp_path / "faulty", read_target(smollm2))
    command = [sys.executable, "-m", "leadout", "serve", str(smollm2), "--draft", str(faulty)]
    command += ["--if-unfit", "bare", *SMALL]
    with Server(command, log=tmp_path / "log", environment=environment) as server:
        assert "serving WITHOUT speculation" in server.log.read_text()
        assert texts_of(server.url) == bare_texts

        family = family_of(os.getpid())
        (process,) = [p for p in family if "-m vllm.entrypoints.cli.main serve" in p.command]
        os.kill(process.pid, signal.SIGTERM)
        assert server.wait_until_ended(600) == 0
