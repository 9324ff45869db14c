"""Capture and rollout inside a real scheduler, with and without drafts and live control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leadout.engine.capture import MIN_RESPONSE
from leadout.engine.capture_store import read_info, segment_paths
from leadout.engine.counters import read_small
from leadout.engine.served_requests import ServedRequests, served_requests_file
from leadout.engine.settings import (
    CAPTURE,
    LIVE,
    REGISTRY,
    SCHEDULER,
    CaptureSettings,
    LiveSettings,
    RegistrySettings,
    Section,
    with_section,
)
from leadout.models import fingerprint
from leadout.registry import Registry
from leadout.shards import Sample, read_shard
from support.version_registry import CONFIG, publish

PROMPTS = [[5, 9, 2, 44, *range(100, 200)], [60, 61, 62, 300]]
K = CONFIG.max_draft_tokens


@pytest.fixture(scope="module")
def registry(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Registry:
    work = tmp_path_factory.mktemp("work")
    registry = Registry(work / "registry")
    publish(registry, target, work, seed=0)
    return registry


@pytest.fixture
def engine(run_engine: Any, target: Path) -> Any:
    def open_with(sections: dict[str, Section], **settings: Any) -> Any:
        additional: dict[str, Any] = {}
        for name, section in sections.items():
            additional = with_section(additional, name, section)
        usual = {"max_model_len": 256, "max_num_seqs": 8, "skip_tokenizer_init": True}
        usual |= {"scheduler_cls": SCHEDULER, "additional_config": additional}
        return run_engine(target, **usual | settings)

    return open_with


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def asked(llm: Any, temperature: float = 0.0, **extra: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        max_tokens=12,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra or None,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def kept_in(folder: Path) -> list[Sample]:
    found = [sample for path in segment_paths(folder) for _, sample in read_shard(path)]
    return sorted(found, key=lambda sample: len(sample.prompt), reverse=True)


def test_capture_needs_no_drafter(engine: Any, target: Path, tmp_path: Path) -> None:
    with engine({CAPTURE: CaptureSettings(folder=tmp_path)}) as llm:
        assert type(scheduler_of(llm)).__name__ == "LeadoutScheduler"
        said = asked(llm)
        asked(llm, leadout_capture="off")
        llm.llm_engine.add_request("ended-early", {"prompt_token_ids": [1, 2]}, _long())
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["ended-early"])
        # What a stop string does: vLLM's API process finds it and aborts the request.
        llm.llm_engine.add_request("stopped", {"prompt_token_ids": [1, 2]}, _long())
        before_stop: list[int] = []
        while len(before_stop) < MIN_RESPONSE:
            for output in llm.llm_engine.step():
                before_stop = list(output.outputs[0].token_ids)
        llm.llm_engine.abort_request(["stopped"])
        scheduler_of(llm)._capture.close()
    *kept, stopped = kept_in(tmp_path)
    assert stopped.prompt == [1, 2]
    assert stopped.response[: len(before_stop)] == before_stop
    assert [sample.prompt for sample in kept] == PROMPTS
    assert [sample.response for sample in kept] == said
    assert {sample.temperature for sample in kept} == {0.0}
    assert read_info(tmp_path).target_fingerprint == fingerprint(target)


def test_all_parts_work_in_one_scheduler(engine: Any, registry: Registry, tmp_path: Path) -> None:
    sections = {
        LIVE: LiveSettings(),
        CAPTURE: CaptureSettings(folder=tmp_path),
        REGISTRY: RegistrySettings(folder=registry.folder),
    }
    drafter = {
        "method": "dflash",
        "model": str(registry.path(1)),
        "num_speculative_tokens": K,
    }
    with engine(sections, speculative_config=drafter) as llm:
        scheduler = scheduler_of(llm)
        assert type(scheduler).__name__ == "LeadoutLiveScheduler"
        said = asked(llm)
        hot = asked(llm, temperature=0.8)
        scheduler._capture.close()
        served_path = served_requests_file(llm.llm_engine.vllm_config, 0)
        served = read_small(served_path, ServedRequests)
        assert scheduler._control is not None  # no error switched it off; shutdown does
    kept = kept_in(tmp_path)
    assert {sample.temperature for sample in kept} == {0.0, 0.8}
    assert sorted(sample.response for sample in kept) == sorted([*said, *hot])
    assert served is not None
    assert not served_path.exists()


def test_requests_after_a_reset_do_not_find_older_cache_entries(
    engine: Any, registry: Registry
) -> None:
    sections = {REGISTRY: RegistrySettings(folder=registry.folder)}
    drafter = {
        "method": "dflash",
        "model": str(registry.path(1)),
        "num_speculative_tokens": K,
    }
    with engine(sections, speculative_config=drafter, block_size=32) as llm:
        scheduler, inner = scheduler_of(llm), llm.llm_engine

        def cached_for(name: str) -> int:
            """Prompt tokens that a new request finds in the cache; it goes on running."""
            inner.add_request(name, {"prompt_token_ids": PROMPTS[0]}, _long())
            while True:
                for output in inner.step():
                    if output.request_id == name:
                        return int(output.num_cached_tokens)

        assert cached_for("first") == 0
        assert cached_for("second") > 0
        assert inner.reset_prefix_cache() is False  # requests run
        assert cached_for("later") == 0
        assert cached_for("another") > 0  # the blocks of "later"
        while inner.has_unfinished_requests():
            inner.step()
        assert scheduler._tally.requests == 2
        assert inner.reset_prefix_cache() is True
        assert scheduler._hash_mask is None
        assert scheduler._tally.requests == 0


def _long() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
