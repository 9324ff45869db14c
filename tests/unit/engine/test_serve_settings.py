"""Settings of `leadout serve`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from leadout.cli.app import app
from leadout.engine.serve_settings import ServeSettings
from leadout.settings import SettingsError


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
