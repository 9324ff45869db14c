"""From one format to the other and back, without losing a bit or a meaning."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leadout.checkpoints import (
    CheckpointError,
    convert,
    load_drafter,
    load_weights,
    read_checkpoint,
    write_checkpoint,
)
from leadout.dflash.config import (
    DrafterConfig,
    LayerAttention,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Yarn,
)
from support.drafters import FULL, MINI, MINI_REDUCED, SLIDING, edit_config, random_weights

BIDIRECTIONAL = LayerAttention(window=6, causal=False)
CAUSAL_FULL = LayerAttention(causal=True)


def write(folder: Path, config: DrafterConfig, to: str, **options: object) -> Path:
    weights = random_weights(config, dtype=torch.bfloat16)
    write_checkpoint(folder, weights, config, to, **options)  # type: ignore[arg-type]
    return folder


def same_tensors(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


BOTH_WAYS = {
    "all full": MINI,
    "all sliding, causal": replace(MINI, layers=(SLIDING, SLIDING)),
    "all sliding, bidirectional": replace(MINI, layers=(BIDIRECTIONAL, BIDIRECTIONAL)),
    "mixed, bidirectional": replace(MINI, layers=(BIDIRECTIONAL, FULL)),
    "biases": replace(MINI, attention_bias=True, rms_norm_eps=1e-5),
    "first and last target layer": replace(MINI, target_layer_ids=(5, 0)),
    "yarn": replace(MINI, rope=Rope(5e5, Yarn(8.0, 32, mscale=1.0, mscale_all_dim=0.5))),
    "yarn, stated": replace(MINI, rope=Rope(5e5, Yarn(8.0, 32, 1.2, 16.0, 2.0, truncate=False))),
    "llama3": replace(MINI, rope=Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))),
    "linear": replace(MINI, rope=Rope(1e4, LinearScaling(2.0))),
}  # fmt: skip


@pytest.mark.parametrize("config", BOTH_WAYS.values(), ids=BOTH_WAYS.keys())
def test_there_and_back(config: DrafterConfig, tmp_path: Path) -> None:
    source = write(tmp_path / "zlab", config, "zlab")
    there = convert(source, tmp_path / "there", "speculators", target_name="some/target")
    assert there.config == config
    assert there.target_name == "some/target"
    assert there.draft_tokens == config.block_size - 1
    back = convert(tmp_path / "there", tmp_path / "back", "zlab")
    assert back.config == config
    assert same_tensors(source, tmp_path / "back")
    assert read_checkpoint(source).notes == there.notes == back.notes == ()


ZLAB_ONLY = {
    "mixed, as published": replace(MINI, layers=(SLIDING, FULL)),
    "causal full layers": replace(MINI, layers=(CAUSAL_FULL, CAUSAL_FULL)),
    "all causal": replace(MINI, layers=(SLIDING, CAUSAL_FULL)),
    "partial rotation": replace(MINI, rope=Rope(1e4, fraction=0.5)),
    "scalings": replace(MINI, embedding_scale=2.0, logit_multiplier=0.5, logit_softcap=30.0),
}


@pytest.mark.parametrize("config", ZLAB_ONLY.values(), ids=ZLAB_ONLY.keys())
def test_what_only_zlabs_format_can_hold(config: DrafterConfig, tmp_path: Path) -> None:
    source = write(tmp_path / "zlab", config, "zlab")
    assert read_checkpoint(source).config == config
    with pytest.raises(CheckpointError, match="z-lab"):
        convert(source, tmp_path / "there", "speculators", target_name="some/target")
    assert not (tmp_path / "there").exists()


SPECULATORS_ONLY = {
    "reduced vocabulary": MINI_REDUCED,
    "own embedding": replace(MINI, own_embedding=True),
    "own head": replace(MINI, own_head=True),
    "wider target": replace(MINI, own_embedding=True, own_head=True, target_hidden_size=32),
}


@pytest.mark.parametrize("config", SPECULATORS_ONLY.values(), ids=SPECULATORS_ONLY.keys())
def test_what_only_the_speculators_format_can_hold(config: DrafterConfig, tmp_path: Path) -> None:
    source = write(tmp_path / "source", config, "speculators", target_name="some/target")
    again = convert(source, tmp_path / "again", "speculators")
    assert again.config == config
    assert same_tensors(source, tmp_path / "again")
    with pytest.raises(CheckpointError, match="Use `--to speculators`"):
        convert(source, tmp_path / "zlab", "zlab")


@pytest.mark.parametrize("to", ["zlab", "speculators"])
@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((BIDIRECTIONAL, CAUSAL_FULL), "causal"),
        ((SLIDING, LayerAttention(window=7, causal=True)), "sliding_window"),
    ],
)
def test_what_no_format_can_hold(
    layers: tuple[LayerAttention, ...], why: str, to: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=why):
        write(tmp_path / "never", replace(MINI, layers=layers), to, target_name="some/target")
    assert not (tmp_path / "never").exists()


def test_a_served_trap_is_repaired_by_rewriting(speculators_folder: Path, tmp_path: Path) -> None:
    edit_config(speculators_folder, lambda c: c.update(sliding_window_non_causal=False))
    assert any(
        "serves them as trained" in note for note in read_checkpoint(speculators_folder).notes
    )
    repaired = convert(speculators_folder, tmp_path / "repaired", "speculators")
    assert repaired.notes == ()
    written = json.loads((tmp_path / "repaired" / "config.json").read_text())
    assert written["sliding_window_non_causal"] is True


def test_the_number_to_draft_survives(speculators_folder: Path, tmp_path: Path) -> None:
    def ask_for_two(config: dict[str, object]) -> None:
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 2  # type: ignore[index]

    edit_config(speculators_folder, ask_for_two)
    assert convert(speculators_folder, tmp_path / "again", "speculators").draft_tokens == 2


@pytest.mark.parametrize("stated", [0, 4])
def test_the_number_to_draft_must_fit_the_block(stated: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"speculative_tokens is {stated}; expected 1 to 3"):
        write(tmp_path / "never", MINI, "speculators", target_name="t", draft_tokens=stated)


def test_inert_fields_survive_both_ways(zlab_folder: Path, tmp_path: Path) -> None:
    fields = {"bos_token_id": 1, "tie_word_embeddings": True, "release": {"by": ["us"]}}
    edit_config(zlab_folder, lambda config: config.update(fields))
    convert(zlab_folder, tmp_path / "there", "speculators", target_name="some/target")
    assert convert(tmp_path / "there", tmp_path / "back", "zlab").kept == fields


def test_the_speculators_format_needs_a_target(zlab_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--target"):
        convert(zlab_folder, tmp_path / "there", "speculators")


class TestTargetOnDisk:
    """z-lab's format needs the number of the target's layers."""

    @pytest.fixture
    def unknown(self, speculators_folder: Path, tmp_path: Path) -> Path:
        config = replace(MINI, target_num_layers=None)
        return write(tmp_path / "unknown", config, "speculators", target_name="some/target")

    def target(self, tmp_path: Path, config: object) -> str:
        folder = tmp_path / "target"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    def test_is_needed_where_the_file_does_not_say(self, unknown: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="num_target_layers is missing"):
            convert(unknown, tmp_path / "zlab", "zlab")

    @pytest.mark.parametrize(
        "config", [{"num_hidden_layers": 6}, {"text_config": {"num_hidden_layers": 6}}]
    )
    def test_tells_its_layers(self, config: object, unknown: Path, tmp_path: Path) -> None:
        target = self.target(tmp_path, config)
        assert convert(unknown, tmp_path / "zlab", "zlab", target).config.target_num_layers == 6

    @pytest.mark.parametrize("count", [3, "6", None, True])
    def test_must_fit(self, count: object, unknown: Path, tmp_path: Path) -> None:
        target = self.target(tmp_path, {"num_hidden_layers": count})
        with pytest.raises(CheckpointError, match=r"num_hidden_layers|target_layer_ids"):
            convert(unknown, tmp_path / "zlab", "zlab", target)

    def test_must_be_the_one_of_the_file(self, zlab_folder: Path, tmp_path: Path) -> None:
        target = self.target(tmp_path, {"num_hidden_layers": 7})
        with pytest.raises(CheckpointError, match="num_hidden_layers is 7; expected 6"):
            convert(zlab_folder, tmp_path / "there", "speculators", target)


class TestWriting:
    def test_nothing_is_overwritten(self, zlab_folder: Path, tmp_path: Path) -> None:
        before = (zlab_folder / "config.json").read_text()
        with pytest.raises(CheckpointError, match="a new or empty folder"):
            write(zlab_folder, MINI, "zlab")
        with pytest.raises(CheckpointError, match="a new or empty folder"):
            convert(zlab_folder, zlab_folder, "zlab")
        with pytest.raises(CheckpointError, match="a new or empty folder"):
            convert(zlab_folder, zlab_folder / "config.json", "zlab")
        assert (zlab_folder / "config.json").read_text() == before

    def test_an_empty_folder_will_do(self, zlab_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert convert(zlab_folder, tmp_path / "empty", "zlab").config == MINI

    def test_a_half_written_checkpoint_is_not_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The disk fills up while config.json, the last file, is written."""
        flushed = []

        def full_disk(handle: int) -> None:
            flushed.append(handle)
            if len(flushed) == 3:  # after the weights and their folder
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path / "half", MINI, "zlab")
        assert [path.name for path in (tmp_path / "half").iterdir()] == ["model.safetensors"]
        with pytest.raises(CheckpointError, match=r"config.json is missing"):
            read_checkpoint(tmp_path / "half")

    @pytest.mark.parametrize("damage", ["missing", "extra", "misshapen", "infinite", "integers"])
    def test_what_could_not_be_read_is_not_written(self, damage: str, tmp_path: Path) -> None:
        weights = random_weights(MINI)
        match damage:
            case "missing":
                del weights["norm.weight"]
            case "extra":
                weights["norm.weight.old"] = weights["norm.weight"]
            case "misshapen":
                weights["norm.weight"] = weights["norm.weight"][1:]
            case "infinite":
                weights["norm.weight"][0] = torch.inf
            case "integers":
                weights["norm.weight"] = weights["norm.weight"].long()
        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(tmp_path / "never", weights, MINI, "zlab")
        assert caught.value.field.startswith("norm.weight")
        assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_precision_is_kept_or_chosen(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_weights(MINI, dtype=dtype)
    write_checkpoint(tmp_path / "drafter", weights, MINI, "zlab")
    assert read_checkpoint(tmp_path / "drafter").tensors.dtype == dtype
    drafter = load_drafter(tmp_path / "drafter")
    assert {parameter.dtype for parameter in drafter.parameters()} == {dtype}
    assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())
    wide = load_drafter(tmp_path / "drafter", torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}


def test_a_loaded_drafter_can_be_trained(zlab_folder: Path) -> None:
    drafter = load_drafter(zlab_folder)
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    before = load_weights(read_checkpoint(zlab_folder))["norm.weight"].clone()
    with torch.no_grad():
        drafter.norm.weight.zero_()
    assert torch.equal(load_weights(read_checkpoint(zlab_folder))["norm.weight"], before)
