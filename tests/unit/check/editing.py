"""Ways to damage a pair, and to look at the findings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from leadout.findings import Finding


def names(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings]


def only(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


def set_mask(drafter: Path, token: int) -> None:
    edit_json(drafter / "config.json", lambda c: c["dflash_config"].update(mask_token_id=token))
