"""The targets of the tests: a real small model, and tiny random ones."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config
from transformers.models.qwen3 import Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TINY_VOCAB = 320


def cached_smollm2() -> Path:
    """SmolLM2-135M-Instruct, made once by the script that users run and kept outside the tree."""
    return _cached("smollm2-135m-instruct", "make_smollm2.py")


def cached_qwen_coder() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct, made as `cached_smollm2`: a large vocabulary, another family."""
    return _cached("qwen2.5-coder-1.5b-instruct", "make_qwen_coder.py")


def _cached(name: str, script: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "leadout" / "models"
    destination = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:  # tests run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not destination.exists():
            subprocess.run([sys.executable, ROOT / "examples" / script, destination], check=True)
    return destination


# The initializer range is large enough that greedy text does not repeat one token.
_TINY = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention supports
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


def tiny_qwen3(seed: int = 0) -> PreTrainedModel:
    """A random Qwen3 with 6 layers; the same weights for the same seed."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=6, **_TINY)).eval()


def tiny_llama(seed: int = 0) -> PreTrainedModel:
    """A random Llama with 4 layers; the same weights for the same seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **_TINY)).eval()
