"""Fields of config.json of published targets, by family: what a drafter's shape follows from."""

from __future__ import annotations

from typing import Any

_LLAMA = {"model_type": "llama", "rope_theta": 5e5}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1e6,
}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 1e4,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "rope_theta": 150000,
}


def _decoder(hidden: int, layers: int, heads: int, kv: int, mlp: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _LLAMA | _decoder(576, 30, 9, 3, 1536, 49152) | {"tie_word_embeddings": True},
    "Qwen2.5-Coder-1.5B": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **_decoder(1536, 28, 12, 2, 8960, 151936),
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "rope_theta": 1e6,
        "head_dim": 128,
        **_decoder(4096, 36, 32, 8, 12288, 151936),
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "rope_theta": 1e6,
        "head_dim": 128,
        **_decoder(5120, 64, 64, 8, 25600, 151936),
    },
    "Llama-3.3-70B": _LLAMA | _decoder(8192, 80, 64, 8, 28672, 128256),
    "Llama-2-7B": _LLAMA | {"rope_theta": 1e4} | _decoder(4096, 32, 32, 32, 11008, 32000),
    "Phi-3-mini": {
        "model_type": "phi3",
        "rope_theta": 1e4,
        **_decoder(3072, 32, 32, 32, 8192, 32064),
    },
    "Gemma-2-9b": {
        "model_type": "gemma2",
        "rope_theta": 1e4,
        "head_dim": 256,
        **_decoder(3584, 42, 16, 8, 14336, 256000),
    },
    "Gemma-3-1b": {
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "head_dim": 256,
        **_decoder(1152, 26, 4, 1, 6912, 262144),
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **_decoder(4096, 32, 32, 8, 14336, 32000),
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe",
        "rope_theta": 1e4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        **_decoder(2048, 16, 16, 16, 1024, 50304),
    },
    "Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        **_decoder(4096, 46, 96, 8, 10944, 151552),
    },
    "MiniMax-M2": {
        "model_type": "minimax_m2",
        "rope_theta": 5e6,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        **_decoder(3072, 62, 48, 8, 1536, 200064),
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "rope_theta": 1e4,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **_decoder(2048, 27, 16, 16, 10944, 102400),
    },
    "DeepSeek-V3": _DEEPSEEK
    | {
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "vocab_size": 129280,
    },
    "Kimi-K2": _DEEPSEEK
    | {
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    },
}
