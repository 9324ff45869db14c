"""What a command's own server of hidden states leaves behind; no engine runs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from leadout.engine import states_server as module
from leadout.engine.child_process import EngineError
from leadout.engine.states_server import states_server


class FakeServer:
    """Takes the command of a server; fails to start on demand."""

    fails = False
    url = "http://127.0.0.1:1"
    command: Sequence[str] = ()

    def __init__(self, command: Sequence[str], *, log: Path, **_: Any) -> None:
        FakeServer.command = command
        self._log = log

    def __enter__(self) -> Self:
        self._log.write_text("started")
        if self.fails:
            raise EngineError("on demand")
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(module, "Server", FakeServer)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def folder_of(command: Sequence[str]) -> Path:
    return Path(command[command.index("--states-folder") + 1])


@pytest.mark.parametrize("has_room", [True, False])
def test_the_folder_is_in_shared_memory_if_that_has_room(
    monkeypatch: pytest.MonkeyPatch,
    temporary: Path,
    tmp_path_factory: pytest.TempPathFactory,
    has_room: bool,
) -> None:
    shared = tmp_path_factory.mktemp("shared")
    for name in ("leadout.engine.states_server", "leadout.engine.process_folders"):
        monkeypatch.setattr(f"{name}.SHARED_MEMORY", shared)
    monkeypatch.setattr(module, "MIN_SHARED_BYTES", 0 if has_room else 1 << 62)
    with states_server("target", [1], longest=9, dtype="float32"):
        folder = folder_of(FakeServer.command)
        assert folder.parent == (shared if has_room else temporary)
        assert folder.exists()
    assert not list(shared.iterdir())
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("flags", "expected"), [((), "0.7"), (("--gpu-memory-utilization", "0.5"), "0.5")]
)
def test_a_trainer_on_the_same_gpu_keeps_its_share(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, flags: tuple[str, ...], expected: str
) -> None:
    """On a machine that says it has one."""
    monkeypatch.setattr(module.torch.accelerator, "is_available", lambda: True)
    given = {"longest": 9, "dtype": "bfloat16", "vllm_flags": flags}
    with states_server("target", [1], **given, gpu_memory=0.7):
        command = FakeServer.command
    assert command[command.index("--gpu-memory-utilization") + 1] == expected
    assert list(command).count("--gpu-memory-utilization") == 1
    with states_server("target", [1], longest=9, dtype="bfloat16"):
        assert "--gpu-memory-utilization" not in FakeServer.command


def test_the_log_of_a_server_that_does_not_start_is_kept(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setattr(FakeServer, "fails", True)
    monkeypatch.setattr(module, "MIN_SHARED_BYTES", 1 << 62)
    server = states_server("target", [1], longest=9, dtype="float32")
    with pytest.raises(EngineError), server:
        pass
    (log,) = temporary.iterdir()
    assert log.read_text() == "started"
