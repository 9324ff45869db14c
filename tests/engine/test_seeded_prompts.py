"""On CPUs, requests with a seed whose prompt would be computed in parts do not end the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leadout.engine.settings import SCHEDULER
from support.models import tiny_llama

BUDGET = 64  # tokens of a step


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


def test_generators_on_cpus_still_cannot_be_set_back() -> None:
    """When this fails, vLLM does not end any more: `CpuSeedWorkaround` can go for that version."""
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator(device="cpu").get_offset()


def prompt(number: int, tokens: int) -> list[int]:
    return [number + 1, *range(10, 9 + tokens)]


def answers(llm: Any, prompts: list[list[int]], seeds: list[int | None]) -> list[list[int]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=12, ignore_eos=True, detokenize=False)
        for seed in seeds
    ]
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


SIZES = {"max_model_len": 256, "max_num_seqs": 8, "skip_tokenizer_init": True}


def test_seeds_do_not_end_an_engine_that_splits_prompts(run_engine: Any, target: Path) -> None:
    with run_engine(target, scheduler_cls=SCHEDULER, max_num_batched_tokens=BUDGET, **SIZES) as llm:
        prompts = [prompt(9, 200), *(prompt(number, 50) for number in range(4)), prompt(8, 150)]
        found = answers(llm, prompts, [5, 1, 2, 3, 4, None])
        assert [len(each) for each in found] == [12] * 6


def test_seeds_are_kept_where_no_prompt_is_split(run_engine: Any, target: Path) -> None:
    settings = {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}
    with run_engine(target, scheduler_cls=SCHEDULER, **SIZES, **settings) as llm:
        prompts, seeds = [prompt(number, 50) for number in range(8)], list(range(8))
        alone = [answers(llm, [each], [seed])[0] for each, seed in zip(prompts, seeds, strict=True)]
        assert answers(llm, prompts, [*seeds]) == alone
