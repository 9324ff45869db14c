"""On CPUs, DFlash normalizes the context keys of all layers by the first layer's weight."""

from types import SimpleNamespace

import torch
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform

current_platform.import_kernels()
torch.manual_seed(0)
eps = 1e-6
keys = torch.randn(3, 5, 2, 64)  # layers, tokens, heads, size of a head
weights = torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 64).contiguous()  # k_norm by layer

model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=eps)
found = DFlashQwen3Model._normalize_context_k(model, keys)
unscaled = keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + eps)
scales = [(found[layer] / unscaled[layer]).mean().item() for layer in range(3)]
print("weight of each layer that was used:", [round(scale, 2) for scale in scales])
print("expected:                          ", weights[:, 0].tolist())
if torch.allclose(found, unscaled * weights[:, None, None], atol=1e-4):
    raise SystemExit("fixed")
