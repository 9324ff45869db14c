"""On CPUs, top_k without top_p fails in a step that has no drafts to verify."""

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

logits = torch.empty(0, 320)  # RejectionSampler: the logits of no drafts
top_k = torch.empty(0, dtype=torch.int32)

found = apply_top_k_top_p_pytorch(logits, top_k, torch.empty(0), allow_cpu_sync=True)
print("with top_p: ", tuple(found.shape))
try:
    found = apply_top_k_top_p_pytorch(logits, top_k, None, allow_cpu_sync=True)
except RuntimeError as error:
    print("top_k alone:", type(error).__name__, str(error).splitlines()[0])
    print("expected:    (0, 320)")
else:
    raise SystemExit("fixed")
