"""The share of decoding steps that run in full CUDA graphs, replayed on four faked GPUs.

    python experiments/gpu_dispatch.py --out results/gpu/dispatch.json

`cells` has one entry for each GPU, way to start a server and number of requests: `full` is the
share of the steps without prefill that vLLM's own dispatch gives a full graph.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import track

from common import write_result
from support.fake_gpu import GPUS
from support.gpu_dispatch import cells_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    cells = [
        {"gpu": gpu, **cell} for gpu in track(GPUS, description="GPUs") for cell in cells_on(gpu)
    ]
    write_result(arguments.out, {"cells": cells})


if __name__ == "__main__":
    main()
