"""Checkpoints and targets, for the fuzzing: a valid sample of each of their files."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from leadout.check.static import RECORD, record_findings
from leadout.check.tokenizer import read_token_files
from leadout.check.weights import missing_shards, target_weight_findings
from leadout.checkpoints import Checkpoint, load_drafter, read_checkpoint, write_checkpoint
from leadout.checkpoints.mask_embedding import MASK_EMBEDDING, read_mask_embedding
from leadout.data.settings import DataSettings
from leadout.dflash.drafter import Drafter
from leadout.dflash.mask import decode_masks
from leadout.evaluate.reference import loaded_bytes
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.pairing import read_sizes, read_target
from leadout.pairing.target import read_logit_scaling
from leadout.train.run import _stop_tokens
from support.drafters import FULL, MINI, MINI_REDUCED, SLIDING, random_weights, shard
from support.fuzzing import Reader
from support.tiny_chat import tiny_tokenizer

VOCAB = 64
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
PRINT = "f" * 64


def _json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def _sampling(folder: Path) -> None:
    DataSettings(target="t", prompts=("a",), out=folder).sampling(folder, reasons=True)


def _write_zlab(folder: Path) -> None:
    config = replace(MINI, layers=(SLIDING,))
    write_checkpoint(folder, random_weights(config), config, "zlab")


def _write_speculators(folder: Path) -> None:
    config = replace(MINI_REDUCED, layers=(FULL,))
    write_checkpoint(folder, random_weights(config), config, "speculators", target_name="t")


def _write_sharded(folder: Path) -> None:
    _write_zlab(folder)
    shard(folder)


def require_working(drafter: Drafter) -> None:
    """One block after a short context, in finite numbers."""
    config = drafter.config
    positions = torch.arange(7)[None]
    context, own = positions[:, :4], positions[:, 4:]
    states = torch.ones(1, 4, len(config.target_layer_ids) * config.context_size)
    block = torch.ones(1, 3, config.hidden_size, dtype=drafter.fc.weight.dtype)
    masks = decode_masks(config.layers, own, context, torch.ones_like(context).bool())
    with torch.no_grad():
        kv = drafter.context_kv(drafter.context_features(states), context)
        hidden = drafter(block, own, kv, masks)
    assert hidden.shape == block.shape
    assert torch.isfinite(hidden).all()


def _load(folder: Path) -> None:
    require_working(load_drafter(folder))


def _write_mask(folder: Path) -> None:
    value = {"mask_token_id": 7, "embedding": torch.arange(16, dtype=torch.float32)}
    torch.save(value, folder / MASK_EMBEDDING)


TARGET_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 128,
    "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "logit_scale": 0.5, "layer_types": ["full_attention"],
    "final_logit_softcapping": 30.0, "dtype": "bfloat16", "text_config": {"hidden_size": 16,
    "num_hidden_layers": 4, "vocab_size": VOCAB, "num_experts": 4, "num_attention_heads": 4},
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "quantization_config": None,
}  # fmt: skip


def _write_target(folder: Path) -> None:
    _json(folder / CONFIG, TARGET_CONFIG)
    weights = {
        "model.embed_tokens.weight": torch.ones(VOCAB, 16),
        "lm_head.weight": torch.ones(VOCAB, 16),
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    _json(folder / INDEX, {"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS)})
    eos = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0}
    _json(folder / GENERATION, eos)


def _use_target_config(folder: Path) -> None:
    read_target(folder)
    read_sizes(folder)
    read_logit_scaling(json.loads((folder / CONFIG).read_text()), folder / CONFIG)
    _sampling(folder)


def _use_target_weights(folder: Path) -> None:
    facts = SimpleNamespace(vocab_size=VOCAB)
    target_weight_findings(folder, facts)  # type: ignore[arg-type]
    loaded_bytes(folder, torch.bfloat16)
    load_target_weights(TargetFiles(folder), torch.float32, torch.device("cpu"))


def _write_tokenizer(folder: Path) -> None:
    _write_target(folder)
    tiny_tokenizer().save_pretrained(folder)
    # Fewer tokens, so that a case costs less.
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    found["model"]["vocab"] = dict(list(found["model"]["vocab"].items())[:8])
    found["added_tokens"] = found["added_tokens"][:3]
    for number, token in enumerate(found["added_tokens"], start=8):
        token["id"] = number
    _json(path, found)
    _json(
        folder / "tokenizer_config.json",
        {"chat_template": [{"name": "default", "template": "x"}], "eos_token": {"content": "a"}},
    )


def _tokens(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    read_token_files(folder, [])


def _write_record(folder: Path) -> None:
    _write_zlab(folder)
    _json(
        folder / RECORD,
        {
            "target": "t", "target_fingerprint": PRINT, "template_hash": PRINT, "thinking": None,
            "config": {
                "layers": 1, "block_size": 4, "target_layer_ids": [1, 3], "mask_token_id": 7,
            },
        },
    )  # fmt: skip


def _record(folder: Path) -> None:
    record_findings(_checkpoint(folder), folder / "none", None, None)


@functools.cache
def _checkpoint(folder: Path) -> Checkpoint:
    return read_checkpoint(folder)


FILES_OF_MODELS = [
    Reader("training record", RECORD, "json", _write_record, _record, is_tolerant=True),
    Reader("checkpoint: z-lab config", CONFIG, "json", _write_zlab, _load),
    Reader("checkpoint: z-lab weights", WEIGHTS, "safetensors", _write_zlab, _load),
    Reader("checkpoint: speculators config", CONFIG, "json", _write_speculators, _load),
    Reader("checkpoint: speculators weights", WEIGHTS, "safetensors", _write_speculators, _load),
    Reader("checkpoint: index", INDEX, "json", _write_sharded, _load),
    Reader("checkpoint: mask embedding", MASK_EMBEDDING, "zip", _write_mask,
           lambda folder: read_mask_embedding(folder, 7, 16)),
    Reader("target: config", CONFIG, "json", _write_target, _use_target_config),
    Reader("target: weights", WEIGHTS, "safetensors", _write_target, _use_target_weights),
    Reader("target: index", INDEX, "json", _write_target, missing_shards, is_tolerant=True),
    Reader("target: stop tokens", GENERATION, "json", _write_target, _stop_tokens),
    Reader("target: sampling", GENERATION, "json", _write_target, _sampling, is_tolerant=True),
    Reader("target: tokenizer", "tokenizer.json", "json", _write_tokenizer, _tokens,
           is_tolerant=True),
    Reader("target: tokenizer config", "tokenizer_config.json", "json", _write_tokenizer, _tokens,
           is_tolerant=True),
]  # fmt: skip
