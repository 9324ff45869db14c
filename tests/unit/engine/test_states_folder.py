"""The files of hidden states and the limit on those that wait; no engine runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from leadout.engine.states_folder import (
    SERVER_ID,
    Backlog,
    StatesError,
    error_of,
    hold,
    make_folder,
    new_name,
    parse_states,
    path_of,
    usage,
    write_states,
)
from leadout.fp8 import to_fp8


def tensors(tokens: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "states": torch.randn(tokens, 3, 8, generator=generator),
        "tokens": torch.arange(tokens),
        "layers": torch.tensor([0, 2, 3]),
    }


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    path = path_of(tmp_path, new_name())
    write_states(path, tensors(), 1 << 20)
    found = parse_states(path.read_bytes())
    assert torch.equal(found.states, tensors()["states"])
    assert found.tokens.tolist() == [0, 1, 2, 3, 4]
    assert found.layer_ids == [0, 2, 3]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_fp8_keeps_each_token_and_layer_within_its_precision(tmp_path: Path) -> None:
    states = tensors()["states"] * torch.tensor([1e-3, 1.0, 1e4])[:, None]
    values, scales = to_fp8(states)
    path = path_of(tmp_path, new_name())
    write_states(path, tensors() | {"states": values, "scales": scales}, 1 << 20)
    found = parse_states(path.read_bytes()).states
    # E4M3 has 3 bits after the leading one; below 2^-6 of the range they become fewer.
    allowed = states.abs() * 2**-4 + states.abs().amax(-1, keepdim=True) * 2**-17
    assert bool(((found - states).abs() <= allowed).all())
    assert not torch.equal(found, states)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_fp8_does_not_hide_values_that_are_not_finite(value: float) -> None:
    states = tensors()["states"]
    states[2, 1, 3] = value
    values, scales = to_fp8(states)
    assert not bool(torch.isfinite(values.float() * scales[..., None]).all())


@pytest.mark.parametrize("name", ["../secret", "", "A" * 32, "a" * 31, "a" * 32 + "/", "%2e%2e"])
def test_only_names_are_accepted(tmp_path: Path, name: str) -> None:
    with pytest.raises(StatesError, match="not the name of states"):
        path_of(tmp_path, name)


def test_states_over_the_limit_leave_the_reason(tmp_path: Path) -> None:
    path = path_of(tmp_path, new_name())
    write_states(path, tensors(), 100)
    assert not path.exists()
    assert "more than the 100 of --states-backlog" in (error_of(path) or "")


def test_a_write_that_fails_leaves_the_reason_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_full_disk(_tensors: object, path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("leadout.engine.states_folder.save_file", fake_full_disk)
    path = path_of(tmp_path, new_name())
    write_states(path, tensors(), 1 << 20)
    assert [each.suffix for each in tmp_path.iterdir()] == [".error"]
    assert "No space left on device" in (error_of(path) or "")


def test_damaged_files_are_refused() -> None:
    with pytest.raises(StatesError, match="damaged"):
        parse_states(b"no safetensors")


def test_requests_wait_while_the_folder_is_full(tmp_path: Path) -> None:
    pauses: list[float] = []
    backlog = Backlog(tmp_path, 1000, 600, pauses.append)
    assert backlog.admit("one", 600)
    assert backlog.admit("one", 600)  # asked again: counted once
    assert not backlog.admit("two", 600)
    assert pauses  # the engine's loop does not spin
    time.sleep(0.03)
    (tmp_path / f"{new_name()}.safetensors").write_bytes(bytes(600))
    backlog.release("one")  # it is the file now
    assert not backlog.admit("two", 600)
    for path in tmp_path.iterdir():
        path.unlink()
    time.sleep(0.03)
    assert backlog.admit("two", 600)


def test_unread_files_are_removed_when_there_is_no_room(tmp_path: Path) -> None:
    old, new = (tmp_path / f"{new_name()}.safetensors" for _ in range(2))
    for path in (old, new):
        path.write_bytes(bytes(400))
    (tmp_path / SERVER_ID).write_text("me")
    for path in (old, tmp_path / SERVER_ID):
        os.utime(path, (1, 1))
    backlog = Backlog(tmp_path, 1000, 600, lambda _: None)
    assert backlog.admit("small", 100)
    assert old.exists()
    assert backlog.admit("large", 400)
    assert not old.exists()
    assert new.exists()
    assert (tmp_path / SERVER_ID).exists()


def test_a_request_that_never_fits_runs_and_is_told_so(tmp_path: Path) -> None:
    assert Backlog(tmp_path, 1000, 600, lambda _: None).admit("huge", 10_000)


def test_folders_of_ended_servers_are_removed(tmp_path: Path) -> None:
    ended = tmp_path / "leadout-states-999999999-abc"
    ended.mkdir()
    (ended / "file").write_text("left over")
    running = make_folder(tmp_path)
    assert not ended.exists()
    assert running.stat().st_mode & 0o777 == 0o700
    another = make_folder(tmp_path)
    assert running.exists()
    assert another != running
    assert usage(running) == (0, 0)


def test_a_folder_that_a_server_in_another_container_holds_is_kept(tmp_path: Path) -> None:
    held = tmp_path / "leadout-states-999999999-abc"  # no process of this machine has this id
    held.mkdir()
    (held / SERVER_ID).write_text("its-name")
    descriptor = hold(held)
    assert os.get_inheritable(descriptor)  # `leadout serve` becomes the server
    again = hold(held)  # by the server's routes
    os.close(again)
    make_folder(tmp_path)
    assert held.exists()
    os.close(descriptor)
    make_folder(tmp_path)
    assert not held.exists()


def test_a_folder_that_is_gone_cannot_be_held(tmp_path: Path) -> None:
    with pytest.raises(StatesError, match=r"cannot be used .*Start the server again"):
        hold(tmp_path / "gone")
