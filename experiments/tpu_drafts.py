"""Compare the drafts of tpu-inference's DFlash with the reference.

The target writes greedy answers with transformers. Then both implementations draft at the same
places: the reference in `leadout.dflash`, and the JAX model of tpu-inference in an environment of
its own, on a CPU (`tpu_drafts_jax.py` says which one call is replaced there). Rows have prompts
and steps of different lengths, so that the paged cache of the JAX model is filled as on a server.
The drafter is compared as tpu-inference reads it, with the overrides that correct its rotary
embedding, and with the wide heads that the kernels of TPUs need.

    python experiments/tpu_drafts.py TARGET DRAFTER --python PYTHON --out results/tpu/drafts.json

PYTHON is the interpreter of the other environment; docs/howto/tpus.md says how to make it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import ROOT, write_result
from leadout.checkpoints import load_drafter, read_checkpoint
from leadout.checkpoints.widen import widen_heads
from leadout.dflash.drafter import Drafter
from leadout.dflash.generate import generate
from leadout.dflash.propose import BlockProposer
from leadout.dflash.target import Target

SCRIPT = ROOT / "experiments" / "tpu_drafts_jax.py"
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers and returns the sum.",
    "A farmer has 12 apples and gives 5 away. How many are left? Explain your answer.",
    "Write a short poem about the sea.",
)
# Tokens committed in each step, by row: what verification of a block may accept.
COUNTS = ((1, 3, 2, 8), (4, 1, 8, 2), (8, 2, 1, 5), (2, 8, 3, 1), (3, 5, 4, 6))
DTYPES = ("bfloat16", "float32")
KERNEL_HEAD_DIM = 128  # of which tpu-inference has a bidirectional kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    target, drafter, python = arguments.target, arguments.drafter, arguments.python
    with tempfile.TemporaryDirectory() as scratch:
        wide = Path(scratch) / "wide"
        widen_heads(drafter, wide, "zlab", KERNEL_HEAD_DIM)
        overrides = rope_overrides(drafter)
        arms = {
            "stock": Arm(drafter, {}),
            "overrides": Arm(drafter, overrides),
            "overrides and wide heads": Arm(wide, overrides),
        }
        found = compare(target, arms, python)
    write_result(arguments.out, {"arms": found}, target=target, drafter=drafter)


def rope_overrides(drafter: Path) -> dict[str, Any]:
    """`--hf-overrides` for a target without scaled positions that make tpu-inference 0.32 right.

    It looks for a field `rope_theta`, which configs of transformers 5 do not have, and takes their
    `rope_parameters` for a scaling, whose factor is 8 unless `scale_factor` is stated.
    """
    theta = read_checkpoint(drafter).config.rope.theta
    parameters = {"rope_type": "default", "rope_theta": theta, "scale_factor": 1.0}
    return {"rope_theta": theta, "rope_parameters": parameters}


class Arm(NamedTuple):
    drafter: Path
    hf_overrides: dict[str, Any]


def compare(target: Path, arms: dict[str, Arm], python: Path) -> dict[str, Any]:
    """For each arm, the drafts of both implementations and what differs."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / str(number) for number, name in enumerate(arms)}
        expected = {name: _ask(target, model.eval(), arms[name], folders[name]) for name in arms}
        ended = subprocess.run([python, SCRIPT, *folders.values()], capture_output=True, text=True)
        if ended.returncode != 0:
            raise RuntimeError(f"{SCRIPT.name} failed:\n{ended.stderr[-3000:]}")
        return {name: _answer(arm, expected[name], folders[name]) for name, arm in arms.items()}


def _ask(target: Path, model: Any, arm: Arm, folder: Path) -> Tensor:
    """Write what the JAX model needs; the reference's logits [steps, rows, K, vocab]."""
    drafter = load_drafter(arm.drafter, torch.float32)
    reads = Target(model, drafter.config.target_layer_ids)
    texts, counts, anchors = _schedule(target, reads)
    with torch.no_grad():
        states = [reads.states(torch.tensor([text]))[0] for text in texts]  # each [T, taps * H]
        head = reads.head(torch.eye(reads.hidden_size)).T  # [vocab, H]
    folder.mkdir()
    request = {
        "target": str(target.resolve()),
        "drafter": str(arm.drafter.resolve()),
        "draft_tokens": drafter.config.max_draft_tokens,
        "hf_overrides": arm.hf_overrides,
        "max_length": max(map(len, texts)) + drafter.config.block_size,
        "counts": counts.tolist(),
        "anchors": anchors.tolist(),
    }
    (folder / "request.json").write_text(json.dumps(request))
    tensors = {f"states.{row}": each.contiguous() for row, each in enumerate(states)}
    weights = {"embedding": reads.embedding.detach().clone(), "head": head.contiguous()}
    save_file(tensors | weights, folder / "inputs.safetensors")
    return _reference_logits(drafter, reads, states, counts, anchors)


def _answer(arm: Arm, expected: Tensor, folder: Path) -> dict[str, Any]:
    config, found = read_checkpoint(arm.drafter).config, load_file(folder / "outputs.safetensors")
    return {
        "jax": json.loads((folder / "facts.json").read_text()),
        "hf_overrides": arm.hf_overrides,
        "head_dim": config.head_dim,
        "rope_theta": config.rope.theta,
        "blocks": expected[..., 0, 0].numel(),
        "drafts": expected[..., 0].numel(),
        "by_dtype": {dtype: _difference(expected, found, dtype) for dtype in DTYPES},
    }


def _schedule(target: Path, reads: Target) -> tuple[list[list[int]], Tensor, Tensor]:
    """Texts of the target, states to commit [steps, rows], and the anchors after them."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in PROMPTS
    ]
    counts = torch.tensor([[len(prompt) for prompt in prompts], *COUNTS])  # [steps, rows]
    longest = int(counts[1:].sum(dim=0).max()) + 1
    answers = generate(reads, None, prompts, max_new_tokens=longest)
    texts = [[*p, *answer.tokens] for p, answer in zip(prompts, answers, strict=True)]
    places = counts.cumsum(dim=0)
    anchors = [[text[at] for text, at in zip(texts, row, strict=True)] for row in places.tolist()]
    return texts, counts, torch.tensor(anchors)


def _reference_logits(
    drafter: Drafter, target: Target, states: list[Tensor], counts: Tensor, anchors: Tensor
) -> Tensor:
    """[steps, rows, K, vocab]"""
    rows = len(states)
    proposer = BlockProposer(drafter, target, rows)
    starts = torch.zeros(rows, dtype=torch.int64)
    found = []
    for count, anchor in zip(counts, anchors, strict=True):
        new = torch.zeros(rows, int(count.max()), states[0].shape[-1])
        for row in range(rows):
            new[row, : count[row]] = states[row][starts[row] : starts[row] + count[row]]
        with torch.no_grad():
            proposer.commit(new, count)
            found.append(proposer.block_logits(anchor, drafter.config.max_draft_tokens))
        starts = starts + count
    return torch.stack(found)


def _difference(reference: Tensor, found: dict[str, Tensor], dtype: str) -> dict[str, float]:
    drafts, logits = found[f"{dtype}.drafts"].long(), found[f"{dtype}.logits"]
    assert torch.equal(drafts, logits.argmax(dim=-1))
    equal = drafts == reference.argmax(dim=-1)  # [steps, rows, K]
    # How much less likely the reference finds a draft that differs than its own.
    behind = reference.amax(dim=-1) - reference.gather(-1, drafts[..., None])[..., 0]
    scale = float(reference.std())
    return {
        "equal_drafts": int(equal.sum()),
        "largest_logit_error": float((logits - reference).abs().max()) / scale,
        "largest_gap_of_a_different_draft": float(behind.max()) / scale,
    }


if __name__ == "__main__":
    main()
