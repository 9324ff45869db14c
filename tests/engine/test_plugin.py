"""When the plugin changes vLLM, and when it does not."""

import json
import subprocess
import sys

# In a new process, where no plugin has been loaded yet.
THREE_STARTS = """
import json, os, vllm
from vllm import ModelRegistry
from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES
from leadout.engine.plugin import register

def what_is_registered():
    register()
    return [
        ModelRegistry.models["DFlashDraftModel"].module_name,
        SUPPORTED_SPECULATORS_TYPES["dflash"].__module__,
    ]

real = vllm.__version__
os.environ["LEADOUT_PLUGIN"] = "0"
off = what_is_registered()
del os.environ["LEADOUT_PLUGIN"]
vllm.__version__ = "0.33.0"
unsupported = what_is_registered()
vllm.__version__ = real
print("ANSWER", json.dumps([off, unsupported, what_is_registered()]))
"""

STOCK = [
    "vllm.model_executor.models.qwen3_dflash",
    "vllm.transformers_utils.configs.speculators.algos",
]
OURS = ["leadout.engine.draft_model", "leadout.engine.plugin"]


def test_a_disabled_or_unsupported_plugin_leaves_vllm_unchanged() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", THREE_STARTS], capture_output=True, text=True, check=True
    )
    (answer,) = [line for line in ended.stdout.splitlines() if line.startswith("ANSWER ")]
    assert json.loads(answer.removeprefix("ANSWER ")) == [STOCK, STOCK, OURS]
    said = ended.stdout + ended.stderr
    assert said.count("is disabled: it supports vLLM >=0.32,<0.33, this is vLLM 0.33.0") == 1
