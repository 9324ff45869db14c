"""Acceptance length of a drafter on prompt sets: served by vLLM, and predicted.

    python experiments/train_acceptance.py TARGET DRAFTER PROMPTS.jsonl ... --out FILE

Greedy, K = B-1, the first turn of each prompt through the target's chat template. `predicted` is
computed offline for the texts that were served, with an interval over texts; it shows that engine
and reference agree. `ahead` is a prediction in earnest: the acceptance computed on every second
text, and what vLLM accepts on the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track

from leadout.checkpoints import load_drafter
from leadout.data.chat import Chat
from leadout.data.prompts import read_prompts, source_name
from leadout.engine.offline import TextEngine, TextRequest
from leadout.evaluate.acceptance import (
    AcceptedDrafts,
    DraftHead,
    accepted_drafts,
    along_decoding,
    summarise,
)
from leadout.evaluate.blocks import BlockForward, TrainingSequence
from leadout.evaluate.hidden_states import StateSource
from leadout.evaluate.reference import reference_target
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.models import fingerprint
from leadout.provenance import Provenance, RunStart
from leadout.stats import Interval, ratio_interval

DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
MAX_LENGTH = 2048


def main() -> None:
    started = RunStart.now()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--count", type=int, default=40, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    served = serve(arguments)
    predicted = predict(arguments, served)
    for name, found in served.items():
        del found["texts"]
        found.update(predicted[name])
        found["difference"] = abs(found["predicted"] / found["served"] - 1)
        found["ahead"]["served"] = found.pop("served_second_half")
    models = {"target": arguments.target, "drafter": arguments.drafter}
    made = Provenance.of_this_run({r: fingerprint(f) for r, f in models.items()}, started)
    result = {
        "provenance": made.model_dump(),
        "sets": served,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for name, found in served.items():
        print(f"{name:12} served {found['served']:.3f}  predicted {found['predicted']:.3f}")


def serve(arguments: Any) -> dict[str, dict[str, Any]]:
    chat = Chat(arguments.target)
    count = load_drafter(arguments.drafter).config.max_draft_tokens
    engine = TextEngine(
        str(arguments.target),
        max_length=MAX_LENGTH,
        max_requests=16,
        dtype=arguments.dtype,
        drafter=str(arguments.drafter),
        draft_tokens=count,
    )
    found: dict[str, dict[str, Any]] = {}
    for source in track(arguments.prompts, description="served"):
        name = source_name(source)
        tokens = [chat.prompt(prompt.turns[:1]) for prompt in spread(source, arguments.count)]
        tokens = [prompt for prompt in tokens if len(prompt) + arguments.tokens <= MAX_LENGTH]
        halves = [
            complete(engine, [*enumerate(tokens)][first::2], name, arguments.tokens)
            for first in (0, 1)
        ]
        counts = [half.counts for half in halves]
        steps, accepted, *places = (sum(pair) for pair in zip(*counts, strict=True))
        answers = [answer for half in halves for answer in half.answers]
        found[name] = {
            "prompts": len(tokens),
            "tokens": sum(map(len, answers)),
            "served": 1 + accepted / steps,
            "served_second_half": 1 + counts[1][1] / counts[1][0],
            "served_by_position": [place / steps for place in places],
            "texts": [
                list(zip(tokens[first::2], half.answers, strict=True))
                for first, half in enumerate(halves)
            ],
        }
    return found


class Half(NamedTuple):
    """Every second prompt of a set."""

    counts: list[int]  # decoding steps, accepted drafts, accepted drafts at each place
    answers: list[list[int]]


def complete(
    engine: TextEngine, prompts: Sequence[tuple[int, list[int]]], name: str, tokens: int
) -> Half:
    before = numbers(engine)
    asks = [TextRequest(f"{name}/{number}", prompt, tokens) for number, prompt in prompts]
    answers = [list(answer.tokens) for answer in engine.complete(asks)]
    counts = [now - then for now, then in zip(numbers(engine), before, strict=True)]
    return Half(counts, answers)


def spread(source: str, count: int) -> list[Any]:
    """`count` prompts spread over the whole set, because some sets are ordered by kind."""
    prompts = read_prompts([source])
    return [prompts[len(prompts) * i // count] for i in range(min(count, len(prompts)))]


def numbers(engine: TextEngine) -> list[int]:
    counters = engine.counters()
    return [counters[DRAFTS], counters[ACCEPTED], *counters[BY_POSITION]]


def predict(arguments: Any, served: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    precision: torch.dtype = getattr(torch, arguments.dtype)
    drafter = load_drafter(arguments.drafter, precision)
    config = drafter.config
    target_weights = load_target_weights(
        TargetFiles(arguments.target), precision, torch.device("cpu")
    )
    forward = BlockForward(drafter, target_weights.embedding)
    head = DraftHead.of(drafter, target_weights)
    taps = config.target_layer_ids
    with reference_target(arguments.target, taps, precision, longest=MAX_LENGTH) as target:
        source = target.source(taps)
        return {
            name: predicted(forward, head, source, name, each["texts"])
            for name, each in track(served.items(), description="predicted")
        }


def predicted(
    forward: BlockForward, head: DraftHead, source: StateSource, name: str, texts: list[Any]
) -> dict[str, Any]:
    size = forward.drafter.config.block_size
    halves = []
    for part, half in enumerate(texts):
        sequences = [
            TrainingSequence(
                f"{name}/{part}/{i}", name, torch.tensor([*prompt, *answer]), len(prompt)
            )
            for i, (prompt, answer) in enumerate(half)
        ]
        halves.append(accepted_drafts(forward, head, source, list(enumerate(sequences)), size))
    both = [*halves[0], *halves[1]]
    overall, ahead = (summarise(drafts, size).overall for drafts in (both, halves[0]))
    return {
        "predicted": overall.acceptance_length,
        "predicted_interval": interval(both).model_dump(),
        "predicted_by_position": overall.by_position,
        "ahead": {"predicted": ahead.acceptance_length},
    }


def interval(drafts: Sequence[AcceptedDrafts]) -> Interval:
    """The acceptance length over texts."""
    steps = [along_decoding(each.counts) for each in drafts]
    tokens = np.array([sum(each) + len(each) for each in steps], dtype=np.float64)
    return ratio_interval(tokens, np.array([len(each) for each in steps], dtype=np.float64))


if __name__ == "__main__":
    main()
