"""The settings of `leadout tune`, and the error for pairs that cannot be tuned as requested."""

from __future__ import annotations

from pathlib import Path

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
    dtype: str = setting(
        "auto", "Precision of target and drafter.", panel="Measurement", metavar="DTYPE"
    )

    out: Path = setting(
        Path("tuned.json"),
        "File for `leadout serve --tuned`; a page with charts is written beside it.",
        panel="Output",
    )
