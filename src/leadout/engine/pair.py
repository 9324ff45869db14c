"""The target, drafter and settings of a vLLM config as a `Pair`, checked by the pairing rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_fields
from typing import Any

from vllm.config import replace, set_current_vllm_config
from vllm.logger import init_logger

from leadout.checkpoints import Checkpoint, UnsupportedCheckpointError, read_checkpoint
from leadout.dflash.config import DrafterConfig
from leadout.engine.vllm_adapter import (
    dflash_layer_causal,
    draft_folder,
    get_attn_backend,
    get_model_cls,
    model_runner,
    supports_eagle3,
)
from leadout.engine.vllm_internals import ATTENTION_CHECK, TARGET_CHECK, is_usable
from leadout.errors import NEGATIVE, LeadoutError
from leadout.findings import Finding, Severity
from leadout.models import is_left_to_vllm
from leadout.pairing import EngineSettings, Pair, examine, target_from_config

logger = init_logger("vllm.leadout")


class UnfitPairError(LeadoutError):
    """Target, drafter and settings do not fit; the message names the rules and the remedies."""

    exit_code = NEGATIVE


def require_fit(vllm_config: Any) -> Checkpoint | None:
    """Check the pair of an engine that is starting; returns the drafter's checkpoint.

    None for a drafter of a kind that Leadout does not know but vLLM may serve: without Leadout it
    would be served too.
    """
    require_tapped_states(vllm_config)
    draft = vllm_config.speculative_config.draft_model_config
    if draft.model_weights or is_left_to_vllm(draft.model):  # no local files
        logger.warning("Leadout leaves the drafter %s to vLLM, unexamined.", draft.model)
        return None
    try:
        pair = pair_of(vllm_config)
    except UnsupportedCheckpointError as problem:
        logger.warning("Leadout leaves this drafter to vLLM, unexamined: %s", problem)
        return None
    if pair.drafter.left_to_vllm:
        logger.warning(
            "Leadout leaves the weights of this drafter to vLLM, unexamined: it has %s",
            ", ".join(pair.drafter.left_to_vllm),
        )
    findings: list[Finding] = []
    for finding in examine(pair):
        if finding.severity is Severity.WARNING:
            logger.warning("%s", finding)
        else:
            findings.append(finding)
    raise_if_unfit(findings)
    return pair.drafter


def require_tapped_states(vllm_config: Any) -> None:
    """Raise if vLLM's class of this target cannot hand the states of its layers to a drafter."""
    if not is_usable(TARGET_CHECK):
        return
    target = vllm_config.model_config
    found = get_model_cls(target)
    if not supports_eagle3(found):
        raise UnfitPairError(
            f"vLLM cannot draft for {target.model}: its model class {found.__name__} does not hand "
            "out the hidden states of its layers. Add `--model-impl transformers` to run the "
            "model by a class that does, or use another target."
        )


def raise_if_unfit(findings: Sequence[Finding]) -> None:
    errors = [str(finding) for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise UnfitPairError("target and drafter do not fit\n" + "\n".join(errors))


def pair_of(vllm_config: Any) -> Pair:
    """The pair of a config with speculation, including what vLLM will do with the drafter."""
    speculation = vllm_config.speculative_config
    draft = speculation.draft_model_config
    checkpoint = read_checkpoint(draft_folder(vllm_config), as_served=True)
    pair = planned_pair(vllm_config, checkpoint, speculation.num_speculative_tokens)
    assert pair.settings is not None
    if not is_usable(ATTENTION_CHECK):
        return pair
    backend_name, takes_non_causal = _draft_attention_backend(vllm_config, checkpoint.config)
    causal = [
        dflash_layer_causal(draft.hf_config, layer) for layer in range(checkpoint.config.num_layers)
    ]
    settings = replace_fields(
        pair.settings,
        backend_name=backend_name,
        backend_takes_non_causal=takes_non_causal,
        served_causal=tuple(causal),
    )
    return replace_fields(pair, settings=settings)


def planned_pair(vllm_config: Any, checkpoint: Checkpoint, draft_tokens: int) -> Pair:
    """The pair of a config without speculation: what vLLM will do with the drafter is unknown."""
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
            model_runner=model_runner(vllm_config),
            backend_name=None,
            backend_takes_non_causal=None,
            served_causal=None,
        ),
    )


def _draft_attention_backend(
    vllm_config: Any, drafter: DrafterConfig
) -> tuple[str | None, bool | None]:
    """The attention backend that vLLM selects for the drafter; whether it supports non-causal."""
    bidirectional = not all(layer.causal for layer in drafter.layers)
    attention = replace(
        vllm_config.attention_config,
        # vLLM selects the drafter's backend independently of the target's.
        backend=vllm_config.speculative_config.attention_backend,
        use_non_causal=bidirectional,
    )
    with set_current_vllm_config(replace(vllm_config, attention_config=attention)):
        try:
            backend = get_attn_backend(
                drafter.head_dim,
                vllm_config.model_config.dtype,
                vllm_config.speculative_config.kv_cache_dtype
                or vllm_config.cache_config.cache_dtype,
                has_sliding_window=any(layer.window is not None for layer in drafter.layers),
            )
        except ValueError:  # no backend supports what the drafter needs
            return None, False
    return backend.get_name(), bool(backend.supports_non_causal())
