"""States on disk equal the computed ones, also after a kill, and are read rather than mapped.

Several drafters share one pass of the target over each text.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from leadout.dflash.target import Observation, Target
from leadout.evaluate import hidden_states
from leadout.evaluate.blocks import TrainingSequence
from leadout.evaluate.hidden_states import ComputedStates, Indexed, SharedStates, StatesOnDisk
from leadout.files import FileError
from leadout.train.run import STATES
from support.models import tiny_llama
from support.small_runs import KilledError, MakeRun


def items() -> list[Indexed]:
    generator = torch.Generator().manual_seed(0)
    return [
        (n, TrainingSequence(str(n), "s", torch.randint(250, (length,), generator=generator), 3))
        for n, length in enumerate((12, 7, 9, 20))
    ]


class Counting:
    """A source that counts the requested sequences."""

    def __init__(self, target: Target) -> None:
        self._computed = ComputedStates(lambda: target)
        self.requested = 0

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        self.requested += len(sequences)
        return self._computed.observe(sequences)


def on_disk(path: Path, source: Counting, dtype: torch.dtype = torch.float32) -> StatesOnDisk:
    lengths = [len(sequence) for _, sequence in items()]
    return StatesOnDisk(path, source, lengths, taps=3, hidden_size=64, dtype=dtype)


def assert_same(found: Observation, expected: Observation, sequences: Sequence[Indexed]) -> None:
    for row, (_, sequence) in enumerate(sequences):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[row, : len(sequence)], b[row, : len(sequence)])


def test_padding_changes_nothing(target: Target) -> None:
    source = Counting(target)
    together = source.observe(items())
    for row, item in enumerate(items()):
        alone = source.observe([item])
        length = len(item[1])
        torch.testing.assert_close(together.states[row, :length], alone.states[0])
        torch.testing.assert_close(together.final[row, :length], alone.final[0])


def test_states_on_disk_equal_computed_states(target: Target, tmp_path: Path) -> None:
    source = Counting(target)
    states = on_disk(tmp_path / "states.bin", source)
    some = items()[1:3]
    assert_same(states.observe(some), source.observe(some), some)
    source.requested = 0
    everything = items()[::-1]
    assert_same(states.observe(everything), Counting(target).observe(everything), everything)
    assert source.requested == 2  # the other two are there
    again = on_disk(tmp_path / "states.bin", source)
    assert_same(again.observe(everything), Counting(target).observe(everything), everything)
    assert source.requested == 2


def test_states_on_disk_have_the_precision_of_the_run(target: Target, tmp_path: Path) -> None:
    source = Counting(target)
    states = on_disk(tmp_path / "states.bin", source, torch.bfloat16)
    found = states.observe(items())
    assert found.states.dtype == found.final.dtype == torch.bfloat16
    assert torch.equal(found.states[3], source.observe(items()).states[3].bfloat16())
    size = sum(len(sequence) for _, sequence in items()) * 4 * 64 * 2
    assert (tmp_path / "states.bin").stat().st_size == size


def test_partially_written_states_are_computed_again(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "states.bin"
    source = Counting(target)
    on_disk(path, source).observe(items()[:1])
    states = on_disk(path, source)
    write = os.pwrite
    written: list[int] = []

    def dies_at_third_write(handle: int, view: memoryview, offset: int) -> int:
        if len(written) == 2:
            raise KilledError
        written.append(write(handle, view[: len(view) // 3], offset))
        return written[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", dies_at_third_write)  # type: ignore[attr-defined]
        with pytest.raises(KilledError):
            states.observe(items()[1:])
    assert min(written) > 0
    source.requested = 0
    assert_same(on_disk(path, source).observe(items()), Counting(target).observe(items()), items())
    assert source.requested == 3


def test_a_truncated_file_is_reported(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "states.bin"
    states = on_disk(path, Counting(target))
    states.observe(items())
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(FileError, match="ends before sample"):
        states.observe(items())


def test_states_are_read_not_memory_mapped(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "states.bin"
    states = on_disk(path, Counting(target))
    observed = states.observe(items())
    assert str(path) not in Path("/proc/self/maps").read_text()
    # What was read is the reader's own memory: the file may change under it.
    before = observed.states.clone()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(observed.states, before)


def test_runs_with_computed_and_stored_states_are_equal(make_run: MakeRun) -> None:
    computed, disk = make_run("computed"), make_run("disk", states="disk")
    for run in (computed, disk):
        run.train(lambda _: None)
    assert (disk.folder / STATES).exists()
    assert not (computed.folder / STATES).exists()
    for name, weight in computed.weights.named().items():
        torch.testing.assert_close(disk.weights.named()[name], weight, atol=1e-5, rtol=1e-4)


def text(number: int) -> Indexed:
    return number, TrainingSequence(str(number), "set", torch.arange(5, 20) + number, 4)


@pytest.mark.parametrize("keep_all", [True, False])
def test_taps_are_those_of_a_pass_for_each_drafter(keep_all: bool) -> None:
    model = tiny_llama()
    shared = SharedStates(model, [0, 1, 2, 3], keep_all=keep_all)
    for number in (0, 1, 0):
        item = text(number)
        tokens = item[1].tokens[None]
        for taps in ((0, 2), (3, 1), (1, 2, 3)):
            own = Target(model, taps).observe(tokens)
            found = shared.tapped_at(taps).observe([item])
            torch.testing.assert_close(found.states, own.states)
            torch.testing.assert_close(found.final, own.final)
    normed = shared.tapped_at((0, 3), normed_last_tap=True).observe([text(0)])
    width = normed.final.shape[-1]
    assert torch.equal(normed.states[..., -width:], normed.final)


@pytest.mark.parametrize(("keep_all", "passes"), [(True, 2), (False, 3)])
def test_the_target_reads_a_text_once_while_its_states_are_kept(
    keep_all: bool, passes: int
) -> None:
    model = tiny_llama()
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    shared = SharedStates(model, [1, 2], keep_all=keep_all)
    for number in (0, 0, 1, 1, 0):
        shared.tapped_at((1,)).observe([text(number)])
    assert len(calls) == passes


def test_states_that_do_not_fit_on_the_disk_are_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1000))
    source = ComputedStates(lambda: Target(tiny_llama(), (0, 1)))
    made = StatesOnDisk(
        tmp_path / STATES, source, [2, 3], taps=2, hidden_size=64, dtype=torch.float32
    )
    with pytest.raises(FileError, match=r"need 3,840 more bytes in .* but 1,000 are free"):
        made.require_room()
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=4000))
    made.require_room()


def test_states_are_on_the_disk_before_they_are_marked(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_fdatasync(_file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    source = Counting(target)
    states = on_disk(tmp_path / STATES, source)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fake_fdatasync)
        with pytest.raises(OSError, match="Input/output"):
            states.observe(items()[:2])
    assert not states.has_all([0])
    states.observe(items()[:2])
    assert states.has_all([0, 1])
    assert source.requested == 4  # computed again


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closed_states_hold_no_files(target: Target, tmp_path: Path) -> None:
    before = open_files()
    made = on_disk(tmp_path / STATES, Counting(target))
    assert open_files() == before + 2
    made.close()
    assert open_files() == before


@pytest.mark.parametrize(("has_it", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_is_computed_in_float32_where_it_would_be_emulated(
    monkeypatch: pytest.MonkeyPatch, has_it: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(hidden_states, "_has_bfloat16", lambda: has_it)
    assert hidden_states.compute_dtype(torch.bfloat16, torch.device("cpu")) == expected
    assert hidden_states.compute_dtype(torch.float32, torch.device("cpu")) == torch.float32
    assert hidden_states.compute_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
