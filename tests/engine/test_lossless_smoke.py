"""vLLM's own DFlash with a drafter that is wrong nearly always: the text must not change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.drafters import write_random_drafter
from support.prompts import PROMPTS

K = 7
# Nightly: live control and `leadout serve` are compared with bare vLLM at every change.
pytestmark = pytest.mark.nightly


def greedy_tokens(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def bare_tokens(run_engine: Callable[..., Any], smollm2: Path) -> list[list[int]]:
    with run_engine(smollm2) as llm:
        return greedy_tokens(llm)


def test_greedy_text_is_equal_with_and_without_speculation(
    run_engine: Callable[..., Any],
    smollm2: Path,
    bare_tokens: list[list[int]],
    tmp_path: Path,
) -> None:
    drafter = write_random_drafter(tmp_path / "drafter")
    speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": K}
    with run_engine(smollm2, speculative_config=speculative, disable_log_stats=False) as llm:
        speculated = greedy_tokens(llm)
        drafted = sum(
            metric.value
            for metric in llm.get_metrics()
            if metric.name == "vllm:spec_decode_num_draft_tokens"
        )
    assert [len(tokens) for tokens in speculated] == [48] * 8
    assert speculated == bare_tokens
    # The comparison says something only if drafts were really made and verified.
    assert drafted >= 8 * 40 * K
