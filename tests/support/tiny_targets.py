"""Tiny random chat targets of other kinds than the dense Qwen3 and Llama in `support.models`.

Each has the byte tokenizer of `support.tiny_chat`, at most 6 layers and weights that are the same
for the same seed, small enough that its text repeats and a drafter can learn it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from leadout.dflash.config import DrafterConfig
from support.drafters import TINY_DRAFTER
from support.models import ROOT, TINY_VOCAB
from support.tiny_chat import END_OF_TEXT, END_OF_TURN, MASK_TOKEN, tiny_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention supports
    "max_position_embeddings": 512,
    "initializer_range": 0.0375,
    "tie_word_embeddings": False,
}
_WINDOW = 32  # shorter than the texts of the tests, so that it matters
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _moe() -> Any:
    return Qwen3MoeConfig(
        **_SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )


def _mla() -> Any:
    # One dense layer, then mixtures of experts with a shared one, as DeepSeek-V3 has. The cache of
    # a token (kv_lora_rank + qk_rope_head_dim) has its size, for which vLLM has kernels.
    return DeepseekV3Config(
        **_SIZES | {"num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4},
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        moe_intermediate_size=32,
    )


def _gemma3() -> Any:
    # Sliding layers with a rotary base of their own, a scaled embedding, a norm around each part.
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(
        **_SIZES, layer_types=kinds, sliding_window=_WINDOW, query_pre_attn_scalar=32
    )


def _sliding() -> Any:
    # Alternating windows, attention sinks, biases and a mixture of experts, as gpt-oss has.
    kinds = ["sliding_attention", "full_attention"] * 3
    return GptOssConfig(
        **_SIZES,
        layer_types=kinds,
        sliding_window=_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def _dense() -> Any:
    return Qwen3Config(**_SIZES)


_CONFIGS: dict[str, Callable[[], Any]] = {
    "moe": _moe,
    "mla": _mla,
    "sliding": _sliding,
    "fp8": _dense,
    "int8": _dense,
    "gemma3": _gemma3,
}
# What vLLM says where it runs a target, but not with a drafter.
NOT_SERVED = {
    "gemma3": "Gemma3ForCausalLM does not hand out the hidden states",
    # On CPUs the cache of MLA has blocks of 16 tokens, that of the drafter multiples of 32.
    "mla": "No common block size",
}
KINDS = tuple(kind for kind in _CONFIGS if kind not in NOT_SERVED)


def drafter_config(kind: str) -> DrafterConfig:
    """A drafter that fits the target of that kind."""
    layers = _CONFIGS[kind]().num_hidden_layers
    return replace(TINY_DRAFTER, target_num_layers=layers, mask_token_id=MASK_TOKEN)


def write_tiny_target(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write the target of that kind and its tokenizer to `folder`."""
    config = _CONFIGS[kind]()
    config.eos_token_id, config.bos_token_id = END_OF_TURN, None
    config.pad_token_id = END_OF_TEXT
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=[END_OF_TURN, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if kind == "fp8":
        _quantize(folder)
    elif kind == "int8":
        unquantized = folder.rename(folder.with_name(f"{folder.name}-float32"))
        script = ROOT / "examples" / "quantize_int8.py"
        subprocess.run([sys.executable, script, unquantized, folder], check=True)
    return folder


def _quantize(folder: Path) -> None:
    """Quantize the linear layers in place to FP8, in the format of compressed-tensors.

    A scale for each row of a weight, and activations that are quantized token by token.
    """
    path, tensors = folder / "model.safetensors", {}
    for name, weight in load_file(path).items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / _LARGEST  # [rows, 1]
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = weight
    save_file(tensors, path, metadata={"format": "pt"})
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
