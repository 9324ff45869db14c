"""The classes that are put together into one scheduler do not use each other's names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from vllm.v1.core.sched.scheduler import Scheduler

from leadout.engine.capture import CaptureMixin
from leadout.engine.request_metrics import RequestMetricsMixin
from leadout.engine.scheduler import (
    CpuSamplingWorkaround,
    CpuSeedWorkaround,
    LabelLogprobsWorkaround,
    LiveScheduler,
)
from leadout.engine.served_requests import RolloutMixin
from leadout.engine.served_texts import LearnMixin
from leadout.engine.step_records import StepRecordingMixin

PARTS = (
    *(CaptureMixin, LearnMixin, RolloutMixin, StepRecordingMixin, RequestMetricsMixin),
    *(LiveScheduler, CpuSeedWorkaround, CpuSamplingWorkaround, LabelLogprobsWorkaround),
)
ASSIGNED = re.compile(r"\bself\.(\w+)(?::[^=\n]+)? = ")


def names_of(kind: type) -> set[str]:
    """Methods and attributes of a class and of its objects, without those of Python's own."""
    assigned = set(ASSIGNED.findall(inspect.getsource(kind)))
    return {name for name in {*vars(kind), *assigned} if not name.startswith("__")}


def shared_names(parts: Iterable[type]) -> dict[str, set[str]]:
    """Names that several of the classes define, though vLLM's scheduler has no such method."""
    of_vllm = set(dir(Scheduler))
    owners: dict[str, set[type]] = {}
    ours = {kind for part in parts for kind in part.__mro__} - {*Scheduler.__mro__, object}
    for kind in ours:
        for name in names_of(kind) - of_vllm:
            owners.setdefault(name, set()).add(kind)
    found = {}
    for name, kinds in owners.items():  # a subclass may mean to override its base
        unrelated = {each for each in kinds if not kinds & {*each.__mro__[1:]}}
        if len(unrelated) > 1:
            found[name] = {each.__name__ for each in unrelated}
    return found


def test_no_part_overrides_another_one_by_chance() -> None:
    assert shared_names(PARTS) == {}


class Counting:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def schedule(self) -> None: ...

    def _count_request(self) -> None: ...


def test_a_name_that_is_used_twice_is_found() -> None:
    assert shared_names([Counting]) == {}
    assert shared_names([Counting, RolloutMixin]) == {
        "_count_request": {"Counting", "RolloutMixin"}
    }
