"""Internals of vLLM come from one module, and its helpers see all engines and their failures."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine import vllm_adapter
from leadout.engine.vllm_adapter import call_workers, watch_for_failure


def test_objects_come_from_vllm_on_demand() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert vllm_adapter.Scheduler is Scheduler
    with pytest.raises(AttributeError, match="no attribute 'Scheduler2'"):
        vllm_adapter.__getattr__("Scheduler2")  # type: ignore[attr-defined]


class TwoEngines:
    """Stands for the client of a server with two ranks, of which each has one worker."""

    def __init__(self) -> None:
        self.engine_core = self

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[str]:
        return [f"first {method}{args}"]

    async def call_utility_all_async(self, utility: str, *arguments: Any) -> list[list[str]]:
        method, timeout, args, keywords = arguments
        assert (utility, timeout, keywords) == ("collective_rpc", None, None)
        return [[f"first {method}{args}"], [f"second {method}{args}"]]


def test_the_workers_of_all_engines_answer() -> None:
    alone = asyncio.run(call_workers(TwoEngines(), 1, "begin", (3,)))
    assert alone == ["first begin(3,)"]
    both = asyncio.run(call_workers(TwoEngines(), 2, "begin", (3,)))
    assert both == ["first begin(3,)", "second begin(3,)"]


class FakeClient:
    """Stands for vLLM's client of an engine, which can fail or be stopped."""

    def __init__(self) -> None:
        self.errored, self._end = False, asyncio.Event()
        self.output_handler = asyncio.create_task(self._end.wait())
        self._finalizer = SimpleNamespace(alive=True)
        self.manager = SimpleNamespace(failed_proc_name=None)
        self.resources = SimpleNamespace(engine_manager=self.manager)
        self.engine_core = self

    def shutdown(self) -> None:
        self._finalizer.alive = False
        self.end_outputs()

    def end_outputs(self) -> None:
        self.errored = True  # for vLLM, after a stop as well
        self._end.set()


def fake_death(client: FakeClient) -> None:
    client.manager.failed_proc_name = "EngineCore"
    client.shutdown()


ENDS = {
    "told to stop": (FakeClient.shutdown, False),
    "error in a step": (FakeClient.end_outputs, True),
    "killed": (fake_death, True),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_engine_that_was_stopped_has_not_failed(end: str) -> None:
    end_engine, is_failure = ENDS[end]

    async def after_its_end() -> bool:
        client = FakeClient()
        has_failed = watch_for_failure(client)
        assert not has_failed()
        end_engine(client)
        await client.output_handler
        await asyncio.sleep(0)  # callbacks of the task
        client.shutdown()  # which the server calls in any case
        assert client.errored
        return has_failed()

    assert asyncio.run(after_its_end()) == is_failure


PUBLIC = {
    *("vllm", "vllm.config", "vllm.envs", "vllm.logger", "vllm.platforms", "vllm.sampling_params"),
    *("vllm.engine.arg_utils", "vllm.usage.usage_lib", "vllm.inputs.engine", "vllm.triton_utils"),
}


def test_only_the_adapter_imports_internals_of_vllm() -> None:
    folder = Path(vllm_adapter.__file__).parent
    found = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found.add((path.name, node.module))
            if isinstance(node, ast.Import):
                found |= {(path.name, each.name) for each in node.names if "vllm" in each.name}
    internal = {(file, module) for file, module in found if module not in PUBLIC}
    assert internal == set()
