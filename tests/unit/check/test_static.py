"""Every static gate fires on its fault, and stays silent for a pair that is in order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leadout import environment
from leadout.check import record, static
from leadout.check.result import Finding, Gravity
from leadout.check.static import static_findings
from leadout.check.weights import coarseness
from leadout.data.chat import Chat
from leadout.models import fingerprint
from leadout.pairing import read_target
from leadout.train import export
from leadout.train.config import TrainConfig
from leadout.train.progress import TrainReport
from support.faults import FAULTS, LOAD, Fault, healthy_reduced, healthy_speculators
from support.tiny_chat import END_OF_TEXT, END_OF_TURN, START_OF_TURN

SETTINGS_FAULTS = {"causality", "positions", "batched-tokens", "mixed-layers", "non-causal-backend"}
LOW_MASK = 7  # below every vocabulary that a fault makes
FILE_FAULTS = [fault for fault in FAULTS if fault.rule not in SETTINGS_FAULTS]


def names(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings]


def only(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


def set_mask(drafter: Path, token: int) -> None:
    edit_json(drafter / "config.json", lambda c: c["dflash_config"].update(mask_token_id=token))


def test_a_pair_in_order_gives_no_finding(target: Path, drafter: Path) -> None:
    assert static_findings(target, drafter) == []
    assert static_findings(target, drafter, draft_tokens=4, dtype="float32", thinking=True) == []


@pytest.mark.parametrize("make", [healthy_speculators, healthy_reduced])
def test_the_other_format_gives_notes_at_most(
    target: Path, drafter: Path, tmp_path: Path, make: Callable[..., Path]
) -> None:
    made = make(drafter, tmp_path / "made", read_target(target))
    found = static_findings(target, made)
    assert {finding.gravity for finding in found} <= {Gravity.NOTE}, found


def test_it_imports_neither_engine_nor_model_library(target: Path, drafter: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from leadout.check.static import static_findings\n"
        f"assert static_findings(Path({str(target)!r}), Path({str(drafter)!r})) == []\n"
        "print([m for m in ('vllm', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("fault", FILE_FAULTS, ids=lambda fault: fault.name)
def test_seeded_faults_are_found(fault: Fault, target: Path, drafter: Path, tmp_path: Path) -> None:
    set_mask(drafter, LOW_MASK)
    made = fault.make(drafter, tmp_path / "faulty", read_target(target))
    arguments = fault.engine_arguments
    found = static_findings(
        target,
        made,
        draft_tokens=arguments.get("num_speculative_tokens"),
        dtype=arguments.get("dtype", "auto"),
    )
    if fault.rule == LOAD:
        assert found
        assert Gravity.UNFIT in {finding.gravity for finding in found}
    else:
        assert fault.rule in names(found)
    assert all(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("rule", "gravity"),
    [
        ("layer-order", Gravity.UNFIT),
        ("rope", Gravity.DOUBTFUL),
        ("partial-rotary", Gravity.DOUBTFUL),
        ("verifier", Gravity.NOTE),  # quantised copies of a target break it
        ("vocabulary-padding", Gravity.NOTE),
        ("logit-scaling", Gravity.NOTE),
    ],
)
def test_gravity_of_broken_rules(
    rule: str, gravity: Gravity, target: Path, drafter: Path, tmp_path: Path
) -> None:
    (fault,) = [each for each in FAULTS if each.rule == rule]
    set_mask(drafter, LOW_MASK)
    made = fault.make(drafter, tmp_path / "faulty", read_target(target))
    assert only(static_findings(target, made), rule).gravity is gravity


class TestTarget:
    def test_without_a_config(self, target: Path, drafter: Path) -> None:
        (target / "config.json").unlink()
        found = only(static_findings(target, drafter), "target-unreadable")
        assert found.gravity is Gravity.UNFIT
        assert "config.json" in found.message

    def test_a_cut_weight_file(self, target: Path, drafter: Path) -> None:
        with (target / "model.safetensors").open("r+b") as file:
            file.truncate(10_000)
        found = only(static_findings(target, drafter), "target-unreadable")
        assert found.gravity is Gravity.UNFIT

    def test_a_missing_shard(self, target: Path, drafter: Path) -> None:
        index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
        found = only(static_findings(target, drafter), "target-incomplete")
        assert "model-2.safetensors" in found.message

    def test_weights_elsewhere_are_a_note(self, target: Path, drafter: Path) -> None:
        (target / "model.safetensors").unlink()
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("target-weights-absent", Gravity.NOTE)

    def test_embedding_of_other_rows(self, target: Path, drafter: Path) -> None:
        name = "model.embed_tokens.weight"
        edit_weights(target, lambda w: w.update({name: w[name][:300].contiguous()}))
        found = only(static_findings(target, drafter), "target-embedding")
        assert found.evidence == {"rows": 300, "vocab_size": 320}

    def test_float16_by_its_own_config(self, target: Path, drafter: Path) -> None:
        edit_json(target / "config.json", lambda c: c.update(dtype="float16"))
        assert only(static_findings(target, drafter), "dtype").gravity is Gravity.UNFIT
        assert static_findings(target, drafter, dtype="bfloat16") == []

    def test_shorter_drafter_positions_are_a_note(self, target: Path, drafter: Path) -> None:
        edit_json(drafter / "config.json", lambda c: c.update(max_position_embeddings=128))
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("positions", Gravity.NOTE)
        assert "--max-model-len 128" in found.remedy


class TestTokens:
    def test_no_chat_template(self, target: Path, drafter: Path) -> None:
        (target / "chat_template.jinja").unlink()
        found = only(static_findings(target, drafter), "chat-template-missing")
        assert found.gravity is Gravity.DOUBTFUL

    def test_a_template_in_the_tokenizers_settings_counts(
        self, target: Path, drafter: Path
    ) -> None:
        text = (target / "chat_template.jinja").read_text()
        (target / "chat_template.jinja").unlink()
        named = [{"name": "tools", "template": "x"}, {"name": "default", "template": text}]
        for stated in (text, named):
            edit_json(
                target / "tokenizer_config.json", lambda c, t=stated: c.update(chat_template=t)
            )
            assert static_findings(target, drafter) == []

    def test_no_tokenizer(self, target: Path, drafter: Path) -> None:
        (target / "tokenizer.json").unlink()
        found = only(static_findings(target, drafter), "tokenizer-missing")
        assert found.gravity is Gravity.DOUBTFUL
        (target / "tokenizer.model").write_bytes(b"")
        found = only(static_findings(target, drafter), "tokenizer-not-examined")
        assert found.gravity is Gravity.NOTE

    def test_a_broken_tokenizer(self, target: Path, drafter: Path) -> None:
        (target / "tokenizer.json").write_text("{}")
        found = only(static_findings(target, drafter), "tokenizer-unreadable")
        assert found.gravity is Gravity.UNFIT

    @pytest.mark.parametrize(
        ("special", "gravity"), [(False, Gravity.DOUBTFUL), (True, Gravity.NOTE)]
    )
    def test_a_token_beyond_the_embedding(
        self, target: Path, drafter: Path, special: bool, gravity: Gravity
    ) -> None:
        def add(content: dict[str, Any]) -> None:
            last = dict(content["added_tokens"][-1])
            content["added_tokens"].append(last | {"id": 320, "content": "@@", "special": special})

        edit_json(target / "tokenizer.json", add)
        found = only(static_findings(target, drafter), "tokenizer-beyond-embedding")
        assert found.gravity is gravity
        assert "id 320" in found.message

    def test_tokens_that_the_drafter_lacks(self, target: Path, drafter: Path) -> None:
        edit_json(drafter / "config.json", lambda c: c.update(vocab_size=318))
        set_mask(drafter, 300)
        found = only(static_findings(target, drafter), "tokens-never-drafted")
        assert found.evidence == {"tokens": 2, "drafter_rows": 318}

    @pytest.mark.parametrize(
        ("token", "why"),
        [
            (65, "a token of ordinary text"),
            (END_OF_TURN, "the target's end-of-text token"),
            (END_OF_TEXT, "the target's end-of-text token"),  # it pads too
            (START_OF_TURN, "a token that the chat template writes"),
        ],
    )
    def test_a_mask_that_text_contains(
        self, target: Path, drafter: Path, token: int, why: str
    ) -> None:
        set_mask(drafter, token)
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("mask-in-text", Gravity.DOUBTFUL)
        assert why in found.message

    def test_a_mask_that_only_pads_is_a_note(self, target: Path, drafter: Path) -> None:
        set_mask(drafter, 300)
        edit_json(target / "config.json", lambda c: c.update(pad_token_id=300))
        assert only(static_findings(target, drafter), "mask-in-text").gravity is Gravity.NOTE


def rounded(matrix: Tensor, group: int, levels: int = 15, along_rows: bool = False) -> Tensor:
    """To so many levels for each group, as 4-bit formats do."""
    if along_rows:
        return rounded(matrix.T.contiguous(), group, levels).T.contiguous()
    groups = matrix.float().reshape(-1, group)
    scale = groups.abs().amax(-1, keepdim=True) / (levels // 2)
    return ((groups / scale).round() * scale).reshape(matrix.shape).to(matrix.dtype)


class TestWeights:
    @pytest.mark.parametrize("group", [32, 64])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_quantised(self, target: Path, drafter: Path, group: int, dtype: torch.dtype) -> None:
        def quantise(weights: dict[str, Tensor]) -> None:
            for name, tensor in weights.items():
                changed = rounded(tensor, group) if name.startswith("layers.1.mlp.up") else tensor
                weights[name] = changed.to(dtype)

        edit_weights(drafter, quantise)
        found = only(static_findings(target, drafter), "weights-quantised")
        assert found.gravity is Gravity.DOUBTFUL
        assert found.evidence["matrices"] == 1
        assert found.evidence["group"] == group
        assert found.evidence["along"] == "columns"
        assert 1 < int(str(found.evidence["distinct"])) <= 15
        assert "layers.1.mlp.up_proj.weight" in found.message

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_trained_like_weights_are_not_coarse(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        for shape in ((64, 32), (96, 64), (256, 1024)):
            assert coarseness((0.02 * torch.randn(shape)).to(dtype)) is None
        heavy_tailed = torch.distributions.StudentT(3.0).sample((256, 256)).to(dtype)
        assert coarseness(heavy_tailed) is None

    def test_groups_along_either_side_and_whole_rows(self) -> None:
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

    def test_not_finite(self, target: Path, drafter: Path) -> None:
        edit_weights(drafter, lambda w: w["layers.0.mlp.up_proj.weight"][3, :2].fill_(float("inf")))
        found = only(static_findings(target, drafter), "weights-not-finite")
        assert found.gravity is Gravity.UNFIT
        assert found.evidence == {"values": 2, "tensors": 1}

    @pytest.mark.parametrize(
        ("name", "gravity"),
        [
            ("fc.weight", Gravity.UNFIT),
            ("norm.weight", Gravity.UNFIT),
            ("layers.2.self_attn.o_proj.weight", Gravity.DOUBTFUL),
            ("layers.0.self_attn.k_norm.weight", Gravity.DOUBTFUL),
        ],
    )
    def test_dead(self, target: Path, drafter: Path, name: str, gravity: Gravity) -> None:
        edit_weights(drafter, lambda w: w[name].zero_())
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("weights-dead", gravity)
        assert name in found.message

    def test_norms_of_ones_are_where_norms_start(self, target: Path, drafter: Path) -> None:
        edit_weights(drafter, lambda w: w["layers.0.self_attn.k_norm.weight"].fill_(1.0))
        assert static_findings(target, drafter) == []


class TestRecord:
    @pytest.fixture
    def written(self, target: Path, drafter: Path) -> dict[str, Any]:
        config = {"layers": 3, "block_size": 5, "target_layer_ids": [1, 2, 3], "mask_token_id": 319}
        content = {
            "target": "tiny-target",
            "target_fingerprint": fingerprint(target),
            "template_hash": Chat(target).template_hash,
            "thinking": None,
            "config": config,
            "field_of_a_later_version": 1,
        }
        (drafter / "training.json").write_text(json.dumps(content))
        return content

    @pytest.mark.usefixtures("written")
    def test_of_the_same_target(self, target: Path, drafter: Path) -> None:
        assert static_findings(target, drafter) == []

    @pytest.mark.usefixtures("written")
    def test_a_target_trained_further(self, target: Path, drafter: Path) -> None:
        edit_weights(target, lambda w: w["model.norm.weight"].add_(0.01))
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("other-target", Gravity.DOUBTFUL)

    @pytest.mark.usefixtures("written")
    def test_no_alarm_where_the_weights_are_elsewhere(self, target: Path, drafter: Path) -> None:
        (target / "model.safetensors").unlink()
        assert names(static_findings(target, drafter)) == ["target-weights-absent"]

    @pytest.mark.usefixtures("written")
    def test_another_template(self, target: Path, drafter: Path) -> None:
        with (target / "chat_template.jinja").open("a") as file:
            file.write("{{ 'Be brief.' }}")
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("other-template", Gravity.DOUBTFUL)

    @pytest.mark.parametrize(
        ("trained", "checked", "gravity"),
        [
            (True, False, Gravity.DOUBTFUL),
            (None, False, Gravity.NOTE),
            (False, False, None),
        ],
    )
    def test_thinking(
        self,
        target: Path,
        drafter: Path,
        written: dict[str, Any],
        trained: bool | None,
        checked: bool,
        gravity: Gravity | None,
    ) -> None:
        (drafter / "training.json").write_text(json.dumps(written | {"thinking": trained}))
        found = static_findings(target, drafter, thinking=checked)
        assert [(each.name, each.gravity) for each in found] == (
            [] if gravity is None else [("other-thinking", gravity)]
        )

    @pytest.mark.usefixtures("written")
    def test_a_config_edited_since(self, target: Path, drafter: Path) -> None:
        edit_json(
            drafter / "config.json",
            lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2], mask_token_id=310),
        )
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("not-as-trained", Gravity.DOUBTFUL)
        assert "target_layer_ids [0, 1, 2], trained with [1, 2, 3]" in found.message
        assert "mask_token_id 310, trained with 319" in found.message

    @pytest.mark.usefixtures("written")
    def test_an_old_record_without_fingerprints(self, target: Path, drafter: Path) -> None:
        names_ = ("target_fingerprint", "template_hash", "thinking")
        edit_json(drafter / "training.json", lambda c: [c.pop(name) for name in names_])
        edit_weights(target, lambda w: w["model.norm.weight"].add_(0.01))
        assert static_findings(target, drafter, thinking=True) == []

    def test_it_reads_what_training_writes(self) -> None:
        assert record.RECORD == export.RECORD
        assert set(record.TrainingRecord.model_fields) <= set(TrainReport.model_fields)
        assert set(record.TrainedConfig.model_fields) <= set(TrainConfig.model_fields)

    def test_another_file_of_that_name(self, target: Path, drafter: Path) -> None:
        (drafter / "training.json").write_text("[]")
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("record-unreadable", Gravity.NOTE)


class TestVersions:
    def test_an_engine_out_of_range(
        self, monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path
    ) -> None:
        monkeypatch.setattr(static, "installed_version", lambda _: "0.33.0")
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("engine-version", Gravity.DOUBTFUL)
        assert "0.33.0" in found.message

    def test_no_engine_is_a_note(
        self, monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path
    ) -> None:
        monkeypatch.setattr(static, "installed_distribution", lambda: None)
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("engine-missing", Gravity.NOTE)

    def test_a_companion_of_another_build(
        self, monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path
    ) -> None:
        versions = {"torch": "2.13.0+cpu", "torchaudio": "2.13.0"}
        monkeypatch.setattr(environment, "installed_version", versions.get)
        (found,) = static_findings(target, drafter)
        assert (found.name, found.gravity) == ("torch-companion", Gravity.DOUBTFUL)
        assert found.remedy == "run 'pip uninstall torchaudio'"
