"""The flags and the environment that switch Leadout's parts on in vLLM, beside the user's own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from leadout.engine.capture_settings import CaptureSettings, load_redactor
from leadout.engine.live_settings import LiveSettings
from leadout.engine.pair import UnfitPairError
from leadout.engine.registry_settings import RegistrySettings
from leadout.engine.sections import (
    CAPTURE,
    LIVE,
    REGISTRY,
    SCHEDULER,
    WORKER_EXTENSION,
    Section,
    SectionError,
    with_section,
)

PLUGINS = "VLLM_PLUGINS"
ENDPOINTS = "vllm.endpoint_plugins"
# Groups that load all they find as long as VLLM_PLUGINS is not set.
FILTERED = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


@dataclass(frozen=True)
class Parts:
    """Which of Leadout's parts are asked for."""

    live: LiveSettings | None = None
    capture: CaptureSettings | None = None
    registry: RegistrySettings | None = None

    def by_section(self) -> dict[str, Section]:
        parts = {LIVE: self.live, CAPTURE: self.capture, REGISTRY: self.registry}
        return {name: part for name, part in parts.items() if part is not None}


def flags_for(parts: Parts, asked: Any) -> list[str]:
    """The flags for these parts; `asked` are the user's, as vLLM parsed them."""
    wanted = parts.by_section()
    if not wanted:
        return []
    flag = f"--{next(iter(wanted))}"
    if asked.scheduler_cls is not None:
        raise UnfitPairError(
            f"{flag}: found --scheduler-cls {asked.scheduler_cls} as well, wanted one scheduler; "
            "leave out one of the two"
        )
    for name in (LIVE, REGISTRY):
        if name in wanted and asked.data_parallel_size > 1:
            raise UnfitPairError(
                f"--{name}: found data_parallel_size {asked.data_parallel_size}, wanted 1; start "
                f"one server for each replica, or leave out --{name}"
            )
    additional = dict(asked.additional_config or {})
    for name, settings in wanted.items():
        additional = with_section(additional, name, settings)
    flags = ["--scheduler-cls", SCHEDULER]
    if REGISTRY in wanted:
        _require_one_of_each(asked)
        flags += ["--worker-extension-cls", WORKER_EXTENSION]
    if CAPTURE in wanted:
        _require_known_capture(additional["leadout"][CAPTURE])
    return [*flags, "--additional-config", json.dumps(additional)]


def environment_for(parts: Parts, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """vLLM loads endpoints only from packages that VLLM_PLUGINS names, and then nothing else.

    So all that would have loaded without it is named as well.
    """
    if parts.registry is None:
        return {}
    if PLUGINS in environment:
        named = environment[PLUGINS].split(",")
    else:
        named = sorted({point.name for group in FILTERED for point in entry_points(group=group)})
    return {PLUGINS: ",".join(dict.fromkeys([*filter(None, named), "leadout"]))}


def endpoints_let_in(environment: Mapping[str, str]) -> list[str]:
    """Endpoint plugins of other packages that load only because they had to be named."""
    if PLUGINS in os.environ or PLUGINS not in environment:
        return []
    named = environment[PLUGINS].split(",")
    found = {point.name for point in entry_points(group=ENDPOINTS)}
    return sorted(found & set(named) - {"leadout"})


def _require_one_of_each(asked: Any) -> None:
    if asked.worker_extension_cls:
        raise UnfitPairError(
            f"--registry: found --worker-extension-cls {asked.worker_extension_cls} as well, "
            "wanted one extension; leave out one of the two"
        )
    for name in ("pipeline_parallel_size", "api_server_count"):
        found = getattr(asked, name, None)
        if found is not None and found > 1:
            raise UnfitPairError(
                f"--registry: found {name} {found}, wanted 1; change --{name.replace('_', '-')}, "
                "or leave out --registry"
            )


def _require_known_capture(section: Mapping[str, Any]) -> None:
    """What the server would only find out after its start."""
    try:
        load_redactor(CaptureSettings.model_validate(section).redactor)
    except (SectionError, ValueError) as problem:
        raise UnfitPairError(f"--capture: {problem}") from None
