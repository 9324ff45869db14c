"""Targets as their config files describe them, and their published drafters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedModel

from leadout.checkpoints import CheckpointError
from leadout.dflash.config import LinearScaling, Llama3Scaling, Rope, Yarn
from leadout.pairing import TargetFacts, read_target, target_from_config
from leadout.pairing.target import PUBLISHED, find_published

QWEN3_8B = "z-lab/Qwen3-8B-DFlash-b16"
SIZES = {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 320}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rope_of(**fields: Any) -> Rope | None:
    return target_from_config({**SIZES, **fields}, "target").rope


def test_a_model_that_transformers_wrote(tiny_qwen3: PreTrainedModel, tmp_path: Path) -> None:
    tiny_qwen3.config.save_pretrained(tmp_path / "qwen")
    facts = read_target(tmp_path / "qwen")
    assert facts == TargetFacts(str(tmp_path / "qwen"), 64, 6, 320, Rope(10_000.0), 512)
    assert target_from_config(tiny_qwen3.config.to_dict(), facts.name) == facts


def test_the_name_is_the_users(tmp_path: Path) -> None:
    assert read_target(write(tmp_path, SIZES), "Qwen/Qwen3-8B").name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("path", [("text_config",), ("thinker_config", "text_config")])
def test_the_decoder_inside_a_larger_model(path: tuple[str, ...], tmp_path: Path) -> None:
    config: dict[str, Any] = {**SIZES, "rope_theta": 5e6, "max_position_embeddings": 256}
    for name in reversed(path):
        config = {name: config, "hidden_size": 1, "vision_config": {"hidden_size": 2}}
    facts = read_target(write(tmp_path, config), "name")
    assert facts == TargetFacts("name", 64, 6, 320, Rope(5e6), 256)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 1000000}, Rope(1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None}, Rope(1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, Rope(1e5)),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, Rope(1e6, Yarn(4.0, 128))),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            Rope(1e4, LinearScaling(2.0)),
        ),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, Rope(1e4, fraction=0.25)),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e6},
                },
            },
            Rope(1e6),
        ),
    ],
)
def test_rotary_embedding(fields: dict[str, Any], rope: Rope) -> None:
    assert rope_of(**fields) == rope


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_scaling": YARN},  # theta is the model class's secret
        {"rope_theta": "10000"},
        {"rope_theta": True},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn"}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e7, "mrope_section": [8, 8]}},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ],
)
def test_a_rotary_embedding_that_no_drafter_has_is_unknown(fields: dict[str, Any]) -> None:
    assert rope_of(**fields) is None


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    """State-space targets have them, and the engine reads them too."""
    config = {**SIZES, "time_step_limit": [0.0, float("inf")]}
    assert read_target(write(tmp_path, config)).hidden_size == 64


@pytest.mark.parametrize("value", [None, 0, -1, True, "64", 64.0, [64]])
@pytest.mark.parametrize("field", SIZES)
def test_a_size_that_is_none(field: str, value: object, tmp_path: Path) -> None:
    config = {"text_config": {**SIZES, field: value}}
    with pytest.raises(CheckpointError) as caught:
        read_target(write(tmp_path, config))
    assert caught.value.field == f"text_config.{field}"
    assert caught.value.path == tmp_path / "config.json"


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\udcff"])
def test_a_file_that_is_no_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        CheckpointError, match=r"config\.json (cannot be read|contains a list).*Check the path"
    ):
        read_target(tmp_path)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing|does not exist"):
        read_target(tmp_path / "nowhere")


def test_facts_from_the_engines_config() -> None:
    config = LlamaConfig(**SIZES, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    facts = target_from_config(config.to_dict(), "meta-llama/Llama-3.1-8B")
    assert facts.rope == Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))


def test_a_drafter_in_place_of_the_target(drafter_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a DFlash drafter.*target and drafter swapped\?"):
        read_target(drafter_folder)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing; expected the folder of"):
        read_target(tmp_path)


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-8B",
        "qwen/QWEN3-8b",
        "/models/Qwen3-8B",
        "/models/qwen3-8b/",
        "./Qwen3-8B",
        "Qwen3-8B",
        "/hub/models--Qwen--Qwen3-8B/snapshots/0ac7575",
    ],
)
def test_a_published_drafter_by_the_names_of_its_target(target: str) -> None:
    found = find_published(target)
    assert found is not None
    assert (found.target, found.drafter) == ("Qwen/Qwen3-8B", QWEN3_8B)


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-8B-Base",
        "Qwen/Qwen3-8B-FP8",
        "Qwen/Qwen3",
        "someone/Qwen3-8B",  # may be anything
        "/models/Qwen3-8B-Base",
        "/models/Qwen3-8B/weights",
        "/hub/models--someone--Qwen3-8B/snapshots/0ac7575",
        "z-lab/Qwen3-8B-DFlash-b16",
        "",
        "/",
    ],
)
def test_similar_names_are_other_models(target: str) -> None:
    assert find_published(target) is None


def test_a_folder_that_looks_like_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_published("models/Qwen3-8B") is None
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    found = find_published("models/Qwen3-8B")
    assert found is not None
    assert found.drafter == QWEN3_8B


def test_every_published_target_is_found() -> None:
    assert len(set(PUBLISHED)) == len(PUBLISHED)
    for row in PUBLISHED:
        found = find_published(row.target)
        assert found is not None
        assert found.target == row.target
        assert row.drafter.count("/") == 1
