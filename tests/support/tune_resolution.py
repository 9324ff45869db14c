"""What the two servers of `leadout tune` resolve to on a faked GPU.

    python -m support.tune_resolution H100 MAX_BATCH [vLLM FLAGS]

prints one row for each server, and one for `leadout serve --live` with the same flags, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.gpu_resolution import Mode, Pair, facts_of, planned_config, write_pair

LIVE = "live"


def rows(pair: Pair, max_batch: int, flags: Sequence[str]) -> dict[str, Any]:
    from leadout.engine.calibration import BARE, DRAFTING
    from leadout.engine.vllm_flags import vllm_config_of
    from leadout.tune.run import launch_of
    from leadout.tune.settings import TuneSettings

    target, drafter = str(pair.target), str(pair.drafter)
    settings = TuneSettings(target=target, drafter=drafter, max_batch=max_batch)
    found = {}
    for name in (BARE, DRAFTING):
        command = launch_of(name, settings, flags, pair.target.parent / name).command
        config = vllm_config_of(target, command[command.index(target) + 1 :])
        found[name] = _row(config)
    found[LIVE] = _row(planned_config(pair, Mode(("--draft", "--live"), tuple(flags))))
    return found


def _row(config: Any) -> dict[str, Any]:
    return {
        **facts_of(config),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "scheduler_cls": config.scheduler_config.scheduler_cls,
        "sections": sorted((config.additional_config or {}).get("leadout", {})),
    }


def main() -> None:
    from support.fake_gpu import install

    gpu, batch, *given = sys.argv[1:]
    install(gpu)
    from leadout.engine.plugin import SWITCH, register

    del os.environ[SWITCH]
    register()
    with tempfile.TemporaryDirectory() as folder:
        found = rows(write_pair(Path(folder)), int(batch), given)
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
