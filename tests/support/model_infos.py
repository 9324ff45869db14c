"""What vLLM has noted about its model classes, for servers with a home of their own.

Without it a server starts two processes that import vLLM, only to look at the classes of target and
drafter. It has to do with classes alone: nothing of a request can be in it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def copy_model_infos(cache: Path) -> None:
    """Copy what there is into a folder that a process has as its XDG_CACHE_HOME."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm"
    to = cache / "vllm" / "modelinfos"
    to.mkdir(parents=True)
    # There are none before the first engine on a machine; those of others may be half written.
    for path in Path(os.environ.get("VLLM_CACHE_ROOT", usual)).glob("modelinfos/*.json"):
        shutil.copy(path, to)
