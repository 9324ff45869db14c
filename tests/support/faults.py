"""Seeded faults: a healthy drafter with one thing wrong, and who must notice.

Each is made from a healthy checkpoint in z-lab's format and the facts of its target, so that the
same faults serve a tiny pair in unit tests and a real one in an engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadout.checkpoints import convert, read_checkpoint, write_checkpoint
from leadout.dflash.drafter import Drafter
from leadout.pairing import TargetFacts

LOAD = "load"  # in place of a rule: reading or loading the checkpoint ends in a CheckpointError

Config = dict[str, Any]
Weights = dict[str, Tensor]
Make = Callable[[Path, Path, TargetFacts], Path]  # healthy drafter, new folder, target


@dataclass(frozen=True)
class Fault:
    """One seeded fault, and the rule that must report it."""

    name: str
    rule: str | None  # None: nothing in files or settings gives it away
    make: Make
    # vLLM's arguments that belong to the fault; num_speculative_tokens is the drafter's.
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    # Fields of EngineSettings that only the engine of another machine has.
    engine_facts: Mapping[str, Any] = field(default_factory=dict)
    is_corrected: bool = False  # Leadout corrects it and warns, instead of refusing


def serve_flags(fault: Fault, **settings: Any) -> tuple[str, ...]:
    """The flags of a server with these settings and those that belong to the fault."""
    settings |= fault.engine_arguments
    draft_tokens = settings.pop("num_speculative_tokens", None)
    flags = [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    if draft_tokens is not None:
        speculation = json.dumps({"num_speculative_tokens": draft_tokens})
        flags += ["--speculative-config", speculation]
    return tuple(flags)


# Ways to make one.


def healthy(drafter: Path, out: Path, _: TargetFacts) -> Path:
    """An unchanged copy; its modes are not copied, as the original may be read-only."""
    out.mkdir(parents=True)
    for file in drafter.iterdir():
        shutil.copyfile(file, out / file.name)
    return out


def healthy_speculators(drafter: Path, out: Path, target: TargetFacts) -> Path:
    convert(drafter, out, "speculators", target.name)
    return out


def config_with(change: Callable[[Config, TargetFacts], object], start: Make = healthy) -> Make:
    def make(drafter: Path, out: Path, target: TargetFacts) -> Path:
        path = start(drafter, out, target) / "config.json"
        config = json.loads(path.read_text())
        change(config, target)
        path.write_text(json.dumps(config))
        return out

    return make


def weights_with(change: Callable[[Weights], object], start: Make = healthy) -> Make:
    def make(drafter: Path, out: Path, target: TargetFacts) -> Path:
        path = start(drafter, out, target) / "model.safetensors"
        weights = load_file(path)
        change(weights)
        path.unlink()  # the loaded tensors may still be views of the old file
        save_file(weights, path, metadata={"format": "pt"})
        return out

    return make


def _truncated(drafter: Path, out: Path, target: TargetFacts) -> Path:
    weights = healthy(drafter, out, target) / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size * 3 // 4)
    return out


def _of_half_width(drafter: Path, out: Path, _: TargetFacts) -> Path:
    config = read_checkpoint(drafter).config
    smaller = replace(config, hidden_size=config.hidden_size // 2)
    write_checkpoint(out, Drafter(smaller).state_dict(), smaller, "zlab")
    return out


def _for_another_target(drafter: Path, out: Path, _: TargetFacts) -> Path:
    convert(drafter, out, "speculators", "somebody/another-target")
    return out


def healthy_reduced(drafter: Path, out: Path, target: TargetFacts) -> Path:
    """A healthy drafter of a quarter of the vocabulary, every fourth token."""
    config = replace(
        read_checkpoint(drafter).config,
        own_embedding=True,
        own_head=True,
        draft_vocab_size=target.vocab_size // 4,
    )
    weights = Drafter(config).state_dict()
    weights |= load_file(drafter / "model.safetensors")
    dtype = weights["fc.weight"].dtype
    for name in ("embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name].to(dtype)
    weights["d2t"] = 3 * torch.arange(target.vocab_size // 4)
    write_checkpoint(out, weights, config, "speculators", target_name=target.name)
    return out


# Changes to a config or its weights.


def _taps(change: Callable[[list[int], TargetFacts], list[int]]) -> Make:
    def rewire(config: Config, target: TargetFacts) -> None:
        draft = config["dflash_config"]
        draft["target_layer_ids"] = change(draft["target_layer_ids"], target)

    return config_with(rewire)


def _tap_beyond_the_target(config: Config, target: TargetFacts) -> None:
    del config["num_target_layers"]  # with it, the file contradicts itself
    config["dflash_config"]["target_layer_ids"][-1] = target.num_layers + 10


def _mask_beyond_the_target(config: Config, target: TargetFacts) -> None:
    config["vocab_size"] = 2 * target.vocab_size  # else the file contradicts itself
    config["dflash_config"]["mask_token_id"] = target.vocab_size + 5


def _other_theta(config: Config, _: TargetFacts) -> None:
    config["rope_theta"] /= 10
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] /= 10


def _half_rotation(config: Config, _: TargetFacts) -> None:
    config["partial_rotary_factor"] = 0.5
    if "rope_parameters" in config:
        config["rope_parameters"]["partial_rotary_factor"] = 0.5


def _first_layer_slides(config: Config, _: TargetFacts) -> None:
    config["layer_types"][0] = "sliding_attention"
    config |= {"sliding_window": 64, "use_sliding_window": True}


def _top(**fields: object) -> Make:
    return config_with(lambda config, _: config.update(fields))


def _draft(**fields: object) -> Make:
    return config_with(lambda config, _: config["dflash_config"].update(fields))


def _set_nan(weights: Weights) -> None:
    weights["layers.0.mlp.gate_proj.weight"][0, 0] = float("nan")


def _transpose_fc(weights: Weights) -> None:
    weights["fc.weight"] = weights["fc.weight"].T.contiguous()


FAULTS = (
    # The weights.
    Fault(
        "missing-down-proj",
        LOAD,
        weights_with(lambda weights: weights.pop("layers.1.mlp.down_proj.weight")),
    ),
    Fault("missing-fc", LOAD, weights_with(lambda weights: weights.pop("fc.weight"))),
    Fault("nan-weight", LOAD, weights_with(_set_nan)),
    Fault("misshapen-fc", LOAD, weights_with(_transpose_fc)),
    Fault("extra-tensor", LOAD, weights_with(lambda w: w.update({"extra.weight": torch.ones(2)}))),
    Fault("truncated-file", LOAD, _truncated),
    # Another architecture.
    Fault("dflash2", LOAD, _top(architectures=["DFlash2DraftModel"])),
    Fault("unknown-draft-field", LOAD, _draft(refinement_passes=2)),
    # The wiring.
    Fault("half-width", "hidden-size", _of_half_width),
    Fault("tap-beyond-target", "target-layers", config_with(_tap_beyond_the_target)),
    Fault("tap-beyond-stated-layers", LOAD, _taps(lambda ids, t: [*ids[:-1], t.num_layers])),
    Fault("negative-tap", LOAD, _taps(lambda ids, _: [-1, *ids[1:]])),
    Fault("double-tap", LOAD, _taps(lambda ids, _: [ids[0], *ids[:-1]])),
    Fault("taps-reversed", "layer-order", _taps(lambda ids, _: ids[::-1])),
    Fault(
        "other-number-of-target-layers",
        "target-layers",
        config_with(lambda config, target: config.update(num_target_layers=target.num_layers + 6)),
    ),
    Fault("verifier-of-another-name", "verifier", _for_another_target),
    # The vocabulary.
    Fault(
        "two-thirds-of-the-vocabulary",
        "vocabulary",
        config_with(lambda config, target: config.update(vocab_size=target.vocab_size * 2 // 3)),
    ),
    Fault(
        "one-row-less",
        "vocabulary-padding",
        config_with(lambda config, target: config.update(vocab_size=target.vocab_size - 1)),
    ),
    Fault(
        "reduced-without-map",
        LOAD,
        weights_with(lambda weights: weights.pop("d2t"), healthy_reduced),
    ),
    Fault(
        "map-beyond-the-vocabulary",
        LOAD,
        weights_with(lambda weights: weights["d2t"][-1:].add_(10**6), healthy_reduced),
    ),
    Fault(
        "mask-beyond-own-vocabulary",
        LOAD,
        config_with(
            lambda config, target: config["dflash_config"].update(mask_token_id=target.vocab_size)
        ),
    ),
    Fault("mask-beyond-target", "mask-token", config_with(_mask_beyond_the_target)),
    # The computation.
    Fault("rope-theta", "rope", config_with(_other_theta)),
    Fault("half-rotation", "partial-rotary", config_with(_half_rotation)),
    Fault("embedding-scale", "embedding-scale", _draft(input_embedding_scale=2.0)),
    Fault("logit-multiplier", "logit-scaling", _draft(output_multiplier=0.5)),
    Fault(
        "flipped-causality",
        "causality",
        config_with(
            lambda config, _: config.update(sliding_window_non_causal=False), healthy_speculators
        ),
        is_corrected=True,
    ),
    Fault("mixed-layers-on-v1", "mixed-layers", config_with(_first_layer_slides)),
    # The settings.
    Fault(
        "drafts-beyond-block",
        "draft-tokens",
        healthy,
        {"num_speculative_tokens": 15},
        is_corrected=True,
    ),
    Fault("short-positions", "positions", _top(max_position_embeddings=96), {"max_model_len": 256}),
    Fault("float16", "dtype", healthy, {"dtype": "float16"}),
    Fault(
        "few-batched-tokens",
        "batched-tokens",
        healthy,
        {"max_num_seqs": 16, "max_num_batched_tokens": 32},
    ),
    Fault(
        "causal-only-backend",
        "non-causal-backend",
        healthy,
        engine_facts={"backend_name": "CAUSAL_ONLY", "backend_takes_non_causal": False},
    ),
)

# A plausible value, but not that of training: only acceptance shows it.
UNDETECTABLE = (
    Fault("another-mask-token", None, _draft(mask_token_id=0)),
    Fault("taps-one-too-low", None, _taps(lambda ids, _: [i - 1 for i in ids])),
)
