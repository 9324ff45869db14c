"""Leadout's entry point in vLLM, and its correction of how vLLM reads a drafter's causality.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). It makes
vLLM run Leadout's draft model class and read speculators-format drafters as they were trained.
`LEADOUT_PLUGIN=0` leaves vLLM unchanged.
"""

from __future__ import annotations

import os
from typing import Any

from leadout.engine.vllm_internals import CAUSALITY, SUPPORTED, is_supported, is_usable
from leadout.version import __version__

SWITCH = "LEADOUT_PLUGIN"
# By name, so that registering imports nothing heavy into processes that never draft.
DRAFTER_CLASS = "leadout.engine.draft_model:ServedDrafter"
FLAG = "sliding_window_non_causal"
SLIDING = "sliding_attention"


def register() -> None:
    import vllm
    from vllm.logger import init_logger

    # Under vLLM's own logger name, so that VLLM_LOGGING_LEVEL applies.
    logger = init_logger("vllm.leadout")
    if os.environ.get(SWITCH) == "0":
        logger.debug("Leadout %s is installed but disabled by %s=0", __version__, SWITCH)
        return
    if not is_supported(vllm.__version__):
        logger.warning(
            "Leadout %s is disabled: it supports vLLM %s, this is vLLM %s. Install a supported "
            "vLLM, or set %s=0 to silence this warning.",
            __version__,
            SUPPORTED,
            vllm.__version__,
            SWITCH,
        )
        return
    from vllm import ModelRegistry

    if is_usable(CAUSALITY):
        from leadout.engine.vllm_adapter import register_speculator

        register_speculator("dflash")(translate_as_trained)  # instead of vLLM's own translation
    ModelRegistry.register_model("DFlashDraftModel", DRAFTER_CLASS)
    logger.debug("Leadout %s is active", __version__)


def translate_as_trained(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """vLLM 0.32's translation of a speculators-format config, with the causality corrected.

    The format has one flag, `sliding_window_non_causal`, false by default. The library that writes
    it trains sliding-window layers causal if it is false, and full-attention layers bidirectional
    in any case. vLLM takes false to mean that all layers are causal: a drafter with full-attention
    layers would run as it was never trained, without an error.
    """
    from vllm.logger import init_logger

    from leadout.engine.vllm_adapter import update_dflash

    update_dflash(config_dict=config_dict, pre_trained_config=pre_trained_config)
    count = pre_trained_config["num_hidden_layers"]
    kinds = pre_trained_config.get("layer_types") or ["full_attention"] * count
    if config_dict.get(FLAG, True) or all(kind == SLIDING for kind in kinds):
        return
    if SLIDING in kinds:
        # Without the field vLLM decides by layer type: sliding causal, full attention not.
        del pre_trained_config["dflash_config"]["causal"]
    else:
        pre_trained_config["dflash_config"]["causal"] = False
    init_logger("vllm.leadout").warning_once(
        "causality: because of %s=false, vLLM would run the full-attention layers of this "
        "speculators-format drafter causal. Leadout runs them bidirectional, as they were trained. "
        "To fix the files, rewrite them with `leadout convert`.",
        FLAG,
    )
