"""The settings of `leadout tune`, and the error for pairs that cannot be tuned as requested."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from leadout.errors import LeadoutError
from leadout.settings import Settings, setting


class TuneError(LeadoutError):
    """A pair that cannot be tuned as requested."""


class TuneSettings(Settings):
    command = "tune"

    target: str = setting(..., "Target model: a folder or a hub name.", panel="argument")
    drafter: str = setting(..., "Drafter: a folder or a hub name.", panel="argument")

    prompts: tuple[str, ...] = setting(
        (),
        "File of prompts (.jsonl) like your traffic; repeatable. [default: three small sets]",
        panel="Measurement",
        metavar="PATH",
    )
    max_batch: int = setting(
        16, "Largest number of concurrent requests to measure.", panel="Measurement", ge=1
    )
    short: bool = setting(
        False,
        "Measure a few batch sizes and K only, with few tokens: costs in minutes, acceptance only "
        "roughly.",
        panel="Measurement",
    )
    turns: Literal["auto", "slices", "waves", "single"] = setting(
        "auto", "How the two servers take turns: a few steps each while the other is stopped, a "
        "round each, or with a single server up at a time. [auto: slices on CPUs and waves on GPUs "
        "if the free memory is estimated to hold both, else single]", panel="Measurement",
    )  # fmt: skip

    out: Path = setting(
        Path("tuned.json"),
        "File for `leadout serve --tuned`; a page with charts is written beside it.",
        panel="Output",
    )

    server_flags: tuple[str, ...] = setting((), "Flags for both vLLM servers.", panel="hidden")
