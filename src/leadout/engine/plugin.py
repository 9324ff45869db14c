"""Mends how vLLM 0.32 reads the causality of a speculators-format drafter.

The format has one flag, `sliding_window_non_causal`. The library that writes it trains sliding
layers causal when it is false, and full-attention layers bidirectional always; it writes false
unless asked otherwise. vLLM takes false for "all layers causal": a drafter with full-attention
layers then runs as it was never trained, without an error.
"""

from __future__ import annotations

import os
from typing import Any

from leadout.engine.vllm_adapter import SUPPORTED, is_supported
from leadout.version import __version__

FLAG = "sliding_window_non_causal"
SLIDING = "sliding_attention"


def register_formats() -> None:
    """Take the place of vLLM's own translation in its registry of speculators formats."""
    from vllm.transformers_utils.configs.speculators.algos import register_speculator

    register_speculator("dflash")(translate_as_trained)


def translate_as_trained(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    from vllm.logger import init_logger
    from vllm.transformers_utils.configs.speculators.algos import update_dflash

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
    init_logger("vllm.leadout").warning_once(
        "causality: vLLM would serve the full-attention layers of this speculators-format drafter "
        "causal because of %s=false; Leadout serves them bidirectional, as they were trained. "
        "Remedy for good: rewrite it with `leadout convert`.",
        FLAG,
    )


# vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`).
#
# `LEADOUT_PLUGIN=0` leaves vLLM untouched.

SWITCH = "LEADOUT_PLUGIN"
# By name, so that registering imports nothing heavy into processes that never draft.
DRAFTER_CLASS = "leadout.engine.draft_model:LeadoutDFlashForCausalLM"


def register() -> None:
    import vllm
    from vllm.logger import init_logger

    # Under vLLM's own logger name, so that VLLM_LOGGING_LEVEL governs the lines.
    logger = init_logger("vllm.leadout")
    if os.environ.get(SWITCH) == "0":
        logger.debug("Leadout %s is present but switched off by %s=0", __version__, SWITCH)
        return
    if not is_supported(vllm.__version__):
        logger.warning(
            "Leadout %s does nothing here: found vLLM %s, wanted %s. Install a supported vLLM, or "
            "set %s=0 to silence this.",
            __version__,
            vllm.__version__,
            SUPPORTED,
            SWITCH,
        )
        return
    from vllm import ModelRegistry

    register_formats()
    ModelRegistry.register_model("DFlashDraftModel", DRAFTER_CLASS)
    logger.debug("Leadout %s is present", __version__)
