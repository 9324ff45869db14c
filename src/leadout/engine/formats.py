"""Mends how vLLM 0.32 reads the causality of a speculators-format drafter.

The format has one flag, `sliding_window_non_causal`. The library that writes it trains sliding
layers causal when it is false, and full-attention layers bidirectional always; it writes false
unless asked otherwise. vLLM takes false for "all layers causal": a drafter with full-attention
layers then runs as it was never trained, without an error.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.transformers_utils.configs.speculators.algos import register_speculator, update_dflash

logger = init_logger("vllm.leadout")

FLAG = "sliding_window_non_causal"
SLIDING = "sliding_attention"


def register() -> None:
    """Take the place of vLLM's own translation in its registry of speculators formats."""
    register_speculator("dflash")(translate_as_trained)


def translate_as_trained(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    update_dflash(config_dict=config_dict, pre_trained_config=pre_trained_config)
    count = pre_trained_config["num_hidden_layers"]
    kinds = pre_trained_config.get("layer_types") or ["full_attention"] * count
    if config_dict.get(FLAG, True) or all(kind == SLIDING for kind in kinds):
        return
    if SLIDING in kinds:
        # Without a flag for all layers vLLM goes by the kinds: sliding causal, full not.
        del pre_trained_config["dflash_config"]["causal"]
    else:
        pre_trained_config["dflash_config"]["causal"] = False
    logger.warning_once(
        "causality: vLLM would serve the full-attention layers of this speculators-format drafter "
        "causal because of %s=false; Leadout serves them bidirectional, as they were trained. "
        "Remedy for good: rewrite it with `leadout convert`.",
        FLAG,
    )
