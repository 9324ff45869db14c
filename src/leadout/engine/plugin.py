"""vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`).

`LEADOUT_PLUGIN=0` leaves vLLM untouched.
"""

from __future__ import annotations

import os

from leadout.engine.support import SUPPORTED, is_supported
from leadout.version import __version__

SWITCH = "LEADOUT_PLUGIN"
# By name, so that registering imports nothing heavy into processes that never draft.
DRAFTER_CLASS = "leadout.engine.drafter:LeadoutDFlashForCausalLM"


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

    from leadout.engine import formats

    formats.register()
    ModelRegistry.register_model("DFlashDraftModel", DRAFTER_CLASS)
    logger.debug("Leadout %s is present", __version__)
