"""A swap copies weights that were staged before, keeps every address, and can always be undone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leadout.checkpoints import load_weights, read_checkpoint, write_checkpoint
from leadout.engine import staging
from leadout.engine.child_process import EngineError
from leadout.engine.staging import StagedSwap, StagingError, runtime_weights, stage
from support.drafters import TINY_DRAFTER, random_drafter
from support.served_drafter import (
    engine_config,
    load_served_drafter,
    one_process_group,
    pointers,
    responses,
    serve_as_on_a_gpu,
)

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
LARGER = replace(CONFIG, intermediate_size=16384)  # 9.6 million parameters


class Versions:
    """A target, and two versions of a drafter for it."""

    def __init__(self, target: Path, folder: Path, config: Any = CONFIG) -> None:
        self.folders = [folder / "0", folder / "1"]
        for seed, path in enumerate(self.folders):
            weights = random_drafter(config, seed).state_dict()
            # The one format that supports a drafter's own head.
            write_checkpoint(path, weights, config, "speculators", target_name=str(target))
        self.configs = [
            engine_config(target, path, config.max_draft_tokens) for path in self.folders
        ]

    def load(self, version: int) -> Any:
        """A drafter as a server has it that was started with this version."""
        return load_served_drafter(self.configs[version])

    def stage(self, drafter: Any, version: int, target: nn.Module | None = None) -> StagedSwap:
        weights = load_weights(read_checkpoint(self.folders[version]))
        new = stage(drafter, target or nn.Module(), weights)
        return StagedSwap(drafter, new, runtime_weights(drafter).in_host_memory())


@pytest.fixture(scope="module")
def versions(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    versions = Versions(target, tmp_path_factory.mktemp("versions"))
    with one_process_group(versions.configs[0]):
        yield versions


@pytest.fixture(params=["cpu", "as on a GPU"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "cpu":
        serve_as_on_a_gpu(monkeypatch)
    return str(request.param)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def on_meta(drafter: Any) -> list[str]:
    tensors = [*drafter.named_parameters(), *drafter.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_meta]


def test_a_swap_keeps_addresses_and_serves_what_a_restart_would(
    versions: Versions, platform: str
) -> None:
    drafter = versions.load(0)
    before, addresses = responses(drafter), pointers(drafter)
    # The fused branch, which the CPU kernels do not have.
    assert (drafter.model._fused_kv_weight is None) == (platform == "cpu")
    staged = versions.stage(drafter, 1)
    assert equal(responses(drafter), before)
    staged.commit()
    after = responses(drafter)
    assert not any(map(torch.equal, before, after))
    assert equal(after, responses(versions.load(1)))
    assert pointers(drafter) == addresses
    versions.stage(drafter, 0).commit()
    assert equal(responses(drafter), before)
    assert pointers(drafter) == addresses


def test_a_second_load_updates_the_fused_projection_in_place(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's own weight update does it; a captured graph reads the tensors of the first load."""
    serve_as_on_a_gpu(monkeypatch)
    drafter, other = versions.load(0), versions.load(1)
    names = ("_fused_kv_weight", "_k_norm_weights")
    addresses = {name: getattr(drafter.model, name).data_ptr() for name in names}
    drafter.fill(load_weights(read_checkpoint(versions.folders[1])))
    for name in names:
        assert getattr(drafter.model, name).data_ptr() == addresses[name]
        assert torch.equal(getattr(drafter.model, name), getattr(other.model, name))


class FailsOnce:
    """Stands for a device that fails at one of the calls of a commit."""

    def __init__(self, call: Any, fails_at: int) -> None:
        self._call, self._left = call, fails_at

    def __call__(self, *arguments: Any) -> None:
        self._left -= 1
        if self._left == -1:
            raise RuntimeError("the device failed")
        self._call(*arguments)


@pytest.mark.parametrize("part", ["write_tensor", "set_kernel"])
def test_a_fault_at_any_call_leaves_the_old_drafter_in_service(
    versions: Versions, platform: str, part: str, monkeypatch: pytest.MonkeyPatch, nightly: bool
) -> None:
    drafter = versions.load(0)
    before, addresses = responses(drafter), pointers(drafter)
    staged = versions.stage(drafter, 1)
    calls = staged.new.tensors if part == "write_tensor" else staged.new.kernels
    if (part, platform) == ("set_kernel", "as on a GPU"):
        assert not calls  # tensors alone are written there
        return
    assert len(calls) >= 12
    # The first, the last and some between; nightly each of them.
    for fails_at in range(len(calls)) if nightly else {0, 1, len(calls) // 2, len(calls) - 1}:
        with monkeypatch.context() as patch:
            patch.setattr(staging, part, FailsOnce(getattr(staging, part), fails_at))
            with pytest.raises(RuntimeError, match="the device failed"):
                staged.commit()
        assert equal(responses(drafter), before)
        assert pointers(drafter) == addresses
        assert on_meta(drafter) == []
    staged.commit()
    assert equal(responses(drafter), responses(versions.load(1)))


def test_a_fault_while_staging_changes_nothing(
    versions: Versions, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = versions.load(0)
    before = responses(drafter)
    allocations = 0

    def fails_at(count: int) -> Any:
        allocate = staging.host_memory

        def fail(*arguments: Any) -> Tensor:
            nonlocal allocations
            allocations += 1
            if allocations == count:
                raise MemoryError("no memory left")
            return allocate(*arguments)

        return fail

    for count in (1, 7, 20):
        allocations = 0
        with monkeypatch.context() as patch:
            patch.setattr(staging, "host_memory", fails_at(count))
            with pytest.raises(MemoryError):
                versions.stage(drafter, 1)
        assert equal(responses(drafter), before)
        assert on_meta(drafter) == []


def test_a_commit_looks_at_no_value_and_takes_little_more_than_the_copy(
    target: Path,
    versions: Versions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_as_on_a_gpu(monkeypatch)
    larger = Versions(target, tmp_path, LARGER)
    drafter = larger.load(0)
    staged = larger.stage(drafter, 1)
    pairs = [(torch.empty_like(new), new) for new in staged.new.tensors.values()]
    for destination, source in pairs:  # touches the memory
        destination.copy_(source)

    def fail(*_: Any) -> Any:
        raise AssertionError("checked within the pause")

    for name in ("isfinite", "isnan"):
        monkeypatch.setattr(torch, name, fail)
    copies, commits = [], []
    for _ in range(40):  # the shortest counts: the machine may be busy at any moment
        started = time.perf_counter()
        for destination, source in pairs:
            destination.copy_(source)
        copied = time.perf_counter()
        staged.commit()
        commits.append(time.perf_counter() - copied)
        copies.append(copied - started)
    assert min(commits) <= 2 * min(copies)


def test_staged_weights_are_in_pinned_memory_where_there_is_a_gpu(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU nothing can be pinned, so the two calls that would pin are recorded."""
    serve_as_on_a_gpu(monkeypatch)
    empty_strided, pinned = torch.empty_strided, 0

    def record_allocation(*arguments: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        nonlocal pinned
        pinned += pin_memory
        return empty_strided(*arguments, **settings)

    def record_pin(tensor: Tensor) -> Tensor:
        nonlocal pinned
        pinned += 1
        return tensor

    drafter = versions.load(0)
    monkeypatch.setattr(staging, "is_pin_memory_available", lambda: True)
    monkeypatch.setattr(torch, "empty_strided", record_allocation)
    monkeypatch.setattr(Tensor, "pin_memory", record_pin)
    staged = versions.stage(drafter, 1)
    # Once for each allocated parameter and each tensor of the copy; once for each staged tensor.
    parameters = len(drafter.parameter_formats)
    assert pinned == parameters + 2 * len(staged.new.tensors)


def test_a_drafter_that_is_left_to_vllm_is_not_replaced(versions: Versions) -> None:
    drafter = versions.load(0)
    assert drafter.drafter_config == CONFIG
    checkpoint = drafter._initial_checkpoint
    drafter._initial_checkpoint = replace(checkpoint, left_to_vllm=("a trained mask embedding",))
    with pytest.raises(EngineError, match="has a trained mask embedding, which is left to vLLM"):
        _ = drafter.drafter_config


@pytest.fixture(scope="module")
def with_head(
    target: Path, versions: Versions, tmp_path_factory: pytest.TempPathFactory
) -> Versions:
    config = replace(CONFIG, own_embedding=True, own_head=True)
    return Versions(target, tmp_path_factory.mktemp("with-head"), config)


def test_an_own_head_and_embedding_are_swapped_with_the_rest(
    with_head: Versions, platform: str
) -> None:
    drafter, other = with_head.load(0), with_head.load(1)
    with_head.stage(drafter, 1).commit()
    states = torch.randn(3, CONFIG.hidden_size)
    for mine, theirs in ((drafter.lm_head, other.lm_head),):
        logits = [each.quant_method.apply(each, states) for each in (mine, theirs)]
        assert torch.equal(*logits)
    assert torch.equal(drafter.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_a_reduced_draft_vocabulary_is_swapped_with_the_rest(
    target: Path, versions: Versions, platform: str, tmp_path: Path
) -> None:
    config = replace(CONFIG, own_head=True, draft_vocab_size=100)
    reduced = Versions(target, tmp_path, config)  # with the first 100 tokens
    weights = load_weights(read_checkpoint(reduced.folders[1]))
    weights["d2t"] = torch.arange(100)  # every second token
    shutil.rmtree(reduced.folders[1])
    write_checkpoint(reduced.folders[1], weights, config, "speculators", target_name=str(target))
    drafter, other = reduced.load(0), reduced.load(1)
    before, addresses = responses(drafter), pointers(drafter)
    states = torch.randn(3, config.hidden_size)

    def drafted(each: Any) -> Tensor:
        found: Tensor = each.compute_logits(states)
        return found

    first = drafted(drafter)
    assert not torch.equal(first, drafted(other))
    staged = reduced.stage(drafter, 1)
    assert torch.equal(drafted(drafter), first)
    staged.commit()
    assert torch.equal(drafted(drafter), drafted(other))
    assert torch.equal(drafter.draft_id_to_target_id, torch.arange(100))
    assert equal(responses(drafter), responses(other))
    staged.undo()
    assert equal(responses(drafter), before)
    assert torch.equal(drafted(drafter), first)
    assert pointers(drafter) == addresses


@pytest.mark.parametrize("shared", ["lm_head", "embed_tokens", "storage"])
def test_a_swap_never_writes_to_the_target(with_head: Versions, platform: str, shared: str) -> None:
    """vLLM gives the drafter the target's head or embedding if they were equal at the start."""
    drafter = with_head.load(0)
    target = nn.Module()
    if shared == "lm_head":
        target.lm_head = drafter.lm_head
    elif shared == "embed_tokens":
        target.embed_tokens = drafter.model.embed_tokens
    else:  # another module and another tensor, but a view of the same memory
        memory = drafter.lm_head.weight.data[5:]
        target.register_buffer("part", memory)
    kept = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    before = responses(drafter)
    with pytest.raises(StagingError, match=r"is the target's own.*Restart the server"):
        with_head.stage(drafter, 1, target)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in target.state_dict().items())
    assert equal(responses(drafter), before)


def test_what_the_drafter_has_from_the_target_is_not_touched(
    versions: Versions, platform: str
) -> None:
    """Without an own head and embedding, sharing them with the target is no obstacle."""
    drafter = versions.load(0)
    target = nn.Module()
    target.lm_head, target.embed_tokens = drafter.lm_head, drafter.model.embed_tokens
    for parameter in target.parameters():  # not initialized, since no target was loaded
        parameter.data.fill_(0.5)
    kept = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    kernels = [getattr(module, staging.CPU_KERNEL, None) for module in target.children()]
    versions.stage(drafter, 1, target).commit()
    assert equal(responses(drafter), responses(versions.load(1)))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in target.state_dict().items())
    assert [getattr(each, staging.CPU_KERNEL, None) for each in target.children()] == kernels


def test_a_quantized_drafter_is_refused(versions: Versions) -> None:
    class SomeQuantization:
        """Stands for any of vLLM's quantization methods."""

    drafter = versions.load(0)
    drafter.model.fc.quant_method = SomeQuantization()
    with pytest.raises(StagingError, match=r"model\.fc of the drafter is quantized \(SomeQ"):
        versions.stage(drafter, 1)
