"""A tiny target whose traffic changes: text that its drafter knows, and text that it does not.

Every source has its own language, in which each word follows from the one before, so a drafter
learns it in seconds. The target did not write that text; it takes the place of recorded answers,
on which drafters are compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

from leadout.check.result import Lossless
from leadout.checkpoints import load_drafter
from leadout.data.manifest import DataFolder
from leadout.dflash.generate import generate
from leadout.engine.capture_store import INFO, SOURCE, CaptureInfo, sample_id, segment_name
from leadout.evaluate.blocks import Split, split
from leadout.evaluate.ranks import Ranks
from leadout.learn.cycle import start_registry
from leadout.models import fingerprint
from leadout.registry import Registry
from leadout.shards import Sample, Samples, ShardWriter
from leadout.train.config import TrainConfig
from leadout.train.export import SETTINGS, write_best
from leadout.train.run import Corpus, Run, complete_settings
from support.models import TINY_VOCAB
from support.tiny_chat import MASK_TOKEN
from support.tiny_data import SOURCES, loaded, write_data, write_predictable_target

ALONE = Ranks(0, 1, torch.device("cpu"))
WORDS, ANSWER = 16, 24
KNOWN = 100  # sequences of each source
NEW = len(SOURCES)  # the language of the traffic, of which the drafter has seen a little
SEEN = 25
NOISE = 0.1  # share of random words, which no drafter can predict
STARTED = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
SETTINGS_OF_FIRST = TrainConfig(
    layers=1,
    block_size=5,
    mask_token_id=MASK_TOKEN,
    max_length=64,
    anchors=12,
    batch_sequences=8,
    micro_tokens=2048,
    learning_rate=5e-3,
    epochs=4,
    precision="float32",
    validation_sequences=30,
    validate_every=1000,
    save_every=5,
)


@dataclass(frozen=True, slots=True)
class World:
    """A served target, its drafter, and the drafter's training data."""

    target: Path
    data: DataFolder
    drafter: Path


def make_world(folder: Path, epochs: float = SETTINGS_OF_FIRST.passes) -> World:
    target = write_predictable_target(folder / "target")
    known = [
        sample.model_copy(update={"id": f"{source}/{number}#0/0", "source": source})
        for language, source in enumerate(SOURCES)
        for number, sample in enumerate(requests(language, KNOWN))
    ]
    write_data(folder / "data", target, known)
    data = DataFolder(folder / "data")
    samples, first = data.samples(), SETTINGS_OF_FIRST.model_copy(update={"epochs": epochs})
    trained = split(samples.facts, first.max_length, first.validation_sequences).train
    text = [*(samples[i] for i in trained), *requests(NEW, SEEN, first=500)]
    drafter = train(target, folder / "first", text, "random", first)
    first.write(drafter / SETTINGS)
    return World(target, data, drafter)


def start(world: World, folder: Path) -> Registry:
    """Create a registry that serves the world's drafter."""
    start_registry(str(world.target), folder, str(world.drafter))
    return Registry(folder)


def requests(language: int, count: int, first: int = 0, temperature: float = 0.0) -> list[Sample]:
    """Captured requests in one of the languages, one second apart."""
    draw = random.Random(f"{language} {first}")
    words = random.Random(language).sample(range(250), WORDS)
    found = []
    for number in range(first, first + count):
        place = draw.randrange(WORDS)
        answer = [
            draw.randrange(250) if draw.random() < NOISE else words[(place + step) % WORDS]
            for step in range(ANSWER)
        ]
        found.append(
            Sample(
                id=sample_id(STARTED + timedelta(seconds=number), f"request-{number}"),
                source=SOURCE,
                prompt=[draw.randrange(250) for _ in range(draw.randrange(6, 14))],
                response=answer,
                temperature=temperature,
            )
        )
    return found


def write_capture(folder: Path, target: Path, samples: Sequence[Sample], segments: int = 2) -> Path:
    """Write traffic as a server captures it."""
    folder.mkdir()
    info = CaptureInfo(target="tiny", target_fingerprint=fingerprint(target))
    (folder / INFO).write_text(info.model_dump_json())
    size = -(-len(samples) // segments)
    for number in range(segments):
        name = segment_name(STARTED + timedelta(seconds=number), process=4711)
        with ShardWriter(folder / name) as writer:
            for sample in samples[number * size : (number + 1) * size]:
                writer.append(sample)
    return folder


def lossless_by_reference(target: Path, drafter: Path, samples: Sequence[Sample]) -> Lossless:
    """Compare greedy answers with and without the drafter, by the reference decoder."""
    model = load_drafter(drafter, torch.float32)
    seen = loaded(target, model.config.target_layer_ids)
    prompts = [sample.prompt for sample in samples]
    with_drafts, without = (
        [found.tokens for found in generate(seen, each, prompts, max_new_tokens=12)]
        for each in (model, None)
    )
    assert with_drafts == without
    count = len(samples)
    return Lossless(texts=count, equal_texts=count, divergences=[], largest_allowed_gap=0.0)


def train(
    target: Path, out: Path, samples: Sequence[Sample], initial: str | Path, settings: TrainConfig
) -> Path:
    """Train a drafter on all of these samples."""
    with ShardWriter(out / "samples.jsonl") as writer:
        for sample in samples:
            writer.append(sample)
    found = Samples([writer.path])
    counts = torch.zeros(TINY_VOCAB, dtype=torch.int64)
    lengths = [len(sample.prompt) + len(sample.response) for sample in found]
    answers = [len(sample.response) for sample in found]
    corpus = Corpus(found, Split(list(range(len(found))), [0]), lengths, answers, counts, "")
    config = complete_settings(
        settings.model_copy(update={"initial": str(initial)}), target, corpus, TINY_VOCAB
    )
    run = Run(target, corpus, config, out, ALONE)
    run.train(lambda _: None)
    return write_best(run, out / "drafter", "zlab", "tiny")
