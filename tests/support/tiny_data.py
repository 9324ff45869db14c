"""A data folder for the tiny chat target, with answers from the reference decoder."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from leadout.data.manifest import (
    DataFolder,
    Job,
    Manifest,
    Sampling,
    manifest_path,
    shard_path,
)
from leadout.dflash import verify
from leadout.dflash.generate import GREEDY, generate
from leadout.dflash.target import Target
from leadout.models import fingerprint
from leadout.shards import Sample, ShardWriter
from support.tiny_chat import END_OF_TEXT, END_OF_TURN, write_tiny_chat_target

SOURCES = ("asked", "self")
STOPS = (END_OF_TURN, END_OF_TEXT)
WARM = verify.Sampling(temperature=1.0)
BATCH = 32
SMALL = 0.25


def write_predictable_target(folder: Path, seed: int = 0) -> Path:
    """The tiny chat target with small weights: its text repeats, so a drafter can learn it."""
    write_tiny_chat_target(folder, seed)
    path = folder / "model.safetensors"
    weights = {
        name: tensor * (SMALL if tensor.dim() == 2 else 1)
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@functools.lru_cache(maxsize=1)
def loaded(folder: Path, layer_ids: tuple[int, ...] = (1, 2, 3)) -> Target:
    """The target in a folder, loaded in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Target(model.eval().requires_grad_(False), layer_ids)


def write_tiny_data(
    folder: Path, target: Path, *, prompts: int = 40, new_tokens: int = 24, seed: int = 0
) -> DataFolder:
    """Greedy answers to random prompts of two sources, and sampled ones to every third prompt."""
    draw = random.Random(seed)
    asked = [[draw.randrange(250) for _ in range(draw.randrange(6, 14))] for _ in range(prompts)]
    names = [f"{SOURCES[number % 2]}/{number}" for number in range(prompts)]
    again = range(0, prompts, 3)
    samples = [
        *_answers(target, [f"{name}#0/0" for name in names], asked, 0.0, new_tokens),
        *_answers(
            target, [f"{names[n]}#1/0" for n in again], [asked[n] for n in again], 1.0, new_tokens
        ),
    ]
    write_data(folder, target, samples)
    return DataFolder(folder)


def write_data(folder: Path, target: Path, samples: list[Sample]) -> None:
    with ShardWriter(shard_path(folder, 1, 1)) as writer:
        for sample in samples:
            writer.append(sample)
    manifest = Manifest(job=_job(target), part=1, complete=True, counts={}, skipped=0, versions={})
    manifest.write(manifest_path(folder, 1, 1))


def _answers(
    target: Path, ids: list[str], prompts: list[list[int]], temperature: float, new_tokens: int
) -> list[Sample]:
    completions = generate(
        loaded(target),
        None,
        prompts,
        max_new_tokens=new_tokens,
        sampling=WARM if temperature else GREEDY,
        stop_tokens=STOPS,
        batch_size=BATCH,
    )
    return [
        Sample(
            id=name,
            source=name.partition("/")[0],
            prompt=prompt,
            response=completion.tokens,
            temperature=temperature,
        )
        for name, prompt, completion in zip(ids, prompts, completions, strict=True)
    ]


def _job(target: Path) -> Job:
    sampling = Sampling(
        greedy_share=0.75,
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=24,
        max_length=256,
        samples_per_prompt=1,
        seed=0,
    )
    return Job(
        target="tiny",
        target_fingerprint=fingerprint(target),
        tokenizer_hash="t",
        template_hash="c",
        thinking=None,
        sources=list(SOURCES),
        prompts_hash="p",
        limit=None,
        dtype="float32",
        sampling=sampling,
        parts=1,
    )
