"""Seeds are kept only where vLLM cannot split a prompt, and no prompt is too long for a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from leadout.engine import draft_plan
from leadout.engine.scheduler import CpuSeedWorkaround
from leadout.settings import SettingsError

LENGTH, REQUESTS, DRAFTS = 256, 8, 15


class FakeScheduler:
    def __init__(self, **settings: Any) -> None:
        pass


class SeedScheduler(CpuSeedWorkaround, FakeScheduler):
    pass


def config(drafts: int, **scheduling: Any) -> Any:
    defaults = {
        "max_num_seqs": REQUESTS,
        "max_num_scheduled_tokens": None,
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True,
    }
    speculation = SimpleNamespace(max_num_new_slots_for_drafting=drafts)
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**defaults | scheduling),
        model_config=SimpleNamespace(max_model_len=LENGTH),
        speculative_config=speculation if drafts else None,
    )


ALL = LENGTH * REQUESTS
WITH_DRAFTS = (LENGTH + DRAFTS) * REQUESTS


@pytest.mark.parametrize(
    ("drafts", "budget", "more", "keeps"),
    [
        (0, ALL, {}, True),
        (0, ALL - 1, {}, False),
        (0, ALL, {"max_num_scheduled_tokens": ALL - 1}, False),
        (0, ALL, {"long_prefill_token_threshold": 16}, False),
        (0, LENGTH, {"enable_chunked_prefill": False}, True),
        (0, LENGTH, {"enable_chunked_prefill": False, "long_prefill_token_threshold": 16}, False),
        (DRAFTS, ALL, {}, False),
        (DRAFTS, WITH_DRAFTS, {}, True),
    ],
)
def test_seeds_are_kept_where_no_prompt_can_be_split(
    drafts: int, budget: int, more: dict[str, Any], keeps: bool
) -> None:
    scheduler = SeedScheduler(vllm_config=config(drafts, max_num_batched_tokens=budget, **more))
    assert scheduler._keeps_seeds == keeps


def test_the_longest_prompt_and_its_drafts_fit_into_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(max_num_batched_tokens=None)
    monkeypatch.setattr(draft_plan, "parse", lambda *_: given)

    def added(budget: int, is_chunked: bool = False) -> list[str]:
        made = config(DRAFTS, max_num_batched_tokens=budget, enable_chunked_prefill=is_chunked)
        return draft_plan._room_for_drafts("target", [], made, [])

    needed = LENGTH + DRAFTS
    assert added(LENGTH) == ["--max-num-batched-tokens", str(needed)]
    assert added(needed) == added(LENGTH, is_chunked=True) == []
    given.max_num_batched_tokens = needed - 1
    with pytest.raises(SettingsError, match=f"is {needed - 1}, .* expected at least {needed}"):
        added(needed - 1)
