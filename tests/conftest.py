"""Settings and targets for all tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Before torch is imported: threads that spin for a core another process holds make a step twenty
# times slower, so every process of the tests uses one, bound to none.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# There is no hub in a test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from support.models import cached_smollm2

    return cached_smollm2()


@pytest.fixture
def tiny_qwen3() -> PreTrainedModel:
    from support.models import tiny_qwen3

    return tiny_qwen3()


@pytest.fixture
def tiny_llama() -> PreTrainedModel:
    from support.models import tiny_llama

    return tiny_llama()
