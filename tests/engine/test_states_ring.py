"""The states that a server puts into its ring are the target's own, for the served tokens only."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leadout.checkpoints import write_checkpoint
from leadout.engine.capture import OPT_OUT_ID
from leadout.engine.counters import read_small, small_file
from leadout.engine.served_texts import StatesCounters, TextCounters, ring_info
from leadout.engine.settings import (
    LEARN,
    SCHEDULER,
    STATES_TAP_WORKER,
    LearnSettings,
    with_section,
)
from leadout.models import fingerprint
from leadout.ring.folder import prepare, ring_files
from leadout.ring.sequences import RingReader, ServedSequence
from support.drafters import random_drafter
from support.models import ROOT, tiny_llama
from support.tiny_engine import PROMPTS as PROMPTS_OF_TINY_ENGINE
from support.version_registry import CONFIG

PROMPTS = [[5, 9, 2, 44, *range(100, 190)], [60, 61, 62, 300], [7, 8, 9] * 20]
# Each needs six blocks in the end, and the cache has nine for them.
LONG_PROMPTS = [list(range(first, first + 100)) for first in (10, 40, 70, 120)]
K = CONFIG.max_draft_tokens
TOKENS, LONG_TOKENS = 24, 80
BLOCK, BLOCKS = 32, 10


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "drafter"
    write_checkpoint(folder, random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    return folder


@pytest.fixture
def ring() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="leadout-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def learning(ring: Path, target: Path, **settings: Any) -> LearnSettings:
    usual: dict[str, Any] = {
        "folder": ring,
        "rate": 1.0,
        "max_bytes": 16 << 20,
        "server_id": "0123456789abcdef",
        "target": str(target),
        "target_fingerprint": fingerprint(target),
        "layer_ids": CONFIG.target_layer_ids,
        "hidden_size": CONFIG.hidden_size,
        "dtype": "float32",
    }
    return LearnSettings(**usual | settings)


def engine_settings(section: LearnSettings, drafter: Path) -> dict[str, Any]:
    return {
        "skip_tokenizer_init": True,
        "scheduler_cls": SCHEDULER,
        "worker_cls": STATES_TAP_WORKER,
        "additional_config": with_section({}, LEARN, section),
        "speculative_config": {
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": K,
        },
    }


def target_states(target: Path, tokens: Sequence[int]) -> Tensor:
    """By transformers: the outputs of the tapped layers, side by side."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            outputs[layer] = (output[0] if isinstance(output, tuple) else output).view(
                len(tokens), -1
            )

        return hook

    for layer in CONFIG.target_layer_ids:
        model.model.layers[layer].register_forward_hook(keep(layer))
    with torch.no_grad():
        model(torch.tensor([list(tokens)]))
    return torch.cat([outputs[layer] for layer in CONFIG.target_layer_ids], -1)


def require_true(sequence: ServedSequence, target: Path, tolerance: float = 1e-3) -> None:
    text = [*sequence.prompt, *sequence.response]
    expected = target_states(target, text)[sequence.first : len(text) - 1]
    torch.testing.assert_close(sequence.states.float(), expected, atol=tolerance, rtol=tolerance)


def generate(
    llm: Any, prompts: list[list[int]], tokens: int = TOKENS, **params: Any
) -> list[list[int]]:
    from vllm import SamplingParams

    usual = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(**usual | params),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def draft_from(llm: Any, texts: list[list[int]]) -> list[int]:
    """Makes the drafter propose what these texts continue with, often with a wrong token.

    Returns a list that will hold how many draft tokens were rejected in each block.
    """
    runner, chance = worker_of(llm).model_runner, random.Random(0)
    propose, rejected = runner.drafter.propose, []

    def propose_text(**settings: Any) -> Tensor:
        drafts = propose(**settings)
        starts = settings["common_attn_metadata"].query_start_loc_cpu.tolist()
        tokens, positions = settings["target_token_ids"], settings["target_positions"]
        invalid = settings["num_rejected_tokens_gpu"]
        for row in range(len(drafts)):
            wrong = 0 if invalid is None else int(invalid[row])
            rejected.append(wrong)
            last = starts[row + 1] - 1 - wrong
            place, known = int(positions[last]), int(tokens[last])
            for text in texts:
                drafted = text[place + 2 : place + 2 + K]
                if len(drafted) == K and text[place] == known:
                    if chance.random() < 0.7:
                        drafted[chance.randrange(K)] = chance.randrange(10, 300)
                    drafts[row] = torch.tensor(drafted)
        return drafts

    runner.drafter.propose = propose_text
    return rejected


def count_preemptions(llm: Any) -> list[str]:
    """A list that will hold the ids of requests that lose their place in the cache."""
    scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def listen(request: Any, *arguments: Any, **settings: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *arguments, **settings)

    scheduler._preempt_request = listen  # this one engine's scheduler, not vLLM's class
    return preempted


def test_the_ring_holds_the_states_of_served_tokens(
    run_engine: Any, target: Path, drafter: Path, ring: Path
) -> None:
    """Chunked prefill, several requests in a step, accepted and rejected drafts, preemption."""
    with run_engine(target, skip_tokenizer_init=True, max_model_len=256) as llm:
        answers = generate(llm, PROMPTS)
        long_answers = generate(llm, LONG_PROMPTS, tokens=LONG_TOKENS)
    section = learning(ring, target)
    settings = engine_settings(section, drafter) | {
        "max_num_batched_tokens": 64,
        "enable_chunked_prefill": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "block_size": BLOCK,
        "num_gpu_blocks_override": BLOCKS,
    }
    with run_engine(target, **settings) as llm:
        reader = RingReader(ring)
        asked = zip([*PROMPTS, *LONG_PROMPTS], [*answers, *long_answers], strict=True)
        rejected = draft_from(llm, [[*prompt, *answer] for prompt, answer in asked])
        preempted = count_preemptions(llm)
        assert generate(llm, PROMPTS) == answers
        assert preempted == []
        found = sorted(reader.poll(), key=lambda each: PROMPTS.index(each.prompt))
        assert [each.prompt for each in found] == PROMPTS
        assert [each.response for each in found] == answers
        for sequence in found:
            assert sequence.complete
            require_true(sequence, target)
        assert any(each > 0 for each in rejected)
        assert len(rejected) < sum(map(len, answers))  # some were accepted
        assert reader.counters.open == 0
        # What a rejected draft gives is something else: the comparison can fail.
        sequence = found[0]
        changed = [*sequence.prompt[:-1], 17, *sequence.response]
        wrong = target_states(target, changed)[: len(sequence.states)]
        assert (wrong - sequence.states)[len(sequence.prompt) :].abs().max() > 0.01

        # More than fits into the cache: requests are preempted and computed again.
        rejected.clear()
        assert generate(llm, LONG_PROMPTS, tokens=LONG_TOKENS) == long_answers
        assert preempted
        assert any(each > 0 for each in rejected)
        found = sorted(reader.poll(), key=lambda each: LONG_PROMPTS.index(each.prompt))
        assert [each.response for each in found] == long_answers
        for sequence in found:
            assert sequence.complete
            require_true(sequence, target)
        assert reader.counters.lost == reader.counters.open == 0
    assert list(ring_files(ring)) == []  # removed in order


def test_cached_prefixes_opt_outs_and_ended_requests(
    run_engine: Any, target: Path, drafter: Path, ring: Path
) -> None:
    section = learning(ring, target)
    settings = engine_settings(section, drafter) | {
        "block_size": 32,
        "max_model_len": 256,
        "max_num_seqs": 4,
    }
    with run_engine(target, **settings) as llm:
        reader = RingReader(ring)
        engine = llm.llm_engine

        # A prefix from the cache has no states.
        (first,) = generate(llm, PROMPTS[:1])
        prompt = [*PROMPTS[0], 201, 202]
        generate(llm, [prompt])
        whole, cached = reader.poll()
        assert (whole.first, whole.response) == (0, first)
        assert 0 < cached.first <= len(PROMPTS[0])
        assert cached.prompt == prompt
        require_true(whole, target)
        require_true(cached, target)

        # Opted out: nothing of it, in either lane.
        before = [path.read_bytes() for path in ring_files(ring)]
        generate(llm, [[31, 32, 33, 34]], extra_args={"leadout_capture": "off"})
        engine.add_request(f"a-{OPT_OUT_ID}", {"prompt_token_ids": [31, 32, 33, 34]}, _params())
        while engine.has_unfinished_requests():
            engine.step()
        assert [path.read_bytes() for path in ring_files(ring)] == before
        assert reader.poll() == []

        # A stop string: vLLM's API process finds it and aborts the request.
        engine.add_request("stopped", {"prompt_token_ids": PROMPTS[1]}, _params())
        answer: list[int] = []
        while len(answer) < 6:
            for output in engine.step():
                answer = list(output.outputs[0].token_ids)
        engine.abort_request(["stopped"])
        (stopped,) = reader.poll()
        assert stopped.prompt == PROMPTS[1]
        assert stopped.response[: len(answer)] == answer
        require_true(stopped, target)

        # Too short to learn from: forgotten at once.
        generate(llm, [[91, 92, 93]], tokens=1)
        assert reader.poll() == []
        assert reader.counters.open == 0

        config = engine.vllm_config
        assert config.parallel_config.worker_cls == STATES_TAP_WORKER
        time.sleep(1.1)  # counters are written once a second
        generate(llm, [[95, 96, 97]])

        texts = read_small(small_file(LEARN, config.instance_id, 0), TextCounters)
        states = read_small(small_file("learn-states", config.instance_id, 0), StatesCounters)
        assert texts is not None
        assert texts.written >= 4
        assert states is not None
        assert states.written > texts.written


def test_fp8_and_a_share_of_the_requests(
    run_engine: Any, target: Path, drafter: Path, ring: Path
) -> None:
    section = learning(ring, target, dtype="float8", rate=0.5)
    settings = engine_settings(section, drafter) | {"max_model_len": 128, "max_num_seqs": 8}
    with run_engine(target, **settings) as llm:
        reader = RingReader(ring)
        prompts = [[10 + number, 20, 30, 40] for number in range(16)]
        generate(llm, prompts, tokens=8)
        found = reader.poll()
        assert 0 < len(found) < len(prompts)
        assert reader.counters.open == 0
        text = [*found[0].prompt, *found[0].response]
        expected = target_states(target, text)[: len(text) - 1]
        scale = expected.view(len(expected), 3, -1).abs().amax(-1, keepdim=True) / 15
        difference = (found[0].states.float() - expected).view(len(expected), 3, -1).abs()
        assert (difference <= scale).all()


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--v2", "--known-drafts"], {}),
        (["--v2", "--known-drafts", "--async-scheduling"], {}),
        (["--tensor-parallel", "2"], {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
    ],
    ids=["v2", "v2-async", "tp2"],
)
def test_the_v2_runner_and_two_tensor_parallel_workers(
    tmp_path: Path,
    drafter: Path,
    ring: Path,
    options: list[str],
    environment: dict[str, str],
) -> None:
    tiny_llama().save_pretrained(tmp_path / "target")
    section = learning(ring, tmp_path / "target")
    prepare(ring, ring_info(section))
    reader = RingReader(ring)
    settings = engine_settings(section, drafter)
    ours = {name: settings[name] for name in ("scheduler_cls", "worker_cls", "additional_config")}
    log_path = tmp_path / "log"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "support.tiny_engine", tmp_path / "target", drafter, str(K)),
            *(*options, "--settings", json.dumps(ours)),
        ],
        cwd=ROOT / "tests",
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment},
        stdout=log_path.open("w"),
        stderr=subprocess.STDOUT,
    )
    found: list[ServedSequence] = []
    while process.poll() is None:
        found += reader.poll()
        time.sleep(0.05)
    found += reader.poll()
    log = log_path.read_text()
    assert process.returncode == 0, log[-3000:]
    (line,) = [line for line in log.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    served = list(zip(PROMPTS_OF_TINY_ENGINE, result["answers"], strict=True))
    if "--known-drafts" in options:
        assert result["answers_with_known_drafts"] == result["answers"]
        assert min(result["accepted"], result["rejected"]) > K
        served += sorted(served)  # asked again, in one batch
        found[len(served) // 2 :] = sorted(found[len(served) // 2 :], key=lambda each: each.prompt)
    assert ("AsyncScheduler" in result["scheduler_classes"]) == ("--async-scheduling" in options)
    assert [(each.prompt, each.response) for each in found] == served, log[-3000:]
    for sequence in found:
        assert sequence.complete
        require_true(sequence, tmp_path / "target")
    assert reader.counters.lost == reader.counters.overtaken == 0


def _params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
