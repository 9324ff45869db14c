"""Live control inside vLLM: the same answers, whatever it decides, and never a dead engine."""

import json
import logging
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from leadout.checkpoints import load_weights, read_checkpoint, write_checkpoint
from leadout.control.policy import Decision, Policy
from leadout.engine.scheduler import CpuSeedWorkaround, LiveAsyncScheduler, LiveScheduler
from leadout.engine.settings import LiveSettings
from leadout.registry import Registry
from support.drafters import TINY_DRAFTER, random_drafter
from support.models import ROOT, tiny_llama
from support.tiny_engine import live_engine_arguments
from support.version_registry import publish

K = TINY_DRAFTER.max_draft_tokens
CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
TOKENS = 40
DEFAULTS = LiveSettings()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama().save_pretrained(folder / "target")
    words_as_tokens().save_pretrained(folder / "target")
    write_checkpoint(folder / "drafter", random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    return folder / "target", folder / "drafter"


def words_as_tokens() -> PreTrainedTokenizerFast:
    """A tokenizer for stop strings: token 7 is the word w7."""
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(320)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def prompts() -> list[list[int]]:
    """Of many lengths; the last ones repeat themselves, and so will the answers."""
    draws = random.Random(0)
    found = [[draws.randrange(2, 320) for _ in range(length)] for length in (3, 9, 17, 30, 5, 12)]
    return [*found, [7, 8, 9, 10, 11] * 6, [40, 41, 42, 43] * 9]


def asks() -> list[Any]:
    from vllm import SamplingParams

    extra: list[dict[str, Any] | None] = [None] * len(prompts())
    extra[1], extra[2], extra[3] = {"leadout_draft": "off"}, {"leadout_draft": 2}, None
    extra[4] = {"leadout_draft": "nonsense"}
    lengths = [TOKENS, 11, TOKENS, 1, 25, TOKENS, TOKENS, TOKENS]
    return [
        SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, extra_args=more
        )
        for length, more in zip(lengths, extra, strict=True)
    ]


def answers(llm: Any) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts()], asks(), use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def stopped_answers(llm: Any, whole: list[list[int]]) -> list[Any]:
    """The text and tokens of answers that end where a string within them begins."""
    from vllm import SamplingParams

    stops = [f"w{answer[10]} w{answer[11]}" for answer in whole if len(answer) == TOKENS]
    given = [prompt for prompt, answer in zip(prompts(), whole, strict=True) if len(answer) > 30]
    asks = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS, stop=[stop], ignore_eos=True)
        for stop in stops
    ]
    outputs = llm.generate([{"prompt_token_ids": each} for each in given], asks, use_tqdm=False)
    return [(each.outputs[0].text, list(each.outputs[0].token_ids)) for each in outputs]


Open = Callable[..., Any]


@pytest.fixture(scope="module")
def engine(run_engine: Open) -> Open:
    """Of the tiny target, for few and short requests."""
    return partial(run_engine, max_model_len=256, max_num_seqs=8)


@pytest.fixture(scope="module")
def bare_engine_said(engine: Open, pair: tuple[Path, Path]) -> tuple[list[list[int]], list[Any]]:
    """All answers, and those that a stop string cuts short."""
    with engine(pair[0]) as llm:
        whole = answers(llm)
        return whole, stopped_answers(llm, whole)


@pytest.fixture(scope="module")
def bare(bare_engine_said: tuple[list[list[int]], list[Any]]) -> list[list[int]]:
    return bare_engine_said[0]


@pytest.fixture
def live(engine: Open, pair: tuple[Path, Path]) -> Open:
    def open_engine(settings: LiveSettings = DEFAULTS) -> Any:
        return engine(
            pair[0],
            speculative_config={
                "method": "dflash",
                "model": str(pair[1]),
                "num_speculative_tokens": K,
            },
            **live_engine_arguments(settings),
        )

    return open_engine


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Our log lines, however vLLM or an earlier test has configured its loggers."""
    found: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: found.append(record.getMessage()))
    logger = logging.getLogger("vllm.leadout")
    monkeypatch.setattr(logger, "handlers", [handler])
    before = logger.level
    logger.setLevel(logging.INFO)  # not by its attribute: loggers remember which levels are on
    yield found
    logger.setLevel(before)


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


class RandomPolicy(Policy):
    """Verifies and drafts at random, often by prompt lookup: no choice may change an answer."""

    def __init__(self, seed: int) -> None:
        super().__init__(K)
        self._rng = random.Random(seed)
        self.lookup = self.accepted_lookup = self.steps = self.verified = 0

    def decide(self, requests: Any) -> Decision:
        verify, use_lookup = [], []
        count = len(requests.request_ids)
        limits = [K] * count if requests.limits is None else requests.limits.tolist()
        found = [0] * count if requests.lookup is None else requests.lookup.tolist()
        for available, limit_, lookup in zip(
            requests.available.tolist(), limits, found, strict=True
        ):
            is_lookup = lookup > 0 and self._rng.random() < 0.7
            limit = min(limit_, lookup if is_lookup else available)
            verify.append(self._rng.randint(0, limit))
            use_lookup.append(is_lookup)
        return Decision(tuple(verify), self._rng.randint(0, K), False, None, tuple(use_lookup))

    def observe(
        self, outcomes: Any, k: int, seconds: float | None, prefill: int = 0, **_: bool
    ) -> None:
        self.steps += 1
        self.verified += int(outcomes.verified.sum())
        if outcomes.from_lookup is not None:
            self.lookup += int(outcomes.verified[outcomes.from_lookup].sum())
            self.accepted_lookup += int(outcomes.accepted[outcomes.from_lookup].sum())


def test_answers_are_those_of_bare_vllm(
    live: Open, bare: list[list[int]], lines: list[str]
) -> None:
    with live() as llm:
        scheduler = scheduler_of(llm)
        assert isinstance(scheduler, LiveScheduler)
        assert answers(llm) == bare
        control = scheduler._control
        assert control is not None, lines
        assert control._policy.costs.has_estimate
        # Requests leave nothing behind.
        assert not control._lookups
        assert not control._limits
        nonsense = [line for line in lines if "is 'nonsense', expected" in line]
        assert len(nonsense) == 1

        # Whatever is decided: all lengths, at all steps, with and without prompt lookup.
        policy = RandomPolicy(seed=1)
        control._policy = policy
        for _ in range(2):
            assert answers(llm) == bare
        assert scheduler._control is control, lines
        assert policy.steps > 20
        assert policy.accepted_lookup > 0

        # Requests that leave in the midst of it.
        core = llm.llm_engine
        for number, (prompt, ask) in enumerate(zip(prompts(), asks(), strict=True)):
            core.add_request(f"r{number}", {"prompt_token_ids": prompt}, ask)
        finished: dict[str, list[int]] = {}
        for step in range(200):
            if step == 4:
                core.abort_request(["r0", "r6"])
            for output in core.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            if not core.has_unfinished_requests():
                break
        for number in (1, 2, 3, 4, 5, 7):
            assert finished[f"r{number}"] == bare[number]
        assert scheduler._control is control, lines
        assert not control._limits


def test_a_step_ahead_of_the_model_the_answers_are_the_same(
    live: Open, bare: list[list[int]], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM always schedules in step; what a GPU does is pinned here for once."""
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def keep_ahead(vllm_config: Any) -> None:
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep_ahead))
    with live() as llm:
        scheduler = scheduler_of(llm)
        assert isinstance(scheduler, LiveAsyncScheduler)
        control = scheduler._control
        assert control._min_match == 0
        assert answers(llm) == bare
        assert control._policy.costs.has_estimate
        policy = control._policy = RandomPolicy(seed=2)
        assert answers(llm) == bare
        assert scheduler._control is control, lines
        assert policy.verified > 50
        assert policy.lookup == 0


def test_stop_tokens_and_strings_among_the_drafts_end_answers_where_bare_vllm_ends_them(
    live: Open, bare_engine_said: tuple[list[list[int]], list[Any]]
) -> None:
    from vllm import SamplingParams

    bare, stopped = bare_engine_said
    assert stopped
    assert all(0 < len(tokens) < TOKENS for _, tokens in stopped)
    prompt, whole = prompts()[7], bare[7]
    stop = whole[10]
    ask = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, stop_token_ids=[stop], ignore_eos=True, detokenize=False
    )
    with live(LiveSettings(prompt_lookup_min_match=1)) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], [ask], use_tqdm=False)
        assert list(output.outputs[0].token_ids) == whole[: whole.index(stop) + 1]
        scheduler_of(llm)._control._policy = RandomPolicy(seed=3)
        assert stopped_answers(llm, bare) == stopped


@pytest.mark.parametrize(
    "method",
    ["decide", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("observe", "forget"))],
)
def test_a_policy_that_fails_costs_one_line(
    live: Open,
    bare: list[list[int]],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(Policy, method, fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with live() as llm:
        assert answers(llm) == bare
        assert scheduler_of(llm)._control is None
    told = [line for line in lines if "live control is off" in line]
    assert len(told) == 1
    assert "RuntimeError: no idea" in told[0]
    assert not list(tmp_path.glob("**/live-*"))  # no numbers that no one updates


def test_settings_that_cannot_be_read_leave_vllm_as_it_is(
    live: Open, lines: list[str], tmp_path: Path
) -> None:
    with live(LiveSettings(tuned=tmp_path / "absent.json")) as llm:
        assert scheduler_of(llm)._control is None
    assert sum("absent.json" in line for line in lines) == 1


@pytest.mark.nightly
def test_without_a_drafter_the_scheduler_is_vllms_but_for_seeds(
    engine: Open, pair: tuple[Path, Path]
) -> None:
    with engine(pair[0], **live_engine_arguments(DEFAULTS)) as llm:
        bases = type(scheduler_of(llm)).__mro__[1:]
        assert [each for each in bases if each.__module__.startswith("leadout.")] == [
            CpuSeedWorkaround
        ]


@pytest.mark.nightly  # V2 in CI: test_runners.py
@pytest.mark.parametrize("mode", ["live", "tuned"])
def test_v2_with_async_scheduling_serves_and_swaps(
    pair: tuple[Path, Path], bare: list[list[int]], tmp_path: Path, mode: str
) -> None:
    """In Triton's interpreter; drafts stay in the worker there, only their number is chosen."""
    registry = Registry(tmp_path / "registry")
    for seed in (0, 1):
        publish(registry, pair[0], tmp_path, seed=seed, config=CONFIG)
    asked = prompts()[:3]
    arguments = [str(pair[0]), str(registry.folder), str(K), json.dumps(asked), mode]
    ended = subprocess.run(
        [sys.executable, "-m", "support.live_on_v2", *arguments],
        cwd=ROOT / "tests",
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
    )
    told = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert told, ended.stdout[-3000:] + ended.stderr[-3000:]
    result = json.loads(told[0].removeprefix("RESULT "))
    assert result["is_async"]
    assert len(result["answers"]) == 3  # version 1, 2, and 1 again
    stored = [
        load_weights(read_checkpoint(registry.path(version)))["norm.weight"].tolist()
        for version in (1, 2, 1)
    ]
    assert stored[0] != stored[1]
    assert result["norms"] == stored
    for found in result["answers"]:
        for answer, expected in zip(found, [*bare[:3], bare[0]], strict=True):
            assert answer == expected[: len(answer)]
    # Steps without drafts skip the draft layers.
    assert result["steps_without_drafts"] > 0
    assert 0 < result["blocks"] <= result["steps_with_drafts"]
    if mode == "live":
        assert result["control"]
        assert result["lookup_min_match"] == 0
        assert len(set(result["lengths"])) > 2  # verified drafts per request and step
