"""A vLLM with other internals serves, without the parts of Leadout that rely on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from leadout.engine.settings import SCHEDULER
from leadout.engine.vllm_internals import INTERNALS, is_usable
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.models import tiny_llama


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with one more parameter, as a later vLLM might have it."""

    def changed(*arguments: Any, one_more: Any = None, **settings: Any) -> Any:
        return function(*arguments, **settings)

    return changed


@pytest.fixture
def changed_internals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One function of each part has another signature."""
    done = set()
    for uses in INTERNALS.values():
        first = next(each for each in uses if each.parameters is not None)
        if first in done:
            continue
        done.add(first)
        module, _, name = first.owner.partition(":")
        owner = getattr(import_module(module), name) if name else import_module(module)
        monkeypatch.setattr(owner, first.name, widened(getattr(owner, first.name)))
    is_usable.cache_clear()
    from vllm.model_executor.models import registry

    from leadout.engine import draft_model

    monkeypatch.setattr(draft_model, "ServedDrafter", draft_model.served_class())
    # vLLM keeps the classes of engines that this process started before.
    registry._try_load_model_cls.cache_clear()
    yield
    registry._try_load_model_cls.cache_clear()
    is_usable.cache_clear()


def test_the_engine_serves_without_the_parts(changed_internals: None, tmp_path: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    tiny_llama().save_pretrained(tmp_path / "target")
    drafter = write_random_drafter(tmp_path / "drafter", replace(TINY_DRAFTER, target_num_layers=4))
    llm = LLM(
        model=str(tmp_path / "target"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        scheduler_cls=SCHEDULER,
        additional_config={
            "leadout": {
                "live": {},
                "capture": {"folder": str(tmp_path / "captured")},
                "registry": {"folder": str(tmp_path / "registry")},
            }
        },
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": 4,
        },
    )
    core = llm.llm_engine.engine_core.engine_core
    assert type(core.scheduler) is Scheduler
    (name,) = llm.collective_rpc(lambda worker: type(worker.get_draft_model()).__name__)
    assert name == "DFlashQwen3ForCausalLM"
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 9, 2]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    llm.llm_engine.engine_core.shutdown()
    assert not (tmp_path / "captured").exists()
    assert not any(map(is_usable, INTERNALS))
