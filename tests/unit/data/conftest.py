"""A tokenizer with a chat template, and the sampling and job records of a small job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leadout.data.chat import Chat
from leadout.data.manifest import Job, Sampling
from support.tiny_chat import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat(tokenizer_folder: Path) -> Chat:
    return Chat(tokenizer_folder)


@pytest.fixture(scope="session")
def sampling() -> Callable[..., Sampling]:
    def make(**changes: Any) -> Sampling:
        settings: dict[str, Any] = {
            "greedy_share": 0.5,
            "temperature": 0.7,
            "top_p": 0.9,
            "max_new_tokens": 8,
            "max_length": 256,
            "samples_per_prompt": 1,
            "seed": 0,
        }
        return Sampling(**settings | changes)

    return make


@pytest.fixture(scope="session")
def job(sampling: Callable[..., Sampling]) -> Callable[..., Job]:
    def make(**changes: Any) -> Job:
        settings: dict[str, Any] = {
            "target": "tiny",
            "target_fingerprint": "f",
            "tokenizer_hash": "t",
            "template_hash": "c",
            "thinking": None,
            "sources": ["asked.jsonl"],
            "prompts_hash": "p",
            "limit": None,
            "dtype": "float32",
            "sampling": sampling(),
            "parts": 1,
        }
        return Job(**settings | changes)

    return make
