"""What a server that captures or follows a registry must have before it starts."""

from __future__ import annotations

from pathlib import Path

from leadout.captured import INFO
from leadout.checkpoints import CheckpointError
from leadout.checkpoints.errors import Words
from leadout.checkpoints.fingerprint import fingerprint
from leadout.checkpoints.registry import MANIFEST, Registry
from leadout.engine.capture_segments import require_same_target
from leadout.engine.capture_settings import CaptureSettings
from leadout.engine.folders import local_folder
from leadout.engine.pair import UnfitPairError
from leadout.engine.target_info import about_target
from leadout.shards import ShardError


def version_to_serve(folder: Path, target: str, other: str | None, notes: list[str]) -> str:
    """The folder of the version that the registry points to."""
    if other is not None:
        raise UnfitPairError(
            f"--registry: found the drafter {other} as well, wanted one of the two; leave out "
            "--draft, or publish it with `leadout learn --start`"
        )
    registry = Registry.opened(folder.resolve())
    pointer = registry.serving()
    assert pointer is not None
    manifest = registry.verified(pointer.version)
    found = fingerprint(local_folder(target))
    if manifest.target_fingerprint != found:
        raise CheckpointError(
            registry.path(pointer.version) / MANIFEST,
            "target_fingerprint",
            Words(manifest.target_fingerprint[:12]),
            f"{found[:12]}, that of {target}",
            "Serve the target that the registry is for, or begin a new registry.",
        )
    notes.append(f"--registry: version {pointer.version}, and others as the pointer names them")
    return str(registry.path(pointer.version))


def require_own_folder(capture: CaptureSettings, target: str) -> None:
    """Not one with the traffic of another target."""
    if capture.folder is not None and (capture.folder / INFO).exists():
        try:
            require_same_target(capture.folder, about_target(target))
        except ShardError as problem:
            raise UnfitPairError(str(problem)) from None
