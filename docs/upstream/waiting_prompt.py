"""Without chunked prefill and with parallel drafting, a prompt that fits max_model_len waits."""

import os
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

from transformers import LlamaConfig
from vllm import LLM, SamplingParams

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 320}
sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
with tempfile.TemporaryDirectory() as folder:
    LlamaConfig(architectures=["LlamaForCausalLM"], pard_token=3, **sizes).save_pretrained(folder)
    draft = {"method": "draft_model", "model": folder, "parallel_drafting": True}
    draft["num_speculative_tokens"] = 4
    few = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 4}
    tiny = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True}
    no_parts = {"enable_chunked_prefill": False}
    llm = LLM(folder, speculative_config=draft, enforce_eager=True, **few, **tiny, **no_parts)
params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
answers = []
for tokens in 100, 126, 50:
    prompt = {"prompt_token_ids": list(range(tokens))}
    llm.llm_engine.add_request(f"{tokens} tokens", prompt, params)
    answers.append(sum(len(llm.llm_engine.step()) for _ in range(100)))
    print(f"a prompt of {tokens} tokens, answers after 100 steps: {answers[-1]}")
print("expected: 1 each")
if answers != [1, 0, 0]:
    raise SystemExit("fixed")
