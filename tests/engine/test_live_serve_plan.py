"""`leadout serve --live`: the flags it becomes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadout.control.tuned_file import Model, write_tuned
from leadout.engine.scheduler import make_control
from leadout.engine.serve_plan import Plan, make_plan
from leadout.engine.settings import LIVE, SCHEDULER, LiveSettings, ServeSettings, read_section
from leadout.engine.vllm_flags import vllm_config_of
from leadout.models import fingerprint
from leadout.settings import SettingsError
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.models import tiny_llama
from support.tuned_files import a_tuning

FLAGS = ("--max-model-len", "128", "--max-num-seqs", "8")
K = TINY_DRAFTER.max_draft_tokens
SAMPLED = '{"method": "dflash", "draft_sample_method": "%s"}'


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama().save_pretrained(folder / "target")
    config = replace(TINY_DRAFTER, target_num_layers=4)
    return folder / "target", write_random_drafter(folder / "drafter", config)


def plan_of(pair: tuple[Path, Path], *flags: str, tuned: Path | None = None) -> Plan:
    return make_plan(
        ServeSettings(
            target=str(pair[0]),
            draft=str(pair[1]),
            vllm_flags=(*FLAGS, *flags),
            tuned=tuned,
            live=True,
        )
    )


def config_of(plan: Plan, target: Path) -> Any:
    flags = plan.command[plan.command.index("--max-model-len") :]
    return vllm_config_of(str(target), flags)


def test_adaptive_verification_is_refused(pair: tuple[Path, Path]) -> None:
    flags = ("--speculative-config", '{"enable_adaptive_verification": true}')
    with pytest.raises(SettingsError, match="--live cannot be combined with enable_adaptive_verif"):
        plan_of(pair, *flags)


def test_live_control_reaches_vllms_config(pair: tuple[Path, Path]) -> None:
    plan = plan_of(pair, "--additional-config", '{"other": 1}')
    config = config_of(plan, pair[0])
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert read_section(config, LIVE, LiveSettings) == LiveSettings()
    assert config.additional_config["other"] == 1
    assert config.speculative_config.num_speculative_tokens == K
    assert any(note.startswith("--live: K is the maximum") for note in plan.notes)


def test_a_tuned_file_is_the_start_of_live_control_not_a_table(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    names = {
        role: Model(name=str(folder), fingerprint=fingerprint(folder))
        for role, folder in zip(("target", "drafter"), pair, strict=True)
    }
    write_tuned(a_tuning([0.02, 0.0, 0.0, 0.0], **names), path)
    plan = plan_of(pair, tuned=path)
    speculation = json.loads(plan.command[plan.command.index("--speculative-config") + 1])
    assert speculation["num_speculative_tokens"] == K
    assert "num_speculative_tokens_per_batch_size" not in speculation
    assert read_section(config_of(plan, pair[0]), LIVE, LiveSettings).tuned == path.resolve()


def test_another_scheduler_or_method_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(SettingsError, match=r"--live cannot be combined with --scheduler-cls a\.b"):
        plan_of(pair, "--scheduler-cls", "a.b")
    ngram = '{"method": "ngram", "num_speculative_tokens": 2}'
    with pytest.raises(SettingsError, match=r"--live works with the method dflash only.* ngram"):
        plan_of(pair, "--speculative-config", ngram)


@pytest.mark.parametrize(("method", "looks_up"), [("greedy", True), ("probabilistic", False)])
def test_prompt_lookup_needs_drafts_that_are_not_sampled(
    pair: tuple[Path, Path], method: str, looks_up: bool
) -> None:
    plan = plan_of(pair, "--no-async-scheduling", "--speculative-config", SAMPLED % method)
    config = config_of(plan, pair[0])
    assert config.speculative_config.draft_sample_method == method
    assert not config.use_v2_model_runner
    assert bool(make_control(config)._min_match) == looks_up
