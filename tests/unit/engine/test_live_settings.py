"""What live control is told, there and back through vLLM's field."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from leadout.engine.settings import (
    LiveSettings,
    SectionError,
    engine_settings,
    settings_of,
)


def read(additional: object) -> LiveSettings:
    return settings_of(SimpleNamespace(additional_config=additional))


def test_settings_survive_the_way_through_vllm() -> None:
    settings = LiveSettings(tuned=Path("a/file.json"), copy_match=6)
    passed = engine_settings(settings, {"other": 1, "leadout": {"more": 2}})
    assert passed["additional_config"]["other"] == 1
    assert passed["additional_config"]["leadout"]["more"] == 2
    assert read(passed["additional_config"]) == settings


def test_without_a_word_there_are_defaults() -> None:
    assert read({}) == LiveSettings()
    assert read(SimpleNamespace()) == LiveSettings()


@pytest.mark.parametrize(
    ("live", "field"), [({"copy_match": -1}, "copy_match"), ({"tuend": "x"}, "tuend")]
)
def test_unknown_settings_are_named(live: dict[str, object], field: str) -> None:
    with pytest.raises(SectionError, match=rf"additional_config: leadout\.live\.{field}"):
        read({"leadout": {"live": live}})
