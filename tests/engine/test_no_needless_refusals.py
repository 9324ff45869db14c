"""What stock vLLM serves is served: the plans of `leadout serve`, up to vLLM's own config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from leadout.checkpoints import write_checkpoint
from leadout.control.tuned_file import Model, write_tuned
from leadout.engine.serve_plan import Plan, make_plan
from leadout.engine.settings import (
    DRAFT_TABLE,
    DraftTableSettings,
    ServeSettings,
    restore_draft_table,
    sections_of,
    with_section,
)
from leadout.engine.vllm_flags import vllm_config_of
from leadout.models import fingerprint
from leadout.settings import SettingsError
from support.drafters import (
    TINY_DRAFTER,
    edit_config,
    random_weights,
    write_random_drafter,
)
from support.tuned_files import a_tuning

FLAGS = ("--max-model-len", "128", "--max-num-seqs", "8")
K = TINY_DRAFTER.max_draft_tokens


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return write_random_drafter(tmp_path / "drafter", replace(TINY_DRAFTER, target_num_layers=4))


def plan_of(target: Path | str, drafter: Path | str | None, *flags: str, **settings: Any) -> Plan:
    draft = None if drafter is None else str(drafter)
    return make_plan(
        ServeSettings(target=str(target), draft=draft, vllm_flags=(*FLAGS, *flags), **settings)
    )


def config_of(plan: Plan, target: Path) -> Any:
    return vllm_config_of(str(target), plan.command[plan.command.index("--max-model-len") :])


def value_of(plan: Plan, flag: str) -> Any:
    return json.loads(plan.command[plan.command.index(flag) + 1])


def test_the_users_token_budget_is_kept(target: Path, drafter: Path) -> None:
    plan = plan_of(target, drafter, "--max-num-batched-tokens", "32")
    config = config_of(plan, target)
    assert config.scheduler_config.max_num_batched_tokens == 32
    (note,) = [note for note in plan.notes if note.startswith("batched-tokens: ")]
    assert "3 of up to 8 requests" in note
    assert "--max-num-batched-tokens 72 and --max-num-scheduled-tokens 40" in note


def test_vllms_token_budget_is_kept(target: Path, drafter: Path) -> None:
    flags = ("--max-num-seqs", "1024")
    config = config_of(plan_of(target, drafter, *flags), target)
    bare = vllm_config_of(str(target), [*FLAGS, *flags])
    budgets = [each.scheduler_config.max_num_batched_tokens for each in (config, bare)]
    assert budgets[0] == budgets[1]
    assert budgets[0] < 1024 * (1 + 2 * K)


def test_float16_is_served_with_a_warning(target: Path, drafter: Path) -> None:
    plan = plan_of(target, drafter, "--dtype", "float16")
    assert any(note.startswith("dtype: dtype is float16") for note in plan.notes)
    assert config_of(plan, target).model_config.dtype == torch.float16


def test_a_trained_mask_embedding_and_scaled_logits_are_served(target: Path, drafter: Path) -> None:
    torch.save(torch.ones(TINY_DRAFTER.hidden_size), drafter / "mask_embedding.pt")
    edit_config(drafter, lambda config: config.update(logit_scale=0.5))
    plan = plan_of(target, drafter)
    assert "--speculative-config" in plan.command
    assert len([note for note in plan.notes if "left to vLLM" in note]) == 2


# Data parallelism of a dense target: every rank is an engine of its own.

RANKS = ("--data-parallel-size", "2")


def test_live_control_and_capture_with_ranks(target: Path, drafter: Path, tmp_path: Path) -> None:
    plan = plan_of(target, drafter, *RANKS, live=True, capture=tmp_path / "captured")
    config = config_of(plan, target)
    assert config.parallel_config.data_parallel_size == 2
    assert {"live", "capture"} <= sections_of(config).keys()


def test_a_tuned_table_with_ranks(target: Path, drafter: Path, tmp_path: Path) -> None:
    names = {
        role: Model(name=str(folder), fingerprint=fingerprint(folder))
        for role, folder in (("target", target), ("drafter", drafter))
    }
    tuned = a_tuning([0.9, 0.8, 0.7, 0.6], **names)
    tuned = tuned.model_copy(update={"table": [(1, 4, 3), (5, 16, 0)]})
    write_tuned(tuned, tmp_path / "tuned.json")
    plan = plan_of(target, drafter, *RANKS, tuned=tmp_path / "tuned.json")
    config = config_of(plan, target)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    restore_draft_table(config)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    # What vLLM does in the engine of a rank.
    config.parallel_config.reconfigure_for_independent_dp_rank()
    restore_draft_table(config)
    table = config.speculative_config.num_speculative_tokens_per_batch_size
    assert table == [(1, 4, 3), (5, 8, 0)]


def test_experts_in_ranks_are_refused(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import ModelConfig

    # Stands for a mixture of experts, which would have to be downloaded.
    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda self: True))
    with pytest.raises(SettingsError, match=r"--live with a mixture of experts .* got 2"):
        plan_of(target, drafter, *RANKS, live=True)


def test_an_engine_without_ranks_has_no_table_to_restore() -> None:
    config = SimpleNamespace(additional_config={}, speculative_config=None)
    restore_draft_table(config)
    rows = ((1, 4, 3),)
    additional = with_section({}, DRAFT_TABLE, DraftTableSettings(rows=rows))
    assert additional == {"leadout": {"draft_table": {"rows": [[1, 4, 3]]}}}


# Where models come from.


def test_the_drafters_revision_and_folder_are_vllms(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **settings: Any) -> str:
        asked.append({"name": name, **settings})
        return str(drafter)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    speculation = '{"revision": "v2"}'
    # No network: vLLM's own lookup fails after Leadout's.
    with pytest.raises(SettingsError, match="vLLM refuses these settings"):
        plan_of(
            target,
            "acme/drafter",
            *("--speculative-config", speculation, "--download-dir", "/models"),
        )
    assert [(call["revision"], call["cache_dir"]) for call in asked] == [("v2", "/models")]


def test_a_revision_belongs_to_the_named_checkpoint(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    from leadout.checkpoints import convert

    named = tmp_path / "speculators"
    convert(drafter, named, "speculators", str(target))
    plan = plan_of(named, None, "--revision", "v2", "--tokenizer", str(target))
    assert value_of(plan, "--speculative-config")["revision"] == "v2"
    assert "--revision" not in plan.command
    assert plan.command[plan.command.index("--tokenizer") + 1] == str(target)


@pytest.mark.parametrize("name", ["s3://bucket/model", "/models/tiny.Q4_K_M.gguf"])
def test_targets_that_only_vllm_can_fetch_are_passed_on(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, None)
    assert name in plan.command
    with pytest.raises(SettingsError, match="--capture needs a target whose files"):
        plan_of(name, None, capture=tmp_path / "captured")


@pytest.mark.parametrize("flag", ["--draft", "--spec-model"])
def test_drafters_that_only_vllm_can_fetch_are_passed_on(
    flag: str, target: Path, tmp_path: Path
) -> None:
    name = "s3://bucket/drafter"
    flags = ("--spec-tokens", "3", *(("--spec-model", name) if flag == "--spec-model" else ()))
    drafter = name if flag == "--draft" else None
    plan = plan_of(target, drafter, *flags, capture=tmp_path / "captured")
    assert value_of(plan, "--speculative-config") == {
        "method": "dflash",
        "model": name,
        "num_speculative_tokens": 3,
    }
    assert "--spec-tokens" not in plan.command
    assert f"drafter {name}: only vLLM can fetch it; passed on, not examined" in plan.notes
    with pytest.raises(SettingsError, match=f"--live needs a drafter .* got {name}"):
        plan_of(target, drafter, *flags, live=True)


# Speculation in vLLM's single flags.


def test_single_flags_name_the_drafter(target: Path, drafter: Path) -> None:
    plan = plan_of(target, None, "--spec-model", str(drafter), "--spec-tokens", "2")
    speculation = value_of(plan, "--speculative-config")
    assert speculation == {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 2}
    config = config_of(plan, target).speculative_config
    assert (config.method, config.num_speculative_tokens) == ("dflash", 2)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_reduced_vocabulary_needs_no_logits_of_the_targets(
    target: Path, tmp_path: Path, method: str
) -> None:
    config = replace(TINY_DRAFTER, target_num_layers=4, own_head=True, draft_vocab_size=80)
    drafter = tmp_path / "reduced"
    weights = random_weights(config)
    write_checkpoint(drafter, weights, config, "speculators", target_name=str(target))
    asked = json.dumps({"draft_sample_method": method})
    made = config_of(plan_of(target, drafter, "--speculative-config", asked), target)
    assert made.speculative_config.use_local_argmax_reduction == (method == "greedy")


def test_another_method_in_single_flags_is_passed_on(target: Path) -> None:
    flags = ("--spec-method", "ngram", "--spec-tokens", "2")
    plan = plan_of(target, None, *flags)
    assert plan.command[-len(flags) :] == [*flags]
    assert "speculation with ngram: passed on to vLLM, not examined" in plan.notes
    with pytest.raises(SettingsError, match="--live works with the method dflash only"):
        plan_of(target, None, *flags, live=True)
