"""Per-sequence acceptance of two real candidates, trained one after the other from the shipped one.

    python experiments/gate_noise.py TARGET PROMPTS_FOLDER WORK_FOLDER \
        --out results/learn/gate_noise.json

The target answers prompts of six sets that no drafter was trained on (the base) and requests for
XML tickets (new traffic), greedily. Two cycles train on other tickets for a few steps each, without
replay, so that they lose a little on the base. `gate_cycles.py` takes its noise from this file.
Takes about ten minutes on one core; a second call continues where the first ended.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from common import SHIPPED, write_result
from leadout.checkpoints import load_weights, read_checkpoint, write_checkpoint
from leadout.data.chat import Chat
from leadout.data.prompts import read_prompts
from leadout.evaluate.acceptance import TextAcceptance, acceptance_by_drafter
from leadout.evaluate.blocks import Split
from leadout.evaluate.hidden_states import load_model
from leadout.evaluate.ranks import Ranks
from leadout.learn.config import CycleSettings
from leadout.learn.gate import compare
from leadout.learn.prepare import base_settings, with_steps
from leadout.pairing import read_target
from leadout.shards import Sample, Samples, ShardWriter
from leadout.train.export import write_best
from leadout.train.run import Run, complete_settings, evenly_spaced, make_corpus
from learn_loop import ticket

BASE = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench", "alpaca")
BASE_EACH, BASE_COUNT = 20, 96  # the shortest prompts among some of each set
TICKETS = 24  # measured
TRAINED, STEPS = 16, 2  # tickets to train on, and steps of each of the two cycles
TOKENS, MAX_LENGTH, MAX_PROMPT = 64, 384, 200
BATCH = 32
ALONE = Ranks(0, 1, torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "prompts", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    work: Path = arguments.work
    chat = Chat(arguments.target)
    prompts = prompts_by_part(chat, arguments.prompts)
    counts = {"base": BASE_COUNT, "tickets": TICKETS, "training": TRAINED}
    answers = {
        part: answered(arguments.target, part, prompts[part], count, work)
        for part, count in counts.items()
    }
    drafters = [in_float32(work / "first")]
    for number in (1, 2):
        drafters.append(trained(arguments.target, drafters[-1], answers["training"], work, number))
    measured = [*answers["base"], *answers["tickets"]]
    with torch.inference_mode():
        done = iter(track(measured, description="comparing drafters"))
        found = acceptance_by_drafter(
            arguments.target,
            drafters,
            measured,
            MAX_LENGTH,
            ALONE.device,
            lambda: next(done, None) and None,
        )
    count = len(answers["base"])
    base, traffic = [texts[:count] for texts in found], [texts[count:] for texts in found]
    write_result(
        arguments.out,
        {
            "steps_of_training": STEPS,
            "base_changes": changes(base),
            "traffic_changes": changes(traffic),
            "base": rows(base),
            "traffic": rows(traffic),
        },
        target=arguments.target,
        drafter=SHIPPED,
    )


def changes(by_version: list[list[TextAcceptance]]) -> dict[str, Any]:
    first, second, third = by_version
    pairs = {"1 to 2": (first, second), "2 to 3": (second, third), "1 to 3": (first, third)}
    return {name: compare(*pair).change.model_dump() for name, pair in pairs.items()}


def rows(by_version: list[list[TextAcceptance]]) -> list[dict[str, Any]]:
    """For each sequence its set, and the drafts accepted and the steps of every version."""
    return [
        {
            "set": texts[0].prompt_set,
            "accepted": [sum(text.at_steps) for text in texts],
            "steps": [len(text.at_steps) for text in texts],
        }
        for texts in zip(*by_version, strict=True)
    ]


def prompts_by_part(chat: Chat, folder: Path) -> dict[str, list[tuple[str, list[int]]]]:
    """Prompts with the name of their set; no ticket is in two parts."""
    base = [
        (name, prompt)
        for name in BASE
        for prompt in evenly_spaced(read(chat, folder, name, lambda text: text), BASE_EACH)
    ]
    tickets = read(chat, folder, "shift_train", ticket)
    random.Random(0).shuffle(tickets)
    parts = iter(tickets)
    return {
        "base": base,
        **{
            name: [("tickets", next(parts)) for _ in range(count)]
            for name, count in (("tickets", TICKETS), ("training", TRAINED))
        },
    }


def read(chat: Chat, folder: Path, name: str, change: Any) -> list[list[int]]:
    texts = dict.fromkeys(
        change(prompt.text) for prompt in read_prompts([str(folder / f"{name}.jsonl")])
    )
    found = (chat.prompt([text]) for text in texts)
    return [prompt for prompt in found if len(prompt) <= MAX_PROMPT]


@torch.inference_mode()
def answered(
    target: Path, part: str, prompts: Sequence[tuple[str, list[int]]], count: int, work: Path
) -> list[Sample]:
    """Greedy answers of the target in float32 to the shortest prompts, in batches."""
    path = work / f"{part}.jsonl"
    if not path.exists():
        model: Any = load_model(target, torch.float32)
        end = model.generation_config.eos_token_id
        partial = path.with_suffix(".partial")
        done = {sample.id for sample in Samples([partial])} if partial.exists() else set()
        shortest = sorted(range(len(prompts)), key=lambda place: len(prompts[place][1]))[:count]
        order = [place for place in shortest if sample_id(part, place) not in done]
        with ShardWriter(partial) as writer:
            for start in track(range(0, len(order), BATCH), description=part):
                places = order[start : start + BATCH]
                tokens = [prompts[place][1] for place in places]
                longest = max(map(len, tokens))
                padded = torch.tensor([[end] * (longest - len(row)) + row for row in tokens])
                mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in tokens])
                made = model.generate(
                    padded,
                    attention_mask=mask,
                    max_new_tokens=TOKENS,
                    do_sample=False,
                    pad_token_id=end,
                )
                for place, row in zip(places, made[:, longest:].tolist(), strict=True):
                    response = row[: row.index(end) + 1] if end in row else row
                    name, prompt = prompts[place]
                    writer.append(
                        Sample(
                            id=sample_id(part, place),
                            source=name,
                            prompt=prompt,
                            response=response,
                            temperature=0.0,
                        )
                    )
        partial.rename(path)
    return [
        sample.model_copy(update={"response": sample.response[:TOKENS]})
        for sample in Samples([path])
    ]


def sample_id(part: str, place: int) -> str:
    return f"{part}/{place:04d}#0/0"


def in_float32(folder: Path) -> Path:
    """The shipped drafter with the same weights in float32, in which this experiment computes."""
    if not folder.exists():
        checkpoint = read_checkpoint(SHIPPED)
        weights = {name: tensor.float() for name, tensor in load_weights(checkpoint).items()}
        write_checkpoint(folder, weights, checkpoint.config, checkpoint.format)
        (folder / "training.yaml").write_text((SHIPPED / "training.yaml").read_text())
    return folder


def trained(target: Path, parent: Path, samples: Sequence[Sample], work: Path, number: int) -> Path:
    """Train a drafter as a cycle does, for a few steps."""
    folder = work / f"cycle-{number}"
    out = folder / "drafter"
    if not out.exists():
        path = folder / "samples.jsonl"
        path.unlink(missing_ok=True)
        with ShardWriter(path) as writer:
            for sample in samples:
                writer.append(sample)
        found, checkpoint = Samples([path]), read_checkpoint(parent)
        vocab_size = read_target(target).vocab_size
        places = list(range(len(found)))
        corpus = make_corpus(found, Split(places, places[:4]), MAX_LENGTH, vocab_size, "")
        settings = base_settings(checkpoint, CycleSettings(), MAX_LENGTH, seed=number)
        settings = settings.model_copy(update={"batch_sequences": TRAINED // STEPS})
        settings = complete_settings(settings, target, corpus, vocab_size)
        settings = with_steps(settings, corpus, STEPS, 1)
        run = Run(target, corpus, settings, folder, ALONE, checkpoint.config)
        run.train(lambda event: print(event, flush=True))
        write_best(run, out, checkpoint.format, "SmolLM2-135M-Instruct")
        (out / "training.yaml").write_text((parent / "training.yaml").read_text())
    return out


if __name__ == "__main__":
    main()
