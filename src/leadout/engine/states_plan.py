"""The flags of a server that hands out a target's hidden states (`leadout serve --states`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leadout.engine.process_folders import SHARED_MEMORY
from leadout.engine.settings import ServeSettings, StatesSettings
from leadout.engine.states_folder import hold, make_folder
from leadout.engine.vllm_flags import parse, speculation_of, vllm_config_of
from leadout.engine.vllm_internals import STATE_EXTRACTION, changes
from leadout.models import fingerprint
from leadout.pairing import read_target
from leadout.pairing.target import spread_layer_ids
from leadout.settings import SettingsError

CONNECTOR = {
    "kv_connector": "StatesConnector",
    "kv_connector_module_path": "leadout.engine.states_connector",
    "kv_role": "kv_producer",
}


def states_flags(
    settings: ServeSettings, target: Path, notes: list[str]
) -> tuple[list[str], StatesSettings]:
    """The flags without those of `settings`' section, and the section.

    Makes the folder that the server writes into. `target` is the folder of the target's files.
    """
    flags = [*settings.vllm_flags]
    _require_alone(settings, parse(settings.target, flags))
    changed = changes(STATE_EXTRACTION)
    if changed:
        raise SettingsError(
            "--states does not work with this version of vLLM, whose internals have changed: "
            f"{'; '.join(changed)}. Install a supported one."
        )
    layers = extracted_layers(target, settings.layers)
    max_bytes = int(settings.states_backlog * 2**30)
    _require_room(settings.states_folder or SHARED_MEMORY, max_bytes)
    extraction = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        # vLLM counts the embedding as the first state: layer i has the id i + 1.
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}
        },
    }
    flags += ["--speculative-config", json.dumps(extraction)]
    flags += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    vllm_config_of(settings.target, flags)  # vLLM's own refusals, before a folder is made
    folder = make_folder(settings.states_folder)
    hold(folder)
    precision = " in FP8" if settings.states_fp8 else ""
    notes.append(
        f"--states: hidden states of the layers {', '.join(map(str, layers))}{precision} are "
        f"written to {folder}; at most {settings.states_backlog:g} GiB wait there to be read"
    )
    return flags, StatesSettings(
        folder=folder.resolve(),
        layer_ids=tuple(layers),
        target_fingerprint=fingerprint(target),
        fp8=settings.states_fp8,
        max_bytes=max_bytes,
    )


def refuse_without_states(settings: ServeSettings) -> None:
    """Refuse flags that a server without --states would ignore."""
    for name in ("layers", "states_folder", "states_fp8", "states_backlog"):
        if getattr(settings, name) != ServeSettings.model_fields[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{flag} requires --states. Add it, or remove the flag.")


def extracted_layers(target: Path, asked: Sequence[int] | None) -> list[int]:
    """The layers to extract, ascending; always with the last one, from which the scores come."""
    count = read_target(target).num_layers
    layers = spread_layer_ids(count) if asked is None else asked
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise SettingsError(
            f"--layers {wrong[0]}: expected a layer from 0 to {count - 1} of the target {target}."
        )
    return sorted({*layers, count - 1})


def _require_alone(settings: ServeSettings, parsed: Any) -> None:
    """Refuse what a server that only extracts cannot do as well."""
    ours = ("draft", "registry", "tuned", "capture", "live", "learn_states")
    given = [name for name in ours if getattr(settings, name)]
    given += ["speculative_config"] if speculation_of(parsed) else []
    given += ["kv_transfer_config"] if parsed.kv_transfer_config else []
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise SettingsError(
            f"--states cannot be combined with {flag}: vLLM runs one method of speculation at a "
            "time, and extraction is one. Serve text and states with two servers."
        )


def _require_room(place: Path, max_bytes: int) -> None:
    """Refuse a limit that the folder's disk or shared memory does not have."""
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < max_bytes:
        raise SettingsError(
            f"--states-backlog needs {max_bytes:,} bytes, but {place} has {free:,} free. Lower it, "
            "or choose a folder on another disk with --states-folder."
        )
