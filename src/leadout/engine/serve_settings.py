"""Settings of `leadout serve`. Importing this needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from leadout.engine.settings import CaptureSettings
from leadout.settings import Settings, setting

_DRAFTER, _LENGTH, _CAPTURE = "Drafter", "Draft length", "Capture"


class ServeSettings(Settings):
    command: ClassVar[str] = "serve"

    target: str = setting(
        ...,
        "Folder or hub name of the target model, or of a speculators-format drafter that names "
        "its target.",
        panel="argument",
    )
    draft: str | None = setting(
        None,
        "Folder or hub name of the drafter; 'auto': a published one.",
        panel=_DRAFTER,
        metavar="DRAFTER",
    )
    registry: Path | None = setting(
        None,
        "Registry of `leadout learn`: serve its current drafter and swap in new versions.",
        panel=_DRAFTER,
    )
    if_unfit: Literal["refuse", "bare"] = setting(
        "refuse",
        "What to do with a drafter that does not fit: refuse to serve, or serve without it.",
        panel=_DRAFTER,
    )
    tuned: Path | None = setting(
        None,
        "File written by `leadout tune`: how many tokens to draft at which batch size.",
        panel=_LENGTH,
    )
    live: bool = setting(
        False,
        "Choose the draft length at every step, from measured costs and acceptance.",
        panel=_LENGTH,
    )
    capture: Path | None = setting(
        None,
        "Folder in which to keep the token ids of finished requests. Off by default.",
        panel=_CAPTURE,
    )
    capture_rate: float = setting(
        1.0, "Fraction of the requests to capture.", panel=_CAPTURE, ge=0.0001, le=1
    )
    vllm_flags: tuple[str, ...] = setting((), "Flags for vLLM's server.", panel="hidden")

    @property
    def capture_settings(self) -> CaptureSettings | None:
        if self.capture is None:
            return None
        return CaptureSettings(folder=self.capture.resolve(), rate=self.capture_rate)
