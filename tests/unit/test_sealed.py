"""Encrypted lines of captured traffic."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from leadout.engine.capture_store import CaptureInfo, SegmentWriter, segment_paths
from leadout.sealed import VARIABLE, CaptureKeyError, Keys
from leadout.shards import Sample, usable_samples

OLD, NEW = (Fernet.generate_key().decode() for _ in range(2))
LINE = b'{"id": "a", "prompt": [11, 22, 33]}\n'
SAMPLE = Sample(id="a", source="traffic", prompt=[11, 22, 33], response=[4, 5, 6], temperature=0.0)


def test_a_line_is_opened_by_its_key() -> None:
    sealed = Keys([OLD]).seal(LINE)
    assert sealed.count(b"\n") == 1
    assert LINE.strip() not in sealed
    assert sealed != Keys([OLD]).seal(LINE)  # equal requests do not look equal
    assert Keys([OLD]).unseal(sealed) == LINE


def test_without_keys_lines_stay_as_they_are() -> None:
    assert Keys().seal(LINE) == LINE
    assert Keys().unseal(LINE) == LINE
    assert Keys([OLD]).unseal(LINE) == LINE  # from before there were keys
    assert not Keys().are_given


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    both = Keys([NEW, OLD])
    assert both.unseal(Keys([OLD]).seal(LINE)) == LINE
    assert Keys([NEW]).unseal(both.seal(LINE)) == LINE


@pytest.mark.parametrize("keys", [Keys(), Keys([NEW])])
def test_a_wrong_key_is_an_error_and_no_damaged_line(keys: Keys) -> None:
    with pytest.raises(CaptureKeyError, match="encrypted with the key") as wrong:
        keys.unseal(Keys([OLD]).seal(LINE))
    assert OLD not in str(wrong.value)


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    keys = Keys([OLD])
    whole = keys.seal(SAMPLE.model_dump_json().encode() + b"\n")
    middle = len(whole) // 2
    damaged = [
        whole[:middle]
        + (b"A" if whole[middle : middle + 1] != b"A" else b"B")
        + whole[middle + 1 :],
        b'{"key": "\n',
        b'{"key": "x"}\n',
        b'{"key": "x", "sealed": ' + b"[" * 100_000 + b"\n",
        whole.replace(b'"sealed": "', '"sealed": "é'.encode()),
    ]
    path = tmp_path / "segment"
    path.write_bytes(b"".join([whole, *damaged, whole, whole[:-9]]))
    found = list(usable_samples(path, 100, keys.unseal))
    assert [each is not None for each in found] == [True, *[False] * len(damaged), True]


def test_keys_of_a_file_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{NEW}\n{OLD}\n")
    assert Keys.read(path).unseal(Keys([OLD]).seal(LINE)) == LINE
    monkeypatch.setenv(VARIABLE, OLD)
    assert Keys.read(None).unseal(Keys([OLD]).seal(LINE)) == LINE
    monkeypatch.delenv(VARIABLE)
    assert not Keys.read(None).are_given
    path.write_text("\n")
    with pytest.raises(CaptureKeyError, match="has no key"):
        Keys.read(path)
    path.write_text("password")
    with pytest.raises(CaptureKeyError, match="key 1 is no Fernet key") as refused:
        Keys.read(path)
    assert "password" not in str(refused.value)


WRITER = """
import sys
from pathlib import Path
from leadout.engine.capture_store import CaptureInfo, SegmentWriter
from leadout.sealed import Keys
from leadout.shards import Sample
info = CaptureInfo(target="t", target_fingerprint="f")
seal = Keys([sys.argv[2]]).seal
writer = SegmentWriter(
    Path(sys.argv[1]), lambda: info, max_bytes=1 << 30, max_seconds=1e6, seal=seal
)
for number in range(10**9):
    writer.add(
        Sample(id=f"{number:09d}", source="s", prompt=[1] * 99, response=[2] * 99, temperature=0.0)
    )
    print(number, flush=True)
"""


def test_a_killed_writer_loses_at_most_the_line_it_was_writing(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), OLD], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(50)]
    os.kill(process.pid, signal.SIGKILL)
    said += process.stdout.readlines()
    process.wait()
    written = len([line for line in said if line.endswith("\n")])
    keys = Keys([OLD])
    found = [
        each for path in segment_paths(folder) for each in usable_samples(path, 9, keys.unseal)
    ]
    assert None not in found
    assert written <= len(found) <= written + 1


def test_a_segment_of_a_server_with_a_key_has_no_token_ids(tmp_path: Path) -> None:
    info = CaptureInfo(target="t", target_fingerprint="f")
    writer = SegmentWriter(
        tmp_path, lambda: info, max_bytes=1 << 20, max_seconds=1e6, seal=Keys([OLD]).seal
    )
    writer.add(SAMPLE)
    writer.close()
    (path,) = segment_paths(tmp_path)
    assert b"11,22" not in path.read_bytes()
    ((_, sample),) = (each for each in usable_samples(path, 100, Keys([OLD]).unseal) if each)
    assert sample == SAMPLE
