"""What is borrowed is the target's own, frozen, and NaN wherever it was not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import MakeRun
from transformers import AutoModelForCausalLM, PreTrainedModel

from leadout.evaluate.target_weights import MissingTensorError, TargetFiles, borrow
from leadout.train.loop import BEST, STATE

CPU = torch.device("cpu")


def test_embedding_and_head_are_the_targets(target_folder: Path) -> None:
    found = borrow(TargetFiles(target_folder), torch.float32, CPU)
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
    found = borrow(TargetFiles(tmp_path), torch.bfloat16, CPU)
    assert found.head is found.embedding
    assert found.embedding.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_target_without_it_is_refused(target_folder: Path, tmp_path: Path, name: str) -> None:
    weights = load_file(target_folder / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    with pytest.raises(MissingTensorError, match=f"found no tensor {name.removeprefix('model.')}"):
        borrow(TargetFiles(tmp_path), torch.float32, CPU)


def test_a_missed_load_shows_in_the_first_step(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # What would have filled them does nothing.
        patch.setattr("leadout.evaluate.target_weights.Tensor.copy_", lambda place, _: place)
        run = make_run()
    assert run.borrowed.embedding.isnan().all()
    assert run.borrowed.head.isnan().all()
    with pytest.raises(FloatingPointError, match="step 1: found a gradient norm of nan"):
        run.train(lambda _: None)
    assert not (run.folder / STATE).exists()


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_either_one_left_unloaded_stops_the_run(make_run: MakeRun, part: str) -> None:
    run = make_run(distillation=0.0)
    getattr(run.borrowed, part).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="step 1"):
        run.train(lambda _: None)


def test_borrowed_weights_are_neither_trained_nor_saved(make_run: MakeRun) -> None:
    run = make_run()
    before = run.borrowed.embedding.clone(), run.borrowed.head.clone()
    run.train(lambda _: None)
    assert torch.equal(run.borrowed.embedding, before[0])
    assert torch.equal(run.borrowed.head, before[1])
    for file in (STATE, BEST):
        names = load_file(run.folder / file)
        assert not [name for name in names if "embed" in name or "lm_head" in name]
