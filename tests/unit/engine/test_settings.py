"""Settings of `leadout serve`, and of Leadout's parts in vLLM's `additional_config`."""

from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.engine import settings as engine_settings
from leadout.engine.settings import (
    LIVE,
    REDACTORS,
    CaptureSettings,
    EngineSettingsError,
    LiveSettings,
    ServeSettings,
    load_redactor,
    read_section,
    with_section,
)
from leadout.settings import SettingsError


def read(additional: object) -> LiveSettings:
    return read_section(SimpleNamespace(additional_config=additional), LIVE, LiveSettings)


def test_a_section_is_read_as_it_was_written_and_others_stay() -> None:
    settings = LiveSettings(tuned=Path("a/file.json"), prompt_lookup_min_match=6)
    additional = with_section({"other": 1, "leadout": {"more": 2}}, LIVE, settings)
    assert additional["other"] == 1
    assert additional["leadout"]["more"] == 2
    assert read(additional) == settings


def test_a_missing_section_is_the_defaults() -> None:
    assert read({}) == LiveSettings()
    assert read(SimpleNamespace()) == LiveSettings()


@pytest.mark.parametrize(
    ("live", "field"),
    [
        ({"prompt_lookup_min_match": -1}, "prompt_lookup_min_match is -1"),
        ({"tuend": "x"}, "tuend is 'x'"),
    ],
)
def test_a_wrong_setting_is_named(live: dict[str, object], field: str) -> None:
    with pytest.raises(EngineSettingsError, match=rf"additional_config: leadout\.live\.{field}"):
        read({"leadout": {"live": live}})


@pytest.mark.parametrize("bad", [{"rate": 0.0}, {"rate": 1.5}, {"max_bytes": 10}, {"rat": 1}])
def test_capture_settings_out_of_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        CaptureSettings.model_validate(bad)


def test_only_an_installed_redactor_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineSettingsError, match=r"is 'os:system', expected one of \[\]"):
        load_redactor("os:system")
    point = EntryPoint("hide", "support.prompts:PROMPTS", REDACTORS)
    monkeypatch.setattr(engine_settings, "entry_points", lambda group: [point])
    with pytest.raises(EngineSettingsError, match=r"expected one of \['hide'\]"):
        load_redactor("support.prompts:PROMPTS")


def test_capture_is_off_without_a_folder() -> None:
    assert ServeSettings(target="t").capture_settings is None
    made = ServeSettings(target="t", capture=Path("/captured"), capture_rate=0.5).capture_settings
    assert made is not None
    assert (made.folder, made.rate) == (Path("/captured"), 0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "TARGET is required"),
        ({"target": "t", "capture_rate": 1.5}, "--capture-rate: got 1.5"),
        ({"target": "t", "if_unfit": "ignore"}, "--if-unfit: got ignore"),
    ],
)
def test_wrong_settings_name_the_flag(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ServeSettings.resolve(flags)


def test_help_fits_into_80_columns_and_hides_what_is_no_flag() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "--if-unfit" in shown.stdout
    assert "--vllm-flags" not in shown.stdout
