"""Steps that must have no drafts have none, whatever vLLM or live control adds.

The scheduler is real; what a worker would return is made up.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leadout.checkpoints import write_checkpoint
from leadout.engine.scheduler import LiveAsyncScheduler, LiveScheduler, make_scheduler
from support.drafters import TINY_DRAFTER, random_drafter
from support.models import tiny_llama
from support.served_drafter import engine_config

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
K = CONFIG.max_draft_tokens
LABELS = {"logprob_token_ids": [3, 4], "max_tokens": 2}
SAMPLED = {"temperature": 1.0, "max_tokens": 2}
BLOCK = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama().save_pretrained(folder / "target")
    write_checkpoint(folder / "drafter", random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    return folder / "target", folder / "drafter"


class FakeControl:
    """Live control that always wants K drafts, and adds them where there are none."""

    def plan(self, requests: list[Any]) -> tuple[Any, list[tuple[Any, list[int], bool]]]:
        step = SimpleNamespace(decision=SimpleNamespace(draft=K))
        return step, [(request, [5] * K, False) for request in requests]

    def step_done(self, step: Any, report: Any) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class Steps:
    """A scheduler, and steps in which every request gets one token and new drafts."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        attention = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        config.cache_config.num_gpu_blocks = 100
        self.scheduler = make_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], attention)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        self._is_async = config.scheduler_config.async_scheduling

    def add(self, name: str, prompt: list[int], **parameters: Any) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        usual = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
        asked = SamplingParams(**usual | parameters)
        self.scheduler.add_request(Request(name, prompt, asked, None))

    def run(self) -> tuple[dict[str, int], int]:
        """One step: the drafts that are verified, by request, and the number to be made."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(
            scheduled, ModelRunnerOutput(names, places, [[7]] * len(names))
        )
        made = scheduled.num_spec_tokens_to_schedule
        if not self._is_async:
            drafts = [[5] * made for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        verified = scheduled.scheduled_spec_decode_tokens
        return {name: len(drafts) for name, drafts in verified.items()}, made


@pytest.fixture(params=["plain", "async", "live", "live async"])
def steps(request: pytest.FixtureRequest, pair: tuple[Path, Path]) -> Steps:
    config = engine_config(*pair, K)
    config.scheduler_config.async_scheduling = "async" in request.param
    if "live" in request.param:
        config.additional_config = {"leadout": {"live": {}}}
    made = Steps(config)
    kind = LiveAsyncScheduler if "async" in request.param else LiveScheduler
    assert isinstance(made.scheduler, kind) == ("live" in request.param)
    if "live" in request.param:
        made.scheduler._control = FakeControl()
    return made


@pytest.mark.parametrize("parameters", [LABELS, SAMPLED], ids=["labels", "sampled"])
def test_a_request_that_excludes_drafts_does_so_until_it_ends(
    steps: Steps, parameters: dict[str, Any]
) -> None:
    steps.add("other", [1, 2, 3])
    assert steps.run() == ({}, K)
    assert steps.run() == ({"other": K}, K)
    steps.add("excludes", [4, 5], **parameters)
    assert steps.run() == ({}, 0)
    assert steps.run() == ({}, 0)
    assert "excludes" not in steps.scheduler.requests
    assert steps.run()[1] == K
    assert steps.run() == ({"other": K}, K)


@pytest.mark.parametrize("parameters", [LABELS, SAMPLED], ids=["labels", "sampled"])
def test_a_prompt_of_one_token_is_not_padded_with_drafts(
    steps: Steps, parameters: dict[str, Any]
) -> None:
    steps.add("other", [1, 2, 3])
    steps.run()
    steps.add("one", [6])
    assert steps.run() == ({"other": K, "one": K}, K)  # as vLLM does it otherwise
    steps.add("excludes", [4], **parameters)
    steps.add("another", [6])
    assert steps.run() == ({}, 0)
    assert steps.scheduler.num_spec_tokens == K
