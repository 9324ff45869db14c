"""RejectionSampler fails if a request has logprob_token_ids, with and without drafts."""

import torch
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
settings = dict.fromkeys(("temperature", "top_p", "top_k", "prompt_token_ids"))
settings |= dict.fromkeys(("frequency_penalties", "presence_penalties"), torch.zeros(2))
settings |= {"repetition_penalties": torch.ones(2), "no_penalties": True, "output_token_ids": []}
settings |= {"allowed_token_ids_mask": None, "bad_words_token_ids": {}, "generators": {}}
settings |= {"all_greedy": True, "all_random": False, "logitsprocs": LogitsProcessors()}
fixed = 0
for drafts in [[], []], [[4], [5]]:  # of two requests
    step = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    for chosen in None, {0: [3, 4]}:
        sampling = SamplingMetadata(max_num_logprobs=2, logprob_token_ids=chosen, **settings)
        logits = torch.randn(2 + sum(map(len, drafts)), 320)
        try:
            output = RejectionSampler(Sampler())(step, None, logits, sampling)
            answer = f"log-probabilities {tuple(output.logprobs_tensors.logprobs.shape)}"
            fixed += chosen is not None
        except RuntimeError as error:
            answer = f"{type(error).__name__} {error}"
        print(f"drafts {drafts}, logprob_token_ids {chosen}: {answer}")
print("expected: log-probabilities in every case")
if fixed:
    raise SystemExit("fixed")
