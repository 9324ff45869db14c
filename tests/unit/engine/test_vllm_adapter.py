"""Which vLLM versions are supported."""

import pytest

from leadout.engine.vllm_adapter import is_supported


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.7", True),
        ("0.32.0+cpu", True),
        ("0.31.9", False),
        ("0.33.0", False),
        ("1.32.0", False),
    ],
)
def test_only_the_supported_minor_version_passes(version: str, supported: bool) -> None:
    assert is_supported(version) is supported
