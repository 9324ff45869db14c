"""Every seeded fault is named first, its edit undoes it, and a healthy drafter gets no finding.

A random drafter has no draft of a target's text accepted. So the texts here are the drafter's own:
each block of an answer is what the drafter as trained would draft there. As trained, all its drafts
are accepted; with a fault they are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from leadout.check.diagnosis import (
    MIN_TEXTS,
    Probe,
    Text,
    acceptance_findings,
    context_bucket,
    diagnose,
    drafter_of,
    layers_needed,
    mode_findings,
    offline_table,
    other_modes,
    precision_findings,
    try_variants,
    write_repaired,
)
from leadout.check.hypotheses import (
    TargetInfo,
    Variant,
    last_norm,
    shifted_taps,
    tap_order,
    variants_of,
)
from leadout.check.result import TOO_FEW_TEXTS, CheckError
from leadout.check.trials import Trial, findings_of, repair_of
from leadout.checkpoints import (
    CheckpointError,
    convert,
    load_weights,
    read_checkpoint,
    write_checkpoint,
)
from leadout.console import Progress
from leadout.data.chat import Chat
from leadout.dflash.config import DrafterConfig, LayerAttention, Rope
from leadout.dflash.target import Target
from leadout.evaluate.acceptance import AcceptanceTable, Gain, TextAcceptance
from leadout.evaluate.blocks import BlockForward
from leadout.evaluate.target_weights import TargetFiles, load_target_weights
from leadout.findings import Finding, Severity
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
MASK_CANDIDATES = [256, 258, MASK_TOKEN]
TARGET_INFO = TargetInfo(num_layers=LAYERS, rope=None, mask_candidates=(), longest_text=512)
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
    """A prompt, and blocks that the drafter drafts after random anchors."""
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
    texts = [own_text(model, target, weights, seed, blocks=8) for seed in range(24)]
    needed = {*layers_needed(TRAINED, LAYERS), 0, 5}
    return Probe(target, model, texts, needed, torch.float32)


@pytest.fixture(scope="module")
def healthy(probe: Probe, weights: dict[str, Tensor]) -> list[TextAcceptance]:
    return probe.acceptance(drafter_of(TRAINED, weights))


def trials_of(probe: Probe, config: DrafterConfig, weights: Weights) -> list[Trial]:
    info = TargetInfo(LAYERS, TRAINED.rope, MASK_CANDIDATES, probe.longest)
    before = probe.acceptance(drafter_of(config, weights))
    return try_variants(probe, weights, before, variants_of(config, info))


def swap_parts(weights: Weights) -> dict[str, Tensor]:
    first, second, third = torch.split(weights["fc.weight"], TRAINED.context_size, dim=1)
    return {**weights, "fc.weight": torch.cat([third, second, first], dim=1)}


def swap_layers(weights: Weights) -> dict[str, Tensor]:
    other = {"layers.0": "layers.1", "layers.1": "layers.0"}
    return {other.get(name[:8], name[:8]) + name[8:]: tensor for name, tensor in weights.items()}


def unchanged(weights: Weights) -> dict[str, Tensor]:
    return dict(weights)


FAULTS = {
    "taps-one-too-low": ({"target_layer_ids": (0, 1, 3)}, unchanged),
    "taps-one-too-high": ({"target_layer_ids": (2, 3, 5)}, unchanged),
    "tap-order": ({}, swap_parts),
    "causality": ({"layers": (LayerAttention(causal=True),) * 2}, unchanged),
    "window": ({"layers": (LayerAttention(window=6),) * 2}, unchanged),
    "rope-theta": ({"rope": Rope(theta=100.0)}, unchanged),
    "rope-fraction": ({"rope": Rope(theta=TRAINED.rope.theta, fraction=0.5)}, unchanged),
    "mask-token": ({"mask_token_id": 258}, unchanged),
    "layer-order": ({}, swap_layers),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_seeded_fault_is_named_first_and_its_edit_undoes_it(
    cause: str, probe: Probe, weights: dict[str, Tensor], healthy: list[TextAcceptance]
) -> None:
    fields, change = FAULTS[cause]
    faulty, damaged = replace(TRAINED, **fields), change(weights)  # type: ignore[arg-type]
    trials = trials_of(probe, faulty, damaged)
    findings = findings_of(trials)
    assert findings[0].name == cause
    assert findings[0].severity is not Severity.NOTE
    repair = repair_of(trials)
    assert repair is not None
    repaired = damaged if repair.weights is None else repair.weights(damaged)
    counts = probe.acceptance(drafter_of(repair.config, repaired))
    for one, other in zip(counts, healthy, strict=True):
        assert torch.equal(one.at_positions, other.at_positions)


def test_the_last_tap_after_the_final_norm_is_named(
    probe: Probe, weights: dict[str, Tensor]
) -> None:
    taps_last = replace(TRAINED, target_layer_ids=(1, 2, 5))
    info = TargetInfo(LAYERS, TRAINED.rope, (), probe.longest)
    normed = [v for v in variants_of(taps_last, info) if v.normed_last_tap]
    assert [variant.cause for variant in normed] == ["last-layer-norm"]
    first = probe.sequences[:1]
    plain = probe.states.tapped_at((1, 2, 5)).observe(first).states
    changed = probe.states.tapped_at((1, 2, 5), normed_last_tap=True).observe(first)
    width = TRAINED.context_size
    assert torch.equal(changed.states[..., :-width], plain[..., :-width])
    assert torch.equal(changed.states[..., -width:], changed.final)


def test_a_healthy_drafter_gets_no_finding(probe: Probe, weights: dict[str, Tensor]) -> None:
    trials = trials_of(probe, TRAINED, weights)
    assert findings_of(trials) == []
    assert repair_of(trials) is None


def test_all_drafts_of_the_drafters_own_text_are_accepted(
    healthy: list[TextAcceptance],
) -> None:
    drafts = TRAINED.max_draft_tokens
    for text in healthy:
        assert text.at_steps[:7] == [drafts] * 7
    table = offline_table(healthy, drafts)
    assert table.overall.length.value == pytest.approx(1 + drafts)
    assert list(table.by_context) == ["0 to 127"]
    lengths = [length.value for length in table.by_draft_tokens]
    assert len(lengths) == drafts
    assert 1 < lengths[0] < lengths[-1]
    assert table.by_draft_tokens[-1] == table.overall.length
    assert len({text.prompt for text in table.texts}) == table.overall.texts
    steps, tokens = (sum(getattr(t, name) for t in table.texts) for name in ("steps", "tokens"))
    assert tokens / steps == pytest.approx(table.overall.length.value)
    assert acceptance_findings(table.overall) == []


def test_rejected_drafts_without_a_known_cause_are_an_error(
    target: Path, model: nn.Module, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "drafter", weights, TRAINED, "zlab")
    draws = torch.randint(256, (6, 80), generator=torch.Generator().manual_seed(0)).tolist()
    noise = [Text("noise", draw[:20], draw[20:]) for draw in draws]
    found = diagnose(
        Probe(target, model, noise, range(LAYERS), torch.float32),
        read_target(target),
        read_checkpoint(tmp_path / "drafter"),
        TRAINED.max_draft_tokens,
        MASK_CANDIDATES,
        torch.float32,
        Progress.silent(),
    )
    assert [finding.name for finding in found.findings] == ["drafts-rejected"]
    assert found.repair is None
    assert len(found.tried) > 10


def test_fewer_draft_tokens_use_a_shorter_block_and_the_repair_keeps_the_whole_one(
    target: Path, model: nn.Module, probe: Probe, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    faulty = replace(TRAINED, mask_token_id=258)
    write_checkpoint(tmp_path / "faulty", weights, faulty, "zlab")
    checkpoint = read_checkpoint(tmp_path / "faulty")
    facts = read_target(target)
    found = diagnose(probe, facts, checkpoint, 2, MASK_CANDIDATES, torch.float32, Progress.silent())
    assert len(found.offline.overall.by_position) == 2
    if found.repair is not None:
        assert found.repair.config.block_size == TRAINED.block_size


def trial(gain: float, may_be_intended: bool) -> Trial:
    difference = Interval(value=gain, low=gain * 0.5, high=gain * 1.5)
    variant = Variant(
        "window", "sliding_window: None -> 8", TRAINED, may_be_intended=may_be_intended
    )
    measured = Gain(before=1.0, after=1.0 + gain, difference=difference, p_value=0.001)
    return Trial(variant, measured, texts=5, p_value=0.003)


def test_an_added_window_is_a_note_unless_its_gain_is_large() -> None:
    info = TargetInfo(LAYERS, TRAINED.rope, (), 5000)
    added = [v for v in variants_of(TRAINED, info) if v.cause == "window"]
    assert len(added) == 4
    assert all(variant.may_be_intended for variant in added)
    windowed = replace(TRAINED, layers=(LayerAttention(window=64),) * 2)
    taken_away = next(v for v in variants_of(windowed, info) if v.cause == "window")
    assert not taken_away.may_be_intended
    wide = replace(TRAINED, layers=(LayerAttention(window=6000),) * 2)
    narrowed = [
        v for v in variants_of(wide, info) if "-> None" not in v.edit and v.cause == "window"
    ]
    assert narrowed
    assert all(variant.may_be_intended for variant in narrowed)

    assert findings_of([trial(0.04, True)])[0].severity is Severity.NOTE
    assert repair_of([trial(0.04, True)]) is None
    assert findings_of([trial(0.04, False)])[0].severity is Severity.WARNING
    assert repair_of([trial(0.04, False)]) is not None
    assert findings_of([trial(0.4, True)])[0].severity is Severity.ERROR
    assert repair_of([trial(0.4, True)]) is not None
    assert findings_of([trial(0.005, False)]) == []


def few(texts: int, half: float, *, sets: int = 4, per_set: int | None = None) -> list[Finding]:
    length = Interval(value=2.0, low=2.0 - half, high=2.0 + half)
    table = AcceptanceTable(texts=texts, steps=40 * texts, length=length, by_position=[])
    return precision_findings(table, sets, per_set)


def test_an_imprecise_acceptance_length_is_too_few_texts() -> None:
    assert few(36, 0.19) == []
    (found,) = few(36, 0.31)
    assert (found.name, found.severity) == (TOO_FEW_TEXTS, Severity.WARNING)
    assert "2.00 (1.69 to 2.31): its 95% interval is ±16%, wider than ±10%" in found.message
    assert "about 87 texts would be enough" in found.message  # 36 times the square of 1.55
    assert "at least 87 prompts" in found.remedy
    assert "--prompts FILE" in found.remedy


def test_the_remedy_names_the_flag_that_limits_the_texts() -> None:
    (found,) = few(12, 0.39, per_set=3)
    assert "--texts 12 or more" in found.remedy  # 46 texts of 4 sets


def test_few_texts_are_undecided_however_alike_they_are() -> None:
    for texts in (1, 3, MIN_TEXTS - 1):
        (found,) = few(texts, 0.01)
        assert "interval of the acceptance length needs more than" in found.message
        assert found.evidence["enough"] == MIN_TEXTS
    assert few(MIN_TEXTS, 0.01) == []


@pytest.mark.parametrize(
    ("length", "name"),
    [(0, "0 to 127"), (127, "0 to 127"), (128, "128 to 255"), (5000, "4096 and more")],
)
def test_context_buckets(length: int, name: str) -> None:
    assert context_bucket(length) == name


def test_other_modes_have_other_tokens(target: Path) -> None:
    modes = other_modes((), target, Chat(target, thinking=False), max_tokens=400)
    assert set(modes) == {"without the chat template", "with thinking"}
    assert all(modes.values())


def test_a_mode_with_higher_acceptance_is_named(
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


def up_by_one(drafter: Path) -> Variant:
    return next(iter(shifted_taps(read_checkpoint(drafter).config, TARGET_INFO)))


@pytest.mark.parametrize("to", ["zlab", "speculators"])
def test_a_repair_changes_one_field_and_keeps_all_else(
    drafter: Path, tmp_path: Path, to: str
) -> None:
    if to == "speculators":
        convert(drafter, tmp_path / "converted", "speculators", "some/target")
        drafter = tmp_path / "converted"
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"made_by": "somebody"}))
    before = read_checkpoint(drafter)
    fixed = write_repaired(drafter, up_by_one(drafter), tmp_path / "fixed")
    assert fixed.config == replace(before.config, target_layer_ids=(2, 3, 4))
    assert fixed.format == to
    assert fixed.target_name == before.target_name
    assert fixed.draft_tokens == before.draft_tokens
    assert fixed.kept == before.kept
    assert fixed.kept["made_by"] == "somebody"
    old, new = load_weights(before), load_weights(fixed)
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert read_checkpoint(drafter) == before


def test_a_repair_of_weights(drafter: Path, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(drafter)
    reverse = next(iter(tap_order(checkpoint.config, TARGET_INFO)))
    fixed = write_repaired(drafter, reverse, tmp_path / "fixed")
    old, new = load_weights(checkpoint)["fc.weight"], load_weights(fixed)["fc.weight"]
    first, second, third = old.split(checkpoint.config.context_size, dim=1)
    assert torch.equal(new, torch.cat([third, second, first], dim=1))


def test_a_repair_fills_in_the_number_of_target_layers(drafter: Path, tmp_path: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    del config["num_target_layers"]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_target_layers"):
        write_repaired(drafter, up_by_one(drafter), tmp_path / "fixed")
    fixed = write_repaired(drafter, up_by_one(drafter), tmp_path / "fixed", target_layers=6)
    assert fixed.config.target_num_layers == 6


def test_a_repair_overwrites_nothing(drafter: Path, tmp_path: Path) -> None:
    before = (drafter / "config.json").read_bytes()
    for out in (drafter, tmp_path):
        with pytest.raises(CheckpointError, match="a new or empty folder"):
            write_repaired(drafter, up_by_one(drafter), out)
    assert (drafter / "config.json").read_bytes() == before


def test_a_repair_that_no_file_can_hold_is_refused(drafter: Path, tmp_path: Path) -> None:
    config = replace(read_checkpoint(drafter).config, target_layer_ids=(1, 2, 5))
    (variant,) = last_norm(config, TARGET_INFO)
    with pytest.raises(CheckError, match="last-layer-norm"):
        write_repaired(drafter, variant, tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()
