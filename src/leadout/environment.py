"""What is installed on this machine and which commands can run: the report of `leadout env`."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util

from pydantic import BaseModel
from rich.console import Console

from leadout.console import facts_table, table
from leadout.engine.installation import EngineFacts, probe_engine
from leadout.engine.vllm_internals import SUPPORTED
from leadout.version import __version__, installed_version

LIBRARIES = ("torch", "transformers", "safetensors", "pydantic")


@dataclass(frozen=True, slots=True)
class Need:
    """A module that a command requires, and how to install it."""

    module: str
    remedy: str

    def is_met(self) -> bool:
        return util.find_spec(self.module) is not None


class Usability(BaseModel, extra="forbid"):
    """Whether a command can run here, and what to install if not."""

    usable: bool
    remedy: str | None = None


class Hardware(BaseModel, extra="forbid"):
    system: str
    machine: str
    cores: int
    memory_gib: float
    accelerators: list[str]


class EnvironmentReport(BaseModel, extra="forbid"):
    leadout: str
    python: str
    libraries: dict[str, str | None]
    engine: EngineFacts
    hardware: Hardware
    commands: dict[str, Usability]
    warnings: list[str]


def collect(needs: Mapping[str, tuple[Need, ...]]) -> EnvironmentReport:
    engine = probe_engine()
    hardware = Hardware(
        system=platform.system(),
        machine=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        accelerators=_accelerators(),
    )
    return EnvironmentReport(
        leadout=__version__,
        python=platform.python_version(),
        libraries={name: installed_version(name) for name in LIBRARIES},
        engine=engine,
        hardware=hardware,
        commands={command: usability(required, engine) for command, required in needs.items()},
        warnings=known_problems(),
    )


def usability(needs: tuple[Need, ...], engine: EngineFacts | None = None) -> Usability:
    """Whether all needs are installed and, given `engine`, whether it works and is supported."""
    remedy = "; ".join(need.remedy for need in needs if not need.is_met()) or None
    if remedy is None and engine is not None and any(need.module == "vllm" for need in needs):
        if engine.error is not None:
            remedy = "the engine does not work; see engine and warnings above"
        elif not engine.supported:
            remedy = f"install vLLM {SUPPORTED}"
    return Usability(usable=remedy is None, remedy=remedy)


def render(report: EnvironmentReport) -> None:
    console = Console()
    engine, hardware = report.engine, report.hardware
    facts = [("leadout", report.leadout), ("python", report.python)]
    facts += [(name, version or "not installed") for name, version in report.libraries.items()]
    facts.append(("engine", engine.summary()))
    if engine.model_runner is not None:
        facts.append(("model runner", f"{engine.model_runner}: {engine.model_runner_reason}"))
    machine = f"{hardware.system} {hardware.machine}, {hardware.cores} cores"
    facts.append(("machine", f"{machine}, {hardware.memory_gib:.1f} GiB"))
    facts.append(("accelerators", ", ".join(hardware.accelerators) or "none"))
    console.print(facts_table(facts))
    commands = (
        (name, "yes" if state.usable else "no", state.remedy or "")
        for name, state in report.commands.items()
    )
    console.print(table(None, ("command", "usable", "remedy"), commands, left=3))
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}")


def _accelerators() -> list[str]:
    import torch

    for kind in (torch.cuda, torch.xpu):
        if kind.is_available():
            return [kind.get_device_name(i) for i in range(kind.device_count())]
    return []


def known_problems() -> list[str]:
    """Known faults of installations that look complete but do not work."""
    found = []
    torch_version = installed_version("torch") or ""
    for companion in ("torchvision", "torchaudio", "torchcodec"):
        version = installed_version(companion)
        if version is not None and torch_version.endswith("+cpu") and "+cpu" not in version:
            found.append(
                f"{companion} {version} is not a CPU build but torch {torch_version} is: "
                f"importing transformers can fail; run 'pip uninstall {companion}'"
            )
    return found
