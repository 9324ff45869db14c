"""What each worker checks before it accepts a version's weights, and before it writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from leadout.checkpoints import CheckpointError
from leadout.engine.hot_swap import (
    ASLEEP,
    SwapExtension,
    SwapRefusedError,
    load_version,
    version_to_start_with,
)
from leadout.registry import MANIFEST, Manifest, Registry, RegistryError
from leadout.storage import StorageError
from support.version_registry import CONFIG, WEIGHTS, publish, with_nan


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


def test_a_version_is_loaded_bit_for_bit(registry: Registry, target: Path, tmp_path: Path) -> None:
    first = publish(registry, target, tmp_path, seed=0)
    second = publish(registry, target, tmp_path, seed=1)
    loaded = [load_version(registry, made.version, CONFIG, target) for made in (first, second)]
    written = load_file(registry.path(2) / WEIGHTS)
    assert loaded[1].weights.keys() == written.keys()
    assert all(torch.equal(loaded[1].weights[name], written[name]) for name in written)
    assert loaded[0].digest != loaded[1].digest
    assert loaded[1].digest == load_version(registry, 2, CONFIG, target).digest


def test_a_store_that_fails_does_not_start_a_server_on_an_older_version(
    registry: Registry, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(registry, target, tmp_path, seed=0)
    publish(registry, target, tmp_path, seed=1, parent=1)
    registry.point_to(2, "a test")
    real_verify = Registry.verify

    def fake_verify(self: Registry, version: int) -> Manifest:
        if version == 2:
            raise StorageError("503")
        return real_verify(self, version)

    monkeypatch.setattr(Registry, "verify", fake_verify)
    with pytest.raises(StorageError, match="503"):
        version_to_start_with(registry, target)


def spoil_bytes(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)


AFTER_PUBLISHING: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "does not exist"),
    "missing file": (lambda folder: (folder / WEIGHTS).unlink(), "is missing since publishing"),
    "changed bytes": (spoil_bytes, "changed since publishing"),
}


@pytest.mark.parametrize("fault", AFTER_PUBLISHING)
def test_a_version_that_changed_after_publishing_is_refused(
    registry: Registry, target: Path, tmp_path: Path, fault: str
) -> None:
    publish(registry, target, tmp_path, seed=0)
    spoil, message = AFTER_PUBLISHING[fault]
    spoil(registry.path(1))
    with pytest.raises(RegistryError, match=message):
        load_version(registry, 1, CONFIG, target)


def test_a_version_with_nan_weights_is_refused(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    publish(registry, target, tmp_path, seed=0, spoil=with_nan)
    with pytest.raises(CheckpointError, match=r"fc\.weight.*NaN or infinite"):
        load_version(registry, 1, CONFIG, target)


def test_a_version_with_another_configuration_is_refused(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    publish(registry, target, tmp_path, seed=0, config=replace(CONFIG, block_size=4))
    with pytest.raises(SwapRefusedError, match=r"has block_size 4, but .* in service has 5"):
        load_version(registry, 1, CONFIG, target)


def test_a_version_for_another_target_is_refused(
    registry: Registry, target: Path, tmp_path: Path
) -> None:
    publish(registry, target, tmp_path, seed=0, other_target=True)
    with pytest.raises(SwapRefusedError, match="fingerprint 000000000000, but this server's"):
        load_version(registry, 1, CONFIG, target)


class SleepingWorker(SwapExtension):
    """A worker in vLLM's sleep mode, which CPUs do not have; touching its weights would fail."""

    def __init__(self, state: str, staged: Any = None) -> None:
        model_config = SimpleNamespace(enable_sleep_mode=True)
        self.vllm_config = SimpleNamespace(model_config=model_config, additional_config={})
        self._sleep_mode_backend = SimpleNamespace(state=lambda: state)
        self._leadout_stager = staged

    def get_draft_model(self) -> Any:
        raise AssertionError("the weights of a sleeping engine have no memory")


@pytest.mark.parametrize("state", ["SUSPENDED", "RESUMING"])
def test_a_sleeping_worker_reads_and_writes_no_weights(state: str) -> None:
    worker = SleepingWorker(state)
    worker.leadout_begin(2)
    assert worker.leadout_state() == {"done": True, "error": ASLEEP, "digest": None, "final": False}
    writes: list[str] = []
    worker._leadout_stager = SimpleNamespace(  # type: ignore[assignment]
        version=2, staged=SimpleNamespace(commit=writes.append, undo=writes.append)
    )
    assert worker.leadout_commit(2)["error"] == ASLEEP
    assert worker.leadout_undo()["error"] == ASLEEP
    assert writes == []


def test_a_worker_that_can_sleep_copies_its_weights_before_the_thread_starts() -> None:
    """Within the call vLLM cannot put it to sleep; while the thread runs it can."""
    worker = SleepingWorker("RUNNING")
    worker.leadout_begin(2)
    state = worker.leadout_state()
    assert state["done"]
    assert "have no memory" in state["error"]
