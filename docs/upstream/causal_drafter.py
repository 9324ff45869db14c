"""Bidirectional DFlash drafters in the speculators format are served causal."""

from types import SimpleNamespace

from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
from vllm.transformers_utils.configs.speculators.algos import update_dflash

# A drafter of full-attention layers. The flag is about sliding windows, of which it has none;
# False is what speculators writes unless told otherwise.
written = {
    "sliding_window_non_causal": False,
    "mask_token_id": 3,
    "aux_hidden_state_layer_ids": [2, 3],
}
read = {"layer_types": ["full_attention", "full_attention"]}
before = [_dflash_layer_causal(SimpleNamespace(**read), layer) for layer in range(2)]
update_dflash(written, read)
causal = [_dflash_layer_causal(SimpleNamespace(**read), layer) for layer in range(2)]
print("causal, by layer:", causal)
print("expected:        ", before, "as without the flag")
if not any(causal):
    raise SystemExit("fixed")
