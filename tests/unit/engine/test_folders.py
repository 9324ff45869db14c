"""A model's folder by its name: all that the target needs is fetched, and nothing else."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from leadout.models import ModelNotFoundError, local_folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def download(name: str, **settings: Any) -> str:
        calls.append({"name": name, **settings})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def fetched(patterns: list[str], file: str) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def test_a_folder_is_taken_as_it_is(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path
    assert asked == []


def test_a_hub_model_comes_with_tokenizer_and_template(
    asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert local_folder("acme/tiny", "main") == tmp_path
    patterns = asked[0]["allow_patterns"]
    for file in (
        "config.json",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
    ):
        assert fetched(patterns, file), file
    for file in ("pytorch_model.bin", "modeling_tiny.py", "model.gguf", "training_args.pt"):
        assert not fetched(patterns, file), file


def test_a_config_alone_leaves_the_weights(asked: list[dict[str, Any]]) -> None:
    local_folder("acme/tiny", config_only=True)
    assert asked[0]["allow_patterns"] == ["*.json"]


def test_a_name_that_is_nothing_says_so() -> None:
    with pytest.raises(ModelNotFoundError, match="acme/nothing is neither a local folder"):
        local_folder("acme/nothing")
