"""A fake CUDA platform: vLLM resolves its configuration as on a GPU, on a machine without one.

The CPU build of vLLM has the Python files of the CUDA platform. `install` makes up what is missing:
the answers of the device, and the compiled modules that those files import. Nothing can be computed
with it. A process can install one GPU, before it imports vLLM.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from support.tiny_engine import let_triton_interpret


@dataclass(frozen=True)
class Gpu:
    """What vLLM asks a device for."""

    name: str
    capability: tuple[int, int]
    memory_gib: int
    compute_units: int


GPUS = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80, 132),
    "B200": Gpu("NVIDIA B200", (10, 0), 180, 148),
    "A100": Gpu("NVIDIA A100-PCIE-40GB", (8, 0), 40, 108),
    "L4": Gpu("NVIDIA L4", (8, 9), 24, 58),
}
DEVICES = 8
# Parts of a CUDA build that a CPU build lacks.
COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
# Questions to compiled code that vLLM asks while it is imported, all about quantised kernels.
KERNEL_QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
    "mxfp4_experts_quant_supported",
)
FLASHINFER = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")


class FakeModule(ModuleType):
    """An importable module in which every name that is not set is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def install(name: str) -> None:
    """Make `name`, one of GPUS, the platform of vLLM in this process."""
    if "vllm" in sys.modules:
        raise RuntimeError("fake_gpu.install must run before the first import of vllm")
    gpu = GPUS[name]
    let_triton_interpret()
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # otherwise vLLM looks for kernels on the network
    for module in (*COMPILED, *FLASHINFER):
        sys.modules[module] = FakeModule(module)
    # Imports compiled operations, for a table of sizes that decides over compile ranges only.
    fusion = FakeModule("vllm.compilation.passes.fusion.allreduce_rms_fusion")
    fusion.FI_ALLREDUCE_FUSION_MAX_SIZE_MB = {}
    sys.modules[fusion.__name__] = fusion
    for question in KERNEL_QUESTIONS:
        setattr(torch.ops._C, question, lambda capability: False)

    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class FakeCudaPlatform(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gpu.memory_gib << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return DEVICES

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return gpu.compute_units

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        def graph_pool_handle(self) -> Any:
            return None

    # vLLM resolves its platform when it is first asked for, and keeps it here.
    platforms._current_platform = FakeCudaPlatform()

    from vllm.vllm_flash_attn import flash_attn_interface

    flash_attn_interface.FA4_AVAILABLE = True  # a file of the CUDA build, which vLLM looks for
