"""An engine that computes a drafter wrongly is found, and the first wrong tensor is named."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from leadout.check.parity import (
    FEATURES,
    FINAL,
    LOGITS,
    Reference,
    compare,
    finding_of,
    hidden_name,
    keys_name,
    names_in_order,
    state_name,
    values_name,
)
from leadout.check.result import Parity
from leadout.checkpoints import load_drafter, write_checkpoint
from leadout.dflash.drafter import Drafter
from leadout.dflash.target import Target
from leadout.engine.draft_recorder import (
    RecordedBlock,
    RecordedContext,
    RecordedText,
    read_texts,
    write_texts,
)
from leadout.evaluate.hidden_states import load_model
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.findings import Severity
from support.drafters import TINY_DRAFTER, random_drafter
from support.models import tiny_llama

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
REDUCED = replace(CONFIG, draft_vocab_size=100, own_embedding=True, own_head=True)
K = CONFIG.max_draft_tokens
LENGTH, ANCHORS = 24, (12, 15)
EXACT = torch.float32


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "whole"
    write_checkpoint(folder, random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> nn.Module:
    return load_model(target, torch.float32)


def engine_like(
    target: Path, served: Drafter, model: nn.Module, precision: torch.dtype = torch.float32
) -> RecordedText:
    """What would be recorded of an engine with this drafter."""
    tokens = torch.arange(7, 7 + 3 * LENGTH, 3)
    states = Target(model, served.config.target_layer_ids).states(tokens[None])[0]
    reference = Reference(
        served, load_target_weights(TargetFiles(target), precision, torch.device("cpu")), states
    )
    positions = torch.arange(ANCHORS[-1])
    context = reference.context(positions)
    layers = range(served.config.num_layers)
    own_tokens = served.to_target_ids(torch.arange(served.config.head_rows))
    blocks = []
    for anchor in ANCHORS:
        tensors = reference.block(anchor, int(tokens[anchor]), K)
        logits = torch.full((K, served.config.vocab_size), -torch.inf, dtype=precision)
        logits[:, own_tokens] = tensors[LOGITS]
        anchor_slot = torch.zeros_like(tensors[FINAL][:1])
        blocks.append(
            RecordedBlock(
                torch.tensor(anchor),
                logits.argmax(dim=-1),
                [tensors[hidden_name(layer)] for layer in layers],
                torch.cat([anchor_slot, tensors[FINAL]]),
                logits,
            )
        )
    kept = RecordedContext(
        positions,
        states[positions],
        context[FEATURES],
        [context[keys_name(layer)] for layer in layers],
        [context[values_name(layer)] for layer in layers],
    )
    return RecordedText(tokens, kept, blocks)


@pytest.fixture
def right(target: Path, drafter: Path, model: nn.Module) -> RecordedText:
    return engine_like(target, load_drafter(drafter, torch.float32), model)


def places(text: RecordedText) -> dict[str, Tensor]:
    """The rows of the recorded tensors, by the names they are compared under."""
    context, block = text.context, text.blocks[-1]
    width = context.states.shape[1] // len(CONFIG.target_layer_ids)
    taps = torch.split(context.states, width, dim=1)
    layers = range(CONFIG.num_layers)
    return {
        **{state_name(i): tap for i, tap in zip(CONFIG.target_layer_ids, taps, strict=True)},
        FEATURES: context.features,
        **{keys_name(layer): context.keys[layer] for layer in layers},
        **{values_name(layer): context.values[layer] for layer in layers},
        **{hidden_name(layer): block.hidden[layer] for layer in layers},
        FINAL: block.final,
        LOGITS: block.logits,
    }


def test_equal_computation_gives_no_finding(
    target: Path, drafter: Path, model: nn.Module, right: RecordedText
) -> None:
    parity = compare(target, drafter, model, [right], EXACT, EXACT)
    assert parity.blocks == len(ANCHORS)
    assert parity.drafts == parity.equal_drafts == len(ANCHORS) * K
    assert parity.first_difference is None
    assert list(parity.differences) == names_in_order(CONFIG)
    assert finding_of(parity) is None


@pytest.mark.parametrize("name", names_in_order(CONFIG))
def test_the_tensor_that_differs_is_named(
    target: Path, drafter: Path, model: nn.Module, right: RecordedText, name: str
) -> None:
    # In this tensor and all after it, by two thousandths.
    found = places(right)
    for wrong in names_in_order(CONFIG)[names_in_order(CONFIG).index(name) :]:
        found[wrong] *= 1.002
    parity = compare(target, drafter, model, [right], EXACT, EXACT)
    assert parity.first_difference == name
    finding = finding_of(parity)
    assert finding is not None
    assert finding.name == "engine-parity"
    assert finding.severity is Severity.WARNING
    assert name in finding.message


def test_a_single_nan_is_found(
    target: Path, drafter: Path, model: nn.Module, right: RecordedText
) -> None:
    right.blocks[0].hidden[1][2, 5] = torch.nan
    parity = compare(target, drafter, model, [right], EXACT, EXACT)
    assert parity.first_difference == hidden_name(1)
    assert Parity.model_validate_json(parity.model_dump_json()) == parity


def test_drafts_that_are_not_the_best_of_the_logits_are_an_error(
    target: Path, drafter: Path, model: nn.Module, right: RecordedText
) -> None:
    for block in right.blocks:
        block.drafts[:] = block.drafts.roll(1) + 1
    parity = compare(target, drafter, model, [right], EXACT, EXACT)
    assert parity.first_difference is None
    finding = finding_of(parity)
    assert finding is not None
    assert finding.severity is Severity.ERROR


def test_rounding_to_bfloat16_is_allowed_and_a_wrong_norm_is_not(
    target: Path, drafter: Path
) -> None:
    half = torch.bfloat16
    model = load_model(target, half)
    served = load_drafter(drafter, half)
    parity = compare(target, drafter, model, [engine_like(target, served, model, half)], half, half)
    assert parity.first_difference is None
    assert finding_of(parity) is None

    first, second = (served.layers[layer].self_attn.k_norm for layer in (0, 1))
    second.weight.data = first.weight.data
    parity = compare(target, drafter, model, [engine_like(target, served, model, half)], half, half)
    assert parity.first_difference == keys_name(1)


def test_of_a_quantized_target_the_states_may_differ_by_rounding_and_nothing_else(
    target: Path, drafter: Path, model: nn.Module, right: RecordedText
) -> None:
    first = state_name(CONFIG.target_layer_ids[0])
    found = places(right)
    found[first] *= 1.01
    rounded = compare(target, drafter, model, [right], EXACT, torch.bfloat16)
    assert rounded.first_difference == FEATURES  # in float32, of the states that were recorded
    assert compare(target, drafter, model, [right], EXACT, EXACT).first_difference == first

    found[first] *= 1.1
    wrong = compare(target, drafter, model, [right], EXACT, torch.bfloat16)
    assert wrong.first_difference == first


def test_a_reduced_vocabulary_in_the_wrong_order_is_found(
    target: Path, model: nn.Module, tmp_path: Path
) -> None:
    whole = random_drafter(REDUCED)
    assert whole.d2t is not None
    whole.d2t[:] = torch.arange(100) * 2  # draft id i means token 3 i
    write_checkpoint(
        tmp_path / "reduced", whole.state_dict(), REDUCED, "speculators", target_name=str(target)
    )
    served = load_drafter(tmp_path / "reduced", torch.float32)
    text = engine_like(target, served, model)
    assert (
        compare(target, tmp_path / "reduced", model, [text], EXACT, EXACT).first_difference is None
    )

    assert served.d2t is not None
    served.d2t[:] = torch.arange(100)
    text = engine_like(target, served, model)
    parity = compare(target, tmp_path / "reduced", model, [text], EXACT, EXACT)
    assert parity.first_difference == LOGITS


def test_recorded_texts_are_read_back(right: RecordedText, tmp_path: Path) -> None:
    write_texts([copy.deepcopy(right), right], tmp_path / "drafts.safetensors")
    _, read = read_texts(tmp_path / "drafts.safetensors")
    assert torch.equal(read.tokens, right.tokens)
    assert [int(block.anchor) for block in read.blocks] == list(ANCHORS)
    for name, tensor in places(read).items():
        assert torch.equal(tensor, places(right)[name]), name
