"""Every reader of files and replies: whatever is in them, only typed errors, in bounded memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from leadout.errors import LeadoutError
from support import fuzzing
from support.fuzzing import Reader, run_bounded
from support.readers import READERS

CASES, NIGHTLY_CASES = 200, 5000
MAX_SECONDS = 6 * fuzzing.MAX_SECONDS  # for slow machines
INTERVAL = {"value": 2.0, "low": 2.0, "high": 2.0}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_only_typed_errors(reader: Reader, tmp_path: Path, nightly: bool) -> None:
    cases = NIGHTLY_CASES if nightly else CASES
    outcomes = run_bounded(reader, tmp_path / "case", 0, cases, MAX_SECONDS)
    assert outcomes.cases == cases
    assert outcomes.lost == 0, outcomes.losses
    # A mutation that never or always ends one way would prove nothing.
    assert outcomes.counts["read"] > 0
    assert reader.is_tolerant or outcomes.counts["refused"] > cases // 20


def edited(*keys: Any, value: Any) -> Callable[[bytes], bytes]:
    """Replaces one value of a JSON file, or of its first line."""

    def edit(valid: bytes) -> bytes:
        first, newline, rest = valid.partition(b"\n") if b"}\n{" in valid else (valid, b"", b"")
        content = json.loads(first)
        place = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return json.dumps(content).encode() + (newline or b"\n") + rest

    return edit


def instead(content: bytes) -> Callable[[bytes], bytes]:
    return lambda valid: content


BOMB = b"a: &a [x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (name, name, b",".join([b"*%c" % before] * 9))
    for before, name in pairwise(b"abcdefgh")
)
STEP = b'{"kind":"step","step":1,"seconds":1,"loss":null,"learning_rate":1}\n'


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tuned file", edited("verify", value={})),
        ("tuned file", edited("draft", "1", value={})),
        ("tuned file", edited("acceptance", "tokens", value={})),
        ("tuned file", edited("acceptance", "tokens", "0", "value", value=1.5)),
        ("tuned file", edited("acceptance", "tokens", str(2**40), value=INTERVAL)),
        ("tuned file", edited("verify", "1", "0", "value", value=0.0)),
        ("registry: manifest", edited("version", value=4)),
        ("registry: manifest", edited("promises", "traffic", "low", value=2**63 - 1)),
        ("registry: manifest", edited("promises", "traffic", "low", value=float("nan"))),
        ("registry: pointer", edited("version", value=10**400)),
        ("registry: ledger", edited("evidence", value={"gain": float("nan")})),
        ("data: samples", edited("response", value=[0, 1, -1, 3])),
        ("data: samples", edited("response", value=[5000] * 4)),
        ("data: samples", edited("response", value=[2**31] * 4)),
        ("data: prompts", instead(b'{"conversations": [{"from": ["human"], "value": "hi"}]}')),
        ("data: prompts", instead(b'{"id": "\\ud800", "prompt": "hello"}')),
        ("data: prompts", instead(b'{"prompt": "a", "tools": ' + b"[" * 900 + b"]" * 900 + b"}")),
        ("training.yaml", instead(BOMB)),
        ("training.yaml", instead(b"layers: 5 # \xff")),
        ("training.yaml", instead(b'"\\uD800mask": -0.5')),
        ("training.yaml", instead(b"layers: !!timestamp x")),
        ("training: log", instead(b"\0\0\0\n")),
        ("training: log", instead(b"\xff\n")),
        ("training: log", instead(STEP)),
        ("training: state", instead(b"")),
        ("training: state", instead(save({"weights.fc.weight": torch.zeros(1)}))),
        ("target: stop tokens", instead(b"[]")),
        ("target: stop tokens", instead(b"{")),
        ("target: weights", instead(b"xx")),
        ("bench: rounds", lambda valid: b"\xff\xfe\n" + valid),
        ("engine: steps", instead(b"{}\n")),
        ("load: part of a stream", instead(b"[]")),
        ("states: reply of a server", instead(b"[]")),
        ("states: reply of a server", instead(b'{"kv_transfer_params": {"states": "../x"}}')),
    ],
)
def test_what_once_crashed_a_reader_is_refused(
    name: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    reader = next(each for each in READERS if each.name == name)
    reader.write(tmp_path)
    path = tmp_path / reader.file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LeadoutError) as caught:
        reader.read(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < fuzzing.MAX_MESSAGE


def _raise(error: type[BaseException], message: str = "") -> None:
    raise error(message)


def _compute() -> None:
    end = time.process_time() + fuzzing.MAX_SECONDS + 0.1
    while time.process_time() < end:
        pass


def _block() -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        (lambda: _raise(KeyError), "untyped"),
        (lambda: _raise(RecursionError), "untyped"),
        (lambda: _raise(LeadoutError, "two\nlines"), "message"),
        (lambda: _raise(LeadoutError, "x" * 5000), "message"),
        (lambda: _raise(LeadoutError, "\ud800"), "message"),
        (lambda: bytearray((fuzzing.MAX_MIB + 100) << 20), "too much memory"),
        (_compute, "too slow"),
        (os.abort, "process ended"),
        (_block, "process ended"),
    ],
)
def test_each_kind_of_loss_is_found(
    fails: Callable[[], object], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fails is _block:  # the others may be slow
        monkeypatch.setattr(fuzzing, "BLOCKED_SECONDS", 3)

    def read(folder: Path) -> None:
        if (folder / "file").is_dir():  # one case, that of a folder in place of the file
            fails()

    reader = Reader("fails", "file", "bytes", lambda f: (f / "file").write_bytes(b"valid"), read)
    outcomes = run_bounded(reader, tmp_path / "case", 0, 20)
    assert outcomes.cases == 20
    assert outcomes.lost == outcomes.counts[kind] == 1
    assert outcomes.losses[0]["case"] == list(fuzzing.FAULTS).index("a folder")
