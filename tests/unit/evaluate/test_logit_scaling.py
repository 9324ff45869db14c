"""A target's logits are those of its model class: scaled and capped as its config says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from leadout.checkpoints import CheckpointError
from leadout.dflash.config import LogitScaling
from leadout.dflash.target import Observation, Target
from leadout.evaluate.hidden_states import ComputedStates, Indexed, StateSource
from leadout.evaluate.reference import ServedTarget
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.pairing.target import read_logit_scaling
from leadout.train.gradient import Gradient
from support.small_runs import MakeRun

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 1.0,
}
MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8}
FAMILIES: dict[str, Any] = {
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=7.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES)),
    "cohere2": lambda: Cohere2ForCausalLM(Cohere2Config(**SIZES, logit_scale=0.25)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, final_logit_softcapping=3.0)),
    "falcon h1": lambda: FalconH1ForCausalLM(
        FalconH1Config(**SIZES, **MAMBA, mamba_n_groups=1, lm_head_multiplier=0.3)
    ),
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


@torch.no_grad()
def scaled_and_plain(model: PreTrainedModel, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    model.eval().save_pretrained(folder)
    weights = load_target_weights(TargetFiles(folder), torch.float32, torch.device("cpu"))
    scores = Target(model, [0]).observe(IDS).final @ weights.head.T
    return weights.scaling.apply(scores), scores


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_from_the_head_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    found, plain = scaled_and_plain(model, tmp_path)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(plain, expected, atol=0.1), "the test needs a scale that shows"


@torch.no_grad()
def test_the_scores_of_a_served_target_are_scaled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES["granite"]().eval()
    model.save_pretrained(tmp_path)
    weights = load_target_weights(TargetFiles(tmp_path), torch.float32, torch.device("cpu"))
    states: Any = ComputedStates(lambda: Target(model, [0]))  # in the place of servers
    found = ServedTarget(states, [0], weights).next_logits(IDS[0].tolist())
    torch.testing.assert_close(found, model(input_ids=IDS).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_most_targets_have_no_scaling(tmp_path: Path) -> None:
    found, plain = scaled_and_plain(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)
    assert found is plain


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "cohere"}, LogitScaling(0.0625)),  # the default of its class
        ({"model_type": "gemma2"}, LogitScaling(softcap=30.0)),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, LogitScaling()),
        ({"model_type": "granite", "logits_scaling": 8}, LogitScaling(0.125)),
        ({"model_type": "hyperclovax", "logits_scaling": 8}, LogitScaling(8.0)),
        ({"model_type": "minicpm", "hidden_size": 64, "dim_model_base": 16}, LogitScaling(0.25)),
        ({"text_config": {"model_type": "cohere2", "logit_scale": 0.5}}, LogitScaling(0.5)),
    ],
    ids=str,
)
def test_what_configs_say(config: dict[str, Any], expected: LogitScaling) -> None:
    assert read_logit_scaling(config, Path("config.json")) == expected


@pytest.mark.parametrize("value", ["inv_sqrt_d_model", 0, -1.0, float("nan")])
def test_an_unknown_scale_is_an_error(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"text_config.logit_scale is .*a positive number"):
        read_logit_scaling({"text_config": {"logit_scale": value}}, Path("config.json"))


class ScaledFinalStates:
    """The states of a target whose final states are larger by a factor."""

    def __init__(self, source: StateSource, factor: float) -> None:
        self._source = source
        self._factor = factor

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        states, final = self._source.observe(sequences)
        return Observation(states, final * self._factor)


def test_training_learns_from_the_scaled_logits(make_run: MakeRun) -> None:
    run = make_run(distillation=1.0)
    items = [run.fetch(index) for index in run.corpus.split.train[:5]]

    def loss(scaling: LogitScaling, factor: float) -> float:
        weights = run.target_weights._replace(scaling=scaling)
        source = ScaledFinalStates(run.source, factor)
        run.weights.clear_gradients()
        gradient = Gradient(run._forward, run.weights, weights, source, run.config, None)
        return gradient.accumulate(items, 0, 1.0).loss

    scaled = loss(LogitScaling(50.0), 1.0)
    assert scaled == pytest.approx(loss(LogitScaling(), 50.0), rel=1e-5)
    assert scaled != pytest.approx(loss(LogitScaling(), 1.0), rel=1e-4)


def test_a_run_reads_the_scaling_of_its_target(make_run: MakeRun, target_folder: Path) -> None:
    path = target_folder / "config.json"
    before = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(before) | {"logit_scale": 0.5}))
        assert make_run().gradient._scaling == LogitScaling(0.5)
    finally:
        path.write_text(before)
