"""What vLLM and Leadout resolve on four faked GPUs, for every way to start a server.

    python experiments/gpu_resolution.py --out results/gpu/resolution.json

Nothing runs on a GPU: vLLM's own config resolution sees a platform with the capability and memory
of one. `rows` has one entry for each GPU and way to start; a row of `leadout serve` names the row
of plain vLLM that it was compared with, and each field that `differs` with the reason.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.progress import track

from common import write_result
from support.fake_gpu import GPUS
from support.gpu_resolution import DRAFT_TOKENS, rows_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [{"gpu": gpu, **row} for gpu in track(GPUS, description="GPUs") for row in rows_on(gpu)]
    gpus = {name: asdict(gpu) for name, gpu in GPUS.items()}
    write_result(arguments.out, {"gpus": gpus, "draft_tokens": DRAFT_TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
