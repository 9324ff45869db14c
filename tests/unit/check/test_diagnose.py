"""Every known cause is named first when it is seeded, its edit undoes it, and health is left alone.

A random drafter accepts nothing of a target's text. So the texts here are the drafter's own: each
block of an answer is what the drafter as trained would guess there. With it all drafts stand, with
a fault in it they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from leadout.check.diagnosis import (
    context_bucket,
    examine,
    findings_of,
    hardly_any,
    layers_needed,
    mode_findings,
    offline_table,
    other_modes,
    repair_of,
    variants_of,
)
from leadout.check.hypotheses import Surroundings, Variant
from leadout.check.probe import Probe, Text, Trial, drafter_of, try_variants
from leadout.check.result import Gravity, Silence
from leadout.checkpoints import read_checkpoint, write_checkpoint
from leadout.data.chat import Chat
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.target import Target
from leadout.evaluate.acceptance import Gain
from leadout.evaluate.blocks import BlockForward
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.pairing import read_target
from leadout.stats import Interval
from support.drafters import TINY_DRAFTER, random_drafter
from support.tiny_chat import MASK_TOKEN, write_tiny_chat_target

LAYERS = 6
TRAINED = replace(
    TINY_DRAFTER,
    target_layer_ids=(1, 2, 4),
    target_num_layers=LAYERS,
    mask_token_id=MASK_TOKEN,
    layers=(LayerAttention(), LayerAttention()),
)
SPECIALS = [256, 258, MASK_TOKEN]
Weights = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat_target(tmp_path_factory.mktemp("diagnose") / "target")


@pytest.fixture(scope="module")
def model(target: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_drafter(TRAINED).state_dict()


@torch.no_grad()
def own_text(model: nn.Module, target: Path, weights: Weights, seed: int, blocks: int) -> Text:
    """A prompt, and blocks that the drafter guesses after random anchors."""
    drafter = drafter_of(TRAINED, weights)
    borrowed = load_target_weights(TargetFiles(target), torch.float32, torch.device("cpu"))
    forward = BlockForward(drafter, borrowed.embedding)
    tapped = Target(model, TRAINED.target_layer_ids)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(256, (24,), generator=generator).tolist()
    tokens = list(prompt)
    for _ in range(blocks):
        tokens.append(int(torch.randint(256, (1,), generator=generator)))
        row = torch.tensor([tokens])
        anchors = torch.tensor([[len(tokens) - 1]])
        hidden = forward(tapped.states(row), anchors, row[:, -1:])
        tokens += (hidden[0, 0] @ borrowed.head.T).argmax(-1).tolist()
    return Text("own", prompt, tokens[len(prompt) :])


@pytest.fixture(scope="module")
def probe(target: Path, model: nn.Module, weights: dict[str, Tensor]) -> Probe:
    texts = [own_text(model, target, weights, seed, blocks=8) for seed in range(8)]
    needed = {*layers_needed(TRAINED, LAYERS), 0, 5}
    return Probe(target, model, texts, needed, torch.float32)


def diagnose(probe: Probe, config: DrafterConfig, weights: Weights) -> list[Trial]:
    around = Surroundings(LAYERS, TRAINED.rope, SPECIALS, probe.longest)
    before = probe.acceptance(drafter_of(config, weights))
    return try_variants(probe, weights, before, variants_of(config, around))


def swap_parts(weights: Weights) -> dict[str, Tensor]:
    first, second, third = torch.split(weights["fc.weight"], TRAINED.context_size, dim=1)
    return {**weights, "fc.weight": torch.cat([third, second, first], dim=1)}


def swap_layers(weights: Weights) -> dict[str, Tensor]:
    other = {"layers.0": "layers.1", "layers.1": "layers.0"}
    return {other.get(name[:8], name[:8]) + name[8:]: tensor for name, tensor in weights.items()}


def as_they_are(weights: Weights) -> dict[str, Tensor]:
    return dict(weights)


FAULTS = {
    "taps-one-too-low": ({"target_layer_ids": (0, 1, 3)}, as_they_are),
    "taps-one-too-high": ({"target_layer_ids": (2, 3, 5)}, as_they_are),
    "tap-order": ({}, swap_parts),
    "causality": ({"layers": (LayerAttention(causal=True),) * 2}, as_they_are),
    "window": ({"layers": (LayerAttention(window=6),) * 2}, as_they_are),
    "rope-theta": ({"rope": Rope(theta=100.0)}, as_they_are),
    "rope-fraction": ({"rope": Rope(theta=TRAINED.rope.theta, fraction=0.5)}, as_they_are),
    "mask-token": ({"mask_token_id": 258}, as_they_are),
    "layer-order": ({}, swap_layers),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_seeded_fault_is_named_first_and_its_edit_undoes_it(
    cause: str, probe: Probe, weights: dict[str, Tensor]
) -> None:
    fields, change = FAULTS[cause]
    faulty, damaged = replace(TRAINED, **fields), change(weights)  # type: ignore[arg-type]
    trials = diagnose(probe, faulty, damaged)
    findings = findings_of(trials)
    assert findings[0].name == cause
    assert findings[0].gravity is not Gravity.NOTE
    repair = repair_of(trials)
    assert repair is not None
    repaired = damaged if repair.weights is None else repair.weights(damaged)
    counts = probe.acceptance(drafter_of(repair.config, repaired))
    healthy = probe.acceptance(drafter_of(TRAINED, weights))
    for one, other in zip(counts, healthy, strict=True):
        assert torch.equal(one.at_positions, other.at_positions)


def test_the_last_tap_after_the_final_norm_is_named(
    probe: Probe, weights: dict[str, Tensor]
) -> None:
    taps_last = replace(TRAINED, target_layer_ids=(1, 2, 5))
    around = Surroundings(LAYERS, TRAINED.rope, (), probe.longest)
    normed = [v for v in variants_of(taps_last, around) if v.normed_last_tap]
    assert [variant.cause for variant in normed] == ["last-layer-norm"]
    plain = probe.states_of(0, (1, 2, 5), normed_last_tap=False).states
    changed = probe.states_of(0, (1, 2, 5), normed_last_tap=True)
    width = TRAINED.context_size
    assert torch.equal(changed.states[..., :-width], plain[..., :-width])
    assert torch.equal(changed.states[..., -width:], changed.final)


def test_a_healthy_drafter_gets_no_finding(probe: Probe, weights: dict[str, Tensor]) -> None:
    assert findings_of(diagnose(probe, TRAINED, weights)) == []
    assert repair_of(diagnose(probe, TRAINED, weights)) is None


def test_the_drafter_s_own_text_is_accepted_whole(probe: Probe, weights: dict[str, Tensor]) -> None:
    drafts = TRAINED.max_draft_tokens
    for text in probe.acceptance(drafter_of(TRAINED, weights)):
        assert text.at_steps[:7] == [drafts] * 7
    table = offline_table(probe.acceptance(drafter_of(TRAINED, weights)), drafts)
    assert table.overall.length.value == pytest.approx(1 + drafts)
    assert list(table.by_context) == ["0 to 127"]
    assert hardly_any(table.overall) == []


def test_a_drafter_that_guesses_nothing_without_a_known_cause_is_unfit(
    target: Path, model: nn.Module, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "drafter", weights, TRAINED, "zlab")
    draws = torch.randint(256, (6, 80), generator=torch.Generator().manual_seed(0)).tolist()
    noise = [Text("noise", draw[:20], draw[20:]) for draw in draws]
    found = examine(
        Probe(target, model, noise, range(LAYERS), torch.float32),
        read_target(target),
        read_checkpoint(tmp_path / "drafter"),
        TRAINED.max_draft_tokens,
        SPECIALS,
        torch.float32,
        Silence(),
    )
    assert [finding.name for finding in found.findings] == ["drafts-rejected"]
    assert found.repair is None
    assert len(found.tried) > 10


def test_a_shorter_draft_is_judged_with_a_shorter_block_and_mended_with_the_whole(
    target: Path, model: nn.Module, probe: Probe, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    faulty = replace(TRAINED, mask_token_id=258)
    write_checkpoint(tmp_path / "faulty", weights, faulty, "zlab")
    checkpoint = read_checkpoint(tmp_path / "faulty")
    facts = read_target(target)
    found = examine(probe, facts, checkpoint, 2, SPECIALS, torch.float32, Silence())
    assert len(found.offline.overall.by_position) == 2
    if found.repair is not None:
        assert found.repair.config.block_size == TRAINED.block_size


def trial(gain: float, may_be_meant: bool) -> Trial:
    difference = Interval(value=gain, low=gain * 0.5, high=gain * 1.5)
    variant = Variant("window", "sliding_window: None -> 8", TRAINED, may_be_meant=may_be_meant)
    return Trial(variant, Gain(before=1.0, after=1.0 + gain, difference=difference), texts=5)


def test_a_window_that_was_never_there_is_a_note_unless_it_gains_much() -> None:
    around = Surroundings(LAYERS, TRAINED.rope, (), 5000)
    added = [v for v in variants_of(TRAINED, around) if v.cause == "window"]
    assert len(added) == 4
    assert all(variant.may_be_meant for variant in added)
    windowed = replace(TRAINED, layers=(LayerAttention(window=64),) * 2)
    taken_away = next(v for v in variants_of(windowed, around) if v.cause == "window")
    assert not taken_away.may_be_meant
    wide = replace(TRAINED, layers=(LayerAttention(window=6000),) * 2)
    narrowed = [
        v for v in variants_of(wide, around) if "-> None" not in v.edit and v.cause == "window"
    ]
    assert narrowed
    assert all(variant.may_be_meant for variant in narrowed)

    assert findings_of([trial(0.04, True)])[0].gravity is Gravity.NOTE
    assert repair_of([trial(0.04, True)]) is None
    assert findings_of([trial(0.04, False)])[0].gravity is Gravity.DOUBTFUL
    assert repair_of([trial(0.04, False)]) is not None
    assert findings_of([trial(0.4, True)])[0].gravity is Gravity.UNFIT
    assert repair_of([trial(0.4, True)]) is not None
    assert findings_of([trial(0.005, False)]) == []


def test_what_was_only_screened_is_no_finding() -> None:
    screened = replace(trial(0.4, False), texts=2)
    assert [f.name for f in findings_of([trial(0.04, False), screened])] == ["window"]
    assert findings_of([trial(0.0, False), screened]) == []


@pytest.mark.parametrize(
    ("length", "name"),
    [(0, "0 to 127"), (127, "0 to 127"), (128, "128 to 255"), (5000, "4096 and more")],
)
def test_context_buckets(length: int, name: str) -> None:
    assert context_bucket(length) == name


def test_other_modes_are_those_that_give_other_tokens(target: Path) -> None:
    modes = other_modes((), target, Chat(target, thinking=False), max_prompt=400)
    assert set(modes) == {"without the chat template", "with thinking"}
    assert all(modes.values())


def test_a_mode_that_accepts_more_is_named(
    target: Path, model: nn.Module, probe: Probe, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "drafter", weights, TRAINED, "zlab")
    checkpoint = read_checkpoint(tmp_path / "drafter")
    good = [own_text(model, target, weights, seed, blocks=6) for seed in range(20, 26)]
    strange = random_drafter(TRAINED, seed=9).state_dict()
    bad = [own_text(model, target, strange, seed, blocks=6) for seed in range(30, 36)]

    def named(here: list[Text], there: list[Text]) -> list[str]:
        asked = Probe(target, model, here, TRAINED.target_layer_ids, torch.float32)
        counts = asked.acceptance(drafter_of(TRAINED, weights))
        found = mode_findings(
            target,
            model,
            checkpoint,
            TRAINED.max_draft_tokens,
            {"with thinking": there},
            offline_table(counts, TRAINED.max_draft_tokens),
            torch.float32,
        )
        return [finding.name for finding in found]

    assert named(here=bad, there=good) == ["asked-in-another-mode"]
    assert named(here=good, there=bad) == []
