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
