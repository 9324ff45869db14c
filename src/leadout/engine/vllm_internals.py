"""Which vLLM Leadout works with: the supported versions, and the internals that it relies on.

vLLM's internals may change with any release. `INTERNALS` lists those in use, by the part of Leadout
that uses them, as they are in the supported version. A part asks `is_usable` before it switches
itself on: if something that it relies on has changed, that part alone stays off, with one line in
the log, and the server serves without it. Importing this needs no vLLM.
"""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

logger = logging.getLogger("vllm.leadout")

SUPPORTED = ">=0.32,<0.33"

# Modules and classes of vLLM, as MODULE or MODULE:CLASS.
VLLM_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_REQUEST = "vllm.v1.request:Request"
_OUTPUT = "vllm.v1.core.sched.output:SchedulerOutput"
_RUNNER_OUTPUT = "vllm.v1.outputs:ModelRunnerOutput"
_LOGPROBS = "vllm.v1.outputs:LogprobsLists"
DFLASH = "vllm.model_executor.models.qwen3_dflash"
VLLM_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
LINEAR = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
LOADER = "vllm.model_executor.model_loader.utils"
INTERFACES = "vllm.model_executor.models.interfaces"
ALGORITHMS = "vllm.transformers_utils.configs.speculators.algos"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"

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


_FREE_REQUEST = Internal(VLLM_SCHEDULER, "_free_request", "self, request, delay_free_blocks=")
_ADD_REQUEST = Internal(VLLM_SCHEDULER, "add_request", "self, request")
_UPDATE_AFTER = Internal(VLLM_SCHEDULER, "_update_after_schedule", "self, scheduler_output")
_UPDATE_FROM = Internal(
    VLLM_SCHEDULER, "update_from_output", "self, scheduler_output, model_runner_output"
)
_SCHEDULE = Internal(VLLM_SCHEDULER, "schedule", "self, throttle_prefills=")
_COUNT_DRAFTS = Internal(
    VLLM_SCHEDULER,
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
    *_attributes(VLLM_SCHEDULER, "running num_spec_tokens"),
    *_attributes(_REQUEST, "sampling_params"),
    *_attributes(_OUTPUT, "num_spec_tokens_to_schedule scheduled_spec_decode_tokens"),
    *_attributes(_OUTPUT, "num_scheduled_tokens total_num_scheduled_tokens"),
    *_attributes(_RUNNER_OUTPUT, "sampled_token_ids req_id_to_index"),
)
_STEP_WITHOUT_DRAFTS = (
    _SCHEDULE,
    _UPDATE_AFTER,
    *_attributes(VLLM_SCHEDULER, "running requests num_spec_tokens"),
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
        *_attributes(VLLM_SCHEDULER, "structured_output_manager"),
        *_attributes(_REQUEST, "spec_token_ids is_prefill_chunk all_token_ids"),
        *_attributes(_OUTPUT, "num_invalid_spec_tokens"),
    ),
    STEP_RECORDS: (
        *_WATCHED_STEP,
        *_attributes(VLLM_SCHEDULER, "requests"),
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
        *_attributes(VLLM_WORKER, "model_runner"),
        *_attributes("vllm.v1.worker.worker_base:WorkerBase", "is_driver_worker vllm_config"),
        Internal(VLLM_WORKER, "init_device", "self"),
        Internal(VLLM_WORKER, "execute_model", "self, scheduler_output"),
        Internal(VLLM_WORKER, "shutdown", "self"),
    ),
    ROLLOUT: (
        _FREE_REQUEST,
        *_attributes(_REQUEST, "num_output_tokens"),
        _ADD_REQUEST,
        Internal(
            VLLM_SCHEDULER, "reset_prefix_cache", "self, reset_running_requests=, reset_connector="
        ),
        _COUNT_DRAFTS,
        Internal(_REQUEST, "update_block_hashes", "self"),
        *_attributes(_REQUEST, "block_hashes _block_hasher"),
        Internal(LINEAR, "process_weights_after_loading", "self, layer"),
        Internal(EMBEDDING, "process_weights_after_loading", "self, layer"),
        Internal("vllm.utils.platform_utils", "is_pin_memory_available", ""),
        *_attributes("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", CPU_KERNEL),
        Internal(VLLM_WORKER, "get_model", "self"),
        Internal(VLLM_WORKER, "get_draft_model", "self"),
        *_attributes(VLLM_WORKER, "_sleep_mode_backend"),
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
        Internal(VLLM_WORKER, "init_device", "self"),
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
        *_attributes(VLLM_WORKER, "model_runner"),
    ),
    DRAFT_CLASS: (
        *(
            Internal(f"{DFLASH}:DFlashQwen3Model", name, parameters)
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
            f"{DFLASH}:DFlashQwen3Model",
            "_fused_kv_weight _fused_kv_bias _k_norm_weights _rope_cos_sin_cache _rms_norm_eps "
            "mask_token_id has_separate_mask_embedding",
        ),
        *(
            Internal(f"{DFLASH}:DFlashQwen3ForCausalLM", name, parameters)
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
        *_attributes(f"{DFLASH}:DFlashQwen3Model", "use_aux_hidden_state fc"),
        Internal(
            "vllm.config", "get_layers_from_vllm_config", "vllm_config, layer_type, layer_names="
        ),
        *_attributes("vllm.model_executor.layers.attention:Attention", "sliding_window"),
        Internal("vllm._custom_ops", "rms_norm", "out, input, weight, epsilon"),
        Internal("vllm.forward_context", "get_forward_context", ""),
    ),
    CAUSALITY: (
        Internal(ALGORITHMS, "register_speculator", "name"),
        Internal(ALGORITHMS, "update_dflash", "config_dict, pre_trained_config"),
    ),
    ATTENTION_CHECK: (
        Internal(DFLASH, "_dflash_layer_causal", "config, layer_idx"),
        Internal(
            "vllm.v1.attention.selector",
            "get_attn_backend",
            "head_size, dtype, kv_cache_dtype, use_mla=, has_sink=, use_sparse=, use_mm_prefix=, "
            "use_per_head_quant_scales=, attn_type=, num_heads=, has_sliding_window=",
        ),
    ),
    STATE_EXTRACTION: (
        *(
            Internal(f"{CONNECTOR}:ExampleHiddenStatesConnector", name, parameters)
            for name, parameters in (
                ("__init__", "self, vllm_config, role, kv_cache_config"),
                ("_submit_async_write", "self, pending"),
                ("get_finished", "self, finished_req_ids"),
                ("request_finished", "self, request, block_ids"),
                ("request_finished_all_groups", "self, request, block_ids"),
            )
        ),
        Internal(CONNECTOR, "extract_from_kv_cache", "kv_cache, slot_mapping, num_tokens"),
        *_attributes(
            f"{CONNECTOR}:ExampleHiddenStatesConnector",
            "_block_size _executor _get_copy_stream _is_tp_rank_zero _kv_cache _pending_saves "
            "_req_copy_events "
            "_req_futures _request_filenames _storage_path use_lock",
        ),
        *_attributes(_REQUEST, "num_prompt_tokens status"),
        *_attributes("vllm.v1.request:RequestStatus", "FINISHED_ABORTED"),
    ),
    TARGET_CHECK: (
        Internal(LOADER, "get_model_cls", "model_config"),
        Internal(INTERFACES, "supports_eagle3", "model"),
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
        *_attributes(VLLM_SCHEDULER, "requests"),
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
        owner = object_at(expected.owner)
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


def object_at(path: str) -> Any:
    """The module of vLLM at MODULE, or the class or function at MODULE:NAME."""
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
