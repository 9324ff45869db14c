"""What a server keeps of its traffic: a folder of samples, each file named by when it was begun.

    capture/
      capture.json                                     which target served
      traffic-20260131T093000.000000-4711.jsonl        samples, oldest first

A sample's id begins with the time at which its request ended, so that ids sort by time. Token ids
of a target mean nothing to another one: a folder is of one target.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from leadout.shards import ShardError

INFO = "capture.json"
SOURCE = "traffic"  # of every captured sample
_SEGMENT = re.compile(r"traffic-[0-9]{8}T[0-9]{6}\.[0-9]{6}-[0-9]+\.jsonl")


class CaptureInfo(BaseModel):
    """Which target answered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str  # the last part of its name
    target_fingerprint: str


def segments(folder: Path) -> list[Path]:
    """The files of samples, oldest first; a writer may still be adding to the last ones."""
    return sorted(path for path in folder.iterdir() if _SEGMENT.fullmatch(path.name))


def segment_name(begun: datetime, process: int) -> str:
    """`begun` is in UTC."""
    return f"traffic-{begun:%Y%m%dT%H%M%S.%f}-{process}.jsonl"


def sample_id(ended: datetime, request: str) -> str:
    """`ended` is in UTC."""
    return f"{ended:%Y-%m-%dT%H:%M:%S.%f}/{request}"


def read_info(folder: Path) -> CaptureInfo:
    path = folder / INFO
    try:
        return CaptureInfo.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ShardError(
            f"{path}: found nothing, wanted the traffic of a server; name the folder given to "
            "`leadout serve --capture`"
        ) from None
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        raise ShardError(
            f"{path}: {field}: {first['msg']}; wanted the file as `leadout serve --capture` "
            "writes it; capture into a new folder"
        ) from None
