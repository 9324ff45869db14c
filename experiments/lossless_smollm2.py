"""Show that reference decoding is lossless: the same text with and without speculation.

Greedy decoding in float32. Arms: each batch size, with a drafter of random weights (nearly all
drafts are rejected) and with an oracle that knows the text (all drafts are accepted, so the
acceptance length must be the block size). Writes one JSON file and fails if any token differs.

    python experiments/lossless_smollm2.py TARGET PROMPTS... --out results/lossless/smollm2.json

PROMPTS are files with one `{"turns": ["...", ...]}` per line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import provenance
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.drafter import Drafter
from leadout.dflash.generate import GREEDY, Completion, acceptance_length, decode, generate
from leadout.dflash.propose import BlockProposer, Proposal, Proposer
from leadout.dflash.target import Target

BLOCK_SIZE = 8
Prompts = Sequence[Sequence[int]]


class Oracle:
    """Drafts exactly the text that plain decoding generated."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = torch.tensor(texts)  # [batch, length]
        self._place: Tensor | None = None  # [batch] index of each anchor in its text

    def commit(self, states: Tensor, counts: Tensor) -> None:
        # The first commit is the prompt; the anchor is then the first token of the text.
        self._place = torch.zeros_like(counts) if self._place is None else self._place + counts

    def propose(self, anchors: Tensor, count: int) -> Proposal:
        assert self._place is not None
        ahead = self._place[:, None] + 1 + torch.arange(count)
        return Proposal(self._texts.gather(1, ahead), None)

    def keep_rows(self, index: Tensor) -> None:
        assert self._place is not None
        self._texts, self._place = self._texts[index], self._place[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("prompt_files", type=Path, nargs="+", metavar="PROMPTS")
    parser.add_argument(
        "--prompts", type=int, default=100, help="in total, taken from the files in turn"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    target = Target(model, layer_ids=_spread(model.config.num_hidden_layers))
    prompts = _read_prompts(arguments.target, arguments.prompt_files, arguments.prompts)
    # The oracle needs text beyond the limit to fill its last block.
    longer = arguments.tokens + BLOCK_SIZE

    def write_plainly(batch: Prompts, _: int) -> list[Completion]:
        return generate(target, None, batch, max_new_tokens=longer, batch_size=len(batch))

    plain = _in_batches(8, prompts, write_plainly, "plain")
    texts = [completion.tokens for completion in plain]
    drafter = _random_drafter(target, model.config.max_position_embeddings)

    arms = []
    for batch_size, kind in itertools.product(arguments.batch_sizes, ("random", "oracle")):

        def speculate(batch: Prompts, start: int, kind: str = kind) -> list[Completion]:
            known = texts[start : start + len(batch)]
            proposer: Proposer = (
                Oracle(known) if kind == "oracle" else BlockProposer(drafter, target, len(batch))
            )
            return decode(
                target,
                proposer,
                batch,
                max_new_tokens=arguments.tokens,
                draft_tokens=BLOCK_SIZE - 1,
                sampling=GREEDY,
                stop_tokens=(),
                generator=torch.Generator(),
            )

        started = time.perf_counter()
        done = _in_batches(batch_size, prompts, speculate, f"{kind}, batch {batch_size}")
        equal = sum(
            completion.tokens == text[: arguments.tokens]
            for completion, text in zip(done, texts, strict=True)
        )
        arms.append(
            {
                "drafter": kind,
                "batch_size": batch_size,
                "prompts": len(prompts),
                "tokens": arguments.tokens,
                "equal_texts": equal,
                "acceptance_length": acceptance_length(done),
                "seconds": round(time.perf_counter() - started, 1),
            }
        )

    result = {
        "provenance": provenance(target=arguments.target),
        "prompt_sets": [file.stem for file in arguments.prompt_files],
        "block_size": BLOCK_SIZE,
        "arms": arms,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    wrong = [arm for arm in arms if arm["equal_texts"] != len(prompts)]
    wrong += [a for a in arms if a["drafter"] == "oracle" and a["acceptance_length"] != BLOCK_SIZE]
    if wrong:
        sys.exit(f"not lossless: {wrong}")
    print(f"lossless in {len(arms)} arms; wrote {arguments.out}")


def _read_prompts(target: Path, files: Sequence[Path], count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(target)
    sets = [[json.loads(line)["turns"][0] for line in file.open()] for file in files]
    in_turn = [turn for turns in zip(*sets, strict=False) for turn in turns]
    if len(in_turn) < count:
        sys.exit(f"--prompts {count}: the {len(files)} files have only {len(in_turn)}")
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": turn}], add_generation_prompt=True
            )["input_ids"]
        )
        for turn in in_turn[:count]
    ]


def _in_batches(
    size: int,
    prompts: Prompts,
    run: Callable[[Prompts, int], list[Completion]],
    label: str,
) -> list[Completion]:
    """Call `run` for batches of prompts, with the index of the first prompt of each."""
    done: list[Completion] = []
    for start in track(range(0, len(prompts), size), description=label):
        done += run(prompts[start : start + size], start)
    return done


def _spread(layers: int) -> tuple[int, ...]:
    return tuple(round(1 + i * (layers - 4) / 4) for i in range(5))


def _random_drafter(target: Target, positions: int) -> Drafter:
    torch.manual_seed(0)
    return Drafter(
        DrafterConfig(
            hidden_size=target.hidden_size,
            intermediate_size=2 * target.hidden_size,
            num_heads=target.hidden_size // 64,
            num_kv_heads=target.hidden_size // 64,
            head_dim=64,
            layers=(LayerAttention(), LayerAttention()),
            rope=Rope(theta=10_000.0),
            max_positions=positions,
            target_layer_ids=target.layer_ids,
            vocab_size=target.vocab_size,
            mask_token_id=0,
            block_size=BLOCK_SIZE,
        )
    )


if __name__ == "__main__":
    main()
