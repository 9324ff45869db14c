"""vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`)."""

from leadout.version import __version__


def register() -> None:
    from vllm.logger import init_logger

    # Under vLLM's own logger name, so that VLLM_LOGGING_LEVEL governs the line.
    init_logger("vllm.leadout").debug("Leadout %s is present", __version__)
