"""Engine tests share two cores: one engine at a time, in this process, with a small cache."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_LOGGING_LEVEL="WARNING",
)


# The files that take longest, longest first: one that starts last would run alone.
FIRST = (
    "test_qwen_coder",
    "test_any_target",
    "test_chaos",
    "test_quickstart",
    "test_make",
    "test_selftest",
    "test_serve",
    "test_bench",
    "test_train",
    "test_swap",
    "test_states",
    "test_data",
    "test_runners",
    "test_live",
    "test_tune",
    "test_same_drafts",
    "test_gpu_resolution",
    "test_gpu_dispatch",
    "test_data_endpoints",
    "test_learn",
    "test_server_end",
    "test_live_server",
    "test_check_engine",
    "test_lossless_reference",  # of tests/model
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--no-loadscope-reorder`, pytest-xdist starts files in this order."""
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(FIRST)))


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Commands that are called in this process set variables, as for their log."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@contextmanager
def engine(model: object, **settings: Any) -> Iterator[Any]:
    """An in-process vLLM engine in float32, gone again at the end of the block."""
    from vllm import LLM

    usual = {"max_model_len": 1024, "max_num_seqs": 16}
    llm = LLM(model=str(model), dtype="float32", enforce_eager=True, seed=0, **usual | settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@pytest.fixture(scope="session")
def run_engine() -> Any:
    return engine
