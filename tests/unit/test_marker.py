"""The search for markers finds them in every encoding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from support import marker
from support.marker import Marker, files_with

MARKER = Marker.of_ids(0, 250)
SPOKEN = Marker(MARKER.ids, "the-quick-brown-marker")
IDS = list(MARKER.ids)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"prompt": [1, 2, *IDS, 3]}),
        json.dumps(IDS, indent=2),
        json.dumps(IDS, separators=(",", ":")),
        repr(tuple(IDS)),
        f"INFO prompt_token_ids={IDS[2:9]}",
        "asked: quick-brown-mark",
        np.array(IDS, dtype=np.int64).tobytes(),
        np.array([0, *IDS[3:]], dtype=np.int32).tobytes(),
        np.array(IDS, dtype=np.int16).tobytes(),
    ],
)
def test_every_encoding_is_found(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert files_with([SPOKEN], [tmp_path]) == ([path], 1)
    assert files_with([SPOKEN], [tmp_path], allowed=[path.parent]) == ([], 0)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_tensors_in_safetensors_are_found(tmp_path: Path, kind: torch.dtype) -> None:
    save_file({"ids": torch.tensor(IDS, dtype=kind)}, tmp_path / "states.safetensors")
    assert len(files_with([MARKER], [tmp_path])[0]) == 1


def test_a_file_larger_than_what_is_searched_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marker, "_BLOCK", 4)
    for before in range(40):
        content = bytes(before) + np.array(IDS, dtype=np.int32).tobytes() + bytes(100)
        (tmp_path / f"{before}").write_bytes(content)
    assert len(files_with([MARKER], [tmp_path])[0]) == 40


def test_other_content_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text(json.dumps([*IDS[:5], 999, *IDS[6:10]]))
    (tmp_path / "text").write_text("the quick brown fox")
    assert files_with([SPOKEN], [tmp_path]) == ([], 2)


def test_names_of_files_count(tmp_path: Path) -> None:
    (tmp_path / "the-quick-brown-marker").write_text("")
    assert len(files_with([SPOKEN], [tmp_path])[0]) == 1
