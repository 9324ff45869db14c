"""Which target captured traffic is of."""

from __future__ import annotations

from leadout.captured import CaptureInfo
from leadout.checkpoints.fingerprint import fingerprint
from leadout.engine.folders import local_folder


def about_target(model: str) -> CaptureInfo:
    return CaptureInfo(
        target=model.rstrip("/").rpartition("/")[2],
        target_fingerprint=fingerprint(local_folder(model)),
    )
