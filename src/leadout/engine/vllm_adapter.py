"""All that Leadout uses of vLLM beyond its public interface.

vLLM's internals may change with any release. `INTERNALS` lists those in use, by the part of Leadout
that uses them, as they are in the supported version. A part asks `is_usable` before it switches
itself on: if something that it relies on has changed, that part alone stays off, with one line in
the log, and the server serves without it. Other modules import internal classes and functions of
vLLM from here (`OBJECTS`), never from vLLM itself. Importing this needs no vLLM.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leadout.models import local_folder

logger = logging.getLogger("vllm.leadout")

SUPPORTED = ">=0.32,<0.33"


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_REQUEST = "vllm.v1.request:Request"
_OUTPUT = "vllm.v1.core.sched.output:SchedulerOutput"
_RUNNER_OUTPUT = "vllm.v1.outputs:ModelRunnerOutput"
_LOGPROBS = "vllm.v1.outputs:LogprobsLists"
_DFLASH = "vllm.model_executor.models.qwen3_dflash"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_LINEAR = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
_LOADER = "vllm.model_executor.model_loader.utils"
_INTERFACES = "vllm.model_executor.models.interfaces"
_ALGORITHMS = "vllm.transformers_utils.configs.speculators.algos"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"

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
        return _found(OBJECTS[name])


# Internal classes and functions that other modules import from here.
OBJECTS = {
    "AggregateStatLoggerBase": "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "DFlashQwen3ForCausalLM": f"{_DFLASH}:DFlashQwen3ForCausalLM",
    "DFlashQwen3Model": f"{_DFLASH}:DFlashQwen3Model",
    "FlexibleArgumentParser": "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "HiddenStatesConnector": f"{_CONNECTOR}:ExampleHiddenStatesConnector",
    "HiddenStatesMetadata": f"{_CONNECTOR}:ExampleHiddenStatesConnectorMetadata",
    "RequestStatus": "vllm.v1.request:RequestStatus",
    "Scheduler": _SCHEDULER,
    "UnquantizedEmbeddingMethod": _EMBEDDING,
    "UnquantizedLinearMethod": _LINEAR,
    "dflash_layer_causal": f"{_DFLASH}:_dflash_layer_causal",
    "extract_from_kv_cache": f"{_CONNECTOR}:extract_from_kv_cache",
    "get_attn_backend": "vllm.v1.attention.selector:get_attn_backend",
    "get_forward_context": "vllm.forward_context:get_forward_context",
    "get_model_cls": f"{_LOADER}:get_model_cls",
    "is_pin_memory_available": "vllm.utils.platform_utils:is_pin_memory_available",
    "make_arg_parser": "vllm.entrypoints.launchers.cli_args:make_arg_parser",
    "register_speculator": f"{_ALGORITHMS}:register_speculator",
    "rms_norm": "vllm._custom_ops:rms_norm",
    "supports_eagle3": f"{_INTERFACES}:supports_eagle3",
    "update_dflash": f"{_ALGORITHMS}:update_dflash",
}

LIVE_CONTROL = "live control"
STEP_RECORDS = "recording of steps"
CAPTURE_OF_TRAFFIC = "capture"
LEARNING = "learning from served states"
ROLLOUT = "rollout of drafter versions"
SAMPLING_WORKAROUND = "workaround for sampling on CPUs"
SEED_WORKAROUND = "workaround for seeds on CPUs"
LABEL_WORKAROUND = "workaround for log-probabilities of chosen tokens"
IDLE_DRAFTER = "skipping of drafts at K = 0"
DRAFT_CLASS = "draft model class"
CAUSALITY = "correction of a drafter's causality"
DRAFT_RECORDING = "recording of drafts"
ATTENTION_CHECK = "check of the drafter's attention"
TARGET_CHECK = "check of the target's model class"
METRICS = "metrics"
REQUEST_METRICS = "acceptance by request"
STATE_EXTRACTION = "extraction of hidden states"

# Attribute of a linear layer on CPUs: a function of the packed weight.
CPU_KERNEL = "cpu_linear"


@dataclass(frozen=True, slots=True)
class Internal:
    """A function, with its parameters as `signature_of` writes them, or an attribute of a class."""

    owner: (
        str  # MODULE or MODULE:CLASS; of an attribute of layers, the MODULE:FUNCTION that sets it
    )
    name: str
    parameters: str | None = None  # None: an attribute

    def __str__(self) -> str:
        return f"{self.owner.rpartition('.')[2].rpartition(':')[2]}.{self.name}"


def _attributes(owner: str, names: str) -> tuple[Internal, ...]:
    return tuple(Internal(owner, name) for name in names.split())


_FREE_REQUEST = Internal(_SCHEDULER, "_free_request", "self, request, delay_free_blocks=")
_ADD_REQUEST = Internal(_SCHEDULER, "add_request", "self, request")
_UPDATE_AFTER = Internal(_SCHEDULER, "_update_after_schedule", "self, scheduler_output")
_UPDATE_FROM = Internal(
    _SCHEDULER, "update_from_output", "self, scheduler_output, model_runner_output"
)
_SCHEDULE = Internal(_SCHEDULER, "schedule", "self, throttle_prefills=")
_COUNT_DRAFTS = Internal(
    _SCHEDULER,
    "make_spec_decoding_stats",
    "self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, "
    "request_id",
)
_PROPOSE = Internal(
    _SPECULATOR,
    "propose",
    "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, "
    "num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, "
    "dp_sync_state=, dummy_run=, skip_attn_for_dummy_run=, mm_inputs=, is_profile=, "
    "num_speculative_tokens=",
)
_PROPOSE_V1 = Internal(
    _PROPOSER,
    "propose",
    "self, num_speculative_tokens, target_token_ids, target_positions, "
    "target_hidden_states, next_token_ids, token_indices_to_sample, common_attn_metadata, "
    "sampling_metadata, mm_embed_inputs=, num_rejected_tokens_gpu=, slot_mappings=",
)
# Of a step that is watched, and whose K is set.
_WATCHED_STEP = (
    _SCHEDULE,
    _UPDATE_AFTER,
    _UPDATE_FROM,
    Internal(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        "_update_after_schedule",
        "self, scheduler_output",
    ),
    *_attributes(_SCHEDULER, "running num_spec_tokens"),
    *_attributes(_REQUEST, "sampling_params"),
    *_attributes(_OUTPUT, "num_spec_tokens_to_schedule scheduled_spec_decode_tokens"),
    *_attributes(_OUTPUT, "num_scheduled_tokens total_num_scheduled_tokens"),
    *_attributes(_RUNNER_OUTPUT, "sampled_token_ids req_id_to_index"),
)
_STEP_WITHOUT_DRAFTS = (
    _SCHEDULE,
    _UPDATE_AFTER,
    *_attributes(_SCHEDULER, "running requests num_spec_tokens"),
    *_attributes(_REQUEST, "request_id spec_token_ids sampling_params"),
    *_attributes(_OUTPUT, "num_spec_tokens_to_schedule"),
)

INTERNALS: dict[str, tuple[Internal, ...]] = {
    LIVE_CONTROL: (
        *_WATCHED_STEP,
        _FREE_REQUEST,
        Internal(
            "vllm.v1.structured_output:StructuredOutputManager",
            "validate_tokens",
            "self, request, spec_tokens",
        ),
        *_attributes(_SCHEDULER, "structured_output_manager"),
        *_attributes(_REQUEST, "spec_token_ids is_prefill_chunk all_token_ids"),
        *_attributes(_OUTPUT, "num_invalid_spec_tokens"),
    ),
    STEP_RECORDS: (
        *_WATCHED_STEP,
        *_attributes(_SCHEDULER, "requests"),
        *_attributes(_REQUEST, "num_output_tokens"),
    ),
    CAPTURE_OF_TRAFFIC: (
        _FREE_REQUEST,
        *_attributes(_REQUEST, "status prompt_token_ids prompt_embeds mm_features lora_request"),
        *_attributes(_REQUEST, "output_token_ids"),
        *_attributes(
            "vllm.v1.request:RequestStatus",
            "FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED",
        ),
    ),
    LEARNING: (
        _FREE_REQUEST,
        _PROPOSE,
        _PROPOSE_V1,
        *_attributes(_REQUEST, "request_id status prompt_token_ids prompt_embeds mm_features"),
        *_attributes(_REQUEST, "lora_request output_token_ids sampling_params"),
        *_attributes(
            "vllm.v1.core.sched.output:NewRequestData",
            "req_id prompt_token_ids prompt_embeds mm_features lora_request sampling_params",
        ),
        *_attributes(_OUTPUT, "scheduled_new_reqs finished_req_ids"),
        *_attributes(
            "vllm.v1.worker.gpu.input_batch:InputBatch",
            "req_ids query_start_loc_np input_ids positions",
        ),
        *_attributes("vllm.v1.worker.gpu_input_batch:InputBatch", "req_ids"),
        *_attributes("vllm.v1.attention.backend:CommonAttentionMetadata", "query_start_loc_cpu"),
        *_attributes("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "speculator"),
        *_attributes("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "drafter input_batch"),
        *_attributes(_WORKER, "model_runner"),
        *_attributes("vllm.v1.worker.worker_base:WorkerBase", "is_driver_worker vllm_config"),
        Internal(_WORKER, "init_device", "self"),
        Internal(_WORKER, "execute_model", "self, scheduler_output"),
        Internal(_WORKER, "shutdown", "self"),
    ),
    ROLLOUT: (
        _FREE_REQUEST,
        *_attributes(_REQUEST, "num_output_tokens"),
        _ADD_REQUEST,
        Internal(
            _SCHEDULER, "reset_prefix_cache", "self, reset_running_requests=, reset_connector="
        ),
        _COUNT_DRAFTS,
        Internal(_REQUEST, "update_block_hashes", "self"),
        *_attributes(_REQUEST, "block_hashes _block_hasher"),
        Internal(_LINEAR, "process_weights_after_loading", "self, layer"),
        Internal(_EMBEDDING, "process_weights_after_loading", "self, layer"),
        Internal("vllm.utils.platform_utils", "is_pin_memory_available", ""),
        *_attributes("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", CPU_KERNEL),
        Internal(_WORKER, "get_model", "self"),
        Internal(_WORKER, "get_draft_model", "self"),
        *_attributes(_WORKER, "_sleep_mode_backend"),
        Internal("vllm.device_allocator.sleep_mode_backend:SleepModeBackend", "state", "self"),
        Internal(
            "vllm.v1.engine.core_client:AsyncMPClient",
            "call_utility_all_async",
            "self, method, *args",
        ),
        Internal(
            "vllm.v1.engine.core:EngineCore",
            "collective_rpc",
            "self, method, timeout=, args=, kwargs=",
        ),
        *_attributes("vllm.v1.engine.async_llm:AsyncLLM", "engine_core output_handler"),
        *_attributes("vllm.v1.engine.core_client:MPClient", "resources _finalizer"),
        *_attributes("vllm.v1.engine.core_client:BackgroundResources", "engine_manager"),
        *_attributes("vllm.v1.engine.utils:CoreEngineProcManager", "failed_proc_name"),
    ),
    SAMPLING_WORKAROUND: (*_STEP_WITHOUT_DRAFTS, _ADD_REQUEST),
    SEED_WORKAROUND: (
        _ADD_REQUEST,
        *_attributes(_REQUEST, "sampling_params"),
        *_attributes("vllm.config.speculative:SpeculativeConfig", "max_num_new_slots_for_drafting"),
    ),
    LABEL_WORKAROUND: (
        *_STEP_WITHOUT_DRAFTS,
        _ADD_REQUEST,
        _FREE_REQUEST,
        _UPDATE_FROM,
        *_attributes(_RUNNER_OUTPUT, "sampled_token_ids req_id_to_index logprobs"),
        *_attributes(_LOGPROBS, "logprob_token_ids logprobs cu_num_generated_tokens"),
    ),
    IDLE_DRAFTER: (
        _PROPOSE,
        Internal(
            _SPECULATOR,
            "_generate_draft",
            "self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, "
            "num_tokens_across_dp, cudagraph_runtime_mode=",
        ),
        Internal(_SPECULATOR, "_precompute_context_kv", "self, start, end, dummy_run="),
        Internal(_SPECULATOR, "init_cudagraph_manager", "self, cudagraph_mode"),
        Internal(_WORKER, "init_device", "self"),
        *_attributes("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "speculator"),
    ),
    DRAFT_RECORDING: (
        _PROPOSE,
        _PROPOSE_V1,
        *_attributes(
            "vllm.v1.worker.gpu.input_batch:InputBatch",
            "num_reqs num_tokens idx_mapping positions",
        ),
        *_attributes("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "speculator"),
        *_attributes("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "drafter"),
        *_attributes(_WORKER, "model_runner"),
    ),
    DRAFT_CLASS: (
        *(
            Internal(f"{_DFLASH}:DFlashQwen3Model", name, parameters)
            for name, parameters in (
                ("_build_fused_kv_buffers", "self"),
                ("_build_context_kv_buffers", "self, layers_attn, has_bias"),
                ("_normalize_context_k", "self, all_k"),
                (
                    "precompute_and_store_context_kv",
                    "self, context_states, context_positions, context_slot_mapping=",
                ),
            )
        ),
        *_attributes(
            f"{_DFLASH}:DFlashQwen3Model",
            "_fused_kv_weight _fused_kv_bias _k_norm_weights _rope_cos_sin_cache _rms_norm_eps "
            "mask_token_id has_separate_mask_embedding",
        ),
        *(
            Internal(f"{_DFLASH}:DFlashQwen3ForCausalLM", name, parameters)
            for name, parameters in (
                ("__init__", "self, *, vllm_config, prefix="),
                ("forward", "self, input_ids, positions, inputs_embeds="),
                ("combine_hidden_states", "self, hidden_states"),
                (
                    "precompute_and_store_context_kv",
                    "self, context_states, context_positions, context_slot_mapping=",
                ),
                ("load_weights", "self, weights"),
                ("_read_mask_embedding", "self"),
            )
        ),
        *_attributes(f"{_DFLASH}:DFlashQwen3Model", "use_aux_hidden_state fc"),
        Internal(
            "vllm.config", "get_layers_from_vllm_config", "vllm_config, layer_type, layer_names="
        ),
        *_attributes("vllm.model_executor.layers.attention:Attention", "sliding_window"),
        Internal("vllm._custom_ops", "rms_norm", "out, input, weight, epsilon"),
        Internal("vllm.forward_context", "get_forward_context", ""),
    ),
    CAUSALITY: (
        Internal(_ALGORITHMS, "register_speculator", "name"),
        Internal(_ALGORITHMS, "update_dflash", "config_dict, pre_trained_config"),
    ),
    ATTENTION_CHECK: (
        Internal(_DFLASH, "_dflash_layer_causal", "config, layer_idx"),
        Internal(
            "vllm.v1.attention.selector",
            "get_attn_backend",
            "head_size, dtype, kv_cache_dtype, use_mla=, has_sink=, use_sparse=, use_mm_prefix=, "
            "use_per_head_quant_scales=, attn_type=, num_heads=, has_sliding_window=",
        ),
    ),
    STATE_EXTRACTION: (
        *(
            Internal(f"{_CONNECTOR}:ExampleHiddenStatesConnector", name, parameters)
            for name, parameters in (
                ("__init__", "self, vllm_config, role, kv_cache_config"),
                ("_submit_async_write", "self, pending"),
                ("get_finished", "self, finished_req_ids"),
                ("request_finished", "self, request, block_ids"),
                ("request_finished_all_groups", "self, request, block_ids"),
            )
        ),
        Internal(_CONNECTOR, "extract_from_kv_cache", "kv_cache, slot_mapping, num_tokens"),
        *_attributes(
            f"{_CONNECTOR}:ExampleHiddenStatesConnector",
            "_block_size _executor _get_copy_stream _is_tp_rank_zero _kv_cache _pending_saves "
            "_req_copy_events "
            "_req_futures _request_filenames _storage_path use_lock",
        ),
        *_attributes(_REQUEST, "num_prompt_tokens status"),
        *_attributes("vllm.v1.request:RequestStatus", "FINISHED_ABORTED"),
    ),
    TARGET_CHECK: (
        Internal(_LOADER, "get_model_cls", "model_config"),
        Internal(_INTERFACES, "supports_eagle3", "model"),
    ),
    METRICS: (
        Internal(
            "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
            "__init__",
            "self, vllm_config, engine_indexes",
        ),
        Internal(
            "vllm.v1.metrics.loggers:AggregateStatLoggerBase",
            "record",
            "self, scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=",
        ),
        *_attributes("vllm.v1.metrics.stats:SchedulerStats", "spec_decoding_stats"),
        *_attributes(
            "vllm.v1.spec_decode.metrics:SpecDecodingStats",
            "num_drafts num_draft_tokens num_accepted_tokens num_accepted_tokens_per_pos",
        ),
    ),
    REQUEST_METRICS: (
        _FREE_REQUEST,
        _COUNT_DRAFTS,
        *_attributes(_SCHEDULER, "requests"),
        *_attributes(_REQUEST, "request_id num_output_tokens"),
    ),
}


@cache
def is_usable(part: str) -> bool:
    """Whether the internals that a part relies on are as expected; logs one line if not."""
    found = changes(part)
    if found:
        logger.warning(
            "Leadout's %s is off, because vLLM's internals have changed: %s. Serving goes on "
            "without it.",
            part,
            "; ".join(found),
        )
    return not found


def changes(part: str) -> list[str]:
    """What differs from `INTERNALS`, one text for each."""
    return [text for each in INTERNALS[part] if (text := _change(each)) is not None]


def _change(expected: Internal) -> str | None:
    try:
        owner = _found(expected.owner)
    except (ImportError, AttributeError):
        return f"{expected} is missing"
    if expected.parameters is None:
        return None if _has_attribute(owner, expected.name) else f"{expected} is missing"
    function = getattr(owner, expected.name, None)
    if function is None:
        return f"{expected} is missing"
    parameters = signature_of(function)
    if parameters == expected.parameters:
        return None
    return f"{expected}({parameters}), expected ({expected.parameters})"


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


def signature_of(function: Any) -> str:
    """The parameters of a function; `=` follows those that have a default."""
    parts, has_star = [], False
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            has_star = True
        elif each.kind is each.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True
        stars: dict[Any, str] = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}
        parts.append(
            f"{stars.get(each.kind, '')}{each.name}{'' if each.default is each.empty else '='}"
        )
    return ", ".join(parts)


def _has_attribute(owner: Any, name: str) -> bool:
    """Whether objects of a class have an attribute: one of the class, a field, or set in it.

    For a function: whether it sets the attribute of a layer.
    """
    if hasattr(owner, name) or (is_dataclass(owner) and name in {f.name for f in fields(owner)}):
        return True
    return re.search(rf"\b(self|layer)\.{name}\b", _source_of(owner)) is not None


@cache
def _source_of(owner: Any) -> str:
    """Kept, because finding a class in its file is slow."""
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):  # no source to look at
        return ""


def is_supported(version: str) -> bool:
    """Whether a vLLM version is in SUPPORTED: any 0.32.x, with or without a build suffix."""
    return version.split(".")[:2] == ["0", "32"]


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

    base = _found("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase")
    attention = _found("vllm.model_executor.layers.attention:Attention")
    layers = get_layers_from_vllm_config(vllm_config, base).values()
    return all(type(layer) is attention and layer.sliding_window is None for layer in layers)


def platform_worker() -> Any:
    """The worker class that vLLM would choose for this platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return _found("vllm.v1.worker.cpu_worker:CPUWorker")
    if current_platform.is_xpu():
        return _found("vllm.v1.worker.xpu_worker:XPUWorker")
    return _found(_WORKER)


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
