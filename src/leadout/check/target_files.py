"""Whether the target's weight files are whole, from their headers alone."""

from __future__ import annotations

import json
from pathlib import Path

from leadout.check.findings import Finding, Gravity
from leadout.pairing import TargetFacts

INDEX = "model.safetensors.index.json"
EMBEDDING = "embed_tokens.weight"  # after whatever prefix the architecture has
_DOWNLOAD_AGAIN = "Download the target again."


def weight_file_findings(folder: Path, facts: TargetFacts) -> list[Finding]:
    missing = missing_shards(folder)
    if missing:
        return [
            Finding(
                name="target-incomplete",
                gravity=Gravity.UNFIT,
                message=(
                    f"{folder}: found {len(missing)} of the files in {INDEX} missing, the first "
                    f"is {missing[0]!r}; wanted all of them"
                ),
                evidence={"missing": len(missing)},
                remedy=_DOWNLOAD_AGAIN,
            )
        ]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return [
            Finding(
                name="target-weights-absent",
                gravity=Gravity.NOTE,
                message=f"{folder}: found no safetensors, so no weights were looked at",
                remedy="Give the target's whole folder if it has one.",
            )
        ]
    return _header_findings(files, facts)


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) and not missing_shards(folder)


def missing_shards(folder: Path) -> list[str]:
    """Files that the index names and the folder lacks, if it has any weights at all."""
    if not any(folder.glob("*.safetensors")):
        return []
    try:
        shard_of = json.loads((folder / INDEX).read_bytes())["weight_map"]
        names = sorted({str(name) for name in shard_of.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # no index, or one that nobody could read: the headers tell the rest
    return [name for name in names if not (folder / name).is_file()]


def _header_findings(files: list[Path], facts: TargetFacts) -> list[Finding]:
    """A header that its file does not fill, and an embedding of other rows than the config says."""
    from safetensors import SafetensorError, safe_open

    rows = None
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name.endswith(EMBEDDING):
                        rows = opened.get_slice(name).get_shape()[0]
        except (SafetensorError, OSError) as problem:
            return [
                Finding(
                    name="target-unreadable",
                    gravity=Gravity.UNFIT,
                    message=f"{path}: found {problem}, wanted a whole safetensors file",
                    remedy=_DOWNLOAD_AGAIN,
                )
            ]
    if rows in (None, facts.vocab_size):
        return []
    return [
        Finding(
            name="target-embedding",
            gravity=Gravity.DOUBTFUL,
            message=(
                f"found {rows} rows in the target's {EMBEDDING}, wanted {facts.vocab_size}, the "
                "vocab_size in its config.json"
            ),
            evidence={"rows": rows, "vocab_size": facts.vocab_size},
            remedy="Config and weights are not of the same model; download the target again.",
        )
    ]
