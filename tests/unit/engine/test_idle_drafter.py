"""A drafter for a table of K on the V2 runner, with a fake runner: the real one needs Triton."""

from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine import idle_drafter
from leadout.engine.idle_drafter import skip_idle_drafts
from leadout.engine.vllm_internals import IDLE_DRAFTER


class FakeSpeculator:
    """Stands for vLLM's DFlashSpeculator: the parts of `propose` in the order of vLLM 0.32."""

    def __init__(self, has_graph: bool) -> None:
        self.has_graph = has_graph
        self.calls: list[str] = []
        table = [(1, 8, 3), (9, 16, 0)]
        speculation = SimpleNamespace(num_speculative_tokens_per_batch_size=table)
        self.vllm_config = SimpleNamespace(speculative_config=speculation)
        self.captured_for: object = "nothing yet"

    def init_cudagraph_manager(self, cudagraph_mode: str) -> None:
        speculation = self.vllm_config.speculative_config
        self.captured_for = speculation.num_speculative_tokens_per_batch_size

    def _precompute_context_kv(self, start: int, end: int) -> None:
        self.calls.append(f"context {start}:{end}")

    def _generate_draft(self, num_reqs: int) -> None:
        self.calls.append("layers")

    def propose(
        self,
        tokens: int,
        dp_sync_state: object = None,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> str:
        if self.has_graph and not is_profile:
            self.calls.append("graph of context and layers")
        else:
            self._precompute_context_kv(0, tokens)
            self._generate_draft(1)
        return "drafts"


def fake_runner(has_graph: bool) -> SimpleNamespace:
    return SimpleNamespace(speculator=FakeSpeculator(has_graph))


@pytest.mark.parametrize("has_graph", [False, True])
def test_without_drafts_only_the_context_is_stored(has_graph: bool) -> None:
    runner = fake_runner(has_graph)
    assert skip_idle_drafts(runner)
    assert runner.speculator.propose(5, num_speculative_tokens=0) == "drafts"
    assert runner.speculator.calls == ["context 0:5"]


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_speculative_tokens": 3},
        {},
        {"num_speculative_tokens": 0, "dummy_run": True},
        {"num_speculative_tokens": 0, "dp_sync_state": object()},
    ],
)
def test_all_other_steps_are_vllms(has_graph: bool, settings: dict[str, Any]) -> None:
    runner, vllms = fake_runner(has_graph), FakeSpeculator(has_graph)
    skip_idle_drafts(runner)
    runner.speculator.propose(5, num_speculative_tokens=0)
    runner.speculator.calls.clear()
    runner.speculator.propose(5, **settings)
    vllms.propose(5, **settings)
    assert runner.speculator.calls == vllms.calls


def test_graphs_of_the_drafter_are_those_of_whole_blocks() -> None:
    runner = fake_runner(has_graph=True)
    config = runner.speculator.vllm_config
    skip_idle_drafts(runner)
    runner.speculator.init_cudagraph_manager("FULL")
    assert runner.speculator.captured_for is None
    # The target's graphs, and the scheduler, need the table.
    assert runner.speculator.vllm_config is config
    assert config.speculative_config.num_speculative_tokens_per_batch_size


def test_other_speculators_and_versions_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not skip_idle_drafts(SimpleNamespace(speculator=None))
    assert not skip_idle_drafts(SimpleNamespace())  # a V1 runner
    assert not skip_idle_drafts(SimpleNamespace(speculator=SimpleNamespace()))
    changed = fake_runner(has_graph=False)
    monkeypatch.setattr(idle_drafter, "is_usable", lambda part: part != IDLE_DRAFTER)
    assert not skip_idle_drafts(changed)
    assert type(changed.speculator) is FakeSpeculator


def test_vllms_speculator_has_what_is_relied_on() -> None:
    import inspect

    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    source = inspect.getsource(DFlashSpeculator.propose)
    assert "need_eager=is_profile" in source
    assert "_precompute_context_kv(0, num_target_tokens, dummy_run)" in source
    assert "_generate_draft(" in source
    captures = inspect.getsource(DFlashSpeculator.init_cudagraph_manager)
    assert "DFlashCudaGraphManager(\n            self.vllm_config," in captures
