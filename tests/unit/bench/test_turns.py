"""Whether servers can be up together."""

from pathlib import Path

import pytest
from sample_rounds import BARE, BARE_AGAIN, FIXED

from leadout.bench import turns
from leadout.bench.setup import KV_SPACE, Arm
from leadout.bench.turns import choose_turns

ARMS = (BARE, BARE_AGAIN, FIXED)
GIB = 2**30


@pytest.mark.parametrize(
    ("available", "cache", "expected"),
    [(20 * GIB, "1", "slices"), (20 * GIB, "7", "single"), (6 * GIB, "1", "single")],
)
def test_servers_take_turns_together_if_memory_holds_them(
    available: int,
    cache: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    monkeypatch.setenv(KV_SPACE, cache)
    # Stands for a machine with so much memory.
    monkeypatch.setattr(turns, "_available_bytes", lambda: available)
    assert choose_turns(ARMS, [tmp_path], on_cpu=True) == expected


def test_weights_of_unknown_size_are_served_one_at_a_time(tmp_path: Path) -> None:
    # A hub name of which only the configuration has been downloaded.
    (tmp_path / "config.json").write_text("{}")
    for on_cpu in (True, False):
        assert choose_turns(ARMS, [tmp_path], on_cpu) == "single"


def test_live_control_is_measured_in_waves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = Arm(name="live", kind="live", drafter="some/drafter")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    monkeypatch.setattr(turns, "_available_bytes", lambda: 30 * GIB)
    monkeypatch.setenv(KV_SPACE, "1")
    assert choose_turns((BARE, BARE_AGAIN, live), [tmp_path], on_cpu=True) == "waves"


def test_the_available_memory_is_read_from_the_kernel() -> None:
    assert turns._available_bytes() > GIB / 4
