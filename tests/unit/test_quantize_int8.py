"""examples/quantize_int8.py: a copy with int8 matrices that is close to the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from support.models import ROOT

SCRIPT = ROOT / "examples" / "quantize_int8.py"


@pytest.fixture
def folder(tiny_qwen3: PreTrainedModel, tmp_path: Path) -> Path:
    tiny_qwen3.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_matrices_are_int8_and_the_rest_is_unchanged(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "int8"
    subprocess.run([sys.executable, SCRIPT, folder, copy], check=True)
    config = json.loads((copy / "config.json").read_text())
    assert config.pop("quantization_config")["ignore"] == ["lm_head"]
    assert config == json.loads((folder / "config.json").read_text())
    weights, quantized = (
        load_file(folder / "model.safetensors"),
        load_file(copy / "model.safetensors"),
    )
    matrices = {name for name, tensor in quantized.items() if tensor.dtype == torch.int8}
    assert matrices == {name for name in weights if name.endswith("_proj.weight")}
    for name in matrices:
        scale = quantized.pop(f"{name}_scale")  # [out, 1]
        error = (quantized[name].float() * scale - weights[name].float()).abs()
        assert (error <= scale / 2 + 1e-6).all()
        assert quantized[name].abs().amax(dim=1).eq(127).all()
    assert quantized.keys() == weights.keys()
    assert all(torch.equal(quantized[name], weights[name]) for name in weights.keys() - matrices)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, tmp_path, tmp_path / "int8"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "has no .safetensors files; name the folder of a model" in ended.stderr
    assert not (tmp_path / "int8").exists()


def test_an_existing_folder_is_left_alone(folder: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, folder, tmp_path], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "exists already; name a new folder" in ended.stderr
