"""What is in order gives no finding at all, in either format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadout.checkpoints import Checkpoint, Format, speculators, write_checkpoint, zlab
from leadout.checkpoints.config_fields import read_json_object
from leadout.dflash.config import LayerAttention, Llama3Scaling, Rope, Yarn
from leadout.findings import Severity
from leadout.pairing import EngineSettings, Pair, TargetFacts, examine
from support.drafters import random_drafter
from support.faults import Make, healthy, healthy_reduced, healthy_speculators
from support.pairs import DRAFTER, TARGET, served_pair

PUBLISHED = Path(__file__).parents[1] / "checkpoints" / "published"
SLIDING = LayerAttention(window=64, causal=True)
YARN = Rope(10_000.0, Yarn(4.0, 128))


@pytest.mark.parametrize("make", [healthy, healthy_speculators, healthy_reduced])
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_a_healthy_drafter(
    make: Make, draft_tokens: int, drafter_folder: Path, tmp_path: Path
) -> None:
    folder = make(drafter_folder, tmp_path / "drafter", TARGET)
    arguments = {"num_speculative_tokens": draft_tokens, "dtype": "float32"}
    assert examine(served_pair(folder, TARGET, arguments)) == []


@pytest.mark.parametrize("target", ["/models/Tiny-Target", "other/TINY-target"])
def test_the_named_target_under_another_owner(
    target: str, drafter_folder: Path, tmp_path: Path
) -> None:
    folder = healthy_speculators(drafter_folder, tmp_path / "drafter", TARGET)
    assert examine(served_pair(folder, replace(TARGET, name=target))) == []


VARIANTS: dict[str, dict[str, Any]] = {
    "sliding-causal": {"layers": (SLIDING, SLIDING)},
    "sliding-bidirectional": {"layers": (replace(SLIDING, causal=False),) * 2},
    "one-layer": {"layers": (LayerAttention(),)},
    "yarn": {"rope": YARN},
    "llama3": {"rope": Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))},
    "first-and-last-layer": {"target_layer_ids": (0, 5)},
    "one-tap": {"target_layer_ids": (2,)},
    "larger-block": {"block_size": 16},
    "last-row-is-the-mask": {"mask_token_id": 319},
}


@pytest.mark.parametrize("to", ["zlab", "speculators"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_healthy_variants(variant: str, to: Format, tmp_path: Path) -> None:
    config = replace(DRAFTER, **VARIANTS[variant])
    weights = random_drafter(config).state_dict()
    write_checkpoint(tmp_path / "drafter", weights, config, to, target_name=TARGET.name)
    target = replace(TARGET, rope=config.rope)
    assert examine(served_pair(tmp_path / "drafter", target)) == []


def test_mixed_layers_on_the_runner_that_has_them(tmp_path: Path) -> None:
    config = replace(DRAFTER, layers=(SLIDING, LayerAttention()))
    write_checkpoint(tmp_path / "drafter", random_drafter(config).state_dict(), config, "zlab")
    facts = {"model_runner": "V2"}
    assert examine(served_pair(tmp_path / "drafter", TARGET, facts=facts)) == []


GPT_OSS_ROPE = Rope(150_000.0, Yarn(32.0, 4096, truncate=False))
KIMI_ROPE = Rope(50_000.0, Yarn(64.0, 4096, mscale=1.0, mscale_all_dim=1.0))


@pytest.mark.parametrize(
    ("file", "target", "draft_tokens"),
    [
        ("qwen3-4b-b16", TargetFacts("Qwen/Qwen3-4B", 2560, 36, 151936, Rope(1e6), 40960), 15),
        ("redhat-qwen3-8b", TargetFacts("Qwen/Qwen3-8B", 4096, 36, 151936, Rope(1e6), 40960), 7),
        (
            "redhat-qwen3-8b",  # its quantized copy in a folder, by another name
            TargetFacts("/models/Qwen3-8B-FP8", 4096, 36, 151936, Rope(1e6), 40960),
            7,
        ),
        (
            "gpt-oss-20b",
            TargetFacts("openai/gpt-oss-20b", 2880, 24, 201088, GPT_OSS_ROPE, 131072),
            7,
        ),
        (
            "kimi-k2.5",
            TargetFacts("moonshotai/Kimi-K2.5", 7168, 61, 163840, KIMI_ROPE, 262144),
            7,
        ),
        ("qwen3.6-27b", TargetFacts("Qwen/Qwen3.6-27B", 5120, 64, 248320, None, 262144), 15),
        (
            "qwen3.5-122b-a10b",
            TargetFacts("Qwen/Qwen3.5-122B-A10B", 3072, 48, 248320, None, 262144),
            15,
        ),
    ],
)
def test_published_drafters_with_their_targets(
    file: str, target: TargetFacts, draft_tokens: int, pair: Pair
) -> None:
    checkpoint = published(file, pair.drafter)
    settings = EngineSettings(
        draft_tokens=draft_tokens,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        dtype="bfloat16",
        model_runner="V2",
        backend_name="FLASH_ATTN",
        backend_takes_non_causal=True,
        served_causal=tuple(layer.causal for layer in checkpoint.config.layers),
    )
    found = examine(Pair(target, checkpoint, settings))
    assert [str(finding) for finding in found if finding.severity is Severity.ERROR] == []
    expected = ["verifier"] if target.name.startswith("/") else []
    assert [finding.name for finding in found] == expected


def published(file: str, stand_in: Checkpoint) -> Checkpoint:
    """A published config; the tensors are those of another drafter, which no rule looks at."""
    path = PUBLISHED / f"{file}.json"
    config = read_json_object(path)
    if speculators.matches(config):
        own_tensors = {"embed_tokens.weight", "lm_head.weight", "d2t"}
        reading = speculators.read(config, own_tensors, path)
    else:
        reading = zlab.read(config, path)
    return replace(stand_in, config=reading.config, target_name=reading.target_name)
