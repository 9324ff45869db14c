"""A process of its own tells how far it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from leadout.engine.child_process import DecodeError, run_apart


class Number(BaseModel):
    value: int


@pytest.fixture
def doubler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that doubles a number, or dies of 0."""
    (tmp_path / "doubler.py").write_text(
        "import json, sys\n"
        "from types import SimpleNamespace\n"
        "from leadout.engine.child_process import say_progress, say_result\n"
        "value = json.load(sys.stdin)['value']\n"
        "print('noise', end='')\n"
        "say_progress('halfway')\n"
        "1 / value\n"
        "say_progress('nearly there')\n"
        "say_result(SimpleNamespace(model_dump_json=lambda: json.dumps({'value': 2 * value})))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "doubler"


def test_progress_and_result_are_heard(doubler: str) -> None:
    heard: list[str] = []
    assert run_apart(doubler, Number(value=21), Number, heard.append) == Number(value=42)
    assert heard == ["halfway", "nearly there"]


def test_a_death_halfway_is_an_error_with_its_cause(doubler: str) -> None:
    heard: list[str] = []
    with pytest.raises(DecodeError, match=r"code 1(.|\n)*ZeroDivisionError"):
        run_apart(doubler, Number(value=0), Number, heard.append)
    assert heard == ["halfway"]
