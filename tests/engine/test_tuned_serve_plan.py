"""`leadout serve --tuned`: the settings that a tuned file becomes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from leadout.control.tuned_file import Model, Tuned, TunedFileError, write_tuned
from leadout.engine.serve_plan import Plan, make_plan
from leadout.engine.server_turns import CPU_FLAGS
from leadout.engine.settings import ServeSettings
from leadout.engine.step_records import server_config
from leadout.engine.tuned_plan import (
    NOTHING_TO_DRAFT,
    served_table,
    table_up_to,
    tuned_speculation,
)
from leadout.engine.vllm_flags import vllm_config_of
from leadout.models import ModelNotFoundError, fingerprint
from leadout.registry import Registry
from leadout.settings import SettingsError
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.tuned_files import a_tuning
from support.version_registry import publish

GOOD, USELESS = [0.9, 0.85, 0.8, 0.8], [0.02, 0.0, 0.0, 0.0]
FLAGS = ("--max-model-len", "128", "--max-num-seqs", "32", "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY_DRAFTER, target_num_layers=4)
    return write_random_drafter(tmp_path_factory.mktemp("drafters") / "tiny", config)


def tuning_of(target: Path, drafter: Path, probabilities: list[float]) -> Tuned:
    return a_tuning(
        probabilities,
        target=Model(name=str(target), fingerprint=fingerprint(target)),
        drafter=Model(name=str(drafter), fingerprint=fingerprint(drafter)),
    )


def plan_of(
    tuned: Tuned,
    folder: Path,
    target: Path,
    drafter: Path | None,
    flags: tuple[str, ...] = FLAGS,
) -> Plan:
    path = folder / "tuned.json"
    write_tuned(tuned, path)
    draft = None if drafter is None else str(drafter)
    return make_plan(ServeSettings(target=str(target), draft=draft, vllm_flags=flags, tuned=path))


def speculation_in(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan.command[plan.command.index("--speculative-config") + 1])
    return found


def test_the_table_is_passed_to_vllm_up_to_max_num_seqs(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    tuned = tuning_of(target, drafter, GOOD)
    plan = plan_of(tuned, tmp_path, target, drafter)
    asked = speculation_in(plan)
    table = asked["num_speculative_tokens_per_batch_size"]
    assert table[:-1] == [list(row) for row in tuned.table[:-1]]
    assert table[-1] == [tuned.table[-1][0], 32, tuned.table[-1][2]]
    assert asked["num_speculative_tokens"] == tuned.max_drafts
    assert not [note for note in plan.notes if "tune again" in note]


def test_the_drafter_defaults_to_the_one_that_was_measured(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    plan = plan_of(tuning_of(target, drafter, GOOD), tmp_path, target, None)
    assert speculation_in(plan)["model"] == str(drafter)


def test_a_drafter_without_gain_is_not_served(target: Path, drafter: Path, tmp_path: Path) -> None:
    plan = plan_of(tuning_of(target, drafter, USELESS), tmp_path, target, drafter)
    assert "--speculative-config" not in plan.command
    assert NOTHING_TO_DRAFT in plan.notes
    elsewhere = a_tuning(USELESS)  # whose drafter is not even here
    plan = plan_of(elsewhere, tmp_path, target, None)
    assert "--speculative-config" not in plan.command
    assert NOTHING_TO_DRAFT in plan.notes


def test_a_drafter_below_break_even_is_warned_about(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    def warnings(probabilities: list[float], *, live: bool = False) -> list[str]:
        path = tmp_path / "tuned.json"
        write_tuned(tuning_of(target, drafter, probabilities), path)
        settings = ServeSettings(
            target=str(target), draft=str(drafter), vllm_flags=FLAGS, tuned=path, live=live
        )
        return [note for note in make_plan(settings).notes if "below break-even" in note]

    for live in (False, True):
        (warning,) = warnings(USELESS, live=live)
        assert "at every measured load: at 1 it yields 1.02" in warning
        assert "with K = 1, break-even is 1.15" in warning
    (warning,) = warnings([0.5, 0.2, 0.0, 0.0])
    assert "concurrent requests and more" in warning
    assert warnings([0.999] * 4) == []


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_file_of_another_pair_is_refused(
    target: Path, drafter: Path, tmp_path: Path, role: str
) -> None:
    other = Model(name="another", fingerprint="0" * 64)
    tuned = tuning_of(target, drafter, GOOD).model_copy(update={role: other})
    with pytest.raises(SettingsError, match=f"for the {role} another .*leadout tune"):
        plan_of(tuned, tmp_path, target, drafter)


def test_a_later_version_of_a_registry_is_served_with_the_file_of_an_earlier_one(
    target: Path, tmp_path: Path
) -> None:
    registry = Registry(tmp_path / "registry")
    for seed in (0, 1):
        publish(registry, target, tmp_path, seed=seed)
    first = tuning_of(target, registry.path(1), GOOD)
    path = tmp_path / "tuned.json"

    def planned(tuned: Tuned, version: int) -> Plan:
        registry.point_to(version, "the test")
        write_tuned(tuned, path)
        settings = ServeSettings(
            target=str(target), registry=registry.folder, vllm_flags=FLAGS, tuned=path
        )
        return make_plan(settings)

    def on_version(plan: Plan) -> list[str]:
        return [note for note in plan.notes if "with this version of the registry" in note]

    assert on_version(planned(first, 1)) == []
    plan = planned(first, 2)  # promoted since; a restart must not be refused
    (note,) = on_version(plan)
    assert "acceptance may differ" in note
    assert speculation_in(plan)["num_speculative_tokens"] == first.max_drafts

    other = Model(name="another", fingerprint="0" * 64)
    with pytest.raises(SettingsError, match=r"for the target another .*leadout tune"):
        planned(first.model_copy(update={"target": other}), 2)
    with pytest.raises(SettingsError, match=r"for the drafter .*leadout tune"):
        planned(first.model_copy(update={"block_size": first.block_size + 3}), 2)


def test_a_second_draft_length_is_refused(target: Path, drafter: Path, tmp_path: Path) -> None:
    tuned = tuning_of(target, drafter, GOOD)
    flags = (*FLAGS, "--speculative-config", '{"method": "dflash", "num_speculative_tokens": 2}')
    with pytest.raises(SettingsError, match="combined with num_speculative_tokens 2"):
        plan_of(tuned, tmp_path, target, drafter, flags)
    flags = (*FLAGS, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    with pytest.raises(SettingsError, match=r"--tuned works with the method dflash only.* ngram"):
        plan_of(tuned, tmp_path, target, None, flags)


def test_a_drafter_that_is_not_here_must_be_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="Name the drafter with --draft"):
        plan_of(a_tuning(GOOD), tmp_path, target, None)


def test_a_broken_file_is_refused(target: Path, drafter: Path, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("{}")
    with pytest.raises(TunedFileError, match="tune again"):
        make_plan(
            ServeSettings(target=str(target), draft=str(drafter), vllm_flags=FLAGS, tuned=path)
        )


def test_differences_from_the_measured_machine_are_noted(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    tuned = tuning_of(target, drafter, GOOD)
    versions = {**tuned.provenance.versions, "torch": "1.0"}
    changed = {"versions": versions, "machine": "a bigger one"}
    tuned = tuned.model_copy(
        update={"provenance": tuned.provenance.model_copy(update=changed), "dtype": "float32"}
    )
    notes = "\n".join(plan_of(tuned, tmp_path, target, drafter).notes)
    assert "measured with torch 1.0, now" in notes
    assert "measured with machine a bigger one" in notes
    assert "measured with dtype float32, now bfloat16" in notes


def test_flags_that_change_the_cost_of_a_step_are_noted(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    served = server_config(vllm_config_of(str(target), FLAGS))
    tuned = tuning_of(target, drafter, GOOD).model_copy(update={"server": served})
    notes = "\n".join(plan_of(tuned, tmp_path, target, drafter).notes)
    assert "tensor_parallel_size" not in notes
    other = served.model_copy(
        update={"tensor_parallel_size": 2, "quantization": "fp8", "device": "NVIDIA A100"}
    )
    tuned = tuned.model_copy(update={"server": other})
    notes = "\n".join(plan_of(tuned, tmp_path, target, drafter).notes)
    assert "measured with tensor_parallel_size 2, now 1; tune again" in notes
    assert "measured with quantization fp8, now absent" in notes
    assert "measured with device NVIDIA A100, now absent" in notes
    # As `leadout tune` starts servers on CPUs: no difference that tuning again would not remove.
    eager = server_config(vllm_config_of(str(target), (*CPU_FLAGS, *FLAGS)))
    assert eager == served


def config_of(*, sequences: int = 16, v2: bool = False, full_graphs: bool = False) -> Any:
    """Of a server that this machine may not be able to run."""
    mode = CUDAGraphMode.FULL_AND_PIECEWISE if full_graphs else CUDAGraphMode.NONE
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=sequences),
        use_v2_model_runner=v2,
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )


def test_the_v2_runner_goes_on_drafting_what_was_measured() -> None:
    tuned = a_tuning(GOOD).model_copy(update={"table": [(1, 4, 2), (5, 16, 0)]})
    rows = [(1, 4, 2), (5, 16, 0)]
    assert tuned_speculation(tuned, config_of()) == {
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": rows,
    }
    assert tuned_speculation(tuned, config_of(v2=True)) == {
        "num_speculative_tokens": tuned.block_size - 1,
        "num_speculative_tokens_per_batch_size": rows,
    }


def test_one_length_needs_no_table() -> None:
    tuned = a_tuning(GOOD).model_copy(update={"table": [(1, 16, 2)]})
    assert tuned_speculation(tuned, config_of()) == {"num_speculative_tokens": 2}


def test_a_smaller_server_takes_only_its_rows() -> None:
    table = [(1, 4, 3), (5, 8, 2), (9, 16, 0)]
    assert table_up_to(table, 6) == [(1, 4, 3), (5, 6, 2)]
    assert table_up_to(table, 2) == [(1, 2, 3)]
    assert table_up_to(table, 100) == [(1, 4, 3), (5, 8, 2), (9, 100, 0)]


def test_with_full_graphs_only_k_of_the_ladder_are_served() -> None:
    tuned = a_tuning([0.8] * 15).model_copy(
        update={"table": [(1, 2, 14), (3, 4, 8), (5, 8, 7), (9, 12, 2), (13, 16, 0)]}
    )
    assert served_table(tuned, config_of(v2=True, full_graphs=True)) == [
        (1, 8, 7),
        (9, 12, 1),
        (13, 16, 0),
    ]
    for config in (config_of(), config_of(v2=True)):
        assert served_table(tuned, config) == tuned.table
    short = a_tuning(GOOD).model_copy(update={"table": [(1, 4, 2), (5, 16, 0)]})
    # Blocks of 5 leave nothing between 0 and 4.
    assert served_table(short, config_of(v2=True, full_graphs=True)) == [(1, 4, 4), (5, 16, 0)]
