"""What vLLM is about to run, seen as a pair that the rules can judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_fields
from typing import Any

from vllm.config import replace, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
from vllm.v1.attention.selector import get_attn_backend

from leadout.checkpoints import Checkpoint, read_checkpoint
from leadout.dflash.config import DrafterConfig
from leadout.errors import LeadoutError
from leadout.findings import Finding, Severity
from leadout.models import local_folder
from leadout.pairing import EngineSettings, Pair, examine, target_from_config

logger = init_logger("vllm.leadout")

# Only a warning at the start of the engine: defaults of vLLM's own break this rule on many
# machines, and such a server is slower than it could be, not wrong. `leadout serve` fills in a
# value that keeps it, and refuses only one that the user chose.
FORGIVEN_AT_START = "batched-tokens"


class UnfitPairError(LeadoutError):
    """Target, drafter and settings do not fit; the message names the rules and the remedies."""


def require_fit(vllm_config: Any) -> Checkpoint:
    """Judge the pair of a starting engine; returns its drafter's checkpoint if it may run."""
    pair = pair_of(vllm_config)
    broken: list[Finding] = []
    for finding in examine(pair):
        if finding.severity is Severity.WARNING or finding.name == FORGIVEN_AT_START:
            logger.warning("%s", finding)
        else:
            broken.append(finding)
    require_no_refusal(broken)
    return pair.drafter


def require_no_refusal(findings: Sequence[Finding]) -> None:
    refused = [str(finding) for finding in findings if finding.severity is Severity.ERROR]
    if refused:
        raise UnfitPairError("target and drafter do not fit\n" + "\n".join(refused))


def pair_of(vllm_config: Any) -> Pair:
    """The pair of a config with speculation: what vLLM will do with the drafter is known."""
    speculation = vllm_config.speculative_config
    draft = speculation.draft_model_config
    checkpoint = read_checkpoint(local_folder(draft.model, draft.revision))
    pair = pair_to_be(vllm_config, checkpoint, speculation.num_speculative_tokens)
    assert pair.settings is not None
    backend_name, takes_non_causal = _backend_of(vllm_config, checkpoint.config)
    causal = [
        _dflash_layer_causal(draft.hf_config, layer)
        for layer in range(checkpoint.config.num_layers)
    ]
    settings = replace_fields(
        pair.settings,
        backend_name=backend_name,
        backend_takes_non_causal=takes_non_causal,
        served_causal=tuple(causal),
    )
    return replace_fields(pair, settings=settings)


def pair_to_be(vllm_config: Any, checkpoint: Checkpoint, draft_tokens: int) -> Pair:
    """The same from a config without speculation, which vLLM has not been asked about yet."""
    target, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    return Pair(
        target=target_from_config(target.hf_config.to_dict(), target.model),
        drafter=checkpoint,
        settings=EngineSettings(
            draft_tokens=draft_tokens,
            max_model_len=target.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            dtype=str(target.dtype).removeprefix("torch."),
            model_runner="V2" if vllm_config.use_v2_model_runner else "V1",
            backend_name=None,
            backend_takes_non_causal=None,
            served_causal=None,
        ),
    )


def _backend_of(vllm_config: Any, drafter: DrafterConfig) -> tuple[str | None, bool | None]:
    """The attention backend that vLLM would run the drafter with, and whether it can."""
    bidirectional = not all(layer.causal for layer in drafter.layers)
    attention = replace(
        vllm_config.attention_config,
        # Never the target's choice: the drafter's is selected on its own.
        backend=vllm_config.speculative_config.attention_backend,
        use_non_causal=bidirectional,
    )
    with set_current_vllm_config(replace(vllm_config, attention_config=attention)):
        try:
            backend = get_attn_backend(
                drafter.head_dim,
                vllm_config.model_config.dtype,
                vllm_config.cache_config.cache_dtype,
                has_sliding_window=any(layer.window is not None for layer in drafter.layers),
            )
        except ValueError:  # no backend at all takes what the drafter needs
            return None, False
    return backend.get_name(), bool(backend.supports_non_causal())
