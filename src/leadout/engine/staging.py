"""Drafter weights prepared for a swap, so that the pause of serving consists of copies alone.

vLLM's weight loaders and kernels decide how a checkpoint's tensors are sharded, fused and packed in
a worker. `stage` runs them on a shadow of the drafter: the same modules with tensors of their own
in host memory. `StagedSwap.commit` then copies the results into the tensors of the drafter in
service. Their addresses do not change, because captured CUDA graphs keep reading them, and no
module is taken apart, so that a swap which fails can be reverted by copying the other way.

CPU kernels keep packed weights in memory that cannot be written to. There, a linear layer gets the
kernel that was packed for the new weights instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.platforms import current_platform

from leadout.engine.vllm_adapter import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    is_pin_memory_available,
)
from leadout.engine.vllm_internals import CPU_KERNEL
from leadout.errors import LeadoutError


class StagingError(LeadoutError):
    """The weights cannot be brought into the memory of the drafter in service."""


@dataclass(frozen=True)
class ParameterFormat:
    """How a parameter looks while a checkpoint is loaded, before vLLM packs it for its kernels."""

    kind: type[nn.Parameter]
    attributes: dict[str, Any]  # vLLM's, with the weight loader
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: nn.Parameter) -> ParameterFormat:
        return cls(
            type(parameter),
            dict(parameter.__dict__),
            tuple(parameter.shape),
            parameter.stride(),
            parameter.dtype,
        )

    def allocate(self) -> nn.Parameter:
        """A parameter of this format in host memory, not initialized."""
        tensor: Any = host_memory(self.shape, self.stride, self.dtype)
        tensor.__class__ = self.kind
        tensor.__dict__.update(self.attributes)
        parameter: nn.Parameter = tensor
        return parameter


def host_memory(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that a device copies from at full speed: pinned, where there is a GPU."""
    return torch.empty_strided(
        shape, stride, dtype=dtype, device="cpu", pin_memory=is_pin_memory_available()
    )


@dataclass(frozen=True)
class RuntimeWeights:
    """All that a swap replaces, as the kernels of this worker use it."""

    tensors: dict[str, Tensor]
    kernels: dict[str, Callable[..., Tensor]]  # by the name of the module

    def in_host_memory(self) -> RuntimeWeights:
        """A copy that later writes to these tensors do not change."""
        copies = {}
        for name, tensor in self.tensors.items():
            copies[name] = host_memory(tuple(tensor.shape), tensor.stride(), tensor.dtype)
            copies[name].copy_(tensor)
        return RuntimeWeights(copies, dict(self.kernels))


def runtime_weights(drafter: Any) -> RuntimeWeights:
    """The drafter's own weights, without copying them and without what it shares with the target.

    Layers whose weight is in a packed kernel have an empty parameter, which is left out.
    """
    own = drafter.own_modules()
    kernels = {
        name: getattr(module, CPU_KERNEL) for name, module in own.items() if _has_kernel(module)
    }
    tensors = {
        name: tensor.data for name, tensor in drafter.own_tensors().items() if tensor.numel() > 0
    }
    return RuntimeWeights(tensors, kernels)


def _has_kernel(module: nn.Module) -> bool:
    return CPU_KERNEL in module.__dict__


class StagedSwap:
    """New weights for a drafter in service, and those it has now."""

    def __init__(self, drafter: Any, new: RuntimeWeights, previous: RuntimeWeights) -> None:
        self.serving = runtime_weights(drafter)
        self.new, self.previous = new, previous
        self._modules = {name: drafter.get_submodule(name) for name in self.serving.kernels}

    def commit(self) -> None:
        """Write the new weights; after an error the previous ones are in service again.

        No step may run meanwhile.
        """
        try:
            self._write(self.new)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Write the previous weights, whatever part of the new ones has been written."""
        self._write(self.previous)

    def _write(self, weights: RuntimeWeights) -> None:
        _wait_for_device()  # steps may still run there after the scheduler's thread has gone on
        for name, tensor in self.serving.tensors.items():
            write_tensor(tensor, weights.tensors[name])
        for name, kernel in weights.kernels.items():
            set_kernel(self._modules[name], kernel)
        _wait_for_device()


@torch.no_grad()
def write_tensor(serving: Tensor, staged: Tensor) -> None:
    serving.copy_(staged, non_blocking=True)


def set_kernel(module: nn.Module, kernel: Callable[..., Tensor]) -> None:
    setattr(module, CPU_KERNEL, kernel)


def _wait_for_device() -> None:
    if not current_platform.is_cpu() and torch.accelerator.is_available():
        torch.accelerator.synchronize()


def stage(drafter: Any, target: nn.Module, weights: Mapping[str, Tensor]) -> RuntimeWeights:
    """Prepare checked weights for a drafter, which serves meanwhile."""
    require_no_shared_memory(drafter, target)
    _require_unquantized(drafter)
    shadow = shadow_of(drafter)
    with torch.no_grad():
        shadow.fill(weights)
        for module in shadow.own_modules().values():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)
    new = runtime_weights(shadow)
    _require_same_layout(runtime_weights(drafter), new)
    if is_pin_memory_available():  # fused tensors were computed from pinned ones, into new memory
        pinned = {name: tensor.pin_memory() for name, tensor in new.tensors.items()}
        new = RuntimeWeights(pinned, new.kernels)
    return new


def require_no_shared_memory(drafter: Any, target: nn.Module) -> None:
    """Refuse to write to memory of the target.

    vLLM lets a drafter use the target's embedding or head if its own were equal when the server
    started. Writing another version's into them would change the target, and thereby answers.
    """
    modules = set(target.modules())
    storages = {_storage(tensor) for tensor in target.parameters()}
    storages |= {_storage(tensor) for tensor in target.buffers()}
    storages.discard(0)  # empty tensors
    shared = [name for name, module in drafter.own_modules().items() if module in modules]
    shared += [
        name for name, tensor in drafter.own_tensors().items() if _storage(tensor) in storages
    ]
    if shared:
        raise StagingError(
            f"{shared[0]} of the drafter is the target's own: both were equal when the server "
            "started, and vLLM keeps one of them. A swap would overwrite the target. Restart the "
            "server to serve this version, or publish drafters without an embedding and head of "
            "their own."
        )


def _require_unquantized(drafter: Any) -> None:
    """Quantized weights are packed by kernels of the device, which serves meanwhile."""
    for name, module in drafter.own_modules().items():
        method = getattr(module, "quant_method", None)
        if not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod | None):
            raise StagingError(
                f"{name} of the drafter is quantized ({type(method).__name__}), and a running "
                "server can replace unquantized weights only. Restart it to serve this version."
            )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() > 0 else 0


def _require_same_layout(serving: RuntimeWeights, new: RuntimeWeights) -> None:
    if serving.kernels.keys() != new.kernels.keys():
        different = sorted(serving.kernels.keys() ^ new.kernels.keys())[0]
        raise StagingError(f"{different} of the drafter in service uses another kernel")
    for name in sorted(serving.tensors.keys() | new.tensors.keys()):
        layouts = [
            None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            for tensor in (serving.tensors.get(name), new.tensors.get(name))
        ]
        if layouts[0] != layouts[1]:
            raise StagingError(
                f"{name} has shape, stride and type {layouts[1]}, but the drafter in service has "
                f"{layouts[0]}. Restart the server to serve this version."
            )


def shadow_of(drafter: Any) -> Any:
    """A drafter of the same modules whose parameters have memory of their own.

    Attributes are shared with the original, except tensors: whatever loads weights into the shadow
    has no way to write to the original. Buffers, such as rotary tables, are only read.
    """
    formats: Mapping[str, ParameterFormat] = drafter.parameter_formats
    copies: dict[nn.Module, nn.Module] = {}

    def copy(module: nn.Module, prefix: str) -> nn.Module:
        if module in copies:
            return copies[module]
        shadow = copies[module] = module.__class__.__new__(module.__class__)
        shadow.__dict__.update(
            (name, value)
            for name, value in module.__dict__.items()
            if not isinstance(value, Tensor)
        )
        shadow.__dict__["_parameters"] = {
            name: formats[prefix + name].allocate()
            for name, parameter in module._parameters.items()
            if parameter is not None and prefix + name in formats
        }
        shadow.__dict__["_parameters"] |= {
            name: None for name, parameter in module._parameters.items() if parameter is None
        }
        shadow.__dict__["_buffers"] = dict(module._buffers)
        shadow.__dict__["_modules"] = {
            name: None if child is None else copy(child, f"{prefix}{name}.")
            for name, child in module._modules.items()
        }
        return shadow

    return copy(drafter, "")
