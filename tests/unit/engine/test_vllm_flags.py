"""Flags of vLLM's server: misspelt flags are refused, Leadout's features get their flags."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.data.settings import DataSettings
from leadout.engine import vllm_flags
from leadout.engine.settings import SCHEDULER, CaptureSettings, LiveSettings, RegistrySettings
from leadout.engine.vllm_flags import (
    LOCAL_ARGMAX,
    PLUGINS,
    Features,
    draft_selection,
    engine_arguments,
    feature_environment,
    feature_flags,
    is_speculation,
    newly_loaded_endpoints,
    parse,
    speculation_of,
    without_revision,
    without_speculation,
)
from leadout.settings import SettingsError
from support.drafters import MINI, MINI_REDUCED


@pytest.mark.parametrize(
    ("flags", "suggestion"),
    [
        (("--drafft", "x"), "--draft"),
        (("--draft_", "x"), "--draft"),
        (("--if-unfitt=bare",), "--if-unfit"),
        (("--capturerate", "0.5"), "--capture-rate"),
        (("--tune", "x"), "--tuned"),
        (("--max-model-len", "128", "--lives"), "--live"),
        (("--max-model-leng", "128"), "--max-model-len"),
        # vLLM would accept these as abbreviations of its own flags.
        (("--speculative-conf", "{}"), "--speculative-config"),
        (("--max-model", "128"), "--max-model-len"),
    ],
)
def test_a_misspelt_flag_is_refused_with_the_nearest_one(
    flags: tuple[str, ...], suggestion: str
) -> None:
    with pytest.raises(SettingsError, match=rf"Did you mean {suggestion}\?") as refused:
        parse("target", flags)
    assert refused.value.exit_code == 2
    assert "written in full" in str(refused.value)


def test_a_flag_like_no_other_is_refused_too() -> None:
    with pytest.raises(SettingsError, match="--zzz is not a flag") as refused:
        parse("target", ["--zzz"])
    assert "Did you mean" not in str(refused.value)


def test_a_second_argument_and_a_bad_value_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"Unexpected argument drafter.*--draft"):
        parse("target", ["drafter"])
    with pytest.raises(SettingsError, match="vLLM refuses its flags: argument --max-num-seqs"):
        parse("target", ["--max-num-seqs", "many"])


@pytest.mark.parametrize("flags", [("--model", "other"), ("--model=other",)])
def test_a_second_model_is_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"--model other .* would replace the target target"):
        parse("target", flags)
    assert parse("target", ["--model", "target"]).model == "target"


def test_the_target_takes_precedence_over_vllms_config_file_as_with_vllm_serve(
    tmp_path: Path,
) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("model: other\nmax-num-seqs: 3\n")
    parsed = parse("target", ["--config", str(path)])
    assert (parsed.model, parsed.max_num_seqs) == ("target", 3)


def test_a_revision_can_be_taken_out() -> None:
    flags = ["--a", "1", "--revision", "v2", "--tokenizer-revision", "v3", "--revision=v4"]
    assert without_revision(flags) == ["--a", "1", "--tokenizer-revision", "v3"]


def test_followers_of_a_registry_run_in_one_api_server() -> None:
    features = Features(registry=RegistrySettings(folder=Path("r")))
    added = ["--api-server-count", "1"]
    assert feature_flags(features, parse("t", ["-dp", "2"]))[2:4] == added
    assert "--api-server-count" not in feature_flags(features, parse("t", []))
    chosen = parse("t", ["-dp", "2", "--api-server-count", "1"])
    assert "--api-server-count" not in feature_flags(features, chosen)


def test_vllms_own_spellings_are_accepted() -> None:
    parsed = parse(
        "target",
        [
            *("--max_model_len", "1k", "-tp", "2", "--seed=-1", "-O3"),
            *("--speculative-config.method", "ngram", "-cc.mode", "0"),
        ],
    )
    assert parsed.max_model_len == 1000
    assert parsed.tensor_parallel_size == 2
    assert parsed.speculative_config["method"] == "ngram"


def test_flags_of_speculation_are_recognised_in_every_spelling() -> None:
    flags = [
        *("--a", "1", "--speculative-config", "{}", "--speculative_config={}", "-sc", "{}"),
        *("--speculative-config.method", "ngram", "-sc.model", "m", "--spec-method", "dflash"),
        *("--spec_model=d", "--spec-tokens", "3", "--b"),
    ]
    assert without_speculation(flags) == ["--a", "1", "--b"]
    assert not is_speculation("--speculative-other")


def test_single_flags_of_speculation_are_fields_of_its_config() -> None:
    assert speculation_of(parse("target", [])) == {}
    flags = ["-sc", '{"method": "dflash", "draft-sample-method": "v2"}', "--spec-model", "d"]
    assert speculation_of(parse("target", [*flags, "--spec-tokens", "3"])) == {
        "method": "dflash",
        "draft_sample_method": "v2",
        "model": "d",
        "num_speculative_tokens": 3,
    }
    with pytest.raises(SettingsError, match=r"--spec-method ngram cannot be .* method dflash"):
        speculation_of(parse("target", [*flags, "--spec-method", "ngram"]))


def test_features_become_a_scheduler_and_sections_of_the_additional_config() -> None:
    parsed = parse("target", ["--additional-config", '{"other": 1}'])
    assert feature_flags(Features(), parsed) == []
    features = Features(
        live=LiveSettings(), capture=CaptureSettings(folder=Path("/captured"), rate=0.5)
    )
    *scheduler, flag, additional = feature_flags(features, parsed)
    assert scheduler == ["--scheduler-cls", SCHEDULER]
    assert flag == "--additional-config"
    assert json.loads(additional) == {
        "other": 1,
        "leadout": {"live": {}, "capture": {"folder": "/captured", "rate": 0.5}},
    }


def test_plugins_of_other_packages_stay_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {
        "vllm.general_plugins": ["leadout", "theirs"],
        "vllm.platform_plugins": ["a-platform"],
        "vllm.endpoint_plugins": ["leadout", "theirs", "closed"],
    }

    def found(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, "x:y", group) for name in installed.get(group, [])]

    monkeypatch.setattr(vllm_flags, "entry_points", found)
    monkeypatch.delenv(PLUGINS, raising=False)
    features = Features(registry=RegistrySettings(folder=Path("r")))
    made = feature_environment(features, {})
    assert made == {PLUGINS: "a-platform,leadout,theirs"}
    assert newly_loaded_endpoints(made) == ["theirs"]
    assert feature_environment(features, {PLUGINS: "theirs"}) == {PLUGINS: "theirs,leadout"}
    assert feature_environment(features, {PLUGINS: ""}) == {PLUGINS: "leadout"}
    assert feature_environment(Features(), {}) == {}


def test_only_the_arguments_that_flags_name_reach_the_engine() -> None:
    assert engine_arguments("target", []) == {}
    found = engine_arguments(
        "target",
        ["-tp", "2", "--no-enforce-eager", "--hf-overrides.rope_theta", "5", "--quantization=fp8"],
    )
    assert found == {
        "tensor_parallel_size": 2,
        "enforce_eager": False,  # vLLM's default, but requested
        "hf_overrides": {"rope_theta": 5},
        "quantization": "fp8",
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", "8001"), "--port is a flag of vLLM's server"),
        (("--max-model-len=99",), "--max-model-len among vLLM's flags.* use --max-length"),
        (("--revision", "main"), "not accept --revision .* and name its folder"),
        (("--download-dir=d",), "not accept --download-dir .* set HF_HUB_CACHE instead"),
        (("--model", "other"), "would replace the target"),
        (("--tensor-paralel-size", "2"), "Did you mean --tensor-parallel-size"),
        (("surplus",), "Unexpected argument surplus: `leadout data` takes TARGET only"),
    ],
)
def test_flags_that_an_engine_cannot_take_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        engine_arguments("target", flags, DataSettings, {"max_model_len": "use --max-length"})


@pytest.mark.parametrize(
    ("is_reduced", "ranks", "speculation", "is_without_logits"),
    [
        (True, 1, {}, True),
        (False, 2, {}, True),
        (False, 1, {}, False),  # the same work
        (True, 1, {"draft_sample_method": "greedy"}, True),
        (True, 2, {"draft_sample_method": "probabilistic"}, False),
        (True, 2, {"enable_adaptive_verification": True}, False),
    ],
)
def test_drafts_are_chosen_without_logits_where_that_saves_work(
    is_reduced: bool, ranks: int, speculation: dict[str, Any], is_without_logits: bool
) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks))
    drafter = MINI_REDUCED if is_reduced else replace(MINI, own_head=True)
    chosen = draft_selection(speculation, config, drafter)
    assert chosen == ({LOCAL_ARGMAX: True} if is_without_logits else {})
    for asked in (True, False):  # the user decides
        assert draft_selection({**speculation, LOCAL_ARGMAX: asked}, config, drafter) == {}
