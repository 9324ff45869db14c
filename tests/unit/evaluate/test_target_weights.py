"""Embedding and head are the target's own, frozen, and NaN wherever they were not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.files import FileError
from leadout.train.config import TrainError
from leadout.train.state import BEST, STATE
from support.small_runs import MakeRun

CPU = torch.device("cpu")


def test_embedding_and_head_are_the_targets(target_folder: Path) -> None:
    found = load_target_weights(TargetFiles(target_folder), torch.float32, CPU)
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    assert torch.equal(found.embedding, model.get_input_embeddings().weight)
    assert torch.equal(found.head, model.get_output_embeddings().weight)
    assert not found.embedding.requires_grad
    assert not found.head.requires_grad


def test_a_tied_head_is_the_embedding_itself(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    tiny_llama.config.tie_word_embeddings = True
    tiny_llama.tie_weights()
    tiny_llama.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = load_target_weights(TargetFiles(tmp_path), torch.bfloat16, CPU)
    assert found.head is found.embedding
    assert found.embedding.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_target_without_one_of_them_is_rejected(
    target_folder: Path, tmp_path: Path, name: str
) -> None:
    weights = load_file(target_folder / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    with pytest.raises(FileError, match=f"tensor {name.removeprefix('model.')} is missing"):
        load_target_weights(TargetFiles(tmp_path), torch.float32, CPU)


def test_weights_that_were_not_loaded_fail_the_first_step(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # What would have filled them does nothing.
        patch.setattr("leadout.evaluate.target_weights.Tensor.copy_", lambda place, _: place)
        run = make_run()
    assert run.target_weights.embedding.isnan().all()
    assert run.target_weights.head.isnan().all()
    with pytest.raises(TrainError, match="gradient norm at step 1 is nan"):
        run.train(lambda _: None)
    assert not (run.folder / STATE).exists()


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_either_one_not_loaded_fails_the_first_step(make_run: MakeRun, part: str) -> None:
    run = make_run(distillation=0.0)
    getattr(run.target_weights, part).fill_(torch.nan)
    with pytest.raises(TrainError, match="step 1"):
        run.train(lambda _: None)


def test_target_weights_are_neither_trained_nor_saved(make_run: MakeRun) -> None:
    run = make_run()
    before = run.target_weights.embedding.clone(), run.target_weights.head.clone()
    run.train(lambda _: None)
    assert torch.equal(run.target_weights.embedding, before[0])
    assert torch.equal(run.target_weights.head, before[1])
    for file in (STATE, BEST):
        names = load_file(run.folder / file)
        assert not [name for name in names if "embed" in name or "lm_head" in name]
