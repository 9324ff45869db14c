"""How ranks join, what they agree on, and how they part. The process group is a stand-in."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import distributed

from leadout.evaluate.ranks import ALONE, NotSharedError, Ranks, joined_ranks, require_equal
from leadout.evaluate.states_client import ClientSettings


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Of the process group's start and end."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(
            distributed, name, lambda *_, name=name, **given: found.append((name, given))
        )
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    return found


def test_a_rank_waits_longer_than_a_client_of_states(
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    """The client's error says how to continue, that of the process group does not."""
    with joined_ranks():
        pass
    (started, given), (ended, _) = calls
    assert (started, ended) == ("init_process_group", "destroy_process_group")
    assert given["timeout"].total_seconds() > 1.5 * ClientSettings().give_up_seconds


def test_an_error_does_not_wait_for_the_other_ranks(
    calls: list[tuple[str, dict[str, Any]]],
) -> None:
    with pytest.raises(ValueError, match="its own"), joined_ranks():
        raise ValueError("its own")
    assert [name for name, _ in calls] == ["init_process_group"]


def test_ranks_that_have_read_different_files_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = [hashlib.sha256(text).hexdigest() for text in (b"one", b"one", b"another")]

    def summed(self: Ranks, values: torch.Tensor) -> torch.Tensor:
        return torch.tensor([int(each[:15], 16) for each in prints])

    monkeypatch.setattr(Ranks, "sum", summed)
    ranks = Ranks(0, 3, torch.device("cpu"))
    with pytest.raises(NotSharedError, match="--data d differs between ranks: rank 2 and rank 0"):
        require_equal(ranks, "--data d", prints[0])
    prints[2] = prints[0]
    require_equal(ranks, "--data d", prints[0])
    monkeypatch.undo()
    require_equal(ALONE, "--data d", prints[0])
