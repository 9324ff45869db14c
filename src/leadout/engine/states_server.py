"""A server of hidden states that a command starts for itself, and that ends with it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from leadout.engine.child_process import GUARD_REMOVES, exact_environment
from leadout.engine.load_test import flag_value
from leadout.engine.process_folders import SHARED_MEMORY
from leadout.engine.server import Server
from leadout.engine.server_turns import machine_environment, machine_flags
from leadout.engine.states_folder import hold, make_folder

STARTUP_SECONDS = 3600.0  # large targets are read from disk first
# Of the free bytes, at most; and never more than the default of `leadout serve`.
BACKLOG_SHARE, MAX_BACKLOG_GIB = 0.25, 4.0
MIN_SHARED_BYTES = 1 << 30  # containers often have less shared memory than one text needs


@contextmanager
def states_server(
    target: str | Path,
    layer_ids: Sequence[int],
    *,
    longest: int,
    dtype: str,
    vllm_flags: Sequence[str] = (),
    gpu_memory: float | None = None,
) -> Iterator[str]:
    """The URL of a server for texts of up to `longest` tokens, while the block lasts.

    `gpu_memory` is the share of a GPU's memory that it takes where this process needs the rest;
    the user's flags take precedence. It runs in processes of its own, through `leadout serve`: this
    one does not load vLLM. Its log is kept only if the server does not start or the block fails.
    """
    folder = make_folder(_place())
    holder = hold(folder)
    try:
        backlog = min(MAX_BACKLOG_GIB, BACKLOG_SHARE * shutil.disk_usage(folder).free / 2**30)
        command = [sys.executable, "-m", "leadout", "serve", str(target), "--states"]
        for layer in layer_ids:
            command += ["--layers", str(layer)]
        command += ["--states-folder", str(folder), "--states-backlog", f"{backlog:.4f}"]
        if not torch.accelerator.is_available():
            command += machine_flags(on_cpu=True, servers=1)
        defaults: dict[str, object] = {"--dtype": dtype, "--max-model-len": longest + 1}
        if gpu_memory is not None and torch.accelerator.is_available():
            defaults["--gpu-memory-utilization"] = gpu_memory
        command += _with_defaults(vllm_flags, defaults)
        descriptor, log = tempfile.mkstemp(prefix="leadout-states-", suffix=".log")
        os.close(descriptor)
        server = Server(
            command,
            log=Path(log),
            environment={
                **machine_environment(),
                **exact_environment(dtype),
                GUARD_REMOVES: str(folder),
            },
            startup_seconds=STARTUP_SECONDS,
        )
        with server:
            yield server.url
        Path(log).unlink()
    finally:
        os.close(holder)
        shutil.rmtree(folder, ignore_errors=True)


def _place() -> Path | None:
    """Where the folder goes: None, for shared memory, if that has room."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= MIN_SHARED_BYTES:
        return None
    return Path(tempfile.gettempdir())


def _with_defaults(flags: Sequence[str], defaults: dict[str, object]) -> list[str]:
    """The flags, and those of the defaults that they do not set."""
    added = [
        [name, str(value)] for name, value in defaults.items() if flag_value(flags, name) is None
    ]
    return [*flags, *(word for pair in added for word in pair)]
