"""Eight candidates for the gate, of which one should pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from leadout.checkpoints import load_drafter, load_weights, read_checkpoint, write_checkpoint
from leadout.evaluate.blocks import split
from leadout.shards import Sample
from support.drafters import random_drafter
from support.learn_world import NEW, SETTINGS_OF_FIRST, World, requests, train

TRAINED, EVALUATED = 100, 40  # requests
STALE = NEW + 1  # a language of earlier traffic
FASTER = SETTINGS_OF_FIRST.model_copy(update={"learning_rate": 1e-2, "epochs": 3})


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    make: Callable[[World, Path], Path]  # writes it into a folder
    broken_rules: tuple[str, ...]  # the start of each expected reason; none: it should pass


def newest_requests() -> list[Sample]:
    """The requests that only the gate uses."""
    return requests(NEW, EVALUATED, first=1000)


def base_of(world: World) -> list[Sample]:
    """Original data that the world's drafter was not trained on."""
    samples, first = world.data.samples(), SETTINGS_OF_FIRST
    held_out = split(samples.facts, first.max_length, first.validation_sequences).validation
    return [samples[index] for index in held_out]


def overfitted_part() -> list[Sample]:
    """The requests that the overfitted candidate was trained on."""
    return requests(STALE, TRAINED // 2)


def _better(world: World, folder: Path) -> Path:
    text = [*requests(NEW, TRAINED), *_replay(world)]
    return train(world.target, folder, text, world.drafter, FASTER)


def _broken_on_base(world: World, folder: Path) -> Path:
    settings = FASTER.model_copy(update={"learning_rate": 2e-2, "epochs": 5})
    return train(world.target, folder, requests(NEW, TRAINED), world.drafter, settings)


def _overfitted(world: World, folder: Path) -> Path:
    text = [*overfitted_part(), *_replay(world)]
    return train(world.target, folder, text, world.drafter, FASTER)


def _noisy(share: float) -> Callable[[World, Path], Path]:
    def make(world: World, folder: Path) -> Path:
        checkpoint = read_checkpoint(world.drafter)
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: tensor + share * tensor.std() * torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 2
            else tensor
            for name, tensor in load_weights(checkpoint).items()
        }
        write_checkpoint(folder / "drafter", weights, checkpoint.config, "zlab")
        return folder / "drafter"

    return make


def _not_a_number(world: World, folder: Path) -> Path:
    drafter = _noisy(0.0)(world, folder)
    weights = load_weights(read_checkpoint(drafter))
    weights["fc.weight"][3, 5] = torch.nan
    (path,) = drafter.glob("*.safetensors")
    save_file(weights, path, metadata={"format": "pt"})
    return drafter


def _for_another_target(world: World, folder: Path) -> Path:
    config = replace(read_checkpoint(world.drafter).config, vocab_size=512, target_num_layers=8)
    write_checkpoint(folder / "drafter", random_drafter(config).state_dict(), config, "zlab")
    return folder / "drafter"


def _random(world: World, folder: Path) -> Path:
    config = load_drafter(world.drafter).config
    write_checkpoint(folder / "drafter", random_drafter(config).state_dict(), config, "zlab")
    return folder / "drafter"


def _replay(world: World) -> Sequence[Sample]:
    samples, first = world.data.samples(), SETTINGS_OF_FIRST
    known = split(samples.facts, first.max_length, first.validation_sequences).train
    return [samples[index] for index in known[:TRAINED]]


CANDIDATES = (
    Candidate("better", _better, ()),
    Candidate("equal", _noisy(1e-4), ("traffic",)),
    Candidate("slightly worse", _noisy(0.1), ("traffic",)),
    Candidate("better on new, broken on base", _broken_on_base, ("base", "base, ")),
    Candidate("NaN", _not_a_number, ("weights-",)),
    Candidate("other target", _for_another_target, ("target-layers", "vocabulary", "shape")),
    Candidate("random", _random, ("traffic", "base")),
    Candidate("overfitted to the training part", _overfitted, ("traffic", "base")),
)
