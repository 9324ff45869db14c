"""On CPUs, temperatures and top_k of requests are not expanded to the drafts of a step."""

import torch
from vllm.platforms import current_platform
from vllm.utils.cpu_triton_utils import _expand_kernel_impl

current_platform.import_kernels()
ends = torch.tensor([2, 5, 6], dtype=torch.int32)  # three requests with 2, 3 and 1 drafts
written = []
for name, values in (
    ("temperature", torch.tensor([0.7, 1.0, 0.3])),
    ("top_k", torch.tensor([7, 8, 9], dtype=torch.int32)),
):
    # expand_batch_to_tokens passes uninitialized memory; -1 shows what is written.
    expanded = values.new_full((6,), -1)
    _expand_kernel_impl(expanded, values, ends, 0, 1)
    wanted = values.repeat_interleave(torch.tensor([2, 3, 1]))
    print(f"{name}, {values.dtype}")
    print(f"  found:    {[round(value, 1) for value in expanded.tolist()]}")
    print(f"  expected: {[round(value, 1) for value in wanted.tolist()]}")
    written.append(torch.equal(expanded, wanted))
if any(written):
    raise SystemExit("fixed")
