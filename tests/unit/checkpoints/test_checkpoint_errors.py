"""Every kind of damage ends in one error that names the spot, what is there and what should be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leadout.checkpoints import (
    CheckpointError,
    UnsupportedCheckpointError,
    load_drafter,
    load_weights,
    read_checkpoint,
    write_checkpoint,
)
from support.drafters import (
    MINI_REDUCED,
    edit_config,
    edit_weights,
    random_weights,
    shard,
)

GATE = "layers.1.mlp.gate_proj.weight"
Damage = Callable[[dict[str, Tensor]], object]


def error_of(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder)
    message = str(caught.value)
    for part in (caught.value.path, caught.value.field, caught.value.expected, caught.value.remedy):
        assert str(part) in message
    return caught.value


def test_a_missing_tensor(zlab_folder: Path) -> None:
    edit_weights(zlab_folder, lambda weights: weights.pop(GATE))
    error = error_of(zlab_folder)
    assert error.field == GATE
    assert "is missing" in str(error)


def test_an_extra_tensor(zlab_folder: Path) -> None:
    edit_weights(zlab_folder, lambda weights: weights.update(extra=torch.ones(2)))
    assert error_of(zlab_folder).field == "extra"


def test_an_embedding_is_extra_in_the_zlab_format(zlab_folder: Path) -> None:
    embedding = {"embed_tokens.weight": torch.ones(40, 16)}
    edit_weights(zlab_folder, lambda weights: weights.update(embedding))
    assert error_of(zlab_folder).field == "embed_tokens.weight"


def test_a_misshapen_tensor(zlab_folder: Path) -> None:
    edit_weights(zlab_folder, lambda weights: weights.update({GATE: torch.ones(16, 24)}))
    error = error_of(zlab_folder)
    assert error.field == GATE
    assert "shape [16, 24]" in str(error)
    assert "shape [24, 16]" in error.expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite(value: float, zlab_folder: Path) -> None:
    def poison(weights: dict[str, Tensor]) -> None:
        weights[GATE][3, 5] = value

    edit_weights(zlab_folder, poison)
    read_checkpoint(zlab_folder)  # headers alone cannot show it
    error = error_of(zlab_folder)
    assert error.field == GATE
    assert "1 of 384 values" in str(error)


def test_a_value_that_does_not_fit_the_requested_precision(zlab_folder: Path) -> None:
    def grow(weights: dict[str, Tensor]) -> None:
        weights[GATE][0, 0] = 1e6

    edit_weights(zlab_folder, grow)
    load_drafter(zlab_folder)
    with pytest.raises(CheckpointError, match=rf"{GATE} as torch.float16"):
        load_drafter(zlab_folder, torch.float16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_weights_of_another_type(dtype: torch.dtype, zlab_folder: Path) -> None:
    edit_weights(zlab_folder, lambda weights: weights.update({GATE: weights[GATE].to(dtype)}))
    with pytest.raises(UnsupportedCheckpointError, match="quantized"):
        load_drafter(zlab_folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("layers.0.self_attn.qkv_proj.weight", "fused"),
        ("layers.0.self_attn.g_proj.weight", "Laguna"),
        ("layers.0.attention_conv.base_kernel", "DFlash 2"),
        ("layers.0.self_attn.attention_sink_bias", "sinks"),
        ("layers.0.mlp.up_proj.weight_scale", "quantized"),
        ("encoder.fc.weight", "Muse"),
        ("mask_hidden", "mask embedding"),
    ],
)
def test_a_tensor_of_a_relative(name: str, reason: str, zlab_folder: Path) -> None:
    edit_weights(zlab_folder, lambda weights: weights.update({name: torch.ones(2)}))
    with pytest.raises(UnsupportedCheckpointError, match=reason):
        read_checkpoint(zlab_folder)


@pytest.mark.parametrize(
    ("fields", "tensors", "feature"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            {GATE: torch.ones(24, 16).to(torch.float8_e4m3fn), f"{GATE}_scale": torch.ones(1)},
            "a quantized drafter",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            {GATE.replace("weight", "weight_packed"): torch.ones(24, 2, dtype=torch.int32)},
            "a quantized drafter",
        ),
        (
            {"add_swa_attention_sink_bias": True},
            {"layers.0.self_attn.attention_sink_bias": torch.ones(2)},
            "attention sinks",
        ),
    ],
)
def test_what_only_vllm_computes_can_be_served(
    fields: dict[str, object], tensors: dict[str, Tensor], feature: str, zlab_folder: Path
) -> None:
    edit_config(zlab_folder, lambda config: config.update(fields))
    edit_weights(zlab_folder, lambda weights: weights.update(tensors))
    with pytest.raises(UnsupportedCheckpointError, match=feature):
        read_checkpoint(zlab_folder)
    served = read_checkpoint(zlab_folder, as_served=True)
    assert served.left_to_vllm == (feature,)
    load_weights(served)


def test_a_served_drafter_is_checked_where_leadout_knows_it(zlab_folder: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    edit_config(zlab_folder, lambda config: config.update(quantized, num_hidden_layers=9))
    with pytest.raises(CheckpointError, match=r"the 9 layers \(num_hidden_layers\)"):
        read_checkpoint(zlab_folder, as_served=True)
    edit_config(zlab_folder, lambda config: config.update(num_hidden_layers=2, hc_mult=4))
    with pytest.raises(UnsupportedCheckpointError, match="hyper-connections"):
        read_checkpoint(zlab_folder, as_served=True)


def test_a_served_drafter_has_the_ids_of_its_draft_vocabulary(tmp_path: Path) -> None:
    folder, weights = tmp_path / "drafter", random_weights(MINI_REDUCED)
    write_checkpoint(folder, weights, MINI_REDUCED, "speculators", target_name="acme/target")
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    edit_config(folder, lambda config: config.update(quantized))
    load_weights(read_checkpoint(folder, as_served=True))
    edit_weights(folder, lambda weights: weights.pop("d2t"))
    with pytest.raises(CheckpointError, match="d2t"):
        read_checkpoint(folder, as_served=True)


def test_the_prefix_of_other_tools_is_accepted_and_noted(zlab_folder: Path) -> None:
    plain = load_drafter(zlab_folder).state_dict()

    def prefix(weights: dict[str, Tensor]) -> None:
        for name in list(weights):
            weights[f"model.{name}"] = weights.pop(name)

    edit_weights(zlab_folder, prefix)
    assert any("`model.`" in note for note in read_checkpoint(zlab_folder).notes)
    prefixed = load_drafter(zlab_folder).state_dict()
    assert all(torch.equal(plain[name], prefixed[name]) for name in plain)


def test_a_tensor_with_and_without_the_prefix(zlab_folder: Path) -> None:
    edit_weights(zlab_folder, lambda w: w.update({"model.norm.weight": w["norm.weight"].clone()}))
    assert error_of(zlab_folder).field == "norm.weight"


def test_half_precision_and_mixed_precision_are_noted(zlab_folder: Path) -> None:
    edit_weights(
        zlab_folder,
        lambda weights: weights.update(
            {name: w.half() for name, w in weights.items() if w.ndim > 1}
        ),
    )
    notes = " ".join(read_checkpoint(zlab_folder).notes)
    assert "float16 overflows" in notes
    assert "(float16, float32)" in notes
    assert {p.dtype for p in load_drafter(zlab_folder).parameters()} == {torch.float16}


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights(kept: int, zlab_folder: Path) -> None:
    path = zlab_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    error = error_of(zlab_folder)
    assert error.path == path
    assert error.expected == "a complete safetensors file"


def test_no_weights(zlab_folder: Path) -> None:
    (zlab_folder / "model.safetensors").unlink()
    assert error_of(zlab_folder).field == "model.safetensors"


def test_no_config(zlab_folder: Path) -> None:
    (zlab_folder / "config.json").unlink()
    assert error_of(zlab_folder).field == "config.json"


def test_no_folder(tmp_path: Path) -> None:
    assert "hf download" in error_of(tmp_path / "z-lab" / "Qwen3-4B-DFlash-b16").remedy


def test_a_file_for_a_folder(zlab_folder: Path) -> None:
    assert "is a file" in str(error_of(zlab_folder / "config.json"))


def test_a_pipe_is_not_opened(zlab_folder: Path) -> None:
    (zlab_folder / "config.json").unlink()
    os.mkfifo(zlab_folder / "config.json")
    assert "a regular file" in str(error_of(zlab_folder))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "a list"),
        ("null", "a NoneType"),
        ('{"a": 1, "a": 2}', "repeats the key 'a'"),
        ('{"a": NaN}', "the number NaN"),
        ('{"a": -Infinity}', "the number -Infinity"),
        ('{"a": 1e999}', "the number 1e999"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of 5000 digits"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64"),
        (r'{"a": "\ud800"}', "surrogates not allowed"),
        ('{"a": "' + "x" * 9_000_000 + '"}', "bytes"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_json(text: str, problem: str, zlab_folder: Path) -> None:
    (zlab_folder / "config.json").write_text(text)
    error = error_of(zlab_folder)
    assert error.path == zlab_folder / "config.json"
    assert problem in str(error.value)


def test_a_config_in_another_encoding(zlab_folder: Path) -> None:
    path = zlab_folder / "config.json"
    path.write_bytes(path.read_text().encode("utf-16"))
    assert "utf-8" in str(error_of(zlab_folder).value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("hidden_size", 0, "greater than or equal to 1"),
        ("hidden_size", "16", "a valid integer"),
        ("hidden_size", 16.0, "a valid integer"),
        ("hidden_size", True, "a valid integer"),
        ("hidden_size", None, "a valid integer"),
        ("hidden_size", 17, "shape"),
        ("num_hidden_layers", 10**9, "less than or equal to 1000"),
        ("num_attention_heads", 3, "shape"),
        ("num_key_value_heads", 3, "a divisor of num_heads"),
        ("head_dim", 7, "even"),
        ("rms_norm_eps", 0, "greater than 0"),
        ("rms_norm_eps", "1e-6", "a valid number"),
        ("attention_bias", 1, "a valid boolean"),
        ("vocab_size", -40, "greater than or equal to 1"),
        ("block_size", 1, "greater than or equal to 2"),
        ("architectures", ["Qwen3ForCausalLM"], "DFlashDraftModel"),
        ("architectures", "DFlashDraftModel", "DFlashDraftModel"),
        ("dflash_config", [1], "a JSON object"),
        ("is_causal", "no", "a valid boolean"),
    ],
)
def test_impossible_values(field: str, value: Any, expected: str, zlab_folder: Path) -> None:
    edit_config(zlab_folder, lambda config: config.update({field: value}))
    error = error_of(zlab_folder)
    assert expected in error.expected
    assert field in error.field or expected == "shape"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("target_layer_ids", [1, 6], "0 to 5"),
        ("target_layer_ids", [1, 1], "no layer twice"),
        ("target_layer_ids", [-1, 3], "greater than or equal to 0"),
        ("target_layer_ids", [], "at least 1 item"),
        ("target_layer_ids", [1, "3"], "a valid integer"),
        ("target_layer_ids", [1, 3, 4], "shape"),
        ("mask_token_id", 40, "a row of the target's embedding, 0 to 39"),
        ("mask_token_id", -1, "greater than or equal to 0"),
        ("mask_token_id", None, "a token id"),
        ("output_multiplier", 0.0, "greater than 0"),
    ],
)
def test_impossible_draft_values(field: str, value: Any, expected: str, zlab_folder: Path) -> None:
    edit_config(zlab_folder, lambda config: config["dflash_config"].update({field: value}))
    error = error_of(zlab_folder)
    assert expected in error.expected
    assert field in error.field or expected == "shape"


def test_another_number_of_layers_than_in_the_weights(zlab_folder: Path) -> None:
    edit_config(
        zlab_folder,
        lambda config: config.update(num_hidden_layers=3, layer_types=["full_attention"] * 3),
    )
    error = error_of(zlab_folder)
    assert (error.field, error.value) == ("num_hidden_layers", 3)
    assert error.expected == "2, the number of layers in the weights"


def test_an_enormous_value_does_not_flood_the_message(zlab_folder: Path) -> None:
    edit_config(zlab_folder, lambda config: config.update(hidden_size="x" * 1_000_000))
    assert len(str(error_of(zlab_folder))) < 600


def test_unprintable_names_are_escaped(zlab_folder: Path) -> None:
    edit_config(zlab_folder, lambda config: config.update({"mask\x1b[2J\u202e": 1}))
    assert str(error_of(zlab_folder)).isprintable()


class TestVocabulary:
    """d2t and t2d of a reduced vocabulary."""

    @pytest.mark.parametrize(
        ("damage", "field", "problem"),
        [
            (lambda w: w["d2t"].__setitem__(9, 31), "d2t", "target id 40"),
            (lambda w: w["d2t"].__setitem__(0, -1), "d2t", "target id -1"),
            (lambda w: w["d2t"].__setitem__(9, 2**63 - 1), "d2t", "target id"),
            (lambda w: w["d2t"].__setitem__(0, 4), "d2t", "several draft ids"),
            (lambda w: w["t2d"].__setitem__(0, False), "t2d", "differs from d2t at 1 target ids"),
            (lambda w: w.update(d2t=w["d2t"].int()), "d2t", "I32"),
            (lambda w: w.update(t2d=w["t2d"].long()), "t2d", "I64"),
            (lambda w: w.update(d2t=w["d2t"][:9].clone()), "d2t", "shape [9]"),
            (lambda w: w.pop("d2t"), "d2t", "is missing"),
            (lambda w: w.pop("lm_head.weight"), "lm_head.weight", "False"),
        ],
    )
    def test_damage(
        self, damage: Damage, field: str, problem: str, speculators_folder: Path
    ) -> None:
        edit_weights(speculators_folder, damage)
        error = error_of(speculators_folder)
        assert error.field == field
        assert problem in str(error)

    def test_t2d_may_be_absent(self, speculators_folder: Path) -> None:
        edit_weights(speculators_folder, lambda weights: weights.pop("t2d"))
        drafter = load_drafter(speculators_folder)
        assert drafter.to_target_ids(torch.tensor([0, 9])).tolist() == [0, 36]


class TestShards:
    def test_are_one_checkpoint(self, zlab_folder: Path) -> None:
        whole = load_drafter(zlab_folder).state_dict()
        shard(zlab_folder)
        parts = load_drafter(zlab_folder).state_dict()
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)

    @pytest.mark.parametrize(
        "file",
        [
            "../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", 3, None,
            "model.bin", "C:\\model.safetensors", "a\x00.safetensors", ["model.safetensors"],
        ],
    )  # fmt: skip
    def test_an_index_that_points_elsewhere(self, file: Any, zlab_folder: Path) -> None:
        shard(zlab_folder)
        path = zlab_folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["norm.weight"] = file
        path.write_text(json.dumps(index))
        error = error_of(zlab_folder)
        assert error.field == "weight_map.norm.weight"
        assert "the bare name" in error.expected

    def test_a_missing_shard(self, zlab_folder: Path) -> None:
        shard(zlab_folder)
        (zlab_folder / "model-00002-of-00002.safetensors").unlink()
        assert error_of(zlab_folder).field == "model-00002-of-00002.safetensors"

    def test_a_tensor_missing_from_the_index(self, zlab_folder: Path) -> None:
        shard(zlab_folder)
        path = zlab_folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        del index["weight_map"]["norm.weight"]
        path.write_text(json.dumps(index))
        assert error_of(zlab_folder).field == "norm.weight"

    @pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', "["])
    def test_a_useless_index(self, index: str, zlab_folder: Path) -> None:
        shard(zlab_folder)
        (zlab_folder / "model.safetensors.index.json").write_text(index)
        assert error_of(zlab_folder).path.name == "model.safetensors.index.json"


def test_stray_weights_that_vllm_would_load(zlab_folder: Path) -> None:
    weights = (zlab_folder / "model.safetensors").read_bytes()
    (zlab_folder / "older.safetensors").write_bytes(weights)
    assert error_of(zlab_folder).field == "older.safetensors"


def test_a_target_in_place_of_the_drafter(zlab_folder: Path) -> None:
    edit_config(zlab_folder, lambda c: c.update(architectures=["Qwen3ForCausalLM"]))
    error = error_of(zlab_folder)
    assert "architectures is ['Qwen3ForCausalLM']" in str(error)
    assert "are target and drafter swapped?" in str(error)
