"""Thousands of damaged checkpoints: each is refused by the one error, or is a working drafter."""

from __future__ import annotations

import copy
import json
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.checkpoints import CheckpointError, load_drafter, write_checkpoint
from leadout.dflash.drafter import Drafter
from leadout.dflash.mask import decode_masks
from support.drafters import FULL, MINI, MINI_REDUCED, SLIDING, random_weights, shard

SECONDS_PER_CASE = 5.0  # a case takes milliseconds; this is for a busy machine

NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 8, 64, 1001, 2**31, 2**53, 2**63 - 1, -(2**63), 0.0, -0.5,
    0.5, 1.0, 1e-300, 1e300, "", "0", "16", "full_attention", "sliding_attention", "yarn", "llama3",
    "linear", "default", "dflash", "silu", "\u0000", "\ud800", "ÿ\u202e", "x" * 5000, [], [[]], {},
    [0], [1, 3], [1, 1], [None], ["full_attention"], {"a": {}}, {"rope_type": "yarn", "factor": 2},
    {"rope_type": "llama3", "factor": 1, "low_freq_factor": 1, "high_freq_factor": 4},
    {"full_attention": {"rope_theta": 7}}, {"": []}, list(range(70)),
]  # fmt: skip

NAMES = [
    "is_causal", "causal", "use_swa", "swa_window_size", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "partial_rotary_factor", "rope_scaling", "rope_parameters",
    "rope_theta", "target_hidden_size", "num_target_layers", "target_layer_ids", "block_size",
    "final_logit_softcapping", "output_multiplier", "input_embedding_scale", "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids", "hc_mult", "auto_map", "quantization_config", "mystery",
    "attention_bias", "head_dim", "v_head_dim", "sample_from_anchor", "gating", "\ud800mask", "",
    "speculators_model_type", "dflash_config", "transformer_layer_config", "architectures",
]  # fmt: skip


def containers(value: Any) -> list[Any]:
    """The value and everything in it that holds other values."""
    if not isinstance(value, dict | list):
        return []
    children = value.values() if isinstance(value, dict) else value
    return [value, *(inner for child in children for inner in containers(child))]


def mutate_json(value: Any, dice: random.Random) -> Any:
    """One to three small changes anywhere in a JSON value."""
    value = copy.deepcopy(value)
    for _ in range(dice.randint(1, 3)):
        place = dice.choice(containers(value))
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        kind = dice.choice(["set", "set", "nudge", "delete", "add", "nest"])
        if kind == "add" and isinstance(place, dict):
            place[dice.choice(NAMES)] = copy.deepcopy(dice.choice(NASTY))
        elif keys:
            key = dice.choice(keys)
            if kind == "delete":
                del place[key]
            elif kind == "nest":
                place[key] = [place[key]]
            elif kind == "nudge" and isinstance(place[key], int | float):
                place[key] = dice.choice(
                    [place[key] + 1, place[key] - 1, -place[key], place[key] * 2, float(place[key])]
                )
            else:
                place[key] = copy.deepcopy(dice.choice(NASTY))
    return value


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    """Cut, flip, insert or repeat a piece."""
    at = dice.randrange(len(data))
    kind = dice.choice(["cut", "flip", "insert", "drop", "repeat"])
    piece = dice.randbytes(dice.randint(1, 8))
    match kind:
        case "cut":
            return data[:at]
        case "flip":
            return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
        case "insert":
            return data[:at] + piece + data[at:]
        case "drop":
            return data[:at] + data[at + len(piece) :]
        case _:
            return data + data[at:]


def mutate_safetensors(data: bytes, dice: random.Random) -> bytes:
    """Damage the length, the header's JSON, its text, or any byte."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + length], data[8 + length :]
    match dice.choice(["length", "json", "json", "field", "text", "any"]):
        case "length":
            wrong = dice.choice(
                [0, 1, 8, length - 1, length + 1, len(data), 2**32, 2**63, 2**64 - 1]
            )
            return struct.pack("<Q", wrong) + header + body
        case "json":
            header = json.dumps(mutate_json(json.loads(header), dice)).encode()
        case "field":
            fields = json.loads(header)
            tensor = fields[dice.choice([name for name in fields if name != "__metadata__"])]
            match dice.choice(["dtype", "shape", "data_offsets"]):
                case "dtype":
                    tensor["dtype"] = dice.choice(["F16", "BF16", "F64", "I8", "F8_E4M3", "Z9"])
                case "shape":
                    tensor["shape"] = dice.choice(
                        [[], [0], [-1], [2**62, 4], tensor["shape"][::-1]]
                    )
                case _:
                    tensor["data_offsets"] = [dice.randint(-9, 9000), dice.randint(-9, 2**40)]
            header = json.dumps(fields).encode()
        case "text":
            header = mutate_bytes(header, dice)
        case _:
            return mutate_bytes(data, dice)
    return struct.pack("<Q", len(header)) + header + body


def mutate_document(data: bytes, dice: random.Random) -> bytes:
    return json.dumps(mutate_json(json.loads(data), dice)).encode()


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


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "drafter"
    if request.param == "zlab":
        config = replace(MINI, layers=(SLIDING,))
        write_checkpoint(path, random_weights(config), config, "zlab")
    else:
        config = replace(MINI_REDUCED, layers=(FULL,))
        write_checkpoint(path, random_weights(config), config, "speculators", target_name="t")
    return path


@pytest.mark.parametrize("folder", ["zlab", "speculators"], indirect=True)
@pytest.mark.parametrize(
    ("file", "mutate", "cases"),
    [
        ("config.json", mutate_document, 500),
        ("config.json", mutate_bytes, 200),
        ("model.safetensors", mutate_safetensors, 400),
        ("model.safetensors.index.json", mutate_document, 100),
    ],
)
def test_only_one_error_or_a_working_drafter(
    folder: Path,
    file: str,
    mutate: Callable[[bytes, random.Random], bytes],
    cases: int,
) -> None:
    if file == "model.safetensors.index.json":
        shard(folder)
    original = (folder / file).read_bytes()
    outcomes: Counter[str] = Counter()
    for seed in range(cases):
        (folder / file).write_bytes(mutate(original, random.Random(seed)))
        started = time.monotonic()
        try:
            require_working(load_drafter(folder))
            outcomes["working"] += 1
        except CheckpointError as problem:
            outcomes["refused" if str(problem).isprintable() else f"flooded {seed}"] += 1
        except BaseException as problem:
            raise AssertionError(f"seed {seed}: {problem!r}") from problem
        assert time.monotonic() - started < SECONDS_PER_CASE, f"seed {seed} took too long"
    assert set(outcomes) == {"refused", "working"}
    # A mutation that never or always ends one way would prove nothing.
    assert outcomes["refused"] > cases // 4
    assert outcomes["working"] > 0
