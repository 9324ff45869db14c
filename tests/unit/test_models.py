"""Models by name: which files are downloaded, what a wrong name reports, fingerprints."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from leadout.models import ModelNotFoundError, fingerprint, is_left_to_vllm, local_folder

REQUEST = httpx.Request("GET", "https://huggingface.co")


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


def test_the_same_files_as_vllms_are_downloaded(asked: list[dict[str, Any]]) -> None:
    local_folder("acme/tiny", "v2", "/models")
    assert asked[0]["revision"] == "v2"
    assert asked[0]["cache_dir"] == "/models"
    # Weights in a subfolder are a second copy in another format.
    for file in ("original/model.safetensors", "metal/config.json"):
        assert fetched(asked[0]["ignore_patterns"], file), file
    assert not fetched(asked[0]["ignore_patterns"], "model.safetensors")


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("s3://bucket/model", True),
        ("gs://bucket/model", True),
        ("/models/tiny.Q4_K_M.gguf", True),
        ("acme/tiny-GGUF:Q4_K_M", True),
        ("acme/tiny", False),
        ("/models/tiny-gguf", False),
    ],
)
def test_what_only_vllm_can_fetch(name: str, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    assert is_left_to_vllm(name) is left


def test_names_on_modelscope_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert is_left_to_vllm("acme/tiny")
    assert not is_left_to_vllm(str(tmp_path))


def test_a_config_alone_leaves_the_weights(asked: list[dict[str, Any]]) -> None:
    local_folder("acme/tiny", config_only=True)
    assert asked[0]["allow_patterns"] == ["*.json"]


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"gone does not exist; expected the folder"):
        local_folder(str(tmp_path / "gone"))


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf is a file; expected the folder"):
        local_folder(str(tmp_path / "model.gguf"))


def test_an_offline_hub_name_mentions_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find the requested files in the disk cache.\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError) as caught:
        local_folder("acme/nothing")
    message = str(caught.value)
    assert "acme/nothing is neither a local folder nor in the Hugging Face cache" in message
    assert "Check the name, the network and HF_HUB_OFFLINE" in message
    assert "\n" not in message


def test_a_name_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: Any) -> str:
        raise RepositoryNotFoundError("404", response=httpx.Response(404, request=REQUEST))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"Check the spelling; .* `hf auth login`"):
        local_folder("acme/nothing")


def test_a_revision_that_the_model_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: Any) -> str:
        raise RevisionNotFoundError("404", response=httpx.Response(404, request=REQUEST))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match="acme/tiny has no revision v9 ") as caught:
        local_folder("acme/tiny", "v9")
    assert "network" not in str(caught.value)


def test_the_fingerprint_sees_configuration_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    content = bytearray(20 << 20)
    weights.write_bytes(content)
    prints = [fingerprint(tmp_path)]
    for place in (0, 10 << 20):  # in the header, and in the midst
        content[place] = 1
        weights.write_bytes(content)
        prints.append(fingerprint(tmp_path))
    weights.write_bytes(content[:-1])
    prints.append(fingerprint(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1}')
    prints.append(fingerprint(tmp_path))
    assert len(set(prints)) == len(prints)
    assert prints[-1] == fingerprint(tmp_path)
