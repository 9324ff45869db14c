"""Which targets are loaded for reference, and the scores of one that is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.checkpoints.store import read_header
from leadout.dflash.target import Observation
from leadout.evaluate import reference
from leadout.evaluate.hidden_states import Indexed, LoadedTarget, load_model
from leadout.evaluate.reference import (
    ServedTarget,
    is_quantized,
    loaded_bytes,
    reference_target,
    rounding_of,
    why_not_loaded,
)
from leadout.evaluate.target_weights import TargetFiles, load_final_norm, load_target_weights

TOKENS = [5, 6, 7, 8, 9, 10]


class FakeServedStates:
    """What servers would return, computed here."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.asked: list[list[int]] = []

    def observe(self, sequences: Sequence[Indexed]) -> Observation:
        self.asked += [sequence.tokens.tolist() for _, sequence in sequences]
        return self._source.observe(sequences)


def test_the_size_of_a_target_comes_from_its_files(target_folder: Path) -> None:
    model = load_model(target_folder, torch.float32)
    count = sum(each.numel() for each in model.parameters())
    assert loaded_bytes(target_folder, torch.float32) == 4 * count
    assert loaded_bytes(target_folder, torch.bfloat16) == 2 * count


def test_weights_that_are_there_a_second_time_are_counted_once(
    target_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(target_folder, tmp_path / "target")
    (file,) = (tmp_path / "target").glob("*.safetensors")
    once = loaded_bytes(tmp_path / "target", torch.float32)
    shutil.copy(file, file.with_name("consolidated.safetensors"))
    assert loaded_bytes(tmp_path / "target", torch.float32) == 2 * once
    index = {"weight_map": {each.name: file.name for each in read_header(file)}}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert loaded_bytes(tmp_path / "target", torch.float32) == once


def test_a_small_dense_target_is_loaded(target_folder: Path) -> None:
    assert why_not_loaded(target_folder, torch.float32) is None
    with reference_target(target_folder, [1], torch.float32, longest=10) as found:
        assert isinstance(found, LoadedTarget)


def test_a_target_larger_than_memory_is_not_loaded(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(reference, "available_bytes", lambda: 1000)
        assert "GiB" in (why_not_loaded(target_folder, torch.float32) or "")
    # Nor one that is larger than the memory of the GPU it would run on.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 10**9))
    assert why_not_loaded(target_folder, torch.float32, torch.device("cpu")) is None
    assert "GiB" in (why_not_loaded(target_folder, torch.float32, torch.device("cuda")) or "")


@pytest.mark.parametrize("section", ["", "text_config"])
def test_a_quantized_target_is_not_loaded(tmp_path: Path, section: str) -> None:
    quantized: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
    config = {section: quantized} if section else quantized
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert why_not_loaded(tmp_path, torch.float32) == "its weights are quantized"
    assert rounding_of(tmp_path, torch.float32) == torch.bfloat16


def test_quantization_is_found_in_other_files_and_in_flags(
    target_folder: Path, tmp_path: Path
) -> None:
    assert not is_quantized(target_folder, ["--tensor-parallel-size", "2"])
    for flags in (["--quantization", "fp8"], ["-q", "fp8"], ["--quantization=fp8"]):
        assert is_quantized(target_folder, flags)
        assert rounding_of(target_folder, torch.float32, flags) == torch.bfloat16
        assert why_not_loaded(target_folder, torch.float32, None, flags) is not None
        assert why_not_loaded(target_folder, torch.float32) is None
    (tmp_path / "config.json").write_text((target_folder / "config.json").read_text())
    assert not is_quantized(tmp_path)
    # Of versions of ModelOpt that leave config.json alone.
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert is_quantized(tmp_path)


def test_a_target_that_does_not_fit_on_the_gpu_is_served(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @contextmanager
    def server(*given: Any, **_: Any) -> Iterator[str]:
        asked.append(given[0])
        raise InterruptedError
        yield ""

    monkeypatch.setattr(reference, "states_server", server)
    # Stands for a machine with a GPU of so much free memory.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 10**9))
    cpu = torch.device("cpu")  # as `reference_device` chooses, although memory would do
    opened = reference_target(target_folder, [1], torch.float32, longest=10, device=cpu)
    with pytest.raises(InterruptedError), opened:
        pass
    assert asked == [target_folder]


def test_a_target_that_is_not_quantized_rounds_as_its_precision(target_folder: Path) -> None:
    for precision in (torch.float32, torch.bfloat16, torch.float16):
        assert rounding_of(target_folder, precision) == precision


def test_a_served_target_has_the_scores_and_states_of_a_loaded_one(target_folder: Path) -> None:
    loaded = LoadedTarget(load_model(target_folder, torch.float32))
    states: Any = FakeServedStates(loaded.source([0, 1, 3]))
    cpu = torch.device("cpu")
    weights = load_target_weights(TargetFiles(target_folder), torch.float32, cpu)
    served = ServedTarget(states, [0, 1, 3], weights)
    for portion in (0, 2):
        expected = loaded.next_logits(TOKENS, portion)
        torch.testing.assert_close(served.next_logits(TOKENS, portion), expected)
    assert states.asked == [TOKENS, TOKENS[:-2], TOKENS]  # the first portion fills the cache
    sequence = reference.TrainingSequence("t", "s", torch.tensor(TOKENS), 1)
    for mine, theirs in zip(
        served.source([3, 1]).observe([(0, sequence)]),
        loaded.source([3, 1]).observe([(0, sequence)]),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_the_final_norm_is_that_of_the_target(target_folder: Path) -> None:
    model: Any = load_model(target_folder, torch.float32)
    norm = load_final_norm(TargetFiles(target_folder), torch.float32, torch.device("cpu"))
    assert type(norm) is type(model.model.norm)
    states = torch.randn(3, model.config.hidden_size)
    assert torch.equal(norm(states), model.model.norm(states))
