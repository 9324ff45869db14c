"""Seeded faults through a real engine: refused before the first request, or served right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from leadout.checkpoints import CheckpointError, write_checkpoint
from leadout.cli.app import app
from leadout.engine.pair import UnfitPairError
from leadout.engine.serve_plan import Plan, make_plan
from leadout.engine.settings import SCHEDULER, ServeSettings
from leadout.pairing import TargetFacts, read_target
from support.drafters import TINY_DRAFTER, random_drafter
from support.faults import (
    FAULTS,
    LOAD,
    Fault,
    healthy_reduced,
    healthy_speculators,
    serve_flags,
)

CONFIG = replace(TINY_DRAFTER, target_num_layers=4)
# On this machine's engine, and not only in another's.
HERE = [fault for fault in FAULTS if not fault.engine_facts]
WARNINGS = {"vocabulary-padding", "verifier", "rope", "partial-rotary", "logit-scaling"}
WARNINGS |= {"dtype", "batched-tokens"}
REFUSED = [f for f in HERE if f.rule not in WARNINGS and not f.is_corrected]
# In an engine: files that cannot be loaded, a value in the weights, a rule; nightly more rules.
STARTED = {"missing-down-proj", "nan-weight", "tap-beyond-target"}
NIGHTLY = {"taps-reversed", "mask-beyond-target", "short-positions", "two-thirds-of-the-vocabulary"}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "healthy"
    write_checkpoint(folder, random_drafter(CONFIG).state_dict(), CONFIG, "zlab")
    return folder


def start_engine(target: Path, drafter: Path, fault: Fault | None) -> list[int]:
    """Start an engine on the pair, answer one request, and end it."""
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = dict(fault.engine_arguments) if fault else {}
    speculation = {
        "method": "dflash",
        "model": str(drafter),
        "num_speculative_tokens": arguments.pop("num_speculative_tokens", 4),
    }
    settings = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, **arguments}
    llm = LLM(
        model=str(target),
        skip_tokenizer_init=True,
        enforce_eager=True,
        speculative_config=speculation,
        **settings,
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 9, 2]}], params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, id=fault.name, marks=pytest.mark.nightly if fault.name in NIGHTLY else ()
        )
        for fault in REFUSED
        if fault.name in STARTED | NIGHTLY
    ],
)
def test_the_engine_refuses_before_the_first_request(
    target: Path, drafter: Path, tmp_path: Path, fault: Fault
) -> None:
    faulty = fault.make(drafter, tmp_path / "faulty", read_target(target))
    with pytest.raises((UnfitPairError, CheckpointError)) as refused:
        start_engine(target, faulty, fault)
    if fault.rule != LOAD:
        assert f"{fault.rule}: " in str(refused.value)


@pytest.fixture(scope="module")
def expected(target: Path, drafter: Path) -> list[int]:
    return start_engine(target, drafter, None)


@pytest.mark.parametrize("make", [healthy_speculators, healthy_reduced])
def test_every_healthy_pair_starts_and_answers_alike(
    target: Path, drafter: Path, expected: list[int], tmp_path: Path, make: Any
) -> None:
    made = make(drafter, tmp_path / "drafter", read_target(target))
    answer = start_engine(target, made, None)
    assert len(answer) == 8
    assert answer == expected


# `leadout serve`, up to the command it would become.


def plan_for(
    fault: Fault, target: Path, faulty: Path, if_unfit: Literal["refuse", "bare"] = "refuse"
) -> Plan:
    flags = serve_flags(fault, max_model_len=128, dtype="float32", max_num_seqs=4)
    return make_plan(
        ServeSettings(target=str(target), draft=str(faulty), if_unfit=if_unfit, vllm_flags=flags)
    )


@pytest.fixture(scope="module")
def facts(target: Path) -> TargetFacts:
    return read_target(target)


@pytest.mark.parametrize("fault", REFUSED, ids=lambda fault: fault.name)
def test_leadout_serve_refuses_or_serves_bare(
    target: Path, drafter: Path, facts: TargetFacts, tmp_path: Path, fault: Fault
) -> None:
    faulty = fault.make(drafter, tmp_path / "faulty", facts)
    with pytest.raises((UnfitPairError, CheckpointError)) as refused:
        plan_for(fault, target, faulty)
    assert fault.rule == LOAD or f"{fault.rule}: " in str(refused.value)

    bare = plan_for(fault, target, faulty, if_unfit="bare")
    assert "--speculative-config" not in bare.command
    assert str(refused.value) in bare.notes[-1]


def test_the_exit_code_for_an_unfit_pair_is_1(
    target: Path, drafter: Path, facts: TargetFacts, tmp_path: Path
) -> None:
    (fault,) = [fault for fault in HERE if fault.name == "tap-beyond-target"]
    faulty = fault.make(drafter, tmp_path / "faulty", facts)
    command = ["serve", str(target), "--draft", str(faulty), "--plan", "--max-model-len", "128"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "error: target and drafter do not fit" in refused.stderr
    assert refused.stdout == ""


def test_more_drafts_than_the_block_holds_are_reduced(target: Path, drafter: Path) -> None:
    (fault,) = [fault for fault in HERE if fault.name == "drafts-beyond-block"]
    plan = plan_for(fault, target, drafter)
    speculation = plan.command[plan.command.index("--speculative-config") + 1]
    assert '"num_speculative_tokens": 4' in speculation
    assert any(
        note.startswith("draft-tokens: num_speculative_tokens 15 reduced to 4")
        for note in plan.notes
    )


def test_a_pair_with_a_warning_is_served(
    target: Path, drafter: Path, facts: TargetFacts, tmp_path: Path
) -> None:
    (fault,) = [fault for fault in HERE if fault.rule == "rope"]
    plan = plan_for(fault, target, fault.make(drafter, tmp_path / "faulty", facts))
    assert any(note.startswith("rope: ") for note in plan.notes)
    assert "--speculative-config" in plan.command


NO_SEEDS = "on CPUs seeds are ignored unless --no-enable-chunked-prefill: docs/limits.md"


def test_another_method_of_speculation_is_passed_on(target: Path) -> None:
    flags = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    plan = make_plan(ServeSettings(target=str(target), vllm_flags=flags))
    assert plan.command[-2:] == list(flags)
    assert plan.notes == [NO_SEEDS, "speculation with ngram: passed on to vLLM, not examined"]


def test_no_drafter_is_plain_vllm(target: Path) -> None:
    flags = ("--max-model-len", "128")
    plan = make_plan(ServeSettings(target=str(target), vllm_flags=flags))
    assert plan.command[-2:] == ["--max-model-len", "128"]
    assert plan.notes == [NO_SEEDS, "no drafter: plain vLLM"]
    assert plan.command[-4:-2] == ["--scheduler-cls", SCHEDULER]
    own = make_plan(
        ServeSettings(target=str(target), vllm_flags=("--scheduler-cls", "a.b", *flags))
    )
    assert own.command.count("--scheduler-cls") == 1
    assert own.notes == ["no drafter: plain vLLM"]
