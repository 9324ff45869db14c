"""How far a target's hidden states move when the same text is read in passes of other lengths.

    python experiments/quantized_rounding.py QUANTIZED_TARGET OTHER_TARGET

There is no drafter: a server in float32, without a prefix cache, reads texts whole and their first
halves alone. With causal attention the first half has the same states both times, but for rounding.
`leadout check` must allow at least that much between a target with drafts and one without. Writes
results/check/rounding.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from common import ROOT, write_result
from leadout.check.parity import allowed_in_states, distances
from leadout.data.chat import Chat
from leadout.evaluate.blocks import TrainingSequence
from leadout.evaluate.prompts import check_prompts
from leadout.evaluate.reference import reference_target, rounding_of
from leadout.pairing import read_target
from leadout.pairing.target import spread_layer_ids

RESULT = ROOT / "results" / "check" / "rounding.json"
TEXTS_PER_SET, LONGEST = 4, 400
NO_CACHE = ("--no-enable-prefix-caching",)
EXACT = torch.float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("quantized", type=Path)
    parser.add_argument("other", type=Path)
    arguments = parser.parse_args()
    found = {
        "quantized": measured(arguments.quantized),
        "not quantized": measured(arguments.other),
    }
    write_result(RESULT, found, quantized=arguments.quantized, other=arguments.other)


def measured(target: Path) -> dict[str, Any]:
    """The mean distance of the states of a text, by layer: that of the text where it is largest."""
    prompts = check_prompts((), Chat(target, None), LONGEST, TEXTS_PER_SET)
    texts = [prompt for part in prompts.values() for prompt in part]
    layers = spread_layer_ids(read_target(target).num_layers)
    states = dict.fromkeys(layers, 0.0)
    rounding = rounding_of(target, EXACT)
    with reference_target(
        target, layers, EXACT, longest=LONGEST, served=True, vllm_flags=NO_CACHE
    ) as reference:
        source = reference.source(layers)
        for number, text in enumerate(texts):
            half = len(text) // 2
            whole, first = (
                source.observe([(2 * number + place, sequence(part))]).states[0, :half]
                for place, part in enumerate((text, text[:half]))
            )
            for layer, one, other in zip(
                layers, whole.chunk(len(layers), 1), first.chunk(len(layers), 1), strict=True
            ):
                states[layer] = max(states[layer], float(distances(one, other).mean()))
    return {
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "states": states,
        "allowed": {layer: allowed_in_states(layer, rounding) for layer in layers},
    }


def sequence(tokens: list[int]) -> TrainingSequence:
    return TrainingSequence(f"text of {len(tokens)}", "", torch.tensor(tokens), 1)


if __name__ == "__main__":
    main()
