"""Which vLLM versions are supported, and what happens when one has other internals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine import vllm_adapter
from leadout.engine.vllm_internals import (
    CAPTURE_OF_TRAFFIC,
    DRAFT_CLASS,
    INTERNALS,
    LIVE_CONTROL,
    METRICS,
    ROLLOUT,
    SAMPLING_WORKAROUND,
    Internal,
    changes,
    is_supported,
    is_usable,
    signature_of,
)


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


# vLLM's internals.

TABLE = [(part, each) for part, uses in INTERNALS.items() for each in uses]


@pytest.fixture
def unchecked() -> Iterator[None]:
    """`is_usable` checks again, in the test and after it."""
    is_usable.cache_clear()
    yield
    is_usable.cache_clear()


def change(internal: Internal, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later vLLM might have it: another signature, or no such attribute."""
    module, _, name = internal.owner.partition(":")
    owner = import_module(module)
    if internal.parameters is None:
        monkeypatch.setattr(owner, name, type(name, (), {}))
    else:
        target = getattr(owner, name) if name else owner
        monkeypatch.setattr(target, internal.name, lambda self, changed: None)


@pytest.mark.parametrize("part", INTERNALS)
def test_the_installed_vllm_is_as_expected(
    part: str, unchecked: None, leadout_log: list[str]
) -> None:
    assert changes(part) == []
    assert is_usable(part)
    assert leadout_log == []


@pytest.mark.parametrize(("part", "internal"), TABLE, ids=str)
def test_a_change_switches_off_what_relies_on_it(
    part: str,
    internal: Internal,
    unchecked: None,
    leadout_log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(internal, monkeypatch)
    assert not is_usable(part)
    assert not is_usable(part)
    (line,) = leadout_log
    assert line.startswith(f"Leadout's {part} is off, because vLLM's internals have changed: ")
    assert str(internal) in line
    # All others stay on that do not use the same function, of a subclass perhaps, or the same
    # class where one of its attributes is gone.
    for other, uses in INTERNALS.items():
        if internal.parameters is not None:
            shares = any(each.name == internal.name for each in uses)
        else:
            shares = any(each.owner == internal.owner for each in uses)
        if not shares:
            assert is_usable(other), other


def test_a_signature_is_compared_with_order_kind_and_defaults() -> None:
    def function(one: int, two: int = 2, *rest: int, three: int, **more: int) -> None: ...

    def keywords(one: int, *, two: int = 2) -> None: ...

    assert signature_of(function) == "one, two=, *rest, three, **more"
    assert signature_of(keywords) == "one, *, two="


# What a part that is off leaves behind: vLLM's own.


@pytest.fixture
def switched_off(monkeypatch: pytest.MonkeyPatch, unchecked: None) -> Callable[[str], None]:
    def switch_off(part: str) -> None:
        for each in INTERNALS[part]:
            if each.parameters is not None:
                return change(each, monkeypatch)
        return change(INTERNALS[part][0], monkeypatch)

    return switch_off


def engine_config(*sections: str, method: str = "dflash") -> Any:
    settings = {"capture": {"folder": "/captured"}, "registry": {"folder": "/registry"}}
    return SimpleNamespace(
        additional_config={"leadout": {name: settings.get(name, {}) for name in sections}},
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        speculative_config=SimpleNamespace(method=method),
        use_v2_model_runner=False,
    )


@pytest.mark.parametrize(
    ("part", "sections", "name"),
    [
        (LIVE_CONTROL, ("live",), "LiveScheduler"),
        (CAPTURE_OF_TRAFFIC, ("capture",), "LeadoutScheduler"),
        (ROLLOUT, ("registry",), "LeadoutScheduler"),
        (SAMPLING_WORKAROUND, (), "CpuSamplingWorkaround"),
    ],
)
def test_without_its_part_the_scheduler_is_vllms(
    part: str, sections: tuple[str, ...], name: str, switched_off: Callable[[str], None]
) -> None:
    from leadout.engine import scheduler

    # Without a DFlash drafter there is no workaround to be seen.
    needs_drafter = part in (LIVE_CONTROL, SAMPLING_WORKAROUND)
    config = engine_config(*sections, method="dflash" if needs_drafter else "ngram")
    assert scheduler._scheduler_class(config).__name__ == name
    switched_off(part)
    is_usable.cache_clear()
    assert scheduler._scheduler_class(config) is vllm_adapter.Scheduler


def test_without_its_part_the_drafter_is_vllms(switched_off: Callable[[str], None]) -> None:
    from leadout.engine import draft_model

    assert draft_model.served_class() is draft_model.LeadoutDFlashForCausalLM
    switched_off(DRAFT_CLASS)
    is_usable.cache_clear()
    assert draft_model.served_class() is vllm_adapter.DFlashQwen3ForCausalLM


def test_without_their_part_there_are_no_metrics(switched_off: Callable[[str], None]) -> None:
    from leadout.engine import metrics

    assert metrics._is_wanted(engine_config())
    switched_off(METRICS)
    is_usable.cache_clear()
    assert not metrics._is_wanted(engine_config())
