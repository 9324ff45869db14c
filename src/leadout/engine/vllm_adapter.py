"""vLLM's internal classes and functions, and helpers that read its configs, workers and clients.

Other modules import internals of vLLM from here (`OBJECTS`), never from vLLM itself. Whether the
installed version has them as expected, `vllm_internals` says. Importing this needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leadout.engine.vllm_internals import (
    ALGORITHMS,
    CONNECTOR,
    DFLASH,
    EMBEDDING,
    INTERFACES,
    LINEAR,
    LOADER,
    VLLM_SCHEDULER,
    VLLM_WORKER,
    object_at,
)
from leadout.models import local_folder

if TYPE_CHECKING:
    AggregateStatLoggerBase: Any
    AsyncScheduler: Any
    DFlashQwen3ForCausalLM: Any
    DFlashQwen3Model: Any
    FlexibleArgumentParser: Any
    HiddenStatesConnector: Any
    HiddenStatesMetadata: Any
    RequestStatus: Any
    Scheduler: Any
    UnquantizedEmbeddingMethod: Any
    UnquantizedLinearMethod: Any
    dflash_layer_causal: Any
    extract_from_kv_cache: Any
    get_attn_backend: Any
    get_forward_context: Any
    get_model_cls: Any
    is_pin_memory_available: Any
    make_arg_parser: Any
    register_speculator: Any
    rms_norm: Any
    supports_eagle3: Any
    update_dflash: Any
else:

    def __getattr__(name: str) -> Any:
        if name not in OBJECTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return object_at(OBJECTS[name])


# Internal classes and functions that other modules import from here.
OBJECTS = {
    "AggregateStatLoggerBase": "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "DFlashQwen3ForCausalLM": f"{DFLASH}:DFlashQwen3ForCausalLM",
    "DFlashQwen3Model": f"{DFLASH}:DFlashQwen3Model",
    "FlexibleArgumentParser": "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "HiddenStatesConnector": f"{CONNECTOR}:ExampleHiddenStatesConnector",
    "HiddenStatesMetadata": f"{CONNECTOR}:ExampleHiddenStatesConnectorMetadata",
    "RequestStatus": "vllm.v1.request:RequestStatus",
    "Scheduler": VLLM_SCHEDULER,
    "UnquantizedEmbeddingMethod": EMBEDDING,
    "UnquantizedLinearMethod": LINEAR,
    "dflash_layer_causal": f"{DFLASH}:_dflash_layer_causal",
    "extract_from_kv_cache": f"{CONNECTOR}:extract_from_kv_cache",
    "get_attn_backend": "vllm.v1.attention.selector:get_attn_backend",
    "get_forward_context": "vllm.forward_context:get_forward_context",
    "get_model_cls": f"{LOADER}:get_model_cls",
    "is_pin_memory_available": "vllm.utils.platform_utils:is_pin_memory_available",
    "make_arg_parser": "vllm.entrypoints.launchers.cli_args:make_arg_parser",
    "register_speculator": f"{ALGORITHMS}:register_speculator",
    "rms_norm": "vllm._custom_ops:rms_norm",
    "supports_eagle3": f"{INTERFACES}:supports_eagle3",
    "update_dflash": f"{ALGORITHMS}:update_dflash",
}


def is_dflash(vllm_config: Any) -> bool:
    """Whether an engine drafts with DFlash."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.method == "dflash")


def model_runner(vllm_config: Any) -> Literal["V1", "V2"]:
    return "V2" if vllm_config.use_v2_model_runner else "V1"


def all_layers_share_blocks(vllm_config: Any) -> bool:
    """Whether a block of the KV cache always belongs to one request, in all layers at once.

    So it is if all layers attend to all earlier tokens. Otherwise vLLM forms several groups of
    layers, and a block that one group frees may be given to another.
    """
    from vllm.config import get_layers_from_vllm_config

    base = object_at("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase")
    attention = object_at("vllm.model_executor.layers.attention:Attention")
    layers = get_layers_from_vllm_config(vllm_config, base).values()
    return all(type(layer) is attention and layer.sliding_window is None for layer in layers)


def platform_worker() -> Any:
    """The worker class that vLLM would choose for this platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return object_at("vllm.v1.worker.cpu_worker:CPUWorker")
    if current_platform.is_xpu():
        return object_at("vllm.v1.worker.xpu_worker:XPUWorker")
    return object_at(VLLM_WORKER)


def device_name() -> str | None:
    """The name of this process's first accelerator; None on a CPU."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else str(current_platform.get_device_name())


def engine_index(vllm_config: Any) -> int:
    """The number of this engine among those of its server.

    vLLM gives every data-parallel engine of a dense target the rank 0, since they are independent.
    """
    return int(vllm_config.parallel_config.data_parallel_index)


def engine_count(vllm_config: Any) -> int:
    """The number of engines of a server, as its API process sees them."""
    return int(vllm_config.parallel_config.data_parallel_size)


async def call_workers(
    engine: Any, engines: int, method: str, args: tuple[Any, ...] = ()
) -> list[Any]:
    """The results of a worker's method on all workers of all engines of an engine client.

    With several engines vLLM's own `collective_rpc` calls all workers, but returns the results of
    the first engine only.
    """
    if engines == 1:
        results: list[Any] = await engine.collective_rpc(method, args=args)
        return results
    by_engine = await engine.engine_core.call_utility_all_async(
        "collective_rpc", method, None, args, None
    )
    return [result for results in by_engine for result in results]


def watch_for_failure(engine: Any) -> Callable[[], bool]:
    """Returns a function that says whether the engine of a client has failed by itself.

    vLLM's own `errored` is also true after an orderly stop: its client ends the engine before the
    server. But then it has detached its finalizer before the engine's outputs end.
    """
    has_failed = False

    def outputs_end(handler: Any) -> None:
        nonlocal has_failed
        finalizer = getattr(engine.engine_core, "_finalizer", None)
        has_failed = not handler.cancelled() and bool(getattr(finalizer, "alive", False))

    def answer() -> bool:
        resources = getattr(getattr(engine, "engine_core", None), "resources", None)
        manager = getattr(resources, "engine_manager", None)
        # The name is set if a process ended, such as by a signal, without having been told to.
        return has_failed or getattr(manager, "failed_proc_name", None) is not None

    handler = getattr(engine, "output_handler", None)
    if handler is not None:
        handler.add_done_callback(outputs_end)
    return answer


def is_asleep(worker: Any) -> bool:
    """Whether vLLM's sleep mode has taken a worker's memory away."""
    backend = getattr(worker, "_sleep_mode_backend", None)  # None until it first sleeps
    return backend is not None and backend.state() != "RUNNING"


def target_folder(vllm_config: Any) -> Path:
    """The local files of the target that vLLM loads."""
    model = vllm_config.model_config
    return local_folder(model.model, model.revision, vllm_config.load_config.download_dir)


def draft_folder(vllm_config: Any) -> Path:
    """The local files of the drafter that vLLM loads."""
    model = vllm_config.speculative_config.draft_model_config
    return local_folder(model.model, model.revision, vllm_config.load_config.download_dir)
