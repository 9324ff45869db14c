"""Settings and targets for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from support.s3_server import S3Server

# Before torch is imported: threads that spin for a core another process holds make a step twenty
# times slower, so every process of the tests uses one, bound to none.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Otherwise every engine starts a process that sends statistics of its use.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# There is no hub in a test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# The test files that take longest, longest first: one that starts last would run alone.
FIRST = (
    "engine/test_qwen_coder",
    "engine/test_any_target",
    "engine/test_chaos",
    "engine/test_quickstart",
    "engine/test_make",
    "engine/test_selftest",
    "engine/test_serve",
    "engine/test_bench",
    "engine/test_train",
    "engine/test_swap",
    "engine/test_states",
    "engine/test_states_ring",
    "engine/test_data",
    "engine/test_runners",
    "engine/test_vllm_faults",
    "engine/test_ring_privacy",
    "engine/test_odd_requests",
    "engine/test_refusals",
    "engine/test_live",
    "engine/test_tune",
    "engine/test_same_drafts",
    "engine/test_gpu_resolution",
    "engine/test_gpu_dispatch",
    "engine/test_data_endpoints",
    "engine/test_learn",
    "engine/test_capture_routes",
    "engine/test_metrics_server",
    "engine/test_server_end",
    "engine/test_live_server",
    "engine/test_check_engine",
    "engine/test_capture",
    "model/test_lossless_reference",
    "unit/test_fuzzed_readers",
    "learn/test_cycle",
    "learn/test_continuous",
    "learn/test_served_privacy",
    "learn/test_privacy",
    "evaluate/test_ranks",
    "dflash/test_sampled_equality",
    "unit/test_distribution",
    "unit/test_kills",
    "docs/test_site",
    "train/test_optimizer",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly",
        action="store_true",
        help="also the tests and the sizes that take too long for every change",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # With `--no-loadscope-reorder`, pytest-xdist starts files in this order.
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(f"{item.path.parent.name}/{item.path.stem}", len(FIRST)))
    if config.getoption("--nightly"):
        return
    left = [item for item in items if item.get_closest_marker("nightly") is not None]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collections() -> None:
    """Leaves out of garbage collections what lives at this moment, which is what was imported.

    vLLM and transformers make so many objects that each `gc.collect()` takes half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or some libraries report leaks at the end of the process


@pytest.fixture(scope="session")
def nightly(request: pytest.FixtureRequest) -> bool:
    """Whether there is time for everything."""
    return bool(request.config.getoption("--nightly"))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server, for all tests of this process."""
    from support.s3_server import s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A URL with nothing behind it yet, and the variables to reach it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return s3_server.new_url()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from support.models import cached_smollm2

    return cached_smollm2()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama, without a tokenizer; many modules have a target of their own."""
    from support.models import tiny_llama

    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_qwen3() -> PreTrainedModel:
    from support.models import tiny_qwen3

    return tiny_qwen3()


@pytest.fixture
def tiny_llama() -> PreTrainedModel:
    from support.models import tiny_llama

    return tiny_llama()
