"""On CPUs, a temperature and a seed end the engine if a prompt is computed in parts."""

import os
import tempfile
import traceback

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

from transformers import LlamaConfig
from vllm import LLM, SamplingParams

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 320}
sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
with tempfile.TemporaryDirectory() as folder:
    LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    few = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    tiny = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True}
    llm = LLM(folder, enforce_eager=True, **few, **tiny)
params = SamplingParams(temperature=0.9, seed=1, max_tokens=4, detokenize=False)
for tokens in 50, 200:
    try:
        llm.generate([{"prompt_token_ids": list(range(tokens))}], params, use_tqdm=False)
        print(f"a prompt of {tokens} tokens: answered")
    except RuntimeError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"a prompt of {tokens} tokens: {type(error).__name__} {error}")
        print(f"  in {where.name}: {where.line}")
        break
else:
    raise SystemExit("fixed")
print("expected: both are answered")
