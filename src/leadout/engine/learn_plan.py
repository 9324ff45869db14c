"""The settings of a server that writes texts and states into a ring (`--learn-states`)."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any, Literal

from leadout.checkpoints import Checkpoint
from leadout.engine.settings import LearnSettings, ServeSettings
from leadout.engine.vllm_flags import parse
from leadout.engine.vllm_internals import LEARNING, changes
from leadout.models import fingerprint
from leadout.settings import SettingsError

NEEDS_DRAFTER = (
    "--learn-states requires a drafter, whose layers of the target are learnt from. Add --registry "
    "or --draft, or remove --learn-states."
)


def refuse_without_ring(settings: ServeSettings) -> None:
    """Refuse flags that a server without --learn-states would ignore."""
    if settings.learn_states is not None:
        return
    for name in ("learn_rate", "learn_states_fp8", "learn_ring_gib"):
        if getattr(settings, name) != ServeSettings.model_fields[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{flag} requires --learn-states. Add it, or remove the flag.")


def learn_settings(
    settings: ServeSettings,
    ring: Path,
    target_name: str,
    target: Path,
    checkpoint: Checkpoint,
    vllm_config: Any,
    notes: list[str],
) -> LearnSettings:
    """The section for the ring, whose folder is made here; `target` is the target's folder."""
    # Imports torch, which `leadout --help` does without.
    from leadout.engine.served_texts import ring_info
    from leadout.ring.folder import prepare
    from leadout.ring.memory import RingError

    changed = changes(LEARNING)
    if changed:
        raise SettingsError(
            "--learn-states does not work with this version of vLLM, whose internals have changed: "
            f"{'; '.join(changed)}. Install a supported one."
        )
    chosen = parse(target_name, settings.vllm_flags).worker_cls
    if chosen != "auto":
        raise SettingsError(
            f"--learn-states cannot be combined with --worker-cls {chosen}, because it sets "
            "--worker-cls itself. Remove one of the two."
        )
    if getattr(vllm_config.speculative_config, "enable_adaptive_verification", False):
        raise SettingsError(
            "--learn-states cannot be combined with enable_adaptive_verification, with which only "
            "the GPU knows the rows of a request. Remove one of the two."
        )
    windows = {layer.window for layer in checkpoint.config.layers}
    dtype: Literal["bfloat16", "float32", "float8"] = "bfloat16"
    if settings.learn_states_fp8:
        dtype = "float8"
    elif str(vllm_config.model_config.dtype) == "torch.float32":
        dtype = "float32"
    section = LearnSettings(
        folder=ring.absolute(),
        rate=settings.learn_rate,
        max_bytes=int(settings.learn_ring_gib * 2**30),
        server_id=secrets.token_hex(16),
        target=target_name,
        target_fingerprint=fingerprint(target),
        layer_ids=checkpoint.config.target_layer_ids,
        hidden_size=vllm_config.model_config.get_hidden_size(),
        dtype=dtype,
        window=None if None in windows else max(each for each in windows if each is not None),
    )
    try:
        prepare(section.folder, ring_info(section))
    except RingError as problem:
        raise SettingsError(f"--learn-states: {problem}") from None
    engines = vllm_config.parallel_config.data_parallel_size
    _require_room(section, engines)
    notes.append(
        f"--learn-states: texts and states of {section.rate:.0%} of the requests go through "
        f"{section.folder}, in memory only, {dtype}"
    )
    return section


def _require_room(section: LearnSettings, engines: int) -> None:
    needed = engines * (section.max_bytes + section.max_bytes // 16)
    free = shutil.disk_usage(section.folder).free
    if needed > free:
        raise SettingsError(
            f"--learn-ring-gib {section.max_bytes / 2**30:g} needs {needed / 2**30:.1f} GiB of "
            f"shared memory, but {free / 2**30:.1f} GiB are free. Lower it, or enlarge "
            "/dev/shm (in containers --shm-size)."
        )
