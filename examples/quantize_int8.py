"""A copy of a model with int8 weights and activations (W8A8), in the format of compressed-tensors.

    python examples/quantize_int8.py MODEL_FOLDER DESTINATION

Weights of the decoder layers' matrices get one scale per output row, activations one per token
while the model runs; embeddings, norms and head stay as they are. For dense models: routers of
mixtures of experts would have to be named under `ignore`. vLLM serves the copy as any model. On
processors with VNNI instructions its matrix products are faster than in float32 or bfloat16.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values [out, in] and their scales [out, 1]."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
    return (weight / scales).round().to(torch.int8), scales


def quantize(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder and renamed, so that the destination is always complete.
    scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        model = scratch / "model"
        shutil.copytree(source, model, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a dict)
                    tensor = weights.get_tensor(name)
                    if ".layers." in name and name.endswith("_proj.weight"):
                        scale = name.removesuffix("weight") + "weight_scale"
                        tensors[name], tensors[scale] = quantized(tensor)
                    else:
                        tensors[name] = tensor
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        config = json.loads((model / "config.json").read_text())
        config["quantization_config"] = QUANTIZATION
        (model / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        model.rename(destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        sys.exit("usage: python examples/quantize_int8.py MODEL_FOLDER DESTINATION")
    source, destination = Path(sys.argv[1]), Path(sys.argv[2])
    if destination.exists():
        sys.exit(f"{destination} exists already; name a new folder or remove it first")
    if not any(source.glob("*.safetensors")):
        sys.exit(f"{source} has no .safetensors files; name the folder of a model")
    quantize(source, destination)
    print(f"wrote {destination}")
