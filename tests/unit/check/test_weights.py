"""Incomplete, broken, constant and quantised weights are reported; trained ones are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from editing import edit_weights, only
from torch import Tensor

from leadout.check.static import static_findings
from leadout.check.weights import coarseness
from leadout.findings import Severity


def test_a_truncated_weight_file_is_an_error(target: Path, drafter: Path) -> None:
    with (target / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    found = only(static_findings(target, drafter), "target-unreadable")
    assert found.severity is Severity.ERROR


def test_a_missing_shard_is_named(target: Path, drafter: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    found = only(static_findings(target, drafter), "target-incomplete")
    assert "model-2.safetensors" in found.message


def test_a_target_without_weights_is_a_note(target: Path, drafter: Path) -> None:
    (target / "model.safetensors").unlink()
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("target-weights-absent", Severity.NOTE)


def test_an_embedding_with_other_rows_than_the_config_is_reported(
    target: Path, drafter: Path
) -> None:
    name = "model.embed_tokens.weight"
    edit_weights(target, lambda w: w.update({name: w[name][:300].contiguous()}))
    found = only(static_findings(target, drafter), "target-embedding")
    assert found.evidence == {"rows": 300, "vocab_size": 320}


def rounded(matrix: Tensor, group: int, levels: int = 15, along_rows: bool = False) -> Tensor:
    """To so many levels for each group, as 4-bit formats do."""
    if along_rows:
        return rounded(matrix.T.contiguous(), group, levels).T.contiguous()
    groups = matrix.float().reshape(-1, group)
    scale = groups.abs().amax(-1, keepdim=True) / (levels // 2)
    return ((groups / scale).round() * scale).reshape(matrix.shape).to(matrix.dtype)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights_are_a_warning(
    target: Path, drafter: Path, group: int, dtype: torch.dtype
) -> None:
    def quantise(weights: dict[str, Tensor]) -> None:
        for name, tensor in weights.items():
            changed = rounded(tensor, group) if name.startswith("layers.1.mlp.up") else tensor
            weights[name] = changed.to(dtype)

    edit_weights(drafter, quantise)
    found = only(static_findings(target, drafter), "weights-quantised")
    assert found.severity is Severity.WARNING
    assert found.evidence["matrices"] == 1
    assert found.evidence["group"] == group
    assert found.evidence["along"] == "columns"
    assert 1 < int(str(found.evidence["distinct"])) <= 15
    assert "layers.1.mlp.up_proj.weight" in found.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_weights_are_not_taken_for_quantised(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((64, 32), (96, 64), (256, 1024)):
        assert coarseness((0.02 * torch.randn(shape)).to(dtype)) is None
    heavy_tailed = torch.distributions.StudentT(3.0).sample((256, 256)).to(dtype)
    assert coarseness(heavy_tailed) is None


def test_quantisation_groups_along_rows_columns_and_whole_rows() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(256, 384)
    for group in (32, 64, 128):
        found = coarseness(rounded(matrix, group))
        assert found is not None
        assert (found.along, found.group) == ("columns", group)
        found = coarseness(rounded(matrix, group, along_rows=True))
        assert found is not None
        assert (found.along, found.group) == ("rows", group)
    whole = coarseness(rounded(matrix, 384))
    assert whole is not None
    assert whole.group == 384
    assert coarseness(rounded(matrix, 128, levels=255)) is None  # 8 bits lose too little


def test_values_that_are_not_finite_are_an_error(target: Path, drafter: Path) -> None:
    edit_weights(drafter, lambda w: w["layers.0.mlp.up_proj.weight"][3, :2].fill_(float("inf")))
    found = only(static_findings(target, drafter), "weights-not-finite")
    assert found.severity is Severity.ERROR
    assert found.evidence == {"values": 2, "tensors": 1}


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("fc.weight", Severity.ERROR),
        ("norm.weight", Severity.ERROR),
        ("layers.2.self_attn.o_proj.weight", Severity.WARNING),
        ("layers.0.self_attn.k_norm.weight", Severity.WARNING),
    ],
)
def test_constant_weights_are_reported(
    target: Path, drafter: Path, name: str, severity: Severity
) -> None:
    edit_weights(drafter, lambda w: w[name].zero_())
    (found,) = static_findings(target, drafter)
    assert (found.name, found.severity) == ("weights-dead", severity)
    assert name in found.message


def test_norms_of_ones_are_accepted(target: Path, drafter: Path) -> None:
    edit_weights(drafter, lambda w: w["layers.0.self_attn.k_norm.weight"].fill_(1.0))
    assert static_findings(target, drafter) == []
